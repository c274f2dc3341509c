"""Whatever decides beside the attributes of modules is compared, or named as not guarded."""

import functools
import importlib
import operator
import sys
import threading
import weakref
from array import array
from collections import ChainMap, OrderedDict, namedtuple
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import whence
from tests.behaviours import constructions_of_values
from tests.checks import same_bits

X = torch.ones(4, 4)


class Thing:
    """An object of a user's."""

    shared = 2.0

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def scaled(self, out: Tensor) -> Tensor:
        """Reads its object."""
        return out * self.factor

    def loss(self, out: Tensor) -> Tensor:
        """A loss of its own."""
        return (out * self.factor).sum()

    def __call__(self, out: Tensor) -> Tensor:
        return (out * self.shared).sum()

    @staticmethod
    def doubled(out: Tensor) -> Tensor:
        """A function on a class."""
        return out * 2


class Weighted(nn.Module):
    """A loss with a number."""

    factor = 2.0

    def forward(self, out: Tensor) -> Tensor:
        return (out * self.factor).sum()


class Model(nn.Module):
    """A weight, and code around it."""

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


class World:
    """What is around a model, made anew for every test."""

    def __init__(self) -> None:
        self.context: ContextVar[Any] = ContextVar("context", default=2.0)
        self.nothing: ContextVar[Any] = ContextVar("nothing", default=None)
        self.thing = Thing()
        self.options: dict[str, Any] = {"inner": {"factor": 2.0}}


def _by_context(world: World) -> Any:
    context = world.context
    return Model(lambda self, x: self.linear(x) * context.get()), None, lambda _: context.set(3.0)


def _by_held_context(world: World) -> Any:
    model = Model(lambda self, x: self.linear(x) * self.context.get())
    model.context = world.context  # type: ignore[assignment]
    return model, None, lambda _: world.context.set(3.0)


def _by_empty_context(world: World) -> Any:
    context = world.nothing
    run = lambda self, x: self.linear(x) * (2.0 if context.get() is None else 3.0)  # noqa: E731
    return Model(run), None, lambda _: context.set(1)


def _by_object(world: World) -> Any:
    thing = world.thing
    return Model(lambda self, x: self.linear(x) * thing.factor), None, lambda _: setattr(thing, "factor", 3.0)


def _by_class(world: World) -> Any:
    return _on_class(lambda self, x: self.linear(x) * Thing.shared, "shared", 3.0)


def _by_nested(world: World) -> Any:
    options = world.options
    run = lambda self, x: self.linear(x) * options["inner"]["factor"]  # noqa: E731
    return Model(run), None, lambda _: options["inner"].update(factor=3.0)


SETTINGS: dict[str, Any] = {"factor": 2.0, "layers": {"count": 1}, "calls": 0, "offset": 1.0}


def _by_item(_: World) -> Any:
    """Beside things that are not compared, and one that each call advances."""

    def run(self: Any, x: Tensor) -> Any:
        SETTINGS["calls"] += 1
        return self.linear(x) * SETTINGS["factor"]

    return Model(run), None, lambda patch: patch.setitem(SETTINGS, "factor", 3.0)


def _by_items(_: World) -> Any:
    """Each of two functions reads an item of its own."""
    first = Model(lambda self, x: self.linear(x) * SETTINGS["factor"])
    model = nn.Sequential(first, Model(lambda self, x: self.linear(x) + SETTINGS["offset"]))
    return model, None, lambda patch: patch.setitem(SETTINGS, "offset", 3.0)


class Named(dict[str, Any]):
    """A dict of a user's, with an attribute of its own."""

    scale = 1.0


class Pair(NamedTuple):
    """A named tuple."""

    first: float
    second: float


class Config:
    """Read by a helper, by a method of its own, through a class and through what it holds."""

    offset = 1.0
    options: ClassVar[dict[str, Any]] = {"factor": 2.0, "thing": object()}

    def __init__(self) -> None:
        self.scale, self.shift, self.unread = 2.0, 1.0, 0
        self.options_of_mine = Named(factor=2.0)
        self.mixed: dict[str, Any] = {"list": [2.0, object()], "thing": object()}

    def scaled(self, x: Tensor) -> Tensor:
        """Named by who calls it; `scale` is named here."""
        return x * self.scale

    @classmethod
    def shifted(cls, x: Tensor) -> Tensor:
        """On the class."""
        return x + cls.offset

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.mixed["list"][0]


