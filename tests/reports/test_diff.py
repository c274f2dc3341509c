"""A difference of two programs names calls, operations and shapes, and what is alike once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import whence
from tests.models import case
from whence.rewriting import CommonSubexpressions

X = torch.randn(6, 4)
aten = torch.ops.aten


def blocks(activation: type[nn.Module] = nn.ReLU, count: int = 3) -> whence.Program:
    """Equal blocks, one after another."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), activation()) for _ in range(count)))
    return whence.capture(model, (X,), backward=lambda y: y.sum())


def test_programs_of_one_model_do_not_differ() -> None:
    """Also where they were captured twice, with equal layers run instead of replayed."""
    model, args, kwargs = case("llama").make()
    first, second = (whence.capture(model, args, kwargs, reuse=reuse) for reuse in (True, False))
    found = first.diff(second)
    assert found.ok
    assert str(found) == "the same calls, operations and signature"


def test_another_activation_is_told_once() -> None:
    """Three calls of another class, three that compute otherwise, forward and backward."""
    found = blocks().diff(blocks(nn.Tanh))
    assert found.retyped == tuple((f"{n}.1", "ReLU", "Tanh") for n in range(3))
    assert [(change.calls, change.phase) for change in found.rows] == [
        (("0.1", "1.1", "2.1"), "forward"),
        (("2.1", "1.1", "0.1"), "backward"),
    ]
    forward = found.rows[0]
    assert forward.added == ((("aten.tanh.default", "f32[6, 4]"), 1),)
    assert "0.1 … 2.1 (× 3), forward\n  + aten.tanh.default f32[6, 4]\n  - aten.relu" in str(found)


def test_calls_and_weights_that_changed_alike_are_told_once() -> None:
    """Classes, inputs and outputs, as operations are."""
    page = str(blocks().diff(blocks(nn.Tanh)))
    assert "~ call 0.1 … 2.1 (× 3): ReLU, now Tanh\n" in page and page.count("~ call") == 1
    double = whence.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), (X.double(),))
    page = str(whence.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), (X,)).diff(double))
    assert "~ input 0.weight … 1.weight (× 2): f32[4, 4], now f64[4, 4]\n" in page
    page = str(blocks(count=3).diff(blocks(count=1)))
    assert "- call 1 … 2 (× 2)\n" in page
    assert "- output gradient 1.0.weight … 2.0.weight (× 2): f32[4, 4]\n" in page


def test_calls_that_came_and_went() -> None:
    """With their weights."""
    found = blocks().diff(blocks(count=2))
    assert found.gone == ("2", "2.0", "2.1") and found.appeared == ()
    assert "- 2.0.weight: f32[4, 4]" in found.inputs
    assert any("gradient 2.0.weight" in row for row in found.outputs)
    assert blocks(count=2).diff(blocks()).appeared == found.gone


def test_shapes_and_dtypes_are_differences() -> None:
    """The same operators, another batch or another dtype."""
    model = nn.Linear(4, 4)
    program = whence.capture(model, (X,))
    found = program.diff(whence.capture(model, (X[:2],)))
    assert found.inputs == ("+ args[0]: f32[2, 4]", "- args[0]: f32[6, 4]")
    double = whence.capture(nn.Linear(4, 4).double(), (X.double(),))
    (row,) = program.diff(double).rows
    assert row.changed == ((("aten.linear.default", "f32[6, 4]", "f64[6, 4]"), 1),)
    assert not (row.added or row.removed or row.moved)


def widths(width: int) -> whence.Program:
    """Three layers that are as wide."""
    layers = (nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4)) for _ in range(3))
    return whence.capture(nn.Sequential(*layers), (X,), backward=lambda y: y.sum())


def test_the_same_operations_of_another_shape_are_changes() -> None:
    """By call, line, operator and order; told once for layers alike."""
    found = widths(8).diff(widths(12))
    assert found.rows and not any(row.added or row.removed or row.moved for row in found.rows)
    page = str(found)
    assert "0.1 … 2.1 (× 3), forward\n  ~ aten.gelu.default f32[6, 8], now f32[6, 12]\n" in page
    assert "  ~ aten.mm.default f32[6, 8], now f32[6, 12]\n" in page
    assert "  ~ aten.t.default f32[8, 4], now f32[12, 4] × 2\n" in page
    assert "~ input 0.0.weight … 2.0.weight (× 3): f32[8, 4], now f32[12, 4]\n" in page


