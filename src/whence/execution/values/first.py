"""The first value of a run that is not finite, or that another program computes otherwise."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from whence._torch.autograd.nodes import inside_backward
from whence._torch.observe.hooks import hooks_on_gradient
from whence._torch.observe.module_calls import ObservedCall, observed_modules
from whence._torch.operators.table import said_of
from whence._torch.pytrees import tree_flatten, whole_leaves
from whence._torch.tensors import same_bits
from whence.execution.compare import Comparison, beside
from whence.execution.running import differentiate
from whence.execution.values.walk import Given, detached, drawing_again, inputs_of, walk
from whence.program import FlatProgram, Named
from whence.program.calls import Call, Leaf, Structure
from whence.program.node_records import origin_of, record_of
from whence.program.plain import AsJSON, plain_fields
from whence.program.signature import Input, describe
from whence.provenance import CallSite, ModulePath, Origin
from whence.schema import InputKind, Phase, Quality
from whence.tracing.listening.call_names import CallNames
from whence.tracing.target.subject import Subject, tensors_by_name


@dataclass(frozen=True)
class First(AsJSON):
    """The first value that is not as it should be: its node, where that came from, and what is wrong."""

    node: str
    origin: Origin
    why: str

    def __str__(self) -> str:
        if self.origin.quality is Quality.NONE and not self.origin.calls:
            return f"{self.node} {self.why}"
        calls = " + ".join(map(str, self.origin.calls)) or "the model's own code"
        line = f", at {self.origin.source}" if self.origin.source else ""
        return f"{self.node} {self.why}: {self.origin.phase} of {calls}{line}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**plain_fields(self, "node", "why"), **plain_fields(self.origin, "phase", "calls", "source")}


def first_nonfinite(program: FlatProgram, given: Given) -> First | None:
    """The first operation that makes a NaN of what holds none, or an infinity of what is finite.

    An infinity that is written down (a mask filled with `-inf`), and what it is handed on to, is meant to be
    there, but in a parameter or the state of an optimizer; a NaN never is. Memory that nobody has written is
    no value yet.
    """
    seen: dict[str, tuple[bool, bool]] = {}
    for node, values in walk(program, inputs_of(program, *given)):
        if said_of(node.target).gives_memory:
            continue
        nan, infinite = seen[node.name] = _nonfinite(values[node.name])
        if not nan and not infinite:
            continue
        sources = [seen.get(source.name, (False, False)) for source in node.all_input_nodes]
        if nan and not any(had for had, _ in sources):
            return _first_at(program, node, "holds a NaN")
        row = _given_as(program, node)
        is_meant = row is not None and row.kind not in (InputKind.PARAMETER, InputKind.OPTIMIZER_STATE)
        given_infinity = is_meant or any(had for _, had in sources) or _writes_infinity(node)
        if infinite and not given_infinity:
            return _first_at(program, node, "holds an infinity")
    return None


def _nonfinite(value: Any) -> tuple[bool, bool]:
    tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return any(bool(t.isnan().any()) for t in floats), any(bool(t.isinf().any()) for t in floats)


def _writes_infinity(node: fx.Node) -> bool:
    leaves = tree_flatten((node.args, node.kwargs))[0]
    return any(isinstance(leaf, float) and math.isinf(leaf) for leaf in leaves)


def first_difference(program: FlatProgram, other: FlatProgram, given: Given) -> First | None:
    """The first node of the program whose value the node of that name in another program does not have.

    Both begin with the same random state, and read their own weights; nodes that only one of them has are
    not compared, nor is memory that nobody has written. The random state afterwards is that of the
    program's run.
    """
    names = {node.name for node in program.graph.nodes} & {node.name for node in other.graph.nodes}
    inputs = inputs_of(other, *given)
    with drawing_again(other):
        there = walk(other, inputs)
        expected = {node.name: detached(values[node.name]) for node, values in there if node.name in names}
    for node, values in walk(program, inputs_of(program, *given)):
        compares = node.name in expected and not said_of(node.target).gives_memory
        if compares and (why := next(_otherwise(detached(values[node.name]), expected[node.name]), None)):
            return _first_at(program, node, why)
    return None


def _otherwise(found: Any, expected: Any) -> Iterator[str]:
    ours, theirs = (tree_flatten(value)[0] for value in (found, expected))
    if len(ours) != len(theirs):
        yield f"holds {len(ours)} values, and not {len(theirs)}"
    for mine, other in zip(ours, theirs, strict=False):
        if not isinstance(mine, Tensor) or not isinstance(other, Tensor):
            continue
        if mine.shape != other.shape or mine.dtype != other.dtype:
            yield f"is {describe(mine)}, and not {describe(other)}"
        elif not same_bits(other, mine):
            largest = (mine.to(torch.float64) - other.to(torch.float64)).abs().max()
            yield f"differs by up to {float(largest):.3g}"


def _first_at(program: FlatProgram, node: fx.Node, why: str) -> First:
    if (row := _given_as(program, node)) is not None:
        why = f"{why}: it is the {row.kind.replace('_', ' ')} {row.path}"
    return First(node.name, program.where(node), why)


def _given_as(program: FlatProgram, node: fx.Node) -> Input | None:
    """What a node stands for that is given, or held."""
    rows = (*program.signature.inputs, *program.signature.attributes) if node.op != "call_function" else ()
    return next((row for row in rows if row.name == node.name), None)


def first_unequal(rows: Iterable[Comparison]) -> str | None:
    """The first call that returns something else, or whose backward makes another gradient of an equal one;
    None if there is none."""
    return next((row.differs_in or f"{row.name}, {row.note}" for row in rows if not row.equal), None)


Start = Callable[[Callable[[tuple[Any, Any]], Any]], Any]
"""Runs something on the inputs, from the same state and seed each time."""


def by_call(program: FlatProgram, subject: Subject, start: Start) -> Iterator[Comparison]:
    """What each call of a module returns in eager and in the program, in the order in which calls end; where
    the program holds a backward, then the gradients of that, in the order in which eager has them."""
    watcher, tangents = start(lambda given: _watched(program, subject, *given))
    values = start(lambda given: _values_inside(program, given, tangents))
    return calls_beside(program, watcher, values)


def _watched(program: FlatProgram, subject: Subject, args: Any, kwargs: Any) -> tuple["Watcher", list[Any]]:
    """The calls of a run of eager, and the gradients that it began with."""
    watcher = Watcher(subject, has_backward=program.has_backward)
    with watcher.watching(program):
        result = subject.call(*args, **kwargs)
        if not program.has_backward:
            return watcher, []
        loss = None if program.loss_function is None else program.loss_function(result)
        return watcher, differentiate(whole_leaves(result), loss)


def calls_beside(program: FlatProgram, watcher: "Watcher", values: Mapping[str, Any]) -> Iterator[Comparison]:
    """What each call returned that was watched, and its gradient, beside the values of nodes in a program."""
    calls = {(call.site.path, call.site.index): call for call in program.calls}
    for site, leaves in watcher.finished:
        call, name = calls.get((site.path, site.index)), _with_class(site)
        if call is None:
            yield Comparison("call", name, equal=False, note="which runs in eager and not in the program")
        elif call.outputs is not None:  # in a branch, which may not be the one that is taken, it is None
            for leaf, value in _returned_beside(program, call.outputs, leaves, values):
                yield _beside(program, ("call", name), leaf, value, values)
    yield from _gradients_beside(program, watcher, values, calls)


def _returned_beside(
    program: FlatProgram, outputs: Structure, leaves: Sequence[Any], values: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The nodes of what a call returns, each with what it was in eager.

    Of a call in a graph of others it is known which of its values are read, and not as which of its results:
    a node is beside the equal one, or else beside the only one that is like it.
    """
    if program.guards.rows:
        for leaf, value in zip(outputs.leaves, leaves, strict=False):
            if isinstance(leaf, Named) and leaf.name in values and isinstance(value, Tensor):
                yield leaf.name, value
        return
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    read = ((name, now) for name in outputs.names if isinstance(now := values.get(name), Tensor))
    for name, now in read:
        like = [value for value in tensors if value.shape == now.shape]
        equal = [value for value in like if same_bits(value, now)]
        if equal or len(like) == 1:
            yield name, (equal or like)[0]