class Other:
    """Read through the class alone."""

    factor, offset = 2.0, 1.0


CONFIG, PAIR, ARRAY = Config(), Pair(2.0, 1.0), array("d", [2.0])
ORDERED: Any = OrderedDict(factor=2.0)
LOCAL = threading.local()
FUNCTIONS: dict[str, Any] = {"sine": torch.sin, "cosine": torch.cos}
NUMBERS: dict[Any, Any] = {0: 1.0, 1: 2.0, "thing": object()}


class Described:
    """A descriptor with a number."""

    factor = 2.0

    def __get__(self, instance: object, owner: type | None = None) -> float:
        return self.factor


class Made(type):
    """A class of classes."""

    @property
    def factor(cls) -> float:
        """Computed of what the class has."""
        return cls.own  # type: ignore[attr-defined]


class Various(metaclass=Made):
    """What objects and classes can have beside attributes."""

    own = 2.0
    described = Described()
    text = str.lower

    def __init__(self) -> None:
        self.shift = 2.0
        self.in_c = Tensor.mul

    def _times(self, x: Tensor, factor: float) -> Tensor:
        return x * factor * self.shift

    doubled = functools.partialmethod(_times, factor=2.0)

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


@functools.singledispatch
def overloaded(_: object) -> float:
    return 2.0


def _with_attribute(x: Tensor) -> Tensor:
    return x * _with_attribute.factor  # type: ignore[attr-defined]


def _with_keyword(x: Tensor, *, factor: float = 2.0) -> Tensor:
    return x * factor


_with_attribute.factor = 2.0  # type: ignore[attr-defined]
VARIOUS: Any = Various()
BEHIND = {"factor": 2.0}
PROXY, CHAINED = MappingProxyType(BEHIND), ChainMap({}, BEHIND)
WEAKLY = weakref.ref(CONFIG)
ACTIVATIONS: list[Any] = [torch.sin]
MODULES: dict[str, Any] = {"activation": nn.ReLU}
CAST, KIND, NOTHING_YET = float, Config, None
SCALED = functools.partial(torch.mul, other=2.0)
ANSWER = functools.lru_cache(lambda: 2.0)
METHOD: Any = Thing().scaled
COVERED: Any = Thing()
IN_A_DICT = {"scaled": functools.partial(torch.mul, other=2.0)}
CHOSEN, ATTRIBUTE, PLACE, FACTOR, ACTIVATION = "sine", "shift", 1, 2.0, F.relu


def _scaled(x: Tensor, scaled: Any = SCALED) -> Any:
    return scaled(x)


def _helper(x: Tensor) -> Tensor:
    return x * CONFIG.shift * Other.factor


def _traced(self: Any, x: Tensor) -> Tensor:
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        found = getattr(importlib.import_module("tests.behaviours.constructions_of_values"), "factor")  # noqa: B009
        return self.linear(x) * found()
    finally:
        sys.settrace(before)


def _imported(self: Any, x: Tensor) -> Any:
    from tests.behaviours import constructions_of_values as imported  # noqa: PLC0415

    return self.linear(x) * imported.FACTOR


def _held(self: Any, x: Tensor) -> Any:
    return self.linear(x) * self.held.scale


def _set_local(value: float) -> None:
    LOCAL.factor = value


class Looker:
    """Its methods read a variable, or an array."""

    def number(self) -> float:
        """Of a variable."""
        return SCALE

    def element(self) -> float:
        """Of an array."""
        return float(ARRAY[0])


class Asker:
    """Asks an object that a variable holds."""

    def number(self) -> float:
        """By way of it."""
        return LOOKER.number()

    def element(self) -> float:
        """By way of it."""
        return LOOKER.element()


SCALE, LOOKER, ASKER = 2.0, Looker(), Asker()


class Level(Enum):
    """Its members hold a number, and compute."""

    FIRST = 1

    def __init__(self, factor: int) -> None:
        self.factor = 2.0 * factor

    @property
    def scale(self) -> float:
        """Of a variable."""
        return SCALE


class Grade(int, Enum):
    """Numbers with an attribute."""

    FIRST = 1
    factor: float


Grade.FIRST.factor = 2.0


class Scaling(type):
    """Classes of this one compute."""

    @property
    def scale(cls) -> float:
        """Of a variable."""
        return SCALE


class Scaled(metaclass=Scaling):
    """A class with a number that its class computes."""


