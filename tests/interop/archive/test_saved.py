"""Programs come back from files as they were: all that they say, and the bits that they compute."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import json
import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import whence
from tests import checks
from tests.interop.archive.mutations import members, with_data
from tests.interop.archive.programs import KINDS, X, content, layered, program, sine, through_file
from tests.models import MODEL_CASES, ModelCase, case
from tests.sameness import differences
from tests.tracing.attribution.test_wrapper_subclasses import doubled
from tests.tracing.steps.small import batch, small, zero_first
from whence._torch.pytrees import GetAttrKey, register_container, tree_flatten
from whence._torch.sizes.symbols import whole_bound
from whence.captured import loaded
from whence.errors import CallError, MalformedProgram, NotStorable, StaleCapture, UnreadableFile, UsageError
from whence.reports.figures import figures_of
from whence.viewer import page as drawn

PAGES = (str, repr, lambda p: str(p.guards), lambda p: str(p.calls), lambda p: str(p.signature))


def say_the_same(
    before: whence.Program, after: whence.Program, sizes: Mapping[str, int] | None = None
) -> None:
    """Two programs say the same, word for word, also on the page that is drawn of them."""
    assert differences(before, after) == {}
    assert [page(before) for page in PAGES] == [page(after) for page in PAGES]
    assert before.to_json() == after.to_json()
    assert drawn(figures_of(before, sizes=sizes)) == drawn(figures_of(after, sizes=sizes))


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_survives(kind: str, tmp_path: Path) -> None:
    """Pages, origins, calls, guards, layers and facts are those of the program that was saved."""
    sizes = {"size_of_index": 8, "size_of_nonzero": 8} if kind == "sizes of data" else None
    say_the_same(program(kind), through_file(program(kind), tmp_path), sizes)


def test_what_an_example_decided_survives(tmp_path: Path) -> None:
    """A loaded program holds its runs to the same answers."""

    class Routed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() if x.sum() > 0 else x.cos()

    before = whence.capture(Routed(), (torch.ones(3),), decide="example")
    after = through_file(before, tmp_path)
    say_the_same(before, after)
    assert after.decisions == before.decisions and len(after.decisions) == 1
    with pytest.raises(StaleCapture, match="gt is False, and was True"):
        after.module()(-torch.ones(3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_a_loaded_program_is_the_same_file(kind: str) -> None:
    """Nothing is lost on the way, however often it is gone."""
    again = copy.deepcopy(loaded(content(kind), "a file"))
    first, second = (json.loads(members(each)["program.json"]) for each in (content(kind), _bytes(again)))
    for data in (first, second):
        for symbol in data["tables"]["symbols"]:
            symbol.pop()  # the greatest that a size of data may be is not read again
    assert first == second


def _bytes(given: whence.Program) -> bytes:
    return whence.interop.bytes_of(given, weights=True)


def test_saving_twice_gives_the_same_bytes() -> None:
    """A file says nothing of when and where it was written."""
    assert _bytes(program("joint")) == content("joint")


QUICK = ("llama", "vit", "tied_language_model", "shared_module", "deberta_v2")


def _rows() -> Iterator[Any]:
    for row in MODEL_CASES:
        yield pytest.param(row, id=row.name, marks=() if row.name in QUICK else pytest.mark.slow)


@pytest.mark.sample(3)
@pytest.mark.parametrize("model", list(_rows()))
@pytest.mark.parametrize("mode", ["forward", "loss"])
def test_table_of_models(model: ModelCase, mode: str, tmp_path: Path) -> None:
    """Each model's program comes back saying the same, computing the same bits, and valid for the model."""
    before = checks.captured(model.name, mode)
    after = through_file(before, tmp_path)
    say_the_same(before, after)
    for make in ("module", "unflatten"):
        trees = [getattr(each, make)(copy=True) for each in (before, after)]
        assert same_results(*(_seeded(model, tree) for tree in trees))
    module, args, kwargs = model.make()
    bound = through_file(before, tmp_path, weights=False, model=module)
    assert bound.check(module, args, kwargs) == []


