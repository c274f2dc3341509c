"""Module paths and patterns over them: tuples of segments inside, text only at the edges."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

ANY_DEPTH = "**"


class ModulePath(tuple[str, ...]):
    """Where a module lives in its model, one segment per attribute; the root is the empty path."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> "ModulePath":
        """Read `model.layers.3`; the empty text is the root."""
        return cls(text.split(".")) if text else cls()

    def __str__(self) -> str:
        return ".".join(self)

    def __repr__(self) -> str:
        return f"ModulePath({str(self)!r})"

    @property
    def name(self) -> str:
        """The last segment; empty for the root."""
        return self[-1] if self else ""

    @property
    def parent(self) -> "ModulePath":
        """The path without its last segment; the root is its own parent."""
        return ModulePath(self[:-1])

    def child(self, segment: str) -> "ModulePath":
        """The path of the attribute `segment` of this module."""
        return ModulePath((*self, segment))

    def is_within(self, other: "ModulePath") -> bool:
        """Whether this path is `other` or lies below it."""
        return self[: len(other)] == tuple(other)

    def relative_to(self, other: "ModulePath") -> "ModulePath":
        """The rest of this path below `other`; meaningful where `is_within(other)`."""
        return ModulePath(self[len(other) :])

    def moved(self, before: "ModulePath", now: "ModulePath") -> "ModulePath":
        """The path as it is below `now` instead of `before`; itself where it lies elsewhere."""
        return ModulePath((*now, *self.relative_to(before))) if self.is_within(before) else self

    def prefixes(self) -> Iterator["ModulePath"]:
        """This path and every path above it, from the root down."""
        return (ModulePath(self[:length]) for length in range(len(self) + 1))


ROOT = ModulePath()


@dataclass(frozen=True)
class PathPattern:
    """A glob over paths: `*`, `?` and `[…]` within one segment, `**` for any number of segments."""

    segments: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "PathPattern":
        """Read `layers.*.self_attn` or `**.mlp`."""
        return cls(ModulePath.parse(text))

    def matches(self, path: ModulePath) -> bool:
        """Whether the whole of `path` fits the pattern."""
        return _fits(self.segments, path)


def _fits(segments: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if not segments:
        return not path
    if segments[0] == ANY_DEPTH:
        return any(_fits(segments[1:], path[skipped:]) for skipped in range(len(path) + 1))
    return bool(path) and fnmatchcase(path[0], segments[0]) and _fits(segments[1:], path[1:])
