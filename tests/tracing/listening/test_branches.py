"""Branches, loops and attention by parts in captures: rows 152 to 158, and defect 16."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim
from torch.fx.experimental import proxy_tensor
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import Backward, verified
from tests.sameness import differences
from tests.tracing import branching
from whence._torch.pytrees import tree_flatten
from whence.errors import UnsupportedMutation, UnsupportedOperator
from whence.schema import Phase, Quality

X = torch.arange(8.0).reshape(2, 4) / 4 + 0.1
pytestmark = [
    # torch.cond, called in eager, compiles itself and looks at the gradient of what it is given
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated"),
]


def loss(result: Any) -> Tensor:
    """A number that every result counts in."""
    leaves = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
    total: Tensor = sum(leaf.sin().sum() for leaf in leaves if leaf.is_floating_point())  # type: ignore[assignment]
    return total


class Calls(nn.Module):
    """A module that runs a function of itself and its input."""

    shift: Tensor

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.zeros(4))
        self.function = function
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def branches(positive: Callable[[Any, Tensor], Any], negative: Callable[[Any, Tensor], Any]) -> Calls:
    """A module with a condition."""
    return Calls(
        lambda m, x: torch.cond(x.sum() > 0, lambda x: positive(m, x), lambda x: negative(m, x), (x,))
    )


SLOW = pytest.mark.slow
TRAINED = ["Cond", "Nested", "Twice", "Made", "Dropped", "Detached", "Mapped", "Scanned"]
SOME = ["Cond", pytest.param("Nested", marks=pytest.mark.sweep)]
SOME += [pytest.param(name, marks=SLOW) for name in TRAINED[2:]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["forward", pytest.param("tangents", marks=SLOW), "loss"])
@pytest.mark.parametrize("name", SOME)
def test_capture_is_bitwise_in_every_branch(name: str, mode: str) -> None:
    """Captured where one branch is taken, the program is bitwise equal to eager where the other one is."""
    model, backward = getattr(branching, name)(), {"forward": False, "tangents": True, "loss": loss}[mode]
    given = [x.clone().requires_grad_(mode != "forward") for x in (X, -X, X / 2)]
    program = whence.capture(model, (given[0],), backward=backward)  # type: ignore[arg-type]
    for x in given:
        result = program.verify(model, (x,))
        assert result.ok, str(result)


@pytest.mark.sample(2)
@pytest.mark.parametrize("joint", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize("name", SOME)
def test_tree_trains_as_eager_does(name: str, joint: bool) -> None:
    """The tree returns what eager returns, and leaves the gradients that eager leaves."""
    model = getattr(branching, name)()
    tree = whence.capture(model, (X.clone().requires_grad_(joint),), backward=joint).unflatten()
    for given in (X, -X):
        found = [_trained(module, given, model) for module in (model, tree)]
        assert all(map(_equal, *found)), [map(_equal, *found)]


def _trained(module: nn.Module, given: Tensor, model: nn.Module) -> list[Tensor | None]:
    model.zero_grad()
    torch.manual_seed(0)
    x = given.clone().requires_grad_()
    result = module(x)
    loss(result).backward()
    leaves = [leaf.detach() for leaf in tree_flatten(result)[0]]
    return [*leaves, x.grad, *(p.grad for p in model.parameters())]


def _equal(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


@pytest.mark.parametrize("name", ["Loop", "Constants"])
def test_what_pytorch_does_not_differentiate_is_captured_forward(name: str) -> None:
    """The rounds of a loop are those of the input; numbers that branches return are returned."""
    model = getattr(branching, name)()
    program = whence.capture(model, (X,))
    assert all(program.verify(model, (given,)).ok for given in (X, -X, X * 3))
    assert _same(program.unflatten()(X * 3), model(X * 3))


class Picks(nn.Module):
    """Branches that return another number each, which eager mode and an export let them do."""

    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: (x.sin(), 3), lambda x: (x.cos(), 4), (x,))


def test_row_154_numbers_that_differ_in_an_export() -> None:
    """An exported condition that picks a number picks it in the tree, too; a capture says what to write."""
    tree = whence.unflatten(torch.export.export(Picks(), (X,), strict=True))
    assert [tree(given)[1] for given in (X, -X)] == [Picks()(given)[1] for given in (X, -X)] == [3, 4]
    with pytest.raises(UnsupportedOperator, match="return a tensor that holds the number"):
        whence.capture(Picks(), (X,))


def _same(left: Any, right: Any) -> bool:
    pairs = zip(tree_flatten(left)[0], tree_flatten(right)[0], strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def test_nodes_of_branches_say_which_module_made_them() -> None:
    """Selecting by module finds what a branch computes; it stands in the graph of the caller."""
    program = whence.capture(branching.Twice(), (X,), backward=True)
    found = program.select("inner.left :: aten.addmm :: forward")
    assert [str(program.where(node).calls[0]) for node in found] == ["inner.left", "inner.left@1"]
    assert {str(program.where(node).place) for node in found} == {"inner", "inner@1"}
    for node in found:
        origin = program.where(node)
        assert origin.quality is Quality.EXACT
        assert origin.source is not None
        assert origin.source.function == "Cond.forward.<locals>.positive"
    assert {str(program.call_of(node).site) for node in program.select(":: cond")} == {"inner", "inner@1"}


def test_nodes_of_backward_branches_are_recomputed_or_inferred() -> None:
    """What a backward branch computes again is exact; what autograd adds belongs to the caller, inferred."""
    program = whence.capture(branching.Cond(), (X,), backward=loss)
    inside = [node for node in program.nodes() if node.graph is not program.graph]
    backward = [
        program.where(node)
        for node in inside
        if node.op == "call_function" and program.where(node).phase is Phase.BACKWARD
    ]
    again = [origin for origin in backward if origin.recomputed]
    assert {str(origin.calls[0]) for origin in again} >= {"left", "right.0"}
    assert {origin.quality for origin in again} == {Quality.EXACT}
    assert {origin.quality for origin in backward if not origin.recomputed} == {Quality.INFERRED}
    assert all(node.op != "call_function" or program.where(node).calls for node in inside)


def test_steps_of_a_differentiated_scan_keep_their_module() -> None:
    """PyTorch cuts the step of a scan in two for its backward; its forward still names the cell."""
    program = whence.capture(branching.Scanned(), (X,), backward=True)
    found = [program.where(node) for node in program.select("cell :: aten.addmm")]
    assert any(origin.phase is Phase.FORWARD and origin.quality is Quality.EXACT for origin in found)


def test_weights_of_branches_are_inputs_once() -> None:
    """A weight that both branches read is one input, and one operand."""
    program = whence.capture(branching.Cond(), (X,))
    (cond,) = program.select(":: cond")
    operands = [node.name for node in cond.args[3]]  # type: ignore[union-attr]
    assert operands.count("p_weight") == 1
    assert len(set(operands)) == len(operands)
    assert program.input("weight").name == "p_weight"


@pytest.mark.parametrize("name", ["Mapped", pytest.param("Twice", marks=SLOW)])
@pytest.mark.parametrize("backward", [False, pytest.param(True, marks=SLOW)])
def test_modules_with_branches_are_not_replayed(name: str, backward: bool) -> None:
    """With and without reuse, the program is the same."""
    model = getattr(branching, name)()
    program = whence.capture(model, (X,), backward=backward)
    assert differences(program, whence.capture(model, (X,), backward=backward, reuse=False)) == {}


@pytest.mark.sweep
def test_module_with_a_branch_says_why_it_is_not_replayed() -> None:
    """The report names the operator."""
    model = nn.Sequential(branching.Cond(), branching.Cond(), branching.Cond())
    program = whence.capture(model, (X,))
    assert "cond runs functions inside it" in str(program.replay)
    assert program.verify(model, (X,)).ok


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", ["Mapped", *(pytest.param(name, marks=SLOW) for name in ("Cond", "Scanned", "Loop"))]
)
def test_batch_varies(name: str) -> None:
    """Sizes vary inside of branches and around them."""
    model = getattr(branching, name)()
    joint = name != "Loop"
    program = whence.capture(model, (X,), backward=joint, dynamic_shapes={"x": {0: Dim("batch")}})
    longer = torch.cat([X, X + 0.5, X * 2])
    assert all(program.verify(model, (given,)).ok for given in (X, longer, -longer))


def test_functions_without_state_of_open_sizes() -> None:
    """What they give has memory of its own, whatever stands for memory where sizes are symbols."""
    model = branches(lambda _, x: x.sin(), lambda _, x: x * 2)
    program = whence.capture(model, (X,), dynamic_shapes={"x": {0: Dim("batch")}})
    longer = torch.cat([X, X + 0.5, X * 2])
    assert all(program.verify(model, (given,)).ok for given in (X, -X, longer, -longer))
    views = branches(lambda _, x: x[:, :2], lambda _, x: x[:, :2] * 2)
    with pytest.raises(UnsupportedOperator, match="return a clone"):
        whence.capture(views, (X,), dynamic_shapes={"x": {0: Dim("batch")}})


def test_condition_on_a_size_keeps_both_branches() -> None:
    """A size that varies may decide; the other branch is in the program."""
    model = Calls(lambda m, x: torch.cond(x.shape[0] > 4, m.a, lambda x: m.a(x).sin(), (x,)))
    program = whence.capture(model, (X,), dynamic_shapes={"x": {0: Dim("batch")}})
    assert program.verify(model, (X,)).ok
    assert program.verify(model, (torch.cat([X, X, X]),)).ok


@pytest.mark.sweep
def test_program_with_branches_is_copied_and_exported() -> None:
    """A copy, attributes for state, and an ExportedProgram all hold the branches."""
    model = branching.Nested()
    program = whence.capture(model, (X,))
    assert torch.equal(copy.deepcopy(program.unflatten())(-X), model(-X))
    assert whence.capture(model, (X,), state="attributes").verify(model, (-X,)).ok
    exported = program.to_exported_program()
    assert all(torch.equal(exported.module()(given), model(given)) for given in (X, -X))


@pytest.mark.sweep
def test_tree_of_a_tree() -> None:
    """A tree with branches is captured again, and exported."""
    model = branching.Cond()
    tree = whence.capture(model, (X,)).unflatten()
    again = verified(tree, X, backward=True)
    assert [str(again.where(node).quality) for node in again.select(":: cond :: forward")] == ["exact"]
    exported = torch.export.export(tree, (X,))
    assert torch.equal(exported.module()(-X), model(-X))


def test_associative_scan_runs_flat() -> None:
    """In its generic mode PyTorch computes it with ordinary operations."""
    model = Calls(lambda m, x: associative_scan(lambda a, b: a * b + m.a.bias, x, 0, combine_mode="generic"))
    verified(model, X, backward=loss)


def test_attention_by_parts() -> None:
    """Flex attention with a learnt bias and a block mask, in a block of a transformer; forward on the CPU."""
    model = branching.Attention().requires_grad_(False)
    x = torch.randn(2, 8, 16)
    program = verified(model, x)
    assert torch.equal(program.unflatten()(x), program.module()(x))
    assert [str(program.where(node).quality) for node in program.select(":: flex_attention")] == ["exact"]


@SLOW
@pytest.mark.filterwarnings("ignore")  # transformers compiles masks by a deprecated flag, inside an export
def test_llama_on_attention_by_parts() -> None:
    """Llama of transformers, switched to flex attention: each layer's attention names its module."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=100,
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    model.set_attn_implementation("flex_attention")
    program = verified(model, input_ids=torch.randint(0, 100, (2, 128)), use_cache=False)
    found = [str(program.where(node).calls[0]) for node in program.select(":: flex_attention")]
    assert found == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


