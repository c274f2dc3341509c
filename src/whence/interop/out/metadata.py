"""Origins in the spelling of torch.export: `nn_module_stack`, `stack_trace`, `torch_fn`."""

import linecache
from collections.abc import Mapping
from typing import Any

from torch import fx

from whence._torch.graphs import nested_graph
from whence._torch.operators.schemas import op_name, short_name
from whence.interop.graphs.frames import STACK
from whence.program import Call, Program
from whence.program.guards.expectations import ExpectedHolder
from whence.program.node_records import RECORD
from whence.provenance import Source
from whence.schema import GuardKind

ROOT_KEY = "L__self__"


def classes_of(program: Program) -> dict[str, str]:
    """The full names of the classes of modules by path, as guards know them or the exporter said them."""
    guarded = {}
    for row in program.guards:
        if isinstance(row.expected, ExpectedHolder):
            path, kind = row.what if row.kind is GuardKind.SUBMODULE else "", row.expected.type
            guarded[path] = f"{kind.__module__}.{kind.__qualname__}"
    stacks = (node.meta.get(STACK) or {} for node in program.graph.nodes)
    return guarded | {str(path): str(kind) for stack in stacks for path, kind, *_ in stack.values()}


def with_metadata(program: Program, node: fx.Node, classes: Mapping[str, str]) -> dict[str, Any]:
    """The metadata of a node with its origin as torch.export writes it, in place of ours."""
    meta = {key: value for key, value in node.meta.items() if key not in (RECORD, STACK, "stack_trace")}
    if nested_graph(node) is not None:
        user = next(iter(node.users))
        return meta | {STACK: with_metadata(program, user, classes)[STACK]}
    if node.op != "call_function":
        return meta
    origin = program.where(node)
    meta[STACK] = _stack(program, program.call_of(node), classes)
    meta.setdefault("torch_fn", (f"{short_name(node.target)}_1", f"OpOverload.{op_name(node.target)}"))
    trace = node.meta.get("stack_trace") or (origin.source and _trace(origin.source))
    return meta | ({"stack_trace": trace} if trace else {})


def _stack(program: Program, call: Call, classes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The calls around a node."""
    rows = [row for row in reversed(program.calls.chain(call)) if row.site.path]
    stack = {ROOT_KEY: ("", classes.get("", program.calls.program.site.type))}
    for row in rows:
        path = str(row.site.path)
        stack[f"{ROOT_KEY}{row.site}"] = (path, classes.get(path, row.site.type))
    return stack


def _trace(source: Source) -> str:
    text = linecache.getline(source.file, source.line).strip()
    function = source.function.rpartition(".")[2]
    return f'File "{source.file}", line {source.line}, in {function}\n    {text}'
