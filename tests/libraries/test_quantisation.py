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
