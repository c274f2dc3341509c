"""torch.export's vocabulary, as whence reads it."""

import pytest
from torch.export import Dim
from torch.export.dynamic_shapes import _DerivedDim, _DimHint, _DimHintType, _StaticDim

from whence._torch.sizes.dims import DimWish, Freedom, dim_of, wish_of, written


@pytest.mark.canary(
    "torch.export.dynamic_shapes._DimHint",
    "torch.export.dynamic_shapes._DimHintType.AUTO",
    "torch.export.dynamic_shapes._DimHintType.DYNAMIC",
    "torch.export.dynamic_shapes._DimHintType.STATIC",
)
def test_hints_are_what_they_were() -> None:
    """`Dim.AUTO`, `Dim.DYNAMIC` and `Dim.STATIC` are hints of three types, and take bounds."""
    assert isinstance(Dim.AUTO, _DimHint)
    types = (_DimHintType.AUTO, _DimHintType.DYNAMIC, _DimHintType.STATIC)
    assert tuple(hint.type for hint in (Dim.AUTO, Dim.DYNAMIC, Dim.STATIC)) == types
    assert wish_of(Dim.DYNAMIC(min=2, max=6)) == DimWish(
        Freedom.DYNAMIC, "Dim.DYNAMIC(min=2, max=6)", low=2, high=6
    )


@pytest.mark.canary("torch.export.dynamic_shapes._DerivedDim", "torch.export.dynamic_shapes._StaticDim")
def test_derived_dims_have_a_root_and_a_function() -> None:
    """`2 * dim` knows its root, and how it follows from it."""
    batch = Dim("batch", min=1, max=8)
    assert isinstance(2 * batch, _DerivedDim)
    assert wish_of(2 * batch) == DimWish(Freedom.NAMED, "2*batch", "batch", 1, 8, scale=2)
    assert wish_of(batch + 1) == DimWish(Freedom.NAMED, "batch + 1", "batch", 1, 8, offset=1)
    assert wish_of(_StaticDim(4)) == wish_of(4)
    assert wish_of("batch") is None


def test_a_wish_is_written_as_a_dim() -> None:
    """What was read can be written again."""
    roots: dict[str, object] = {}
    for dim in (Dim("k", min=2), 3 * Dim("k", min=2), Dim.STATIC, Dim.AUTO(max=4)):
        wish = wish_of(dim)
        assert wish is not None
        again = wish_of(dim_of(wish, roots))
        assert again == wish
    assert written(wish_of(3 * Dim("k", min=2) - 1)) == "3*Dim('k', min=2) - 1"  # type: ignore[arg-type]
