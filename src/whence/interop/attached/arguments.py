"""How a program of a graph from elsewhere is called: with the arguments that are not the model's state."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from whence._torch.pytrees import tree_flatten
from whence._torch.sizes.symbols import Assumed, assumed_of, is_symbolic, names_of_sizes, sizes_in
from whence.errors import Fault
from whence.interop.attached.roles import GraphWords, Slot
from whence.program import Convention
from whence.program.arguments.binding import binding_faults
from whence.program.arguments.convention import names_of, paths_of
from whence.program.arguments.open_sizes import Asker, Dimension, SizeRule, Sizes, bounds, relation, sizes_of
from whence.schema import InputKind
from whence.tracing.target.subject import Subject

_FIXED = "trace the graph with fixed sizes, or capture or export the model with dynamic_shapes"


@dataclass(frozen=True)
class ArgumentLeaf:
    """One argument: its placeholder's name and what it takes; `slot` is None where the graph has none."""

    name: str
    path: str
    value: Any
    slot: Slot | None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arguments:
    """The arguments in the structure in which they are given."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: tuple[ArgumentLeaf, ...]
    parameters: Any = None
    faults: tuple[Fault, ...] = field(default=())

    def convention(self, reads_memory: bool) -> Convention:
        """How the program is called."""
        return Convention(
            spec=tree_flatten((self.args, dict(self.kwargs)))[1],
            leaves=tuple(leaf.value for leaf in self.leaves),
            paths=tuple(leaf.path for leaf in self.leaves),
            parameters=self.parameters,
            reads_memory=reads_memory,
        )


def arguments_of(words: GraphWords, slots: Sequence[Slot], subject: Subject) -> Arguments:
    """The arguments: as they were given, without those that are state; or else the inputs, by position."""
    users = {slot.leaf: slot for slot in slots if slot.kind is InputKind.USER}
    if words.args is None and words.kwargs is None:
        ordered = sorted(users.values(), key=lambda slot: slot.leaf or 0)
        args = tuple(slot.node.meta.get("val") for slot in ordered)
        paths = paths_of(args, {})
        rows = zip(ordered, paths, strict=True)
        leaves = (
            ArgumentLeaf(_name(slot), path, _slot_value(slot), slot, _aliases(slot, path))
            for slot, path in rows
        )
        return Arguments(args, {}, tuple(leaves))
    state = {slot.leaf for slot in slots if slot.state is not None} | _same_tensors(words, slots)
    return _arguments_given(words, users, state, subject)


def _same_tensors(words: GraphWords, slots: Sequence[Slot]) -> set[int | None]:
    """The positions of arguments that are the model's own tensors."""
    held = {id(slot.state.tensor) for slot in slots if slot.state is not None}
    return {at for at, leaf in enumerate(words.leaves) if id(leaf) in held}


def _arguments_given(
    words: GraphWords, users: Mapping[int | None, Slot], state: set[int | None], subject: Subject
) -> Arguments:
    counted = iter(range(len(words.leaves)))
    args: list[Any] = []
    kept: list[int] = []
    for argument in words.args or ():
        positions = [next(counted) for _ in tree_flatten(argument)[0]]
        own = [at for at in positions if at not in state]
        is_whole = len(own) == len(positions) and bool(positions or not state)
        args += [argument] if is_whole else [words.leaves[at] for at in own]
        kept += own
    kwargs: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, argument in (words.kwargs or {}).items():
        positions = [next(counted) for _ in tree_flatten(argument)[0]]
        own = [at for at in positions if at not in state]
        kept += own
        if own and len(own) < len(positions):
            what = f"kwargs[{name!r}] holds state of the model and other values"
            faults.append(Fault(what, remedy="pass them apart, or name the inputs with inputs=[...]"))
        if own:
            kwargs[name] = argument
    is_call = len(args) == len(words.args or ()) and subject.is_module and subject.parameters is not None
    fits = is_call and not binding_faults(subject.parameters, args, kwargs)  # type: ignore[arg-type]
    parameters = subject.parameters if fits else None
    names = names_of(tuple(args), kwargs, parameters)
    paths = paths_of(tuple(args), kwargs)
    rows = zip(names, paths, kept, strict=True) if not faults else ()
    leaves = tuple(_argument_leaf(name, path, words.leaves[at], users.get(at)) for name, path, at in rows)
    return Arguments(tuple(args), kwargs, leaves, parameters, tuple(faults))


def _argument_leaf(name: str, path: str, held: Any, slot: Slot | None) -> ArgumentLeaf:
    value = held if slot is None else _slot_value(slot, held)
    return ArgumentLeaf(name, path, value, slot, () if slot is None else _aliases(slot, path))


def _slot_value(slot: Slot, held: Any = None) -> Any:
    return slot.node.meta.get("val", held)


def _aliases(slot: Slot, path: str) -> tuple[str, ...]:
    return () if slot.path == path else (slot.path,)


def _name(slot: Slot) -> str:
    """The word that was said, or the name that the graph has."""
    word = slot.path if slot.path.isidentifier() else str(slot.node.target)
    return re.sub(r"\W", "_", word)


def open_sizes(ready: fx.GraphModule, leaves: Sequence[ArgumentLeaf]) -> tuple[Sizes | None, list[Fault]]:
    """The sizes that vary, with all that was assumed of them; None where none does. Faults say what fails."""
    placeholders = [node for node in ready.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in placeholders]
    if not any(is_symbolic(size) for value in values for size in sizes_in(value)):
        return None, []
    sizes = sizes_of([leaf.value for leaf in leaves], [leaf.path for leaf in leaves])
    known = {reading.name: reading.dimension for reading in sizes.readings}
    assumed = assumed_of(values)
    faults = list(_argument_faults(placeholders, assumed, known))
    if faults:
        return None, faults
    return replace(sizes, rules=(*sizes.rules, *_rules(assumed, known))), []


def _argument_faults(
    placeholders: Sequence[fx.Node], assumed: Assumed, known: dict[str, Dimension]
) -> Iterator[Fault]:
    for node in placeholders:
        if unknown := sorted(names_of_sizes(node.meta.get("val")) - set(known)):
            yield Fault(
                f"{node.name} has the size {unknown[0]}, which is the size of no argument", remedy=_FIXED
            )
    for condition, names in assumed.conditions:
        if not names <= set(known):
            yield Fault(
                f"the graph holds where {condition}, of sizes that are not those of arguments", remedy=_FIXED
            )
    if assumed.of_data:
        yield Fault("sizes in the graph depend on the values of tensors", remedy=_FIXED)


def _rules(assumed: Assumed, known: dict[str, Dimension]) -> Iterator[SizeRule]:
    for name, low, high in assumed.limits:
        if name in known:
            yield from bounds(known[name], name, (low, high), Asker())
    for condition, names in assumed.conditions:
        dimensions = tuple(known[name] for name in sorted(names))
        yield SizeRule(dimensions, condition, relation(condition), Asker())