@pytest.mark.parametrize("name", ["vit", "spectral_norm"])
def test_programs_are_saved_when_their_model_is_gone(name: str, tmp_path: Path) -> None:
    """What guards compare is found from classes, and those that were made for a model by their modules."""
    row = case(name)

    def captured() -> whence.Program:
        model, args, kwargs = row.make()
        return whence.capture(model, args, kwargs, backward=checks.backward_of(row, "loss"))

    before = captured()
    gc.collect()
    assert before.guards.of is not None and before.guards.of.target() is None
    module, args, kwargs = row.make()
    bound = through_file(before, tmp_path, weights=False, model=module)
    assert bound.check(module, args, kwargs) == []
    alone = bound.with_changes(guards=replace(bound.guards, settled=None))
    assert alone.check(module, args, kwargs) == []


class Weighing(nn.Module):
    """A loss with state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.head = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)

    def forward(self, outputs: Tensor) -> Tensor:
        return (self.head(outputs) * self.gain).sum()


WEIGHTS, WEIGHING = torch.rand(3), Weighing()
ENTROPY = nn.CrossEntropyLoss(weight=WEIGHTS)


@pytest.mark.parametrize("weights", [True, False], ids=["with weights", "without"])
@pytest.mark.parametrize(
    "loss",
    [lambda y: (y * WEIGHTS).sum(), lambda y: ENTROPY(y, torch.tensor([0, 1])), lambda y: -WEIGHING(y)],
    ids=["a tensor around it", "a loss of torch.nn", "a module with parameters"],
)
def test_tensors_of_a_loss_are_in_the_file(loss: Any, weights: bool, tmp_path: Path) -> None:
    """No model has them; and whoever keeps programs for it is told, for they may be others then."""
    model, x = nn.Linear(4, 3), torch.rand(2, 4)
    before = whence.capture(model, (x,), backward=loss)
    before.save(tmp_path / "program.whence", weights=weights)
    after = whence.load(tmp_path / "program.whence", model=model)
    for make in ("module", "unflatten"):
        assert torch.equal(getattr(after, make)()(x)[0], getattr(before, make)()(x)[0])
    known = whence.load(tmp_path / "program.whence", model=model, loss_function=loss)
    assert known.check(model, (x,)) == [] and known.verify(model, (x,)).ok
    with pytest.warns(whence.NotKept, match="the loss function holds loss"):
        whence.cached(model, (x,), backward=loss, directory=tmp_path / "kept")


def test_what_a_loss_closes_over_is_compared_where_it_is_given(tmp_path: Path) -> None:
    """Beside the model; alone nobody knows which loss it is."""

    def scaled(by: float) -> Callable[[Tensor], Tensor]:
        return lambda outputs: outputs.sum() * by

    model, x = nn.Linear(4, 3), torch.rand(2, 4)
    whence.capture(model, (x,), backward=scaled(0.5)).save(path := tmp_path / "program.whence")
    assert whence.load(path, model=model, loss_function=scaled(0.5)).check(model, (x,)) == []
    (found,) = whence.load(path, model=model, loss_function=scaled(0.7)).check(model, (x,))
    assert "`closure by` was 0.5 at capture" in str(found) and "is 0.7 now" in str(found)
    with pytest.raises(UsageError, match="beside a model"):
        whence.load(path, loss_function=scaled(0.5))


def test_a_step_that_was_loaded_without_a_model_says_what_it_is_bound_with(tmp_path: Path) -> None:
    """It has the classes of the file by name, that of its optimizer too."""
    model, optimizer = small()
    held: dict[str, Any] = {"model": model, "optimizer": optimizer}
    whence.capture_step(zero_first(model, optimizer), (batch(),), **held).save(path := tmp_path / "p.whence")
    with pytest.raises(UsageError, match=r"by name\n.*whence.load\(path, model="):
        whence.load(path).bind(model, optimizer)
    assert torch.is_tensor(whence.load(path, model=model).bind(model, optimizer)(batch()))


def _seeded(model: ModelCase, tree: nn.Module) -> Any:
    _, args, kwargs = model.make()
    torch.manual_seed(3)
    return tree(*args, **kwargs)


def same_results(left: Any, right: Any) -> bool:
    """Structured results are the same, bit for bit."""
    (mine, spec), (theirs, other) = tree_flatten(left), tree_flatten(right)
    return spec == other and all(map(checks.same_bits, mine, theirs))


def test_sizes_of_other_calls(tmp_path: Path) -> None:
    """What the sizes of the example do not fix runs with others, and limits are kept."""
    sized = through_file(program("sizes"), tmp_path)
    other = torch.randn(7, 4)
    for tree in (sized.unflatten(), sized.module()):
        assert torch.equal(tree(other)[0], sine(layered()(other)))
    with pytest.raises(CallError, match="at most 64"):
        sized.module()(torch.randn(65, 4))


def test_reports_are_those_of_the_saved_program(tmp_path: Path) -> None:
    """Cost, memory, report and differences need no tensors."""
    before, after = program("joint"), through_file(program("joint"), tmp_path, weights=False)
    assert str(before.report()) == str(after.report()) and before.diff(after).ok
    assert before.cost().to_dict() == after.cost().to_dict()
    assert before.memory().to_dict() == after.memory().to_dict()
    assert [node.name for node in after.select("0 :: :: backward")] == [
        node.name for node in before.select("0 :: :: backward")
    ]


def test_values_on_the_way(tmp_path: Path) -> None:
    """`run` and `first` work on a loaded program."""
    after = through_file(program("forward"), tmp_path)
    before, found = (each.run((X,), read=["2"])["2"] for each in (program("forward"), after))
    assert torch.equal(before, found) and after.first((X,)) is None


def test_without_weights_what_needs_them_says_so(tmp_path: Path) -> None:
    """Modules, trees and values ask for a model; constants are there all the same."""
    bare = through_file(program("joint"), tmp_path, weights=False)
    for use in (bare.module, bare.unflatten):
        with pytest.raises(MalformedProgram, match="model="):
            use()
    with pytest.raises(UsageError, match=r"no value is given for 0\.weight"):
        bare.run((X,), read=["2"])
    constants = through_file(program("constants"), tmp_path, weights=False)
    assert [row.path for row in constants.signature.state if row.name in constants.state] == ["scale"]


def test_guards_ask_for_a_model(tmp_path: Path) -> None:
    """A file names classes and code: what is to be checked has to be there when it is read."""
    for use in (lambda p: p.check(layered(), (X,)), lambda p: p.guarded(layered())(X)):
        with pytest.raises(UsageError, match="model="):
            use(through_file(program("forward"), tmp_path))


class Paired(nn.Module):
    """Holds two tensors in one thing, and reads one of them."""

    def __init__(self, hold: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.held = hold(torch.tensor(2.0), torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        first, *_ = self.held
        return x * (self.held[first] if isinstance(first, str) else first)


@pytest.mark.parametrize(
    "hold",
    [
        lambda *both: both,
        lambda *both: [*both],
        namedtuple("Both", "read other"),
        lambda a, b: {"a": a, "b": b},
    ],
    ids=["tuple", "list", "named", "dictionary"],
)
def test_tensors_that_are_not_read_may_be_any(hold: Callable[[Tensor, Tensor], Any], tmp_path: Path) -> None:
    """The file does not have them; the one beside it, which the program reads, has to be the same."""
    model = Paired(hold)
    whence.capture(model, (X,)).save(tmp_path / "p.whence")
    again = whence.load(tmp_path / "p.whence", model=model)
    assert again.check(model, (X,)) == []
    assert again.check(Paired(hold), (X,)) == []
    model.held = hold(torch.tensor(4.0), torch.tensor(3.0))
    assert again.check(model, (X,)) != []


def test_a_step_is_bound(tmp_path: Path) -> None:
    """With the optimizer of another process it does what the step does, three times."""
    program("step").save(tmp_path / "p.whence", weights=False)
    (model, optimizer), (eager, theirs) = small(), small()
    run = whence.load(tmp_path / "p.whence", model=model).bind(model, optimizer)
    step = zero_first(eager, theirs)
    assert [bool(torch.equal(run(batch()), step(batch()))) for _ in range(3)] == [True] * 3
    assert checks.differing(checks.state(eager), checks.state(model)) == []
    with pytest.raises(UsageError, match="captured with AdamW, not SGD"):
        whence.load(tmp_path / "p.whence", model=model).bind(model, torch.optim.SGD(model.parameters()))


class Scaled(torch.optim.Optimizer):
    """An optimizer of somebody's, whose step has defaults."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0, maximize: bool = False) -> None:  # type: ignore[override]
        assert closure is None
        for held in self.param_groups[0]["params"]:
            held.add_(held.grad * scale, alpha=0.1 if maximize else -0.1)