class _Flex(nn.Module):
    """Flex attention past the check of devices, which lets no gradient be computed on a CPU."""

    def __init__(self, *, learnt: bool) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.1, 0.3]), requires_grad=learnt)
        self.query = nn.Linear(16, 16)
        self.blocks = branching.Attention().mask

    def forward(self, x: Tensor) -> Tensor:
        def bias(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, slope: Tensor) -> Tensor:
            return score + slope[h] * (q - k)

        operator: Any = torch.ops.higher_order.flex_attention
        blocks, buffers = self.blocks.as_tuple(), (self.slope.tanh(),)
        found: Tensor = operator(self.query(x), x, x * 2, bias, blocks, 0.25, {"BACKEND": "AUTO"}, buffers)[0]
        return found


def test_backward_of_attention_by_parts() -> None:
    """Its backward is an operator with graphs of its own."""
    model, x = _Flex(learnt=False), torch.randn(1, 2, 8, 16, requires_grad=True)
    program = verified(model, x, backward=True)
    (backward,) = program.select(":: flex_attention_backward")
    assert program.where(backward).phase is Phase.BACKWARD


def test_backward_of_attention_for_what_the_score_reads_is_refused() -> None:
    """As a graph, PyTorch's backward gives None for these."""
    with pytest.raises(UnsupportedOperator, match="gives no gradient for tensors that score_mod reads"):
        whence.capture(_Flex(learnt=True), (torch.randn(1, 2, 8, 16),), backward=True)


