"""Canaries of what is used in the middle of a capture: whence runs it, and the result is eager's."""

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import AdditionalInputs, Dim

import whence
from tests.behaviours.test_statements import SHAPES, Truncated, rows
from tests.tracing.branching import Scanned
from whence._torch.higher_order.function_graphs import indexes_for_attention
from whence._torch.observe.hooks import _hook_lines
from whence._torch.pytrees import register_container, tree_flatten, tree_unflatten
from whence._torch.tensors import attributes_set_on
from whence.demo import GPT, GPTConfig, next_token_loss

X = torch.ones(2, 4)


class Layer(nn.Module):
    """One of several equal ones, which are recorded once and replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def stack(count: int = 3) -> nn.Sequential:
    """Equal layers."""
    return nn.Sequential(*(Layer() for _ in range(count)))


def verified(model: nn.Module, *args: Any, **options: Any) -> whence.Program:
    """The capture, which is eager bit for bit."""
    program = whence.capture(model, args, **options)
    assert program.verify(model, args).ok
    return program


@pytest.mark.sweep
@pytest.mark.canary(
    *("torch.fx.Graph._find_nodes_lookup_table", "torch.fx.Graph._graph_namespace", "torch.fx.Graph._len"),
    *("torch.fx.Node._prepend", "torch.fx.graph._Namespace._base_count"),
    *("torch.fx.graph._Namespace._obj_to_name", "torch.fx.graph._Namespace._used_names"),
)
def test_replayed_operations_are_put_into_the_graph() -> None:
    """Replay writes nodes into the tables of a graph itself: they are found, counted and named as others."""
    program = verified(GPT(GPTConfig(16, 4, 8, 2, 4)), torch.arange(4)[None], backward=next_token_loss)
    nodes = list(program.graph.nodes)
    assert len(program.graph.nodes) == len(nodes) == len({node.name for node in nodes})
    gelu = torch.ops.aten.gelu.default
    found = program.graph.find_nodes(op="call_function", target=gelu)
    assert found == [node for node in nodes if node.target is gelu]
    assert len(found) == 4


@pytest.mark.canary("torch._check")
def test_a_convolution_states_its_sizes() -> None:
    """A convolution with open sizes requires by `torch._check` what its kernel requires."""
    program = whence.capture(nn.Conv1d(2, 3, 1), (torch.ones(2, 2, 5),), dynamic_shapes=({2: Dim("length")},))
    assert program.module()(torch.ones(2, 2, 7)).shape == (2, 3, 7)


@pytest.mark.canary("torch._check_index", "torch._check_type", "torch._check_value")
@pytest.mark.canary("torch._check_not_implemented", "torch._check_tensor_all", "torch._check_tensor_all_with")
@pytest.mark.parametrize(
    ("check", "error"),
    [
        (torch._check_index, IndexError),
        (torch._check_type, TypeError),
        (torch._check_value, ValueError),
        (torch._check_not_implemented, NotImplementedError),
        (lambda holds, said: torch._check_tensor_all(torch.tensor([holds]), said), RuntimeError),
        (lambda holds, said: torch._check_tensor_all_with(KeyError, torch.tensor([holds]), said), KeyError),
    ],
)
def test_checks_only_tell_people_of_a_message(check: Any, error: type[Exception]) -> None:
    """They ask for it where they fail, and its text is the error's."""
    check(True, partial(pytest.fail, "the message was asked for"))
    with pytest.raises(error, match="too long"):
        check(False, lambda: "too long")


@pytest.mark.canary(
    "torch._check_with", "torch.fx.experimental.symbolic_shapes.ShapeEnv._maybe_evaluate_static"
)
def test_statements_are_told_from_other_needs() -> None:
    """What code states of a number by `torch._check` is part of the program, and nothing else is."""
    program = whence.capture(Truncated(), (rows(6), torch.tensor(3)), dynamic_shapes=SHAPES)
    with pytest.raises(RuntimeError):
        program.module()(rows(4, 2), torch.tensor(3))


@pytest.mark.canary("torch._decomp.decompositions.lstm_impl")
def test_lstm_on_the_meta_device() -> None:
    """Where no kernel runs, an LSTM with open sizes is PyTorch's own in Python."""
    model = nn.LSTM(4, 3, batch_first=True, device="meta")
    sizes = ({0: Dim("batch")},)
    program = whence.capture(model, (torch.ones(2, 5, 4, device="meta"),), dynamic_shapes=sizes)
    assert program.module()(torch.ones(3, 5, 4, device="meta"))[0].shape == (3, 5, 3)


@pytest.mark.canary(
    "torch._dynamo._trace_wrapped_higher_order_op.ModIndex",
    "torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex",
)
def test_attention_indexes_by_tensors() -> None:
    """Flex attention's functions index by tensors in a mode of its own, with a derivative of its own."""
    indexing = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    bias = torch.ones(3, requires_grad=True)
    with indexing.TransformGetItemToIndex():
        node = bias[torch.tensor(1)].grad_fn
        assert node is not None
        assert indexes_for_attention(node)
    assert not indexes_for_attention(node)


