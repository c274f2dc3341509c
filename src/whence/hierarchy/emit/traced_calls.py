"""Make captured calls ready for those who read code: see `plainly`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from whence._torch.pytrees import KeyPath, tree_flatten_with_path
from whence._torch.sizes.exported_sizes import order_of
from whence._torch.sizes.symbols import is_symbolic
from whence.errors import CallError
from whence.hierarchy.emit.for_tracers import (
    Alone,
    Body,
    ExpectedLeaf,
    Keyword,
    Looking,
    Places,
    Positional,
    Running,
)
from whence.hierarchy.plan.plan import CallPlan, Plan
from whence.hierarchy.run.bodies import body_of, captured_of
from whence.hierarchy.run.hooks import has_hooks, run_hooked
from whence.hierarchy.run.interface import Interface
from whence.hierarchy.swap.preserved import CallPlace
from whence.hierarchy.swap.state import places
from whence.hierarchy.swap.unpreserved import Unpreserved, in_place_of, name_of_repeated
from whence.hierarchy.tree import Inside
from whence.program import Absent, Convention
from whence.program.arguments.open_sizes import function_of, shape_of
from whence.program.program import Program
from whence.provenance import ModulePath


class ReadableCall(Protocol):
    """A captured call."""

    @property
    def number(self) -> int:
        """Its number."""

    @property
    def plan(self) -> Plan:
        """The plan it is of."""

    @property
    def call_plan(self) -> CallPlan:
        """What it computes."""

    def readable_body(self) -> Body:
        """Its forward in plain code."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it as a person calls it."""


_NOT_WHOLE = "leave out fullgraph=True"
_JOINT = (
    "its backward was captured, and autograd runs it as one function; leave out fullgraph=True, compile a "
    "program that was captured without its backward, or run it under torch.no_grad()"
)
OTHER = f"another module took the place of a captured one; {_NOT_WHOLE}, or capture the model with it"


@dataclass(frozen=True)
class PlainChild:
    """A call that plain code makes: where its module is, seen from the caller or else from the root."""

    path: tuple[str, ...]
    from_caller: bool
    place: CallPlace


def plain_body(function: Callable[..., tuple[Any, ...]], children: Sequence[PlainChild]) -> Body:
    """A body that calls its children as modules, so that whoever reads it sees the hierarchy."""
    calls = tuple(map(_plain_call, children))

    def run(module: nn.Module, *values: Any) -> tuple[Any, ...]:
        return function(module, calls, *values)

    return run


def _plain_call(child: PlainChild) -> Body:
    path, from_caller, place = child.path, child.from_caller, child.place
    plan, number = place.plan, place.number
    hooked = _unread(_through_hooks(number), f"a module of a captured tree has hooks; {_NOT_WHOLE}")
    other, only = (
        _unread(each.forward, OTHER) for each in (in_place_of(place), Unpreserved(place, only=True))
    )
    repeated = name_of_repeated(place)

    def run(caller: nn.Module, *values: Any) -> tuple[Any, ...]:
        held: Any = caller if from_caller else captured_of(caller).whence_root
        module = held
        for segment in path:
            held, module = module, module._modules[segment]
        if repeated and repeated in held._modules:
            return only(held._modules[repeated], values)  # type: ignore[no-any-return]
        call = body_of(module, plan, number)
        if call is None:
            return other(module, values)  # type: ignore[no-any-return]
        if has_hooks(module):
            return hooked(module, values)  # type: ignore[no-any-return]
        if not torch.compiler.is_dynamo_compiling():  # `torch.fx` would keep modules of torch.nn whole
            return call.readable_body()(module, *values)
        return module(Inside, number, *values)  # type: ignore[no-any-return]

    return run


def _through_hooks(number: int) -> Callable[[nn.Module, Sequence[Any]], tuple[Any, ...]]:
    def run(module: nn.Module, values: Sequence[Any]) -> tuple[Any, ...]:
        return run_hooked(captured_of(module).bodies[number], module, values)

    return run


def _unread(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """A function that tracers do not read: they stop there, say why, and go on behind it if they may."""
    return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return]


def alone(interface: Interface, call: ReadableCall, spelling: tuple[int, tuple[str, ...]]) -> Alone:
    """A call as a person makes it, with so many positional arguments and such keywords."""
    program, convention = call.plan.program, interface.convention
    positional, keywords = _spelled(convention, *spelling)
    reason = _refusal(call)
    return Alone(
        positional=positional,
        keywords=keywords,
        spec=convention.spec,
        looking=looking(convention),
        running=running(interface, call),
        body=call.readable_body(),
        autocast=program.autocast,
        plainly=_unread(call.run, f"{reason}; {_NOT_WHOLE}" if reason else _JOINT),
        refuses=_unread(_misfit, f"the arguments do not fit the capture; {_NOT_WHOLE}"),
        is_joint=program.has_backward,
        is_refused=bool(reason),
        places=Places(call.plan, tuple(_places(call.plan, call.number)), _unread(call.run, OTHER)),
    )


def _misfit(problem: str) -> None:
    raise CallError(f"the arguments do not fit the capture: {problem}")


def _places(plan: Plan, number: int) -> Iterator[tuple[tuple[str, ...], int]]:
    """Where modules may be that took the places of preserved ones."""
    around = plan.site(number).path
    for call, path in places(plan, number):
        yield tuple(path.relative_to(around)), call


