"""The models that are measured, and their inputs."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 1000
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
}
"""The yardstick of the design; the number of layers varies."""

LARGE = {
    "8b": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "405b": {
        "num_hidden_layers": 126,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
"""Published sizes, by number of parameters."""


def llama(layers: int) -> LlamaForCausalLM:
    """The yardstick, with random weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SMALL))


def llama_on_meta(layers: int) -> LlamaForCausalLM:
    """The yardstick without weights."""
    with torch.device("meta"):
        return llama(layers)


def large_llama(size: str) -> LlamaForCausalLM:
    """A model of published size, on the meta device."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**LARGE[size]))


def batch() -> dict[str, Any]:
    """Two sequences of 32 tokens."""
    ids = torch.randint(0, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "use_cache": False}


def meta_batch(sequences: int, length: int) -> dict[str, Any]:
    """Tokens without values."""
    ids = torch.zeros(sequences, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "use_cache": False}


def labelled(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs, with themselves as labels, so that the outputs hold a loss."""
    return {**inputs, "labels": inputs["input_ids"]}


def loss(outputs: Any) -> Any:
    """The loss that a model of transformers returns when it is given labels."""
    return outputs.loss
