"""What `import whence` gives: a facade without logic. Each call leads to the room that does the work."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.export import ExportedProgram, FlatArgsAdapter

from whence import hierarchy, interop
from whence._torch.record.annotations import region
from whence.captured import Program, capture, capture_step, full, loaded
from whence.errors import (
    CallError,
    CaptureError,
    DataDependent,
    FailedOperation,
    InputMismatch,
    InvalidLoss,
    InvalidShapes,
    LostProvenance,
    LostState,
    MalformedProgram,
    NestedCapture,
    NotCallable,
    NotDifferentiable,
    NotExportable,
    NotKept,
    NotStorable,
    SelectionError,
    SideEffect,
    SpecialisedShapes,
    StaleCapture,
    ToldCompiled,
    UnmatchedRecomputation,
    UnreadableFile,
    UnsupportedGenerator,
    UnsupportedGraph,
    UnsupportedHook,
    UnsupportedInput,
    UnsupportedModule,
    UnsupportedMutation,
    UnsupportedOperator,
    UnsupportedRelease,
    UnsupportedStep,
    UntriedRelease,
    UsageError,
    WhenceError,
)
from whence.execution.bound import Bound
from whence.execution.values.culprit import Culprit, culprit
from whence.execution.values.step_inputs import given_to
from whence.execution.values.walk import Given
from whence.execution.verify import Verification
from whence.guards import Guarded
from whence.hierarchy import Tree
from whence.program import Call, Calls, Convention, FlatProgram, Input, Layers, Output, Part, Signature
from whence.program.guards.guards import Guards
from whence.program.guards.rows import Guard, Violation
from whence.provenance import CallSite, ModulePath, Origin, Source
from whence.reports.cost import Cost
from whence.reports.memory import Memory
from whence.reports.report import Report
from whence.rewriting import Edit, GraphPass, Pass
from whence.schema import GuardKind, InputKind, OnViolation, OutputKind, Phase, Quality, Strictness
from whence.tracing.target.caches import register_caches

M = TypeVar("M", bound=nn.Module)


def from_exported_program(exported: ExportedProgram) -> Program:
    """The program of a `torch.export.ExportedProgram`: strict or not, decomposed or not, loaded or new.

    Signature, origins, calls, modules and state are those of the exported program, in the spelling of whence;
    it shares the exported program's tensors. Regions without gradients, of autocast and of checkpoints are
    part of the one graph, casts included, and writes are outputs. An operation about which the export says
    nothing is given to the innermost call around all that use it, and its quality is `inferred`. What was
    assumed by the export is not known here: `guards` is empty, and a call is checked against the inputs
    alone.

    Raises `UnsupportedGraph` naming all that a program cannot hold, and `UnsupportedMutation` for writes that
    have no functional form.
    """
    return full(interop.from_exported_program(exported))


def attach(
    graph: object,
    *,
    model: Callable[..., Any],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    inputs: Sequence[str] | None = None,
    outputs: Sequence[str | None] | None = None,
    state_first: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
) -> Program:
    """The program of a graph that others made.

    That is a `torch.fx.GraphModule` of `make_fx`, of Dynamo or of a traced training step, or what AOT
    autograd gives, a `JointWithDescriptors`. The program shares the tensors of `model`; the graph is copied,
    and torch functions in it become operators.

    What each input is follows from `inputs`, one word each (a qualified name for state, any other name for an
    argument); or else from descriptors and Dynamo's names in the graph; from `args` and `kwargs`, with which
    the graph was traced, and in which the model's own tensors are state; or with `state_first` from the
    order: parameters, then buffers, then arguments. `outputs` says what is returned, one word each: `"loss"`,
    `"gradient of NAME"`, `"new NAME"`, any other word or None for a result, None also for what the graph
    returns as None; `"gradients"`, `"new parameters"` and
    `"new buffers"` stand for one each, in the model's order. The program is called with what is not state.
    `loss` is the function behind a loss, for `verify`.

    Origins follow from the graph's metadata: modules that were noted while it was traced are `exact`, those
    of a backward and of annotations `inferred`; where it says nothing, `none`, at the root.
    Raises `UnsupportedGraph` naming every input and output that is not known or does not fit the model.
    """
    words = interop.GraphWords(args, kwargs, inputs, outputs, state_first)
    return full(interop.attach(graph, model, words)).under(loss_function=loss)


def cached(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    directory: str | Path,
    **options: Any,
) -> Program:
    """What `capture` gives, kept in `directory` between processes and taken from there while it still holds.

    `options` are those of `capture`. A kept program is used where the class of the model, the arguments, the
    options and the releases of Python, PyTorch and whence are the same; where `program.check` finds nothing,
    with the live model and these arguments; and where no file of code was changed that the capture could have
    run, which are those that its origins and guards name and all that is imported there. Otherwise the model
    is captured, and that is kept, without weights: a kept program has the tensors of the live model.

    Warns (`NotKept`) where a program cannot be kept, and why: it holds what no file can (`NotStorable`), its
    code has no file, or guards compare objects that have no name; and where another process finds it only
    with a module loaded that the model itself imports. Raises what `capture` raises, and `UsageError` for
    options under which nobody could say whether a program still holds.
    """
    given = kwargs or {}
    if faults := list(interop.cache_faults(options)):
        raise UsageError("these captures cannot be kept", why="; ".join(faults), remedy="use whence.capture")
    cache = interop.Cache(Path(directory), interop.key_of(model, args, given, options))
    asked = {"dynamic_shapes": options.get("dynamic_shapes"), "loss_function": _loss_in(options)}

    def broken(program: FlatProgram) -> list[Violation]:
        whole = full(program)
        return whole.check(model, args, given) or (whole.check(model) if whole.variants else [])

    found = cache.found(model, broken)
    if found is not None:
        return full(found).under(**asked)
    loaded = frozenset(sys.modules)
    program = capture(model, args, kwargs, **options)
    for why in cache.keep(program, model, broken) or interop.late_modules(program, loaded):
        warnings.warn(f"the program of {program.name} is {why}", NotKept, stacklevel=2)
    return program


def _loss_in(options: Mapping[str, Any]) -> Callable[[Any], Tensor] | None:
    loss = options.get("backward", False)
    return None if isinstance(loss, bool) else loss


def load(
    path: str | Path,
    *,
    model: Callable[..., Any] | None = None,
    loss_function: Callable[[Any], Tensor] | None = None,
) -> Program:
    """The program that `program.save` wrote to a file.

    Nothing in the file runs and nothing is imported: classes and functions of the model stay names, and
    operators are those that are registered in this process. A live `model` gives the program its own tensors
    by their qualified names, shared as by `capture`: what was saved without weights needs one. Guards can be
    checked only then, too, for they speak of what is loaded. The `loss_function` of a joint program is a name
    in its file as well: given beside the model, the program has it and its tensors, and what it closes over
    is compared.

    Raises `UnreadableFile` for anything else than a saved program, naming every operator and every class of
    containers that this process does not have; and `StaleCapture` naming every tensor that does not fit.
    """
    if loss_function is not None and model is None:
        raise UsageError("load takes a loss_function beside a model", remedy="pass model=..., too")
    return loaded(interop.content_of(path), str(path), model, loss=loss_function)


def beside(
    path: str | Path, model: Callable[..., Any], loss_function: Callable[[Any], Tensor] | None = None
) -> Program:
    """The program of a file, to be checked on a model and a loss: its guards speak of these, and its tensors
    are its own.

    Raises what `load` raises, but for tensors that do not fit: those are guards that do not hold.
    """
    return loaded(interop.content_of(path), str(path), model, loss=loss_function, binds=False)


def bisect(
    program: Program,
    passes: Sequence[Pass | GraphPass],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    check: Callable[[Program], object] | None = None,
    inputs: Mapping[str, Any] | None = None,
    optimizer: object = None,
) -> Culprit | None:
    """Which of these passes makes `program` compute something else; None where all together keep every bit.

    They are applied in order, as `program.apply` does, and the programs in between are run on these arguments
    from one random state: outputs, gradients and new state are compared bit for bit. So many programs are run
    as halving takes, and the pass that is named is one before which all was well, and after which it was not.
    `check` takes the place of the comparison: a function of a program that is true where it is as it should
    be. `inputs` and `optimizer` are those of `program.run`.

    Raises what a pass and what `program.run` raise, and `UsageError` where `check` fails before any pass.
    """
    given: Given = (args, kwargs, inputs or {})
    if optimizer is not None:
        _, given = given_to(program, *given, optimizer)
    return culprit(program, passes, given, check)


def unflatten(
    program: FlatProgram | ExportedProgram,
    flat_args_adapter: FlatArgsAdapter | None = None,
    *,
    copy: bool = False,
) -> Tree:
    """The tree of modules of a program (see `Program.unflatten`), or of a `torch.export.ExportedProgram`.

    For an exported program it stands in for `torch.export.unflatten`: the same calling convention, state,
    names and order of modules, and a copy of the state. `flat_args_adapter` is asked where the tree is called
    with another structure of arguments. Raises what `from_exported_program` raises.
    """
    if isinstance(program, FlatProgram):
        return hierarchy.unflatten(interop.adapted(program, flat_args_adapter), copy=copy)
    read = full(interop.from_exported_program(program))
    return hierarchy.unflatten(interop.adapted(read, flat_args_adapter), copy=True)


__all__ = [
    "Bound",
    "Call",
    "CallError",
    "CallSite",
    "Calls",
    "CaptureError",
    "Convention",
    "Cost",
    "DataDependent",
    "Edit",
    "FailedOperation",
    "Guard",
    "GuardKind",
    "Guarded",
    "Guards",
    "Input",
    "InputKind",
    "InputMismatch",
    "InvalidLoss",
    "InvalidShapes",
    "Layers",
    "LostProvenance",
    "LostState",
    "MalformedProgram",
    "Memory",
    "ModulePath",
    "NestedCapture",
    "NotCallable",
    "NotDifferentiable",
    "NotExportable",
    "NotKept",
    "NotStorable",
    "OnViolation",
    "Origin",
    "Output",
    "OutputKind",
    "Part",
    "Phase",
    "Program",
    "Quality",
    "Report",
    "SelectionError",
    "SideEffect",
    "Signature",
    "Source",
    "SpecialisedShapes",
    "StaleCapture",
    "Strictness",
    "ToldCompiled",
    "Tree",
    "UnmatchedRecomputation",
    "UnreadableFile",
    "UnsupportedGenerator",
    "UnsupportedGraph",
    "UnsupportedHook",
    "UnsupportedInput",
    "UnsupportedModule",
    "UnsupportedMutation",
    "UnsupportedOperator",
    "UnsupportedRelease",
    "UnsupportedStep",
    "UntriedRelease",
    "UsageError",
    "Verification",
    "Violation",
    "WhenceError",
    "attach",
    "bisect",
    "cached",
    "capture",
    "capture_step",
    "from_exported_program",
    "load",
    "region",
    "register_caches",
    "unflatten",
]
