"""The words of `docs/glossary.md` are few, in order, and those of the public surface."""

from pathlib import Path

from whence import api, errors

GLOSSARY = Path(__file__).parents[1] / "docs" / "glossary.md"
MOST = 40
WORDS = {
    "Bound": "bind",
    "Call": "call",
    "CallSite": "call site",
    "Calls": "call",
    "Convention": "call",
    "Cost": "cost",
    "Edit": "edit",
    "Guard": "guard",
    "GuardKind": "guard",
    "Guarded": "guard",
    "Guards": "guard",
    "Input": "input, output",
    "InputKind": "input, output",
    "Layers": "layer",
    "Memory": "cost",
    "ModulePath": "module path",
    "OnViolation": "violation",
    "Origin": "origin",
    "Output": "input, output",
    "OutputKind": "input, output",
    "Part": "part",
    "Phase": "phase",
    "Program": "program",
    "Quality": "quality",
    "Report": "cost",
    "Signature": "signature",
    "Source": "origin",
    "Strictness": "guard",
    "Tree": "tree",
    "Verification": "verification",
    "Violation": "violation",
    "attach": "attach",
    "bisect": "pass",
    "cached": "capture",
    "capture": "capture",
    "capture_step": "step",
    "from_exported_program": "program",
    "load": "program",
    "region": "region",
    "register_caches": "state",
    "unflatten": "tree",
}
"""What each public name is about."""


def rows() -> dict[str, tuple[str, ...]]:
    """The terms, each with its meaning and what PyTorch calls it."""
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[1:]]
    return {term: rest for term, *rest in cells}  # type: ignore[misc]


def test_terms_are_few_and_in_order() -> None:
    """Each has a meaning, and a word of PyTorch's or a dash."""
    found = rows()
    assert len(found) <= MOST
    assert list(found) == sorted(found)
    assert all(len(rest) == 2 and all(rest) for rest in found.values())


def test_public_names_are_about_terms() -> None:
    """Every public name but those of errors, which say themselves what they are."""
    public = {name for name in api.__all__ if not hasattr(errors, name)}
    assert public == WORDS.keys()
    assert set(WORDS.values()) <= rows().keys()
