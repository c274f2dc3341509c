"""What a run reads is what its program relies on, and what it makes itself is not."""

import pytest
import torch

import whence


def test_what_a_run_imports_is_no_condition() -> None:
    """A registry of transformers imports the files of models when it is asked, and keeps them in a table that
    a capture gives back as it was."""
    transformers = pytest.importorskip("transformers", minversion="5.23")
    config = transformers.PPOCRV6TinyRecConfig(hidden_size=32)
    model = transformers.PPOCRV6TinyRecModel(config).eval()
    pixels = torch.randn(2, 3, 64, 64)
    program = whence.capture(model, (pixels,))
    assert program.check(model, (pixels,)) == []
    assert program.verify(model, (pixels,)).ok
