"""What modules hold and how it is reached: rows 49 to 56, 64 to 67 and 69 to 71, without guards."""

from collections import OrderedDict
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import whence
from tests.checks import leaves_no_trace
from tests.upstream.checks import equal, faithful, names, operations
from tests.upstream.modules import Block

X = torch.randn(3, 4)


def test_row_49_parameters_and_buffers_of_both_kinds() -> None:
    """A buffer that is not persistent is no part of the state dict, and is a buffer all the same."""

    class Kinds(nn.Module):
        kept: Tensor
        loose: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))
            self.register_buffer("kept", torch.randn(4))
            self.register_buffer("loose", torch.randn(4), persistent=False)
            self.unregistered = torch.randn(4)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight + self.kept - self.loose * self.unregistered

    model = Kinds()
    program = faithful(model, X)
    assert names(program, "parameter") == ["p_weight"]
    assert names(program, "buffer") == ["b_kept", "b_loose"]
    assert names(program, "constant") == ["c_unregistered"]
    for module in (program.module(), program.unflatten()):
        assert list(module.state_dict()) == ["weight", "kept"]
        assert dict(module.named_buffers()).keys() == {"kept", "loose"}
        assert dict(module.named_buffers())["loose"] is model.loose


def test_row_50_none_buffers_and_deleted_submodules() -> None:
    """A buffer, parameter or submodule that is None stays a name; what was deleted is gone."""

    class Partial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.register_buffer("nothing", None)
            self.register_parameter("bias", None)
            self.second = None  # type: ignore[assignment]
            del self.third

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            if self.second is not None or self.nothing is not None or self.bias is not None:
                x = x + 1
            return x + 2 if hasattr(self, "third") else x

    model = Partial()
    tree: Any = faithful(model, X).unflatten()
    assert (tree.nothing, tree.bias, tree.second) == (None, None, None)
    assert list(tree._modules) == ["first", "second"]
    assert not hasattr(tree, "third")


def test_row_51_parameter_in_a_plain_dict() -> None:
    """A parameter in a plain dict is not registered: a constant of the program, the model's own tensor."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = {"scale": nn.Parameter(torch.randn(4))}
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.linear(x) * self.table["scale"]

    model = Hidden()
    program = whence.capture(model, (X,), backward=True)
    assert program.verify(model, (X,)).ok
    assert [row.path for row in program.signature.inputs if row.kind == "parameter"] == [
        "linear.weight",
        "linear.bias",
    ]
    [constant] = names(program, "constant")
    assert program.state[constant] is model.table["scale"]
    assert equal(program.module()(X), model(X))
    assert equal(program.unflatten()(X), model(X))


class Reassigning(nn.Module):
    """Replaces a buffer, and keeps a tensor that nobody registered."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.last: Tensor | None = None

    def forward(self, x: Tensor, keep: bool = False) -> Tensor:
        self.count = self.count + 1
        if keep:
            self.last = x * 2
        return x + self.count


def test_row_52_reassigned_buffer_is_a_mutation() -> None:
    """A buffer that forward replaces is an output of the program, and no warning."""
    model = nn.Sequential(Reassigning())
    program = faithful(model, X, backward=False)
    [output] = program.signature.outputs_of(whence.OutputKind.MUTATION)
    assert output.of == "b_0_count"
    tree: Any = program.unflatten(copy=True)
    tree(X)
    assert torch.equal(tree.get_buffer("0.count"), torch.ones(4))
    assert torch.equal(model.get_buffer("0.count"), torch.zeros(4))