def test_a_step_with_somebodys_optimizer_is_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where none has been made when the file is read: PyTorch puts a function around its step then."""
    plain = Scaled.step
    (model, _), (eager, _), (other, _) = small(), small(), small()
    optimizer, theirs = Scaled(model.parameters()), Scaled(eager.parameters())
    held: dict[str, Any] = {"model": model, "optimizer": optimizer}
    whence.capture_step(zero_first(model, optimizer), (batch(),), **held).save(path := tmp_path / "p.whence")
    assert Scaled.step is not plain
    monkeypatch.setattr(Scaled, "step", plain)
    program = whence.load(path, model=other)
    run, step = program.bind(other, Scaled(other.parameters())), zero_first(eager, theirs)
    assert [bool(torch.equal(run(batch()), step(batch()))) for _ in range(3)] == [True] * 3
    monkeypatch.setattr(inspect.unwrap(plain), "__defaults__", (2.0, 1.0, False))
    with pytest.raises(StaleCapture, match=r"a default argument of step` was None .*, is 2\.0 now"):
        run(batch())


class Options:
    """What a step reads around itself."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * self.scale * self.factor

    @property
    def factor(self) -> float:
        """Of all."""
        return 1.0


class KeptAs(Enum):
    """A key."""

    SHIFT = 1


