"""Operations that are told where to write their result."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import whence
from tests.tracing.writing import Bodies, Body, Writer, check

bodies = Bodies()


@bodies.add
def sum_(m: Writer, x: Tensor) -> Tensor:
    result = torch.empty(4, 8)
    torch.add(x.detach(), 1, out=result)
    return result * m.weight


@bodies.add
def product(m: Writer, x: Tensor) -> Tensor:
    result = torch.empty(4, 8)
    torch.mm(x.detach(), m.linear.weight.detach(), out=result)
    return result * m.weight


@bodies.add
def into_a_view(m: Writer, x: Tensor) -> Tensor:
    result = torch.zeros(6, 8)
    torch.mul(x.detach(), 2, out=result[1:5])
    return result * m.weight


@bodies.add
def into_a_transposed_tensor(m: Writer, x: Tensor) -> Tensor:
    result = torch.zeros(8, 4).t()
    torch.mul(x.detach(), 2, out=result)
    return result * m.weight


@bodies.add
def two_results(m: Writer, x: Tensor) -> Tensor:
    values, places = torch.empty(4), torch.empty(4, dtype=torch.long)
    torch.max(x.detach(), 1, out=(values, places))
    return values[:, None] * m.weight + places[:, None]


@bodies.add
def returned_result(m: Writer, x: Tensor) -> Tensor:
    result = torch.empty(4, 8)
    return torch.add(x.detach(), 1, out=result) * m.weight + result


@bodies.add
def concatenation(m: Writer, x: Tensor) -> Tensor:
    result = torch.empty(8, 8)
    torch.cat([x.detach(), x.detach()], out=result)
    return result * m.weight


@bodies.add
def another_dtype(m: Writer, x: Tensor) -> Tensor:
    result = torch.empty(4, 8, dtype=torch.float64)
    torch.add(x.detach(), 1, out=result)
    return result * m.weight


@bodies.add
def empty_tensor_that_grows(m: Writer, x: Tensor) -> Tensor:
    result = torch.empty(0)
    torch.add(x.detach(), 1, out=result)
    return result * m.weight


@bodies.add
def concatenation_that_grows(m: Writer, x: Tensor) -> Tensor:
    return torch.cat([x.detach(), x.detach()], out=torch.empty(0)) * m.weight


@bodies.add
def two_results_as_tensors(m: Writer, x: Tensor) -> Tensor:
    values, places = torch.empty(8), torch.empty(8, dtype=torch.long)
    returned, _ = torch.max(x.detach(), 0, out=(values, places))
    return values * m.weight + places + returned


@bodies.add
def two_results_that_grow(m: Writer, x: Tensor) -> Tensor:
    values, places = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.sort(x.detach().t(), out=(values, places))
    values.add_(1)
    return values.t() * m.weight + places.t()


@bodies.add
def grows_in_the_order_of_what_is_added(m: Writer, x: Tensor) -> Tensor:
    result = torch.empty(0)
    torch.add(x.detach().t(), 1, out=result)
    return (result.t() * m.weight).sum(0)


@bodies.add
def into_a_buffer(m: Writer, x: Tensor) -> Tensor:
    torch.mul(x.detach(), 2, out=m.table)
    return m.table * m.weight


@pytest.mark.sample(28)
@bodies.parametrize()
def test_write_to_out(body: Body, mode: str) -> None:
    """`out=` writes show wherever the tensor is read afterwards, with eager's bits and gradients."""
    check(body, mode)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize(
    "write",
    [lambda x, out: torch.cat([x, x], out=out), lambda _, out: out.resize_(8, 8)],
    ids=["out", "resize_"],
)
def test_a_buffer_does_not_grow(write: Callable[[Tensor, Tensor], Tensor], rows: int) -> None:
    """Whoever holds it would have a tensor of another shape; the buffer is as it was."""

    def body(m: Writer, x: Tensor) -> Tensor:
        write(x.detach(), m.table)
        return m.linear(m.table)

    model = Writer(body)
    model.table = torch.ones(rows, 8)
    with pytest.raises(whence.UnsupportedMutation, match="whoever holds b_table would have"):
        whence.capture(model, (torch.randn(4, 8),))
    assert torch.equal(model.table, torch.ones(rows, 8))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_tensor_that_others_look_into_does_not_grow() -> None:
    """They would see memory that it has left."""

    def body(_: Writer, x: Tensor) -> Tensor:
        whole = torch.ones(8, 8)
        row = whole[0]
        torch.mul(x.detach(), 2, out=whole)
        return row

    with pytest.raises(whence.UnsupportedMutation, match="another shape"):
        check(body, "forward")
