"""What stands, in the run that is recorded, for things that a step replaces or only adds to.

What a step finds there would be another thing in every run: whoever asks for it is refused.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Self

from whence._torch.pytrees import tree_flatten
from whence.program.calls import Deferred
from whence.tracing.reads.type_queries import StandIn

Refuse = Callable[[str], Exception]
"""Makes the error for a step that reads what is at this path."""


def _deny(self: Any, *_operands: object) -> Any:
    raise object.__getattribute__(self, "refusal")(object.__getattribute__(self, "at"))


def _class_of(self: Any) -> type:
    """The class, for those who watch what the step does: they come by, and read nothing."""
    asking = sys._getframe(1).f_globals.get("__name__", "")
    return type(self) if asking.partition(".")[0] == "whence" else _deny(self)


class Unread(StandIn):
    """Stands for a value that the step replaces."""

    def __init__(self, path: str, refuse: Refuse) -> None:
        object.__setattr__(self, "at", path)
        object.__setattr__(self, "refusal", refuse)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _deny
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _deny
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __neg__ = __pos__ = __abs__ = _deny
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __hash__ = __bool__ = __len__ = _deny
    __iter__ = __contains__ = __getitem__ = __setitem__ = __delitem__ = __call__ = __getattr__ = _deny
    __int__ = __float__ = __complex__ = __index__ = __round__ = __str__ = __repr__ = __format__ = _deny
    __array__ = __setattr__ = __delattr__ = __enter__ = _asked_for_class = _deny
    __class__ = property(_class_of)

    @classmethod
    def __torch_function__(cls, _function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _deny(next(leaf for leaf in tree_flatten((args, kwargs))[0] if issubclass(type(leaf), Unread)))


class Later(Unread):
    """Stands for what a schedule leaves: it may be handed on, and a run puts there what is left.

    `number` is how many schedules had been called by then.
    """

    def __init__(self, path: str, refuse: Refuse, left: Deferred, number: int) -> None:
        super().__init__(path, refuse)
        object.__setattr__(self, "left", left)
        object.__setattr__(self, "number", number)


def refuse_read(value: object) -> None:
    """Raise the error of a stand-in that the step hands on."""
    if type(value) is Unread:
        _deny(value)


def left_at(later: Later) -> tuple[str, Deferred, int]:
    """Which place it is, what is left there, and after how many calls."""
    at, left, number = (object.__getattribute__(later, name) for name in ("at", "left", "number"))
    return at, left, number


class _Appended(StandIn):
    """What a list and a deque have in common that a step appends to; `added` is what it appended."""

    def __init__(self, path: str, refuse: Refuse, like: Any, *extent: Any) -> None:
        super().__init__([Unread(path, refuse)], *extent)  # type: ignore[call-arg]
        self.at = path
        self.refusal = refuse
        self.like = like
        self.added: list[Any] = []

    def append(self, value: Any) -> None:
        """Note it."""
        self.added.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        """Note them."""
        self.added.extend(values)

    def __iadd__(self, values: Iterable[Any]) -> Self:  # type: ignore[misc]
        self.extend(values)
        return self

    __len__ = __iter__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = _deny
    __add__ = __mul__ = __rmul__ = __imul__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = _deny
    __bool__ = __reversed__ = __repr__ = copy = count = index = insert = pop = remove = reverse = _deny
    clear = _deny


class GrowingList(_Appended, list[Any]):
    """Stands for a list that the step appends to."""

    sort = _deny  # type: ignore[assignment]


class GrowingDeque(_Appended, deque[Any]):
    """Stands for a deque that the step appends to."""

    appendleft = extendleft = popleft = rotate = _deny


Growing = GrowingList | GrowingDeque


def growing(path: str, refuse: Refuse, like: Any) -> Growing:
    """What stands for a list or a deque."""
    if isinstance(like, list):
        return GrowingList(path, refuse, like)
    return GrowingDeque(path, refuse, like, like.maxlen)


def is_stand_in(value: object) -> bool:
    """Whether a value is one of these; its class must not be asked."""
    return type(value) in (Unread, GrowingList, GrowingDeque)
