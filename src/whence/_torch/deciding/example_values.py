"""What the operations of a recording give on the example's real values, computed when somebody asks.

The recorded nodes are run in the order in which they were recorded, each once: so writes in place and random
draws come out as they do in eager. Nothing outside changes: memory of the example and of the model is copied
before the first write, and random generators are given back.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from whence._torch.autograd.nodes import below_autograd
from whence._torch.observe.generators import DEFAULT
from whence._torch.operators.schemas import acts, draws, written_arguments
from whence._torch.pytrees import tree_flatten, tree_map_only
from whence._torch.tensors import autocast_state, storage_of, without_autocast

ABSENT = object()
"""The value of what is computed from something that the example does not have, such as a tangent."""


@contextmanager
def for_real() -> Iterator[None]:
    """Inside the block operations run as a flat program runs them: past all modes, below autograd."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        no_python_dispatcher(),
        without_autocast(autocast_state()),
        below_autograd(),
    ):
        yield


class ExampleValues:
    """The values of a graph's nodes on the example.

    `held` gives what a placeholder stands for, and `redraws` the draw that one in a recomputation repeats.
    `nested` holds the graphs of functions that operators run.
    """

    def __init__(
        self,
        graph: fx.Graph,
        nested: nn.Module,
        held: Callable[[fx.Node], Any],
        redraws: Mapping[fx.Node, fx.Node | None],
    ) -> None:
        self._graph = graph
        self._nested = nested
        self._held = held
        self._redraws = redraws
        self._values: dict[fx.Node, Any] = {}
        self._foreign: set[int] = set()
        self._moved: dict[int, torch.UntypedStorage] = {}
        self._states: list[Tensor] | None = None

    def of(self, node: fx.Node) -> Any:
        """The value of a node, now that all before it have run; `ABSENT` where the example has none."""
        waiting = [row for row in self._graph.nodes if row not in self._values]
        with for_real(), self._generators_moved(any(draws(r.target, r.args, r.kwargs) for r in waiting)):
            for row in waiting:
                self._values[row] = self._computed(row)
        return self._values[node]

    def sized_by_indices(self, node: fx.Node) -> Any:
        """What has the size of an indexing's result, which masks alone decide: nothing else is known of a
        gradient.

        Its numbers are none of the example's: the value of the node stays `ABSENT`.
        """
        source: Any = node.args[0]
        indices: Any = fx.map_arg(node.args[1], self._values.__getitem__)
        if any(index is ABSENT for index in indices):
            return ABSENT
        shown = source.meta["val"]
        with for_real():
            gradient = torch.empty_strided(
                shown.shape, shown.stride(), dtype=shown.dtype, device=shown.device
            )
            return node.target(gradient, indices)  # type: ignore[operator]

    def know(self, node: fx.Node, value: Any) -> None:
        """A value that was found another way."""
        self._values[node] = value

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._adopted(self._held(node))
        if node.op == "get_attr":
            return self._nested.get_submodule(str(node.target))
        if acts(node.target):
            return None
        if (first := self._redraws.get(node)) is not None:
            return self._values[first]
        if any(self._values[source] is ABSENT for source in node.all_input_nodes):
            return ABSENT
        self._copy_outside_memory(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _adopted(self, value: Any) -> Any:
        """What a placeholder stands for; a fake or a meta tensor says nothing."""
        if not isinstance(value, Tensor):
            return value
        if isinstance(value, FakeTensor) or value.is_meta:
            return ABSENT
        value = value.detach()
        if value.layout is torch.strided:
            self._foreign.add(storage_of(value))
        return self._at_home(value)

    def _copy_outside_memory(self, node: fx.Node) -> None:
        """Copy the memory that an operation writes to, if it is the model's or the example's."""
        written = written_arguments(node.target, node.args, node.kwargs)
        values = [self._values[row] for row in tree_flatten(written)[0] if isinstance(row, fx.Node)]
        for value in values:
            if value.layout is torch.strided and (memory := storage_of(value)) in self._foreign:
                self._foreign.remove(memory)
                self._moved[memory] = value.untyped_storage().clone()
                for row, known in self._values.items():
                    self._values[row] = tree_map_only(Tensor, self._at_home, known)

    def _at_home(self, tensor: Tensor) -> Tensor:
        """A tensor, looking into the copy of its memory where there is one."""
        if tensor.layout is not torch.strided or (memory := storage_of(tensor)) not in self._moved:
            return tensor
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(self._moved[memory], tensor.storage_offset(), tensor.shape, tensor.stride())

    @contextmanager
    def _generators_moved(self, wanted: bool) -> Iterator[None]:
        """Inside the block random generators are where eager has them by now; a recording draws nothing."""
        if not wanted:
            yield
            return
        generators = [DEFAULT, *torch.cuda.default_generators]
        before = [generator.get_state() for generator in generators]
        for generator, state in zip(generators, self._states or before, strict=True):
            generator.set_state(state)
        try:
            yield
            self._states = [generator.get_state() for generator in generators]
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
