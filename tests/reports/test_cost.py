"""FLOPs are those that PyTorch counts while eager runs, and sums are right whichever way one adds."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import whence
from tests.models import case
from whence import Phase
from whence.reports.devices import Device

X = torch.randn(6, 4)
aten = torch.ops.aten
MODELS = ("llama", "gpt2", "t5", "mixtral", "vit", "resnet")


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_flops_of_a_training_step_are_those_of_the_flop_counter(name: str) -> None:
    """But for attention on a CPU, which that counter leaves out: `beyond` says how much that is."""
    found = case(name)
    model, args, kwargs = found.make()
    cost = whence.capture(model, args, kwargs, backward=found.loss).cost()
    with FlopCounterMode(display=False) as counter:
        found.loss(model(*args, **kwargs)).backward()
    assert cost.total.total_flops - sum(cost.beyond.values()) == counter.get_total_flops()
    assert all("attention" in name or "grouped_mm" in name for name in cost.beyond)
    assert cost.gaps == {}


@pytest.mark.sweep
def test_flops_of_experts() -> None:
    """Tokens are multiplied with the matrices of their experts; the backward takes twice as much."""
    found = case("mixtral")
    model, args, kwargs = found.make()
    cost = whence.capture(model, args, kwargs, backward=found.loss).cost()
    config: Any = model.config
    tokens = kwargs["input_ids"].numel()
    numbers = 3 * config.hidden_size * config.intermediate_size  # of one expert: gate, up, down
    forward = 2 * tokens * config.num_experts_per_tok * numbers * config.num_hidden_layers
    counted = [count for name, count in cost.beyond.items() if "grouped_mm" in name]
    assert sum(counted) == 3 * forward


@pytest.mark.parametrize("name", ["llama", "bert", "resnet"])
def test_flops_of_a_forward_are_those_of_the_flop_counter(name: str) -> None:
    """Composites count as what eager makes of them."""
    model, args, kwargs = case(name).make()
    cost = whence.capture(model, args, kwargs).cost()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*args, **kwargs)
    assert cost.total.total_flops - sum(cost.beyond.values()) == counter.get_total_flops()
    assert set(cost.total.flops) == {"forward"}


def test_rows_add_up() -> None:
    """A call has what is in it and in the calls inside it; shared weights are counted once in all."""
    found = case("llama")
    model, args, kwargs = found.make()
    program = whence.capture(model, args, kwargs, backward=found.loss)
    cost = program.cost()
    assert cost.total.total_flops == sum(node.flops for node in cost.nodes)
    assert cost.total.read == sum(node.read for node in cost.nodes)
    assert cost.total.parameters == sum(held.numel() for held in model.parameters())
    assert cost.total.parameter_bytes == 4 * cost.total.parameters
    one = next(row for row in cost.rows if row.path == "model.layers.0")
    inside = [
        row for row in cost.rows if row.path.startswith("model.layers.0.") and row.depth == one.depth + 1
    ]
    assert one.total_flops == sum(row.total_flops for row in inside)
    assert one.intensity == one.total_flops / (one.read + one.written)


def test_tied_weights_count_once() -> None:
    """In the program, and in each call that reads them."""
    left, right = nn.Linear(4, 4), nn.Linear(4, 4)
    right.weight = left.weight
    rows = whence.capture(nn.Sequential(left, right), (X,)).cost().rows
    assert [(row.path, row.parameters) for row in rows] == [("", 24), ("", 24), ("0", 20), ("1", 20)]


def test_recomputation_and_optimizer_are_phases_of_their_own() -> None:
    """A checkpoint computes its products once more."""
    found = case("checkpoint")
    model, args, kwargs = found.make()
    flops = whence.capture(model, args, kwargs, backward=found.loss).cost().total.flops
    assert 0 < flops["recomputed"] <= flops["forward"] < flops["backward"]
    linear = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(linear.parameters())

    def step(x: torch.Tensor) -> None:
        linear(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    cost = whence.capture_step(step, (X,), model=linear, optimizer=optimizer).cost()
    assert cost.total.flops == {"forward": 2 * 6 * 4, "backward": 2 * 6 * 4, "optimizer": 0}
    assert any(node.phase == "optimizer" and node.written for node in cost.nodes)
    assert "element-wise" in str(cost)
    assert "element-wise" not in str(whence.capture(linear, (X,)).cost())


class Selective(nn.Module):
    """A checkpoint that keeps what these operators give."""

    def __init__(self, *kept: Any) -> None:
        super().__init__()
        self.chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh())
        self.contexts = partial(create_selective_checkpoint_contexts, list(kept))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.chain, x, use_reentrant=False, context_fn=self.contexts)
        return found.sin()


@pytest.mark.parametrize("kept", [(), (aten.addmm.default,), (aten.tanh.default,)], ids=str)
def test_selective_checkpoints_compute_again_what_eager_does(kept: Any) -> None:
    """Products that no result needs, and eager computes all the same, are named; numbers are eager's."""
    model = Selective(*kept)
    program = whence.capture(model, (X,), backward=torch.sum)
    cost = program.cost()
    with FlopCounterMode(display=False) as counter:
        model(X).sum().backward()
    assert cost.total.total_flops + sum(row.flops for row in cost.unread) == counter.get_total_flops()
    assert program.verify(model, (X,)).ok