FACTOR, OPTIONS, HELD = 1.0, Options(1.0), SimpleNamespace()
TABLE: dict[Any, Any] = {"scale": 1.0, "more": [1.0], KeptAs.SHIFT: 0.0}


def twofold(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    factor = {"by": 2.0}

    @functools.wraps(function)
    def run(x: Tensor) -> Tensor:
        return function(x) * factor["by"]

    return run


@twofold
def reads_around(x: Tensor) -> Tensor:
    HELD.optimizer.zero_grad()
    loss: Tensor = OPTIONS.scaled(HELD.model(x).sin().mean()) * FACTOR * TABLE["scale"] * len(TABLE["more"])
    loss = loss + TABLE[KeptAs.SHIFT]
    loss.backward()
    HELD.optimizer.step()
    return loss


def closed_over(function: Any) -> Any:
    return function.__closure__[0].cell_contents


AROUND: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "global FACTOR": lambda patch: patch.setattr(sys.modules[__name__], "FACTOR", 2.0),
    "OPTIONS.scale": lambda patch: patch.setattr(sys.modules[__name__], "OPTIONS", Options(2.0)),
    "Options.scaled": lambda patch: patch.setattr(Options, "scaled", lambda _, loss: loss * 2.0),
    "Options.factor": lambda patch: patch.setattr(Options, "factor", property(lambda _: 2.0)),
    "the keys of global TABLE": lambda patch: patch.setitem(TABLE, "other", 1.0),
    "global TABLE['more']": lambda patch: patch.setitem(TABLE, "more", [1.0, 2.0]),
    "global TABLE[<KeptAs.SHIFT: 1>]": lambda patch: patch.setitem(TABLE, KeptAs.SHIFT, 1.0),
    "closure factor": lambda patch: patch.setitem(closed_over(reads_around), "by", 3.0),
}


