"""A torch.export.ExportedProgram becomes a Program, step by step."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from whence._torch.export.programs import came_through, fakes_like, ran_for
from whence._torch.graphs import graph_module, nested_graph, placeholder
from whence._torch.higher_order.function_graphs import is_of_transform
from whence.errors import Fault, UnsupportedGraph, UnsupportedMutation
from whence.interop.exported.call_boundaries import KeptConvention, leaf_of, leaves_of, with_structures
from whence.interop.exported.modules import module_paths, records_of, training_flags
from whence.interop.exported.refusals import refuse_unsupported
from whence.interop.exported.shared_modules import Chain
from whence.interop.exported.signature import (
    convention_of,
    mutations,
    result_of,
    state_inputs,
    user_inputs,
    user_outputs,
)
from whence.interop.exported.state import State, histories, read_through_one, state_of
from whence.interop.graphs.call_sites import ROOT_MODULE, Sites, sites_of
from whence.interop.graphs.decompose_composites import with_casts, without_hidden_writes
from whence.interop.graphs.faults import refusal, scope_faults
from whence.interop.graphs.frames import frames_of, root_type, source_of, spelling_of
from whence.interop.graphs.inline import Flat, Region, flattened
from whence.interop.graphs.no_op_casts import Echo, echoes, meant, without
from whence.program import FlatProgram, GraphFacts, ModuleRecord, Signature, Structure
from whence.program.node_records import set_origin, write_facts
from whence.program.wellformed import check
from whence.provenance import ModulePath, Origin
from whence.rewriting.cut_gradients import cut_gradients
from whence.rewriting.functionalize import Functional, functionalize
from whence.schema import Phase, Quality

_NONE: Mapping[str, Tensor] = MappingProxyType({})
_DECOMPOSE = "call run_decompositions({}) on the exported program first"
_MUTATIONS = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)
_AS_EXPORTED = "TRAINING"
"""The dialect of a program that nobody decomposed."""


def from_exported_program(exported: ExportedProgram, unused: Mapping[str, Tensor] = _NONE) -> FlatProgram:
    """The program of an exported one; it shares the exported program's tensors.

    `unused` are buffers of the model that the export left out, by their names.

    Raises `UnsupportedGraph` naming everything that a program cannot hold, and `UnsupportedMutation` for
    writes that have no functional form.
    """
    exported = refuse_unsupported(exported)
    rows = state_of(exported, unused)
    flat, users = _flat_of_export(exported, rows)
    sites, chains = _sites(exported, flat, rows)
    heard = _echoes(exported, flat, sites)
    flat.returned = without(flat.returned, heard, sites)
    made = made_by_decomposition(exported.dialect, flat.operations)
    _set_origins(sites, made)
    _set_nested_origins(flat, sites)
    functional = functional_form(flat)
    returned = _returned(exported, flat, functional)
    written = _values_written(exported, flat, functional, rows)
    flat.graph.output((*returned, *written.values()))
    outside = Region()
    straight = cut_gradients(
        functional,
        lambda node: flat.regions.get(node, outside).without_grad,
        open_inputs={*functional.graph.find_nodes(op="placeholder")},
    )
    records = _records(exported, rows, sites, chains)
    program = _program_of_parts(
        _ExportedParts(exported, flat, functional, rows, sites, heard, records, users, returned, written),
        straight,
    )
    check(program)
    return program


@dataclass(frozen=True)
class _ExportedParts:
    """What a program is put together from."""

    exported: ExportedProgram
    flat: Flat
    functional: Functional
    rows: Sequence[State]
    sites: Sites
    echoes: Sequence[Echo]
    records: tuple[ModuleRecord, ...]
    users: Sequence[fx.Node]
    returned: Sequence[Any]
    written: Mapping[str, fx.Node]


def _flat_of_export(exported: ExportedProgram, rows: Sequence[State]) -> tuple[Flat, list[fx.Node]]:
    """The operations without wrappers over placeholders of our own: the state, then the arguments."""
    graph = fx.Graph()
    held: dict[str, fx.Node] = {}
    old = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    fake = fakes_like([node.meta.get("val") for node in old.values()])
    for row in rows:
        known = old.get(row.name)
        value = known.meta["val"] if known is not None else fake(row.tensor)
        held |= dict.fromkeys((row.name, *row.placeholders), placeholder(graph, row.name, {"val": value}))
    users = [
        placeholder(
            graph,
            spec.arg.name,
            {
                "val": (
                    spec.arg.value
                    if isinstance(spec.arg, ConstantArgument)
                    else old[spec.arg.name].meta["val"]
                )
            },
        )
        for spec in exported.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    held |= {node.name: node for node in users}
    flat = flattened(exported.graph_module, {**held, **_objects(exported)}, graph)
    with_casts(flat)
    read_through_one(flat, rows, held)
    without_hidden_writes(flat)
    UnsupportedGraph.refuse(flat.faults)
    return flat, users


def _objects(exported: ExportedProgram) -> dict[str, Any]:
    """What operations are given as it is: objects that are no tensors; tokens, which are nothing here."""
    kinds = (InputKind.CUSTOM_OBJ, InputKind.TOKEN)
    specs = (spec for spec in exported.graph_signature.input_specs if spec.kind in kinds)
    return {spec.arg.name: exported.constants.get(spec.target or "") for spec in specs}


def _sites(exported: ExportedProgram, flat: Flat, rows: Sequence[State]) -> tuple[Sites, list[Chain]]:
    nodes = flat.operations
    owners = {row.name: row.first.path.parent for row in rows}
    spelling = spelling_of(
        [entry.fqn.partition("@")[0] for entry in exported.module_call_graph], nodes, owners
    )
    frames = {node: frames_of(node, spelling) for node in nodes}
    if faults := list(scope_faults(frames)):
        raise refusal(flat.graph, faults)
    empty = [_site_of(entry.fqn) for entry in exported.module_call_graph if entry.signature and entry.fqn]
    sites = sites_of(nodes, frames, root_type(nodes) or "Module", empty)
    return sites, [found or () for found in frames.values()]


def _site_of(name: str) -> tuple[ModulePath, int]:
    path, _, index = name.partition("@")
    return ModulePath.parse(path), int(index) if index else 0


def _set_origins(sites: Sites, made: frozenset[fx.Node]) -> None:
    for node, number in sites.homes.items():
        site = sites.calls.rows[number].site
        quality = Quality.INFERRED if node in sites.inferred or node in made else Quality.EXACT
        set_origin(node, Origin(Phase.FORWARD, (site,), quality, source_of(node), place=site))


def _set_nested_origins(flat: Flat, sites: Sites) -> None:
    """What a branch or a loop computes belongs to the call that runs it: the export says no more about it."""
    for reader in flat.graph.nodes:
        users = [user for user in reader.users if user in sites.homes] if reader.op == "get_attr" else []
        for user in users[:1]:
            site = sites.calls.rows[sites.homes[user]].site
            origin = Origin(Phase.FORWARD, (site,), Quality.INFERRED, source_of(user), place=site)
            set_origin(reader, origin)
            for node in _nodes_of(flat.nested[str(reader.target)]):
                set_origin(node, origin._replace(source=source_of(node) or origin.source))


def _nodes_of(module: fx.GraphModule) -> Iterator[fx.Node]:
    for node in module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            yield node
        inner = nested_graph(node)
        yield from () if inner is None else _nodes_of(inner)


def _returned(exported: ExportedProgram, flat: Flat, functional: Functional) -> list[Any]:
    pairs = zip(flat.returned, exported.graph_signature.output_specs, strict=True)
    leaves = [value for value, spec in pairs if spec.kind is OutputKind.USER_OUTPUT]
    return [functional.final(leaf) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]


def _values_written(
    exported: ExportedProgram, flat: Flat, functional: Functional, rows: Sequence[State]
) -> dict[str, fx.Node]:
    """The final value of every input that is written: as the signature says, or in place."""
    names = {name.target: row.name for row in rows for name in row.names}
    written: dict[str, fx.Node] = {}
    for value, spec in zip(flat.returned, exported.graph_signature.output_specs, strict=True):
        if spec.kind in _MUTATIONS and spec.target is not None:
            written[names.get(spec.target, spec.target)] = functional.final(value)
    for node in flat.graph.nodes:
        if node.op == "placeholder" and node in functional.history:
            written[node.name] = functional.final(node)
    return {name: value for name, value in written.items() if value.name != name}


def functional_form(flat: Flat) -> Functional:
    """The graph with its writes as values; what has no such form, PyTorch's own decomposition may know."""
    UnsupportedGraph.refuse(_of_transforms(flat))
    try:
        return functionalize(flat.graph)
    except UnsupportedMutation as error:
        rows = error.faults or (Fault(error.what, error.where, error.why),)
        raise UnsupportedMutation.of(replace(row, remedy=_DECOMPOSE) for row in rows) from error


