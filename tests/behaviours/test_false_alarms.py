"""What a model does by itself is no change: right after its capture, once it has run, and of its copies."""

import array
import collections
import contextlib
import copy
import enum
import functools
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel

import whence

X = torch.ones(4, 4)
CONTEXT: ContextVar[float] = ContextVar("CONTEXT", default=2.0)


class Holding(nn.Module):
    """Computes something with a value that it holds."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], value: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.run = run
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.linear(x))


def holding(run: Callable[[Any, Tensor], Any], make: Callable[[], Any]) -> Callable[[], nn.Module]:
    """A factory of such models."""
    return lambda: Holding(run, make())


def times(get: Callable[[Any], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Multiply with what is found in the value."""
    return lambda self, x: x * get(self.value)


class Recipe:
    """What a pattern means, without a way to compare two of them."""

    def __init__(self, pattern: str, axes: tuple[str, ...]) -> None:
        self.pattern, self.axes = pattern, axes


@functools.lru_cache(maxsize=16)
def _recipe(pattern: str, axes: tuple[str, ...]) -> Recipe:
    return Recipe(pattern, axes)


@functools.lru_cache(maxsize=16)
def _sizes(recipe: Recipe, shape: tuple[int, ...], many: int) -> tuple[int, ...]:
    return (*shape[:-1], len(recipe.axes) * many, -1)


class Symmetry(tuple[int, int]):
    """A pair that says what it is by its fields, and has no length, as those of e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


class Rearranged(nn.Module):
    """A layer that works by cached recipes, and makes them anew for a copy, as those of einops do."""

    def __init__(self, pattern: str, **axes: int) -> None:
        super().__init__()
        self.pattern, self.axes = pattern, axes
        self.recipes = {rank: _recipe(pattern, tuple(axes)) for rank in range(4)}

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(_sizes(self.recipes[x.dim()], tuple(x.shape), self.axes["many"]))

    def __getstate__(self) -> dict[str, Any]:
        return {"pattern": self.pattern, "axes": self.axes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["pattern"], **state["axes"])  # type: ignore[misc]


@dataclass
class Config:
    """A user's config."""

    scale: float = 2.0
    inner: Any = None


@dataclass(frozen=True)
class Key:
    """What may be the key of a dictionary."""

    name: str = "key"


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class SlottedNotes:
    """Keeps notes, and what is made first, without a dictionary."""

    __slots__ = ("made", "notes")

    def __init__(self) -> None:
        self.notes, self.made = [1.0], None


class Cache:
    """Makes what it is asked for when it is first asked."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    @functools.cached_property
    def table(self) -> Tensor:
        return torch.arange(4.0)

    @functools.cached_property
    def factor(self) -> float:
        return 2.0

    def get(self, count: int) -> Any:
        if count not in self.known:
            self.known[count] = torch.arange(float(count))
        return self.known[count]


class Attributes(dict[str, Any]):
    """A dictionary whose entries are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Cycle:
    """An object that leads back to itself."""

    def __init__(self) -> None:
        self.scale, self.me = 2.0, [self]


class Color(enum.Flag):
    """A user's flag."""

    RED = 1
    BLUE = 2


class Turned(nn.Module):
    """A singular value decomposition of a weight, of which it keeps a part."""

    def forward(self, u: Tensor, s: Tensor, v: Tensor) -> Tensor:
        return u @ torch.diag(s) @ v

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        return u[:, :2], s[:2], v.t()[:, :2].t()


def _if_none(self: Any, x: Tensor) -> Tensor:
    if self.value is None:
        self.value = torch.ones(4)
    return x * self.value


def _if_missing(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "table"):
        self.register_buffer("table", torch.arange(4.0), persistent=False)
    return x * self.table


def _counting(self: Any, x: Tensor) -> Tensor:
    self.value += 1
    return x


def _counted(x: Tensor) -> Tensor:
    _counted.calls += 1  # type: ignore[attr-defined]
    _counted.shapes.append(x.shape)  # type: ignore[attr-defined]
    return x


_counted.calls, _counted.shapes = 0, []  # type: ignore[attr-defined]


def _noting(self: Any, x: Tensor) -> Tensor:
    self.value.append(x.shape[0])
    return x


def _noting_inside(self: Any, x: Tensor) -> Tensor:
    self.value.notes.append(1.0)
    return x * 2


def _if_none_inside(self: Any, x: Tensor) -> Tensor:
    if self.value.made is None:
        self.value.made = 2.0
    result: Tensor = x * self.value.made
    return result


def _flagged(self: Any, x: Tensor) -> Tensor:
    self.value.used = True
    return x * 2 if self.value.used else x


