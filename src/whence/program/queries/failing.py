"""What a run says of an operation that fails in a program that was read from a file."""

import linecache
import traceback
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from whence._torch.files import TORCH, WHENCE, is_standard_library
from whence._torch.operators.schemas import op_name
from whence.errors import FailedOperation, Place
from whence.program.node_records import place_of
from whence.provenance.origin import GENERATED_FILE, GENERATED_NODES

if TYPE_CHECKING:
    from whence.program.program import FlatProgram

OF_OPERATIONS = (
    *(RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError),
    *(NotImplementedError, ZeroDivisionError, OverflowError),
)
"""What operators and Python raise themselves. Classes of these say more, and stay what they are."""
_OF_FX = "<eval_with_key>"


def refuse_failed(program: "FlatProgram", error: Exception, node: str | None = None) -> None:
    """Raise `FailedOperation` in the place of what an operation of a program raised that a file holds.

    A file may say what no run can do: then PyTorch's words are about something that nobody wrote. `node` is
    the operation, or else it is found. What other people's code raises, in a module that took the place of a
    captured one, is theirs.
    """
    said = program.guards.said
    if said is None or type(error) not in OF_OPERATIONS:
        return
    if node is None:
        frames = [*_frames(error)]
        if not frames or not _is_ours(frames[-1]):
            return
        node = next((name for frame in reversed(frames) if (name := _node_of(frame))), None)
    raise _failed(program, said.file, node, error) from error


def refuse_misfits(program: "FlatProgram", gradients: Iterable[tuple[str, Tensor | None, Any]]) -> None:
    """Raise `FailedOperation` where what a file says to be a gradient is none, by its shape; each with the
    name and the shape of what it is of. It would be an error of autograd's, outside of all our code."""
    said = program.guards.said
    for name, gradient, shape in gradients if said is not None else ():
        if gradient is not None and shape is not None and not _expands(shape, gradient.shape):
            error = RuntimeError(f"it has a gradient of {list(gradient.shape)}, and is {list(shape)}")
            raise _failed(program, said.file, name, error)  # type: ignore[union-attr]


def _expands(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether autograd sums a gradient of that shape to what it is of."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, wanted) for size, wanted in pairs)


def _failed(program: "FlatProgram", file: str, node: str | None, error: Exception) -> FailedOperation:
    words = " ".join(str(error).split())[:200]
    operation, where = _operation(program, node)
    return FailedOperation(
        f"{node or 'a run'} of the program {program.name} fails: {words}",
        where=where,
        why=f"{operation} raised {type(error).__name__}, and the program was read from {file}",
        remedy="give it arguments that the captured model takes; where these are such, the file was changed, "
        "or is of another release: capture the model again, and save that",
    )


def _operation(program: "FlatProgram", name: str | None) -> tuple[str, Place | None]:
    """What a node calls, and where it came from."""
    found = next((node for node in program.nodes() if node.name == name), None)
    return ("it", None) if found is None else (op_name(found.target), place_of(found))


def _frames(error: Exception) -> Iterator[FrameType]:
    """Where an error came from, without the code of PyTorch and Python."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(TORCH) and not is_standard_library(file):
            yield frame


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((WHENCE, GENERATED_FILE, _OF_FX))


def _node_of(frame: FrameType) -> str | None:
    """The operation that a line of generated code runs."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    if file == GENERATED_FILE:
        found: str | None = frame.f_globals[GENERATED_NODES].get(line)
        return found
    if file.startswith(_OF_FX):
        return linecache.getline(file, line).partition("=")[0].partition(":")[0].strip() or None
    return None