@torch.no_grad()
def _scale_of(x: Tensor) -> Tensor:
    return x * SCALE


@functools.singledispatch
def _scale_by_class(_: object) -> float:
    return 1.0


@_scale_by_class.register
def _(_: int) -> float:
    return SCALE


Functions = namedtuple("Functions", "scale")
IN_TUPLE, IN_NAMED, IN_PROXY = (
    (lambda: SCALE,),
    Functions(lambda: SCALE),
    MappingProxyType({"a": lambda: SCALE}),
)
IN_SET = frozenset([lambda: SCALE])


Run = Callable[[Any, Tensor], Any]
Change = Callable[[Any], Any]
EMPTY: dict[str, float] = {}
METHOD_IN_C: Any = Tensor.mul
BY_DTYPE, BY_LEVEL = {torch.float32: 2.0, torch.float64: 1.0}, {Level.FIRST: 2.0}
BY_FLAG, BY_PAIR = {True: 2.0, False: 1.0}, {(1, "a"): 2.0}
AROUND: dict[str, tuple[Run, Change]] = {
    "entry_of_an_empty_table": (
        lambda self, x: self.linear(x) * EMPTY.get("scale", 2.0),
        lambda patch: patch.setitem(EMPTY, "scale", 3.0),
    ),
    "attribute_of_a_member": (
        lambda self, x: self.linear(x) * Level.FIRST.factor,
        lambda patch: patch.setattr(Level.FIRST, "factor", 3.0),
    ),
    "attribute_of_members_that_are_gone_through": (
        lambda self, x: self.linear(x) * sum(each.factor for each in Level),
        lambda patch: patch.setattr(Level.FIRST, "factor", 3.0),
    ),
    "entry_of_a_dtype": (
        lambda self, x: self.linear(x) * BY_DTYPE[x.dtype],
        lambda patch: patch.setitem(BY_DTYPE, torch.float32, 3.0),
    ),
    "entry_of_a_member": (
        lambda self, x: self.linear(x) * BY_LEVEL[Level(x.dim() - 1)],
        lambda patch: patch.setitem(BY_LEVEL, Level.FIRST, 3.0),
    ),
    "entry_of_a_flag": (
        lambda self, x: self.linear(x) * BY_FLAG[self.training],
        lambda patch: patch.setitem(BY_FLAG, True, 3.0),
    ),
    "entry_of_a_tuple": (
        lambda self, x: self.linear(x) * BY_PAIR[(x.dim() - 1, "a")],
        lambda patch: patch.setitem(BY_PAIR, (1, "a"), 3.0),
    ),
    "method_in_c": (
        lambda self, x: METHOD_IN_C(self.linear(x), 2),
        lambda patch: patch.setitem(globals(), "METHOD_IN_C", Tensor.sub),
    ),
    "method_in_c_on_an_object": (
        lambda self, x: VARIOUS.in_c(self.linear(x), 2),
        lambda patch: patch.setattr(VARIOUS, "in_c", Tensor.sub),
    ),
    "method_in_c_on_a_class": (
        lambda self, x: self.linear(x) * len(Various.text("aß")),
        lambda patch: patch.setattr(Various, "text", str.upper),
    ),
    "attribute_that_a_helper_reads": (
        lambda self, x: _helper(self.linear(x) * CONFIG.scale),
        lambda patch: patch.setattr(CONFIG, "shift", 3.0),
    ),
    "class_that_a_helper_reads": (
        lambda self, x: _helper(self.linear(x) * Other.offset),
        lambda patch: patch.setattr(Other, "factor", 3.0),
    ),
    "attribute_that_a_method_reads": (
        lambda self, x: CONFIG.scaled(self.linear(x)),
        lambda patch: patch.setattr(CONFIG, "scale", 3.0),
    ),
    **{
        f"variable_that_{name}_reads": (run, lambda patch: patch.setitem(globals(), "SCALE", 3.0))
        for name, run in {
            "a_member_of_an_enumeration": lambda self, x: self.linear(x) * Level.FIRST.scale,
            "a_metaclass": lambda self, x: self.linear(x) * Scaled.scale,
            "a_function_under_no_grad": lambda self, x: self.linear(x) * _scale_of(x).detach(),
            "an_overload": lambda self, x: self.linear(x) * _scale_by_class(1),
            "a_function_in_a_tuple": lambda self, x: self.linear(x) * IN_TUPLE[0](),
            "a_function_in_a_named_tuple": lambda self, x: self.linear(x) * IN_NAMED.scale(),
            "a_function_in_a_proxy": lambda self, x: self.linear(x) * IN_PROXY["a"](),
            "a_function_in_a_set": lambda self, x: self.linear(x) * next(iter(IN_SET))(),
        }.items()
    },
    "variable_that_a_method_reads": (
        lambda self, x: self.linear(x) * LOOKER.number(),
        lambda patch: patch.setitem(globals(), "SCALE", 3.0),
    ),
    "variable_that_an_object_behind_another_reads": (
        lambda self, x: self.linear(x) * ASKER.number(),
        lambda patch: patch.setitem(globals(), "SCALE", 3.0),
    ),
    "array_that_an_object_behind_another_reads": (
        lambda self, x: self.linear(x) * ASKER.element(),
        lambda _: ARRAY.__setitem__(0, 3.0),
    ),
    "class_that_a_method_reads": (
        lambda self, x: Config.shifted(self.linear(x)),
        lambda patch: patch.setattr(Config, "offset", 3.0),
    ),
    "what_an_object_that_is_called_reads": (
        lambda self, x: CONFIG(self.linear(x)),
        lambda _: CONFIG.mixed["list"].__setitem__(0, 3.0),
    ),
    "item_on_a_class": (
        lambda self, x: self.linear(x) * Config.options["factor"],
        lambda patch: patch.setitem(Config.options, "factor", 3.0),
    ),
    "item_of_a_dict_of_a_users": (
        lambda self, x: self.linear(x) * CONFIG.options_of_mine["factor"],
        lambda patch: patch.setitem(CONFIG.options_of_mine, "factor", 3.0),
    ),
    "ordered_dict": (
        lambda self, x: self.linear(x) * ORDERED["factor"],
        lambda patch: patch.setitem(ORDERED, "factor", 3.0),
    ),
    "named_tuple": (
        lambda self, x: self.linear(x) * PAIR.first,
        lambda patch: patch.setitem(globals(), "PAIR", Pair(3.0, 1.0)),
    ),
    "array": (lambda self, x: self.linear(x) * ARRAY[0], lambda _: ARRAY.__setitem__(0, 3.0)),
    "local_of_a_thread": (lambda self, x: self.linear(x) * LOCAL.factor, lambda _: _set_local(3.0)),
    "function_under_a_key": (
        lambda self, x: FUNCTIONS[CHOSEN](self.linear(x)),
        lambda patch: patch.setitem(FUNCTIONS, "sine", torch.cos),
    ),
    "function_that_is_asked_for": (
        lambda self, x: FUNCTIONS.get(CHOSEN, torch.tan)(self.linear(x)),
        lambda patch: patch.setitem(FUNCTIONS, "sine", F.silu),
    ),
    "attribute_of_a_function": (
        lambda self, x: _with_attribute(self.linear(x)),
        lambda patch: patch.setattr(_with_attribute, "factor", 3.0),
    ),
    "default_of_a_keyword": (
        lambda self, x: _with_keyword(self.linear(x)),
        lambda patch: patch.setattr(_with_keyword, "__kwdefaults__", {"factor": 3.0}),
    ),
    "call_of_a_class": (
        lambda self, x: VARIOUS(self.linear(x)),
        lambda patch: patch.setattr(Various, "__call__", lambda _, x: x * 3),
    ),
    "overload": (
        lambda self, x: self.linear(x) * overloaded("text"),
        lambda _: overloaded.register(str, lambda _: 3.0),
    ),
    "descriptor": (
        lambda self, x: self.linear(x) * VARIOUS.described,
        lambda patch: patch.setattr(Described, "factor", 3.0),
    ),
    "object_of_a_method_with_fixed_arguments": (
        lambda self, x: VARIOUS.doubled(self.linear(x)),
        lambda patch: patch.setattr(VARIOUS, "shift", 3.0),
    ),
    "method_with_fixed_arguments": (
        lambda self, x: VARIOUS.doubled(self.linear(x)),
        lambda patch: patch.setattr(Various, "doubled", functools.partialmethod(Various._times, factor=3.0)),
    ),
    "property_of_a_class": (
        lambda self, x: self.linear(x) * Various.factor,
        lambda patch: patch.setattr(Various, "own", 3.0),
    ),
    "mapping_behind_a_proxy": (
        lambda self, x: self.linear(x) * PROXY["factor"],
        lambda patch: patch.setitem(BEHIND, "factor", 3.0),
    ),
    "mapping_in_a_chain": (
        lambda self, x: self.linear(x) * CHAINED["factor"],
        lambda patch: patch.setitem(BEHIND, "factor", 3.0),
    ),
    "behind_a_weak_reference": (
        lambda self, x: self.linear(x) * WEAKLY().shift,  # type: ignore[union-attr]
        lambda patch: patch.setattr(CONFIG, "shift", 3.0),
    ),
    "another_function_in_a_list": (
        lambda self, x: [function(self.linear(x)) for function in ACTIVATIONS][-1],
        lambda patch: patch.setitem(globals(), "ACTIVATIONS", [torch.sin, torch.cos]),
    ),
    "another_entry_of_a_dictionary": (
        lambda self, x: [function(self.linear(x)) for function in FUNCTIONS.values()][-1],
        lambda patch: patch.setitem(FUNCTIONS, "tangent", torch.tan),
    ),
    "class_in_a_variable": (
        lambda self, x: self.linear(x) * CAST(2.5),
        lambda patch: patch.setitem(globals(), "CAST", int),
    ),
    "class_that_is_asked_for": (
        lambda self, x: self.linear(x) * (2 if isinstance(CONFIG, KIND) else 3),
        lambda patch: patch.setitem(globals(), "KIND", dict),
    ),
    "class_of_modules": (
        lambda self, x: MODULES["activation"]()(self.linear(x)),
        lambda patch: patch.setitem(MODULES, "activation", nn.Tanh),
    ),
    "nothing_yet": (
        lambda self, x: self.linear(x) * (2 if NOTHING_YET is None else 3),
        lambda patch: patch.setitem(globals(), "NOTHING_YET", 1),
    ),
    "attribute_that_may_be_absent": (
        lambda self, x: self.linear(x) * (3 if hasattr(CONFIG, "surplus") else 2),
        lambda patch: patch.setattr(CONFIG, "surplus", 1, raising=False),
    ),
    "number_in_a_partial": (
        lambda self, x: SCALED(self.linear(x)),
        lambda patch: patch.setitem(globals(), "SCALED", functools.partial(torch.mul, other=3.0)),
    ),
    "default_of_a_function": (
        lambda self, x: _scaled(self.linear(x)),
        lambda patch: patch.setattr(_scaled, "__defaults__", (functools.partial(torch.mul, other=3.0),)),
    ),
    "function_in_a_partial": (
        lambda self, x: SCALED(self.linear(x)),
        lambda patch: patch.setitem(globals(), "SCALED", functools.partial(torch.sub, other=2.0)),
    ),
    "partial_in_a_dictionary": (
        lambda self, x: IN_A_DICT["scaled"](self.linear(x)),
        lambda patch: patch.setitem(IN_A_DICT, "scaled", functools.partial(torch.mul, other=3.0)),
    ),
    "another_in_the_place_of_a_cached_function": (
        lambda self, x: self.linear(x) * ANSWER(),
        lambda patch: patch.setitem(globals(), "ANSWER", lambda: 3.0),
    ),
    "another_cached_function": (
        lambda self, x: self.linear(x) * ANSWER(),
        lambda patch: patch.setitem(globals(), "ANSWER", functools.lru_cache(lambda: 3.0)),
    ),
    "object_of_a_bound_method": (
        lambda self, x: METHOD(self.linear(x)),
        lambda patch: patch.setattr(METHOD.__self__, "factor", 3.0),
    ),
    "method_of_another_object": (
        lambda self, x: METHOD(self.linear(x)),
        lambda patch: patch.setitem(globals(), "METHOD", Thing(3.0).scaled),
    ),
    "function_of_torch": (
        lambda self, x: ACTIVATION(self.linear(x) - 9),
        lambda patch: patch.setitem(globals(), "ACTIVATION", F.elu),
    ),
    "number_under_a_key": (
        lambda self, x: self.linear(x) * NUMBERS[PLACE],
        lambda patch: patch.setitem(NUMBERS, 1, 3.0),
    ),
    "attribute_by_a_name_in_a_variable": (
        lambda self, x: self.linear(x) * getattr(CONFIG, ATTRIBUTE),
        lambda patch: patch.setattr(CONFIG, "shift", 3.0),
    ),
    "attribute_by_a_getter": (
        lambda self, x: self.linear(x) * operator.attrgetter(ATTRIBUTE)(CONFIG),
        lambda patch: patch.setattr(CONFIG, "shift", 3.0),
    ),
    "attribute_among_variables": (
        lambda self, x: self.linear(x) * vars(Other)["factor"],
        lambda patch: patch.setattr(Other, "factor", 3.0),
    ),
    "variable_among_variables": (
        lambda self, x: self.linear(x) * globals()["FACTOR"],
        lambda patch: patch.setitem(globals(), "FACTOR", 3.0),
    ),
    "module_among_modules": (
        lambda self, x: self.linear(x) * sys.modules["tests.behaviours.constructions_of_values"].FACTOR,
        lambda patch: patch.setattr(constructions_of_values, "FACTOR", 3.0, raising=False),
    ),
    "module_by_its_name": (
        lambda self, x: (
            self.linear(x) * importlib.import_module("tests.behaviours.constructions_of_values").FACTOR
        ),
        lambda patch: patch.setattr(constructions_of_values, "FACTOR", 3.0, raising=False),
    ),
    "import_in_a_function": (
        _imported,
        lambda patch: patch.setattr(constructions_of_values, "FACTOR", 3.0, raising=False),
    ),
    "function_under_a_tracer_of_the_models_own": (
        _traced,
        lambda patch: patch.setattr(constructions_of_values, "FACTOR", 3.0, raising=False),
    ),
    "another_module_among_modules": (
        lambda self, x: self.linear(x) * sys.modules["tests.behaviours.constructions_of_values"].FACTOR,
        lambda patch: patch.setitem(sys.modules, constructions_of_values.__name__, _another_module()),
    ),
    "another_module_by_its_name": (
        lambda self, x: (
            self.linear(x) * importlib.import_module("tests.behaviours.constructions_of_values").FACTOR
        ),
        lambda patch: patch.setitem(sys.modules, constructions_of_values.__name__, _another_module()),
    ),
    "another_module_in_a_variable": (
        lambda self, x: self.linear(x) * constructions_of_values.FACTOR,
        lambda patch: patch.setitem(globals(), "constructions_of_values", _another_module()),
    ),
}


