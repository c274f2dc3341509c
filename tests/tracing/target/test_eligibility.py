"""Kinds of modules that no row of upstream's covers: wrappers, parametrizations, modules made in forward."""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

import whence
from tests import zoo
from tests.checks import leaves_no_trace
from tests.models import case
from tests.tracing.steps.small import zero_first
from tests.upstream.checks import call_sites, equal, faithful, hooks, names, trains_alike

X = torch.randn(3, 4)


def compiled(module: Any, **options: Any) -> Any:
    """What `torch.compile` makes of it, with a backend that raises when anything is compiled."""
    return torch.compile(module, backend=refuse, **options)


def refuse(graph: Any, inputs: Any) -> Any:
    raise AssertionError("something was compiled")


# --- compiled ----------------------------------------------------------------------------------------


class Parts(nn.Module):
    """A model whose parts are compiled in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.one = compiled(nn.Linear(4, 4))
        self.two = nn.Linear(4, 4)
        self.two.compile(backend=refuse)
        self.three = compiled(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), fullgraph=True)
        self.function = compiled(torch.sin, fullgraph=True)

    def forward(self, x: Tensor) -> Any:
        x = self.two(self.one(x)) * self.one.weight.sum()
        return self.function(self.three(x)) + self.three.get_submodule("0")(x)


class Uncompiled(nn.Module):
    """The same without compiling."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.three = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        x = self.two(self.one(x)) * self.one.weight.sum()
        return torch.sin(self.three(x)) + self.three.get_submodule("0")(x)


def test_compiled_parts_are_seen_through() -> None:
    """Compiled submodules, methods and functions run as written, under the user's own names."""
    model, plain = Parts(), Uncompiled()
    program, expected = whence.capture(model, (X,), backward=True), whence.capture(plain, (X,), backward=True)
    assert [str(call) for call in program.calls][1:] == [str(call) for call in expected.calls][1:]
    assert str(program.signature) == str(expected.signature)
    assert list(program.unflatten().state_dict()) == list(plain.state_dict())
    assert not any("_orig_mod" in row.path for row in program.signature.inputs)
    plain.load_state_dict(program.module().state_dict())
    assert equal(program.module()(X), plain(X))
    assert equal(program.unflatten()(X), plain(X))
    trains_alike(expected, plain, X)
    assert program.verify(model, (X,)).ok


def test_compiled_root_is_seen_through() -> None:
    """A compiled model is captured as the model it was made from, and left as it was."""
    original = zoo.Mlp()
    model, x = compiled(original), torch.randn(2, 3, zoo.WIDTH)
    with leaves_no_trace(original):
        program = whence.capture(model, (x,), backward=True)
    assert str(program.signature) == str(whence.capture(original, (x,), backward=True).signature)
    assert call_sites(program)[:2] == ["", "norm"]
    assert program.verify(model, (x,)).ok
    assert program.verify(original, (x,)).ok
    original.compile(backend=refuse)
    assert call_sites(whence.capture(original, (x,), backward=True)) == call_sites(program)


def test_compiled_layers_of_a_transformer() -> None:
    """A language model whose layers are compiled one by one has the graph and the names of the plain one."""
    model, args, kwargs = case("llama").make()
    plain = whence.capture(model, args, kwargs, backward=True)
    layers: Any = model.get_submodule("model.layers")
    for index, layer in enumerate(layers):
        layers[index] = compiled(layer)
    program = whence.capture(model, args, kwargs, backward=True)
    assert call_sites(program) == call_sites(plain)
    assert [node.name for node in program.graph.nodes] == [node.name for node in plain.graph.nodes]
    assert program.verify(model, args, kwargs).ok


def test_hooks_of_a_compiled_part_run() -> None:
    """A hook that was put on the wrapper runs around the module inside; on the root it is refused."""
    part = compiled(nn.Linear(4, 4))
    part.register_forward_hook(lambda module, args, output: output + 1)
    model = nn.Sequential(part)
    program = whence.capture(model, (X,), backward=True)
    assert program.verify(model, (X,)).ok
    assert hooks(program) == ["<lambda>"]
    with pytest.raises(whence.UnsupportedHook, match="hooks on OptimizedModule") as caught:
        whence.capture(part, (X,))
    assert "_orig_mod" in caught.value.remedy


