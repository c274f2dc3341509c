"""Programs become exported programs: PyTorch runs, saves, loads and decomposes them."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim
from torch.export.graph_signature import InputKind, OutputKind

import whence
from tests.checks import differing, same_bits
from tests.interop.helpers import exported, is_eager, loaded, program_of, run, unflattened
from tests.models import case

X = torch.arange(8.0).reshape(2, 4)
NAMES = ("bert", "llama", "tied_language_model", "running_statistics", "dict_to_dataclass", "unet")


class Mixed(nn.Module):
    """State of every kind, an input that is written, constants among the results."""

    count: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)
        self.other.weight = self.tied.weight
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.plain = torch.full((4,), 3.0)

    def forward(self, x: Tensor, flag: bool = True) -> tuple[Tensor, None, int]:
        self.count.add_(1)
        x.mul_(2)
        return self.other(self.tied(x)) + self.count + self.table + self.plain + torch.ones(4), None, 3


def runs_as_eager(module: nn.Module) -> None:
    """An exported module gives the model's bits; it calls constants buffers, and orders names by kind."""
    model = mixed()
    for _ in range(2):
        expected, found = run(model, (X,)), run(module, (X,))
        assert (
            differing(expected, {name: found[name] for name in expected} | {"names": expected["names"]}) == []
        )


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


@pytest.mark.parametrize("state", ["inputs", "attributes"])
def test_exported_program_runs(state: str) -> None:
    """`.module()` gives eager's bits, and writes what eager writes, from either view of the state."""
    program = whence.capture(mixed(), (X.clone(),), state=state).to_exported_program()
    runs_as_eager(program.module())


def test_exported_program_saves_and_loads() -> None:
    """It comes back from a file, runs, and reads as the same program."""
    captured = whence.capture(mixed(), (X.clone(),))
    again = loaded(captured.to_exported_program())
    is_eager(unflattened(again), mixed(), (X,))
    runs_as_eager(again.module())
    read = whence.from_exported_program(again)
    assert [row.path for row in read.signature.inputs] == [row.path for row in captured.signature.inputs]
    assert [str(call.site) for call in read.calls] == [str(call.site) for call in captured.calls]
    assert [str(node.target) for node in read.nodes()] == [str(node.target) for node in captured.nodes()]


def test_exported_program_decomposes() -> None:
    """`run_decompositions` takes it."""
    program = whence.capture(mixed(), (X.clone(),)).to_exported_program().run_decompositions({})
    is_eager(unflattened(program), mixed(), (X,))


def test_exported_program_is_unflattened_by_pytorch() -> None:
    """PyTorch's own unflatten reads its stacks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    tree = torch.export.unflatten(whence.capture(model, (X,)).to_exported_program())
    assert torch.equal(tree(X), model(X))
    assert list(tree.state_dict()) == list(model.state_dict())


def test_signature_is_in_the_words_of_pytorch() -> None:
    """Kinds, targets and persistence are those of torch.export."""
    program = whence.capture(mixed(), (X.clone(),)).to_exported_program()
    rows = {
        row.target: (row.kind, row.persistent) for row in program.graph_signature.input_specs if row.target
    }
    assert rows["tied.weight"] == (InputKind.PARAMETER, None)
    assert rows["count"] == (InputKind.BUFFER, True)
    assert rows["table"] == (InputKind.BUFFER, False)
    assert rows["plain"] == (InputKind.CONSTANT_TENSOR, None)
    outputs = [row.kind for row in program.graph_signature.output_specs]
    assert outputs[:2] == [OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION]
    assert program.state_dict["tied.weight"] is program.state_dict["other.weight"]


def test_rows_31_33_37_metadata_is_in_the_spelling_of_pytorch() -> None:
    """Stacks, traces and functions are written as torch.export writes them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    ours = whence.capture(model, (X,)).to_exported_program()
    theirs = exported(model, (X,))

    def stacks(program: torch.export.ExportedProgram) -> set[tuple[tuple[str, str], ...]]:
        nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        assert all("torch_fn" in node.meta and 'File "' in node.meta["stack_trace"] for node in nodes)
        assert not any("whence" in node.meta for node in nodes)
        found = (node.meta["nn_module_stack"].items() for node in nodes)
        return {tuple((key, entry[0]) for key, entry in stack) for stack in found}

    assert stacks(ours) == stacks(theirs)