def test_what_an_optimizer_computes_counts_for_the_module_that_it_updates() -> None:
    """Muon multiplies matrices; in all that is what the counter of PyTorch sees of the step."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Linear(8, 1))
    optimizer = torch.optim.Muon([held for held in model.parameters() if held.ndim == 2])

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    cost = whence.capture_step(step, (X,), model=model, optimizer=optimizer).cost()
    step(X)
    with FlopCounterMode(display=False) as counter:
        step(X)
    assert cost.total.total_flops == counter.get_total_flops() and cost.gaps == {}
    by_path = {row.path: row.flops.get("optimizer", 0) for row in cost.rows}
    iteration = 5 * 2 * (2 * 4 * 4 * 8 + 4 * 4 * 4)  # of Newton and Schulz: X @ X.T, its square, times X
    assert by_path["0.0"] == by_path["0"] == iteration and by_path["0.1"] == 0
    assert cost.total.flops["optimizer"] == iteration + by_path["1"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*MODELS, "unet"])
def test_flops_of_a_whole_step_are_those_of_the_flop_counter(name: str) -> None:
    """The optimizer multiplies, too."""
    found = case(name)
    model, args, kwargs = found.make()
    optimizer = torch.optim.Muon([held for held in model.parameters() if held.ndim == 2])

    def step(args: Any, kwargs: Any) -> None:
        optimizer.zero_grad()
        found.loss(model(*args, **kwargs)).backward()
        optimizer.step()

    cost = whence.capture_step(step, (args, kwargs), model=model, optimizer=optimizer).cost()
    step(args, kwargs)
    with FlopCounterMode(display=False) as counter:
        step(args, kwargs)
    assert cost.total.total_flops - sum(cost.beyond.values()) == counter.get_total_flops()
    assert cost.gaps == {} and cost.total.flops["optimizer"] > 0
    assert cost.total.total_flops == sum(node.flops for node in cost.nodes)


def test_what_has_no_formula_is_a_gap() -> None:
    """Named with how often it occurs; it counts as none."""
    cost = whence.capture(lambda x: torch.linalg.inv(x.T @ x), (X,)).cost()
    assert cost.total.total_flops == 2 * 4 * 6 * 4
    assert cost.gaps["aten.linalg_inv_ex.default: no formula"] == 1
    assert whence.capture(torch.lgamma, (X,)).cost().gaps == {}
    batches = torch.randn(3, 4, 4)
    summed = whence.capture(lambda x, y: torch.addbmm(x, y, y), (torch.randn(4, 4), batches)).cost()
    assert summed.gaps == {"aten.addbmm.default: no formula": 1}
    assert whence.capture(torch.linalg.vector_norm, (X,)).cost().gaps == {}  # a sum, as clipping takes it
    bilinear = whence.capture(nn.Bilinear(4, 4, 2), (X, X)).cost()
    assert bilinear.gaps or bilinear.total.total_flops
    product = whence.capture(lambda x: x @ x[0], (X,)).cost()
    assert product.total.total_flops == 2 * 6 * 4
    x = X.clone().requires_grad_()
    vector = whence.capture(lambda x: x @ x[0], (x,), backward=lambda y: y.sum()).cost()
    assert vector.beyond["aten.mv.default"] == 2 * (2 * 6 * 4)


def either(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x @ x @ x, (x,))


def test_the_larger_branch_counts() -> None:
    """As with PyTorch's counter; what each takes is said."""
    found = whence.capture(either, (torch.randn(3, 3),))
    cost = found.cost()
    with FlopCounterMode(display=False) as counter:
        either(torch.randn(3, 3))
    assert cost.total.total_flops == counter.get_total_flops() == 2 * 2 * 27
    assert cost.gaps == {} and found.report().ok
    assert cost.branches == {"cond": {"true_graph_0": 2 * 27, "false_graph_0": 2 * 2 * 27}}
    assert "cond takes one of its graphs, and the largest counts: true_graph_0 54" in str(cost)
    assert cost.total.total_flops == sum(node.flops for node in cost.nodes if node.taken)
    assert found.memory().peak == 36 + 1 + 2 * 36  # two products at once: one is the result


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.once, self.wide, self.back = nn.Linear(4, 4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.once(x).sin(), lambda x: self.back(self.wide(x)), (x,))


