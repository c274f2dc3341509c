import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whence
from tests import zoo
from tests.checks import leaves_no_trace
from tests.models import case, mean_sine
from tests.tracing.steps.small import zero_first
from tests.tracing.writing import sines
from whence._torch.fakes import FakeTensorMode
from whence._torch.observe.hooks import hooks_on_gradient
from whence.errors import UsageError

X = torch.randn(2, 3, zoo.WIDTH)


class Asking(nn.Module):
    """Computes something else when it is being compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(zoo.WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self.layer(x) * 2
        return self.layer(x) if x.isfinite().all() else x


def kinds(result: whence.Verification) -> set[str]:
    return {row.kind for row in result.rows}


def unequal(result: whence.Verification) -> list[str]:
    return [row.name for row in result.rows if not row.equal]


def broken(model: nn.Module, operation: Any, other: Any, *args: Any, **options: Any) -> whence.Program:
    """The program of a model, one of its operations replaced by another."""
    program = whence.capture(model, args, **options)
    (node, *_) = [node for node in program.nodes() if node.target is operation]
    node.target = other
    return program


def test_equal_program_is_ok() -> None:
    """A program that computes eager's bits is ok, and every comparison is listed."""
    model = zoo.Mlp()
    result = whence.capture(model, (X,), backward=True).verify(model, (X,))
    assert result.ok
    assert unequal(result) == []
    assert result.divergence is None


def test_everything_is_compared() -> None:
    """Outputs, gradients of parameters and inputs, state, inputs and the generator have rows of their own."""
    model, x = zoo.InplaceActivations().train(), torch.randn(2, 3, 8, 8, requires_grad=True)
    result = whence.capture(model, (x,), backward=sines).verify(model, (x,))
    names = {row.name for row in result.rows}
    assert {"loss", "output", "stem.0.weight", "stem.1.running_mean", "args[0]"} <= names
    assert {"output", "gradient", "input", "generator"} <= kinds(result)


def test_wrong_output_is_found() -> None:
    """One wrong operation makes the output differ, and the verification is not ok."""
    model = zoo.Mlp()
    program = broken(model, torch.ops.aten.gelu.default, torch.ops.aten.relu.default, X)
    result = program.verify(model, (X,))
    assert not result.ok
    assert "output" in unequal(result)
    assert result.rows[0].difference > 0  # type: ignore[operator]


def test_wrong_gradient_is_found() -> None:
    """One wrong operation in the backward leaves the output and makes gradients differ."""
    model = zoo.Mlp()
    aten = torch.ops.aten
    program = whence.capture(model, (X,), backward=sines)
    (node, *_) = program.select(":: aten.cos :: backward")
    node.target = aten.sin.default
    result = program.verify(model, (X,))
    assert not result.ok
    assert "output" not in unequal(result)
    assert "up.weight" in unequal(result)


def test_divergence_names_the_module() -> None:
    """The first module whose result differs is named with its class and the line of its operation."""
    model = nn.Sequential(zoo.Mlp(), zoo.Mlp())
    program = whence.capture(model, (X,))
    (node,) = program.select("1.up :: aten.linear")
    node.args = node.args[:2]
    divergence = program.verify(model, (X,)).divergence
    assert divergence is not None
    assert divergence.startswith("1.up (Linear)")


def test_calls_are_compared() -> None:
    """What each returns has a row of its own, in the order in which they end."""
    model = nn.Sequential(zoo.Mlp(), zoo.Mlp())
    program = whence.capture(model, (X,))
    equal = program.verify(model, (X,), by="call")
    calls = [row.name for row in equal.rows if row.kind == "call"]
    assert equal.ok and calls[0] == "0.norm (LayerNorm)" and calls[-1] == "(root) (Sequential)"
    assert "call" not in kinds(program.verify(model, (X,)))
    (node,) = program.select("1.up :: aten.linear")
    node.args = node.args[:2]
    found = [row for row in program.verify(model, (X,), by="call").rows if row.kind == "call"]
    names = [row.name.partition(" ")[0] for row in found if not row.equal]
    assert (
        names[0] == "1.up"
        and set(names) <= {"1", "1.up", "1.dropout", "1.down", "(root)"}
        and not found[-1].equal
    )
    assert "Mlp.forward" in next(row.note for row in found if not row.equal)
    with pytest.raises(whence.UsageError, match='by="call"'):
        program.verify(model, (X,), by="node")


