"""Every operator in PyTorch's own table, forward and joint, in place and not, against eager bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

import whence
from tests.conformance.exceptions import OPERATORS, UNWRITTEN, expected_of
from tests.conformance.running import SEEDED, Calling, Case, modules_that_seed, spread, swept, unseeded

SAMPLES = 3
"""So many examples of an operator with the first seed; with the others the largest one, in place."""
SEEDS = 5
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
"""The first that an operator takes is the one it is run with."""

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def named(info: Any) -> str:
    """The operator, and which of its variants."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def dtype_of(info: Any) -> torch.dtype | None:
    """What an operator is run with; None for those that the CPU has no kernel for."""
    supported = info.supported_dtypes("cpu")
    return next((dtype for dtype in (*DTYPES, *sorted(supported, key=str)) if dtype in supported), None)


def samples(info: Any, dtype: torch.dtype, seed: int, *, grad: bool) -> Iterator[tuple[str, Any]]:
    """Some of PyTorch's examples of an operator, with their names."""
    torch.manual_seed(seed)
    found = list(info.sample_inputs("cpu", dtype, requires_grad=grad, set_seed=False))
    chosen = spread(found, SAMPLES) if seed == 0 else sorted(found, key=size_of)[-1:]
    yield from ((f"seed {seed}, sample {at}", sample) for at, sample in enumerate(chosen))


def size_of(sample: Any) -> int:
    """How many numbers an example begins with."""
    return sample.input.numel() if isinstance(sample.input, Tensor) else 0


def cases(info: Any) -> Iterator[Case]:
    """The examples of an operator, each also in place where it has such a form."""
    dtype = dtype_of(info)
    if dtype is None:
        return
    grad = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    for name, sample in samples(info, dtype, 0, grad=grad):
        yield Case(name, info.op, (sample.input, *sample.args), sample.kwargs, grad)
    if info.inplace_variant is None:
        return
    written = in_place(info.inplace_variant)
    for seed in range(SEEDS):
        for name, sample in samples(info, dtype, seed, grad=grad):
            if isinstance(sample.input, Tensor) and not sample.broadcasts_input:
                args = (sample.input, *sample.args)
                yield Case(f"{name} in place", written, args, sample.kwargs, grad)


def in_place(variant: Any) -> Any:
    """Writes to a copy: eager writes to no leaf that requires a gradient."""
    return lambda given, *args, **kwargs: variant(given.clone(), *args, **kwargs)


@pytest.mark.parametrize("info", [row for row in op_db if row.name in UNWRITTEN], ids=named)
def test_unwritten_memory(info: Any) -> None:
    """What an operator gives that writes nothing is named, and compared with nothing."""
    found = []
    for case in cases(info):
        model, program = Calling(case), whence.capture(Calling(case), tuple(case.tensors))
        result = model(*case.tensors)
        found.append(result.numel() == 0 or program.verify(model, tuple(case.tensors)).uninitialised != ())
    assert found and all(found)


@pytest.mark.parametrize("info", [row for row in op_db if row.name not in UNWRITTEN], ids=named)
def test_operator(info: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator is captured with every bit of eager's, or is in the table of exceptions with its reason."""
    for module in modules_that_seed():
        monkeypatch.setattr(module, SEEDED, unseeded)
    found = swept(cases(info))
    assert set(found.values()) == expected_of(OPERATORS, named(info)), found


def test_every_exception_is_about_an_operator() -> None:
    """A name in the table is one of PyTorch's."""
    assert {name for row in OPERATORS for name in row.names} <= {named(info) for info in op_db}
