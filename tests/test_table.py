"""Every model of the table: its program and its tree are the model, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.checks import captured, differing, gradients, same_bits, state
from tests.models import MODEL_CASES, ModelCase, sampled_cases

STEPS = 3
EVERY_CASE = pytest.mark.parametrize("row", MODEL_CASES, ids=lambda row: row.name)


def _in_every_mode() -> list[Any]:
    """Each model in each mode: tangents, of which a loss shows all but the beginning, for some of them."""
    found: list[Any] = [(row, mode, ()) for row in MODEL_CASES for mode in ("forward", "loss")]
    found += [(case.values[0], "tangents", case.marks) for case in sampled_cases()]
    return [pytest.param(row, mode, id=f"{row.name}-{mode}", marks=marks) for row, mode, marks in found]


EVERY_CASE_AND_MODE = pytest.mark.parametrize(("row", "mode"), _in_every_mode())


@pytest.mark.sample(20, large=True)
@EVERY_CASE_AND_MODE
def test_program_is_eager(row: ModelCase, mode: str) -> None:
    """The program verifies against eager."""
    model, args, kwargs = row.make()
    result = captured(row.name, mode).verify(model, args, kwargs)
    assert result.ok, str(result)


def seeds_for(outputs: list[Tensor]) -> list[Tensor]:
    """The same random gradients for the same outputs."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float32).to(o.dtype) for o in outputs]


def one_run(
    row: ModelCase, module: nn.Module, inputs: tuple[Any, Any], mode: str, *, tree: bool
) -> dict[str, Any]:
    """Outputs, gradients, state, inputs and generator state after one run from a fixed seed."""
    args, kwargs = inputs
    torch.manual_seed(3)
    result = module(*args, **kwargs)
    loss = None
    if mode == "loss":
        loss, result = result if tree else (row.loss(result), result)
    outputs = tree_leaves(result)
    if loss is not None:
        loss.backward()
    elif roots := [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]:
        torch.autograd.backward(roots, seeds_for(roots))
    found = {
        f"output {i}": leaf.detach() if isinstance(leaf, Tensor) else leaf for i, leaf in enumerate(outputs)
    }
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    found |= {f"input {i}": leaf.detach() for i, leaf in enumerate(given)}
    found |= {f"gradient of input {i}": leaf.grad for i, leaf in enumerate(given) if leaf.is_leaf}
    found |= {f"gradient of {name}": gradient for name, gradient in gradients(module).items()}
    return found | {"loss": loss, "generator": torch.get_rng_state()} | state(module)


@pytest.mark.sample(31)
@EVERY_CASE_AND_MODE
def test_tree_is_eager(row: ModelCase, mode: str) -> None:
    """A run of the tree gives eager's outputs, gradients, buffers, inputs and generator state."""
    if "custom_function" in row.tags and mode == "forward":
        pytest.skip("a forward-only tree refuses to differentiate a custom function")
    _, args, kwargs = row.make()
    original, *again = row.make()
    tree = captured(row.name, mode).unflatten(copy=True)
    expected = one_run(row, original, (again[0], again[1]), mode, tree=False)
    found = one_run(row, tree, (args, kwargs), mode, tree=True)
    assert differing(expected, found) == []


def training_losses(
    row: ModelCase, module: nn.Module, inputs: tuple[Any, Any], *, tree: bool
) -> list[Tensor]:
    """The losses of three steps of gradient descent."""
    args, kwargs = inputs
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        result = module(*args, **kwargs)
        loss = result[0] if tree else row.loss(result)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


@pytest.mark.sample(13)
@EVERY_CASE
def test_tree_trains_as_eager(row: ModelCase) -> None:
    """Three SGD steps on the tree of a captured loss leave eager's losses, parameters and buffers."""
    _, args, kwargs = row.make()
    original, *again = row.make()
    tree = captured(row.name, "loss").unflatten(copy=True)
    expected = training_losses(row, original, (again[0], again[1]), tree=False)
    found = training_losses(row, tree, (args, kwargs), tree=True)
    assert [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not same_bits(a, b)] == []
    assert differing(state(original), state(tree)) == []
