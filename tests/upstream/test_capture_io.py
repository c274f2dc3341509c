"""What goes into a capture and comes out of its flat module: rows 1 to 21."""

import functools
import itertools
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

import whence
from tests.models import case
from tests.upstream.checks import call_sites, equal, gradients, names, operations
from tests.upstream.modules import Batch, Block, Box, Containers, Modal, Mode, Point, Settings, Stranger


def test_row_01_flat_module_computes_what_eager_does() -> None:
    """The flat module gives eager's outputs and gradients on tensor arguments."""
    block, x = Block(), torch.randn(3, 4)
    flat = whence.capture(block, (x,)).module()
    assert torch.equal(flat(x), block(x))
    other = torch.randn(3, 4)
    assert torch.equal(flat(other), block(other))
    trained = whence.capture(block, (x,), backward=True)
    assert trained.verify(block, (x,)).ok
    joint = trained.module()
    assert equal(
        gradients(joint, lambda: joint(other).square().sum()),
        gradients(block, lambda: block(other).square().sum()),
    )
    for name in ("vit", "named_branches", "lstm"):
        model, args, kwargs = case(name).make()
        assert equal(whence.capture(model, args, kwargs).module()(*args, **kwargs), model(*args, **kwargs))


def test_row_02_nested_containers_in_and_out() -> None:
    """Nested dicts, lists and tuples go in and come out, also of a capture of the flat module."""
    model = Containers()
    batch = {"x": torch.randn(2, 4), "inner": {"y": torch.randn(2, 4)}}
    args = (batch, (torch.randn(4), [torch.randn(2), torch.randn(3)]))
    program = whence.capture(model, args)
    assert names(program, "user") == ["batch_x", "batch_inner_y", "pair_0", "pair_1_0", "pair_1_1"]
    assert program.input("batch_inner_y").path == "args[0]['inner']['y']"
    flat = program.module()
    assert equal(flat(*args), model(*args))
    again = whence.capture(flat, args)
    assert equal(again.module()(*args), model(*args))
    assert operations(again.graph) == operations(program.graph)
    assert again.verify(flat, args).ok


def test_row_03_keywords_come_in_any_order() -> None:
    """Keyword arguments may be given in any order, and by position where the model takes them so."""

    class Mixed(nn.Module):
        def forward(self, first: Tensor, *, second: Tensor, third: dict[str, Tensor]) -> Tensor:
            return first - 2 * second - 3 * third["a"] - 4 * third["b"]

    model = Mixed()
    first, second = torch.randn(2), torch.randn(2)
    third = {"a": torch.randn(2), "b": torch.randn(2)}
    expected = model(first, second=second, third=third)
    kwargs: dict[str, Any] = {"first": first, "second": second, "third": third}
    for captured in itertools.permutations(kwargs.items()):
        flat = whence.capture(model, (), dict(captured)).module()
        for called in itertools.permutations(kwargs.items()):
            assert torch.equal(flat(**dict(called)), expected)
        assert torch.equal(flat(first, third=third, second=second), expected)
        with pytest.raises(whence.CallError, match="fourth"):
            flat(first, third=third, second=second, fourth=first)


def test_row_04_dict_and_ordered_dict_are_one_structure() -> None:
    """A dict may stand for an OrderedDict with the same keys in the same order; another order is refused."""

    class Values(nn.Module):
        def forward(self, given: dict[str, Tensor]) -> Tensor:
            first, second = given.values()
            return first - second

    model, one, two = Values(), torch.ones(2), torch.full((2,), 2.0)
    plain, ordered = {"one": one, "two": two}, OrderedDict(one=one, two=two)
    for captured, called in itertools.product((plain, ordered), repeat=2):
        flat = whence.capture(model, (captured,)).module()
        assert torch.equal(flat(called), model(called))
        with pytest.raises(whence.CallError, match="structure"):
            flat({"two": two, "one": one})
        with pytest.raises(whence.CallError, match="structure"):
            flat({"one": one, "three": two})


