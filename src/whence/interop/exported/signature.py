"""The rows of the signature of an exported program, and how it is called."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from keyword import iskeyword
from typing import Any

from torch import fx
from torch.export import ExportedProgram, FlatArgsAdapter

from whence._torch.operators.schemas import reads_memory
from whence._torch.pytrees import TreeSpec, key_segments, spelled, tree_flatten_with_path, tree_unflatten
from whence._torch.sizes.exported_sizes import limits_of
from whence.interop.exported.state import State
from whence.program import Constant, Convention, FlatProgram, Input, Named, Output, Structure
from whence.program.arguments.convention import paths_of
from whence.program.calls import Leaf
from whence.provenance import ModulePath
from whence.schema import InputKind, OutputKind


def state_inputs(rows: Sequence[State], types: Mapping[ModulePath, str], graph: fx.Graph) -> Iterator[Input]:
    """A row for every tensor of the state."""
    values = {node.name: node.meta["val"] for node in graph.nodes if node.op == "placeholder"}
    for row in rows:
        first, *others = row.names
        is_held = first.path.parent in types
        yield Input(
            name=row.name,
            kind=row.kind,
            path=str(first.path) if is_held else "_".join(first.path),
            aliases=tuple(str(name.path) for name in others),
            module=first.path.parent if is_held else None,
            module_type=types.get(first.path.parent),
            value=values[row.name],
            persistent=row.persistent,
        )


def user_inputs(placeholders: Sequence[fx.Node], paths: Sequence[str]) -> Iterator[Input]:
    """A row for every leaf of the arguments."""
    for node, path in zip(placeholders, paths, strict=True):
        yield Input(node.name, InputKind.USER, path, value=node.meta["val"])


def user_outputs(leaves: Sequence[Any], spec: TreeSpec) -> Iterator[Output]:
    """A row for every leaf of the result."""
    pairs, _ = tree_flatten_with_path(tree_unflatten(list(range(len(leaves))), spec))
    for path, position in pairs:
        leaf = leaves[position]
        name, access = "_".join(["output", *key_segments(path)]), f"output{spelled(path)}"
        held = leaf.name if isinstance(leaf, fx.Node) else None
        yield Output(name, OutputKind.USER, access, node=held, value=None if held else leaf)


def mutations(written: Mapping[str, fx.Node], inputs: Mapping[str, Input]) -> Iterator[Output]:
    """A row for every input that the program gives a new value."""
    for name, value in written.items():
        yield Output(f"new_{name}", OutputKind.MUTATION, inputs[name].path, of=name, node=value.name)


def result_of(leaves: Sequence[Any], spec: TreeSpec) -> Structure:
    """The structure of the result over the nodes that hold it."""
    held: list[Leaf] = [Named(leaf.name) if isinstance(leaf, fx.Node) else Constant(leaf) for leaf in leaves]
    return Structure(spec, tuple(held))


def convention_of(exported: ExportedProgram, leaves: Sequence[Any], graph: fx.Graph) -> Convention:
    """How the exported module is called."""
    spec = exported.call_spec.in_spec
    args, kwargs = tree_unflatten(list(leaves), spec)
    return Convention(
        spec=spec,
        leaves=tuple(leaves),
        paths=paths_of(args, kwargs),
        parameters=_exported_parameters(exported, args, kwargs),
        reads_memory=any(reads_memory(node.target) for node in graph.nodes),
        limits=limits_of(exported.range_constraints),
    )


def _exported_parameters(
    exported: ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.Signature | None:
    """The names that the export kept of the arguments; they have no defaults."""
    root = next((entry.signature for entry in exported.module_call_graph if not entry.fqn), None)
    names = list(getattr(root, "forward_arg_names", None) or ())
    if len(names) != len(args) + len(kwargs) or names[len(args) :] != list(kwargs):
        names = [f"args_{position}" for position in range(len(args))] + list(kwargs)
    if len(set(names)) < len(names) or not all(name.isidentifier() and not iskeyword(name) for name in names):
        return None
    kinds = [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(args) + [inspect.Parameter.KEYWORD_ONLY] * len(
        kwargs
    )
    return inspect.Signature([inspect.Parameter(name, kind) for name, kind in zip(names, kinds, strict=True)])


def adapted(program: FlatProgram, adapter: FlatArgsAdapter | None) -> FlatProgram:
    """The program with an adapter for its own arguments; itself where there is none."""
    if adapter is None:
        return program
    return program.with_changes(convention=replace(program.convention, adapter=adapter.adapt))
