"""A Python decision that needs a tensor's value: what asked for it, whose value it is, what to do instead."""

import dis
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import FrameType

import torch
from torch import Tensor, fx

from whence._torch.operators.schemas import has_size_of_data, short_name
from whence._torch.sizes.symbols import OuterNumber, RaggedSize, unknown_size
from whence.errors import DataDependent, Place
from whence.program.queries.printing import line

_SHOWN = 3
_EXAMPLE = 'let the example decide with decide="example", and every run is held to it'
NO_NUMBERS = "a capture runs on fake tensors, shapes without numbers"
"""Why a value cannot be had."""
_OUTSIDE = (
    "write a Python `if` or loop in the place of the operator, which an example can decide with "
    'decide="example"'
)
_INSIDE = (
    "a function that an operator runs (cond, while_loop, map) is recorded for whatever a run gives it: the "
    "example takes one way through it, or none, and nothing in it is decided"
)
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR", "YIELD_VALUE", "RERAISE"})
_CONVERTS = frozenset({"COMPARE_OP", "TO_BOOL", "UNARY_NOT"})
_CALLS = frozenset({"CALL", "PRECALL", "CALL_KW"})


class Need(Enum):
    """What a value is needed for; the value of the member is what to do instead."""

    BRANCH = (
        "compute both sides and choose with torch.where(condition, a, b); or decide outside and pass the "
        "decision in as a Python bool, a constant of the program: capture once for each"
    )
    NUMBER = (
        "keep it a tensor, which takes part in arithmetic, comparisons and indexing as a number does; or "
        "compute it outside and pass it in as a Python number, a constant of the program"
    )
    SIZE = (
        "keep the size fixed and carry a mask along: torch.where(mask, x, 0) or x * mask for x[mask], "
        "mask.sum() for a count, torch.topk for a fixed number; or select outside the captured function"
    )
    CONTENT = (
        "compute it with torch functions in place of Python's or NumPy's; or move that part out of the "
        "captured function and pass its result in"
    )
    ADDRESS = (
        "ask what decides by it outside of the captured function, and pass the answer in: every run has its "
        "tensors elsewhere in memory"
    )
    ANOMALY = (
        "turn it off for the capture, or capture under torch.autograd.set_detect_anomaly(True, "
        "check_nan=False); program.first(...) finds the first value that is not finite"
    )


_READS: dict[str, tuple[str, Need]] = {
    "__bool__": ("a branch (if, while, and, or, bool())", Need.BRANCH),
    "__contains__": ("a branch (in)", Need.BRANCH),
    "is_nonzero": ("torch.is_nonzero", Need.BRANCH),
    "equal": ("torch.equal", Need.BRANCH),
    "allclose": ("torch.allclose", Need.BRANCH),
    "item": ("a number (.item() or .tolist())", Need.NUMBER),
    "__int__": ("a number (int())", Need.NUMBER),
    "__float__": ("a number (float())", Need.NUMBER),
    "__index__": ("a number (an index, a slice or range())", Need.NUMBER),
    "__getitem__": ("a number (an index or a slice)", Need.NUMBER),
    "grad": ("a number (.item(), int(), if, while)", Need.NUMBER),  # all that is known inside the backward
    "tensor": ("the content (torch.tensor of tensors, which torch.stack can do)", Need.CONTENT),
    "as_tensor": ("the content (torch.as_tensor of tensors, which torch.stack can do)", Need.CONTENT),
    "asarray": ("the content (torch.asarray of tensors, which torch.stack can do)", Need.CONTENT),
    "new_tensor": ("the content (new_tensor of tensors, which torch.stack can do)", Need.CONTENT),
    "new": ("the content (new of tensors, which torch.stack can do)", Need.CONTENT),
    "tolist": ("the content (.tolist())", Need.CONTENT),
    "numpy": ("the content (.numpy())", Need.CONTENT),
    "__array__": ("the content (as a NumPy array)", Need.CONTENT),
    "__reduce_ex__": ("the content (pickled)", Need.CONTENT),
    "__dlpack__": ("the content (from_dlpack)", Need.CONTENT),
    "data_ptr": ("the address (.data_ptr())", Need.ADDRESS),
    "is_set_to": ("the address (.is_set_to())", Need.ADDRESS),
    "untyped_storage": ("the memory (.untyped_storage())", Need.ADDRESS),
    "storage": ("the memory (.storage())", Need.ADDRESS),
    "__format__": ("the content (formatted as text)", Need.CONTENT),
    "__repr__": ("the content (as text)", Need.CONTENT),
}
_SIZES = {
    "__getitem__": "indexing with a mask",
    "where": "torch.where with one argument",
    "fn": "torch.unique",  # one function in torch stands for all that return more when asked to
}


