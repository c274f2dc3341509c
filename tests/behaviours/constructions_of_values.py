"""Constructions of models in which values decide: sizes, branches, loops, coin flips."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import whence
from tests.behaviours.constructions import ROWS, Parts, never, numbers, row

__all__ = ["ROWS"]

FACTOR: Any
"""What tests put here."""


def factor() -> Any:
    return FACTOR  # noqa: F821


# --- values that data decide -------------------------------------------------------------------------

BY_VALUE = "which way it goes is a value's, and nobody said that the example decides"


@row()
def reads_an_item(m: Parts, x: Tensor) -> Tensor:
    return m.linear(x) * x.abs().max().item()


@row(lambda: torch.arange(3.0), lambda: torch.tensor([1, 3]))
def lists_numbers(m: Parts, x: Tensor, by: Tensor) -> Tensor:
    first, second = by.tolist()
    return m.linear.weight[:3] * x[:, None] * first + second


@row()
def indices_of_nonzero(m: Parts, x: Tensor) -> Tensor:
    rows, columns = (x > 0).nonzero(as_tuple=True)
    return m.linear(x)[rows, columns].sum() + m.other.bias


@row()
def mask_as_an_index(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    return hidden[x > 0] * 2


@row()
def mask_written(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x).clone()
    hidden[x < 0] = 0
    return m.other(hidden)


@row()
def masked_select_and_scatter(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    return hidden.masked_scatter(x > 0, torch.masked_select(m.other(x), x > 0))


@row(lambda: numbers(6, 4), lambda: torch.tensor([0, 2, 2, 5, 0, 2]))
def unique_groups(m: Parts, x: Tensor, group: Tensor) -> Tensor:
    found, inverse = group.unique(return_inverse=True)
    sums = m.linear(x).new_zeros(found.shape[0], 4)
    return sums.index_add(0, inverse, m.linear(x))


@row(lambda: numbers(3, 4), lambda: torch.tensor([1, 3, 2]))
def repeats_rows(m: Parts, x: Tensor, counts: Tensor) -> Tensor:
    return m.linear(x).repeat_interleave(counts, 0).tanh()


@row(lambda: numbers(3, 4), lambda: torch.tensor([1, 3, 2]), decide="example")
def sums_up_repeated_rows(m: Parts, x: Tensor, counts: Tensor) -> Tensor:
    return m.linear(x).repeat_interleave(counts, 0).cumsum(0)


@row(lambda: numbers(1, 2, 4), lambda: torch.tensor(3), decide="example")
def repeats_by_a_number(m: Parts, x: Tensor, count: Tensor) -> Tensor:
    return m.linear(x).repeat(1, int(count), 1)


@row(lambda: numbers(1, 2, 4), lambda: torch.tensor(2.0), decide="example")
def interpolates_by_a_number(m: Parts, x: Tensor, factor: Tensor) -> Tensor:
    return F.interpolate(m.linear(x), scale_factor=factor.item(), mode="linear")


@row(lambda: numbers(4, 4), lambda: torch.tensor([3, 1]))
def splits_by_numbers(m: Parts, x: Tensor, sizes: Tensor) -> Tensor:
    first, second = m.linear(x).split(sizes.tolist())
    return first.sum(0) * second.mean(0)


@row(lambda: numbers(4, 4), lambda: torch.tensor(2))
def slices_to_a_number(m: Parts, x: Tensor, end: Tensor) -> Tensor:
    return m.linear(x)[: end.item()].sum(0)


@row(lambda: numbers(4, 4), lambda: torch.tensor(2))
def reads_at_a_tensor(m: Parts, x: Tensor, at: Tensor) -> Tensor:
    return m.linear(x)[at] * x[..., at.int()] + x[at:, 1:][0, at - 1]


def read_twice(m: Parts, x: Tensor, at: Tensor, advance: Callable[[Tensor], object]) -> Tensor:
    """What is read after a write are other numbers."""
    m.place.copy_(at)
    first = m.place.item()
    advance(m.place)
    return m.linear(x)[first] * x[: m.place.item()].sum(0)


@row(lambda: numbers(4, 4), lambda: torch.tensor(2))
def reads_again_after_a_write(m: Parts, x: Tensor, at: Tensor) -> Tensor:
    return read_twice(m, x, at, lambda place: place.add_(1))


@row(lambda: numbers(4, 4), lambda: torch.tensor(2))
def reads_again_after_a_write_to_data(m: Parts, x: Tensor, at: Tensor) -> Tensor:
    return read_twice(m, x, at, lambda place: place.data.add_(1))


@row(lambda: numbers(4, 4), lambda: torch.tensor(2))
def reads_again_after_a_write_to_a_view(m: Parts, x: Tensor, at: Tensor) -> Tensor:
    return read_twice(m, x, at, lambda place: place.view(1).add_(1))


@row(lambda: numbers(4, 4), lambda: torch.tensor(2))
def writes_at_a_tensor(m: Parts, x: Tensor, at: Tensor) -> Tensor:
    hidden = m.linear(x)
    hidden[at, :at] = x[0, :at]
    return hidden


@row(lambda: numbers(3, 4), lambda: torch.tensor(2))
def checks_a_number(m: Parts, x: Tensor, at: Tensor) -> Tensor:
    place = at.item()
    torch._check(place >= 0)
    torch._check(place < x.shape[0])
    return m.linear(x)[place]


@row(lambda: numbers(3, 4), lambda: torch.tensor([0, 2, 1]))
def asserts_a_range(m: Parts, x: Tensor, ids: Tensor) -> Tensor:
    assert ids.max() < 3, "out of range"
    return m.linear(x)[ids]


@row()
def raises_on_bad_values(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    if not torch.isfinite(hidden).all():
        raise ValueError("not finite")
    return hidden.exp()


@row(lambda: torch.tensor([1, 2, 2, 0]))
def counts_by_bincount(m: Parts, ids: Tensor) -> Tensor:
    counts = torch.bincount(ids, minlength=4)
    return m.linear(counts.float())


@row(lambda: numbers(4, 4), lambda: torch.tensor([2, 1, 1]), decide="example")
def groups_of_sequences(m: Parts, x: Tensor, lengths: Tensor) -> Tensor:
    return pad_sequence(m.linear(x).split(lengths.tolist()), batch_first=True).sum(1)


@row()
def sparse_adjacency(m: Parts, x: Tensor) -> Tensor:
    places = torch.tensor([[0, 1, 2], [1, 2, 0]])
    adjacency = torch.sparse_coo_tensor(places, torch.ones(3), (3, 3), check_invariants=False)
    return torch.sparse.mm(adjacency, m.linear(x))


SPARSE = never(whence.UnsupportedInput, "is a sparse_", "its indices are part of its numbers")


@row(numbers, lambda: numbers(3, 3).relu().to_sparse(), refused=SPARSE)
def sparse_adjacency_passed_in(m: Parts, x: Tensor, adjacency: Tensor) -> Tensor:
    return adjacency @ m.linear(x)


@row(numbers, lambda: numbers(3, 3).relu().to_sparse(), refused=SPARSE)
def compressed_adjacency(m: Parts, x: Tensor, adjacency: Tensor) -> Tensor:
    return adjacency @ m.linear(x)


@row()
def edges_of_a_mask(m: Parts, x: Tensor) -> Tensor:
    source, target = (x @ x.T > 0).nonzero().unbind(1)
    hidden = m.linear(x)
    return torch.zeros_like(hidden).index_add(0, target, hidden[source])


# --- the example decides -----------------------------------------------------------------------------


@row(refused=never(whence.DataDependent, 'decide="example"', BY_VALUE))
def branches_undecided(m: Parts, x: Tensor) -> Tensor:
    return m.linear(x) if x.sum() > 0 else m.other(x)


@row(decide="example")
def branches_by_a_sum(m: Parts, x: Tensor) -> Tensor:
    return m.linear(x) if x.sum() > 0 else m.other(x)


@row(lambda: numbers(6, 4), decide="example")
def routes_to_experts(m: Parts, x: Tensor) -> Tensor:
    which, found = m.linear(x)[:, :3].argmax(1), torch.zeros_like(x)
    for at, expert in enumerate(m.experts):
        if (mask := which == at).any():
            found[mask] = expert(x[mask])
    return found


@row(lambda: numbers(6, 4), decide="example")
def routes_by_a_list(m: Parts, x: Tensor) -> Tensor:
    which, found = m.linear(x)[:, :3].argmax(1), torch.zeros_like(x)
    for at in which.unique().tolist():
        rows = (which == at).nonzero().flatten()
        found = found.index_add(0, rows, m.experts[at](x[rows]))
    return found


@row(numbers, lambda: torch.ones(3, 4, dtype=torch.bool), decide="example")
def drops_a_full_mask(m: Parts, x: Tensor, mask: Tensor) -> Tensor:
    hidden = m.linear(x)
    return hidden if mask.all() else hidden.masked_fill(~mask, 0)


@row(lambda: numbers(2, 5, 4), lambda: torch.tensor([5, 3]), decide="example")
def packed_sequences(m: Parts, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(m.linear(x), lengths, batch_first=True)
    return pad_packed_sequence(m.recurrent(packed)[0], batch_first=True)[0]


@row(lambda: numbers(6, 4), decide="example")
def starts_codes_once(m: Parts, x: Tensor) -> Tensor:
    hidden = m.linear(x)
    if not m.started:
        m.codes.copy_(hidden.detach()[torch.randperm(6)[:3]])
        m.started.fill_(True)
    return hidden + m.codes[torch.cdist(hidden, m.codes).argmin(1)]


@row(decide="example")
def exits_early(m: Parts, x: Tensor) -> Any:
    for depth, layer in enumerate(m.experts):
        x = layer(x).tanh()
        if x.abs().max() < 0.9:
            return x, depth
    return m.other(x), -1


@row(lambda: numbers(3, 4), lambda: numbers(2, 4) + 1, decide="example")
def matches_in_the_loss(m: Parts, x: Tensor, targets: Tensor) -> Tensor:
    hidden = m.linear(x)
    costs = torch.cdist(hidden, targets).detach().numpy()
    pairs = [(int(costs[:, at].argmin()), at) for at in range(costs.shape[1])]
    return torch.stack([(hidden[a] - targets[b]).square().sum() for a, b in pairs])


@row(decide="example")
def iterates_to_a_tolerance(m: Parts, x: Tensor) -> Tensor:
    state, found = x, m.linear(x).tanh()
    while (found - state).norm() > 0.5:
        state, found = found, m.linear(found).tanh() * 0.5
    return found


@row(lambda: torch.tensor([[1, 5, 2, 0], [3, 2, 0, 0]]), decide="example")
def stops_at_an_end(m: Parts, ids: Tensor) -> Tensor:
    found = m.scale.new_zeros(2, 4)
    for at in range(4):
        if (ids[:, at] == 0).all():
            break
        found = m.linear(found + ids[:, at : at + 1])
    return found


@row(decide="example")
def key_of_a_dict(m: Parts, x: Tensor) -> Tensor:
    named = {0: m.linear, 1: m.other}
    return named[int((x > 0).sum()) % 2](x)


@row(decide="example")
def checks_equal(m: Parts, x: Tensor) -> Tensor:
    return m.linear(x) if torch.equal(m.scale, torch.ones(4)) else m.other(x)


# --- coin flips --------------------------------------------------------------------------------------


@row(decide="example")
def flips_by_torch(m: Parts, x: Tensor) -> Tensor:
    return m.linear(x) if torch.rand(1).item() < 0.5 else m.other(x)


@row(decide="example")
def drops_layers(m: Parts, x: Tensor) -> Tensor:
    for layer in m.experts:
        if torch.rand([]) >= 0.5:
            x = x + layer(m.drop(x))
    return x + m.other(x)


@row(decide="example")
def picks_by_randint(m: Parts, x: Tensor) -> Tensor:
    return m.experts[int(torch.randint(0, 3, ()))](m.drop(x))


@row(decide="example")
def flips_by_bernoulli(m: Parts, x: Tensor) -> Tensor:
    return m.linear(x) if torch.bernoulli(torch.tensor(0.3)).bool() else m.drop(m.other(x))


DRAWN = never(whence.SideEffect, "draws from", "the number would be a constant")


@row(decide="example")
def flips_by_python(m: Parts, x: Tensor) -> Tensor:
    return m.linear(x) if random.random() < 0.5 else m.other(x)


@row(decide="example")
def drops_layers_by_python(m: Parts, x: Tensor) -> Tensor:
    for layer in m.experts:
        if random.uniform(0, 1) >= 0.5:
            x = x + m.drop(layer(x))
    return x + m.other(x)


@row(decide="example")
def picks_by_python(m: Parts, x: Tensor) -> Tensor:
    return random.choice([m.linear, m.other])(x) * random.randint(1, 3)


@row(decide="example")
def flips_by_numpy(m: Parts, x: Tensor) -> Tensor:
    return m.linear(x) if np.random.rand() < 0.5 else m.other(x)


@row(decide="example")
def picks_by_numpy(m: Parts, x: Tensor) -> Tensor:
    return m.experts[np.random.randint(3)](x) + m.experts[int(np.random.choice(3))](x)
