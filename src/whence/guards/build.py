"""What was read while a model ran becomes guards."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from whence._torch.observe.wrappers import seen_through, wrapper_chain
from whence._torch.patching import without_patches
from whence._torch.plain_values import PLAIN
from whence._torch.subclasses.fully_sharded import class_as_written, managed_parameters
from whence.dependence.describe import Describer, described_hooks, hook_rows, reference
from whence.dependence.lookup import NOTHING, class_attribute, is_of_module
from whence.dependence.observed import Observed, Read
from whence.dependence.values import is_constant
from whence.guards.inputs import input_guards
from whence.guards.switches import mode_guards
from whence.guards.unguarded import unguarded
from whence.program import FlatProgram
from whence.program.arguments.optimizer_arguments import Outside
from whence.program.guards.expectations import (
    ExpectedConstant,
    ExpectedHolder,
    ExpectedNames,
    ExpectedWords,
    Missing,
)
from whence.program.guards.guards import Guards
from whence.program.guards.rows import Guard, Holder
from whence.program.queries.memory_order import in_any_layout
from whence.provenance import ModulePath, Source
from whence.schema import GuardKind


class Located(NamedTuple):
    """A live module or object with its row; of a module, its other paths and what wraps it."""

    thing: object
    holder: Holder
    aliases: tuple[str, ...] = ()
    wrappers: tuple[nn.Module, ...] = ()

    def spelled(self, name: str) -> str:
        """An attribute of it, as the model's author would write it."""
        return f"{self.holder.path}.{name}" if self.holder.path else name


def located(observed: Observed) -> list[Located]:
    """Modules that were read and those above them, parents first; then objects in the order they were met."""
    modules = _modules(observed)
    paths = {id(row.thing): row.holder.path for row in modules}
    spelled = _object_paths(observed, paths)
    objects = [
        Located(
            thing,
            Holder(number, spelled[id(thing)], class_as_written(type(thing)), isinstance(thing, nn.Module)),
        )
        for number, thing in enumerate(observed.objects, len(modules))
    ]
    return [*modules, *objects]


def _modules(observed: Observed) -> list[Located]:
    wanted = _wanted_paths(observed)
    roots = {path: position for position, (path, _) in enumerate(observed.roots)}
    rows: dict[int, Located] = {}
    numbers: dict[ModulePath, int] = {}
    modules = dict(observed.modules)
    for path, module in observed.modules:
        if path not in wanted:
            continue
        parent = path.parent
        above = numbers.get(parent) if path else None
        names = () if above is None else ((above, path.name),)
        known = rows.get(id(module))
        if known is None:
            holder = Holder(
                len(rows), str(path), class_as_written(type(module)), True, names, roots.get(path)
            )
            rows[id(module)] = Located(
                module, holder, wrappers=_wrappers_between(path, module, modules.get(parent))
            )
        else:
            holder = known.holder._replace(names=(*known.holder.names, *names))
            aliases = (*known.aliases, str(path)) if names else known.aliases
            rows[id(module)] = known._replace(holder=holder, aliases=aliases)
        numbers[path] = rows[id(module)].holder.number
    return list(rows.values())


def _wrappers_between(path: ModulePath, module: nn.Module, parent: nn.Module | None) -> tuple[nn.Module, ...]:
    """What a module is seen through where its parent holds it."""
    held = None if parent is None or not path else parent._modules.get(path.name)
    return () if held is None or held is module else wrapper_chain(held)


def _wanted_paths(observed: Observed) -> set[ModulePath]:
    """The paths of modules that were read or found by a read, and all paths above them."""
    met = {id(read.holder) for read in observed.reads}
    met |= {id(read.value) for read in observed.reads if issubclass(type(read.value), nn.Module)}
    tables = (read.value for read in observed.reads if read.name == "_modules")
    met |= {id(child) for table in tables if isinstance(table, dict) for child in table.values()}
    wanted: set[ModulePath] = {path for path, _ in observed.roots}
    above: ModulePath | None = None
    for path, module in reversed(observed.modules):  # children come after their parents
        if id(module) in met and path.parent != above:
            wanted.update(path.prefixes())
            above = path.parent
        elif id(module) in met:
            wanted.add(path)
    return wanted


