"""Whatever a step is made of, the program is eager, bit for bit."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import whence
from tests.checks import differing
from tests.tracing.reversible import reversible, rows
from tests.tracing.steps.small import STEPS, Step, batch, by_hand, small
from whence.schema import InputKind, OutputKind, Phase


def every_operation_has_a_phase(program: whence.Program) -> None:
    """Of all phases there are operations, exact but for sums, and forward nodes lead to forward nodes."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    origins = [program.where(node) for node in nodes]
    assert {origin.phase for origin in origins} == set(Phase)
    assert {origin.quality.value for origin in origins} <= {"exact", "accumulated", "inferred"}
    assert all(origin.quality.value != "inferred" or origin.hook for origin in origins)
    led = [program.where(origin.forward).phase for origin in origins if origin.forward]
    assert led
    assert set(led) == {Phase.FORWARD}
    assert {
        str(origin.calls[0].path) for origin in origins if origin.phase is Phase.OPTIMIZER and origin.calls
    } == {"0", "2"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", STEPS)
def test_step_verifies(name: str) -> None:
    """Outputs, state, gradients, the optimizer and random numbers are eager's; all is left as it was.

    Every operation has a phase.
    """
    model, optimizer = small()
    before = {key: held.clone() for key, held in model.named_parameters()}
    program = whence.capture_step(STEPS[name](model, optimizer), (batch(),), model=model, optimizer=optimizer)
    result = program.verify(model, (batch(),))
    assert result.ok, str(result)
    assert str(result).endswith("bitwise equal to eager")
    assert all(torch.equal(before[key], held) for key, held in model.named_parameters())
    assert optimizer.state == {}
    assert all(held.grad is None for held in model.parameters())
    every_operation_has_a_phase(program)


def test_step_without_an_optimizer() -> None:
    """A step may update parameters itself."""
    model, optimizer = small()
    program = whence.capture_step(by_hand(model, optimizer), (batch(),), model=model)
    assert program.verify(model, (batch(),)).ok
    assert program.signature.inputs_of(InputKind.OPTIMIZER_STATE) == ()
    assert program.signature.outputs_of(OutputKind.GRADIENT) == ()


def test_optimizer_between_backwards_is_the_optimizer() -> None:
    """What runs without grad mode is no forward of the next backward; a loss that is computed late is."""
    model, optimizer = small()

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        hidden = model[0](x)
        (hidden.sin().mean()).backward(retain_graph=True)
        late = hidden.detach().cos() * next(model.parameters()).tanh().sum()
        nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)
        optimizer.step()
        late.sum().backward()

    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert program.verify(model, (batch(),)).ok
    phases = {
        str(node.target): program.where(node).phase
        for node in program.graph.nodes
        if node.op == "call_function"
    }
    for name in ("addcdiv.default", "linalg_vector_norm.default", "stack.default"):
        assert phases[f"aten.{name}"] is Phase.OPTIMIZER
    assert phases["aten.tanh.default"] is Phase.FORWARD


def test_forward_and_backward_are_those_of_a_joint_capture() -> None:
    """Origins and operations of forward and backward agree with what `capture` gives."""
    model, optimizer = small()
    joint = whence.capture(model, (batch(),), backward=lambda found: found.sin().mean())
    step = whence.capture_step(
        STEPS["zero_last"](model, optimizer), (batch(),), model=model, optimizer=optimizer
    )
    for phase in ("forward", "backward"):
        left, right = ([*program.select(f"** :: * :: {phase}")] for program in (joint, step))
        told = [
            [(str(node.target), program.where(node).calls, program.where(node).forward) for node in found]
            for program, found in ((joint, left), (step, right))
        ]
        kept = [row for row in told[1] if row not in told[0]]
        assert [row for row in told[0] if row not in told[1]] == []
        assert {name for name, *_ in kept} <= {"aten.detach.default"}


def test_signature_names_everything() -> None:
    """Optimizer state and learning rates are inputs with names of their own; changes are mutations."""
    model, optimizer = small()
    program = whence.capture_step(
        STEPS["zero_first"](model, optimizer), (batch(),), model=model, optimizer=optimizer
    )
    row = program.input("optimizer.state['0.weight']['exp_avg']")
    assert (row.name, row.kind, row.of) == ("o_0_weight_exp_avg", InputKind.OPTIMIZER_STATE, "0.weight")
    assert list(row.value.shape) == [8, 4]
    assert str(row.module) == "0"
    rate = program.input("optimizer.param_groups[0]['lr']")
    assert (rate.name, rate.kind, rate.value, rate.of) == (
        "o_param_groups_0_lr",
        InputKind.OPTIMIZER_STATE,
        0.01,
        None,
    )
    kinds = [output.kind.value for output in program.signature.outputs]
    assert kinds == ["user"] + ["mutation"] * 16 + ["gradient"] * 4
    assert program.output("grad_p_0_weight").of == "p_0_weight"
    assert "optimizer  0" in str(program)
    assert repr(program).endswith("forward, backward and optimizer>")
    assert {str(program.where(node).calls[0]) for node in program.select("0 :: * :: optimizer")} == {"0"}
    assert len(program.select(":: aten.addcdiv :: optimizer")) == 4
    assert program.select("0 :: optimizer") == program.select("0 :: * :: optimizer")
    assert {program.where(node).phase for node in program.select(":: optimizer")} == {Phase.OPTIMIZER}


