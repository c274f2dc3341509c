"""What a module of a tree runs: captured calls, held by a `Tree` or by an instance of the user's class."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from whence._torch.observe.compile_flags import compiler_reading, constant_to_tracers
from whence.errors import CallError
from whence.hierarchy.plan.plan import Plan
from whence.program.state import refuse_pickling
from whence.provenance import ModulePath

if TYPE_CHECKING:
    from whence.hierarchy.emit.calls import CallBody
    from whence.hierarchy.run.variants import VariantTree


KEY = "_whence_captured"
"""The attribute under which a module holds its captured calls."""
CAPTURED_MODE = "whence_captured_training"
"""Where a module says in which mode it was captured."""
_GIVEN_UP = "torch.compile has given up on what calls the tree, and would read its parts one by one"


@dataclass(frozen=True, eq=False)
class FlatCall:
    """A call inside the tree, made through the module so that whoever watches module calls sees it."""

    call: "CallBody"
    values: tuple[Any, ...]


class Inside:
    """The first argument of a call inside the tree that a tracer reads; its number and flat values follow."""


class Readables:
    """Calls of one module in plain code, each an attribute."""

    def __deepcopy__(self, _memo: object) -> "Readables":
        return Readables()

    def __reduce__(self) -> tuple[Any, ...]:
        return Readables, ()


@dataclass(eq=False)
class Captured:
    """The captured calls of one module: those a person makes, and all by number; and the whole tree.

    `bodies` has those, too, that a checkpoint runs again in the backward. `watched` runs instead of a flat
    module's only call while it is captured again: it makes the module calls that the flat one inlines.
    `readable` are calls in plain code, made when `torch.compile` reads them. `inlined` says why a module has
    no calls of its own that was called. `whence_root` is for a module that calls another not below it.
    `variants` are for arguments that the root's calls do not admit.
    """

    calls: tuple["CallBody", ...] = ()
    bodies: dict[int, "CallBody"] = field(default_factory=dict)
    watched: "CallBody | None" = None
    whence_root: nn.Module | None = None
    readable: Readables = field(default_factory=Readables)
    inlined: str = ""
    variants: tuple["VariantTree", ...] = ()

    def give(self, calls: tuple["CallBody", ...]) -> None:
        """Add calls; those that repeat others for a checkpoint are made by nobody else."""
        self.calls = (*self.calls, *(call for call in calls if not call.is_recomputation))
        self.bodies.update({call.number: call for call in calls})

    def fitting(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "CallBody":
        """The call that was captured with such arguments, best one that differentiates those that require a
        gradient; or else the first."""
        if not self.calls:
            raise CallError(
                f"{name} has no graph of its own, so there is nothing to run",
                why=self.inlined or "it was not called in the capture",
                remedy="call the module around it, which runs its operations"
                if self.inlined
                else "capture a program that calls it",
            )
        if len(self.calls) == 1:
            return self.calls[0]
        known = (call for call in self.calls if call.fits(args, kwargs))
        if (first := next(known, None)) is None:
            return self.calls[0]
        fitting = chain((first,), known)
        return next((call for call in fitting if call.differentiates(args, kwargs)), first)

    def variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
        """The tree of a variant that alone admits these arguments."""
        if any(call.fits(args, kwargs) for call in self.calls):
            return None
        return next((tree.as_held() for tree in self.variants if tree.fits(args, kwargs)), None)


class KeepsInProcess:
    """What may be copied, and not pickled."""

    def __reduce__(self) -> str:
        refuse_pickling("a captured tree of the user's own classes")

    def __deepcopy__(self, _memo: object) -> "KeepsInProcess":
        return self


@dataclass(eq=False)
class CapturedInstance(Captured):
    """Those of an instance of the user's class, of which pickle would take the original's `forward`."""

    keeps: KeepsInProcess = field(default_factory=KeepsInProcess)


def captured_of(module: nn.Module) -> Any:
    """What holds the `calls` and `bodies` of a module; None for a module that was not captured."""
    return module.__dict__.get(KEY)


def body_of(module: nn.Module, plan: Plan, number: int) -> "CallBody | None":
    """The call with this number of this plan that a module holds; None for one that took another's place."""
    holder = captured_of(module)
    call: CallBody | None = None if holder is None else holder.bodies.get(number)
    return None if call is None or call.plan is not plan else call


def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The `forward` of an instance of the user's class: run what was captured, called as the original is.

    Raises `CallError` when the arguments are not those of a captured call.
    """
    return run_captured(module, args, kwargs)


def run_captured(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run what was captured of a module; `torch.fx` may give one object for all arguments."""
    held = module.__dict__[KEY]
    if torch.compiler.is_dynamo_compiling() or _is_read(args, kwargs):
        return _call_in_plain_code(module, held, args, kwargs)
    if compiler_reading() is not None:
        return _run_unread(module, args, kwargs)
    return _run_fitting(module, args, kwargs)


