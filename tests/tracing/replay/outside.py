"""Layers that depend on something besides what they are given and hold, each in another way.

`loop` steps through the layers and changes what the layers look at between them.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from tests.tracing.replay.layered import WIDTH, Block


class Shared:
    """An object outside the model."""

    def __init__(self) -> None:
        self.count = 0

    def bump(self) -> int:
        """One more."""
        self.count += 1
        return self.count

    @property
    def now(self) -> int:
        """How many."""
        return self.count


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("count",)

    def __init__(self, count: float = 0) -> None:
        self.count = count


class Local(threading.local):
    """An object with other attributes in each thread."""

    count = 1

    def get(self) -> int:
        """How many."""
        return self.count


NUMBER = 1
COUNTED = [0]
SHARED, LISTED, LOCAL, SLOTTED = Shared(), [Shared()], Local(), Slotted()
BY_IDENTITY: dict[Any, float] = {}
THIS: Any = None
ADDED = types.ModuleType("whence_added_module")
ADDED.count = 1  # type: ignore[attr-defined]
sys.modules[ADDED.__name__] = ADDED


def reset() -> None:
    """Everything as it was when this file was read."""
    set_all(1)
    COUNTED[0] = 0
    HoldsNested.Config.scale = 1.0
    CountsOnType.count = CountsOnClass.count = CountsByMethod.count = CountsOnItself.count = 0
    counted.calls = 0  # type: ignore[attr-defined]
    defaults: Any = CountsInDefault.forward.__defaults__
    defaults[0]["count"] = 0


def set_all(count: int) -> None:
    """Give everything that can be looked at a number."""
    global NUMBER  # noqa: PLW0603
    NUMBER = SHARED.count = LISTED[0].count = LOCAL.count = count
    SLOTTED.count = count
    ADDED.count = count  # type: ignore[attr-defined]
    os.environ["WHENCE_TEST_COUNT"] = str(count)


def counted(x: Tensor) -> Tensor:
    """Counts its calls in an attribute of its own."""
    counted.calls += 1  # type: ignore[attr-defined]
    return x * counted.calls  # type: ignore[attr-defined]


class CountsOnType(Block):
    """The counter is looked up through the type."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        """Counts."""
        type(self).count += 1
        return super().forward(x) * type(self).count


class CountsOnClass(Block):
    """The counter is looked up through `__class__` of the instance."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        """Counts."""
        self.__class__.count += 1
        return super().forward(x) * self.count


class CountsByMethod(Block):
    """The counter is counted by a class method."""

    count = 0

    @classmethod
    def bump(cls) -> int:
        """One more."""
        cls.count += 1
        return cls.count

    def forward(self, x: Tensor) -> Tensor:
        """Counts."""
        return super().forward(x) * self.bump()


class CountsOnItself(Block):
    """The class is a variable that the method closes over."""

    count = 0

    def forward(self, x: Tensor) -> Tensor:
        """Counts."""
        __class__.count += 1  # type: ignore[name-defined]
        return super().forward(x) * __class__.count  # type: ignore[name-defined]


class CountsInDefault(Block):
    """A mutable default."""

    def forward(self, x: Tensor, kept: dict[str, int] = {"count": 0}) -> Tensor:  # noqa: B006
        """Counts."""
        kept["count"] += 1
        return super().forward(x) * kept["count"]


class CountsOnFunction(Block):
    """An attribute of a function."""

    def forward(self, x: Tensor) -> Tensor:
        """Counts."""
        return counted(super().forward(x))


def scaled_by(scale: Callable[[Any], Any]) -> type[Block]:
    """A class of layers scaled by what `scale` finds."""

    class Scaled(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale(self)

    return Scaled


class ByMethod(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SHARED.bump()


class ByProperty(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SHARED.now


class InList(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * LISTED[0].count


class ByName(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(SHARED, "count")  # noqa: B009


class ByComputedName(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(SHARED, "co" + "unt")


class BySlot(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SLOTTED.count


class ByThread(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * LOCAL.get()


class ByEnvironment(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(os.environ["WHENCE_TEST_COUNT"])


class ByGlobals(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * globals()["NUMBER"]


class ByImport(Block):
    def forward(self, x: Tensor) -> Tensor:
        import whence_added_module  # type: ignore[import-not-found] # noqa: PLC0415

        return super().forward(x) * whence_added_module.count


class ByImportedName(Block):
    def forward(self, x: Tensor) -> Tensor:
        from whence_added_module import count  # noqa: PLC0415

        return super().forward(x) * count


class ByFrame(Block):
    def forward(self, x: Tensor) -> Tensor:
        frame = inspect.currentframe()
        while frame is not None and "number" not in frame.f_locals:
            frame = frame.f_back
        return super().forward(x) * (1 if frame is None else frame.f_locals["number"])


class ByCopy(Block):
    held: Any = SHARED

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * copy(SHARED).count


class ById(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * BY_IDENTITY[id(self)]


class ByKey(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * BY_IDENTITY[self]


class IsThis(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self is THIS else 1.0)


class HoldsThis(Block):
    config: Any

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if self.config is THIS else 1.0)


class ByVars(Block):
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * vars(self)["scale"]


class ByDictionary(Block):
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.__dict__["scale"]


class PastClass(Block):
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * object.__getattribute__(self, "scale")


class Described:
    """A descriptor that keeps the values itself."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}

    def __get__(self, thing: Any, kind: type | None = None) -> Any:
        return self if thing is None else self.values[id(thing)]

    def __set__(self, thing: Any, value: float) -> None:
        self.values[id(thing)] = value


