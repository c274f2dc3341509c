"""What a page holds, read as the browser reads it."""

from __future__ import annotations

import base64
import json
import re
import zlib
from functools import cache
from html.parser import HTMLParser
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch._higher_order_ops.scan import scan

import whence
from whence.reports.figures import figures_of

HOSTILE = "</script><img src=x onerror=hacked=1>"
"""What a module may be called, and nobody would."""


class Elements(HTMLParser):
    """The elements of a page, as a parser of HTML sees them, and the text of the one with the data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note it."""
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Keep the data of the page."""
        if self.tags and self.tags[-1][1].get("id") == "data":
            self.data += data


def data_of(page: str) -> Any:
    """What the page says, unpacked."""
    return json.loads(zlib.decompress(base64.b64decode(json.loads(Elements(page).data)["deflate"])))


def policy_of(page: str) -> str:
    """What the page allows itself."""
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    found: str = policy
    return found


def summed(differences: list[int]) -> list[int]:
    """Numbers of which the differences were written."""
    return list(accumulate(differences))


class Named(nn.Module):
    """Two layers, the first of which has a name of the caller's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(4, 4))
        self.add_module("last", nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> Any:
        """One after the other."""
        for layer in self.children():
            x = layer(x)
        return x


@cache
def program_of(name: str = "first") -> whence.Program:
    """A training step with a module of that name."""
    return whence.capture(Named(name), (torch.randn(3, 4),), backward=lambda y: y.sum())


class Inner(nn.Module):
    """A layer, or its negative where what comes in is less than nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        """Takes one way or the other."""
        return torch.cond(x.sum() > 0, lambda x: self.layer(x).sin(), lambda x: -x, (x,))


class Branching(nn.Module):
    """A branch in a module, and a loop that the root runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> Any:
        """The branch, and three products."""
        products = scan(lambda carry, row: (carry @ row, row.cos()), x, torch.stack([x, x, x]))[0]
        return products + self.inner(x)


@cache
def branching(backward: bool = False) -> whence.Program:
    """A program whose nodes run graphs."""
    loss = (lambda y: y.sum()) if backward else False
    return whence.capture(Branching(), (torch.randn(4, 4),), backward=loss)


@cache
def figures(name: str = "first") -> dict[str, Any]:
    """What a page about it draws."""
    return figures_of(program_of(name))
