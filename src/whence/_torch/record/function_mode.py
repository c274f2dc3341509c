"""Torch functions that a recording looks at before autograd and the dispatcher see them."""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.overrides import TorchFunctionMode

from whence._torch.autograd.mode_questions import GRAD, INFERENCE
from whence._torch.autograd.nodes import below_autograd
from whence._torch.autograd.replaced_data import replace_data
from whence._torch.deciding.packed_rows import with_static_batch_sizes
from whence._torch.files import WHENCE
from whence._torch.function_tracer import untold
from whence._torch.operators.composites import COMPOSITES, calls_composites, in_sight, keep_whole
from whence._torch.operators.schemas import HigherOrderOperator
from whence._torch.operators.values_alone import of_values
from whence._torch.pytrees import tree_flatten, tree_map_only
from whence._torch.record.recurrent_dropout import forgets_dropout, layer_by_layer
from whence._torch.refusals import casts_inside, nested_met, resized
from whence._torch.sizes.plain_answers import decides
from whence._torch.tensor_questions import QUESTIONS, Answer
from whence._torch.tensors import attributes_set_on, autocast_state
from whence.schema import TensorFact

if TYPE_CHECKING:
    from whence._torch.record.recorder import Recorder

_TENSOR: Any = Tensor
_VALUE_READERS: tuple[object, ...] = (
    *(Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__dlpack__, _TENSOR.__reduce_ex__),
)
_WITHOUT_HISTORY: tuple[object, ...] = (Tensor.numpy, Tensor.__array__)
"""They read no tensor that requires a gradient."""
_MAKERS = frozenset(
    {
        *(torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, _TENSOR.new),
        *(torch.sparse_coo_tensor, torch.sparse_compressed_tensor, torch.sparse_csr_tensor),
        *(torch.sparse_csc_tensor, torch.sparse_bsr_tensor, torch.sparse_bsc_tensor),
    }
)
"""They read the numbers of tensors in a list, from C++ that asks nobody."""
_LISTS = (list, tuple)
_NO_LISTS = (Tensor, str, bytes, bytearray, memoryview, range, dict)
_POINTER_READERS = frozenset({torch.tensor_split, Tensor.tensor_split})
"""They look at the memory of a tensor, which nobody sees, and ask for the numbers of a fake one."""
_WITHOUT_GRADIENT = frozenset({torch.linspace, torch.logspace})
"""What makes a tensor of tensors, and from Python no history of them."""
_NUMBERS: tuple[object, ...] = (
    *(_TENSOR.__float__, _TENSOR.__int__, _TENSOR.__index__, _TENSOR.__bool__, _TENSOR.__complex__),
)
"""What old constructors (`torch.FloatTensor([x, 1.0])`), of which nobody is told, ask each for."""
_ADDRESS_READERS: tuple[object, ...] = (Tensor.data_ptr, Tensor.__dlpack__, _TENSOR.__reduce_ex__)
_MEMORY_READERS = frozenset({Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.is_set_to})
_GET_GRADIENT = _TENSOR.grad.__get__
_HISTORY_READERS = (
    *(_TENSOR.grad_fn.__get__, _TENSOR._base.__get__, _TENSOR.output_nr.__get__),
    *(_TENSOR._version.__get__, _TENSOR.data_ptr, Tensor._is_view),
)
_ASKED = {
    **dict.fromkeys((Tensor.stride, Tensor.is_contiguous), TensorFact.STRIDES),
    **dict.fromkeys((_TENSOR.is_leaf.__get__, _TENSOR.grad_fn.__get__), TensorFact.IS_LEAF),
    **{_TENSOR.requires_grad.__get__: TensorFact.REQUIRES_GRAD},
    **{Tensor.storage_offset: TensorFact.STORAGE_OFFSET},
}
_DTYPE_ASKED = frozenset(
    {
        *(_TENSOR.dtype.__get__, _TENSOR.itemsize.__get__, _TENSOR.nbytes.__get__, Tensor.element_size),
        *(Tensor.type, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    }
)
"""They give what depends on the dtype, or nothing new where it is the right one already."""
_VERSION = _TENSOR._version.__get__
_INFERENCE_ASKED = frozenset({Tensor.is_inference, torch.is_inference})
_LEFT_ALIGNED = torch._nested_tensor_from_mask_left_aligned
"""Whether a mask keeps the beginning of every row: an encoder asks before it knows that gradients are off."""
_FROM_MASK = torch._nested_tensor_from_mask
"""Makes a nested tensor, with sizes by the values of a mask."""
_CASTING_INSIDE = frozenset(
    {
        *(torch.bilinear, torch.linalg.lstsq, torch.linalg.pinv, torch.pinverse),
        *(torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention),
    }
)
"""Their kernels call others, which autocast casts for."""
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SET_REQUIRES = frozenset({Tensor.requires_grad_, _TENSOR.requires_grad.__set__})
_AS_INTEGER = Tensor.__int__
_INDEXINGS = (Tensor.__getitem__, Tensor.__setitem__)
_WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})
_LEAF_WRITTEN = "a leaf Variable that requires grad is being used in an in-place operation"
"""What autograd says; of a view of one, too."""
_DETACH = frozenset({Tensor.detach_, torch.detach_})
_WRITERS = frozenset({Tensor.__format__, Tensor.__repr__})
"""They make text of the numbers in a tensor."""
_SPELLING = frozenset((Tensor.__repr__.__code__.co_filename, torch.overrides.__file__))
"""Files through which text is asked for."""


