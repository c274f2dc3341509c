"""A size of 1, which no example may have: what PyTorch decides there is decided in the run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.export import Dim
from torch.nn.functional import scaled_dot_product_attention

import whence

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
GPT = {"vocab_size": 99, "n_layers": 2, "n_heads": 4, "d_model": 32, "max_seq_len": 64}
XGLM = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64, "vocab_size": 99}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "MPNet": ("MPNetModel", SMALL | {"intermediate_size": 64}),
    "Mpt": ("MptForCausalLM", GPT),
    "Falcon": ("FalconForCausalLM", SMALL | {"alibi": True, "new_decoder_architecture": False}),
    "XGLM": ("XGLMForCausalLM", XGLM | {"max_position_embeddings": 64}),
    "DebertaV2": ("DebertaV2Model", SMALL | {"intermediate_size": 64}),
}


def loss(output: Any) -> Tensor:
    """A number."""
    result: Tensor = output["logits" if "logits" in output else "last_hidden_state"]
    return result.sin().sum()


def captured(name: str) -> tuple[torch.nn.Module, whence.Program]:
    """A training step whose batch and length vary, from an example of two rows."""
    torch.manual_seed(0)
    kind, options = MODELS[name]
    config = getattr(transformers, f"{name}Config")(**options)
    config.use_cache = False
    model = getattr(transformers, kind)(config).eval()
    shapes = {"input_ids": {0: Dim.AUTO, 1: Dim.AUTO}}
    example = {"input_ids": torch.randint(3, 90, (2, 16))}
    return model, whence.capture(model, (), example, backward=loss, dynamic_shapes=shapes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_one_row_are_eagers(name: str) -> None:
    """Eager's matmul reshapes by a view there, and its backward multiplies matrices in another layout."""
    model, program = captured(name)
    for size in ((1, 20), (3, 11)):
        result = program.verify(model, (), {"input_ids": torch.randint(3, 90, size)})
        assert result.ok, str(result)


@pytest.mark.sweep
def test_one_row_is_ruled_out_where_a_backward_multiplies_in_another_order() -> None:
    """The view that eager takes of one row lies column by column, and its backward follows that."""
    torch.manual_seed(0)
    config = transformers.ConvBertConfig(**SMALL, intermediate_size=64, embedding_size=32, conv_kernel_size=3)
    model, ids = transformers.ConvBertModel(config).eval(), torch.randint(3, 90, (2, 8))
    shapes = {"input_ids": {0: Dim.AUTO}}
    program = whence.capture(model, (), {"input_ids": ids}, backward=loss, dynamic_shapes=shapes)
    assert program.verify(model, (), {"input_ids": torch.randint(3, 90, (5, 8))}).ok
    with pytest.raises(whence.CallError, match=r"must be other than 1: modeling_convbert.py:\d+ \(enc"):
        program.verify(model, (), {"input_ids": ids[:1]})
    forward = whence.capture(model, (), {"input_ids": ids}, dynamic_shapes=shapes)
    assert forward.verify(model, (), {"input_ids": ids[:1]}).ok  # autograd chooses in every run


def test_a_copy_by_matmul_is_a_reshape() -> None:
    """Where sizes vary it decides in the run; with fixed sizes it is the clone that export records, too."""
    _, program = captured("Mpt")
    views = program.select(":: aten._unsafe_view.default")
    assert {view.all_input_nodes[0].target for view in views} == {torch.ops.aten.mm.default}
    assert program.select("transformer.blocks.0 :: aten.reshape.default")


class Applied(torch.nn.Module):
    """A function of the input and a weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, torch.nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


RULED_OUT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], int]] = {
    "a matrix times several": (lambda x, w: w @ x, (3, 8, 6), 1),
    "a product of three": (lambda x, w: torch.einsum("bij,jk,bik->bk", x, w, x), (3, 6, 8), 1),
    "a variance": (lambda x, w: (x @ w).var(0), (3, 8), 1),
    "a deviation": (lambda x, w: (x @ w).std(0), (3, 8), 1),
    "attention": (lambda x, w: scaled_dot_product_attention(x @ w, x, x), (2, 2, 3, 8), 0),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", RULED_OUT)
def test_a_size_that_goes_another_way_is_ruled_out(name: str) -> None:
    """Other bits, a division by zero that is none in C++, or a kernel that would end the process."""
    torch.manual_seed(0)
    function, shape, size = RULED_OUT[name]
    dim = 2 if name == "attention" else 0
    model, x = Applied(function), torch.randn(shape, requires_grad=True)
    program = whence.capture(
        model, (x,), backward=lambda y: y.square().sum(), dynamic_shapes=({dim: Dim.AUTO},)
    )
    for other in (2, 5):
        given = torch.randn([other if at == dim else extent for at, extent in enumerate(shape)])
        assert program.verify(model, (given.requires_grad_(),)).ok
    given = torch.randn([size if at == dim else extent for at, extent in enumerate(shape)])
    with pytest.raises(whence.CallError, match=rf"is {size}, and must be (other than 1|at least [12])"):
        program.verify(model, (given.requires_grad_(),))


def test_a_composite_that_asks_for_sizes_is_explained() -> None:
    """`torch.kron` takes sizes as Python numbers, in an operator that no dispatcher knows."""
    with pytest.raises(whence.SpecialisedShapes, match="was fixed to 3"):
        whence.capture(
            lambda x: torch.kron(x, torch.ones(2, 2)), (torch.randn(3, 4),), dynamic_shapes=({0: Dim("b")},)
        )
