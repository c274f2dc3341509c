"""Values that equality decides are compared by type and value, whatever a class of its own says."""

from typing import Any

import pytest
import torch
from torch import Tensor

from whence._torch.plain_values import same_constant


class Agreeable(str):
    """A text that equals all others."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True


class Kind(str):
    """A text as any other."""

    __slots__ = ()


SAME = [(float("nan"), float("nan")), (0.0, 0.0), (-0j, -0j), (Kind("b"), Kind("b")), ((1, 2), (1, 2))]
OTHER = [(0.0, -0.0), (0j, -0j), (1, 1.0), (1, True), (Agreeable("a"), Agreeable("b")), (Kind("b"), "b")]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_same_constants(left: Any, right: Any) -> None:
    """Equal type and value are the same, nan with itself, too."""
    assert same_constant(left, right)


@pytest.mark.parametrize(("left", "right"), OTHER)
def test_other_constants(left: Any, right: Any) -> None:
    """Another type, another zero, or another text that calls itself equal is not the same."""
    assert not same_constant(left, right)


def test_compilers_read_the_comparison() -> None:
    """Dynamo traces it without a break, also for classes derived from texts and numbers."""
    held = (1.5, Kind("b"), (1, 2), torch.float32)

    def compared(x: Tensor, given: tuple[Any, ...]) -> Tensor:
        return x + sum(same_constant(one, other) for one, other in zip(held, given, strict=True))

    compiled = torch.compile(compared, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(()), (1.5, Kind("b"), (1, 2), torch.float16)).item() == 3
