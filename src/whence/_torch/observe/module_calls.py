"""See every module call and every access to a submodule, on one thread.

Modules are called through `torch.nn.Module.__call__` and reached through `Module.__getattr__` or a
container's own accessors. Global module hooks would not do: they change the path a call takes, are missed
when a module raises, and fire in all threads. The patches below look at the thread first, so models running
elsewhere only pay for one comparison.
"""

import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import nn

from whence._torch.function_tracer import Untold, untold
from whence._torch.observe.wrappers import call_through, inner_module
from whence._torch.patching import patched

_REGISTERING = (
    "register_forward_pre_hook",
    "register_forward_hook",
    "register_full_backward_pre_hook",
    "register_full_backward_hook",
)


class ObservedCall(NamedTuple):
    """A call of a module that is being made.

    `returned` takes its result. `answer` holds the result where it is known without running the module.
    """

    returned: Callable[[Any], None]
    answer: tuple[Any] | None = None


class CallObserver(Protocol):
    """What is told about module calls and accesses."""

    def called(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[ObservedCall]:
        """A call of `module` lasts as long as the context; its result is reported to the value given."""

    def accessed(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        """`child` was reached as the submodule `name` of `parent`."""


@contextmanager
def observed_modules(observer: CallObserver) -> Iterator[None]:
    """Report the module calls and accesses of the calling thread to `observer`."""
    here, is_over = threading.get_ident(), False

    def is_observed() -> bool:
        return threading.get_ident() == here and not is_over

    def end() -> None:
        """Whoever patched a patch of ours may call it for ever."""
        nonlocal is_over
        is_over = True

    with ExitStack() as patches:
        patches.callback(end)
        for owner, name, observed in _OBSERVED:
            patches.enter_context(patched(owner, name, observed(vars(owner)[name], observer, is_observed)))
        yield


def _observed_call(call: Any, observer: CallObserver, is_observed: Callable[[], bool]) -> Any:
    def observed_call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if not is_observed():
            return call(module, *args, **kwargs)
        if (inner := inner_module(module)) is not None:
            return call_through(call, module, inner, args, kwargs)
        with Untold(observer.called(module, args, kwargs)) as observed:
            if observed.answer is not None:
                return observed.answer[0]
            result = call(module, *args, **kwargs)
            untold(observed.returned, result)
        return result

    return observed_call


def _observed_getattr(lookup: Any, observer: CallObserver, is_observed: Callable[[], bool]) -> Any:
    def observed_getattr(module: nn.Module, name: str) -> Any:
        found = lookup(module, name)
        if isinstance(found, nn.Module) and is_observed():
            untold(observer.accessed, module, name, found)
        return found

    return observed_getattr


def _observed_iter(iterate: Any, observer: CallObserver, is_observed: Callable[[], bool]) -> Any:
    def observed_iter(container: nn.Module) -> Iterator[nn.Module | None]:
        children: Iterator[nn.Module | None] = iterate(container)
        if not is_observed():
            return children
        return _announced(partial(observer.accessed, container), children, tuple(container._modules))

    return observed_iter


def _observed_index(index: Any, observer: CallObserver, is_observed: Callable[[], bool]) -> Any:
    def observed_index(container: nn.Module, key: Any) -> Any:
        found = index(container, key)
        if isinstance(found, nn.Module) and not isinstance(key, slice) and is_observed():
            name = key if isinstance(key, str) else list(container._modules)[key]
            observer.accessed(container, name, found)
        return found

    return observed_index


def _observed_view(view: Any, observer: CallObserver, is_observed: Callable[[], bool]) -> Any:
    kind = _Values if view.__name__ == "values" else _Items

    def observed_view(container: nn.ModuleDict) -> Any:
        if not is_observed():
            return view(container)
        return kind(container._modules, partial(observer.accessed, container))

    return observed_view


_OBSERVED: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (nn.Module, "__call__", _observed_call),
    (nn.Module, "__getattr__", _observed_getattr),
    (nn.Sequential, "__iter__", _observed_iter),
    (nn.Sequential, "__getitem__", _observed_index),
    (nn.ModuleList, "__iter__", _observed_iter),
    (nn.ModuleList, "__getitem__", _observed_index),
    (nn.ModuleDict, "__getitem__", _observed_index),
    (nn.ModuleDict, "values", _observed_view),
    (nn.ModuleDict, "items", _observed_view),
)


def _announced(
    accessed: Callable[[str, nn.Module], None], children: Iterator[Any], names: Iterable[str]
) -> Iterator[Any]:
    """The children of a container as it gives them itself, each announced when it is asked for."""
    for child, name in zip(children, names, strict=True):
        if isinstance(child, nn.Module):
            accessed(name, child)
        yield child


class _Values(ValuesView[Any]):
    """The children of a `ModuleDict` as its own view has them."""

    def __init__(self, held: dict[str, Any], accessed: Callable[[str, nn.Module], None]) -> None:
        super().__init__(held)
        self._held, self._accessed = held, accessed

    def __iter__(self) -> Iterator[Any]:
        return _announced(self._accessed, iter(self._held.values()), tuple(self._held))

    def __reversed__(self) -> Iterator[Any]:
        return _announced(self._accessed, reversed(self._held.values()), tuple(reversed(self._held)))


class _Items(ItemsView[str, Any]):
    """The names and children of a `ModuleDict` as its own view has them."""

    def __init__(self, held: dict[str, Any], accessed: Callable[[str, nn.Module], None]) -> None:
        super().__init__(held)
        self._held, self._values = held, _Values(held, accessed)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return zip(tuple(self._held), self._values, strict=True)

    def __reversed__(self) -> Iterator[tuple[str, Any]]:
        return zip(tuple(reversed(self._held)), reversed(self._values), strict=True)


class WriteObserver(Protocol):
    """What is told about changes of modules."""

    def attribute_set(self, module: nn.Module, name: str) -> None:
        """The attribute `name` of `module` has been set."""

    def module_hook_registered(self) -> None:
        """A hook has been put on a module."""


@contextmanager
def observed_writes(observer: WriteObserver) -> Iterator[None]:
    """Report attributes that are set and hooks that are registered on the calling thread."""
    here = threading.get_ident()
    before: dict[str, Any] = {name: vars(nn.Module)[name] for name in ("__setattr__", *_REGISTERING)}

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        before["__setattr__"](module, name, value)
        if threading.get_ident() == here:
            observer.attribute_set(module, name)

    def registering(register: Callable[..., Any]) -> Callable[..., Any]:
        def registered(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                observer.module_hook_registered()
            return register(module, *args, **kwargs)

        return registered

    changed: dict[str, Any] = {name: registering(before[name]) for name in _REGISTERING}
    changed["__setattr__"] = set_attribute
    with ExitStack() as patches:
        for name, function in changed.items():
            patches.enter_context(patched(nn.Module, name, function))
        yield