def _another_module() -> ModuleType:
    made = ModuleType(constructions_of_values.__name__)
    vars(made)["FACTOR"] = 3.0
    return made


def _around(name: str) -> Callable[[World], Any]:
    run, change = AROUND[name]

    def make(_: World) -> Any:
        _set_local(2.0)
        ARRAY[0] = CONFIG.mixed["list"][0] = 2.0
        vars(constructions_of_values)["FACTOR"] = 2.0
        return Model(run), None, change

    return make


def _by_held_dict(_: World) -> Any:
    model = Model(_held)
    model.held = held = Named()  # type: ignore[assignment]
    held.scale = 2.0
    return model, None, lambda _: setattr(held, "scale", 3.0)


def _by_held_member(_: World) -> Any:
    model = Model(lambda self, x: self.linear(x) * self.held[0].factor)
    model.held = [Level.FIRST]  # type: ignore[assignment]
    return model, None, lambda patch: patch.setattr(Level.FIRST, "factor", 3.0)


def _by_held_number_of_an_enumeration(_: World) -> Any:
    model = Model(lambda self, x: self.linear(x) * self.held.factor)
    model.held = Grade.FIRST  # type: ignore[assignment]
    return model, None, lambda patch: patch.setattr(Grade.FIRST, "factor", 3.0)