def test_rows_38_39_stacks_of_a_program_that_was_read() -> None:
    """What an exported program said of classes, by their full names, it says again."""
    program = exported(nn.Sequential(nn.Linear(4, 4)), (X,))
    again = whence.from_exported_program(program).to_exported_program()
    node = next(node for node in again.graph.nodes if node.op == "call_function")
    assert node.meta["nn_module_stack"]["L__self__0"] == ("0", "torch.nn.modules.linear.Linear")


class Settings:
    """Holds how much."""

    def __init__(self) -> None:
        self.scale = 2.0


class WithSettings(nn.Module):
    """Reads an attribute of an object that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.settings = nn.Linear(4, 4), Settings()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.settings.scale


def test_the_class_of_the_root_is_that_of_the_model() -> None:
    """And not that of an object that the model reads."""
    back = whence.from_exported_program(whence.capture(WithSettings(), (X,)).to_exported_program())
    assert back.name == "WithSettings"
    assert isinstance(back.unflatten(onto=WithSettings()), WithSettings)


@pytest.mark.parametrize("name", NAMES)
def test_models_go_out_and_come_back(name: str) -> None:
    """Models of the table become exported programs, and come back, bit for bit."""
    row = case(name)
    model, args, kwargs = row.make()
    original = copy.deepcopy(model)
    program = whence.capture(model, args, kwargs).to_exported_program()
    outputs = []
    for module in (original, unflattened(program), program.module()):
        _, args, kwargs = row.make()
        torch.manual_seed(3)
        outputs.append(torch.utils._pytree.tree_leaves(module(*args, **kwargs)))
    for found in outputs[1:]:
        assert all(map(same_bits, outputs[0], found))


def test_open_sizes_go_out_again() -> None:
    """Open sizes stay open, with their limits."""
    rows = torch.export.Dim("rows", min=2, max=9)
    model = nn.Linear(4, 4)
    program = exported(model, (X,), dynamic_shapes={"input": {0: rows}})
    again = whence.from_exported_program(program).to_exported_program()
    assert torch.equal(again.module()(torch.ones(7, 4)), model(torch.ones(7, 4)))
    with pytest.raises(whence.CallError, match="is 10, and must be at most 9"):
        unflattened(loaded(again))(torch.ones(10, 4))


def test_compilers_take_it() -> None:
    """`.module()` checks its inputs, and values are in a mode that compilers run the real parameters in."""
    program = whence.capture(nn.Linear(4, 4), (X,)).to_exported_program()
    with pytest.raises(AssertionError, match="Guard failed"):
        program.module()(torch.ones(3, 4))
    modes = {
        id(node.meta["val"].fake_mode): node.meta["val"].fake_mode
        for node in program.graph.nodes
        if "val" in node.meta
    }
    (mode,) = modes.values()
    assert mode.allow_non_fake_inputs
    assert program.example_inputs is not None
    assert program.example_inputs[0][0].shape == X.shape


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_inductor_compiles_it_ahead_of_time() -> None:
    """AOTInductor makes a package of a captured program, which gives eager's numbers."""
    inductor: Any = pytest.importorskip("torch._inductor")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    path = inductor.aoti_compile_and_package(whence.capture(model, (X,)).to_exported_program())
    assert torch.allclose(inductor.aoti_load_package(path)(X), model(X))


@pytest.mark.sweep
def test_onnx_takes_it() -> None:
    """`torch.onnx.export` takes an exported program that was captured; needs onnxscript."""
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    onnx: Any = pytest.importorskip("onnx")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    file = io.BytesIO()
    made = torch.onnx.export(whence.capture(model, (X,)).to_exported_program(), dynamo=True, verbose=False)
    made.save(file)  # type: ignore[union-attr, arg-type]
    reference = onnx.reference.ReferenceEvaluator(onnx.load_from_string(file.getvalue()))
    (result,) = reference.run(None, {reference.input_names[0]: X.numpy()})
    assert torch.allclose(torch.from_numpy(result), model(X))


def test_joint_programs_do_not_go_out() -> None:
    """A joint program is refused, with the way to export its forward."""
    program = whence.capture(nn.Linear(4, 4), (X,), backward=True)
    with pytest.raises(whence.NotExportable, match="it holds a backward pass"):
        program.to_exported_program()


