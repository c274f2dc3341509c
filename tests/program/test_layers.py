"""Which module calls compute the same."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, fx, nn

import whence
from tests.behaviours.test_random_modules import SEARCH, made, total
from tests.checks import Backward, captured
from tests.hierarchy.random_modules import Recipe, recipes
from tests.models import ModelCase, sampled_cases
from tests.program.small import Layer, sine_loss, stack_program
from tests.tracing.replay.layered import Block, Stemmed
from tests.tracing.replay.layered import Stack as Replayed
from whence.program import Layers
from whence.program.equality import Key
from whence.program.node_records import origin_of, set_origin
from whence.schema import Phase, Quality


def grouped(program: whence.Program) -> list[list[str]]:
    """The call sites of every group."""
    return [[str(call) for call in group.calls] for group in program.layers()]


class Chain(nn.Module):
    """Modules one after another."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Step(nn.Module):
    """A function of a tensor, as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(hidden)


class Sized(nn.Module):
    """A layer that is so wide inside."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, inside), nn.Linear(inside, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(hidden).sin())


def chain_program(*layers: nn.Module, backward: bool = True, width: int = 4) -> whence.Program:
    """The program of layers one after another, the first behind a projection, so that gradients reach all."""
    chain = Chain(nn.Linear(width, width, bias=False), *layers)
    return whence.capture(chain, (torch.randn(3, width),), backward=backward)


def test_equal_layers_are_one_group() -> None:
    """Layers that compute the same are a group, in the order of their calls."""
    group = chain_program(Layer(), Layer(), Layer()).layers()[0]
    assert group.type == "Layer"
    assert [str(call) for call in group.calls] == ["layers.1", "layers.2", "layers.3"]
    assert len(group) == 3


def test_group_as_text() -> None:
    """A group says what it is, how often, where, and how large."""
    joint, forward = chain_program(Layer(), Layer(), Layer()), stack_program()
    assert str(joint.layers()[0]) == "Layer × 3: layers.1 … layers.3, 7 forward + 15 backward nodes each"
    assert str(forward.layers()[0]) == "Layer × 2: layers.0, layers.1, 4 forward nodes each"


def test_first_layer_that_needs_no_gradient_of_its_input_is_another() -> None:
    """The backward belongs to a layer: the first of a stack has less to do there."""
    assert grouped(stack_program(sine_loss, depth=3))[-1] == ["layers.1", "layers.2"]


def test_norm_behind_the_layers_joins_the_norms_in_them() -> None:
    """Equal calls form a group wherever they are; what follows from a group around them is left out."""
    names = [(group.type, len(group)) for group in captured("llama", "forward").layers()]
    assert names == [("LlamaDecoderLayer", 2), ("LlamaRMSNorm", 5), ("Linear", 4)]


def test_shared_module_called_again_and_again() -> None:
    """Calls of one module are equal like calls of several."""
    assert grouped(captured("albert", "loss")) == [
        ["albert.encoder.albert_layer_groups.0", "albert.encoder.albert_layer_groups.0@1"]
    ]


def test_blocks_of_other_widths_are_other_layers() -> None:
    """One class is as many groups as there are sizes."""
    program = chain_program(*(Sized(width) for width in (4, 4, 8, 8)))
    groups = [calls for calls in grouped(program) if calls[0].count(".") == 1]
    assert groups == [["layers.1", "layers.2"], ["layers.3", "layers.4"]]


@pytest.mark.sweep
def test_blocks_of_other_sizes_are_other_layers() -> None:
    """Swin's stages have blocks of one class and four sizes, and every second one is shifted."""
    blocks = [group for group in captured("swin", "forward").layers() if group.type == "SwinLayer"]
    for group in blocks:
        assert len({call.path.parent for call in group.calls}) == 1


def test_encoder_and_decoder_keep_their_own_layers() -> None:
    """BART's encoder and decoder layers are two groups."""
    types = {group.type: len(group) for group in captured("bart", "forward").layers()}
    assert (types["BartEncoderLayer"], types["BartDecoderLayer"]) == (2, 2)