def _run_fitting(module: nn.Module, args: Any, kwargs: Any) -> Any:
    held = module.__dict__[KEY]
    if len(args) == 1 and isinstance(args[0], FlatCall):
        return args[0].call.run_forward(module, *args[0].values)
    if held.variants and (variant := held.variant(args, kwargs)) is not None:
        return run_captured(variant, args, kwargs)
    if held.watched is not None and torch.compiler.is_compiling():
        return held.watched.run(module, args, kwargs)
    return held.fitting(module._get_name(), args, kwargs).run(module, args, kwargs)


def _run_unread(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run what was captured where `torch.compile` has given up on a caller, or on code that it was to read.

    What it would read then is made to be run: it would warn of each operation, and stop there. With the
    stance "eager_on_recompile" nothing is disabled, so what runs does not ask again who reads it.
    """
    return torch.compiler.disable(_run_fitting, reason=_GIVEN_UP)(module, args, kwargs)


def _is_read(args: Any, kwargs: Any) -> bool:
    """Whether a module is called by `torch.fx`, which reads what it does, or by code that a tracer has read.

    Who asks has asked `is_dynamo_compiling()` itself: it is true of the frame that is read, and PyTorch 2.15
    reads this one by itself when it has given up on its caller.
    """
    if isinstance(args, fx.Proxy) or (args and args[0] is Inside):
        return True
    return any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values()))


def _call_in_plain_code(module: nn.Module, held: Captured, args: Any, kwargs: Any) -> Any:
    """Make a call in plain code, which is made ready when it is first read."""
    if not isinstance(args, fx.Proxy) and args and args[0] is Inside:
        name = f"inside_{args[1]}"
        _ready(held, name, args[1], ())
        return getattr(held.readable, name)(module, *args[2:])
    if not torch.compiler.is_dynamo_compiling():
        if not _is_read(args, kwargs):  # compiled code of a caller leads here, of before the compiler gave up
            return _run_unread(module, args, kwargs)
        _refuse_variants(held)
        return held.calls[0].run_on_proxies(module, args, kwargs)
    name = f"alone_{len(args)}_{'_'.join(kwargs)}"
    _ready(held, name, len(args), tuple(kwargs))
    ways = getattr(held.readable, name)
    for way in ways:
        if way.fits(args, kwargs):
            return way.run(module, args, kwargs)
    return ways[0].unfit(module, args, kwargs)


def _refuse_variants(held: Captured) -> None:
    """What `torch.fx` traces has no sizes yet by which to choose."""
    if held.variants:
        raise CallError(
            f"torch.fx traces one graph, and this module chooses among {len(held.variants) + 1} by sizes",
            remedy="trace the module of program.with_changes(variants=()), or that of one of the variants",
        )


@constant_to_tracers
def _ready(held: Captured, name: str, number: int, keywords: tuple[str, ...]) -> bool:
    """Make plain code for a call inside the tree, or for those of people with so many arguments.

    Each has an attribute of its own: `torch.compile` reads it once, and does not see what is added later.
    """
    if hasattr(held.readable, name):
        return True
    if name.startswith("inside"):
        setattr(held.readable, name, held.bodies[number].readable_body())
        return True
    calls = held.calls if held.watched is None else (held.watched,)
    if not calls:
        held.fitting("the module", (), {})
    found = {call.plan.first[call.number]: call for call in reversed(calls)}
    ways = [call.readable_call(number, keywords) for call in reversed(found.values())]
    setattr(held.readable, name, ways)
    return True


def train(module: nn.Module, mode: bool = True) -> nn.Module:
    """The `train` of a captured module: its class's own, and a warning that graphs stay as they are."""
    tell_of_mode(module, mode)
    return type(module).train(module, mode)


def tell_of_mode(module: nn.Module, mode: bool) -> None:
    """Warn once of all modules within that were captured in another mode, and give them this one."""
    turned = [
        inner
        for inner in module.modules()
        if inner.training is not mode and inner.__dict__.get(CAPTURED_MODE, mode) is not mode
    ]
    if not turned:
        return
    for inner in turned:
        inner.training = mode
    warnings.warn(
        f"{len(turned)} module(s) were captured in {'evaluation' if mode else 'training'} mode, and their "
        "graphs stay so: capture again in the other mode to change what dropout and batch normalisation do",
        stacklevel=3,
    )


def refuse_moved(
    module: nn.Module, path: Iterable[str], held: object, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise `CallError` where what `module` holds at `path` has another dtype, or is on another
    kind of device.

    What `torch.fx` puts in the place of a tensor has neither.
    """
    if not isinstance(held, Tensor) or (held.dtype is dtype and held.device.type == device.type):
        return
    now, then = f"{held.dtype} on {held.device}", f"{dtype} on {device}"
    raise CallError(
        f"{_path_of(module, path)} is {now} now, and was {then} at capture",
        why="the casts, constants and kernels in the graph are those of the capture",
        remedy="convert the model and capture again, or convert this module back",
    )


def _path_of(module: nn.Module, path: Iterable[str]) -> str:
    """The path from the root, which every module of a tree knows by the calls that it holds."""
    holder = captured_of(module)
    call = None if holder is None else next(iter(holder.bodies.values()), None)
    around = () if call is None else call.plan.site(call.number).path
    return str(ModulePath((*around, *path)))
