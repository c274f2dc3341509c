"""What a report says of computing a call again is what a checkpoint around that call does in eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from itertools import combinations, count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import whence
from tests.models import ModelCase, case
from tests.reports.memory.test_taken import saved_by_eager
from whence.reports.flops import OWN


def checkpointed(build: Callable[[], nn.Module], path: str) -> nn.Module:
    """The model, with the calls of a module in checkpoints that take all tensors they are given."""
    model = build()
    module = model.get_submodule(path)
    forward = module.forward

    def in_checkpoint(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))

        def again(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, spec)
            return forward(*args, **kwargs)

        return checkpoint(again, *leaves, use_reentrant=False)

    module.forward = in_checkpoint
    return model


def checkpointed_once(build: Callable[[], nn.Module], path: str, index: int) -> nn.Module:
    """The model, with one call of a module in a checkpoint."""
    model, calls = build(), count()
    module = model.get_submodule(path)
    plain = module.forward
    checkpointed(lambda: model, path)
    again = module.forward

    def in_one(*args: Any, **kwargs: Any) -> Any:
        return (again if next(calls) == index else plain)(*args, **kwargs)

    module.forward = in_one
    return model


def flops_of_eager(found: ModelCase) -> int:
    """Of forward and backward, by PyTorch's counter and our formulas for what that leaves out."""
    model, args, kwargs = found.make()
    with FlopCounterMode(display=False, custom_mapping=dict(OWN)) as counter:
        found.loss(model(*args, **kwargs)).backward()
    return counter.get_total_flops()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name",
    [
        *("gru", "llama", "mixtral", "bert", "vit", "resnet", "t5", "albert", "gpt2_dropout"),
        *("unet", "convnext", "custom_function", "mamba"),
    ],
)
def test_each_call_saves_and_takes_what_a_checkpoint_does(name: str) -> None:
    """Of every call of the model: bytes that autograd holds, and FLOPs, with and without the checkpoint."""
    found = case(name) if "_" in name else replace(case(name), training=False)
    model, args, kwargs = found.make()
    report = whence.capture(model, args, kwargs, backward=found.loss).report()
    kept, flops = saved_by_eager(found), flops_of_eager(found)
    for row in report.rows[1:]:
        build = partial(checkpointed_once, found.build, row.path, row.index)
        other = replace(found, build=build)
        eager = (kept - saved_by_eager(other), flops_of_eager(other) - flops)
        figures = dict(row.figures)
        assert (figures["recomputing saves"], figures["recomputing FLOPs"]) == eager, (row.path, row.index)


@pytest.mark.parametrize("path", ["model.layers.0.mlp", "model.layers.1.self_attn.q_proj", "lm_head"])
def test_it_is_what_a_capture_of_the_checkpoint_keeps(path: str) -> None:
    """And computes again: nothing of a linear layer, whose arguments are all that is saved."""
    found = case("llama")
    programs = []
    for build in (found.build, partial(checkpointed, found.build, path)):
        model, args, kwargs = replace(found, build=build).make()
        programs.append(whence.capture(model, args, kwargs, backward=found.loss))
    before, after = programs
    (row,) = before.report(where=path).rows
    figures = dict(row.figures)
    assert figures["recomputing saves"] == before.memory().kept_bytes - after.memory().kept_bytes
    assert figures["recomputing FLOPs"] == after.cost().total.flops["recomputed"]


def test_a_call_in_a_checkpoint_is_run_again_as_it_is() -> None:
    """A second one around it computes nothing more, around calls in it their forward; there is nothing of
    these to save."""
    found = case("llama_checkpoint")
    model, args, kwargs = found.make()
    program = whence.capture(model, args, kwargs, backward=found.loss)
    taken = {}
    for row in program.report(where="model.layers.0.**").rows:
        other = replace(found, build=partial(checkpointed, found.build, row.path))
        taken[row.path] = flops_of_eager(other) - flops_of_eager(found)
        assert dict(row.figures)["recomputing FLOPs"] == taken[row.path], row.path
        assert dict(row.figures)["recomputing saves"] == 0 or row.path == "model.layers.0"
    assert taken["model.layers.0"] == taken["model.layers.0.mlp"] == 0 < taken["model.layers.0.self_attn"]


def nested() -> nn.Module:
    """Calls in calls, with something to save before, in and behind each."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Tanh())
    middle = nn.Sequential(nn.LayerNorm(4), inner, nn.Dropout(), nn.Linear(4, 4))
    return nn.Sequential(nn.Linear(4, 4), middle, nn.GELU(), nn.Linear(4, 4))


PATHS = [name for name, _ in nested().named_modules() if name not in ("", "0", "1.2")]
"""The first layer and a dropout compute nothing that is read when they are computed again."""
CHECKPOINTS = [paths for count in (1, 2, 3) for paths in combinations(PATHS, count)]


@pytest.mark.sample(12)
@pytest.mark.parametrize("paths", CHECKPOINTS, ids="+".join)
def test_checkpoints_in_checkpoints_save_and_take_what_eager_does(paths: tuple[str, ...]) -> None:
    """One more around each call of a model that has some, around calls in them and around them; and each
    keeps states of generators."""

    def build() -> nn.Module:
        return reduce(lambda model, path: checkpointed(lambda: model, path), paths, nested())

    found = ModelCase("nested", build, lambda: ((torch.randn(3, 4),), {}), lambda y: y.sin().sum(), True)
    model, args, kwargs = found.make()
    report = whence.capture(model, args, kwargs, backward=found.loss).report()
    assert report.memory.gaps == {"checkpoint: the states of generators that it keeps": len(paths)}
    kept, flops = saved_by_eager(found), flops_of_eager(found)
    for row in report.rows[1:]:
        other = replace(found, build=partial(checkpointed, build, row.path))
        eager = (kept - saved_by_eager(other), flops_of_eager(other) - flops)
        figures = dict(row.figures)
        assert (figures["recomputing saves"], figures["recomputing FLOPs"]) == eager, row.path


def test_steps_are_asked_too() -> None:
    """And a forward alone keeps nothing, so there is nothing to save."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)), torch.randn(6, 4)
    optimizer = torch.optim.SGD(model.parameters())

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    joint = whence.capture(model, (x,), backward=lambda y: y.sum()).report()
    whole = whence.capture_step(step, (x,), model=model, optimizer=optimizer).report()
    saves = [[dict(row.figures)["recomputing saves"] for row in report.rows[1:]] for report in (joint, whole)]
    assert saves[0] == saves[1] == [2 * 6 * 8 * 4, 0, 0, 0]
    assert "recomputing saves" not in dict(whence.capture(model, (x,)).report().rows[0].figures)
