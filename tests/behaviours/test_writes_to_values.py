"""In-place operations on intermediate values."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import whence
from tests.tracing.writing import Bodies, Body, Writer, check

bodies = Bodies()


@bodies.add
def add(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).add_(m.weight)


@bodies.add
def several_in_a_row(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden += 1
    hidden *= m.weight
    hidden -= x
    return hidden * 2


@bodies.add
def relu(m: Writer, x: Tensor) -> Tensor:
    return F.relu_(m.linear(x))


@bodies.add
def number_set(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[0] = 3.0
    return hidden


@bodies.add
def rows_set(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[torch.tensor([0, 2])] = m.weight
    return hidden


@bodies.add
def masked_number_set(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[x > 0] = 0.5
    return hidden


@bodies.add
def filled_by_rows(m: Writer, x: Tensor) -> Tensor:
    hidden = torch.zeros(4, 8)
    for row in range(4):
        hidden[row] = m.linear(x[row])
    return hidden


@bodies.add
def rows_swapped(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    first = hidden[0].clone()
    hidden[0] = hidden[1]
    hidden[1] = first
    return hidden


@bodies.add
def row_copied(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[1].copy_(m.weight)
    return hidden


@bodies.add
def broadcast_copied(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).copy_(m.weight) * 2


@bodies.add
def copied_to_a_transposed_tensor(m: Writer, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.empty(8, 4).t()
    hidden.copy_(m.linear(x))
    return hidden * 2, hidden.sum(0)


@bodies.add
def addcmul(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).addcmul_(x, m.weight, value=0.3)


@bodies.add
def addmm(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).addmm_(x, m.linear.weight)


@bodies.add
def lerp(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).lerp_(x, 0.3)


@bodies.add
def power(m: Writer, x: Tensor) -> Tensor:
    return (m.linear(x) * 1).pow_(2)


@bodies.add
def cumulated(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).cumsum_(1)


@bodies.add
def lower_triangle(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).tril_()


@bodies.add
def diagonal_filled(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).fill_diagonal_(1.0)


@bodies.add
def row_zeroed(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[0].zero_()
    return hidden


@bodies.add
def row_filled_with_a_tensor(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[0].fill_(m.weight.sum())
    return hidden


@bodies.add
def index_added(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).index_add_(0, torch.tensor([0, 2]), x[:2])


@bodies.add
def index_put_accumulated(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).index_put_((torch.tensor([0, 0]),), x[:2], accumulate=True)


@bodies.add
def index_filled(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).index_fill_(0, torch.tensor([1]), 2.0)


@bodies.add
def index_copied(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).index_copy_(0, torch.tensor([1]), x[:1])


@bodies.add
def scattered(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).scatter_(1, torch.tensor([[0], [1], [2], [3]]), x[:, :1])


@bodies.add
def number_scattered(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).scatter_(1, torch.tensor([[0], [1], [2], [3]]), 1.0)


@bodies.add
def scatter_added(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).scatter_add_(1, torch.tensor([[0], [1], [2], [3]]), x[:, :1])


@bodies.add
def scatter_reduced(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).scatter_reduce_(1, torch.tensor([[0], [1], [2], [3]]), x[:, :1], "amax")


@bodies.add
def clamped_without_grad(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    with torch.no_grad():
        hidden.clamp_(-0.1, 0.1)
    return hidden + 1


@bodies.add
def written_through_detach(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.detach().mul_(2)
    return hidden + 1


@bodies.add
def written_through_data(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.data.mul_(2)
    return hidden + 1


@bodies.add
def integers_added(m: Writer, x: Tensor) -> Tensor:
    return (x > 0).long().add_(2) * m.weight


@bodies.add
def booleans_joined(m: Writer, x: Tensor) -> Tensor:
    mask = x > 0
    mask |= x < -1
    return mask * m.weight


@bodies.add
def doubles_added_to_floats(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).add_(x.double())


@bodies.add
def floats_multiplied_into_halves(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).to(torch.bfloat16).mul_(m.weight)


@bodies.add
def booleans_multiplied_into_integers(m: Writer, x: Tensor) -> Tensor:
    count = (x > 0).long()
    count *= x < 1
    return count * m.weight


@bodies.add
def floats_copied_into_integers(m: Writer, x: Tensor) -> Tensor:
    return torch.zeros(4, 8, dtype=torch.long).copy_(x * 3) * m.weight


@bodies.add
def floats_copied_into_halves(m: Writer, x: Tensor) -> Tensor:
    return torch.zeros(4, 8, dtype=torch.bfloat16).copy_(m.linear(x)) * m.weight


@bodies.add
def comparison_written_into_floats(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).detach().gt_(0.1) * m.weight


@bodies.add
def negation_written_into_floats(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).detach().logical_not_() * m.weight


@bodies.add
def integers_divided(m: Writer, x: Tensor) -> Tensor:
    return (x * 10).long().div_(3, rounding_mode="floor") * m.weight


@bodies.add
def storage_replaced(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(4, 8).set_(x.detach() * 2) * m.weight  # type: ignore[call-overload]


@pytest.mark.sample(17)
@bodies.parametrize()
def test_write_to_a_value(body: Body, mode: str) -> None:
    """A value changed in place has eager's bits wherever it is read afterwards, and so have the gradients."""
    check(body, mode)


@pytest.mark.parametrize("mode", ["forward", "tangents", "loss"])
def test_write_to_a_sequence(mode: str) -> None:
    """An operation that writes to several tensors at once writes each of them."""

    def body(m: Writer, x: Tensor) -> Tensor:
        first, second = m.linear(x), x * 2
        torch._foreach_mul_([first, second], 2.0)
        return first + second

    check(body, mode)


@pytest.mark.parametrize("mode", ["forward", "tangents", "loss"])
def test_zeros_to_a_sequence(mode: str) -> None:
    """What led to values that are zeroed together has a gradient of zeros, as where each is zeroed alone."""

    def body(m: Writer, x: Tensor) -> Tensor:
        first, second = m.linear(x), x * m.weight
        torch._foreach_zero_([first[0], second])
        return first * 2 + second

    check(body, mode)


@pytest.mark.parametrize("mode", ["forward", "tangents", "loss"])
def test_every_write_without_a_form_is_named(mode: str) -> None:
    """Two writes that are refused are one error, each with its line and reason; their gradients are not."""

    def body(m: Writer, x: Tensor) -> Tensor:
        first, second = m.linear(x), m.linear(x) * 2
        second.unfold(1, 2, 2).add_(1)
        first.unfold(1, 2, 2).mul_(2)
        return first + second

    with pytest.raises(whence.UnsupportedMutation) as caught:
        check(body, mode)
    assert [fault.what.split(" ")[0] for fault in caught.value.faults] == [
        "aten.add_.Tensor",
        "aten.mul_.Tensor",
    ]
    lines = [fault.where.line for fault in caught.value.faults]
    assert None not in lines
    assert len(set(lines)) == 2