def test_what_a_step_reads_around_itself_is_compared_after_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also equal things that were made anew will do; another value is refused by name."""
    HELD.model, HELD.optimizer = small()
    held = {"model": HELD.model, "optimizer": HELD.optimizer}
    whence.capture_step(reads_around, (batch(),), **held).save(tmp_path / "p.whence", weights=False)
    monkeypatch.setattr(sys.modules[__name__], "OPTIONS", Options(1.0))
    monkeypatch.setattr(sys.modules[__name__], "TABLE", dict(TABLE, more=[1.0]))
    model, optimizer = small()
    whence.load(tmp_path / "p.whence").save(tmp_path / "again.whence", weights=False)
    program = whence.load(tmp_path / "again.whence", model=model)
    assert program.check(model, (batch(),)) == []
    run = program.bind(model, optimizer)
    assert [bool(torch.equal(run(batch()), reads_around(batch()))) for _ in range(3)] == [True] * 3
    assert checks.differing(checks.state(HELD.model), checks.state(model)) == []
    for name, change in AROUND.items():
        with monkeypatch.context() as patch:
            change(patch)
            assert name in [row.guard.what for row in program.check(model, (batch(),))]
            with pytest.raises(StaleCapture):
                run(batch())
    run(batch())


def test_what_a_program_does_it_does_after_loading(tmp_path: Path) -> None:
    """Passes, the other view of the state, copies, exported programs, and a guarded program."""
    model = layered().eval()
    after = through_file(whence.capture(model, (X,)), tmp_path, model=model)
    wanted = model(X)
    for other in (after.decompose(), after.with_state("attributes"), copy.deepcopy(after)):
        assert torch.equal(other.module()(X), wanted)
    assert torch.equal(after.to_exported_program().module()(X), wanted)
    assert torch.equal(after.guarded(model)(X), wanted) and torch.equal(after.bind(model)(X), wanted)


def test_bound_to_a_model_it_shares_its_tensors(tmp_path: Path) -> None:
    """Training a tree of the loaded program trains the model, and guards hold on it."""
    model = layered()
    saved = whence.capture(model, (X,))
    bound = through_file(saved, tmp_path, weights=False, model=model)
    assert bound.check(model, (X,)) == []
    tree = bound.unflatten()
    assert next(tree.parameters()) is next(model.parameters())
    assert torch.equal(tree(X), model(X))


def test_another_model_is_refused(tmp_path: Path) -> None:
    """Every tensor that does not fit is named at once."""
    with pytest.raises(StaleCapture, match=r"0.weight is .*; 1.weight is not there"):
        through_file(program("forward"), tmp_path, weights=False, model=nn.Sequential(nn.Linear(5, 5)))


def test_changes_of_the_model_are_found(tmp_path: Path) -> None:
    """A bound program is checked as one that was just captured: modes, classes, hooks, structure."""
    model = layered()
    whence.capture(model, (X,)).save(tmp_path / "p.whence", weights=False)
    bound = whence.load(tmp_path / "p.whence", model=model)
    changed = layered()
    changed[2] = nn.GELU()
    assert [row.guard.what for row in bound.check(changed, (X,))][:1] == ["2"]
    assert {row.guard.name for row in bound.check(layered().eval(), (X,))} == {"training"}
    assert bound.check(model, (torch.randn(5, 4),)) != []


class Static(nn.Module):
    """Has functions that are no methods."""

    @staticmethod
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    @classmethod
    def halved(cls, x: Tensor) -> Tensor:
        return x / 2

    def forward(self, x: Tensor) -> Tensor:
        return self.doubled(x) + Static.doubled(x) + self.halved(x)


def test_static_methods_are_found_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The class holds what wraps the function, and code that asks gets the function."""
    whence.capture(Static(), (X,)).save(tmp_path / "p.whence")
    loaded = whence.load(tmp_path / "p.whence", model=Static())
    assert loaded.check(Static(), (X,)) == []
    assert loaded.verify(Static(), (X,)).ok
    monkeypatch.setattr(Static, "doubled", staticmethod(lambda x: x * 3))
    assert loaded.check(Static(), (X,)) != []


ACTIVATION = nn.ReLU()


def activated(x: Tensor, activation: nn.Module = ACTIVATION) -> Tensor:
    """A default that is a module."""
    return activation(x)


def in_mathematics(x: Tensor) -> Tensor:
    """A class that C++ has made under another name than it has."""
    with sdpa_kernel([SDPBackend.MATH]):
        return nn.functional.scaled_dot_product_attention(x, x, x)


_VARIABLES: dict[str, Any] = {"_scale": 2.0}
"""As those of what attrs generates, which are no file's."""
generated: Any = eval("lambda x: x * _scale", _VARIABLES)
generated.__module__, generated.__qualname__ = __name__, "generated"


class Slot(nn.Module):
    """Keeps a number in a slot."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Absent:
    """The class of one object, and deleted then, as that of typing_extensions' `NoDefault` is."""


ABSENT = Absent()
del Absent


def defaulted(x: Tensor, given: Any = ABSENT) -> Tensor:
    """Asks whether it was given something."""
    return x * 2 if given is ABSENT else x


FOUND: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "class that is deleted": (defaulted, lambda model: setattr(model, "__defaults__", (None,))),
    "named tuple": (lambda x: Pair(x, 2.0).left * 2, lambda model: None),
    "default": (activated, lambda model: ACTIVATION.register_forward_hook(print)),
    "class of C++": (in_mathematics, lambda model: None),
    "variables of no file": (lambda x: generated(x) * 2, lambda model: _VARIABLES.update(_scale=3.0)),
    "slot": (Slot(), lambda model: setattr(model, "scale", 3.0)),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_has_no_plain_name_is_found_after_loading(name: str, tmp_path: Path) -> None:
    """It is compared as before it was saved: no alarm without a change, and one with it."""
    model, change = FOUND[name]
    before = whence.capture(model, (X,))
    after = through_file(before, tmp_path, model=model)
    assert after.check(model, (X,)) == []
    change(model)
    assert bool(after.check(model, (X,))) is bool(before.check(model, (X,)))