def _by_held_reference(_: World) -> Any:
    model = Holding()
    model.held = WEAKLY
    return model, None, lambda patch: patch.setattr(CONFIG, "shift", 3.0)


def _by_held_method(_: World) -> Any:
    model = Doubling()
    model.held = VARIOUS
    other = functools.partialmethod(Various._times, factor=3.0)
    return model, None, lambda patch: patch.setattr(Various, "doubled", other)


def _by_held_local(_: World) -> Any:
    model = Model(_held)
    model.held = held = threading.local()  # type: ignore[assignment]
    held.scale = 2.0
    return model, None, lambda _: setattr(held, "scale", 3.0)


class Settings:
    """A class that nobody makes instances of."""

    scale = 2.0

    class Inner:
        """Settings of a part."""

        scales: ClassVar = [2.0]


class Derived(Settings):
    """Adds nothing."""


def _held_settings(run: Callable[[Any, Tensor], Any], held: Any, *change: Any) -> Callable[[World], Any]:
    def make(_: World) -> Any:
        model = Model(run)
        model.held = held
        return model, None, lambda patch: patch.setattr(*change)

    return make


HELD_CLASSES = {
    "held_class": _held_settings(lambda self, x: x * self.held.scale, Settings, Settings, "scale", 3.0),
    "base_of_a_held_class": _held_settings(
        lambda self, x: x * self.held.scale, Derived, Settings, "scale", 3.0
    ),
    "class_in_a_held_class": _held_settings(
        lambda self, x: x * self.held.Inner.scales[0], Settings, Settings.Inner, "scales", [3.0]
    ),
    "class_in_a_held_list": _held_settings(
        lambda self, x: x * self.held[0].scale, [Settings], Settings, "scale", 3.0
    ),
}
"""Classes in the place of objects with settings."""