def test_code_kept_from_the_compiler() -> None:
    """What `torch._dynamo.disable` keeps from the compiler is captured as any code."""
    disable: Any = torch.compiler.disable
    model = nn.Sequential(disable(nn.Linear(4, 4)), nn.Tanh())
    program = whence.capture(model, (X,), backward=True)
    assert call_sites(program) == ["", "0", "1"]
    assert program.verify(model, (X,)).ok


# --- data parallel -----------------------------------------------------------------------------------


def test_data_parallel_model_is_seen_through(group: None) -> None:
    """A DDP model is captured as the model inside: its names have no `module.` before them."""
    inner: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = DistributedDataParallel(inner)
    with leaves_no_trace(inner):
        program = whence.capture(model, (X,), backward=True)
    assert call_sites(program) == ["", "0", "1"]
    assert str(program.signature) == str(whence.capture(inner, (X,), backward=True).signature)
    assert program.verify(model, (X,)).ok
    assert program.verify(inner, (X,)).ok
    (program.unflatten()(X) * X).sum().backward()  # the sum alone of what is normalised is a constant
    gradient = inner[0].weight.grad
    assert gradient is not None
    assert not torch.equal(gradient, torch.zeros(4, 4))


def test_data_parallel_part_is_seen_through(group: None) -> None:
    """A DDP module inside a model is known by its own name, whichever way it is reached."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part: Any = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4)))

        def forward(self, x: Tensor) -> Any:
            return self.part(x) * self.part.module[0](x)

    model = Outer()
    program = whence.capture(model, (X,), backward=True)
    assert call_sites(program) == ["", "part", "part.0", "part.0@1"]
    assert names(program, "parameter") == ["p_part_0_weight", "p_part_0_bias"]
    assert program.verify(model, (X,)).ok


def test_other_data_parallel_is_seen_through() -> None:
    """`nn.DataParallel` is seen through, too."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inner, x = nn.Sequential(nn.Linear(4, 4)).to(device), X.to(device)
    program = whence.capture(nn.DataParallel(inner), (x,), backward=True)
    assert call_sites(program) == ["", "0"]
    assert program.verify(inner, (x,)).ok


def test_averaged_gradients_are_refused(group_of_two: None) -> None:
    """Gradients that several processes average are no part of a program: refused, with all such modules."""
    model = nn.Sequential(DistributedDataParallel(nn.Linear(4, 4)), DistributedDataParallel(nn.Linear(4, 4)))
    with pytest.raises(whence.CaptureError) as caught:
        whence.capture(model, (X,), backward=True)
    assert "0 (DistributedDataParallel) over 2 processes, 1 (Dist" in caught.value.what
    assert "model.module" in caught.value.remedy
    with pytest.raises(whence.CaptureError, match=r"\(root\)"):
        whence.capture(next(model.children()), (X,), backward=lambda output: output.sum())
    assert call_sites(whence.capture(model, (X,))) == ["", "0", "1"]


# --- distributed, quantised --------------------------------------------------------------------------


def test_distributed_parameters_need_distributed_inputs(group: None) -> None:
    """What eager refuses, a capture refuses in eager's words."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1,))
    for layer in (model[0], model[1]):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh))
    assert isinstance(model[0].weight, DTensor)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        whence.capture(model, (X,))


@pytest.mark.filterwarnings("ignore")
def test_packed_weights_are_refused_by_name() -> None:
    """Every quantised module that keeps its weight in the form of a backend is named."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(whence.UnsupportedInput) as caught:
        whence.capture(model, (X,))
    for path in ("0._packed_params._packed_params", "2._packed_params._packed_params"):
        assert f"{path} is a packed quantised weight" in caught.value.what
    assert "before it is quantised" in caught.value.remedy


class WithSparse(nn.Module):
    """Whisper's way: places of heads that the forward does not read, or reads at the end."""

    def __init__(self, read: Callable[[Any], Any] = lambda _: None, *, persistent: bool = False) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(4, 4), read
        self.register_buffer("heads", torch.eye(4).to_sparse(), persistent=persistent)
        self.places = torch.eye(4).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.layer(x)
        self.read(self)
        return hidden


