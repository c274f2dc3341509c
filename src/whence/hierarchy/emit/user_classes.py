"""The modules of a plan as instances of the user's own classes.

They are made without `__init__`: attributes are those of the user's modules, parameters and buffers those of
the tree, submodules are new. What an attribute holds of the model's modules, also in lists and as bound
methods, is the new one. `forward` is the captured one. Hooks are part of the captured graphs, so they are not
taken along.
"""

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

from torch import nn

from whence._torch.observe.wrappers import seen_through
from whence.errors import Fault, Place, UsageError
from whence.hierarchy.plan.plan import ROOT_CALL
from whence.hierarchy.run.captured import KEY, CapturedInstance, forward, train
from whence.program import FlatProgram
from whence.program.names import modules_within
from whence.provenance import ROOT, ModulePath

_REGISTERS = ("_parameters", "_buffers", "_modules")
_UNKNOWN = "Module"
"""The class of a module of which an exported program does not know it."""


def instances(program: FlatProgram, model: object) -> dict[ModulePath, nn.Module]:
    """An instance for each module of a model, which is left as it is.

    Raises `UsageError` naming every module that does not fit, or cannot be made without `__init__`.
    """
    given = _modules_of(program, model)
    made, faults = _empty_instances(given)
    UsageError.refuse((*_misfits(program, given), *faults))
    for module in given.values():
        _fill(made[id(module)], module, made)
    return {path: made[id(module)] for path, module in given.items()}


def _modules_of(program: FlatProgram, model: object) -> dict[ModulePath, nn.Module]:
    if program.calls.entry == ROOT_CALL:
        raise UsageError(
            f"{program.name} is no module, so it has no class to unflatten onto",
            remedy="capture the module itself, or unflatten without onto",
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"onto must be a module, got {type(model).__name__}",
            remedy="pass the captured model, or another instance of its class",
        )
    return dict(modules_within(ROOT, seen_through(model)))


def _misfits(program: FlatProgram, given: Mapping[ModulePath, nn.Module]) -> Iterator[Fault]:
    remedy = "pass the captured model, or another instance of its class"
    for record in program.modules:
        module = given.get(record.path)
        where = Place(str(record.path))
        if module is None:
            yield Fault(f"the model has no module {str(record.path)!r}", where, remedy=remedy)
        elif (
            record.type not in (module._get_name(), type(module).__name__, _UNKNOWN) and not record.container
        ):
            what = f"{str(record.path) or 'the root'} was a {record.type}, and is a {type(module).__name__}"
            yield Fault(what, where, remedy=remedy)


def _empty_instances(given: Mapping[ModulePath, nn.Module]) -> tuple[dict[int, nn.Module], list[Fault]]:
    """An empty instance for every module, by the identity of the original."""
    made: dict[int, nn.Module] = {}
    faults: list[Fault] = []
    for path, module in given.items():
        if id(module) in made:
            continue
        kind = type(module)
        try:
            made[id(module)] = kind.__new__(kind)
        except TypeError as error:
            faults.append(
                Fault(
                    f"{kind.__name__} cannot be made without arguments: {error}",
                    Place(str(path)),
                    why="instances are made with `__new__` alone, for `__init__` could do anything",
                    remedy=f"give {kind.__name__}.__new__ defaults, or unflatten without onto",
                )
            )
    return made, faults


def _fill(new: nn.Module, module: nn.Module, made: Mapping[int, nn.Module]) -> None:
    """Attributes as the user's module has them; empty registers, no hooks."""
    usual = vars(nn.Module())
    attributes = {name: value for name, value in vars(module).items() if name not in usual}
    new.__dict__.update(usual)
    new.__dict__.update({name: _renewed(value, made) for name, value in attributes.items()})
    new.__dict__["_non_persistent_buffers_set"] = set(module._non_persistent_buffers_set)
    new.__dict__["training"] = module.training
    for register in _REGISTERS[:2]:
        new.__dict__[register].update(vars(module)[register])
    for name, child in module._modules.items():
        new._modules[name] = None if child is None else made[id(seen_through(child))]
    for name in _slots(type(module)):
        if hasattr(module, name):
            object.__setattr__(new, name, _renewed(getattr(module, name), made))
    if type(module).forward is not nn.Module.forward:
        new.__dict__["forward"] = MethodType(forward, new)
    new.__dict__["train"] = MethodType(train, new)
    new.__dict__[KEY] = CapturedInstance()


def _renewed(value: Any, made: Mapping[int, nn.Module]) -> Any:
    """An attribute with the new modules in the place of the user's."""
    if isinstance(value, nn.Module):
        return made.get(id(value), value)
    if isinstance(value, MethodType) and id(value.__self__) in made:
        return MethodType(value.__func__, made[id(value.__self__)])
    if type(value) in (list, tuple, set):
        items = [_renewed(item, made) for item in value]
        return type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if type(value) is dict:
        entries = {name: _renewed(item, made) for name, item in value.items()}
        return entries if any(entries[name] is not item for name, item in value.items()) else value
    return value


def _slots(kind: type) -> Iterator[str]:
    """Attributes that a class keeps outside the dictionary of its instances."""
    for base in kind.__mro__:
        declared = base.__dict__.get("__slots__", ())
        yield from (declared,) if isinstance(declared, str) else declared
