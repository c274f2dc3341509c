"""Whose strides a value has."""

from torch import fx

from whence._torch.operators import is_elementwise


def inputs_behind(node: fx.Node) -> set[str]:
    """The placeholders from which a value has its layout, through element-wise operations alone.

    Any other operation depends on the layout of its arguments by itself.
    """
    found, waiting, seen = set[str](), [node], set[fx.Node]()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.op == "placeholder":
            found.add(value.name)
        elif is_elementwise(value.target):
            waiting += value.all_input_nodes
    return found
