"""In-place operations on buffers, parameters and inputs: their new values are outputs of the program."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import same_bits
from tests.tracing.writing import Bodies, Body, Writer, check
from whence import OutputKind

bodies = Bodies()


@bodies.add
def buffer_added_to(m: Writer, x: Tensor) -> Tensor:
    m.table.add_(x.detach())
    return m.table * m.weight


@bodies.add
def buffers_counted(m: Writer, x: Tensor) -> Tensor:
    m.table += 1
    m.count += 1
    return m.table * m.weight * m.count


@bodies.add
def buffer_counted_twice(m: Writer, x: Tensor) -> Tensor:
    m.count += 1
    before = m.count * 1
    m.count += 1
    return x * m.weight * (before + m.count)


@bodies.add
def buffer_written_through_a_view(m: Writer, x: Tensor) -> Tensor:
    m.table[0].copy_(x[0].detach())
    return m.table * m.weight


@bodies.add
def buffer_written_through_data(m: Writer, x: Tensor) -> Tensor:
    m.table.data.add_(1)
    return m.table * m.weight


@bodies.add
def buffer_reassigned(m: Writer, x: Tensor) -> Tensor:
    m.table = m.table * 0.9 + x.detach() * 0.1
    return m.table * m.weight


@bodies.add
def buffer_reassigned_twice(m: Writer, x: Tensor) -> Tensor:
    m.table = m.table * 0.9
    m.table = m.table + 1
    return m.table * m.weight


@bodies.add
def buffer_reassigned_to_another_shape(m: Writer, x: Tensor) -> Tensor:
    m.table = torch.cat([m.table, x.detach()])
    return m.table * m.weight


@bodies.add
def buffer_reassigned_to_an_input(m: Writer, x: Tensor) -> Tensor:
    m.table = x.detach()
    return m.table * m.weight


@bodies.add
def buffer_reassigned_and_then_written(m: Writer, x: Tensor) -> Tensor:
    m.table = m.table.clone()
    m.table.add_(1)
    return m.table * m.weight


@bodies.add
def buffer_written_and_then_reassigned(m: Writer, x: Tensor) -> Tensor:
    m.table.add_(1)
    m.table = m.table * 2
    return m.table * m.weight


@bodies.add
def buffer_reassigned_to_a_value_with_history(m: Writer, x: Tensor) -> Tensor:
    m.table = m.linear(x)
    return m.table * 2


@bodies.add
def buffer_returned_after_a_write(m: Writer, x: Tensor) -> tuple[Tensor, Tensor]:
    m.table.add_(1)
    return m.table, x * m.weight


@bodies.add
def buffer_returned_without_a_write(m: Writer, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.table, x * m.weight


@bodies.add
def view_of_a_buffer_returned_after_a_write(m: Writer, x: Tensor) -> tuple[Tensor, Tensor]:
    row = m.table[0]
    m.table.add_(1)
    return row, x * m.weight


@bodies.add
def old_value_of_a_buffer_used_in_the_backward(m: Writer, x: Tensor) -> Tensor:
    hidden = m.weight * m.table.clone()
    m.table.add_(1)
    return hidden * m.table


@bodies.add
def parameter_decayed(m: Writer, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.weight.mul_(0.9)
    return m.linear(x) * m.weight


@bodies.add
def row_of_a_parameter_decayed(m: Writer, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.linear.weight[0].mul_(0.5)
    return m.linear(x)


@bodies.add
def embedding_renormalised(m: Writer, x: Tensor) -> Tensor:
    return F.embedding(torch.tensor([0, 1]), m.linear.weight, max_norm=0.5)


@bodies.add
def batch_norm_in_training(m: Writer, x: Tensor) -> Tensor:
    return F.batch_norm(m.linear(x), m.table[0], m.table[1], training=True)


@bodies.add
def batch_norm_in_evaluation(m: Writer, x: Tensor) -> Tensor:
    return F.batch_norm(m.linear(x), m.table[0], m.table[1].abs(), training=False)


@bodies.add
def input_added_to(m: Writer, x: Tensor) -> Tensor:
    x.add_(1)
    return m.linear(x)


@bodies.add
def input_written_through_a_view(m: Writer, x: Tensor) -> Tensor:
    x[0].mul_(2)
    return m.linear(x)


@bodies.add
def input_returned_after_a_write(m: Writer, x: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    return x * m.weight, x


@bodies.add
def view_of_an_input_returned_after_a_write(m: Writer, x: Tensor) -> tuple[Tensor, Tensor]:
    row = x[0]
    x.mul_(2)
    return x * m.weight, row


@pytest.mark.sample(14)
@bodies.parametrize()
def test_write_to_state(body: Body, mode: str) -> None:
    """State and inputs that are written have eager's bits in outputs and gradients, and afterwards."""
    check(body, mode)


