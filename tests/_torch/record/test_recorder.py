"""Canaries: fake tensors and the recording of operators."""

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Self

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    TorchFunctionMetadataMode,
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    has_proxy_slot,
    snapshot_fake,
    track_tensor_tree,
)
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

import whence
from whence._torch.pytrees import tree_flatten
from whence._torch.record.recorder import Recorder
from whence._torch.sizes.symbols import fake_mode_of
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence.errors import Place
from whence.schema import TensorFact

aten = torch.ops.aten


class Branching:
    """Nobody calls an operator that runs functions."""

    def called(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def rule_for(self, operator: Any) -> None:
        raise NotImplementedError

    def traced(self, function: Any, args: tuple[Any, ...]) -> fx.GraphModule:
        raise NotImplementedError

    def refused(self, operator: Any, why: str, remedy: str = "") -> Exception:
        raise NotImplementedError

    def composed(self, operator: Any, tensor: Tensor) -> Exception:
        raise NotImplementedError


class Listener:
    """Notes what is recorded, and what the model does."""

    @property
    def model(self) -> Self:
        return self

    def __init__(self) -> None:
        self.branches = Branching()
        self.nodes: list[fx.Node] = []
        self.met: list[Tensor] = []
        self.hooks: list[object] = []
        self.asked_of: list[tuple[Tensor, TensorFact]] = []
        self.composed: list[Tensor] = []
        self.made: list[str] = []
        self.histories = 0

    def here(self) -> Place:
        """Nowhere in particular."""
        return Place()

    def recorded(self, node: fx.Node, of: fx.Node | None = None) -> None:
        self.nodes.append(node)

    def met_tensor(self, tensor: Tensor) -> str:
        self.met.append(tensor)
        return f"c_{len(self.met)}"

    def made_of_numbers(self, name: str) -> None:
        self.made.append(name)

    def value_needed(self, operation: object, arguments: Sequence[Any], function: object) -> Exception:
        return LookupError(operation, arguments, function)

    def size_recorded(self, node: fx.Node) -> None:
        self.nodes.append(node)

    def required(self, condition: str) -> str:
        return condition

    def stated(self, branching: FrameType | None = None, *, called: bool) -> tuple[bool, str] | None:
        return None

    def user_of_sizes(self) -> object:
        return None

    def reading(self) -> object:
        return "here"

    def requires_set(self, tensor: Tensor, wanted: bool) -> None:
        """Not looked at here."""

    def differentiated(self, tensor: Tensor) -> None:
        pass

    def gradient_asked(self, tensor: Tensor) -> None:
        """Not looked at here."""

    def memory_asked(self, tensor: Tensor, function: Any) -> None:
        """Not looked at here."""

    def data_replaced(self, why: str) -> Exception:
        return TypeError(why)

    def stops_gradients(self) -> bool:
        return False

    def composite_opened(self) -> Exception:
        return LookupError("a composite")

    def composed_met(self, tensor: Tensor) -> None:
        self.composed.append(tensor)

    def asked(self, tensor: Tensor, fact: TensorFact) -> None:
        self.asked_of.append((tensor, fact))

    def input_asked(self, question: str, tensor: Tensor) -> None:
        """Not looked at here."""

    def leaf_written(self, values: Sequence[Any]) -> None:
        """Nothing here has a history."""

    def mode_asked(self, name: str) -> None:
        """Not looked at here."""

    def made_contiguous(self, tensor: Tensor) -> None:
        """Not looked at here."""

    def taken_apart(self, composite: Any) -> None:
        """A composite was not kept whole."""

    def dtype_asked(self) -> None:
        """Not looked at here."""

    def casts_inside(self, function: object) -> Exception:
        return LookupError(str(function))

    def resized(self, name: str) -> Exception:
        return LookupError(name)

    def nested_met(self) -> Exception:
        return LookupError("a nested tensor")

    def distrusted(self, _reason: str) -> None:
        self.histories += 1

    def hook_registered(self, tensor: Tensor, hook: object) -> None:
        self.hooks.append(hook)

    def object_met(self, operation: object, met: object) -> Exception:
        return LookupError(str(operation))


def recorded(work: Callable[[Tensor], Any], x: Tensor | None = None) -> tuple[list[str], Listener]:
    """The operators that `work` is recorded as, on a fake twin of `x`."""
    listener = Listener()
    recorder = Recorder(lambda _: listener, FakeTensorMode())
    twin, _ = recorder.fake_input(torch.randn(2, 4) if x is None else x, "x")
    with recorder.active():
        work(twin)
    return [str(n.target) for n in listener.nodes if n.op == "call_function"], listener


def test_fake_tensor_describes_and_holds_nothing() -> None:
    """A fake tensor has shape, dtype, strides and requirement of a gradient, on the meta device inside."""
    real = torch.randn(4, 2).t().requires_grad_()
    fake = FakeTensorMode().from_tensor(real, static_shapes=True)
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.stride(), fake.dtype, fake.requires_grad) == (
        (2, 4),
        (1, 2),
        torch.float32,
        True,
    )
    assert fake.device.type == "cpu"


