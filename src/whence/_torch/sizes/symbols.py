"""Sizes that are symbols.

What makes and reads them is in `size_environment`, which is imported when the first is met: sympy alone takes
as long to import as everything else here.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import _config

from whence._torch.fakes import fake_like
from whence._torch.plain_values import same_constant

if TYPE_CHECKING:
    from whence._torch.sizes.environment import SizeEnvironment

__all__ = [
    "SYMBOLIC",
    "Assumed",
    "SizesKnown",
    "admit",
    "are_same_at",
    "assumed_of",
    "bookkeeping_is_undecided",
    "comparable",
    "environment_of",
    "expression",
    "has_open_sizes",
    "is_surely_contiguous",
    "is_symbolic",
    "leave_bookkeeping_undecided",
    "mode_for_sizes",
    "names_in",
    "names_of_sizes",
    "number_of",
    "shape_env_version",
    "sized_like",
    "sizes_in",
    "spelled",
    "undecided_bookkeeping",
    "unknown_size",
    "whole_bound",
    "without_decisions",
]

SYMBOLIC = (SymInt, SymFloat, SymBool)
"""What stands for a number that is not known before a program runs."""

SizesKnown = tuple[int, ...]
"""How many symbols there are, and how much is known of them."""


def _environments() -> Any:
    """Where symbols are made and read."""
    return importlib.import_module("whence._torch.sizes.environment")


def _expressions() -> Any:
    return importlib.import_module("whence._torch.sizes.expressions")


def unknown_size(error: RuntimeError) -> tuple[str, list[str]] | None:
    """Of an error of PyTorch, what it could not decide about sizes and who gives those; None for others."""
    if not type(error).__module__.endswith("symbolic_shapes"):
        return None
    found = _environments()
    return found.unknown_condition(error) if isinstance(error, found.UnknownSize) else None


class RaggedSize(RuntimeError):
    """A jagged tensor was made, whose rows differ in length, while no size may be a symbol."""


class OuterNumber(RuntimeError):
    """A function that an operator runs, or its derivative, uses a number that only a run has."""


def _refuse_ragged(**_: Any) -> None:
    """A jagged tensor asks for a symbol; without a place for one PyTorch asserts that there is."""
    raise RaggedSize


def fake_mode_of(tensors: Iterable[Tensor], *, dynamic: bool = False) -> FakeTensorMode:
    """The mode that made the first fake tensor among `tensors`, or a new one; with sizes that are symbols
    where it is to be `dynamic`."""
    found = next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)
    return found or mode_for_sizes(vary=dynamic)


def mode_for_sizes(*, vary: bool) -> FakeTensorMode:
    """A mode for fake tensors whose sizes are numbers, or may be symbols."""
    if not vary:
        fixed: Any = FakeTensorMode()  # not of a class of its own: operators find their rules by the class
        fixed.create_symbolic_nested_int = _refuse_ragged
        return fixed  # type: ignore[no-any-return]
    mode = FakeTensorMode(shape_env=_environments().SizeEnvironment())
    mode.cache_enabled = False  # with symbols, an entry costs as much as the kernel; `Results` remembers more
    return mode


def environment_of(mode: FakeTensorMode) -> "SizeEnvironment | None":
    """The symbols of a mode whose sizes may vary."""
    if mode.shape_env is None:
        return None
    kind = _environments().SizeEnvironment
    return mode.shape_env if isinstance(mode.shape_env, kind) else None


def bookkeeping_is_undecided() -> bool:
    """Whether PyTorch does not decide on sizes where an answer would only be good to have, on this thread."""
    return bool(_config.backed_size_oblivious)


def leave_bookkeeping_undecided(wanted: bool) -> None:
    """Say whether it is to."""
    if bookkeeping_is_undecided() is not wanted:
        _config.backed_size_oblivious = wanted


@contextmanager
def undecided_bookkeeping(wanted: bool) -> Iterator[None]:
    """Inside the block PyTorch does not decide on sizes where an answer would only be good to have."""
    before = bookkeeping_is_undecided()
    leave_bookkeeping_undecided(wanted or before)
    try:
        yield
    finally:
        leave_bookkeeping_undecided(before)


@contextmanager
def _change_nothing() -> Iterator[None]:
    yield


def without_decisions(environment: "SizeEnvironment | None") -> AbstractContextManager[Any]:
    """What is decided inside the block is not required of other sizes."""
    return _change_nothing() if environment is None else environment.suppress_guards()


def admit(values: Iterable[object], name: str, number: int) -> None:
    """Let a size, by name, be this number, too, in the environment of these fake tensors."""
    sizes: Iterator[Any] = (size for value in values if isinstance(value, Tensor) for size in value.shape)
    found = [size.node.shape_env for size in sizes if isinstance(size, SymInt)]
    for environment in {id(each): each for each in found}.values():
        environment.admit(name, number)


def are_same_at(left: Any, right: Any, at: Mapping[str, int]) -> bool:
    """Whether a size is what one of another environment is, where some sizes, by name, are these numbers; any
    other constant is compared as such."""
    if isinstance(left, SYMBOLIC) or isinstance(right, SYMBOLIC):
        return bool(_expressions().are_same_at(left, right, at))
    return same_constant(left, right)


def size_at(size: Any, at: Mapping[str, int]) -> int | float:
    """What a number is where open sizes, by name, are these numbers, and all others those of the example.

    Raises `UnknownAtHand` for one that data decide, which no example gives.
    """
    if not isinstance(size, SYMBOLIC):
        return size  # type: ignore[no-any-return]
    found = _expressions().number_at(size, at)
    if found is None and (found := size.node.hint) is None:
        raise UnknownAtHand(", ".join(sorted(names_in(size))) or str(size))
    return found  # type: ignore[no-any-return]


def open_shape(tensor: Tensor) -> tuple[Any, ...]:
    """The sizes of a tensor: numbers, and expressions over the names of open ones."""
    return tuple(map(open_number, tensor.shape))


def open_number(size: Any) -> Any:
    """A number, or an expression over the names of open sizes."""
    return _expressions().over_names(size) if isinstance(size, SYMBOLIC) else size


def can_view(shape: Sequence[Any], strides: Sequence[Any], wanted: Sequence[Any] | None) -> bool | None:
    """Whether a view of a tensor laid out so has the shape wanted; without one, whether it is contiguous.

    Sizes may be such expressions: None where it is not the same for all of two and more.
    """
    return _expressions().can_view(shape, strides, wanted)  # type: ignore[no-any-return]


def is_surely_contiguous(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous whatever its open sizes are; nothing is decided by those."""
    if not has_open_sizes(tensor):
        return tensor.is_contiguous()
    return can_view(open_shape(tensor), tuple(map(open_number, tensor.stride())), None) is True


