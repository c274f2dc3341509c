"""Steps that people write train as eager does, bit for bit, or are refused by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import whence
from tests.behaviours import (
    constructed_games,
    constructed_hooks,
    constructed_keeping,
    constructed_optimizers,
    constructed_schedules,
    constructed_trainers,
    constructed_trainings,
    constructed_ways,
)
from tests.behaviours.constructed_steps import ConstructedStep, Training
from tests.behaviours.constructions import generators, seeded
from tests.checks import differing, gradients, state


def in_a_row(several: Any) -> list[Any]:
    """Several optimizers or models, one, or none."""
    if several is None:
        return []
    found = several.values() if isinstance(several, dict) else several
    return list(found) if isinstance(several, dict | list | tuple) else [several]


def everything(training: Training) -> dict[str, Any]:
    """A copy of all that a step may change."""
    optimizers = in_a_row(training.optimizer)
    model = nn.ModuleList(in_a_row(training.model))
    found: dict[str, Any] = {f"gradient of {name}": held for name, held in gradients(model).items()}
    for at, optimizer in enumerate(optimizers):
        found |= {f"optimizer {at}, {n}": held for n, held in enumerate(tree_leaves(optimizer.state_dict()))}
        found[f"keys of optimizer {at}"] = sorted(map(str, optimizer.state_dict().get("state", ())))
    kept = tree_leaves(training.kept())
    found |= {
        f"kept {at}": str(leaf) if isinstance(leaf, str | None) else leaf for at, leaf in enumerate(kept)
    }
    found = {name: held.clone() if isinstance(held, Tensor) else held for name, held in found.items()}
    return found | state(model)


def one_step(run: Any, batch: tuple[Tensor, ...], number: int) -> dict[str, Any]:
    seeded(number)
    leaves = tree_leaves(run(*[tensor.clone() for tensor in batch]))
    return {f"output {at}": leaf for at, leaf in enumerate(leaves)} | generators()


TABLES = (
    *(constructed_trainings, constructed_keeping, constructed_schedules, constructed_ways),
    *(constructed_games, constructed_hooks, constructed_optimizers, constructed_trainers),
)
STEPS = [*dict.fromkeys(row for table in TABLES for row in table.STEPS)]


@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph")
@pytest.mark.sample(11)
@pytest.mark.parametrize("row", STEPS, ids=lambda row: row.name)
def test_step(row: ConstructedStep) -> None:
    """Three bound steps leave eager's results, parameters, buffers, gradients, optimizer and generators."""
    eager, ours = row.make(), row.make()

    def captured() -> whence.Program:
        seeded(0)
        batch = tuple(tensor.clone() for tensor in ours.batches[0])
        held = {"model": ours.model, "optimizer": ours.optimizer}
        return whence.capture_step(ours.step, batch, decide=row.decide, **held)

    before = everything(ours)
    if row.refused is not None and not row.refused.of_run:
        with pytest.raises(row.refused.error, match=row.refused.words):
            captured()
        assert differing(before, everything(ours)) == []
        return
    program = captured()
    assert differing(before, everything(ours)) == []
    batch = tuple(tensor.clone() for tensor in ours.batches[0])
    if row.refused is None:
        result = program.verify(ours.model, batch)
        assert result.ok, str(result)
        assert program.check(ours.model, batch) == []
        assert differing(before, everything(ours)) == []
    run = program.bind(ours.model, ours.optimizer)
    with nullcontext() if row.refused is None else pytest.raises(row.refused.error, match=row.refused.words):
        for number, batch in enumerate(eager.batches):
            assert differing(one_step(eager.step, batch, number), one_step(run, batch, number)) == [], number
            assert differing(everything(eager), everything(ours)) == [], number
            eager.between()
            ours.between()