def mutations(body: Any) -> list[str]:
    rows = check(body, "forward").signature.outputs_of(OutputKind.MUTATION)
    return [row.path for row in rows]


def test_every_written_tensor_is_an_output() -> None:
    """Each buffer, parameter or input that changed is an output of kind mutation, once."""
    assert mutations(buffers_counted) == ["table", "count"]
    assert mutations(parameter_decayed) == ["weight"]
    assert mutations(input_written_through_a_view) == ["args[0]"]


def test_reassigned_buffer_is_an_output() -> None:
    """A buffer that was replaced by another tensor is an output of kind mutation."""
    assert mutations(buffer_reassigned_twice) == ["table"]


def test_shared_memory_that_is_written_is_refused() -> None:
    """Tensors that share their memory, one or both of them written, are named in pairs, once each."""

    class Overlapping(nn.Module):
        total: Tensor
        head: Tensor
        tail: Tensor
        alone: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))
            self.register_buffer("head", self.total[:2])
            self.register_buffer("tail", self.total[2:])
            self.register_buffer("alone", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(1)
            self.head.add_(1)
            self.alone.add_(1)
            return x + self.tail.sum()

    with pytest.raises(whence.UnsupportedMutation) as caught:
        whence.capture(Overlapping(), (torch.ones(2),))
    assert caught.value.what.split("; ") == [
        "b_total is written, and shares its memory with b_head",
        "b_total is written, and shares its memory with b_tail",
    ]


def test_nothing_written_is_no_output() -> None:
    """A buffer that is only read is not among the outputs."""
    assert mutations(buffer_returned_without_a_write) == []


class Counted(torch.autograd.Function):
    """What it is given; its backward tells."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Callable[[Tensor], None]) -> Tensor:
        ctx.tell = tell
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.tell(*gradients)
        return *gradients, None


class Late(nn.Module):
    """Writes a buffer in the backward: what does so says `begin`, and what is written `write`."""

    seen: Tensor

    def __init__(self, begin: Callable[[Any, Tensor], Tensor], write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))
        self.begin, self.write = begin, write
        self.inner.register_full_backward_hook(self.called if begin is in_a_hook_on_a_module else ignored)

    def tell(self, gradient: Tensor) -> None:
        self.write(self, gradient.detach().sum(0))

    def called(self, _module: nn.Module, _given: Any, gradients: Any) -> None:
        self.tell(gradients[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.begin(self, self.inner(self.first(x))).sin()


def ignored(*_: Any) -> None:
    """A hook that does nothing."""


def in_a_hook_on_a_module(_: Any, y: Tensor) -> Tensor:
    return y


def in_a_hook_on_a_tensor(model: Any, y: Tensor) -> Tensor:
    y.register_hook(model.tell)
    return y


def in_a_hook_on_a_node(model: Any, y: Tensor) -> Tensor:
    y.grad_fn.register_prehook(lambda gradients: model.tell(gradients[0]))  # type: ignore[union-attr]
    return y


def in_a_function_of_the_users(model: Any, y: Tensor) -> Tensor:
    found: Tensor = Counted.apply(y, model.tell)
    return found


def in_a_checkpoint(model: Any, y: Tensor) -> Tensor:
    found: Tensor = checkpoint(model.norm, y, use_reentrant=False)
    return found


def adds(model: Any, gradient: Tensor) -> None:
    model.seen.add_(gradient)


def puts(model: Any, gradient: Tensor) -> None:
    model.seen = model.seen * 0.9 + gradient


LATE: list[tuple[Any, Any]] = [
    *((in_a_hook_on_a_module, write) for write in (adds, puts)),
    *((in_a_hook_on_a_tensor, write) for write in (adds, puts)),
    *((in_a_hook_on_a_node, adds), (in_a_function_of_the_users, puts)),
]


@pytest.mark.parametrize(("begin", "write"), LATE)
def test_a_write_in_the_backward_is_no_part_of_a_joint_program(begin: Any, write: Any) -> None:
    """It writes state when its forward is done."""
    with pytest.raises(whence.UnsupportedMutation, match="is written in the backward") as caught:
        whence.capture(Late(begin, write), (torch.ones(3, 4),), backward=torch.sum)
    assert "capture_step" in str(caught.value.remedy)


@pytest.mark.parametrize(("begin", "write"), [*LATE, (in_a_checkpoint, adds)])
def test_a_write_in_the_backward_of_a_step(begin: Any, write: Any) -> None:
    """Buffers and weights are eager's after each step."""
    found, x = [], torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    for is_captured in (False, True):
        model = Late(begin, write)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run: Any = step
        if is_captured:
            program = whence.capture_step(step, (x,), model=model, optimizer=optimizer)
            assert program.verify(model, (x,)).ok
            run = program.bind(model, optimizer)
        found.append([*(run(x * scale) for scale in (1.0, 0.5, 2.0)), *model.state_dict().values()])
    assert all(map(same_bits, *found))