def spelled_sum(terms: Mapping[Any, int]) -> str:
    """The sum of numbers and such expressions, each with how often it occurs, as Python source."""
    return _expressions().spelled_sum(terms)  # type: ignore[no-any-return]


def terms_of(found: Any) -> dict[Any, int]:
    """A number, or such an expression, as a sum: what is added up, and how often."""
    return _expressions().terms_of(found)  # type: ignore[no-any-return]


def is_multiple(term: Any, other: Any) -> bool:
    """Whether what is added up is at least another, whatever the sizes are: it is that, times sizes."""
    return _expressions().is_multiple(term, other)  # type: ignore[no-any-return]


class UnknownAtHand(LookupError):
    """A size that is not known before the program runs; its message is the size's name."""


def sized_like(mode: FakeTensorMode, tensor: Tensor, sizes: Sequence[Any]) -> Tensor:
    """A fake leaf with the sizes given, some of which are symbols, laid out as `tensor` is, and standing for
    the conjugate or the negative of what lies there where that does."""
    strides = _strides(tensor, sizes)
    with torch._C.DisableTorchFunction():
        made = fake_like(mode, tensor, sizes, strides)
        torch._C._set_conj(made, tensor.is_conj())
        torch._C._set_neg(made, tensor.is_neg())
        return made.requires_grad_(tensor.requires_grad)