@pytest.mark.parametrize("backward", [False, True])
def test_sparse_tensors_that_nobody_reads(backward: bool) -> None:
    """They are no inputs, and the model has them afterwards; `bind` and a file do without them, too."""
    model = WithSparse()
    heads = model.heads
    program = faithful(model, X, backward=backward)
    assert [row.path for row in program.signature.state] == ["layer.weight", "layer.bias"]
    assert model.heads is heads
    assert not program.check(model, (X,))


def test_step_of_a_model_with_a_sparse_buffer() -> None:
    """As eager's."""
    model = WithSparse()
    optimizer = torch.optim.Adam(model.parameters())
    step = zero_first(model, optimizer)
    program = whence.capture_step(step, (X,), model=model, optimizer=optimizer)
    assert program.verify(model, (X,)).ok
    program.bind(model, optimizer)(X)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("heads", lambda model: model.heads.to_dense()),
        ("heads", lambda model: next(model.buffers()).to_dense()),
        ("heads", lambda model: model.heads is None),
        ("places", lambda model: model.places.to_dense()),
    ],
    ids=["buffer", "among buffers", "whether it is there", "attribute"],
)
def test_sparse_tensors_that_are_read(name: str, read: Callable[[Any], Any]) -> None:
    """They are named, with the line; and those in checkpoints are refused at once."""
    with pytest.raises(whence.UnsupportedInput, match=f"{name} is a sparse_coo tensor") as caught:
        whence.capture(WithSparse(read), (X,))
    assert "test_eligibility.py" in str(caught.value.where)
    with pytest.raises(whence.UnsupportedInput, match="heads is a sparse_coo tensor"):
        whence.capture(WithSparse(persistent=True), (X,))


# --- parametrizations --------------------------------------------------------------------------------


class Antisymmetric(nn.Module):
    """A matrix minus its transpose."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu(1) - weight.triu(1).T


def parametrized() -> Any:
    """A layer with a computed weight."""
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Antisymmetric())
    return layer


class Cached(nn.Module):
    """Computes the weight once for two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = parametrized()

    def forward(self, x: Tensor) -> Any:
        with parametrize.cached():
            return self.layer(self.layer(x))


def test_parametrized_weight() -> None:
    """A computed weight is computed in the graph, by a call of the module that computes it."""
    model = nn.Sequential(parametrized(), nn.ReLU())
    program = faithful(model, X)
    trains_alike(program, model, X)
    assert names(program, "parameter") == ["p_0_bias", "p_0_parametrizations_weight_original"]
    inside = ["0.parametrizations.weight", "0.parametrizations.weight.0"]
    assert call_sites(program) == ["", "0", *inside, "1"]


def test_cached_parametrization() -> None:
    """Inside `cached()` the weight is computed once, as in eager, and the cache is empty afterwards."""
    model = Cached()
    program = faithful(model, X)
    assert len([site for site in call_sites(program) if "parametrizations.weight.0" in site]) == 1
    assert not parametrize._cache


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_norms_as_parametrizations(wrap: Any) -> None:
    """Weight norm and spectral norm of today are parametrizations with buffers."""
    model = nn.Sequential(wrap(nn.Linear(4, 4)), nn.ReLU())
    program = faithful(model, X)
    assert "p_0_parametrizations_weight_original" in " ".join(names(program, "parameter"))


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm"])
def test_norms_as_hooks(wrap: str) -> None:
    """Those of old are hooks that set the weight in every run: in the graph, no leak, named as hooks."""
    model = nn.Sequential(getattr(nn.utils, wrap)(nn.Linear(4, 4)), nn.ReLU())
    with leaves_no_trace(model):
        program = whence.capture(model, (X,), backward=True)
    assert hooks(program) == ["__call__"]
    assert program.verify(model, (X,)).ok


# --- forwards of their own ---------------------------------------------------------------------------


def test_forward_of_an_instance() -> None:
    """A forward that was set on the instance is what is captured: a function, a method, a partial."""

    def scaled(module: nn.Linear, x: Tensor, factor: int) -> Tensor:
        return nn.functional.linear(x, module.weight) * factor

    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    original = model[0].forward
    model[0].forward = lambda x: original(x) + 1
    model[1].forward = types.MethodType(functools.partial(scaled, factor=3), model[1])
    model[2].forward = functools.partial(scaled, model[2], factor=5)
    program = whence.capture(model, (X,), backward=True)
    assert program.verify(model, (X,)).ok
    assert call_sites(program) == ["", "0", "1", "2"]
    assert equal(program.module()(X), model(X))
    assert equal(program.unflatten()(X), model(X))