class Checkpointed(nn.Module):
    """Computes a part once more in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = zoo.Mlp(), nn.Sequential(nn.Linear(zoo.WIDTH, 4), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.second, self.first(x), use_reentrant=False)
        return found


class Ranked(nn.Module):
    """Returns three values, of which others read the last first, and one not at all."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.sin(), x[0].cos(), x.mean(-1)


class ReadsTwo(nn.Module):
    """Reads the last and the first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Ranked()

    def forward(self, x: Tensor) -> Tensor:
        first, _, last = self.inner(x)
        return last.exp()[..., None] + first


def test_results_of_calls_in_an_exported_program_are_known_by_their_values() -> None:
    """Of which of a call's results a value is the graph does not say; a wrong one is found."""
    model = ReadsTwo()
    program = whence.from_exported_program(torch.export.export(model, (X,), strict=False))
    assert program.verify(model, (X,), by="call").ok
    with program.track("wrong") as edit:
        (sine,) = edit.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        sine.target = torch.ops.aten.tanh.default
    found = edit.program.verify(model, (X,), by="call")
    assert not found.ok
    assert found.divergence is not None
    assert found.divergence.startswith("inner (Ranked)")


def test_calls_of_a_step_are_compared() -> None:
    """Also where a model runs twice and a checkpoint runs modules again; the first that differs is named."""
    model = Checkpointed()
    optimizer = torch.optim.Adam(model.parameters())

    def step(x: Tensor) -> None:
        for part in x.chunk(2):
            model(part).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    equal = program.verify(model, (X,), by="call")
    calls = [row.name.partition(" ")[0] for row in equal.rows if row.kind == "call"]
    assert equal.ok and len(calls) == 2 * 9
    assert calls[8:10] == ["(root)", "first.norm@1"] and calls[-3:] == ["second.1@1", "second@1", "@1"]
    node = program.select("second.0@1 :: aten.addmm :: forward")[0]
    node.kwargs = {"alpha": 2}  # which the gradient of a sum does not see
    program.graph_module.recompile()
    assert program.verify(model, (X,)).ok
    found = program.verify(model, (X,), by="call")
    assert not found.ok
    assert found.divergence is not None and found.divergence.startswith("second.0@1 (Linear)")
    assert "first module that differs: second.0@1" in str(found)


@pytest.mark.parametrize("backward", [True, mean_sine], ids=["tangents", "loss"])
def test_gradients_at_the_borders_of_calls_are_compared(backward: Any) -> None:
    """In the order of the backward; the first call that makes another gradient of an equal one is named."""
    model = nn.Sequential(zoo.Mlp(), zoo.Mlp())
    program = whence.capture(model, (X,), backward=backward)
    equal = program.verify(model, (X,), by="call")
    rows = {kind: [row.name for row in equal.rows if row.kind == kind] for kind in ("call", "backward")}
    assert equal.ok and set(rows["backward"]) == set(rows["call"])
    first = ["1 (Mlp)", "(root) (Sequential)", "1.down (Linear)", "1.dropout (Dropout)"]
    assert rows["backward"][:4] == first
    assert rows["backward"][-1] == "0.norm (LayerNorm)"
    assert "backward" not in kinds(program.verify(model, (X,)))
    node = program.select("0.** :: aten.gelu_backward :: backward")[0]
    node.kwargs = {"approximate": "tanh"}
    program.graph_module.recompile()
    found = program.verify(model, (X,), by="call")
    wrong = [row.name.partition(" ")[0] for row in found.rows if row.kind == "backward" and not row.equal]
    assert not found.ok and wrong == ["0.up", "0.norm"]
    assert found.divergence is not None and found.divergence.startswith("0 (Mlp), at ")
    assert all(row.equal for row in found.rows if row.kind == "call")


