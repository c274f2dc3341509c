"""A tree or flat module runs a variant where that alone admits the arguments, on its own tensors."""

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.tracing.test_variants import Branching, captured, other_layer, written

WAYS: dict[str, Any] = {
    "flat": lambda program, _model: program.module(),
    "flat copy": lambda program, _model: program.module(copy=True),
    "tree": lambda program, _model: program.unflatten(),
    "tree copy": lambda program, _model: program.unflatten(copy=True),
    "copied": lambda program, _model: deepcopy(program.unflatten()),
    "pickled": lambda program, _model: pickle.loads(pickle.dumps(program.unflatten())),
    "onto": lambda program, model: program.unflatten(onto=model),
    "saved state": lambda program, _model: program.with_state("attributes").unflatten(),
}
SIZES = (1, 3, 1, 5)


def made(way: str, backward: Any = False) -> tuple[Branching, whence.Program, nn.Module]:
    """A model, its program, and a module that runs both ways."""
    model, program = captured(other_layer, backward)
    return model, program, WAYS[way](program, model)


@pytest.mark.parametrize("way", WAYS)
def test_calls_take_the_program_that_fits(way: str) -> None:
    """The values and the names of the state are eager's, and buffers move with either."""
    model, _, module = made(way)
    expected = deepcopy(model)
    for size in SIZES:
        x = torch.randn(size, 4)
        assert torch.equal(module(x), expected(x))
    assert list(module.state_dict()) == list(model.state_dict())
    assert module.get_buffer("seen").item() == len(SIZES)


@pytest.mark.parametrize("backward", [False, lambda output: output.sin().sum()], ids=["forward", "loss"])
@pytest.mark.parametrize("way", WAYS)
def test_training(way: str, backward: Any) -> None:
    """An optimizer over its parameters trains it as eager, whichever program a batch takes."""
    model, _, module = made(way, backward)
    eager = deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, eager)]
    for size in SIZES:
        x = torch.randn(size, 4)
        for trained, optimizer in zip((module, eager), optimizers, strict=True):
            optimizer.zero_grad()
            result = trained(x)
            loss = result[0] if isinstance(result, tuple) else result.sin().sum()
            loss.backward()
            optimizer.step()
    for (name, ours), theirs in zip(module.named_parameters(), eager.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("way", WAYS)
def test_what_becomes_of_the_tensors(way: str) -> None:
    """Loaded values, other parameters and moved buffers are those of the variants, too."""
    model, _, module = made(way)
    other = Branching(other_layer)
    module.load_state_dict(other.state_dict())
    module.get_submodule("single").weight = nn.Parameter(other.single.weight.detach() * 2)
    other.single.weight = nn.Parameter(other.single.weight.detach() * 2)
    x = torch.randn(1, 4)
    assert torch.equal(module(x), other(x))
    assert type(model) is Branching


def test_another_dtype_is_refused_alike() -> None:
    """Tensors that were converted are those of the variants: both say so in the same words."""
    _, _, module = made("tree copy")
    module.to(torch.float64)
    said = []
    for size in (1, 3):
        with pytest.raises(whence.CallError, match="seen is torch") as error:
            module(torch.randn(size, 4))
        said.append(str(error.value))
    assert said[0] == said[1]


def test_replaced_modules_and_hooks() -> None:
    """What takes the place of a module runs in a variant, too, and hooks hear of its calls."""
    _, _, tree = made("tree")
    heard = []
    tree.get_submodule("single").register_forward_hook(lambda *_: heard.append("single"))
    x = torch.randn(1, 4)
    tree(x)
    assert heard == ["single"]
    new = nn.Linear(4, 4)
    tree.set_submodule("single", new)
    assert torch.equal(tree(x), new(x) * torch.tensor([2.0, 3.0, 4.0, 5.0]))


def test_tracers_read_one_graph() -> None:
    """An export has the sizes by which to choose; `torch.fx` has none, and is refused; compilers as ever."""
    model, program, tree = made("tree")
    for size in (1, 3):
        x = torch.randn(size, 4)
        assert torch.equal(torch.export.export(tree, (x,)).module()(x), model(x))
        again = whence.capture(tree, (x,))
        assert again.verify(tree, (x,)).ok
    compiled = torch.compile(tree, backend="eager")
    assert torch.equal(compiled(x), model(x))
    with pytest.raises(whence.CallError, match="must be other than 1"):
        compiled(x[:1])
    with pytest.raises(whence.CallError, match="chooses among 2"):
        torch.fx.symbolic_trace(tree)
    torch.fx.symbolic_trace(program.with_changes(variants=()).unflatten())


def test_other_sizes_are_refused_as_ever() -> None:
    """Where no variant fits, the error is that of the program."""
    _, _, tree = made("tree")
    with pytest.raises(whence.CallError, match=r"x|args"):
        tree(torch.randn(2, 5))


def test_a_buffer_that_only_a_variant_writes() -> None:
    """It is written where the variant runs, in the module that a person holds."""
    model, program = captured(written)
    tree, x = program.unflatten(copy=True), torch.ones(1, 4)
    tree(x)
    tree(torch.ones(2, 4))
    buffer: Tensor = tree.get_buffer("seen")
    assert (buffer.item(), model.seen.item()) == (6.0, 0.0)
