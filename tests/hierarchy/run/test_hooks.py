"""Hooks that a person puts on the modules of a tree."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests import zoo
from tests.checks import differing, gradients, same_bits

X = torch.randn(2, 3, zoo.WIDTH)
BOTH = pytest.mark.parametrize("backward", [False, True])


def pair(backward: bool) -> tuple[nn.Module, nn.Module]:
    """A model and the tree of a copy of it."""
    torch.manual_seed(0)
    model = nn.Sequential(zoo.Mlp(), zoo.Mlp())
    return model, whence.capture(deepcopy(model), (X,), backward=backward).unflatten()


@BOTH
def test_forward_hook_sees_arguments_and_result(backward: bool) -> None:
    """A forward hook on any submodule sees what the original's hook sees."""
    seen: list[list[Any]] = [[], []]
    for module, notes in zip(pair(backward), seen, strict=True):
        for path in ("0", "0.up", "1.norm"):
            module.get_submodule(path).register_forward_hook(
                lambda m, args, output, notes=notes: notes.append(
                    (m._get_name(), args[0].detach(), output.detach())
                )
            )
        module(X)
    assert [name for name, *_ in seen[0]] == [name for name, *_ in seen[1]] == ["Linear", "Mlp", "LayerNorm"]
    for expected, found in zip(*seen, strict=True):
        assert same_bits(expected[1], found[1])
        assert same_bits(expected[2], found[2])


@BOTH
def test_forward_hook_with_keywords(backward: bool) -> None:
    """A hook that asks for keyword arguments gets them."""
    seen = []
    _, tree = pair(backward)
    tree.get_submodule("0").register_forward_hook(
        lambda module, args, kwargs, output: seen.append((len(args), kwargs)), with_kwargs=True
    )
    tree(X)
    assert seen == [(1, {})]


@BOTH
def test_pre_hook_fires(backward: bool) -> None:
    """A forward pre-hook on a submodule fires before it runs."""
    order: list[str] = []
    _, tree = pair(backward)
    tree.get_submodule("0").register_forward_pre_hook(lambda module, args: order.append("before"))
    tree.get_submodule("0.up").register_forward_hook(lambda module, args, output: order.append("inside"))
    tree(X)
    assert order == ["before", "inside"]


@BOTH
def test_hook_that_only_looks_changes_no_numbers(backward: bool) -> None:
    """A hook that returns nothing leaves outputs and gradients as they are."""
    model, tree = pair(backward)
    tree.get_submodule("1.up").register_forward_hook(lambda module, args, output: None)
    for module in (model, tree):
        module(X).sin().sum().backward()
    assert differing(gradients(model), gradients(tree)) == []


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


@BOTH
def test_hook_that_replaces_the_result(backward: bool) -> None:
    """A hook that replaces a result has the original's effect on the output."""
    model, tree = pair(backward)
    for module in (model, tree):
        module.get_submodule("0.up").register_forward_hook(double)
    with torch.no_grad():
        assert same_bits(tree(X), model(X))


@BOTH
def test_hook_that_replaces_the_result_is_differentiated_or_refused(backward: bool) -> None:
    """The gradients through a replaced result are the original's, or the tree refuses to give any."""
    model, tree = pair(backward)
    for module in (model, tree):
        module.get_submodule("0.up").register_forward_hook(double)
    model(X).sin().sum().backward()
    try:
        tree(X).sin().sum().backward()
    except whence.WhenceError:
        return
    assert differing(gradients(model), gradients(tree)) == []


@BOTH
def test_hook_on_the_root_that_replaces_the_result(backward: bool) -> None:
    """A hook on the whole tree is outside the captured graph, and is differentiated by autograd."""
    model, tree = pair(backward)
    for module in (model, tree):
        module.register_forward_hook(double)
        module(X).sin().sum().backward()
    assert differing(gradients(model), gradients(tree)) == []


def test_pre_hook_that_replaces_the_arguments_is_refused() -> None:
    """A pre-hook that returns new arguments for a submodule is refused by name."""
    _, tree = pair(False)
    tree.get_submodule("0").register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with pytest.raises(whence.CallError, match=r"hook on Mlp cannot be honoured.*\n.*new arguments"):
        tree(X)


def test_backward_hook_is_refused() -> None:
    """A backward hook on a submodule is refused: its backward runs inside a captured graph."""
    _, tree = pair(True)
    tree.get_submodule("0.up").register_full_backward_hook(lambda module, inputs, outputs: None)
    with pytest.raises(whence.CallError, match="hook on Linear cannot be honoured"):
        tree(X)


def test_removed_hook_is_gone() -> None:
    """A hook that was removed fires no more."""
    seen = []
    _, tree = pair(True)
    handle = tree.get_submodule("0").register_forward_hook(lambda module, args, output: seen.append(1))
    handle.remove()
    tree(X)
    assert seen == []


def test_hook_fires_once_for_each_call() -> None:
    """A hook on a shared module fires once for each of its calls."""
    seen = []
    tree = whence.capture(zoo.SharedLayer(), (X,)).unflatten()
    tree.get_submodule("block").register_forward_hook(lambda module, args, output: seen.append(1))
    tree(X)
    assert len(seen) == 4


def test_hook_on_a_parameter() -> None:
    """A hook on a parameter sees the gradient that the original's parameter gets."""
    seen: list[Tensor] = []
    for module in pair(True):
        module.get_parameter("0.up.weight").register_hook(lambda gradient: seen.append(gradient.clone()))
        module(X).sin().sum().backward()
    assert same_bits(seen[0], seen[1])


def test_hooks_of_the_original_are_part_of_the_program() -> None:
    """What the original's hooks computed was captured, and does not run twice."""
    model = zoo.Hooked()
    tree = whence.capture(model, (X,)).unflatten()
    assert same_bits(tree(X), model(X))


def test_replaced_submodule_is_refused() -> None:
    """A submodule of a joint tree that was replaced has no captured backward, and the tree says so."""
    tree = whence.capture(zoo.Mlp(), (X,), backward=True).unflatten()
    tree.up = nn.Linear(zoo.WIDTH, 2 * zoo.WIDTH)
    with pytest.raises(whence.CallError, match="up was replaced by a Linear"):
        tree(X)


class Residual(nn.Module):
    """Takes what it does not read, as the output of Swin's attention does, and gives what nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Second()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.inner(x.sin(), x)
        return self.scale * (y + x)


class Second(nn.Module):
    """Reads the first argument alone."""

    def forward(self, x: Tensor, _unread: Tensor) -> tuple[Tensor, Tensor]:
        return x.cos(), x.exp()


@BOTH
def test_hook_on_a_call_that_reads_not_all_it_is_given(backward: bool) -> None:
    """What the call in the tree does not have says so to whoever takes it for a tensor; no fake is seen."""
    model, seen = Residual(), list[Any]()
    for patterns, unread in (((), "preserve_calls hands it in"), (("inner",), "")):
        tree = whence.capture(model, (X,), backward=backward, preserve_calls=patterns).unflatten()
        tree.get_submodule("inner").register_forward_hook(lambda _m, args, out: seen.append((args, out)))
        tree(X)
        (first, second), (result, nobodys) = seen.pop()
        assert same_bits(first, X.sin()) and same_bits(result, X.sin().cos())
        with pytest.raises(AttributeError, match="nothing in the program uses this value"):
            nobodys.mean()
        if not unread:
            assert same_bits(second, X)
            continue
        with pytest.raises(AttributeError, match=unread):
            second.mean()