def test_mode_gives_one_twin_to_one_tensor() -> None:
    """The same tensor has the same fake twin, so ties survive."""
    mode, real = FakeTensorMode(), torch.randn(2)
    assert mode.from_tensor(real, static_shapes=True) is mode.from_tensor(real, static_shapes=True)


def test_mode_of_fake_inputs_is_taken() -> None:
    """Inputs that are fake already bring their own mode."""
    mode = FakeTensorMode()
    fake = mode.from_tensor(torch.randn(2))
    assert fake_mode_of(iter([torch.randn(2), fake])) is mode
    assert isinstance(fake_mode_of(iter([torch.randn(2)])), FakeTensorMode)


def test_operators_are_recorded_below_autograd() -> None:
    """What reaches the recording are ATen operators, composites taken apart."""
    assert recorded(lambda x: torch.nn.functional.linear(x, torch.randn(3, 4)))[0][-2:] == [
        "aten.t.default",
        "aten.mm.default",
    ]


def test_several_results_are_taken_apart() -> None:
    """An operator with several results is followed by one `getitem` for each."""
    names, _ = recorded(lambda x: x.max(dim=1))
    assert names == ["aten.max.dim", "<built-in function getitem>", "<built-in function getitem>"]


def test_list_of_results_is_taken_apart() -> None:
    """An operator that returns a list is followed by one `getitem` for each part."""
    names, _ = recorded(lambda x: x.split(2, dim=1))
    assert names == ["aten.split.Tensor", "<built-in function getitem>", "<built-in function getitem>"]


def test_in_place_operator_is_recorded_as_it_is() -> None:
    """Nothing is made functional while recording."""
    assert recorded(lambda x: (x * 2).add_(1))[0] == ["aten.mul.Tensor", "aten.add_.Tensor"]


def test_node_has_a_fake_value() -> None:
    """Every recorded operation carries the fake tensor that it makes."""
    _, listener = recorded(lambda x: x.sum(0))
    value = listener.nodes[-1].meta["val"]
    assert isinstance(value, FakeTensor)
    assert value.shape == (4,)


def test_real_tensor_is_met_once() -> None:
    """A tensor from outside is announced the first time it reaches an operation, and known after that."""
    outside = torch.randn(2, 4)
    _, listener = recorded(lambda x: x + outside + outside)
    assert [tensor is outside for tensor in listener.met] == [True]
    assert [node.op for node in listener.nodes[-1].graph.nodes].count("placeholder") == 2


@pytest.mark.canary("torch.Tensor._base", "torch.fx.experimental.proxy_tensor.disable_proxy_modes_tracing")
def test_real_tensor_is_not_touched() -> None:
    """An in-place operation on a real tensor from outside changes no number of it."""
    outside = torch.zeros(2, 4)
    recorded(outside.add_)
    assert torch.equal(outside, torch.zeros(2, 4))


