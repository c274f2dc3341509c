from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whence


@pytest.mark.canary("torch._assert")
def test_an_assertion_of_torch_is_one_of_the_program() -> None:
    """`torch._assert` of a tensor asks for its truth by that name, and every run looks at it."""

    def positive(x: Tensor) -> Tensor:
        torch._assert((x > 0).all(), "not positive")
        return x.sin()

    run = whence.capture(positive, (torch.ones(2),)).module()
    assert torch.equal(run(torch.full((2,), 2.0)), torch.full((2,), 2.0).sin())
    with pytest.raises(RuntimeError, match="the model requires otherwise"):
        run(torch.zeros(2))


def likely(x: Tensor, variances: Tensor) -> Tensor:
    """PyTorch's own function raises for variances below zero."""
    return nn.functional.gaussian_nll_loss(x, x * 2, variances)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("shape", [(2, 3), (2, 1), (2,)], ids=str)
def test_what_a_function_of_torch_requires_every_run_does(shape: tuple[int, ...], backward: bool) -> None:
    """Where it raises otherwise nothing is decided, and open sizes stay so."""
    rows = {0: torch.export.Dim.AUTO}
    x, variances = torch.rand(2, 3, requires_grad=backward), torch.rand(shape)
    loss = (lambda out: out) if backward else False
    program = whence.capture(likely, (x, variances), backward=loss, dynamic_shapes=(rows, rows))
    assert program.verify(likely, (x, variances)).ok
    run, other, others = program.module(), torch.rand(5, 3, requires_grad=backward), torch.rand(5, *shape[1:])
    found = run(other, others)
    assert torch.equal(found[0] if backward else found, likely(other, others))
    with pytest.raises(RuntimeError, match="the model requires otherwise"):
        run(other, others - 2)


class Converting(nn.Module):
    """Brings a part of itself to a dtype, as routers do that compute in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.to(self.dtype)(x.to(self.dtype))


def test_a_module_that_is_what_it_is_brought_to() -> None:
    """Nothing is written then; with another dtype there would be other parameters."""
    x = torch.randn(2, 4)
    model = Converting(torch.float32)
    assert whence.capture(model, (x,)).verify(model, (x,)).ok
    with pytest.raises(whence.LostState, match=r"linear\.weight"):
        whence.capture(Converting(torch.float64), (x,))


@pytest.mark.parametrize("backward", [False, True])
def test_an_index_made_of_single_numbers(backward: bool) -> None:
    """`x[rows, columns]` with tuples of tensors: they are one tensor, of which nobody needs the numbers."""

    class Marking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            rows, columns = zip(*x.argsort(1)[:, :2], strict=True)
            x = self.linear(x)
            x[rows, columns] = 0.0
            return x * x[:, rows].sum()

    model, x = Marking(), torch.randn(4, 4)
    program = whence.capture(model, (x,), backward=backward)
    assert not program.decisions
    for inputs in (x, torch.randn(4, 4)):
        assert program.verify(model, (inputs,)).ok


@pytest.mark.canary("torch.Tensor._nnz")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("asked", ["_nnz", "_values", "_indices", "values", "indices"])
def test_entries_of_a_computed_sparse_tensor(asked: str) -> None:
    """A fake one has none, which would be taken for an answer; those of one that was just made are known."""

    def made(values: Tensor, indices: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(indices, values, (5, 5))._values() * 2

    def computed(values: Tensor, indices: Tensor) -> Tensor:
        sparse = torch.sparse_coo_tensor(indices, values, (5, 5)).coalesce()
        return values * torch.as_tensor(getattr(sparse, asked)()).sum()

    example = torch.ones(3), torch.tensor([[0, 2, 0], [0, 1, 0]])
    assert torch.equal(whence.capture(made, example).module()(*example), made(*example))
    with pytest.raises(whence.UnsupportedOperator, match="only its values say"):
        whence.capture(computed, example)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("softmax", [torch.sparse.softmax, torch.sparse.log_softmax])
def test_a_softmax_of_sparse_tensors(softmax: Callable[[Tensor, int], Tensor]) -> None:
    """Where autograd is passed by, its kernel gives zeros: no joint program has it."""

    def model(values: Tensor, indices: Tensor) -> Tensor:
        return softmax(torch.sparse_coo_tensor(indices, values, (5, 5)), 1).to_dense()

    example = torch.randn(3), torch.tensor([[0, 2, 3], [0, 1, 3]])
    assert torch.equal(whence.capture(model, example).module()(*example), model(*example))
    with pytest.raises(whence.UnsupportedOperator, match="zeros"):
        whence.capture(model, (example[0].requires_grad_(), example[1]), backward=True)


def test_what_numbers_alone_make_is_known_beside_open_numbers() -> None:
    """A position is known where another number is open: code that looks at it goes eager's way."""

    def packed(x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0])
        torch._check_tensor_all(x > 0)
        if torch.compiler.is_compiling() or not (positions.diff() == 1).all():
            return x * 2
        return x * 3

    x = torch.ones(4)
    program = whence.capture(packed, (x,))
    assert program.asked == ()
    assert torch.equal(program.module()(x), x * 3)
