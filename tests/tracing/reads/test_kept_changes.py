"""State outside parameters and buffers: programs are right in all calls, or refused, and eager goes on."""

from __future__ import annotations

import copy
import functools
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._decomp import global_decomposition_table
from torch._ops import OperatorBase, OpOverloadPacket
from torch.utils._pytree import SUPPORTED_NODES

import whence
from tests.checks import leaves_no_trace, same_bits, surroundings
from tests.models import MODEL_CASES, ModelCase
from tests.tracing.keeping import Keeping, all_places, results

X = torch.full((2, 4), 1.0)


PLACES = all_places()
SLOW = frozenset({"in_a_module_of_pythons", "pair_in_a_module_of_pythons"})
"""Each capture looks through all that the process has, which is much among so many tests."""
EVERY_PLACE = pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, id=place.name, marks=pytest.mark.slow if place.name in SLOW else ())
        for place in PLACES
    ],
)


@contextmanager
def warnings_ignored() -> Iterator[None]:
    """A tensor that is not kept is warned about, which is not the matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.sample(10)
@EVERY_PLACE
def test_the_program_is_right_in_every_call_or_there_is_none(place: Keeping) -> None:
    """State that a call advances is refused; what is computed once, or asked by nothing, is not."""
    model, expected = place.world().Model(), results(place.world().Model())
    with warnings_ignored():
        try:
            program = whence.capture(model, (X,))
        except whence.CaptureError as error:
            assert not place.is_right, str(error)
            assert error.remedy
            return
        module = program.module()
    assert all(map(same_bits, results(module), expected))


@pytest.mark.sample(10)
@EVERY_PLACE
def test_eager_goes_on_as_if_nothing_had_been_captured(place: Keeping) -> None:
    """Two captures with eager calls around leave variables, caches, iterators and generators as they were."""
    model, found = place.world().Model(), []
    for number in range(2):
        with warnings_ignored(), suppress(whence.CaptureError):
            whence.capture(model, (X,))
        found.append(model(torch.full((2, 4), number + 1.0)))
    assert place.is_random or all(map(same_bits, found, results(place.world().Model(), 2)))


class Several(nn.Module):
    """Models of several worlds, one after another."""

    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        for model in self.models:
            x = torch.tanh(model(x))
        return x


def check_drawn(seed: int) -> None:
    """Three places drawn at random, in one model."""
    chosen = random.Random(seed).sample([place for place in PLACES if not place.is_random], 3)
    model, found = Several([place.world().Model() for place in chosen]), []
    for number in range(2):
        with warnings_ignored():
            try:
                whence.capture(model, (X,))
            except whence.CaptureError as error:
                assert not all(place.is_right for place in chosen), str(error)
        found.append(model(torch.full((2, 4), number + 1.0)))
    again = Several([place.world().Model() for place in chosen])
    assert all(map(same_bits, found, results(again, 2)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(8))
def test_models_that_keep_state_in_several_places(seed: int) -> None:
    """Wherever several modules keep state, eager goes on as if nothing had been captured."""
    check_drawn(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 150))
def test_many_models_that_keep_state_in_several_places(seed: int) -> None:
    """As above, many more."""
    check_drawn(seed)


class Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def tick(self) -> int:
        self.calls += 1
        return self.calls


OF_FILE = Counter()


class Holding(nn.Module):
    """Puts a counter under `now` in every call, and asks it twice."""

    def __init__(self, find: Callable[[Any], Counter]) -> None:
        super().__init__()
        self.find, self.held, self.row = find, Counter(), [Counter()]

    def forward(self, x: Tensor) -> Tensor:
        self.now = self.find(self)
        return x * self.now.tick() + self.now.tick()


MET: dict[str, Callable[[Any], Counter]] = {
    "an attribute": lambda model: model.held,
    "an entry": lambda model: model.row[0],
    "by text": lambda model: vars(model)["held"],
    "of a file": lambda _: OF_FILE,
    "inside of what is made": lambda model: SimpleNamespace(inner=model.held).inner,
}


def test_an_object_that_every_run_makes_is_no_state() -> None:
    """What a run has made, put under a name and changed, the next one makes again."""
    counting = Holding(lambda _: Counter())
    assert torch.equal(whence.capture(counting, (X,)).bind(counting)(X), Holding(lambda _: Counter())(X))


@pytest.mark.sweep
def test_a_distribution_that_every_run_makes_is_no_state() -> None:
    """Its attributes are computed when they are read first."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept = SimpleNamespace()

        def forward(self, x: Tensor) -> Tensor:
            self.kept.distribution = torch.distributions.Categorical(logits=x)
            return self.kept.distribution.entropy() + self.kept.distribution.log_prob(torch.tensor(1))

    policy = Policy()
    with warnings_ignored():
        run = whence.capture(policy, (X,)).bind(policy)
    assert all(torch.equal(run(X), Policy()(X)) for _ in range(2))


class Policy:
    """What an actor has at hand, as those of stable-baselines3."""

    distribution: torch.distributions.Normal
    drawn: Tensor | None = None
    row: Any = ()


