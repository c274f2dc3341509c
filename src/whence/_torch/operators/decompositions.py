"""What an operation is made of: the operations that it calls, on fake tensors.

`make_fx` would give a graph, and patches `nn.Module` for every thread while it runs; a mode does not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from whence._torch.operators.schemas import is_composite
from whence._torch.pytrees import tree_map_only

FAILS = (AssertionError, NotImplementedError, DataDependentOutputException)
"""What a function raises that uses tensors of its own, or looks at numbers."""
Table = Mapping[Any, Callable[..., Any]]
"""Functions that compute what an operator does, in terms of others."""


@dataclass(frozen=True)
class Autocast:
    """The settings of one autocast region."""

    device: str
    dtype: torch.dtype | None
    enabled: bool
    cache: bool | None


@dataclass(frozen=True)
class Operation:
    """One operation below autograd, on fake values, and what it returned: the tensors themselves, and as they
    were then, for another operation may turn them."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    value: Any


def decomposition_of(
    call: Callable[[], Any],
    values: Sequence[Any],
    regions: Sequence[Autocast] = (),
    table: Table | None = None,
    running: tuple[Any, ...] = (),
) -> tuple[list[Operation], Any]:
    """What `call` does below autograd, inside these autocast regions, in the mode of these fake values.

    Operators of the `table` are followed into the functions that it gives, but for those whose functions are
    `running`.
    """
    noted: list[Operation] = []
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), nullcontext())
    with _inside_autocast_regions(regions), mode, _OperationLog(noted, table or {}, running):
        return noted, call()


class _OperationLog(TorchDispatchMode):
    """Writes down every operation of this thread."""

    def __init__(self, noted: list[Operation], table: Table, running: tuple[Any, ...]) -> None:
        super().__init__()
        self._noted = noted
        self._table = table
        self._running = list(running)

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (function := self._function(func)) is not None:
            self._running.append(func)
            try:
                with self:
                    result = function(*args, **(kwargs or {}))
            finally:
                self._running.pop()
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions, such as which device a tensor is on
            value = tree_map_only(Tensor, lambda tensor: tensor.detach(), result)
            self._noted.append(Operation(func, args, kwargs or {}, result, value))
        return result

    def _function(self, target: Any) -> Callable[..., Any] | None:
        """What a table says; what its functions call may be composite, and autograd does not see it."""
        if target in self._running:
            return None
        if target in self._table or not self._table or target.namespace == "prim":
            return self._table.get(target)
        return target.decompose if is_composite(target) else None


@contextmanager
def _inside_autocast_regions(regions: Sequence[Autocast]) -> Iterator[None]:
    with ExitStack() as stack:
        for region in regions:
            settings = {"dtype": region.dtype, "enabled": region.enabled, "cache_enabled": region.cache}
            stack.enter_context(torch.autocast(region.device, **settings))  # type: ignore[arg-type]
        yield
