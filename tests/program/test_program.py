"""What a program is made of can be held in mind, and does not change."""

from dataclasses import FrozenInstanceError, fields

import pytest

import whence
from tests.program.small import stack_program


def test_program_is_a_dozen_things() -> None:
    """What is asked of it is read from those."""
    assert len(fields(whence.Program)) <= 12


@pytest.mark.parametrize("name", [row.name for row in fields(whence.Program)])
def test_nothing_of_it_is_set(name: str) -> None:
    """Another program is made instead."""
    program = stack_program()
    with pytest.raises(FrozenInstanceError):
        setattr(program, name, None)
