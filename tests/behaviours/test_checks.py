"""What eager mode finds out about values, and raises, a program raises, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.checks import verified

Body = Callable[[Tensor], Tensor]


def asserted(x: Tensor) -> Tensor:
    torch._assert_async(x.sum() > 0)
    return x * 2


BODIES: dict[str, Body] = {
    "asserted": asserted,
    "cholesky": torch.linalg.cholesky,
    "inverse": torch.linalg.inv,
    "solved": lambda x: torch.linalg.solve(x, torch.ones(3)),
    "factored": lambda x: torch.linalg.lu_factor(x)[0],
}


class Checking(nn.Module):
    """Runs a function that raises for some numbers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return BODIES[self.name](x.sin())


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_program_raises_what_eager_raises(name: str, backward: bool) -> None:
    """A matrix that cannot be inverted is no garbage in the result, although nothing reads the check."""
    model, bad = nn.Sequential(Checking(name)), torch.zeros(3, 3, requires_grad=True)
    program = verified(model, torch.eye(3, requires_grad=True), backward=backward)
    with pytest.raises(RuntimeError) as expected:
        model(bad)
    for captured in (program.module(), program.unflatten()):
        with pytest.raises(type(expected.value)):
            captured(bad)


def test_check_has_an_origin() -> None:
    """It belongs to the call that asked for it."""
    model = nn.Sequential(Checking("cholesky"))
    program = whence.capture(model, (torch.eye(3, requires_grad=True),), backward=True)
    (check,) = program.select("0 :: aten._linalg_check_errors :: forward")
    assert check.meta.get("val") is None and str(program.where(check).calls[0]) == "0"