@pytest.mark.canary("torch._dynamo.eval_frame.DisableContext._torchdynamo_disable")
def test_a_disabled_function_says_nothing_of_its_operations() -> None:
    """PyTorch annotates what runs in a function that its compiler does not read; a program does not."""

    class Disabled(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.compiler.disable(torch.sin)(x)

    program = verified(Disabled(), X)
    assert [node.meta["custom"] for node in program.nodes() if "custom" in node.meta] == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated")
@pytest.mark.canary("torch._dynamo.source.ConstantSource", "torch.fx.experimental.symbolic_shapes.ShapeEnv")
def test_an_exported_program_knows_where_sizes_come_from() -> None:
    """Sizes of a program that goes out are checked by PyTorch where they are read."""
    program = whence.capture(stack(1), (X,), dynamic_shapes=({0: Dim("rows", min=2)},))
    exported = program.to_exported_program()
    assert exported.module()(torch.ones(5, 4)).shape == (5, 4)
    branch = whence.capture(Scanned(), (X,)).to_exported_program()
    assert branch.module()(X)[1]["y"].shape == (2, 4)


@pytest.mark.canary("torch.export._trace._export_root")
@pytest.mark.canary("torch._export.wrappers.ExportTracepoint._export_tracepoint")
@pytest.mark.parametrize("strict", [False, True])
def test_exports_name_their_root(strict: bool) -> None:
    """The names that torch.export gives a root and its marks at preserved modules are understood."""
    model = stack()
    exported = torch.export.export(model, (X,), strict=strict, preserve_module_call_signature=("1",))
    program = whence.from_exported_program(exported)
    assert program.select("1.linear :: aten.linear")
    assert torch.equal(program.unflatten()(X), model(X))


def test_what_a_fake_tensor_keeps_is_not_set_by_anybody() -> None:
    """Attributes that somebody set on a fake tensor are told from its own."""
    fake: Any = FakeTensorMode().from_tensor(torch.ones(2))
    assert "_fake_device" in dir(fake) or hasattr(type(fake), "_fake_device") or fake.fake_device is not None
    assert attributes_set_on(fake) == {}
    fake.note = 3
    assert attributes_set_on(fake) == {"note": 3}


@pytest.mark.canary("torch.export.AdditionalInputs._examples")
def test_sizes_are_read_from_further_examples() -> None:
    """The inputs that were added to `AdditionalInputs` say which sizes vary."""
    examples = AdditionalInputs()
    examples.add((torch.ones(3, 4),))
    program = whence.capture(stack(1), (X,), dynamic_shapes=examples)
    assert program.module()(torch.ones(5, 4)).shape == (5, 4)


@pytest.mark.canary("torch.utils._sympy.functions.ToFloat")
def test_a_divisor_is_not_zero() -> None:
    """A size by which code divides must not be 0; the true quotient of whole numbers is a float."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * (1 / x.shape[0])

    program = whence.capture(Mean(), (X,), dynamic_shapes=({0: Dim("rows", min=0)},))
    assert torch.equal(program.module()(torch.ones(4, 4)), Mean()(torch.ones(4, 4)))


@pytest.mark.canary(
    *("torch.nn.Module._backward_pre_hooks", "torch.nn.Module._compiled_call_impl"),
    *("torch.nn.Module._forward_hooks_with_kwargs", "torch.nn.Module._forward_pre_hooks_with_kwargs"),
)
def test_hooks_of_a_tree_run() -> None:
    """Hooks on a module inside a tree run, with the arguments they asked for."""
    tree: Any = whence.capture(stack(), (X,)).unflatten()
    seen: list[int] = []
    tree[1].register_forward_pre_hook(lambda *given: seen.append(len(given)), with_kwargs=True)
    tree[1].register_forward_hook(lambda *given: seen.append(len(given)), with_kwargs=True)
    tree(X)
    assert seen == [3, 4]


@pytest.mark.canary("torch.nn.ParameterList._size")
def test_parameter_lists_are_made_again() -> None:
    """A list of parameters in a tree has its length and its entries."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(4), torch.ones(4)])

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scales[0] + self.scales[1]

    tree: Any = verified(Listed(), X).unflatten()
    assert len(tree.scales) == 2
    assert tree.scales[1] is tree.get_parameter("scales.1")


PLUMBING = (
    *("_call_impl", "_wrapped_call_impl", "_slow_forward", "_get_backward_hooks", "_get_backward_pre_hooks"),
    *("_is_full_backward_hook", "_state_dict_hooks", "_load_state_dict_pre_hooks"),
    *("_forward_hooks_always_called", "_modules", "_parameters"),
)


@pytest.mark.canary(
    *("torch.nn.Module._wrapped_call_impl", "torch.nn.Module._slow_forward", "torch.nn.Module._call_impl"),
    *("torch.nn.Module._get_backward_hooks", "torch.nn.Module._get_backward_pre_hooks"),
    *("torch.nn.Module._is_full_backward_hook", "torch.nn.Module._state_dict_hooks"),
    *("torch.nn.Module._load_state_dict_pre_hooks", "torch.nn.Module._forward_hooks_always_called"),
)
def test_what_every_call_reads_is_no_guard() -> None:
    """Attributes that Module reads in every call are there, and no capture depends on them."""
    _hook_lines.cache_clear()
    model = stack()
    model[0].register_forward_hook(lambda *_: None)
    assert all(hasattr(model, name) for name in PLUMBING)
    guards = str(verified(model, X).guards)
    assert [name for name in PLUMBING if name in guards] == []


@pytest.mark.canary("torch.utils._pytree.register_pytree_node")
def test_registered_containers_are_taken_apart() -> None:
    """A class that is registered is taken apart and made again, here and in PyTorch's own trees."""

    class Pair:
        def __init__(self, first: Any, second: Any) -> None:
            self.parts = (first, second)

    register_container(
        Pair, lambda pair: ([(("a",), pair.parts[0]), (("b",), pair.parts[1])], None), _made(Pair)
    )
    leaves, spec = tree_flatten(Pair(1, 2))
    assert leaves == [1, 2]
    assert tree_unflatten([3, 4], spec).parts == (3, 4)
    assert torch.utils._pytree.tree_leaves(Pair(5, 6)) == [5, 6]


def _made(kind: Any) -> Any:
    return lambda values, _context: kind(*values)
