"""A captured call as a person makes it: what eager, `torch.compile` and `torch.fx` all run around its body.

It is written for tracers to read: functions over plain data that was computed before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from whence._torch.subclasses.fully_sharded import whole
from whence.hierarchy.run.captured import refuse_moved
from whence.hierarchy.run.interface import Interface, readable
from whence.hierarchy.run.wrapper_subclasses import attribute_of
from whence.program import Structure
from whence.program.arguments.open_sizes import Reading, function_of
from whence.program.program import FlatProgram
from whence.program.queries.marks import written_behind_autograd
from whence.provenance import ModulePath

if TYPE_CHECKING:
    from whence.hierarchy.emit.calls import CallBody

Body = Callable[..., tuple[Any, ...]]
"""Runs a call on its module and flat values."""
Expression = Callable[..., Any]
"""Computes something from the sizes of a call, in the order in which they are read."""
Write = tuple[str, int | tuple[str, ...], bool, bool]
"""A new value, the position or the path of what it replaces, whether that keeps its shape, and whether
autograd is not to know."""


@dataclass(frozen=True)
class GeneratedCall:
    """How flat arguments become the inputs of a body, and its outputs a result.

    `leaves` and `copied` say which arguments are which values, `state` what the module holds, with its dtype
    and device at capture, `sizes` what is computed from the open sizes, which `readings` read. Results that
    are state themselves are `read_after` the body.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    leaves: tuple[tuple[int, str], ...]
    copied: tuple[tuple[str, int], ...]
    state: tuple[tuple[str, tuple[str, ...], Any], ...]
    readings: tuple[Reading, ...]
    sizes: tuple[tuple[str, Expression], ...]
    writes: tuple[Write, ...]
    handed_on: tuple[tuple[str, tuple[str, ...]], ...]
    read_after: tuple[tuple[str, tuple[str, ...]], ...]
    result: Structure
    loss: str | None

    def run(
        self,
        body: Body,
        module: nn.Module,
        flat: Sequence[Any],
        leaves: Sequence[Any],
        took: Callable[[tuple[str, ...]], bool] | None = None,
    ) -> Any:
        """Run the body, write what it writes, and give the result.

        `leaves` are the flat arguments as autograd is to see them. State is left out that `took` says belongs
        to a module in another's place.
        """
        values: dict[str, Any] = {}
        for at, name in self.leaves:
            values[name] = leaves[at]
        for name, path, then in self.state:
            values[name] = whole(attribute_of(module, path))
            if then is not None:
                refuse_moved(module, path, values[name], *then)
        for name, at in self.copied:
            values[name] = flat[at].clone()
        if self.sizes:
            sizes = [reading.of(flat) for reading in self.readings]
            for name, expression in self.sizes:
                values[name] = expression(*sizes)
        results = body(module, *[values[name] for name in self.inputs])
        for at, name in enumerate(self.outputs):
            values[name] = results[at]
        for name, path in self.handed_on:
            values[name] = whole(attribute_of(module, path)).detach().clone()
        for name, target, keeps_shape, is_behind in self.writes:
            is_gone = took is not None and isinstance(target, tuple) and took(target)
            if values[name] is not None and not is_gone:
                _write_target(module, flat, target, values[name], keeps_shape, is_behind)
        return self._returned(module, flat, values)

    def _returned(self, module: nn.Module, flat: Sequence[Any], values: dict[str, Any]) -> Any:
        """The result over these values; an input that was written and is returned is itself."""
        for name, path in self.read_after:
            values[name] = whole(attribute_of(module, path))
        for name, target, _, _ in self.writes:
            if isinstance(target, int) and not carries_gradient(values[name]):
                values[name] = flat[target]
        result = self.result.filled(values)
        return result if self.loss is None else (values[self.loss], result)


def carries_gradient(value: Any) -> bool:
    """Whether a value has a history; what `torch.fx` puts in its place has none."""
    return isinstance(value, Tensor) and value.requires_grad


def _write_target(
    module: nn.Module, flat: Sequence[Any], target: Any, new: Any, keeps_shape: bool, is_behind: bool
) -> None:
    """Give an argument, or state of the module, its new value; one of another kind takes its place.

    An empty region without gradients would be a graph of its own in an export.
    """
    held = flat[target] if isinstance(target, int) else attribute_of(module, target)
    if isinstance(new, Tensor) and not isinstance(target, int):
        keeps_shape = held.shape == new.shape and held.dtype == new.dtype
    if not keeps_shape:
        setattr(attribute_of(module, target[:-1]), target[-1], new.detach())
    elif is_behind:
        held.data.copy_(new.detach())
    elif carries_gradient(held):
        with torch.no_grad():
            held.copy_(new.detach())
    else:
        held.copy_(new.detach())


def generated_call(interface: Interface, call: "CallBody") -> GeneratedCall:
    """How a person makes a call."""
    body, nodes = call.call_plan.forward, call.plan.nodes
    program, open_sizes = call.plan.program, interface.convention.sizes
    readings = () if open_sizes is None else open_sizes.readings
    names = [reading.name for reading in readings]
    given = tuple((at, name) for at, name in enumerate(interface.leaves) if name is not None)
    held = (name for name, _ in (*interface.state, *interface.sizes))
    known = {*interface.leaves, *body.outputs, *held}
    after = (name for name in interface.result.names if name not in known)
    return GeneratedCall(
        inputs=body.inputs,
        outputs=body.outputs,
        leaves=given,
        copied=tuple(_arguments_copied(interface)),
        state=tuple((name, tuple(path), _dtype_and_device(nodes[name])) for name, path in interface.state),
        readings=readings,
        sizes=tuple((name, function_of(text, names)) for name, text in interface.sizes),
        writes=tuple(_written_targets(interface, nodes, program)),
        handed_on=tuple(_handed_on(interface, call)),
        read_after=tuple((name, tuple(ModulePath.parse(program.input(name).path))) for name in after),
        result=interface.result,
        loss=interface.loss,
    )


def _dtype_and_device(node: fx.Node) -> tuple[torch.dtype, torch.device] | None:
    value = node.meta["val"]
    return (value.dtype, value.device) if isinstance(value, Tensor) else None


def _handed_on(interface: Interface, call: "CallBody") -> Iterator[tuple[str, tuple[str, ...]]]:
    """State that is the new value of other state, as it is before anything is written."""
    state = {row.name for row in call.plan.program.signature.state}
    for name in dict.fromkeys(name for name, _ in interface.writes if name in state):
        path = readable(call.plan, name, call.number)
        if path is not None:
            yield name, tuple(path)


def _arguments_copied(interface: Interface) -> Iterator[tuple[str, int]]:
    for _, target in interface.writes:
        if isinstance(target, int) and (name := interface.leaves[target]) is not None:
            yield name, target


def _written_targets(
    interface: Interface, nodes: Mapping[str, fx.Node], program: FlatProgram
) -> Iterator[Write]:
    holders, behind = program.facts.holders, written_behind_autograd(program)
    for name, target in interface.writes:
        holder = holders.get(name, name)
        if isinstance(target, int):
            yield name, target, True, holder in behind
            continue
        held, new = nodes[holder].meta["val"], nodes[name].meta["val"]
        yield name, tuple(target), (held.shape, held.dtype) == (new.shape, new.dtype), holder in behind
