"""What a pass must not do, each found on the graph it left; all of it is reported at once."""

from collections.abc import Iterator

from torch import fx

from whence._torch.graphs import nested_graph, returned
from whence._torch.operators.schemas import acts, keeps_its_place, op_name
from whence.program.signature import describe
from whence.program.wellformed import Broken
from whence.rewriting.edits.after import After
from whence.rewriting.edits.before import WorkingCopy
from whence.rewriting.edits.origins import NodeSources

_SAY = (
    "say it inside the block: edit.replaced(new, *olds) or edit.split(old, *news), or copy the meta of a "
    "node, as torch.fx.traceback.preserve_node_meta() does where a graph is traced anew"
)
_TRACE = (
    "trace torch.fx.Interpreter(edit.graph_module).run under torch.fx.traceback.preserve_node_meta(); or "
    "say it inside the block: edit.replaced(new, *olds)"
)
_SHOWN = 3
_PLACEHOLDERS = "leave inputs and outputs as they are: give a pass that changes them a capture of its own"
_FLAT = "write the operation itself, as call_function: a program hides none in modules or methods"


def faults_of(old: WorkingCopy, now: After, sources: NodeSources) -> list[Broken]:
    """Everything that is wrong with the graph after a pass."""
    rules = (_broken_inputs, _broken_outputs, _kinds, _order, _draws)
    lost = _bare(sources) if now.is_bare else _lost(sources)
    return [*lost, *(fault for rule in rules for fault in rule(old, now))]


def _lost(sources: NodeSources) -> Iterator[Broken]:
    for node in sources.lost:
        if node.op == "call_function":
            yield Broken(
                f"it is not known what {node.name} ({op_name(node.target)}) was made from", node.name, _SAY
            )


def _bare(sources: NodeSources) -> Iterator[Broken]:
    nodes = [node for node in sources.lost if node.op == "call_function"]
    if nodes:
        named = ", ".join(f"{node.name} ({op_name(node.target)})" for node in nodes[:_SHOWN])
        more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
        what = f"the graph was traced anew without its metadata, and new is what computes {named}{more}"
        yield Broken(what, nodes[0].name, _TRACE)


def _broken_inputs(old: WorkingCopy, now: After) -> Iterator[Broken]:
    kept = {node: name for name, node in now.kept.items()}
    found = [node for node in now.graph.nodes if node.op == "placeholder"]
    rows = [row.name for row in old.program.signature.inputs]
    added = [node for node in found if node not in kept]
    gone = [name for name in rows if name not in now.kept]
    for node in added:
        yield Broken(
            f"{node.name} is a new input, which the signature does not have", node.name, _PLACEHOLDERS
        )
    for name in gone:
        yield Broken(f"the input {name} is gone", None, _PLACEHOLDERS)
    if not added and not gone and [kept[node] for node in found] != rows:
        yield Broken("the inputs are in another order", None, _PLACEHOLDERS)


def _broken_outputs(old: WorkingCopy, now: After) -> Iterator[Broken]:
    earlier, later = returned(old.program.graph) or (), returned(now.graph)
    rows = old.program.signature.outputs
    if later is None or len(later) != len(earlier):
        count = "no row of values" if later is None else f"{len(later)} values"
        yield Broken(f"the graph returns {count}, and the signature has {len(rows)}", "output", _PLACEHOLDERS)
        return
    for row, before, value in zip(rows, earlier, later, strict=True):
        if isinstance(before, fx.Node) != isinstance(value, fx.Node):
            yield Broken(f"the output {row.name} was {before}, and is {value}", "output", _PLACEHOLDERS)
        elif isinstance(value, fx.Node) and "val" in value.meta and _shape(value) != _shape(before):
            was, now_is = (describe(node.meta.get("val")) for node in (before, value))
            yield Broken(f"the output {row.name} was {was}, and is {now_is}", value.name, _PLACEHOLDERS)
        elif not isinstance(value, fx.Node) and (type(value), repr(value)) != (type(before), repr(before)):
            yield Broken(f"the output {row.name} was {before!r}, and is {value!r}", "output", _PLACEHOLDERS)


def _shape(node: fx.Node) -> tuple[object, ...]:
    value = node.meta.get("val")
    return tuple(map(str, getattr(value, "shape", ()))), getattr(value, "dtype", None)


def _kinds(_: WorkingCopy, now: After) -> Iterator[Broken]:
    for node in now.graph.nodes:
        if node.op in ("call_module", "call_method"):
            yield Broken(f"{node.name} is a {node.op} of {node.target}", node.name, _FLAT)
        if node.op == "get_attr" and node not in now.kept.values() and nested_graph(node) is None:
            yield Broken(
                f"{node.name} reads {node.target}, which is not in the signature", node.name, _PLACEHOLDERS
            )


def _order(_: WorkingCopy, now: After) -> Iterator[Broken]:
    seen: set[fx.Node] = set()
    for node in now.graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                remedy = "move it behind what it reads"
                yield Broken(f"{node.name} reads {source.name} before it is made", node.name, remedy)
        seen.add(node)


def _draws(old: WorkingCopy, now: After) -> Iterator[Broken]:
    """Operations that draw random numbers keep their order, and with it their numbers; and those that act."""
    names = {node: name for name, node in now.kept.items()}
    acting = [names[node] for node in now.graph.nodes if node in names and _keeps_its_place(node)]
    before = [name for name in old.nodes if name in set(acting)]
    for name, other in zip(acting, before, strict=True):
        if name != other:
            does = "acts" if acts(now.kept[name].target) else "draws its random numbers"
            remedy = "keep the order of operations that draw random numbers, or give nothing"
            yield Broken(f"{name} {does} where {other} did", now.kept[name].name, remedy)
            return


def _keeps_its_place(node: fx.Node) -> bool:
    return node.op == "call_function" and keeps_its_place(node.target, node.args, node.kwargs)