def test_row_05_every_kind_of_parameter() -> None:
    """Defaults, `*args`, keyword-only arguments and `**kwargs` holding pytrees are taken as in Python."""

    class Kinds(nn.Module):
        def forward(
            self,
            x: Tensor,
            scale: float = 2.0,
            *rest: dict[str, Tensor],
            shift: Tensor | None = None,
            shape: tuple[int, ...] = (1, 2),
            **named: Any,
        ) -> dict[str, Any]:
            total = (x * scale).reshape(shape)
            for item in rest:
                total = total + item["a"] - item["b"]
            if shift is not None:
                total = total + shift
            return {name: total * value[0] for name, value in named.items()} | {"total": total}

    model, x, y = Kinds(), torch.randn(2), torch.randn(2)
    item = {"a": x, "b": y}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}),
        ((x, 3.0), {}),
        ((x, 3.0, item, {"a": y, "b": x}), {"shift": y}),
        ((x, 2.0, item), {"late": (y, [x]), "shift": x, "early": [y]}),
    ]
    for args, kwargs in calls:
        program = whence.capture(model, args, kwargs)
        assert equal(program.module()(*args, **kwargs), model(*args, **kwargs))
        assert program.verify(model, args, kwargs).ok
    assert names(program, "user") == [
        *("x", "scale", "rest_0_a", "rest_0_b", "late_0", "late_1_0", "shift", "early_0")
    ]
    defaults = whence.capture(model, (x,)).module()
    assert equal(defaults(x, float("2"), shift=None, shape=(1, x.numel())), model(x))
    with pytest.raises(whence.CallError, match="scale"):
        defaults(x, scale=4.0)


def test_row_06_arguments_that_are_no_tuple() -> None:
    """Example arguments that are no tuple are refused, saying what they are and what to write."""
    x = torch.randn(3, 4)
    given: list[Any] = [x, [x], {"x": x}]
    for args in given:
        with pytest.raises(whence.InputMismatch, match="expected `args` to be a tuple") as caught:
            whence.capture(Block(), args)
        assert f"got {type(args).__name__}" in str(caught.value)
        assert "(x,)" in caught.value.remedy
    bad_kwargs: Any = [("x", x)]
    with pytest.raises(whence.InputMismatch, match="expected `kwargs` to be a dict"):
        whence.capture(Block(), (), bad_kwargs)


def test_row_07_wrong_number_or_structure_of_arguments() -> None:
    """The flat module refuses missing, extra and differently nested arguments, and names them."""
    model = Containers()
    batch: dict[str, Any] = {"x": torch.randn(2, 4), "inner": {"y": torch.randn(2, 4)}}
    pair: tuple[Any, ...] = (torch.randn(4), [torch.randn(2)])
    flat = whence.capture(model, (batch, pair)).module()
    with pytest.raises(whence.CallError, match="missing a required argument: 'pair'"):
        flat(batch)
    with pytest.raises(whence.CallError, match="too many positional arguments"):
        flat(batch, pair, pair)
    with pytest.raises(whence.CallError, match="unexpected keyword argument 'other'"):
        flat(batch, pair, other=pair)
    with pytest.raises(whence.CallError, match="structure") as caught:
        flat(batch, (pair[0], [*pair[1], torch.randn(2)]))
    assert "[f32[2]]" in caught.value.why
    assert "[f32[2], f32[2]]" in caught.value.why
    with pytest.raises(whence.CallError, match=r"args\[0\]\['x'\] was f32\[2, 4\] .* is f32\[3, 4\]"):
        flat(batch | {"x": torch.randn(3, 4)}, pair)
    with pytest.raises(whence.CallError, match=r"args\[1\]\[0\] was .* is f64\[4\]"):
        flat(batch, (pair[0].double(), pair[1]))
    assert isinstance(caught.value, ValueError)


