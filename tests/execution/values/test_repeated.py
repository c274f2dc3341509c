"""Patches of what a checkpoint computes again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import whence
from tests.program.small import sine_loss

X = torch.randn(3, 4)


SELECTIVE: dict[str, Any] = {
    "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
}


class Repeated(nn.Module):
    """A chain in a checkpoint, perhaps in another one, which keeps nothing, or products alone."""

    def __init__(self, inner: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        chain = (nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.inner, self.head = inner or nn.Sequential(*chain), nn.Linear(4, 4)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(checkpoint(self.inner, x, use_reentrant=False, **self.options).sin())
        return found


@pytest.mark.parametrize("path", ["0", "2", "3", "5", ""])
@pytest.mark.parametrize(
    "make",
    [Repeated, lambda: Repeated(Repeated()), lambda: Repeated(**SELECTIVE)],
    ids=["once", "twice", "selective"],
)
def test_a_patch_in_a_checkpoint_is_a_hook_of_eager(make: Any, path: str) -> None:
    """The backward computes the value again, and the hook runs again: gradients behind it are eager's."""
    torch.manual_seed(0)
    model = make()
    inside = "inner.inner" if isinstance(model.inner, Repeated) else "inner"
    name = f"{inside}.{path}".rstrip(".")
    program = whence.capture(model, (X,), backward=sine_loss)
    torch.manual_seed(1)
    found = program.run((X,), patch={name: lambda value: value * 2}).outputs
    model.get_submodule(name).register_forward_hook(lambda _module, _args, value: value * 2)
    torch.manual_seed(1)
    sine_loss(model(X)).backward()
    gradients = {row.path: row.name for row in program.signature.outputs_of(whence.OutputKind.GRADIENT)}
    modules = [each for each, _ in model.named_modules()]
    behind = {each for each in modules[modules.index(name) :] if not f"{each}.".startswith(f"{name}.")}
    assert "head" in behind
    for each in (each for each in gradients if each.rpartition(".")[0] in behind):
        gradient = model.get_parameter(each).grad
        assert gradient is not None and torch.equal(found[gradients[each]], gradient), each


def _chain(x: Tensor) -> Tensor:
    return x.sin().cos().sin().cos().sin()


def test_some_of_equal_operations_run_again() -> None:
    """Of one call: the first ones are those that are told apart; where others come before, nobody knows."""
    given = X.clone().requires_grad_()

    def inside(x: Tensor) -> Tensor:
        return checkpoint(_chain, x, use_reentrant=False)

    def beside(x: Tensor) -> Tensor:
        return inside(x.cos().sin())

    program = whence.capture(inside, (given,), backward=sine_loss)
    again = [node.name for node in program.select(":: aten.sin :: recomputed")]
    assert len(again) == 2 and len(program.select(":: aten.sin :: forward")) == 4
    values = program.run((X,), read=again, patch={"sin": torch.neg})
    assert torch.equal(values[again[0]], -X.sin()) and torch.equal(values[again[1]], (-X.sin()).cos().sin())
    with pytest.raises(
        whence.UsageError, match="a checkpoint runs only some of the operations like it again"
    ):
        whence.capture(beside, (given,), backward=sine_loss).run((X,), patch={"sin_1": torch.neg})
