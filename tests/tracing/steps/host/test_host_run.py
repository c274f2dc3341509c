"""What a step changes in Python around it is changed by its program, and by nothing else."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from tests.tracing.steps.small import batch, small, zero_first


def counting(**held: Any) -> tuple[SimpleNamespace, Callable[[Tensor], Tensor], dict[str, Any]]:
    """What a step keeps, the step, and its model and optimizer."""
    model, optimizer = small()
    kept, inner = SimpleNamespace(step=0, losses=[0.5], **held), zero_first(model, optimizer)

    def step(x: Tensor) -> Tensor:
        kept.step += 1
        loss = inner(x * kept.step)
        kept.losses.append(loss.item())
        return loss

    return kept, step, {"model": model, "optimizer": optimizer}


def test_they_are_inputs_and_outputs() -> None:
    """A counter has one of each, and what is appended an output of its own."""
    _, step, held = counting()
    program = whence.capture_step(step, (batch(),), **held)
    row = program.input("kept.step")
    assert (row.name, row.kind, row.value) == ("s_kept_step", "step_state", 0)
    assert program.output("new_s_kept_step").of == row.name
    (effect,) = [row for row in program.signature.outputs if row.kind == "effect"]
    assert effect.path == "kept.losses"


def test_a_capture_leaves_them_as_they_were() -> None:
    """Also one that fails after it has changed them, and a verification."""
    kept, step, held = counting()
    losses = kept.losses

    def failing(x: Tensor) -> None:
        step(x)
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        whence.capture_step(failing, (batch(),), **held)
    program = whence.capture_step(step, (batch(),), **held)
    assert program.verify(held["model"], (batch(),)).ok
    assert kept.losses is losses
    assert (kept.step, kept.losses) == (0, [0.5])


def test_a_stale_run_changes_nothing() -> None:
    """What the step advances has to be a number, as it was."""
    kept, step, held = counting()
    run = whence.capture_step(step, (batch(),), **held).bind(**held)
    kept.step = "three"
    with pytest.raises(
        whence.StaleCapture, match=r"`kept.step` was a number \(int\) at capture, is a str now"
    ):
        run(batch())
    assert kept.losses == [0.5]


def test_others_may_change_them_too() -> None:
    """A counter that is set anew, and a list that is emptied, are as good as those of the capture."""
    kept, step, held = counting()
    run = whence.capture_step(step, (batch(),), **held).bind(**held)
    run(batch())
    kept.step, kept.losses[:] = 4, []
    loss = run(batch())
    assert (kept.step, kept.losses) == (5, [loss.item()])


def test_a_copy_of_a_program_changes_the_same() -> None:
    """As it compares the same."""
    kept, step, held = counting()
    copied = copy.deepcopy(whence.capture_step(step, (batch(),), **held))
    copied.bind(**held)(batch())
    assert kept.step == 1


def test_a_loaded_program_knows_nothing_of_them(tmp_path: Path) -> None:
    """What was around the step is in no file."""
    _, step, held = counting()
    whence.capture_step(step, (batch(),), **held).save(tmp_path / "step")
    loaded = whence.load(tmp_path / "step", model=held["model"])
    with pytest.raises(whence.UsageError, match="not in a file"):
        loaded.bind(**held)


def test_a_loaded_program_does_not_write_to_a_tensor_of_the_file(tmp_path: Path) -> None:
    """Another lies around the step, and nobody would see what it holds."""
    _, _, held = counting()
    inner, mean = zero_first(held["model"], held["optimizer"]), torch.zeros(4)

    def step(x: Tensor) -> Tensor:
        mean.add_(x.mean(0))
        return inner(x)

    whence.capture_step(step, (batch(),), **held).save(tmp_path / "step")
    run = whence.load(tmp_path / "step", model=held["model"]).bind(**held)
    with pytest.raises(whence.StaleCapture, match=r"`closure mean` was .* is where the file cannot say now"):
        run(batch())


def test_a_number_that_sizes_follow_is_a_way_for_each() -> None:
    """Another size in every run is another program in every run, up to a limit, and then an error says so."""
    kept, _, held = counting()
    inner = zero_first(held["model"], held["optimizer"])

    def step(x: Tensor) -> Tensor:
        kept.step += 1
        return inner(x[: kept.step])

    run = whence.capture_step(step, (batch(),), **held).bind(held["model"], held["optimizer"])
    assert kept.step == 0
    with pytest.raises(whence.StaleCapture, match="has gone 17 ways already") as caught:
        for _ in range(40):
            run(batch())
    assert "pass what decides as a tensor" in caught.value.remedy
    assert kept.step == 17


def test_tensors_made_of_a_counter_are_of_its_type() -> None:
    """An integer makes a tensor of integers."""
    kept, _, held = counting()
    inner = zero_first(held["model"], held["optimizer"])

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        kept.step += 1
        return inner(x), torch.tensor([kept.step * 2, 1])

    run = whence.capture_step(step, (batch(),), **held).bind(**held)
    run(batch())
    made = run(batch())[1]
    assert made.dtype is torch.int64
    assert made.tolist() == [4, 1]


def test_returned_numbers_are_saved(tmp_path: Path) -> None:
    """A number that a step computes in Python and returns is no constant, in a file neither."""
    kept, step, held = counting()

    def weighted(x: Tensor) -> tuple[Tensor, float]:
        return step(x), 1 / kept.step

    program = whence.capture_step(weighted, (batch(),), **held)
    assert program.output("output_1").value is None
    program.save(tmp_path / "step.whence")
    assert str(whence.load(tmp_path / "step.whence")) == str(program)


def test_places_that_are_spelled_alike() -> None:
    """Each number has an input of its own, in lists within lists, too."""
    kept, step, held = counting(nested=[0, [10, [20]]], meter={"sum": 1}, meter_sum=2)

    def counts(x: Tensor) -> Tensor:
        kept.nested[0] += 1
        kept.nested[1][0] += 1
        kept.nested[1][1][0] += 1
        kept.meter["sum"] += 1
        kept.meter_sum += 1
        return step(x)

    program = whence.capture_step(counts, (batch(),), **held)
    assert program.input("kept.nested[1][1][0]").value == 20
    bound = program.bind(**held)
    bound(batch()), bound(batch())
    assert (kept.nested, kept.meter["sum"], kept.meter_sum) == ([2, [12, [22]]], 3, 4)


def test_a_list_of_numbers_is_replaced() -> None:
    """What stood there is not compared with numbers that only a run has."""
    kept, step, held = counting(last=[0.5])

    def replaces(x: Tensor) -> Tensor:
        loss = step(x)
        kept.last = [loss.item()]
        return loss

    loss = whence.capture_step(replaces, (batch(),), **held).bind(**held)(batch())
    assert kept.last == [loss.item()]


def test_a_place_that_comes_of_what_is_there_is_refused() -> None:
    """Every attempt found another one, and the capture went on for ever."""
    kept, step, held = counting(table={})

    def puts(x: Tensor) -> Tensor:
        loss = step(x)
        kept.table[len(kept.table)] = "a step"
        return loss

    with pytest.raises(whence.UnsupportedStep, match=r"puts something at kept\.table\[1\], and .*table\[0\]"):
        whence.capture_step(puts, (batch(),), **held)
    assert kept.table == {}


def test_a_list_that_grows_is_no_result() -> None:
    """The next run would return more."""
    kept, inner, held = counting()

    def step(x: Tensor) -> list[float]:
        inner(x)
        return kept.losses

    with pytest.raises(whence.UnsupportedStep, match=r"the step reads kept\.losses, and changes it"):
        whence.capture_step(step, (batch(),), **held)


@pytest.mark.parametrize("keep", [Tensor.detach, Tensor.item], ids=["tensor", "number"])
def test_what_is_replaced_and_kept_elsewhere_was_read(keep: Callable[[Tensor], Any]) -> None:
    """A first step that keeps what was there before it is another one than later ones, which keep what the
    last one made."""
    model, optimizer = small()
    kept, inner = SimpleNamespace(last=None, before=None), zero_first(model, optimizer)

    def step(x: Tensor) -> Tensor:
        loss = inner(x)
        kept.last, kept.before = keep(loss), kept.last
        return loss

    held: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if keep is Tensor.detach:
        with pytest.raises(whence.UnsupportedStep, match=r"the step reads kept\.last, and changes it"):
            whence.capture_step(step, (batch(),), **held)
    step(batch())
    run = whence.capture_step(step, (batch(),), **held).bind(**held)
    last, before = kept.last, kept.before
    for _ in range(3):
        loss = run(batch())
        before, last = last, keep(loss)
        assert (kept.last, kept.before) == (last, before)
