"""Origins in the spelling of torch.export: `nn_module_stack`, `stack_trace`, `torch_fn`."""

import linecache
from typing import Any

from torch import fx

from whence._torch.operators import op_name, short_name
from whence.interop.frames import STACK
from whence.program import Call, Program
from whence.program.origins import ORIGIN
from whence.provenance import Source

ROOT_KEY = "L__self__"


def with_metadata(program: Program, node: fx.Node) -> dict[str, Any]:
    """The metadata of a node with its origin as torch.export writes it, in place of ours."""
    meta = {key: value for key, value in node.meta.items() if key not in (ORIGIN, STACK, "stack_trace")}
    if node.op != "call_function":
        return meta
    origin = program.where(node)
    meta[STACK] = _stack(program, program.call_of(node), node.meta.get(STACK) or {})
    meta.setdefault("torch_fn", (f"{short_name(node.target)}_1", f"OpOverload.{op_name(node.target)}"))
    trace = node.meta.get("stack_trace") or (origin.source and _trace(origin.source))
    return meta | ({"stack_trace": trace} if trace else {})


def _stack(program: Program, call: Call, known: Any) -> dict[str, tuple[str, str]]:
    """The calls around a node; a class by its full name where the exporter said it."""
    full = {str(path): kind for path, kind, *_ in known.values()}
    rows = [row for row in reversed(program.calls.chain(call)) if row.site.path]
    stack = {ROOT_KEY: ("", full.get("", program.calls.program.site.type))}
    for row in rows:
        path = str(row.site.path)
        stack[f"{ROOT_KEY}{row.site}"] = (path, str(full.get(path, row.site.type)))
    return stack


def _trace(source: Source) -> str:
    text = linecache.getline(source.file, source.line).strip()
    function = source.function.rpartition(".")[2]
    return f'File "{source.file}", line {source.line}, in {function}\n    {text}'
