"""`program.run` gives what eager computes on the way, and computes with what takes its place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.models import case, logits_loss
from tests.program.small import Stack, sine_loss

X = torch.randn(3, 4)


def hooked(model: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
    """What a module returned in a run of eager."""
    kept: list[Any] = []
    handle = model.get_submodule(path).register_forward_hook(lambda *given: kept.append(given[-1]))
    model(*args, **kwargs)
    handle.remove()
    return kept[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("joint", [False, True], ids=["forward", "joint"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_calls_of_transformers_return_what_eager_computes(name: str, joint: bool) -> None:
    """Of every call that returns one tensor; outputs are those of the model."""
    model, args, kwargs = case(name).make()
    program = whence.capture(model, args, kwargs, backward=logits_loss if joint else False)
    paths = [str(call.site) for call in program.calls if call.outputs and len(call.outputs.leaves) == 1][:12]
    values = program.run(args, kwargs, read=paths)
    for path in paths:
        expected = hooked(model, path, args, kwargs)
        if isinstance(expected, Tensor):
            assert torch.equal(values[path], expected), path
    assert repr(values) == f"<{len(program.signature.outputs):,} outputs, {len(paths)} read>"


class Recurrent(nn.Module):
    """A composite with one kernel where gradients are wanted and another elsewhere, in two grad modes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(50, 32), nn.LSTM(32, 48, 2), nn.Linear(48, 50)
        self.always = nn.LSTM(50, 48)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.lstm(self.embed(x))[0])
        with torch.enable_grad():
            return hidden + self.always(hidden)[0].mean()


def _t5() -> Any:
    model, args, kwargs = case("t5").make()
    return model.eval(), args, kwargs


def _recurrent() -> Any:
    return Recurrent(), (torch.randint(0, 50, (20, 4)),), {}


