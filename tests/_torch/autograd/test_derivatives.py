"""What C++ computes otherwise for fake tensors is recorded as eager computes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

import whence
from tests.checks import verified
from whence._torch.autograd import derivatives

Body = Callable[[Tensor], Tensor]

PRODUCTS: dict[str, Body] = {
    "all": lambda x: x.prod(),
    "transposed": lambda x: x.t().prod(),
    "vector": lambda x: x[0].prod(),
    "number": lambda x: x[0, 5].prod(),
    "one_element": lambda x: x[:1, :1].prod(),
    "wide": lambda x: x.prod(dtype=torch.float64),
    "along": lambda x: x.prod(1),
    "along_kept": lambda x: x.t().prod(-1, keepdim=True),
    "along_one": lambda x: x[:, :1].prod(1),
    "running": lambda x: x.cumprod(1),
    "running_transposed": lambda x: x.t().cumprod(-1),
    "running_wide": lambda x: x.cumprod(0, dtype=torch.float64),
}
EXTREMES = (torch.max, torch.min, torch.median, torch.nanmedian)


def factors(zeros: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Factors near 1, some of them 0."""
    x = (torch.rand(6, 40, generator=torch.Generator().manual_seed(0)) + 0.6).to(dtype)
    for row in range(zeros):
        x[row, row + 3] = 0
    return x.requires_grad_()