def test_row_08_python_values_are_constants() -> None:
    """Ints, bools, strings, None and enums are constants in the signature, and checked in every call."""
    model, x = Modal(), torch.randn(2, 4)
    args: tuple[Any, ...] = (x, 2, True, "relu", None, Mode.SUBTRACT)
    program = whence.capture(model, args)
    held = {row.name: row.value for row in program.signature.inputs if row.kind == "user" and row.name != "x"}
    assert held == {"times": 2, "double": True, "activation": "relu", "bias": None, "mode": Mode.SUBTRACT}
    flat = program.module()
    assert torch.equal(flat(*args), model(*args))
    others: list[tuple[Any, ...]] = [
        (x, 3, True, "relu", None, Mode.SUBTRACT),
        (x, 2, False, "relu", None, Mode.SUBTRACT),
        (x, 2, True, "tanh", None, Mode.SUBTRACT),
        (x, 2, True, "relu", torch.zeros(4), Mode.SUBTRACT),
        (x, 2, True, "relu", None, Mode.ADD),
        (x, 2, 1, "relu", None, Mode.SUBTRACT),
    ]
    for position, changed in enumerate(others, 1):
        spelled = r"args\[2\]" if position == 6 else rf"args\[{position}\]"
        with pytest.raises(whence.CallError, match=spelled):
            flat(*changed)
    with pytest.raises(whence.CallError, match=r"args\[5\] was <Mode.SUBTRACT: 2> at capture"):
        flat(x, 2, True, "relu")
    with pytest.raises(whence.CallError) as caught:
        flat(x, 3, False, "tanh", None, Mode.ADD)
    assert all(f"args[{position}]" in caught.value.why for position in (1, 2, 3, 5))


def test_row_09_registered_classes_are_inputs_and_outputs() -> None:
    """Dataclasses, named tuples, pytree classes, constants and sizes go in; the same classes come out."""

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: Batch, point: Point, box: Box, settings: Settings, size: torch.Size) -> Any:
            hidden = self.linear(batch.tokens) * box.content["weight"] + point.x.pow(settings.power)
            shown = hidden.reshape(size)
            return Batch(hidden, shown), Box({"y": point.y + 1}, box.label), Point(shown, hidden.sum())

    model = Custom()
    x = torch.randn(2, 4)
    box = Box({"weight": torch.randn(4)}, "label")
    args = (Batch(x), Point(torch.randn(4), torch.randn(3)), box, Settings(2), torch.Size((4, 2)))
    program = whence.capture(model, args)
    assert [row.path for row in program.signature.inputs if row.kind == "user"] == [
        *("args[0].tokens", "args[1].x", "args[1].y", "args[2].content['weight']", "args[4][0]", "args[4][1]")
    ]
    batch, box_out, point = program.module()(*args)
    assert equal((batch, box_out, point), model(*args))
    assert isinstance(batch, Batch)
    assert isinstance(point, Point)
    assert box_out.label == "label"
    assert program.verify(model, args).ok
    with pytest.raises(whence.CallError, match="structure"):
        program.module()(*args[:2], Box(box.content, "other"), *args[3:])
    with pytest.raises(whence.CallError, match="structure"):
        program.module()(*args[:3], Settings(3), args[4])
    with pytest.raises(whence.CallError, match=r"args\[4\]\[0\] was 4 at capture, is 2"):
        program.module()(*args[:4], torch.Size((2, 4)))
    with pytest.raises(whence.CallError, match="structure"):
        program.module()(Batch(x, torch.ones(2)), *args[1:])


def test_row_10_a_module_is_an_input() -> None:
    """A module passed as an argument runs, and its parameters become constants that receive gradients."""

    class Applies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, other: nn.Module) -> Tensor:
            return other(self.linear(x))

    model, other, x = Applies(), nn.Linear(4, 2), torch.randn(3, 4)
    program = whence.capture(model, (x, other), backward=True)
    assert names(program, "parameter") == ["p_linear_weight", "p_linear_bias"]
    held = [program.state[name] for name in names(program, "constant")]
    assert {id(tensor) for tensor in held} == {id(other.weight), id(other.bias)}
    flat = program.module()
    assert torch.equal(flat(x, other), model(x, other))
    flat(x, other).square().sum().backward()
    found = [parameter.grad for parameter in (*model.parameters(), *other.parameters())]
    model.zero_grad()
    other.zero_grad()
    model(x, other).square().sum().backward()
    assert equal(found, [parameter.grad for parameter in (*model.parameters(), *other.parameters())])
    with pytest.raises(whence.CallError, match=r"args\[1\]"):
        flat(x, nn.Linear(4, 2))


