"""A size that a branch excludes is admitted where the other side of the branch computes the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim

import whence


class Branching(nn.Module):
    """Compares the size of its input with numbers."""

    def __init__(self, function: Callable[["Branching", Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def expanded(model: Branching, x: Tensor) -> Tensor:
    """Both sides are one: at a size of 1 there is nothing to expand."""
    positions = torch.arange(4)[None]
    if x.shape[0] != positions.shape[0]:
        positions = positions.expand(x.shape[0], -1)
    return model.linear(x) + positions


def asked_and_forgotten(model: Branching, x: Tensor) -> Tensor:
    """The answer decides nothing."""
    _ = bool(x.shape[0] == 1)
    return model.linear(x)


def another_number(model: Branching, x: Tensor) -> Tensor:
    """It is not about 1."""
    result = model.linear(x)
    return torch.sin(result) if x.shape[0] == 7 else result.sin()


def two_numbers(model: Branching, x: Tensor) -> Tensor:
    """One of the sizes that are excluded is admitted."""
    result = model.linear(x)
    if x.shape[0] < 2:
        return result.cos() if x.shape[0] == 0 else result.sin()
    return result.sin()


def other_operation(model: Branching, x: Tensor) -> Tensor:
    """The other side computes something else."""
    result = model.linear(x)
    return result.cos() if x.shape[0] == 1 else result.sin()


def other_number(model: Branching, x: Tensor) -> Tensor:
    """The other side has another constant."""
    return model.linear(x) * (2.0 if x.shape[0] == 1 else 3.0)


def other_zero(model: Branching, x: Tensor) -> Tensor:
    """The other side has a zero of the other sign."""
    return 1 / (model.linear(x) * (0.0 if x.shape[0] == 1 else -0.0))


def other_size(model: Branching, x: Tensor) -> Tensor:
    """The other side is right for its size alone."""
    result = model.linear(x)
    return result / (2 if x.shape[0] == 1 else x.shape[0])


def other_attribute(model: Branching, x: Tensor) -> Tensor:
    """The other side reads what the program does not watch."""
    result = model.linear(x)
    if x.shape[0] == 1 and model.scale == 3.0:
        return result.cos()
    return result.sin()


def squeezed(model: Branching, x: Tensor) -> Tensor:
    """Every run squeezes as eager does."""
    return model.linear(x).sum(1, keepdim=True).squeeze() * 2


def other_number_of_dimensions(model: Branching, x: Tensor) -> Tensor:
    """At a size of 1 nothing is left of it."""
    result = model.linear(x).sum(1, keepdim=True).squeeze()
    return result * 2 if result.ndim == 1 else result * 3


def other_dimension_squeezed_in_place(model: Branching, x: Tensor) -> Tensor:
    result = model.linear(x).clone().squeeze_(0)
    return result * result.ndim


def write_of_what_is_squeezed(model: Branching, x: Tensor) -> Tensor:
    """A number is written otherwise than a row of them."""
    result = model.linear(x).clone()
    result[:, 0] = result[:, 1:2].squeeze()
    return result


def other_constant(model: Branching, x: Tensor) -> Tensor:
    """The other side makes another tensor of numbers."""
    return model.linear(x) * torch.tensor([2.0 if x.shape[0] == 1 else 3.0])


def other_error(model: Branching, x: Tensor) -> Tensor:
    """The other side fails."""
    if x.shape[0] == 1:
        raise ValueError("not for one")
    return model.linear(x)


ADMITTED = {
    expanded: [1, 2, 5],
    asked_and_forgotten: [1, 2, 5],
    another_number: [1, 2, 7],
    two_numbers: [1, 2, 5],
}
REFUSED = {
    two_numbers: (0, "at least 1"),
    other_operation: (1, "other than 1"),
    other_number: (1, "other than 1"),
    other_zero: (1, "other than 1"),
    other_size: (1, "other than 1"),
    other_attribute: (1, "other than 1"),
    other_constant: (1, "other than 1"),
    other_number_of_dimensions: (1, "other than 1"),
    other_dimension_squeezed_in_place: (1, "other than 1"),
    write_of_what_is_squeezed: (1, "other than 1"),
    other_error: (1, "other than 1"),
}
MODES = [False, True, lambda output: output.sin().sum()]


def captured(function: Any, backward: Any) -> tuple[Branching, whence.Program]:
    """A program whose batch varies, from an example of three rows."""
    torch.manual_seed(0)
    model = Branching(function)
    shapes = {"x": {0: Dim("batch", min=0)}}
    return model, whence.capture(model, (torch.randn(3, 4),), backward=backward, dynamic_shapes=shapes)


@pytest.mark.sample(3)
@pytest.mark.parametrize("backward", MODES, ids=["forward", "tangents", "loss"])
@pytest.mark.parametrize("function", ADMITTED, ids=lambda function: function.__name__)
def test_the_same_on_both_sides_is_no_rule(function: Any, backward: Any) -> None:
    """One program stands for all of these sizes, bit for bit."""
    model, program = captured(function, backward)
    for size in ADMITTED[function]:
        result = program.verify(model, (torch.randn(size, 4),))
        assert result.ok, str(result)


@pytest.mark.sample(5)
@pytest.mark.parametrize("backward", MODES, ids=["forward", "tangents", "loss"])
@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_another_side_stays_a_rule(function: Any, backward: Any) -> None:
    """What the program does not compute it refuses, with the line that decided."""
    model, program = captured(function, backward)
    size, words = REFUSED[function]
    with pytest.raises(whence.CallError, match=rf"must be {words}: test_variants_excluded_sizes.py:\d+"):
        program.verify(model, (torch.randn(size, 4),))
    assert program.verify(model, (torch.randn(6, 4),)).ok


@pytest.mark.parametrize("backward", [False, True])
def test_squeezing_is_decided_in_every_run_of_a_forward_alone(backward: bool) -> None:
    """A forward has eager's operator, a backward a view of the one shape."""
    model, program = captured(squeezed, backward)
    assert program.verify(model, (torch.randn(5, 4),)).ok
    assert bool(program.check(model, (one := torch.randn(1, 4),))) is backward
    assert backward or program.verify(model, (one,)).ok


