"""What stands against reading an exported program, all of it at once, before anything is done."""

from collections.abc import Iterator

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from whence._torch.graphs import nested_graph
from whence._torch.operators.schemas import op_name, written_nodes
from whence.errors import Fault, UnsupportedGraph
from whence.interop.graphs.aliases import looked_into
from whence.interop.graphs.faults import place_of, refusal
from whence.interop.graphs.inline import WRAPPERS

_TRAINING = (OutputKind.LOSS_OUTPUT, OutputKind.GRADIENT_TO_PARAMETER, OutputKind.GRADIENT_TO_USER_INPUT)


def refuse_unsupported(exported: object) -> ExportedProgram:
    """The exported program; raises `UnsupportedGraph` naming all that a program cannot hold of it."""
    if not isinstance(exported, ExportedProgram):
        raise UnsupportedGraph(
            f"expected a torch.export.ExportedProgram, got {type(exported).__name__}",
            remedy="pass what torch.export.export or torch.export.load returns",
        )
    faults = [*_joint(exported), *_inputs(exported), *_placeholders(exported), *_missing_state(exported)]
    faults += _in_parts(exported)
    faults += nested_writes(exported.graph_module)
    if faults:
        specs = exported.graph_signature.input_specs
        raise refusal(
            exported.graph, faults, {str(spec.target): spec.arg.name for spec in specs if spec.target}
        )
    return exported


def _joint(exported: ExportedProgram) -> Iterator[Fault]:
    kinds = {spec.kind for spec in exported.graph_signature.output_specs}
    if exported.graph_signature.backward_signature is not None or kinds.intersection(_TRAINING):
        yield Fault(
            "the exported program is joint: it holds a backward pass",
            why="torch.export does not say which module call made which operation of the backward",
            remedy="capture the model with whence.capture(model, args, backward=loss), which does",
        )


def _in_parts(exported: ExportedProgram) -> Iterator[Fault]:
    """A decomposition takes tensors that are made of others apart, and does not say which parts belong
    together."""
    signature, spec = exported.graph_signature, exported.call_spec
    sides = (
        ("takes", spec.in_spec, sum(row.kind is InputKind.USER_INPUT for row in signature.input_specs)),
        ("returns", spec.out_spec, sum(row.kind is OutputKind.USER_OUTPUT for row in signature.output_specs)),
    )
    for verb, structure, count in sides:
        if structure is not None and structure.num_leaves < count:
            yield Fault(
                f"the graph {verb} {count} values, and the model {structure.num_leaves}",
                why="a tensor that is made of others was taken apart by run_decompositions",
                remedy="unflatten it before run_decompositions, or whence.capture the model, which puts such "
                "tensors together again",
            )


def _inputs(exported: ExportedProgram) -> Iterator[Fault]:
    for spec in exported.graph_signature.input_specs:
        if spec.kind is InputKind.CUSTOM_OBJ and spec.target not in exported.constants:
            yield Fault(
                f"{spec.target} is a script object that the exported program does not hold",
                remedy="give the exported program its constants back before reading it",
            )


def _placeholders(exported: ExportedProgram) -> Iterator[Fault]:
    found = [node.name for node in exported.graph.nodes if node.op == "placeholder"]
    told = [spec.arg.name for spec in exported.graph_signature.input_specs]
    if found != told:
        differing = sorted({*found} ^ {*told}) or ["their order"]
        yield Fault(
            f"the signature and the placeholders differ: {', '.join(differing)}",
            why="a pass changed one and not the other",
            remedy="change both in the pass, or export the model again",
        )


def _missing_state(exported: ExportedProgram) -> Iterator[Fault]:
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    for spec in exported.graph_signature.input_specs:
        held = exported.state_dict.get(spec.target, exported.constants.get(spec.target))
        if spec.kind in kinds and not isinstance(held, Tensor):
            yield Fault(
                f"{spec.target} is in the signature and not in the state of the exported program",
                remedy="give the exported program its state back before reading it",
            )


def nested_writes(module: fx.GraphModule) -> Iterator[Fault]:
    """Writes in a branch or loop to what it takes from outside."""
    for node in module.graph.nodes:
        inner = nested_graph(node)
        if inner is not None:
            if not all(op_name(user.target) in WRAPPERS for user in node.users):
                yield from _writes_outside(inner)
            yield from nested_writes(inner)


def _writes_outside(module: fx.GraphModule) -> Iterator[Fault]:
    outside = {node for node in module.graph.nodes if node.op == "placeholder"}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if not outside.isdisjoint(written_nodes(node)):
            yield Fault(
                f"{op_name(node.target)} writes to a value from outside its branch or loop",
                where=place_of(node),
                why="in a program nothing changes its inputs, and the graph of a branch stays as it is",
                remedy="return the new value from the branch, and write it outside",
            )
        if not outside.isdisjoint(looked_into(node)):
            outside.add(node)
