"""Captured calls for those who read code: `torch.compile`, strict export and `torch.fx.symbolic_trace`.

A call made by a person is three steps here, all of them functions over plain data that was computed before:
the arguments become flat values, these are looked at, and the body runs on them. A tracer records the second
and the third, and learns from the second what it may assume.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.observe.compile_flags import constant_to_tracers
from whence._torch.pytrees import TreeSpec, tree_flatten, tree_unflatten
from whence._torch.tensors import autocast_state
from whence.hierarchy.run.bodies import body_of
from whence.program import Constant, Named, Structure
from whence.program.arguments.open_sizes import Reading

Body = Callable[..., tuple[Any, ...]]
"""Runs a call on its module and flat values."""
Expression = Callable[..., Any]
"""Computes something from the sizes of a call, in the order in which they are read."""

autocast_now = constant_to_tracers(autocast_state)


@dataclass(frozen=True)
class ExpectedLeaf:
    """What must hold of one flat argument: the sizes that are fixed (None where open), or its value."""

    position: int
    path: str
    shape: tuple[int | None, ...] | None
    dtype: torch.dtype | None
    constant: Any = None


def problem_of(leaves: Sequence[ExpectedLeaf], flat: Sequence[Any]) -> str:
    """The first thing in which arguments differ from those of the capture, in words, or nothing."""
    for leaf in leaves:
        given = flat[leaf.position]
        if leaf.shape is None:
            if type(given) is not type(leaf.constant) or given != leaf.constant:
                return f"{leaf.path} has another value than at capture"
        elif not isinstance(given, Tensor):
            return f"{leaf.path} was a tensor at capture"
        elif given.dtype != leaf.dtype or given.dim() != len(leaf.shape):
            return f"{leaf.path} has another dtype or rank than at capture"
        else:
            for axis, size in enumerate(leaf.shape):
                if size is not None and given.shape[axis] != size:
                    return f"{leaf.path}.shape[{axis}] was {size} at capture"
    return ""


@dataclass(frozen=True)
class Looking:
    """What is read from flat arguments before they are used: their sizes, and rules that these must keep."""

    leaves: tuple[ExpectedLeaf, ...]
    readings: tuple[Reading, ...]
    rules: tuple[tuple[Expression, str], ...]
    same: tuple[tuple[int, int], ...]

    def sizes(self, flat: Sequence[Any]) -> list[Any]:
        """The open sizes of a call."""
        return [_read(reading, flat) for reading in self.readings]

    def problem(self, flat: Sequence[Any]) -> str:
        """Why the capture does not hold for these arguments, in words, or nothing."""
        if found := problem_of(self.leaves, flat):
            return found
        sizes = self.sizes(flat)
        for rule, words in self.rules:
            if not rule(*sizes):
                return words
        for first, second in self.same:
            if flat[first] is not flat[second]:
                return f"arguments {first} and {second} were one tensor at capture"
        return ""


def _read(reading: Reading, flat: Sequence[Any]) -> Any:
    leaf = flat[reading.dimension.position]
    found = leaf if reading.dimension.dim is None else leaf.shape[reading.dimension.dim]
    return found if (reading.scale, reading.offset) == (1, 0) else (found - reading.offset) // reading.scale


@dataclass(frozen=True)
class Running:
    """How flat arguments become the inputs of a body, and its outputs a result."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    leaves: tuple[tuple[int, str], ...]
    state: tuple[tuple[str, tuple[str, ...]], ...]
    sizes: tuple[tuple[str, Expression], ...]
    copied: tuple[tuple[str, int], ...]
    orders: Mapping[str, tuple[int, ...]]
    writes: tuple[tuple[str, int | tuple[str, ...], bool], ...]
    result: Structure
    read_after: tuple[tuple[str, tuple[str, ...]], ...]
    loss: str | None

    def run(self, body: Body, module: nn.Module, flat: Sequence[Any], sizes: Sequence[Any]) -> Any:
        """Run the body, write what it writes, and give the result."""
        values: dict[str, Any] = {}
        for at, name in self.leaves:
            values[name] = flat[at]
        for name, path in self.state:
            values[name] = attribute_at(module, path)
        for name, at in self.copied:
            values[name] = flat[at].clone()
        for name, expression in self.sizes:
            values[name] = expression(*sizes)
        for name, order in self.orders.items():
            values[name] = in_order(values[name], order)
        results = body(module, *[values[name] for name in self.inputs])
        for at, name in enumerate(self.outputs):
            values[name] = results[at]
        for name, target, keeps_shape in self.writes:
            write(module, flat, target, values[name], keeps_shape)
        return self.filled(module, flat, values)

    def filled(self, module: nn.Module, flat: Sequence[Any], values: dict[str, Any]) -> Any:
        """The result over these values; an input that was written and is returned is itself."""
        for name, path in self.read_after:
            values[name] = attribute_at(module, path)
        for name, target, _ in self.writes:
            if isinstance(target, int) and not carries_gradient(values[name]):
                values[name] = flat[target]
        leaves = [
            values[leaf.name]
            if isinstance(leaf, Named)
            else leaf.value
            if isinstance(leaf, Constant)
            else leaf
            for leaf in self.result.leaves
        ]
        result = tree_unflatten(leaves, self.result.spec)
        return result if self.loss is None else (values[self.loss], result)