def test_row_11_constants_duplicates_and_no_computation() -> None:
    """A model may take nothing, compute nothing, and return constants, inputs or one value twice."""

    class Nothing(nn.Module):
        def forward(self) -> Tensor:
            return torch.arange(3) + 1

    class Plain(nn.Module):
        def forward(self, x: Tensor, flag: bool) -> tuple[Any, ...]:
            y = x + 1
            return y, y, x, 3, None, "text", flag, [y, (x, 2.5)]

    class Python(nn.Module):
        def forward(self, count: int) -> int:
            return count + 1

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2))

        def forward(self) -> tuple[Tensor, dict[str, Tensor]]:
            return self.weight, {}

    x = torch.randn(2)
    given: list[tuple[nn.Module, tuple[Any, ...]]] = [
        *[(Nothing(), ()), (Plain(), (x, False)), (Python(), (4,)), (Holds(), ()), (nn.Identity(), (x,))]
    ]
    for model, args in given:
        program = whence.capture(model, args)
        assert equal(program.module()(*args), model(*args))
        assert equal(program.unflatten()(*args), model(*args))
        assert program.verify(model, args).ok
    program = whence.capture(Plain(), (x, False))
    assert operations(program.graph) == ["aten.add.Tensor"]
    assert [row.node for row in program.signature.outputs] == [
        *("add", "add", "x", None, None, None, None, "add", "x", None)
    ]
    values = [row.value for row in program.signature.outputs if row.node is None]
    assert values == [3, None, "text", False, 2.5]
    first, second, same, *_ = program.module()(x, False)
    assert first is second
    assert same is x