@dataclass(frozen=True)
class Value:
    """A tensor whose value was needed: its name, and how it came to be."""

    name: str
    made: str = ""


def data_dependent(
    operation: object, function: object, values: Sequence[Value], where: Place, *, inside: bool = False
) -> DataDependent:
    """The error for values that were needed; `inside` a function that an operator runs nothing decides."""
    asked, need = _need_of(operation, function)
    named = " and ".join(dict.fromkeys(value.name for value in values)) or "a tensor"
    made = dict.fromkeys(value.made for value in values if value.made)
    return DataDependent(
        f"{asked} needs the value of {named}, which a capture does not have",
        where=where,
        why="; ".join([*made, _INSIDE if inside else NO_NUMBERS]),
        remedy=need.value if need is Need.ADDRESS else f"{need.value}; or {_OUTSIDE if inside else _EXAMPLE}",
    )


_UNALLOCATED = "its data is not allocated yet"
"""What a C++ kernel says that looks at the memory of a fake tensor."""


def refused_size(error: RuntimeError, where: Place) -> DataDependent | None:
    """The error for what PyTorch could not do without knowing a size, or what lies in the memory of a tensor;
    None where it is another error."""
    if _UNALLOCATED in str(error):
        return DataDependent(
            "a kernel looks at the numbers of a tensor while it decides what to do",
            where=where,
            why=NO_NUMBERS,
            remedy="pass a Python number, or a list of them, in the place of that tensor",
        )
    if isinstance(error, RaggedSize):
        return DataDependent(
            "the model makes a jagged tensor, whose rows have lengths that come from data",
            where=where,
            remedy="capture with dynamic_shapes={}, or with sizes that vary: there a symbol stands for them",
        )
    if isinstance(error, OuterNumber):
        return DataDependent(
            "a function that an operator runs (cond, while_loop, map) uses a number read from a tensor",
            where=where,
            why="it is recorded into a graph of its own, and its derivative into another: both get tensors",
            remedy="use the tensor in the place of its .item(), as an operand of the operator",
        )
    unknown = unknown_size(error)
    return None if unknown is None else _size_unknown(*unknown, where)


def formula_decides(name: str, where: Place) -> DataDependent:
    """The error for a derivative inside the model whose formula looks at values."""
    return DataDependent(
        f"the derivative {name} decides by numbers, and the model takes it while it runs",
        where=where,
        why="eager takes a quicker way for some numbers (no factor of a product is 0), with other last bits",
        remedy="write it without: functools.reduce(torch.mul, x.unbind(dim)) for x.prod(dim), "
        "torch.where(mask, value, x) for x.masked_fill(mask, value); or take the derivative outside",
    )


def _size_unknown(condition: str, names: Sequence[str], where: Place) -> DataDependent:
    """The error for a decision by a size, or a number, that only a run gives."""
    return DataDependent(
        f"whether {condition} decides what the model does, and is not known in a capture",
        where=where,
        why=f"{', '.join(names)} comes from data: {_GIVEN}",
        remedy=f"say before that line what always holds, torch._check({condition}); or compute both sides "
        f"and choose with torch.where; or decide outside and pass the decision in; or {_EXAMPLE}",
    )