def test_what_a_count_decides_survives(tmp_path: Path) -> None:
    """A step that asks whether a number of its own is there any more is written, and read."""
    model, left = nn.Linear(4, 2), [5]

    def step(x: Tensor) -> Tensor:
        left[0] -= 1
        loss: Tensor = model(x).sum() if left[0] % 2 else model(x).mean()
        return loss

    before = whence.capture_step(step, (torch.ones(3, 4),), model=model)
    after = through_file(before, tmp_path)
    say_the_same(before, after)
    assert after.decisions == before.decisions and len(after.decisions) == 1


def test_as_many_results_as_values_said_are_loaded(tmp_path: Path) -> None:
    """Nobody can tell how many rows an operator gives that looks at values."""

    def repeated(x: Tensor) -> Tensor:
        return x.repeat_interleave((x[:, 0] > 0).long() + 1, dim=0).reshape(-1, 2, 2)

    before = whence.capture(repeated, (X,), decide="example")
    assert torch.equal(through_file(before, tmp_path).module()(X), repeated(X))


def test_memory_that_tensors_share_is_shared_again(tmp_path: Path) -> None:
    """One tensor under several names, views of one memory, and strides are as they were."""

    class Sharing(nn.Module):
        part: Tensor
        turned: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.whole = nn.Parameter(torch.randn(4, 6))
            self.register_buffer("part", self.whole.detach()[1:3, ::2])
            self.register_buffer("turned", torch.randn(6, 4).t())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.whole + self.part.sum() + self.turned.sum()

    model = Sharing()
    after = through_file(whence.capture(model, (X,)), tmp_path)
    whole, part, turned = (after.state[after.input(name).name] for name in ("whole", "part", "turned"))
    assert isinstance(whole, nn.Parameter) and torch.equal(part, whole[1:3, ::2])
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert turned.stride() == model.turned.stride() and torch.equal(after.module()(X), model(X))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128, torch.float8_e5m2, torch.uint16])
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    """Tensors of dtypes that readers of safetensors do not know are there, bit for bit."""

    class Held(nn.Module):
        held: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.arange(6).reshape(2, 3).to(dtype))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.held.shape[0]

    after = through_file(whence.capture(Held(), (X,)), tmp_path)
    (found,) = after.state.values()
    assert found.dtype is dtype and torch.equal(found.view(torch.uint8), Held().held.view(torch.uint8))


def test_what_cannot_be_stored_is_named_at_once(tmp_path: Path) -> None:
    """Python's functions and tensors that are made of others; no file is written."""

    captured = whence.capture(doubled(nn.Linear(4, 4)), (X,))
    with captured.track("mine") as edit:
        for node in edit.graph.nodes:
            if node.op == "call_function":
                node.target = torch.add
    with pytest.raises(NotStorable) as caught:
        edit.program.save(tmp_path / "no.whence")
    text = str(caught.value)
    assert "calls add" in text and "the tensor weight" in text and len(caught.value.faults) > 1
    assert list(tmp_path.iterdir()) == []


def test_operators_that_are_not_there_are_all_named() -> None:
    """A file of another release loads where its operators exist."""

    def rename(data: Any) -> None:
        for row in data["tables"]["targets"]:
            if row[:3] in (["operator", "aten", "relu"], ["operator", "aten", "linear"]):
                row[2] = f"{row[2]}_of_tomorrow"

    with pytest.raises(UnreadableFile, match=r"aten.linear_of_tomorrow.default, aten.relu_of_tomorrow"):
        loaded(with_data(content("forward"), rename), "a file")


def test_later_versions_are_refused() -> None:
    """A form that this release does not know."""
    with pytest.raises(UnreadableFile, match="version 2"):
        loaded(with_data(content("forward"), lambda data: {**data, "version": 2}), "a file")


def test_losses_stay_names(tmp_path: Path) -> None:
    """A function runs again when the program is given it."""
    model = layered()
    after = through_file(whence.capture(model, (X,), backward=sine), tmp_path)
    assert repr(after.loss_function) == "sine"
    with pytest.raises(CallError, match="sine cannot run"):
        after.verify(model, (X,))
    assert after.under(loss_function=sine).verify(model, (X,)).ok


