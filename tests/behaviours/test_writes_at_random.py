"""Random numbers, drawn in place and otherwise: the program draws the same ones in the same order."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tracing.writing import Bodies, Body, Writer, check

bodies = Bodies()


@bodies.add
def uniform(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x).detach().uniform_() * m.weight


@bodies.add
def uniform_permuted(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(8, 4).t().uniform_() * m.weight


@bodies.add
def normal(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(4, 8).normal_(1, 2) * m.weight


@bodies.add
def normal_permuted(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(8, 4).t().normal_() * m.weight


@bodies.add
def bernoulli(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(4, 8).bernoulli_(0.3) * m.weight


@bodies.add
def bernoulli_with_default_chance(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(4, 8).bernoulli_() * m.weight


@bodies.add
def bernoulli_permuted(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(8, 4).t().bernoulli_(0.3) * m.weight


@bodies.add
def bernoulli_permuted_in_three_dimensions(m: Writer, x: Tensor) -> Tensor:
    return torch.zeros(4, 3, 8).permute(2, 0, 1).bernoulli_(0.3) * m.weight.view(8, 1, 1)


@bodies.add
def bernoulli_on_every_other_column(m: Writer, x: Tensor) -> Tensor:
    return torch.zeros(4, 16)[:, ::2].bernoulli_(0.3) * m.weight


@bodies.add
def bernoulli_of_chances(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(4, 8).bernoulli_(torch.sigmoid(x.detach())) * m.weight


@bodies.add
def bernoulli_of_chances_permuted(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(8, 4).t().bernoulli_(torch.sigmoid(x.detach())) * m.weight


@bodies.add
def exponential(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(4, 8).exponential_() * m.weight


@bodies.add
def exponential_permuted(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(8, 4).t().exponential_() * m.weight


@bodies.add
def integers(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(4, 8).random_(0, 10) * m.weight


@bodies.add
def cauchy(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(4, 8).cauchy_() * m.weight


@bodies.add
def geometric(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(4, 8).geometric_(0.4) * m.weight


@bodies.add
def log_normal(m: Writer, x: Tensor) -> Tensor:
    return torch.empty(4, 8).log_normal_() * m.weight


@bodies.add
def dropout(m: Writer, x: Tensor) -> Tensor:
    return F.dropout(m.linear(x), 0.3)


@bodies.add
def dropout_of_a_half(m: Writer, x: Tensor) -> Tensor:
    return F.dropout(m.linear(x), 0.5)


@bodies.add
def dropout_in_place(m: Writer, x: Tensor) -> Tensor:
    return F.dropout(m.linear(x), 0.3, inplace=True)


@bodies.add
def dropout_of_a_half_in_place(m: Writer, x: Tensor) -> Tensor:
    return F.dropout(m.linear(x), 0.5, inplace=True)


@bodies.add
def dropout_transposed(m: Writer, x: Tensor) -> Tensor:
    return F.dropout(m.linear(x).t(), 0.3)


@bodies.add
def dropout_of_a_half_transposed(m: Writer, x: Tensor) -> Tensor:
    return F.dropout(m.linear(x).t(), 0.5)


@bodies.add
def dropout_on_every_other_column(m: Writer, x: Tensor) -> Tensor:
    return F.dropout(m.linear(x)[:, ::2], 0.3)


@bodies.add
def dropout_of_everything(m: Writer, x: Tensor) -> Tensor:
    return F.dropout(m.linear(x), 1.0)


@bodies.add
def dropout_of_channels(m: Writer, x: Tensor) -> Tensor:
    return F.dropout2d(m.linear(x).view(1, 4, 8, 1), 0.3)


@bodies.add
def dropout_of_half_the_channels(m: Writer, x: Tensor) -> Tensor:
    return F.dropout2d(m.linear(x).view(1, 4, 8, 1), 0.5)


@bodies.add
def alpha_dropout(m: Writer, x: Tensor) -> Tensor:
    return F.alpha_dropout(m.linear(x), 0.3, True)


@bodies.add
def leaky_relu_with_random_slopes(m: Writer, x: Tensor) -> Tensor:
    return F.rrelu(m.linear(x), training=True)


@bodies.add
def leaky_relu_with_random_slopes_in_place(m: Writer, x: Tensor) -> Tensor:
    return F.rrelu_(m.linear(x), training=True) * 2


@bodies.add
def leaky_relu_in_place(m: Writer, x: Tensor) -> Tensor:
    return F.rrelu(m.linear(x), training=False, inplace=True) * 2


@bodies.add
def gumbel_softmax(m: Writer, x: Tensor) -> Tensor:
    return F.gumbel_softmax(m.linear(x), hard=True)


@bodies.add
def rows_permuted(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x)[torch.randperm(4)]


@bodies.add
def rows_sampled(m: Writer, x: Tensor) -> Tensor:
    return m.linear(x)[torch.multinomial(torch.ones(4), 2)]


@bodies.add
def attention_with_dropout(m: Writer, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(m.linear(x)[None], x[None], x[None], dropout_p=0.3)


@bodies.add
def numbers_nobody_reads(m: Writer, x: Tensor) -> Tensor:
    torch.rand(3)
    return F.dropout(m.linear(x), 0.3)


@pytest.mark.sample(14)
@bodies.parametrize()
def test_random_draw(body: Body, mode: str) -> None:
    """From the same seed the program has eager's numbers, gradients and generator state."""
    check(body, mode)
