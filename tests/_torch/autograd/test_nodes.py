"""Canaries: what we rely on in autograd's private parts."""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import Node

from whence._torch.autograd import nodes as autograd
from whence._torch.autograd.grad_modes import GradModes, observed_grad_modes


def history(tensor: Tensor) -> Node:
    node = tensor.grad_fn
    assert node is not None
    return node


def weight() -> Tensor:
    return torch.ones(3, requires_grad=True)


def test_counter_is_there() -> None:
    """`torch._C._autograd._get_sequence_nr` counts the autograd nodes made on this thread."""
    assert isinstance(torch._C._autograd._get_sequence_nr(), int)


def test_next_node_carries_the_counter() -> None:
    """A node made now carries the number that the counter showed before."""
    leaf = weight()
    expected = autograd.next_sequence_number()
    assert autograd.sequence_number(history(leaf * 2)) == expected
    assert autograd.next_sequence_number() == expected + 1


def test_numbers_grow_in_the_order_of_the_forward() -> None:
    """Later operations have larger numbers, whatever they read."""
    leaf = weight()
    first, second = leaf * 2, leaf * 3
    assert history(first)._sequence_nr() < history(second)._sequence_nr()


@pytest.mark.sweep
@pytest.mark.canary("torch._C._autograd._get_sequence_nr")
def test_operation_without_a_gradient_does_not_count() -> None:
    """Under `no_grad` no node is made and the counter stands still."""
    leaf = weight()
    before = autograd.next_sequence_number()
    with torch.no_grad():
        leaf * 2
    assert autograd.next_sequence_number() == before


@pytest.mark.canary("torch.autograd.graph.Node._sequence_nr")
def test_leaf_has_no_moment() -> None:
    """The node of a leaf has the largest number there is, which is no moment."""
    leaf = weight()
    (accumulate, _), *_ = history(leaf * 2).next_functions
    assert accumulate is not None
    assert accumulate._sequence_nr() == autograd.LEAF_SEQUENCE_NUMBER
    assert autograd.sequence_number(accumulate) is None


def test_leaf_node_is_known_by_its_variable() -> None:
    """The node of a leaf holds the leaf as `variable`, and no other node does."""
    leaf = weight()
    node = history(leaf * 2)
    (accumulate, _), *_ = node.next_functions
    assert accumulate is not None
    assert getattr(accumulate, "variable", None) is leaf
    assert autograd.is_leaf_node(accumulate)
    assert not autograd.is_leaf_node(node)


def test_key_of_a_tensor_is_where_its_gradient_goes() -> None:
    """The key of a tensor is the key of the edge that leads to it from what reads it."""
    first, second = torch.stack([weight(), weight()]).unbind()
    (edge,) = autograd.keys_out(history(second.sin()))
    assert edge == autograd.gradient_key(second)
    assert edge != autograd.gradient_key(first)


def test_key_of_a_leaf_is_where_its_gradient_goes() -> None:
    """The same for a leaf."""
    leaf = weight()
    assert autograd.keys_out(history(leaf.sin())) == [autograd.gradient_key(leaf)]


def test_tensor_without_a_gradient_has_no_key() -> None:
    """Nothing is collected for a tensor that requires no gradient."""
    assert autograd.gradient_key(torch.ones(3)) is None


@pytest.mark.canary("torch._C.DisableTorchFunction")
def test_torch_functions_are_passed_by() -> None:
    """`torch._C.DisableTorchFunction` keeps looking at a tensor from calling torch functions."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            raise AssertionError(func)

    tensor = weight() * 2
    with Mode():
        assert autograd.gradient_key(tensor) is not None
        assert autograd.history_of(tensor) is not None


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


@pytest.mark.canary("torch._C._FunctionBase")
def test_custom_function_is_told_from_built_in() -> None:
    """The backward of a Python function is a `torch._C._FunctionBase`, that of a built-in one is not."""
    assert autograd.is_custom_function(history(Doubling.apply(weight())))
    assert isinstance(history(Doubling.apply(weight())), torch._C._FunctionBase)
    assert not autograd.is_custom_function(history(weight() * 2))


def test_custom_function_counts_like_a_built_in_one() -> None:
    """A Python function's node carries the number that the counter showed before it was applied."""
    leaf = weight()
    expected = autograd.next_sequence_number()
    assert autograd.sequence_number(history(Doubling.apply(leaf))) >= expected  # type: ignore[operator]


