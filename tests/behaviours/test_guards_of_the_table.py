"""Every model of the table has guards that hold, and that fire when the model changes."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import whence
from tests.checks import captured
from tests.models import ModelCase, sampled_cases
from whence.program.guards.expectations import ExpectedConstant
from whence.schema import GuardKind

EVERY_CASE = pytest.mark.parametrize("row", sampled_cases())


class Twin(nn.Module):
    """An activation that no model has."""

    def forward(self, *args: object, **kwargs: object) -> object:
        raise AssertionError("guards are checked without running the model")


def _found(program: whence.Program, model: nn.Module) -> list[str]:
    return [violation.guard.what for violation in program.check(model)]


def _called(program: whence.Program, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that were called, by path; the deepest first."""
    what = [guard.what for guard in program.guards if guard.kind is GuardKind.TRAINING]
    paths = [text.removesuffix("training").removesuffix(".") for text in what]
    modules = dict(model.named_modules())
    return ((path, modules[path]) for path in reversed(paths) if path in modules)


@pytest.mark.sample(3)
@EVERY_CASE
def test_capture_holds_right_away(row: ModelCase) -> None:
    """Neither the model nor its inputs are reported when nothing changed; nor is a copy of the model."""
    model, args, kwargs = row.make()
    program = whence.capture(model, args, kwargs)
    assert list(map(str, program.check(model, args, kwargs))) == []
    assert list(map(str, program.check(copy.deepcopy(model), args, kwargs))) == []


@pytest.mark.sample(3)
@EVERY_CASE
def test_capture_holds_on_another_instance(row: ModelCase) -> None:
    """A model built again is one the capture stands for, also after its state was loaded."""
    program = captured(row.name, "forward")
    model, args, kwargs = row.make()
    assert list(map(str, program.check(model, args, kwargs))) == []
    other, _, _ = row.make()
    model.load_state_dict(other.state_dict())
    assert list(map(str, program.check(model, args, kwargs))) == []


@pytest.mark.sample(3)
@EVERY_CASE
def test_capture_holds_while_training(row: ModelCase) -> None:
    """Steps of an optimizer change numbers, which no guard is about; what a model's first run changes of what
    it reads was captured both ways."""
    program = captured(row.name, "loss")
    model, args, kwargs = row.make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for _ in range(2):
        row.loss(model(*args, **kwargs)).backward()
        torch.optim.SGD(trained, lr=0.1).step()
        _, args, kwargs = row.make()
        assert list(map(str, program.check(model, args, kwargs))) == []


@pytest.mark.sample(6)
@EVERY_CASE
def test_changed_model_is_found(row: ModelCase) -> None:
    """A flipped mode, a hook, a swapped module, another forward: each is told of, by its name."""
    program = captured(row.name, "forward")
    model, _, _ = row.make()
    path, module = next(_called(program, model))
    prefix = f"{path}." if path else ""
    module.train(not module.training)
    assert f"{prefix}training" in _found(program, model)
    module.train(not module.training)

    handle = module.register_forward_hook(lambda *_: None)
    assert _found(program, model) == [f"hooks of {path or 'the model'}"]
    handle.remove()

    module.forward = module.forward
    assert _found(program, model) == []  # the same function under the same name
    module.forward = lambda *_: None
    assert [name.rpartition(".")[2] for name in _found(program, model)] == ["forward"]
    del module.forward
    assert _found(program, model) == []


@pytest.mark.sample(8)
@EVERY_CASE
def test_swapped_module_is_found(row: ModelCase) -> None:
    """Another class in the place of a module that was called is told of by the module's path."""
    program = captured(row.name, "forward")
    model, _, _ = row.make()
    path, _ = next(_called(program, model))
    if path:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Twin())
    assert (_found(program, model) or _found(program, Twin()))[0] == (path or "the model")


@pytest.mark.sample(12)
@EVERY_CASE
def test_changed_number_is_found(row: ModelCase) -> None:
    """Every number, flag and text that a module read of itself is watched."""
    program = captured(row.name, "forward")
    model, _, _ = row.make()
    modules = dict(model.named_modules())
    for guard in program.guards:
        if guard.kind is not GuardKind.ATTRIBUTE or not isinstance(guard.expected, ExpectedConstant):
            continue
        module = modules.get(guard.what.rpartition(".")[0])
        if module is None or guard.name not in vars(module):
            continue
        before = getattr(module, guard.name)
        setattr(module, guard.name, "something else")
        assert guard.what in _found(program, model)
        setattr(module, guard.name, before)
    assert _found(program, model) == []
