"""Guards on sizes: what they are, what breaks them, and what is said."""

import typing

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence
from whence.program.arguments.open_sizes import SizeRule
from whence.schema import GuardKind


class Scaled(nn.Module):
    """Needs two inputs of one length, and decides by it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y if x.shape[1] > 4 else x).view(-1, 2)


@pytest.fixture
def program() -> whence.Program:
    """A batch with a name and bounds; lengths as the model allows them."""
    batch = Dim("batch", max=8)
    shapes = ({0: batch, 1: Dim.AUTO}, {0: batch, 1: Dim.AUTO})
    return whence.capture(Scaled(), (torch.ones(2, 6), torch.ones(2, 6)), dynamic_shapes=shapes)


def test_rules_are_guards_with_who_asked(program: whence.Program) -> None:
    """Bounds, equal sizes and decisions of the code are rows with a source, outside the graph."""
    rows = [guard for guard in program.guards if guard.kind is GuardKind.SIZE]
    said = {str(guard) for guard in rows}
    assert "dim 0 of `args[0]`: at most 8 (Dim('batch', max=8) in dynamic_shapes)" in said
    decided = [guard for guard in rows if guard.source is not None]
    assert {guard.source.function for guard in decided if guard.source} == {"Scaled.forward"}
    assert all(isinstance(guard.expected, SizeRule) for guard in rows)
    assert not any("assert" in str(node.target) for node in program.graph.nodes)
    assert "at most 8" in str(program.guards)
    assert any(row["kind"] == "size" for row in program.guards.to_dict()["guards"])


@pytest.mark.parametrize(
    ("shape", "other", "said"),
    [
        ((9, 6), (9, 6), ["dim 0 of `args[0]` is 9, and must be at most 8"]),
        ((2, 6), (3, 6), ["dim 0 of `args[1]` is 3, and must be what dim 0 of `args[0]` is"]),
        ((2, 4), (2, 4), ["must be at least 5"]),
        ((9, 3), (9, 3), ["must be at most 8", "must be at least 5"]),
    ],
)
def test_what_breaks_them(
    program: whence.Program, shape: tuple[int, ...], other: tuple[int, ...], said: list[str]
) -> None:
    """The check and the call name the input, the dimension, the bound and who asked for it."""
    args = (torch.ones(shape), torch.ones(other))
    found = "\n".join(map(str, program.check(Scaled(), args)))
    for text in said:
        assert text in found
    for module in (program.module(), program.unflatten()):
        with pytest.raises(whence.CallError, match="does not hold for these sizes"):
            module(*args)


def test_admitted_sizes_break_nothing(program: whence.Program) -> None:
    """Every size in the range is fine, in either spelling of the call."""
    for batch, length in ((2, 6), (8, 5), (1, 20)):
        args = (torch.ones(batch, length), torch.ones(batch, length))
        assert program.check(Scaled(), args) == []
        assert program.check(Scaled(), args[:1], {"y": args[1]}) == []
        assert program.verify(Scaled(), args).ok


def test_what_is_no_size_is_still_guarded(program: whence.Program) -> None:
    """Another dtype, rank or fixed size is a violation of the input."""
    good = torch.ones(2, 6)
    for bad in (good.double(), torch.ones(2, 6, 1), None, 3, good.requires_grad_()):
        violations = program.check(Scaled(), (torch.ones(2, 6), bad))
        assert [violation.guard.what for violation in violations] == ["args[1]"]


def test_strides_follow_from_sizes() -> None:
    """A transposed input is another layout at every size; one that is laid out alike is not."""
    model = nn.Linear(4, 2)
    shapes = ({0: Dim("rows")},)
    program = whence.capture(model, (torch.ones(3, 4),), backward=True, dynamic_shapes=shapes)
    assert program.check(model, (torch.ones(9, 4),)) == []
    (violation,) = program.check(model, (torch.ones(4, 9).t(),))
    assert violation.guard.what == "args[0]"


@pytest.mark.parametrize("rows", [1, 4])
def test_where_there_is_one_row_its_stride_means_nothing(rows: int) -> None:
    """A row that lies in a longer tensor is laid out as one that does not, whatever its stride says."""
    model = nn.Linear(4, 2)
    shapes = ({0: Dim.AUTO},)
    program = whence.capture(model, (torch.ones(rows, 4),), backward=True, dynamic_shapes=shapes)
    assert program.check(model, (torch.ones(5, 9)[:1, :4],)) == []
    (violation,) = program.check(model, (torch.ones(5, 9)[:rows, 1:9:2],))
    assert violation.guard.what == "args[0]"


def test_a_guarded_program_captures_again_for_another_size(program: whence.Program) -> None:
    """A call of a size that is not admitted is captured as it is; the next one is fixed to it."""
    guarded = program.guarded(Scaled(), on_violation="recapture")
    args = (torch.ones(9, 6), torch.ones(9, 6))
    assert torch.equal(guarded(*args), Scaled()(*args))
    with pytest.raises(whence.StaleCapture, match="must be at most 8"):
        program.guarded(Scaled())(*args)


def test_what_kernels_of_pytorch_run_is_not_the_models() -> None:
    """Where sizes are open they read schemas, whose types `typing_extensions` may put together."""

    def rows(x: Tensor) -> Tensor:
        return x[x > 0].sum() + x[torch.arange(x.shape[0] - 1)] + 1

    for forget in typing._cleanups:  # type: ignore[attr-defined]
        forget()
    program = whence.capture(rows, (torch.ones(3, 4),), dynamic_shapes=({0: Dim.DYNAMIC},))
    assert [row.what for row in program.guards if "typing" in str(row.source)] == []