def test_recomputed_layers_are_equal() -> None:
    """What a checkpoint computes again is part of the layer's backward."""
    group = captured("llama_checkpoint", "loss").layers()[0]
    assert (group.type, len(group)) == ("LlamaDecoderLayer", 2)
    assert len(group.backward[0]) > 2 * len(group.forward[0])


def test_program_without_equal_calls() -> None:
    """Where nothing is equal there are no groups."""
    assert captured("lstm", "loss").layers() == ()


def scaled(number: float) -> nn.Module:
    return Step(lambda hidden: hidden * number)


def differing_layers() -> Iterable[tuple[str, nn.Module, nn.Module]]:
    """Pairs that nearly compute the same."""
    yield "constant", scaled(2.0), scaled(3.0)
    yield "sign of zero", Step(lambda h: h.clamp(min=0.0)), Step(lambda h: h.clamp(min=-0.0))
    yield "type of a constant", Step(lambda h: h + 1), Step(lambda h: h + 1.0)
    yield "operation", Step(lambda h: h.sin()), Step(lambda h: h.cos())
    yield (
        "wiring",
        Step(lambda h: (a := h.sin()) - (b := h.cos()) + a * b * 0),
        Step(lambda h: (b := h.cos()) - (a := h.sin()) + a * b * 0),
    )
    yield "use", Step(lambda h: h.sin() + h), Step(lambda h: (s := h.sin()) + s + 0 * h)
    yield "bias", nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    yield (
        "stride",
        Step(lambda h: h.new_empty_strided((3, 4), (4, 1)).copy_(h)),
        Step(lambda h: h.new_empty_strided((3, 4), (1, 3)).copy_(h)),
    )
    yield "frozen", nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(requires_grad=False)


NEARLY = list(differing_layers())


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "joint"])
@pytest.mark.parametrize(("one", "other"), [row[1:] for row in NEARLY], ids=[row[0] for row in NEARLY])
def test_layers_that_nearly_compute_the_same_are_not_equal(
    one: nn.Module, other: nn.Module, backward: bool
) -> None:
    """One difference in a constant, an operation, the wiring, a stride or the state is enough."""
    program = chain_program(one, other, backward=backward)
    assert ["layers.1", "layers.2"] not in grouped(program)


def test_lines_of_one_function_are_told_apart() -> None:
    """The same operation on two lines is not the same: each node of a group comes from one line."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.ReLU(), nn.ReLU()

        def forward(self, hidden: Tensor) -> Tensor:
            hidden = self.first(hidden)
            return self.second(hidden)

    assert grouped(whence.capture(Two(), (torch.randn(3),))) == []


class Pair(nn.Module):
    """Adds two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return one * self.scale + other


def test_one_value_twice_is_not_two_values() -> None:
    """Which values from outside are the same value is part of a region."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.ModuleList(Pair() for _ in range(4))

        def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
            inputs = [(x, x), (y, y), (x, y), (y, x)]
            return [pair(*given) for pair, given in zip(self.pairs, inputs, strict=True)]

    program = whence.capture(Model(), (torch.randn(3, 4), torch.randn(3, 4)))
    assert grouped(program) == [["pairs.0", "pairs.1"], ["pairs.2", "pairs.3"]]


def test_layouts_from_outside_are_compared() -> None:
    """A transposed input is another input."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = nn.ModuleList(nn.ReLU() for _ in range(3))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [step(given) for step, given in zip(self.steps, (x, x.t(), x), strict=True)]

    assert grouped(whence.capture(Model(), (torch.randn(4, 4),))) == [["steps.0", "steps.2"]]


