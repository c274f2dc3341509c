"""A program as a readable page: its signature, then its nodes under the modules that made them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx

from whence._torch.operators.schemas import op_name
from whence._torch.pytrees import unmade_in
from whence.program.arguments.variants import in_words
from whence.program.node_records import origin_of
from whence.program.signature import describe
from whence.provenance import Origin
from whence.schema import Quality

if TYPE_CHECKING:
    from whence.program.program import FlatProgram


def page(program: "FlatProgram") -> str:
    """The whole program; one line per node, grouped by phase and module call."""
    variants = [f"  variant   {in_words(each.circumstances.numbers)}: {each!r}" for each in program.variants]
    structures = program.convention.spec, program.result.spec
    unmade = dict.fromkeys(kind for spec in structures for kind in unmade_in(spec))
    no_runs = [f"  no run    {kind.what}: {kind.why}" for kind in unmade]
    head = [f"program {program.name}", str(program.signature), *variants, *no_runs]
    return "\n".join([*head, *_body(program.graph)])


def partial_page(name: str, graph: fx.Graph, stopped: str) -> str:
    """A program that was not finished: the inputs used so far, the nodes, and why there are no more."""
    used = [node for node in graph.nodes if node.op == "placeholder" and node.users]
    inputs = [f"  in   {node.name}: {describe(node.meta.get('val'))}" for node in used]
    head = f"program {name}, as far as it was recorded"
    return "\n".join([head, *inputs, *_body(graph), f"\n<- stopped here: {stopped}"])


def marked(graph: fx.Graph, notes: Mapping[str, Sequence[str]], around: int = 1) -> str:
    """The graph where something is wrong: the nodes that `notes` name, with the notes below each, and
    `around` nodes before and after."""
    nodes = list(graph.nodes)
    wrong = [position for position, node in enumerate(nodes) if node.name in notes]
    near = sorted({at for w in wrong for at in range(max(0, w - around), min(len(nodes), w + around + 1))})
    lines: list[str] = []
    for before, at in zip([-1, *near], near, strict=False):
        lines += ["    …"] if at > before + 1 else []
        lines.append(f"    {_any_line(nodes[at])}")
        lines += [f"      ^ {note}" for note in notes.get(nodes[at].name, ())]
    lines += ["    …"] if near and near[-1] + 1 < len(nodes) else []
    return "\n".join(["  in the graph:", *lines]) if near else ""


def _any_line(node: fx.Node) -> str:
    match node.op:
        case "placeholder":
            return f"{_printed_input(node)} = placeholder"
        case "output":
            return f"return {_argument_in_words(node.args[0])}" if node.args else "return"
    return line(node)


def _printed_input(node: fx.Node) -> str:
    """An input and what it is like; a number that varies is its own description."""
    described = describe(node.meta.get("val"))
    return node.name if described == node.name else f"{node.name}: {described}"


def _body(graph: fx.Graph) -> Iterator[str]:
    heading = ""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        origin = origin_of(node)
        if (now := _heading(origin)) != heading:
            heading = now
            yield f"\n{heading}"
        yield f"  {line(node)}"


def _heading(origin: Origin) -> str:
    unnamed = "module not known" if origin.quality is Quality.NONE else "outside any module"
    where = " + ".join(str(site) or "(root)" for site in origin.calls) or unnamed
    mark = " (recomputed)" if origin.recomputed else ""
    return f"{origin.phase.value}  {where}{mark}"


def line(node: fx.Node) -> str:
    """One operation: its name, what it is, and the call that makes it."""
    arguments = [_argument_in_words(argument) for argument in node.args]
    arguments += [f"{key}={_argument_in_words(value)}" for key, value in node.kwargs.items()]
    called = str(node.target) if node.op == "get_attr" else f"{op_name(node.target)}({', '.join(arguments)})"
    return f"{node.name}: {describe(node.meta.get('val'))} = {called}"


def _argument_in_words(argument: object) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_argument_in_words, argument))}]"
    return str(argument)