@pytest.mark.parametrize("records", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("make", [_t5, _recurrent])
def test_composites_choose_the_kernels_of_eager(make: Any, records: bool) -> None:
    """By the grad mode of the run and by what requires a gradient; what is handed out holds on to nothing."""
    torch.manual_seed(0)
    model, args, kwargs = make()
    program = whence.capture(model, args, kwargs)
    before = {name: held._version for name, held in model.named_parameters()}
    with torch.set_grad_enabled(records):
        calls = [call for call in program.calls if call.outputs and len(call.outputs.leaves) == 1]
        paths = [path for call in calls if (path := str(call.site)) in dict(model.named_modules())]
        values = program.run(args, kwargs, read=paths)
        expected = {path: hooked(model, path, args, kwargs) for path in paths}
        found = {path: value for path, value in expected.items() if isinstance(values.read[path], Tensor)}
        assert found and not [path for path in found if not torch.equal(values[path], found[path])]
        assert program.verify(model, args, kwargs, by="call").ok
        assert program.first(args, kwargs, differs_from=program) is None
    handed = [*values.outputs.values(), *(values[path] for path in found)]
    assert not any(value.requires_grad for value in handed if isinstance(value, Tensor))
    assert all(held.grad is None and held._version == before[n] for n, held in model.named_parameters())


def test_gradients_are_outputs_and_are_read_by_pattern() -> None:
    """With a loss, and with tangents, which are one everywhere unless they are given."""
    model = Stack()
    program = whence.capture(model, (X,), backward=sine_loss)
    values = program.run((X,), read="layers.1.** :: backward")
    sine_loss(model(X)).backward()
    for name, held in model.named_parameters():
        row = next(row for row in program.signature.outputs if row.path == name)
        assert held.grad is not None and torch.equal(values.outputs[row.name], held.grad), name
    assert set(values["layers.1.** :: backward"]) == {
        node.name for node in program.select("layers.1.** :: backward")
    }
    tangents = whence.capture(model, (X,), backward=True)
    (tangent,) = tangents.signature.inputs_of(whence.InputKind.TANGENT)
    ones = tangents.run((X,)).outputs
    given = tangents.run((X,), inputs={tangent.name: torch.ones_like(model(X))}).outputs
    halves = tangents.run((X,), inputs={tangent.path: torch.full_like(model(X), 0.5)}).outputs
    weight = next(name for name in ones if "head_weight" in name)
    assert torch.equal(ones[weight], given[weight]) and torch.equal(ones[weight] / 2, halves[weight])


@pytest.mark.parametrize("joint", [False, True], ids=["forward", "joint"])
def test_patched_call_is_a_hook_of_eager(joint: bool) -> None:
    """Everything behind it is computed from the new value, also gradients of what follows."""
    model = Stack()
    program = whence.capture(model, (X,), backward=sine_loss if joint else False)
    found = program.run((X,), patch={"layers.0.mlp": lambda value: value * 2}).outputs
    model.get_submodule("layers.0.mlp").register_forward_hook(lambda _module, _args, value: value * 2)
    result = model(X)
    (row,) = program.signature.outputs_of(whence.OutputKind.USER)
    assert torch.equal(found[row.name], result)
    if joint:
        sine_loss(result).backward()
        name = next(name for name in found if "head_weight" in name)
        gradient = model.get_parameter("head.weight").grad
        assert gradient is not None and torch.equal(found[name], gradient)


def test_node_is_read_and_patched_by_itself_and_by_name() -> None:
    """A tensor, or a function of what was there."""
    program = whence.capture(lambda x: x.sin().cos(), (X,))
    node = program.node("sin")
    assert torch.equal(program.run((X,), read=node)[node], X.sin())
    assert torch.equal(
        program.run((X,), read=["sin"], patch={node: torch.zeros(3, 4)})["sin"], torch.zeros(3, 4)
    )
    (result,) = program.run((X,), patch={"sin": torch.neg}).outputs.values()
    assert torch.equal(result, (-X.sin()).cos())


def test_state_stays_and_may_be_given() -> None:
    """Counters do not count; another weight takes the place of the captured one."""
    linear = nn.Linear(4, 4)
    model = nn.Sequential(linear, nn.BatchNorm1d(4)).train()
    program = whence.capture(model, (X,))
    before = {name: held.clone() for name, held in model.state_dict().items()}
    program.run((X,))
    assert all(torch.equal(held, before[name]) for name, held in model.state_dict().items())
    values = program.run((X,), read="0", inputs={"0.weight": torch.zeros(4, 4)})
    assert torch.equal(values["0"], linear.bias.expand(3, 4))


def test_second_call_of_a_module() -> None:
    """Calls are told apart by their numbers."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.lin(self.lin(x).relu())
            return result

    model = Twice()
    program = whence.capture(model, (X,))
    calls = list(program.calls)
    values = program.run((X,), read=["lin@0", "lin@1", "lin", "type=Linear", calls[1], calls[2].site])
    first, second = model.lin(X), model(X)
    assert torch.equal(values["lin@0"], first) and torch.equal(values[calls[1]], first)
    assert torch.equal(values["lin@1"], second) and torch.equal(values[calls[2].site], second)
    for key in ("lin", "type=Linear"):
        assert [*values[key]] == ["lin", "lin@1"]
        assert torch.equal(values[key]["lin"], first) and torch.equal(values[key]["lin@1"], second)


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("layers.0.*lp", ["layers.0.mlp"]),
        ("type=ReLU", ["layers.0.mlp.1", "layers.1.mlp.1"]),
        ("*.*@0", ["layers.0", "layers.1"]),
    ],
)
def test_patterns_of_calls_read_and_patch_all_of_them(key: str, names: list[str]) -> None:
    """In a dictionary by call, however many fit; a patch is as a hook on each in eager."""
    model = Stack()
    program = whence.capture(model, (X,), backward=sine_loss)
    values = program.run((X,), read=key)[key]
    assert [*values] == names
    assert all(torch.equal(values[name], hooked(model, name, (X,), {})) for name in names)
    found = program.run((X,), patch={key: lambda value: value * 2}).outputs
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda _module, _args, value: value * 2)
    (row,) = program.signature.outputs_of(whence.OutputKind.USER)
    assert torch.equal(found[row.name], model(X))


def test_patterns_of_operations_are_patched() -> None:
    """Each operation by itself."""
    program = whence.capture(lambda x: x.relu().sin().relu(), (X,))
    (result,) = program.run((X,), patch={"** :: aten.relu": torch.neg}).outputs.values()
    assert torch.equal(result, -(-X.relu()).sin().relu())


def test_what_does_not_fit_is_named() -> None:
    """Names that are not there, other arguments, values that are missing, and patches of another shape."""
    program = whence.capture(Stack(), (X,))
    with pytest.raises(whence.CallError):
        program.run((X, X))
    with pytest.raises(whence.UsageError, match=r"gives f32\[1\], and there was f32\[3, 4\]"):
        program.run((X,), patch={"relu": torch.zeros(1)})
    with pytest.raises(whence.UsageError, match=r"gives f32\[1\], and there was f32"):
        program.run((X,), patch={"** :: aten.relu": torch.zeros(1)})
    with pytest.raises(whence.SelectionError):
        program.run((X,), inputs={"nowhere": X})
    wrong: Any = 3
    for given in ({"read": wrong}, {"read": [wrong]}, {"patch": {wrong: X}}):
        with pytest.raises(whence.UsageError, match="nothing is found under 3, of the class int"):
            program.run((X,), **given)


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("layers.9", "there are layers.1, layers.0"),
        ("relv", "there are relu"),
        ("Layers.*", "there are layers"),
        ("**.9", "no call fits"),
        ("** :: aten.rely", "aten.relu.default"),
        ("head :: backward", "found only in forward"),
        ("type=Liner", "there are Linear"),
        ("loss=1", "no operation is annotated with loss"),
        ("kind=tangent", "there are parameter, user"),
        ("head@3", "the calls are head alone"),
    ],
)
def test_what_nothing_is_called_is_an_error(key: str, near: str) -> None:
    """Reading and patching are never silently empty: the error says what there is."""
    program = whence.capture(Stack(), (X,))
    for options in ({"read": key}, {"read": ["head", key]}, {"patch": {key: torch.neg}}):
        with pytest.raises(whence.SelectionError, match=re.escape(near)):
            program.run((X,), **options)
    with pytest.raises(whence.SelectionError, match="there are none"):
        whence.capture(torch.relu, (X,)).run((X,), read="layers.*")


def test_state_of_an_optimizer_has_to_be_given() -> None:
    """A step's program holds the model's tensors, and not the optimizer's."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(X)
    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    rows = program.signature.inputs_of(whence.InputKind.OPTIMIZER_STATE)
    with pytest.raises(whence.UsageError, match="no value is given for optimizer"):
        program.run((X,))
    given = {r.path: torch.zeros(1, 4) if isinstance(r.value, Tensor) else 0.5 for r in rows}
    given |= {r.path: torch.zeros(1) for r in rows if r.of == "bias"}
    outputs = program.run((X,), inputs=given).outputs
    (new,) = [row for row in program.signature.outputs if row.path == "weight" and row.kind == "mutation"]
    expected = model.weight - 0.5 * torch.ones(3, 1).T @ X
    assert torch.allclose(outputs[new.name], expected)  # one step of SGD, added up in another order


def test_what_runs_in_a_branch_is_no_value_of_the_program() -> None:
    """A pattern that finds nothing else is an error, as such a call is, and not an empty answer."""

    def either(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    program = whence.capture(either, (X,))
    assert program.select("** :: aten.sin")
    with pytest.raises(whence.SelectionError, match="inside a branch"):
        program.run((X,), read=["** :: aten.sin"])
