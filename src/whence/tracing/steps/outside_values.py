"""What a step reads outside of itself: constants of its program, which are guarded as those of a model are.

What the code of functions names is walked as for models. Which attributes it reads of a trainer, or of what
that holds, is seen while it runs. Of a container all entries count.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from enum import Enum
from functools import cached_property, partial
from logging import Logger
from numbers import Number
from operator import attrgetter, itemgetter
from types import (
    BuiltinFunctionType,
    FrameType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from whence._torch.fakes import FakeTensor
from whence._torch.files import is_installed, is_library
from whence._torch.observe.attribute_reads import NOTHING, class_attribute, is_observable, own_attributes
from whence._torch.observe.training_steps import (
    is_around_another,
    is_own_value,
    members_of,
    methods_of,
    with_inner,
)
from whence._torch.plain_values import PLAIN, PLAIN_IN_WHOLE
from whence._torch.sizes.numbers import is_recorded
from whence.dependence.code import (
    APART,
    OF_ENVIRONMENT,
    codes_in,
    function_in,
    globals_within,
    names_in,
    tells_apart,
)
from whence.dependence.snapshots import CONTAINERS, is_iterator, spelled_key
from whence.dependence.values import is_solid
from whence.errors import Place, UnsupportedStep
from whence.program.arguments.optimizer_arguments import Outside
from whence.provenance import ModulePath, Source
from whence.tracing.reads.code_words import NO_WORDS, CodeWords
from whence.tracing.reads.held_values import (
    Step,
    asks_as_pythons,
    attribute_of,
    items_of,
    methods_called,
    of_class,
    of_module,
    spelled_in,
    value_at,
    values_held,
)
from whence.tracing.reads.named_values import FAR, NamedValues, beginning
from whence.tracing.reads.outside.running_code import RunningFunction
from whence.tracing.steps.enclosed_state import (
    Enclosed,
    functions_of,
    is_looked_at_whole,
    owners_of,
    refuse_changed,
    wrappers_of,
)
from whence.tracing.steps.host.host_run import asked_of_schedule
from whence.tracing.steps.host.stand_ins import is_stand_in
from whence.tracing.steps.optimizer import Optimizing
from whence.tracing.steps.optimizer import is_plain as is_compared
from whence.tracing.steps.session import StepSession

_ACTORS = (nn.Module, Optimizer, LRScheduler, GradScaler)
_LEFT = (nn.Parameter, Logger, FakeTensor)
"""What is the model's, or compared elsewhere, or decides nothing."""
_NOT_WATCHED = (
    *(*PLAIN_IN_WHOLE, Number, Enum, BuiltinFunctionType, type, partial, list, tuple, deque),
    *(FunctionType, MethodType, ModuleType, Tensor),
)
_HOLDING = (dict, MappingProxyType, list, tuple, deque)
_MOST = 10_000
"""Entries of a container that are compared; of a larger one it is how many there are."""
_ASKS_CLASS = frozenset({"type", "__class__"})
"""Names with which code looks at the class of an object."""
_WHOLE = frozenset({"__dict__", "vars"})
"""Names with which code looks at all attributes at once."""


