"""Sizes that were asked to vary and that the model does not let vary: all of them, in one error."""

from typing import Any


def refuse_less(settled: Any) -> None:
    """Raise `SpecialisedShapes` where less is allowed than was asked for."""
