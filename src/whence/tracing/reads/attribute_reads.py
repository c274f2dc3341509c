"""Which attributes the model reads while it runs: what the capture depends on."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from itertools import chain
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Protocol

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from whence._torch.observe.attribute_reads import (
    NOTHING,
    TABLES,
    ReadListener,
    ReadObserver,
    class_attribute,
    has_attributes,
    is_observable,
    own_attributes,
)
from whence._torch.observe.hooks import HOOK_KINDS
from whence._torch.observe.scripted import is_script_object
from whence._torch.plain_values import PLAIN
from whence._torch.refusals import object_used, sparse_read
from whence._torch.tensor_questions import put_after_looking
from whence._torch.tensors import attributes_set_on
from whence.dependence.code import behind, function_in
from whence.dependence.describe import entries_of
from whence.dependence.lookup import static_attribute
from whence.dependence.observed import Change, Left, Observed, Read
from whence.dependence.snapshots import ATTRIBUTES, CACHED, CONTAINER, CONTAINERS, Saved, containers_saved
from whence.errors import Place
from whence.program.arguments.optimizer_arguments import Outside
from whence.provenance import ModulePath, Source
from whence.tracing.reads.held_values import implied_methods
from whence.tracing.reads.kept_changes import ContainerSnapshot
from whence.tracing.reads.nondeterminism import ImpureCalls
from whence.tracing.reads.outside.running_code import RunningFunction
from whence.tracing.reads.reachable import Reachable
from whence.tracing.reads.type_queries import StandIn
from whence.tracing.sandbox.leftovers import Named, RunValues, StandIns, left_behind, refuse_drawn, with_put
from whence.tracing.sandbox.module_snapshot import Lines, ModuleCopy, changes_reported, object_kept
from whence.tracing.target.placeholders import Prepared
from whence.tracing.target.subject import StateTensor, Subject, left_out

_ATOMS = (*(*PLAIN, Tensor, type), *(date, time, timedelta, Decimal, Fraction, PurePath, ModuleType))
_KEPT = (*PLAIN, FunctionType, MethodType, BuiltinFunctionType)
_LEADING_NOWHERE = PLAIN | {FunctionType, nn.Parameter}
_CONTAINERS = (list, tuple, set, frozenset, deque, dict, SimpleNamespace, MappingProxyType)

_OF_STEPS = (LRScheduler, GradScaler)

Reader = tuple[ModulePath | None, Source | None]
"""Who reads: the module that runs, and the user's line."""


def _is_held(read: Read) -> bool:
    held = own_attributes(read.holder)
    for name in TABLES:
        if (table := held.get(name)) and table.get(read.name) is read.value:
            return True
    if static_attribute(read.holder, read.name) is read.value:
        return True
    return any(base.__dict__.get(read.name) is read.value for base in type(read.holder).__mro__)


def _was_filled(found: Outside) -> bool:
    """Whether the run itself put it there: a cache that was given back as it was, and is filled again."""
    return found.value is not NOTHING and found.now() is NOTHING


def _contents(held: Any) -> Iterator[Any]:
    entries = entries_of(held)
    yield from held if entries is None else entries.values()


def tensor_attributes(state: Iterable[StateTensor]) -> list[Saved]:
    """What somebody has put on the model's tensors, with what containers among that hold."""
    rows = [(str(row.paths[0]), row.tensor) for row in state]
    found = [Saved(path, tensor, ATTRIBUTES, dict(own_attributes(tensor))) for path, tensor in rows]
    put = ((path, name, value) for path, tensor in rows for name, value in attributes_set_on(tensor).items())
    inside = [(f"{path}.{name}", value) for path, name, value in put if isinstance(value, CONTAINERS)]
    return [*found, *containers_saved(inside, keyed=True)]


def changed_arguments(prepared: Prepared) -> Iterator[Change]:
    """What the run looked for on an argument, and then put there: a call with the same one finds it."""
    pairs = {id(twin): (twin, given) for twin, given in zip(prepared.leaves, prepared.originals, strict=True)}
    for twin, given in pairs.values():
        for name, value in put_after_looking(twin):
            yield Change(given, name, value)


