"""What a tree holds: the original's names, tensors and modes."""

import gc
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import whence
from tests import zoo
from tests.checks import captured, differing, same_bits, state
from tests.models import MODEL_CASES, case

NAMES = [row.name for row in MODEL_CASES]
X = torch.randn(2, 3, zoo.WIDTH)


def tree_of(name: str, mode: str = "forward") -> Any:
    return captured(name, mode).unflatten()


@pytest.mark.sample(13)
@pytest.mark.parametrize("name", NAMES)
def test_names_are_the_original_s(name: str) -> None:
    """Modules, parameters and buffers have the original's names, in the original's order."""
    model, _, _ = case(name).make()
    tree = tree_of(name)
    assert [n for n, _ in tree.named_modules()] == [n for n, _ in model.named_modules()]
    assert [n for n, _ in tree.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in tree.named_buffers()] == [n for n, _ in model.named_buffers()]


@pytest.mark.sample(13)
@pytest.mark.parametrize("name", NAMES)
def test_state_dict_is_the_original_s(name: str) -> None:
    """The state dict has the original's keys in the original's order, and its values."""
    model, _, _ = case(name).make()
    expected, found = model.state_dict(), tree_of(name).state_dict()
    assert list(found) == list(expected)
    assert differing(expected, found) == []


