"""The modules of a captured program: ordinary `nn.Module`s that run captured graphs.

A module holds a body for every call the capture saw of it. Bodies call each other by identity: the call
site is written into the caller's code, and nothing is chosen by counting calls.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Self

from torch import fx, nn

from whence.errors import CallError
from whence.hierarchy.run.captured import KEY, Captured, run_captured, tell_of_mode
from whence.program.state import copy_results
from whence.schema import Phase

if TYPE_CHECKING:
    from whence.hierarchy.emit.calls import CallBody


class Tree(nn.Module):
    """One module of a captured program: the original's parameters, buffers, children and call.

    `type_name` is the class of the original. `forward_graph` and `backward_graph` are what its first call
    computed, and `calls` holds all of them.
    """

    type_name: str

    def __init__(self, type_name: str) -> None:
        super().__init__()
        # nn.Module's own way to set an attribute first looks whether it is a parameter or a module
        self.__dict__ |= {"type_name": type_name, KEY: Captured()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run what was captured, called as the original is called.

        Raises `CallError` when the arguments are not those of a captured call.
        """
        return run_captured(self, args, kwargs)

    @property
    def calls(self) -> tuple["CallBody", ...]:
        """The captured calls, in the order in which they were made."""
        return self.__dict__[KEY].calls  # type: ignore[no-any-return]

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

    def __reduce__(self) -> tuple[Any, ...]:
        """As any module is pickled; a class of its own is made again."""
        kind = type(self)
        return _unfilled, (kind.__base__ if _is_own_class(kind) else kind,), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: all but the signature of the original, which the calls have."""
        state = dict(vars(self))
        state["__signature__"], state["forward"] = "__signature__" in state, _is_own_class(type(self))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        is_signed, is_root = state.pop("__signature__"), state.pop("forward")
        super().__setstate__(state)
        parameters = self.calls[0].parameters if is_signed else None
        if parameters is not None:
            self.__dict__["__signature__"] = parameters
            if is_root:
                sign_forward(self, parameters)

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


OWN_NAMES = frozenset({"type_name", "calls", "forward_graph", "backward_graph"})
"""What a tree calls its own, which no plain attribute of the original can be called beside it."""
TAKEN_NAMES = OWN_NAMES | {"training"}
"""Attributes of a tree module that a captured parameter, buffer or submodule may be called, too."""


def sign_forward(tree: Tree, parameters: inspect.Signature) -> None:
    """Give a tree a `forward` with the signature of the original: `torch.export` asks it for names.

    It is that of a class of its own: a method in the tree's own dictionary would hold the tree in a circle.
    """
    kind = type(tree)
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    tree.__class__ = type(kind.__name__, (kind,), {**names, "forward": _forward_as(parameters)})


def _unfilled(kind: type[Tree]) -> Tree:
    return kind.__new__(kind)


def _is_own_class(kind: type[Tree]) -> bool:
    return kind not in (Tree, TreeList)


def _forward_as(parameters: inspect.Signature) -> Callable[..., Any]:

    def signed(self: Tree, *args: Any, **kwargs: Any) -> Any:
        return run_captured(self, args, kwargs)

    # A compiler counts by code how often it compiled: the eighth tree would be the last that it takes.
    signed.__code__ = signed.__code__.replace()
    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    if "self" not in parameters.parameters:
        signed.__signature__ = inspect.Signature([*own, *parameters.parameters.values()])  # type: ignore[attr-defined]
    return signed


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