class WithModule(nn.Module):
    """Keeps a file of code under an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.code = constructions_of_values

    def forward(self, x: Tensor) -> Any:
        """Scaled by a number of the file."""
        return x * self.code.FACTOR


def _by_held_file(_: World) -> Any:
    vars(constructions_of_values)["FACTOR"] = 2.0
    return WithModule(), None, lambda patch: patch.setattr(constructions_of_values, "FACTOR", 3.0)


class Holding(nn.Module):
    """Reads behind a reference that it holds."""

    held: Any = None

    def forward(self, x: Tensor) -> Any:
        """Scaled."""
        return x * self.held().shift


class Doubling(Holding):
    """Calls a method of what it holds."""

    def forward(self, x: Tensor) -> Any:
        """Twice as much."""
        return self.held.doubled(x)


class Keyed(nn.Module):
    """Looks up by texts that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.entry = "scale", 1

    def forward(self, x: Tensor) -> Any:
        return x * getattr(CONFIG, self.key) + NUMBERS[self.entry]


def _by_held_name(_: World) -> Any:
    return Keyed(), None, lambda patch: patch.setattr(CONFIG, "scale", 3.0)


def _by_held_number(_: World) -> Any:
    """Of two models of a class each looks up for itself."""
    first, second = Keyed(), Keyed()
    first.entry = 0
    return nn.Sequential(first, second), None, lambda patch: patch.setitem(NUMBERS, 1, 3.0)


