"""Operators whose fake kernel asks which real kernel would run, and decides on sizes by that.

Fake convolutions ask for the backend to know the memory format of the result: oneDNN is not taken for a batch
below 16, for example. Which kernel runs is chosen anew in every run, by the program as by eager, so the
question is not to limit sizes. What the operator really requires of sizes is required here.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher

from whence._torch.sizes import SizeEnvironment, without_decisions

aten = torch.ops.aten

# Where the input, the weight, whether it is transposed, and the groups are among the arguments.
_CONVOLUTIONS: dict[Any, tuple[int, int, int, int]] = {
    aten.convolution.default: (0, 1, 6, 8),
    aten.convolution_backward.default: (1, 2, 7, 9),
}


def kernels_for_symbols(wanted: bool) -> AbstractContextManager[object]:
    """Inside the block, operators whose C++ kernel takes numbers only run as PyTorch's decompositions of them
    in Python, which take symbols."""
    return enable_python_dispatcher() if wanted else nullcontext()


def chooses_a_kernel(func: Any) -> bool:
    """Whether the fake kernel of an operator asks which real one would run."""
    return func in _CONVOLUTIONS


def run_without_choosing(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], environment: SizeEnvironment | None
) -> Any:
    """What the fake kernel gives; the choice of a real one decides nothing."""
    tensor, weight, transposed, groups = (args[position] for position in _CONVOLUTIONS[func])
    taken = weight.shape[0] if transposed else weight.shape[1] * groups
    torch._check(tensor.shape[1] == taken)
    with without_decisions(environment):
        return func(*args, **kwargs)
