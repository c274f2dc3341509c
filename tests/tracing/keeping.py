"""Models that keep state in every place Python has, each run in a world of its own: `keeping.txt`.

A world is what a file of a user's is: variables, classes, functions, and a `Model` that is called with one
tensor. After `== name` come the parts of a model: what is `before` it, its `members`, `init` and `forward`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_HEAD = """
import array, collections, contextvars, datetime, functools, itertools, os, random, secrets, threading, time
import uuid, weakref
from time import perf_counter
import numpy as np
import torch
from torch import Tensor, nn
"""
_MODEL = """
class Model(nn.Module):
{members}
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(16.0).reshape(4, 4) / 16)
            self.linear.bias.zero_()
{init}

    def forward(self, x):
{forward}
"""
_RIGHT = ("caches", "harmless")
"""Groups whose programs are right; all others may be refused."""


@dataclass(frozen=True)
class Keeping:
    """A place for state."""

    name: str
    group: str
    parts: tuple[tuple[str, str], ...]

    @property
    def is_right(self) -> bool:
        """Whether a program is to be right in all calls."""
        return self.group in _RIGHT

    @property
    def is_random(self) -> bool:
        """Whether eager itself computes something else every time."""
        return self.group == "sources"

    def world(self) -> ModuleType:
        """A new world with this model in it."""
        made, parts = ModuleType(f"world_of_{self.name}"), dict(self.parts)
        body = _MODEL.format(
            members=textwrap.indent(parts.get("members", ""), " " * 4),
            init=textwrap.indent(parts.get("init", "pass"), " " * 8),
            forward=textwrap.indent(parts["forward"], " " * 8),
        )
        exec(compile(f"{_HEAD}{parts.get('before', '')}\n{body}", f"/{self.name}.py", "exec"), vars(made))
        return made


def all_places() -> list[Keeping]:
    """Every model of the table."""
    return list(_read(Path(__file__).with_name("keeping.txt").read_text()))


def _read(text: str) -> Iterator[Keeping]:
    for group in text.split("\n# ")[1:]:
        title, *rows = group.split("\n== ")
        for row in rows:
            name, *parts = row.split("\n-- ")
            pairs = (part.partition("\n") for part in parts)
            yield Keeping(name, title.strip(), tuple((word, body.rstrip()) for word, _, body in pairs))


def results(call: Callable[[Tensor], Any], count: int = 3) -> list[Tensor]:
    """What some calls in a row return."""
    return [call(torch.full((2, 4), float(number + 1))).detach().clone() for number in range(count)]