def test_row_12_functions_and_bound_methods() -> None:
    """A function and a bound method are captured as they are, and their state keeps its names."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.unused = nn.Linear(2, 2)

        def encode(self, x: Tensor, *, twice: bool = False) -> Tensor:
            x = self.block(x)
            return self.block(x) if twice else x

        def forward(self, x: Tensor) -> Tensor:
            return self.encode(x) + 1

    model, x = Encoder(), torch.randn(3, 4)
    program = whence.capture(model.encode, (x,), {"twice": True}, backward=True)
    assert call_sites(program) == ["block", "block.up", "block.down", "block@1", "block.up@1", "block.down@1"]
    flat = program.module()
    assert torch.equal(flat(x, twice=True), model.encode(x, twice=True))
    assert list(flat.state_dict()) == list(model.state_dict())
    assert program.verify(model.encode, (x,), {"twice": True}).ok

    partial = whence.capture(functools.partial(model.encode, twice=True), (x,))
    assert [row.path for row in partial.signature.state] == [row.path for row in program.signature.state]

    def add(x: Tensor, scale: float = 3.0) -> dict[str, Tensor]:
        return {"sum": model.block(x) * scale}

    functions: list[tuple[Any, dict[str, Any]]] = [
        *[(add, {}), (add, {"scale": 2.0}), (functools.partial(add, scale=4.0), {}), (torch.relu, {})]
    ]
    for function, kwargs in functions:
        program = whence.capture(function, (x,), kwargs)
        assert equal(program.module()(x, **kwargs), function(x, **kwargs))
        assert program.verify(function, (x,), kwargs).ok
    assert "model.block.up.weight" in [row.path for row in whence.capture(add, (x,)).signature.inputs]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_row_13_script_modules_are_refused() -> None:
    """A TorchScript module, function or method is refused, pointing at what to capture in its place."""
    x = torch.randn(3, 4)
    scripted: list[Any] = [torch.jit.script(nn.Linear(4, 4)), torch.jit.trace(nn.Linear(4, 4), x)]
    scripted += [torch.jit.script(_doubled), scripted[0].forward, nn.Sequential(nn.Linear(4, 4), scripted[0])]
    for model in scripted:
        with pytest.raises(whence.CaptureError, match="cannot be captured") as caught:
            whence.capture(model, (x,))
        assert "TorchScript" in caught.value.why
        assert "scripted from" in caught.value.remedy


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def test_row_14_pytrees_with_copied_lists_and_constants() -> None:
    """Lists the model copies and changes, and constants between tensors, come out as eager gives them."""

    class Lists(nn.Module):
        def forward(self, rows: list[Any], scale: float) -> tuple[list[Any], dict[str, Any]]:
            copied = list(rows)
            copied.append(rows[0] * scale)
            copied[1] = "replaced"
            del copied[2]
            return copied, {"rows": rows, "count": len(copied), "last": copied[-1] + 1}

    model, rows = Lists(), [torch.randn(2), 7, None, torch.randn(3)]
    program = whence.capture(model, (rows, 0.5))
    flat = program.module()
    assert isinstance(flat, nn.Module)
    assert equal(flat(rows, 0.5), model(rows, 0.5))
    assert len(rows) == 4
    fresh = [torch.randn(2), 7, None, torch.randn(3)]
    assert equal(flat(fresh, 0.5), model(fresh, 0.5))
    with pytest.raises(whence.CallError, match=r"args\[0\]\[1\] was 7"):
        flat([fresh[0], 8, None, fresh[3]], 0.5)


def test_row_15_a_module_that_overrides_call() -> None:
    """A module with its own `__call__` is captured through it, and keeps all parameters and buffers."""

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.register_buffer("unused", torch.ones(2))
            self.spare = nn.Parameter(torch.ones(2))

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 2

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Calls()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1

    x = torch.randn(3, 4)
    for model in (Calls(), Around()):
        program = whence.capture(model, (x,), backward=True)
        flat = program.module()
        assert torch.equal(flat(x), model(x))
        assert torch.equal(program.unflatten()(x), model(x))
        assert program.verify(model, (x,)).ok
        assert [name for name, _ in flat.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert [name for name, _ in flat.named_buffers()] == [name for name, _ in model.named_buffers()]
        assert len(names(program, "parameter")) == 5
        assert len(names(program, "buffer")) == 2


def test_row_16_dataclass_input_gives_this_exact_code() -> None:
    """The code generated for a dataclass input names its fields and is exactly this."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: Batch) -> Tensor:
            assert batch.mask is not None
            return self.linear(batch.tokens) * batch.mask

    model, batch = Masked(), Batch(torch.randn(3, 4), torch.ones(3, 1))
    program = whence.capture(model, (batch,))
    assert program.graph_module.code.strip() == _MASKED_CODE.strip()
    assert torch.equal(program.module()(batch), model(batch))


_MASKED_CODE = """
def forward(self, p_linear_weight, p_linear_bias, batch_tokens, batch_mask):
    linear = torch.ops.aten.linear.default(batch_tokens, p_linear_weight, p_linear_bias);  batch_tokens = p_linear_weight = p_linear_bias = None
    mul = torch.ops.aten.mul.Tensor(linear, batch_mask);  linear = batch_mask = None
    return (mul,)
"""  # noqa: E501 - fx writes the line so


def test_row_17_closed_over_tensors_are_constants() -> None:
    """Tensors a function closes over are inputs of kind constant, and those that need gradients get them."""
    outer, weight = torch.randn(3), torch.randn(3, requires_grad=True)
    linear = nn.Linear(3, 3)

    def closure(x: Tensor) -> Tensor:
        return linear(x) * weight + outer

    x = torch.randn(2, 3)
    program = whence.capture(closure, (x,), backward=True)
    held = [program.state[name] for name in names(program, "constant")]
    assert {id(tensor) for tensor in held} == {id(outer), id(weight)}
    assert [row.path for row in program.signature.inputs if row.kind == "parameter"] == [
        *("linear.weight", "linear.bias")
    ]
    assert names(program, "buffer") == []
    flat = program.module()
    assert torch.equal(flat(x), closure(x))
    flat(x).sum().backward()
    found, weight.grad = weight.grad, None
    closure(x).sum().backward()
    assert equal(found, weight.grad)
    with torch.no_grad():
        outer.add_(1)
    assert torch.equal(flat(x), closure(x))


