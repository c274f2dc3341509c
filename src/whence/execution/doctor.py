"""What to put into a bug report: versions, and whether PyTorch is what whence expects."""

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from whence._torch.versions.finding import looked_for
from whence._torch.versions.release import TRIED, is_tried, release
from whence.dependence.asking import Failed, attempt
from whence.execution.verify import Verification
from whence.program.plain import AsJSON

_PACKAGES = ("whence", "transformers", "numpy")


@dataclass(frozen=True)
class Diagnosis(AsJSON):
    """`private` is everything private that whence relies on, and whether it is there; `step` says how a
    captured training step compares with eager, or why there is none."""

    versions: dict[str, str]
    tried: bool
    private: dict[str, bool]
    step: str
    step_ok: bool

    @property
    def gone(self) -> tuple[str, ...]:
        """What is not there."""
        return tuple(name for name, is_there in self.private.items() if not is_there)

    @property
    def ok(self) -> bool:
        """Whether all is as expected. A release that nobody has tried may be."""
        return self.step_ok and not self.gone

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        there = len(self.private) - len(self.gone)
        rows = {
            **self.versions,
            "tried": "yes" if self.tried else f"no, only {', '.join(TRIED)}",
            "private parts": f"{there} of {len(self.private)} as expected",
            "training step": self.step,
        }
        width = max(map(len, rows))
        lines = [f"{name:{width}}  {value}" for name, value in rows.items()]
        return "\n".join([*lines, *(f"gone: {name}" for name in self.gone)])


def diagnosis(verified: Callable[[], Verification]) -> Diagnosis:
    """Look at this installation; `verified` captures a training step and compares it."""
    step = attempt(verified)
    if isinstance(step, Failed):
        told = f"{type(step.error).__name__}: {step.error}"
    else:
        equal = sum(row.equal for row in step.rows)
        told = f"{equal} of {len(step.rows)} values bitwise equal to eager"
    return Diagnosis(
        versions={
            "PyTorch": release(),
            **{name: version_of(name) for name in _PACKAGES},
            "Python": platform.python_version(),
            "platform": platform.platform(),
        },
        tried=is_tried(release()),
        private=looked_for(),
        step=told,
        step_ok=not isinstance(step, Failed) and step.ok,
    )


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
