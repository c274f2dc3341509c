"""What `import whence` gives: a facade without logic. Each call leads to the room that does the work."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Self

from torch import Tensor

from whence import hierarchy, tracing
from whence.errors import (
    CallError,
    CaptureError,
    DataDependent,
    InputMismatch,
    InvalidLoss,
    MalformedProgram,
    NestedCapture,
    NotCallable,
    NotDifferentiable,
    SelectionError,
    UnsupportedHook,
    UnsupportedInput,
    UnsupportedMutation,
    UsageError,
    WhenceError,
)
from whence.hierarchy import Tree
from whence.program import Call, Calls, Convention, Input, Output, Signature
from whence.program import Program as _Program
from whence.program.state import with_state
from whence.provenance import CallSite, ModulePath, Origin, Source
from whence.reports.verification import Verification, verify
from whence.schema import InputKind, OutputKind, Phase, Quality


@dataclass(frozen=True, eq=False)
class Program(_Program):
    """A captured program, with everything that can be asked of it."""

    def with_state(self, state: str) -> Self:
        """The same program with its state as `"inputs"` (placeholders) or `"attributes"` (`get_attr`)."""
        return with_state(self, state)

    def module(self, *, copy: bool = False) -> Tree:
        """The program as one flat runnable module with the original's calling convention.

        With a loss function it returns `(loss, outputs)`. It shares the captured model's tensors unless
        `copy`.
        """
        return hierarchy.flat_module(self, copy=copy)

    def unflatten(self, *, copy: bool = False) -> Tree:
        """The tree of modules: the original's hierarchy, names and state, each module with its own graphs.

        It shares the captured model's tensors unless `copy`, so training the tree trains the model.
        """
        return hierarchy.unflatten(self, copy=copy)

    def verify(
        self, model: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Verification:
        """Run eager and the program from the same seed, and compare everything bit for bit.

        `model` may be another instance than the captured one; it is left as it was.
        """
        return verify(self, model, args, kwargs)


def capture(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    backward: bool | Callable[[Any], Tensor] = False,
    state: str = "inputs",
) -> Program:
    """Record what `model` computes on these example inputs, as one functional graph.

    `model` is a module, a bound method, or any callable. Nothing is computed and no weight is copied: the run
    uses fake tensors, and the model is as it was afterwards, also after an error. Lazy modules alone are
    initialised from the example first, as the model's first call would do it, and stay so.

    Modules compiled by `torch.compile` are captured as they were written, and data-parallel ones as the
    module inside: the program is the local computation, without the averaging of gradients between
    processes. Hooks run once, and what they compute is part of the program.

    `backward=False` records the forward; `True` also the backward, with one tangent input for every
    differentiable output; a function of the outputs records the backward of the scalar it returns.
    `state="inputs"` makes parameters and buffers placeholders, `"attributes"` makes them `get_attr` nodes.

    Raises a `CaptureError` that names the module, the line, the reason and the remedy. An error raised by the
    model itself stays its own, with a note that a capture was running.
    """
    if not isinstance(backward, bool) and not callable(backward):
        raise UsageError(
            f"backward cannot be {backward!r}", remedy="use False, True or a function of the outputs"
        )
    program = tracing.capture(model, args, kwargs, backward)
    return Program(**{field.name: getattr(program, field.name) for field in fields(program)}).with_state(
        state
    )


def unflatten(program: _Program, *, copy: bool = False) -> Tree:
    """The tree of modules of a program; see `Program.unflatten`."""
    return hierarchy.unflatten(program, copy=copy)


__all__ = [
    "Call",
    "CallError",
    "CallSite",
    "Calls",
    "CaptureError",
    "Convention",
    "DataDependent",
    "Input",
    "InputKind",
    "InputMismatch",
    "InvalidLoss",
    "MalformedProgram",
    "ModulePath",
    "NestedCapture",
    "NotCallable",
    "NotDifferentiable",
    "Origin",
    "Output",
    "OutputKind",
    "Phase",
    "Program",
    "Quality",
    "SelectionError",
    "Signature",
    "Source",
    "Tree",
    "UnsupportedHook",
    "UnsupportedInput",
    "UnsupportedMutation",
    "UsageError",
    "Verification",
    "WhenceError",
    "capture",
    "unflatten",
]