@pytest.mark.sample(13)
@pytest.mark.parametrize("name", NAMES)
def test_classes_and_modes_are_the_original_s(name: str) -> None:
    """Every module shows the original's class name and mode."""
    model, _, _ = case(name).make()
    tree = tree_of(name)
    described = [
        {path: (module._get_name(), module.training) for path, module in whole.named_modules()}
        for whole in (model, tree)
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize("name", ["gpt2", "t5", "albert", "tied_language_model", "shared_module"])
def test_tied_tensors_stay_tied(name: str) -> None:
    """Names that are one tensor in the original are one tensor in the tree, copied or not."""
    model, _, _ = case(name).make()
    for tree in (tree_of(name), captured(name, "forward").unflatten(copy=True)):
        groups = [{id(p): [] for p in whole.parameters()} for whole in (model, tree)]  # type: ignore[var-annotated]
        for whole, group in zip((model, tree), groups, strict=True):
            for n, p in whole.named_parameters(remove_duplicate=False):
                group[id(p)].append(n)
        assert list(groups[0].values()) == list(groups[1].values())


def test_tensors_are_the_model_s_own() -> None:
    """Without a copy, every parameter and buffer of the tree is the model's object."""
    model = zoo.InplaceActivations().train()
    tree = whence.capture(model, (torch.randn(2, 3, 8, 8),)).unflatten()
    assert all(p is q for p, q in zip(model.parameters(), tree.parameters(), strict=True))
    assert all(p is q for p, q in zip(model.buffers(), tree.buffers(), strict=True))


def test_state_dict_is_loaded() -> None:
    """Loading the state of another instance gives that instance's outputs."""
    model, other = zoo.Mlp(), zoo.Mlp()
    tree = whence.capture(model, (X,)).unflatten(copy=True)
    tree.load_state_dict(other.state_dict())
    assert same_bits(tree(X), other(X))


def test_state_dict_round_trips_through_the_original() -> None:
    """The state of a trained tree loads into the original's class."""
    tree = whence.capture(zoo.Mlp(), (X,), backward=True).unflatten()
    tree(X).sum().backward()
    torch.optim.SGD(tree.parameters(), lr=0.1).step()
    other = zoo.Mlp()
    other.load_state_dict(tree.state_dict())
    assert same_bits(other(X), tree(X))


def test_tensors_assigned_by_load_state_dict() -> None:
    """Loading with `assign=True` replaces the tensors, and the tree computes with the new ones."""
    other = zoo.Mlp()
    for backward in (False, True):
        tree = whence.capture(zoo.Mlp(), (X,), backward=backward).unflatten()
        tree.load_state_dict(other.state_dict(), assign=True)
        assert same_bits(tree(X), other(X))


def test_parameter_replaced_by_a_person() -> None:
    """A tree computes with the parameter that is there when it runs."""
    model = zoo.Mlp()
    tree: Any = whence.capture(model, (X,)).unflatten(copy=True)
    model.up.weight = tree.up.weight = nn.Parameter(torch.randn(2 * zoo.WIDTH, zoo.WIDTH))
    assert same_bits(tree(X), model(X))


@pytest.mark.parametrize(
    "name", ["gpt2", "checkpoint", "shared_module", "running_statistics", "constants", "closure"]
)
@pytest.mark.parametrize("mode", ["forward", "loss"])
def test_deepcopy(name: str, mode: str) -> None:
    """A deep copy computes the same with tensors of its own."""
    _, args, kwargs = case(name).make()
    tree = captured(name, mode).unflatten(copy=True)
    duplicate = deepcopy(tree)
    expected, found = tree(*args, **kwargs), duplicate(*args, **kwargs)
    leaves = [torch.utils._pytree.tree_leaves(result) for result in (expected, found)]
    assert all(map(same_bits, *leaves))
    assert not {id(p) for p in tree.parameters()} & {id(p) for p in duplicate.parameters()}


MADE: dict[str, Callable[[whence.Program], nn.Module]] = {
    "tree": lambda program: program.unflatten(),
    "flat": lambda program: program.module(),
    "pickled": lambda program: pickle.loads(pickle.dumps(program.unflatten())),
    "copied": lambda program: deepcopy(program.unflatten()),
}


@pytest.mark.parametrize("mode", ["forward", "loss"])
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_tree_goes_when_nobody_holds_it(make: Callable[[whence.Program], nn.Module], mode: str) -> None:
    """With its weights, and with what its backward has kept, before Python's collector comes."""
    x = torch.randn(2, 4)
    backward: Any = False if mode == "forward" else torch.sum
    gc.disable()
    try:
        tree = make(whence.capture(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (x,), backward=backward))
        given = x.clone()
        result = tree(given)
        (result.sum() if mode == "forward" else result[0]).backward()
        kept, weight = ref(given), ref(tree.get_parameter("0.weight"))
        del given, result
        assert kept() is None
        del tree
        assert weight() is None
    finally:
        gc.enable()


def test_replica_runs_on_its_own_weights() -> None:
    """As `nn.DataParallel` makes them of a module."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    tree = whence.capture(layer, (x,)).unflatten()
    replica = tree._replicate_for_data_parallel()
    replica.weight, replica.bias = layer.weight * 2, layer.bias
    assert torch.equal(replica(x), nn.functional.linear(x, layer.weight * 2, layer.bias))


def test_deepcopy_of_a_module_that_reaches_beside_itself() -> None:
    """In a copy, a module that calls a sibling calls the sibling's copy."""

    first = nn.Linear(zoo.WIDTH, zoo.WIDTH)
    tree = whence.capture(
        nn.Sequential(OrderedDict(first=first, second=zoo.Neighbour(first))), (X,)
    ).unflatten()
    duplicate = deepcopy(tree)
    with torch.no_grad():
        tree.get_parameter("first.weight").zero_()
        tree.get_parameter("first.bias").zero_()
    assert tree(X).abs().sum() == 0
    assert duplicate(X).abs().sum() > 0


def test_dtype_moves_parameters() -> None:
    """`.to(torch.float64)` on a copy moves its parameters and leaves the model's."""
    model = zoo.Mlp()
    tree = whence.capture(model, (X,)).unflatten(copy=True).to(torch.float64)
    assert {p.dtype for p in tree.parameters()} == {torch.float64}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_mode_can_be_set() -> None:
    """`train` and `eval` set the modules' modes and change no numbers: what runs is what was captured."""
    model = zoo.Mlp(dropout=0.5).eval()
    tree = whence.capture(model, (X,)).unflatten()
    expected = model(X)
    for mode in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree.train(mode)
        assert {module.training for module in tree.modules()} == {mode}
        assert same_bits(tree(X), expected)


@pytest.mark.parametrize("kind", ["tree", "flat", "onto"])
def test_changed_mode_is_warned_about(kind: str) -> None:
    """Another mode than that of the capture is one warning; the same mode again is none."""
    model = nn.Sequential(zoo.Mlp(dropout=0.5), nn.ReLU()).train()
    program = whence.capture(nn.Sequential(model), (X,))
    makes = {"tree": program.unflatten, "flat": program.module}
    tree = makes[kind]() if kind != "onto" else program.unflatten(onto=nn.Sequential(model))
    with pytest.warns(UserWarning, match="were captured in training mode") as told:
        tree.eval()
    assert (len(told), {module.training for module in tree.modules()}) == (1, {False})
    tree.eval()
    tree.train()


def test_shared_module_is_one_module() -> None:
    """A module under two names is one object in the tree."""
    tree = tree_of("shared_module")
    assert tree.question is tree.answer
    assert len(list(tree.modules())) == len(set(map(id, tree.modules())))


def test_buffers_move_on() -> None:
    """Each run of the tree changes the buffers as a run of the original does."""
    model = zoo.RunningStatistics().train()
    original = deepcopy(model)
    tree = whence.capture(model, (X,)).unflatten()
    for _ in range(3):
        tree(X)
        original(X)
    assert differing(state(original), state(tree)) == []
    assert tree.steps == 3


@pytest.mark.sweep
def test_reassigned_buffer_moves_on() -> None:
    """A buffer that forward replaces has the new value after each run."""

    class Averaging(nn.Module):
        average: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(zoo.WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            self.average = 0.9 * self.average + 0.1 * x.mean((0, 1))
            return x - self.average

    original, tree = Averaging(), whence.capture(Averaging(), (X,)).unflatten()
    for _ in range(3):
        assert same_bits(tree(X), original(X))
    assert same_bits(tree.average, original.average)


@pytest.mark.parametrize("backward", [False, True])
def test_written_input_is_returned_as_it_is_now(backward: bool) -> None:
    """An input that forward writes and returns comes back with its new value."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x.mul_(2)
            return x, x * self.weight

    tree = whence.capture(Writing(), (torch.ones(3),), backward=backward).unflatten()
    given = torch.ones(3)
    returned, scaled = tree(given)
    assert given.tolist() == returned.tolist() == scaled.tolist() == [2.0, 2.0, 2.0]


def test_written_buffer_is_returned_as_it_is_now() -> None:
    """A buffer that forward writes and returns comes back with its new value."""

    class Counting(nn.Module):
        steps: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.steps.add_(1)
            return self.steps, x * self.steps

    tree = whence.capture(Counting(), (torch.ones(3),)).unflatten()
    assert [tree(torch.ones(3))[0].tolist()[0] for _ in range(3)] == [1.0, 2.0, 3.0]


def test_non_persistent_buffer_is_not_saved() -> None:
    """A buffer that the original does not save is a buffer that the tree does not save."""
    tree = tree_of("constants")
    assert "decay" in dict(tree.named_buffers())
    assert "decay" not in tree.state_dict()


def test_absent_parts_are_absent() -> None:
    """A bias that is None and a submodule that is None are None."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(zoo.WIDTH, 4, bias=False)
            self.missing = None
            self.register_module("child", None)
            self.register_buffer("table", None)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    tree: Any = whence.capture(Bare(), (X,)).unflatten()
    assert tree.layer.bias is None
    assert tree.child is None
    assert tree.table is None


def test_containers_are_containers() -> None:
    """Lists, dictionaries and sequences of modules and parameters keep their accessors."""
    tree = tree_of("named_branches")
    assert list(tree.branches) == ["wide", "deep"]
    assert len(tree.scales) == 2
    assert tree.offsets["deep"] is dict(tree.named_parameters())["offsets.deep"]


def test_sequential_is_indexed() -> None:
    """A sequence that was called can be indexed, iterated and measured."""
    tree: Any = whence.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(4),)).unflatten()
    assert len(tree) == 2
    assert tree[-1]._get_name() == "ReLU"
    assert [module._get_name() for module in tree] == ["Linear", "ReLU"]


