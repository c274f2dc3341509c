"""Where sizes may vary, equal layers are replayed too, and the program is the same."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import whence
from tests import models
from tests.checks import backward_of
from tests.models import MODEL_CASES, ModelCase
from tests.sameness import differences, first_run
from tests.tracing.dynamic import dynamic_case
from tests.tracing.replay import layered, sized
from tests.tracing.replay.layered import Stack, Stemmed
from tests.tracing.replay.records.test_likeness import CASES, DIFFERS_WITH_COUNTS, MODES, blocks, made

SHAPES = ({0: Dim.DYNAMIC, 1: Dim.AUTO},)
QUICK = ("t5", "checkpoint")


def _rows() -> list[object]:
    return [
        pytest.param(
            row,
            mode,
            id=f"{row.name}-{mode}",
            marks=() if row.name in QUICK and mode == "loss" else pytest.mark.slow,
        )
        for row in MODEL_CASES
        for mode in ("forward", "tangents", "loss")
    ]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("row", "mode"), _rows())
def test_models_of_the_table(row: ModelCase, mode: str) -> None:
    """Node for node, with sizes, signature, origins, calls, adjoints and guards."""
    case, programs = dynamic_case(row), []
    for reuse in (False, True):
        model, args, kwargs = case.call
        backward = backward_of(row, mode)
        programs.append(
            whence.capture(model, args, kwargs, backward=backward, dynamic_shapes=case.shapes, reuse=reuse)
        )
    assert differences(*programs) == {}


FEW = ("equal", "adapters on some layers", "batch normalisation", "checkpoints", "stacks of layers")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FEW else pytest.mark.slow)
        for name in sorted(CASES.keys() - DIFFERS_WITH_COUNTS)
    ],
)
def test_layers_that_seem_equal(name: str) -> None:
    """As with fixed sizes; one more layer runs where the first asks about a size."""
    model, x = made(name)
    plain, program = (_captured(model, x, reuse=reuse) for reuse in (False, True))
    assert differences(plain, program) == {}
    _, kind, expected = CASES[name]
    assert expected - 2 <= program.replay[kind].replayed <= expected


SIZED: dict[str, tuple[Callable[[], nn.Module], str, int]] = {
    "computes with sizes": (lambda: Stack(*blocks(sized.Reshapes)), "Reshapes", 3),
    "decides the same": (lambda: Stack(*(sized.Decides(2) for _ in range(5))), "Decides", 3),
    "decides otherwise": (lambda: Stack(*(sized.Decides(n) for n in (1, 2, 3, 2, 2))), "Decides", 1),
    "another length each": (lambda: Stack(*blocks(sized.Grows)), "Grows", 0),
    "sizes of its own": (lambda: Stack(*blocks(sized.Picks)), "Picks", 0),
    "a length given": (lambda: sized.Telling(*blocks(sized.Told, 6)), "Told", 4),
    "a length returned": (lambda: sized.ToldBack(*blocks(sized.Tells)), "Tells", 0),
    "results written inside": (lambda: Stack(*blocks(sized.WritesInside)), "WritesInside", 3),
    "layers in layers": (lambda: Stack(*blocks(sized.Around)), "Around", 2),
    "asked between layers": (sized.Decider, "Block", 3),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", models.MODES)
@pytest.mark.parametrize("name", SIZED)
def test_layers_that_look_at_sizes(name: str, mode: str) -> None:
    """One program with and without reuse; a layer stands for others only where they would decide alike."""
    make, kind, expected = SIZED[name]
    model, x = Stemmed(make()), torch.randn(3, 4, layered.WIDTH)
    plain, program = (_captured(model, x, reuse=reuse, mode=mode) for reuse in (False, True))
    assert differences(plain, program) == {}
    assert program.replay[kind].replayed == expected, str(program.replay)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SIZED)
def test_other_sizes_are_what_eager_computes(name: str) -> None:
    """Bit for bit, at sizes that the capture has not seen."""
    model = Stemmed(SIZED[name][0]())
    program = _captured(model, torch.randn(3, 4, layered.WIDTH), reuse=True)
    for batch, length in ((3, 4), (5, 7), (2, 5)):
        result = program.verify(model, (torch.randn(batch, length, layered.WIDTH),))
        assert result.ok, str(result)


def test_what_was_decided_is_said_once() -> None:
    """Guards name the line that asked first, whichever layer it ran in."""
    model, x = Stack(*(sized.Decides(2) for _ in range(4))), torch.randn(3, 4, layered.WIDTH)
    plain, program = (_captured(model, x, reuse=reuse) for reuse in (False, True))
    assert str(program.shapes) == str(plain.shapes)
    assert "blocks.0" in str(program.shapes)


def test_first_layer_that_asks_is_not_replayed() -> None:
    """What it found out is known to those behind it, and they are recorded with that."""
    program = _captured(Stack(*(sized.Decides(2) for _ in range(4))), torch.randn(3, 4, layered.WIDTH))
    assert "finds out something about a size" in str(program.replay["Decides"])
    assert program.replay["Decides"].traced == 2


def _captured(model: nn.Module, x: Tensor, *, reuse: bool = True, mode: str = "loss") -> whence.Program:
    return first_run(deepcopy(model), (x,), backward=MODES[mode], shapes=SHAPES, reuse=reuse)


def test_nothing_of_a_run_is_left() -> None:
    """A call that is replayed inside a recorded one does not keep autograd's graph alive through its
    backward."""
    program = _captured(Stack(*blocks(sized.Around)), torch.randn(3, 4, layered.WIDTH))
    assert program.replay["Block"].replayed == 3
    assert "keeps" not in str(program.replay)
