"""Models in which values decide, each with an example and with inputs that decide otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

X = torch.tensor([[1.0, -2.0, 3.0, 0.0], [0.5, 0.0, -1.0, 2.0]])
NEGATIVE = -X.abs()


@dataclass(frozen=True, eq=False)
class Deciding:
    """A row: a model, its example, inputs that decide otherwise (none where the second run does), and one of
    the decisions."""

    build: Callable[[], nn.Module]
    example: tuple[Tensor, ...]
    other: tuple[Tensor, ...] | None
    decision: str

    @property
    def name(self) -> str:
        return self.build.__name__


ROWS: list[Deciding] = []


def row(
    example: tuple[Tensor, ...], other: tuple[Tensor, ...] | None, decision: str
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def add(build: type[nn.Module]) -> type[nn.Module]:
        ROWS.append(Deciding(build, example, other, decision))
        return build

    return add


class Linear(nn.Module):
    """A linear layer, which the others use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


@row((X,), (NEGATIVE,), "any_1 is False")
class Routed(Linear):
    """Experts that run where somebody is sent to them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        found, which = torch.zeros_like(hidden), x.sum(1).long().abs() % 3
        for number, expert in enumerate(self.experts):
            if (mask := which == number).any():
                found[mask] = expert(hidden[mask])
        return found


@row((X,), (X * 1000,), "lt is True")
class EarlyExit(Linear):
    """Layers until one is sure."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = torch.tanh(self.linear(x))
            if x.abs().max() < 0.99:
                break
        return x


@row((X,), (X * 1000,), "abs_2.item() > 0.001 is True")
class Converging(Linear):
    """A square root by Newton's method."""

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        wanted = found = self.linear(x).abs().sum() + 1
        rounds = 0
        while (found * found - wanted).abs().item() > 1e-3:
            found, rounds = 0.5 * (found + wanted / found), rounds + 1
        return found, rounds


@row((X,), (X * 1000,), "all_1 is True")
class Tailed(Linear):
    """Rows within borders begin otherwise, whose backward asks how many there are; the others stay, as all
    do where one is far out."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, inside = self.linear(x), x.sum(1) > 1.8
        if not (hidden.abs() < 100).all():
            return hidden
        found = torch.zeros_like(hidden)
        found[~inside] = hidden[~inside]
        rows = hidden[inside].clone()
        rows[:, 0] = 2.0
        found[inside] = rows
        return found


@row((X,), None, "b_initted is False")
class Quantiser(Linear):
    """Codes that the first batch initialises by k-means."""

    initted: Tensor
    codes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("initted", torch.tensor([False]))
        self.register_buffer("codes", torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x).repeat(4, 1)
        if not self.initted:
            self.codes.data.copy_(self.means(rows.detach()))
            self.initted.data.copy_(torch.tensor([True]))
        code = self.codes[torch.cdist(rows, self.codes).argmin(1)]
        return rows + (code - rows).detach()

    def means(self, rows: Tensor) -> Tensor:
        found = rows[torch.randint(0, len(rows), (3,))]
        for _ in range(3):
            nearest = torch.cdist(rows, found).argmin(1)
            counts = torch.bincount(nearest, minlength=3)
            sums = torch.zeros(3, 4).scatter_add_(0, nearest[:, None].expand(-1, 4), rows)
            means = sums / counts.masked_fill(counts == 0, 1)[:, None]
            found = torch.where((counts == 0)[:, None], found, means)
        return found


@row((X, torch.tensor([2, 0, 1])), (X, torch.tensor([1, 0, 2])), "getitem is 2")
class Listed(Linear):
    """A loop over a list of numbers, which index a list."""

    def forward(self, x: Tensor, order: Tensor) -> Tensor:
        parts, found = [x, x * 2, x * 3], self.linear(x)
        for at in order.tolist():
            found = found + parts[at] * (at + 1)
        return found


@row((X, torch.tensor(3)), (X, torch.tensor(4)), "count is 3")
class Sized(Linear):
    """A number that is a size."""

    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        return F.pad(self.linear(x), (0, int(count)))


@row((X, torch.ones(2, 4, dtype=torch.bool)), (X, X > 0), "all_1 is True")
class Masked(Linear):
    """A mask that is left out where it hides nothing."""

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.all():
            mask = None
        found = self.linear(x)
        return found if mask is None else found.masked_fill(~mask, 0)


@row((X,), (X * 2,), "getitem_3.item() < getitem_2.item() is False")
class Matching(Linear):
    """A loss between rows that are matched greedily, as detectors do."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        taken, loss = set[int](), hidden.sum() * 0
        targets = torch.stack([hidden.detach()[0] + x.sum(), hidden.detach()[0] + 4])
        for at, costs in enumerate(torch.cdist(hidden, targets).tolist()):
            free = [other for other in range(len(costs)) if other not in taken]
            best = min(free, key=costs.__getitem__)
            taken.add(best)
            loss = loss + (hidden[at] - targets[best]).pow(2).sum()
        return loss


