"""Canaries: what operators say of themselves."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, can_auto_functionalize
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

from whence._torch.operators import schemas as operators
from whence._torch.operators.schemas import (
    arguments_of_twin,
    draws,
    functional_twin,
    in_place_twin,
    makes_memory,
    op_name,
    overloads_of,
    traits,
    without_outputs,
    written_arguments,
)
from whence._torch.operators.table import ROWS, said_of

aten = torch.ops.aten


def test_operators_are_overloads() -> None:
    """`torch.ops.aten.mm.default` is a `torch._ops.OpOverload`, with a schema and tags."""
    assert isinstance(aten.mm.default, OpOverload)
    assert [argument.name for argument in aten.mm.default._schema.arguments] == ["self", "mat2"]
    assert isinstance(torch.ops.higher_order.cond, HigherOrderOperator)


@pytest.mark.canary("torch._ops.OpOverload")
def test_operator_is_named_with_its_overload() -> None:
    """An operator prints as namespace, name and overload."""
    assert op_name(aten.add.Tensor) == "aten.add.Tensor"
    assert op_name(aten.mm.default) == "aten.mm.default"
    assert (aten.add.Tensor.namespace, aten.add.Tensor._opname, aten.add.Tensor._overloadname) == (
        "aten",
        "add",
        "Tensor",
    )


def test_what_kernels_ask_is_no_composite() -> None:
    """PyTorch's dispatcher does not know these operators, and has no kernels of theirs to ask for."""
    with pytest.raises(RuntimeError, match="does not exist"):
        aten.stride.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    assert not operators.is_composite(aten.stride.default)
    assert operators.is_composite(aten.linear.default)


def test_other_callables_are_named_plainly() -> None:
    """Anything else has its own name."""
    assert op_name(test_other_callables_are_named_plainly) == "test_other_callables_are_named_plainly"


@pytest.mark.parametrize(
    ("target", "mutates"),
    [
        (aten.add_.Tensor, (0,)),
        (aten.add.out, (3,)),
        (aten.add.Tensor, ()),
        (aten.max.dim_max, (3, 4)),
        (aten._foreach_add_.Scalar, (0,)),
        (aten.native_batch_norm.default, (3, 4)),
        (aten._native_batch_norm_legit.default, (3, 4)),
        (aten.index_put_.default, (0,)),
    ],
)
def test_schema_says_what_is_written(target: Any, mutates: tuple[int, ...]) -> None:
    """The schema marks the arguments that an operator writes, except where we know better."""
    assert traits(target).mutates == mutates


def test_batch_norm_writes_without_saying_so() -> None:
    """`native_batch_norm` writes its running statistics in training, and its schema still does not say so."""
    average, spread = torch.zeros(3), torch.ones(3)
    assert not any(argument.alias_info for argument in aten.native_batch_norm.default._schema.arguments)
    torch.native_batch_norm(torch.randn(4, 3), None, None, average, spread, True, 0.1, 1e-5)
    assert average.abs().sum() > 0


def test_batch_norm_writes_in_training_only() -> None:
    """In evaluation the running statistics are read."""
    arguments = (1, 2, 3, "average", "spread")
    assert written_arguments(aten.native_batch_norm.default, (*arguments, True, 0.1, 1e-5), {}) == [
        "average",
        "spread",
    ]
    assert written_arguments(aten.native_batch_norm.default, (*arguments, False, 0.1, 1e-5), {}) == []


@pytest.mark.parametrize(
    ("target", "viewed"),
    [
        (aten.view.default, 0),
        (aten.select.int, 0),
        (aten.split.Tensor, 0),
        (aten.unbind.int, 0),
        (aten.clone.default, None),
        (aten.add_.Tensor, None),
        (aten.reshape.default, 0),
    ],
)
def test_schema_says_what_is_a_view(target: Any, viewed: int | None) -> None:
    """The schema marks results that look into an argument."""
    assert traits(target).viewed == viewed


@pytest.mark.parametrize(
    "target", [aten.squeeze_.default, aten.t_.default, aten.transpose_.default, aten.unsqueeze_.default]
)
def test_tag_says_what_moves_a_view(target: Any) -> None:
    """Operators that change only the shape of a tensor in place are tagged as such."""
    assert traits(target).moves_view