class Acting(nn.Module):
    """Leaves the distribution of each call, and what it drew, on an object that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(4, 4), Policy()

    def forward(self, x: Tensor) -> Tensor:
        self.kept.distribution = torch.distributions.Normal(self.linear(x), 1.0)
        self.kept.drawn = self.kept.distribution.rsample()
        self.kept.row = []
        self.kept.row.append(self.kept.drawn)
        return self.kept.row[0] + self.kept.distribution.log_prob(self.kept.drawn)


@pytest.mark.parametrize("calls", [1, 2])
def test_what_a_run_puts_anew_in_each_call_is_no_state(calls: int) -> None:
    """However often the run calls the model: what is read first is what the run has put there itself."""

    def losses(
        taken: Callable[[Callable[..., Tensor], nn.Module, torch.optim.Optimizer], Any],
    ) -> list[Tensor]:
        torch.manual_seed(0)
        model = Acting()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = sum((model(x).sum() for _ in range(calls)), torch.zeros([]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        run = taken(step, model, optimizer)
        torch.manual_seed(1)
        return [run(X).detach() for _ in range(3)]

    def bound(step: Callable[..., Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
        return program.bind(model, optimizer, on_violation="raise")

    with warnings_ignored():
        assert all(map(same_bits, losses(lambda step, *_: step), losses(bound)))


@functools.cache
def noise(size: int) -> Tensor:
    return torch.randn(size, 1)


def test_what_is_drawn_once_is_not_drawn_in_every_run() -> None:
    """A function that keeps what it returns is refused while it has not drawn yet, and then a constant."""

    def noisy(x: Tensor) -> Tensor:
        return x * noise(len(x))

    noise.cache_clear()
    with pytest.raises(whence.SideEffect, match="noise keeps what it draws, randn"):
        whence.capture(noisy, (X,))
    expected = noisy(X)
    assert torch.equal(whence.capture(noisy, (X,)).module()(X), expected)
    noise.cache_clear()


@pytest.mark.parametrize("way", MET)
def test_an_object_that_was_there_before_is_state(way: str) -> None:
    """Under whatever name it is put meanwhile, the next run finds it changed."""
    with pytest.raises(whence.CaptureError, match=r"calls while it runs, and computes otherwise"):
        whence.capture(Holding(MET[way]), (X,))
    assert OF_FILE.calls == 0


def variables() -> dict[str, Any]:
    """What the files of libraries have in variables and in containers among these."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith(("transformers.models", "transformers.modeling", "tests.zoo", "tests.models")):
            held = {key: value for key, value in vars(module).items() if not isinstance(value, type(sys))}
            found |= {f"{name}.{key}": id(value) for key, value in held.items()}
            plain = {key: value for key, value in held.items() if type(value) in (dict, list, set)}
            found |= {f"what {name}.{key} holds": copy.copy(value) for key, value in plain.items()}
    return found


def operator_tables() -> dict[str, Any]:
    """What PyTorch does for every operator, in the tables that Python keeps."""
    packets = [packet for packet in vars(torch.ops.aten).values() if isinstance(packet, OpOverloadPacket)]
    operators = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    operators += [held for held in vars(torch.ops.higher_order).values() if isinstance(held, OperatorBase)]
    tables = ("py_kernels", "python_key_table", "functorch_table")
    found = {str(held): [dict(vars(held).get(table, {})) for table in tables] for held in operators}
    return found | {
        "decompositions": [dict(table) for table in global_decomposition_table.values()],
        "containers": dict(SUPPORTED_NODES),
    }


