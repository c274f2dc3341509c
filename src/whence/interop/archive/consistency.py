"""What the parts of a program that was read must keep to, so that each finds what it names in the others."""

import re
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Tensor, fx, nn

from whence._torch.graphs import nested_graph
from whence._torch.operators.schemas import may_give, op_name
from whence._torch.pytrees import TreeSpec, tree_unflatten, unmade_in
from whence._torch.sizes.symbols import has_open_sizes, spelled
from whence._torch.tensor_questions import is_question
from whence.interop.archive.records.checked import Unreadable
from whence.interop.archive.results import sizes_in_example
from whence.program import Calls, Convention, FlatProgram, Named, Structure
from whence.program.arguments.containers import containers_in, containers_of
from whence.program.arguments.open_sizes import Sizes
from whence.program.guards.expectations import Expectation, inside_of
from whence.program.guards.guards import Guards
from whence.program.node_records import origin_of, record_of
from whence.program.signature import Input, describe
from whence.program.wellformed import faults
from whence.provenance import ROOT
from whence.schema import GuardKind, InputKind, OutputKind, Phase

_NAME = re.compile(r"[^\W\d]\w*")


def refuse_inconsistent(program: FlatProgram, *, is_complete: bool) -> None:
    """Raise `Unreadable` for the first thing that is named and is not there, or is there twice.

    Parameters and buffers may be left out unless the file says that it `is_complete`.
    """
    for what in (*_faults_found(program), *_of_state(program, is_complete=is_complete)):
        raise Unreadable(what)


def _of_state(program: FlatProgram, *, is_complete: bool) -> Iterator[str]:
    for row in program.signature.state:
        held = program.state.get(row.name)
        if held is None and (is_complete or row.kind is InputKind.CONSTANT):
            yield f"the numbers of {row.path} are missing"
        elif held is not None and (held.shape, held.dtype) != (row.value.shape, row.value.dtype):
            yield f"{row.path} has another shape than its numbers"
        elif held is not None and not _is_of_its_kind(row, held):
            yield f"{row.path} is a parameter, and its numbers are of none"


def _is_of_its_kind(row: Input, held: Tensor) -> bool:
    """Whether a parameter is one; what a parameter is made of need not be."""
    return row.kind is not InputKind.PARAMETER or row.part is not None or isinstance(held, nn.Parameter)


def _faults_found(program: FlatProgram) -> Iterator[str]:
    nodes = {node.name for node in program.graph.nodes}
    yield from _of_calls(program.calls, nodes)
    yield from _of_structure(program.result, nodes, "the result")
    yield from _of_convention(program)
    yield from _of_records(program, nodes)
    yield from _of_signature(program, nodes)
    yield from _of_outputs(program)
    yield from _of_kinds(program)
    yield from _of_values(program)
    yield from _of_branches(program)
    yield from _of_modules(program)
    yield from _of_guards(program.guards, program.convention)
    yield from (fault.what for fault in faults(program, without_state=True))


def _of_calls(calls: Calls, nodes: Set[str]) -> Iterator[str]:
    rows = calls.rows
    if not rows or rows[0].parent != 0 or rows[0].site.path:
        yield "there is no call of the program"
        return
    if [row.number for row in rows] != list(range(len(rows))):
        yield "calls are not numbered in order"
    if not all(0 <= row.parent < row.number for row in rows[1:]):
        yield "a call is made by one that comes after it"
    elif any(number not in calls.within(row.parent) for number, row in enumerate(rows)):
        yield "calls are not nested"
    if len({(row.site.path, row.site.index) for row in rows[1:]}) < len(rows) - 1:
        yield "two calls are one"
    if not {calls.entry, *calls.preserved} <= set(range(len(rows))):
        yield "a call is named that was not made"
    elif rows[calls.entry].site.path:
        yield "the program is entered in the middle"
    elif not calls.preserved.isdisjoint({0, calls.entry}):
        yield "the program itself is called as it was"
    for row in rows:
        for structure in (row.inputs, row.outputs):
            if structure is not None:
                yield from _of_structure(structure, nodes, f"the call {row.label}")


def _of_structure(structure: Structure, nodes: Set[str], where: str) -> Iterator[str]:
    if structure.spec.num_leaves != len(structure.leaves):
        yield f"{where} has another number of leaves than its structure"
    for leaf in structure.leaves:
        if isinstance(leaf, Named) and leaf.name not in nodes:
            yield f"{where} names {leaf.name}, which does not exist"


def _of_convention(program: FlatProgram) -> Iterator[str]:
    convention, count = program.convention, len(program.convention.leaves)
    spec = convention.spec
    if spec.num_leaves != count or len(convention.paths) != count:
        yield "the arguments have another number of leaves than their structure"
    if spec.type is not tuple or [child.type for child in spec.children()] != [tuple, dict]:
        yield "the arguments are no tuple and dictionary"
    if not all(0 <= at < count for pair in convention.same for at in pair):
        yield "an argument is named that is not there"
    if [row.path for row in program.signature.inputs_of(InputKind.USER)] != list(convention.paths):
        yield "the arguments are not the inputs of the program"
    if convention.returned and not _are_there(convention.returned, spec, program.result.spec):
        yield "a container is named that is not there"
    if not all(is_question(row.question) and 0 <= row.position < count for row in convention.questions):
        yield "an argument is asked what is no question"
    if convention.sizes is not None:
        yield from _of_sizes(convention, convention.sizes)


