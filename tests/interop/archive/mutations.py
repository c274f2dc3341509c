"""Files of programs, changed at random: bytes, members of the zip, and what the plain data says."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

PROGRAM, TENSORS = "program.json", "tensors.safetensors"
_STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 10**6, 2**40, 2**63, 2**64, -(2**70), 10**400, 1.5, -0.0, 1e308),
    *(
        "",
        "x",
        "self",
        "None",
        "__import__",
        "import os",
        "os.system",
        "x" * 5000,
        "a.b",
        "\x00",
        "é",
        "../x",
    ),
    *("__import__('os').system('x')", "2**2**2**2**2", "9**9**9", "torch", "lambda: 0", "]", "f'{x}'"),
    *([], {}, [[]], [0], [None], ["operator", "aten", "mm", "default"], ["higher order", "cond"]),
    *(["function", "operator.getitem"], ["operator", "os", "system", "x"], {"node": 0}, {"node": 10**9}),
    *(
        {"words": "x"},
        {"tensor": 0},
        {"tuple": []},
        {"number": "nan"},
        {"size": ["whole", 1, 1]},
        {"class": 0},
    ),
    *(
        {"bytes": "!!"},
        {"range": [0, 2**60, 1]},
        {"complex": [1, 2]},
        {"enum": [0, "x"]},
        {"mapping": [[[], 1]]},
    ),
    *({"distinct": [], "at": [0]}, {"distinct": [1], "at": [-1]}, {"count": 10**9, "columns": {}}),
)


def members(content: bytes) -> dict[str, bytes]:
    """What is in a file."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return {name: file.read(name) for name in file.namelist()}


def zipped(rows: list[tuple[str, bytes]]) -> bytes:
    """A zip of these members, whatever their names."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_STORED) as file:
        for name, content in rows:
            file.writestr(zipfile.ZipInfo(name), content)
    return held.getvalue()


def with_data(content: bytes, change: Callable[[Any], Any]) -> bytes:
    """The file with other plain data."""
    held = members(content)
    data = json.loads(held[PROGRAM])
    changed = change(data)
    text = json.dumps(data if changed is None else changed)
    return zipped([(PROGRAM, text.encode()), (TENSORS, held[TENSORS])])


def mutated(content: bytes, dice: random.Random) -> bytes:
    """The file with something changed."""
    return dice.choice((_flipped, _flipped, _members, _tensors, *[_data] * 6))(content, dice)


def _flipped(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 8))):
        at = dice.randrange(len(changed))
        kind = dice.randrange(4)
        if kind == 0:
            changed[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del changed[at : at + dice.randrange(64)]
        elif kind == 2:
            changed[at:at] = dice.randbytes(dice.randrange(64))
        else:
            changed[at : at + 4] = dice.choice((b"\xff\xff\xff\xff", b"\0\0\0\0"))
        if not changed:
            break
    return bytes(changed)


def _members(content: bytes, dice: random.Random) -> bytes:
    rows = list(members(content).items())
    kind = dice.randrange(5)
    if kind == 0:
        del rows[dice.randrange(len(rows))]
    elif kind == 1:
        rows.append(
            (dice.choice(("../evil", "/etc/passwd", "x.pkl", "data.pkl", "")), b"cos\nsystem\n(S'x'\ntR.")
        )
    elif kind == 2:
        at = dice.randrange(len(rows))
        rows[at] = (dice.choice(("a", "program.json ", "PROGRAM.JSON", "")), rows[at][1])
    elif kind == 3:
        at = dice.randrange(len(rows))
        rows[at] = (rows[at][0], dice.choice((b"", b"[]", b"null", b"{", b"[" * 100_000, b'{"a":' * 50_000)))
    else:
        rows = [(name, dice.choice(rows)[1]) for name, _ in rows]
    return zipped(rows)


def _tensors(content: bytes, dice: random.Random) -> bytes:
    held = members(content)
    return zipped([(PROGRAM, held[PROGRAM]), (TENSORS, _flipped(held[TENSORS], dice))])


def _data(content: bytes, dice: random.Random) -> bytes:
    def change(data: Any) -> Any:
        for _ in range(dice.choice((1, 1, 1, 2, 5))):
            _change_one(data, dice)
        return data

    return with_data(content, change)


def _change_one(data: Any, dice: random.Random) -> None:
    """Walk down at random, and change where that ends; places near the top are as likely as deep ones."""
    holder, key = data, dice.choice(list(data))
    while isinstance(holder[key], dict | list) and holder[key] and dice.random() < 0.93:
        holder = holder[key]
        key = dice.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    kind = dice.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, deepcopy(dice.choice(_STRANGE)))
    elif kind == 2 and isinstance(holder, list):
        other = dice.randrange(len(holder))
        holder[key], holder[other] = holder[other], holder[key]
    elif kind == 3 and type(holder[key]) is int:
        holder[key] += dice.choice((-1, 1, 2, 100))
    elif kind == 4 and isinstance(holder, dict):
        holder[dice.choice(("x", "columns", "node", "tuple", "words"))] = holder.pop(key)
    else:
        holder[key] = deepcopy(dice.choice(_STRANGE))


def all_mutations(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """So many files, each changed otherwise."""
    for number in range(count):
        yield mutated(content, random.Random(f"{seed}:{number}"))
