"""What a model computes at a size that a branch excludes is a program of its own, behind one callable."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim

import whence

MODES = [False, True, lambda output: output.sin().sum()]
BATCH = Dim("batch", min=0)


class Branching(nn.Module):
    """Takes another way at some sizes: another layer, a constant, statistics of a batch."""

    seen: Tensor

    def __init__(self, function: Callable[["Branching", Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.usual, self.single, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.function(self, x)


def other_operation(model: Branching, x: Tensor) -> Tensor:
    """One row goes through another operator."""
    return model.usual(x).cos() if x.shape[0] == 1 else model.usual(x).sin()


def other_layer(model: Branching, x: Tensor) -> Tensor:
    """One row goes through another layer, and meets a constant of its own."""
    if x.shape[0] == 1:
        return model.single(x) * torch.tensor([2.0, 3.0, 4.0, 5.0])
    return model.usual(x) * torch.tensor([5.0, 4.0, 3.0, 2.0])


def normalised(model: Branching, x: Tensor) -> Tensor:
    """Statistics need more than one row; an empty batch is excluded, too."""
    return model.norm(model.usual(x)) if x.shape[0] > 1 else model.single(x)


def divided(model: Branching, x: Tensor) -> Tensor:
    """The other side is right for its size alone."""
    result = model.usual(x)
    return result / (2 if x.shape[0] == 1 else x.shape[0])


def seventh(model: Branching, x: Tensor) -> Tensor:
    """It is not about 1."""
    return model.single(x) if x.shape[0] == 7 else model.usual(x)


def written(model: Branching, x: Tensor) -> Tensor:
    """Only one row is noted in the buffer."""
    if x.shape[0] == 1:
        model.seen.add_(x.detach().sum())
    return model.usual(x)


def by_both(model: Branching, x: Tensor) -> Tensor:
    """Two dimensions decide, each by itself and both together."""
    if x.dim() == 3 and x.shape[1] == 1:
        return model.single(x) if x.shape[0] == 1 else model.usual(x).cos()
    return model.usual(x).tanh() if x.shape[0] == 1 else model.usual(x)


def same_at_one(model: Branching, x: Tensor) -> Tensor:
    """Both sides are one, so there is no rule, and nothing to keep."""
    return model.usual(x if x.shape[0] == 1 else x.expand(x.shape[0], -1))


VARIANTS: dict[Any, list[tuple[tuple[str, int], ...]]] = {
    other_operation: [(("batch", 1),)],
    other_layer: [(("batch", 1),)],
    normalised: [(("batch", 0),), (("batch", 1),)],
    divided: [(("batch", 1),)],
    seventh: [(("batch", 7),)],
    written: [(("batch", 1),)],
    same_at_one: [],
}


def captured(function: Any, backward: Any = False, **options: Any) -> tuple[Branching, whence.Program]:
    """A program with variants, from an example of three rows."""
    torch.manual_seed(0)
    model = Branching(function)
    shapes = {"x": {0: BATCH}}
    options = {"dynamic_shapes": shapes, "variants": True, **options}
    return model, whence.capture(model, (torch.randn(3, 4),), backward=backward, **options)


def numbers(program: whence.Program) -> list[tuple[tuple[str, int], ...]]:
    """The sizes that the variants have."""
    return sorted(each.circumstances.numbers for each in program.variants)


@pytest.mark.parametrize("backward", MODES, ids=["forward", "tangents", "loss"])
@pytest.mark.parametrize("function", VARIANTS, ids=lambda function: function.__name__)
def test_every_size_is_eager(function: Any, backward: Any) -> None:
    """What one branch excludes runs as the variant, bit for bit: outputs, gradients and buffers."""
    model, program = captured(function, backward)
    assert numbers(program) == VARIANTS[function]
    for size in {1, 2, 5, *(size for at in VARIANTS[function] for _, size in at)}:
        x = torch.randn(size, 4)
        result = program.verify(model, (x,))
        assert result.ok, str(result)
        assert program.check(model, (x,)) == []


class LastStep(nn.Module):
    """A recurrent network is recorded otherwise for one step, and so is what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result = self.steps(x)[0]
        return result[:, -1].sin() if x.shape[1] > 1 else result.squeeze(1)


def test_a_size_that_two_rules_exclude() -> None:
    """It has a variant as one has that a single rule excludes."""
    model, shapes = LastStep(), {"x": {1: Dim("length", min=1)}}
    program = whence.capture(model, (torch.randn(3, 5, 4),), dynamic_shapes=shapes, variants=True)
    assert numbers(program) == [(("length", 1),)]
    for length in (1, 2, 7):
        assert program.verify(model, (torch.randn(3, length, 4),)).ok


def test_a_size_that_nobody_asked_for_has_no_variant() -> None:
    """What dynamic_shapes leaves out is left out."""
    assert captured(normalised, dynamic_shapes={"x": {0: Dim("batch", min=2)}})[1].variants == ()


def test_without_being_asked_for_the_size_stays_excluded() -> None:
    """Variants are kept only where they were asked for."""
    model, program = captured(other_operation, variants=False)
    assert program.variants == ()
    with pytest.raises(whence.CallError, match="must be other than 1"):
        program.verify(model, (torch.randn(1, 4),))


