"""What a run decided by sizes becomes rules, and an error where it is less than was asked for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from whence._torch.sizes.dims import DimWish, Freedom
from whence.errors import CallError, InvalidShapes
from whence.program import Convention, FlatProgram
from whence.program.arguments.open_sizes import (
    ZERO_ONE,
    Asker,
    Dimension,
    Reading,
    Sized,
    SizeRule,
    Sizes,
    bounds,
    shape_of,
    sized,
)
from whence.tracing.assembling.specialised import asker, refuse_less
from whence.tracing.recording.run import Recorded
from whence.tracing.target.dynamic_shapes import DynamicSizes
from whence.tracing.target.example import Example
from whence.tracing.target.symbols import size_names

if TYPE_CHECKING:
    from whence._torch.sizes.environment import Found, SizeEnvironment


@dataclass(frozen=True)
class Settled:
    """Everything that is known of sizes after a run.

    `names` gives the size behind each dimension, `readings` those that are read from inputs, and `decisions`
    what code required, with the place of each.
    """

    dynamic: DynamicSizes
    environment: "SizeEnvironment"
    names: Mapping[Dimension, str]
    readings: tuple[Reading, ...]
    decisions: tuple["Found", ...]


def with_sizes(program: FlatProgram, example: Example, recorded: Recorded) -> FlatProgram:
    """The program with the rules that its sizes must keep; raises `SpecialisedShapes`."""
    environment = recorded.session.recorder.environment
    if environment is None or example.dynamic is None:
        return program
    environment.freeze()
    names = size_names(example.dynamic, example.names)
    refuse_less(environment, example.dynamic, names)
    settled = _settled(environment, example.dynamic, names)
    leaves = recorded.prepared.leaves
    shapes = tuple(_shape(settled, position, leaf) for position, leaf in enumerate(leaves))
    hidden, rules = _rules(settled, leaves)
    sizes = Sizes((*settled.readings, *hidden), shapes, rules)
    convention = replace(program.convention, sizes=sizes)
    _check_further(convention, example.dynamic)
    return program.with_changes(convention=convention)


def _check_further(convention: Convention, dynamic: DynamicSizes) -> None:
    """Raise `InvalidShapes` where the program does not hold for inputs that were added as examples."""
    for number, (args, kwargs) in enumerate(dynamic.further):
        try:
            convention.flatten(args, kwargs)
        except CallError as error:
            raise InvalidShapes(
                f"the capture does not hold for example {number} of AdditionalInputs",
                why=error.why,
                remedy="leave that example out, or change the model where it decides by sizes",
            ) from error


def _shape(settled: Settled, position: int, leaf: Any) -> tuple[Sized, ...] | None:
    """The shape of an input; a size that was asked to vary and is fixed has a rule that says why."""
    if not isinstance(leaf, Tensor):
        return None
    asked = {at.dim for at in settled.names if at.position == position}
    return tuple(str(size) if dim in asked else size for dim, size in enumerate(shape_of(leaf)))


def _settled(
    environment: "SizeEnvironment", dynamic: DynamicSizes, names: Mapping[Dimension, str]
) -> Settled:
    free = {name for name, symbol in environment.bases.items() if environment.is_free(symbol)}
    readings: dict[str, Reading] = {}
    for at, name in names.items():
        wish = dynamic.wishes[at]
        if name in free:
            readings.setdefault(name, Reading(name, at, wish.scale, wish.offset))
    return Settled(dynamic, environment, names, tuple(readings.values()), tuple(environment.found()))


def _rules(settled: Settled, leaves: Sequence[Any]) -> tuple[tuple[Reading, ...], tuple[SizeRule, ...]]:
    """Further readings that only rules look at, and the rules."""
    hidden: list[Reading] = []
    rules: list[SizeRule] = []
    own = {reading.dimension: reading for reading in settled.readings}
    for at, wish in settled.dynamic.wishes.items():
        size = sized(leaves[at.position] if at.dim is None else leaves[at.position].shape[at.dim])
        if at not in own or wish.scale != 1:
            reading = Reading(f"_{at.position}" if at.dim is None else f"_{at.position}_{at.dim}", at)
            hidden.append(reading)
            rules.append(_equal(settled, at, wish, f"{reading.name} == {size}", own))
        if at in own:
            rules += _declared_bounds(at, wish, settled.names[at])
        elif wish.freedom is not Freedom.NAMED and isinstance(size, str):
            rules += _declared_bounds(at, wish, reading.name)
    rules += [rule for found in settled.decisions if (rule := _decided(settled, found)) is not None]
    rules += _filled_sizes(settled)
    return tuple(hidden), tuple(_without_repeats(rules))


def _equal(
    settled: Settled, at: Dimension, wish: DimWish, condition: str, own: Mapping[Dimension, Reading]
) -> SizeRule:
    name = settled.names[at]
    base = next((there for there, reading in own.items() if reading.name == name), None)
    if base is not None:
        return SizeRule((at, base), condition, _related(at, wish, name, base), Asker(asked=wish.text))
    symbol = settled.environment.bases.get(name)
    by = Asker(asked=ZERO_ONE) if symbol is None else asker(settled.environment.cause_of(symbol))
    size = condition.partition(" == ")[2]
    base = next(
        (there for there, reading in own.items() if reading.name == size and reading.scale == 1), None
    )
    if base is not None and not settled.dynamic.wishes[base].is_derived:
        return SizeRule((at, base), condition, f"what {base} is", by)
    return SizeRule((at,), condition, size, by)


def _related(at: Dimension, wish: DimWish, name: str, base: Dimension) -> str:
    """How a dimension follows from the size that another one, or itself, is read for."""
    if at == base:
        return f"of the form {wish.text}"
    return f"{wish.text}, where {name} is {base}" if wish.is_derived else f"what {base} is"


def _declared_bounds(at: Dimension, wish: DimWish, name: str) -> Iterator[SizeRule]:
    return bounds(at, name, (wish.low or None, wish.high), Asker(wish.text), wish.scale, wish.offset)


def _decided(settled: Settled, found: "Found") -> SizeRule | None:
    concerned = [at for at, name in settled.names.items() if name in found.names]
    if not concerned:
        return None
    return SizeRule(tuple(concerned), found.text, found.words, asker(found.decision))


def _filled_sizes(settled: Settled) -> Iterator[SizeRule]:
    for symbol, (module, source) in settled.environment.filled.items():
        name = settled.environment.spelled(symbol)
        concerned = tuple(at for at, known in settled.names.items() if known == name)
        if concerned:
            yield SizeRule(concerned, f"{name} >= 1", "at least 1", Asker(module=module, source=source))


def _without_repeats(rules: Sequence[SizeRule]) -> Iterator[SizeRule]:
    seen: set[str] = set()
    for rule in rules:
        if rule.condition not in seen:
            seen.add(rule.condition)
            yield rule