class RestListener(ReadListener, Protocol):
    """What is told of the rest that a step reads."""

    def began(self, running: RunningFunction, frame: FrameType) -> bool:
        """A function of the user's runs to which no method of the model leads; says if once is enough."""

    def reached(self, path: ModulePath, thing: object) -> None:
        """An object is met that the model holds; the listener gives it back as it was."""


class Reads:
    """Notes first reads of modules, and of the objects that modules hold."""

    def __init__(
        self,
        subject: Subject,
        lines: Lines,
        place: Callable[[], Reader],
        is_user: Callable[[CodeType], bool],
        sources: ImpureCalls,
    ) -> None:
        self.observer = ReadObserver(self)
        self.reachable = Reachable(is_user, self.is_watched, sources, self.observer.observe_class_of)
        self._subject = subject
        self._lines = lines
        self._place = place
        self._modules = tuple(subject.named_modules())
        self._known = {id(module) for _, module in self._modules}
        self._left_out = {id(tensor): path for path, tensor in left_out(subject)}
        self._objects: list[object] = []
        self.kept: list[ModuleCopy] = []
        self._rows: list[Read] = []
        self._before = ContainerSnapshot({id(module): module for _, module in self._modules}.values())
        self._left = Left()
        self._variables: tuple[tuple[Outside, Source | None], ...] = ()
        self._noted: set[tuple[int, str]] = set()
        self._ran: list[Read] = []
        self.watchers: list[Callable[[Read], None]] = []
        self.passed_over: set[int] = set()
        self.spelled: set[str] = set()
        self._outside: RestListener | None = None

    @contextmanager
    def watched(self, watcher: Callable[[Read], None]) -> Iterator[None]:
        """Tell `watcher` of every read inside the block, whether or not it was the first of its kind."""
        self.watchers.append(watcher)
        try:
            with self.observer.anew():
                yield
        finally:
            self.watchers.remove(watcher)

    def is_watched(self, thing: object) -> bool:
        """Whether the attributes of a thing are seen being read, or nobody may read it."""
        return id(thing) in self._known or issubclass(type(thing), StandIn)

    def repeat(self, reads: Iterable[Read]) -> None:
        """Note reads that a call would have made that was not run."""
        known = self._known
        for read in reads:
            value = read.value
            if self._note(read) and type(value) not in _LEADING_NOWHERE and id(value) not in known:
                self._follow(value, (read.module or ModulePath()).child(read.name))

    @contextmanager
    def active(
        self,
        prepared: Prepared,
        values: RunValues,
        line_of: Callable[[Tensor], str | None],
        outside: RestListener | None,
    ) -> Iterator[None]:
        """Note reads while the block runs; objects that modules hold are given back as they were.

        `outside` is told of all, also of objects that the model does not hold. `values` knows the tensors of
        the run, and `line_of` which line made one. `prepared` is what the call is given.
        """
        self._outside = outside
        self.reachable.step_follows = None if outside is None else outside.began
        with (
            changes_reported(self.kept, self._lines, line_of, of_objects=True),
            self.observer.active(module for _, module in self._modules),
        ):
            try:
                self._follow_hooks()
                self._follow_attributes(tensor_attributes(self._subject.state))
                yield
                self._variables = tuple(self.reachable.variables())
                refuse_drawn((row for row in self.reachable.saved if row.kind is CACHED), values)
                put = self._before.put()
                changes = (*self._before.changes(self._ran), *changed_arguments(prepared))
                self._left = with_put(self._left_behind(changes, prepared, values), put, values)
            finally:
                self._known.clear()
                self._ran.clear()
                self._outside = None

    def read(self, holder: object, name: str, value: object) -> bool:
        """An attribute of the model was read; what it holds is watched from now on."""
        is_outside = self._outside is not None and self._outside.read(holder, name, value)
        if id(holder) not in self._known or issubclass(type(value), StandIn):
            return is_outside or self.reachable.read(holder, name, self._place)
        read = Read(holder, name, value, True, *self._place())
        if is_script_object(value):
            source = None if read.source is None else str(read.source)
            raise object_used(f"forward reads {name},", value, Place(str(read.module or ""), source))
        if isinstance(value, Tensor):
            self.refuse_left_out(value)
        if self._note(read):
            self._ran.append(read)
            self._before.keep(holder, name, value)
        if name == "__dict__":
            self._read_by_text(holder)
        if type(value) in (
            FunctionType,
            MethodType,
        ):  # it will be called, and may use things outside of the model
            self.reachable.code_of(value)
        function = function_in(class_attribute(type(holder), name))
        if function is not None and not (type(value) is MethodType and value.__func__ is function):
            self.reachable.code_of(function)  # which computes it
        if type(value) not in PLAIN and not isinstance(value, Tensor):
            self.reachable.held_under(type(holder), value, name)
        is_made = id(value) not in self._known and self._before.has_got(holder, name, value)
        is_held = static_attribute(holder, name) is value and not is_made
        self._follow(value, (read.module or ModulePath()).child(name), is_held=is_held)
        if is_made and id(value) in self._known:
            self._before.passes_over(value)
        return True

    def refuse_left_out(self, value: Tensor) -> None:
        """Raise `UnsupportedInput` for a sparse tensor of a module's, which is no input of a program."""
        if (path := self._left_out.get(id(value))) is not None:
            module, source = self._place()
            where = Place(str(module or ""), None if source is None else str(source))
            raise sparse_read(str(path), value, where)

    def _read_by_text(self, holder: object) -> None:
        """Code has all attributes of a thing: those are noted of which it has the name as text."""
        held = own_attributes(holder)
        elsewhere = {*TABLES, *(key for table in TABLES for key in held.get(table, ()))}
        for name in sorted(self.reachable.texts):
            if name in held:
                self.read(holder, name, held[name])
            elif name not in elsewhere and static_attribute(holder, name) is NOTHING:
                self.missing(holder, name)

    def missing(self, holder: object, name: str) -> bool:
        """An attribute was looked for that the model does not have."""
        is_outside = self._outside is not None and self._outside.missing(holder, name)
        if id(holder) not in self._known:
            return is_outside or self.reachable.read(holder, name, self._place)
        read = Read(holder, name, None, False, *self._place())
        if self._note(read):
            self._ran.append(read)
        return True

    def _note(self, read: Read) -> bool:
        """Write a read down, and say whether it is the first of its kind."""
        for watcher in self.watchers:
            watcher(read)
        key = (id(read.holder), read.name)
        if key in self._noted:
            return False
        self._noted.add(key)
        self._rows.append(read)
        return True

    def observed(self, around: Iterable[object] = ()) -> Observed:
        """Everything noted, once the model is as it was; of the run itself nothing is held any longer.

        `around` is what a step named outside of the model.
        """
        subject, rows = self._subject, tuple(map(self._settled, self._rows))
        self._rows.clear()
        objects, left = tuple(self._objects), self._left
        self._left = Left()
        named = frozenset(self.reachable.names)
        variables = tuple(row for row in self._variables if not _was_filled(row[0]))
        values = chain((row.value for row, _ in variables), around)
        replaced = self.reachable.called.guarded_rows(named | self.spelled, values)
        variables += tuple((row, None) for row in replaced)
        self._variables = ()
        held = (subject.call, subject.roots, self._modules, objects, rows, left, variables)
        return Observed(*held, named, named | self.spelled)

    def _settled(self, read: Read) -> Read:
        """A read without what the run made: what the holder holds, and what its class answers, stays."""
        is_kept = not read.is_there or issubclass(type(read.value), _KEPT) or _is_held(read)
        if is_kept and not self._before.was_written(read):
            return read
        return read._replace(value=None, is_held=False)

    def _left_behind(self, changes: Sequence[Change], prepared: Prepared, values: RunValues) -> Left:
        rows = zip(prepared.originals, prepared.nodes, strict=True)
        paths = {id(given): ModulePath((node.name,)) for given, node in rows}
        for path, module in self._modules:
            paths.setdefault(id(module), path)
        paths |= {id(kept.module): kept.path for kept in self.kept}

        def named(row: Change | Saved) -> Named:
            if isinstance(row, Saved):
                return " and ".join(row.changed_names()), self.reachable.line_of(row)
            path = paths.get(id(row.holder), ModulePath())
            name = row.entry or row.name
            return str(path.child(name)), self._lines.attributes.get((id(row.holder), name))

        return left_behind(changes, self.reachable.changed(), named, StandIns(values))

    def _follow_attributes(self, of_tensors: Sequence[Saved]) -> None:
        self.reachable.saved += of_tensors
        for row in (row for row in of_tensors if row.kind is ATTRIBUTES):
            for name, value in row.before.items():
                self._follow(value, ModulePath((row.path, name)))

    def _follow_hooks(self) -> None:
        for path, module in self._modules:
            held = own_attributes(module)
            for table in HOOK_KINDS if any(map(held.get, HOOK_KINDS)) else ():
                for hook in list(held.get(table, {}).values()):
                    self._follow(hook, path)

    def _follow(self, value: Any, path: ModulePath, *, is_held: bool = True) -> None:
        """Watch what is found in a value; one that is not held was computed for who asked."""
        waiting, inside = [value], set[int]()
        while waiting:
            found = waiting.pop()
            kind = type(found)  # `isinstance` would ask the thing itself for its class
            if is_held and issubclass(kind, type):
                self.reachable.class_held(found, path, self._place)
            if issubclass(kind, Enum):
                self.reachable.held(found, path, self._place)
            elif id(found) in inside or self._is_left(found):
                continue
            elif issubclass(kind, _CONTAINERS):
                inside.add(id(found))
                if is_held or kind is SimpleNamespace:
                    self._own_attributes(found, path)
                waiting += _contents(found)
            elif kind is MethodType:
                waiting.append(found.__self__)
            elif kind is partial:
                waiting += behind(found)
            elif issubclass(kind, nn.Module) or self.observer.observe_class_of(found):
                self._watch(found, path)
            elif kind is FunctionType:
                self.reachable.code_of(found)
            elif kind is BuiltinFunctionType and not self.reachable.sources.held(found):
                waiting.append(found.__self__)
            elif is_held:
                self.reachable.held(found, path, self._place)

    def _watch(self, found: object, path: ModulePath) -> None:
        """What is read of an object is noted from now on, and what code may call of it is looked at."""
        self._known.add(id(found))
        self._objects.append(found)
        self._before.begin(found)
        if self._outside is not None and not isinstance(found, nn.Module):
            self._outside.reached(path, found)
        elif has_attributes(found):
            self.kept.append(object_kept(path, found))
        self.reachable.held(found, path, self._place, but=ATTRIBUTES)
        for method in implied_methods(type(found)):
            self.reachable.code_of(method)

    def _is_left(self, found: object) -> bool:
        """Whether a thing is watched already, leads nowhere, or is one at which a step looks by itself."""
        kind = type(found)
        if issubclass(kind, (*_ATOMS, StandIn)) or id(found) in self._known or id(found) in self.passed_over:
            return True
        return self._outside is not None and issubclass(kind, _OF_STEPS) and not is_observable(kind)

    def _own_attributes(self, held: Any, path: ModulePath) -> None:
        """A container of a class of the user's may have attributes beside what it contains."""
        if self._outside is not None and type(held) is SimpleNamespace:
            self._outside.reached(path, held)
        elif type(held).__module__ != "builtins" and own_attributes(held):
            self.reachable.held(held, path, self._place, but=CONTAINER)