def test_walk_finds_every_node_once() -> None:
    """The nodes below a result are all operations and leaves that lead to it."""
    leaf = weight()
    shared = leaf.sin()
    names = [type(node).__name__ for node in autograd.nodes_below([history(shared * shared.cos())])]
    assert sorted(names) == ["AccumulateGrad", "CosBackward0", "MulBackward0", "SinBackward0"]


class Listener:
    """Notes what runs, in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, int]] = []
        self.reported = set[int]()

    def node_starts(self, node: Node, received: Sequence[Tensor | None]) -> None:
        self.events.append(("starts", type(node).__name__, len(received)))

    def node_ends(self, node: Node, produced: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        self.events.append(("ends", type(node).__name__, len(produced)))
        return produced


def test_watched_backward_is_told_in_order() -> None:
    """Every node is reported when it starts and when it ends, one after the other, latest operation first."""
    leaf, listener = weight(), Listener()
    value = (leaf.sin() * leaf.cos()).sum()
    autograd.run_backward([value], [leaf], [torch.ones(())], listener)
    names = ["SumBackward0", "MulBackward0", "CosBackward0", "SinBackward0"]
    assert [event[:2] for event in listener.events] == [(e, n) for n in names for e in ("starts", "ends")]


def test_edges_are_reported_in_order() -> None:
    """What a node hands on comes in the order of its outgoing edges, None where nothing is needed."""
    listener = Listener()
    leaf = weight()
    result = torch.addcmul(leaf, torch.ones(3), leaf)
    autograd.run_backward([result], [leaf], [torch.ones(3)], listener)
    assert listener.events[-1] == ("ends", "AddcmulBackward0", 3)
    assert [key is None for key in autograd.keys_out(history(result))] == [False, True, False]


def test_backward_runs_on_the_calling_thread() -> None:
    """With multithreading off, autograd's nodes run on the thread that asked."""
    threads = []
    leaf = weight()
    leaf_result = leaf * 2
    leaf_result.register_hook(lambda gradient: threads.append(threading.get_ident()))
    autograd.run_backward([leaf_result.sum()], [leaf], [torch.ones(())], Listener())
    assert threads == [threading.get_ident()]


def test_hooks_are_removed_after_the_backward() -> None:
    """Watching ends with the block: a second backward is not reported."""
    leaf, listener = weight(), Listener()
    value = leaf.sin().sum()
    with autograd.watched(autograd.nodes_below([history(value)]), listener):
        pass
    value.backward()
    assert listener.events == []


def test_unused_input_has_no_gradient() -> None:
    """A tensor that nothing uses gets None."""
    assert autograd.run_backward([weight().sum()], [weight()], [torch.ones(())], Listener()) == (None,)


@pytest.mark.canary("torch._C._AutoDispatchBelowAutograd")
def test_below_autograd_nothing_is_recorded() -> None:
    """`torch._C._AutoDispatchBelowAutograd` with grad mode on runs operations without making history."""
    leaf = weight()
    with autograd.below_autograd():
        assert torch.is_grad_enabled()
        result = leaf * 2
    assert not result.requires_grad
    assert torch.is_grad_enabled()


@pytest.mark.canary("torch._C._current_graph_task_id")
def test_engine_is_known_to_run() -> None:
    """`torch._C._current_graph_task_id` tells a backward in progress from none."""
    seen: list[bool] = []
    leaf = weight()
    result = leaf * 2
    result.register_hook(lambda gradient: seen.append(autograd.inside_backward()))
    result.sum().backward()
    assert seen == [True]
    assert not autograd.inside_backward()
    assert torch._C._current_graph_task_id() == -1


