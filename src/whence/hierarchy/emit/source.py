"""Write a body as the source of a Python function, and compile it.

Local names are numbers in order of appearance, so equal layers have equal source and are compiled once.
Values are deleted after their last use, as the interpreter of fx graphs does, to free memory early.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any

import torch
from torch import fx

from whence._torch.graphs import nested_graph, value_inputs, with_code
from whence._torch.operators.schemas import OpOverload, entry_point, owner_of
from whence._torch.subclasses.fully_sharded import is_distributed, whole
from whence.hierarchy.emit.differentiable import (
    put_behind,
    straight_through,
    with_gradients,
    without_gradients,
)
from whence.hierarchy.plan.plan import Body, Plan
from whence.hierarchy.run import gradient_pieces as pieces
from whence.hierarchy.run.captured import refuse_moved
from whence.hierarchy.run.gradient_pieces import GradientPieces
from whence.hierarchy.tree import TAKEN_NAMES
from whence.program.node_records import origin_of
from whence.program.program import FlatProgram
from whence.program.queries.marks import written_behind_autograd
from whence.program.queries.memory_order import gathered, in_memory_order
from whence.provenance import ModulePath
from whence.provenance import Source as UserLine
from whence.schema import Phase

_LITERALS = (bool, int, str, type(None))


@dataclass(frozen=True)
class FunctionSource:
    """The text of a function, and what belongs to it.

    `names` are the objects its global names stand for, `calls` the calls it makes, in order. `lines` gives
    the line of the user's code that each of its lines came from, and `nodes` the operation that it runs.
    """

    text: str
    names: Mapping[str, Any]
    calls: tuple[int, ...]
    lines: Mapping[int, UserLine | None]
    nodes: Mapping[int, str]


@dataclass
class _BodyWriter:
    plan: Plan
    readable: bool = False
    kept: GradientPieces | None = None
    locals: dict[str, str] = field(default_factory=dict)
    globals: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    origins: dict[int, UserLine | None] = field(default_factory=dict)
    nodes: dict[int, str] = field(default_factory=dict)

    def local(self, name: str) -> str:
        if name not in self.locals:
            self.locals[name] = f"v{len(self.locals)}"
        return self.locals[name]

    def write(self, line: str) -> None:
        self.lines.append(f"    {line}")

    def callee(self, target: Any, args: Sequence[Any] = ()) -> str:
        """A global name for an operation on these arguments."""
        if isinstance(target, OpOverload):
            name = f"{target.namespace}_{target._opname}_{target._overloadname}"
        else:
            name = f"function_{getattr(target, '__name__', 'call')}"
        function = target if self.readable else entry_point(target, args)
        while self.globals.setdefault(name, function) is not function:
            name += "_"
        return name

    def constant(self, value: Any) -> str:
        name = f"constant_{sum(key.startswith('constant_') for key in self.globals)}"
        self.globals[name] = value
        return name

    def value(self, name: str) -> str:
        """A value that an operation takes: one that may be in pieces is added up."""
        local = self.local(name)
        if self.kept is None or name not in self.kept.nodes:
            return local
        return f"{self.callee(pieces.whole)}({local})"

    def spelled(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            nested = nested_graph(argument)
            if nested is None:
                return self.value(argument.name)
            return self.constant(with_code(nested) if self.readable else nested)
        if isinstance(argument, (list, tuple)):
            items = ", ".join(map(self.spelled, argument))
            return f"[{items}]" if isinstance(argument, list) else f"({items},)" if argument else "()"
        if type(argument) in _LITERALS or (type(argument) is float and math.isfinite(argument)):
            return repr(argument)
        if isinstance(argument, (torch.dtype, torch.layout, torch.memory_format)):
            self.globals["torch"] = torch
            return str(argument)
        return self.constant(argument)


def write(
    plan: Plan, phase: Phase, number: int, *, readable: bool = False, kept: GradientPieces | None = None
) -> FunctionSource:
    """The function of one call in one phase.

    The forward takes the module, the calls it makes and its inputs; it returns its outputs, and last what it
    keeps, if anything. The backward takes the module, its calls, what was kept, if anything (a list that it
    empties), and its inputs. With `readable`, operators are called as people call them, for tracers to read;
    the gradients that are `kept` in pieces are added up when an operation takes them.
    """
    body = plan.body(phase, number)
    writer = _BodyWriter(plan, readable, kept)
    parameters = [writer.local(name) for name in body.inputs]
    is_backward = phase is Phase.BACKWARD
    if is_backward and body.kept:
        parameters.insert(0, "kept")
        writer.write(f"{_assigned_names(writer, body.kept)} = kept")
        writer.write("kept.clear()")
    copied = _copied(plan.program)
    for name, path in body.reads:
        value = attribute("module", path)
        if is_distributed(plan.program.state.get(name)):
            value = f"{writer.callee(whole)}({value})"
        writer.write(f"{writer.local(name)} = {value}{'.clone()' if name in copied else ''}")
        _write_look(writer, name, path)
    last_uses = _last_uses_in_body(plan, phase, body)
    for position, step in enumerate(body.steps):
        _write_step(writer, phase, step)
        dead = [writer.local(name) for name in last_uses.get(position, ()) if name in writer.locals]
        if dead:
            writer.write(f"del {', '.join(dead)}")
    results = [writer.local(name) for name in body.outputs]
    if not is_backward and body.kept:
        results.append(f"({''.join(f'{_copy_of_state(writer, name)}, ' for name in body.kept)})")
    writer.write(f"return ({''.join(f'{result}, ' for result in results)})")
    head = f"def run({', '.join(['module', 'calls', *parameters])}):"
    return FunctionSource(
        "\n".join([head, *writer.lines, ""]),
        writer.globals,
        tuple(writer.calls),
        writer.origins,
        writer.nodes,
    )


def _copied(program: FlatProgram) -> Set[str]:
    """State that is read as a copy, for it is written when the program has run."""
    changing = {} if program.has_backward else program.facts.histories
    return changing.keys() - written_behind_autograd(program)


def _is_put_behind(writer: _BodyWriter, node: fx.Node) -> bool:
    """Whether a value may go into the memory of the one before: there it is what autograd has kept, and no
    tensor of the model's, which is written when all has run."""
    program, before = writer.plan.program, node.args[0]
    if node.name not in program.facts.behind or not isinstance(before, fx.Node):
        return False
    is_apart = before.name not in program.state or before.name in _copied(program)
    return is_apart and not any(node < user for user in before.users)


