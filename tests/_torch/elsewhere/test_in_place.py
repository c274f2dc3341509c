"""Tensors that lie on the device for a while."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whence._torch.elsewhere.in_place import TwinsInPlace
from whence._torch.elsewhere.target import Twins, spelled

pytestmark = pytest.mark.canary("torch._C._swap_tensor_impl", "torch.Tensor._cdata")


def exchanged(tensors: Iterable[Tensor]) -> TwinsInPlace:
    """These tensors with their twins."""
    elsewhere = spelled("cuda")
    assert elsewhere is not None
    twins = Twins(elsewhere)
    return TwinsInPlace((tensor, twins.of(tensor)) for tensor in tensors)


def facts(tensors: Iterable[Tensor]) -> list[tuple[Any, ...]]:
    """What must not change: the object and the memory, its class, attributes, gradient and hooks."""
    return [
        (id(held), held.data_ptr(), type(held), dict(vars(held)), id(held.grad), held._backward_hooks)
        for held in tensors
    ]


def trained() -> tuple[Any, list[Tensor]]:
    """A model that has weak references to its weights, gradients, attributes, and a graph that is alive."""
    model: Any = nn.LSTM(3, 4)
    model(torch.randn(2, 1, 3))[0].sum().backward()
    model.weight_ih_l0.tag = "mine"
    state = list(model.parameters())
    return model, [*(held.grad for held in state if held.grad is not None), *state]


def test_whoever_holds_a_tensor_finds_it_there() -> None:
    """Class, attributes and gradient with it."""
    model, tensors = trained()
    alive, gradient = model(torch.randn(2, 1, 3))[0], model.weight_ih_l0.grad
    there = exchanged(tensors)
    there.put()
    weight = model.weight_ih_l0
    assert weight.device == torch.device("cuda", 0)
    assert weight.tag == "mine"
    assert isinstance(weight, nn.Parameter)
    assert weight.requires_grad
    assert weight.grad is gradient
    assert weight.grad.device.type == "cuda"
    there.give_back()
    alive.sum().backward()
    assert weight.grad is gradient


def test_all_are_given_back() -> None:
    """Also twice, and where nothing was done."""
    model, tensors = trained()
    before, numbers = facts(tensors), [held.detach().clone() for held in tensors]
    there = exchanged(tensors)
    there.give_back()
    assert facts(tensors) == before
    there.put()
    there.give_back()
    there.give_back()
    assert facts(tensors) == before
    assert all(map(torch.equal, tensors, numbers))
    assert all(twin.device.type == "cuda" and twin.grad is None for twin in there.twins.values())
    model(torch.randn(2, 1, 3))[0].sum().backward()


def test_an_exchange_that_was_cut_off_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt comes between two of them."""
    _, tensors = trained()
    before, there, swap = facts(tensors), exchanged(tensors), torch._C._swap_tensor_impl
    left = [*range(3)]

    def interrupted(*pair: Tensor) -> None:
        left.pop()
        swap(*pair)
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr(torch._C, "_swap_tensor_impl", interrupted)
    with pytest.raises(KeyboardInterrupt):
        there.put()
    monkeypatch.undo()
    there.give_back()
    assert facts(tensors) == before


def test_hooks_that_were_put_on_meanwhile_are_gone() -> None:
    """Python would add later ones to a table that nobody reads."""
    weight = nn.Parameter(torch.ones(2))
    there = exchanged([weight])
    there.put()
    weight.register_hook(lambda gradient: gradient)
    weight.register_post_accumulate_grad_hook(lambda _: None)
    there.give_back()
    weight.register_hook(lambda gradient: gradient * 2)
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0]
