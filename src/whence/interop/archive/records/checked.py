"""What plain data may be: everything that is read goes through here before it is used."""

import ast
import json
import keyword
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

LARGEST = 2**62
_FEW = 4
_SIZE_CALLS = frozenset({"max", "min", "abs", "int", "float"})
_SIZE_NODES = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.IfExp, ast.Constant, ast.Name),
    *(ast.Load, ast.Call, ast.Attribute, ast.operator, ast.unaryop, ast.boolop, ast.cmpop),
)


class Unreadable(ValueError):
    """Something in a file is not what it may be."""


def raise_unless(holds: bool, otherwise: str) -> None:
    """Raise `Unreadable` where something does not hold."""
    if not holds:
        raise Unreadable(otherwise)


def atom(kinds: tuple[type, ...], data: Any) -> Any:
    if type(data) not in kinds:
        if float in kinds and isinstance(data, dict):
            return infinite(data.get("number"))
        raise Unreadable(
            f"a {type(data).__name__} stands where only {' or '.join(k.__name__ for k in kinds)} may"
        )
    return data


def text(data: Any) -> str:
    return atom((str,), data)  # type: ignore[no-any-return]


def number(data: Any) -> int:
    return atom((int,), data)  # type: ignore[no-any-return]


def truth(data: Any) -> bool:
    """Yes or no."""
    return atom((bool,), data)  # type: ignore[no-any-return]


def listed(data: Any) -> list[Any]:
    return atom((list,), data)  # type: ignore[no-any-return]


def mapping(data: Any) -> dict[str, Any]:
    return atom((dict,), data)  # type: ignore[no-any-return]


def optional(read: Callable[[Any], Any], data: Any) -> Any:
    """What is read, or nothing."""
    return None if data is None else read(data)


def place(data: Any, among: Sequence[Any]) -> int:
    """The number of one of these."""
    if type(data) is not int or not 0 <= data < len(among):
        raise Unreadable("a number leads nowhere")
    return data


def places(data: Any, among: Sequence[Any]) -> list[Any]:
    """Numbers of some of these, or nothing, in a column: looked at all at once."""
    found = set(listed(data)) - {None}
    kinds = set(map(type, data)) - {type(None)}
    if not kinds <= {int} or (found and not 0 <= min(found) <= max(found) < len(among)):
        raise Unreadable("a number leads nowhere")
    return data  # type: ignore[no-any-return]


def names(data: Any) -> list[str]:
    """Names that Python could have, in ASCII, each once: looked at all at once."""
    raise_unless(set(map(type, listed(data))) <= {str}, "a name is no text")
    spelled = "".join(data).isascii() and all(map(str.isidentifier, data))
    raise_unless(spelled and set(data).isdisjoint(keyword.kwlist), "what is called so can have no such name")
    raise_unless(len(set(data)) == len(data), "two things have one name")
    return data  # type: ignore[no-any-return]


def expanded(data: Any, read: Callable[[Any], Any]) -> list[Any]:
    """A column; where much of it is the same, what there is once, and which of these each is."""
    if isinstance(data, list):
        return list(map(read, data))
    given = mapping(data)
    distinct, at = list(map(read, listed(given["distinct"]))), listed(given["at"])
    raise_unless(set(map(type, at)) <= {int} and (not at or min(at) >= 0), "a number leads nowhere")
    return [distinct[position] for position in at]


def column(values: list[Any]) -> Any:
    """A column, as `expanded` reads it."""
    numbers: dict[str, int] = {}
    at = [numbers.setdefault(key, len(numbers)) for key in _keys(values)]
    if len(numbers) * 2 > len(values) or len(values) < _FEW:
        return values
    distinct: list[Any] = [None] * len(numbers)
    for number, value in zip(at, values, strict=True):
        distinct[number] = value
    return {"distinct": distinct, "at": at}


def _keys(values: list[Any]) -> Iterator[str]:
    return (f"'{value}" if type(value) is str else json.dumps(value) for value in values)


def identifier(data: Any) -> str:
    """A name that Python could have."""
    found = text(data)
    raise_unless(found.isidentifier() and not keyword.iskeyword(found), f"{found!r} is no name")
    raise_unless(not found.startswith("__"), f"{found!r} is no name of ours")
    return found


def infinite(data: Any) -> float:
    """A number that JSON has no word for."""
    raise_unless(data in ("inf", "-inf", "nan"), "that is no number")
    return float(data)


def named_dtype(data: Any) -> torch.dtype:
    return of_torch(data, torch.dtype)  # type: ignore[no-any-return]


def of_torch(data: Any, kind: type) -> Any:
    found = vars(torch).get(text(data))
    if not isinstance(found, kind):
        raise Unreadable(f"torch has no {kind.__name__} {data!r}")
    return found


def named_device(data: Any) -> torch.device:
    return torch.device(text(data))


def sized(data: Any) -> int | str:
    """A number, or Python source over names of sizes: arithmetic, and nothing else."""
    if type(data) is int:
        return data
    raise_unless(len(text(data)) < 10_000, "a size is longer than any that is computed")
    for node in ast.walk(ast.parse(data, mode="eval")):
        raise_unless(isinstance(node, _SIZE_NODES), f"{data!r} is no size")
        match node:
            case ast.Name(id=name):
                raise_unless(not name.startswith("__"), f"{data!r} is no size")
            case ast.Constant(value=held):
                raise_unless(type(held) in (int, float, bool), f"{data!r} is no size")
            case ast.Call(func=function, keywords=keywords):
                raise_unless(not keywords and _is_known(function), f"{data!r} is no size")
            case ast.Attribute():
                raise_unless(_is_known(node), f"{data!r} is no size")
            case ast.BinOp(op=ast.Pow(), right=power):
                small = isinstance(power, ast.Constant) and power.value in range(-64, 65)
                raise_unless(small, f"{data!r} is no size")
            case ast.operator():
                raise_unless(not isinstance(node, ast.LShift | ast.MatMult), f"{data!r} is no size")
    return str(data)


def _is_known(function: ast.expr) -> bool:
    match function:
        case ast.Name(id=name):
            return name in _SIZE_CALLS
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return not name.startswith("_") and name not in ("factorial", "comb", "perm")
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return name.startswith("sym_")
    return False
