"""What `type(x)` gives in code that is captured: the class that `x` has in eager mode.

Nobody sees the call, so a class of ours takes the place of `type` in the files whose code names it. For all
that does not stand for something else it is `type`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.record.recorder import FakeTensor

_IN_EAGER = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class StandIn:
    """Stands in a run for what nobody may read there; who watches comes by, and reads nothing."""

    def _asked_for_class(self) -> type:
        """What it stands for is of the class of Python's that it has beside ours."""
        return type(self).__mro__[-2]


class _InPlaceOfType:
    """Does what a class does that is asked as `type` is; what is derived from it is derived from `type`."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return _class_of(given[0]) if len(given) == 1 and not named else type(*given, **named)

    def __instancecheck__(self, thing: object) -> bool:
        return thing is self or isinstance(thing, type)

    def __subclasscheck__(self, kind: Any) -> bool:
        return kind is self or issubclass(kind, type)

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (type,)

    def __getitem__(self, kind: Any) -> Any:
        return type[kind]

    def __or__(self, other: Any) -> Any:
        return type | other

    __ror__ = __or__

    def __getattr__(self, name: str) -> Any:
        return getattr(type, name)


def _class_of(thing: Any) -> Any:
    kind = type(thing)
    if kind is type:
        return TYPE
    if issubclass(kind, FakeTensor):
        return nn.Parameter if isinstance(thing, nn.Parameter) else Tensor
    if issubclass(kind, StandIn):
        return kind._asked_for_class(thing)
    return next((found for symbol, found in _IN_EAGER.items() if issubclass(kind, symbol)), kind)


TYPE: Any = _InPlaceOfType()
"""In the place of `type`."""