def test_row_52_tensor_left_on_self_is_reported() -> None:
    """A tensor that forward leaves on self is removed; the warning names module, attribute and line."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Reassigning()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x, keep=True)

    line = Reassigning.forward.__code__.co_firstlineno + 3
    model = Outer()
    with pytest.warns(
        UserWarning, match=rf"inner\.last \({__file__}:{line} in Reassigning.forward\)"
    ) as told:
        program = whence.capture(model, (X,))
    assert len(told) == 1
    assert model.inner.last is None
    assert program.module()(X).shape == (3, 4)


@pytest.mark.parametrize("kind", ["list", "dict", "nested"])
def test_row_52_tensor_left_in_a_container_is_reported(kind: str) -> None:
    """A tensor that forward adds to a container of self is reported with the line that made it."""

    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept: Any = {"list": [], "dict": {}, "nested": [[]]}[kind]

        def forward(self, x: Tensor) -> Tensor:
            made = x + 1
            if kind == "dict":
                self.kept["made"] = made
            else:
                (self.kept if kind == "list" else self.kept[0]).append(made)
            return made

    model = Collecting()
    line = Collecting.forward.__code__.co_firstlineno + 1
    with pytest.warns(UserWarning, match=rf":{line} in .*Collecting.forward"):
        whence.capture(model, (X,))
    assert not model.kept or model.kept == [[]]


def test_row_53_python_state_that_decides_is_refused_and_restored() -> None:
    """Numbers, tuples and dicts on self that every run changes and computes with.

    PyTorch bakes in what the first run saw, and is wrong from the second call on; here that is refused.
    """

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 1
            self.shape: tuple[int, ...] = (0,)
            self.settings = {"scale": 2}
            self.names = ["a"]

        def forward(self, x: Tensor, *, computes: bool) -> Tensor:
            self.calls += 1
            self.shape = tuple(x.shape)
            self.settings["scale"] *= 3
            self.settings["new"] = 5
            self.names.append("b")
            if not computes:
                return x + self.shape[0]
            return x * self.calls * self.settings["scale"] + self.shape[0] + len(self.names)

    model = Counting()
    with leaves_no_trace(model), pytest.raises(whence.LostState, match="changes calls, settings, names"):
        whence.capture(model, (X,), {"computes": True})
    with leaves_no_trace(model):
        program = whence.capture(model, (X,), {"computes": False})
    assert (model.calls, model.shape, model.names) == (1, (0,), ["a"])
    assert model.settings == {"scale": 2}
    expected = deepcopy(model)(X, computes=False)
    for make in (program.module, program.unflatten):
        with pytest.warns(UserWarning, match="each run of the model changes calls, settings, names"):
            module = make()
        assert equal(module(X, computes=False), expected)
        assert equal(module(X, computes=False), expected)
    assert program.verify(model, (X,), {"computes": False}).ok


def test_row_54_tensor_subclasses() -> None:
    """Parameters, buffers and attributes made of other tensors are known by their parts, nested ones too."""

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(TwoTensor(torch.randn(4), torch.randn(4)))
            self.register_buffer("table", TwoTensor(torch.randn(4), torch.randn(4)))
            self.loose = TwoTensor(torch.randn(4), TwoTensor(torch.randn(4), torch.randn(4)))
            self.plain = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            table: Any = self.table
            return self.plain(x), x * self.weight + table, x * self.loose

    model = nn.Sequential(Doubled())
    program = faithful(model, X)
    for path in ("0.weight.a", "0.weight.b", "0.table.a", "0.loose.a", "0.loose.b.a", "0.loose.b.b"):
        part = program.input(path).part
        assert part is not None and part.type == "TwoTensor"
        assert path == f"{part.whole}.{part.access}"
    assert program.input("0.plain.weight").part is None


def test_row_55_mode_of_a_captured_module() -> None:
    """`train` and `eval` set the flag and warn: the graphs stay in the mode of the capture."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval()
    program = faithful(model, X)
    for module in (program.module(copy=True), program.unflatten(copy=True)):
        assert not module.training
        with pytest.warns(UserWarning, match="captured in evaluation mode"):
            module.train()
        assert module.training
        assert equal(module(X), model(X))
        module.eval()


