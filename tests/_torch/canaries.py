"""What the source uses of PyTorch's private parts, and the lines that run it."""

from functools import cache
from pathlib import Path

from tests.private_parts import Use, uses_by_name
from whence._torch.versions.relied_on import ATTRIBUTES, NAMES, VARIABLES

SOURCE = Path(__file__).parents[2] / "src" / "whence"


@cache
def sources() -> dict[str, str]:
    """The text of every source file but the list's own."""
    files = (file for file in sorted(SOURCE.rglob("*.py")) if file.name != "relied_on.py")
    return {str(file.relative_to(SOURCE)): file.read_text() for file in files}


@cache
def used() -> dict[str, list[tuple[str, Use]]]:
    """Everything private that the source uses, by name."""
    return uses_by_name(sources())


def relied_on() -> set[str]:
    """The dotted names of all that is listed, those of other releases included."""
    return {
        f"{owner}.{name}"
        for table in (NAMES, ATTRIBUTES, VARIABLES)
        for owner, names in table.items()
        for name in names.replace("|", " ").split()
    }


def lines_that_use(name: str, *, running: bool = False) -> set[tuple[str, int]]:
    """Where something of the list is used, or only where it is used inside a function."""
    last = name.rpartition(".")[2]
    found = [row for spelled in (name, f".{last}", f":{last}") for row in used().get(spelled, ())]
    return {
        (file, line)
        for file, use in found
        if use.runs or not running
        for line in range(use.first, use.last + 1)
    }