def _strides(tensor: Tensor, sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Strides that follow from sizes as those of `tensor` do; others stay numbers."""
    strides: list[Any] = list(tensor.stride())
    dense: int = 1
    spelled: Any = 1
    for dim in sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), -dim)):
        if tensor.stride(dim) == dense:
            strides[dim] = spelled
        dense = tensor.stride(dim) * tensor.shape[dim]
        spelled = strides[dim] * sizes[dim]
    return tuple(strides)


def is_symbolic(value: object) -> bool:
    """Whether a value is a number that is not known before a program runs."""
    return isinstance(value, SYMBOLIC) and bool(expression(value).free_symbols)


def expression(value: Any) -> Any:
    """What a number is, as sympy knows it, with everything that was found out since."""
    return value.node.expr if isinstance(value, SYMBOLIC) else _environments().sympy.sympify(value)


def shape_env_version(environment: "SizeEnvironment | None") -> SizesKnown:
    """How much has been found out about sizes so far: equal at two times where nothing was between them."""
    if environment is None:
        return ()
    kept = (environment.var_to_range, environment.guards, environment.decisions, environment.replacements)
    return (*map(len, kept), environment.num_deferred_runtime_asserts)


def comes_from_data(size: Any) -> bool:
    """Whether a size is one that values decide, of which nothing is known before a program runs."""
    return is_symbolic(size) and bool(_environments().free_unbacked_symbols(size))


def has_open_sizes(tensor: Tensor) -> bool:
    """Whether a size, a stride or the offset of a tensor is a symbol."""
    return isinstance(tensor, FakeTensor) and bool(tensor._has_symbolic_sizes_strides)


def comparable(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes of which some are symbols, to be compared and looked up without deciding anything by them."""
    return tuple([expression(size) if isinstance(size, SYMBOLIC) else size for size in sizes])


def number_of(value: Any) -> Any:
    """A number that is known after all."""
    found = expression(value)
    if isinstance(value, SymBool):
        return bool(found)
    return int(found) if isinstance(value, SymInt) else float(found)


def spelled(value: Any) -> str:
    """A number or an expression of sizes as Python source, over the names of the sizes."""
    if not isinstance(value, SYMBOLIC):
        return str(value)
    environment = value.node.shape_env
    return _expressions().spell(value.node.expr, getattr(environment, "names", {}))  # type: ignore[no-any-return]


def spelled_over(found: Any, names: Mapping[Any, str]) -> str:
    """An expression of sizes as Python source, over these names of symbols."""
    return _expressions().spell(found, dict(names))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Assumed:
    """What a tracer of PyTorch's assumed of open sizes.

    `conditions` are Python source with the names in it, and `limits` the least and greatest value of each
    size, None where there is none. `of_data` says that sizes depend on values, too.
    """

    conditions: tuple[tuple[str, frozenset[str]], ...]
    limits: tuple[tuple[str, int | None, int | None], ...]
    of_data: bool


def assumed_of(values: Iterable[Any]) -> Assumed:
    """What the tracers of these fake values assumed; what always holds is left out."""
    sizes = [size for value in values for size in sizes_in(value)]
    known = {id(size.node.shape_env): size.node.shape_env for size in sizes if is_symbolic(size)}.values()
    guards = [environment.replace(guard.expr) for environment in known for guard in environment.guards]
    return Assumed(
        tuple(
            (_expressions().spell(guard, {}), frozenset(map(str, guard.free_symbols)))
            for guard in dict.fromkeys(guards)
            if guard.free_symbols
        ),
        tuple(
            (str(symbol), whole_bound(bounds.lower), whole_bound(bounds.upper))
            for environment in known
            for symbol, bounds in environment.var_to_range.items()
        ),
        any(environment.deferred_runtime_asserts for environment in known),
    )


def whole_bound(bound: Any) -> int | None:
    """A bound of a symbol as a number; None where it is infinite, or not of whole numbers."""
    return int(bound) if getattr(bound, "is_Integer", False) else None


def names_in(value: Any) -> set[str]:
    """The names of the sizes that a number is made of."""
    names = getattr(value.node.shape_env, "names", {}) if isinstance(value, SYMBOLIC) else {}
    return {names.get(symbol, str(symbol)) for symbol in expression(value).free_symbols}


def sizes_in(value: Any) -> tuple[Any, ...]:
    """The sizes of a tensor; anything else stands for itself."""
    return tuple(value.shape) if isinstance(value, Tensor) else (value,)


def names_of_sizes(value: Any) -> set[str]:
    """The names in the open sizes of a tensor, or in a number."""
    return {name for size in sizes_in(value) if is_symbolic(size) for name in names_in(size)}