RESERVED = [
    "calls",
    "bodies",
    "type_name",
    "root",
    "forward_graph",
    "backward_graph",
    "run",
    "graph",
    "state",
    "module",
]


class Awkward(nn.Module):
    """Has a child of a name that the tree could want for itself."""

    def __init__(self, name: str, part: nn.Module) -> None:
        super().__init__()
        self.add_module(name, part)
        self.beside = [part]

    def forward(self, x: Tensor) -> Tensor:
        return self.beside[0](x) * 2


@pytest.mark.parametrize("name", RESERVED)
def test_child_may_have_any_name(name: str) -> None:
    """A submodule may be called like an attribute of the tree's own class."""
    model = Awkward(name, zoo.Mlp())
    tree = whence.capture(model, (X,), backward=True).unflatten()
    assert same_bits(tree(X), model(X))
    assert list(tree.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("name", RESERVED)
def test_buffer_may_have_any_name(name: str) -> None:
    """A buffer may be called like an attribute of the tree's own class."""

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer(name, torch.arange(3.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.get_buffer(name)

    model, x = Holding(), torch.randn(3)
    assert same_bits(whence.capture(model, (x,)).unflatten()(x), model(x))


@pytest.mark.parametrize("key", ["a-b", "with space", "1", "class", "ü", "a/b"])
def test_key_may_be_any_text(key: str) -> None:
    """Keys of module and parameter dictionaries need not be identifiers."""

    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({key: nn.Linear(zoo.WIDTH, 4)})
            self.offsets = nn.ParameterDict({key: torch.randn(4)})

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[key](x) + self.offsets[key]

    model = Keyed()
    program = whence.capture(model, (X,), backward=True)
    assert program.verify(model, (X,)).ok
    assert same_bits(program.unflatten()(X), model(X))
    assert list(program.unflatten().state_dict()) == list(model.state_dict())


def result_types() -> list[Any]:
    return ["dict_to_dataclass", "aliased_outputs", "gpt2"]


@pytest.mark.parametrize("name", result_types())
def test_result_has_the_original_s_structure(name: str) -> None:
    """What a tree returns is of the class and structure that the original returns."""
    model, args, kwargs = case(name).make()
    expected, found = model(*args, **kwargs), tree_of(name)(*args, **kwargs)
    assert type(found) is type(expected)
    specs = [torch.utils._pytree.tree_structure(result) for result in (expected, found)]
    assert specs[0] == specs[1]


@pytest.mark.parametrize(
    "make", [lambda program: program.module(), lambda program: program.unflatten()], ids=["flat", "tree"]
)
def test_repr_shows_the_original_s_classes(make: Callable[[whence.Program], nn.Module]) -> None:
    """Printing a flat module or a tree shows the original's class names."""
    module = make(whence.capture(zoo.Mlp(), (X,)))
    assert repr(module).startswith("Mlp(")
    assert "(up): Linear" in repr(module)


class Called(nn.ModuleList):
    """A list that is called."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = module(x)
        return x


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.Sequential, Called])
def test_repr_shows_equal_neighbours_once(kind: Callable[..., Any]) -> None:
    """Lists print a run of equal modules as one, as a `ModuleList` does, also where they are called."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [zoo.Mlp() for _ in range(3)]
            self.layers = kind(*layers) if kind is nn.Sequential else kind(layers)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers if kind is nn.ModuleList else [self.layers]:
                x = layer(x)
            return x

    tree = whence.capture(Model(), (X,)).unflatten()
    assert f"{kind.__name__}(\n    (0-2): 3 x Mlp(" in repr(tree)


def test_repr_of_named_layers_shows_their_names() -> None:
    """A sequence whose modules have names prints each."""
    model = nn.Sequential(OrderedDict([("first", nn.ReLU()), ("second", nn.ReLU())]))
    assert "(second): ReLU" in repr(whence.capture(model, (X,)).unflatten())


def test_inputs_that_share_memory_are_refused_together() -> None:
    """Inputs that are written and share their memory now, and did not at capture, are named in pairs."""

    def step(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        first.add_(1)
        second.add_(1)
        return first + second + third

    flat = whence.capture(step, (torch.ones(4), torch.ones(4), torch.ones(4))).module()
    shared = torch.ones(4)
    with pytest.raises(whence.CallError) as caught:
        flat(shared, shared[:], shared[:])
    assert caught.value.what.replace(" share memory, and did not at capture", "").split("; ") == [
        "args[0] and args[1]",
        "args[0] and args[2]",
        "args[1] and args[2]",
    ]
