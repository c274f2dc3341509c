"""Operators whose C++ kernel takes numbers only run as kernels in Python, where sizes are open.

The kernels are put in place for the process, where only threads that trace look.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher

from whence._torch.operators.table import ROWS

_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
_KERNELS: dict[Any, Callable[..., Any] | None] = {
    operator: row.kernel for operator, row in ROWS.items() if row.kernel is not None or row.takes_symbols
}
"""What runs instead of PyTorch's kernel in Python; None for the C++ kernel, which takes symbols."""


@contextmanager
def kernels_for_symbols(wanted: bool) -> Iterator[None]:
    """Inside the block operators that take numbers only run as kernels in Python that take symbols."""
    if not wanted:
        yield
        return
    before = {operator: dict(operator.py_kernels) for operator in _KERNELS}
    try:
        for operator, kernel in _KERNELS.items():
            _replace(operator, dict.fromkeys(_KEYS, kernel) if kernel is not None else {})
        with enable_python_dispatcher():
            yield
    finally:
        for operator, kernels in before.items():
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _replace(operator: Any, kernels: dict[Any, Any]) -> None:
    for key in _KEYS:
        operator.py_kernels.pop(key, None)
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()
