"""The real tensors that a recording knows: recognised by identity, and replaced by fake ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, snapshot_fake, track_tensor_tree

from whence._torch.autograd.nodes import above_autograd, outside_inference_mode
from whence._torch.fakes import FakeMaker, as_leaf_like, fake_of
from whence._torch.operators.schemas import is_composite
from whence._torch.sizes.symbols import has_open_sizes
from whence._torch.tensors import is_simple, storage_of


def fresh_like(fakes: FakeMaker, like: Tensor) -> Tensor:
    """A fake tensor that nobody knows."""
    if has_open_sizes(like):
        return snapshot_fake(like)  # type: ignore[return-value]
    return fakes.like(like)


def fresh_pair_like(fakes: FakeMaker, like: Tensor) -> tuple[Tensor, Any]:
    """A fake tensor that nobody knows, and what shows it."""
    if has_open_sizes(like):
        fresh = fresh_like(fakes, like)
        return fresh, snapshot_fake(fresh)
    return fakes.pair_like(like)


class Inferred:
    """The memory of what eager makes as inference tensors: all that is computed in inference mode.

    A view of another tensor is what that is.
    """

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self.is_inside = False

    def take(self, twin: Tensor, tensor: Tensor) -> None:
        """A fake `twin` stands for an input."""
        if tensor.is_inference():
            self.storages.add(storage_of(twin))

    def has(self, fake: Tensor) -> bool:
        """Whether eager has an inference tensor in the place of a fake one."""
        return storage_of(fake) in self.storages

    def around(self, record: Callable[..., Any], func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives that is called while inference mode is on.

        A composite comes here whole: none of autograd's kernels has taken it apart, which they do when it is
        called once more. Its result becomes a view outside, and must not be one before.
        """
        self.is_inside = True
        try:
            if func.namespace != "prim" and is_composite(func):
                recorder: Any = record.__self__  # type: ignore[attr-defined]
                with outside_inference_mode(), above_autograd(tracking_views=False), recorder:
                    return func(*args, **(kwargs or {}))
            with outside_inference_mode():
                return self.noted(func, record(func, types, args, kwargs))
        finally:
            self.is_inside = False

    def noted(self, func: Any, result: Any) -> Any:
        """What an operator gave, noted where that is in inference mode."""
        if self.is_inside and isinstance(func, OpOverload) and not _gives_views(func):
            made = result if isinstance(result, list | tuple) else (result,)
            self.storages |= {storage_of(each) for each in made if isinstance(each, FakeTensor)}
        return result


def _gives_views(func: OpOverload) -> bool:
    return any(row.alias_info for row in func._schema.returns)


class Adopted:
    """Real tensors with their placeholders, the `nodes`, and the fake `stand_ins` that operations have asked
    for, both by identity; `real` is the way back."""

    def __init__(self, mode: FakeTensorMode, fakes: FakeMaker, tracer: Any) -> None:
        self.real: dict[fx.Node, Tensor] = {}
        self._mode = mode
        self._fakes = fakes
        self._tracer = tracer
        self.nodes: dict[int, fx.Node] = {}
        self.stand_ins: dict[int, Tensor] = {}
        self._storages: set[int] = set()
        self.replaced: dict[int, tuple[Tensor, fx.Node]] = {}
        """Tensors that have other data now, by identity, with their placeholders."""

    def add(self, tensor: Tensor, node: fx.Node) -> None:
        """Let a real tensor be known by a placeholder from now on."""
        node.meta["val"] = self._shown(tensor)
        self.nodes[id(tensor)] = node
        self.real[node] = tensor

    def stand_in(self, tensor: Tensor) -> Tensor | None:
        """The fake tensor that operations get in the place of a real one, made when the first asks."""
        known = self.stand_ins.get(id(tensor))
        if known is not None or (node := self.nodes.get(id(tensor))) is None:
            return known
        shown: Tensor = node.meta["val"]
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            stand_in = shown.detach() if shown.requires_grad else shown
        self.stand_ins[id(tensor)] = stand_in
        track_tensor_tree(stand_in, fx.Proxy(node, self._tracer), constant=None, tracer=self._tracer)
        node.meta["val"] = shown
        return stand_in

    def stands_for(self, tensor: Tensor, value: Tensor) -> bool:
        """Let another fake tensor stand for a real one from now on; whether one did."""
        if id(tensor) not in self.stand_ins:
            return False
        self.stand_ins[id(tensor)] = value
        return True

    def forget(self) -> None:
        """Let go of all of them."""
        for held in (self.stand_ins, self.nodes, self.real, self.replaced):
            held.clear()

    def _shown(self, tensor: Tensor) -> Tensor:
        """A fake tensor that shows what `tensor` is; made directly where it is nothing special."""
        if isinstance(tensor, FakeTensor):
            memory: Any = tensor.detach()  # of which the leaf is another
            return as_leaf_like(memory, tensor)
        if not is_simple(tensor) or (storage := storage_of(tensor)) in self._storages:
            return fake_of(self._mode, tensor)
        self._storages.add(storage)
        with torch._C.DisableTorchFunction():
            shown = fresh_like(self._fakes, tensor)
            if isinstance(tensor, nn.Parameter):
                shown._is_param = True
            return shown.requires_grad_(tensor.requires_grad)
