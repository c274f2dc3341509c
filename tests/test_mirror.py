"""Tests are where one looks for them: a file of tests has place and name of the source file that it is for.

What several files do together is in `tests/behaviours`. Source files without tests of their own are tested by
those of others, and listed.
"""

from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "whence"
LISTED = TESTS / "without_own_tests.txt"
SOURCES = {str(file.relative_to(SOURCE).with_suffix("")) for file in SOURCE.rglob("*.py")}
ROOMS = sorted({source.partition("/")[0] for source in SOURCES if "/" in source})


def sources_of(test: Path) -> set[str]:
    """The source files that a file of tests may be for: `test_binding_table.py` is for `binding.py`."""
    place, words = test.parent.relative_to(TESTS), test.stem.removeprefix("test_").split("_")
    names = {"_".join(words[:count]) for count in range(1, len(words) + 1)}
    return {str(place / name) for name in names} & SOURCES


def files_of_rooms() -> list[Path]:
    return [test for room in ROOMS for test in sorted((TESTS / room).rglob("test_*.py"))]


def test_tests_are_named_for_a_source_file() -> None:
    """Every file of tests in the folder of a room."""
    found = files_of_rooms()
    assert len(found) > 100
    assert [str(test.relative_to(TESTS)) for test in found if not sources_of(test)] == []


def test_source_files_without_tests_of_their_own_are_listed() -> None:
    """The list is as long as it has to be: who adds a file, or tests for one, sees it here."""
    tested = {source for test in files_of_rooms() for source in sources_of(test)}
    inner = {source for source in SOURCES if "/" in source and not source.endswith("__init__")}
    assert LISTED.read_text().split() == sorted(inner - tested)