@pytest.mark.parametrize(
    "target",
    [
        aten.native_dropout.default,
        aten.bernoulli_.float,
        aten.rand.default,
        aten.randint.low,
        aten.normal_.default,
    ],
)
def test_tag_says_what_is_random(target: Any) -> None:
    """Operators that draw random numbers are tagged as such."""
    assert traits(target).random


@pytest.mark.parametrize(("chance", "expected"), [(0.0, False), (0.3, True)])
def test_attention_draws_with_dropout_only(chance: float, expected: bool) -> None:
    """Attention is tagged random, and draws only when its dropout is above zero."""
    target = aten._scaled_dot_product_flash_attention.default
    assert operators.draws(target, (1, 2, 3, chance), {}) is expected
    assert operators.draws(target, (1, 2, 3), {"dropout_p": chance}) is expected
    assert operators.draws(target, (1, 2, 3), {}) is False


@pytest.mark.canary("torch._ops.OpOverload._schema")
def test_out_arguments_are_dropped() -> None:
    """The arguments that only say where to write are marked in the schema."""
    assert without_outputs(aten.add.out, {"alpha": 2, "out": 1}) == {"alpha": 2}


@pytest.mark.parametrize(
    ("target", "twin"),
    [
        (aten.add_.Tensor, aten.add.Tensor),
        (aten.mul_.Scalar, aten.mul.Scalar),
        (aten.add.out, aten.add.Tensor),
        (aten.max.dim_max, aten.max.dim),
        (aten.copy_.default, aten.copy.default),
        (aten.bernoulli_.float, aten.bernoulli.p),
        (aten.normal_.default, aten.normal_functional.default),
        (aten.pow_.Scalar, aten.pow.Tensor_Scalar),
        (aten.pow_.Tensor, aten.pow.Tensor_Tensor),
        (aten.masked_fill_.Tensor, aten.masked_fill.Tensor),
        (aten.native_batch_norm.default, aten._native_batch_norm_legit_functional.default),
        (aten._native_batch_norm_legit.default, aten._native_batch_norm_legit_functional.default),
        (aten._batch_norm_with_update.default, aten._batch_norm_with_update_functional.default),
    ],
)
def test_functional_twin(target: Any, twin: Any) -> None:
    """Every operator that writes has a twin that computes the same and writes nothing."""
    assert functional_twin(target) is twin


def writing_operators() -> list[Any]:
    """Every in-place operator of ATen on one tensor, and every one that is told where to write."""
    packets = [getattr(aten, name) for name in dir(aten) if not name.startswith("_")]
    packets = [packet for packet in packets if isinstance(packet, OpOverloadPacket)]
    targets = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    listed = (aten.native_batch_norm.default,)
    return [t for t in targets if traits(t).mutates and t not in listed and functional_twin(t) is not None]


def inputs(target: Any) -> list[Any]:
    return [argument for argument in target._schema.arguments if not argument.is_out]


def kind_of(argument: Any) -> str:
    """The type of an argument, where it is given."""
    return re.sub(r"Optional\[(\w+)\]", r"\1", str(argument.type))


def test_twin_takes_the_same_kinds_of_arguments() -> None:
    """A twin has the argument types of the operator it stands for, not only its argument names."""
    pairs: Any = [(target, functional_twin(target)) for target in writing_operators()]
    kinds = [[tuple(map(kind_of, inputs(operator))) for operator in pair] for pair in pairs]
    given = [
        (arguments_of_twin(target, twin, left), right)
        for (target, twin), (left, right) in zip(pairs, kinds, strict=True)
    ]
    assert [f"{a} -> {b}" for (a, b), (left, right) in zip(pairs, given, strict=True) if left != right] == []


def test_operator_without_a_twin() -> None:
    """An operator that has no functional form has no twin."""
    assert functional_twin(aten.set_.source_Tensor) in (None, aten.set.source_Tensor)
    assert functional_twin(aten.mm.default) is None


@torch.library.custom_op("whence_tests::count", mutates_args=("total",))
def count(total: Tensor, x: Tensor) -> None:
    """Writes to an argument, and says so in its schema."""
    total.add_(x.numel())


@count.register_fake
def _nothing(total: Tensor, x: Tensor) -> None:
    return None