class ByDescriptor(Block):
    scale = Described()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class HoldsSlots(Block):
    config: Any

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.count


class WritesSlots(Block):
    config: Any

    def forward(self, x: Tensor) -> Tensor:
        self.config.count += 1
        return super().forward(x) * self.config.count


class MultipliesBySet(Block):
    factors: Any

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        for factor in self.factors:
            x = x * factor
        return x


class Turns(Block):
    phase: complex

    def forward(self, x: Tensor) -> Tensor:
        pairs = super().forward(x).reshape(*x.shape[:-1], -1, 2)
        return torch.view_as_real(torch.view_as_complex(pairs) * self.phase).reshape(x.shape)


class ByWeightAttribute(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.up.weight.scale  # type: ignore[attr-defined]


class MarksResult(Block):
    def forward(self, x: Tensor) -> Tensor:
        depth = getattr(x, "depth", 1)
        x = super().forward(x) * depth
        x.depth = depth + 1  # type: ignore[attr-defined]
        return x


class Warns(Block):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("a warning of the model", stacklevel=1)
        return super().forward(x)


class WritesPart(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x[:, 0] = x[:, 1] * 2
        return x * 1.0


class Resembles(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + functional.cosine_similarity(x, x.flip(-1), dim=-1).unsqueeze(-1)


class HoldsNested(Block):
    class Config:
        scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.Config.scale


class ScalesNested(nn.Module):
    """A class inside the class of the layers is changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(HoldsNested() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            HoldsNested.Config.scale = 1.0 + number
            x = layer(x)
        return x


def scaled(state: list[int], x: Tensor) -> Tensor:
    """Counts in a list that it is given."""
    state[0] += 1
    return x * state[0]


class CallsPartial(Block):
    scaling: Any

    def forward(self, x: Tensor) -> Tensor:
        return self.scaling(super().forward(x))


class _ScaledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Any, x: Tensor) -> Any:
        ctx.layer = layer
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0] * ctx.layer.scale


class ReadsInBackward(Block):
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        return _ScaledBackward.apply(self, super().forward(x))


class LooksAtMemory(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.as_strided(x, (WIDTH,), (1,), x.storage_offset())


class Chunks(nn.Module):
    """Layers look at parts of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LooksAtMemory() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = (x * 2).unbind(0)
        return torch.stack([layer(part) for layer, part in zip(self.layers, parts, strict=True)])


class ReadsConfig(Block):
    config: Any

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.config.count


class WritesFirst(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x.add_(1)
        x[:, 0].mul_(2)
        return self.inner(x)


class Loop(nn.Module):
    """Layers in a row; everything outside is given another number before each."""

    def __init__(self, kind: Callable[[], nn.Module], count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers, 1):
            set_all(number)
            x = layer(x)
        return x


class Row(Loop):
    """Layers in a row."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Patched(Loop):
    """Somebody replaces a function of torch meanwhile."""

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            with mock.patch.object(functional, "gelu", functional.relu if number == 3 else functional.gelu):
                x = layer(x)
        return x


class LooksAtHistory(Loop):
    """What autograd recorded decides."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x * (1 if x.grad_fn is None else 1 + len(x.grad_fn.next_functions))
        return x


class WritesData(Loop):
    """Results are written past autograd."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x.data.mul_(2)
        return x


class Substitutes(Loop):
    """The weights are other tensors."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weights = {name: weight * 1.5 for name, weight in layer.named_parameters()}
            x = torch.func.functional_call(layer, weights, (x,))
        return x


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: Tensor) -> Any:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.layer(x)
        return None, torch.autograd.grad(result, x, gradients)[0]


class Recomputes(Loop):
    """A checkpoint by hand."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.layers[0].norm.weight  # type: ignore[operator, union-attr]
        for layer in self.layers:
            x = _Recomputed.apply(layer, x)
        return x


class Cached(Loop):
    """Parametrised weights are computed once for several calls."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](self.layers[0](x))
        with parametrize.cached():
            for _ in range(3):
                x = self.layers[0](x)
        return x


class PassesList(Loop):
    """A list is given and comes back."""

    def forward(self, x: Tensor) -> Tensor:
        held = [x]
        for layer in self.layers:
            x, same = layer(x, held)
            same[0] = same[0] * 0.5
        return x + held[0]


class GivesListBack(Block):
    def forward(self, x: Tensor, held: list[Tensor]) -> Any:  # type: ignore[override]
        return super().forward(x) + held[0], held


class TwoInputs(Block):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + self.up(y).sum(-1, keepdim=True) * x


class Mixed(Loop):
    """The gradients come in one layout for some layers, in another for others."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x * 2, x)
        second = self.layers[1](first, x * 2)
        third = self.layers[2](x * 2, second)
        return third.transpose(0, 1).contiguous().transpose(0, 1)


class Wrapped(nn.Module):
    """Something inside something."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class OneInTwo(nn.Module):
    """The same wrapper around a torch layer, and around itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Wrapped(Wrapped(self._layer())), Wrapped(self._layer())

    @staticmethod
    def _layer() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Nested(nn.Module):
    """Two layers, a part of whose result is cut off from its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.out = Block(), TwoInputs(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        p = self.one(x)
        return self.out(p) + self.other(x + p.detach(), y) * p


class CalledOften(nn.Module):
    """One module called several times: its weights collect the gradients of all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer, self.unused = nn.Linear(WIDTH, WIDTH), Nested(), Nested()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        self.layer(x, x)
        return self.layer(x, x), self.layer(x, x)


def numbered(kind: type[Block], name: str, make: Callable[[int], Any]) -> nn.Module:
    """A row of layers, each with an attribute of its own."""
    row = Row(kind)
    for number, layer in enumerate(row.layers, 1):
        setattr(layer, name, make(number))
    return row


def identified(kind: type[Block]) -> nn.Module:
    """A row of layers that are known to a table outside, and the last of them to a variable."""
    global THIS  # noqa: PLW0603
    row = Row(kind)
    THIS = row.layers[-1]
    BY_IDENTITY.clear()
    for number, layer in enumerate(row.layers, 1):
        BY_IDENTITY[id(layer)] = BY_IDENTITY[layer] = float(number)
    return row


def one_known() -> nn.Module:
    """Layers whose configurations are equal, one of which a variable knows."""
    global THIS  # noqa: PLW0603
    row = numbered(HoldsThis, "config", lambda _: Shared())
    THIS = row.layers[-1].config  # type: ignore[union-attr,index]
    return row


def weighted() -> nn.Module:
    """Weights that carry a number."""
    row = Row(ByWeightAttribute)
    for number, layer in enumerate(row.layers, 1):
        layer.up.weight.scale = float(number)  # type: ignore[union-attr]
    return row


def counting_in_closure() -> nn.Module:
    """A class and an object that only a function knows."""
    state = Shared()

    class Counts(Block):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            Counts.count += 1
            state.count += 2
            return super().forward(x) * (Counts.count + state.count)

    return Row(Counts)


def parametrised() -> nn.Module:
    """Layers whose first weight is normalised."""
    model = Cached(Block, 2)
    for layer in model.layers:
        parametrizations.weight_norm(layer.up)  # type: ignore[arg-type]
    return model


def sharing_slots() -> nn.Module:
    """One object for all layers."""
    config = Slotted(0)
    return numbered(WritesSlots, "config", lambda _: config)


CASES: dict[str, Callable[[], nn.Module]] = {
    **{
        kind.__name__: (lambda kind=kind: Row(kind))  # type: ignore[misc]
        for kind in (
            *(CountsOnType, CountsOnClass, CountsByMethod, CountsOnItself, CountsInDefault, CountsOnFunction),
            *(MarksResult, WritesPart, Resembles),
        )
    },
    **{
        kind.__name__: (lambda kind=kind: Loop(kind))  # type: ignore[misc]
        for kind in (
            *(
                ByMethod,
                ByProperty,
                InList,
                ByName,
                ByComputedName,
                BySlot,
                ByThread,
                ByEnvironment,
                ByGlobals,
            ),
            *(ByImport, ByImportedName, ByFrame, ByCopy),
        )
    },
    **{
        kind.__name__: (lambda kind=kind: identified(kind))  # type: ignore[misc]
        for kind in (ById, ByKey, IsThis)
    },
    **{
        kind.__name__: (lambda kind=kind: numbered(kind, "scale", float))  # type: ignore[misc]
        for kind in (ByVars, ByDictionary, PastClass, ByDescriptor)
    },
    **{
        kind.__name__: (lambda kind=kind: kind(Block))  # type: ignore[misc]
        for kind in (Patched, LooksAtHistory, WritesData, Substitutes, Recomputes)
    },
    "a class inside a class": ScalesNested,
    "a partial function": partial(numbered, CallsPartial, "scaling", lambda _: partial(scaled, COUNTED)),
    "an attribute read in the backward": partial(numbered, ReadsInBackward, "scale", float),
    "memory": Chunks,
    "a configuration for each": partial(numbered, ReadsConfig, "config", lambda _: Shared()),
    "a range for each": lambda: numbered(MultipliesBySet, "factors", lambda n: range(1, 3 + n % 2, 2)),
    "written before an inner call": lambda: Row(WritesFirst),
    "HoldsThis": one_known,
    "HoldsSlots": lambda: numbered(HoldsSlots, "config", Slotted),
    "WritesSlots": sharing_slots,
    "sets in another order": lambda: numbered(MultipliesBySet, "factors", lambda n: [{1, 9}, {9, 1}][n % 2]),
    "sets of other types": lambda: numbered(MultipliesBySet, "factors", lambda n: [{1}, {True}][n % 2]),
    "signed zeros": lambda: numbered(Turns, "phase", lambda n: complex(1, [0.0, -0.0][n % 2])),
    "attributes of weights": weighted,
    "variables of a function": counting_in_closure,
    "a cache of torch's": parametrised,
    "a list given back": lambda: PassesList(GivesListBack),
    "gradients in two layouts": lambda: Mixed(TwoInputs, 3),
    "a wrapper in itself": OneInTwo,
    "one module called often": CalledOften,
}
