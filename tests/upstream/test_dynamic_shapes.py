"""Rows 159 to 168: dynamic shapes, and what is said where they do not hold."""

import re
import textwrap
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor, nn
from torch.export import AdditionalInputs, Dim, ShapesCollection

import whence
from tests.upstream.checks import equal


class Pair(nn.Module):
    """Two inputs, a layer, and a result for each."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).relu(), y * 2


class Nested(nn.Module):
    """Tensors in a dict and a list."""

    def forward(self, batch: dict[str, Tensor], rest: list[Tensor]) -> Tensor:
        return batch["x"] + rest[0].sum() + rest[1].sum()


def said(error: pytest.ExceptionInfo[whence.WhenceError]) -> str:
    """The message, in lines of 100, without numbers of lines and without where there is more."""
    lines = re.sub(r"\S*(test_dynamic_shapes.py):\d+", r"\1:N", str(error.value)).splitlines()
    kept = [line for line in lines if not line.startswith(("  more:", "  recorded until"))]
    return "\n".join(textwrap.fill(line, 100, subsequent_indent="      ") for line in kept)


def expected(found: str, text: str) -> None:
    """Compare with text in the source; EXPECTTEST_ACCEPT=1 writes it anew."""
    expecttest.assert_expected_inline(found, text, skip=1)


def test_row_159_wrong_static_size() -> None:
    """A size that was not asked to vary is named, in the flat module, the tree and the check alike."""
    model = Pair()
    args = (torch.randn(2, 4), torch.randn(3))
    program = whence.capture(model, args)
    for module in (program.module(), program.unflatten()):
        with pytest.raises(whence.CallError) as caught:
            module(torch.randn(6, 4), torch.randn(3))
        expected(
            said(caught),
            """\
[WH202] the arguments do not fit the capture
  why: args[0] was f32[2, 4] at capture, is f32[6, 4]
  what to do: capture again with these inputs, or with a dynamic_shapes that lets dim 0 of `args[0]`
      vary
  in the graph:
    …
    x: f32[2, 4] = placeholder
      ^ args[0] was f32[2, 4] at capture, is f32[6, 4]
    …""",
        )
    (violation,) = program.check(model, (torch.randn(6, 4), torch.randn(3)))
    expected(
        str(violation),
        """`args[0]` was Tensor float32[2, 4] at capture, is Tensor float32[6, 4] now: capture again""",
    )


def test_row_160_specifications_of_every_kind() -> None:
    """By name, by position, nested, as a collection and from further examples: the same program."""
    model = Nested()
    x, first, second = torch.randn(4, 2), torch.randn(5), torch.randn(6)
    args = ({"x": x}, [first, second])
    batch = Dim("batch", max=16)
    collection = ShapesCollection()
    collection[x] = (batch, None)
    collection[first] = {0: Dim.AUTO}
    collection[second] = (None,)
    examples = AdditionalInputs()
    examples.add(({"x": torch.randn(7, 2)}, [torch.randn(9), second]))
    specs: list[Any] = [
        {"batch": {"x": {0: batch}}, "rest": [{0: Dim.AUTO}, None]},
        ({"x": (batch, Dim.STATIC)}, [(Dim.AUTO,), {}]),
        collection,
        examples,
    ]
    for spec in specs:
        program = whence.capture(model, args, dynamic_shapes=spec)
        other = ({"x": torch.randn(9, 2)}, [torch.randn(3), torch.randn(6)])
        assert program.verify(model, other).ok
        with pytest.raises(whence.CallError):
            program.module()({"x": x}, [first, torch.randn(7)])


def test_row_160_structures_that_do_not_fit() -> None:
    """All that does not fit is said at once, in the place where it is."""
    model, args = Nested(), ({"x": torch.randn(4, 2)}, [torch.randn(5), torch.randn(6)])
    with pytest.raises(whence.InvalidShapes) as caught:
        whence.capture(model, args, dynamic_shapes={"batch": {"y": None}, "rest": [(None, None), 3.5]})
    expected(
        said(caught),
        """\
[WH114] dynamic_shapes['batch'] lacks 'x' and has 'y', which is not there
  what to do: use exactly 'x', with None for what stays as it is
[WH114] dynamic_shapes['rest'][0] has 2 entries, and args[1][0] has 1 dimensions
  what to do: give one entry for each dimension, or a dict from dimension to a Dim, Dim.AUTO,
      Dim.DYNAMIC, Dim.STATIC, a number or None