@pytest.mark.canary(
    "torch._higher_order_ops.auto_functionalize.auto_functionalized",
    "torch._higher_order_ops.auto_functionalize.can_auto_functionalize",
)
def test_operator_that_writes_has_a_wrapper() -> None:
    """A custom operator that writes is run on a copy by a wrapper, which gives what was written."""
    target = torch.ops.whence_tests.count.default
    assert operators.is_wrapped(target) and not operators.is_wrapped(torch.ops.aten.add_.Tensor)
    total = torch.zeros(())
    results: Any = operators.WRAPPER(target, total=total, x=torch.ones(3))
    assert (total.item(), results[1].item()) == (0, 3)


@pytest.mark.canary(
    "torch._C.DispatchKey.Autograd",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._ops.HigherOrderOperator",
)
def test_custom_operator_is_told_from_built_in() -> None:
    """An operator defined outside PyTorch with a derivative has an Autograd kernel of its own."""

    @torch.library.custom_op("whence_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert torch._C._dispatch_has_kernel_for_dispatch_key("whence_tests::doubled", "Autograd")
    assert operators.brings_derivative(torch.ops.whence_tests.doubled.default)
    assert not operators.brings_derivative(aten.mm.default)


def test_entry_point_computes_the_same() -> None:
    """The C++ function behind an operator is called as the operator is."""
    x = torch.randn(2, 2)
    assert torch.equal(operators.entry_point(aten.mm.default)(x, x), torch.mm(x, x))


class Seen(TorchDispatchMode):
    """Notes every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


X, BATCH, ROW = torch.ones(4, 4), torch.ones(2, 4, 4), torch.ones(4)
ARGUMENTS: dict[Any, list[tuple[Any, ...]]] = {
    aten.addmm.default: [(ROW, X, X)],
    aten.baddbmm.default: [(BATCH, BATCH, BATCH)],
    aten.bmm.default: [(BATCH, BATCH)],
    aten.cat.default: [([X, X],), ([X, X], -1)],
    aten.embedding.default: [(X, torch.tensor([0, 1])), (X, torch.tensor([0]), 1, True, False)],
    aten.expand.default: [(ROW, [4, -1]), (ROW, [2, 4])],
    aten.mean.dim: [(X, [-1]), (X, [0, 1], True)],
    aten.mm.default: [(X, X)],
    aten.native_layer_norm.default: [(X, [4], ROW, ROW, 1e-5), (X, [4], None, None, 1e-5)],
    aten.permute.default: [(X, [1, 0])],
    aten.reshape.default: [(X, [2, 8]), (X.t(), [16]), (X, [-1])],
    aten.select.int: [(X, 0, 1)],
    aten.squeeze.dim: [(X[:1], 0), (X, 0)],
    aten.sum.dim_IntList: [(X, [0]), (X, [0, 1], True), (X, []), (X, None)],
    aten.transpose.int: [(X, 0, 1), (X, -1, -2)],
    aten.unsqueeze.default: [(X, 1), (X, -1)],
    aten.view.default: [(X, [2, 8]), (X, [-1])],
    **{
        operator: [(X, X), (X, ROW), (X, 2), (X, 1e-6), (X, True)]
        for operator in (aten.add.Tensor, aten.mul.Tensor)
    },
    **{operator: [(X, X), (X, ROW), (X, 2), (X, 1e-6)] for operator in (aten.sub.Tensor, aten.div.Tensor)},
}


@pytest.mark.parametrize("target", [operator for operator, row in ROWS.items() if row.entry], ids=str)
def test_bound_function_reaches_the_operator(target: Any) -> None:
    """The function that runs for an operator runs it, on whatever arguments it is given."""
    function = said_of(target).entry
    assert function is not None
    assert operators.entry_point(target, (fx.Graph().placeholder("x"),)) is function
    for args in ARGUMENTS.get(target, [(X,)]):
        with Seen() as expected:
            target(*args)
        with Seen() as found:
            function(*args)
        assert found.operators == expected.operators


@pytest.mark.canary("torch._ops.OpOverload._op")
@pytest.mark.parametrize("args", [(), (2.0,)])
def test_operator_on_numbers_runs_itself(args: tuple[Any, ...]) -> None:
    """Functions want a tensor first; an operator takes a number in its place."""
    assert operators.entry_point(aten.mul.Tensor, args) is aten.mul.Tensor._op


def test_keywords_are_those_of_the_operator() -> None:
    """What graphs pass by name, the functions take by the same name."""
    assert torch.add(X, X, alpha=2).equal(aten.add.Tensor(X, X, alpha=2))
    assert torch.sum(X, [0], dtype=torch.float64).dtype is torch.float64
    assert torch.mean(X, [0], dtype=torch.float64).dtype is torch.float64
    assert torch.clone(X, memory_format=torch.contiguous_format).equal(X)
    assert Tensor.expand(ROW, [4, 4], implicit=False).equal(X)


@torch.library.custom_op("whence_canaries::fill", mutates_args={"x", "others"})
def fill(x: Tensor, others: list[Tensor], value: float) -> Tensor:
    for tensor in (x, *others):
        tensor.fill_(value)
    return x.sum()


def test_wrapper_runs_an_operator_on_copies() -> None:
    """`auto_functionalized` gives results and copies; `can_auto_functionalize` says of what."""
    target = torch.ops.whence_canaries.fill.default
    assert operators.is_wrapped(target) == can_auto_functionalize(target)
    assert not operators.is_wrapped(aten.add_.Tensor)
    assert operators.WRAPPER is auto_functionalized
    given = torch.zeros(2)
    results: Any = auto_functionalized(target, x=given, others=[torch.zeros(1)], value=2.0)
    total, first, others = results
    assert given.tolist() == [0.0, 0.0]
    assert (total.item(), first.tolist(), [other.tolist() for other in others]) == (4.0, [2.0, 2.0], [[2.0]])


@pytest.mark.parametrize(
    ("target", "is_act"),
    [
        (aten._assert_async.default, True),
        (aten._assert_async.msg, True),
        (operators.ASSERT, True),
        (torch.ops.whence_canaries.fill.default, False),
        (aten.add_.Tensor, False),
        (aten.sin.default, False),
        (aten.sym_constrain_range.default, False),
        (len, False),
    ],
    ids=str,
)
def test_operators_that_give_nothing(target: Any, is_act: bool) -> None:
    """What is called for what it does; what only says something about sizes is not."""
    assert operators.acts(target) == is_act


@pytest.mark.canary("torch._ops.OpOverloadPacket")
def test_overloads_of_a_name() -> None:
    """A name stands for all its overloads, an overload for itself, anything else for none."""
    assert overloads_of(aten.gelu.default) == (aten.gelu.default,)
    assert set(overloads_of(aten.add)) >= {aten.add.Tensor, aten.add.Scalar}
    assert overloads_of(torch.add) == ()


def test_recurrent_networks_draw_where_something_is_dropped() -> None:
    """As attention does; most other operators that are random always are."""
    weights: list[Any] = []
    assert not draws(aten.lstm.input, (None, weights, weights, True, 2, 0.0, True, False, False), {})
    assert draws(aten.lstm.input, (None, weights, weights, True, 2, 0.5, True, False, False), {})
    assert draws(aten.bernoulli.default, (None,), {})


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.mm.default, True),
        (aten._foreach_add.Scalar, True),
        (aten.view.default, False),
        (aten._unsafe_view.default, False),
        (aten.unsafe_split.Tensor, False),
        (aten.add_.Tensor, False),
        (aten.native_batch_norm.default, False),
        (aten.reshape.default, False),
        (len, False),
    ],
    ids=str,
)
def test_who_makes_memory(target: Any, expected: bool) -> None:
    """No view, not one of which schemas do not speak either; nobody who writes, no composite, no function."""
    assert makes_memory(target) is expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.mul.Tensor, aten.mul_.Tensor),
        (aten._foreach_lerp.Scalar, aten._foreach_lerp_.Scalar),
        (aten._fused_adamw.default, aten._fused_adamw_.default),
        (aten.mm.default, None),
        (aten.t.default, None),
        (aten.eq.Tensor, aten.eq_.Tensor),
        (len, None),
    ],
    ids=str,
)
def test_who_can_write_in_place(target: Any, expected: Any) -> None:
    """Operators by element and those of optimizers, where PyTorch has one that writes."""
    assert in_place_twin(target) is expected


def test_arguments_of_a_twin_that_always_trains() -> None:
    """Without the flag that says so."""
    twin = aten._batch_norm_with_update_functional.default
    given = tuple("xwbmvtfe")
    assert arguments_of_twin(aten.cudnn_batch_norm.default, twin, given) == tuple("xwbmvfe")
    other = aten._native_batch_norm_legit_functional.default
    assert arguments_of_twin(aten.native_batch_norm.default, other, given) == given