def _gradients_beside(
    program: FlatProgram,
    watcher: "Watcher",
    values: Mapping[str, Any],
    calls: Mapping[tuple[ModulePath, int], Call],
) -> Iterator[Comparison]:
    """A row for each gradient of what a call returned, and of a parameter; those of what a call is given say
    where one differs."""
    known: dict[str, str] = {}
    for border, gradient in watcher.gradients():
        total = gradient_of(program, _leaf_at(border, calls))
        if total is None or total not in values:
            continue
        row = _beside(program, _kind_and_name(program, border), total, gradient, values)
        known[total] = "" if row.equal else _differs_in(program, total, known)
        if isinstance(border, str) or border.is_returned:
            yield replace(row, differs_in=known[total])


def _kind_and_name(program: FlatProgram, border: "_Border | str") -> tuple[str, str]:
    if isinstance(border, str):
        return "gradient", program.input(border).path
    return "backward", _with_class(border.site)


def _leaf_at(border: "_Border | str", calls: Mapping[tuple[ModulePath, int], Call]) -> Leaf | None:
    if isinstance(border, str):
        return Named(border)
    call = calls.get((border.site.path, border.site.index))
    structure = None if call is None else call.outputs if border.is_returned else call.inputs
    leaves = () if structure is None else structure.leaves
    return leaves[border.at] if border.at < len(leaves) else None