[WH114] dynamic_shapes['rest'][1] is 3.5, and args[1][1] is a tensor
  what to do: give a tuple with one entry for each dimension, or a dict to a Dim, Dim.AUTO,
      Dim.DYNAMIC, Dim.STATIC, a number or None""",
    )
    with pytest.raises(whence.InvalidShapes) as caught:
        whence.capture(model, args, dynamic_shapes={"x": None})
    expected(
        said(caught),
        """\
[WH114] dynamic_shapes lacks 'batch', 'rest' and has 'x', which is not there
  what to do: use exactly 'batch', 'rest', with None for what stays as it is""",
    )
    with pytest.raises(whence.InvalidShapes) as caught:
        whence.capture(model, args, dynamic_shapes=(None,))
    expected(
        said(caught),
        """\
[WH114] dynamic_shapes has 1 entries, and there are 2 arguments: batch, rest
  what to do: give one entry for each argument, None for those that stay as they are""",
    )


class Fixing(nn.Module):
    """Fixes one size by a comparison and another by a loop."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[1] == 16:
            x = x + 1
        for _ in range(y.shape[0]):
            x = x * 2
        return x


def test_row_161_a_size_that_the_code_fixes() -> None:
    """Every dimension at once, with what was asked of it, the line and the module, and what works."""
    model, args = nn.Sequential(Fixing())[0], (torch.randn(4, 16), torch.randn(3))
    spec = ({0: Dim("batch"), 1: Dim.DYNAMIC}, {0: Dim("count")})
    with pytest.raises(whence.SpecialisedShapes) as caught:
        whence.capture(model, args, dynamic_shapes=spec)
    expected(
        said(caught),
        """\
[WH115] the model does not allow all sizes that dynamic_shapes asks for
  dim 1 of `args[0]` (Dim.DYNAMIC) was fixed to 16 because test_dynamic_shapes.py:N (the model
      itself) compared it with 16
  dim 0 of `args[1]` (Dim('count')) was fixed to 3 because test_dynamic_shapes.py:N (the model
      itself) took count as a Python number (range(), len(), int(), an index)
  what to do:
    * change the lines named so that they work for every size
    * write x.shape[0] for len(x): it varies where Python's own number does not
    * ask for what is allowed (error.suggested): dynamic_shapes={'x': {0: Dim('batch'), 1:
      Dim.STATIC}, 'y': {0: Dim.STATIC}}
    * write Dim.AUTO for these dimensions, which takes what is allowed""",
    )
    rows = caught.value.dimensions
    assert [(row.dimension.path, row.dimension.dim, row.kind, row.allowed) for row in rows] == [
        ("args[0]", 1, "fixed", "16"),
        ("args[1]", 0, "fixed", "3"),
    ]
    program = whence.capture(model, args, dynamic_shapes=caught.value.suggested)
    assert program.verify(model, (torch.randn(9, 16), torch.randn(3))).ok


class Halves(nn.Module):
    """Takes a tensor that is twice as long as another, and one that is longer by one."""

    def forward(self, x: Tensor, double: Tensor, more: Tensor) -> Tensor:
        return double.view(2, -1) + x + more[1:]


def test_row_162_derived_dims() -> None:
    """`2*d` and `d + 1` hold for every d; their root may be a size of no input, and be fixed with them."""
    model = Halves()
    size = Dim("size", min=2, max=10)
    args = (torch.randn(3), torch.randn(6), torch.randn(4))
    program = whence.capture(model, args, dynamic_shapes=({0: size}, {0: 2 * size}, {0: size + 1}))
    for count in (3, 2, 7, 10):
        assert program.verify(model, (torch.randn(count), torch.randn(2 * count), torch.randn(count + 1))).ok
    with pytest.raises(whence.CallError) as caught:
        program.module()(torch.randn(5), torch.randn(11), torch.randn(6))
    expected(
        said(caught),
        """\
[WH202] the capture does not hold for these sizes
  why: dim 0 of `args[1]` is 11, and must be 2*size, where size is dim 0 of `args[0]`: 2*size in
      dynamic_shapes
  what to do: pass inputs of an admitted size (print(program.shapes) lists them), or capture again
      with a dynamic_shapes, or an example, that admits this one""",
    )
    alone = whence.capture(Pair(), (torch.randn(6, 4), torch.randn(3)), dynamic_shapes=({0: 2 * size}, None))
    assert alone.module()(torch.randn(8, 4), torch.randn(3))[0].shape == (8, 4)
    with pytest.raises(whence.CallError) as caught:
        alone.module()(torch.randn(7, 4), torch.randn(3))
    expected(
        said(caught),
        """\
[WH202] the capture does not hold for these sizes
  why: dim 0 of `args[0]` is 7, and must be of the form 2*size: 2*size in dynamic_shapes
  what to do: pass inputs of an admitted size (print(program.shapes) lists them), or capture again
      with a dynamic_shapes, or an example, that admits this one""",
    )


