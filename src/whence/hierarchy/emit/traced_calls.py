"""Captured calls for those who read code: `torch.compile`, strict export and `torch.fx.symbolic_trace`.

A tracer looks at the arguments, which tells it what it may assume, and then records the generated call.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from whence._torch.autograd.mode_questions import mode_now
from whence._torch.observe.compile_flags import constant_to_tracers
from whence._torch.pytrees import KeyPath, TreeSpec, tree_flatten, tree_flatten_with_path
from whence._torch.tensors import autocast_state
from whence.errors import CallError
from whence.hierarchy.emit.generated_call import Body, GeneratedCall
from whence.hierarchy.plan.plan import Plan
from whence.hierarchy.run.captured import Inside, body_of, captured_of
from whence.hierarchy.run.hooks import has_hooks, run_hooked
from whence.hierarchy.run.interface import Interface
from whence.hierarchy.swap.preserved import CallPlace
from whence.hierarchy.swap.state import places
from whence.hierarchy.swap.unpreserved import Unpreserved, in_place_of, name_of_repeated
from whence.program import Convention
from whence.program.arguments.binding import CallSpelling, spelling_of
from whence.program.arguments.fitting import Look
from whence.program.queries.memory_order import in_memory_order, order_if_dense
from whence.provenance import ModulePath

if TYPE_CHECKING:
    from whence.hierarchy.emit.calls import CallBody

_autocast_now = constant_to_tracers(autocast_state)
_mode_now = constant_to_tracers(mode_now)
_NOT_WHOLE = "leave out fullgraph=True"
_JOINT = (
    "its backward was captured, and autograd runs it as one function; leave out fullgraph=True, compile a "
    "program that was captured without its backward, or run it under torch.no_grad()"
)
OTHER = f"another module took the place of a captured one; {_NOT_WHOLE}, or capture the model with it"


def plain_body(function: Body, calls: Sequence[Body]) -> Body:
    """A body that makes these calls, of modules, so that whoever reads it sees the hierarchy."""
    made = tuple(calls)

    def run(module: nn.Module, *values: Any) -> tuple[Any, ...]:
        return function(module, made, *values)

    return run


def plain_call(path: ModulePath, from_caller: bool, place: CallPlace) -> Body:
    """A call that plain code makes: where its module is, seen from the caller or else from the root."""
    plan, number, segments = place.plan, place.number, tuple(path)
    hooked = _untraced(run_hooked, f"a module of a captured tree has hooks; {_NOT_WHOLE}")
    other, only = (
        _untraced(each.forward, OTHER) for each in (in_place_of(place), Unpreserved(place, only=True))
    )
    repeated = name_of_repeated(place)

    def run(caller: nn.Module, *values: Any) -> tuple[Any, ...]:
        held: Any = caller if from_caller else captured_of(caller).whence_root
        module = held
        for segment in segments:
            held, module = module, module._modules[segment]
        if repeated and repeated in held._modules:
            return only(held._modules[repeated], values)  # type: ignore[no-any-return]
        call = body_of(module, plan, number)
        if call is None:
            return other(module, values)  # type: ignore[no-any-return]
        if has_hooks(module):
            return hooked(call, module, values)  # type: ignore[no-any-return]
        if not torch.compiler.is_dynamo_compiling():  # `torch.fx` would keep modules of torch.nn whole
            return call.readable_body()(module, *values)
        return module(Inside, number, *values)  # type: ignore[no-any-return]

    return run


def _untraced(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """A function that tracers do not read: they stop there, say why, and go on behind it if they may."""
    return torch.compiler.disable(function, reason=reason)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Alone:
    """One way to make a captured call, with as many positional arguments and such keywords.

    `unread` runs the call as it is, unread: always where it `is_refused`, and where it `is_joint` while
    gradients are recorded. So does `around` where another module is in one of the `places`, and `unfit` where
    arguments do not fit: a tracer that meets an error gives up on all its callers and starts anew below.
    """

    spelling: CallSpelling
    spec: TreeSpec
    look: Look
    generated: GeneratedCall
    body: Body
    autocast: tuple[tuple[str, str], ...]
    modes: tuple[tuple[str, bool], ...]
    unread: Callable[..., Any]
    around: Callable[..., Any]
    unfit: Callable[..., Any]
    is_joint: bool
    is_refused: bool
    plan: Plan
    places: tuple[tuple[tuple[str, ...], int], ...]

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the capture holds for these arguments."""
        flat, spec = tree_flatten(self.spelling.arranged(args, kwargs))
        if spec != self.spec or _autocast_now() != self.autocast:
            return False
        for name, then in self.modes:
            if _mode_now(name) != then:
                return False
        return not self.spelling.changed(args, kwargs) and self.look(flat)

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, with arguments that fit."""
        trains = self.is_joint and torch.is_grad_enabled() and not torch.compiler.is_exporting()
        if trains or self.is_refused or not torch.compiler.is_dynamo_compiling():
            return self.unread(module, args, kwargs)
        if self._is_place_taken(module):
            return self.around(module, args, kwargs)
        flat, _ = tree_flatten(self.spelling.arranged(args, kwargs))
        if not self.autocast:
            return self.generated.run(self.body, module, flat, flat)
        with torch.autocast(self.autocast[0][0], enabled=False):
            return self.generated.run(self.body, module, flat, flat)

    def _is_place_taken(self, module: nn.Module) -> bool:
        for path, number in self.places:
            held: Any = module
            for segment in path:
                held = held._modules[segment]
            if body_of(held, self.plan, number) is None:
                return True
        return False


def alone(interface: Interface, call: "CallBody", spelling: tuple[int, tuple[str, ...]]) -> Alone:
    """A call as a person makes it, with so many positional arguments and such keywords."""
    program, convention = call.plan.program, interface.convention
    reason, around = _tracing_refusal(call), call.plan.site(call.number).path
    found = dict.fromkeys((*places(call.plan, call.number), *call.places_written))
    return Alone(
        spelling=_call_spelling(convention, *spelling),
        spec=convention.spec,
        look=convention.expected.look,
        generated=call.generated,
        body=_body_laid_out(call),
        autocast=program.circumstances.autocast,
        modes=tuple((mode.name, mode.value) for mode in program.circumstances.modes),
        unread=_untraced(call.run, f"{reason}; {_NOT_WHOLE}" if reason else _JOINT),
        around=_untraced(call.run, OTHER),
        unfit=_untraced(call.run, f"the arguments do not fit the capture; {_NOT_WHOLE}"),
        is_joint=program.has_backward,
        is_refused=bool(reason),
        plan=call.plan,
        places=tuple((tuple(path.relative_to(around)), taken) for taken, path in found),
    )


def _body_laid_out(call: "CallBody") -> Body:
    """The body on inputs that lie in memory as those of the capture did."""
    body, orders = call.readable_body(), tuple(_memory_orders(call))
    if not orders:
        return body

    def run(module: nn.Module, *values: Any) -> tuple[Any, ...]:
        ordered = list(values)
        for at, order in orders:
            ordered[at] = in_memory_order(ordered[at], order)
        return body(module, *ordered)

    return run


def _memory_orders(call: "CallBody") -> Iterator[tuple[int, tuple[int, ...]]]:
    """In which order the dimensions of an input have to lie in memory, where it fills its memory."""
    for at, name in enumerate(call.call_plan.forward.inputs):
        order = order_if_dense(call.plan.nodes[name].meta.get("val"))
        if order is not None and name not in call.in_any_layout:
            yield at, order


def _tracing_refusal(call: "CallBody") -> str:
    """Why a tracer cannot read a call, where it cannot."""
    program = call.plan.program
    if program.signature.wholes:
        return "tensors that are made of others are taken apart at its border"
    if program.circumstances.opaque and torch.is_grad_enabled():
        return (
            f"it ran {', '.join(program.circumstances.opaque)}, whose part in the backward was not captured"
        )
    return ""


def _call_spelling(convention: Convention, count: int, names: tuple[str, ...]) -> CallSpelling:
    try:
        return convention.spelling(count, names)
    except CallError:  # it does not bind, and is told so when it is made
        return spelling_of(None, (0, ()), (count, names))


def on_proxies(call: "CallBody", module: nn.Module, arguments: tuple[Any, Any]) -> Any:
    """Run a call on what `torch.fx` puts in the place of arguments: all of them, or flat ones.

    A function of `*args` gets them all in one: then they are read as the capture's were given.
    """
    flat = _proxied(call.alone.convention, *arguments)
    return call.generated.run(call.readable_body(), module, flat, flat)


def _proxied(convention: Convention, args: Any, kwargs: Any) -> list[Any]:
    """The leaves of such a call; placeholders alone are leaves already."""
    count = len(convention.leaves)
    if isinstance(args, fx.Proxy):
        example = convention.unflatten(range(count))
        return [_accessed((args, kwargs), path) for path, _ in tree_flatten_with_path(example)[0]]
    try:
        return convention.in_order(args, kwargs)
    except CallError:
        if kwargs or len(args) < count or not all(isinstance(value, fx.Proxy) for value in args):
            raise
        return list(args[:count])


def _accessed(value: Any, path: KeyPath) -> Any:
    for key in path:
        value = key.get(value)
    return value
