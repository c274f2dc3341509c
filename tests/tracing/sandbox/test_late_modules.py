"""A module that a forward is the first to import is loaded as without a capture."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import whence

TABLES = {
    "tables_of_test": """
import torch
TABLE, LAYER = torch.arange(4.0), torch.nn.Linear(4, 4)

def looked_up(x):
    return LAYER(x) * TABLE
""",
    "user_of_tables": """
from tables_of_test import looked_up
import tables_of_test

def doubled(x):
    return looked_up(x) * 2 + tables_of_test.TABLE
""",
    "model_of_tables": """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        from user_of_tables import doubled
        return doubled(self.layer(x))
""",
}


@pytest.mark.parametrize("backward", [False, torch.sum], ids=["forward", "joint"])
def test_modules_that_a_forward_imports_first_have_their_tensors(
    backward: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a module makes while it is loaded is made without a capture: its tensors were taken from it, and
    the model itself could not run any more."""
    for name, text in TABLES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        model, x = import_module("model_of_tables").Model(), torch.randn(3, 4)
        program = whence.capture(model, (x,), backward=backward)
        tables: Any = import_module("tables_of_test")
        assert type(tables.TABLE) is Tensor and torch.equal(tables.TABLE, torch.arange(4.0))
        assert import_module("user_of_tables").tables_of_test is tables
        outputs = program.module()(x)
        assert torch.equal(outputs[1] if backward else outputs, model(x))
        assert program.check(model, (x,)) == []
    finally:
        for name in TABLES:
            sys.modules.pop(name, None)


def test_a_capture_that_fails_leaves_no_tensors_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is not loaded then, as before, and the model runs."""
    (tmp_path / "tables_of_test.py").write_text(TABLES["tables_of_test"])
    monkeypatch.syspath_prepend(str(tmp_path))

    def decides(x: Tensor) -> Tensor:
        tables: Any = import_module("tables_of_test")
        return x * tables.TABLE if x.sum() > 0 else x

    try:
        with pytest.raises(whence.DataDependent):
            whence.capture(decides, (torch.ones(4),))
        assert "tables_of_test" not in sys.modules
        assert torch.equal(decides(torch.ones(4)), torch.arange(4.0))
    finally:
        sys.modules.pop("tables_of_test", None)
