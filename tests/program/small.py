"""A model small enough to read as text: two layers, each a residual of two projections, and a head."""

import torch
from torch import Tensor, nn

import whence
from tests.checks import Backward


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4, bias=False)
        self.mlp = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU())

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.attention(hidden))


class Stack(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(4, 2)

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features = layer(features)
        return self.head(features)


class Counted(nn.Module):
    """A buffer that counts calls, and one linear layer under two names."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = self.first
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, features: Tensor) -> Tensor:
        self.steps += 1
        hidden = torch.relu(self.first(features))
        return self.second(hidden) * self.steps


def sine_loss(output: Tensor) -> Tensor:
    return output.sin().sum()


def stack_program(backward: Backward = False, depth: int = 2) -> whence.Program:
    """The program of `Stack` on three rows of features."""
    torch.manual_seed(0)
    return whence.capture(Stack(depth), (torch.randn(3, 4),), backward=backward)


def counted_program(backward: Backward = False) -> whence.Program:
    """The program of `Counted` on three rows of features."""
    torch.manual_seed(0)
    return whence.capture(Counted(), (torch.randn(3, 4),), backward=backward)