def test_calls_in_branches_have_what_is_theirs() -> None:
    """Their operations, and the FLOPs of the branch that counts; their caller has all."""
    program = whence.capture(Either(), (X,))
    flops = {row.path: row.total_flops for row in program.cost().rows[1:]}
    assert flops == {"": 2 * 2 * 6 * 32, "once": 0, "wide": 2 * 6 * 32, "back": 2 * 6 * 32}
    counts = {row.path: row.forward for row in program.report().rows[1:]}
    assert counts["once"] == counts["wide"] == counts["back"] == 1
    assert counts[""] == sum(node.op == "call_function" for node in program.nodes())
    joint = whence.capture(Either(), (X,), backward=lambda y: y.sum()).cost()
    assert joint.rows[2].total_flops == 0 and joint.rows[3].flops["forward"] == 2 * 6 * 32


@pytest.mark.sweep
def test_what_a_scan_repeats_counts_as_often() -> None:
    """Forward and backward; open sizes as they are given."""

    def products(first: torch.Tensor, rows: torch.Tensor) -> Any:
        return scan(lambda carry, row: (carry @ row, (carry @ row).sin()), first, rows)

    args = torch.randn(3, 3, requires_grad=True), torch.randn(5, 3, 3, requires_grad=True)
    rows = torch.export.Dim("rows", min=2)
    cost = whence.capture(products, args, backward=lambda found: found[1].sum()).cost()
    assert cost.total.flops == {"forward": 5 * 2 * 54, "backward": 5 * 4 * 54} and cost.gaps == {}
    program = whence.capture(products, args, dynamic_shapes=(None, {0: rows}))
    assert program.cost(sizes={"rows": 7}).total.total_flops == 7 * 2 * 54
    assert program.cost().formulas == {}
    assert program.memory().peak == (36 + 5 * 36) * 2 + 3 * 36


def test_how_often_a_loop_runs_is_a_gap() -> None:
    """One trip counts."""

    def doubled(x: torch.Tensor) -> Any:
        return while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, x @ x), (torch.tensor(0), x))

    cost = whence.capture(doubled, (torch.randn(3, 3),)).cost()
    assert cost.total.total_flops == 54
    assert cost.gaps == {"while_loop: how often its graphs run is not known, they count once": 1}


def test_open_sizes_are_those_that_are_given() -> None:
    """As if captured at that size; the example's where none is given."""
    model, batch = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), torch.export.Dim("batch")
    program = whence.capture(model, (X,), dynamic_shapes=({0: batch},))
    wider = whence.capture(model, (torch.randn(10, 4),))
    assert program.cost().rows == whence.capture(model, (X,)).cost().rows
    assert program.cost(sizes={"batch": 10}).rows == wider.cost().rows
    assert program.memory(sizes={"batch": 10}).peak == wider.memory().peak
    with pytest.raises(whence.UsageError, match="no open size is called btach"):
        program.memory(sizes={"btach": 10})
    for wrong in (-3, 2.5, "3", True):
        with pytest.raises(whence.UsageError, match=f"no size can be batch={wrong!r}"):
            program.cost(sizes={"batch": wrong})  # type: ignore[dict-item]