class Doubled(torch.autograd.Function):
    """Keeps its result, and says whether letting go of it in the backward freed it."""

    freed: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        return x * 2

    @staticmethod
    def backward(ctx: Any, received: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        alive = weakref.ref(saved)
        autograd.release_saved(ctx)
        del saved
        Doubled.freed.append(alive() is None)
        return received * 2


def test_saved_tensors_are_freed_in_the_backward() -> None:
    """`maybe_clear_saved_tensors` lets go of what was saved, unless the graph is retained."""
    Doubled.freed = []
    result = Doubled.apply(weight()).sum()
    result.backward(retain_graph=True)
    result.backward()
    assert Doubled.freed == [False, True]


@pytest.mark.canary(
    "torch._C._is_fwd_grad_enabled", "torch._C._set_fwd_grad_enabled", "torch.autograd.Function._backward_cls"
)
def test_a_custom_function_is_known_by_its_modes() -> None:
    """`Function.apply` runs the forward without grad mode and with `torch._C._is_fwd_grad_enabled()` off;
    `_set_fwd_grad_enabled` keeps inference mode from turning that off, too."""
    seen: list[bool] = []

    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(autograd.inside_custom_function())
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * 2

    Doubles.apply(weight())
    with observed_grad_modes(GradModes()):
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                seen.append(autograd.inside_custom_function())
        with torch.inference_mode():
            Doubles.apply(weight())
    assert seen == [True, False, False, False, True]
    assert isinstance(Doubles.apply(weight()).grad_fn, autograd.node_class_of(Doubles))  # `_backward_cls`


@pytest.mark.canary(
    "torch._C._ForceDispatchKeyGuard",
    "torch._C._dispatch_tls_local_exclude_set",
    "torch._C._dispatch_tls_local_include_set",
)
def test_operations_below_autograd_can_be_recorded_again() -> None:
    """`torch._C._ForceDispatchKeyGuard` gives autograd's dispatch keys back."""
    leaf = weight()
    with autograd.below_autograd():
        assert (leaf * 2).grad_fn is None
        with autograd.above_autograd():
            assert (leaf * 2).grad_fn is not None


@pytest.mark.canary("torch._C._autograd._get_current_graph_task_keep_graph")
def test_a_backward_knows_whether_its_graph_is_kept() -> None:
    """`_get_current_graph_task_keep_graph` says what `retain_graph` was."""
    seen: list[bool] = []
    leaf = weight()
    result = (leaf * 2).sum()
    history(result).register_prehook(lambda _: seen.append(autograd.keeps_graph()))
    result.backward(retain_graph=True)
    result.backward()
    assert seen == [True, False]
    assert not autograd.keeps_graph()


@pytest.mark.canary("torch._C._InferenceMode", "torch._C._set_grad_enabled")
def test_outside_of_inference_mode_tensors_have_versions() -> None:
    """Inside the block operations run as under `no_grad`; afterwards all is as before."""
    with torch.inference_mode():
        with autograd.outside_inference_mode():
            made = weight() * 2
            assert not (torch.is_inference_mode_enabled() or torch.is_grad_enabled())
        assert torch.is_inference_mode_enabled()
        assert not (made.is_inference() or made.requires_grad)


def test_outside_of_inference_mode_nothing_changes_where_it_is_off() -> None:
    """The block is none."""
    with autograd.outside_inference_mode():
        assert (weight() * 2).requires_grad


@pytest.mark.canary("torch._C.DispatchKey.ADInplaceOrView")
@pytest.mark.parametrize("tracking", [True, False])
def test_above_autograd_views_are_tracked_where_that_is_wanted(tracking: bool) -> None:
    """A result that becomes a view outside must not be one before."""
    leaf, include = weight(), torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set().add(torch._C.DispatchKey.ADInplaceOrView)
    guard, above = torch._C._ForceDispatchKeyGuard(include, exclude), autograd.above_autograd
    with guard, autograd.below_autograd(), above(tracking_views=tracking):
        assert leaf.view(3, 1)._is_view() is tracking
