"""What code spells: the names that it looks up, and the texts and numbers by which it may."""

from collections import deque
from collections.abc import Iterable
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from whence.dependence.code import BY_TEXT, codes_in, globals_in, looked_up_in, names_in
from whence.dependence.lookup import static_attribute
from whence.dependence.snapshots import content_of_cell

FOR_ALL = frozenset(("items", "values", "keys"))
"""Methods of a dictionary by which code asks for all entries."""

ENTERED = frozenset(
    (
        *("__call__", "__enter__", "__exit__", "__iter__", "__next__", "__getitem__", "__setitem__"),
        *("__getattr__", "__get__", "forward", "backward", "setup_context"),
    )
)
"""Methods of a class that code calls without naming them."""
HOLDING = (dict, list, tuple, set, frozenset, deque)


class CodeWords(NamedTuple):
    """The names that code looks up, and the constants by which it may ask for entries.

    `asked` are names of attributes that may be absent: code has them as text, and asks for them so.
    `looked_up` are the variables of whose entries it does not ask for all, where it does of others.
    """

    names: frozenset[str]
    keys: frozenset[Any]
    asked: frozenset[str] = frozenset()
    looked_up: frozenset[str] = frozenset()

    @classmethod
    def of(cls, code: CodeType) -> "CodeWords":
        """What a code spells, and the functions written inside it."""
        inner = list(codes_in(code))
        keys = frozenset(each for part in inner for each in part.co_consts if type(each) in (str, int))
        names = frozenset[str]().union(*map(names_in, inner))
        texts = (key for key in keys if type(key) is str and key.isidentifier())
        asks = not names.isdisjoint(("hasattr", "getattr"))
        asked = frozenset(texts) if asks else frozenset()
        is_mixed = "get" in names and not names.isdisjoint(FOR_ALL)
        return cls(names, keys, asked, looked_up_in(code) if is_mixed else frozenset())

    def and_held(self, held: frozenset[Any]) -> "CodeWords":
        """What code spells, and texts and numbers by which it may look up that it holds."""
        texts = frozenset(text for text in held if type(text) is str)
        return CodeWords(self.names | texts, self.keys | held, self.asked, self.looked_up)

    def with_(self, other: "CodeWords") -> "CodeWords":
        """What two codes spell."""
        looked_up = self.looked_up if other.names.isdisjoint(FOR_ALL) else frozenset[str]()
        return CodeWords(
            self.names | other.names, self.keys | other.keys, self.asked | other.asked, looked_up
        )


NO_WORDS = CodeWords(frozenset(), frozenset())


def names_if_it_looks_up(function: FunctionType) -> frozenset[str]:
    """The names of a function that looks up attributes by text, or has a variable that holds entries."""
    names = names_in(function.__code__)
    held = _variables_held(function, globals_in(function.__code__))
    is_looking = not names.isdisjoint(BY_TEXT) or any(isinstance(each, HOLDING) for each in held)
    return names if is_looking else frozenset()


def _variables_held(function: FunctionType, names: Iterable[str]) -> list[Any]:
    """What globals of these names hold, and the variables that the function closes over."""
    cells = map(content_of_cell, function.__closure__ or ())
    return [*(function.__globals__.get(name) for name in names), *cells]


def words_held(function: FunctionType, names: Iterable[str], method: object) -> frozenset[Any]:
    """The texts and numbers that are under these names in the variables of a function, and in the object
    whose method it is."""
    held = _variables_held(function, names)
    if type(method) is MethodType:
        held += [static_attribute(method.__self__, name) for name in names]
    return frozenset(each for each in held if type(each) in (str, int))
