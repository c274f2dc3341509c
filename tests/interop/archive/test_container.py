"""The zip of a file: two members by name, no more than they say, and nothing else."""

from __future__ import annotations

import io
import zipfile

import pytest

from tests.interop.archive.mutations import PROGRAM, TENSORS, zipped
from whence.errors import UnreadableFile
from whence.interop.archive.container import packed, unpacked


def test_members_come_back() -> None:
    """What was packed is there, and equal members are equal bytes."""
    held = {PROGRAM: b"{}" * 1000, TENSORS: bytes(range(256))}
    assert unpacked(packed(held), "a file") == held
    assert packed(held) == packed(dict(held))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no whole zip file"),
        (b"PK\x03\x04", "no whole zip file"),
        (zipped([(TENSORS, b"")]), "it has no program.json"),
        (zipped([(PROGRAM, b"{}"), ("../evil.pkl", b"")]), "holds '../evil.pkl'"),
        (zipped([(PROGRAM, b"{}"), ("/etc/passwd", b"")]), "which no saved program has"),
    ],
)
def test_anything_else_is_refused(content: bytes, words: str) -> None:
    """Other files, other members, paths that lead elsewhere."""
    with pytest.raises(UnreadableFile, match=words):
        unpacked(content, "a file")


def test_two_members_of_one_name_are_refused() -> None:
    """Readers of zip files do not agree which of them counts."""
    with pytest.warns(UserWarning, match="Duplicate name"):
        content = zipped([(PROGRAM, b"{}"), (PROGRAM, b"[]")])
    with pytest.raises(UnreadableFile, match="two of its members"):
        unpacked(content, "a file")


def bomb(size: int) -> bytes:
    """A member of nothing but zeros."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:
        file.writestr(PROGRAM, bytes(size))
    return held.getvalue()


def test_bombs_are_refused_before_they_are_unpacked() -> None:
    """A file is not larger than its length can hold, whatever it says."""
    content = bomb(50_000_000)
    with pytest.raises(UnreadableFile, match="larger than a file of this length"):
        unpacked(content, "a file")
    lying = content.replace((50_000_000).to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    with pytest.raises(UnreadableFile, match="no whole zip file"):
        unpacked(lying, "a file")


def test_other_ways_to_pack_are_refused() -> None:
    """Tensors are not packed, and plain data in one way only."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_LZMA) as file:
        file.writestr(PROGRAM, b"{}" * 100)
    with pytest.raises(UnreadableFile, match="packed in a way"):
        unpacked(held.getvalue(), "a file")
