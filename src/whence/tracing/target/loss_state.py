"""What a loss function holds: its parameters, buffers and tensors, under names of their own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from whence.program.names import state_name
from whence.provenance import ModulePath
from whence.schema import InputKind
from whence.tracing.target.subject import (
    Subject,
    closure_values,
    named_attributes,
    state_tensors,
    subject_unchecked,
)


@dataclass(frozen=True)
class LossTensor:
    """A tensor that a loss function holds, under all its names, and the class of the module around it."""

    kind: InputKind
    paths: tuple[ModulePath, ...]
    owner: str | None = None

    @property
    def name(self) -> str:
        """What its placeholder is called."""
        return state_name(self.kind, self.paths[0])


def tensors_of_loss(loss: Callable[..., Any], subject: Subject) -> dict[int, LossTensor]:
    """The tensors of a loss function by identity: `loss.weight` for one of a module that is the loss,
    `loss.criterion.weight` where a function names the module `criterion`, `loss.weight` for its own `weight`.

    The model may have a `loss` of its own: then the name grows an underscore.
    """
    return {id(tensor): row for tensor, row in _held_by_loss(loss, subject)}


def tensors_of_loss_by_name(loss: Callable[..., Any], subject: Subject) -> dict[str, Tensor]:
    """The same tensors by all their names."""
    rows = {id(tensor): (tensor, row) for tensor, row in _held_by_loss(loss, subject)}
    return {str(path): tensor for tensor, row in rows.values() for path in row.paths}


def _held_by_loss(loss: Callable[..., Any], subject: Subject) -> Iterator[tuple[Tensor, LossTensor]]:
    """Each with what it is; of a tensor that is met several times, the last says it."""
    around, above = subject_unchecked(loss), _free_name(subject)
    for path, tensor in _own_tensors(loss, above):
        yield tensor, LossTensor(InputKind.CONSTANT, (path,))
    for path, owner, tensor in named_attributes(around):
        yield tensor, LossTensor(InputKind.CONSTANT, (_below(above, path),), owner)
    for row in state_tensors(around):
        yield row.tensor, LossTensor(row.kind, tuple(_below(above, path) for path in row.paths), row.owner)


def _below(above: ModulePath, path: ModulePath) -> ModulePath:
    return ModulePath((*above, *path))


def _own_tensors(loss: Callable[..., Any], above: ModulePath) -> Iterator[tuple[ModulePath, Tensor]]:
    """Tensors among the variables of a function, and the arguments of a partial."""
    if not isinstance(loss, nn.Module):
        for held in closure_values(loss):
            yield from (
                (above.child(name), value) for name, value in held.items() if isinstance(value, Tensor)
            )


def _free_name(subject: Subject) -> ModulePath:
    """A name that no module of the model has for anything, at the root."""
    taken = {path.name for path, _ in subject.roots}
    for _, module in subject.roots:
        taken |= {*dir(type(module)), *vars(module), *module._modules, *module._parameters, *module._buffers}
    name = "loss"
    while name in taken:
        name += "_"
    return ModulePath((name,))