class Rows(nn.Module):
    """Needs a multiple of four."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1, 4)


def test_row_162_divisibility() -> None:
    """A size that must be a multiple is told so, and a derived dim is suggested."""
    model, args = Rows(), (torch.randn(8),)
    with pytest.raises(whence.SpecialisedShapes) as caught:
        whence.capture(model, args, dynamic_shapes=({0: Dim("size", max=100)},))
    expected(
        said(caught),
        """\
[WH115] the model does not allow all sizes that dynamic_shapes asks for
  dim 0 of `args[0]` (Dim('size', max=100)) can only be a multiple of 4 because
      test_dynamic_shapes.py:N (the model itself) asked whether (size % 4) == 0
  what to do:
    * change the lines named so that they work for every size
    * ask for what is allowed (error.suggested): dynamic_shapes={'x': {0: 4*Dim('size_by_4',
      max=25)}}
    * write Dim.AUTO for these dimensions, which takes what is allowed""",
    )
    program = whence.capture(model, args, dynamic_shapes=caught.value.suggested)
    assert program.verify(model, (torch.randn(20),)).ok


def test_row_163_ranges() -> None:
    """A size outside its range is named, with the bound and who asked for it; bounds must not conflict."""
    model, args = Pair(), (torch.randn(4, 4), torch.randn(3))
    program = whence.capture(model, args, dynamic_shapes=({0: Dim("rows", min=2, max=8)}, None))
    for module in (program.module(), program.unflatten()):
        with pytest.raises(whence.CallError) as caught:
            module(torch.randn(9, 4), torch.randn(3))
        expected(
            said(caught),
            """\
[WH202] the capture does not hold for these sizes
  why: dim 0 of `args[0]` is 9, and must be at most 8: Dim('rows', min=2, max=8) in dynamic_shapes
  what to do: pass inputs of an admitted size (print(program.shapes) lists them), or capture again
      with a dynamic_shapes, or an example, that admits this one""",
        )
    with pytest.raises(whence.InvalidShapes) as conflicting:
        whence.capture(
            model, (args[0], torch.randn(4)), dynamic_shapes=({0: Dim("rows")}, {0: Dim("rows", max=8)})
        )
    expected(
        said(conflicting),
        """\
[WH114] rows is Dim('rows') for dim 0 of `args[0]` and Dim('rows', max=8) for dim 0 of `args[1]`
  what to do: define a Dim once, and use it in both places""",
    )


class Adds(nn.Module):
    """Needs two sizes to be one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if x.shape[0] > 2 else x - y


def test_row_164_suggestions_work() -> None:
    """What is suggested is an object, and a capture with it holds for every size it admits."""
    model, args = Adds(), (torch.randn(4), torch.randn(4))
    with pytest.raises(whence.SpecialisedShapes) as caught:
        whence.capture(model, args, dynamic_shapes=({0: Dim("a", max=8)}, {0: Dim("b")}))
    expected(
        said(caught),
        """\
[WH115] the model does not allow all sizes that dynamic_shapes asks for
  dim 0 of `args[0]` (Dim('a', max=8)) is always what dim 0 of `args[1]` is because
      test_dynamic_shapes.py:N (the model itself) compared it with b
  dim 0 of `args[1]` (Dim('b')) can only be between 3 and 8 because test_dynamic_shapes.py:N (the
      model itself) asked whether a > 2
  what to do:
    * change the lines named so that they work for every size
    * ask for what is allowed (error.suggested): dynamic_shapes={'x': {0: Dim('b', min=3, max=8)},
      'y': {0: Dim('b', min=3, max=8)}}
    * write Dim.AUTO for these dimensions, which takes what is allowed""",
    )
    program = whence.capture(model, args, dynamic_shapes=caught.value.suggested)
    for count in (3, 5, 8):
        assert program.verify(model, (torch.randn(count), torch.randn(count))).ok
    for count in (2, 9):
        assert program.check(model, (torch.randn(count), torch.randn(count)))