def _differs_in(program: FlatProgram, total: str, known: Mapping[str, str]) -> str:
    """The calls whose backward makes another gradient of equal ones, at or before this; `known` says so of
    those that were compared before, and nothing where one is equal."""
    made, reached = set[fx.Node](), [program.node(total)]
    while reached:
        made.add(node := reached.pop())
        for source in node.all_input_nodes:
            origin = origin_of(source)
            if source in made or origin.phase is not Phase.BACKWARD or origin.recomputed:
                continue
            if found := known.get(source.name):
                return found
            reached += [] if source.name in known else [source]
    calls = {site: None for node in sorted(made) for site in program.where(node).calls}
    names = " or ".join(map(_with_class, calls)) or "the model's own code"
    return f"{names}, at {origin_of(program.node(total)).source}"


def _with_class(site: CallSite) -> str:
    return f"{str(site) or '(root)'} ({site.type})"


def _beside(
    program: FlatProgram, row: tuple[str, str], node: str, value: Tensor, values: Mapping[str, Any]
) -> Comparison:
    found, line = beside(*row, value, values[node]), f"at {origin_of(program.node(node)).source}"
    return found if found.equal else replace(found, note=f"{found.note}, {line}" if found.note else line)


def gradient_of(program: FlatProgram, leaf: Leaf | None) -> str | None:
    """The node that holds the gradient of a parameter, or of what a call returned; None where none does, or
    a pass merged it."""
    if not isinstance(leaf, Named):
        return None
    record = record_of(program.node(leaf.name))
    return None if record.adjoint is None or record.unclear else record.adjoint.total


def border_gradients(program: FlatProgram) -> set[str]:
    """The nodes that hold gradients of parameters, and of what calls are given and return."""
    borders = [each for call in program.calls for each in (call.inputs, call.outputs) if each is not None]
    leaves = [leaf for each in borders for leaf in each.leaves]
    leaves += [Named(row.name) for row in program.signature.inputs_of(InputKind.PARAMETER)]
    totals = (gradient_of(program, leaf) for leaf in leaves)
    return {total for total in totals if total is not None}