def _by_default(_: World) -> Any:
    def run(self: Any, x: Tensor, factors: Any = (2.0,)) -> Any:
        return self.linear(x) * factors[0]

    run.__defaults__ = ([2.0],)
    return Model(run), None, lambda _: run.__defaults__[0].__setitem__(0, 3.0)


def _by_weight(_: World) -> Any:
    model = Model(lambda self, x: F.linear(x, self.linear.weight) * self.linear.weight.scale)
    model.linear.weight.scale = 2.0  # type: ignore[attr-defined]
    return model, None, lambda _: setattr(model.linear.weight, "scale", 3.0)


def _by_buffer(_: World) -> Any:
    model = Model(lambda self, x: self.linear(x) * getattr(self.table, "scale", 1.0))
    model.register_buffer("table", torch.ones(4))
    model.table.scale = 2.0  # type: ignore[union-attr]
    return model, None, lambda _: delattr(model.table, "scale")


def _loss_closure(_: World) -> Any:
    scale = 2.0

    def loss(out: Tensor) -> Tensor:
        return (out * scale).sum()

    def change(_: World) -> None:
        nonlocal scale
        scale = 3.0

    return nn.Linear(4, 4), loss, change


def _loss_object(world: World) -> Any:
    return nn.Linear(4, 4), world.thing, lambda _: setattr(world.thing, "shared", 3.0)


def _loss_method(world: World) -> Any:
    return nn.Linear(4, 4), world.thing.loss, lambda _: setattr(world.thing, "factor", 3.0)


def _loss_module(_: World) -> Any:
    loss = Weighted()
    return nn.Linear(4, 4), loss, lambda _: setattr(loss, "factor", 3.0)


def _loss_partial(_: World) -> Any:
    factors = [2.0]
    loss = functools.partial(lambda factors, out: (out * factors[0]).sum(), factors)
    return nn.Linear(4, 4), loss, lambda _: factors.__setitem__(0, 3.0)


