"""The plain PyTorch models of the table in `tests.models`: each is small and strange in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class Mlp(nn.Module):
    """A residual two-layer perceptron: the brick the other models are built from."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        update = self.down(F.gelu(self.up(self.norm(hidden))))
        return hidden + self.dropout(update)


class Attention(nn.Module):
    """Self-attention over the middle dimension, the residual left to the caller."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        split = self.query_key_value(hidden).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


# Diffusion


class TimeEmbedding(nn.Module):
    """Sines and cosines of a diffusion time, through a small perceptron."""

    frequencies: Tensor

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(0, -3, width // 2))
        self.project = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies
        return self.project(torch.cat([angles.sin(), angles.cos()], dim=-1))


class TimedConvolution(nn.Module):
    """A residual convolution block shifted by the time embedding."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shift = nn.Linear(WIDTH, outputs)
        self.skip: nn.Module = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(F.silu(self.norm(image))) + self.shift(time)[:, :, None, None]
        return F.silu(self.second(hidden)) + self.skip(image)


class UNet(nn.Module):
    """One level down, attention in the middle, one level up with a skip connection."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.time = TimeEmbedding()
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.down = TimedConvolution(channels, channels)
        self.shrink = nn.Conv2d(channels, WIDTH, 3, stride=2, padding=1)
        self.middle = TimedConvolution(WIDTH, WIDTH)
        self.attention = Attention()
        self.up = TimedConvolution(WIDTH + channels, channels)
        self.leave = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        embedded = self.time(time)
        fine = self.down(self.enter(image), embedded)
        coarse = self.middle(self.shrink(fine), embedded)
        sequence = coarse.flatten(2).transpose(1, 2)
        coarse = coarse + self.attention(sequence).transpose(1, 2).reshape_as(coarse)
        grown = F.interpolate(coarse, scale_factor=2.0, mode="nearest")
        return self.leave(self.up(torch.cat([grown, fine], dim=1), embedded))


class ModulatedBlock(nn.Module):
    """A transformer block whose norms are scaled, shifted and gated by a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = Attention()
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU("tanh"), nn.Linear(64, WIDTH))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, next_shift, next_scale, next_gate = (
            self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        )
        hidden = hidden + gate * self.attention(self.norm(hidden) * (1 + scale) + shift)
        update = self.feed_forward(self.norm(hidden) * (1 + next_scale) + next_shift)
        return hidden + next_gate * update


