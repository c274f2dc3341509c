"""With decide="example" the example decides, and a run that decides otherwise changes nothing."""

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import whence
from tests.behaviours.deciding import NEGATIVE, ROWS, Deciding, Half, Quantiser, X
from tests.checks import gradients, same_bits, state
from whence.rewriting import DeadCode


def total(outputs: Any) -> Tensor:
    """A scalar in which every result takes part."""
    leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.sin().sum() for leaf in leaves]).sum()


def made(row: Deciding) -> nn.Module:
    torch.manual_seed(1)
    return row.build()


MODES = pytest.mark.parametrize("mode", ["forward", pytest.param("tangents", marks=pytest.mark.slow), "loss"])
BACKWARD: dict[str, Any] = {"forward": False, "tangents": True, "loss": total}


@cache
def captured(row: Deciding, mode: str) -> tuple[nn.Module, whence.Program]:
    """A model, which nothing may change, and its program."""
    model = made(row)
    return model, whence.capture(model, row.example, backward=BACKWARD[mode], decide="example")


def clones(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor.clone() for tensor in tensors)


def one_run(module: nn.Module, inputs: tuple[Tensor, ...], *, has_loss: bool) -> list[Any]:
    """What a run from a fixed seed gives and leaves behind, gradients included."""
    torch.manual_seed(2)
    result = module(*clones(inputs))
    loss, result = result if has_loss else (total(result), result)
    loss.backward()
    left = [*gradients(module).values(), *state(module).values(), torch.get_rng_state()]
    return [loss, *tree_leaves(result), *left]


TABLE = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@pytest.mark.sample(8)
@MODES
@TABLE
def test_the_example_decides(row: Deciding, mode: str) -> None:
    """Program and tree are eager on the example, and the program says what was decided."""
    model, program = captured(row, mode)
    assert any(row.decision in str(decision) for decision in program.decisions)
    result = program.verify(model, row.example)
    assert result.ok, str(result)
    expected = one_run(deepcopy(model), row.example, has_loss=False)
    found = one_run(program.unflatten(copy=True), row.example, has_loss=mode == "loss")
    assert all(map(same_bits, found, expected))
    assert program.check(model, row.example) == []


@pytest.mark.sample(11)
@MODES
@TABLE
def test_another_decision_is_refused(row: Deciding, mode: str) -> None:
    """Flat, as a tree and bound: nothing is written before the error, which names the line."""
    model, program = captured(row, mode)
    ways: list[Any] = [program.module(), program.unflatten()]
    ways += [] if mode == "tangents" else [program.bind(model)]
    held = deepcopy(model.state_dict())
    if row.other is None:
        ways[0](*row.example)
    for run in ways:
        before = deepcopy(model.state_dict())
        given = clones(row.other or row.example)
        with pytest.raises(whence.StaleCapture, match="at capture") as caught:
            run(*given)
        assert str(caught.value.where.line).startswith(f"{ROWS_FILE}:")
        assert all(map(same_bits, model.state_dict().values(), before.values()))
        assert all(map(same_bits, given, row.other or row.example))
        assert all(parameter.grad is None for parameter in model.parameters())
    model.load_state_dict(held)


def test_masks_choose_among_gradients() -> None:
    """A gradient that is an input has no values on the example; those of masks are enough for its size."""
    row = next(row for row in ROWS if row.name == "Tailed")
    model, program = captured(row, "tangents")
    assert program.verify(model, row.example).ok
    expected = one_run(deepcopy(model), row.example, has_loss=False)
    assert all(map(same_bits, one_run(program.unflatten(copy=True), row.example, has_loss=False), expected))


ROWS_FILE = __file__.replace("test_decisions.py", "deciding.py")


@pytest.mark.sample(4)
@TABLE
def test_a_guarded_program_keeps_every_way(row: Deciding) -> None:
    """It captures each once, and chooses among them; random numbers are eager's, whichever is tried."""
    model = made(row)
    eager, calls = deepcopy(model), [row.example, row.other or row.example] * 2
    guarded = whence.capture(model, row.example, decide="example").guarded(model, "recapture")
    for inputs in calls:
        torch.manual_seed(3)
        found = guarded(*clones(inputs)), torch.get_rng_state()
        torch.manual_seed(3)
        expected = eager(*clones(inputs)), torch.get_rng_state()
        assert all(map(same_bits, tree_leaves(found), tree_leaves(expected)))
    assert all(map(same_bits, model.state_dict().values(), eager.state_dict().values()))
    assert len(guarded.programs) == 2


def test_what_is_refused_names_the_remedy() -> None:
    """Without `decide` such a model is an error, as ever."""
    with pytest.raises(whence.DataDependent, match='decide="example"'):
        whence.capture(Half(), (X,))


