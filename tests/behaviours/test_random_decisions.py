"""Whatever values decide, and however, a captured run is eager's or is refused before it changes anything."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import whence
from tests.checks import same_bits

pytestmark = pytest.mark.random
SEARCH = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
KINDS = (
    *("branch", "count", "loop", "listed", "rows", "write", "state", "coin", "key", "sort", "equal", "size"),
    *("inside", "dropout", "numpy", "number"),
)


@dataclass(frozen=True)
class Asked:
    """One thing that a module decides by values: of a kind, by a limit."""

    kind: str
    limit: float


class Module(nn.Module):
    """Decides one thing after another; what is `inside` is a module of its own."""

    seen: Tensor

    def __init__(self, recipe: list[Asked]) -> None:
        super().__init__()
        self.recipe = recipe
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))
        inner = [Asked("branch", row.limit) for row in recipe if row.kind == "inside"]
        self.inner = nn.ModuleList(Module([row]) for row in inner)

    def forward(self, x: Tensor) -> Tensor:
        inner = iter(self.inner)
        for row in self.recipe:
            x = next(inner)(x) if row.kind == "inside" else getattr(self, row.kind)(x, row.limit)
        return x

    def branch(self, x: Tensor, limit: float) -> Tensor:
        return self.linear(x) if x.mean() > limit else x.sin()

    def count(self, x: Tensor, limit: float) -> Tensor:
        for _ in range(int((x > limit).sum()) % 3):
            x = self.linear(x)
        return x

    def loop(self, x: Tensor, limit: float) -> Tensor:
        while x.abs().max().item() > 1 + abs(limit):
            x = x * 0.5
        return x

    def listed(self, x: Tensor, limit: float) -> Tensor:
        for number in (x > limit).sum(0).tolist():
            x = x + number if number else x * 2
        return x

    def rows(self, x: Tensor, limit: float) -> Tensor:
        chosen = x[x.sum(1) > limit]
        return x + self.linear(chosen).sum(0) if len(chosen) > 1 else x.cos()

    def write(self, x: Tensor, limit: float) -> Tensor:
        x = x.clone()
        x[0] = x[1] * 2
        if x[0].sum() > limit:
            x.view(-1)[:2].add_(1)
        return x

    def state(self, x: Tensor, limit: float) -> Tensor:
        if self.seen > 0.5:
            x = x * 3
        with torch.no_grad():
            self.seen.copy_(x.mean() if limit > 0 else x.max())
        return x

    def coin(self, x: Tensor, limit: float) -> Tensor:
        return self.linear(x) if torch.rand([]) > 0.5 + limit / 4 else x

    def key(self, x: Tensor, limit: float) -> Tensor:
        counts: dict[bool, int] = {}
        for positive in (x[:, 0] > limit).tolist():
            counts[positive] = counts.get(positive, 0) + 1
        return x * len(counts)

    def sort(self, x: Tensor, limit: float) -> Tensor:
        sums = (x - limit).sum(1).tolist()
        return x[sorted(range(len(sums)), key=sums.__getitem__)]

    def equal(self, x: Tensor, limit: float) -> Tensor:
        return x + 1 if torch.equal(x.clamp(min=limit), x) else self.linear(x)

    def size(self, x: Tensor, limit: float) -> Tensor:
        return F.pad(x, (0, int((x > limit).any()))).sum(1, keepdim=True) + x

    def dropout(self, x: Tensor, limit: float) -> Tensor:
        return F.dropout(x, 0.2 + abs(limit) / 4)

    def numpy(self, x: Tensor, limit: float) -> Tensor:
        return x * float((x > limit).any(0).numpy().sum())

    def number(self, x: Tensor, limit: float) -> Tensor:
        return x * x.max().item() + limit


asked = st.builds(Asked, st.sampled_from(KINDS), st.sampled_from([-1.0, -0.25, 0.0, 0.25, 1.0]))
MODES: dict[str, Any] = {"forward": False, "tangents": True, "loss": lambda output: output.sin().sum()}


def run(module: Any, x: Tensor, *, has_loss: bool) -> list[Any]:
    """What one run gives and leaves behind."""
    x = x.clone()
    torch.manual_seed(7)
    result = module(x)
    loss, result = result if has_loss else (result.sin().sum(), result)
    if loss.requires_grad:
        loss.backward()
    grads = [parameter.grad for parameter in module.parameters()]
    return [result.detach(), torch.get_rng_state(), x, *grads, *(b.clone() for b in module.buffers())]


def is_same(left: Any, right: Any) -> bool:
    return all(map(same_bits, tree_leaves(left), tree_leaves(right)))


@pytest.mark.sweep
@SEARCH
@given(st.lists(asked, min_size=1, max_size=4), st.sampled_from(sorted(MODES)), st.integers(0, 99))
def test_a_run_is_eagers_or_refused(recipe: list[Asked], mode: str, seed: int) -> None:
    """On the example as eager; on other data as eager, or `StaleCapture` with everything as it was."""
    torch.manual_seed(seed)
    model = Module(recipe)
    others = [torch.randn(4, 3) * scale for scale in (1, 2, 0.1)]
    example = others[0]
    torch.manual_seed(7)
    try:
        program = whence.capture(model, (example,), backward=MODES[mode], decide="example")
    except whence.InvalidLoss:  # nothing that is trained took part
        return
    for make in (program.module, program.unflatten):
        for number, x in enumerate([example, *others[1:], -example]):
            eager, found = deepcopy(model), make(copy=True)
            before = deepcopy(found.state_dict())
            expected = run(eager, x, has_loss=False)
            try:
                given = run(found, x, has_loss=mode == "loss")
            except whence.StaleCapture:
                assert number, "the example itself was refused"
                assert is_same(found.state_dict(), before)
            else:
                assert is_same(given, expected), (recipe, number)