@row(
    (torch.arange(40.0).sin().view(2, 5, 4), torch.tensor([5, 3])),
    (torch.arange(40.0).sin().view(2, 5, 4), torch.tensor([4, 3])),
    "the size of _pack_padded_sequence is [8, 4]",
)
class Packed(nn.Module):
    """Sequences of lengths that are in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        rows, _ = self.network(pack_padded_sequence(x, lengths, batch_first=True))
        return pad_packed_sequence(rows, batch_first=True)[0]


@row((X,), (-X,), "getitem is 2")
class Counted(Linear):
    """Numbers that are keys."""

    def forward(self, x: Tensor) -> Tensor:
        counts: dict[int, int] = {}
        for number in x.sum(1).long().tolist():
            counts[number] = counts.get(number, 0) + 1
        return self.linear(x) * sum(number * count for number, count in counts.items())


@row((X,), (X * 2,), "the content of select is [1.0, -2.0, 3.0, 0.0]")
class OfNumPy(Linear):
    """An order that NumPy finds."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, torch.as_tensor(np.argsort(x.detach()[0].numpy()))]


@row((X,), (X.flip(0),), "getitem_1.item() < getitem.item() is True")
class Sorted(Linear):
    """Rows in an order that Python finds."""

    def forward(self, x: Tensor) -> Tensor:
        sums = x.sum(1).tolist()
        return self.linear(x)[sorted(range(len(sums)), key=sums.__getitem__)]


@row((X,), (NEGATIVE,), "size_of_nonzero is 4")
class Places(Linear):
    """A loop over the places of what is above 0."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x)
        for at, column in (x > 0).nonzero().tolist():
            found = found + x[at, column]
        return found


@row((X,), (X * 100,), "equal(round_1, clamp) is True")
class Compared(Linear):
    """Whole tensors are compared."""

    def forward(self, x: Tensor) -> Tensor:
        within = torch.equal(x.round(), x.round().clamp(-5, 5))
        return self.linear(x) if within else self.linear(-x)


class Half(Linear):
    """Turns what is below 0 around."""

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x)
        return found if found.mean() > 0 else -found


@row((X,), (-3 * X,), "gt_1 is")
class Layers(nn.Module):
    """Equal modules, each of which decides by its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Half() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@row((X,), (X - 100,), "gt is True")
class Running(nn.Module):
    """Decides by a buffer that it has just written."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm(x)
        held: Any = self.norm
        return found * 2 if held.running_mean.sum() > 0 else found


@row((X,), (-X,), "gt is True")
class Written(Linear):
    """Decides by what it has written in place."""

    def forward(self, x: Tensor) -> Tensor:
        scaled = x.clone()
        scaled.view(-1).mul_(2)
        scaled[0] = scaled[1] + 1
        return self.linear(x) + scaled if scaled.sum() > 5 else self.linear(x)


@row((X,), (-X,), "drawn at random")
class Rerun(Linear):
    """A checkpointed region that draws and decides, in the recomputation once more."""

    def forward(self, x: Tensor) -> Tensor:
        found: Any = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return found

    def inner(self, x: Tensor) -> Tensor:
        found = self.linear(F.dropout(x))
        return found.sin() if x.sum() * (found.sum() > -100) > 0 else found.cos()
