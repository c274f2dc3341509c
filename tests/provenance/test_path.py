import pytest

from whence.provenance import ROOT, ModulePath


@pytest.mark.parametrize("text", ["", "layer", "model.layers.3.mlp"])
def test_text_round_trips(text: str) -> None:
    """A path is printed as it was read."""
    assert str(ModulePath.parse(text)) == text


def test_path_is_a_tuple_of_segments() -> None:
    """A path equals and hashes as its segments, one for each attribute."""
    path = ModulePath.parse("layers.3.mlp")
    assert path == ("layers", "3", "mlp")
    assert hash(path) == hash(("layers", "3", "mlp"))


def test_root_is_the_empty_path() -> None:
    """The root has no segments, no name, and is its own parent."""
    assert tuple(ModulePath.parse("")) == tuple(ROOT) == ()
    assert (ROOT.name, ROOT.parent) == ("", ROOT)


def test_child_and_parent_are_inverse() -> None:
    """The parent of a child is the path itself, and the child's name its last segment."""
    path = ModulePath.parse("model.layers")
    assert path.child("3").parent == path
    assert path.child("3").name == "3"


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ("a.b", "a", True),
        ("a", "a", True),
        ("a", "", True),
        ("", "", True),
        ("a", "a.b", False),
        ("ab", "a", False),
        ("layers.10", "layers.1", False),
    ],
)
def test_within_compares_whole_segments(inner: str, outer: str, expected: bool) -> None:
    """A path lies within itself and its ancestors, and `layers.10` does not lie within `layers.1`."""
    assert ModulePath.parse(inner).is_within(ModulePath.parse(outer)) is expected


def test_relative_path_is_the_rest() -> None:
    """What remains below an ancestor is a path again."""
    relative = ModulePath.parse("model.layers.3").relative_to(ModulePath.parse("model"))
    assert isinstance(relative, ModulePath)
    assert str(relative) == "layers.3"


def test_prefixes_go_from_the_root_down() -> None:
    """The prefixes are the root, every ancestor, and the path itself."""
    assert list(map(str, ModulePath.parse("a.b").prefixes())) == ["", "a", "a.b"]


def test_repr_shows_the_text() -> None:
    """A path in a debugger reads as it is spelled."""
    assert repr(ModulePath.parse("a.b")) == "ModulePath('a.b')"