def compared(body: Body, x: Tensor) -> whence.Program:
    """The joint program, as it is and in a tree, with gradients that are not all the same."""
    program = verified(body, x, backward=True)
    verified(body, x, backward=lambda y: (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().abs())
    return program


@pytest.mark.parametrize("body", PRODUCTS.values(), ids=PRODUCTS)
def test_product(body: Body) -> None:
    """Eager divides where no factor is 0, and the same program is right where one is."""
    program = compared(body, factors(0))
    assert all(program.verify(body, (factors(zeros),)).ok for zeros in (1, 2))


def test_product_of_complex_numbers() -> None:
    """Eager divides by the conjugate, and a complex number divided by itself is not always 1."""
    x = torch.rand(6, 1, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for body in (PRODUCTS["all"], PRODUCTS["along"], PRODUCTS["along_kept"]):
        verified(lambda x, body=body: body(x).abs(), x, backward=True)
    x = torch.rand(4, 30, dtype=torch.complex64).requires_grad_()
    verified(lambda x: x.cumprod(1).abs(), x, backward=True)


def test_product_in_a_checkpoint() -> None:
    """A recomputed product unpacks what it saved once, as autograd does."""
    x = factors(0)

    def body(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(lambda x: x.sin().prod(1), x, use_reentrant=False)

    verified(body, x, backward=True)


def test_product_whose_sizes_vary() -> None:
    """The rules take sizes that are symbols."""
    x, rows = factors(0), torch.export.Dim("rows")
    for body in (PRODUCTS["all"], PRODUCTS["along"], PRODUCTS["running"], torch.max):
        program = whence.capture(body, (x,), backward=True, dynamic_shapes=({0: rows},))
        assert program.verify(body, (factors(1)[:4].detach().requires_grad_(),)).ok


@pytest.mark.parametrize("function", EXTREMES)
def test_extreme_of_everything(function: Body) -> None:
    """The gradient is 0 elsewhere, also where what arrives is infinite."""
    x = torch.randn(7, 9, generator=torch.Generator().manual_seed(0))
    for given in (x, x.round(), torch.where(x > 1, torch.nan, x)):
        compared(lambda x: function(x.t()) * torch.inf, given.clone().requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("inplace", [True, False])
def test_value_that_fills(dtype: torch.dtype, inplace: bool) -> None:
    """The gradient of a filled in value is summed as eager sums it: what the mask selects, and no zeros."""
    mask = torch.rand(40, 51, generator=torch.Generator().manual_seed(0)) > 0.4
    x, value = torch.randn(40, 51, requires_grad=True), torch.tensor(2.0, dtype=dtype, requires_grad=True)

    def body(x: Tensor, value: Tensor) -> Tensor:
        return x.sin().masked_fill_(mask, value) if inplace else x.masked_fill(mask, value)

    verified(body, x, value, backward=True)


@pytest.mark.parametrize("ignored", [0, 2, 3])
def test_smoothed_weighted_cross_entropy(ignored: int) -> None:
    """It is divided by the sum of the weights of targets that count, added up as eager does."""
    generator = torch.Generator().manual_seed(ignored)
    target = torch.randint(0, 51, (8, 30), generator=generator)
    if ignored:
        target.view(-1)[::ignored] = -100
    x = torch.randn(8, 51, 30, generator=generator, requires_grad=True)
    model = nn.CrossEntropyLoss(torch.rand(51, generator=generator), label_smoothing=0.2)
    program = verified(model, x, target, backward=True)
    assert [node.target for node in program.nodes()].count(derivatives.SUM_SELECTED) == 1
    assert program.verify(model, (x, target.clamp(min=0))).ok


def test_sum_of_weights_that_is_no_cross_entropy() -> None:
    """What a model adds up itself stays a sum."""
    weight, target = torch.rand(51), torch.randint(0, 51, (30,))

    def body(x: Tensor) -> Tensor:
        ignored = target == 3
        weights = weight.gather(0, target.masked_fill(ignored, 0)).masked_fill(ignored, 0)
        return F.nll_loss(x, target, weight, ignore_index=3) / weights.sum()

    program = verified(body, torch.randn(30, 51, requires_grad=True), backward=True)
    assert derivatives.SUM_SELECTED not in [node.target for node in program.nodes()]


INSIDE: dict[str, Body] = {
    "product": lambda x: x.prod(1).sum(),
    "filled": lambda x: x.masked_fill(torch.ones(6, 40, dtype=torch.bool), x[0, 0]).sum(),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("body", INSIDE.values(), ids=INSIDE)
def test_derivative_inside_the_model(body: Body, again: bool) -> None:
    """A derivative that the model takes is not rewritten, and refused where eager's decides by values."""

    def model(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(body(x), x, create_graph=again)
        return gradient.sum()

    for backward in {again, False}:
        with pytest.raises(whence.errors.DataDependent, match="decides by numbers") as caught:
            whence.capture(model, (factors(0),), backward=backward)
        assert "test_derivatives.py" in str(caught.value.where.line)


def test_running_product_inside_the_model() -> None:
    """Its derivative is eager's, the derivative of that is not."""

    def model(x: Tensor, again: bool) -> Tensor:
        (gradient,) = torch.autograd.grad(x.cumprod(1).sum(), x, create_graph=again)
        return gradient

    assert torch.equal(
        whence.capture(model, (factors(0), False)).module()(factors(1), False), model(factors(1), False)
    )
    with pytest.raises(whence.errors.DataDependent, match="Cumprod"):
        whence.capture(model, (factors(0), True))


@pytest.mark.parametrize("backward", [False, True])
def test_remedies_inside_the_model(backward: bool) -> None:
    """What the error proposes is captured bit for bit."""
    mask = torch.rand(6, 40) > 0.4

    def model(x: Tensor) -> Tensor:
        y = reduce(torch.mul, x.unbind(1)).sum() + x.max() + torch.where(mask, x[0, 0], x).sum()
        y = y + x.masked_fill(mask, torch.tensor(2.0)).sin().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=backward)
        return gradient.sum()

    if backward:
        verified(model, factors(0), backward=True)
    else:
        program = whence.capture(model, (factors(0),))
        assert torch.equal(program.module()(factors(0)), model(factors(0)))


def test_tensor_for_a_node() -> None:
    """A fresh tensor can stand for what an operation gave: the recording knows it by the same node."""
    seen: list[fx.Node | None] = []

    def listening(ran: derivatives._Ran) -> derivatives.Produced:
        node = ran.operations[-1]
        seen.append(node)
        seen.append(ran.recorder.node_of(ran.value(node)))
        return ran.produced

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(derivatives._RULES, "SinBackward0", listening)
        whence.capture(torch.sin, (torch.ones(3, requires_grad=True),), backward=True)
    assert len(seen) == 2 and seen[0] is seen[1]
    used = (unset_fake_temporarily, disable_proxy_modes_tracing, track_tensor_tree)
    assert all(getattr(derivatives, name.__name__) is name for name in used)
