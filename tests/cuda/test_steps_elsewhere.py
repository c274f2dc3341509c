"""Training steps for a CUDA device, from fakes everywhere: those of the CPU but for what the device takes."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

import whence
from tests.checks import differing
from tests.cuda.architectures import Residual, bert, gpt2
from tests.cuda.devices import deterministic, mean_sine, on_a_device
from tests.cuda.test_elsewhere import operations
from tests.cuda.test_steps_on_device import kept
from whence.demo import GPT, GPTConfig, next_token_loss
from whence.errors import UsageError
from whence.schema import Phase

Made = Callable[[Any], Optimizer]
TOGETHER: dict[str, tuple[Made, dict[str, Any]]] = {
    "sgd": (lambda held: SGD(held, lr=0.1), {"foreach": True}),
    "momentum": (lambda held: SGD(held, lr=0.1, momentum=0.9, nesterov=True), {"foreach": True}),
    "momentum fused": (lambda held: SGD(held, lr=0.1, momentum=0.9, fused=True), {}),
    "adam": (lambda held: Adam(held, amsgrad=True), {"foreach": True}),
    "adamw": (AdamW, {"foreach": True}),
    "adamw one by one": (lambda held: AdamW(held, foreach=False), {}),
    "adamw fused": (lambda held: AdamW(held, fused=True), {}),
    "adam fused with a tensor for its rate": (lambda held: Adam(held, torch.tensor(0.01), fused=True), {}),
    "rmsprop": (lambda held: RMSprop(held, momentum=0.5), {"foreach": True}),
    "adagrad": (Adagrad, {"foreach": True}),
    "adagrad fused": (lambda held: Adagrad(held, fused=True), {}),
    "adafactor": (Adafactor, {}),
}
"""Each with what makes the CPU do what the device does by default."""
if hasattr(torch.optim, "Muon"):
    TOGETHER["muon"] = (lambda held: torch.optim.Muon([each for each in held if each.ndim == 2]), {})


def small(make: Made, on: str = "cpu", **options: Any) -> tuple[nn.Module, Optimizer]:
    """A model without anything that the device does in a way of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2)).to(on)
    optimizer = make(model.parameters())
    for group in optimizer.param_groups:
        group.update(options)
    return model, optimizer


def training(
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[Any], Tensor],
    foreach: bool | None,
    schedules: bool = True,
) -> Callable[..., Tensor]:
    """Gradients of two halves, clipping, a schedule; parameters are held in a list, too."""
    held = list(model.parameters())
    moves = schedules and not optimizer.param_groups[0].get("fused")  # whose rate may not move
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10) if moves else None

    def step(*args: Any, **kwargs: Any) -> Tensor:
        for _ in range(2):
            loss = loss_of(model(*args, **kwargs)) / 2
            loss.backward()
        nn.utils.clip_grad_norm_(held, 1.0, foreach=foreach)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        model.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("name", TOGETHER)
def test_operations_are_those_of_the_cpu_together(name: str, later: bool) -> None:
    """The first step and later ones, with inputs, outputs and phases, in their order."""
    make, options = TOGETHER[name]
    found = []
    for device in (None, "cuda"):
        model, optimizer = small(make, **({} if device else options))
        step = training(model, optimizer, torch.sum, None if device else True)
        x = torch.randn(3, 4)
        if later:
            step(x)
        program = whence.capture_step(step, (x,), model=model, optimizer=optimizer, device=device)
        nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        rows = [(str(node.target), program.where(node).phase, program.where(node).calls) for node in nodes]
        signature = program.signature
        found.append((rows, [row.path for row in signature.inputs], [row.path for row in signature.outputs]))
    assert found[0] == found[1]


CAPTURABLE: dict[str, Made] = {
    "adamw": lambda held: AdamW(held, capturable=True),
    "adamw fused": lambda held: AdamW(held, capturable=True, fused=True),
    "adamw one by one": lambda held: AdamW(held, capturable=True, foreach=False),
    "rmsprop": lambda held: RMSprop(held, capturable=True),
}


@pytest.mark.parametrize("name", CAPTURABLE)
def test_what_graphs_take_is_there_whole(name: str) -> None:
    """Nothing of it is on the CPU, where these optimizers do not run."""
    model, optimizer = small(CAPTURABLE[name])
    step = training(model, optimizer, torch.sum, None)
    program = whence.capture_step(step, (torch.randn(3, 4),), model=model, optimizer=optimizer, device="cuda")
    held = [node.meta.get("val") for node in program.nodes()]
    assert {value.device.type for value in held if isinstance(value, Tensor)} == {"cuda"}