_GIVEN = "a number read from a tensor, or the size of a result of nonzero, unique or indexing with a mask"


def _need_of(operation: object, function: object) -> tuple[str, Need]:
    name = getattr(function, "__name__", short_name(operation))
    if has_size_of_data(operation):
        return f"{_SIZES.get(name, name)}, whose result has a size that depends on data,", Need.SIZE
    looks_for_nan = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    if name in ("grad", "backward") and looks_for_nan:
        return "anomaly mode, which looks for NaN in every gradient,", Need.ANOMALY
    return _READS.get(name, (f"a number (in {name})", Need.NUMBER))


def tensors_read(arguments: Sequence[object]) -> list[Tensor]:
    """The tensors whose values an operation needs: masks where there are any, otherwise all."""
    tensors = list(_tensors_in(arguments))
    return [tensor for tensor in tensors if tensor.dtype == torch.bool] or tensors


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def value_of(node: fx.Node, computed: Place, inputs: Mapping[fx.Node, str]) -> Value:
    """Which operation, on which line and in which module, made a value, and from what."""
    if node.op == "placeholder":
        return Value(_input_in_words(node, inputs))
    roots = dict.fromkeys(_input_in_words(root, inputs) for root in _roots(node))
    wanted = [text for text in roots if text.startswith(INPUT)] or list(roots)
    shown = ", ".join(wanted[:_SHOWN]) + (", …" if len(wanted) > _SHOWN else "")
    made = [line(node), *([f"computed {computed}"] if str(computed) else [])]
    return Value(node.name, ", ".join([*made, *([f"from {shown}"] if shown else [])]))


INPUT = "the input"
"""How a user's input is described, to be told from state."""


def _input_in_words(node: fx.Node, inputs: Mapping[fx.Node, str]) -> str:
    return inputs.get(node, f"{node.name}, a tensor from outside the model")


def _roots(node: fx.Node) -> list[fx.Node]:
    """The placeholders that a value is computed from, in graph order."""
    waiting, seen = [node], {node}
    while waiting:
        sources = waiting.pop().all_input_nodes
        waiting += [source for source in sources if source not in seen]
        seen.update(sources)
    return sorted(found for found in seen if found.op == "placeholder")


def required(frame: FrameType | None, *, called: bool) -> bool | None:
    """What a value has to be for code to go on that branches on it next; None where both sides go on.

    `called` says that a function gave the value, in place of a truth that code asks for by itself.
    """
    if frame is None:
        return None
    rows = list(dis.get_instructions(frame.f_code))
    at = next((n for n, row in enumerate(rows) if row.offset == frame.f_lasti), len(rows))
    passed = _CALLS | _CONVERTS if called else _CONVERTS
    jump = next((n for n in range(at, len(rows)) if rows[n].opname not in passed), None)
    if jump is None or "POP_JUMP" not in (name := rows[jump].opname) or "NONE" in name:
        return None
    sides = {"TRUE" in name: _target(rows, jump), "TRUE" not in name: jump + 1}
    negated = any(row.opname == "UNARY_NOT" for row in rows[at:jump])
    going_on = [value != negated for value, start in sides.items() if not _only_raises(rows, start)]
    return going_on[0] if len(going_on) == 1 else None


def _target(rows: Sequence[dis.Instruction], at: int) -> int:
    return next(n for n, row in enumerate(rows) if row.offset == rows[at].argval)


def _only_raises(rows: Sequence[dis.Instruction], start: int) -> bool:
    """Whether every way from here ends in an exception."""
    waiting, seen = [start], set[int]()
    while waiting:
        if (at := waiting.pop()) in seen or rows[at].opname == "RAISE_VARARGS":
            continue
        if rows[at].opname in _ENDS:
            return False
        seen.add(at)
        jumps = rows[at].opcode in dis.hasjrel
        waiting += [_target(rows, at)] if jumps else []
        waiting += [] if rows[at].opname.startswith("JUMP_") and "IF" not in rows[at].opname else [at + 1]
    return True
