"""What `type(x)` and `isinstance(x, …)` give in code that is captured: what `x` is in eager mode.

Nobody sees the calls, so a class of ours takes the place of `type`, and a function of ours that of
`isinstance`, in the files whose code names them. For all that does not stand for something else they are
Python's.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from whence._torch.fakes import FakeTensor, class_in_eager
from whence._torch.sizes.numbers import as_recorded, is_recorded
from whence._torch.tensor_questions import note_class_asked

_IN_EAGER = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class StandIn:
    """Stands in a run for what nobody may read there; who watches comes by, and reads nothing."""

    def _asked_for_class(self) -> type:
        """What it stands for is of the class of Python's that it has beside ours."""
        return type(self).__mro__[-2]


class _InPlaceOfType(type):
    """What a class does that is asked as `type` is."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        return _class_of(given[0]) if len(given) == 1 and not named else type(*given, **named)

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, type)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type)

    def __getitem__(cls, kind: Any) -> Any:
        return type[kind]


def _class_of(thing: Any) -> Any:
    kind = type(thing)
    if kind is type:
        return TYPE
    if issubclass(kind, FakeTensor):
        note_class_asked(thing)
        return class_in_eager(thing)
    if issubclass(kind, StandIn):
        return kind._asked_for_class(thing)
    if is_recorded(thing):
        return as_recorded(thing).__class__
    return next((found for symbol, found in _IN_EAGER.items() if issubclass(kind, symbol)), kind)


TYPE: Any = _InPlaceOfType("type", (type,), {"__module__": "builtins"})
"""In the place of `type`."""


def _is_instance(thing: Any, kinds: Any, /) -> bool:
    if isinstance(thing, FakeTensor):
        note_class_asked(thing, kinds)
    if isinstance(as_recorded(thing), kinds):
        return True
    in_eager = _IN_EAGER.get(type(thing))
    return in_eager is not None and issubclass(in_eager, kinds)


ANSWERS: Mapping[str, Any] = MappingProxyType({"type": TYPE, "isinstance": _is_instance})
"""What stands for Python's own in the files whose code names it."""


def is_answer(value: object) -> bool:
    """Whether a value stands for one of Python's own."""
    return any(value is answer for answer in ANSWERS.values())