class DiffusionTransformer(nn.Module):
    """A class-conditioned transformer over image patches."""

    def __init__(self, patch: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.patch = patch
        self.time = TimeEmbedding()
        self.label = nn.Embedding(classes, WIDTH)
        self.position = nn.Parameter(0.1 * torch.randn(1, (32 // patch) ** 2, WIDTH))
        self.enter = nn.Conv2d(3, WIDTH, patch, stride=patch)
        self.blocks = nn.ModuleList(ModulatedBlock() for _ in range(2))
        self.leave = nn.Linear(WIDTH, 3 * patch * patch)

    def forward(self, image: Tensor, time: Tensor, label: Tensor) -> Tensor:
        condition = self.time(time) + self.label(label)
        hidden = self.enter(image).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            hidden = block(hidden, condition)
        return F.fold(self.leave(hidden).transpose(1, 2), (32, 32), self.patch, stride=self.patch)


# Recurrent


class LstmClassifier(nn.Module):
    """Tokens through a two-layer bidirectional LSTM; the last state decides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH, padding_idx=0)
        self.encoder = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (last, _) = self.encoder(self.embedding(tokens))
        return self.head(torch.cat([last[-2], last[-1]], dim=-1))


class GruForecaster(nn.Module):
    """A GRU reads a series, then its own cell unrolls three steps into the future."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.GRU(4, WIDTH, batch_first=True)
        self.cell = nn.GRUCell(4, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, series: Tensor) -> Tensor:
        _, last = self.reader(series)
        state, forecasts = last[0], [series[:, -1]]
        for _ in range(3):
            state = self.cell(forecasts[-1], state)
            forecasts.append(self.head(state))
        return torch.stack(forecasts[1:], dim=1)


# Parameters in unusual places


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 8)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, features: Tensor) -> Tensor:
        code = torch.tanh(self.encoder(features))
        return F.linear(code, self.encoder.weight.t(), self.bias)


class TiedLanguageModel(nn.Module):
    """Two names of one parameter: `head.weight` is `embedding.weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.block = Mlp()
        self.head = nn.Linear(WIDTH, 100, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


class NamedBranches(nn.Module):
    """Modules in a ModuleDict, parameters in a ParameterList and a ParameterDict."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"wide": nn.Linear(WIDTH, WIDTH), "deep": Mlp()})
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
        self.offsets = nn.ParameterDict({name: torch.randn(WIDTH) for name in ("wide", "deep")})

    def forward(self, features: Tensor) -> Tensor:
        total = torch.zeros_like(features)
        for (name, branch), scale in zip(self.branches.items(), self.scales, strict=True):
            total = total + scale * branch(features) + self.offsets[name]
        return total


class PartlyFrozen(nn.Module):
    """A frozen parameter, a parameter that is never used, and one used at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.frozen(features * self.scale)
        return self.head(torch.relu(hidden) * self.scale)


class WeightNormed(nn.Module):
    """Weights computed from a direction and a length by a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.first = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = weight_norm(nn.Conv1d(8, 8, 3, padding=1))

    def forward(self, features: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(features)))


class SpectralNormed(nn.Module):
    """A parametrization with state: in training each use of a weight steps its power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.second = spectral_norm(nn.Linear(WIDTH, 4))

    def forward(self, features: Tensor) -> Tensor:
        return self.second(F.leaky_relu(self.first(features), 0.2))


# Calls


class SharedLayer(nn.Module):
    """One block called four times in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(4):
            hidden = self.block(hidden)
        return self.head(hidden)


class SharedAcrossNames(nn.Module):
    """One module under two names, called under both, each time with different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.question = Mlp()
        self.answer = self.question
        self.compare = nn.Bilinear(WIDTH, WIDTH, 3)

    def forward(self, question: Tensor, answer: Tensor) -> Tensor:
        return self.compare(self.question(question).mean(1), self.answer(answer).mean(1))


class DenseExperts(nn.Module):
    """Every expert sees every token; a router keeps the two best for each."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(Mlp() for _ in range(experts))

    def forward(self, features: Tensor) -> Tensor:
        scores, chosen = self.router(features).topk(2, dim=-1)
        nothing = features.new_zeros(*features.shape[:-1], len(self.experts))
        weights = nothing.scatter(-1, chosen, scores.softmax(dim=-1))
        outputs = torch.stack([expert(features) for expert in self.experts], dim=-1)
        return (outputs * weights.unsqueeze(-2)).sum(dim=-1)


class Hooked(nn.Module):
    """Forward hooks change what a submodule is given and what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.block.register_forward_pre_hook(_shift_inputs)
        self.block.register_forward_hook(_squash_outputs)

    def forward(self, features: Tensor) -> Tensor:
        return self.block(features * self.scale)


def _shift_inputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value + 0.5 for value in inputs)


def _squash_outputs(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return torch.tanh(output)


def standardize(values: Tensor) -> Tensor:
    """A free function, so that its operations belong to whoever calls it."""
    centred = values - values.mean(dim=-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + 1e-5)


class ClosureOps(nn.Module):
    """Operations made by a closure over parameters and by a free function."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, features: Tensor) -> Tensor:
        return standardize(self._gated(features)(self.first))

    def _gated(self, features: Tensor) -> Callable[[nn.Module], Tensor]:
        gate = torch.sigmoid(features * self.gain)
        return lambda layer: gate * layer(features)


# Modes and regions


class MixedPrecision(nn.Module):
    """The middle layers compute in bfloat16 under autocast, the ends in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.block = Mlp()
        self.attention = Attention()
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.enter(features)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.attention(self.block(hidden))
        return self.leave(hidden.float())


class Distillation(nn.Module):
    """A student compared with a frozen teacher under no_grad and with its own detached average."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Mlp()
        self.teacher = Mlp().requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        student = self.student(features)
        with torch.no_grad():
            target = self.teacher(features) * self.student.down.bias.sigmoid()
        average = 0.9 * target + 0.1 * student.detach()
        return F.smooth_l1_loss(student, average, reduction="none").mean(dim=-1)


class MomentumTeacher(nn.Module):
    """The teacher's parameters follow the student's inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(WIDTH, 8)
        self.teacher = nn.Linear(WIDTH, 8).requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        self._follow()
        return F.cosine_similarity(self.student(features), self.teacher(features), dim=-1)

    @torch.no_grad()
    def _follow(self) -> None:
        for target, source in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            target.lerp_(source, 0.1)


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward instead of saved."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(dropout=dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(hidden)


class EnergyForces(nn.Module):
    """An energy and its derivative by the positions: autograd inside forward, differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        energy = self.energy(positions).sum(dim=(1, 2))
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -slope


# In-place writes


class InplaceActivations(nn.Module):
    """A residual convolution net with batch norm and in-place ReLUs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.branch = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.activation = nn.ReLU(inplace=True)
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.stem(image)
        update = self.branch(hidden)
        update += hidden
        return self.head(self.activation(update).mean(dim=(2, 3)))


class InplaceViews(nn.Module):
    """Writes through views of an intermediate value, which its base must show."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.first_token = nn.Parameter(torch.randn(WIDTH))
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.enter(features)
        hidden[:, 0] = self.first_token
        half = WIDTH // 2
        hidden[..., :half].mul_(hidden[..., half:].sigmoid())
        hidden[:, 1:].add_(0.5).clamp_(min=-1.0)
        hidden[..., -1].masked_fill_(features[..., -1] > 0, 0.25)
        return self.leave(hidden)


class RunningStatistics(nn.Module):
    """Normalises by a running average and counts its own calls, in buffers."""

    average: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("steps", torch.tensor(0))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, features: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(features.detach().mean(dim=(0, 1)), alpha=0.1)
            self.steps += 1
        corrected = self.average / (1 - 0.9**self.steps)
        return self.head(features - corrected)


class CachedAttention(nn.Module):
    """One decoding step that writes its key and value into the caller's cache."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, token: Tensor, position: Tensor, *, keys: Tensor, values: Tensor) -> Tensor:
        key, value = self.key_value(token).chunk(2, dim=-1)
        keys.index_copy_(1, position, key.detach())
        values.index_copy_(1, position, value.detach())
        visible = torch.arange(keys.shape[1]) <= position
        scores = self.query(token) @ keys.transpose(1, 2)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return weights @ values + value


# Custom functions


class RoundStraightThrough(torch.autograd.Function):
    """Rounds forward; backward passes the gradient where the input was in range."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(values.abs() <= limit)
        return values.clamp(-limit, limit).round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return gradient * inside, None


class RecomputedGate(torch.autograd.Function):
    """`silu(gate) * value`, the derivative recomputed from the inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gate, value)
        return F.silu(gate) * value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, value = ctx.saved_tensors
        chance = torch.sigmoid(gate)
        slope = chance * (1 + gate * (1 - chance))
        return gradient * value * slope, gradient * gate * chance


class QuantizedGate(nn.Module):
    """A quantised layer and a gate, both with hand-written derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 2 * WIDTH)
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, features: Tensor) -> Tensor:
        gate, value = self.enter(features).chunk(2, dim=-1)
        hidden = RecomputedGate.apply(gate, value)
        return self.leave(RoundStraightThrough.apply(8 * hidden, 6.0) / 8)


