"""Give a recorded graph its functional form: no node changes an input of another.

In-place operations become their functional twins, and every later reader is pointed at the new value. Views
are followed through a chain of steps to the tensor they look into: writing to a view writes the inverse of
each step back into that base, and a view read after its base has changed is taken again.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from whence._torch.autograd.replaced_data import PUTS_DATA, is_data
from whence._torch.graphs import fake_result
from whence._torch.operators.schemas import (
    WRAPPER,
    arguments_of_twin,
    functional_twin,
    is_wrapped,
    looked_into,
    missing_defaults,
    op_name,
    short_name,
    traits,
    without_outputs,
    written_arguments,
    written_nodes,
)
from whence._torch.operators.table import said_of
from whence._torch.operators.views import written_into
from whence._torch.pytrees import tree_map_only
from whence._torch.record.annotations import CUSTOM
from whence._torch.sizes.nodes import SizeNodes
from whence._torch.sizes.symbols import SYMBOLIC, is_surely_contiguous
from whence.errors import Fault, UnsupportedMutation
from whence.program.node_records import origin_of, place_of, set_origin
from whence.rewriting.layouts import as_before, as_recorded, drawn_in_memory_order, laid_out_as
from whence.schema import Phase

aten = torch.ops.aten


@dataclass(frozen=True)
class View:
    """A node that looks into `base` through `steps`, each a view operation in recording order."""

    base: fx.Node
    steps: tuple[fx.Node, ...]


@dataclass
class Functional:
    """A graph being rewritten.

    `same` leads from a node that returned one of its arguments to that argument. `latest` and `versions`
    hold the newest value of a tensor and how often it was written; `taken` the value of a view and the
    version it shows. `sharing` leads to others that lie in a tensor's memory, as parts of a sparse one do;
    `replaced` from a removed node to the node that holds its value; `history` lists the values that a tensor
    went through; `sources` leads from a node made here to the recorded one it was made for, `overwritten`
    from one that holds what was written to the one that held the tensor until then, and `copied` where all
    of it came from elsewhere; `looking` are nodes that take a view again, and those `behind` write behind
    autograd's back: where there are any it `is_overlooked`, and views are taken again after every write, for
    what autograd keeps of them has to lie in the memory that is written.
    """

    graph: fx.Graph
    sizes: SizeNodes | None = None
    views: dict[fx.Node, View] = field(default_factory=dict)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    latest: dict[fx.Node, fx.Node] = field(default_factory=dict)
    versions: dict[fx.Node, int] = field(default_factory=dict)
    taken: dict[fx.Node, tuple[int, fx.Node]] = field(default_factory=dict)
    sharing: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)
    straight: dict[fx.Node, None] = field(default_factory=dict)
    history: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    sources: dict[fx.Node, fx.Node] = field(default_factory=dict)
    overwritten: dict[fx.Node, fx.Node] = field(default_factory=dict)
    copied: dict[fx.Node, fx.Node] = field(default_factory=dict)
    looking: dict[fx.Node, None] = field(default_factory=dict)
    behind: dict[fx.Node, None] = field(default_factory=dict)
    is_overlooked: bool = False

    def final(self, node: fx.Node, last: fx.Node | None = None) -> fx.Node:
        """The node that holds, at the end of the graph, the value of the tensor that `node` recorded.

        A view that must be taken again is taken after `last`, or at the very end.
        """
        end = last or next(iter(reversed(self.graph.nodes)))
        return self.current(node, _NodeWriter(self, end, end.next))

    def current(self, node: fx.Node, writer: "_NodeWriter") -> fx.Node:
        """The node that holds the value of the tensor that `node` recorded, at the writer's position."""
        tensor = self.identity(node)
        view = self.views.get(tensor)
        if view is None:
            return self.latest.get(tensor, tensor)
        version, value = self.taken[tensor]
        newest = self.versions.get(view.base, 0)
        if version == newest:
            return value
        value = _looked_through(self, view, writer)[-1]
        self.taken[tensor] = (newest, value)
        return value

    def value_of(self, node: fx.Node) -> fx.Node:
        """The node that holds what `node` itself gave when it was recorded."""
        while node in self.replaced:
            node = self.replaced[node]
        return node

    def names_where(self, holds: Callable[[fx.Node], bool]) -> frozenset[str]:
        """The nodes that were made for a recorded one of which something holds."""
        return frozenset(node.name for node in self.graph.nodes if holds(self.sources.get(node, node)))

    @property
    def names_behind(self) -> frozenset[str]:
        """The nodes that write behind autograd's back."""
        return frozenset(node.name for node in self.behind)

    def identity(self, node: fx.Node) -> fx.Node:
        """The node that first stood for the tensor."""
        while node in self.same:
            node = self.same[node]
        return node