def test_inputs_that_are_one_tensor_do_not_go_out() -> None:
    """An exported program would not notice that two inputs are not one tensor any more."""
    program = whence.capture(torch.add, (X, X))
    with pytest.raises(whence.NotExportable, match=r"args\[0\] and args\[1\] are one tensor"):
        program.to_exported_program()


class Doubling(torch.autograd.Function):
    """A derivative of its own."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 3


class Averaging(nn.Module):
    """Doubles its argument, and keeps an average without gradients."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        y = Doubling.apply(x)
        with torch.no_grad():
            self.average.copy_(y.mean())
        return y


def test_derivatives_that_no_graph_has_are_warned_of() -> None:
    """An exported program differentiates the operators that it has; what it writes has no history."""
    model, x = Averaging(), X.clone().requires_grad_()
    program = whence.capture(model, (x,))
    with pytest.warns(UserWarning, match="no part of the custom autograd function Doubling in its backward"):
        exported = program.to_exported_program().module()
    assert same_bits(exported(x), model(x))
    assert not any(held.requires_grad for held in (*model.buffers(), *exported.buffers()))


def test_gradients_that_an_exported_program_cannot_say_are_warned_of() -> None:
    """Where an operation under no_grad passes its gradient on unchanged, a warning says that it will not."""

    class Clamps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            with torch.no_grad():
                y.clamp_(min=2)
            return y

    program = program_of(Clamps(), (X.clone().requires_grad_(),))
    with pytest.warns(UserWarning, match="no way to say that a gradient passes"):
        out = program.to_exported_program()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(out.module()(X), Clamps()(X))


class Halves(nn.Module):
    """Takes a size apart."""

    def forward(self, x: Tensor) -> Any:
        """Two groups of rows."""
        if x.shape[0] % 2:
            return x
        return x.reshape(2, -1, x.shape[1]).sum(0)


def test_sizes_that_vary_go_out_with_their_bounds() -> None:
    """And come back."""
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    program = whence.capture(model, (x,), dynamic_shapes=({0: Dim("rows", max=64)},))
    exported = program.to_exported_program()
    assert torch.equal(exported.module()(torch.ones(9, 8)), model(torch.ones(9, 8)))
    again = whence.from_exported_program(exported).module()
    assert torch.equal(again(torch.ones(64, 8)), model(torch.ones(64, 8)))
    with pytest.raises(whence.CallError, match="is 65, and must be at most 64"):
        again(torch.ones(65, 8))


class TwoInputs(nn.Module):
    """Rows in groups, of a batch that is handed over by name, and another size."""

    def forward(self, batch: dict[str, Tensor], **others: Any) -> Tensor:
        """The sum of both halves of the rows."""
        return Halves()(batch["x"]) + others["more"][0].sum()


def test_rules_of_sizes_are_checked_by_the_exported_program() -> None:
    """As PyTorch checks its own, loaded and decomposed, too."""
    model, x, y = TwoInputs(), torch.randn(4, 8), torch.randn(6)
    shapes = {"batch": {"x": {0: Dim.AUTO}}, "others": {"more": ({0: 2 * Dim("pairs", max=32)},)}}
    program = whence.capture(model, ({"x": x},), {"more": (y,)}, dynamic_shapes=shapes)
    exported = program.to_exported_program()
    torch.export.save(exported, buffer := io.BytesIO())
    buffer.seek(0)
    others = {"more": (torch.ones(8),)}
    for one in (exported, torch.export.load(buffer), exported.run_decompositions({})):
        run, even = one.module(), {"x": torch.randn(6, 8)}
        assert torch.equal(run(even, **others), model(even, **others))
        with pytest.raises(AssertionError, match=r"Guard failed: batch\['x'\].size\(\)\[0\] % 2 == 0"):
            run({"x": torch.randn(5, 8)}, **others)


def test_attention_of_open_sizes_goes_out() -> None:
    """What a kernel decided about sizes is spelled as PyTorch reads it; a flag beside them is no size."""
    model, x = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval(), torch.randn(3, 5, 16)
    shapes = {"src": {0: Dim.AUTO, 1: Dim.AUTO}, "is_causal": None}
    program = whence.capture(model, (x,), {"is_causal": False}, dynamic_shapes=shapes)
    exported = program.to_exported_program()
    other = torch.randn(2, 7, 16)
    for one in (exported, exported.run_decompositions({})):
        found = one.module()(other, is_causal=False)
        assert torch.equal(found, program.module()(other, is_causal=False))


