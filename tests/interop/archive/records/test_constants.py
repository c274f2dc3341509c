"""What a file says of constants, flags and views of mappings is what the model holds, and nothing else."""

import math
import re
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Flag, IntFlag
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whence

X = torch.ones(2, 2)


class Part(Flag):
    """Flags, which may be several."""

    FIRST, SECOND, THIRD = 1, 2, 4


class Place(IntFlag):
    """Flags that are numbers."""

    LEFT, RIGHT, TOP = 1, 2, 4


class Pair(NamedTuple):
    """Its class has variables of its own."""

    first: float
    second: float


PAIR = Pair(2.0, 1.0)


class Holding(nn.Module):
    """Reads what it holds."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.value is not None else x


class Named(nn.Module):
    """Reads a named tuple of its file's."""

    def forward(self, x: Tensor) -> Tensor:
        return x * PAIR.first


def _with_zone(hours: int) -> datetime:
    return datetime(2020, 1, 1, tzinfo=timezone(timedelta(hours=hours)))


ROWS: Mapping[str, tuple[Any, Any]] = {
    "several flags": (Part.FIRST | Part.SECOND, Part.FIRST | Part.THIRD),
    "no flag": (Part(0), Part.FIRST),
    "flags that are numbers": (Place.LEFT | Place.TOP, Place.LEFT),
    "view of a mapping": (MappingProxyType({"a": 2.0}), MappingProxyType({"a": 3.0})),
    "floats of a dtype": (torch.finfo(torch.float32), torch.finfo(torch.float64)),
    "numbers of a dtype": (torch.iinfo(torch.int8), torch.iinfo(torch.int16)),
    "path": (Path("/a"), Path("/b")),
    "path of Windows": (PureWindowsPath("c:/a"), PurePosixPath("c:/a")),
    "pattern": (re.compile("a", re.I), re.compile("a")),
    "decimal": (Decimal("1.50"), Decimal("1.6")),
    "fraction": (Fraction(1, 3), Fraction(2, 3)),
    "date": (date(2020, 1, 1), date(2020, 1, 2)),
    "date and time": (_with_zone(1), _with_zone(2)),
    "time": (time(1, 2), time(1, 3)),
    "span of time": (timedelta(1, 2, 3), timedelta(1)),
    "universal identifier": (UUID(int=7), UUID(int=8)),
    "module": (math, re),
    "float of NumPy's": (np.float32(0.1), np.float32(0.2)),
    "double of NumPy's": (np.sqrt(2.0), np.sqrt(3.0)),
    "integer of NumPy's": (np.int64(3), np.int32(3)),
    "complex number of NumPy's": (np.complex64(1 + 2j), np.complex64(1)),
}


def _loaded(model: nn.Module, path: Path) -> whence.Program:
    whence.capture(model, (X,)).save(path)
    return whence.load(path, model=model)


@pytest.mark.parametrize("name", ROWS)
def test_a_loaded_program_holds_for_what_was_captured_alone(name: str, tmp_path: Path) -> None:
    """No violation for the value that was there, and one for another."""
    value, other = ROWS[name]
    program = _loaded(Holding(value), tmp_path / "program.whence")
    assert program.check(Holding(value), (X,)) == []
    assert [row.guard.what for row in program.check(Holding(other), (X,))] == ["value"]


@pytest.mark.parametrize("make", [Named], ids=["named tuple"])
def test_what_python_makes_is_no_variable(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """The class of a named tuple looks up `tuple.__new__`, which no file can say."""
    model = make()
    assert _loaded(model, tmp_path / "program.whence").check(model, (X,)) == []


def test_a_view_of_a_mapping_is_looked_through() -> None:
    """What somebody changes behind it is found, also by a call that remembers the last look."""
    behind = {"a": 2.0}
    model = Holding(MappingProxyType(behind))
    program = whence.capture(model, (X,))
    guarded = program.guarded(model)
    guarded(X)
    behind["a"] = 3.0
    assert [row.guard.what for row in program.check(model, (X,))] == ["value"]
    with pytest.raises(whence.StaleCapture, match="value"):
        guarded(X)
