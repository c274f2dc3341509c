"""A forward Program becomes a torch.export.ExportedProgram: graph, signature and state in upstream's form."""

import linecache
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram, ExportGraphSignature, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ArgumentSpec,
    ConstantArgument,
    InputSpec,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.export.graph_signature import InputKind as ExportedInput
from torch.export.graph_signature import OutputKind as ExportedOutput
from torch.nn import Parameter

from whence._torch.export.programs import SpecViolationError, Verifier, in_a_mode_for_all
from whence._torch.files import TORCH
from whence._torch.graphs import name_exactly, nested_graph
from whence._torch.observe.scripted import object_among, takes_objects
from whence._torch.operators.schemas import OpOverload, acts, op_name, short_name
from whence._torch.pytrees import refuse_unmade, spelled, tree_flatten_with_path
from whence._torch.sizes.exported_sizes import is_number, like, ranges_of, say_where
from whence.errors import Fault, NotExportable
from whence.interop.graphs.frames import STACK
from whence.interop.out.decisions import asserted, decision_faults
from whence.program import FlatProgram, Input, Output
from whence.program.arguments.variants import alone
from whence.program.guards.expectations import ExpectedHolder
from whence.program.node_records import RECORD
from whence.program.queries.decisions import is_decision
from whence.program.state import with_state
from whence.provenance import Source
from whence.schema import GuardKind, InputKind, OutputKind

_INPUTS = {
    InputKind.PARAMETER: ExportedInput.PARAMETER,
    InputKind.BUFFER: ExportedInput.BUFFER,
    InputKind.CONSTANT: ExportedInput.CONSTANT_TENSOR,
    InputKind.USER: ExportedInput.USER_INPUT,
}
_WRITTEN = {
    InputKind.PARAMETER: ExportedOutput.PARAMETER_MUTATION,
    InputKind.BUFFER: ExportedOutput.BUFFER_MUTATION,
    InputKind.USER: ExportedOutput.USER_INPUT_MUTATION,
}
ROOT_KEY = "L__self__"


def to_exported_program(program: FlatProgram) -> ExportedProgram:
    """The exported program of a forward program; it shares the program's tensors.

    Raises `NotExportable` naming everything that an exported program cannot hold.
    """
    for spec in (program.convention.spec, program.result.spec):
        refuse_unmade(spec)
    NotExportable.refuse(_export_faults(program))
    if straight := program.facts.straight_through:
        warnings.warn(
            "an exported program has no way to say that a gradient passes an operation unchanged, as it does "
            f"for {', '.join(sorted(straight))}, written in place under no_grad: its outputs "
            f"are right, and its gradients there are not{_where_it_runs(program)}",
            stacklevel=3,
        )
    if opaque := dict.fromkeys(program.circumstances.opaque):
        warnings.warn(
            f"an exported program has no part of {', '.join(opaque)} in its backward: its outputs are "
            "right, and gradients that go through there are not",
            stacklevel=3,
        )
    if off := program.facts.turned_off:
        warnings.warn(
            f"an exported program of one graph runs {', '.join(sorted(off))}, which the model runs under "
            "no_grad, in the grad mode of its caller: last bits may differ where that is on",
            stacklevel=3,
        )
    for mode in program.circumstances.modes:
        if mode.source is None or not mode.source.file.startswith(TORCH):  # PyTorch's modules do the same
            warnings.warn(
                f"an exported program does not look at the {mode.name}, for which the model asks "
                f"({mode.source}): it does what the model does where that is {mode.value}",
                stacklevel=3,
            )
    if program.variants:
        warnings.warn(
            f"an exported program has one graph, without the {len(program.variants)} variant(s); each is a "
            "program of its own: program.variants[0].to_exported_program()",
            stacklevel=3,
        )
    program = with_state(alone(program), "inputs")
    say_where([row.value for row in program.signature.inputs], dict(_sources(program)))
    try:
        return _exported(program)
    except SpecViolationError as error:
        raise NotExportable(
            f"PyTorch takes the graph of {program.name} for no exported program: {error}",
            remedy="take apart what it names, program.decompose(); or call program.module()",
        ) from error


