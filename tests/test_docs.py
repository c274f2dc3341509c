"""The examples in the documentation run, in order, as a reader would run them."""

import re
from pathlib import Path

import pytest

from whence.cli import main

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUN_AS_ERRORS = "WH*.md"  # their first example fails; tests/test_errors.py runs them
RUN = [page for page in PAGES if not page.match(RUN_AS_ERRORS) and page != ROOT / "README.md"]
EXAMPLE = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)


@pytest.mark.sample(3)
@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All examples of a page share one namespace and raise nothing; they print what the page says."""
    run_examples(page, capsys)


def test_the_examples_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    """What people read first is in no sample."""
    run_examples(ROOT / "README.md", capsys)


def run_examples(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the examples of a page, one after another."""
    names: dict[str, object] = {"__name__": "example"}
    for number, (example, shown) in enumerate(EXAMPLE.findall(page.read_text()), 1):
        capsys.readouterr()
        exec(compile(example, f"{page.name}, example {number}", "exec"), names)
        if shown:
            assert capsys.readouterr().out == shown


def test_the_readme_shows_what_the_demo_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page in the README is the command's real output."""
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    out = capsys.readouterr().out.replace(tmp_path.as_uri(), "file:///home/you/whence")
    printed = [line.rstrip() for line in out.splitlines() if line.strip()]
    shown = (ROOT / "README.md").read_text().split("$ make demo\n")[1].split("```")[0]
    assert [line.rstrip() for line in shown.splitlines() if line.strip()] == printed


def test_every_relative_link_leads_somewhere() -> None:
    """Links between pages are whole."""
    pages = [*PAGES, *(ROOT / "src").rglob("README.md"), ROOT / "CONTRIBUTING.md"]
    links = [
        (page, target)
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    ]
    assert links
    assert [(page.name, target) for page, target in links if not (page.parent / target).exists()] == []


def test_every_file_that_is_named_is_there() -> None:
    """Pages name files by their path in the project or the package, READMEs of rooms by that in the room."""
    pages = [*PAGES, *(ROOT / "src").rglob("README.md"), ROOT / "CONTRIBUTING.md"]
    named = [(page, name) for page in pages for name in re.findall(r"`([\w/]+\.py)`", page.read_text())]
    package = ROOT / "src" / "whence"
    lost = [
        (str(page.relative_to(ROOT)), name)
        for page, name in named
        if not any((place / name).exists() for place in (ROOT, package, page.parent))
    ]
    assert len(named) > 50
    assert lost == []
