"""Which line of the user's code is running."""

import copy
import inspect
import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Literal

import torch
from torch import Tensor, autograd, nn, overrides

from whence._torch.autograd.mode_questions import is_given_back
from whence._torch.files import ALGEBRA, TORCH, WHENCE, is_standard_library
from whence._torch.observe.hooks import CALL_OF_MODULE, calls_a_hook
from whence.provenance import Source
from whence.provenance.origin import GENERATED_FILE, GENERATED_LINES

Kind = Literal["user", "module", "engine", "boundary", "generated"]
_MODULES = f"{Path(torch.__file__).parent / 'nn' / 'modules'}{os.sep}"
_COMPILER = f"{Path(torch.__file__).parent / 'compiler'}{os.sep}"
_ANSWERS = (
    *("_torch/autograd/mode_questions.py", "_torch/autograd/saved_tensors.py"),
    *("_torch/observe/compile_flags.py", "_torch/record/function_mode.py", "_torch/record/step_recorder.py"),
    *("_torch/function_tracer.py", "tracing/listening/model_acts.py", "tracing/answers.py"),
)
"""Where questions of others are answered; what asks in our other files is no model."""
_DEEPCOPY: str = Tensor.__deepcopy__.__code__.co_filename
_ASKS_FOR_OTHERS = (autograd.__file__, copy.__file__, overrides.__file__, _DEEPCOPY)
_ANSWERING = frozenset((*(str(Path(WHENCE, place)) for place in _ANSWERS), *_ASKS_FOR_OTHERS))
_DOORS = frozenset({"api.py", "captured.py", "errors.py"})