def _above(x: Tensor) -> Tensor:
    return torch.cat([x[x > 0], x[x > 0.5]])


def test_sizes_that_data_decide_are_to_be_given() -> None:
    """The error names all of them at once, those in sums too, and what it says to do works."""
    program = whence.capture(_above, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for ask in (program.cost, program.memory, program.report):
        with pytest.raises(whence.UsageError, match="sizes that data decide") as failed:
            ask()
        given = ast.literal_eval(str(failed.value).partition("sizes=")[2].partition("\n")[0])
        assert len(given) == 2 and "batch" not in given
        assert ask(sizes=given) is not None
        with pytest.raises(whence.UsageError, match="a size that data decide"):
            ask(sizes=dict([given.popitem()]))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_formulas_over_open_sizes_are_the_totals_at_any(name: str) -> None:
    """Forward and backward, FLOPs and bytes; evaluated at sizes they are what is counted there."""
    found = case(name)
    model, args, kwargs = found.make()
    free = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2, max=64)}
    shapes = {key: free if isinstance(value, torch.Tensor) else None for key, value in kwargs.items()}
    program = whence.capture(model, args, kwargs, backward=found.loss, dynamic_shapes=shapes)
    formulas = program.cost().formulas
    assert set(formulas) == {"forward FLOPs", "backward FLOPs", "bytes read", "bytes written"}
    for sizes in ({"batch": 3, "length": 17}, {"batch": 5, "length": 64}):
        total = program.cost(sizes=sizes).total
        flops = {f"{phase} FLOPs": count for phase, count in total.flops.items()}
        counted = {**flops, "bytes read": total.read, "bytes written": total.written}
        assert {key: eval(formula, dict(sizes)) for key, formula in formulas.items()} == counted


def test_formulas_are_only_there_where_all_is_known() -> None:
    """None where no size is open; without totals to which something adds that has no formula."""
    linear, rows = nn.Linear(4, 8), ({0: torch.export.Dim("rows", min=2)},)
    assert whence.capture(linear, (X,)).cost().formulas == {}
    cost = whence.capture(linear, (X,), dynamic_shapes=rows).cost()
    assert cost.formulas["forward FLOPs"] == "64*rows"
    assert "forward FLOPs: 64*rows" in str(cost)
    spread = nn.ConvTranspose1d(4, 2, 3)
    cost = whence.capture(lambda x: spread(x.T[None]), (X,), dynamic_shapes=rows).cost()
    assert cost.total.total_flops and set(cost.formulas) == {"bytes read", "bytes written"}


def test_time_is_that_of_a_roofline() -> None:
    """Products at the peak, copies at the bandwidth; a device is named, or described."""
    program = whence.capture(nn.Linear(4, 4, bias=False), (X,))
    moved = 4 * (6 * 4 + 4 * 4 + 6 * 4)
    slow = Device("slow", {"float32": 1.0}, bandwidth=1e12)
    assert program.cost(slow).total.seconds == 2 * 6 * 4 * 4
    assert program.cost(Device("narrow", {"float32": 1e12}, 1.0)).total.seconds == moved
    assert program.cost("h100").to_dict()["device"] == "h100"
    assert program.cost().total.seconds is None
    with pytest.raises(whence.UsageError, match="no peaks are listed for 'abacus'"):
        program.cost("abacus")


def test_the_peak_is_that_of_what_is_multiplied() -> None:
    """A product of eight bits gives sixteen, and takes scales of thirty-two."""
    left, right = torch.randn(16, 32), torch.randn(16, 32)
    eight = torch.float8_e4m3fn
    program = whence.capture(_of_eight_bits, (left.to(eight), right.to(eight).t()))
    peaks = {"float32": 1.0, "bfloat16": 2.0, "float8_e4m3fn": 4.0}
    seconds = program.cost(Device("mixed", peaks, bandwidth=1e12)).total.seconds
    assert seconds == pytest.approx(2 * 16 * 32 * 16 / 4)