class OutsideReads(NamedValues):
    """Notes what a step reads that is neither its own, nor an argument, nor the model's; `hooks` are
    functions that its backward calls. Of what is `found` of its optimizer a program has the state."""

    def __init__(
        self, session: StepSession, enclosed: Enclosed, found: Optimizing, hooks: Iterable[Any] = ()
    ) -> None:
        run = session.run
        super().__init__(run.places.finder.is_user, lambda _: False)
        self._enclosed = enclosed
        self._scheduling = session.step.scheduling
        self._sources = run.reads.reachable.sources
        self._observer = run.reads.observer
        self._reading = run.places.reading
        self._spelled = run.reads.spelled
        self._optimizers = {
            id(member): (way, member)
            for each in members_of(found.optimizer)
            for way, member in with_inner(each)
        }
        self._is_state = found.is_owned
        self._calls = (run.subject.call, *hooks)
        self._place = Place(None, run.subject.place.line)
        self._inside = {id(row.tensor) for row in run.subject.state}
        self._inside |= {id(module) for _, module in run.subject.named_modules()}
        self._inside |= self._optimizers.keys() | {id(each.state) for _, each in self._optimizers.values()}
        owners = {id(owner) for call in self._calls for _, owner in owners_of(call)}
        run.reads.passed_over |= self._inside | owners
        self.actors: list[Outside] = []
        self._places: dict[int, Outside] = {}
        self._kinds: dict[type, tuple[list[Outside], CodeWords]] = {}
        self._packages = {_package(function) for call in self._calls for function in functions_of(call)}

    def begin(self, inputs: Iterable[Tensor]) -> None:
        """Look at the step's variables, and watch what it belongs to, while reads are observed; `inputs` are
        no constants."""
        self._inside |= {id(tensor) for tensor in inputs}
        for call in self._calls:
            for function in (*wrappers_of(call), *functions_of(call)):
                self._follow(function)
            words = next((CodeWords.of(each.__code__) for each in functions_of(call)), NO_WORDS)
            for name, owner in owners_of(call):
                found = Outside(name, owner, (), owner)
                if isinstance(owner, nn.Module):
                    self._watch(found)
                    self._watch_actors(found)
                elif type(owner) not in PLAIN:
                    self.walk(found, None, words)
        for _, member in self._optimizers.values():
            self._observer.observe_class_of(member)
            for name in methods_of(member):
                for function in functions_of(class_attribute(type(member), name)):
                    self._follow(function)

    def began(self, running: RunningFunction, frame: FrameType) -> bool:
        """A function runs: its variables count, however code came to it, and the class that has it."""
        function, owner, name, held = running
        self.given(frame, (ModuleType, type))  # reads of others are seen
        self._follow(function)
        if owner is not None and self._is_followed(function) and not self._is_inside(owner):
            self.walk(of_class(owner, name, held), beginning(function.__code__), NO_WORDS)
        return False

    def reached(self, path: ModulePath, thing: object) -> None:
        """An object that the model holds: what the step changes there is as good as what it changes of a
        trainer, but that what no program puts there again is left out."""
        self._enclosed.reach(path, thing)

    def found(self, place: Place) -> tuple[tuple[Outside, Source | None], ...]:
        """Everything, in the order it was met; raises `UnsupportedStep` for what has changed since."""
        refuse_changed((row.found.path for row in self.rows if not row.is_unchanged), place)
        return tuple((row.found, row.source) for row in self.rows)

    def read(self, holder: object, name: str, value: object) -> bool:
        """An attribute was looked up and found; False for one of another object."""
        if id(holder) in self._optimizers:
            return self._read_of_optimizer(holder, name, value)
        at = self._places.get(id(holder))
        if at is None:
            return False
        if isinstance(holder, GradScaler) and type(value) not in PLAIN:
            return True  # its tensors are inputs, and what it keeps of optimizers it changes itself
        if self._is_written(holder, name, value):
            return True
        if _package(type(holder)) in self._packages:
            self._sources.held(value)
        _, source = self._reading()
        attribute = class_attribute(type(holder), name)
        is_computed = hasattr(type(attribute), "__get__") and type(attribute) is not MemberDescriptorType
        if name in own_attributes(holder) or not (is_computed or attribute is NOTHING):
            part = attribute_of(at, name, value)
            if isinstance(attribute, cached_property):  # which whoever asks next computes anew
                part = replace(part, way=(*at.way, attrgetter(name)))
            self.walk(part, source, NO_WORDS)
        elif is_computed:  # or by `__getattr__`: what that reads is seen
            function = function_in(attribute)
            words = NO_WORDS if function is None else CodeWords.of(function.__code__)
            own = [] if isinstance(attribute, cached_property) else [attribute_of(at, name, attribute)]
            for part in (of_class(type(holder), name, attribute), *own, *self._unseen(at, words)):
                self.walk(part, source, words)
        return True

    def _read_of_optimizer(self, member: object, name: str, value: object) -> bool:
        """What its class holds, what it began with, and what it has that is neither a setting nor state; what
        PyTorch asks for itself, code may ask for yet."""
        if self._observer.is_torch_reading:
            return False
        way, _ = self._optimizers[id(member)]
        if name in own_attributes(member):
            is_setting = is_compared(value) or not is_own_value(name)
            if name != "defaults" and (is_setting or self._is_state(".".join((*way, name)), value)):
                return True
        elif hasattr(type(attribute := class_attribute(type(member), name)), "__get__"):
            self._follow(function_in(attribute))
            return True
        _, source = self._reading()
        self.walk(attribute_of(self._optimizer(member), name, value), source, NO_WORDS)
        return True

    def _optimizer(self, member: object) -> Outside:
        """Where code finds an optimizer."""
        name = type(member).__name__
        return next((row for row in self.actors if row.value is member), Outside(name, member, (), member))

    def missing(self, holder: object, name: str) -> bool:
        """An attribute was looked for and not found; False for one of another object."""
        is_of_user = id(holder) in self._optimizers and not name.startswith("_")
        at = self._optimizer(holder) if is_of_user else self._places.get(id(holder))
        if at is not None:
            _, source = self._reading()
            self.walk(attribute_of(at, name, NOTHING), source, NO_WORDS)
        return at is not None

    def walk(self, found: Outside, source: Source | None, spelling: CodeWords, left: int = FAR) -> None:
        """Note a value, or what is in it; an object's attributes when they are read."""
        value, kind = found.value, type(found.value)  # `isinstance` would ask the thing itself for its class
        if issubclass(kind, _ACTORS):
            self.actors.append(found)
        if issubclass(kind, LRScheduler):
            self._scheduling.meet(found.path, value, partial(asked_of_schedule, self._enclosed))
        if self._is_left(found):
            return
        if _is_iterator(value):
            raise self._taken_from(found)
        if is_looked_at_whole(value) or issubclass(kind, (*CONTAINERS, SimpleNamespace, nn.Module)):
            self._enclosed.reach(found.path, value)
        if not issubclass(kind, nn.Module):
            self._watch(found)
        self._follow(function_in(value))
        if issubclass(kind, (set, frozenset, tuple)) and all(map(is_solid, value)):
            self._note(found, source)
        else:
            super().walk(found, source, spelling, left)

    # --- what counts -------------------------------------------------------------------------------------

    def _is_left(self, found: Outside) -> bool:
        value, kind = found.value, type(found.value)
        if id(value) in self._inside or issubclass(kind, _LEFT) or is_stand_in(value) or is_recorded(value):
            return True
        is_container = issubclass(kind, (dict, list, tuple, deque))  # of which each entry counts by itself
        return self._sources.is_put(value) or (not is_container and super()._is_left(found))

    def _is_default_noted(self, _value: object) -> bool:
        return True

    def _says_what_it_is(self, value: object) -> bool:
        return value is None or value is NOTHING or isinstance(value, type)

    def _is_thing(self, value: object) -> bool:
        return id(value) in self._places and not issubclass(type(value), nn.Module)

    def _key_to_enter(self, found: Outside) -> tuple[object, ...]:
        return id(found.root), found.path, len(found.way)

    def _key_to_note(self, found: Outside) -> tuple[object, ...]:
        return id(found.root), found.path

    def _parts(self, found: Outside, spelling: CodeWords) -> Iterator[Outside]:
        value, kind = found.value, type(found.value)
        if id(value) in self._places:
            yield from self._unseen(found, spelling)
        elif not issubclass(kind, _HOLDING):
            yield from values_held(found, spelling)
            yield from _held_by_torch(found)
        if issubclass(kind, _HOLDING):
            yield from _entries(found)
        elif issubclass(kind, (SimpleNamespace, BaseException)) and id(value) not in self._places:
            yield from (attribute_of(found, name, held) for name, held in own_attributes(value).items())
        elif issubclass(kind, ModuleType) and is_library(value.__name__):
            names = sorted(spelling.names & vars(value).keys())
            yield from (of_module(found, name) for name in names if type(vars(value)[name]) in PLAIN)
        elif issubclass(kind, ModuleType):
            self._enclosed.see_file(value, spelled_in(vars(value), spelling.names))

    def _unseen(self, found: Outside, spelling: CodeWords) -> Iterator[Outside]:
        """What decides of an object whose reads are seen, and is not read: methods that Python calls, what
        computes attributes, and attributes that are looked at all at once."""
        kind, own = type(found.value), own_attributes(found.value)
        methods, words = self._kinds[kind]
        yield from methods
        names = spelling.names | words.names
        for name in sorted(names):
            held = class_attribute(kind, name)
            is_computing, is_there = hasattr(type(held), "__get__"), held is not NOTHING
            if is_observable(type(held)) if is_computing else is_there and _ASKS_CLASS & names:
                yield of_class(kind, name, held)
            if name in own and not names.isdisjoint(_WHOLE):
                yield attribute_of(found, name, own[name])

    def _is_written(self, holder: object, name: str, value: object) -> bool:
        """Whether the step reads what it has put there itself."""
        is_held = name in own_attributes(holder) and own_attributes(holder)[name] is value
        return is_held and self._enclosed.has_changed(holder, name)

    def _watch(self, found: Outside) -> None:
        thing, kind = found.value, type(found.value)
        if issubclass(kind, _NOT_WATCHED) or id(thing) in self._inside:
            return
        if kind not in self._kinds:  # and has its own methods still
            self._kinds[kind] = [*methods_called(kind, NO_WORDS)], self._with_methods(thing, NO_WORDS)
        if self._observer.observe_class_of(thing):
            self._places.setdefault(id(thing), found)
            if not isinstance(thing, _ACTORS) or is_around_another(thing):
                self._enclosed.reach(found.path, thing)

    def _watch_actors(self, model: Outside) -> None:
        """Schedules, and scalers of gradients, that a module holds whose method the step is."""
        for name, held in own_attributes(model.value).items():
            if isinstance(held, LRScheduler | GradScaler):
                self.walk(attribute_of(model, name, held), None, NO_WORDS)

    def _follow(self, function: FunctionType | None) -> None:
        """Look at the variables of a function of the step's package, or of none that is installed."""
        if function is None or not self._is_followed(function):
            return
        if not self._is_new(("followed", id(function)), function):
            return
        code, variables = function.__code__, function.__globals__
        self._enclosed.reach(function.__name__, function)
        for name in globals_within(code):
            self._sources.answers_for(variables, name)
            self._sources.named(variables, name)
        for cell in function.__closure__ or ():
            self._sources.closed_over(cell)
        words = CodeWords.of(code)
        self._spelled |= words.names
        if any(map(tells_apart, codes_in(code))):
            self._spelled.add(APART)
        self.function(function, function.__name__, words)
        if not names_in(code).isdisjoint(OF_ENVIRONMENT):
            self.environment(code)

    def _is_followed(self, function: FunctionType) -> bool:
        is_own = self._is_user(function.__code__) and not is_installed(function.__code__.co_filename)
        return is_own or _package(function) in self._packages

    def _taken_from(self, found: Outside) -> UnsupportedStep:
        return UnsupportedStep(
            f"the step has {found.path}, which is an iterator",
            where=self._place,
            why="what it takes from it would be a constant of the program, the same in every run",
            remedy="take it outside of the step, and pass it as an argument",
        )