def _of_sizes(convention: Convention, sizes: Sizes) -> Iterator[str]:
    """Sizes that may vary are those of arguments, called as these say."""
    count = len(convention.leaves)
    spelt = {name for shape in sizes.shapes for size in shape or () for name in _NAME.findall(str(size))}
    if not spelt <= {row.name for row in sizes.readings}:
        yield "a size is read from no argument"
    dimensions = [row.dimension for row in sizes.readings]
    dimensions += [row for rule in sizes.rules for row in rule.dimensions]
    if len(sizes.shapes) != count or not all(0 <= row.position < count for row in dimensions):
        yield "a size is one of an argument that is not there"
    for position, shape in enumerate(sizes.shapes[:count]):
        leaf = convention.leaves[position]
        found = [spelled(size) for size in leaf.shape] if isinstance(leaf, Tensor) else None
        if (None if shape is None else [*map(str, shape)]) != found:
            yield "an argument has another shape than it has"
            return
    for row in dimensions:
        shape = sizes.shapes[row.position] if row.position < count else ()
        if (row.dim is None) != (shape is None) or not 0 <= (row.dim or 0) < max(len(shape or ()), 1):
            yield "a size is one of a dimension that is not there"


def _of_records(program: FlatProgram, nodes: Set[str]) -> Iterator[str]:
    calls = range(len(program.calls.rows))
    state = {row.name: row.value for row in program.signature.state}
    for node in program.graph.nodes:
        record = record_of(node)
        if record.adjoint is None and not record.versions and not record.unclear:
            continue
        parts = () if record.adjoint is None else record.adjoint.contributions
        scopes = {*record.unclear, *(part.scope for part in parts)}
        names = {name for part in parts for name in (part.node, part.sum) if name is not None}
        if not all(scope in calls for scope in scopes):
            yield f"{node.name} has a gradient of a call that was not made"
        if not names.union(base for base, _ in record.versions) <= nodes:
            yield f"{node.name} speaks of a node that does not exist"
        written = [state[base] for base, _ in record.versions if base in state]
        if any(_kind_of(node.meta.get("val")) != _kind_of(value) for value in written):
            yield f"{node.name} is written where something else is"


def _of_signature(program: FlatProgram, nodes: Set[str]) -> Iterator[str]:
    signature = program.signature
    inputs = [row.name for row in (*signature.attributes, *signature.inputs)]
    if len(set(inputs)) < len(inputs) or not set(inputs) <= nodes:
        yield "two inputs have one name, or one has none of a node"
    for row in signature.state:
        if not isinstance(row.value, torch.Tensor):
            yield f"{row.path} is no tensor"
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    for row in (*signature.attributes, *signature.inputs):
        if _kind_of(values.get(row.name)) != _kind_of(row.value):
            yield f"{row.path} is something else in the graph"
    for whole in signature.wholes:
        if not set(whole.parts) <= set(inputs):
            yield f"{whole.path} is made of inputs that do not exist"


def _of_outputs(program: FlatProgram) -> Iterator[str]:
    """What outputs are of is there, and a gradient is like it; the loss is one."""
    signature, nodes = program.signature, {node.name: node for node in program.graph.nodes}
    inputs = {row.name for row in (*signature.attributes, *signature.inputs)}
    for output in signature.outputs:
        if output.of is None and output.kind in (OutputKind.GRADIENT, OutputKind.MUTATION):
            yield f"the {output.kind} {output.name} is of nothing"
        elif output.of is not None and output.of not in inputs:
            yield f"the output {output.name} is of an input that does not exist"
        elif output.kind is OutputKind.GRADIENT:
            pair = (nodes[name].meta.get("val") for name in (output.of, output.node) if name in nodes)
            if len({*map(sizes_in_example, pair)} - {None}) > 1:
                yield f"the gradient {output.name} has another shape than what it is of"
    for output in signature.outputs_of(OutputKind.LOSS):
        computed = nodes.get(output.node or "")
        if computed is not None and origin_of(computed).phase is Phase.BACKWARD:
            yield "the loss is computed in its own backward"
        if output.name != "loss":
            yield f"the loss is called {output.name}"


def _of_kinds(program: FlatProgram) -> Iterator[str]:
    """Inputs and outputs are of kinds that the program has, and what it returns is among its outputs."""
    signature, is_joint = program.signature, program.has_backward or program.step is not None
    differentiated = (*signature.inputs_of(InputKind.TANGENT), *signature.outputs_of(OutputKind.GRADIENT))
    if not is_joint and (*differentiated, *signature.outputs_of(OutputKind.LOSS)):
        yield "there are gradients, and no backward"
    returned = [row.node for row in signature.outputs_of(OutputKind.USER)]
    if [leaf.name if isinstance(leaf, Named) else None for leaf in program.result.leaves] != returned:
        yield "the result is not made of the outputs"


