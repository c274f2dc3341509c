"""Give a graph that was edited what every captured one has: functional form, and gradients that stop."""

from dataclasses import dataclass

from torch import fx

from whence.errors import Fault, UnsupportedMutation, UsageError
from whence.program.queries.selecting import select
from whence.rewriting.cut_gradients import cut_gradients
from whence.rewriting.functionalize import Functional, functionalize
from whence.rewriting.passes import GraphPass, Pass, as_pass
from whence.rewriting.track import Edit, evaluate


@dataclass(frozen=True)
class Functionalize:
    """Let a pass write in place: what writes to the result of another becomes its functional twin behind it.

    What is written to an input would be a mutation, which the signature has to know: that is refused.
    """

    behind: Pass | GraphPass
    name: str = "functionalize"

    def rewrite(self, edit: Edit) -> None:
        """Raises `UnsupportedMutation` naming what has no functional form, and inputs that are written."""
        as_pass(self.behind).rewrite(edit)
        evaluate(edit.graph)
        functional = functionalize(edit.graph)
        if not functional.replaced:
            return
        inputs = [node for node in edit.graph.find_nodes(op="placeholder") if node in functional.latest]
        UnsupportedMutation.refuse(
            Fault(
                f"the input {node.name} is written",
                why="a program says so by an output of kind mutation",
                remedy="write to a copy: aten.clone.default",
            )
            for node in inputs
        )
        _hand_over(edit, functional)


def _hand_over(edit: Edit, functional: Functional) -> None:
    """Let the results be those of the end, and say of each new node in whose place it stands."""
    output = edit.graph.output_node()
    output.args = fx.map_arg(output.args, lambda node: functional.final(node, output.prev))
    for made, recorded in functional.sources.items():
        edit.replaced(made, recorded)
    left = set(edit.graph.nodes)
    for recorded in reversed(list(functional.replaced)):
        if recorded in left and not recorded.users:
            edit.graph.erase_node(recorded)


@dataclass(frozen=True)
class CutGradients:
    """Let no gradient flow into what a pattern of `select` means: `CutGradients("encoder")` freezes it.

    For forward programs, which autograd differentiates when they run.
    """

    pattern: str
    name: str = "cut gradients"

    def rewrite(self, edit: Edit) -> None:
        """Detach what the chosen operations read; raises `UsageError` for a program with a backward."""
        program = edit.program
        if program.has_backward:
            raise UsageError(
                "a program with a backward has its gradients in the graph",
                remedy="capture the model with these parameters frozen (requires_grad_(False))",
            )
        chosen = {node.name for node in select(program, self.pattern)}
        before = set(edit.graph.nodes)
        cut_gradients(
            Functional(edit.graph),
            lambda node: node.name in chosen,
            open_inputs={*edit.graph.find_nodes(op="placeholder")},
        )
        for node in edit.graph.nodes:
            if node not in before:
                edit.replaced(node, *(user for user in node.users if user in before))