def _write_look(writer: _BodyWriter, name: str, path: ModulePath) -> None:
    """Look whether state is what it was at capture, where it is read: that costs less than anything else."""
    fake, local = writer.plan.nodes[name].meta.get("val"), writer.local(name)
    if not isinstance(fake, torch.Tensor):
        return
    dtype, device = str(fake.dtype).partition(".")[2], re.sub(r"\W", "_", f"device_{fake.device}")
    writer.globals |= {dtype: fake.dtype, device: fake.device, "refuse_moved": refuse_moved}
    writer.write(f"if {local} is not None and ({local}.dtype is not {dtype} or {local}.device != {device}):")
    writer.write(f"    refuse_moved(module, {writer.spelled(tuple(path))}, {local}, {dtype}, {device})")


def _copy_of_state(writer: _BodyWriter, name: str) -> str:
    """State that the program writes is kept as a copy, and so is a view of it: the tensor changes before the
    backward runs."""
    local, node = writer.local(name), writer.plan.nodes.get(name)  # what another call keeps is no node
    is_written = node is not None and owner_of(node).name in writer.plan.program.facts.histories
    return f"{local}.clone()" if is_written else local


def _assigned_names(writer: _BodyWriter, names: tuple[str, ...]) -> str:
    return "".join(f"{writer.local(name)}, " for name in names)


