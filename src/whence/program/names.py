"""Names: of placeholders, which say what they are, of modules, and of what a file has by its name alone."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from whence._torch.observe.wrappers import seen_through
from whence.errors import CallError
from whence.provenance import ModulePath
from whence.schema import InputKind

PREFIXES = {
    InputKind.PARAMETER: "p",
    InputKind.BUFFER: "b",
    InputKind.CONSTANT: "c",
    InputKind.OPTIMIZER_STATE: "o",
    InputKind.STEP_STATE: "s",
}


def state_name(kind: InputKind, path: ModulePath) -> str:
    """`p_model_layers_0_weight` for the parameter `model.layers.0.weight`."""
    return "_".join([PREFIXES[kind], *path])


def as_name(path: str) -> str:
    """A path as the name of a node: letters, digits and underscores."""
    return re.sub(r"\W+", "_", path).strip("_")


def modules_within(
    path: ModulePath, module: nn.Module, above: tuple[int, ...] = ()
) -> Iterator[tuple[ModulePath, nn.Module]]:
    """A module at a path and those inside it, parents first; modules that only wrap others are seen through.

    A module that holds one of those around it, whose identities are `above`, does not lead there again.
    """
    yield path, module
    within = (*above, id(module))
    for name, child in module._modules.items():
        if child is not None and id(inner := seen_through(child)) not in above:
            yield from modules_within(path.child(name), inner, within)


class NamedOnly:
    """Base of the classes that stand for those of a model, in a program that was loaded without one."""


@dataclass(frozen=True, slots=True)
class OfClass:
    """Stands for an object of a class, of which a file keeps nothing else."""

    kind: type

    def __repr__(self) -> str:
        return f"a {self.kind.__name__}"


class Said(dict[int, tuple[Any, Any]]):
    """What a file said of things, by their identities: each thing, which stays alive, and the words.

    `file` is what the file is called.
    """

    def __init__(self, file: str = "a file") -> None:
        super().__init__()
        self.file = file

    def __deepcopy__(self, _known: object) -> "Said":
        """A copy of a program speaks of the same things."""
        return self

    def note(self, thing: Any, words: Any) -> Any:
        """The thing, of which this was said."""
        self[id(thing)] = thing, words
        return thing


@dataclass(frozen=True, slots=True)
class Unfound:
    """Stands for what is not loaded, or that a file could not say."""


@dataclass(frozen=True, slots=True)
class InWords:
    """Stands for a value that a file does not hold; it is equal to no value of a model."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def __call__(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """A function that was kept in words cannot run; raises `CallError`."""
        raise CallError(
            f"{self.text} cannot run: the program was loaded from a file, which keeps of it only its name",
            remedy="give the program the function: program.under(loss_function=...), "
            "or whence.capture the model again",
        )
