"""What a run says of an operation that fails in a program that was read from a file."""

import linecache
import traceback
from collections.abc import Iterator
from types import FrameType

from whence._torch.files import TORCH, WHENCE, is_standard_library
from whence._torch.operators.schemas import op_name
from whence.errors import FailedOperation, Place
from whence.program.node_records import place_of
from whence.program.program import FlatProgram
from whence.provenance.origin import GENERATED_FILE, GENERATED_NODES

OF_OPERATIONS = (
    *(RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError),
    *(NotImplementedError, ZeroDivisionError, OverflowError),
)
"""What operators and Python raise themselves. Classes of these say more, and stay what they are."""
_OF_FX = "<eval_with_key>"


def refuse_failed(program: FlatProgram, error: Exception, node: str | None = None) -> None:
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
    words = " ".join(str(error).split())[:200]
    failed = f"{node or 'a run'} of the program {program.name} fails: {words}"
    operation, where = _operation(program, node)
    raise FailedOperation(
        failed,
        where=where,
        why=f"{operation} raised {type(error).__name__}, and the program was read from {said.file}",
        remedy="give it arguments that the captured model takes; where these are such, the file was changed, "
        "or is of another release: capture the model again, and save that",
    ) from error


def _operation(program: FlatProgram, name: str | None) -> tuple[str, Place | None]:
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
