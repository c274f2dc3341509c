"""A module that code names, and the model does not hold, decides by all that it is made of."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

Change = Callable[[Any], object]
Made = Callable[[SimpleNamespace], Any]


class Head(nn.Module):
    """Tensors, modules, a number and a mode."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
        self.norm = nn.LayerNorm(3)
        self.scale = 0.5
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        """Reads all of it."""
        return self.changed(self.norm(self.layers(x)))

    def changed(self, x: Tensor) -> Tensor:
        """A method beside forward."""
        return torch.dropout(x * self.scale + self.offset, 0.5, self.training)


def another_layer(head: Head) -> None:
    head.layers[1] = nn.Tanh()


def another_linear(head: Head) -> None:
    head.layers[0] = nn.Linear(4, 3)


def another_method(head: Head) -> None:
    head.changed = lambda x: x  # type: ignore[method-assign]


CHANGES: dict[str, Change] = {
    "mode": lambda head: head.train(),
    "mode of a part": lambda head: head.layers.train(),
    "number": lambda head: setattr(head, "scale", 0.7),
    "number of a library's": lambda head: setattr(head.norm, "eps", 0.1),
    "parameter": lambda head: setattr(head.layers[0], "weight", nn.Parameter(torch.ones(3, 4))),
    "no bias": lambda head: setattr(head.layers[0], "bias", None),
    "buffer": lambda head: setattr(head, "offset", torch.zeros(3)),
    "layer": another_layer,
    "layer of the same class": another_linear,
    "one layer more": lambda head: head.layers.append(nn.Tanh()),
    "hook": lambda head: head.register_forward_hook(lambda _module, _args, output: output * 2),
    "hook of a part": lambda head: head.norm.register_forward_pre_hook(lambda _module, args: args),
    "forward": lambda head: setattr(head, "forward", lambda x: x[:, :3]),
    "method": another_method,
}
SAME: dict[str, Change] = {
    "nothing": lambda head: None,
    "numbers in place": lambda head: head.layers[0].weight.data.mul_(2),
    "memory": lambda head: setattr(head.offset, "data", torch.zeros(3)),
    "another attribute": lambda head: setattr(head, "note", 3),
}


def function(held: SimpleNamespace) -> Callable[[Tensor], Tensor]:
    """Whose head is held by an object."""
    linear = nn.Linear(3, 3)
    return lambda x: linear(held.head(x))


def model(held: SimpleNamespace) -> nn.Module:
    """A module that is not the head's owner."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(held.head(x))

    return Model()


KINDS: tuple[Made, ...] = (function, model)


class Holder(nn.Module):
    """Keeps something that is called, and is no module of its own."""

    def __init__(self, held: Any, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.held = held
        self.linear, self.call = nn.Linear(3, 3), call

    def forward(self, x: Tensor) -> Tensor:
        """What is kept, then a layer."""
        return self.linear(self.call(self.held, x))


def in_list(held: SimpleNamespace) -> nn.Module:
    """No `ModuleList`."""
    return Holder([held.head], lambda kept, x: kept[0](x))


def in_dictionary(held: SimpleNamespace) -> nn.Module:
    """No `ModuleDict`."""
    return Holder({"head": held.head}, lambda kept, x: kept["head"](x))


def in_tuple_of_object(held: SimpleNamespace) -> nn.Module:
    """An object of the user's."""
    return Holder(SimpleNamespace(heads=(held.head,)), lambda kept, x: kept.heads[0](x))


def in_partial(held: SimpleNamespace) -> nn.Module:
    """A function that has it as an argument."""
    return Holder(partial(lambda head, x: head(x), held.head), lambda kept, x: kept(x))


def behind_method(held: SimpleNamespace) -> nn.Module:
    """Its `__call__`."""
    return Holder(held.head.__call__, lambda kept, x: kept(x))


HELD = (*KINDS, in_list, in_dictionary, in_tuple_of_object, in_partial, behind_method)


def captured(made: Made) -> tuple[SimpleNamespace, Any, Tensor, whence.Program]:
    """What holds the head, what was captured, its input, and the program."""
    held = SimpleNamespace(head=Head().eval())
    subject, x = made(held), torch.randn(2, 4)
    return held, subject, x, whence.capture(subject, (x,))


@pytest.mark.parametrize("made", HELD)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_changed_is_found(made: Made, change: Change) -> None:
    """Where the program would compute what the module computed before."""
    held, subject, x, program = captured(made)
    assert program.check(subject, (x,)) == []
    change(held.head)
    assert program.check(subject, (x,)) != []


@pytest.mark.parametrize("made", KINDS)
def test_another_module_is_found(made: Made) -> None:
    """In the place of the one that was there."""
    held, subject, x, program = captured(made)
    held.head = Head().eval()
    assert any("head" in str(violation) for violation in program.check(subject, (x,)))


@pytest.mark.parametrize("made", HELD)
@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_what_a_program_follows_is_no_change(made: Made, change: Change) -> None:
    """The program reads the module's own tensors."""
    held, subject, x, program = captured(made)
    change(held.head)
    assert program.check(subject, (x,)) == []
    assert torch.equal(program.module()(x), subject(x))
