"""Decisions by values are assertions of an exported program."""

import io
from typing import Any

import pytest
import torch

import whence
from tests.behaviours.deciding import NEGATIVE, Counted, EarlyExit, Half, Matching, OfNumPy, Routed, Sized, X


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "example", "other"),
    [
        (EarlyExit, (X,), (X * 1000,)),  # true
        (Routed, (X,), (NEGATIVE,)),  # false, and sizes of data
        (Sized, (X, torch.tensor(3)), (X, torch.tensor(4))),  # a number
        (Matching, (X,), (X * 2,)),  # a comparison of numbers
        (Counted, (X,), (X * 2,)),
    ],
)
def test_decisions_are_assertions(model: Any, example: Any, other: Any) -> None:
    """PyTorch runs them, also decomposed, and a tree of ours that is made of what was exported."""
    torch.manual_seed(1)
    eager = model()
    exported = whence.capture(eager, example, decide="example").to_exported_program()
    for module in (exported.module(), exported.run_decompositions({}).module(), whence.unflatten(exported)):
        assert torch.equal(module(*example), eager(*example))
        with pytest.raises(RuntimeError):
            module(*other)


def test_the_line_is_in_the_assertion() -> None:
    """PyTorch saves and loads it, and a run that fails says where the model decided."""
    file = io.BytesIO()
    torch.export.save(whence.capture(Half(), (X,), decide="example").to_exported_program(), file)
    file.seek(0)
    (gt,) = whence.capture(model := Half(), (X,), decide="example").decisions
    loaded = torch.export.load(file).module()
    assert loaded(X).shape == model(X).shape
    texts = [node.args[1] for node in loaded.graph.nodes if "_assert_async" in str(node.target)]
    assert texts and "Half.forward" in str(texts[0]) and gt.asked in str(texts[0])


def test_what_it_has_no_words_for() -> None:
    """What NumPy read is no symbol; the error names it, and its line."""
    program = whence.capture(OfNumPy(), (X,), decide="example")
    with pytest.raises(whence.NotExportable, match="the content of select is") as caught:
        program.to_exported_program()
    assert "deciding.py" in str(caught.value)
