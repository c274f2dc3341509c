import pytest

from whence.provenance import ModulePath, PathPattern


def matches(pattern: str, path: str) -> bool:
    return PathPattern.parse(pattern).matches(ModulePath.parse(path))


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("layers.0.mlp", "layers.0.mlp"),
        ("layers.*.mlp", "layers.11.mlp"),
        ("layers.?", "layers.3"),
        ("layers.[01]", "layers.1"),
        ("layers.[!0]", "layers.1"),
        ("*", "layers"),
        ("l*s", "layers"),
        ("", ""),
    ],
)
def test_segment_glob_fits(pattern: str, path: str) -> None:
    """`*`, `?` and `[…]` fit inside one segment."""
    assert matches(pattern, path)


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("layers.*", "layers.0.mlp"),
        ("layers.*", "layers"),
        ("*", ""),
        ("layers.?", "layers.10"),
        ("layers.[01]", "layers.2"),
        ("mlp", "layers.0.mlp"),
        ("layers", "layers.0"),
        ("", "layers"),
        ("Layers", "layers"),
    ],
)
def test_segment_glob_keeps_depth(pattern: str, path: str) -> None:
    """Without `**` a pattern fits paths of its own depth only, and case matters."""
    assert not matches(pattern, path)


@pytest.mark.parametrize("path", ["mlp", "layers.0.mlp", "model.encoder.layers.0.mlp"])
def test_leading_double_star_fits_any_depth(path: str) -> None:
    """`**.mlp` fits a module of that name wherever it is, the top included."""
    assert matches("**.mlp", path)


@pytest.mark.parametrize("path", ["layers", "layers.0", "layers.0.mlp.up"])
def test_trailing_double_star_fits_the_module_and_all_below(path: str) -> None:
    """`layers.**` fits the module itself and everything inside it."""
    assert matches("layers.**", path)


@pytest.mark.parametrize(
    ("path", "expected"), [("a.z", True), ("a.b.c.z", True), ("a.b.c", False), ("z", False)]
)
def test_inner_double_star_fits_any_number_of_segments(path: str, expected: bool) -> None:
    """`a.**.z` fits with nothing or anything between."""
    assert matches("a.**.z", path) is expected


@pytest.mark.parametrize("path", ["", "a", "a.b.c"])
def test_double_star_alone_fits_everything(path: str) -> None:
    """`**` fits every path, the root too."""
    assert matches("**", path)


@pytest.mark.parametrize(("path", "expected"), [("a.x.b.y.c", True), ("a.b.c", True), ("a.c.b", False)])
def test_two_double_stars(path: str, expected: bool) -> None:
    """Several `**` in one pattern each take what they need."""
    assert matches("a.**.b.**.c", path) is expected
