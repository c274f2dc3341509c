"""A report is a table that a person reads, and the same figures as data."""

from __future__ import annotations

import json
from collections import OrderedDict

import pytest
import torch
from torch import nn

import whence

X = torch.randn(6, 4)


def model_of_blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)), nn.Linear(4, 1))


class Repeated(nn.Module):
    """Calls one module three times."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.lin(x)
        return x


def report_of(**options: object) -> whence.Report:
    program = whence.capture(model_of_blocks(), (X,), backward=lambda y: y.sum())
    return program.report(**options)  # type: ignore[arg-type]


def test_page() -> None:
    """Equal neighbours are one row."""
    table = [line.split() for line in str(report_of(depth=2)).partition("\n\n")[0].splitlines()]
    expected = (
        "(program) 19 48 85 816 1.44 k 5.72 k 0.394 384 384 816",
        "(root) Sequential 18 46 85 816 1.44 k 5.69 k 0.397 384 384 768",
        "0 Sequential 4 8 20 192 192 1.12 k 0.343 96 192",
        "1 … 3 × 3 Sequential 4 10 20 192 384 1.38 k 0.419 96 192",
        "4 Linear 2 8 5 48 96 440 0.327",
    )
    assert [line[-1] for line in table[:2]] == ["recomputing", "FLOPs"]  # a name of two words takes two lines
    assert [" ".join(line) for line in table[2:]] == [*expected]


def test_calls_of_one_module_are_one_row() -> None:
    """With its name alone."""
    report = whence.capture(Repeated(), (X,)).report()
    rows = [line.split(" | ")[0].strip("| ") for line in report.to_markdown().splitlines()]
    assert rows[2:] == ["(program)", "(root)", "lin  × 3"]


def test_page_of_a_step() -> None:
    """The optimizer has a column of operations, and counts for the modules whose parameters it updates."""
    model = model_of_blocks()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    report = whence.capture_step(step, (X,), model=model, optimizer=optimizer).report()
    head, total = report.to_markdown().splitlines()[0], report.rows[0]
    assert "backward | optimizer | parameters" in head and "optimizer FLOPs" in head
    by_path = {row.path: row.optimizer for row in report.rows[1:]}
    assert by_path["0"] == by_path["0.0"] == by_path["4"] and by_path["0.1"] == 0
    assert by_path[""] == 5 * by_path["4"] > 0
    assert total.optimizer > by_path[""]  # numbers made of a learning rate are no module's
    assert report.to_dict()["rows"][0]["optimizer"] == total.optimizer


def test_summary_names_the_peak_and_what_is_kept() -> None:
    """The largest first, equal ones together."""
    text = str(report_of()).partition("\n\n")[2]
    assert text.startswith("peak ")
    assert " × 4: aten.relu.default in " in text


def test_data_and_tables_hold_the_same() -> None:
    """As plain data, CSV and Markdown."""
    report = report_of()
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] is report.ok is True
    lines = report.to_csv().splitlines()
    assert len(lines) == 1 + len(data["rows"])
    assert lines[0].split(",") == ["call", *data["rows"][0]]
    assert [line.partition(",")[0] for line in lines[1:4]] == ["(program)", "(root)", "0"]
    assert report.to_markdown().splitlines()[1].startswith("| --- | --- | ---: |")


def test_names_are_no_markup() -> None:
    """Whatever a module is called: one line for each call, and no tag."""
    model = nn.Sequential(OrderedDict({"a|b\n<img src=x>": nn.Linear(4, 4)}))
    lines = whence.capture(model, (torch.randn(2, 4),)).report().to_markdown().splitlines()
    assert len(lines) == 5
    assert lines[4].startswith("|   a\\|b &lt;img src=x&gt; | Linear |")


def test_rows_are_chosen_and_sorted() -> None:
    """By depth, by a pattern of paths, and by a figure."""
    assert {row.depth for row in report_of(depth=1).rows} == {0, 1}
    assert [row.path for row in report_of(where="*.0").rows] == ["0.0", "1.0", "2.0", "3.0"]
    figures = [dict(row.figures)["kept bytes"] for row in report_of(sort="kept bytes").rows]
    assert figures == sorted(figures, reverse=True)
    with pytest.raises(whence.UsageError, match="there is no figure 'joy'"):
        report_of(sort="joy")
    with pytest.raises(whence.SelectionError, match="no call fits"):
        report_of(where="nowhere")
    with pytest.raises(whence.SelectionError, match="down to depth 1"):
        report_of(depth=1, where="0.0")
    with pytest.raises(whence.SelectionError, match="down to depth -1"):
        report_of(depth=-1)


@pytest.mark.parametrize(
    ("where", "paths"),
    [
        ("type=Linear", ["0.0", "1.0", "2.0", "3.0", "4"]),
        ("type=Re*", ["0.1", "1.1", "2.1", "3.1"]),
        ("2.0@0", ["2.0"]),
        ("* :: aten.relu.*", ["0", "1", "2", "3"]),
        ("*.* :: backward", ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "3.0", "3.1"]),
        ("*.1 :: saved", ["0.1", "1.1", "2.1", "3.1"]),
    ],
)
def test_rows_are_chosen_as_nodes_are(where: str, paths: list[str]) -> None:
    """By every pattern of `select`: class, number of the call, operation, phase, mark."""
    report = report_of(where=where)
    assert [row.path for row in report.rows] == paths
    whole = {row.path: row.figures for row in report_of().rows}
    assert all(row.figures == whole[row.path] for row in report.rows)


def test_rows_are_chosen_by_region() -> None:
    """Of what ran in a block."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with whence.region("gate"):
                gate = self.gate(x)
            return self.up(x) * gate

    report = whence.capture(Gated(), (X,)).report(where="region=gate")
    assert [row.path for row in report.rows] == ["", "gate"]


