"""Canaries: where `torch.fx.traceback.annotate` puts what it says."""

from torch import fx
from torch.fx import traceback

from whence._torch.record.annotations import (
    annotate_like,
    annotations,
    annotations_restored,
    common_annotations,
    note_annotations,
)


def two_nodes() -> tuple[fx.Node, fx.Node]:
    graph = fx.Graph()
    return graph.placeholder("x"), graph.placeholder("y")


def test_annotations_are_seen_while_they_hold() -> None:
    """What is said is there inside the block, nested ones too, and gone after it."""
    assert annotations() == {}
    with traceback.annotate({"a": 1}), traceback.annotate({"b": 2}):
        assert annotations() == {"a": 1, "b": 2}
    assert annotations() == {}


def test_nodes_keep_them_and_pass_them_on() -> None:
    """A node has its own, another like it the same, and both have in common what both say."""
    one, other = two_nodes()
    note_annotations(one)
    assert "custom" not in one.meta
    with traceback.annotate({"a": 1, "b": 2}):
        note_annotations(one)
    annotate_like(other, one)
    annotate_like(other, None)
    assert other.meta["custom"] == {"a": 1, "b": 2}
    other.meta["custom"]["b"] = 3
    assert common_annotations([one, other]) == {"a": 1}
    assert common_annotations([]) == {}


def test_what_is_left_behind_is_taken_away() -> None:
    """A way back leads to what was said before."""
    back = annotations_restored()
    traceback.get_current_meta()["recompute"] = True
    back()
    assert "recompute" not in traceback.get_current_meta()


def test_annotations_are_left_to_who_made_them() -> None:
    """A block of another thread may have ended meanwhile, or go on."""
    with traceback.annotate({"of": "a block that ends"}):
        back = annotations_restored()
        with traceback.annotate({"of": "one inside of it"}):
            pass
        back()
        assert annotations() == {"of": "a block that ends"}
    back()
    assert annotations() == {}
    back = annotations_restored()
    with traceback.annotate({"of": "a block that goes on"}):
        back()
        assert annotations() == {"of": "a block that goes on"}
