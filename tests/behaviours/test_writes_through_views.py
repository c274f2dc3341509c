"""In-place operations on views: their bases show them, and so do other views of those."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import whence
from tests.tracing.writing import Bodies, Body, Writer, check

bodies, refused = Bodies(), Bodies()


@bodies.add
def view(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.view(2, 16).mul_(2)
    return hidden


@bodies.add
def view_of_a_view_taken_before(m: Writer, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = m.linear(x)
    part = hidden.view(2, 16)[0]
    hidden.mul_(2)
    return part, part.cos()


@bodies.add
def view_of_a_view_returned(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    part = hidden.view(2, 16)[0]
    hidden.mul_(2)
    return part


@bodies.add
def reshape(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.reshape(32).mul_(2)
    return hidden


@bodies.add
def flatten(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.flatten().mul_(2)
    return hidden


@bodies.add
def unflatten(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.unflatten(1, (2, 4))[:, 1].mul_(2)
    return hidden


@bodies.add
def slice_(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[:, 2:6].mul_(m.weight[:4])
    return hidden


@bodies.add
def slice_with_step(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[:, 1::3].add_(1)
    return hidden


@bodies.add
def narrow(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.narrow(1, 2, 3).zero_()
    return hidden


@bodies.add
def select(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[1].mul_(m.weight)
    return hidden


@bodies.add
def diagonal(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.diagonal().add_(m.weight[:4])
    return hidden


@bodies.add
def as_strided(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.as_strided((2, 3), (8, 2), 1).mul_(3)
    return hidden


@bodies.add
def t(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.t().mul_(torch.arange(4.0))
    return hidden


@bodies.add
def matrix_transpose(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.mT[0].mul_(3)
    return hidden


@bodies.add
def transpose(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.transpose(0, 1)[2].mul_(5)
    return hidden


@bodies.add
def permute(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.view(2, 2, 8).permute(2, 0, 1)[3].mul_(5)
    return hidden


@bodies.add
def permute_of_a_returned_view(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).view(2, 2, 8)
    hidden.permute(2, 0, 1)[3].mul_(5)
    return hidden


@bodies.add
def movedim(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.view(2, 2, 8).movedim(0, 2)[1].mul_(2)
    return hidden


@bodies.add
def swapaxes(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.swapaxes(0, 1).add_(torch.arange(4.0))
    return hidden


@bodies.add
def unsqueeze(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.unsqueeze(1).mul_(2)
    return hidden


@bodies.add
def squeeze(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).clone().unsqueeze(1)
    hidden.squeeze(1).mul_(2)
    return hidden * 1


@bodies.add
def squeeze_of_a_returned_view(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).unsqueeze(1)
    hidden.squeeze(1).mul_(2)
    return hidden


@bodies.add
def squeeze_all(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).unsqueeze(1)
    hidden.squeeze().mul_(2)
    return hidden * 1


@bodies.add
def squeeze_several(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).view(4, 1, 8, 1)
    hidden.squeeze((1, 3)).mul_(2)
    return hidden * 1


@bodies.add
def split(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).detach()
    first, second = hidden.split(4, dim=1)
    first.mul_(2)
    second.add_(first)
    return hidden * m.weight


@bodies.add
def split_with_sizes(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).detach()
    hidden.split([3, 5], dim=-1)[1].mul_(2)
    return hidden * m.weight


@bodies.add
def chunk(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).detach()
    hidden.chunk(3, 1)[2].mul_(2)
    return hidden * m.weight


@bodies.add
def hsplit(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).detach()
    hidden.hsplit(2)[0].mul_(2)
    return hidden * m.weight


@bodies.add
def unbind(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).detach()
    hidden.unbind(1)[2].mul_(2)
    return hidden * m.weight


@bodies.add
def view_as_real(m: Writer, x: Tensor) -> Tensor:
    hidden = torch.complex(m.linear(x), x)
    torch.view_as_real(hidden)[..., 0].mul_(2)
    return hidden.abs()


@bodies.add
def real(m: Writer, x: Tensor) -> Tensor:
    hidden = torch.complex(m.linear(x), x)
    hidden.real.mul_(2)
    return hidden.abs()


@bodies.add
def imag(m: Writer, x: Tensor) -> Tensor:
    hidden = torch.complex(m.linear(x), x)
    hidden.imag.add_(2)
    return hidden.abs()


@bodies.add
def conj(m: Writer, x: Tensor) -> Tensor:
    hidden = torch.complex(m.linear(x), x)
    hidden.conj().mul_(2j)
    return hidden.abs()


@bodies.add
def complex_slice(m: Writer, x: Tensor) -> Tensor:
    hidden = torch.complex(m.linear(x), x)
    hidden[..., 1:] = hidden[..., :-1] * 2j
    return hidden.abs()


@bodies.add
def complex_slice_of_a_conjugate(m: Writer, x: Tensor) -> Tensor:
    hidden = torch.complex(m.linear(x), x).conj()
    hidden.T[1:3] = hidden.T[:2].conj() * 2
    return torch.view_as_real(hidden.resolve_conj())


@bodies.add
def complex_pick(m: Writer, x: Tensor) -> Tensor:
    hidden = torch.complex(x, m.linear(x))
    hidden[:, -1] = hidden[:, 0].conj()
    return hidden.abs()


@bodies.add
def complex_zeros(m: Writer, x: Tensor) -> Tensor:
    hidden = torch.complex(m.linear(x), x)
    hidden[:, 1:2].zero_()
    other = torch.complex(x, m.linear(x)).zero_()
    return (hidden + other).abs()


@bodies.add
def view_as_complex(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    torch.view_as_complex(hidden.view(4, 4, 2)).mul_(1j)
    return hidden


@bodies.add
def view_as_another_dtype(m: Writer, x: Tensor) -> Tensor:
    hidden = x.detach() * 1
    hidden.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    return hidden * m.weight


@bodies.add
def chain_of_views(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.view(2, 2, 8)[1].t()[3:5].mul_(2)
    return hidden


@bodies.add
def overlapping_views(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    upper, lower = hidden[:2], hidden[1:3]
    upper.mul_(2)
    lower.add_(1)
    return upper.sum(0) + lower.sum(0) + hidden


@bodies.add
def view_read_after_its_base_changed(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    row = hidden[0]
    hidden.mul_(2)
    return row + hidden.sum(0)


@bodies.add
def expanded_view_read_after_its_base_changed(m: Writer, x: Tensor) -> Tensor:
    row = m.weight * 1
    rows = row.expand(4, 8)
    row.mul_(2)
    return rows + x


@bodies.add
def view_of_a_view_read_after_both_changed(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    halves = hidden.view(2, 16)
    first = halves[0]
    hidden.add_(1)
    halves.mul_(2)
    return first.sum() * x


@bodies.add
def view_returned_after_its_base_changed(m: Writer, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = m.linear(x)
    row = hidden[0]
    hidden.mul_(2)
    return hidden, row


@bodies.add
def view_set_from_another(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[1:, :4] = torch.where(x[1:, :4] > 0, hidden[1:, :4], m.weight[:4])
    return hidden


@bodies.add
def squeezed_in_place(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).unsqueeze(0)
    hidden.squeeze_(0)
    return hidden * 2


@bodies.add
def unsqueezed_in_place(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.unsqueeze_(0)
    hidden.mul_(2)
    return hidden


@bodies.add
def transposed_in_place(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.transpose_(0, 1)
    hidden[0].mul_(2)
    return hidden


@bodies.add
def transposed_in_place_under_a_view(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).detach()
    row = hidden[0]
    hidden.t_()
    hidden.mul_(2)
    return (hidden.sum(1) + row) * m.weight


@bodies.add
def strided_in_place(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden.as_strided_((2, 2), (8, 1))
    return hidden * 2


@bodies.add
def activation_of_what_lies_otherwise(m: Writer, x: Tensor) -> Tensor:
    hidden = F.layer_norm((x.repeat(2, 1) @ m.table.T).mul(m.weight[0]), (4,)).t()
    return F.silu(hidden, inplace=True)


@pytest.mark.sample(19)
@bodies.parametrize()
def test_write_through_a_view(body: Body, mode: str) -> None:
    """A write through a view shows in its base and in every other view, with eager's bits and gradients."""
    check(body, mode)