class Forwarding(nn.Module):
    """A wrapper that looks for attributes in its tables by itself, and then in what it wraps, as those of
    tensordict do."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.module(x) * self.in_features
        return result

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__
        for table in ("_parameters", "_buffers", "_modules"):
            if name in held[table]:
                return held[table][name]
        return getattr(super().__getattr__("module"), name)


def _under(self: Any, x: Tensor) -> Tensor:
    with self.value:
        return x * 2


def _traced() -> nn.Module:
    return fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


def _svd() -> nn.Module:
    linear = nn.Linear(4, 3)
    parametrize.register_parametrization(linear, "weight", Turned(), unsafe=True)
    return linear


def _with_gaps() -> nn.Module:
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    return linear


def _with_class() -> nn.Module:
    class Own(nn.Linear):
        scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    return Own(4, 4)


def _compiled() -> nn.Module:
    compiled: Any = torch.compile(nn.Linear(4, 4), backend="eager")
    return compiled


def _patched() -> nn.Module:
    linear = nn.Linear(4, 4)
    before = linear.forward
    linear.forward = lambda x: before(x) * 2  # type: ignore[method-assign,assignment]
    return nn.Sequential(linear)


def _hooked() -> nn.Module:
    linear, seen = nn.Linear(4, 4), list[Any]()
    linear.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    return nn.Sequential(linear)


def _weakly() -> Any:
    held: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
    held[Config] = 2.0
    return held


def _cyclic() -> list[Any]:
    made: list[Any] = [2.0]
    made.append(made)
    return made


def _optimized() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.randn(4, 4)).sum().backward()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "graph module": _traced,
    "graph modules inside": lambda: nn.Sequential(_traced(), _traced()),
    "another tree": lambda: whence.capture(nn.Sequential(nn.Linear(4, 4)), (X,)).unflatten(),
    "another flat module": lambda: whence.capture(nn.Sequential(nn.Linear(4, 4)), (X,)).module(),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "orthogonal, rectangular": lambda: parametrizations.orthogonal(nn.Linear(4, 3)),
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)).eval(),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "decomposed weight": _svd,
    "weight with gaps": _with_gaps,
    "class in a function": _with_class,
    "patched": _patched,
    "hooked": _hooked,
    "averaged": lambda: AveragedModel(nn.Linear(4, 4)),
    "with gradients": _optimized,
    "compiled": _compiled,
    "a pair without a length": holding(times(lambda pair: pair[1]), lambda: Symmetry((1, 2))),
    "pairs without a length": holding(times(lambda pairs: pairs[0][1]), lambda: [Symmetry((1, 2))]),
    "recipes": lambda: nn.Sequential(nn.Linear(4, 4), Rearranged("rows (many columns)", many=2)),
    "recurrent": lambda: nn.GRU(4, 4),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(4)),
    "filled when None": lambda: Holding(_if_none, None),
    "filled when missing": lambda: Holding(_if_missing, None),
    "flag that each run puts there": lambda: Holding(_flagged, types.SimpleNamespace(used=False)),
    "flag that each run puts in an object": lambda: Holding(_flagged, Cache()),
    "forwarding": Forwarding,
    "counter": lambda: Holding(_counting, 3),
    "counter of a function": lambda: Holding(lambda _, x: _counted(x), None),
    "counter of a held function": holding(lambda self, x: self.value(x), lambda: _counted),
    "notes": lambda: Holding(_noting, [1]),
    "last notes": lambda: Holding(_noting, collections.deque([1, 2], maxlen=2)),
    "cached property": holding(times(lambda it: it.factor), Cache),
    "cached tensor": holding(times(lambda it: it.table), Cache),
    "cache": holding(times(lambda it: it.get(4)), Cache),
    "cached function": holding(times(lambda it: it(3)), lambda: functools.lru_cache(float)),
    "context variable": holding(times(lambda it: it.get()), lambda: CONTEXT),
    "context": holding(_under, contextlib.nullcontext),
    "partial": holding(lambda self, x: self.value(x), lambda: functools.partial(F.gelu, approximate="tanh")),
    "lambda": holding(lambda self, x: self.value(x), lambda: lambda x: x * 2),
    "bound method": holding(lambda self, x: self.value(x), lambda: nn.Linear(4, 4).forward),
    "module in a list": holding(lambda self, x: self.value[0](x), lambda: [nn.Linear(4, 4)]),
    "modules in a dict": holding(lambda self, x: self.value["a"](x), lambda: {"a": nn.Linear(4, 4)}),
    "dataclass": holding(times(lambda it: it.scale), Config),
    "nested": holding(times(lambda it: it.inner.scale), lambda: Config(inner=Config())),
    "slots": holding(times(lambda it: it.scale), Slotted),
    "notes in a slot": lambda: Holding(_noting_inside, SlottedNotes()),
    "slot filled when None": lambda: Holding(_if_none_inside, SlottedNotes()),
    "cycle of objects": holding(times(lambda it: it.me[0].scale), Cycle),
    "cycle of lists": holding(times(lambda it: it[1][0]), _cyclic),
    "attribute dictionary": holding(times(lambda it: it.b.c), lambda: Attributes(b=Attributes(c=2.0))),
    "namespace": holding(times(lambda it: it.a), lambda: types.SimpleNamespace(a=2.0)),
    "ordered": holding(times(lambda it: it["a"]), lambda: collections.OrderedDict(a=2.0)),
    "default": holding(times(lambda it: 1 + len(it["a"])), lambda: collections.defaultdict(list)),
    "tally": holding(times(lambda it: it["a"]), lambda: collections.Counter(a=2)),
    "user's dictionary": holding(times(lambda it: it["a"]), lambda: collections.UserDict(a=2.0)),
    "chain": holding(times(lambda it: it["a"]), lambda: collections.ChainMap({"a": 2.0})),
    "objects as keys": holding(times(len), lambda: {Key(): 2.0, nn.Linear(1, 1): 3.0}),
    "classes as keys": holding(times(lambda it: it[Key]), lambda: {Key: 2.0}),
    "weak keys": holding(times(lambda it: it[Config]), _weakly),
    "set of objects": holding(times(len), lambda: {Key("a"), Key("b")}),
    "tensors in a deque": holding(times(lambda it: it[0]), lambda: collections.deque([torch.ones(4)])),
    "tensors in dicts": holding(times(lambda it: it[0]["a"]), lambda: [{"a": torch.ones(4)}]),
    "flag": holding(times(lambda it: 2 if Color.RED in it else 3), lambda: Color.RED | Color.BLUE),
    "not a number": holding(times(lambda it: it["b"]), lambda: {"a": float("nan"), "b": 2.0}),
    "fraction": holding(times(float), lambda: Fraction(1, 2)),
    "path": holding(times(lambda it: len(it.name)), lambda: Path("a")),
    "array": holding(times(lambda it: it[0]), lambda: array.array("d", [2.0])),
    "numpy": holding(times(lambda it: float(it[0])), lambda: np.ones(2)),
    "bytes": holding(times(lambda it: it[0]), lambda: bytearray(b"ab")),
    "size": holding(times(lambda it: it[1]), lambda: torch.Size([1, 2])),
    "random": holding(times(lambda _: 2.0), torch.Generator),
}


def _copied(model: nn.Module) -> list[nn.Module]:
    with contextlib.suppress(TypeError, RuntimeError):  # not every model can be copied
        return [copy.deepcopy(model)]
    return []


@pytest.mark.sample(18)
@pytest.mark.filterwarnings("ignore:.*kept tensors of the capture:UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_reported_that_the_model_does(name: str) -> None:
    """Right after the capture, after one run and two, and of copies made before and after: no violation."""
    model = MODELS[name]()
    program = whence.capture(model, (X,))
    models = [model, *_copied(model)]
    found = [violation for each in models for violation in program.check(each, (X,))]
    for _ in range(2):
        model(X)
        found += [row for each in (model, *_copied(model)) for row in program.check(each, (X,))]
    assert list(map(str, found)) == []


class Unlike:
    """Compares by identity."""


def _made(scale: float) -> Any:
    class Inner:
        value = scale

        def scaled(self) -> float:
            return self.value

    return Inner


KEY = Unlike()
TABLE = {KEY: 2.0}
INNER = _made(2.0)
INSTANCE = INNER()
KEYED: dict[str, Callable[[], nn.Module]] = {
    "objects": holding(times(lambda value: sum(value.values())), lambda: {Unlike(): 2.0, Unlike(): 3.0}),
    "weak references": holding(times(lambda value: sum(value.values())), lambda: {weakref.ref(KEY): 2.0}),
    "keys held weakly": holding(times(lambda value: value[KEY]), lambda: weakref.WeakKeyDictionary(TABLE)),
    "parameters": holding(times(lambda value: sum(value.values())), lambda: {nn.Parameter(X[0]): 2.0}),
    "an object of a variable": holding(times(lambda _: TABLE[KEY]), lambda: None),
    "a class made inside a function": holding(times(lambda _: INNER.value), lambda: None),
    "an instance of one": holding(times(lambda _: INSTANCE.scaled()), lambda: None),
    "an attribute that is one": holding(times(lambda value: value.value), lambda: _made(2.0)),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", KEYED)
def test_nothing_is_reported_of_keys_and_classes_after_loading(name: str, tmp_path: Path) -> None:
    """Objects as keys, and classes that have no name in their file, are found again."""
    model = KEYED[name]()
    whence.capture(model, (X,)).save(tmp_path / "p.whence")
    for each in (model, KEYED[name]()):
        assert whence.load(tmp_path / "p.whence", model=each).check(each, (X,)) == []
    assert whence.capture(model, (X,)).check(KEYED[name](), (X,)) == []


def test_nothing_is_reported_of_a_model_before_its_first_step() -> None:
    """The program is of later steps, and the first one is the step's own: its turn is no violation."""

    def run(self: Any, x: Tensor) -> Tensor:
        if self.value is None:
            self.value = 2
        return x * self.value

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).sin().sum()
        loss.backward()
        optimizer.step()
        return loss

    model = Holding(run, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    assert program.check(model, (X,)) == [] and model.value is None
    program.bind(model, optimizer)(X)
    assert program.check(model, (X,)) == [] and model.value == 2
    model.value = 3
    assert [row.guard.what for row in program.check(model, (X,))] == ["value"]


def test_edited_copy_of_a_graph_module_is_reported() -> None:
    """Two classes that were made for one instance each are alike only with the same code around the same."""
    functions = [lambda x: x * 2, lambda x: x * 3]
    graph = fx.Graph()
    called = graph.call_function(functions[0], (graph.placeholder("x"),))
    graph.output(called)
    model = fx.GraphModule(nn.Module(), graph)
    program, other = whence.capture(model, (X,)), copy.deepcopy(model)
    next(node for node in other.graph.nodes if node.op == "call_function").target = functions[1]
    assert program.check(other, (X,)) == []
    other.recompile()
    assert len(program.check(other, (X,))) == 1


def test_strides_that_the_model_looked_at_are_those_of_the_capture() -> None:
    """A copy has no gaps: that is no change, but for a model that asked for them."""
    model = _with_gaps()
    asking = Holding(lambda self, x: x * (2 if self.linear.weight.is_contiguous() else 3), None)
    asking.linear = model  # type: ignore[assignment]
    assert whence.capture(model, (X,)).check(copy.deepcopy(model)) == []
    (violation,) = whence.capture(asking, (X,)).check(copy.deepcopy(asking))
    assert "strides (8, 2)" in str(violation)


@pytest.mark.filterwarnings("ignore:.*kept tensors of the capture:UserWarning")
def test_numbers_of_a_cache_are_named() -> None:
    """Once a cache is filled its numbers may be anything: what it holds is compared, what it is is not."""
    model = Holding(_if_none, None)
    program = whence.capture(model, (X,))
    assert "numbers in value" in str(program.guards)
    model.value = torch.zeros(4, dtype=torch.float64)
    assert [violation.guard.what for violation in program.check(model)] == ["value"]


@pytest.mark.filterwarnings("ignore:.*kept tensors of the capture:UserWarning")
def test_cache_of_weights_is_a_change_once_it_is_filled() -> None:
    """The program computes it of weights as they are, and the model has it of those it had."""

    def run(self: Any, x: Tensor) -> Tensor:
        if self.value is None:
            self.value = self.linear.weight.detach() * 2
        return x @ self.value

    model = Holding(run, None)
    program = whence.capture(model, (X,))
    assert program.check(model) == []
    model(X)
    assert [violation.guard.what for violation in program.check(model)] == ["value"]


def test_count_that_every_run_changes_is_named() -> None:
    """It is not compared any longer, and that is said."""
    guards = whence.capture(Holding(_counting, 3), (X,)).guards
    assert guards.about("value") == []
    assert any(row.what == "value" for row in guards.unguarded)


def test_cached_recipes_that_are_made_anew() -> None:
    """A copy has recipes of its own once the caches are empty: they say the same."""
    _recipe.cache_clear()
    _sizes.cache_clear()
    model: Any = MODELS["recipes"]()
    program = whence.capture(model, (X,), backward=torch.sum)
    _recipe.cache_clear()
    _sizes.cache_clear()
    copied = copy.deepcopy(model)
    assert copied[1].recipes[2] is not model[1].recipes[2]
    assert program.check(copied, (X,)) == []
    copied[1].recipes[2].axes = ("many", "more")
    assert len(program.check(copied, (X,))) == 1


REGISTRY: dict[str, dict[str, float]] = {"first": {"factor": 2.0}}


def _registered(_: Any, x: Tensor) -> Tensor:
    entries = REGISTRY.get("first") or {}
    return x * sum(factor for _, factor in entries.items())


def test_a_registry_may_grow_that_code_asks_for_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it goes through that entry; transformers has one, with a class more for each model."""
    model = Holding(_registered, None)
    program = whence.capture(model, (X,))
    monkeypatch.setitem(REGISTRY, "second", {})
    assert program.check(model, (X,)) == []
    monkeypatch.setitem(REGISTRY["first"], "factor", 3.0)
    assert program.check(model, (X,)) != []
