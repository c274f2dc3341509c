"""Every module in PyTorch's own table, forward and joint, in training and not, against eager bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_modules import module_db

from tests.conformance.exceptions import MODULES, expected_of
from tests.conformance.running import Case, spread, swept

EXAMPLES = 2
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def cases(info: Any) -> Iterator[Case]:
    """Some of PyTorch's examples of a module, in training and in evaluation."""
    for training in (True, False):
        torch.manual_seed(0)
        examples = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=training)
        for at, example in enumerate(spread(list(examples), EXAMPLES)):
            made, given = example.constructor_input, example.forward_input
            module = info.module_cls(*made.args, **made.kwargs).train(training)
            if given is not None:
                if issubclass(info.module_cls, LazyModuleMixin):
                    module(*given.args, **given.kwargs)
                name = f"example {at} in {'training' if training else 'evaluation'}"
                yield Case(name, module, given.args, given.kwargs, differentiated=True)


@pytest.mark.parametrize("info", module_db, ids=[info.name for info in module_db])
def test_module(info: Any) -> None:
    """A module is captured with every bit of eager's, or is in the table of exceptions with its reason."""
    found = swept(cases(info))
    assert set(found.values()) == expected_of(MODULES, info.name), found
