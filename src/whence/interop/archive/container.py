"""The file itself: a zip of a few members, each no larger than it says, none leading elsewhere."""

import io
import struct
import zipfile
import zlib
from collections.abc import Mapping

from whence.errors import UnreadableFile

PROGRAM, TENSORS = "program.json", "tensors.safetensors"
_MEMBERS = (PROGRAM, TENSORS)
_MOST_PLAIN = 2**28
"""Bytes of plain data: a program of a million nodes has less."""
_RATIO = 200
"""How many times smaller plain data may be when it is packed."""
_BROKEN = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, NotImplementedError, RuntimeError),
    *(ValueError, OverflowError, KeyError, IndexError),
)
"""What Python's reader of zip files comes to with a broken one."""
_DATE = (1980, 1, 1, 0, 0, 0)


def packed(members: Mapping[str, bytes]) -> bytes:
    """The bytes of a file; equal members give equal bytes."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as file:
        for name, content in members.items():
            how = zipfile.ZIP_DEFLATED if name == PROGRAM else zipfile.ZIP_STORED
            row = zipfile.ZipInfo(name, _DATE)
            row.compress_type = how
            file.writestr(row, content, compresslevel=1 if how == zipfile.ZIP_DEFLATED else None)
    return held.getvalue()


def unpacked(content: bytes, name: str) -> dict[str, bytes]:
    """The members of a file; raises `UnreadableFile` for anything else than a saved program."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            rows = file.infolist()
            why = _zip_fault(rows, len(content))
            held = {} if why else {row.filename: _read_member(file, row) for row in rows}
    except _BROKEN as error:
        raise not_readable(name, f"it is no whole zip file: {error}") from error
    if why:
        raise not_readable(name, why)
    return held


def not_readable(name: str, why: str) -> UnreadableFile:
    """The error for a file that holds no program."""
    return UnreadableFile(
        f"{name} cannot be loaded",
        why=why,
        remedy="save the program again with program.save(path); only files of whence are read here",
    )


def _zip_fault(rows: list[zipfile.ZipInfo], length: int) -> str:
    names = [row.filename for row in rows]
    if len(set(names)) < len(names):
        return "two of its members have one name"
    if other := sorted({*names} - {*_MEMBERS}):
        return f"it holds {', '.join(map(repr, other))}, which no saved program has"
    if PROGRAM not in names:
        return f"it has no {PROGRAM}"
    for row in rows:
        if row.flag_bits & 1:
            return f"{row.filename} is encrypted"
        packs = row.compress_type == zipfile.ZIP_DEFLATED
        if not packs and (row.compress_type != zipfile.ZIP_STORED or row.file_size > length):
            return f"{row.filename} is packed in a way that is not read"
        if packs and (row.filename != PROGRAM or row.file_size > min(_MOST_PLAIN, _RATIO * length)):
            return f"{row.filename} is larger than a file of this length can hold"
    return ""


def _read_member(file: zipfile.ZipFile, row: zipfile.ZipInfo) -> bytes:
    with file.open(row) as member:
        return member.read(row.file_size)
