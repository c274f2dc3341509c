"""Modules that make their parameters in their first call: rows 80 to 87."""

from queue import SimpleQueue
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import taken
from tests.upstream.checks import equal, faithful, names

X = torch.randn(3, 5)


class LazyScale(LazyModuleMixin, nn.Module):
    """Scales by a weight of the size of its input, and stays of its class."""

    weight: Any

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.UninitializedParameter()

    def initialize_parameters(self, x: Tensor) -> None:
        if not self.has_uninitialized_params():
            return
        with torch.no_grad():
            self.weight.materialize(x.shape[-1:])
            self.weight.uniform_()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def initialised_alike(model: nn.Module, other: nn.Module, *args: Any, **kwargs: Any) -> whence.Program:
    """The program of `model`, which must have come to be what an eager call makes of `other`."""
    torch.manual_seed(5)
    program = faithful(model, *args, **kwargs)
    torch.manual_seed(5)
    other(*args, **kwargs)
    assert [type(module) for module in model.modules()] == [type(module) for module in other.modules()]
    state, expected = model.state_dict(), other.state_dict()
    assert list(state) == list(expected)
    assert [
        name
        for name in state
        if "num_batches" not in name
        and "running" not in name
        and not torch.equal(state[name], expected[name])
    ] == []
    assert not any(module._forward_pre_hooks for module in model.modules())
    return program


def test_row_80_lazy_modules_become_what_they_are() -> None:
    """A capture makes real parameters in the order of the calls, and every class becomes the final one."""

    def make() -> nn.Module:
        return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))

    model = make()
    program = initialised_alike(model, make(), torch.randn(2, 3, 8, 8))
    assert [type(module) for module in model.children()] == [nn.Conv2d, nn.BatchNorm2d, nn.Flatten, nn.Linear]
    assert names(program, "parameter")[:2] == ["p_0_weight", "p_0_bias"]
    assert [call.site.type for call in program.calls][1:] == ["Conv2d", "BatchNorm2d", "Flatten", "Linear"]
    assert torch.equal(model[1].running_mean, torch.zeros(4))  # type: ignore[index]


class Pair(NamedTuple):
    """Two tensors."""

    left: Tensor
    right: Tensor


class LazyTree(LazyModuleMixin, nn.Module):
    """Makes a lazy submodule and a plain one in its initialisation, from inputs in containers."""

    weight: Any

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.UninitializedParameter()

    def initialize_parameters(self, items: list[Tensor], pair: Pair, *, scale: Tensor) -> None:
        if not self.has_uninitialized_params():
            return
        self.weight.materialize((items[0].shape[-1], pair.left.shape[-1]))
        nn.init.uniform_(self.weight)
        self.inner = nn.LazyLinear(4)
        self.plain = nn.Linear(4, scale.shape[-1])

    def forward(self, items: list[Tensor], pair: Pair, *, scale: Tensor) -> Tensor:
        inner: Any = self.inner
        plain: Any = self.plain
        return plain(inner(items[0] @ self.weight + pair.left * pair.right)) * scale


def test_row_81_lists_tuples_keywords_and_submodules() -> None:
    """`initialize_parameters` gets its inputs in their containers, and may make lazy submodules."""
    args = ([X, X + 1], Pair(torch.randn(3, 6), torch.randn(3, 6)))
    model = LazyTree()
    program = initialised_alike(model, LazyTree(), *args, scale=torch.randn(2))
    assert [row.path for row in program.signature.inputs if row.kind == "parameter"] == [
        "weight",
        "inner.weight",
        "inner.bias",
        "plain.weight",
        "plain.bias",
    ]
    assert type(model.inner) is nn.Linear