def test_arguments_are_called_as_before(tmp_path: Path) -> None:
    """Defaults, keywords and structured results are those of the model."""
    after = through_file(program("constants"), tmp_path).module()
    before = program("constants").module(copy=True)
    assert same_results(after(X), before(X)) and same_results(after(X, factor=2.0), before(x=X))
    with pytest.raises(CallError, match="factor"):
        after(X, factor=3.0)


Pair = namedtuple("Pair", ["left", "right"])


class Checked(Pair):
    """A class above a named tuple, as `PackedSequence` is one, which looks at what it is made of."""

    def __new__(cls, left: Any, right: Any = None) -> Checked:
        """The second may be left out."""
        return super().__new__(cls, left, left if right is None else right)


@pytest.mark.parametrize("kind", [Pair, Checked])
def test_named_tuples(kind: Any, tmp_path: Path) -> None:
    """Their class has to be loaded, and is said by name where it is not."""

    def run(pair: Any) -> Any:
        return kind(pair.right * 2, [pair.left])

    before = whence.capture(run, (kind(X, X + 1),))
    after = through_file(before, tmp_path)
    say_the_same(before, after)
    found = after.module()(kind(X, X + 1))
    assert type(found) is kind and same_results(found, run(kind(X, X + 1)))

    def rename(other: str) -> bytes:
        text = members((tmp_path / "program.whence").read_bytes())["program.json"].decode()
        data = json.loads(text.replace(f"{__name__}:{kind.__name__}", other))
        return with_data((tmp_path / "program.whence").read_bytes(), lambda _: data)

    elsewhere = loaded(rename("somewhere:Pair"), "a file")
    with pytest.raises(UnreadableFile, match=r"container somewhere\.Pair\n.*no such named tuple"):
        elsewhere.module()(Pair(X, X + 1))
    with pytest.raises(UnreadableFile, match="is no named tuple"):
        loaded(rename("os:system"), "a file")


class Bounded(nn.Module):
    """Says how long what values decide is."""

    def forward(self, x: Tensor) -> Tensor:
        found = x.nonzero()
        torch._check(found.shape[0] >= 2)
        torch._check(found.shape[0] <= 5)
        return found


@pytest.mark.parametrize("read", [False, True])
def test_bounds_of_sizes(read: bool, tmp_path: Path) -> None:
    """Those of data, and those of PyTorch's own front end, which its programs call otherwise in each process:
    a table of shapes says them, an exported program has them, and calls are held to them."""
    sizes = ({0: torch.export.Dim("rows", min=3, max=50)},)
    x = torch.tensor([1.0, 0.0, 2.0, 3.0])
    exported = torch.export.export(Bounded(), (x,), dynamic_shapes=sizes)
    own = whence.capture(Bounded(), (x,), dynamic_shapes=sizes)
    before = whence.from_exported_program(exported) if read else own
    after = through_file(before, tmp_path)
    assert after.shapes.to_dict() == before.shapes.to_dict()
    assert _ranges(after) == _ranges(before) and (2, 5) in _ranges(after)
    for each in (before, after):
        with pytest.raises(CallError, match="at most 50"):
            each.module()(torch.ones(51))


