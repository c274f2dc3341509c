"""Capture through PyTorch's bytecode front end, which reads a model's code where tracing runs it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from whence import hierarchy, tracing
from whence._torch.export.front_end import kept_by_nobody
from whence._torch.sizes.exported_sizes import Limits, is_number, multiple_of
from whence.errors import NotCallable, NotDifferentiable, Noting, Place
from whence.interop.exported.read import from_exported_program
from whence.program import FlatProgram, ModuleRecord
from whence.program.queries.selecting import preserved_calls
from whence.tracing.target.example import example_of
from whence.tracing.target.subject import module_records, subject_of

_FUNCTION = "autograd.function"
"""What the front end notes on operations in the forward of a custom autograd function."""


def strict_program(
    model: Callable[..., Any], given: tracing.Given, backward: bool | Callable[[Any], Tensor]
) -> FlatProgram:
    """The program of what `torch.export.export(strict=True)` reads; it shares the model's tensors.

    A joint program is traced from the modules of the forward one. Raises `NotCallable` for what is no module,
    and `SelectionError` for a pattern that fits no called one; what the front end raises stays its own, with
    a note.
    """
    if not isinstance(model, nn.Module):
        raise NotCallable(
            f"strict=True takes a module, not a {type(model).__name__}",
            where=Place(getattr(model, "__qualname__", "")),
            why="it goes through torch.export.export(strict=True), which exports modules",
            remedy="wrap it in a module whose forward calls it, or capture it with strict=False",
        )
    forward = _forward_export(model, given)
    if not backward:
        return forward
    if opaque := forward.circumstances.opaque:
        raise NotDifferentiable(
            f"{type(model).__name__} runs {', '.join(opaque)}, whose backward is not captured",
            why="with strict=True torch.export reads its forward alone, without gradients",
            remedy="capture with strict=False, which runs its backward, too",
        )
    tree = hierarchy.unflatten(forward)
    joint, _ = tracing.capture(tree, given, backward)
    return joint


def _forward_export(model: nn.Module, given: tracing.Given) -> FlatProgram:
    program = _program_of_strict_export(model, given, ())
    if not given.preserve:
        return program
    numbers = preserved_calls(program.calls, given.preserve, 0)
    paths = dict.fromkeys(str(program.calls.rows[number].site.path) for number in sorted(numbers))
    return _program_of_strict_export(model, given, tuple(paths))


def _program_of_strict_export(
    model: nn.Module, given: tracing.Given, preserved: tuple[str, ...]
) -> FlatProgram:
    note = (
        f"whence was capturing {type(model).__name__} with strict=True, through torch.export; "
        "strict=False runs the model instead of reading its code"
    )
    with Noting(note), kept_by_nobody(model):
        exported = torch.export.export(
            model,
            given.args,
            given.kwargs,
            dynamic_shapes=given.dynamic_shapes,
            strict=True,
            preserve_module_call_signature=preserved,
        )
    program = from_exported_program(exported, dict(model.named_buffers(remove_duplicate=False)))
    convention = replace(program.convention, limits=_declared_limits(model, given, program))
    return program.with_changes(modules=tuple(_as_in_model(model, program)), convention=convention).under(
        opaque=_custom_functions_in(exported)
    )


def _custom_functions_in(exported: ExportedProgram) -> tuple[str, ...]:
    """What stands for the custom autograd functions that the front end has read, in words."""
    modules = (module for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule))
    nodes = (node for module in modules for node in module.graph.nodes)
    read = any(name == _FUNCTION for node in nodes for name, _ in node.meta.get("source_fn_stack", ()))
    return ("a custom autograd function",) if read else ()


def _declared_limits(model: nn.Module, given: tracing.Given, program: FlatProgram) -> dict[str, Limits]:
    """The limits of sizes, with those below which PyTorch checks nothing where somebody wrote them."""
    limits, dynamic = dict(program.convention.limits), example_of(subject_of(model), given).dynamic
    for at, wish in {} if dynamic is None else dynamic.wishes.items():
        leaf = program.convention.leaves[program.convention.paths.index(at.path)]
        size = leaf if at.dim is None else leaf.shape[at.dim]
        found = multiple_of(size) if is_number(size) else None
        if found is not None and wish.low and (found.scale, found.offset) == (wish.scale, wish.offset):
            low, high = limits.get(found.symbol, (None, None))
            limits[found.symbol] = max(low or 0, wish.low), high
    return limits


def _as_in_model(model: nn.Module, program: FlatProgram) -> Iterator[ModuleRecord]:
    """The hierarchy of the model, with what the export found besides: constants, and modules in variables."""
    names = {id(tensor): name for name, tensor in program.state.items()}
    found = {record.path: record for record in program.modules}
    for record in module_records(subject_of(model), names):
        exported = found.pop(record.path, record)
        yield replace(
            record,
            tensors=tuple(dict.fromkeys((*record.tensors, *exported.tensors))),
            children=tuple(dict.fromkeys((*record.children, *exported.children))),
        )
    yield from found.values()