def carries_gradient(value: Any) -> bool:
    """Whether a value has a history; what `torch.fx` puts in its place has none."""
    return isinstance(value, Tensor) and value.requires_grad


def attribute_at(module: Any, path: Sequence[str]) -> Any:
    """What is at an attribute path; a module may hold state under a name that the tree uses itself."""
    for segment in path[:-1]:
        module = module._modules[segment] if segment in module._modules else getattr(module, segment)
    name = path[-1]
    if name in module._parameters:
        return module._parameters[name]
    return module._buffers[name] if name in module._buffers else getattr(module, name)


def in_order(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """A tensor whose dimensions lie in memory one after the other, in this order."""
    back = [order.index(axis) for axis in range(len(order))]
    if back == list(order) == list(range(len(order))):
        return tensor.contiguous()
    return tensor.permute(list(order)).contiguous().permute(back)


def write(module: nn.Module, flat: Sequence[Any], target: Any, new: Any, keeps_shape: bool) -> None:
    """Give an argument, or state of the module, its new value."""
    held = flat[target] if isinstance(target, int) else attribute_at(module, target)
    if not keeps_shape:
        for segment in target[:-1]:
            module = module._modules[segment]  # type: ignore[assignment]
        setattr(module, target[-1], new.detach())
    elif carries_gradient(held):
        with torch.no_grad():
            held.copy_(new.detach())
    else:
        held.copy_(new.detach())


@dataclass(frozen=True)
class Places:
    """The places of preserved modules, as paths and numbers of calls, and how to run where one was taken."""

    plan: Any
    rows: tuple[tuple[tuple[str, ...], int], ...]
    around: Callable[..., Any]

    def taken(self, module: nn.Module) -> bool:
        """Whether another module is in one of the places."""
        for path, number in self.rows:
            held: Any = module
            for segment in path:
                held = held._modules[segment]
            if body_of(held, self.plan, number) is None:
                return True
        return False


@dataclass(frozen=True)
class Alone:
    """One way to make a captured call, with as many positional arguments and such keywords.

    `spelled` says where each argument of the capture is found: among the positional ones, by a keyword, or
    left at its default. `plainly` runs the call as it is, unread: always where it `is_refused`, and where it
    `is_joint` while gradients are recorded. So does a call in which another module is in one of the `places`.
    `refuses` raises the error for arguments that do not fit, unread: a tracer that meets an error gives up
    on all its callers, and starts anew below them.
    """

    positional: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    spec: TreeSpec
    looking: Looking
    running: Running
    body: Body
    autocast: tuple[tuple[str, str], ...]
    plainly: Callable[..., Any]
    refuses: Callable[[str], Any]
    is_joint: bool
    is_refused: bool
    places: Places

    def problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why the capture does not hold for these arguments, in words, or nothing."""
        flat, spec = tree_flatten(self.arranged(args, kwargs))
        if spec != self.spec:
            return "the arguments have another structure than those of the capture"
        if autocast_now() != self.autocast:
            return "autocast is not as it was at capture"
        return self.looking.problem(flat)

    def arranged(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in the spelling of the capture."""
        return (
            tuple([self._found(where, args, kwargs) for where in self.positional]),
            {name: self._found(where, args, kwargs) for name, where in self.keywords},
        )

    def _found(self, where: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(where, Positional):
            return args[where.at]
        return kwargs[where.name] if isinstance(where, Keyword) else where

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, with arguments that fit."""
        trains = self.is_joint and torch.is_grad_enabled() and not torch.compiler.is_exporting()
        if trains or self.is_refused:
            return self.plainly(module, args, kwargs)
        if self.places.taken(module):
            return self.places.around(module, args, kwargs)
        flat, _ = tree_flatten(self.arranged(args, kwargs))
        sizes = self.looking.sizes(flat)
        if not self.autocast:
            return self.running.run(self.body, module, flat, sizes)
        with torch.autocast(self.autocast[0][0], enabled=False):
            return self.running.run(self.body, module, flat, sizes)


@dataclass(frozen=True)
class Positional:
    """Stands for a positional argument."""

    at: int


@dataclass(frozen=True)
class Keyword:
    """Stands for a keyword argument."""

    name: str