@dataclass(frozen=True)
class _NodeWriter:
    """Inserts operations in front of a node, one after the other, with the origin of `node`."""

    state: Functional
    node: fx.Node
    border: fx.Node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if self.state.sizes is not None:
            args, kwargs = self._sized(args), self._sized(kwargs)
        made = self._made(target, args, kwargs)
        made.meta["val"] = fake_result(target, args, kwargs)
        return made

    def _sized(self, arguments: Any) -> Any:
        """Arguments with nodes in the place of sizes that vary."""
        sizes: Any = self.state.sizes
        return tree_map_only(SYMBOLIC, lambda size: sizes.spelled_by(self._made, size), arguments)

    def _made(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        graph = self.state.graph
        with graph.inserting_before(self.border):
            made = graph.create_node("call_function", target, args, kwargs, short_name(target))
        self.state.sources[made] = self.node
        for key in ("torch_fn", CUSTOM):
            if key in self.node.meta:
                made.meta[key] = self.node.meta[key]
        set_origin(made, origin_of(self.node))
        return made


def functionalize(graph: fx.Graph, sizes: SizeNodes | None = None) -> Functional:
    """Rewrite `graph` in place; what is returned finds values by the nodes that were recorded.

    `sizes` knows the nodes of sizes that vary.
    """
    state = Functional(graph, sizes)
    if not any(_writes_arguments(node) for node in graph.nodes):
        return state
    state.is_overlooked = any(PUTS_DATA in node.meta or writes_data(node) for node in graph.nodes)
    _refuse([fault for node in list(graph.nodes) if (fault := _rewritten(state, node)) is not None])
    for node in reversed(list(state.replaced)):
        if not node.users:
            graph.erase_node(node)
    return state


def _rewritten(state: Functional, node: fx.Node) -> "_NoForm | None":
    """Rewrite a node; what stands against it, so that the nodes behind it are looked at, too."""
    if node.op != "call_function":
        return None
    try:
        _rewrite(state, node)
    except _NoForm as fault:
        return fault
    return None


def _writes_arguments(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(written_arguments(node.target, node.args, node.kwargs))


def writes_data(node: fx.Node) -> bool:
    """Whether a recorded operation writes through `tensor.data`, or through a view of it."""
    return any(any(map(is_data, _followed(written))) for written in written_nodes(node))


def _followed(node: fx.Node | None) -> Iterator[fx.Node]:
    while node is not None:
        yield node
        node = looked_into(node)


def _rewrite(state: Functional, node: fx.Node) -> None:
    writer = _NodeWriter(state, node, node)
    recorded: Any = node.args
    written = written_arguments(node.target, node.args, node.kwargs) if _writes_arguments(node) else []
    given = (node.args, node.kwargs)
    node.args, node.kwargs = fx.map_arg(given, lambda argument: state.current(argument, writer))
    kind = traits(node.target)
    if kind.moves_view:
        _move_view(state, node, recorded, writer)
    elif written:
        _write_functionally(state, node, written, writer)
        if PUTS_DATA in node.meta:
            _note_shared(state, _base_of(state, recorded[0]), recorded[1:2])
    elif kind.viewed is not None:
        _note_view(state, node, recorded[kind.viewed])
    elif node.target is operator.getitem and recorded[0] in state.views:
        _note_view(state, node, recorded[0])
    elif said_of(node.target).shares_memory:
        _note_shared(state, node, recorded)


def _note_shared(state: Functional, node: fx.Node, parts: Any) -> None:
    for base in (_base_of(state, part) for part in parts if isinstance(part, fx.Node)):
        state.sharing.setdefault(node, []).append(base)
        state.sharing.setdefault(base, []).append(node)


def _base_of(state: Functional, node: fx.Node) -> fx.Node:
    tensor = state.identity(node)
    view = state.views.get(tensor)
    return tensor if view is None else view.base


def _note_view(state: Functional, node: fx.Node, viewed: Any) -> None:
    if not isinstance(viewed, fx.Node):
        return
    source = state.identity(viewed)
    around = state.views.get(source, View(source, ()))
    state.views[node] = View(around.base, (*around.steps, node))
    state.taken[node] = (state.versions.get(around.base, 0), node)


def _move_view(state: Functional, node: fx.Node, recorded: Any, writer: _NodeWriter) -> None:
    """`x.squeeze_()`: from now on the tensor is a view of what it was."""
    twin = _twin_of(node)
    tensor = state.identity(recorded[0])
    if tensor.op == "placeholder" and node.target is not aten.detach_.default:
        raise _NoForm(node, f"whoever holds {tensor.name} would have a tensor of another shape afterwards")
    moved = writer(twin, *node.args, **node.kwargs)
    _note_view(state, moved, tensor)
    state.same[tensor] = moved
    state.same[node] = moved
    state.replaced[node] = moved


def _write_functionally(state: Functional, node: fx.Node, written: list[Any], writer: _NodeWriter) -> None:
    if not all(isinstance(tensor, (fx.Node, list, tuple)) for tensor in written):
        raise _NoForm(node, "what it writes to is not known")
    target: Any = node.target
    if functional_twin(target) is None and is_wrapped(target):
        _write_wrapped(state, node, written, writer)
        return
    twin, values = _twin_of(node), list[fx.Node]()
    made = _computed(twin, node, writer)
    own = len(twin._schema.returns) - len(written)
    for offset, tensor in enumerate(written):
        value = made if len(twin._schema.returns) == 1 else writer(operator.getitem, made, own + offset)
        for part, new in _each(tensor, value, writer):
            if _is_resized(target, part, new):
                values.append(_resize(state, part, new, writer))
                continue
            values.append(as_before(new, part, writer))
            _write(state, part, values[-1], writer)
    several = own == 0 and len(values) > 1 and len(target._schema.returns) > 1
    if not isinstance(written[0], fx.Node) or several:
        state.replaced[node] = made
        for item in node.users if several and isinstance(written[0], fx.Node) else ():
            position: Any = item.args[1]  # of several results, each is a tensor that is written
            state.same[item] = state.identity(written[position])
            state.replaced[item] = values[position]
        return
    if own > 0:
        lone = len(target._schema.returns) == 1
        result = as_recorded(node, writer(operator.getitem, made, 0), writer) if lone else made
        node.replace_all_uses_with(result)
        state.same[node] = result
        state.replaced[node] = result
        return
    state.same[node] = state.identity(written[0])
    state.replaced[node] = values[0]


def _is_resized(target: Any, tensor: fx.Node, value: fx.Node) -> bool:
    """Whether an operation finds no room for its result in the tensor that it is told to write to."""
    may = said_of(target).resizes or any(argument.is_out for argument in target._schema.arguments)
    return may and tensor.meta["val"].shape != value.meta["val"].shape


def _resize(state: Functional, recorded: fx.Node, value: fx.Node, writer: _NodeWriter) -> fx.Node:
    """From now on the tensor has other memory, of the size that the result needs."""
    tensor, node = state.identity(recorded), writer.node
    if tensor.op == "placeholder":
        why = f"whoever holds {tensor.name} would have a tensor of another shape afterwards"
        raise _NoForm(node, why, "run it once before the capture, and the tensor has that shape")
    if tensor in state.views or any(view.base is tensor for view in state.views.values()):
        raise _NoForm(node, "it gives another shape to a tensor that others look into")
    dtype = recorded.meta["val"].dtype
    if value.meta["val"].dtype != dtype:
        value = writer(aten._to_copy.default, value, dtype=dtype)
    state.latest[tensor] = value
    state.versions[tensor] = state.versions.get(tensor, 0) + 1
    state.history.setdefault(tensor, []).append(value)
    return value


def _write_wrapped(state: Functional, node: fx.Node, written: list[Any], writer: _NodeWriter) -> None:
    """A library's operator that writes: PyTorch's wrapper runs it on copies, and gives them back."""
    target: Any = node.target
    given = {argument.name: argument.default_value for argument in target._schema.arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    made = writer(WRAPPER, target, **given)
    own = len(target._schema.returns)
    positions = enumerate(traits(target).mutates, start=max(own, 1))
    offsets = [offset for offset, at in positions if given[list(given)[at]] is not None]
    for offset, tensor in zip(offsets, written, strict=True):
        for part, new in _each(tensor, writer(operator.getitem, made, offset), writer):
            _write(state, part, new, writer)
    result = writer(operator.getitem, made, 0) if own == 1 else made
    node.replace_all_uses_with(result)
    state.same[node] = state.replaced[node] = result


def _each(written: Any, value: fx.Node, writer: _NodeWriter) -> list[tuple[fx.Node, fx.Node]]:
    """What is written, each with its new value: a tensor, or those of a list."""
    if isinstance(written, fx.Node):
        return [(written, value)]
    if value.target is aten._foreach_zero.default:  # it has no derivative, and that of one tensor has
        now: Any = value.args[0]
        return [(part, writer(aten.zero.default, each)) for part, each in zip(written, now, strict=True)]
    return [(part, writer(operator.getitem, value, at)) for at, part in enumerate(written)]


def _computed(twin: Any, node: fx.Node, writer: _NodeWriter) -> fx.Node:
    """What the in-place operation writes, computed without writing; two twins would not give its numbers."""
    if twin is aten.copy.default:
        return _cloned_as_target(node, writer)
    tensor = node.args[0]
    is_contiguous = not isinstance(tensor, fx.Node) or is_surely_contiguous(tensor.meta["val"])
    if twin is aten.bernoulli.p and not is_contiguous:
        return drawn_in_memory_order(twin, node, writer)
    if rounds_in_place(twin, _tensors_of(node)):
        return _multiplied_in_half(twin, node, writer)
    if twin is aten.zero.default and tensor.meta["val"].is_complex():  # type: ignore[union-attr]
        return writer(aten.fill.Scalar, tensor, 0)  # the twin has no derivative in complex numbers
    target: Any = node.target
    kwargs = without_outputs(target, node.kwargs)
    args = arguments_of_twin(target, twin, node.args)
    return writer(twin, *args, **kwargs, **missing_defaults(target, twin, args, kwargs))


_MULTIPLIED = (aten.mul.Scalar, aten._foreach_mul.Scalar, aten._foreach_mul.ScalarList)


def _tensors_of(node: fx.Node) -> list[fx.Node]:
    """The tensors that are first among the arguments of an operation on one, or on a list."""
    first: Any = node.args[0]
    return [first] if isinstance(first, fx.Node) else list(first)


def rounds_in_place(twin: Any, tensors: Sequence[fx.Node]) -> bool:
    """Whether an operator and the one that writes give other last bits: in place a CPU rounds the number to
    the tensor's precision first."""
    if twin not in _MULTIPLIED:
        return False
    values = [tensor.meta["val"] for tensor in tensors]
    return any(value.device.type == "cpu" and value.dtype in _HALF for value in values)


_HALF = (torch.float16, torch.bfloat16)


def _multiplied_in_half(twin: Any, node: fx.Node, writer: _NodeWriter) -> fx.Node:
    """The number is rounded first, as in place."""
    tensors, by = _tensors_of(node), node.args[1]
    numbers: Any = by if isinstance(by, list | tuple) else [by] * len(tensors)
    rounded = [
        writer(aten.new_full.default, tensor, [], number)
        for tensor, number in zip(tensors, numbers, strict=True)
    ]
    if twin is aten.mul.Scalar:
        return writer(aten.mul.Tensor, tensors[0], rounded[0])
    return writer(aten._foreach_mul.List, tensors, rounded)


def _cloned_as_target(node: fx.Node, writer: _NodeWriter) -> fx.Node:
    """`aten.copy` has no derivative; a clone in the shape, dtype and layout of the target has."""
    target, source = node.args[:2]
    value = as_before(source, target, writer)  # type: ignore[arg-type]
    if is_surely_contiguous(target.meta["val"]):  # type: ignore[union-attr]
        return writer(aten.clone.default, value, memory_format=torch.contiguous_format)
    is_whole = said_of(target.target).view is None  # type: ignore[union-attr]
    if is_whole and origin_of(node).phase is Phase.BACKWARD:  # gradients arrive in any layout
        return written_into(aten.slice_scatter.default, target, value, writer)  # type: ignore[arg-type]
    return writer(aten.clone.default, value)


def _twin_of(node: fx.Node) -> Any:
    twin = functional_twin(node.target)
    if twin is None:
        raise _NoForm(node, f"{op_name(node.target)} has no functional form")
    return twin


def _write(state: Functional, recorded: fx.Node, value: fx.Node, writer: _NodeWriter) -> None:
    tensor = state.identity(recorded)
    view = state.views.get(tensor)
    base = _base_of(state, recorded)
    _refuse_shared(state, base, writer.node)
    before, whole = state.current(tensor, writer), state.latest.get(base, base)
    is_behind = PUTS_DATA in writer.node.meta or (view is not None and any(map(is_data, view.steps)))
    written = value if view is None else _written_through(state, view, value, writer, is_seen=not is_behind)
    if is_behind:
        written = writer(aten.copy.default, whole, written)
        state.straight[written] = state.behind[written] = None
    state.latest[base] = laid_out_as(whole, written, writer)
    state.overwritten[state.latest[base]] = whole
    if writer.node.target is aten.copy_.default and state.latest[base] is value:
        state.copied[value] = whole
    state.versions[base] = state.versions.get(base, 0) + 1
    state.history.setdefault(base, []).append(state.latest[base])
    if view is not None and not state.is_overlooked:
        taken = laid_out_as(before, value, writer)
        state.overwritten.setdefault(taken, before)
        state.taken[tensor] = (state.versions[base], taken)


def _refuse_shared(state: Functional, base: fx.Node, writing: fx.Node) -> None:
    """Raise where others still read the memory that is written, as a sparse tensor or as its values."""
    for other in state.sharing.get(base, ()):
        seen = [node for node in (*state.views, *state.same) if _base_of(state, node) is other]
        if any(writing < user for node in (other, *seen) for user in node.users):
            raise _NoForm(writing, "another tensor, sparse or with this one as its data, shares the memory")


def _looked_through(state: Functional, view: View, writer: _NodeWriter) -> list[fx.Node]:
    """The newest value of the base, and of each step of the view."""
    values = [state.latest.get(view.base, view.base)]
    for step in view.steps:
        values.append(writer(step.target, values[-1], *step.args[1:], **step.kwargs))
        state.looking[values[-1]] = None
    return values


def _written_through(
    state: Functional, view: View, value: fx.Node, writer: _NodeWriter, *, is_seen: bool
) -> fx.Node:
    """The new value of the base; a write that autograd has seen hands gradients on where it is detached."""
    values = _looked_through(state, View(view.base, view.steps[:-1]), writer)
    for position in reversed(range(len(view.steps))):
        step = view.steps[position]
        if step.target is operator.getitem:
            continue
        following = view.steps[position + 1] if position + 1 < len(view.steps) else None
        index = following.args[1] if following is not None and following.target is operator.getitem else None
        inverse = said_of(step.target).view
        written = inverse and inverse(step, index, values[position], value, writer)  # type: ignore[arg-type]
        if written is None:
            why = f"it writes through {op_name(step.target)}, whose inverse is not known"
            raise _NoForm(writer.node, why)
        if step.target is aten.detach.default and is_seen:
            written = writer(aten.copy.default, values[position], value)
            state.straight[written] = None
        value = written
    return value


_OUT_OF_PLACE = "use the out-of-place operation there, or clone the tensor before writing to it"


class _NoForm(Exception):
    """A node writes in a way that cannot be said without writing."""

    def __init__(self, node: fx.Node, why: str, remedy: str = _OUT_OF_PLACE) -> None:
        super().__init__(why)
        self.node, self.why, self.remedy = node, why, remedy


def _refuse(found: Sequence[_NoForm]) -> None:
    """Raise `UnsupportedMutation` for all of them; what stands in the backward follows from the forward."""
    written = [fault for fault in found if origin_of(fault.node).phase is Phase.FORWARD]
    UnsupportedMutation.refuse(map(_mutation_fault, written or found))


def _mutation_fault(found: _NoForm) -> Fault:
    what = f"{op_name(found.node.target)} cannot be written without changing its input"
    return Fault(what, where=place_of(found.node), why=found.why, remedy=found.remedy)
