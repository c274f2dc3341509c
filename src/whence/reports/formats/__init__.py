"""A program in the formats of other tools: what `figures` says, as plain data or text."""

import json
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

from whence.errors import UsageError
from whence.program import FlatProgram
from whence.reports.devices import Device
from whence.reports.figures import figures_of
from whence.reports.formats.dot import dot
from whence.reports.formats.model_explorer import model_explorer
from whence.reports.formats.node_data import node_data
from whence.reports.formats.tlparse import tlparse
from whence.reports.formats.trace import trace

FORMS: Mapping[str, Callable[[Any], Any]] = {
    "model-explorer": model_explorer,
    "node-data": node_data,
    "trace": trace,
    "dot": dot,
    "tlparse": tlparse,
    "json": itemgetter("program"),
}
Values = str | Mapping[str, float]
_DEVICE, _TIMED = "h100", ("trace", "tlparse", "node-data")
"""Whose times a file has where nobody names a device."""


def text_of(
    program: FlatProgram,
    form: str,
    device: str | Device | None,
    sizes: Mapping[str, int] | None,
    values: Values | None,
) -> str:
    """The text of a file; raises `UsageError` for a form that is not one of them."""
    if form not in FORMS:
        raise UsageError(f"there is no form {form!r}", remedy=f"the forms are {', '.join(FORMS)}")
    if values is not None and form != "node-data":
        raise UsageError(f"{form} has no place for values", remedy="node-data is the form for them")
    figure, own = (values, None) if isinstance(values, str) else (None, values)
    figures = figures_of(program, device or (_DEVICE if form in _TIMED else None), sizes, own)
    found = FORMS[form]({**figures, "figure": figure})
    return found if isinstance(found, str) else json.dumps(found, allow_nan=False)