def test_a_changed_operator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees one kernel more."""
    before = operator_tables()
    monkeypatch.setitem(torch.ops.aten.t.default.py_kernels, torch._C.DispatchKey.AutogradOther, len)
    assert [name for name, value in operator_tables().items() if before[name] != value] == ["aten.t.default"]


def check_row(row: ModelCase) -> None:
    """Capture twice with an eager run between."""
    torch.manual_seed(0)
    model, args, kwargs = row.make()
    torch.manual_seed(0)
    other, same_args, same_kwargs = row.make()
    for _ in range(2):
        before, outside = variables() | operator_tables(), surroundings()
        with warnings_ignored(), suppress(whence.CaptureError), leaves_no_trace(model):
            whence.capture(model, args, kwargs)
        now, around = variables() | operator_tables(), surroundings()
        assert [name for name, value in before.items() if now.get(name) != value] == []
        assert [name for name, value in outside.items() if around[name] != value] == []
        torch.manual_seed(1)
        found = model(*args, **kwargs)
        torch.manual_seed(1)
        expected = other(*same_args, **same_kwargs)
        pairs = zip(*(torch.utils._pytree.tree_leaves(each) for each in (found, expected)), strict=True)
        assert all(same_bits(left, right) for left, right in pairs if isinstance(left, Tensor))


class Head(nn.Module):
    """Leaves its result in a list that it shares with the model around it, as heads of supervision do."""

    def __init__(self, shared: list[Any]) -> None:
        super().__init__()
        self.shared, self.linear = shared, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        self.shared[0] = result
        return result


class Supervised(nn.Module):
    """What it does with the list, before the head has left something there or afterwards, says `use`."""

    def __init__(self, use: Callable[[Supervised, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared: list[Any] = [torch.zeros(2, 4), torch.ones(2, 4)]
        self.head, self.use = Head(self.shared), use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


SHARED: dict[str, tuple[Callable[[Supervised, Tensor], Tensor], bool]] = {
    "afterwards": (lambda m, x: m.head(x) + m.shared[0], True),
    "all of it": (lambda m, x: torch.stack([m.head(x), *m.shared]), True),
    "length": (lambda m, x: m.head(x) * len(m.shared), True),
    "before": (lambda m, x: m.shared[0] + m.head(x), False),
    "turned": (lambda m, x: m.head(x) * (m.shared.reverse() or m.shared[0]), False),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("backward", [False, True])
def test_modules_that_share_a_list(name: str, backward: bool) -> None:
    """It is one list in the next call, too, and as long: what a call leaves there and reads is its own."""
    use, is_right = SHARED[name]
    model, eager = Supervised(use), Supervised(use)
    with warnings_ignored(), nullcontext() if is_right else pytest.raises(whence.LostState):
        module = whence.capture(model, (X,), backward=backward).unflatten()
        for scale in (1, 2, 3):
            assert torch.equal(module(X * scale), eager(X * scale))


@pytest.mark.slow
@pytest.mark.parametrize("row", MODEL_CASES, ids=lambda row: row.name)
def test_models_of_the_table_go_on(row: ModelCase) -> None:
    """Model, variables of its files, generators and modes are as before; so is what eager does next."""
    check_row(row)


FEW = [row for row in MODEL_CASES if row.name in ("resnet", "gpt2_dropout", "momentum_teacher")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("row", FEW, ids=lambda row: row.name)
def test_some_models_of_the_table_go_on(row: ModelCase) -> None:
    """As above, for a few."""
    check_row(row)


class Reordering(nn.Module):
    """Puts an entry behind the others, in a dictionary under tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.held = {torch.ones(2): 1, torch.zeros(2): 2}

    def forward(self, x: Tensor) -> Tensor:
        first = next(iter(self.held))
        self.held[first] = self.held.pop(first)
        return x * 2


def test_a_dictionary_under_tensors_has_its_order_afterwards() -> None:
    """Tensors are not to be asked whether they are equal, which was an error of theirs."""
    model = Reordering()
    whence.capture(model, (torch.ones(2),))
    assert list(model.held.values()) == [1, 2]


class MadeWhenAsked(OrderedDict[str, float]):
    """Holds nothing, and makes its values, as transformers' tables of models do, by importing all of them."""

    def __init__(self, texts: dict[str, str]) -> None:
        super().__init__()
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)

    def __getitem__(self, key: str) -> float:
        return float(self.texts[key])

    def values(self) -> Any:
        """Not to be called for another's sake."""
        raise ImportError

    items = values


TABLE = {"nested": MadeWhenAsked({"a": "2"})}
DIRECT = MadeWhenAsked({"a": "3"})


class ReadsTables(nn.Linear):
    """Reads an entry of each."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * TABLE["nested"]["a"] * DIRECT["a"]


@pytest.mark.parametrize("backward", [False, torch.sum])
def test_values_that_are_made_when_asked_for(backward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary is looked at without code of its class; what it makes its values of is compared."""
    model = nn.Sequential(ReadsTables(4, 4))
    program = whence.capture(model, (X,), backward=backward)
    assert program.verify(model, (X,)).ok
    assert program.check(model, (X,)) == []
    monkeypatch.setitem(TABLE["nested"].texts, "a", "5")
    assert len(program.check(model, (X,))) == 1


def test_a_step_beside_values_that_are_made_when_asked_for() -> None:
    """So is what a step leads to."""
    model = nn.Sequential(ReadsTables(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    assert program.check(model, (X,)) == []
    program.bind(model, optimizer)(X)


class Marking(nn.Linear):
    """Counts on its argument how often it has been called with it, and marks it."""

    def forward(self, x: Tensor) -> Tensor:
        x.seen = True  # type: ignore[attr-defined]
        x.calls = getattr(x, "calls", 0) + 1  # type: ignore[attr-defined]
        return super().forward(x) * x.calls  # type: ignore[attr-defined]


class Marked(Marking):
    """Only marks it, and counts on what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        x.seen = True  # type: ignore[attr-defined]
        return super().forward(x * 2)


@pytest.mark.parametrize("backward", [False, True])
def test_what_is_kept_on_an_argument_is_state(backward: bool) -> None:
    """A count that a call leaves on its argument is refused by name, with all of it as it was; a mark that
    nothing asks for is none."""
    x = torch.ones(2, 4)
    with pytest.raises(whence.LostState, match=r"x\.calls"):
        whence.capture(Marking(4, 4), (x,), backward=backward)
    model = Marked(4, 4)
    assert whence.capture(model, (x,), backward=backward).verify(model, (x,)).ok
    assert not vars(x)
