"""Run PyTorch's own examples in eager mode and captured, and say how each compares."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import whence

SEEDED = "wrapper_set_seed"
"""In PyTorch's tables random operators run inside a function that sets the seed and gives it back."""


@dataclass(frozen=True)
class Case:
    """One call: what is called, and its arguments; `differentiated` if some of them require a gradient."""

    name: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    differentiated: bool

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments: the inputs of the capture."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


class Calling(nn.Module):
    """Calls a function with the tensors it is given among arguments that stay."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.function, self.arguments = case.function, (case.args, case.kwargs)

    def forward(self, *tensors: Tensor) -> Any:
        remaining = iter(tensors)
        args, kwargs = tree_map(
            lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, self.arguments
        )
        return self.function(*args, **kwargs)


def outcome(case: Case, *, joint: bool) -> str:
    """How a capture of a case compares: empty where every bit is eager's, otherwise what there is instead.

    `eager` where eager mode fails or is not one result, the code of an error of ours that refuses, `foreign`
    with any other error, `wrong` with what differs.
    """
    model = Calling(case)
    try:
        expected, again = _ran(model, case, model), _ran(model, case, model)
    except Exception as error:  # noqa: BLE001
        return f"eager: {type(error).__name__}"
    if _differing(expected, again):
        return "eager: not the same twice"
    if joint and not any(expected[name] for name in expected if name.startswith("requires")):
        return ""
    try:
        program = whence.capture(model, tuple(_given(case)), backward=joint)
        for captured in (program.module(), program.unflatten()):
            if differing := _differing(expected, _ran(captured, case, model)):
                return f"wrong: {', '.join(differing)}"
    except whence.WhenceError as error:
        return error.code
    except Exception as error:  # noqa: BLE001
        return f"foreign: {type(error).__name__}"
    return ""


def _given(case: Case) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in case.tensors]


def _ran(called: Callable[..., Any], case: Case, owner: nn.Module) -> dict[str, Any]:
    """All that a run gives and changes, from one seed; the owner of the state is as before."""
    given, state = _given(case), dict((*owner.named_parameters(), *owner.named_buffers()))
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    torch.manual_seed(0)
    random.seed(0)
    leaves = tree_leaves(called(*given))
    results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    _differentiate([result for result in results if result.requires_grad])
    found = {
        **{f"output {at}": leaf for at, leaf in enumerate(leaves)},
        **{f"requires_grad {at}": result.requires_grad for at, result in enumerate(results)},
        **{f"gradient {at}": tensor.grad for at, tensor in enumerate(given)},
        **{f"input {at}": tensor for at, tensor in enumerate(given)},
        **{f"gradient of {name}": tensor.grad for name, tensor in state.items()},
        **{name: tensor.detach().clone() for name, tensor in state.items()},
        "generator": torch.get_rng_state(),
    }
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.grad = None
            tensor.copy_(before[name])
    return found


def _differentiate(roots: Sequence[Tensor]) -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(root.shape, generator=generator).to(root.dtype) for root in roots]
    if roots:
        torch.autograd.backward(roots, drawn)


def _differing(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    names = dict.fromkeys([*expected, *found])
    return [name for name in names if not _same(expected.get(name), found.get(name))]


def _same(left: Any, right: Any) -> bool:
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return type(left) is type(right) and bool(left == right)
    alike = (left.shape, left.dtype, left.layout) == (right.shape, right.dtype, right.layout)
    return alike and _same_numbers(left.detach().to_dense(), right.detach().to_dense())


def _same_numbers(left: Tensor, right: Tensor) -> bool:
    """Equal, NaN equal to NaN; of the small types PyTorch compares few."""
    if left.is_floating_point() or left.is_complex():
        wide = torch.complex128 if left.is_complex() else torch.float64
        left, right = left.to(wide), right.to(wide)
        return bool(((left == right) | (left.isnan() & right.isnan())).all())
    return torch.equal(left, right)


def swept(cases: Iterable[Case]) -> dict[str, str]:
    """What is not as eager does it, by case and mode."""
    outcomes = {
        f"{case.name}, {'joint' if joint else 'forward'}": outcome(case, joint=joint)
        for case in cases
        for joint in ((False, True) if case.differentiated else (False,))
    }
    return {name: said for name, said in outcomes.items() if said}


def spread(rows: Sequence[Any], count: int) -> Sequence[Any]:
    """So many of the rows, from the first to the last."""
    if len(rows) <= count:
        return rows
    return [rows[round(at * (len(rows) - 1) / (count - 1))] for at in range(count)]


def modules_that_seed() -> Iterator[Any]:
    """Where PyTorch's tables look up the function that sets the seed."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal") and hasattr(module, SEEDED):
            yield module


def unseeded(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Instead of that function: the sweep seeds each run itself."""
    return operator(*args, **kwargs)