def test_sparse_gradients_are_eager() -> None:
    """An embedding with sparse gradients: they are left in `.grad` as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, ids = STEPS["never_zero"](model, optimizer), torch.tensor([1, 2, 2])
    program = whence.capture_step(step, (ids,), model=model, optimizer=optimizer)
    assert program.verify(model, (ids,)).ok
    program.bind(model, optimizer)(ids)
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert gradient.is_sparse


def test_tied_weights_have_one_state() -> None:
    """A parameter with two names is one input, with one piece of state of each kind."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.second(self.first(x).sin())
            return result

    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    program = whence.capture_step(
        STEPS["zero_first"](model, optimizer), (batch(),), model=model, optimizer=optimizer
    )
    assert program.verify(model, (batch(),)).ok
    assert program.input("p_first_weight").aliases == ("second.weight",)
    assert [row.of for row in program.signature.inputs_of(InputKind.OPTIMIZER_STATE)] == [
        "first.weight"
    ] * 3 + [None]


def attacking(model: nn.Module, optimizer: torch.optim.Optimizer, way: str) -> Step:
    """A step whose first backward is for the attack alone."""

    def step(x: torch.Tensor) -> Any:
        scale = 2.0 if way == "asks" and next(model.parameters()).grad is not None else 1.0
        x = (x * scale).requires_grad_()
        model(x).sin().mean().backward()
        read: Any = next(model.parameters()).grad if way in ("reads", "returns") else None
        slope: Any = x.grad
        attacked = (x + 0.1 * slope.sign()).detach()
        optimizer.zero_grad()
        loss = model(attacked).sin().mean()
        if way == "reads":
            loss = loss + read.sum()
        loss.backward()
        optimizer.step()
        return (loss, read) if way == "returns" else loss

    return step


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["forgets", "asks", "reads", "returns"])
def test_gradients_that_are_taken_away_unread(way: str) -> None:
    """A run may begin with gradients that the step adds to and takes away; where it looks at them, they are
    inputs of another program."""
    (model, optimizer), (theirs, other) = small(), small()
    eager = attacking(theirs, other, way)
    program = whence.capture_step(
        attacking(model, optimizer, way), (batch(),), model=model, optimizer=optimizer
    )
    run, strict = program.bind(model, optimizer), program.bind(model, optimizer, on_violation="raise")
    found, wanted = tree_leaves(run(batch())), tree_leaves(eager(batch()))
    assert all(map(torch.equal, found, wanted))
    if way != "forgets":
        with pytest.raises(whence.StaleCapture, match="have gradients, and had none"):
            strict(batch())
    for _ in range(2):
        found, wanted = tree_leaves(run(batch())), tree_leaves(eager(batch()))
        assert all(map(torch.equal, found, wanted))
        assert all(map(torch.equal, model.parameters(), theirs.parameters()))


def test_gradients_that_are_zeroed_in_place() -> None:
    """Captured where there are some the program begins with zeros, and needs some in every run."""

    def zeroing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss: torch.Tensor = model[0](x).sin().mean()  # type: ignore[index]
            loss.backward()
            optimizer.step()
            return loss

        return step

    (model, optimizer), (theirs, other) = small(), small()
    step, eager = zeroing(model, optimizer), zeroing(theirs, other)
    for trained in (model, theirs):
        trained(batch()).sum().backward()
    program = whence.capture_step(step, (batch(),), model=model, optimizer=optimizer)
    assert program.verify(model, (batch(),)).ok
    run = program.bind(model, optimizer, on_violation="raise")
    for _ in range(3):
        assert torch.equal(run(batch()), eager(batch()))
        pairs = list(zip(model.parameters(), theirs.parameters(), strict=True))
        assert all(torch.equal(left, right) for left, right in pairs)
        assert all(torch.equal(*(held.grad for held in pair)) for pair in pairs)  # type: ignore[arg-type]
    optimizer.zero_grad()
    with pytest.raises(whence.StaleCapture, match="have no gradients, and had some"):
        run(batch())


@pytest.mark.parametrize("used_again", [False, True])
@pytest.mark.parametrize("clears", [False, True])
def test_a_backward_inside_the_backward(used_again: bool, clears: bool) -> None:
    """A reversible network accumulates in `.grad` what its blocks get, in the order of eager mode."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, Step]:
        model = reversible(used_again=used_again)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> torch.Tensor:
            if clears:
                optimizer.zero_grad()
            loss: torch.Tensor = model(x).sin().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step(rows())
        return model, optimizer, step

    (model, optimizer, step), (eager, _, in_eager) = made(), made()
    program = whence.capture_step(step, (rows(),), model=model, optimizer=optimizer)
    assert program.verify(model, (rows(),)).ok
    run = program.bind(model, optimizer)
    for _ in range(3):
        assert torch.equal(run(rows()), in_eager(rows()))
    assert not differing(model.state_dict(), eager.state_dict())
