"""Operators that are called for what they do: assertions, custom ones that give nothing, those that write."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.pipelining import pipe_split

import whence
from tests.checks import Backward, verified

LOG: list[float] = []


@torch.library.custom_op("whence_tests::note", mutates_args=())
def note(x: Tensor) -> None:
    LOG.append(float(x.sum()))


@note.register_fake
def _note(x: Tensor) -> None:
    return None


@torch.library.custom_op("whence_tests::accumulate", mutates_args={"total", "count"})
def accumulate(total: Tensor, x: Tensor, count: Tensor) -> Tensor:
    total.add_(x)
    count.add_(1)
    return total.sum()


@accumulate.register_fake
def _accumulate(total: Tensor, x: Tensor, count: Tensor) -> Tensor:
    return total.new_empty(())


@torch.library.custom_op("whence_tests::double", mutates_args={"x"})
def double(x: Tensor) -> None:
    x.mul_(2)


class Noting(nn.Module):
    """Asserts and notes what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        torch._assert_async((y < 1e3).all(), "too large")
        note(y)
        y.sum()  # nothing needs it
        return y * 2


class Layers(nn.Module):
    """Calls equal layers, and notes between them what an in-place operation is about to change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noting() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async(x.sum() < 1e3)
        for layer in self.layers:
            kept = x.detach().clone()
            note(kept)
            kept.add_(1)
            note(kept)
            x = layer(x)
        return x


class Writing(nn.Module):
    """Custom operators write to a buffer, to a view, and to two values of which one is a view."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.zeros(3)
        sum_ = accumulate(self.total, x.detach(), counts[1])
        double(counts[1:])
        double(self.total)
        return self.linear(x) * sum_ + counts.sum() + self.total


@pytest.fixture
def noted() -> Iterator[list[float]]:
    """What is noted, none of it before."""
    LOG.clear()
    yield LOG
    LOG.clear()


@pytest.mark.parametrize("backward", [False, True, lambda y: y.sum()], ids=["forward", "tangents", "loss"])
def test_effects_are_nodes(backward: Backward, noted: list[float]) -> None:
    """A capture has none; the program and the tree have eager's, in eager's order and calls."""
    model, x = Layers(), torch.randn(2, 4)
    program = whence.capture(model, (x,), backward=backward)
    assert noted == []
    model(x)
    expected = list(noted)
    for module in (program.module(), program.unflatten()):
        noted.clear()
        module(x)
        assert noted == expected
        with pytest.raises(RuntimeError, match="nonzero"):
            module(x + 1e3)
        with pytest.raises(RuntimeError, match="too large"):
            module(x - x.sum() / 8 + torch.tensor([1e5, -1e5, 0.0, 0.0]))
    tree = program.unflatten()
    noted.clear()
    tree.get_submodule("layers.1")(x)
    assert len(noted) == 1
    for at in range(3):
        [node] = program.select(f"layers.{at} :: whence_tests.note.default")
        assert program.where(node).source is not None
    assert program.verify(model, (x,)).ok


def test_effects_in_a_step(noted: list[float]) -> None:
    """A bound step notes what the step notes."""
    model, x = Noting(), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(loss.detach())
        return loss.detach()

    bound = whence.capture_step(step, (x,), model=model, optimizer=optimizer).bind(model, optimizer)
    assert noted == []
    loss = bound(x)
    assert len(noted) == 2
    assert noted[1] == loss.item()


def test_pass_that_loses_an_effect_is_refused() -> None:
    """Without it, and where two change places, a run would be another one."""
    program = whence.capture(Layers(), (torch.randn(2, 4),))

    def lose(graph: fx.Graph) -> None:
        graph.erase_node(graph.find_nodes(op="call_function", target=torch.ops.whence_tests.note.default)[0])

    def exchange(graph: fx.Graph) -> None:
        first, second = graph.find_nodes(op="call_function", target=torch.ops.whence_tests.note.default)[:2]
        second.append(first)

    for change, why in ((lose, "gave nothing"), (exchange, "acts where")):
        with pytest.raises(whence.LostProvenance, match=why), program.track("change") as edit:
            change(edit.graph)
    with program.track("cleaned") as edit:
        edit.graph.lint()
    program = edit.program
    assert len(program.select(":: whence_tests.note.default")) == 9


def test_exported_effects(noted: list[float]) -> None:
    """A tree of an ExportedProgram has them; one that PyTorch would lose again is refused by name."""
    model, x = Noting(), torch.randn(2, 4)
    exported = torch.export.export(model, (x,))
    noted.clear()
    whence.unflatten(exported)(x)
    assert len(noted) == 1
    with pytest.raises(whence.NotExportable, match=r"whence_tests.note.default gives no result"):
        whence.capture(model, (x,)).to_exported_program()


def piped(x: Tensor) -> Tensor:
    y = x.sin()
    pipe_split()
    return y.cos()


def test_pipe_split_is_a_node() -> None:
    """It stands between what it splits, also in an exported program."""
    program = verified(piped, torch.randn(2))
    exported = program.to_exported_program()
    for graph in (program.graph, exported.graph):
        names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        assert names == ["aten.sin.default", "pippy._pipe_split.default", "aten.cos.default"]


@pytest.mark.parametrize("backward", [False, True])
def test_custom_operator_that_writes(backward: bool) -> None:
    """It runs on copies, which are values of the program; buffers and gradients are eager's bit for bit."""
    model, x = Writing(), torch.randn(2, 4)
    program = verified(model, x, backward=backward)
    assert "total" in [row.of and program.input(row.of).path for row in program.signature.outputs]
    twin = Writing()
    twin.load_state_dict(model.state_dict())
    expected, found = twin(x), program.unflatten()(x)
    assert torch.equal(expected, found)
    assert torch.equal(twin.total, model.total)


READERS: list[Callable[[torch.export.ExportedProgram], torch.export.ExportedProgram]] = [
    lambda exported: exported,
    lambda exported: exported.run_decompositions({}),
    lambda exported: exported.run_decompositions(),
]


@pytest.mark.parametrize("read", READERS, ids=["exported", "functional", "decomposed"])
def test_exported_operator_that_writes(
    read: Callable[[torch.export.ExportedProgram], torch.export.ExportedProgram],
) -> None:
    """The tree writes to its buffer what the model writes to its own, with and without PyTorch's wrapper."""
    model, x = Writing(), torch.randn(2, 4)
    tree = whence.unflatten(read(torch.export.export(model, (x,))))
    for _ in range(2):
        assert torch.equal(tree(x), model(x))
        assert torch.equal(tree.get_buffer("total"), model.total)


def test_operator_that_writes_is_exported() -> None:
    """The exported program of a program is run by PyTorch with the same results."""
    model, x = Writing(), torch.randn(2, 4)
    exported = whence.capture(model, (x,)).to_exported_program().module()
    before = model.total.clone()
    expected = model(x)
    model.total.copy_(before)
    assert torch.equal(exported(x), expected)
