"""`program.apply`: a pass makes a program of a program, and leaves the first as it was."""

from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from torch.utils.checkpoint import checkpoint

import whence
from tests.program.small import Stack, sine_loss
from whence import Phase
from whence.rewriting import CommonSubexpressions, ConstantFolding, DeadCode, Pass

aten = torch.ops.aten
X = torch.randn(2, 3)


class Repeats(nn.Module):
    """Computes one value twice, another for nothing, and draws twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = self.linear(x).sin(), self.linear(x).sin()
        return first * 2 + second, torch.rand_like(x) + torch.rand_like(x), first.cos()


def targets(program: whence.Program) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


@dataclass(frozen=True)
class Negated:
    """Multiplies by -1 in the place of `neg`."""

    name: str = "negated"

    def rewrite(self, edit: whence.Edit) -> None:
        for node in edit.graph.find_nodes(op="call_function", target=aten.neg.default):
            with edit.graph.inserting_before(node):
                made = edit.graph.call_function(aten.mul.Tensor, (node.args[0], -1))
            node.replace_all_uses_with(made)
            edit.graph.erase_node(node)


def nothing(_: fx.GraphModule) -> None:
    """Changes nothing."""


def copied(module: fx.GraphModule) -> fx.GraphModule:
    return fx.Transformer(module).transform()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "pass_", [DeadCode(), CommonSubexpressions(), nothing, copied, CSEPass()], ids=lambda row: str(row)[:20]
)
@pytest.mark.parametrize("backward", [False, sine_loss])
def test_program_is_made_of_another(pass_: Any, backward: Any) -> None:
    """Everything is eager's, and the program that it was made of is as before, also as an object."""
    model, x = Stack(), torch.randn(3, 4)
    program = whence.capture(model, (x,), backward=backward)
    before = (fields_of(program), [str(node.format_node()) for node in program.graph.nodes])
    with torch.fx.traceback.preserve_node_meta():
        made = program.apply(pass_)
    assert made is not program
    assert type(made) is whence.Program
    assert (fields_of(program), [str(node.format_node()) for node in program.graph.nodes]) == before
    assert made.verify(model, (x,)).ok
    assert made.unflatten()(x) is not None


def fields_of(program: whence.Program) -> dict[str, Any]:
    """What the program holds."""
    return {field.name: getattr(program, field.name) for field in fields(program)}


def test_pass_of_ones_own_is_named_by_origins() -> None:
    """What a frozen dataclass rewrites comes from where it came, and is deduced."""
    program = whence.capture(lambda x: -x.sin(), (X,))
    made = program.apply(Negated())
    assert isinstance(Negated(), Pass)
    assert targets(made) == [aten.sin.default, aten.mul.Tensor]
    origin = made.where(made.graph.find_nodes(op="call_function", target=aten.mul.Tensor)[0])
    assert (origin.passes, origin.quality, origin.phase) == (("negated",), "inferred", Phase.FORWARD)
    assert targets(program) == [aten.sin.default, aten.neg.default]


def test_several_passes_run_one_after_another() -> None:
    """In the order in which they are given; all of them are named."""
    program = whence.capture(lambda x: (-x).sin() + (-x).sin(), (X,))
    made = program.apply(CommonSubexpressions(), Negated())
    assert targets(made) == [aten.mul.Tensor, aten.sin.default, aten.add.Tensor]
    assert torch.equal(made.module()(X), program.module()(X))


def test_no_pass_is_refused() -> None:
    """By a word of ours that says what a pass is."""
    with pytest.raises(whence.UsageError, match="expected a pass, got str"):
        whence.capture(torch.sin, (X,)).apply("dead code")  # type: ignore[arg-type]
    with pytest.raises(whence.UsageError, match="expected a pass, got the class DeadCode"):
        whence.capture(torch.sin, (X,)).apply(DeadCode)  # type: ignore[arg-type]


def test_pass_that_breaks_the_program_leaves_it() -> None:
    """The error is `track`'s, and names the pass."""

    def broken(module: fx.GraphModule) -> None:
        module.graph.output_node().args = ((),)

    program = whence.capture(torch.sin, (X,))
    with pytest.raises(whence.LostProvenance, match="broken"):
        program.apply(broken)
    assert targets(program) == [aten.sin.default]


def test_equal_operations_are_one() -> None:
    """But for those that draw, and for those that are both returned."""
    model = Repeats()
    program = whence.capture(model, (X,))
    made = program.apply(CommonSubexpressions())
    assert targets(made).count(aten.linear.default) == targets(made).count(aten.sin.default) == 1
    assert targets(made).count(aten.rand_like.default) == 2
    torch.manual_seed(0)
    expected = model(X)
    torch.manual_seed(0)
    assert all(map(torch.equal, made.unflatten()(X), expected))

    twice = whence.capture(lambda x: (x + 1, x + 1), (X,)).apply(CommonSubexpressions())
    first, second = twice.module()(X)
    assert first is not second


def test_what_is_recomputed_stays_so() -> None:
    """A checkpoint's second forward goes only where that is asked for."""

    def recomputed(x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False)
        return inner

    program = whence.capture(recomputed, (X.clone().requires_grad_(),), backward=torch.sum)
    kept, merged = (program.apply(CommonSubexpressions(across)) for across in (False, True))
    assert targets(kept).count(aten.sin.default) == 2
    assert targets(merged).count(aten.sin.default) == 1


def test_dead_code_goes() -> None:
    """What draws stays, and so do inputs that nobody reads."""
    program = whence.capture(lambda x, y: (x.sin(), y)[0], (X, X))
    with program.track("unused") as edit:
        sine = edit.node("sin")
        with edit.graph.inserting_after(sine):
            unused = edit.graph.call_function(aten.neg.default, (sine,))
            drawn = edit.graph.call_function(aten.rand_like.default, (sine,))
        edit.replaced(unused, sine)
        edit.replaced(drawn, sine)
    program = edit.program
    made = program.apply(DeadCode())
    assert targets(made) == [aten.sin.default, aten.rand_like.default]
    assert [row.name for row in made.signature.inputs] == ["x", "y"]


def test_passes_are_values() -> None:
    """They compare, print, and stay what they are."""
    assert CommonSubexpressions() == CommonSubexpressions(across_phases=False)
    assert "across_phases=True" in repr(CommonSubexpressions(across_phases=True))
    with pytest.raises(FrozenInstanceError):
        DeadCode().name = "other"  # type: ignore[misc]


def _of_numbers(x: Tensor) -> Tensor:
    ones = torch.zeros(3, 4) + 1
    negative = torch.zeros(3, 4) * -1  # which is another zero
    rows = torch.arange(4.0) * 2
    return x * ones.sin() / negative.exp() + rows + (negative.reciprocal() < 0) + torch.rand(3, 4)


@pytest.mark.parametrize("most", [100, 3])
def test_what_no_input_leads_to_is_computed_now(most: int) -> None:
    """Where it is one number; its bits are eager's, draws stay, and so does what is larger than `most`."""
    program = whence.capture(_of_numbers, (torch.randn(3, 4),))
    folded = program.apply(ConstantFolding(most))
    assert folded.verify(_of_numbers, (torch.randn(3, 4),)).ok
    targets = [str(node.target) for node in folded.graph.nodes if node.op == "call_function"]
    assert "aten.rand.default" in targets and "aten.arange.default" in targets
    assert ("aten.sin.default" in targets) is (most == 3)
    full = [node for node in folded.graph.nodes if node.target is torch.ops.aten.full.default]
    assert len(full) == (3 if most == 100 else 0)
    assert all(folded.where(node).passes == ("constant folding",) for node in full)
