"""The way in: with a release of PyTorch that lacks something, `import whence` gives one error."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from whence._torch.versions.finding import is_there, names_gone
from whence._torch.versions.release import TRIED, release, warn_if_untried
from whence.errors import Fault, UnsupportedRelease

_SOURCE = Path(__file__).parents[2]


@contextmanager
def entered() -> Iterator[None]:
    """Around the imports of whence: afterwards all private names are there, or the block ends with an error.

    A look at names that are there takes less than a millisecond. Only when something failed everything is
    imported that whence ever imports, to say it at once.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        gone = [*names_gone(load=True), *_public_names_gone()]
        if not gone:
            raise
        raise _unsupported(gone) from error
    if gone := names_gone(load=False):
        raise _unsupported(gone)
    warn_if_untried(release())


def _unsupported(gone: list[str]) -> UnsupportedRelease:
    why = "whence reads what PyTorch does from parts that no release promises to the next"
    remedy = f"install torch {TRIED[0]} to {TRIED[-1]}, or a whence that knows this release"
    return UnsupportedRelease.of(
        Fault(f"PyTorch {release()} has no {name}", why=why, remedy=remedy) for name in dict.fromkeys(gone)
    )


def _public_names_gone() -> Iterator[str]:
    """The names that whence imports from PyTorch's public parts and that are not there."""
    for file in sorted(_SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (name for name in names if not is_there(name))