class Dropped(nn.Module):
    """Convolutions, batch norms and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.dropout = Residual(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.inner(x))


REAL: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "gpt2": (
        gpt2,
        {
            "aten._scaled_dot_product_efficient_attention": 4,
            "aten._scaled_dot_product_flash_attention_for_cpu": -4,
        },
    ),
    "bert": (bert, {"aten._scaled_dot_product_efficient_attention": 4}),
    "convolutions": (
        lambda: (Dropped(), (torch.randn(2, 3, 8, 8),), {}),
        {"aten.native_dropout": 2, "aten._batch_norm_with_update_functional": 2},
    ),
}
"""What the device takes, how often for two halves, and what it does not."""


@pytest.mark.parametrize("name", REAL)
def test_models_take_the_kernels_of_the_device(name: str) -> None:
    """In the forward and the backward; what the optimizer does is what it does on the CPU."""
    make, wanted = REAL[name]
    found = []
    for device in (None, "cuda:sm80"):
        torch.manual_seed(0)
        model, args, kwargs = make()
        optimizer = AdamW(model.parameters(), foreach=None if device else True)
        step = training(model, optimizer, mean_sine, None if device else True)
        program = whence.capture_step(step, args, kwargs, model=model, optimizer=optimizer, device=device)
        found.append(program)
    here, there = found
    assert phases(here, Phase.OPTIMIZER) == phases(there, Phase.OPTIMIZER)
    more = Counter(operations(there))
    more.subtract(operations(here))
    assert {key: more[f"{key}.default"] for key in wanted} == wanted
    assert [row.path for row in there.signature.inputs] == [row.path for row in here.signature.inputs]
    assert not any("for_cpu" in operation for operation in operations(there))
    assert all(
        there.where(node).quality != "none" for node in there.graph.nodes if node.op == "call_function"
    )


def phases(program: whence.Program, phase: Phase) -> list[str]:
    """The operations of a phase, in order."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    return [str(node.target) for node in nodes if program.where(node).phase == phase]


def of_gpt() -> whence.Program:
    """A step in bfloat16."""
    torch.manual_seed(0)
    model, ids = GPT(GPTConfig(16, 8, 16, 2, 2)).bfloat16(), torch.arange(8)[None]
    optimizer = AdamW(model.parameters())
    step = training(model, optimizer, next_token_loss, None)
    return whence.capture_step(step, (ids,), model=model, optimizer=optimizer, device="cuda:1:sm90")


def test_everything_that_only_looks_works(tmp_path: Path) -> None:
    """Figures, text, selections, files; the device is the one that was named."""
    program = of_gpt()
    assert program.device == "cuda:1:sm90"
    assert program.cost()
    assert program.memory()
    assert "optimizer" in str(program.report())
    assert "_foreach_addcdiv" in str(program)
    assert program.to_json()
    assert program.select(":: aten._foreach_lerp.Scalar :: optimizer")
    assert program.input("blocks.0.mlp.up.weight").value.device == torch.device("cuda", 1)
    assert all(value.device.type in ("cuda", "cpu") for value in program.state.values())
    program.save(tmp_path / "step.whence", weights=False)
    again = whence.load(tmp_path / "step.whence")
    assert (again.device, again.presumed) == (program.device, program.presumed)
    assert operations(again) == operations(program)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_such_a_program_does_not_run_here() -> None:
    """It says so, and what to do."""
    program, ids = of_gpt(), torch.arange(8)[None]
    with pytest.raises(UsageError, match="was captured for cuda:1:sm90 and cannot run here") as caught:
        program.run((ids,))
    assert "program.bind(model.to('cuda'), optimizer)" in str(caught.value)


@pytest.mark.parametrize("varies", [False, True], ids=["fixed", "open sizes"])
def test_autocast_casts_in_every_attempt(varies: bool) -> None:
    """A first step is recorded twice, with and without the optimizer's state: weights are cast in both."""
    model, optimizer = small(AdamW)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.mse_loss(model(x), x[:, :2])
        loss.backward()
        optimizer.step()

    shapes: Any = ({0: Dim("rows", min=2, max=64)},) if varies else None
    program = whence.capture_step(
        step, (torch.ones(3, 4),), model=model, optimizer=optimizer, device="cuda", dynamic_shapes=shapes
    )
    products = [node.meta["val"].dtype for node in program.graph.nodes if "mm" in str(node.target)]
    assert products and set(products) == {torch.bfloat16}
    assert {row.value.dtype for row in program.signature.state} == {torch.float32}


@on_a_device
@pytest.mark.parametrize("name", TOGETHER)
def test_a_step_for_the_device_is_that_of_the_device(name: str) -> None:
    """Operation for operation, and it trains the model there, where there is a device to ask."""
    make, x = TOGETHER[name][0], torch.randn(3, 4)
    train = partial(training, loss_of=torch.sum, foreach=True, schedules=False)
    with deterministic():
        model, optimizer = small(make)
        (step := train(model, optimizer))(x)
        there = whence.capture_step(step, (x,), model=model, optimizer=optimizer, device="cuda")
        (model, optimizer), (eager, theirs) = small(make, on="cuda"), small(make, on="cuda")
        x, step, trained = x.cuda(), train(model, optimizer), train(eager, theirs)
        assert torch.equal(step(x), trained(x))
        here = whence.capture_step(step, (x,), model=model, optimizer=optimizer)
        assert operations(there) == operations(here)
        run = there.bind(model, optimizer)
        for _ in range(3):
            assert torch.equal(run(x), trained(x))
            assert differing(kept(eager, theirs), kept(model, optimizer)) == []
