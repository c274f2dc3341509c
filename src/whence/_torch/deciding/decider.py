"""What is decided by values goes as the example decides it, and the recording says so."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from whence._torch.deciding.example_values import ABSENT, ExampleValues, for_real
from whence._torch.fakes import fake_like
from whence._torch.operators.schemas import OpOverload, has_size_of_data, short_name
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import tree_map_only
from whence._torch.record.direct_recording import is_plain
from whence._torch.sizes.drawn_numbers import DRAWN, HostDraw, as_tensor, spelled_number
from whence._torch.sizes.numbers import ITEM, are_alike, contents, sizes_of, stays
from whence._torch.sizes.symbols import spelled_over
from whence.errors import Place, UnsupportedMutation

if TYPE_CHECKING:
    from whence._torch.record.recorder import Recorder

_INDEX = torch.ops.aten.index.Tensor
_PACK = torch.ops.aten._pack_padded_sequence.default
_LARGEST = 2**53
"""From here on, and for what is no number, Python's integers are others than a tensor's."""
_MOST = 4096
"""How many numbers of a tensor Python may look at: a program holds them all."""


@contextmanager
def deciding(
    recorder: "Recorder", inputs: Sequence[tuple[fx.Node, Any]], redraws: Mapping[fx.Node, fx.Node | None]
) -> Iterator[None]:
    """Inside the block values of the example decide, where the model lets values decide."""
    decider = Decider(recorder, dict(inputs), redraws)
    with recorder.deciding(decider):
        yield
        decider.refuse_written()


class Decider:
    """Answers with the example's values, and appends a node for each answer that holds every run to it."""

    def __init__(
        self, recorder: "Recorder", inputs: Mapping[fx.Node, Any], redraws: Mapping[fx.Node, fx.Node | None]
    ) -> None:
        self._recorder = recorder
        self._known: dict[object, Any] = {}
        self._arrays: list[tuple[Any, Any, Place]] = []
        held = partial(_real_value, recorder, inputs)
        self._values = ExampleValues(recorder.graph, recorder.nested, held, redraws)

    # --- what is asked -------------------------------------------------------------------------------

    def by_symbols(self, asked: Any) -> Any:
        """The answer to a question about numbers of a run; None where the example does not have it."""
        sizes: Any = self._recorder.sizes
        if not sizes.knows(asked):
            return None
        node = sizes.argument(asked)
        if not isinstance(node, fx.Node):
            return node
        key = (self._recorder.listener.user_of_sizes(), asked)
        if key not in self._known:
            answer = self._values.of(node)
            if answer is ABSENT:
                return None
            self._known[key] = answer
            is_number = node.target is ITEM
            shown = _number(node) if is_number else spelled_over(asked, sizes.readable_names())
            self._note(node, answer, shown)
        return self._known[key]

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator gives that reads values: a number, a truth, or tensors whose size is the
        example's; None for other operators, and where the example does not have it."""
        recorder = self._recorder
        if not _reads_values(func, args, symbols_stand=recorder.environment is not None):
            return None
        given = tree_map_only(Tensor, recorder.node_of, (args, kwargs))
        node = recorder.graph.create_node(
            "call_function", func, given[0], given[1], func.overloadpacket.__name__
        )
        node.meta["val"] = None
        found = self._values.of(node)
        if found is ABSENT and func is _INDEX:
            found = self._values.sized_by_indices(node)
        if found is ABSENT:
            recorder.graph.erase_node(node)
            return None
        if not isinstance(found, (bool, int, float, complex)):
            return self._sized(node, found)
        node.meta["val"] = found
        recorder.listener.size_recorded(node)
        sources = ", ".join(source.name for source in node.all_input_nodes)
        self._note(node, found, _number(node) if func is ITEM else f"{short_name(func)}({sources})")
        return found

    def _sized(self, node: fx.Node, found: Any) -> Any:
        recorder = self._recorder
        result = tree_map_only(
            Tensor, lambda real: fake_like(recorder.fake_mode, real, real.shape, real.stride()), found
        )
        recorder.track(result, node)
        recorder.listener.recorded(node)
        if not isinstance(result, Tensor):
            for position, part in enumerate(result):
                recorder.track_part(node, position, part)
        for part in [result] if isinstance(result, Tensor) else result:
            made = recorder.node_of(part)
            sizes = self._append(sizes_of, (made,), list(part.shape))
            self._note(sizes, list(part.shape), f"the size of {node.name}")
        return result

    def content(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What Python makes of all numbers of a tensor; None where the example does not have them."""
        node = self._recorder.node_of(self._recorder.recognised(args[0]))
        if node is None:
            return None
        found: Any = self._values.of(node)
        if found is ABSENT or found.numel() > _MOST:
            return None
        with for_real():
            numbers = contents(found)
            given = function(found.clone(), *args[1:])
        self._note(self._append(contents, (node,), None), numbers, f"the content of {node.name}")
        if type(given) not in PLAIN and hasattr(given, "tolist"):
            self._arrays.append((given, numbers, self._recorder.listener.model.here()))
        return given

    def refuse_written(self) -> None:
        """Raise `UnsupportedMutation` where the model has written to an array, and so to a tensor."""
        with for_real():
            written = [
                place for array, numbers, place in self._arrays if not are_alike(array.tolist(), numbers)
            ]
        if written:
            raise UnsupportedMutation(
                "the model writes into the NumPy array of a tensor",
                where=written[0],
                why="array and tensor are one memory, and a capture does not see who writes to an array",
                remedy="write to a copy: tensor.numpy().copy(), or write to the tensor",
            )

    def number(self, node: fx.Node) -> Any:
        """The number that a node gives; None where the example does not have it."""
        found = self._values.of(node)
        return None if found is ABSENT else found

    def drawn(self, draw: HostDraw, found: Any) -> Any:
        """What Python or NumPy has drawn just now, as what a node draws in every run."""
        count = len(found) if type(found) is list else -1
        is_whole = count >= 0 or type(found) is int
        made = DRAWN(draw.function, draw.arguments, is_whole, count)
        with for_real():
            real = as_tensor(found, whole=is_whole)
        node: Any = self._recorder.node_of(made)
        self._values.know(node, real)
        return made.tolist()

    def is_differentiated(self, tensor: Tensor) -> bool:
        """Whether the backward of what is computed of a tensor is recorded, too, with known sizes."""
        is_joint = self._recorder.environment is None and not self._recorder.keeps_composites
        return is_joint and tensor.requires_grad and torch.is_grad_enabled()

    def whole(self, tensor: Tensor) -> Tensor:
        """What `int()` is asked of: of a number with a fraction only the whole part is decided."""
        if not tensor.is_floating_point() or tensor.numel() != 1:
            return tensor
        node = self._recorder.node_of(self._recorder.recognised(tensor))
        found: Any = ABSENT if node is None else self._values.of(node)
        with for_real():
            is_whole = found is not ABSENT and abs(found.item()) < _LARGEST
        return tensor.detach().to(torch.int64) if is_whole else tensor

    # --- what is written down ------------------------------------------------------------------------

    def _note(self, found: fx.Node, answer: Any, asked: str) -> None:
        place = self._recorder.listener.model.here()
        self._append(stays, (found, answer, asked, place.module, place.line), None)

    def _append(self, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        node = self._recorder.graph.create_node("call_function", target, args, {})
        node.meta["val"] = value
        self._recorder.listener.size_recorded(node)
        return node


def _real_value(recorder: "Recorder", inputs: Mapping[fx.Node, Any], node: fx.Node) -> Any:
    """What an input stands for, or a tensor that the model holds."""
    known = recorder.real_of(node)
    return inputs.get(node, ABSENT) if known is None else known


def _number(node: fx.Node) -> str:
    """How a number is called that is read of a tensor, or was drawn."""
    held: Any = node.args[0]
    return spelled_number(held) if held.target is DRAWN else held.name


def _reads_values(func: Any, args: Any, *, symbols_stand: bool) -> bool:
    """Whether an operator needs values; symbols stand for numbers and sizes where there are some."""
    has_size = func is _PACK or has_size_of_data(func)
    if not isinstance(func, OpOverload) or (symbols_stand and (func is ITEM or has_size)):
        return False
    if has_size:
        return func is _PACK or not is_plain(func, args)
    return torch.Tag.data_dependent_output in func.tags