def _of_transforms(flat: Flat) -> Iterator[Fault]:
    """PyTorch's own operations on such values fail, too: what flex attention makes of a tensor that its
    `score_mod` reads."""
    found = [node.name for node in flat.graph.nodes if is_of_transform(node.meta.get("val"))]
    if found:
        yield Fault(
            f"{', '.join(found[:3])} hold values of a transform of torch.func, whose run is over",
            why="the exporter noted them inside of a function, and nothing can be computed with them",
            remedy="capture the model with whence.capture, which reads its code itself",
        )


def _records(
    exported: ExportedProgram, rows: Sequence[State], sites: Sites, chains: Sequence[Chain]
) -> tuple[ModuleRecord, ...]:
    paths = {node: sites.calls.rows[number].site.path for node, number in sites.homes.items()}
    modules = module_paths(exported, rows, (call.site.path for call in sites.calls))
    training = training_flags(paths, paths)
    names = {row.name for row in rows}
    reads = [
        (path, source.name)
        for node, path in paths.items()
        for source in node.all_input_nodes
        if source.name in names
    ]
    return records_of(modules, rows, chains, reads, sites.calls.program.site.type, training)


def _program_of_parts(parts: _ExportedParts, straight: frozenset[str]) -> FlatProgram:
    graph, exported = parts.flat.graph, parts.exported
    regions, outside = parts.flat.regions, Region()
    out_spec = exported.call_spec.out_spec
    convention = convention_of(exported, [node.meta["val"] for node in parts.users], graph)
    inputs = (
        *state_inputs(parts.rows, {record.path: record.type for record in parts.records}, graph),
        *user_inputs(parts.users, convention.paths),
    )
    outputs = (
        *user_outputs(parts.returned, out_spec),
        *mutations(parts.written, {row.name: row for row in inputs}),
    )
    facts = GraphFacts(
        histories=histories(parts.written, parts.functional, parts.sites),
        straight_through=straight | {node.name for node in parts.functional.straight},
        turned_on=parts.functional.names_where(lambda node: regions.get(node, outside).with_grad),
    )
    write_facts(graph, facts)
    program = FlatProgram(
        graph_module=graph_module(dict(parts.flat.nested), graph, parts.sites.calls.program.site.type),
        signature=Signature(inputs, outputs),
        calls=replace(parts.sites.calls, entry=ROOT_MODULE),
        convention=convention,
        result=result_of(parts.returned, out_spec),
        modules=parts.records,
        state={row.name: row.tensor for row in parts.rows},
    )
    calls = with_structures(program, dict(_conventions_kept(parts)))
    kept = {site: entry.inputs for site, entry in _conventions_kept(parts)}
    preserved = frozenset(
        row.number for row in calls if kept.get((row.site.path, row.site.index)) == row.inputs is not None
    )
    return program.with_changes(calls=replace(calls, preserved=preserved))