def _package(held: FunctionType | type) -> str:
    """Where its code is; a decorator calls itself as what it is around."""
    name = held.__module__ if isinstance(held, type) else held.__globals__.get("__name__")
    return str(name).partition(".")[0]


def _is_iterator(value: Any) -> bool:
    """Whether something is an iterator that nobody can look into: one in C, or one of PyTorch's loaders."""
    kind = type(value)
    return is_iterator(value) or (
        kind.__module__.startswith("torch.utils.data") and hasattr(kind, "__next__")
    )


def _entries(found: Outside) -> Iterator[Outside]:
    """All that a container holds, and which keys it has; but for what the step puts there itself."""
    held: Any = found.value
    is_keyed = not isinstance(held, (list, tuple, deque))
    rows = list(items_of(held) if is_keyed else enumerate(held))
    if is_keyed and all(is_solid(key) for key, _ in rows):
        put = frozenset(key for key, value in rows if is_stand_in(value))
        keys_of = partial(_keys_but_for, put) if put else tuple
        yield Outside(f"the keys of {found.path}", found.root, (*found.way, keys_of), keys_of(held))
    else:
        yield Outside(f"the length of {found.path}", found.root, (*found.way, len), len(held))
    is_plain = asks_as_pythons(held) and not hasattr(type(held), "__missing__")
    for position, (key, value) in enumerate(rows if len(rows) <= _MOST else ()):
        is_said = is_plain and type(key) in (str, int)
        ask: Step = itemgetter(key) if is_said else partial(value_at, position=position)
        yield Outside(f"{found.path}[{spelled_key(key, position)}]", found.root, (*found.way, ask), value)


def _held_by_torch(found: Outside) -> Iterator[Outside]:
    """Numbers and tensors of an object of torch's (a distribution), whose reads are not seen."""
    own = own_attributes(found.value) if _package(type(found.value)) == "torch" else {}
    kinds = (Tensor, *PLAIN)
    rows = ((name, held) for name, held in own.items() if issubclass(type(held), kinds))
    yield from (attribute_of(found, name, held) for name, held in rows)


def _keys_but_for(put: Set[Any], held: Any) -> tuple[Any, ...]:
    return tuple(key for key in held if key not in put)