class Encoding(nn.Module):
    """A model used through its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def encode(self, x: Tensor) -> Any:
        return self.up(x)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.encode(x))


def test_method_of_a_compiled_or_a_part() -> None:
    """A bound method is captured with the names of its owner, also when the owner is compiled."""
    model = Encoding()
    for method in (model.encode, compiled(model).encode):
        program = whence.capture(method, (X,), backward=True)
        assert call_sites(program) == ["up"]
        assert program.verify(model.encode, (X,)).ok
        assert equal(program.module()(X), model.encode(X))


class Applying(nn.Module):
    """Runs the module it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, module: Any) -> Any:
        return module(self.layer(x))


def test_module_as_an_argument() -> None:
    """A module given as an argument is a constant of the call; its tensors are constants of the program."""
    model: Any = Applying()
    given = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    program = whence.capture(model, (X, given), backward=True)
    assert program.verify(model, (X, given)).ok
    assert [program.state[name] for name in names(program, "constant")] == list(given.parameters())
    assert equal(program.module()(X, given), model(X, given))
    assert equal(program.unflatten()(X, given), model(X, given))


def test_own_module_as_an_argument() -> None:
    """A submodule given as an argument keeps its name."""
    model = Applying()
    program = whence.capture(model, (X, model.layer), backward=True)
    assert call_sites(program) == ["", "layer", "layer@1"]
    assert names(program, "constant") == []
    assert program.verify(model, (X, model.layer)).ok


# --- made while it runs ------------------------------------------------------------------------------


class Making(nn.Module):
    """Makes modules while it runs, and keeps them or not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.made = nn.ModuleList()

    def forward(self, x: Tensor) -> Any:
        if self.kind == "passing":
            scale = nn.Linear(4, 4, bias=False)
            return x * nn.init.ones_(scale.weight).sum()
        if self.kind == "stateless":
            self.activation = nn.Tanh()
            return self.activation(x)
        if not len(self.made):
            self.made.append(nn.Linear(4, 4))
        return self.made[0](x)


@pytest.mark.parametrize("kind", ["passing", "stateless"])
def test_harmless_new_modules(kind: str) -> None:
    """A module that is made and thrown away, or that has no state, changes nothing: allowed."""
    model = Making(kind)
    with leaves_no_trace(model):
        program = whence.capture(model, (X,))
    assert program.verify(model, (X,)).ok
    assert call_sites(program) == [""]


def test_new_state_is_refused() -> None:
    """A module with parameters that is made in the run and kept would be lost: refused with its line."""
    model = Making("kept")
    line = Making.forward.__code__.co_firstlineno + 8
    with leaves_no_trace(model), pytest.raises(whence.CaptureError) as caught:
        whence.capture(model, (X,))
    assert f"makes Linear made.0 ({__file__}:{line} in Making.forward)" in caught.value.what
    assert "call the model once" in caught.value.remedy
    model(X)
    assert whence.capture(model, (X,), backward=True).verify(model, (X,)).ok


@pytest.mark.filterwarnings("ignore:Counting kept tensors:UserWarning")
def test_new_buffer_that_later_calls_change_is_refused() -> None:
    """A buffer that the first call makes and every call advances is state that a program would not keep."""

    class Counting(nn.Module):
        def forward(self, x: Tensor) -> Any:
            if not hasattr(self, "count"):
                self.register_buffer("count", torch.zeros(()))
            self.get_buffer("count").add_(1)
            return x * self.get_buffer("count")

    model = Counting()
    with pytest.raises(whence.LostState, match="Counting changes count while it runs"):
        whence.capture(model, (X,))
    assert not hasattr(model, "count")
    model(X)
    assert whence.capture(model, (X,)).verify(model, (X,)).ok


def test_new_buffer_is_reported() -> None:
    """A buffer that is registered in the run is removed again, and the warning says where it came from."""

    class Filling(nn.Module):
        def forward(self, x: Tensor) -> Any:
            self.register_buffer("positions", torch.arange(4.0))
            return x + self.get_buffer("positions")

    model = Filling()
    with pytest.warns(UserWarning, match=r"positions \(.*test_eligibility.py:\d+ in"):
        whence.capture(model, (X,))
    assert not hasattr(model, "positions")
