"""One thing that a capture assumed, and one that does not hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from whence.program.arguments.open_sizes import SizeRule
from whence.program.guards.expectations import (
    Expectation,
    ExpectedFunction,
    ExpectedHolder,
    ExpectedTensor,
    ExpectedThing,
    ExpectedWords,
    Hooks,
    Missing,
    Reference,
)
from whence.program.plain import AsJSON, plain_fields
from whence.provenance import ModulePath, Source
from whence.schema import GuardKind, Strictness

_STRICTNESS: Mapping[type, Strictness] = {
    **{Reference: Strictness.IDENTITY, ExpectedFunction: Strictness.IDENTITY, Hooks: Strictness.IDENTITY},
    **{ExpectedTensor: Strictness.METADATA, ExpectedHolder: Strictness.TYPE, Missing: Strictness.ABSENT},
    **{ExpectedWords: Strictness.SAME, SizeRule: Strictness.CONDITION, ExpectedThing: Strictness.TYPE},
}


class Guard(NamedTuple):
    """One thing the capture assumed; a model has thousands, and a tuple is made quickly.

    `what` spells it as the model's author would: `layers.3.mlp.act_fn`, `kwargs['input_ids']`, `grad mode`.
    `holder` is the number of the module or object that holds it (None for inputs and modes), `name` its name
    there, `owner` its class. `module` and `source` say which module and which line of code read it first.
    `positions` are those of the inputs it speaks of.
    """

    kind: GuardKind
    what: str
    expected: Expectation
    reason: str
    name: str = ""
    holder: int | None = None
    owner: type | None = None
    module: ModulePath | None = None
    source: Source | None = None
    positions: tuple[int, ...] = ()

    @property
    def strictness(self) -> Strictness:
        """How it compares."""
        if self.kind is GuardKind.INPUT and isinstance(self.expected, ExpectedWords):
            return Strictness.TYPE if self.positions else Strictness.EQUAL
        return _STRICTNESS.get(type(self.expected), Strictness.EQUAL)

    def __str__(self) -> str:
        return f"{self.what}: {self.expected}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        said = plain_fields(self, "kind", "what", "strictness", "module", "source", "reason")
        return {**said, "expected": str(self.expected)}


@dataclass(frozen=True, slots=True)
class Violation(AsJSON):
    """A guard that does not hold, and what was found instead."""

    guard: Guard
    found: str

    def __str__(self) -> str:
        again = "capture again with an example or dynamic_shapes that admits it"
        return f"{self.change}: {again if isinstance(self.guard.expected, SizeRule) else 'capture again'}"

    @property
    def change(self) -> str:
        """What was expected, where it was read, and what was found, in words."""
        if isinstance(self.guard.expected, SizeRule):
            return f"{self.found}, and must be {self.guard.expected}"
        read = "" if self.guard.source is None else f" ({self.guard.source.short})"
        before = f"`{self.guard.what}` was {self.guard.expected} at capture{read}"
        return f"{before}, is {self.found} now"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**self.guard.to_dict(), "found": self.found}


@dataclass(frozen=True, slots=True)
class Unguarded:
    """Something the capture may depend on that no guard watches."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


class Holder(NamedTuple):
    """A module or object whose attributes were read.

    `names` are the ways to a module from its parents, the first being the one it is known by: each the
    number of the parent and a name in it. An object has none: it is found where a guard expects it. `root` is
    the position among the roots of the capture, for a module that is one.
    """

    number: int
    path: str
    type: type
    is_module: bool
    names: tuple[tuple[int, str], ...] = ()
    root: int | None = None

    @property
    def place(self) -> tuple[int, str] | None:
        """The number of the parent and the name there that a module is found by; None for a root."""
        return self.names[0] if self.root is None and self.names else None

    @property
    def aliases(self) -> tuple[tuple[int, str], ...]:
        """The other places where it is found."""
        return self.names if self.root is not None else self.names[1:]

    @property
    def is_found_by_name(self) -> bool:
        """Whether it is a module of the hierarchy, and not an object that is met where a guard expects it."""
        return self.root is not None or bool(self.names)
