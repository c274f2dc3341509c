"""The modules of a captured program: ordinary `nn.Module`s that run captured graphs.

A module holds a body for every call the capture saw of it. Bodies call each other by identity: the call
site is written into the caller's code, and nothing is chosen by counting calls.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol, Self

import torch
from torch import fx, nn

from whence._torch.observe.compile_flags import constant_to_tracers
from whence.errors import CallError
from whence.hierarchy.plan.plan import CallPlan, Half
from whence.hierarchy.run.interface import Interface
from whence.program.copying import copy_results
from whence.schema import Phase


class CapturedCall(Protocol):
    """A captured call of a module, ready to run."""

    @property
    def number(self) -> int:
        """Which call of the program it is."""

    @property
    def plan(self) -> Any:
        """The plan that it is a part of."""

    @property
    def name(self) -> str:
        """The last segment of its call site, with `@1`, `@2` for later calls."""

    @property
    def parameters(self) -> inspect.Signature | None:
        """The Python signature of the original."""

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it was called with such arguments."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it as a person calls it."""

    def function(self, half: Half) -> tuple[FunctionType, tuple[Any, ...]]:
        """The function that runs one half of it, and the calls that its code makes."""

    @property
    def interface(self) -> Interface | None:
        """How a person makes the call."""

    @property
    def call_plan(self) -> CallPlan:
        """What the call computes."""

    def run_forward(self, module: nn.Module, *values: Any) -> tuple[Any, ...]:
        """Its forward on flat values."""

    def run_backward(self, module: nn.Module, half: Half, *values: Any) -> tuple[Any, ...]:
        """Its backward on what was kept and flat values."""

    def graph(self, phase: Phase) -> fx.Graph | None:
        """What it computes in a phase."""

    def readable_body(self) -> Callable[..., tuple[Any, ...]]:
        """Its forward on its module and flat values, for tracers to read."""

    def readable_call(self, count: int, names: tuple[str, ...]) -> "Readable":
        """The call with so many positional arguments and such keywords, for tracers to read."""

    def interpreted(self, module: nn.Module) -> fx.Graph:
        """What it computes, as a graph that is run on its module."""

    def run_on_proxies(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run it on what `torch.fx` puts in the place of arguments."""


class Readable(Protocol):
    """A call in plain code."""

    def problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why the capture does not hold for these arguments, in words, or nothing."""

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call, with arguments that fit."""


def fitting(
    holder: "CapturedHolder", name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> CapturedCall:
    """The call of a module that was captured with such arguments, or else the first."""
    calls = holder.calls
    if not calls:
        raise CallError(
            f"{name} has no graph of its own, so there is nothing to run",
            why=holder.inlined or "it was not called in the capture",
            remedy="call the module around it, which runs its operations"
            if holder.inlined
            else "capture a program that calls it",
        )
    if len(calls) == 1:
        return calls[0]
    return next((call for call in calls if call.fits(args, kwargs)), calls[0])


@dataclass(frozen=True, eq=False)
class FlatCall:
    """A call inside the tree, made through the module so that whoever watches module calls sees it."""

    call: CapturedCall
    values: tuple[Any, ...]


class Inside:
    """The first argument of a call inside the tree that a tracer reads; its number and flat values follow."""


class Readables:
    """Calls of one module in plain code, each an attribute."""

    def __deepcopy__(self, _memo: object) -> "Readables":
        return Readables()


class CapturedHolder(Protocol):
    """What holds the captured calls of a module."""

    calls: tuple[CapturedCall, ...]
    bodies: dict[int, CapturedCall]
    readable: Readables
    inlined: str


def is_read(args: Any, kwargs: Any) -> bool:
    """Whether a module is called by `torch.fx`, which reads what it does, or by code that a tracer has read.

    Who asks has asked `is_dynamo_compiling()` itself: it is true of the frame that is read, and PyTorch 2.15
    reads this one by itself when it has given up on its caller.
    """
    if isinstance(args, fx.Proxy) or (args and args[0] is Inside):
        return True
    return any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values()))


def read(module: nn.Module, holder: CapturedHolder, args: Any, kwargs: Any) -> Any:
    """Make a call in plain code, which is made ready when it is first read."""
    if not isinstance(args, fx.Proxy) and args and args[0] is Inside:
        name = f"inside_{args[1]}"
        ready(holder, name, args[1], ())
        return getattr(holder.readable, name)(module, *args[2:])
    if not torch.compiler.is_dynamo_compiling():
        return holder.calls[0].run_on_proxies(module, args, kwargs)
    name = f"alone_{len(args)}_{'_'.join(kwargs)}"
    ready(holder, name, len(args), tuple(kwargs))
    problem = ""
    for call in getattr(holder.readable, name):
        problem = call.problem(args, kwargs)
        if not problem:
            return call.run(module, args, kwargs)
    return call.refuses(problem)


@constant_to_tracers
def ready(holder: Any, name: str, number: int, keywords: tuple[str, ...]) -> bool:
    """Make plain code for a call inside the tree, or for those of people with so many arguments.

    Each has an attribute of its own: `torch.compile` reads it once, and does not see what is added later.
    """
    if hasattr(holder.readable, name):
        return True
    if name.startswith("inside"):
        setattr(holder.readable, name, holder.bodies[number].readable_body())
        return True
    calls = (holder.watched,) if getattr(holder, "watched", None) is not None else holder.calls
    if not calls:
        fitting(holder, type(holder).__name__, (), {})
    found = {call.plan.first[call.number]: call for call in reversed(calls)}
    setattr(
        holder.readable, name, [call.readable_call(number, keywords) for call in reversed(found.values())]
    )
    return True


class Tree(nn.Module):
    """One module of a captured program: the original's parameters, buffers, children and call.

    `type_name` is the class of the original. `forward_graph` and `backward_graph` are what its first call
    computed, and `calls` holds all of them. `bodies` finds them by the number of the call, together with
    those that a checkpoint runs again in the backward. `watched` runs instead of a flat module's only call
    while the module is captured again: it makes the module calls that the flat one inlines. `readable` are
    calls in plain code, made when `torch.compile` reads them. `inlined` says why a module has no calls of its
    own that was called. `whence_root` is the whole tree, for a module that calls another not below it.
    """

    type_name: str
    calls: tuple[CapturedCall, ...]
    bodies: dict[int, CapturedCall]
    watched: CapturedCall | None
    readable: Readables
    inlined: str
    whence_root: nn.Module | None

    def __init__(self, type_name: str) -> None:
        super().__init__()
        # nn.Module's own way to set an attribute first looks whether it is a parameter or a module
        self.__dict__ |= {
            "type_name": type_name,
            "calls": (),
            "bodies": {},
            "watched": None,
            "readable": Readables(),
            "inlined": "",
            "whence_root": None,
        }

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run what was captured, called as the original is called.

        Raises `CallError` when the arguments are not those of a captured call.
        """
        if torch.compiler.is_dynamo_compiling() or is_read(args, kwargs):
            return read(self, self, args, kwargs)
        if len(args) == 1 and isinstance(args[0], FlatCall):
            return args[0].call.run_forward(self, *args[0].values)
        if self.watched is not None and torch.compiler.is_compiling():
            return self.watched.run(self, args, kwargs)
        return fitting(self, self.type_name, args, kwargs).run(self, args, kwargs)

    @property
    def forward_graph(self) -> fx.Graph | None:
        """The graph of the first call; None for a module that was never called.

        Modules that compute the same have one graph, whose nodes are those of the first.
        """
        return self.calls[0].graph(Phase.FORWARD) if self.calls else None

    @property
    def backward_graph(self) -> fx.Graph | None:
        """The graph of the backward of the first call; None in a forward-only tree."""
        return self.calls[0].graph(Phase.BACKWARD) if self.calls else None

    def __getattr__(self, name: str) -> Any:
        """What `nn.Module` finds; `graph` is the first call as `torch.fx.Interpreter` runs it."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name == "graph" and self.calls:
                return self.calls[0].interpreted(self)
            error.add_note(
                f"a captured {self.type_name} has parameters, buffers, submodules and its call: "
                "program.unflatten(onto=model) gives instances of the model's classes, with their attributes"
            )
            raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Set it as on any module; a module under the name of a call that was not made is refused."""
        if "@" in name and isinstance(value, nn.Module):
            refuse_unmade(self, name)
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As any module is copied; a constant that something computed begins anew."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        copy_results([*vars(self).values(), *self._buffers.values()], memo)
        copied.__dict__.update(deepcopy(vars(self), memo))
        return copied

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add it as on any module; a module under the name of a call that was not made is refused."""
        refuse_unmade(self, name)
        super().add_module(name, module)

    def train(self, mode: bool = True) -> Self:
        """Set the flag, as on any module; the graphs stay as they were captured, and one warning says so."""
        tell_of_mode(self, mode)
        return super().train(mode)

    def _get_name(self) -> str:
        return self.type_name


def refuse_unmade(tree: Tree, name: str) -> None:
    """Raise `CallError` for the name of a call (`layer@1`) that was not made: nothing would run it."""
    base, _, index = name.rpartition("@")
    held = tree._modules.get(base) if index else None
    made = [call.name for call in held.calls] if isinstance(held, Tree) else []
    if base and index and name not in made[1:] and name not in tree._modules:
        raise CallError(
            f"{tree.type_name} makes no call {name}",
            why=f"the calls of {base} are {', '.join(made)}"
            if made
            else f"it has no module {base} that is called",
            remedy="replace the module itself for all of its calls, or one of those that follow the first",
        )


CAPTURED_MODE = "whence_captured_training"
"""Where a module says in which mode it was captured."""
OWN_NAMES = frozenset({*Tree.__annotations__, "forward_graph", "backward_graph"})
"""What a tree calls its own, which no plain attribute of the original can be called beside it."""
TAKEN_NAMES = OWN_NAMES | {"training"}
"""Attributes of a tree module that a captured parameter, buffer or submodule may be called, too."""


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


def forward_as(parameters: inspect.Signature) -> Callable[..., Any]:
    """The `forward` of a tree, with the signature of the original: `torch.export` asks it for names."""

    def forward(self: Tree, *args: Any, **kwargs: Any) -> Any:
        return Tree.forward(self, *args, **kwargs)

    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    if "self" not in parameters.parameters:
        forward.__signature__ = inspect.Signature([*own, *parameters.parameters.values()])  # type: ignore[attr-defined]
    return forward


class TreeList(Tree):
    """A captured container that can be indexed, iterated and measured."""

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module | None]:
        return iter(self._modules.values())

    def __getitem__(self, index: int) -> nn.Module | None:
        return list(self)[index]

    def __repr__(self) -> str:
        """Neighbours that look the same are shown as one, as in a `ModuleList`."""
        numbered = list(self._modules) == [str(position) for position in range(len(self))]
        return nn.ModuleList.__repr__(self) if numbered else super().__repr__()  # type: ignore[arg-type]
