"""Trees of variants, behind the one module that a person holds: one set of tensors, hooks and replacements.

A variant is another program of the same model, so its tree has modules of its own. What these hold is what
the held tree holds: they share its dictionaries of parameters, buffers and hooks, whatever becomes of them
(`.to`, `load_state_dict`). Modules that took another's place in the held tree take it in the variant's, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from whence.hierarchy.run.captured import captured_of
from whence.program import FlatProgram

_SHARED = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, dict | set))
_CHILDREN = "_modules"


@dataclass(frozen=True, eq=False)
class Pair:
    """A module of the held tree and that of a variant; `tensors` are plain attributes that are tensors."""

    held: nn.Module
    own: nn.Module
    tensors: tuple[str, ...]

    def share(self) -> None:
        """Let the variant's module have the parameters, buffers and hooks of the held one."""
        here = vars(self.held)
        self.own.__dict__.update({name: here[name] for name in _SHARED if name != _CHILDREN})

    def follow(self, own: Mapping[int, nn.Module]) -> None:
        """Have the children and the plain tensors that the held module has now."""
        children = {name: own.get(id(held), held) for name, held in self.held._modules.items()}
        self.own._modules.clear()
        self.own._modules.update(children)
        here = vars(self.held)
        self.own.__dict__.update({name: here[name] for name in self.tensors if name in here})


@dataclass(frozen=True, eq=False)
class VariantTree:
    """The tree of a variant, module by module beside the held one."""

    root: nn.Module
    pairs: tuple[Pair, ...]

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the variant admits these arguments."""
        return bool(captured_of(self.root).calls[0].fits(args, kwargs))

    def as_held(self) -> nn.Module:
        """The tree, as the held one is now."""
        own = {id(pair.held): pair.own for pair in self.pairs}
        for pair in self.pairs:
            pair.follow(own)
        return self.root


def keep_variant(held: nn.Module, variant: nn.Module, program: FlatProgram) -> None:
    """Let a tree run the tree of a variant, whose program this is, for arguments that it does not admit."""
    pairs = tuple(_pairs(held, variant, program))
    for pair in pairs:
        pair.share()
    captured = captured_of(held)
    captured.variants = (*captured.variants, VariantTree(variant, pairs))


def _pairs(held: nn.Module, variant: nn.Module, program: FlatProgram) -> Iterator[Pair]:
    theirs = dict(variant.named_modules(remove_duplicate=False))
    tensors = {str(row.path): tuple(name for name, _ in row.tensors) for row in program.modules}
    for name, module in held.named_modules(remove_duplicate=False):
        if name in theirs:
            yield Pair(module, theirs[name], tensors.get(name, ()))
