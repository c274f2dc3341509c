"""What a run is given: the model's own tensors and fake inputs, each with its placeholder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from whence._torch.autograd.nodes import gradient_key
from whence._torch.pytrees import whole_leaves, with_whole_leaves
from whence._torch.subclasses.wrapper_subclasses import is_composed, plain_parts
from whence.errors import Fault, Place, UnsupportedInput, UnsupportedStep
from whence.tracing.attribution.wrapper_subclasses import Composed
from whence.tracing.target.example import Example
from whence.tracing.target.subject import StateTensor, Subject, plain_tensors


@dataclass(frozen=True)
class Prepared:
    """The inputs of a run: state tensors and fake user inputs, each with its placeholder.

    `arguments` are the fake inputs as the model takes them; `wholes` are the tensors among all that are made
    of others.
    """

    state: tuple[tuple[StateTensor, fx.Node], ...]
    originals: tuple[Any, ...]
    leaves: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    wholes: tuple[Composed, ...] = ()

    def differentiable(self) -> list[tuple[Tensor, fx.Node]]:
        """Every plain tensor that requires a gradient, state first, once each."""
        state = [(row.tensor, node) for row, node in self.state]
        user = [
            (leaf, node)
            for leaf, node in zip(self.leaves, self.nodes, strict=True)
            if isinstance(leaf, Tensor)
        ]
        unique = {id(tensor): (tensor, node) for tensor, node in reversed([*state, *user])}
        return [pair for pair in reversed(unique.values()) if gradient_key(pair[0]) is not None]


def refuse_own_parameters(subject: Subject, example: Example) -> None:
    """Raise `UnsupportedInput` for arguments that are parameters of the model, which are differentiated."""
    held = {id(row.tensor): row for row in plain_tensors(subject.state) if row.tensor.requires_grad}
    UnsupportedInput.refuse(
        Fault(
            f"{path} is the model's own {held[id(leaf)].paths[0]}",
            subject.place,
            why="its gradient is the sum of what arrives for both, in an order that two inputs do not have",
            remedy="let the model read it from itself; or pass a copy, and add its gradient yourself",
        )
        for path, leaf in zip(example.paths, example.leaves, strict=True)
        if id(leaf) in held
    )


def refuse_turned(example: Example, prepared: Prepared, place: Place) -> None:
    """Raise `UnsupportedStep` for arguments that a step lets require a gradient, or no more."""
    rows = zip(example.paths, prepared.originals, prepared.leaves, strict=True)
    turned = [
        path
        for path, given, leaf in rows
        if isinstance(given, Tensor) and given.requires_grad is not leaf.requires_grad
    ]
    if turned:
        raise UnsupportedStep(
            f"the step turns requires_grad of {', '.join(turned)}",
            where=place,
            why="it stays turned, and holds a gradient, where the caller has it; a run leaves it alone",
            remedy="turn that of a copy: x = x.detach().clone().requires_grad_(); or turn it back",
        )


def refuse_returned_parameters(
    subject: Subject, prepared: "Prepared", results: Sequence[fx.Node | None]
) -> None:
    """Raise `UnsupportedInput` for parameters that the model returns and uses in several places.

    Eager adds what arrives for the result before all else; the captured backward hands on a sum.
    """
    UnsupportedInput.refuse(
        Fault(
            f"the model returns its own {row.paths[0]}, which it uses in several places",
            subject.place,
            why="its gradient is a sum that begins with that of the result, which a program would add last",
            remedy="capture with a loss, or leave the parameter out of the results",
        )
        for row, node in prepared.state
        if node in results and row.tensor.requires_grad and len(node.users) > 1
    )


def fake_arguments(
    example: Example, leaves: Sequence[Any]
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[Tensor]]:
    """The arguments over fake leaves, and the composed tensors among them: one for each of the example's."""
    arguments = example.with_leaves(list(leaves))
    if not example.wholes:
        return arguments, []
    whole = whole_leaves(arguments)
    originals = iter(example.wholes)
    twins: dict[int, Tensor] = {}
    for at, leaf in enumerate(whole):
        if is_composed(leaf):
            original = next(originals)
            whole[at] = twins.setdefault(id(original), leaf.requires_grad_(original.requires_grad))
    args, kwargs = with_whole_leaves(arguments, whole)
    return (args, kwargs), list(twins.values())


def wholes_of_state(
    state: Sequence[StateTensor], adopted: Sequence[tuple[StateTensor, fx.Node]]
) -> Iterator[Composed]:
    """The composed tensors of the model, over the placeholders of their parts."""
    nodes = {id(row.tensor): node for row, node in adopted}
    for row in state:
        if is_composed(row.tensor):
            parts = tuple(nodes[id(tensor)] for _, tensor in plain_parts(row.tensor))
            yield Composed(row.tensor, parts, str(row.paths[0]))


def wholes_of_arguments(
    example: Example, twins: Sequence[Tensor], leaves: Sequence[Any], nodes: Sequence[fx.Node]
) -> Iterator[Composed]:
    """The composed tensors among the arguments, likewise."""
    known = [(id(leaf), node, path) for leaf, node, path in zip(leaves, nodes, example.paths, strict=True)]
    for twin in twins:
        held = list(plain_parts(twin))
        rows = [next((node, path) for key, node, path in known if key == id(part)) for _, part in held]
        path = rows[0][1].removesuffix("." + ".".join(held[0][0]))
        yield Composed(twin, tuple(node for node, _ in rows), path)
