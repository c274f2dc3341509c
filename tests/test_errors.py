"""The taxonomy of errors, and the page of each: its failing example fails as shown, and its fix works.

Run with EXPECTTEST_ACCEPT=1 to write the messages on the pages anew.
"""

import ast
import os
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import whence
from whence import errors
from whence.errors import CaptureError, Fault, Place, WhenceError

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "errors"
ABSTRACT = {WhenceError, CaptureError}


def subclasses(kind: type[WhenceError]) -> Iterator[type[WhenceError]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


CONCRETE = sorted(
    (kind for kind in subclasses(WhenceError) if kind not in ABSTRACT), key=lambda kind: kind.code
)


@dataclass(frozen=True)
class Page:
    """A page of the documentation: an example that fails, what it prints, and how to do it right."""

    path: Path
    text: str

    @property
    def examples(self) -> list[str]:
        return re.findall(r"```python\n(.*?)```", self.text, re.DOTALL)

    @property
    def message(self) -> str:
        return re.findall(r"```text\n(.*?)```", self.text, re.DOTALL)[0].rstrip()

    def with_message(self, message: str) -> None:
        """Write the page with another message."""
        start, end = re.search(r"```text\n(.*?)```", self.text, re.DOTALL).span(1)  # type: ignore[union-attr]
        self.path.write_text(f"{self.text[:start]}{message}\n{self.text[end:]}")


def page_of(kind: type[WhenceError]) -> Page:
    path = PAGES / f"{kind.code}.md"
    return Page(path, path.read_text())


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", CONCRETE, ids=lambda kind: kind.code)
def test_page_fails_as_it_shows_and_its_fix_works(kind: type[WhenceError]) -> None:
    """The first example raises this very class with the message on the page; the second runs."""
    page, names = page_of(kind), {"__name__": "example"}
    failing, fixed = page.examples
    with pytest.raises(kind) as caught:
        exec(compile(failing, "example.py", "exec"), names)
    assert type(caught.value) is kind
    if "EXPECTTEST_ACCEPT" in os.environ:
        page.with_message(str(caught.value))
    else:
        assert _line_of_torch_cut(str(caught.value)) == _line_of_torch_cut(page.message)
    exec(compile(fixed, "example.py", "exec"), names)


def _line_of_torch_cut(message: str) -> str:
    """Lines of PyTorch's own files are others in another release."""
    return re.sub(r"\bcontainer\.py:\d+", "container.py", message)


@pytest.mark.parametrize("kind", CONCRETE, ids=lambda kind: kind.code)
def test_page_names_its_error(kind: type[WhenceError]) -> None:
    """A page says in its title which code it is about, and then which class."""
    title, _, first = page_of(kind).text.splitlines()[:3]
    assert title.startswith(f"# {kind.code}: ")
    assert first == f"`{kind.__name__}`"


def test_every_error_has_a_page_and_every_page_an_error() -> None:
    """Pages and codes are the same set."""
    assert sorted(path.stem for path in PAGES.glob("WH*.md")) == [kind.code for kind in CONCRETE]


def test_index_lists_every_page() -> None:
    """The table of the pages has a row for each, with the class and the title of the page."""
    index = (PAGES / "README.md").read_text()
    rows = [
        f"| [{kind.code}]({kind.code}.md) | `{kind.__name__}` | {page_of(kind).text.splitlines()[0][9:]} |"
        for kind in CONCRETE
    ]
    assert [row for row in index.splitlines() if row.startswith("| [WH")] == rows


def test_codes_are_unique_and_of_their_kind() -> None:
    """Each error has a code of its own; those of a capture begin with 1, and only those."""
    codes = [kind.code for kind in CONCRETE]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"WH[1-5]\d\d", code) for code in codes)
    assert [kind for kind in CONCRETE if issubclass(kind, CaptureError)] == [
        kind for kind in CONCRETE if kind.code.startswith("WH1")
    ]


def test_tree_in_the_docstring_is_the_tree() -> None:
    """The drawing at the top of the file has every class with its code."""
    drawn = re.findall(r"── (\w+) +(WH\d+)", errors.__doc__ or "")
    assert drawn == [(kind.__name__, kind.code) for kind in CONCRETE]


def test_errors_are_public() -> None:
    """Every error can be caught by its name in the package."""
    kinds: list[type[WhenceError]] = [*ABSTRACT, *CONCRETE]
    assert [kind for kind in kinds if getattr(whence, kind.__name__, None) is not kind] == []


def raised_bases(source: str) -> list[int]:
    """The lines that make an error of an abstract class."""
    bases = {kind.__name__ for kind in ABSTRACT}
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        for name in [node.func.value if isinstance(node.func, ast.Attribute) else node.func]
        if isinstance(name, ast.Name) and name.id in bases
    ]


def test_bases_are_never_raised() -> None:
    """`WhenceError` and `CaptureError` are for catching: what is raised has a code."""
    files = sorted((ROOT / "src").rglob("*.py"))
    assert files
    assert [f"{file.name}:{line}" for file in files for line in raised_bases(file.read_text())] == []
    assert not any(hasattr(kind, "code") for kind in ABSTRACT)


@pytest.mark.parametrize("source", ["raise CaptureError('no')", "def f():\n return WhenceError.of([])"])
def test_raised_base_is_found(source: str) -> None:
    """An error of an abstract class is found, however it is made."""
    assert len(raised_bases(source)) == 1


def test_faults_become_one_error() -> None:
    """What several share is said once; where they are in several places, each names its own."""
    here, there = Place("encoder"), Place("decoder", "model.py:3")
    alike = errors.NotCallable.of([Fault("one", here, "reason", "remedy"), Fault("two", here, "reason")])
    assert (alike.what, alike.where, alike.why, alike.remedy) == ("one; two", here, "reason", "remedy")
    apart = errors.NotCallable.of(
        [Fault("one", here, "first"), Fault("two", there, "second"), Fault("three")]
    )
    assert apart.what == "one (in module encoder); two (in module decoder, at model.py:3); three"
    assert (apart.where, apart.why) == (Place(), "first; second")


def test_each_fault_prints_its_own_reason() -> None:
    """Faults for different reasons are paragraphs of one message; those for the same reason share one."""
    here, there = Place("encoder"), Place("decoder")
    lines = errors.NotCallable.of(
        [
            Fault("one", here, "first", "do this"),
            Fault("two", there, "first", "do this"),
            Fault("three", here),
        ]
    )
    assert str(lines).splitlines() == [
        "[WH101] one (in module encoder); two (in module decoder)",
        "  why: first",
        "  what to do: do this",
        "[WH101] three",
        "  where: in module encoder",
        "  more: docs/errors/WH101.md in whence's repository",
    ]


def test_stale_capture_holds_what_is_violated() -> None:
    """The guards that do not hold are data, and stay with the error."""
    error = errors.StaleCapture("the model is in another mode", violations=("training",))
    assert pickle.loads(pickle.dumps(error)).violations == ("training",)
    assert errors.StaleCapture("nothing").violations == ()


@pytest.mark.parametrize("kind", CONCRETE, ids=lambda kind: kind.code)
def test_error_travels_between_processes(kind: type[WhenceError]) -> None:
    """An error that comes back from a worker says the same."""
    error = kind("what", where=Place("encoder", "model.py:3"), why="why", remedy="remedy")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)