def _values_inside(program: FlatProgram, flat: tuple[Any, Any], tangents: Sequence[Any]) -> dict[str, Any]:
    """What nodes of the forward hold, and the gradients of what calls return; copies of state and arguments,
    which eager may write. Where eager begins with other gradients than the program, there are none."""
    rows = program.signature.inputs_of(InputKind.TANGENT)
    begins = len(rows) == len(tangents) and all(row.part is None for row in rows)
    given = {row.name: tangent for row, tangent in zip(rows, tangents, strict=True)} if begins else {}
    wanted = border_gradients(program) if begins else set()
    values: dict[str, Any] = {}
    for node, now in walk(program, inputs_of(program, *flat, given)):
        held = detached(now[node.name])
        if node.op != "call_function" and isinstance(held, Tensor):
            values[node.name] = held.clone()
        elif origin_of(node).phase is Phase.FORWARD or node.name in wanted:
            values[node.name] = held
    return values


class _Border(NamedTuple):
    """A value that a call is given or returns, by its position there."""

    site: CallSite
    is_returned: bool
    at: int


class Watcher:
    """Notes what every module call returns, in the order in which they finish, and the gradients of that, of
    what it is given, and of parameters.

    Those are noted by hooks on the tensors, which compute nothing.
    """

    def __init__(self, subject: Subject, *, has_backward: bool = True) -> None:
        self.finished: list[tuple[CallSite, list[Any]]] = []
        self._arrived: list[tuple[_Border | str, Tensor]] = []
        self._has_backward = has_backward
        self._names = CallNames(subject)
        self._parameters = tensors_by_name(subject)

    def gradients(self) -> Iterator[tuple[_Border | str, Tensor]]:
        """In the order of the backward; where several backwards reach a value, none."""
        times = Counter(border for border, _ in self._arrived)
        return (row for row in self._arrived if times[row[0]] == 1)

    @contextmanager
    def watching(self, program: FlatProgram) -> Iterator[None]:
        """Watch what runs inside, and the parameters of this program."""
        rows = [row for row in program.signature.inputs_of(InputKind.PARAMETER) if row.part is None]
        held = [(row.name, self._parameters.get(row.path)) for row in rows]  # a loss may have its own
        hooks = [self._hook(name, each) for name, each in held if each is not None and each.requires_grad]
        try:
            with observed_modules(self):
                yield
        finally:
            for hook in filter(None, hooks):
                hook.remove()

    @contextmanager
    def called(self, module: nn.Module, args: Any, kwargs: Any) -> Iterator[ObservedCall]:
        path = None if inside_backward() else self._names.path(module)
        if path is None:  # or a call that a checkpoint repeats
            yield ObservedCall(lambda _result: None)
            return
        with self._names.calling(module, path) as site:
            self._hook_each(site, tree_flatten((args, kwargs))[0], is_returned=False)
            yield ObservedCall(lambda result: self._note(site, result))

    def accessed(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        self._names.reached(parent, name, child)

    def _note(self, site: CallSite, result: Any) -> None:
        leaves, _ = tree_flatten(result)
        self._hook_each(site, leaves, is_returned=True)
        self.finished.append(
            (site, [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        )

    def _hook_each(self, site: CallSite, leaves: Sequence[Any], *, is_returned: bool) -> None:
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                self._hook(_Border(site, is_returned, at), leaf)

    def _hook(self, border: _Border | str, tensor: Tensor) -> RemovableHandle | None:
        if not self._has_backward or self._is_changed(tensor):
            return None
        hook: RemovableHandle = tensor.register_hook(partial(self._note_gradient, border))
        return hook

    def _note_gradient(self, border: _Border | str, gradient: Tensor) -> None:
        self._arrived.append((border, gradient.detach().clone()))

    def _is_changed(self, leaf: Tensor) -> bool:
        """Whether hooks of the model's own would have changed a gradient before it is noted."""
        return any(getattr(hook, "func", None) != self._note_gradient for hook in hooks_on_gradient(leaf))
