"""Small models of ten architectures, with inputs, for captures on the CPU, on fakes and on a device."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from whence.demo import GPT, GPTConfig

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


class Residual(nn.Module):
    """Convolutions, batch norms and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        return self.head(F.adaptive_avg_pool2d(y + F.relu(self.second(y)), 1).flatten(1))


class Recurrent(nn.Module):
    """An LSTM of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Pinned(nn.Module):
    """Pages of the host that a copy reads while the device works."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin().cpu().pin_memory().to(x.device, non_blocking=True) * 2


def _ids(length: int = 8) -> Tensor:
    return torch.randint(0, 60, (2, length))


def _of_transformers(name: str, head: str, inputs: dict[str, Any], **sizes: Any) -> Made:
    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, head)(config).eval(), (), inputs


def llama() -> Made:
    """Rotary positions and grouped heads."""
    sizes = {**_SMALL, "num_key_value_heads": 2, "vocab_size": 64}
    return _of_transformers("Llama", "LlamaForCausalLM", {"input_ids": _ids(), "use_cache": False}, **sizes)


def bert() -> Made:
    """Attention in both directions."""
    return _of_transformers("Bert", "BertForMaskedLM", {"input_ids": _ids()}, **_SMALL, vocab_size=64)


def gpt2() -> Made:
    """Convolutions of width one."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    inputs = {"input_ids": _ids(), "use_cache": False}
    return _of_transformers("GPT2", "GPT2LMHeadModel", inputs, **sizes, **ends)


def t5() -> Made:
    """An encoder, a decoder, and biases by distance."""
    sizes = {"d_model": 64, "d_kv": 16, "num_layers": 2, "num_heads": 4, "d_ff": 64, "vocab_size": 64}
    inputs = {"input_ids": _ids(), "decoder_input_ids": _ids(5), "use_cache": False}
    return _of_transformers("T5", "T5ForConditionalGeneration", inputs, **sizes, decoder_start_token_id=0)


def vit() -> Made:
    """Patches of pictures."""
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    return _of_transformers("ViT", "ViTForImageClassification", inputs, **_SMALL, image_size=32, patch_size=8)


def gpt(dtype: torch.dtype = torch.float32) -> Made:
    """The demo's."""
    return GPT(GPTConfig(16, 4, 16, 2, 2)).to(dtype), (torch.arange(4)[None],), {}


def bert_in_bfloat16() -> Made:
    """With the kernels of attention that take such numbers alone."""
    model, args, kwargs = bert()
    return model.to(torch.bfloat16), args, kwargs


ARCHITECTURES: dict[str, Callable[[], Made]] = {
    "llama": llama,
    "bert": bert,
    "gpt2": gpt2,
    "t5": t5,
    "vit": vit,
    "gpt": gpt,
    "bert in bfloat16": bert_in_bfloat16,
    "gpt in bfloat16": lambda: gpt(torch.bfloat16),
    "residual": lambda: (Residual(), (torch.randn(2, 3, 8, 8),), {}),
    "residual in eval mode": lambda: (Residual().eval(), (torch.randn(2, 3, 8, 8),), {}),
    "recurrent": lambda: (Recurrent(), (torch.randn(2, 5, 4),), {}),
    "encoder layer": lambda: (
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
        (torch.randn(2, 5, 16),),
        {},
    ),
}