def _of_eight_bits(left: Tensor, right: Tensor) -> Tensor:
    one = torch.ones(())
    return torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("both_ways", [False, True])
def test_layers_of_an_lstm(both_ways: bool) -> None:
    """As many products as its matrices have elements, in every step, and twice as many in the backward."""
    model, x = nn.LSTM(16, 32, 2, bidirectional=both_ways), torch.randn(5, 3, 16)
    products = 2 * 5 * 3 * sum(held.numel() for name, held in model.named_parameters() if "weight" in name)
    forward = whence.capture(model, (x,)).cost()
    assert forward.rows[0].flops == {Phase.FORWARD: products} and forward.beyond == {
        "aten.lstm.input": products
    }
    cost = whence.capture(model, (x,), backward=lambda out: out[0].sum()).cost()
    assert cost.rows[0].flops == {Phase.FORWARD: products, Phase.BACKWARD: 2 * products}
    assert cost.gaps == {} and sum(cost.beyond.values()) == 3 * products


class MakesLeaf(nn.Module):
    """A value requires a gradient that nobody asks for, as in the feature encoders of speech models."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 2
        hidden.requires_grad = True
        return self.layer(hidden)


class LeavesOut(nn.Module):
    """A head that does not read what a pooler gives, in each of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.poolers = nn.ModuleList([nn.Linear(16, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer, pooler in zip(self.layers, self.poolers, strict=True):
            x = layer(x)
            torch.tanh(pooler(x))
        return x


def _stepped(model: nn.Module, x: Tensor) -> whence.Program:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return whence.capture_step(step, (x,), model=model, optimizer=optimizer)


def _forward(model: nn.Module, x: Tensor) -> whence.Program:
    return whence.capture(model, (x,))


def _joint(model: nn.Module, x: Tensor) -> whence.Program:
    return whence.capture(model, (x,), backward=torch.sum)


@pytest.mark.parametrize(
    ("kind", "capture", "flops", "phase"),
    [
        (MakesLeaf, _joint, 512, "backward"),
        (MakesLeaf, _stepped, 512, "backward"),
        (LeavesOut, _forward, 3 * 512, "forward"),
        (LeavesOut, _joint, 3 * 512, "forward"),
        (LeavesOut, _stepped, 3 * 512, "forward"),
    ],
)
def test_what_no_result_needs_is_named(
    kind: type[nn.Module], capture: Any, flops: int, phase: str, tmp_path: Path
) -> None:
    """Eager computes it, a program does not: its FLOPs and `unread` are together eager's, in files, too."""
    model, x = kind(), torch.randn(2, 16)
    program = capture(model, x)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(program.has_backward):
        result = model(x).sum()
        result.backward() if program.has_backward else None
    program.save(tmp_path / "kept")
    for each in (program, whence.load(tmp_path / "kept"), program.decompose()):
        cost = each.cost()
        assert sum(row.flops for row in cost.unread) == flops
        assert cost.total.total_flops + flops == counter.get_total_flops()
        assert {row.phase for row in cost.unread} == {phase}
        assert any("gradients that no result needs" in gap for gap in each.memory().gaps) == (
            phase == "backward"
        )
        assert f"eager also computes {flops / 1000 if flops > 999 else flops:.3g}" in str(each.report())


def test_what_no_result_needs_of_open_sizes() -> None:
    """It is counted at the sizes that are given, as the rest is, and has a formula of its own."""
    sizes = {"x": {0: torch.export.Dim("n", min=2)}}
    program = whence.capture(LeavesOut(), (torch.randn(2, 16),), dynamic_shapes=sizes)
    cost = program.cost(sizes={"n": 10})
    assert sum(row.flops for row in cost.unread) == 5 * 3 * 512 == 768 * 10
    assert cost.formulas["unread forward FLOPs"] == "768*n"
    assert "unread forward FLOPs: 768*n" in str(program.report())
