"""Quantisation of what is exported: PT2E finds in our ExportedPrograms what it finds in PyTorch's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.checks import differing
from tests.libraries.rows import library_called

PIXELS = {"pixel_values": (2, 3, 32, 32)}


def library(name: str) -> Any:
    """The module of this dotted name; skips where its library is not there."""
    pytest.importorskip(name.partition(".")[0])
    return library_called(name)


def vit() -> nn.Module:
    transformers = library("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model: nn.Module = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
    return model.eval()


def resnet() -> nn.Module:
    transformers = library("transformers")
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}
    model: nn.Module = transformers.ResNetModel(transformers.ResNetConfig(**sizes))
    return model.eval()


def quantised(program: torch.export.ExportedProgram, kwargs: dict[str, Tensor]) -> tuple[int, Tensor]:
    """How many values are quantised, and what comes of it."""
    prepared = library("torchao.quantization.pt2e.quantize_pt2e")
    quantizers = library("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    config = quantizers.get_default_x86_inductor_quantization_config()
    quantizer = quantizers.X86InductorQuantizer().set_global(config)
    module = prepared.prepare_pt2e(program.module(), quantizer)
    module(**kwargs)
    converted = prepared.convert_pt2e(module)
    count = sum("quantize_per" in str(node.target) for node in converted.graph.nodes)
    return count, converted(**kwargs).last_hidden_state


@pytest.mark.parametrize("build", [vit, resnet], ids=lambda build: build.__name__)
def test_as_many_values_are_quantised(build: Any) -> None:
    """Of linears, convolutions, pools and sums; the quantised models give the same bits."""
    torch.manual_seed(0)
    model, kwargs = build(), {name: torch.randn(shape) for name, shape in PIXELS.items()}
    count, expected = quantised(torch.export.export(model, (), kwargs, strict=False), kwargs)
    found = quantised(whence.capture(model, (), kwargs).to_exported_program(), kwargs)
    assert count
    assert found[0] == count
    assert torch.equal(found[1], expected)


@pytest.mark.parametrize("taken", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizer_with_quantised_state(name: str, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step quantises its state as the optimizer does, by the copy of that class; its function is run as it
    is written on both sides, where the library has it compiled to other last bits."""
    optimizers = library("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)

    def started() -> tuple[Any, nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        optimizer = getattr(optimizers, name)(model.parameters(), lr=1e-2)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).sin().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for _ in range(taken):
            step(x)
        return step, model, optimizer

    x = torch.randn(4, 64)
    (step, model, optimizer), (twin, expected, _) = started(), started()
    bound = whence.capture_step(step, (x,), model=model, optimizer=optimizer).bind(model, optimizer)
    for _ in range(3):
        assert torch.equal(bound(x), twin(x))
    assert differing(expected.state_dict(), model.state_dict()) == []
    assert type(optimizer.state[model.weight]["exp_avg"]).__name__.startswith("OptimState")


class LowRank(nn.Module):
    """A layer that stays as it is, and what is trained beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return found


def beside_quantised() -> nn.Module:
    quantization = library("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return nn.Sequential(*[LowRank(each) if isinstance(each, nn.Linear) else each for each in model])


def in_mixed_precision() -> nn.Module:
    training = library("torchao.prototype.quantized_training")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    library("torchao.quantization").quantize_(model, training.int8_mixed_precision_training())
    return model


def in_float8() -> nn.Module:
    float8 = library("torchao.float8")
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    config = float8.Float8LinearConfig(emulate=True)
    return float8.convert_to_float8_training(model, config=config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [beside_quantised, in_mixed_precision, in_float8])
def test_quantised_models_are_trained(make: Any) -> None:
    """Weights that are made of other tensors, frozen or trained; their gradient may be a plain tensor."""

    def started() -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = make()
        held = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(held, lr=1e-2)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).sin().pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step, model, optimizer

    (step, model, optimizer), (twin, expected, _) = started(), started()
    bound = whence.capture_step(step, (torch.randn(64, 64),), model=model, optimizer=optimizer)
    run = bound.bind(model, optimizer)
    for seed in range(3):
        x = torch.randn(64, 64)
        torch.manual_seed(seed)
        found = run(x)
        torch.manual_seed(seed)
        assert torch.equal(found, twin(x))
    pairs = list(zip(model.parameters(), expected.parameters(), strict=True))
    grads = [(left.grad, right.grad) for left, right in pairs if left.grad is not None]
    assert grads and all(type(left) is type(right) and torch.equal(left, right) for left, right in grads)
