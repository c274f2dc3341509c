"""What a model's code may not do with what it reaches, told before it runs."""

from collections.abc import Iterable
from types import CodeType, FunctionType

from torch import Tensor

from whence.dependence.code import globals_compared, numbers_matched
from whence.errors import Place, SideEffect, UnsupportedOperator
from whence.provenance import Source


def refuse_compared(function: FunctionType, inner: Iterable[CodeType]) -> None:
    """Raise where code asks of something whether it is a tensor that a variable holds."""
    code = function.__code__
    for name, line in (row for each in inner for row in globals_compared(each)):
        if isinstance(function.__globals__.get(name), Tensor):
            raise SideEffect(
                f"the model asks of something whether it is the tensor `{name}`",
                where=Place(line=str(Source(code.co_filename, line, code.co_qualname))),
                why="a capture runs on fake tensors, and none of them is that one; no run would look again",
                remedy="pass in what it decides, as a flag; or compare with an object that is no tensor",
            )


def refuse_matched(code: CodeType, inner: Iterable[CodeType]) -> None:
    """Raise where a pattern asks for a class that is another one of what stands for a number."""
    for name, line in (row for each in inner for row in numbers_matched(each)):
        raise UnsupportedOperator(
            f"the pattern `case {name}()` asks a number for its class",
            where=Place(line=str(Source(code.co_filename, line, code.co_qualname))),
            why="Python looks at classes itself there, and a size that may vary has one of PyTorch's",
            remedy=f"write `if isinstance(number, {name}):` in its place, or capture with fixed sizes",
        )


def iterated(path: str, value: object, line: str | None) -> SideEffect:
    """The error for an iterator that the model reads."""
    return SideEffect(
        f"the model reads `{path}`, a {type(value).__name__}, while it runs",
        where=Place(line=line),
        why="what is taken from an iterator is gone, and cannot be given back after the capture; a program "
        "would have it as a constant, the same in every run",
        remedy="take from it outside of the model, and pass in what comes",
    )
