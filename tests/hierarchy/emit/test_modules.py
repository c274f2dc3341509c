"""Names of the model's own that the modules of a tree have, too."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from tests.checks import verified
from whence.hierarchy.tree import OWN_NAMES


class Named(nn.Module):
    """Holds a tensor under a name, in one of three ways."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self.name = name
        held: Any = torch.ones(4)
        if kind == "buffer":
            self.register_buffer(name, held)
        else:
            setattr(self, name, nn.Parameter(held) if kind == "parameter" else held)

    def forward(self, x: Tensor) -> Tensor:
        held: Tensor = getattr(self, self.name)
        return x * held


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", sorted(OWN_NAMES))
def test_names_of_the_tree(name: str) -> None:
    """Parameters and buffers may be called what they want; only the user's class keeps a plain tensor so."""
    x = torch.randn(3, 4, requires_grad=True)
    for kind in ("parameter", "buffer"):
        for model in (nn.Sequential(Named(name, kind), nn.Linear(4, 4)), Named(name, kind)):
            program = verified(model, x, backward=torch.sum)
            for run in (program.module(), program.unflatten(), program.unflatten(onto=model)):
                assert torch.equal(run(x)[1], model(x))
    plain = nn.Sequential(Named(name, "plain"))
    program = whence.capture(plain, (x,))
    for make in (program.unflatten, program.module):
        with pytest.raises(whence.UsageError, match=rf"plain attribute {name}(.|\n)*in module 0"):
            make()
    assert torch.equal(program.unflatten(onto=plain)(x), plain(x))  # the user's class has the name for itself