def both_at_once(x: Tensor) -> Tensor:
    """Each size of 1 is like any other; two of them are not."""
    _ = bool(x.shape[0] == 1), bool(x.shape[1] == 1)
    return x.cos() if x.shape[0] == 1 and x.shape[1] == 1 else x.sin()


def test_sizes_that_are_excluded_together() -> None:
    """What is admitted one by one is looked at together, too."""
    shapes = {"x": {0: Dim("batch"), 1: Dim("length")}}
    program = whence.capture(both_at_once, (torch.randn(3, 4),), dynamic_shapes=shapes)
    sizes = ((1, 4), (3, 1), (1, 1), (2, 5))
    admitted = [size for size in sizes if program.check(both_at_once, (torch.ones(size),)) == []]
    assert admitted == [(1, 4), (2, 5)]
    assert all(program.verify(both_at_once, (torch.randn(size),)).ok for size in admitted)


def test_a_size_that_nobody_asked_for_stays_excluded() -> None:
    """The rule of the person who captured is none of a branch."""
    model = Branching(expanded)
    shapes = {"x": {0: Dim("batch", min=2)}}
    program = whence.capture(model, (torch.randn(3, 4),), dynamic_shapes=shapes)
    with pytest.raises(whence.CallError, match="must be at least 2: Dim"):
        program.module()(torch.randn(1, 4))


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": SMALL | {"intermediate_size": 64, "num_key_value_heads": 4},
    "Mistral": SMALL | {"intermediate_size": 64, "num_key_value_heads": 4, "sliding_window": None},
    "Qwen2": SMALL | {"intermediate_size": 64, "num_key_value_heads": 4},
    "GPTNeoX": SMALL | {"intermediate_size": 64},
}
QUICK = (("Llama", "joint"), ("GPTNeoX", "forward"))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "backward"),
    [
        pytest.param(
            name,
            mode == "joint",
            id=f"{name}-{mode}",
            marks=() if (name, mode) in QUICK else pytest.mark.slow,
        )
        for name in DECODERS
        for mode in ("forward", "joint")
    ],
)
def test_a_batch_of_one_of_decoders(name: str, backward: bool) -> None:
    """They compare the batch with 1, to expand the numbers of positions."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**DECODERS[name], use_cache=False)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.randint(3, 90, (2, 8))
    shapes = {"input_ids": {0: Dim("batch"), 1: Dim("length")}}
    loss = (lambda output: output.logits.sin().sum()) if backward else False
    program = whence.capture(model, (), {"input_ids": ids}, backward=loss, dynamic_shapes=shapes)
    for size in ((1, 6), (1, 8), (4, 5)):
        assert program.verify(model, (), {"input_ids": torch.randint(3, 90, size)}).ok
    tree = program.unflatten()
    one = ids[:1]
    assert torch.equal(
        tree(input_ids=one)[1 if backward else 0][0] if backward else tree(input_ids=one).logits,
        model(input_ids=one).logits,
    )


def test_a_step_takes_a_batch_of_one() -> None:
    """A captured step, too; and PyTorch's exported program of a forward does not ask for more either."""
    torch.manual_seed(0)
    model = Branching(expanded)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).sin().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    shapes = {"x": {0: Dim("batch")}}
    example = (torch.randn(3, 4),)
    program = whence.capture_step(step, example, model=model, optimizer=optimizer, dynamic_shapes=shapes)
    for size in (1, 4):
        assert program.verify(model, (torch.randn(size, 4),), optimizer=optimizer).ok


def test_an_exported_program_takes_a_batch_of_one() -> None:
    """What PyTorch noted of the branch is not asked of the arguments any more."""
    model, program = captured(expanded, False)
    exported = program.to_exported_program().module()
    for size in (1, 4):
        x = torch.randn(size, 4)
        assert torch.equal(exported(x), model(x))
