"""Torch functions that a recording answers, or refuses, before the dispatcher sees them."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import whence
from tests._torch.record.test_recorder import recorded
from whence.errors import DataDependent, UnsupportedOperator

KEPT = torch.tensor([[True, False, False, False], [True, True, False, False]])
X = torch.randn(2, 4, 4)


@pytest.mark.canary("torch._nested_tensor_from_mask", "torch._nested_tensor_from_mask_left_aligned")
def test_a_mask_counts_as_aligned_until_it_makes_a_nested_tensor() -> None:
    """Nobody knows its values, and what an encoder then asks may not need them."""

    def encoding(x: Tensor) -> None:
        assert torch._nested_tensor_from_mask_left_aligned(x, KEPT)
        torch._nested_tensor_from_mask(x, KEPT)

    with pytest.raises(DataDependent, match="a nested tensor"):
        recorded(encoding, X)


ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True).eval().requires_grad_(False)
LAYER: Any = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True).eval().requires_grad_(False)


def attended(x: Tensor) -> Any:
    attention = ATTENTION
    return torch._native_multi_head_attention(
        *(x, x, x, 4, 2, attention.in_proj_weight, attention.in_proj_bias),
        *(attention.out_proj.weight, attention.out_proj.bias, None, False),
    )


def layer(x: Tensor) -> Any:
    made = LAYER
    ends = [made.norm1.weight, made.norm1.bias, made.norm2.weight, made.norm2.bias]
    ends += [made.linear1.weight, made.linear1.bias, made.linear2.weight, made.linear2.bias]
    held = made.self_attn
    starts = (held.in_proj_weight, held.in_proj_bias, held.out_proj.weight, held.out_proj.bias)
    return torch._transformer_encoder_layer_fwd(x, 4, 2, *starts, False, False, 1e-5, *ends)


@pytest.mark.canary("torch._transformer_encoder_layer_fwd", "torch._native_multi_head_attention")
@pytest.mark.parametrize("work", [attended, layer])
def test_casts_inside_of_a_kernel_are_refused(work: Callable[[Tensor], Any]) -> None:
    """Under autocast, and only there."""
    targets, _ = recorded(work, X)
    assert targets[0].startswith(("aten._native_multi_head", "aten._transformer_encoder_layer_fwd"))
    with torch.autocast("cpu"), pytest.raises(UnsupportedOperator, match="casts inside"):
        recorded(work, X)


def test_what_was_computed_in_inference_mode_says_so() -> None:
    """A view of what came from outside does not."""

    def asking(x: Tensor) -> None:
        with torch.inference_mode():
            made, view = x * 2, x[0]
        assert (made.is_inference(), view.is_inference(), made[0].is_inference()) == (True, False, True)

    recorded(asking, X)


class Listed(nn.Module):
    """Makes a tensor of a list in which there are tensors that the model holds."""

    def __init__(self, make: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Buffer(torch.tensor(2.0))
        self.whole = torch.tensor(2, dtype=torch.int32)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.make(x, self.scale, self.whole)


class Pair:
    """A sequence of somebody's, which is no list."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: int) -> Any:
        return self.items[at]


def pair(*items: Any) -> Any:
    return Pair(*items)


SPARSE: Any = torch.sparse_coo_tensor  # which takes lists, and is annotated as if it took none
LISTED: dict[str, Callable[..., Tensor]] = {
    "tensor": lambda x, scale, _: torch.tensor([scale, 1.0]),
    "nested": lambda x, scale, _: torch.tensor(((scale, 1.0), (2.0, scale))),
    "by_name": lambda x, scale, _: torch.tensor(data=[scale, 1.0]),
    "keeps_a_dtype": lambda x, _, whole: torch.tensor([whole, 1]),
    "as_tensor": lambda x, scale, _: torch.as_tensor([scale, 1.0]),
    "asarray": lambda x, scale, _: torch.asarray([scale, 1.0]),
    "new_tensor": lambda x, scale, _: x.new_tensor([scale, 1.0]),
    "new": lambda x, scale, _: x.new([scale, 1.0]),
    "old_constructor": lambda x, scale, _: torch.FloatTensor([scale, 1.0]),
    "old_constructor_of_integers": lambda x, _, whole: torch.LongTensor([whole, 1]),
    "sequence": lambda x, scale, _: torch.tensor(pair(scale, 1.0)),
    "sequence_in_a_list": lambda x, scale, _: torch.as_tensor([pair(scale, 1.0)]),
    "mask": lambda x, scale, _: x[:, [scale > 1, True]].cumsum(0).sum(),
    "sparse": lambda x, scale, _: SPARSE([[0], [0]], [scale], (2, 2)).to_dense(),
    "at_an_index": lambda x, _, whole: SPARSE([[whole - 1], [0]], [2.0], (2, 2)).to_dense(),
}