def test_a_mode_that_the_model_asks_for_is_said() -> None:
    """Nothing of an exported program looks at it, as nothing of PyTorch's does."""

    def asking(x: Tensor) -> Tensor:
        return x * 2 if torch.is_inference_mode_enabled() else x * 3

    with pytest.warns(UserWarning, match=r"the inference mode, for which the model asks \(.*test_export\.py"):
        exported = whence.capture(asking, (torch.ones(2),)).to_exported_program()
    assert torch.equal(exported.module()(torch.ones(2)), torch.full((2,), 3.0))


class Branching(nn.Module):
    """A branch, and a loop of unknown length."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        taken = torch.cond(x.sum() > 0, lambda x: self.linear(x).sin(), self.linear, (x,))
        _, looped = while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y.cos()), (torch.tensor(0), taken))
        result: Tensor = looped
        return result


@pytest.mark.sample(1)
@pytest.mark.parametrize("strict", [False, True])
def test_branches_and_loops_go_out(strict: bool) -> None:
    """Also from inside a module: into PyTorch's modules, and decomposed."""
    model, x = nn.Sequential(nn.Linear(8, 8), Branching()).requires_grad_(False), torch.randn(4, 8)
    exported = whence.capture(model, (x,), strict=strict).to_exported_program()
    assert torch.equal(torch.export.unflatten(exported)(x), model(x))
    assert torch.equal(exported.run_decompositions({}).module()(x), model(x))


class Counting(nn.Module):
    """Counts its calls; two ways to be called."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor, flip: bool = False) -> Tensor:
        """With or without a flip."""
        self.count.add_(1)
        hidden: Tensor = self.linear(x) * self.count
        return hidden.flip(0) if flip else hidden


class CountingTwice(nn.Module):
    """Calls it in both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        return self.inner(self.inner(x), flip=True)


@pytest.mark.parametrize("strict", [False, True])
def test_two_ways_to_call_a_module_go_out(strict: bool) -> None:
    """A class is called by one name at all operations, as PyTorch's own reader wants it."""
    model, x = CountingTwice(), torch.randn(4, 8)
    exported = whence.capture(model, (x,), strict=strict).to_exported_program()
    tree = torch.export.unflatten(exported)
    assert torch.equal(tree(x), copy.deepcopy(model)(x))


class Aside(nn.Module):
    """A parameter that no module has, and a value without strides on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.aside = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Tensor:
        """Rows added to the first one."""
        rows = torch.zeros(2, x.shape[0], dtype=torch.int64)
        rows[1] = torch.arange(x.shape[0])
        size = (2, x.shape[0])
        sparse = torch.sparse_coo_tensor(rows, torch.ones(size[1]), size, check_invariants=False)
        return torch.sparse.mm(sparse, self.aside[0](self.linear(x)))


def test_what_torch_export_takes_goes_out() -> None:
    """Parameters that nobody registered are constants there, and sparse values stay sparse."""
    model, x = Aside(), torch.randn(3, 4)
    program = whence.capture(model, (x,)).to_exported_program()
    assert torch.equal(program.module()(x), model(x))
    assert torch.equal(program.run_decompositions({}).module()(x), model(x))


def test_a_parameter_that_is_written_is_told_of() -> None:
    """PyTorch writes it when it has run, and not where gradients are on: the warning says so."""
    model, ids = nn.Embedding(5, 4, max_norm=1.0), torch.tensor([[1, 2]])
    with pytest.warns(UserWarning, match=r"PyTorch writes weight .* under torch.no_grad\(\) alone"):
        exported = whence.capture(model, (ids,)).to_exported_program()
    with torch.no_grad():
        assert torch.equal(exported.module()(ids), model(ids))


def test_what_pytorch_refuses_is_named() -> None:
    """An operator without an overload, as passes may write it: PyTorch's exported programs have none."""
    program = whence.capture(nn.ReLU(), (X,))
    with program.track("any relu") as edit:
        edit.node("relu").target = torch.ops.aten.relu
    assert torch.equal(edit.program.module()(X), X)
    with pytest.raises(
        whence.WhenceError, match=r"takes the graph of ReLU for no exported program.*aten\.relu"
    ):
        edit.program.to_exported_program()
