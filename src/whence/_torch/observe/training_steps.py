"""Watch a training step: backward passes, what they put into `.grad`, and what optimizers do.

The user's own code calls `loss.backward()`, `optimizer.step()` and `zero_grad()`; nobody hands whence these.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import chain, repeat
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import ASGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from whence._torch.autograd.nodes import BackwardListener, is_leaf_node, nodes_below, watched
from whence._torch.function_tracer import code_running
from whence._torch.observe.attribute_reads import NOTHING, own_attributes
from whence._torch.observe.hooks import hooks_of_leaf
from whence._torch.patching import patched
from whence._torch.sizes.numbers import mathematics_recorded

_HOOKED = Optimizer.profile_hook_step(lambda *_: None).__code__
"""What runs around every optimizer's own `step`."""
_SCALER = torch.amp.GradScaler.step.__code__.co_filename


_OF_EVERY_OPTIMIZER = frozenset(
    (
        *("defaults", "param_groups", "state", "step", "_opt_called", "_zero_grad_profile_name"),
        *("_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused"),
    )
)
"""Attributes that say nothing about what a step computes, or are looked at by themselves."""


class StepListener(BackwardListener, Protocol):
    """What is told while a step runs."""

    def backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], *, creates_graph: bool, fills: bool
    ) -> AbstractContextManager[bool]:
        """Autograd begins; inside the block it runs, and gives whether its nodes are to be reported. `fills`
        says whether it fills `.grad`."""

    def gradient_arrives(self, leaf: Tensor) -> None:
        """What is recorded until `gradient_is_kept` puts a gradient into `leaf.grad`."""

    def gradient_is_kept(self, leaf: Tensor) -> None:
        """The gradient is in `leaf.grad`."""

    def hooked(self) -> AbstractContextManager[Any]:
        """A hook on a parameter is called; inside the block it runs."""

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """The `step` of an optimizer begins; inside the block it runs."""

    def closing(self) -> AbstractContextManager[Any]:
        """An optimizer calls the closure that its `step` was given; inside the block it runs."""

    def scheduling(self, schedule: LRScheduler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The `step` of a schedule is called, and does not run."""

    def gradients_cleared(self, parameters: Sequence[Tensor]) -> None:
        """`zero_grad` takes the gradients of these away."""

    def gradients_zeroed(self, parameters: Sequence[Tensor]) -> None:
        """`zero_grad` writes zeros into the gradients of these."""


@contextmanager
def observed_step(listener: StepListener) -> Iterator[None]:
    """Tell `listener` of everything that the step on this thread does."""
    with ExitStack() as active:
        active.enter_context(torch.autograd.set_multithreading_enabled(False))
        run = torch.autograd._engine_run_backward
        active.enter_context(patched(torch.autograd, "_engine_run_backward", _engine(run, listener)))
        record = torch.autograd.profiler.record_function
        active.enter_context(patched(torch.autograd.profiler, "record_function", _regions(record, listener)))
        active.enter_context(mathematics_recorded())
        active.callback(register_optimizer_step_pre_hook(_closures_told(listener)).remove)
        for kind in _schedules(LRScheduler):
            active.enter_context(patched(kind, "step", _scheduled(vars(kind)["step"], listener)))
        for owner in (Optimizer, nn.Module):
            active.enter_context(patched(owner, "zero_grad", _clearing(owner.zero_grad, listener)))
        yield


def _engine(run: Callable[..., Any], listener: StepListener) -> Callable[..., Any]:
    """Autograd's engine with every node reported, those that fill `.grad` included."""
    here = threading.get_ident()

    @wraps(run)
    def observed(
        roots: Sequence[Any], gradients: Any, keep: bool, create: bool, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        rest = (keep, create, inputs, *args)
        tensors = [root for root in roots if isinstance(root, Tensor)]
        if threading.get_ident() != here or not all(tensor.requires_grad for tensor in tensors):
            return run(roots, gradients, *rest, **kwargs)  # which says what is wrong with a root
        fills = bool(kwargs.get("accumulate_grad"))
        with listener.backward(tensors, list(gradients), creates_graph=create, fills=fills) as told:
            nodes = nodes_below([_node_of(root) for root in roots]) if told or fills else []
            with watched(nodes if told else [], listener), _leaves_watched(nodes if fills else [], listener):
                return run(roots, gradients, *rest, **kwargs)

    return observed


def engine_code() -> CodeType:
    """What stands on the stack where autograd runs: what is above it, that called the backward, computes none
    of it."""
    return next(code for code in _engine.__code__.co_consts if isinstance(code, CodeType))


def _node_of(root: Any) -> Node:
    edge = (
        root
        if isinstance(root, torch.autograd.graph.GradientEdge)
        else torch.autograd.graph.get_gradient_edge(root)
    )
    return edge.node


@contextmanager
def _leaves_watched(nodes: Sequence[Node], listener: StepListener) -> Iterator[None]:
    with ExitStack() as hooks:
        for node in nodes:
            if is_leaf_node(node):
                leaf: Tensor = node.variable  # type: ignore[attr-defined]
                before, after = hooks_of_leaf(leaf)
                kept = _telling_hook(listener.gradient_is_kept, leaf)
                hooks.callback(node.register_prehook(_telling_hook(listener.gradient_arrives, leaf)).remove)
                if not after:
                    hooks.callback(node.register_hook(kept).remove)
                hooks.enter_context(_values_replaced(before, _heard(before, listener)))
                hooks.enter_context(_values_replaced(after, _heard(after, listener, kept)))
        yield


@contextmanager
def _values_replaced(held: dict[int, Any], values: Mapping[int, Any]) -> Iterator[None]:
    """Other values under the keys of a dictionary, but for those that are taken away inside the block."""
    before = dict(held)
    held.update(values)
    try:
        yield
    finally:
        held.update({key: before[key] for key in held if key in values})


def _heard(
    hooks: Mapping[int, Any], listener: StepListener, first: Callable[..., None] = lambda *_: None
) -> dict[int, Any]:
    """Hooks of a leaf that tell when they run; `first` is called before the first of them."""
    here = threading.get_ident()

    def heard(hook: Callable[..., Any], begin: Callable[..., None]) -> Callable[..., Any]:
        @wraps(hook)
        def told(given: Tensor) -> Any:
            if threading.get_ident() != here:
                return hook(given)
            begin()
            with listener.hooked():
                return hook(given)

        return told

    begins = chain([first], repeat(lambda *_: None))
    return {key: heard(hook, begin) for (key, hook), begin in zip(hooks.items(), begins, strict=False)}


def _telling_hook(tell: Callable[[Tensor], None], leaf: Tensor) -> Any:
    def hook(*_gradients: object) -> None:
        tell(leaf)

    return hook


def _regions(record: Any, listener: StepListener) -> Callable[..., Any]:
    """In the place of the profiler's regions: optimizers run inside one, and a graph has no place for any."""
    here = threading.get_ident()

    def region(name: str, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return record(name, *args, **kwargs)
        caller = sys._getframe(1)
        if caller.f_code is not _HOOKED:
            return nullcontext()
        return listener.stepping(caller.f_locals["args"][0])

    return region


def _schedules(kind: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    """The classes of schedules that have a `step` of their own."""
    if "step" in vars(kind):
        yield kind
    for derived in kind.__subclasses__():
        yield from _schedules(derived)


def _scheduled(step: Callable[..., Any], listener: StepListener) -> Callable[..., Any]:
    here = threading.get_ident()

    @wraps(step)
    def told(self: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != here:
            return step(self, *args, **kwargs)
        return listener.scheduling(self, args, kwargs)

    return told


def _closures_told(listener: StepListener) -> Any:
    """A hook that puts closures which tell in the place of those that an optimizer's step is given."""
    here = threading.get_ident()

    def telling(given: Any) -> Any:
        return _telling(given, listener) if callable(given) else given

    def hook(_optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != here:
            return None
        return (args[0], *map(telling, args[1:])), {name: telling(value) for name, value in kwargs.items()}

    return hook


def _telling(closure: Callable[..., Any], listener: StepListener) -> Callable[..., Any]:
    @wraps(closure)
    def told(*args: Any, **kwargs: Any) -> Any:
        with listener.closing():
            return closure(*args, **kwargs)

    return told


def _clearing(clear: Callable[..., None], listener: StepListener) -> Callable[..., None]:
    here = threading.get_ident()

    @wraps(clear)
    def observed(self: Any, set_to_none: bool = True) -> None:
        if threading.get_ident() == here:
            tell = listener.gradients_cleared if set_to_none else listener.gradients_zeroed
            tell(parameters_of(self))
        clear(self, set_to_none)

    return observed


class States:
    """The state of several optimizers: each parameter has its own in the one that holds it."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self._of = {id(tensor): member for member in members for tensor in parameters_of(member)}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._of and tensor in self._of[id(tensor)].state

    def __getitem__(self, tensor: Tensor) -> dict[str, Any]:
        return self._of[id(tensor)].state[tensor]  # type: ignore[no-any-return]

    def __delitem__(self, tensor: Tensor) -> None:
        del self._of[id(tensor)].state[tensor]

    def get(self, tensor: Tensor, default: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, or what is given."""
        member = self._of.get(id(tensor))
        return default if member is None else member.state.get(tensor, default)


@dataclass(frozen=True, eq=False)
class Optimizers:
    """Several optimizers of one step, seen as one: its groups are theirs, in order."""

    members: tuple[Optimizer, ...]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> States:
        """The state of all parameters."""
        return States(self.members)


def as_one_optimizer(given: object) -> object:
    """Several optimizers, in a row or by name, seen as one; of one that stands for another, that one."""
    if isinstance(given, dict):
        given = list(given.values())
    if not isinstance(given, list | tuple):
        return _optimizer_behind(given)
    members = [each for each in map(_optimizer_behind, given) if isinstance(each, Optimizer)]
    if not members or len(members) < len(given):
        return given
    return members[0] if len(members) == 1 else Optimizers(tuple(members))


def _optimizer_behind(given: object) -> object:
    """The optimizer that one stands for which has no groups and no state of its own, as those of Accelerate,
    Fabric and Opacus do; what such a one does in Python is part of the step."""
    met = [given]
    while len(inside := [each for each in _stood_for(met[-1]) if not any(each is one for one in met)]) == 1:
        met += inside
    return met[-1]


def _stood_for(given: object) -> Iterator[Optimizer]:
    """The optimizers that one holds whose groups and state are its own; none that itself only stands for one,
    where a real one knows who stands for it."""
    held = own_attributes(given).values() if hasattr(given, "zero_grad") and hasattr(given, "step") else ()
    for inner in (each for each in held if isinstance(each, Optimizer)):
        is_shared = (
            getattr(given, "param_groups", inner.param_groups) is inner.param_groups
            and getattr(given, "state", inner.state) is inner.state
        )
        if is_shared and (is_optimizer(inner) or not is_optimizer(given)):
            yield inner


def members_of(optimizer: object) -> tuple[Optimizer, ...]:
    """The optimizers that one is made of: itself, or several."""
    if isinstance(optimizer, Optimizers):
        return optimizer.members
    return (optimizer,) if isinstance(optimizer, Optimizer) else ()


def parameters_of(owner: Optimizer | Optimizers | nn.Module) -> list[Tensor]:
    """The parameters of an optimizer, group by group, or of a module."""
    if isinstance(owner, nn.Module):
        return list(owner.parameters())
    return [tensor for group in owner.param_groups for tensor in group["params"]]


def is_optimizer(value: object) -> bool:
    """Whether a value is an optimizer, and not one that stands for another and was never set up as one."""
    members = members_of(value)
    return bool(members) and all(hasattr(each, "_optimizer_step_pre_hooks") for each in members)


def is_around_another(value: object) -> bool:
    """Whether an optimizer only stands for another, and holds no groups: was never set up as one, or asks the
    other for them. What it does in Python, and keeps, is part of the step."""
    if not isinstance(value, Optimizer) or not is_optimizer(value):
        return isinstance(value, Optimizer)
    return "param_groups" not in own_attributes(value) and _optimizer_behind(value) is not value


def own_values(optimizer: Optimizer | Optimizers) -> dict[str, Any]:
    """What an optimizer holds beside its groups and its state: attributes of its own, not what PyTorch keeps
    in every optimizer. Of several that of each, its class, and state that is of no parameter."""
    if isinstance(optimizer, Optimizers):
        found: dict[str, Any] = {}
        for number, member in enumerate(optimizer.members):
            found[f"[{number}].__class__"] = type(member).__qualname__
            found |= {f"[{number}].{key}": value for key, value in with_common_state(member).items()}
        return found
    return {
        ".".join((*way, name)): value
        for way, member in with_inner(optimizer)
        for name, value in vars(member).items()
        if is_own_value(name)
    }


def is_own_value(name: str) -> bool:
    """Whether an attribute of an optimizer is not one that PyTorch keeps in all of them."""
    return name not in _OF_EVERY_OPTIMIZER and not name.startswith("_optimizer_")


def with_inner(optimizer: Optimizer) -> list[tuple[tuple[str, ...], Optimizer]]:
    """An optimizer, and those that it stands around as its attributes, each once, with the way there."""
    found: dict[int, tuple[tuple[str, ...], Optimizer]] = {id(optimizer): ((), optimizer)}
    waiting = [*found.values()]
    while waiting:
        way, member = waiting.pop()
        for name, value in vars(member).items():
            if isinstance(value, Optimizer) and is_optimizer(value) and id(value) not in found:
                found[id(value)] = (*way, name), value
                waiting.append(found[id(value)])
    return [*found.values()]


def methods_of(optimizer: Optimizer) -> list[str]:
    """The names of what steps call of an optimizer: its own methods, and those of every optimizer."""
    own = (kind for kind in type(optimizer).__mro__ if issubclass(kind, Optimizer) and kind is not Optimizer)
    names = {name for kind in own for name, held in vars(kind).items() if isinstance(held, FunctionType)}
    return sorted({"step", "zero_grad", *(name for name in names if not name.startswith("__"))})


def method_of(name: str, optimizer: Optimizer) -> object:
    """What runs where a method of an optimizer is called, behind what a schedule puts around `step`."""
    held = vars(optimizer).get(name, NOTHING)
    if hasattr(held, "_wrapped_by_lr_sched"):
        return inspect.unwrap(held, stop=lambda each: not hasattr(each, "_wrapped_by_lr_sched"))
    return getattr(type(optimizer), name, None) if held is NOTHING else held


def all_members_of(optimizer: object) -> list[Optimizer]:
    """The optimizers that one is made of, and those inside of them."""
    return [inner for member in members_of(optimizer) for _, inner in with_inner(member)]


def is_one_of(optimizer: Optimizer, given: object) -> bool:
    """Whether an optimizer is one of those of which a given one is made, or stands for one."""
    behind = _optimizer_behind(optimizer)
    return any(each is behind or each is optimizer for each in all_members_of(given))


def counts_beside(optimizer: object, parameter: Tensor) -> bool:
    """Whether an optimizer keeps what it counts of a parameter on the device of that in any case."""
    return any(isinstance(each, ASGD) and parameter in each.state for each in all_members_of(optimizer))


def common_state(optimizer: Optimizer) -> Iterator[tuple[Any, Any]]:
    """State of an optimizer that is of no parameter, under keys of its own."""
    return ((key, value) for key, value in optimizer.state.items() if not isinstance(key, Tensor))


def with_common_state(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer holds beside its groups and the state of parameters."""
    return own_values(optimizer) | {f"state[{key!r}]": value for key, value in common_state(optimizer)}


def optimizer_hooks(optimizer: Optimizer | Optimizers) -> list[Any]:
    """The hooks that run before and after the optimizer's steps, its own and those for all optimizers; not
    that of a capture, which may go on in another thread."""
    if isinstance(optimizer, Optimizers):
        return [hook for member in optimizer.members for hook in optimizer_hooks(member)]
    held: list[dict[int, Any]] = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    for _, member in with_inner(optimizer):
        held += [member._optimizer_step_pre_hooks, member._optimizer_step_post_hooks]
    return [hook for hooks in held for hook in hooks.values() if not _is_of_a_capture(hook)]


def _is_of_a_capture(hook: Any) -> bool:
    return isinstance(hook, FunctionType) and hook.__code__.co_filename == __file__


def note_step(optimizer: Optimizer | Optimizers) -> None:
    """Say that an optimizer's step has been made, where a schedule would warn that it has not."""
    for member in members_of(optimizer):
        if hasattr(member.step, "_wrapped_by_lr_sched"):
            member._opt_called = True  # type: ignore[attr-defined]


def schedules_in(schedule: LRScheduler) -> Iterator[LRScheduler]:
    """A schedule, and those that it is made of."""
    yield schedule
    for inner in getattr(schedule, "_schedulers", ()):
        yield from schedules_in(inner)


def moved_by(schedule: LRScheduler) -> list[str]:
    """The attributes of a schedule that its steps may move: its numbers, and the last learning rates."""
    held, rates = vars(schedule).items(), getattr(schedule, "_last_lr", NOTHING)
    return [key for key, value in held if type(value) in (int, float) or value is rates]


def is_stepping() -> bool:
    """Whether an optimizer's step is running on this thread."""
    return any(code is _HOOKED for code in code_running())


def is_scaling() -> bool:
    """Whether a `GradScaler` is at work on this thread."""
    return any(code.co_filename == _SCALER for code in code_running())
