"""Branches of which one side only raises: they state what holds, in whatever words."""

import dis
from collections.abc import Sequence
from types import FrameType

_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RETURN_GENERATOR", "YIELD_VALUE", "RERAISE"})
_CONVERTS = frozenset({"COMPARE_OP", "TO_BOOL", "UNARY_NOT"})
_CALLS = frozenset({"CALL", "PRECALL", "CALL_KW"})


def required(frame: FrameType | None, *, called: bool) -> bool | None:
    """What a value has to be for code to go on that branches on it next; None where both sides go on.

    `called` says that a function gave the value, in place of a truth that code asks for by itself.
    """
    if frame is None:
        return None
    rows = list(dis.get_instructions(frame.f_code))
    at = next((n for n, row in enumerate(rows) if row.offset == frame.f_lasti), len(rows))
    passed = _CALLS | _CONVERTS if called else _CONVERTS
    jump = next((n for n in range(at, len(rows)) if rows[n].opname not in passed), None)
    if jump is None or "POP_JUMP" not in (name := rows[jump].opname) or "NONE" in name:
        return None
    sides = {"TRUE" in name: _target(rows, jump), "TRUE" not in name: jump + 1}
    negated = any(row.opname == "UNARY_NOT" for row in rows[at:jump])
    going_on = [value != negated for value, start in sides.items() if not _only_raises(rows, start)]
    return going_on[0] if len(going_on) == 1 else None


def _target(rows: Sequence[dis.Instruction], at: int) -> int:
    return next(n for n, row in enumerate(rows) if row.offset == rows[at].argval)


def _only_raises(rows: Sequence[dis.Instruction], start: int) -> bool:
    """Whether every way from here ends in an exception."""
    waiting, seen = [start], set[int]()
    while waiting:
        if (at := waiting.pop()) in seen or rows[at].opname == "RAISE_VARARGS":
            continue
        if rows[at].opname in _ENDS:
            return False
        seen.add(at)
        jumps = rows[at].opcode in dis.hasjrel
        waiting += [_target(rows, at)] if jumps else []
        waiting += [] if rows[at].opname.startswith("JUMP_") and "IF" not in rows[at].opname else [at + 1]
    return True