# Inputs, outputs and constants


@dataclass(frozen=True)
class Prediction:
    """What `DictToPrediction` returns."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    attributes: dict[str, Tensor]


torch.export.register_dataclass(Prediction, serialized_type_name="whence.tests.Prediction")


class DictToPrediction(nn.Module):
    """A dictionary in, a dataclass out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.block = Mlp()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, batch: dict[str, Tensor]) -> Prediction:
        embedded = self.embedding(batch["tokens"])
        mixed = self.block(embedded) * batch["mask"].unsqueeze(-1)
        logits = self.head(mixed.mean(dim=1))
        return Prediction(logits, (embedded, mixed), {"best": logits.argmax(dim=-1)})


class AliasedOutputs(nn.Module):
    """Returns a value, a view of it, the same value again, the input itself, a parameter and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
        hidden = self.layer(features)
        return hidden, hidden.transpose(0, 1), hidden, features, self.layer.weight, features.shape[0]


class ConstantTensors(nn.Module):
    """Reads a plain tensor attribute, a non-persistent buffer, and tensors made on the spot."""

    decay: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.basis = torch.eye(WIDTH) + 0.1
        self.register_buffer("decay", torch.linspace(1.0, 0.1, 8), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.layer(features) @ self.basis * self.decay[:, None]
        positions = torch.arange(features.shape[1], dtype=hidden.dtype)
        return hidden + positions[:, None] + torch.tensor([0.5, -0.5]).repeat(WIDTH // 2)


class FourierMixer(nn.Module):
    """Mixes positions by a learned complex filter in the frequency domain."""

    def __init__(self, length: int = 8) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(length // 2 + 1, WIDTH, dtype=torch.complex64))
        self.block = Mlp()

    def forward(self, features: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(features, dim=1) * self.filter
        return self.block(torch.fft.irfft(spectrum, n=features.shape[1], dim=1))


class VariationalAutoencoder(nn.Module):
    """Draws its code from a distribution: the random numbers are explicit operations."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 16)
        self.decoder = nn.Linear(8, WIDTH)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(features).chunk(2, dim=-1)
        code = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        divergence = 0.5 * (log_variance.exp() + mean.square() - 1 - log_variance)
        return torch.sigmoid(self.decoder(code)), divergence


class Neighbour(nn.Module):
    """Calls a module that it does not own."""

    def __init__(self, sibling: nn.Module) -> None:
        super().__init__()
        self.beside = [sibling]

    def forward(self, features: Tensor) -> Tensor:
        return self.beside[0](features)