def _exported(program: FlatProgram) -> ExportedProgram:
    graph = _graph(program)
    return ExportedProgram(
        root=_nested(program),
        graph=graph,
        graph_signature=ExportGraphSignature(
            [_input_spec(row) for row in program.signature.inputs],
            [_output_spec(program, row) for row in _ordered(program)],
        ),
        state_dict=_named_tensors(program, persistent=True),
        range_constraints=ranges_of(
            [row.value for row in program.signature.inputs], program.convention.limits
        ),
        module_call_graph=_module_calls(program),
        example_inputs=_example(program),
        constants=_constants(program),
        verifiers=[Verifier],
    )


def _where_it_runs(program: FlatProgram) -> str:
    """PyTorch writes what is new after a run, and where gradients are on no parameter that may get one."""
    inputs = {row.name: row for row in program.signature.inputs_of(InputKind.PARAMETER)}
    rows = [inputs.get(row.of or "") for row in program.signature.outputs_of(OutputKind.MUTATION)]
    paths = [row.path for row in rows if row is not None and row.value.requires_grad]
    if not paths:
        return ""
    return f"; PyTorch writes {', '.join(paths)} when it has run, which it does under torch.no_grad() alone"


def _example(program: FlatProgram) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as at capture, with zeros in the tensors: AOTInductor reads sizes and layouts from them."""
    convention = program.convention
    return convention.unflatten([like(leaf) for leaf in convention.leaves])


def _export_faults(program: FlatProgram) -> Iterator[Fault]:
    if program.has_backward:
        yield Fault(
            f"the program {program.name} is joint: it holds a backward pass",
            why="an exported program is a forward; PyTorch itself cannot read a joint one back into modules",
            remedy="capture the forward alone, with backward=False",
        )
        return
    yield from _composed_faults(program)
    yield from _effects(program)
    yield from decision_faults(program)
    yield from _object_faults(program)
    by_name = {row.name: row for row in program.signature.inputs}
    for row in program.signature.outputs_of(OutputKind.MUTATION):
        changed = by_name.get(row.of or "")
        if changed is not None and changed.kind not in _WRITTEN:
            yield Fault(
                f"the program writes the constant {changed.path}",
                why="an exported program may write parameters, buffers and inputs alone",
                remedy="register the tensor as a buffer and capture again",
            )
    for first, second in program.convention.same:
        paths = program.convention.paths
        yield Fault(
            f"{paths[first]} and {paths[second]} are one tensor",
            why="an exported program takes two, and would not notice when they are",
            remedy="capture with two tensors, or pass the tensor once",
        )


def _composed_faults(program: FlatProgram) -> Iterator[Fault]:
    """Tensors that are made of others: an exported program has one name for each, and one tensor."""
    signature = program.signature
    parts = [row.part for row in (*signature.state, *signature.inputs)]
    parts += [row.part for row in signature.outputs]
    wholes = dict.fromkeys((part.whole, part.type) for part in parts if part is not None)
    if wholes:
        yield Fault(
            f"{', '.join(f'{path} is a {kind}' for path, kind in wholes)}",
            why="an exported program takes and keeps tensors as they are, this one what they are made of",
            remedy="make plain tensors of them before the capture, or run program.module() itself",
        )


def _effects(program: FlatProgram) -> Iterator[Fault]:
    """Operators that give nothing: PyTorch removes those that it does not know, when it makes a module."""
    acting = (node for node in program.nodes() if acts(node.target) and not is_decision(node))
    lost = [node for node in acting if not node.is_impure()]
    for name in dict.fromkeys(op_name(node.target) for node in lost):
        yield Fault(
            f"{name} gives no result",
            why="PyTorch removes it from the module that it makes of an exported program",
            remedy="tell it with torch.fx.node.has_side_effect(operator), or run program.module() itself",
        )


def _object_faults(program: FlatProgram) -> Iterator[Fault]:
    """Operations that are given objects, which an exported program has as inputs of a kind of their own."""
    for node in program.nodes():
        if isinstance(node.target, OpOverload) and not takes_objects(node.target):
            continue
        if (held := object_among([*node.args, *node.kwargs.values()])) is not None:
            yield Fault(
                f"{op_name(node.target)} is given a {type(held).__name__}",
                why="a program has the object in the operation, and an exported program among its state",
                remedy="run program.module() itself, or keep the exported program that it was read from",
            )


def _sources(program: FlatProgram) -> Iterator[tuple[str, str]]:
    """Where each size is read, as PyTorch spells it in the checks of an exported program."""
    sizes = program.convention.sizes
    if sizes is None:
        return
    args, kwargs = program.convention.unflatten(program.convention.leaves)
    given = {**dict(zip(_argument_names(program), args, strict=False)), **kwargs}
    paths = [path for path, _ in tree_flatten_with_path(given)[0]]
    for reading in sizes.readings:
        at = reading.dimension
        found = f"L{spelled(paths[at.position])}" + ("" if at.dim is None else f".size()[{at.dim}]")
        found = f"({found} - {reading.offset})" if reading.offset else found
        yield reading.name, f"({found} // {reading.scale})" if reading.scale != 1 else found


def _ordered(program: FlatProgram) -> list[Output]:
    """Outputs as torch.export orders them: new values of state and inputs first."""
    signature = program.signature
    return [*signature.outputs_of(OutputKind.MUTATION), *signature.outputs_of(OutputKind.USER)]


def _graph(program: FlatProgram) -> fx.Graph:
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    moved, classes = in_a_mode_for_all(), classes_of(program)
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if is_decision(node):
            for each in asserted(graph, node, made.__getitem__):
                each.meta |= {k: v for k, v in with_metadata(program, node, classes).items() if k != "val"}
            continue
        made[node] = graph.node_copy(node, lambda source: made[source])
        name_exactly(made[node], node.name)
        made[node].meta = with_metadata(program, node, classes)
        if "val" in node.meta:
            made[node].meta["val"] = moved(node.meta["val"])
    by_name = {node.name: copy for node, copy in made.items()}
    graph.output(tuple(row.value if row.node is None else by_name[row.node] for row in _ordered(program)))
    return graph


def _nested(program: FlatProgram) -> dict[str, Any]:
    """The graphs of branches and loops, by the name they are read under."""
    found = {str(node.target): nested_graph(node) for node in program.graph.nodes if node.op == "get_attr"}
    return {name: inner for name, inner in found.items() if inner is not None}


def _input_spec(row: Input) -> InputSpec:
    target = None if row.kind is InputKind.USER else row.path
    persistent = row.persistent if row.kind is InputKind.BUFFER else None
    return InputSpec(_INPUTS[row.kind], _argument_specification(row.name, row.value), target, persistent)


def _output_spec(program: FlatProgram, row: Output) -> OutputSpec:
    value = row.value if row.node is None else program.node(row.node).meta["val"]
    argument = _argument_specification(row.node or "", value)
    if row.kind is OutputKind.USER:
        return OutputSpec(ExportedOutput.USER_OUTPUT, argument, None)
    changed = program.input(row.of or "")
    target = changed.name if changed.kind is InputKind.USER else changed.path
    return OutputSpec(_WRITTEN[changed.kind], argument, target)


def _argument_specification(name: str, value: Any) -> ArgumentSpec:
    if isinstance(value, Tensor):
        return TensorArgument(name)
    return SymIntArgument(name) if is_number(value) else ConstantArgument(name, value)


def _constants(program: FlatProgram) -> dict[str, Any]:
    """Tensors that no state dict has; PyTorch finds a parameter among them nowhere, and detaches it."""
    named = _named_tensors(program, persistent=False)
    return {name: held.detach() if isinstance(held, Parameter) else held for name, held in named.items()}


def _named_tensors(program: FlatProgram, *, persistent: bool) -> dict[str, Any]:
    """Tensors by all their names: what a state dict has, or the rest, in the order of the modules."""
    found: dict[str, Tensor] = {}
    for record in program.modules:
        own = [(name, held) for name, held in record.parameters if persistent]
        own += [(name, held) for name, held, lasting in record.buffers if lasting is persistent]
        own += [] if persistent else list(record.tensors)
        found |= {
            str(record.path.child(name)): program.state[held]
            for name, held in own
            if held is not None and held in program.state
        }
    return found | _unowned(program, found, persistent=persistent)


def _unowned(program: FlatProgram, known: Mapping[str, Tensor], *, persistent: bool) -> dict[str, Tensor]:
    rows = [row for row in program.signature.state if row.path not in known]
    return {
        row.path: program.state[row.name]
        for row in rows
        if (row.kind is InputKind.PARAMETER or (row.kind is InputKind.BUFFER and row.persistent))
        is persistent
    }


def _module_calls(program: FlatProgram) -> list[ModuleCallEntry]:
    """An entry for every module, in the model's order; the root's says how it is called."""
    parameters = program.convention.parameters
    names = None if parameters is None else _argument_names(program)
    signature = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=program.convention.spec,
        out_spec=program.out_spec,
        forward_arg_names=names,
    )
    others = [str(record.path) for record in program.modules if record.path]
    return [ModuleCallEntry("", signature), *(ModuleCallEntry(name, None) for name in others)]


def _argument_names(program: FlatProgram) -> list[str]:
    """The names of positional and keyword arguments as the example gave them."""
    args, kwargs = program.convention.unflatten(program.convention.leaves)
    names = list(program.convention.parameters.parameters) if program.convention.parameters else []
    return [*(names[at] if at < len(names) else f"args_{at}" for at in range(len(args))), *kwargs]


def classes_of(program: FlatProgram) -> dict[str, str]:
    """The full names of the classes of modules by path, as guards know them or the exporter said them."""
    guarded = {}
    for row in program.guards:
        if isinstance(row.expected, ExpectedHolder) and row.kind in (GuardKind.CLASS, GuardKind.SUBMODULE):
            path, kind = row.what if row.kind is GuardKind.SUBMODULE else "", row.expected.type
            guarded[path] = f"{kind.__module__}.{kind.__qualname__}"
    stacks = (node.meta.get(STACK) or {} for node in program.graph.nodes)
    return guarded | {str(path): str(kind) for stack in stacks for path, kind, *_ in stack.values()}


def with_metadata(program: FlatProgram, node: fx.Node, classes: Mapping[str, str]) -> dict[str, Any]:
    """The metadata of a node with its origin as torch.export writes it, in place of ours."""
    meta = {key: value for key, value in node.meta.items() if key not in (RECORD, STACK, "stack_trace")}
    if nested_graph(node) is not None:
        user = next(iter(node.users))
        return meta | {STACK: with_metadata(program, user, classes)[STACK]}
    if node.op != "call_function":
        return meta
    origin = program.where(node)
    rows = [row for row in reversed(program.calls.chain(program.call_of(node))) if row.site.path]
    stack = {ROOT_KEY: ("", classes.get("", program.calls.program.site.type))}
    for row in rows:
        path = str(row.site.path)
        stack[f"{ROOT_KEY}{row.site}"] = (path, classes.get(path, row.site.type))
    meta[STACK] = stack
    meta.setdefault("torch_fn", (f"{short_name(node.target)}_1", f"OpOverload.{op_name(node.target)}"))
    trace = node.meta.get("stack_trace") or (origin.source and _trace(origin.source))
    return meta | ({"stack_trace": trace} if trace else {})


def _trace(source: Source) -> str:
    text = linecache.getline(source.file, source.line).strip()
    function = source.function.rpartition(".")[2]
    return f'File "{source.file}", line {source.line}, in {function}\n    {text}'