class GivesTwo(nn.Module):
    """Returns a value and what it made of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        held = x.sin()
        return held, held.cos()


class UsesTheSecond(nn.Module):
    """Three equal modules, of which one is asked for more than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(GivesTwo() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        used = []
        for step in self.steps:
            held, x = step(x)
            used.append(held)
        return x + used[1]


def test_values_used_outside_are_compared() -> None:
    """A layer whose inner value is used outside hands out more than one whose is not."""

    assert grouped(whence.capture(UsesTheSecond(), (torch.randn(4),))) == [["steps.0", "steps.2"]]


def test_state_is_read_under_the_same_name() -> None:
    """Layers that read other attributes of their own modules are not equal."""

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name
            self.left, self.right = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * getattr(self, self.name)

    program = chain_program(Named("left"), Named("right"), Named("left"))
    assert grouped(program) == [["layers.1", "layers.3"]]


@pytest.mark.sample(20)
@pytest.mark.parametrize("mode", ["forward", "loss"])
@pytest.mark.parametrize("row", sampled_cases())
def test_groups_of_the_table_are_sound(row: ModelCase, mode: str) -> None:
    """In every group of every model matched nodes agree, and what they read is matched, too."""
    program = captured(row.name, mode)
    for group in program.layers():
        check_group(program, group)


def check_group(program: whence.Program, group: Layers) -> None:
    """Compare a group node by node, in another way than it was found."""
    first = [program.node(name) for name in (*group.forward[0], *group.backward[0])]
    assert first
    for forward, backward in zip(group.forward, group.backward, strict=True):
        other = [program.node(name) for name in (*forward, *backward)]
        match = dict(zip(first, other, strict=True))
        for one, two in zip(first, other, strict=True):
            assert one.target is two.target
            assert str(one.meta["val"]) == str(two.meta["val"])
            assert origin_of(one).source == origin_of(two).source
            assert len(one.all_input_nodes) == len(two.all_input_nodes)
            for source, matched in zip(one.all_input_nodes, two.all_input_nodes, strict=True):
                assert match.setdefault(source, matched) is matched or source not in first
    assert all(origin_of(program.node(n)).phase is Phase.FORWARD for n in group.forward[0])


@pytest.mark.random
@SEARCH
@given(recipe=recipes("count", "drop"))
def test_groups_of_random_modules_are_sound(recipe: Recipe) -> None:
    """The same for random modules, forward and backward."""
    model, x = made(recipe)
    program = whence.capture(model, (x,), backward=total)
    for group in program.layers():
        check_group(program, group)


def replayed(backward: Backward = False) -> whence.Program:
    """Nine equal layers, most of which were not run."""
    model = Stemmed(Replayed(*(Block() for _ in range(9))))
    return whence.capture(model, (torch.randn(3, 8),), backward=backward)


@pytest.mark.parametrize("backward", [False, sine_loss], ids=["forward", "joint"])
def test_calls_written_from_one_record_are_not_spelled_again(
    backward: Backward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the capture knows of them is believed, and gives the same layers."""
    program, spelled, spell = replayed(backward), list[int](), Key.spelled

    def noted(key: Key) -> tuple[Any, ...]:
        spelled.append(key.number)
        return spell(key)

    monkeypatch.setattr(Key, "spelled", noted)
    known, few = program.layers(), len(spelled)
    assert known == forgotten(program).layers()
    assert len(spelled) - few == few + 6


def forgotten(program: whence.Program) -> whence.Program:
    """The program without what its capture knew of calls that were written from one record."""
    return program.under(replay=replace(program.replay, known=None))


def copied_in_front(node: fx.Node) -> None:
    """The operation once more, read by nothing."""
    with node.graph.inserting_before(node):
        node.graph.node_copy(node, lambda source: source)


EDITS: dict[str, Callable[[fx.Node], object]] = {
    "another operation": lambda node: setattr(node, "target", torch.ops.aten.sin.default),
    "another argument": lambda node: setattr(node, "args", (node.graph.find_nodes(op="placeholder")[-1],)),
    "a keyword": lambda node: setattr(node, "kwargs", {"out": None}),
    "another origin": lambda node: set_origin(node, origin_of(node)._replace(quality=Quality.INFERRED)),
    "another operation in front": copied_in_front,
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_graph_that_was_edited_is_read(edit: Callable[[fx.Node], object]) -> None:
    """Nothing is known any more of a graph that somebody edited."""
    program = replayed()
    assert len(program.layers()[0]) == 9
    (node,) = program.select("stack.blocks.4 :: aten.gelu.default")
    edit(node)
    first = program.layers()[0]
    assert len(first) == 8
    assert "stack.blocks.4" not in map(str, first.calls)
    assert program.layers() == forgotten(program).layers()


def test_layers_of_a_program_whose_state_is_attributes() -> None:
    """How a program holds its state changes nothing about which of its calls are equal."""
    program = stack_program(sine_loss, depth=3)
    assert program.with_state("attributes").layers() == program.layers()