def _object_paths(observed: Observed, paths: dict[int, str]) -> dict[int, str]:
    """How each object was reached first: through an attribute, or inside a container that one holds."""
    wanted = {id(thing) for thing in observed.objects}
    found: dict[int, str] = {}
    known = dict(paths)
    for read in observed.reads if wanted else ():
        if id(read.value) not in wanted and not isinstance(read.value, dict | list | tuple):
            continue
        above = known.get(id(read.holder), "")
        spelled = f"{above}.{read.name}" if above else read.name
        for path, value in _items_inside(read.value, spelled):
            if id(value) in wanted and id(value) not in found:
                found[id(value)] = known[id(value)] = path
    return {identity: found.get(identity, "an object") for identity in wanted}


def _items_inside(value: object, path: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    yield path, value
    if depth > 10 or not isinstance(value, dict | list | tuple):
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        yield from _items_inside(item, f"{path}[{key!r}]", depth + 1)


CALL = "forward"
"""Module's machinery looks this name up in every call: a module that was asked for it was called."""

STRUCTURES = {"_modules": "submodules", "_parameters": "parameters", "_buffers": "buffers"}

_TABLES = {"_parameters": GuardKind.PARAMETER, "_buffers": GuardKind.BUFFER, "_modules": GuardKind.SUBMODULE}

_NO_TENSORS = PLAIN | {dict, OrderedDict, set}
"""What most attributes of modules are."""

_COVERED = ("__dict__", CALL, "training")
"""What is guarded of a module that was called, whatever was read of it."""

_RECORDED = "its code is what was recorded"
_TENSOR = "the operations were recorded for a tensor like this"
_DECIDED = "the model read it, and what it decided is part of the program"
_REASONS = {GuardKind.CODE: _RECORDED, GuardKind.ATTRIBUTE: _DECIDED, GuardKind.SUBMODULE: _DECIDED}
_WITHOUT = "the model asked for it, and went on without"
_ONE_STATE = "they are one module, with one state"
_MODE = "the mode decides what a module does"
_HOOKED = "hooks run inside the call, and what they did is part of the program"
_IN_ORDER = "the model went through them in this order"


def guards_of(program: FlatProgram, observed: Observed, made: Sequence[Tensor] = ()) -> Guards:
    """The guards of one capture; the model must be as it was when the capture began.

    `made` are tensors that stand for what a run makes.
    """
    things = located(observed)
    numbers = {id(row.thing): row.holder.number for row in things}
    lasting = {**managed_parameters(module for _, module in observed.modules), **observed.there}
    registered = _registered_tensors(observed) | set(map(id, made))
    laid_out = _tensors_laid_out(program)
    describer = Describer(numbers, lasting, registered, observed.spelled, laid_out, observed.places)
    builder = _Builder(describer, frozenset(map(id, observed.objects)))
    reads: dict[int, list[Read]] = {}
    for read in observed.reads:
        reads.setdefault(id(read.holder), []).append(read)
    variables = [_variable(builder.describer, *row) for row in observed.variables]
    for row in things:
        builder.about(row, reads.get(id(row.thing), ()))
    return Guards(
        rows=(
            *_callable(builder, observed),
            *builder.rows,
            *variables,
            *input_guards(program, observed.named),
            *mode_guards(program, observed.spelled),
        ),
        holders=tuple(row.holder for row in things),
        unguarded=unguarded(program, observed, [*builder.rows, *variables]),
        of=reference(observed.roots[0][1] if observed.roots else observed.call),
        changes=_names_changed(things, observed),
        variables=tuple(found for found, _ in observed.variables),
        spelled=observed.spelled,
        any_layout=builder.describer.numbers_of(_tensors_in_any_layout(program)),
    )


def _variable(describer: Describer, found: Outside, source: Source | None) -> Guard:
    describe = describer.thing if found.is_thing else describer.describe
    expected = Missing() if found.value is NOTHING else describe(without_patches(found.value))
    return Guard(GuardKind.VARIABLE, found.path, expected, _DECIDED, found.path, source=source)


def _tensors_laid_out(program: FlatProgram) -> set[int]:
    """The tensors that have to lie in memory as they did."""
    looks = program.convention.reads_memory
    strided = {row.name for row in program.signature.state if looks or row.layout_read}
    return {id(held) for name, held in program.state.items() if looks or name in strided}


def _tensors_in_any_layout(program: FlatProgram) -> set[int]:
    """The tensors that the program takes as they lie."""
    free = in_any_layout(program)
    return {id(held) for name, held in program.state.items() if name in free}


def _registered_tensors(observed: Observed) -> set[int]:
    """Tensors that modules of the hierarchy hold under a name: a program can be given others there."""
    tables = [
        table
        for _, module in observed.modules
        for table in (module._parameters, module._buffers, vars(module))
    ]
    held = (value for table in tables for value in table.values() if type(value) not in _NO_TENSORS)
    return {id(value) for value in held if issubclass(type(value), Tensor)}


def _names_changed(things: Sequence[Located], observed: Observed) -> tuple[str, ...]:
    spelled = {id(row.thing): row for row in things}
    names = [
        spelled[id(change.holder)].spelled(change.name)
        for change in observed.left.changes
        if id(change.holder) in spelled
    ]
    around = (name for row in observed.left.outer for name in row.changed_names(but_copies=True))
    return tuple(dict.fromkeys((*names, *around)))


def _callable(builder: "_Builder", observed: Observed) -> Iterator[Guard]:
    if isinstance(observed.call, nn.Module):
        return
    expected = builder.describer.describe(observed.call)
    name = getattr(observed.call, "__qualname__", type(observed.call).__name__)
    yield Guard(GuardKind.CALLABLE, name, expected, "this is what was captured")


@dataclass
class _Builder:
    """Writes the guards of one holder after another."""

    describer: Describer
    objects: frozenset[int]
    rows: list[Guard] = field(default_factory=list)
    _classes: set[tuple[type, str]] = field(default_factory=set)

    def about(self, row: Located, reads: Sequence[Read]) -> None:
        """Add what was read of one thing."""
        if isinstance(row.thing, nn.Module):
            self._module(row, row.thing, reads)
            return
        for read in reads:
            self._of_object(row, read)

    def _module(self, row: Located, module: nn.Module, reads: Sequence[Read]) -> None:
        first = next((read for read in reads if read.name == CALL), reads[0] if reads else None)
        was_called = first is not None and first.name == CALL
        self._class_of(row, first)
        for alias in row.aliases:
            what, expected = f"{row.holder.path} and {alias}", ExpectedWords("one module")
            self.rows.append(Guard(GuardKind.ALIASING, what, expected, _ONE_STATE, "", *_placed(row, first)))
        if first is not None and was_called:
            self._called(row, module, first)
        covered, begins = _COVERED if was_called else ("__dict__",), len(self.rows)
        for read in reads:
            if read.name not in covered:
                self._of_module(row, module, read)
        if any(read.name in STRUCTURES for read in reads):  # gone through, and asked for by name
            unique = {(guard.kind, guard.what): guard for guard in reversed(self.rows[begins:])}
            self.rows[begins:] = reversed(unique.values())

    def _class_of(self, row: Located, read: Read | None) -> None:
        holder = row.holder
        kind = GuardKind.SUBMODULE if holder.names else GuardKind.CLASS
        expected = ExpectedHolder(holder.number, holder.type)
        self.rows.append(
            Guard(kind, holder.path or "the model", expected, _RECORDED, "", *_placed(row, read))
        )

    def _called(self, row: Located, module: nn.Module, read: Read) -> None:
        self._code(row, module, read)
        placed, path = _placed(row, read), row.holder.path
        mode, what = ExpectedConstant(module.training), row.spelled("training")
        hooks = described_hooks(hook_rows(module, row.wrappers), self.describer)
        self.rows += (
            Guard(GuardKind.TRAINING, what, mode, _MODE, "training", *placed),
            Guard(GuardKind.HOOKS, f"hooks of {path or 'the model'}", hooks, _HOOKED, "hooks", *placed),
        )

    def _code(self, row: Located, module: nn.Module, read: Read) -> None:
        kind = row.holder.type
        is_known = (kind, "__call__") in self._classes
        if CALL in vars(module):
            self._found(GuardKind.CODE, row, read, vars(module)[CALL])
        else:
            self._of_class(row, read, CALL)
        if is_known:
            return
        self._of_class(row, read, "__call__")
        for base in kind.__mro__[1:]:  # super().forward() looks on classes, where none sees it
            if CALL in vars(base) and base is not nn.Module:
                self._of_class(row, read, CALL, base)

    def _of_module(self, row: Located, module: nn.Module, read: Read) -> None:
        held, name = vars(module), read.name
        if name in STRUCTURES:
            self._structure(row, read, held[name])
        elif not read.is_there:
            self._absent(row, read)
        elif name in held:
            if read.is_held and held[name] is read.value:  # otherwise the run itself wrote it first
                self._found(_kind_of(read.value), row, read, read.value)
        elif (table := _table_of(held, name)) is not None:
            self._member(row, read, table, held[table][name])
        else:
            self._of_class(row, read, name)

    def _structure(self, row: Located, read: Read, table: Mapping[str, Any]) -> None:
        """A table that was gone through, with the tensors in it; modules have guards of their own."""
        what = f"{STRUCTURES[read.name]} of {row.holder.path or 'the model'}"
        expected = ExpectedNames(tuple(table))
        self.rows.append(
            Guard(GuardKind.STRUCTURE, what, expected, _IN_ORDER, read.name, *_placed(row, read))
        )
        for name, value in table.items():
            self._member(row, read._replace(name=name), read.name, value)

    def _member(self, row: Located, read: Read, table: str, value: Any) -> None:
        """A tensor or a module that a module holds; those of the hierarchy have their own guards,
        whatever wraps them."""
        is_module = table == "_modules" and value is not None
        if not is_module or (id(value) in self.objects and seen_through(value) is value):
            self._found(_TABLES[table], row, read, value)

    def _of_class(self, row: Located, read: Read, name: str, base: type | None = None) -> None:
        """An attribute that the class (or a base of it) has, guarded once for all instances."""
        kind = base or row.holder.type
        if (kind, name) in self._classes:
            return
        self._classes.add((kind, name))
        found = without_patches(class_attribute(kind, name))  # of captures in other threads
        if found is NOTHING or _is_machinery(kind, name):
            return
        is_data = is_constant(found) or isinstance(found, Tensor | list | tuple | dict | set)
        what, reason = f"{kind.__name__}.{name}", _DECIDED if is_data else _RECORDED
        what_kind = GuardKind.ATTRIBUTE if is_data else GuardKind.CODE
        expected = self.describer.describe(found)
        _, _, module, source = _placed(row, read)
        self.rows.append(Guard(what_kind, what, expected, reason, name, None, kind, module, source))

    def _of_object(self, row: Located, read: Read) -> None:
        if not read.is_there:
            self._absent(row, read)
        elif read.is_held and not _is_property(row.holder.type, read.name) and not read.name.startswith("__"):
            self._found(_kind_of(read.value), row, read, read.value)

    def _absent(self, row: Located, read: Read) -> None:
        what = row.spelled(read.name)
        self.rows.append(
            Guard(GuardKind.ATTRIBUTE, what, Missing(), _WITHOUT, read.name, *_placed(row, read))
        )

    def _found(self, kind: GuardKind, row: Located, read: Read, value: Any) -> None:
        expected = self.describer.describe(value)
        reason = _REASONS.get(kind, _TENSOR)
        what = row.spelled(read.name)
        self.rows.append(Guard(kind, what, expected, reason, read.name, *_placed(row, read)))


def _table_of(held: Mapping[str, Any], name: str) -> str | None:
    for table in _TABLES:
        if name in held[table]:
            return table
    return None


def _placed(row: Located, read: Read | None) -> tuple[int, type, ModulePath | None, Source | None]:
    """Who holds what a guard is about, and who read it: the last of its fields."""
    if read is None:
        return row.holder.number, row.holder.type, None, None
    return row.holder.number, row.holder.type, read.module, read.source


def _kind_of(value: object) -> GuardKind:
    return GuardKind.TENSOR if issubclass(type(value), Tensor) else GuardKind.ATTRIBUTE


def _is_machinery(kind: type, name: str) -> bool:
    """Whether a name leads to Module's own methods, which nobody replaces."""
    return (
        name not in ("forward", "__call__")
        and is_of_module(name)
        and (class_attribute(kind, name) is class_attribute(nn.Module, name))
    )


def _is_property(kind: type, name: str) -> bool:
    """Whether a name is computed by code that reads other attributes, which are guarded themselves."""
    return isinstance(class_attribute(kind, name), property)
