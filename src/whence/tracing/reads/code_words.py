"""What code spells: the names that it looks up, and the texts and numbers by which it may."""

from types import CodeType
from typing import Any, NamedTuple

from whence.dependence.code import codes_in, looked_up_in, names_in

FOR_ALL = frozenset(("items", "values", "keys"))
"""Methods of a dictionary by which code asks for all entries."""


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
