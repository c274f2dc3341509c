"""What is not captured with every bit of eager's: each exception with its reason, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exceptions:
    """Operators or modules with one outcome (see `running.outcome`), for one reason."""

    outcome: str
    why: str
    names: frozenset[str]


def _rows(outcome: str, why: str, *names: str) -> Exceptions:
    return Exceptions(outcome, why, frozenset(names))


UNWRITTEN = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
"""They give memory that nobody has written: no two runs of eager's have to be the same."""
OPERATORS = (
    _rows(
        "WH102",
        "an input is sparse, or the result is and requires a gradient",
        *("sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"),
    ),
    _rows("WH104", "the result has as many elements as the numbers say", "nn.functional.one_hot"),
    _rows("WH104", "the result is a Python bool", "allclose", "equal"),
    _rows(
        "WH104",
        "PyTorch's code looks at numbers first: are there enough, is the window zero, how long is a target",
        *("corrcoef", "cov", "linalg.lstsq", "linalg.lstsq.grad_oriented"),
        *("nn.functional.ctc_loss", "nn.functional.gaussian_nll_loss"),
    ),
    _rows(
        "WH105",
        "in place it has no functional form with the same arguments",
        *(f"polygamma.polygamma_n_{order}" for order in range(5)),
    ),
    _rows(
        "WH203",
        "forward programs refuse to be differentiated: autograd would give another gradient than eager",
        *("as_strided_scatter", "nn.functional.rrelu"),
        *("nn.functional.celu", "nn.functional.elu", "nn.functional.selu", "nn.functional.threshold"),
    ),
    _rows(
        "wrong: requires_grad 0, gradient 0",
        "a known bug: a matrix to the power 0 is written over a copy, whose gradient is then None and not 0",
        "linalg.matrix_power",
    ),
    _rows("eager: NotImplementedError", "no derivative in place", "acosh", "asinh", "atanh"),
    _rows(
        "eager: RuntimeError",
        "the example cannot be run, or cannot be differentiated with any gradient (in place, the dtype would "
        "change; a phase of an eigenvector is free)",
        *("as_strided.partial_views", "float_power", "linalg.eig"),
    ),
    _rows(
        "eager: AssertionError",
        "for CUDA alone",
        *("jiterator_2inputs_2outputs", "jiterator_4inputs_with_extra_args", "jiterator_binary"),
        *("jiterator_binary_return_by_ref", "jiterator_unary"),
    ),
)
MODULES = (
    _rows(
        "WH104",
        "PyTorch's code looks at numbers first: variances below 0, lengths of targets, masks that say all",
        *("nn.CTCLoss", "nn.GaussianNLLLoss", "nn.Transformer", "nn.TransformerEncoder"),
    ),
    _rows(
        "eager: RuntimeError",
        "the example's random numbers are of another dtype than its input",
        *("nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"),
    ),
)


def expected_of(table: tuple[Exceptions, ...], name: str) -> set[str]:
    """The outcomes that are known of a name."""
    return {row.outcome for row in table if name in row.names}
