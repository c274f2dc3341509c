"""The kernel of attention is the one that PyTorch's rules give for a capability."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from whence._torch.autograd.switches import SWITCHES, switched
from whence._torch.elsewhere.attention import AttentionCall, kernel_of
from whence._torch.elsewhere.target import Elsewhere, spelled
from whence._torch.versions.grouped_heads import GROUPED_EVERYWHERE

HALF, WHOLE = torch.bfloat16, torch.float32


def there(text: str) -> Elsewhere:
    """A device by its name."""
    found = spelled(text)
    assert found is not None
    return found


def call(
    dtype: torch.dtype = HALF, width: int = 64, keys: int = 8, heads: int = 4, **given: Any
) -> AttentionCall:
    """Attention of 8 queries in 4 heads."""
    query = torch.empty(2, 4, 8, width, dtype=dtype)
    key, value = (torch.empty(2, heads, keys, width, dtype=dtype) for _ in range(2))
    return AttentionCall(query, key, value, **given)


GROUPED = "efficient" if GROUPED_EVERYWHERE else "math"
MASK = torch.ones(8, 8, dtype=torch.bool)
ROWS: list[tuple[str, dict[str, Any], str, str]] = [
    ("half precision", {}, "flash", "cudnn"),
    ("single precision", {"dtype": WHOLE}, "efficient", "efficient"),
    ("double precision", {"dtype": torch.float64}, "math", "math"),
    ("a mask", {"attn_mask": MASK}, "efficient", "cudnn"),
    ("a mask that is learnt", {"attn_mask": torch.zeros(8, 8, requires_grad=True)}, "efficient", "efficient"),
    ("wide heads", {"width": 256}, "flash", "flash"),
    ("wider heads", {"width": 264}, "efficient", "efficient"),
    ("a width that 8 does not divide", {"width": 12}, "flash", "flash"),
    ("such a width in single precision", {"width": 6, "dtype": WHOLE}, "math", "math"),
    ("causal with more keys", {"keys": 16, "is_causal": True}, "efficient", "cudnn"),
    ("dropout of a sixteenth", {"dropout_p": 0.125}, "flash", "cudnn"),
    ("other dropout", {"dropout_p": 0.1}, "flash", "flash"),
    ("grouped heads", {"heads": 2, "enable_gqa": True}, "flash", "cudnn"),
    ("no keys", {"keys": 0}, "math", "math"),
    (
        "grouped heads in single precision",
        {"heads": 2, "enable_gqa": True, "dtype": WHOLE},
GROUPED,
        GROUPED,
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "on_sm80", "on_sm90"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_the_first_kernel_without_an_objection(given: dict[str, Any], on_sm80: str, on_sm90: str) -> None:
    """Whatever PyTorch's own order of priority is on that capability."""
    assert kernel_of(call(**given), there("cuda:sm80")) == on_sm80
    assert kernel_of(call(**given), there("cuda:sm90")) == on_sm90


def test_who_switches_kernels_off_gets_others() -> None:
    """The switches of this process are asked, and so is an order that was set."""
    with sdpa_kernel(SDPBackend.MATH):
        assert kernel_of(call(), there("cuda:sm90")) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert kernel_of(call(), there("cuda:sm80")) == "efficient"


def test_what_only_the_device_could_tell_is_named() -> None:
    """An unnamed capability, and the version of cuDNN."""
    bare, named = there("cuda"), there("cuda:sm90")
    assert kernel_of(call(), bare) == "flash"
    assert "kernels of sm80" in " ".join(bare.presumed)
    kernel_of(call(), named)
    settled = torch.cuda.is_available()  # and known then
    assert settled or "cuDNN is newer than 9.15" in " ".join(named.presumed)


def test_an_order_that_a_device_has_settled_is_for_its_kind() -> None:
    """As PyTorch leaves it after its first call on sm90."""
    before = SWITCHES["order of attention"].read()
    with switched({"order of attention": [3, 1, 2, 0, *before[4:]]}):
        assert kernel_of(call(), there("cuda:sm80")) == "flash"
        assert kernel_of(call(), there("cuda:sm90")) == "cudnn"