def test_bytes_and_intensity_are_in_the_rows() -> None:
    """As `cost` has them, in data and CSV; tables have the sum of bytes."""
    program = whence.capture(model_of_blocks(), (X,), backward=lambda y: y.sum())
    report, cost = program.report(), program.cost()
    for row, counted in zip(report.rows, cost.rows, strict=True):
        figures = dict(row.figures)
        assert (figures["bytes read"], figures["bytes written"]) == (counted.read, counted.written)
        assert figures["intensity"] == pytest.approx(counted.intensity, abs=1e-3)
    assert {"bytes_read", "bytes_written", "intensity"} <= set(report.to_csv().splitlines()[0].split(","))
    sorted_rows = program.report(sort="intensity").rows
    assert [dict(row.figures)["intensity"] for row in sorted_rows] == sorted(
        (dict(row.figures)["intensity"] for row in report.rows), reverse=True
    )


def test_parts_are_short_where_they_are_printed() -> None:
    """What a console shows of them is a line or a few."""
    program = whence.capture(model_of_blocks(), (X,), backward=lambda y: y.sum())
    cost, memory = program.cost("h100"), program.memory()
    assert str(cost).startswith("forward 816 FLOPs, backward 1.44 kFLOPs; read ")
    assert str(cost).endswith(" s on h100")
    assert [repr(cost), repr(memory)] == [
        "<Cost: 2.26 kFLOPs, 5.72 kB moved>",
        "<Memory: 384 B kept, peak 1.06 kB>",
    ]
    assert str(memory).startswith("peak 1.06 kB while ")
    assert repr(program.report()) == "<Report on Sequential: 15 calls>"
    assert repr(program.diff(program)) == "<Diff: 0 calls came, went or changed class, 0 do otherwise>"


def test_missing_flops_are_said() -> None:
    """A report with a gap is not ok, and ends with it."""
    program = whence.capture(lambda x: torch.linalg.inv(x.T @ x), (X,))
    assert not program.report().ok
    assert "FLOPs not known: aten.linalg_inv" in str(program.report())
