"""The model of `whence demo`: a GPT in plain torch, about ten million parameters."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of the demonstration model."""

    vocabulary: int = 4096
    context: int = 128
    width: int = 320
    heads: int = 5
    layers: int = 7


class Attention(nn.Module):
    """Causal self-attention over `[batch, time, width]`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Mix every position with those before it."""
        batch, time, width = hidden.shape
        split = self.qkv(hidden).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        mixed_heads: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return mixed_heads


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform every position by itself."""
        transformed: Tensor = self.down(F.gelu(self.up(hidden)))
        return transformed


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """One layer."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        transformed: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return transformed


class GPT(nn.Module):
    """Token ids `[batch, time]` to logits `[batch, time, vocabulary]`; the embeddings are tied."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        config = config or GPTConfig()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Predict the next token at every position."""
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def gpt() -> tuple[GPT, tuple[Tensor, ...]]:
    """The model with an example batch of four sequences of 64 tokens."""
    torch.manual_seed(0)
    config = GPTConfig()
    return GPT(config), (torch.randint(0, config.vocabulary, (4, 64)),)


def next_token_loss(logits: Tensor) -> Tensor:
    """Cross-entropy against a fixed target, which stands for the next token of each position."""
    targets = torch.arange(logits.shape[0] * logits.shape[1], device=logits.device) % logits.shape[-1]
    return F.cross_entropy(logits.flatten(0, 1), targets)