def test_row_82_class_stays_where_none_is_named() -> None:
    """Without `cls_to_become` the class stays, also where a subclass extends the initialisation."""

    class Shifted(LazyScale):
        shift: Any

        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.UninitializedBuffer()

        def initialize_parameters(self, x: Tensor) -> None:
            super().initialize_parameters(x)
            if nn.parameter.is_lazy(self.shift):
                self.shift.materialize(x.shape[-1:])
                self.shift.fill_(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.shift

    model = nn.Sequential(Shifted(), LazyScale())
    program = initialised_alike(model, nn.Sequential(Shifted(), LazyScale()), X)
    assert [type(module) for module in model] == [Shifted, LazyScale]
    assert names(program, "buffer") == ["b_0_shift"]


def test_row_83_errors_of_the_initialisation_are_the_users() -> None:
    """What `initialize_parameters` raises arrives as it is; the rest of the model is untouched."""

    class Failing(LazyScale):
        def initialize_parameters(self, x: Tensor) -> None:
            raise AttributeError("no such attribute")

    model: Any = nn.Sequential(nn.Linear(5, 5), Failing())
    with pytest.raises(AttributeError, match="no such attribute"):
        whence.capture(model, (X,))
    assert nn.parameter.is_lazy(model[1].weight)
    assert list(vars(model[1])["_forward_pre_hooks"].values()) == [model[1]._infer_parameters]
    with pytest.raises(AttributeError, match="no such attribute"):
        model(X)


def test_row_84_everything_is_initialised_in_one_run() -> None:
    """Each module is initialised once, and the model's real computation is not run for it."""
    noted = SimpleQueue[str]()  # a list would be as before after the capture

    class Counting(LazyScale):
        def initialize_parameters(self, x: Tensor) -> None:
            noted.put(f"initialised with {type(x).__name__}")
            super().initialize_parameters(x)

        def forward(self, x: Tensor) -> Tensor:
            noted.put(f"run on {type(x).__name__}")
            return super().forward(x)

    model = nn.Sequential(Counting(), Counting())
    whence.capture(model, (X,))
    calls = taken(noted)
    assert [call for call in calls if call.startswith("init")] == ["initialised with Tensor"] * 2
    assert [call for call in calls if call.startswith("run")] == ["run on Tensor"] * 4
    whence.capture(model, (X,))
    assert len(calls) + len(taken(noted)) == 8


@pytest.mark.parametrize("size", [1, 4, 7])
def test_row_85_sizes_come_from_the_example(size: int) -> None:
    """Whatever sizes the example has are those of the parameters."""
    model = nn.LazyLinear(2)
    program = faithful(model, torch.randn(2, size))
    assert model.in_features == size
    assert program.input("weight").value.shape == (2, size)


def test_row_86_lazy_module_with_its_own_getattr() -> None:
    """A lazy module may look attributes up in its own way."""

    class Delegating(LazyScale):
        def __init__(self) -> None:
            super().__init__()
            self.settings = {"factor": 3}

        def __getattr__(self, name: str) -> Any:
            if name != "settings" and name in vars(self).get("settings", {}):
                return self.settings[name]
            return super().__getattr__(name)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    model = nn.Sequential(Delegating())
    initialised_alike(model, nn.Sequential(Delegating()), X)


def test_row_87_lazy_module_with_keywords_only() -> None:
    """A lazy module called with keywords alone is initialised from them."""

    class Keywords(LazyScale):
        def initialize_parameters(self, *, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
            super().initialize_parameters(x + y)

        def forward(self, *, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + y

    initialised_alike(Keywords(), Keywords(), x=X, y=X + 1)


def test_lazy_model_in_other_hands() -> None:
    """A method, a function and a compiled module of lazy modules are initialised, too."""
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    program = whence.capture(lambda x: model(x) + 1, (X,))
    assert equal(program.module()(X), model(X) + 1)
    other = nn.Sequential(nn.LazyLinear(4))
    compiled: Any = torch.compile(other, backend="eager")
    assert whence.capture(compiled, (X,)).verify(other, (X,)).ok


def test_lazy_modules_behind_others() -> None:
    """A lazy module in a checkpoint, behind `torch.compile` and after a hook sees what eager's would see."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LazyLinear(4)
            self.compiled: Any = torch.compile(nn.LazyLinear(3), backend="eager")
            self.inner.register_forward_pre_hook(lambda module, args: (args[0][:, :2],), prepend=True)

        def forward(self, x: Tensor) -> Any:
            return self.compiled(checkpoint(self.inner, x, use_reentrant=False))

    model = Behind()
    program = whence.capture(model, (X,), backward=True)
    assert program.verify(model, (X,)).ok
    assert model.inner.weight.shape == (4, 2)
    assert [row.path for row in program.signature.inputs if row.kind == "parameter"] == [
        *("inner.weight", "inner.bias", "compiled.weight", "compiled.bias")
    ]


def test_loaded_lazy_module_becomes_its_class() -> None:
    """A lazy module whose state was loaded, and that was never called, keeps what was loaded."""
    model, trained = nn.LazyLinear(4), nn.Linear(5, 4)
    model.load_state_dict(trained.state_dict())
    program = faithful(model, X)
    assert type(model) is nn.Linear
    assert equal(program.module()(X), trained(X))


def test_generator_moves_by_the_initialisation_alone() -> None:
    """Afterwards the generator is where initialising left it: dropout draws nothing in the rehearsal."""
    torch.manual_seed(0)
    nn.Linear(5, 4)
    expected = torch.rand(1)
    torch.manual_seed(0)
    whence.capture(nn.Sequential(nn.Dropout(), nn.LazyLinear(4), nn.Dropout()), (X,))
    assert torch.equal(torch.rand(1), expected)


def test_initialisation_from_values_is_refused() -> None:
    """Parameters computed from the values of the inputs would be wrong, so they are refused by name."""

    class Normalising(LazyScale):
        def initialize_parameters(self, x: Tensor) -> None:
            super().initialize_parameters(x)
            with torch.no_grad():
                self.weight.copy_(1 / x.std(0))

    model = nn.Sequential(Normalising())
    with pytest.raises(whence.CaptureError, match="weight of Normalising depend on the values") as caught:
        whence.capture(model, (X,))
    assert "call the model once" in caught.value.remedy
    expected = X * (1 / X.std(0))
    assert torch.equal(model(X), expected)
    assert torch.equal(faithful(model, X).module()(X), expected)


def test_failure_after_the_initialisation_leaves_the_rest() -> None:
    """When the model fails later, lazy modules stay initialised and everything else is as before."""

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyLinear(4)
            self.seen = 0

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            x = self.lazy(x)
            raise RuntimeError("later")

    model: Any = Failing()
    with pytest.raises(RuntimeError, match="later"):
        whence.capture(model, (X,))
    assert model.seen == 0
    assert model.lazy.weight.shape == (4, 5)
    assert type(model.lazy.weight) is nn.Parameter
