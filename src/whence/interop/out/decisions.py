"""Decisions by values in the words of torch.export: an assertion that the values decide so."""

import operator
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from whence._torch.fakes import FakeTensor
from whence._torch.operators.schemas import ASSERT
from whence._torch.sizes.drawn_numbers import DRAWN, spelled_number
from whence._torch.sizes.numbers import ITEM
from whence._torch.sizes.symbols import SYMBOLIC
from whence.errors import Fault, Place
from whence.program import FlatProgram
from whence.program.node_records import place_of

aten = torch.ops.aten
Copy = Callable[[fx.Node], fx.Node]


def decision_faults(program: FlatProgram) -> Iterator[Fault]:
    """Decisions about contents, and numbers that were not kept open; and draws that are none of torch's."""
    for row in program.decisions:
        if not _is_symbolic_argument(program.node(row.node)):
            source = None if row.source is None else str(row.source)
            yield Fault(
                f"values decided: {row.asked} is {row.answer!r}",
                where=Place(None if row.call is None else str(row.call), source),
                why="an exported program asserts numbers and truths that it reads itself, and nothing else",
                remedy="run program.module() itself, which looks in every run",
            )

    for node in program.nodes():
        if node.target is DRAWN:
            yield Fault(
                f"{spelled_number(node)} draws from a generator that is none of torch's",
                where=place_of(node),
                why="an exported program leaves out what nobody reads, and the generator would be elsewhere",
                remedy="run program.module() itself, or draw with torch's generator",
            )


def _is_symbolic_argument(node: fx.Node) -> bool:
    found = node.args[0]
    return isinstance(found, fx.Node) and isinstance(found.meta.get("val"), SYMBOLIC)


def asserted(graph: fx.Graph, decision: fx.Node, copy: Copy) -> tuple[fx.Node, ...]:
    """The nodes that assert a decision; the last gives nothing."""
    found, answer, asked, *place = decision.args
    where = ", ".join(str(part) for part in place if part)
    text = f"values decide otherwise: {asked} was {answer!r} at capture ({where})"
    number: Any = found
    ways: tuple[Any, Any, Any] = number, torch.sym_not, ASSERT
    if number.target is ITEM and isinstance(answer, bool):  # what PyTorch reads back has no symbol for one
        ways = number.args[0], aten.logical_not.default, aten._assert_async.msg
    held, negated, assertion = ways
    made: list[fx.Node] = []
    if answer is False:
        made = [_append_call(graph, negated, copy(held))]
    elif answer is not True:
        made = [_append_call(graph, operator.eq, copy(held), answer)]
    checked = graph.call_function(assertion, (made[-1] if made else copy(held), text))
    checked.meta["val"] = None
    return *made, checked


def _append_call(graph: fx.Graph, function: Any, held: fx.Node, *others: Any) -> fx.Node:
    node = graph.call_function(function, (held, *others))
    value: Any = held.meta["val"]
    with value.fake_mode if isinstance(value, FakeTensor) else nullcontext():
        node.meta["val"] = function(value, *others)
    return node