class Branches(nn.Module):
    """Decides by a number that comes from data."""

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        if count.item() > 2:
            return x * 2
        return x


class Checked(nn.Module):
    """Says before what holds of the number."""

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        number = count.item()
        torch._check(number > 2)
        torch._check(number <= x.shape[0])
        return x[:number] * 2 if number > 2 else x


def test_rows_165_and_166_decisions_by_data() -> None:
    """The expression, the line and what to write; nothing about falling back to eager."""
    args = (torch.randn(6), torch.tensor(3))
    with pytest.raises(whence.DataDependent) as caught:
        whence.capture(Branches(), args, dynamic_shapes={})
    found = said(caught)
    expected(
        found,
        """\
[WH104] whether item > 2 decides what the model does, and is not known in a capture
  where: in module (root), at test_dynamic_shapes.py:N in Branches.forward
  why: item comes from data: a number read from a tensor, or the size of a result of nonzero, unique
      or indexing with a mask
  what to do: say before that line what always holds, torch._check(item > 2); or compute both sides
      and choose with torch.where; or decide outside and pass the decision in; or let the example
      decide with decide="example", and every run is held to it""",
    )
    assert "eager" not in found and "Dynamo" not in found
    program = whence.capture(Checked(), args, dynamic_shapes={})
    assert program.verify(Checked(), (torch.randn(6), torch.tensor(5))).ok


def test_row_167_a_second_capture() -> None:
    """A dynamic program captured again has fixed sizes, unless it is asked again."""
    model, args = Pair(), (torch.randn(4, 4), torch.randn(3))
    spec = ({0: Dim("rows")}, {0: Dim.AUTO})
    program = whence.capture(model, args, dynamic_shapes=spec)
    for module in (program.module(), program.unflatten()):
        fixed = whence.capture(module, args)
        assert fixed.convention.sizes is None
        again = whence.capture(module, args, dynamic_shapes=spec)
        other = (torch.randn(1, 4), torch.randn(8))
        assert equal(again.module()(*other), model(*other))


class Counts(nn.Module):
    """Computes with whole numbers."""

    def forward(self, x: Tensor, n: int, m: int) -> tuple[Tensor, int]:
        return x.repeat(n) * m, n + m


def test_row_168_whole_numbers() -> None:
    """A whole number may vary, within bounds; it is a result, too."""
    model, args = Counts(), (torch.randn(4), 3, 5)
    program = whence.capture(model, args, dynamic_shapes=(None, Dim.DYNAMIC(min=1, max=9), Dim.AUTO))
    for n, m in ((3, 5), (1, 2), (9, 7)):
        given = (torch.randn(4), n, m)
        assert program.verify(model, given).ok
        assert program.unflatten()(*given)[1] == n + m
    with pytest.raises(whence.CallError) as caught:
        program.module()(torch.randn(4), 10, 5)
    expected(
        said(caught),
        """\
[WH202] the capture does not hold for these sizes
  why: `args[1]` is 10, and must be at most 9: Dim.DYNAMIC(min=1, max=9) in dynamic_shapes
  what to do: pass inputs of an admitted size (print(program.shapes) lists them), or capture again
      with a dynamic_shapes, or an example, that admits this one""",
    )
    with pytest.raises(whence.CallError) as caught:
        program.module()(torch.randn(4), 2.0, 5)
    expected(
        said(caught),
        """\
[WH202] the arguments do not fit the capture
  why: args[1] was a whole number at capture, is 2.0
  what to do: capture again with these inputs
  in the graph:
    …
    n = placeholder
      ^ args[1] was a whole number at capture, is 2.0
    …""",
    )
    with pytest.raises(whence.InvalidShapes) as named:
        whence.capture(model, args, dynamic_shapes=(None, Dim("n"), None))
    expected(
        said(named),
        """\
[WH114] dynamic_shapes['n'] is Dim('n'), and args[1] is a whole number
  what to do: use Dim.AUTO or Dim.DYNAMIC for whole numbers; names are for sizes""",
    )