def test_row_56_mode_at_capture_picks_the_branch() -> None:
    """Each mode gives its own program."""

    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() if self.training else x.cos()

    model = Branching()
    assert operations(faithful(model.train(), X, backward=False).graph) == ["aten.sin.default"]
    assert operations(faithful(model.eval(), X, backward=False).graph) == ["aten.cos.default"]


class Base(nn.Module):
    """What its subclass builds on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def halved(self, x: Tensor) -> Any:
        return self.linear(x) / 2


class Spelled(Base):
    """Reaches its code in every way that a class offers."""

    factor = 3

    def __init__(self) -> None:
        super().__init__()
        self.factor = 4
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) + 1

    def __len__(self) -> int:
        return 0

    @property
    def doubled(self) -> Tensor:
        return self.linear.weight * 2

    @classmethod
    def shifted(cls, x: Tensor) -> Tensor:
        return x + cls.factor

    @staticmethod
    def squared(x: Tensor) -> Tensor:
        return x * x

    def halved(self, x: Tensor) -> Any:
        return super().halved(x) - 1

    def forward(self, x: Tensor) -> Any:
        x = x @ self.doubled
        x = self.squared(self.shifted(x)) * self.factor
        x = x + 1 if self else x - 1
        x = x * 2 if hasattr(self, "blocks") and not hasattr(self, "missing") else x
        return self.halved(x) if len(self.blocks) else x


def test_row_64_ways_to_reach_code() -> None:
    """Overridden call, length as truth value, class, static and super methods, properties, shadowed names."""
    model = nn.Sequential(Spelled())
    program = faithful(model, X)
    assert [str(call.site) for call in program.calls] == ["", "0", "0.linear"]


class Delegating(nn.Module):
    """Looks attributes up in the module inside, asking itself whether it has them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name != "inner" and hasattr(self, "inner"):
                return getattr(self.inner, name)
            raise

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.tanh(self.up(x)) * self.scale)


class Watching(nn.Module):
    """Sees every attribute that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def __getattribute__(self, name: str) -> Any:
        if name == "scale":
            return 3
        return super().__getattribute__(name)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.scale


def test_row_65_own_attribute_lookup() -> None:
    """`__getattr__` that asks `hasattr` of itself, and `__getattribute__`, keep names and numbers."""
    program = faithful(nn.Sequential(Delegating(Block())), X)
    assert [str(call.site) for call in program.calls] == ["", "0", "0.inner.up", "0.inner.down"]
    assert [str(call.site) for call in faithful(Watching(), X).calls] == ["", "linear"]


class Equal(nn.Module):
    """Compares by its size, so it has no hash."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.linear = nn.Linear(4, 4)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal) and other.size == self.size

    __hash__ = None  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.size


class Odd(nn.Module):
    """Unhashable submodules, names that are no identifiers, attributes deleted and modules compared."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Equal(1), Equal(1)
        self.add_module("odd-name 1", nn.Linear(4, 4))
        self.register_parameter("a:b", nn.Parameter(torch.randn(4)))
        self.scratch = 1

    def forward(self, x: Tensor) -> Any:
        x = self.left(x) if self.left == self.right else x
        x = self.right(x) if self.left is not self.right else x
        del self.scratch
        x = x if hasattr(self, "scratch") else x + 1
        self.scratch = 1
        odd: Any = self._modules["odd-name 1"]
        return odd(x) * self.get_parameter("a:b")


def test_row_66_odd_modules() -> None:
    """What modules may be and be called does not matter: no hash, odd names, deleted attributes."""
    model = Odd()
    program = faithful(model, X)
    assert [str(call.site) for call in program.calls][1:-1] == [
        "left",
        "left.linear",
        "right",
        "right.linear",
    ]
    assert program.input("a:b").kind == "parameter"
    assert list(program.unflatten().state_dict()) == list(model.state_dict())


class Register(OrderedDict[str, Any]):
    """A dict of parameters that does something when it is read."""

    reads = 0

    def __getitem__(self, name: str) -> Any:
        type(self).reads += 1
        return super().__getitem__(name)


def test_row_67_replaced_register_of_parameters() -> None:
    """`_parameters` replaced by a dict of another class, as ZeRO does, is read as any."""
    model = nn.Sequential(nn.Linear(4, 4))
    model[0]._parameters = Register(model[0]._parameters)
    program = faithful(model, X)
    assert names(program, "parameter") == ["p_0_weight", "p_0_bias"]
    assert Register.reads > 0
    assert type(model[0]._parameters) is Register


def test_row_69_state_is_the_models_own() -> None:
    """Every parameter and buffer of the program is the model's own object, so nothing is copied per run."""
    model = Block()
    program = whence.capture(model, (X,), backward=True)
    held = {row.path: program.state[row.name] for row in program.signature.state}
    assert held.keys() == dict((*model.named_parameters(), *model.named_buffers())).keys()
    assert all(held[name] is tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()))
    with torch.no_grad():
        model.up.weight.add_(1)
    assert equal(program.module()(X), model(X))
    assert equal(program.unflatten()(X), model(X))


