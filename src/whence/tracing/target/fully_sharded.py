"""Models whose parameters FSDP manages: what of them cannot be captured, and whose state a program holds."""

import functools
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from whence._torch.subclasses.fully_sharded import (
    besides_gathering,
    can_be_put_aside,
    is_part_of_a_group,
    is_sharded,
    name_of_class,
    processes_sharing,
    sharded_separately,
)
from whence.errors import Fault, Place, UnsupportedModule, UnsupportedMutation
from whence.program import FlatProgram
from whence.provenance import ModulePath
from whence.schema import OutputKind
from whence.tracing.target.subject import Subject

_CALL = nn.Module.__call__
_BEFORE = "capture the model before fully_shard: module paths and names of parameters are the same"


def refuse_sharding(subject: Subject, *, differentiates: bool) -> None:
    """Raise `UnsupportedModule` that names everything FSDP does to the model that a program does not."""
    if not any(is_sharded(module) or is_part_of_a_group(module) for _, module in subject.named_modules()):
        return
    UnsupportedModule.refuse(
        [
            *_method(subject),
            *_sharding_faults(subject),
            *_separately_sharded(subject),
            *(_averaging(subject) if differentiates else ()),
        ]
    )


def _method(subject: Subject) -> Iterator[Fault]:
    """A method captured by itself runs without the hooks around a call."""
    call = subject.call
    while isinstance(call, functools.partial):
        call = call.func
    owner = getattr(call, "__self__", None)
    if isinstance(owner, nn.Module) and is_sharded(owner) and getattr(call, "__func__", None) is not _CALL:
        yield Fault(
            f"{subject.name} is a method of a module that FSDP manages",
            why="FSDP gathers parameters when the module is called, and in no method that it was not told of",
            remedy="capture the module, or a function that calls the method if it was given to "
            "register_fsdp_forward_method",
        )


def _sharding_faults(subject: Subject) -> Iterator[Fault]:
    covered: set[int] = set()
    told: set[int] = set()
    for path, module in subject.named_modules():
        if is_sharded(module):
            covered |= {id(inner) for inner in module.modules()}
        if id(module) not in told and (fault := _module_fault(path, module, id(module) in covered)):
            told.add(id(module))
            yield fault


def _module_fault(path: ModulePath, module: nn.Module, covered: bool) -> Fault | None:
    if can_be_put_aside(module):
        words = besides_gathering(module)
        return _more_than_gathering(path, module, words) if words else None
    if is_sharded(module):
        return Fault(
            f"FSDP manages {_sharded_module_in_words(path, module)}",
            why="only what fully_shard makes of a module can be seen through, not what wraps it or is made "
            "of it later",
            remedy=_BEFORE,
        )
    if is_part_of_a_group(module) and not covered and module._parameters:
        return Fault(
            f"FSDP manages {_sharded_module_in_words(path, module)} for a module above it",
            why="the parameters are gathered in the call of that module, and this one is captured without it",
            remedy="capture the module that fully_shard was called on, and select the part you need",
        )
    return None


def _more_than_gathering(path: ModulePath, module: nn.Module, words: list[str]) -> Fault:
    where = _sharded_module_in_words(path, module)
    return Fault(
        f"FSDP does more than gather parameters in {where}: it {', '.join(words)}",
        why="a program has the parameters as the model holds them, and what the hooks of FSDP make of them "
        "or of their gradients is no part of it",
        remedy=f"call fully_shard without this policy, or {_BEFORE}",
    )


def _separately_sharded(subject: Subject) -> Iterator[Fault]:
    names = sharded_separately(module for _, module in subject.named_modules())
    if names:
        yield Fault(
            f"FSDP sharded tied parameters apart: {', '.join(names)}",
            why="each became a parameter of its own, and FSDP itself refuses to run the model",
            remedy="shard the modules that share a parameter in one call: fully_shard([first, second])",
        )


def _averaging(subject: Subject) -> list[Fault]:
    modules = {id(module): (path, module) for path, module in reversed([*subject.named_modules()])}
    counted = [(path, module, processes_sharing(module)) for path, module in reversed(modules.values())]
    spelled = [
        f"{_sharded_module_in_words(path, module)} over {n} processes" for path, module, n in counted if n > 1
    ]
    if not spelled:
        return []
    return [
        Fault(
            f"gradients are averaged by FSDP in {', '.join(spelled)}",
            why="the program is the computation of one process, and the gradients of its backward are not "
            "averaged",
            remedy="capture the forward, or capture the model before fully_shard and average the gradients "
            "that its program returns",
        )
    ]


def _sharded_module_in_words(path: ModulePath, module: nn.Module) -> str:
    return f"{path or '(root)'} ({name_of_class(module)})"


def with_shards(program: FlatProgram, subject: Subject, sharded: Mapping[int, Tensor]) -> FlatProgram:
    """The program with the sharded parameters as its state; raises `UnsupportedMutation` for writes to them.

    Where several processes share them, its outputs cannot be differentiated: nothing averages the gradients.
    """
    if not sharded:
        return program
    managed = {name for name, tensor in program.state.items() if id(tensor) in sharded}
    _refuse_writes(program, managed)
    state = {name: sharded.get(id(tensor), tensor) for name, tensor in program.state.items()}
    count = max(processes_sharing(module) for _, module in subject.named_modules())
    averaged = (f"FSDP's averaging of gradients over {count} processes",) if count > 1 else ()
    return program.with_changes(state=state).under(opaque=(*program.circumstances.opaque, *averaged))


def _refuse_writes(program: FlatProgram, managed: set[str]) -> None:
    rows = [row for row in program.signature.outputs_of(OutputKind.MUTATION) if row.of in managed]
    if rows:
        raise UnsupportedMutation(
            f"the model writes {', '.join(row.path for row in rows)}, which FSDP manages",
            where=Place(str(ModulePath.parse(rows[0].path).parent)),
            why="in eager the write reaches the gathered copy, which FSDP frees, and in a program the shard",
            remedy="make them buffers, or pass them to fully_shard as ignored_params",
        )
