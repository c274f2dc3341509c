"""The shape of every input and output as a table, with who constrained it."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from whence._torch.sizes.symbols import is_symbolic, names_of_sizes
from whence.program.arguments.open_sizes import Sized, SizeRule, sized
from whence.program.arguments.variants import in_words
from whence.program.plain import AsJSON, plain_fields
from whence.program.signature import SHORT_DTYPES, Output
from whence.schema import InputKind, OutputKind

if TYPE_CHECKING:
    from whence.program.program import FlatProgram


NOTHING = type(None).__name__
_KIND = 8
"""How wide the column of kinds is."""


@dataclass(frozen=True)
class Shape(AsJSON):
    """One input or output: what it is, its dtype and its shape, and what its sizes must keep.

    A whole number has the shape of a scalar; its `value` is how it is spelled. What is not there has the
    dtype `NoneType`. `rules` are those that speak of it, each with who asked.
    """

    kind: str
    path: str
    dtype: str
    shape: tuple[Sized, ...]
    value: Sized | None = None
    rules: tuple[SizeRule, ...] = ()

    def __str__(self) -> str:
        if self.dtype == NOTHING:
            return "none: nothing leads to it" if self.kind == OutputKind.GRADIENT else "None"
        sizes = self.value if self.value is not None else f"[{', '.join(map(str, self.shape))}]"
        return f"{self.dtype} = {sizes}" if self.value is not None else f"{self.dtype}{sizes}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return plain_fields(self, "kind", "path", "dtype", "shape", "value", "rules")


@dataclass(frozen=True)
class Shapes(AsJSON):
    """One row for every input that the user passes and every value that comes back.

    Sizes are numbers, or names and what is computed from them. Printed, the gradients of parameters are one
    line: they have the parameters' shapes. `variants` are sizes that the rules exclude, for which there is a
    program beside.
    """

    rows: tuple[Shape, ...]
    names: tuple[tuple[str, str], ...] = ()
    variants: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Shape]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, path: str) -> Shape:
        """The row of a path, `args[0]` or `output`; raises `KeyError` for others."""
        return {row.path: row for row in self.rows}[path]

    def __str__(self) -> str:
        inputs = {row.path for row in self.rows if row.kind == "input"}
        plain = [row for row in self.rows if row.kind == OutputKind.GRADIENT and row.path not in inputs]
        shown = [row for row in self.rows if row not in plain]
        width = max((len(row.path) for row in shown), default=0)
        lines = [f"{name} is {where}" for name, where in self.names] or ["all sizes are fixed"]
        for row in shown:
            lines.append(f"{row.kind:<{_KIND}}  {row.path:<{width}}  {row}")
            lines += [
                f"{'':<{_KIND}}  {'':<{width}}    {rule.dimensions[0]} must be {rule}" for rule in row.rules
            ]
        variants = [f"{'variant':<{_KIND}}  {where}" for where in self.variants]
        return "\n".join([*lines, *_gradient_lines(plain), *variants])

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        rows = [row.to_dict() for row in self.rows]
        return {"sizes": dict(self.names), "rows": rows, "variants": [*self.variants]}


def _gradient_lines(rows: Sequence[Shape]) -> Iterator[str]:
    """The gradients of parameters in a line, and those that are missing by name."""
    missing = [row.path for row in rows if row.dtype == NOTHING]
    if len(rows) > len(missing):
        count = len(rows) - len(missing)
        yield f"{'gradient':<{_KIND}}  {count} of parameters, each of the shape of its parameter"
    if missing:
        yield f"{'gradient':<{_KIND}}  none for {', '.join(missing)}: nothing leads to it"


def shapes_of(program: "FlatProgram") -> Shapes:
    sizes = program.convention.varying
    rules = () if sizes is None else sizes.rules
    readings = () if sizes is None else sizes.readings
    names = {row.name: row.in_words for row in readings if not row.name.startswith("_")}
    users = enumerate(row for row in program.signature.inputs if row.kind is InputKind.USER)
    inputs = [
        _shape_row("input", row.path, row.value, tuple(r for r in rules if r.dimensions[0].position == at))
        for at, row in users
    ]
    kinds = (OutputKind.LOSS, OutputKind.USER, OutputKind.GRADIENT)
    outputs = [_output(program, row) for row in program.signature.outputs_of(*kinds)]
    names |= _unread(program, names)
    variants = tuple(in_words(each.circumstances.numbers) for each in program.variants)
    return Shapes((*inputs, *outputs), tuple(names.items()), variants)


def _unread(program: "FlatProgram", known: Container[str]) -> dict[str, str]:
    """Sizes that are no argument's own, and where they come from."""
    found: dict[str, str] = {}
    for row in program.signature.inputs:
        for name in sorted(names_of_sizes(row.value)):
            found.setdefault(name, f"a part of the sizes of `{row.path}`")
    for output in program.signature.outputs:
        for name in sorted(names_of_sizes(_output_value(program, output))):
            bounds = _range(*program.convention.limits.get(name, (None, None)))
            found.setdefault(name, f"known once the program has run{bounds}")
    return {name: words for name, words in found.items() if name not in known}


def _range(low: int | None, high: int | None) -> str:
    words = [f"at least {low}"] if low else []
    words += [] if high is None else [f"at most {high}"]
    return f": {' and '.join(words)}" if words else ""


def _output(program: "FlatProgram", row: Output) -> Shape:
    kind = "output" if row.kind is OutputKind.USER else row.kind.value
    return _shape_row(kind, row.path, _output_value(program, row), ())


def _output_value(program: "FlatProgram", row: Output) -> Any:
    return row.value if row.node is None else program.node(row.node).meta["val"]


def _shape_row(kind: str, path: str, value: Any, rules: tuple[SizeRule, ...]) -> Shape:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return Shape(kind, path, SHORT_DTYPES.get(dtype, dtype), tuple(map(sized, value.shape)), rules=rules)
    spelled = sized(value) if is_symbolic(value) else repr(value)
    name = type(value).__name__.removeprefix("Sym").lower() if is_symbolic(value) else type(value).__name__
    return Shape(kind, path, name, (), spelled, rules)
