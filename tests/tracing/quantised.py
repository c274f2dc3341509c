"""A weight of eight-bit numbers and a scale for each row, as quantisation libraries make them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


class Int8Weight(Tensor):
    """Multiplies by its scale where it is used; a linear has a way of its own."""

    numbers: Tensor
    scale: Tensor
    original: torch.dtype

    @staticmethod
    def __new__(cls: type, numbers: Tensor, scale: Tensor, original: torch.dtype) -> Any:
        make: Any = Tensor._make_wrapper_subclass
        return make(cls, numbers.shape, strides=numbers.stride(), dtype=original, device=numbers.device)

    def __init__(self, numbers: Tensor, scale: Tensor, original: torch.dtype) -> None:
        self.numbers, self.scale, self.original = numbers, scale, original

    @classmethod
    def of(cls, weight: Tensor) -> "Int8Weight":
        """The nearest weight of this kind."""
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale, weight.dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8Weight({list(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], self.original

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, original: Any, _size: Any, _stride: Any) -> "Int8Weight":
        return cls(inner["numbers"], inner["scale"], original)

    def whole(self) -> Tensor:
        """What it stands for."""
        return self.numbers.to(self.original) * self.scale

    def each(self, change: Callable[[Tensor], Tensor]) -> "Int8Weight":
        """The weight with both of its tensors changed."""
        return type(self)(change(self.numbers), change(self.scale), self.original)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten.alias.default, aten.t.default):
            changed = args[0].each(lambda tensor: func(tensor, **kwargs))
            return return_and_correct_aliasing(func, args, kwargs, changed)
        return func(*(arg.whole() if isinstance(arg, cls) else arg for arg in args), **kwargs)


def quantised(model: nn.Module) -> nn.Module:
    """The model with such weights in its linear layers."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(Int8Weight.of(layer.weight.detach()), requires_grad=False)
    return model
