"""What the benchmarks say about figures they are given; nothing is timed here."""

import json
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError

import pytest
from expecttest import assert_expected_inline
from rich.console import Console

from benchmarks.__main__ import FAR, MISSED, main
from benchmarks.apart import measured
from benchmarks.report import Machine, Report, read
from benchmarks.results import (
    Figures,
    Result,
    Sample,
    Subject,
    Target,
    Verdict,
    amount,
    exit_status,
    faster,
    longer,
)
from benchmarks.rows import full, smoke
from benchmarks.table import table


def result(ours: float | None, theirs: float | None, target: Target | None) -> Result:
    """A row with these medians."""
    figures = Figures(_sample(ours), _sample(theirs), "s")
    return Result(Subject("Capture", "joint-32", "joint capture", "AOT", 32), target, figures)


def _sample(median: float | None) -> Sample | None:
    return None if median is None else Sample(median, 5)


@pytest.mark.parametrize(
    ("target", "ours", "theirs", "value", "verdict"),
    [
        (faster(8), 1.0, 8.0, 8.0, Verdict.MET),
        (faster(8), 1.0, 7.9, 7.9, Verdict.MISSED),
        (faster(8), 1.0, 4.0, 4.0, Verdict.MISSED),
        (faster(8), 1.0, 3.9, 3.9, Verdict.FAR),
        (longer(1.0), 3.0, 3.0, 1.0, Verdict.MET),
        (longer(1.0), 3.3, 3.0, 1.1, Verdict.MISSED),
        (longer(1.0), 6.0, 3.0, 2.0, Verdict.MISSED),
        (longer(1.0), 6.3, 3.0, 2.1, Verdict.FAR),
        (amount(5), 5.0, None, 5.0, Verdict.MET),
        (amount(5), 5.1, None, 5.1, Verdict.MISSED),
        (amount(5), 10.1, None, 10.1, Verdict.FAR),
        (amount(5), 0.0, None, 0.0, Verdict.MET),
    ],
)
def test_verdict(target: Target, ours: float, theirs: float | None, value: float, verdict: Verdict) -> None:
    """A bound is met when it is reached; far below means half as good or worse."""
    row = result(ours, theirs, target)
    assert row.value == pytest.approx(value)
    assert row.verdict is verdict


@pytest.mark.parametrize(
    "row", [result(None, 1.0, None), result(None, None, faster(8)), result(1.0, 2.0, None)]
)
def test_no_verdict_without_a_figure_or_a_target(row: Result) -> None:
    """A floor, and a row that cannot be measured yet, neither pass nor fail."""
    assert (row.value, row.verdict) == (None, None)
    assert exit_status([row], failing=MISSED) == 0


def test_exit_status() -> None:
    """A full run fails on any miss, a quick one on a miss by half only."""
    met, missed, far = (result(1.0, theirs, faster(8)) for theirs in (9.0, 5.0, 3.0))
    rows = ([met], [met, missed], [met, far])
    assert [exit_status(row, failing=MISSED) for row in rows] == [0, 1, 1]
    assert [exit_status(row, failing=FAR) for row in rows] == [0, 0, 1]


def test_report_round_trip(tmp_path: Path) -> None:
    """What is written is read again, and says value and verdict to those who only look."""
    rows = (result(1.0, 7.0, faster(8)), result(None, 1.0, None), result(4.0, None, amount(5)))
    report = Report(Machine.here(), rows)
    report.write(tmp_path / "results.json")
    assert read(tmp_path / "results.json") == report
    written = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [(row["value"], row["verdict"]) for row in written] == [
        (7.0, "missed"),
        (None, None),
        (4.0, "met"),
    ]
    assert written[0]["target"] == {"kind": "times faster", "bound": 8}
    assert written[0]["figures"]["theirs"] == {"median": 7.0, "repeats": 5}


def test_table() -> None:
    """The page a person reads: groups under titles, ratios in words, floors without a verdict."""
    floor = Figures(None, Sample(0.187, 5), "s", "27,702")
    step = Subject("Running", "training-step", "forward + backward", "eager", 4)
    rows = [
        result(0.6, 6.0, faster(10)),
        result(2.0, 6.0, faster(10)),
        Result(
            Subject("Capture", "depth-1000", "joint capture", layers=1000),
            amount(25),
            Figures(_sample(26), None, "s"),
        ),
        Result(step, longer(1.1), Figures(_sample(19.2), _sample(18.1), "ms")),
        Result(Subject("Floors", "floor-nodes-126", "bare fx nodes", layers=126), None, floor),
    ]
    console = Console(width=140, color_system=None)
    with console.capture() as capture:
        console.print(table(rows))
    page = "\n".join(line.rstrip() for line in capture.get().strip().splitlines() if line.strip())
    assert_expected_inline(
        page,
        """\
what                  against  layers     ours  PyTorch's         ratio  target  verdict
 ───────────────────────────────────────────────────────────────────────────────────────────────
 Capture
   joint capture       AOT          32    0.6 s        6 s  10.0× faster   ≥ 10×  met
   joint capture       AOT          32      2 s        6 s   3.0× faster   ≥ 10×  missed by half
   joint capture                  1000     26 s                           ≤ 25 s  missed
 Running
   forward + backward  eager         4  19.2 ms    18.1 ms        1.061×  ≤ 1.1×  met
 Floors
   bare fx nodes       27,702      126             0.187 s""",
    )


def test_every_target_has_its_row() -> None:
    """The table asks for what was promised, and the quick look for the same."""
    targets = {row.subject.name: row.target for row in full()}
    assert len(targets) == len(full())
    promised = {
        "forward-32": faster(8),
        "joint-32": faster(10),
        "unflatten-32": faster(8),
        "forward-126": faster(20),
        "joint-126": faster(20),
        "unflatten-126": faster(12),
        "tree-forward": longer(1.0),
        "training-step": longer(1.1),
        "varying-forward": longer(1.5),
        "varying-joint": longer(1.5),
        "varying-check": amount(30),
        "meta-405b": amount(5),
        "meta-405b-memory": amount(2),
        "depth-1000": amount(25),
        "viewer-size": amount(6),
        "viewer-paint": amount(2),
        "viewer-open": amount(300),
        "load-405b": amount(1),
        "diff-405b": amount(4),
        "load-32": faster(5),
    }
    assert {name: targets[name] for name in promised} == promised
    quick = {row.subject.name: row.target for row in smoke()}
    assert {name: targets[name] for name in quick} == quick
    assert {"forward-32", "joint-32", "unflatten-32", "tree-forward", "training-step"} <= set(quick)


@pytest.mark.slow
def test_a_row_in_a_fresh_process() -> None:
    """What the other process measured arrives whole and at once; a process that fails is an error."""
    (row,) = (row for row in full() if row.subject.name == "floor-nodes-32")
    unknown = replace(row, subject=replace(row.subject, name="unknown"))
    results = measured("full", [row, unknown], threads=1)
    result = next(results)
    assert (result.subject, result.target) == (row.subject, row.target)
    assert result.figures.theirs or result.figures.ours
    with pytest.raises(CalledProcessError):
        next(results)


def test_an_unknown_row_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """The answer lists the rows there are."""
    with pytest.raises(SystemExit) as caught:
        main(["joint-33"])
    assert caught.value.code == 2
    assert "no row is called joint-33; there are forward-32, joint-32" in capsys.readouterr().err