def _kind_of(value: object) -> str:
    """Whether it is a tensor, which generated code asks for its shape, and of which."""
    return describe(value) if isinstance(value, Tensor) else ""


def _of_values(program: FlatProgram) -> Iterator[str]:
    """Operators give what they give, and what is looked through is a tensor."""
    seen = set[tuple[int, type, int]]()
    for node in program.graph.nodes:
        value = node.meta.get("val")
        count = len(value) if isinstance(value, tuple | list) else -1
        if (key := (id(node.target), type(value), count)) not in seen:
            seen.add(key)
            if not may_give(node.target, value):
                yield f"{node.name} gives something else than {op_name(node.target)}"
        if record_of(node).is_straight_through:
            given = node.args[0] if node.args else None
            known = given.meta.get("val") if isinstance(given, fx.Node) else None
            if not isinstance(known, Tensor) or not isinstance(value, Tensor):
                yield f"{node.name} hands on no gradient"


def _of_branches(program: FlatProgram) -> Iterator[str]:
    """Branches take what they are given, where sizes are fixed."""
    for node in program.nodes():
        if op_name(node.target) != "cond" or node.op != "call_function":
            continue
        arguments: Any = node.args
        given = [each.meta.get("val") if isinstance(each, fx.Node) else each for each in arguments[3]]
        for inner in map(nested_graph, arguments[1:3]):
            inside = () if inner is None else inner.graph.nodes
            taken = [each.meta.get("val") for each in inside if each.op == "placeholder"]
            pairs = [pair for pair in zip(given, taken, strict=False) if _are_fixed(*pair)]
            if len(given) != len(taken) or any(_kind_of(a) != _kind_of(b) for a, b in pairs):
                yield f"{node.name} gives its branches something else than they take"


def _are_fixed(*values: object) -> bool:
    return all(isinstance(value, Tensor) and not has_open_sizes(value) for value in values)


def _of_modules(program: FlatProgram) -> Iterator[str]:
    paths = [record.path for record in program.modules]
    known = {row.name for row in program.signature.state} | {row.name for row in program.signature.wholes}
    if len(set(paths)) < len(paths):
        yield "two modules are in one place"
    seen = {ROOT}
    for record in program.modules:
        if record.same_as is not None and record.same_as not in seen:
            yield f"{record.path} is a module that is not there"
        if record.path.parent not in seen:
            yield f"{record.path} is inside a module that is not there"
        seen.add(record.path)
        held = [name for _, name in (*record.parameters, *record.tensors)]
        held += [name for _, name, _ in record.buffers]
        if not {*held} - {None} <= known:
            yield f"{record.path} holds a tensor that is no state of the program"
    yield from _of_places(program)


def _of_places(program: FlatProgram) -> Iterator[str]:
    """Modules hold their submodules and state where the paths of these say: generated code asks for them."""
    children = {record.path: record.children for record in program.modules}
    for path in children:
        if path and path[-1] not in children[path.parent]:
            yield f"{path.parent} does not hold the module {path}"
    held = {
        record.path.child(str(name)): of
        for record in program.modules
        for name, of, *_ in (*record.parameters, *record.buffers, *record.tensors)
    }
    for row in program.signature.state:
        is_of_module = row.module is not None and row.module in children  # and not of the loss function
        if is_of_module and row.part is None and held.get(row.attribute_paths[0]) != row.name:
            yield f"no module holds {row.path}"


def _is_said(expected: object) -> bool:
    """Whether it is an expectation, with nothing but such inside."""
    return isinstance(expected, Expectation) and all(map(_is_said, inside_of(expected)))


def _are_there(returned: tuple[tuple[str, str], ...], arguments: TreeSpec, result: TreeSpec) -> bool:
    if any(unmade_in(arguments)) or any(unmade_in(result)):  # which no run makes
        return True
    given = containers_in(tree_unflatten(range(arguments.num_leaves), arguments))
    made = containers_of(tree_unflatten(range(result.num_leaves), result))
    here, there = ({each.path for each in found} for found in (given, made))
    return here.issuperset(row[0] for row in returned) and there.issuperset(row[1] for row in returned)


def _of_guards(guards: Guards, convention: Convention) -> Iterator[str]:
    count, leaves = len(guards.holders), range(len(convention.leaves))
    if [row.number for row in guards.holders] != list(range(count)):
        yield "what guards speak of is not numbered in order"
    if not all(0 <= parent < count for row in guards.holders for parent, _ in row.names):
        yield "a module is held by one that is not there"
    if not all(row.holder is None or 0 <= row.holder < count for row in guards):
        yield "a guard is about a module that is not there"
    if not all(at in leaves for row in guards for at in row.positions):
        yield "a guard is about an argument that is not there"
    if sum(row.kind is GuardKind.VARIABLE for row in guards) != len(guards.variables):
        yield "guards speak of other variables than there are"
    if not all(_is_said(row.expected) for row in guards):
        yield "a guard expects what no guard can"
    if guards.settled is not None:
        yield from _of_guards(guards.settled, convention)