class FunctionMode(TorchFunctionMode):
    """Notes which torch function runs, and catches the few that read values behind the dispatcher's back.

    Operators that run functions are handed to the listener: below autograd nobody knows any more what the
    functions close over. PyTorch takes its own mode of this kind off the stack before it calls such an
    operator, so this is another one.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator) and ProxyTorchDispatchMode in func.python_key_table:
            return self.recorder.listener.model.branches.called(func, args, kwargs or {})
        result = untold(self._heard, func, args, kwargs or {})
        if func is Tensor.resize_ or (kwargs and "out" in kwargs):
            self._keeps_shapes(args[0] if func is Tensor.resize_ else kwargs["out"])
        return result

    def _keeps_shapes(self, written: Any) -> None:
        """Raise where a tensor of the model's would have another shape now."""
        held = self.recorder.adopted
        for tensor in tree_flatten(written)[0]:
            stand_in = held.stand_ins.get(id(tensor))
            if stand_in is not None and stand_in.shape != tensor.shape and id(tensor) in held.nodes:
                raise resized(held.nodes[id(tensor)].name, self.recorder.listener.model.here())

    def _heard(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func == _GET_GRADIENT:
            self.recorder.listener.model.gradient_asked(args[0])
        func, args, kwargs = self._with_numbers(func, args, kwargs)
        if _reads_value(func, args):
            return self._decided_content(func, args, is_forced=bool(kwargs.get("force")))
        if (known := self._answered(func, args)) is not None:
            return known
        if func in _WRITERS and (text := self._text(func, args)) is not None:
            return text
        if func is Tensor.__deepcopy__:
            self.recorder.listener.model.asked(args[0], TensorFact.IS_LEAF)
            if _is_copied_as_a_whole(args[0]):
                return self._copied(*args)
        if func == _SET_DATA and self.recorder.holds_data_of(args[0]):
            return self._with_other_data(args[0], args[1])
        self._tell(func, args, kwargs)
        if self.recorder.environment is not None:
            if func is torch.einsum:
                _decide_on_ones(args)
            before, args = args, _with_selected(func, args)
            if args is not before and func is Tensor.__getitem__ and all(map(_is_everything, args[1])):
                return args[0]
            if forgets_dropout(func, args):
                with self:
                    return layer_by_layer(func, args)
        tracer: Any = self.recorder.tracer
        named = tracer.torch_fn_metadata = of_values(func, args, kwargs)
        tracer.torch_fn_counts[named] = tracer.torch_fn_counts.get(named, 0) + 1
        if self.recorder.keeps_composites and (whole := self._whole(func, args, kwargs)) is not None:
            return whole
        return self._called(func, args, kwargs)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            result = self.recorder.called(func, args, kwargs)
        except RuntimeError as error:  # where the model goes on, it may have been the grad mode
            self.recorder.listener.model.mode_asked(GRAD)
            if _LEAF_WRITTEN in str(error):
                self.recorder.listener.model.leaf_written(tree_flatten((args, kwargs))[0])
            raise
        except TypeError as error:
            read = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, FakeTensor)]
            if not read or FakeTensor.__name__ not in str(error):
                raise
            raise self.recorder.listener.model.value_needed(
                func, read, func
            ) from error  # a tensor for a number
        asks = func is Tensor.contiguous or "memory_format" in kwargs
        if asks and args and result is args[0] and not self.recorder.is_inside_composite:
            self.recorder.listener.model.made_contiguous(result)
        return result

    def _copied(self, given: Tensor, known: dict[int, Any]) -> Tensor:
        """What `copy.deepcopy` makes of a tensor that nothing computed: eager copies its memory."""
        copied = given.detach().clone().requires_grad_(given.requires_grad)
        return known.setdefault(id(given), copied)  # type: ignore[no-any-return]

    def _answered(self, func: Any, args: Any) -> Answer | None:
        """What the model is told that asks what a fake tensor cannot say.

        A mask counts as aligned where nobody knows its values: an encoder then goes on to the question
        whether gradients are recorded, and makes a nested tensor, which is refused, or looks no more.
        """
        if func in _INFERENCE_ASKED:
            self.recorder.listener.model.mode_asked(INFERENCE)
            return self.recorder.inferred.has(args[0]) if isinstance(args[0], FakeTensor) else None
        if func == _VERSION and isinstance(args[0], FakeTensor):
            self.recorder.listener.model.mode_asked(INFERENCE)
            if self.recorder.inferred.has(args[0]):
                raise RuntimeError("Inference tensors do not track version counter.")
        if func in QUESTIONS and isinstance(args[0], FakeTensor):
            return self.recorder.listener.model.input_asked(QUESTIONS[func], args[0])
        if func is _FROM_MASK:
            raise nested_met(self.recorder.listener.model.here())
        if func in _CASTING_INSIDE and autocast_state():
            raise casts_inside(func, self.recorder.listener.model.here())
        return self._keeps_beginnings(args[1]) if func is _LEFT_ALIGNED else None

    def _keeps_beginnings(self, mask: Any) -> bool:
        if self.recorder.decider is None:
            return True
        with self:
            return not bool((mask[:, 1:] & ~mask[:, :-1]).any())

    def _with_numbers(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """A call whose kernel reads the numbers of tensors as one that is given them, if that can be."""
        if func in _MAKERS:
            given = self._with_numbers_listed(func, [*args, *kwargs.values()])
            return func, given[: len(args)], dict(zip(kwargs, given[len(args) :], strict=True))
        if func in _WITHOUT_GRADIENT:
            return func, *tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        if func in _POINTER_READERS:
            known = self.recorder.recognised
            return func, known(args), {name: known(given) for name, given in kwargs.items()}
        if self.recorder.decider is not None:
            func, args = with_static_batch_sizes(self.recorder.decider, func, args)
            args = (self.recorder.decider.whole(args[0]),) if func is _AS_INTEGER else args
        if func not in _INDEXINGS:
            return func, args, kwargs
        if func is Tensor.__getitem__:
            args = (args[0], self._with_truths(args[1]))
        if not torch._C._len_torch_function_stack():
            # another mode, as that of flex attention, may index by tensors in its own way
            args = (args[0], self._with_numbers_read(args[1]), *args[2:])
        if isinstance(args[1], tuple | list):
            kind = list if isinstance(args[1], list) else tuple
            index = self._with_numbers_listed(func, [*map(_as_index, args[1])])
            args = (args[0], kind(index), *args[2:])
        return func, args, kwargs

    def _with_truths(self, index: Any) -> Any:
        """An index with a mask of truths in the place of one of bytes, which fake kernels do not take."""
        is_mask = [isinstance(item, Tensor) and item.dtype is torch.uint8 for item in _items(index)]
        if not any(is_mask):
            return index
        with self:
            items = tuple(i.bool() if mask else i for i, mask in zip(_items(index), is_mask, strict=True))
        return items if isinstance(index, tuple) else items[0]

    def _with_numbers_read(self, index: Any) -> Any:
        """An index with the number in the place of each tensor that is one, which C++ would ask for."""
        items = tuple(map(self._with_number_read, _items(index)))
        return items if isinstance(index, tuple) else items[0]

    def _with_number_read(self, item: Any) -> Any:
        if not isinstance(item, slice):
            return self._number(item)
        parts = (item.start, item.stop, item.step)
        return slice(*map(self._number, parts)) if any(map(_is_whole_number, parts)) else item

    def _number(self, item: Any) -> Any:
        if not _is_whole_number(item):
            return item
        with self:
            return item.item()

    def _with_numbers_listed(self, func: Any, given: list[Any]) -> list[Any]:
        """Arguments with the example's tensors for those in lists, also for tensors that the model holds."""
        read = [leaf for each in given for leaf in _tensors_listed(each)]
        if not read:
            return given
        decider = self.recorder.decider
        known = {} if decider is None else {id(leaf): decider.content(Tensor.detach, [leaf]) for leaf in read}
        if decider is None or None in known.values():
            raise self.recorder.listener.model.value_needed(func, read, func)
        return [_with_tensors_listed(known, each) for each in given]

    def _decided_content(self, func: Any, args: Any, *, is_forced: bool) -> Any:
        """What Python makes of the numbers in a tensor, where the example's decide."""
        decider = None if func in _ADDRESS_READERS else self.recorder.decider
        is_plain = func in _WITHOUT_HISTORY and not is_forced
        if decider is not None and is_plain and args[0].requires_grad:
            self.recorder.listener.model.mode_asked(GRAD)
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        if decider is None or (given := decider.content(func, args)) is None:
            raise self.recorder.listener.model.value_needed(func, args[:1], func)
        return given

    def _with_other_data(self, tensor: Tensor, value: Tensor) -> None:
        if not self.recorder.is_joint:
            self.recorder.listener.model.asked(tensor, TensorFact.REQUIRES_GRAD)  # it is no misfit yet
        replace_data(self.recorder, tensor, value)

    def _text(self, func: Any, args: Any) -> str | None:
        """A tensor as text, by which models find modules; None where people read it, with no number in it."""
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename.startswith(WHENCE) or frame.f_code.co_filename in _SPELLING:
            frame = frame.f_back
        if not decides(frame):
            return repr(args[0]) if any(args[1:]) else None
        decider, tensor = self.recorder.decider, args[0]
        shows_history = tensor.requires_grad and (tensor.ndim or func is Tensor.__repr__)
        if decider is None or shows_history or (text := decider.content(func, args)) is None:
            raise self.recorder.listener.model.value_needed(func, [tensor], func)
        return str(text)

    def _whole(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a composite that is recorded as one; None where nothing is kept together."""
        if calls_composites(func):
            with self:
                return self.recorder.functions.told(in_sight(func), *args, **kwargs)
        composite = COMPOSITES.get(func)
        return None if composite is None else keep_whole(self.recorder, composite, func, args, kwargs)

    def _tell(self, func: Any, args: Any, kwargs: Any) -> None:
        """Say what the model asks of a tensor, or does to it, where the dispatcher would not see it."""
        model = self.recorder.listener.model
        if func in _MEMORY_READERS:
            model.memory_asked(args[0], func)
        if func in _HISTORY_READERS:
            model.distrusted("the model looks at what autograd recorded")
        if (fact := _ASKED.get(func)) is not None:
            model.asked(args[0], fact)
        if func in _DTYPE_ASKED or (func is Tensor.to and _has_dtype((*args[1:], *kwargs.values()))):
            model.dtype_asked()
        if func is Tensor.register_hook:
            self.recorder.listener.hook_registered(args[0], args[1] if len(args) > 1 else kwargs["hook"])
        if (self.recorder.keeps_composites and _writes_to_leaf(func, args)) or func is torch.autograd.grad:
            model.mode_asked(GRAD)  # eager refuses the one where gradients are recorded, the other elsewhere
        if func is torch.autograd.grad:
            for leaf in tree_flatten(args[1] if len(args) > 1 else kwargs["inputs"])[0]:
                model.differentiated(leaf)
        if func in _SET_REQUIRES:
            model.requires_set(args[0], (*args[1:], *kwargs.values(), True)[0])
        if func in _DETACH and args[0].requires_grad:
            with below_autograd():
                torch.ops.aten.detach_.default(args[0])


def _is_whole_number(item: Any) -> bool:
    return isinstance(item, Tensor) and not item.ndim and item.dtype in _WHOLE


def _as_index(item: Any) -> Any:
    """A sequence of single whole numbers, which C++ would read one by one, as the tensor that they make."""
    if not isinstance(item, list | tuple) or not any(isinstance(part, Tensor) for part in item):
        return item
    made: Any = {
        "dtype": torch.int64,
        "device": next(part.device for part in item if isinstance(part, Tensor)),
    }
    parts = [torch.scalar_tensor(part, **made) if type(part) is int else part for part in item]
    is_whole = all(isinstance(part, Tensor) and not part.ndim and part.dtype in _WHOLE for part in parts)
    return torch.stack([part.long() for part in parts]) if is_whole else item


def _is_listing(given: Any) -> bool:
    """Whether C++ takes what it is given for a list, and asks for each of its items."""
    kind = type(given)
    if kind in _LISTS:
        return True
    is_sequence = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    return is_sequence and not issubclass(kind, _NO_LISTS) and not hasattr(kind, "__array_interface__")


def _tensors_listed(given: Any) -> Iterator[Tensor]:
    for each in given if _is_listing(given) else ():
        yield from [each] if isinstance(each, Tensor) else _tensors_listed(each)


def _with_tensors_listed(known: dict[int, Any], given: Any, *, inside: bool = False) -> Any:
    if _is_listing(given):
        return [_with_tensors_listed(known, each, inside=True) for each in given]
    return known[id(given)] if inside and isinstance(given, Tensor) else given


def _reads_value(func: Any, args: Any) -> bool:
    if func is _TENSOR.data_ptr:
        return isinstance(args[0], FakeTensor)
    if func in _NUMBERS:
        return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
    return func in _VALUE_READERS


def _writes_to_leaf(func: Any, args: Any) -> bool:
    """Whether a torch function writes in place to what may get a gradient."""
    name = getattr(func, "__name__", "")  # what somebody has put in its place need not have one
    if not args or not (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
        return False
    return isinstance(args[0], Tensor) and args[0].requires_grad and args[0].is_leaf


def _has_dtype(given: Sequence[Any]) -> bool:
    """Whether a dtype is among these, or a tensor that has one."""
    return any(isinstance(each, (torch.dtype, Tensor)) for each in given)


def _is_copied_as_a_whole(tensor: Tensor) -> bool:
    """Whether eager copies a tensor, and a clone has its strides."""
    return tensor.is_leaf and tensor.is_contiguous() and not attributes_set_on(tensor)


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _with_selected(func: Any, args: Any) -> Any:
    """The arguments of an index with the numbers of a run selected; the very same where it has none."""
    if func not in _INDEXINGS or not any(isinstance(item, torch.SymInt) for item in _items(args[1])):
        return args
    return (*_selected(args[0], _items(args[1])), *args[2:])


def _selected(tensor: Tensor, items: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
    """A tensor and what is left of its index, with the numbers of a run, which C++ refuses, selected."""
    filled = tensor.dim() - sum(_dims_of(item) for item in items)
    rest: list[Any] = []
    dim = 0
    for item in items:
        if isinstance(item, torch.SymInt):
            tensor = tensor.select(dim, item)
            continue
        rest += [slice(None)] * filled if item is Ellipsis else [item]
        dim += filled if item is Ellipsis else _dims_of(item)
    return tensor, tuple(rest) or (Ellipsis,)


def _is_everything(item: Any) -> bool:
    return item is Ellipsis or (isinstance(item, slice) and item == slice(None))


def _dims_of(item: Any) -> int:
    """How many dimensions an item of an index is for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) else 1


def _decide_on_ones(args: Any) -> None:
    """Ask of every size whether it is 1, as a product of three tensors or more does in eager mode: sizes of 1
    are left out of it, and what is multiplied first follows from the others."""
    tensors = [leaf for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)]
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
    for size in sizes if len(tensors) > 2 else ():
        bool(size == 1)
