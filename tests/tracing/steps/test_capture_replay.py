"""Equal layers are recorded once, and the program is the same."""

from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn

import whence
from tests.models import case
from tests.tracing.steps.small import batch, microbatches, small, zero_first
from tests.tracing.steps.twins import OPTIMIZERS, twin
from whence.tracing.steps.session import SEVERAL


def computed(program: whence.Program) -> tuple[Counter[int], list[int]]:
    """Every operation with what it reads and where it comes from, in whatever order; and the outputs.

    What puts gradients into `.grad` runs after a replayed call, and inside one that is traced.
    """
    known: dict[fx.Node, int] = {}
    names: dict[str, int] = {}
    for node in program.graph.nodes:
        names[node.name] = known[node] = hash(_row(program, node, known, names))
    outputs = [names[row.node] if row.node else 0 for row in program.signature.outputs]
    return Counter(known[node] for node in known if node.op == "call_function"), outputs


def _row(
    program: whence.Program, node: fx.Node, known: dict[fx.Node, int], names: dict[str, int]
) -> tuple[object, ...]:
    if node.op == "placeholder":
        return node.op, node.name
    arguments = str(fx.map_arg((node.args, node.kwargs), lambda source: known[source]))
    if node.op != "call_function":
        return node.op, arguments
    origin = program.where(node)
    forward = None if origin.forward is None else names[origin.forward]
    place = (origin.phase, origin.calls, origin.quality, origin.source, origin.place, origin.hook)
    return str(node.target), arguments, forward, place, str(node.meta["val"])


SLOW = pytest.mark.slow
CASES = [
    pytest.param("shared_layer", 5, id="shared_layer"),
    *(
        pytest.param(name, least, id=name, marks=SLOW)
        for name, least in (("llama", 10), ("bert", 10), ("gru", 1))
    ),
]


@pytest.mark.parametrize(("name", "least"), CASES)
def test_program_is_the_same(name: str, least: int) -> None:
    """With and without replay: operations, origins, signature; for an optimizer that has begun or not."""
    row = case(name)
    for warm in (False, True):
        made = twin(row, OPTIMIZERS["adamw"], warm=warm)
        _, args, kwargs = row.make()
        replayed, traced = (
            whence.capture_step(
                made.step, args, kwargs, model=made.model, optimizer=made.optimizer, reuse=reuse
            )
            for reuse in (True, False)
        )
        assert replayed.replay.replayed >= least
        assert traced.replay.replayed == 0
        assert computed(replayed) == computed(traced)
        for side in ("inputs", "outputs"):
            left, right = (getattr(program.signature, side) for program in (replayed, traced))
            assert [held.name for held in left] == [held.name for held in right]


class Brick(nn.Module):
    """Large enough to be recorded for others."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x).sin()).tanh())


class Shortcut(nn.Module):
    """Bricks, and past them the input: it gets two gradients, the second of them from a brick."""

    def __init__(self) -> None:
        super().__init__()
        self.bricks = nn.Sequential(Brick(), Brick(), Brick())

    def forward(self, x: Tensor) -> Tensor:
        return self.bricks(x) + x


class Collected(nn.Module):
    """The results of all blocks together: each has a gradient before its next block gives two more."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Shortcut() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        found = [self.enter(x)]
        for block in self.blocks:
            found.append(block(found[-1]))
        return torch.cat(found, dim=1)


@pytest.mark.sweep
def test_sums_around_calls_inside_a_replayed_call() -> None:
    """Gradients from around a replayed call are added in eager's order to those of calls inside it."""
    torch.manual_seed(0)
    model = Collected()
    optimizer = torch.optim.AdamW(model.parameters())
    step = zero_first(model, optimizer)
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert program.replay.replayed >= 10
    assert program.verify(model, (batch(),)).ok


def test_several_passes_are_traced() -> None:
    """Where a step runs its model more than once after a backward, calls run, and the reason is said."""
    model, optimizer = small()
    deep = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), model)
    optimizer = torch.optim.AdamW(deep.parameters())
    program = whence.capture_step(microbatches(deep, optimizer), (batch(),), model=deep, optimizer=optimizer)
    assert program.replay.replayed == 0
    assert SEVERAL in str(program.replay)
    assert program.verify(deep, (batch(),)).ok