def _conventions_kept(parts: _ExportedParts) -> Iterator[tuple[tuple[ModulePath, int], KeptConvention]]:
    """The calling conventions that the export kept, over the values of the program."""
    made = {name: _now(parts.functional, value) for name, value in parts.flat.made.items()}
    for entry in _kept_entries(parts.exported):
        signature = entry.signature
        sides = zip(
            SIDES, (signature.inputs, signature.outputs), (signature.in_spec, signature.out_spec), strict=True
        )
        own = made | _meant(parts, entry.fqn)
        found = [_side(parts, entry.fqn, own, *side) for side in sides]
        if all(len(side.leaves) == side.spec.num_leaves for side in found):
            yield _site_of(entry.fqn), KeptConvention(*found)


def _kept_entries(exported: ExportedProgram) -> Iterator[Any]:
    return (entry for entry in exported.module_call_graph if entry.signature is not None and entry.fqn)


def _echoes(exported: ExportedProgram, flat: Flat, sites: Sites) -> list[Echo]:
    """The values that modules seem to hand out, of whom the export says that they do not."""
    results: dict[int, list[Any]] = {}
    for entry in _kept_entries(exported):
        number = _number_of(sites, entry.fqn)
        passed = flat.points.get((entry.fqn, SIDES[1]))
        given = passed or [flat.made.get(getattr(each, "name", "")) for each in entry.signature.outputs]
        if number is not None:
            results[number] = given
    return list(echoes(sites, results.get)) if results else []


def _number_of(sites: Sites, name: str) -> int | None:
    path, index = _site_of(name)
    rows = (row for row in sites.calls if (row.site.path, row.site.index) == (path, index))
    return next((row.number for row in rows), None)


def _meant(parts: _ExportedParts, name: str) -> dict[str, Any]:
    """The values that a call means otherwise than the export noted them."""
    number = _number_of(parts.sites, name) if parts.echoes else None
    if number is None:
        return {}
    rows = ((key, value, meant(value, number, parts.echoes)) for key, value in parts.flat.made.items())
    return {key: _now(parts.functional, now) for key, value, now in rows if now is not value}


SIDES = ("module_call_inputs", "module_call_outputs")


def _side(
    parts: _ExportedParts, name: str, made: Mapping[str, Any], kind: str, arguments: Any, spec: Any
) -> Structure:
    """What a call takes or returns; inside a wrapper the export leaves it in the graph."""
    passed = parts.flat.points.get((name, kind))
    if arguments or passed is None:
        return Structure(spec, tuple(leaves_of(arguments, made)))
    return Structure(spec, tuple(leaf_of(_now(parts.functional, value)) for value in passed))


def _now(functional: Functional, value: Any) -> Any:
    return functional.value_of(value) if isinstance(value, fx.Node) else value


def made_by_decomposition(dialect: str, nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The operations that were not in the exported program: their modules are deduced.

    One that came through as it was is where it was called. What another one was decomposed into has taken
    over its metadata, and what a region held (`no_grad`, autocast) that of the region.
    """
    if dialect == _AS_EXPORTED or not any(map(ran_for, nodes)):
        return frozenset()
    made: set[fx.Node] = set()
    for node in nodes:
        is_item = node.target is operator.getitem
        if (node.args[0] in made) if is_item else not came_through(node):
            made.add(node)
    return frozenset(made)