@pytest.mark.canary("torch._C.DispatchKey.Python")
def test_old_constructors_ask_for_each_number() -> None:
    """Of them nobody is told, and of the numbers one is."""
    with pytest.raises(DataDependent, match="the buffer scale"):
        whence.capture(Listed(LISTED["old_constructor"]), (torch.ones(2, 2),))


@pytest.mark.parametrize("make", LISTED.values(), ids=LISTED)
@pytest.mark.parametrize("backward", [False, torch.sum], ids=["forward", "joint"])
def test_numbers_of_tensors_in_a_list_are_read(make: Callable[..., Tensor], backward: Any) -> None:
    """They are no constants: C++ reads them of what the model holds, and no operator says so."""
    model, x = Listed(make), torch.ones(2, 2)
    with pytest.raises(whence.DataDependent, match="needs the value of"):
        whence.capture(model, (x,), backward=backward)
    program = whence.capture(model, (x,), backward=backward, decide="example")
    result = program.verify(model, (x,))
    assert result.ok, str(result)
    model.scale.fill_(0.5)
    model.whole.fill_(1)
    with pytest.raises(whence.StaleCapture, match="goes another way"):
        program.module()(x)


SPLITS: dict[str, Callable[..., Any]] = {
    "function": torch.tensor_split,
    "method": Tensor.tensor_split,
    "named": lambda x, at: x.tensor_split(tensor_indices_or_sections=at),
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("backward", [False, torch.sum], ids=["forward", "joint"])
def test_a_split_is_where_a_tensor_of_the_model_says(split: Callable[..., Any], backward: Any) -> None:
    """The kernel looks at the memory of the tensor, and no operator asks for the numbers."""
    model, x = Split(split), torch.ones(4, 2)
    program = whence.capture(model, (x,), backward=backward)
    for held in (1, 2, 3):
        model.at.fill_(held)
        result = program.verify(model, (x,))
        assert result.ok, str(result)


class Split(nn.Module):
    """Takes what comes before a place that the model holds."""

    def __init__(self, split: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.at = nn.Buffer(torch.tensor([1]))
        self.split = split

    def forward(self, x: Tensor) -> Tensor:
        before: Tensor = self.split(self.linear(x), self.at)[0]
        return before.sum()


class Place(NamedTuple):
    """An index that is a tuple of a class of its own."""

    rows: slice
    column: Tensor


class Indexed(nn.Module):
    """Reads and writes at numbers that the model holds, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.at = nn.Buffer(torch.tensor(1))
        self.other = torch.tensor(2, dtype=torch.int32)

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        hidden = self.linear(x)
        wide = torch.zeros(3, 3)
        wide[[self.at, 0], [row, -1]] = hidden[[row, self.other], [0, self.at]]
        return wide + hidden[..., [self.other, self.at, 0]] + hidden[Place(slice(3), self.at[None])]


@pytest.mark.parametrize("backward", [False, torch.sum], ids=["forward", "joint"])
def test_numbers_in_an_index_are_those_of_each_run(backward: Any) -> None:
    """C++ reads a list of numbers one by one; they are stacked, whoever holds them."""
    model, x = Indexed(), torch.linspace(-1, 1, 9).view(3, 3)
    program = whence.capture(model, (x, torch.tensor(1)), backward=backward)
    for held in (1, 0, 2):
        model.at.fill_(held)
        model.other.fill_(2 - held)
        result = program.verify(model, (x, torch.tensor(held)))
        assert result.ok, str(result)


class Ranged(nn.Module):
    """Multiplies by a range up to a parameter."""

    def __init__(self, make: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.make(0, self.linear.bias[0], 2)


@pytest.mark.parametrize("make", [torch.linspace, torch.logspace])
@pytest.mark.parametrize("backward", [False, torch.sum], ids=["forward", "joint"])
def test_ranges_between_tensors_have_no_history(make: Callable[..., Tensor], backward: Any) -> None:
    """Python makes them without autograd, and has no derivative where C++ calls the operator."""
    model, x = Ranged(make), torch.ones(2, 2)
    result = whence.capture(model, (x,), backward=backward).verify(model, (x,))
    assert result.ok, str(result)


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "all": lambda x, mask: x[mask] * 2,
    "rows": lambda x, mask: x[mask[:, 0]] * 2,
    "behind dots": lambda x, mask: x[..., mask[0]] * 2,
    "in a tuple": lambda x, mask: x[:, mask[1]] * 2,
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_bytes_selects_as_in_eager(name: str) -> None:
    """PyTorch's fake kernel of index takes none, and the capture ended in its error."""
    x, mask = torch.rand(2, 3, requires_grad=True), torch.tensor([[1, 0, 2], [0, 1, 1]], dtype=torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that masks of bytes are deprecated
        program = whence.capture(MASKS[name], (x, mask))
        assert program.verify(MASKS[name], (x, mask)).ok