def _edited(_: World) -> Any:
    model = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

    def change(_: World) -> None:
        node = next(node for node in model.graph.nodes if node.target == "1")
        with model.graph.inserting_after(node):
            node.replace_all_uses_with(model.graph.call_function(torch.sin, node.args))
        model.graph.erase_node(node)
        model.recompile()

    return model, None, change


def _by_static_method(_: World) -> Any:
    return _on_class(lambda self, x: Thing.doubled(self.linear(x)), "doubled", staticmethod(torch.sin))


def _by_covered_static_method(_: World) -> Any:
    model = Model(lambda self, x: COVERED.doubled(self.linear(x)))
    return model, None, lambda patch: patch.setattr(COVERED, "doubled", torch.sin)


def _by_added_attribute(_: World) -> Any:
    model = Model(lambda self, x: self.linear(x) * getattr(self.linear.weight, "scale", 1.0))
    return model, None, lambda _: setattr(model.linear.weight, "scale", 3.0)


def _on_class(run: Callable[[Any, Tensor], Any], name: str, value: Any) -> Any:
    return Model(run), None, lambda patch: patch.setattr(Thing, name, value)


CAUGHT: dict[str, Callable[[World], Any]] = {
    each.__name__.strip("_"): each
    for each in (
        *(_by_context, _by_held_context, _by_empty_context, _by_object, _by_class, _by_nested, _by_default),
        _by_added_attribute,
        *(
            _by_static_method,
            _by_covered_static_method,
            _by_held_method,
            _by_held_member,
            _by_held_number_of_an_enumeration,
            _by_held_reference,
            _by_held_name,
            _by_held_number,
            _by_item,
            _by_items,
            _by_weight,
            _by_buffer,
            _edited,
            _by_held_dict,
            _by_held_file,
            _by_held_local,
        ),
        *(_loss_closure, _loss_object, _loss_method, _loss_module, _loss_partial),
    )
}
CAUGHT |= {name: _around(name) for name in AROUND} | HELD_CLASSES


def _by_text(_: World) -> Any:
    model = Model(lambda self, x: self.linear(x) * eval("SCALE"))
    return model, None, lambda patch: patch.setitem(globals(), "SCALE", 3.0)


def _by_frame(_: World) -> Any:
    model = Model(lambda self, x: self.linear(x) * sys._getframe().f_globals["SCALE"])
    return model, None, lambda patch: patch.setitem(globals(), "SCALE", 3.0)


NAMED = {
    "by evaluating, or in namespaces of other code (eval)": _by_text,
    "by evaluating, or in namespaces of other code (f_globals)": _by_frame,
}


def _results(model: nn.Module, loss: Any) -> Tensor:
    out: Tensor = model(X)
    return out if loss is None else loss(out)


def _changed(make: Callable[[World], Any], patch: Any) -> tuple[whence.Program, list[Any]]:
    world = World()
    model, loss, change = make(world)
    program = whence.capture(model, (X,), backward=loss or False)
    before = _results(model, loss)
    assert list(map(str, program.check(model, (X,)))) == []
    change(patch)
    assert not same_bits(_results(model, loss), before)  # the change matters
    return program, program.check(model, (X,))


@pytest.mark.sample(46)
@pytest.mark.parametrize("name", CAUGHT)
def test_change_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context variables, objects and classes around the code, attributes of tensors, all that a loss uses."""
    program, violations = _changed(CAUGHT[name], monkeypatch)
    assert 1 <= len(violations) <= 2  # a function, and the default that it has now
    assert program.guards.about(violations[0].guard.what)


@pytest.mark.parametrize(
    "name",
    [
        *("attribute_that_a_helper_reads", "what_an_object_that_is_called_reads"),
        *("function_under_a_key", "number_under_a_key"),
    ],
)
def test_what_no_code_names_may_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another attribute of an object, and an entry that nobody asks for."""
    model, _, _ = _around(name)(World())
    program = whence.capture(model, (X,))
    monkeypatch.setattr(CONFIG, "unread", 5)
    monkeypatch.setitem(CONFIG.mixed, "unread", 5)
    monkeypatch.setitem(FUNCTIONS, "unread", torch.tan)
    monkeypatch.setitem(NUMBERS, 0, 5.0)
    assert program.check(model, (X,)) == []


@pytest.mark.parametrize("words", NAMED)
def test_what_is_not_compared_is_named(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No violation, and the page of guards says so."""
    program, violations = _changed(NAMED[words], monkeypatch)
    assert violations == []
    assert words in str(program.guards)