def test_a_quantiser_runs_on() -> None:
    """The first batch takes one way, all others the other, and eager's buffers come of it."""
    torch.manual_seed(0)
    model = Quantiser()
    eager = deepcopy(model)
    guarded = whence.capture(model, (X,), decide="example").guarded(model, "recapture")
    torch.manual_seed(4)
    found = [guarded(x) for x in (X, X * 2, NEGATIVE)]
    torch.manual_seed(4)
    assert all(map(same_bits, found, [eager(x) for x in (X, X * 2, NEGATIVE)]))
    assert len(guarded.programs) == 2
    assert [row.answer for program in guarded.programs for row in program.decisions] == [True, False]


@pytest.mark.sample(4)
@TABLE
def test_a_step_is_held_to_its_decisions(row: Deciding) -> None:
    """A step is eager's, and one that decides otherwise leaves model and optimizer as they were."""
    model = made(row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(*inputs: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = total(model(*inputs))
        loss.backward()
        optimizer.step()
        return loss

    program = whence.capture_step(step, row.example, model=model, optimizer=optimizer, decide="example")
    assert program.decisions
    result = program.verify(model, row.example, optimizer=optimizer)
    assert result.ok, str(result)
    bound = program.bind(model, optimizer, on_violation="raise")
    if row.other is None:
        bound(*row.example)
    before = deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(whence.StaleCapture):
        bound(*clones(row.other or row.example))
    after = (model.state_dict(), optimizer.state_dict())
    assert all(map(same_bits, tree_leaves(after), tree_leaves(before)))
    assert len(tree_leaves(after)) == len(tree_leaves(before))


@pytest.mark.parametrize("name", ["Routed", "Converging", "Packed"])
def test_other_tools_go_on(name: str) -> None:
    """Passes keep decisions, lowered programs and copies have them, and costs know them for no work."""
    row = next(row for row in ROWS if row.name == name)
    model, program = captured(row, "forward")
    asked = [decision.asked for decision in program.decisions]
    for other in (program.apply(DeadCode()), program.decompose(None), deepcopy(program)):
        assert [decision.asked for decision in other.decisions] == asked
    assert program.decompose(None).verify(model, row.example).ok
    assert not any("stays" in gap or "content" in gap for gap in program.cost(sizes=SIZES[name]).gaps)
    assert program.first(row.example) is None


SIZES = {"Routed": {"size_of_index": 1, "size_of_index_1": 1}, "Converging": None, "Packed": None}


# PyTorch's compiler looks at the gradient of what is passed over a break.
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_trees_look_too() -> None:
    """The check is a break in the graph that PyTorch compiles."""
    torch.manual_seed(1)
    model = Half()
    tree = torch.compile(whence.capture(model, (X,), decide="example").unflatten(), backend="eager")
    assert torch.equal(tree(X), model(X))
    with pytest.raises(whence.StaleCapture):
        tree(-3 * X)


def mixtral() -> tuple[nn.Module, Tensor]:
    """Two layers with eight experts each, of which eager runs those that somebody is sent to."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 30}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 8, "experts_implementation": "eager"}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **experts))
    return model, torch.arange(24).view(1, 24)


@pytest.mark.parametrize(
    "backward",
    [False, pytest.param(lambda outputs: outputs.logits.sin().mean(), marks=pytest.mark.sweep)],
    ids=["forward", "loss"],
)
def test_experts_of_transformers(backward: Any) -> None:
    """The program holds for every batch that is sent to the same experts, whoever goes where."""
    model, ids = mixtral()
    program = whence.capture(model, (ids,), {"use_cache": False}, backward=backward, decide="example")
    asked = [row for row in program.decisions if str(row.call) == "model.layers.1.mlp.experts"]
    assert [row.answer for row in asked][:2] == [False, 8]  # how many experts there are
    for batch in (ids, ids.flip(1)):
        result = program.verify(model, (batch,), {"use_cache": False})
        assert result.ok, str(result)
    with pytest.raises(whence.StaleCapture) as caught:
        program.module()(ids * 0, use_cache=False)
    assert caught.value.where.module == "model.layers.0.mlp.experts"


class Reading(nn.Module):
    """Reads a result with a history, where it may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        try:
            y.numpy()
        except RuntimeError:
            return y.cos()
        return y.sin()


def test_numpy_reads_no_history() -> None:
    """It fails as in eager where gradients are recorded; so that is a condition."""
    model, x = Reading(), torch.ones(2, 4)
    program = whence.capture(model, (x,), decide="example")
    assert torch.equal(program.module()(x), model(x))
    with torch.no_grad():
        assert [row.guard.what for row in program.check(model, (x,))] == ["grad mode"]
        other = whence.capture(model, (x,), decide="example")
        assert torch.equal(other.module()(x), model(x))