def test_row_70_named_parameters_in_forward() -> None:
    """Parameters, buffers and modules found by their names in forward are known by them."""

    class Walking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Any:
            total: Any = sum(p.pow(2).sum() for _, p in self.named_parameters())
            total = total + sum(b.sum() for _, b in self.named_buffers())
            total = total + sum(p.abs().sum() for p in self.block.parameters())
            for name, module in self.named_modules():
                if name.endswith("up"):
                    x = module(x)
            return x * total

    program = faithful(Walking(), X)
    assert [str(call.site) for call in program.calls] == ["", "block.up"]
    assert names(program, "constant") == []


KEPT: list[Tensor] = []


def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
    """A hook that keeps what it sees."""
    KEPT.append(output)


class Leaking(nn.Module):
    """Keeps a tensor in a global."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        KEPT.append(x.sin())
        return self.linear(x)


@pytest.mark.parametrize("backward", [False, True])
def test_row_71_tensors_kept_outside_are_reported(backward: bool) -> None:
    """What a hook or a global keeps of a capture is taken out, and reported with operation and line."""
    model, hooked = Leaking(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    hooked[0].register_forward_hook(keep)
    line = Leaking.forward.__code__.co_firstlineno + 1
    for kept, expected in (
        (model, rf"KEPT: sin \({__file__}:{line} in Leaking.forward\)"),
        (hooked, r"KEPT: (linear|addmm) \("),
    ):
        with pytest.warns(UserWarning, match=expected) as told:
            whence.capture(kept, (X,), backward=backward)
        assert (len(told), KEPT) == (1, [])
    hooked[0]._forward_hooks.clear()
    whence.capture(hooked, (X,), backward=backward)


class Memory:
    """An object of the user's own that keeps a tensor."""

    def __init__(self) -> None:
        self.last: Tensor | None = None


class Remembering(nn.Module):
    """Keeps tensors in an object, in a nested tuple and as a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.state: Any = ()
        self.literal: Any = None

    def forward(self, x: Tensor, where: str) -> Tensor:
        if where == "object":
            self.memory.last = x * 2
        if where == "tuple":
            self.state = (1, (x * 2, {"deep": x * 3}))
        if where == "literal":
            self.literal = torch.tensor([1.0, 2.0, 3.0, 4.0])
            return x + self.literal
        return x + 1


@pytest.mark.parametrize(
    ("where", "expected"), [("object", r"memory.last \("), ("tuple", r"state \("), ("literal", r"literal \(")]
)
def test_tensors_kept_in_odd_places_are_reported(where: str, expected: str) -> None:
    """Wherever a model leaves a tensor of the capture, one warning says so, with the line."""
    model = Remembering()
    with pytest.warns(UserWarning, match=rf"{expected}{__file__}:\d+ in Remembering.forward") as told:
        whence.capture(model, (X, where))
    assert len(told) == 1