def _refusal(call: ReadableCall) -> str:
    """Why a tracer cannot read a call, where it cannot."""
    program = call.plan.program
    if program.wholes:
        return "tensors that are made of others are taken apart at its border"
    if program.opaque and torch.is_grad_enabled():
        return f"it ran {', '.join(program.opaque)}, whose part in the backward was not captured"
    return ""


def _spelled(
    convention: Convention, count: int, names: tuple[str, ...]
) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """Where the arguments of the capture are found among such arguments."""
    given = tuple(map(Positional, range(count))), {name: Keyword(name) for name in names}
    try:
        args, kwargs = convention.respelled(*given)
    except CallError:
        args, kwargs = given
    return args, tuple(kwargs.items())


def looking(convention: Convention) -> Looking:
    """What is looked at before a call is made."""
    sizes = convention.varying
    names = () if sizes is None else [reading.name for reading in sizes.readings]
    rules = [] if sizes is None else [(row.condition, f"sizes must be {row}") for row in sizes.rules]
    return Looking(
        tuple(_leaves(convention)),
        () if sizes is None else sizes.readings,
        tuple((function_of(condition, names), words) for condition, words in rules),
        convention.same,
    )


def _leaves(convention: Convention) -> Iterator[ExpectedLeaf]:
    for at, (path, leaf) in enumerate(zip(convention.paths, convention.leaves, strict=True)):
        if isinstance(leaf, Tensor):
            shape = tuple(size if type(size) is int else None for size in shape_of(leaf))
            yield ExpectedLeaf(at, path, shape, leaf.dtype)
        elif not isinstance(leaf, Absent) and not is_symbolic(leaf):
            yield ExpectedLeaf(at, path, None, None, leaf)


def running(interface: Interface, call: ReadableCall) -> Running:
    """How flat arguments become a result."""
    body, nodes = call.call_plan.forward, call.plan.nodes
    convention, program = interface.convention, call.plan.program
    sizes = convention.varying
    names = () if sizes is None else [reading.name for reading in sizes.readings]
    given = {name for name in interface.leaves if name is not None}
    after = [
        name
        for name in interface.result.names
        if name not in {*given, *body.outputs, *(held for held, _ in interface.state)}
    ]
    return Running(
        inputs=body.inputs,
        outputs=body.outputs,
        leaves=tuple((at, name) for at, name in enumerate(interface.leaves) if name is not None),
        state=tuple((name, tuple(path)) for name, path in interface.state),
        sizes=tuple((name, function_of(text, names)) for name, text in interface.sizes),
        copied=tuple(_copied(interface)),
        orders=dict(_orders(body.inputs, nodes)),
        writes=tuple(_writes(interface, nodes, program)),
        result=interface.result,
        read_after=tuple((name, tuple(ModulePath.parse(program.input(name).path))) for name in after),
        loss=interface.loss,
    )


def _copied(interface: Interface) -> Iterator[tuple[str, int]]:
    for _, target in interface.writes:
        if isinstance(target, int) and (name := interface.leaves[target]) is not None:
            yield name, target


def _orders(inputs: Sequence[str], nodes: Mapping[str, fx.Node]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """In which order the dimensions of an input lie in memory, where it fills its memory."""
    for name in inputs:
        value = nodes[name].meta.get("val")
        if isinstance(value, Tensor) and value.layout is torch.strided and value.dim() > 1:
            order = order_of(value)
            if value.permute(order).is_contiguous():
                yield name, order


def _writes(
    interface: Interface, nodes: Mapping[str, fx.Node], program: Program
) -> Iterator[tuple[str, int | tuple[str, ...], bool]]:
    holders = {value: name for name, values in program.histories.items() for value in values}
    for name, target in interface.writes:
        if isinstance(target, int):
            yield name, target, True
            continue
        held, new = nodes[holders.get(name, name)].meta["val"], nodes[name].meta["val"]
        yield name, tuple(target), (held.shape, held.dtype) == (new.shape, new.dtype)


def on_proxies(
    interface: Interface, call: ReadableCall, module: nn.Module, arguments: tuple[Any, Any]
) -> Any:
    """Run a call on what `torch.fx` puts in the place of arguments: all of them, or flat ones.

    A function of `*args` gets them all in one: then they are read as the capture's were given.
    """
    convention = interface.convention
    reading = running(interface, call)
    flat = _proxied(convention, *arguments)
    sizes = looking(convention).sizes(flat)
    return replace(reading, orders={}).run(call.readable_body(), module, flat, sizes)


def _proxied(convention: Convention, args: Any, kwargs: Any) -> list[Any]:
    if not isinstance(args, fx.Proxy):
        return _spelled_or_flat(convention, args, kwargs)
    example = convention.unflatten(range(len(convention.leaves)))
    return [_accessed((args, kwargs), path) for path, _ in tree_flatten_with_path(example)[0]]


def _spelled_or_flat(convention: Convention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The leaves of a call in the captured structure; placeholders alone are leaves already."""
    count = len(convention.leaves)
    only_flat = not kwargs and all(isinstance(value, fx.Proxy) for value in args) and len(args) >= count
    try:
        return convention.spelled_out(args, kwargs)
    except CallError:
        if only_flat:
            return list(args[:count])
        raise


def _accessed(value: Any, path: KeyPath) -> Any:
    for key in path:
        value = key.get(value)
    return value