class Turned(nn.Module):
    """Hands on what its first module returns in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.act(self.up(x).transpose(0, 1))
        return found + x.transpose(0, 1)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.GELU()), Turned])
def test_the_call_whose_backward_differs_is_named(make: Any) -> None:
    """As `first` names it beside the program before a pass, and not the one that gets its gradient.

    Also where the caller changes the value between both.
    """
    model = nn.Sequential(make(), make())
    program = whence.capture(model, (X,), backward=mean_sine)
    with program.track("wrong") as edit:
        node = edit.node(program.select("1.** :: aten.gelu_backward :: backward")[0].name)
        node.kwargs = {"approximate": "tanh"}
    wrong: whence.Program = edit.program
    first = wrong.first((X,), differs_from=program)
    assert first is not None and first.node == node.name
    (call,) = first.origin.calls
    found = wrong.verify(model, (X,), by="call")
    assert found.divergence == f"{call} (GELU), at {first.origin.source}"
    assert found.divergence == wrong.verify(model, (X,)).divergence
    rows = [row for row in found.rows if row.kind == "backward" and not row.equal]
    assert rows and {row.differs_in for row in rows} == {found.divergence}


@pytest.mark.parametrize("takes_a_step", [False, True], ids=["joint", "step"])
def test_the_call_whose_parameter_gets_another_gradient_is_named(takes_a_step: bool) -> None:
    """Where no call returns or hands on anything else; in a step the optimizer is no cause."""
    model: Any = nn.Sequential(zoo.Mlp(), zoo.Mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> None:
        mean_sine(model(x)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    if takes_a_step:
        program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    else:
        program = whence.capture(model, (X,), backward=mean_sine)
    with program.track("wrong") as edit:
        node = edit.node(program.select("1.up :: aten.sum.dim_IntList :: backward")[0].name)
        node.target = torch.ops.aten.mean.dim
    for found in (edit.program.verify(model, (X,)), edit.program.verify(model, (X,), by="call")):
        assert found.divergence is not None and found.divergence.startswith("1.up (Linear), at ")
        assert hooks_on_gradient(model[1].up.bias) == ()
    wrong = [row.name for row in found.rows if row.kind in ("gradient", "call", "backward") and not row.equal]
    assert wrong == ["1.up.bias"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["llama", "resnet", "gru", "checkpoint", "albert", "custom_function"])
@pytest.mark.parametrize("joint", ["tangents", "loss"])
def test_gradients_of_calls_of_models_are_equal(name: str, joint: str) -> None:
    """Of loops, tied weights, checkpoints and functions with gradients of their own, too."""
    found = case(name)
    model, args, kwargs = found.make()
    program = whence.capture(model, args, kwargs, backward=found.loss if joint == "loss" else True)
    result = program.verify(model, args, kwargs, by="call")
    assert result.ok and kinds(result) >= {"call", "backward"}


class Hooked(nn.Module):
    """Changes the gradient of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(zoo.WIDTH, zoo.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lin(x)
        found.register_hook(lambda gradient: gradient * 2)
        return found


def doubled(_module: nn.Module, gradients: Any) -> Any:
    """A hook that changes what a module is handed in the backward."""
    return tuple(gradient * 2 for gradient in gradients)


def test_gradients_that_hooks_change_are_no_alarm() -> None:
    """What arrives behind a hook of the model's own is not what a program holds before it: not compared."""
    model = nn.Sequential(Hooked(), nn.Identity(), nn.Linear(zoo.WIDTH, 4))
    model[2].register_full_backward_pre_hook(doubled)
    program = whence.capture(model, (X,), backward=True)
    result = program.verify(model, (X,), by="call")
    compared = [row.name.partition(" ")[0] for row in result.rows if row.kind == "backward"]
    assert result.ok and compared == ["2", "(root)", "0.lin"]


def test_gradients_of_calls_of_a_step_are_compared() -> None:
    """Those of every backward of the step."""
    model = nn.Sequential(zoo.Mlp(), nn.Linear(zoo.WIDTH, 4))
    optimizer = torch.optim.SGD(model.parameters())

    def step(x: Tensor) -> None:
        for part in x.chunk(2):
            model(part).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    rows = [row for row in program.verify(model, (X,), by="call").rows if row.kind == "backward"]
    assert all(row.equal for row in rows)
    assert [row.name.partition(" ")[0] for row in rows][:4] == ["1", "(root)", "0", "0.down"]
    assert len(rows) == len(program.calls)
    gradients = [node["origin"]["gradient"] for node in program.to_dict()["nodes"]]
    assert {program.node(name).name for name in gradients if name} >= {"mul", "mul_1"}


def test_close_is_never_equal() -> None:
    """A last bit is within a tolerance, and `ok` says that it differs."""
    model = zoo.Mlp()
    program = whence.capture(model, (X,))
    with program.track("rounded") as edit:
        (node,) = edit.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
        node.kwargs = {"approximate": "tanh"}
    found = edit.program.verify(model, (X,), atol=1e-2)
    assert found.close and not found.ok and found.to_dict()["close"] is True
    assert "all within 0.01" in str(found) and str(found).endswith("NOT bitwise equal to eager")
    assert edit.program.verify(model, (X,), atol=1e-12).close is False
    assert edit.program.verify(model, (X,)).close is None
    assert program.verify(model, (X,), atol=0.0).close and program.verify(model, (X,), atol=0.0).ok


@pytest.mark.parametrize("atol", [float("nan"), float("inf"), -1e-3])
def test_what_is_no_distance(atol: float) -> None:
    """Nothing is within it, or everything: no answer would mean anything."""
    model = zoo.Mlp()
    with pytest.raises(UsageError, match=f"atol={atol} is no distance"):
        whence.capture(model, (X,)).verify(model, (X,), atol=atol)


def test_other_weights_are_compared() -> None:
    """A program is verified against another instance by that instance's own weights."""
    model, other = zoo.Mlp(), zoo.Mlp()
    assert whence.capture(model, (X,), backward=True).verify(other, (X,)).ok


def test_other_inputs_are_compared() -> None:
    """Inputs other than the example's are compared on."""
    model = zoo.Mlp()
    assert whence.capture(model, (X,), backward=True).verify(model, (X.cos(),)).ok


def test_model_that_asks_is_explained() -> None:
    """Where a model does something else when compiled, the result is not ok, but explained, with the line."""
    model = Asking()
    result = whence.capture(model, (X,), backward=True).verify(model, (X,))
    assert not result.ok
    assert result.explained
    assert len(result.asked) == 1
    assert "Asking.forward" in result.asked[0]


def test_difference_of_a_model_that_asks_is_not_always_explained() -> None:
    """A wrong program of a model that asks stays unexplained."""
    model = Asking()
    program = broken(model, torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor, X)
    result = program.verify(model, (X,))
    assert not result.ok
    assert not result.explained


def test_text_gives_counts_and_a_verdict() -> None:
    """Printed, a verification counts per kind and ends in a verdict."""
    model = zoo.Mlp()
    lines = str(whence.capture(model, (X,), backward=True).verify(model, (X,))).splitlines()
    assert any(line.startswith("gradient") and "6 of 6 bitwise equal" in line for line in lines)
    assert "bitwise equal to eager" in lines[-1]


def test_text_of_a_difference() -> None:
    """Printed, a difference says what differs, by how much, in which module, and the verdict is plain."""
    model = zoo.Mlp()
    program = broken(model, torch.ops.aten.gelu.default, torch.ops.aten.relu.default, X)
    text = str(program.verify(model, (X,)))
    assert "output output differs by at most" in text
    assert "first module that differs:" in text
    assert text.endswith("NOT bitwise equal to eager")


def test_plain_data() -> None:
    """`to_dict` is plain data that says the same."""
    model = zoo.Mlp()
    data = whence.capture(model, (X,)).verify(model, (X,)).to_dict()
    assert data["ok"] is True
    assert {"kind", "name", "equal"} <= set(data["rows"][0])


def test_nan_equals_nan() -> None:
    """Results that are NaN in both are equal."""

    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 0 * 0

    model = Nothing()
    assert whence.capture(model, (X,)).verify(model, (X,)).ok


class Returning(nn.Module):
    """Writes to its buffer, its input, and returns both."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.table.add_(1)
        x.mul_(2)
        return self.table, x


def test_returned_state_is_compared_as_it_was_returned() -> None:
    """A model that returns its own buffer or input is compared by what it returned."""
    model = Returning()
    result = whence.capture(model, (torch.ones(3),)).verify(model, (torch.ones(3),))
    assert result.ok, str(result)


def test_output_in_another_layout() -> None:
    """A model whose output is no contiguous tensor is verified like any other."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(zoo.WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).transpose(1, 2)

    model = Turned()
    assert whence.capture(model, (X,), backward=True).verify(model, (X,)).ok


def test_size_among_the_inputs() -> None:
    """A `torch.Size` among the inputs is no other structure in the second run."""

    class Reshaping(nn.Module):
        def forward(self, x: Tensor, size: torch.Size) -> Tensor:
            return x.view(size)

    model, args = Reshaping(), (X, torch.Size([-1]))
    assert whence.capture(model, args).verify(model, args).ok


def requiring(m: Any, x: Tensor) -> None:
    m.table.requires_grad_()


def freezing(m: Any, x: Tensor) -> None:
    m.layer.weight.requires_grad_(False)


def nothing(m: Any, x: Tensor) -> None:
    pass


def adding(m: Any, x: Tensor) -> None:
    m.table = m.table + 1


@pytest.mark.parametrize("body", [nothing, requiring, freezing, adding], ids=lambda body: body.__name__)
def test_verify_leaves_no_trace(body: Any) -> None:
    """Verifying leaves hooks, attributes, flags, gradients, values and seeds as they were."""

    class Changing(nn.Module):
        table: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(zoo.WIDTH, 4)
            self.register_buffer("table", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            body(self, x)
            return self.layer(x) + self.table

    model = Changing()
    model.layer.weight.grad = torch.ones(4, zoo.WIDTH)
    program = whence.capture(model, (X,))
    with leaves_no_trace(model):
        program.verify(model, (X,))


class Unreparametrised(nn.Module):
    """Writes to what autograd has kept for the backward, as samplers do that work in place."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.exp()
        return kept.mul_(2) + kept


def test_forward_without_a_backward() -> None:
    """Where eager's backward fails, a forward is compared without one, and a wrong result is found."""
    model = nn.Sequential(nn.Linear(zoo.WIDTH, 4), Unreparametrised())
    program = whence.capture(model, (X,))
    result = program.verify(model, (X,))
    assert result.ok and "gradient" not in kinds(result)
    (node,) = program.select(":: aten.exp")
    node.target = torch.ops.aten.exp2.default
    assert not program.verify(model, (X,)).ok


def test_model_that_fails_leaves_no_trace() -> None:
    """When the model itself fails while it is verified, its state and the seeds are as before."""
    model = nn.Sequential(nn.Linear(zoo.WIDTH, 4), nn.Dropout(0.3))
    program = whence.capture(model, (X,), backward=True)

    def fail(*_: Any) -> None:
        raise RuntimeError("not again")

    model[1].register_forward_hook(fail)
    model[0].weight.grad = torch.ones(4, zoo.WIDTH)
    with leaves_no_trace(model), pytest.raises(RuntimeError, match="not again"):
        program.verify(model, (X,))


def test_meta_model_cannot_be_verified() -> None:
    """A model without numbers cannot be compared, which is said, and nothing around it changes."""
    model, x = nn.Linear(4, 4, device="meta"), torch.randn(2, 4, device="meta")
    program = whence.capture(model, (x,), backward=True)
    generator, python = torch.get_rng_state(), random.getstate()
    with pytest.raises(whence.WhenceError):
        program.verify(model, (x,))
    assert torch.equal(torch.get_rng_state(), generator)
    assert random.getstate() == python
    assert model.weight.grad is None


def test_parameter_made_in_forward_is_refused() -> None:
    """A parameter that the model makes while it runs is new state, and refused with its line."""

    class Growing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.ones(()))
            return x * self.scale

    model = Growing()
    with pytest.raises(whence.CaptureError, match=r"Parameter scale .*verify.py:\d+") as caught:
        whence.capture(model, (X,))
    assert "in __init__" in caught.value.remedy
    assert not hasattr(model, "scale")
    model(X)
    assert whence.capture(model, (X,)).verify(model, (X,)).ok


@pytest.mark.parametrize("name", ["dict_to_dataclass", "aliased_outputs", "variational", "cached_attention"])
def test_rows_are_named_as_the_outputs(name: str) -> None:
    """The output rows carry the names of the signature's outputs."""
    row = case(name)
    model, args, kwargs = row.make()
    program = whence.capture(model, args, kwargs)
    expected = [output.name for output in program.signature.outputs if output.kind is whence.OutputKind.USER]
    found = [entry.name for entry in program.verify(model, args, kwargs).rows if entry.kind == "output"]
    assert found == expected


def test_tensors_from_outside_that_are_written_are_as_before() -> None:
    """Each run starts from what they were, and afterwards they are that again."""
    total = torch.zeros(3)

    class Adding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total.add_(x)
            return total * 2

    model, x = Adding(), torch.ones(3)
    program = whence.capture(model, (x,))
    assert program.verify(model, (x,)).ok
    assert torch.equal(total, torch.zeros(3))


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_small_complex_numbers_are_compared() -> None:
    """PyTorch itself has no comparison for them."""
    x = torch.randn(3, dtype=torch.complex64)
    program = whence.capture(lambda x: x.to(torch.complex32), (x,))
    assert program.verify(lambda x: x.to(torch.complex32), (x,)).ok
    assert not program.verify(lambda x: (x * 2).to(torch.complex32), (x,)).ok


def _by_strides(x: Tensor) -> Tensor:
    return x * (2 if x.stride(0) == 0 else 3) + x.stride(1)


@pytest.mark.parametrize("x", [torch.ones(1, 4).expand(3, 4), torch.ones(6, 8)[::2, ::2], torch.ones(4, 3).T])
def test_arguments_keep_their_layout(x: Tensor) -> None:
    """Every run has copies with the strides of the arguments."""
    program = whence.capture(_by_strides, (x,))
    assert program.verify(_by_strides, (x,)).ok


class Parts(nn.Module):
    """Looks at the parts of complex numbers."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.real, x.imag * 2, x.mT.real, torch.view_as_real(x.resolve_conj()) * 2


Z = torch.randn(3, 4, dtype=torch.complex64)


@pytest.mark.parametrize(
    "given",
    [Z, Z.conj(), Z.conj()[:, ::2], Z.conj().expand(2, 3, 4)],
    ids=["plain", "conjugate", "with gaps", "expanded"],
)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "tangents"])
def test_conjugate_arguments(given: Tensor, backward: bool) -> None:
    """Eager and the program run on copies that stand for a conjugate as the arguments do."""
    x = given.detach().requires_grad_(backward)
    program = whence.capture(Parts(), (x,), backward=backward)
    assert program.verify(Parts(), (x,)).ok
    other = given.resolve_conj() if given.is_conj() else given.conj()
    assert "args[0].is_conj" in [violation.guard.what for violation in program.check(Parts(), (other,))]


@pytest.mark.parametrize("given", [Z.conj().imag, Z.conj().imag[:, ::2]], ids=["negative", "with gaps"])
def test_negative_arguments(given: Tensor) -> None:
    """So are those that stand for the negative of what lies in memory."""
    program = whence.capture(nn.Softplus(), (given,))
    assert given.is_neg()
    assert program.verify(nn.Softplus(), (given,)).ok


SEEN: list[int] = []


class Seen:
    """Counts in itself, in a variable of the file, and in a list of somebody's."""

    def __init__(self) -> None:
        self.calls = 0
        self.last: dict[str, int] = {}

    def __call__(self, _module: nn.Module, _args: Any, _result: Tensor) -> None:
        self.calls += 1
        self.last["calls"] = self.calls
        SEEN.append(self.calls)


def test_verify_gives_back_what_hooks_change() -> None:
    """A list of the file, a list around a hook, an object that is one: all is as it was."""
    model, seen, log = nn.Sequential(nn.Linear(3, 2)), Seen(), list[int]()
    model[0].register_forward_hook(seen)
    model[0].register_forward_hook(lambda *_: log.append(1))
    program = whence.capture(model, (torch.ones(1, 3),))
    assert program.verify(model, (torch.ones(1, 3),)).ok
    assert (SEEN, log, seen.calls, seen.last) == ([], [], 0, {})


class Freezing(nn.Module):
    """Freezes a parameter when it runs, for good."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Any:
        self.scale.requires_grad_(False)
        return self.linear(x) * self.scale


def test_a_parameter_that_is_frozen_in_the_run_has_no_gradient() -> None:
    """Neither in eager nor in the program, which is no difference."""
    model = Freezing()
    program = whence.capture(model, (torch.ones(1, 3),), backward=torch.sum)
    result = program.verify(model, (torch.ones(1, 3),))
    assert result.ok, str(result)


@pytest.mark.parametrize("place", [torch.device("meta"), FakeTensorMode()])
def test_shapes_alone_are_not_compared(place: Any) -> None:
    """A model that has no numbers is captured, and verify says that there are none."""
    with place:
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = zero_first(model, optimizer)
    program = whence.capture(model, (x,))
    with pytest.raises(UsageError, match="weight, bias, an argument has a shape and no numbers"):
        program.verify(model, (x,))
    program = whence.capture_step(step, (x,), model=model, optimizer=optimizer)
    assert [row.name for row in program.signature.inputs if "momentum_buffer" in row.name] != []
    with pytest.raises(UsageError, match="weight, bias, an argument has a shape and no numbers"):
        program.verify(model, (x,), optimizer=optimizer)