def test_row_18_defaults_custom_outputs_and_fake_values() -> None:
    """Default arguments are used, registered classes are returned, and values are fakes of one mode."""

    class Boxes(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None = None, *, label: str = "box") -> Box:
            return Box({"x": x + 1, "y": y}, label)

    model, x = Boxes(), torch.randn(2)
    program = whence.capture(model, (x,))
    assert names(program, "user") == ["x"]
    box = program.module()(x)
    assert isinstance(box, Box)
    assert box.label == "box"
    assert equal(box, model(x))
    both = whence.capture(model, (x, x), {"label": "both"})
    assert equal(both.module()(x, x, label="both"), model(x, x, label="both"))
    values = [node.meta["val"] for node in program.graph.nodes if node.op != "output"]
    values += [row.value for row in program.signature.inputs]
    assert all(isinstance(value, FakeTensor) for value in values)
    assert len({id(value.fake_mode) for value in values}) == 1


def test_row_19_python_side_effects_are_undone_and_reported_once() -> None:
    """What the model keeps in Python is undone after a capture, and not repeated: tensors are reported then,
    what it counts where a module of the program leaves it out."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.last: Tensor | None = None
            self.seen: list[Tensor] = []
            self.named: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x * 2
            self.seen.append(self.last)
            self.named["last"] = self.last
            return self.last + 1

    model, x = Remembers(), torch.randn(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        program = whence.capture(model, (x,))
        flat = program.module()
        results = [flat(x), flat(x)]
    [kept, counted] = [str(entry.message) for entry in caught]
    assert "Remembers kept tensors of the capture in last" in kept
    assert "each run of the model changes calls" in counted
    assert (model.calls, model.last, model.named) == (0, None, {})
    assert equal(results, [x * 2 + 1, x * 2 + 1])
    assert model.seen == []


def test_row_20_an_unregistered_class_is_named() -> None:
    """An input or a result of an unregistered class is refused, saying where it is and how to register it."""

    class Opens(nn.Module):
        def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:
            return x + given["box"].content

    class Returns(nn.Module):
        def forward(self, x: Tensor) -> Stranger:
            return Stranger(x + 1)

    x = torch.randn(2)
    with pytest.raises(whence.UnsupportedInput, match=r"args\[1\]\['box'\] is a Stranger") as caught:
        whence.capture(Opens(), (x, {"box": Stranger(x)}))
    assert "register_dataclass" in caught.value.remedy
    assert "register_pytree_node" in caught.value.remedy
    with pytest.raises(whence.UnsupportedInput, match="Returns returned a Stranger") as caught:
        whence.capture(Returns(), (x,))
    assert "register" in caught.value.remedy


def test_row_21_fake_inputs_fake_weights_and_an_outer_fake_mode() -> None:
    """A capture on fake inputs, fake weights or under an outer fake mode records the same program."""
    expected = whence.capture(Block(), (torch.randn(3, 4),), backward=True)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fake_model, fake_x = Block(), torch.randn(3, 4)
    with mode:
        under = whence.capture(fake_model, (fake_x,), backward=True)
        mixed_under = whence.capture(Block(), (torch.randn(3, 4),), backward=True)
    programs = [
        whence.capture(Block(), (fake_x,), backward=True),
        whence.capture(fake_model, (torch.randn(3, 4),), backward=True),
        *(whence.capture(fake_model, (fake_x,), backward=True), under, mixed_under),
    ]
    for program in programs:
        assert [str(node.target) for node in program.graph.nodes] == [
            str(node.target) for node in expected.graph.nodes
        ]
        assert str(program.signature) == str(expected.signature)
        values = pytree.tree_leaves([node.meta["val"] for node in program.graph.nodes if "val" in node.meta])
        assert all(value.fake_mode is mode for value in values)
    assert all(isinstance(parameter, FakeTensor) for parameter in fake_model.parameters())
    assert isinstance(fake_x, FakeTensor)
