"""A graph from elsewhere in the form that a program has: operators, and all state through placeholders."""

from torch import Tensor, fx

from whence._torch.export.lowering import TRACE, in_one_mode, lowered
from whence._torch.graphs import attribute_at, nested_graph, own_copy
from whence._torch.operators.schemas import HigherOrderOperator, OpOverload
from whence._torch.record.annotations import said_of
from whence._torch.sizes.symbols import SYMBOLIC

ATTRIBUTE = "whence_attribute"
"""The key, in the metadata of a placeholder, of the tensor that the graph read as an attribute."""


def readied(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose tensors are placeholders (`ATTRIBUTE` says which), and which calls operators alone."""
    copied = own_copy(module)
    _rename_values(copied)
    _lift(copied)
    if any(_is_above_operators(node) for node in copied.graph.nodes):
        copied = _lowered(copied)
    nodes = [node for node in copied.graph.nodes if "val" in node.meta]
    for node, value in zip(nodes, in_one_mode([node.meta["val"] for node in nodes]), strict=True):
        node.meta["val"] = value
    return copied


def _rename_values(module: fx.GraphModule) -> None:
    """Dynamo notes values under a name of its own."""
    for node in module.graph.nodes:
        if "val" not in node.meta and "example_value" in node.meta:
            node.meta["val"] = node.meta["example_value"]


def _lift(module: fx.GraphModule) -> None:
    """Each tensor that the graph reads as an attribute becomes a placeholder in front of the others."""
    made: dict[int, fx.Node] = {}
    first = next(iter(module.graph.nodes))
    for node in list(module.graph.nodes):
        held = _tensor_at(module, node)
        if held is None:
            continue
        if id(held) not in made:
            with module.graph.inserting_before(first):
                made[id(held)] = module.graph.placeholder(f"attribute_{node.name}")
            made[id(held)].meta = {"val": node.meta.get("val", held), ATTRIBUTE: held, "target": node.target}
        node.replace_all_uses_with(made[id(held)])
        module.graph.erase_node(node)


def _tensor_at(module: fx.GraphModule, node: fx.Node) -> Tensor | None:
    if node.op != "get_attr" or nested_graph(node) is not None:
        return None
    held = attribute_at(module, str(node.target))
    return held if isinstance(held, Tensor) else None


def _is_above_operators(node: fx.Node) -> bool:
    if isinstance(node.meta.get("val"), SYMBOLIC):
        return False  # sizes are computed by functions of Python's
    if node.op in ("call_method", "call_module"):
        return True
    known = isinstance(node.target, (OpOverload, HigherOrderOperator))
    return node.op == "call_function" and not known and node.target.__name__ != "getitem"  # type: ignore[union-attr]


def _lowered(module: fx.GraphModule) -> fx.GraphModule:
    before = [node for node in module.graph.nodes if node.op == "placeholder"]
    values = in_one_mode([node.meta.get("val") for node in before])
    made = lowered(module, values)
    after = [node for node in made.graph.nodes if node.op == "placeholder"]
    for old, new, value in zip(before, after, values, strict=True):
        new.meta = {**old.meta, "val": value}
        new.target = old.target
    made.graph.output_node().meta |= module.graph.output_node().meta
    for node in made.graph.nodes:
        if (trace := said_of(node).get(TRACE)) is not None:
            node.meta["stack_trace"] = trace
    return made