class Counted(nn.Module):
    """Adds how many places are not zero: at most as many as two open sizes make."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.nonzero().shape[0]


def test_a_size_of_data_that_open_sizes_limit(tmp_path: Path) -> None:
    """Its limit is larger than any size, and no limit in a file."""
    x, sizes = torch.eye(3), ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    program = through_file(whence.capture(Counted(), (x,), dynamic_shapes=sizes), tmp_path)
    assert torch.equal(program.module()(torch.eye(5)), torch.eye(5) + 5)


def _ranges(program: whence.Program) -> list[tuple[Any, Any]]:
    """The least and the most that each symbol of a program can be."""
    sizes = [size for node in program.nodes() for size in getattr(node.meta.get("val"), "shape", ())]
    (environment,) = {size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)}
    ranges = environment.var_to_range.values()
    return sorted((whole_bound(each.lower), whole_bound(each.upper)) for each in ranges)


class Packed(nn.Linear):
    """Gives back what it is given: a named tuple with a class that somebody wrote above it."""

    def forward(self, packed: Any) -> Any:
        return packed._replace(data=super().forward(packed.data))


def test_packed_sequences(tmp_path: Path) -> None:
    """Sorted or not, they are arguments and results of what was loaded, with a model or without."""
    model, lengths = Packed(4, 4), torch.tensor([2, 3])
    packed = pack_padded_sequence(torch.randn(3, 2, 4), lengths, enforce_sorted=False)
    before = whence.capture(model, (packed,))
    for after in (through_file(before, tmp_path), through_file(before, tmp_path, model=model)):
        say_the_same(before, after)
        for run in (after.module(), after.unflatten()):
            found = run(packed)
            assert type(found) is PackedSequence and same_results(found, model(packed))
    assert after.verify(model, (packed,)).ok and after.check(model, (packed,)) == []


def test_named_containers(tmp_path: Path) -> None:
    """Dictionaries with an order, lists, empty containers and sizes among arguments and results."""

    def run(given: OrderedDict[str, Any], rows: list[Tensor]) -> dict[str, Any]:
        return {"a": [given["x"] + rows[0], ()], "b": {"size": given["x"].shape, "none": None}}

    args = (OrderedDict(x=X, y={}), [X])
    before = whence.capture(run, args)
    after = through_file(before, tmp_path)
    say_the_same(before, after)
    assert same_results(after.module()(*args), run(*args))


class Held:
    """What a container of one's own is made with."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Around:
    """A container whose context is a class."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


register_container(
    Around,
    lambda given: ([((GetAttrKey("inner"),), given.inner.value)], type(given.inner)),
    lambda leaves, kind: Around(kind(*leaves)),
)


class Surrounding(nn.Linear):
    """Returns such a container."""

    def forward(self, x: Tensor) -> Any:
        return Around(Held(super().forward(x)))


def test_classes_that_containers_are_made_with(tmp_path: Path) -> None:
    """Beside a model they are those that are imported; without one they stay names, and nothing is made."""
    model = Surrounding(4, 4)
    before = whence.capture(model, (X,))
    after = through_file(before, tmp_path, model=model)
    for run in (after.module(), after.unflatten()):
        found = run(X)
        assert type(found.inner) is Held and torch.equal(found.inner.value, model(X).inner.value)
    named_only = through_file(before, tmp_path)
    for run in (named_only.module(), named_only.unflatten()):
        with pytest.raises(
            UnreadableFile, match=r"container .*Around\n.* made with the class .*Held"
        ) as told:
            run(X)
        assert "model=" in str(told.value)


def test_containers_that_are_not_here(tmp_path: Path) -> None:
    """All can be looked at, and saved again; what makes one says which it is, and what helps."""
    before = whence.capture(Surrounding(4, 4), (X,))
    before.save(tmp_path / "here")
    elsewhere = with_data((tmp_path / "here").read_bytes(), _renamed(f"{__name__}:Around", "mine:Around"))
    after = loaded(elsewhere, "a file")
    assert "no run    nobody can make the container mine.Around: this process has no such" in str(after)
    assert str(after.report()) == str(before.report()) and not after.diff(before).rows
    assert torch.equal(after.run((X,), read="linear")["linear"], before.run((X,), read="linear")["linear"])
    for use in (lambda: after.module()(X), lambda: after.unflatten()(X), after.to_exported_program):
        with pytest.raises(UnreadableFile, match=r"nobody can make the container mine\.Around"):
            use()
    after.save(tmp_path / "again")
    again = with_data((tmp_path / "again").read_bytes(), _renamed("mine:Around", f"{__name__}:Around"))
    model = Surrounding(4, 4)
    assert type(loaded(again, "a file", model).module()(X)) is Around


def _renamed(name: str, other: str) -> Callable[[Any], Any]:
    return lambda data: json.loads(json.dumps(data).replace(name, other))


IN_ANOTHER_PROCESS = """
import sys, torch, whence
loaded = whence.load(sys.argv[1])
assert "transformers" not in sys.modules
print(loaded.unflatten()(torch.ones(3, 4)).double().sum().item())
"""


def test_another_process_computes_the_same(tmp_path: Path) -> None:
    """All that it takes is the file."""
    model = layered()
    whence.capture(model, (X,)).save(tmp_path / "p.whence")
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(tmp_path / "p.whence")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    here = whence.load(tmp_path / "p.whence").unflatten()(torch.ones(3, 4)).double().sum()
    assert float(done.stdout) == here.item()


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    """No such file, no such folder."""
    with pytest.raises(UsageError, match="cannot be read"):
        whence.load(tmp_path / "none.whence")
    with pytest.raises(UsageError, match="cannot be written"):
        program("forward").save(tmp_path / "no" / "p.whence")