@pytest.mark.canary("torch.nn.Parameter._is_param")
def test_parameter_gets_its_gradient_through_its_stand_in() -> None:
    """Autograd above the recording sees the real parameter."""
    weight = nn.Parameter(torch.randn(4))
    results: list[Tensor] = []
    recorded(lambda x: results.append(x * weight))
    assert results[0].requires_grad
    assert results[0].grad_fn is not None
    assert any(getattr(node, "variable", None) is weight for node, _ in results[0].grad_fn.next_functions)


def test_literal_becomes_an_input() -> None:
    """`torch.tensor([...])` makes a real tensor, which `aten.lift_fresh` brings in."""
    names, listener = recorded(lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert len(listener.met) == 1
    assert any("lift_fresh" in name for name in names)


REAL = torch.nn.Parameter(torch.ones(2))
VALUE_READERS: dict[str, Callable[[Tensor], Any]] = {
    "bool": lambda x: bool(x.sum() > 0),
    "item": lambda x: x.sum().item(),
    "int": lambda x: int(x.sum()),
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "tolist of a real tensor": lambda x: REAL.tolist(),
    "format": lambda x: f"{x.sum():.2f}",
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[x > 0],
}


@pytest.mark.parametrize("work", VALUE_READERS.values(), ids=VALUE_READERS)
def test_value_is_refused(work: Callable[[Tensor], Any]) -> None:
    """Every way to ask for a value ends in the listener's error, with the tensors that were asked."""
    with pytest.raises(LookupError) as caught:
        recorded(work)
    _, arguments, function = caught.value.args
    assert any(isinstance(leaf, Tensor) for leaf in tree_flatten(arguments)[0])
    assert callable(function)


@pytest.mark.canary(
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
)
@pytest.mark.parametrize(
    ("work", "name"),
    [
        (lambda x: bool(x.sum() > 0), "__bool__"),
        (lambda x: range(x.sum().long()), "__index__"),
        (lambda x: x[x > 0], "__getitem__"),
        (lambda x: x.nonzero(), "nonzero"),
    ],
)
def test_value_is_refused_under_the_name_of_what_the_model_called(
    work: Callable[[Tensor], Any], name: str
) -> None:
    """The torch function that the model called is known below it, where the value is missing."""
    with pytest.raises(LookupError) as caught:
        recorded(work)
    assert caught.value.args[2].__name__ == name


def test_fake_tensors_name_what_they_cannot_do() -> None:
    """The two errors that we translate are the ones that fake tensors raise."""
    mode = FakeTensorMode()
    with mode:
        fake = torch.empty(3)
        with pytest.raises(DataDependentOutputException):
            fake[0].item()
        with pytest.raises(DynamicOutputShapeException):
            fake.nonzero()


@pytest.mark.canary(
    "torch.fx.experimental.proxy_tensor._ProxyTensor", "torch.fx.experimental.proxy_tensor.has_proxy_slot"
)
def test_modes_are_off_after_the_recording() -> None:
    """When recording ends no mode is left on any stack."""
    recorded(lambda x: x * 2)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._len_torch_function_stack() == 0


def test_function_in_progress_is_known() -> None:
    """The torch function that led to an operation is noted on its node, as torch.export spells it."""
    _, listener = recorded(lambda x: torch.nn.functional.softmax(x, dim=0))
    assert listener.nodes[-1].meta["torch_fn"] == ("softmax_1", "function.softmax")


def test_slots_are_kept_by_tracer() -> None:
    """A tracked tensor has a proxy for its tracer, and none for another."""
    first, second = PythonKeyTracer(), PythonKeyTracer()
    for tracer in (first, second):
        tracer.root, tracer.graph = nn.Module(), fx.Graph(tracer_cls=PythonKeyTracer)
    fake = FakeTensorMode().from_tensor(torch.randn(2))
    proxy = first.create_proxy("placeholder", "x", (), {}, name="x")
    track_tensor_tree(fake, proxy, constant=None, tracer=first)
    assert has_proxy_slot(fake, first)
    assert get_proxy_slot(fake, first, None, lambda slot: slot.proxy) is proxy
    assert isinstance(first.tensor_tracker[fake], _ProxyTensor)
    assert not has_proxy_slot(fake, second)
    assert get_proxy_slot(fake, second, None, lambda slot: slot.proxy) is None


def test_snapshot_is_a_detached_fake() -> None:
    """The fake that a node keeps does not change with the tensor and holds no history."""
    fake = FakeTensorMode().from_tensor(torch.randn(2, requires_grad=True))
    kept = snapshot_fake(fake * 2)
    assert isinstance(kept, FakeTensor)
    assert kept.grad_fn is None


def test_modes_have_the_constructors_we_call() -> None:
    """`ProxyTorchDispatchMode` takes a tracer and a kind, `TorchFunctionMetadataMode` a tracer."""
    tracer = PythonKeyTracer()
    assert ProxyTorchDispatchMode(tracer, "fake").tracer is tracer
    assert TorchFunctionMetadataMode(tracer).tracer is tracer
    assert tracer.torch_fn_metadata is None
    assert tracer.torch_fn_counts == {}


@pytest.mark.canary(
    "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode",
    "torch.fx.experimental.proxy_tensor.PythonKeyTracer",
    "torch.fx.experimental.proxy_tensor.track_tensor_tree",
)
def test_recording_is_switched_off_in_a_block() -> None:
    """`disable_proxy_modes_tracing` stops the recording, and in `unset_fake_temporarily` tensors are real."""
    kinds: list[type] = []

    def work(x: Tensor) -> None:
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            kinds.append(type(torch.ones(2) * 2))

    assert recorded(work)[0] == []
    assert kinds == [Tensor]


@pytest.mark.canary("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
def test_wrapper_subclasses_are_told_apart() -> None:
    """A nested tensor is made of other tensors; a parameter and a fake tensor are not."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert is_traceable_wrapper_subclass(nested)
    assert is_composed(nested)
    assert not is_composed(nn.Parameter(torch.ones(2)))
    assert not is_composed(FakeTensorMode().from_tensor(torch.ones(2)))


def test_composites_are_known() -> None:
    """A composite operator has a kernel under `CompositeImplicitAutograd`, a primitive one has none."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    assert aten.reshape.default.has_kernel_for_dispatch_key(key)
    assert not aten.mm.default.has_kernel_for_dispatch_key(key)


def test_value_dependent_operators_are_tagged() -> None:
    """Operators whose result is a Python number are tagged."""
    assert torch.Tag.data_dependent_output in aten._local_scalar_dense.default.tags


@pytest.mark.canary("torch.utils._python_dispatch.TorchDispatchMode")
def test_torch_does_not_wrap_our_dispatch() -> None:
    """`_should_skip_dynamo` decides whether torch keeps its compiler out of every `__torch_dispatch__`."""
    whence.capture(torch.sin, (torch.ones(2),))
    assert TorchDispatchMode._should_skip_dynamo()
    assert not hasattr(Recorder.__torch_dispatch__, "__wrapped__")


@pytest.mark.canary(
    "torch._higher_order_ops.invoke_subgraph.invoke_subgraph_placeholder",
    "torch.fx.experimental.proxy_tensor.get_proxy_slot",
    "torch.nn.Module._non_persistent_buffers_set",
    "torch.utils._pytree.tree_unflatten",
)
def test_results_are_tensors_of_their_own() -> None:
    """The fake kernel of a recurrent layer's backward gives both bias gradients as one tensor, once."""
    model, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    first, second = (whence.capture(model, (x,), backward=True) for _ in range(2))
    assert str(first.graph) == str(second.graph)
    assert first.output("bias_ih_l0").node != first.output("bias_hh_l0").node


def test_questions_about_history_are_told() -> None:
    """What autograd recorded is asked for by `grad_fn`, `_base`, `output_nr` and `_is_view`."""
    _, listener = recorded(lambda x: (x.grad_fn, x._base, x.output_nr, x._is_view(), x.shape))
    assert listener.histories == 4