class SourceFinder:
    """Finds the innermost line of user code below a boundary, and remembers what it learnt.

    `modules` are those of the model, by identity.
    """

    def __init__(self, boundaries: tuple[CodeType, ...], modules: frozenset[int] = frozenset()) -> None:
        self._kinds: dict[int, tuple[CodeType, Kind]] = {id(code): (code, "boundary") for code in boundaries}
        self._sources: dict[tuple[int, int], Source] = {}
        self._forwards: dict[type[nn.Module], CodeType | None] = {}
        self._owners: dict[int, tuple[CodeType, str | None]] = {}
        self._modules = modules

    def current(self) -> Source | None:
        """The innermost user line; failing that, the innermost line of a torch module; failing that, None."""
        return self.in_call(None)[0]

    def in_call(self, running: nn.Module | None) -> tuple[Source | None, bool]:
        """The current line in a call of `running`, and whether it runs in a method of another module that is
        watched."""
        frame: FrameType | None = sys._getframe(1)
        fallback: FrameType | None = None
        while frame is not None:
            kind = self._kind(frame.f_code)
            if kind == "user":
                return self._source(frame), self._is_borrowed(fallback or frame, running)
            if kind == "generated" and (known := _line_behind(frame)) is not None:
                return known, False
            if kind == "boundary":
                break
            if kind == "module" and fallback is None:
                fallback = frame
            if fallback is None and frame.f_code is CALL_OF_MODULE:
                running = None  # code of torch's own that was called as a module
            frame = frame.f_back
        return None if fallback is None else self._source(fallback), False

    def _is_borrowed(self, frame: FrameType | None, running: nn.Module | None) -> bool:
        """Whether code in a call of a module runs in a method that another one was asked for directly."""
        if running is None:
            return False
        own = self._forward_of(type(running))
        while frame is not None and frame.f_code is not own and frame.f_code is not CALL_OF_MODULE:
            if (name := self._owner_name(frame.f_code)) is not None:
                owner = frame.f_locals.get(name)
                if owner is running:
                    return False
                if id(owner) in self._modules:
                    return True
            frame = frame.f_back
        return False

    def _forward_of(self, kind: type[nn.Module]) -> CodeType | None:
        """The code of a module's forward, behind its decorators."""
        if kind not in self._forwards:
            self._forwards[kind] = getattr(inspect.unwrap(kind.forward), "__code__", None)
        return self._forwards[kind]

    def _owner_name(self, code: CodeType) -> str | None:
        """What a method calls the object it belongs to; None for other code."""
        if id(code) not in self._owners:
            holder = code.co_qualname.rpartition(".")[0]
            is_method = bool(holder and code.co_argcount) and not holder.endswith("<locals>")
            self._owners[id(code)] = code, code.co_varnames[0] if is_method else None
        return self._owners[id(code)][1]

    def is_user(self, code: CodeType) -> bool:
        """Whether code is the user's."""
        return self._kind(code) == "user"

    def hook(self) -> str | None:
        """The name of the innermost hook that is running: the outermost user code in it, or torch's own."""
        frame: FrameType | None = sys._getframe(1)
        user: FrameType | None = None
        while frame is not None and (kind := self._kind(frame.f_code)) != "boundary":
            user = frame if kind == "user" else user
            if frame.f_back is not None and calls_a_hook(frame.f_back, frame):
                return (user or frame).f_code.co_qualname
            frame = frame.f_back
        return None

    def is_in_torch(self) -> bool:
        """Whether torch's own code called us: `weight_norm` sets the weight that it computed."""
        frame = frame_outside()
        return frame is not None and frame.f_code.co_filename.startswith(TORCH)

    def is_module_asking(self) -> bool:
        """Whether one of PyTorch's own modules asks what we answer."""
        return self._asking() == "module"

    def is_model_asking(self) -> bool:
        """Whether the user's code asks what we answer, or one of PyTorch's own modules."""
        return self._asking() in ("user", "module")

    def is_user_asking(self) -> bool:
        """Whether the user's code asks what we answer."""
        return self._asking() == "user"

    def is_encoder_asking(self) -> bool:
        """Whether one of PyTorch's encoders asks of one tensor after the other, until one says yes."""
        frame = _asking_frame()
        return frame is not None and self.is_module_asking() and _is_one_of_many(frame)

    def is_given_back(self) -> bool:
        """Whether who asks for the grad mode only sets it again."""
        frame = _asking_frame()
        return frame is not None and is_given_back(frame)

    def _asking(self) -> Kind | None:
        frame = _asking_frame()
        return None if frame is None else self._kind(frame.f_code)

    def asked(self) -> Source | None:
        """Who asked torch's compiler a question, if it was not torch itself.

        Libraries ask through a helper in a file of its own; the line in another file that led there says
        more.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((_COMPILER, WHENCE)):
            frame = frame.f_back
        if frame is None or self._kind(frame.f_code) != "user":
            return None
        helper, asking = frame.f_code.co_filename, frame
        while asking.f_back is not None and asking.f_code.co_filename == helper:
            asking = asking.f_back
        return self._source(asking if self._kind(asking.f_code) == "user" else frame)

    def raised_at(self, error: BaseException) -> Source | None:
        """The innermost user line that an exception passed through."""
        trace, found = error.__traceback__, None
        while trace is not None:
            if self._kind(trace.tb_frame.f_code) == "user":
                code = trace.tb_frame.f_code
                found = Source(code.co_filename, trace.tb_lineno, code.co_qualname)
            trace = trace.tb_next
        return found

    def _kind(self, code: CodeType) -> Kind:
        known = self._kinds.get(id(code))
        if known is None:
            known = self._kinds[id(code)] = (code, _classify(code))
        return known[1]

    def _source(self, frame: FrameType) -> Source:
        code = frame.f_code
        key = (id(code), frame.f_lineno)
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = Source(code.co_filename, frame.f_lineno, code.co_qualname)
        return source


def _is_one_of_many(frame: FrameType) -> bool:
    """Whether a frame runs for each thing that `any` is given, or is what such a one calls."""
    return any(each is not None and each.f_code.co_name == "<genexpr>" for each in (frame, frame.f_back))


def _asking_frame() -> FrameType | None:
    """The innermost frame of who asks what we answer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in (__file__, *_ANSWERING):
        frame = frame.f_back
    return frame


def frame_outside() -> FrameType | None:
    """The innermost frame that is not ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(WHENCE):
        frame = frame.f_back
    return frame


def beginning_of(function: object) -> Source | None:
    """The line where a function of the user's begins; None for one of torch's, or not written in Python."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or _classify(code) != "user":
        return None
    return Source(code.co_filename, code.co_firstlineno, code.co_qualname)


def _classify(code: CodeType) -> Kind:
    file = code.co_filename
    if file.startswith(_MODULES):
        return "engine" if file.endswith("module.py") else "module"
    if file == GENERATED_FILE:
        return "generated"
    if file.startswith((TORCH, *ALGEBRA)) or _is_ours(file):
        return "engine"
    if is_standard_library(file):  # contexts, partials, threads
        return "engine"
    return "user"


def _line_behind(frame: FrameType) -> Source | None:
    """The user's line behind a line of code that whence wrote: a captured module is being captured again."""
    found = frame.f_globals.get(GENERATED_LINES, {}).get(frame.f_lineno)
    return found if isinstance(found, Source) else None


def _is_ours(file: str) -> bool:
    """Whether a file is ours; the demonstration model and the losses beside our rooms are a user's."""
    inside = file.removeprefix(WHENCE)
    return inside != file and (os.sep in inside or inside in _DOORS)