@pytest.mark.parametrize("backward", MODES[::2], ids=["forward", "loss"])
def test_sizes_that_are_excluded_together(backward: Any) -> None:
    """A variant excludes sizes by itself, and has variants of its own."""
    torch.manual_seed(0)
    model = Branching(by_both)
    shapes = {"x": {0: Dim("batch"), 1: Dim("length")}}
    example = (torch.randn(3, 5, 4),)
    program = whence.capture(model, example, backward=backward, dynamic_shapes=shapes, variants=True)
    both = (("batch", 1), ("length", 1))
    assert {*numbers(program)} >= {both[:1], both[1:], both}
    for size in ((3, 5), (1, 5), (3, 1), (1, 1), (2, 7), (1, 9)):
        result = program.verify(model, (torch.randn(*size, 4),))
        assert result.ok, f"{size}: {result}"


def decoder(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small decoder of transformers, with two rows of tokens."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
    config = getattr(transformers, f"{name}Config")(**sizes, intermediate_size=64, use_cache=False)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    return model, {"input_ids": torch.randint(3, 90, (2, 8))}


@pytest.mark.parametrize("name", ["Llama", pytest.param("GPTNeoX", marks=pytest.mark.slow)])
def test_a_batch_of_one_of_a_decoder_needs_none(name: str) -> None:
    """It compares the batch with 1, and computes the same at 1."""
    model, ids = decoder(name)
    shapes = {"input_ids": {0: Dim("batch"), 1: Dim("length", min=2)}}
    program = whence.capture(model, (), ids, dynamic_shapes=shapes, variants=True)
    assert program.variants == ()
    assert program.verify(model, (), {"input_ids": ids["input_ids"][:1]}).ok


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["Llama", pytest.param("GPTNeoX", marks=pytest.mark.slow)])
def test_one_token_of_a_decoder(name: str) -> None:
    """Attention of one token is not told that it is causal: that is a variant."""
    model, ids = decoder(name)
    shapes = {"input_ids": {0: Dim("batch"), 1: Dim("length")}}
    program = whence.capture(model, (), ids, dynamic_shapes=shapes, variants=True)
    assert (("length", 1),) in numbers(program)
    tree = program.unflatten()
    for size in ((1, 8), (3, 5), (3, 1), (1, 1)):
        given = torch.randint(3, 90, size)
        assert program.verify(model, (), {"input_ids": given}).ok
        assert torch.equal(tree(input_ids=given).logits, model(input_ids=given).logits)


def failing(model: Branching, x: Tensor) -> Tensor:
    """There is no way for one row."""
    if x.shape[0] == 1:
        raise ValueError("not for one")
    return model.usual(x)


def test_a_size_at_which_the_model_raises() -> None:
    """It has no variant, for it has no way."""
    model, program = captured(failing)
    assert program.variants == ()
    with pytest.raises(whence.CallError, match="must be other than 1"):
        program.verify(model, (torch.randn(1, 4),))


def decided(model: Branching, x: Tensor) -> Tensor:
    """Values decide what becomes of one row."""
    if x.shape[0] == 1:
        return model.single(x) if x.sum() > 0 else model.usual(x)
    return model.usual(x)


def test_a_size_at_which_no_capture_succeeds() -> None:
    """It stays excluded, and a warning says why."""
    with pytest.warns(UserWarning, match=r"no variant where batch is 1, which stays excluded: \[WH104\]"):
        model, program = captured(decided)
    assert program.variants == ()
    with pytest.raises(whence.CallError, match="must be other than 1"):
        program.verify(model, (torch.randn(1, 4),))


def by_many(model: Branching, x: Tensor) -> Tensor:
    """A branch of its own for each of twenty sizes."""
    for size in range(20, 40):
        if x.shape[0] == size:
            return model.usual(x) * size
    return model.usual(x)


@pytest.mark.sweep
def test_more_than_a_few_are_too_many() -> None:
    """The rest stays excluded, and a warning says from where."""
    with pytest.warns(UserWarning, match="more than 16 variants: where batch is 36 there is none"):
        model, program = captured(by_many)
    assert len(program.variants) == 16
    assert program.verify(model, (torch.randn(20, 4),)).ok
    with pytest.raises(whence.CallError, match="must be other than 39"):
        program.verify(model, (torch.randn(39, 4),))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"dynamic_shapes": None}, "variants=True needs dynamic_shapes"),
        ({"strict": True}, "variants does not work with strict=True"),
        ({"variants": "all"}, "variants cannot be 'all'"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], fault: str) -> None:
    """They are refused before anything runs."""
    with pytest.raises(whence.UsageError, match=fault):
        captured(other_operation, **options)


def test_what_is_printed_says_so() -> None:
    """The page of a program, its shapes, and how it is shown in short."""
    _, program = captured(normalised)
    assert "variant   batch is 1: <Program of Branching" in str(program)
    assert str(program.shapes).splitlines()[-2:] == ["variant   batch is 0", "variant   batch is 1"]
    assert program.shapes.to_dict()["variants"] == ["batch is 0", "batch is 1"]
    assert repr(program).endswith("2 variant(s)>")