@refused.add
def unfold(m: Writer, x: Tensor) -> Tensor:
    hidden = m.linear(x).detach()
    hidden.unfold(1, 2, 2).mul_(2)
    return hidden * m.weight


@refused.add
def expand_of_one(m: Writer, x: Tensor) -> Tensor:
    total = m.weight.sum() * 1
    total.expand(1).mul_(2)
    return total * x


@refused.parametrize()
def test_write_through_a_view_without_an_inverse(body: Body, mode: str) -> None:
    """A write through a view that cannot be undone is refused, with the operations and the line."""
    with pytest.raises(whence.UnsupportedMutation, match="whose inverse is not known") as caught:
        check(body, mode)
    assert caught.value.where.line is not None
    assert body.__name__ in caught.value.where.line


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.linear(x.transpose_(0, 1)),
        lambda m, x: m.linear(x.t_()),
        lambda m, x: m.linear(x.unsqueeze_(0)),
        lambda m, x: m.linear(x.resize_(4, 8)),
        lambda m, x: m.linear(x) * m.table.t_().sum(),
    ],
    ids=["transpose", "t", "unsqueeze", "resize", "of a buffer"],
)
def test_another_shape_for_what_others_hold(body: Body) -> None:
    """Eager changes the tensor of its caller, or of the module; a program would not, and is refused."""
    with pytest.raises(whence.UnsupportedMutation, match="of another shape afterwards") as caught:
        whence.capture(Writer(body), (torch.randn(8, 8),))
    assert "test_writes_through_views.py" in str(caught.value.where)