def test_what_has_no_counterpart_in_its_line_is_no_change() -> None:
    """Where a line has more of an operator than before, or others do, nobody knows which is which."""

    def rows(before: Any, after: Any) -> Any:
        return whence.capture(before, (X,)).diff(whence.capture(after, (X,))).rows

    (row,) = rows(lambda x: x[:2].sin(), lambda x: (x[:3].sin(), x[:4].sin()))
    assert not row.changed and row.added and row.removed
    (row,) = rows(lambda x: (x[:2].sin(), x.sin()), lambda x: (x.sin(), x[:3].sin()))
    assert dict(row.removed)["aten.sin.default", "f32[2, 4]"] == 1 and row.added


@pytest.mark.parametrize(
    ("before", "after", "added"),
    [
        (lambda x: x * 2.0, lambda x: x * 3.0, ("aten.mul.Tensor", "f32[6, 4] of other=3.0")),
        (
            lambda x: x.add(x, alpha=2),
            lambda x: x.add(x, alpha=3),
            ("aten.add.Tensor", "f32[6, 4] of alpha=3"),
        ),
        (lambda x: x + 0.0, lambda x: x + -0.0, ("aten.add.Tensor", "f32[6, 4] of other=-0.0")),
        (
            lambda x: x.sin() - x.cos(),
            lambda x: x.cos() - x.sin(),
            ("aten.sub.Tensor", "f32[6, 4] of aten.cos.default forward, aten.sin.default forward"),
        ),
        (
            lambda x: (x.sin(), x.cos()),
            lambda x: (x.cos(), x.sin()),
            ("output[0]", "f32[6, 4] of aten.cos.default forward"),
        ),
    ],
)
def test_constants_and_what_is_read_are_differences(before: Any, after: Any, added: tuple[str, str]) -> None:
    """Where operators and shapes are alike."""
    first, second = (whence.capture(each, (X,)) for each in (before, after))
    assert first.diff(first).ok
    (row,) = first.diff(second).rows
    assert row.added[0] == (added, 1) and len(row.added) == len(row.removed)


def test_defaults_are_no_differences() -> None:
    """An argument that is spelled out as it would have been."""
    program = whence.capture(nn.GELU(), (X,))
    with program.track("spelled") as edit:
        edit.node("gelu").kwargs = {"approximate": "none"}
    assert program.diff(edit.program).ok


def test_another_probability_is_told_once() -> None:
    """A dropout in every layer."""
    first, second = (
        whence.capture(nn.Sequential(*(nn.Sequential(nn.Dropout(p)) for _ in range(3))), (X,))
        for p in (0.1, 0.2)
    )
    (row,) = first.diff(second).rows
    assert row.calls == ("0.0", "1.0", "2.0") and str(row).count("of p=0.2, train=True") == 1


def test_figures_that_differ() -> None:
    """FLOPs and bytes of all, before and after."""
    found = blocks().diff(blocks(count=2))
    flops = blocks().cost().total.flops["forward"], blocks(count=2).cost().total.flops["forward"]
    assert ("forward FLOPs", *flops) in found.figures and f"forward FLOPs: {flops[0]:,}, now" in str(found)
    assert blocks().diff(blocks()).figures == ()


def test_what_a_pass_moved() -> None:
    """Of two equal operations one is left: the other call has none any more."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Tanh(), nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) + self.right(x)

    program = whence.capture(Twice(), (X,))
    found = program.diff(program.apply(CommonSubexpressions()))
    (row,) = found.rows
    assert row.calls == ("right",) and row.removed == ((("aten.tanh.default", "f32[6, 4]"), 1),)
    with program.track("swapped") as edit:
        left, right = (edit.node(node.name) for node in program.select("** :: aten.tanh"))
        left.target = aten.sin.default
        right.target = aten.sin.default
    swapped = program.diff(edit.program)
    assert len(swapped.rows) == 2 and json.dumps(swapped.to_dict())


class Around(nn.Module):
    """Calls both of its modules, and does something itself."""

    def __init__(self, left: Any, right: Any, itself: Any) -> None:
        super().__init__()
        self.left, self.right, self.itself = _Does(left), _Does(right), itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.itself(self.right(self.left(x)))
        return result


class _Does(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


def test_what_moved_has_a_direction_and_what_came_besides_is_added() -> None:
    """One operation went; of the two that came, one is new."""
    before = whence.capture(Around(torch.neg, torch.neg, torch.erf), (X,))
    after = whence.capture(Around(torch.erf, torch.erf, torch.neg), (X,))
    operation = ("aten.erf.default", "f32[6, 4]")
    rows = before.diff(after).rows
    changed = [(dict(row.added).get(operation), dict(row.moved).get(operation)) for row in rows]
    assert changed == [(None, 1), (1, None), (None, 1)]
    assert "left, forward\n  - aten.neg" not in str(before.diff(after))
    assert "  ~ aten.erf.default f32[6, 4] (moved here)" in str(rows[0])
    assert "  ~ aten.erf.default f32[6, 4] (moved away)" in str(rows[-1])