def _cast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found: Tensor = m.a(x).float()
    return found


def _cast_around(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.cond(x.sum() > 0, lambda x: m.a(x) * 2, m.a, (x,)).float()


def _without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.cond(x.sum() > 0, lambda x: m.a(x) * 2, m.a, (x,))
    found: Tensor = y + m.a(x)
    return found


def _checkpointed(m: Any, x: Tensor) -> Tensor:
    def region(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: m.a(x).sin(), lambda x: m.a(x).cos(), (x,)).tanh()

    return checkpoint(region, m.a(x), use_reentrant=False)


def _region(m: Any, x: Tensor) -> Tensor:
    region = torch.compiler.nested_compile_region(lambda x: m.a(x).sin())
    found: Tensor = region(x) + region(x)
    return found


SURROUNDINGS = {
    "cast": lambda m, x: torch.cond(x.sum() > 0, lambda x: _cast(m, x), m.a, (x,)),
    "cast around": _cast_around,
    "without gradients": _without_gradients,
    "checkpointed": _checkpointed,
    "checkpoint inside": lambda m, x: torch.cond(
        x.sum() > 0, lambda x: checkpoint(lambda x: m.a(x).sin(), x, use_reentrant=False), m.a, (x,)
    ),
    "compiled region": _region,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_branches_in_regions_of_all_kinds(name: str) -> None:
    """Casts, regions without gradients, checkpoints and compiled functions, around branches and in them."""
    model = Calls(SURROUNDINGS[name])
    program = verified(model, X, backward=loss)
    assert program.verify(model, (-X,)).ok
    verified(model, X)


def _scan(m: Any, x: Tensor) -> Tensor:
    def step(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = (carried * row).tanh()
        return new, new.exp()

    last, rows = scan(step, m.a(x)[0], x)
    return rows + last


OPERATORS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cond": lambda m, x: torch.cond(x.sum() > 0, lambda x: m.a(x).sin(), lambda x: x.cos() * 2, (x,)),
    "scan": _scan,
    "map": lambda m, x: map_rows(lambda row, *_: m.a(row).sin(), x),
    "associative scan": lambda m, x: associative_scan(torch.mul, x.exp(), 0, combine_mode="generic"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("backward", [False, True, loss])
@pytest.mark.parametrize("second", OPERATORS)
@pytest.mark.parametrize("first", OPERATORS)
def test_one_operator_after_another(first: str, second: str, backward: Backward) -> None:
    """Nothing of the capture is kept: the values in a graph are not what the operator gave."""
    model = Calls(lambda m, x: OPERATORS[second](m, OPERATORS[first](m, m.a(x))))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*kept tensors of the capture.*")
        program = verified(model, X, backward=backward)
    values = [node.meta["val"] for node in program.nodes() if isinstance(node.meta.get("val"), Tensor)]
    assert not any(value.grad_fn for value in values)


@torch.library.custom_op("whence_tests::scaled", mutates_args=())
def scaled(x: Tensor, factor: float) -> Tensor:
    """A custom operator with a derivative."""
    return x * factor


scaled.register_fake(lambda x, factor: torch.empty_like(x))
scaled.register_autograd(
    lambda ctx, gradient: (gradient * ctx.factor, None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)


@pytest.mark.parametrize("backward", [False, loss], ids=["forward", "joint"])
def test_custom_operators_are_recorded(backward: Backward) -> None:
    """A custom operator keeps its place in the module that called it, in a branch and outside."""
    inside = branches(lambda m, x: scaled(m.a(x), 2.0), lambda m, x: m.a(x))
    for model in (Calls(lambda m, x: scaled(m.a(x), 3.0)), inside):
        program = verified(model, X, backward=backward)
        (node,) = program.select(":: whence_tests.scaled :: forward")
        assert str(program.where(node).calls[0]) == ""
        assert program.where(node).quality is Quality.EXACT


class _Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


def _keeps(m: Any, x: Tensor) -> Tensor:
    m.kept = m.a(x)
    return x.sin()


def _reassigns(m: Any, x: Tensor) -> Tensor:
    m.shift = m.shift + 1
    return x.sin()


def _hooks(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.a(x)
    y.register_hook(lambda gradient: gradient * 2)
    return y.sin()


def _writes(m: Any, x: Tensor) -> Tensor:
    m.shift.add_(1)
    return x.sin()


def _linear(m: Any, x: Tensor) -> Tensor:
    found: Tensor = m.a(x)
    return found


def _used_outside(m: Any, x: Tensor) -> Tensor:
    y = torch.cond(x.sum() > 0, lambda x: _keeps(m, x), lambda x: x.cos(), (x,))
    found: Tensor = y + m.kept
    return found


def _gradient_inside(m: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    y = torch.cond(x.sum() > 0, lambda x: m.a(x).sin(), m.a, (x,))
    return torch.autograd.grad(y.sum(), x)[0]


REFUSED: dict[str, tuple[Calls, type[whence.CaptureError], str]] = {
    "alias": (branches(lambda _, x: x, _linear), UnsupportedOperator, "return a clone"),
    "view": (
        branches(lambda _, x: x.view(-1), lambda m, x: m.a(x).view(-1)),
        UnsupportedOperator,
        "a part of it",
    ),
    "weight": (
        branches(lambda m, _: m.a.weight, lambda m, _: m.a.weight * 2),
        UnsupportedOperator,
        "return a clone",
    ),
    "shapes": (branches(lambda m, x: m.a(x).sum(0), _linear), UnsupportedOperator, "same dim"),
    "dtypes": (branches(lambda m, x: m.a(x).double(), _linear), UnsupportedOperator, "same dtype"),
    "structures": (branches(lambda m, x: (m.a(x),), _linear), UnsupportedOperator, "different structures"),
    "numbers": (
        branches(lambda m, x: (m.a(x), 1), lambda m, x: (m.a(x), 2)),
        UnsupportedOperator,
        "its functions return 1 or 2: what is no tensor must be the same in each",
    ),
    "number of another type": (
        branches(lambda m, x: (m.a(x), 1), lambda m, x: (m.a(x), True)),
        UnsupportedOperator,
        "its functions return 1 or True",
    ),
    "number and tensor": (
        branches(lambda m, x: (m.a(x), 1), lambda m, x: (m.a(x), x.sum())),
        UnsupportedOperator,
        "its functions return 1 or a tensor",
    ),
    "numbers that are closed over": (
        branches(lambda m, x: (m.a(x), len(m.shift)), lambda m, x: (m.a(x), len(m.shift) + 1)),
        UnsupportedOperator,
        "its functions return 4 or 5",
    ),
    "custom function": (
        branches(lambda m, x: _Triple.apply(m.a(x)), _linear),
        UnsupportedOperator,
        "custom autograd function _Triple",
    ),
    "hook": (branches(_hooks, _linear), UnsupportedOperator, "a hook"),
    "write": (branches(_writes, _linear), UnsupportedMutation, "writes to a value from outside"),
    "running mean": (branches(lambda m, x: m.norm(x), _linear), UnsupportedMutation, "from outside"),
    "argument": (branches(lambda _, x: x.sin_() + 1, _linear), UnsupportedMutation, "from outside"),
    "buffer": (branches(_reassigns, _linear), UnsupportedOperator, "keeps a tensor"),
    "kept": (Calls(_used_outside), UnsupportedOperator, "keeps a tensor"),
    "gradient": (Calls(_gradient_inside), UnsupportedOperator, "asks for it in its forward"),
    "transform": (
        Calls(lambda m, x: torch.vmap(lambda r: torch.cond(r.sum() > 1, m.a, torch.cos, (r,)))(x)),
        UnsupportedOperator,
        "torch.func",
    ),
    "count": (
        Calls(lambda m, x: while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, m.a(x)), (0, x))[1]),
        UnsupportedOperator,
        "carries a number",
    ),
    "rounds": (
        Calls(lambda _, x: while_loop(lambda x: x.sum() < 9, lambda x: (x.double(),), (x,))[0]),
        UnsupportedOperator,
        "float64",
    ),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused_in_words(name: str) -> None:
    """The error names the module, the line and the reason; the model is as it was."""
    model, kind, words = REFUSED[name]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(kind, match=words) as caught:
        whence.capture(model, (X,))
    assert caught.value.where.module == ""
    assert __file__ in str(caught.value.where.line)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.kept is None
    assert proxy_tensor._CURRENT_MAKE_FX_TRACER is None


def test_backward_of_a_loop_is_refused() -> None:
    """How many rounds there are is known in a run only."""
    with pytest.raises(UnsupportedOperator, match="a value of each round"):
        whence.capture(branching.Loop(), (X,), backward=True)


def test_error_of_a_branch_stays_its_own() -> None:
    """An error that the model raises in a branch is the model's."""

    def fails(_m: Any, _x: Tensor) -> Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        whence.capture(branches(fails, _linear), (X,))


def test_question_for_a_value_in_a_branch_names_the_line() -> None:
    """A Python decision in a branch is refused as it is elsewhere."""
    model = branches(lambda m, x: m.a(x) if x.sum() > 0 else -x, _linear)
    with pytest.raises(whence.DataDependent) as caught:
        whence.capture(model, (X,))
    assert __file__ in str(caught.value.where.line)


def test_other_threads_trace_as_ever() -> None:
    """While a branch is recorded, `make_fx` in another thread traces what it is given there."""
    found: SimpleQueue[list[Any]] = SimpleQueue()

    def elsewhere() -> None:
        graph = proxy_tensor.make_fx(lambda x: x.sin() + 1)(torch.ones(2)).graph
        found.put([node.target for node in graph.nodes if node.op == "call_function"])

    def positive(m: Any, x: Tensor) -> Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return _linear(m, x)

    whence.capture(branches(positive, lambda m, x: m.a(x).cos()), (X,), backward=loss)
    assert not found.empty()
    while not found.empty():
        assert found.get() == [torch.ops.aten.sin.default, torch.ops.aten.add.Tensor]