def _write_step(writer: _BodyWriter, phase: Phase, step: str | int) -> None:
    if isinstance(step, int):
        _write_call(writer, phase, step)
        return
    if writer.kept is not None and (parts := writer.kept.sums.get(step)) is not None:
        found = (f"{writer.local(part)}, {writer.plan.positions[part]}" for part in parts)
        writer.write(f"{writer.local(step)} = {writer.callee(pieces.joined)}({', '.join(found)})")
        return
    node = writer.plan.nodes[step]
    arguments = [writer.spelled(argument) for argument in node.args]
    arguments += [f"{key}={writer.spelled(value)}" for key, value in node.kwargs.items()]
    for at, order in gathered(node):
        arguments[at] = f"{writer.callee(in_memory_order)}({arguments[at]}, {order})"
    callee = writer.callee(run_as(node.target), node.args)
    if step in writer.plan.program.facts.straight_through:
        arguments.insert(0, callee)
        callee = writer.callee(put_behind if _is_put_behind(writer, node) else straight_through)
    if step in writer.plan.program.facts.turned_on:
        arguments.insert(0, callee)
        callee = writer.callee(with_gradients)
    if step in writer.plan.program.facts.turned_off:
        arguments.insert(0, callee)
        callee = writer.callee(without_gradients)
    writer.write(f"{writer.local(step)} = {callee}({', '.join(arguments)})")
    line = len(writer.lines) + 1
    writer.origins[line], writer.nodes[line] = origin_of(node).source, step


def run_as(target: Any) -> Any:
    """A view in the layout of the capture, in another perhaps a copy.

    Autograd reshapes gradients, and some kernels lay their results out otherwise than their fakes do.
    """
    aten = torch.ops.aten
    return aten.reshape.default if target is aten.view.default else target


def _write_call(writer: _BodyWriter, phase: Phase, number: int) -> None:
    results = writer.plan.gives(phase, number)
    arguments = map(writer.local, writer.plan.takes(phase, number))
    called = f"calls[{len(writer.calls)}]({', '.join(['module', *arguments])})"
    writer.calls.append(number)
    writer.write(f"{_assigned_names(writer, results)} = {called}" if results else called)


def attribute(owner: str, path: ModulePath) -> str:
    """The expression that reads an attribute path; names the tree uses itself are read from registers."""
    for position, segment in enumerate(path):
        if segment in TAKEN_NAMES:
            owner = (
                f"{owner}._modules[{segment!r}]" if position + 1 < len(path) else _tensor_read(owner, segment)
            )
        elif segment.isidentifier() and not iskeyword(segment):
            owner = f"{owner}.{segment}"
        elif position + 1 < len(path):  # Python's parser takes no more than 200 nested calls of getattr
            owner = f"{owner}._modules[{segment!r}]"
        else:
            owner = f"getattr({owner}, {segment!r})"
    return owner


def _tensor_read(owner: str, name: str) -> str:
    """Reads a tensor past what a tree calls so; an instance of the user's class has it plainly."""
    found = f"{owner}.__dict__[{name!r}]"
    for register in ("_buffers", "_parameters"):
        held = f"{owner}.{register}.get({name!r})"
        found = f"({held} if {held} is not None else {found})"
    return found


def _last_uses_in_body(plan: Plan, phase: Phase, body: Body) -> dict[int, list[str]]:
    """Which values are needed no more after each step."""
    held = {*body.outputs, *(body.kept if phase is Phase.FORWARD else ())}
    last: dict[str, int] = {}
    for position, step in enumerate(body.steps):
        for name in _touched(plan, phase, step):
            last[name] = position
    ended: dict[int, list[str]] = {}
    for name, position in last.items():
        if name not in held:
            ended.setdefault(position, []).append(name)
    return ended


def _touched(plan: Plan, phase: Phase, step: str | int) -> Iterator[str]:
    if isinstance(step, str):
        yield step
        yield from (source.name for source in value_inputs(plan.nodes[step]))
        return
    yield from plan.takes(phase, step)
    yield from plan.gives(phase, step)
