"""Which hook is running, and which lines change modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from whence._torch.observe.hooks import has_hooks
from whence.tracing.sandbox.module_snapshot import Lines
from whence.tracing.source_lines import SourceFinder
from whence.tracing.target.subject import Subject


class Watch:
    """Knows whether a hook may be running, so that nobody looks for one where there is none."""

    def __init__(
        self, subject: Subject, finder: SourceFinder, lines: Lines, written: Callable[[str], None]
    ) -> None:
        self._written = written
        self._finder = finder
        self._lines = lines
        self.packs: str | None = None
        self.has_packed = False
        self.packers: dict[str, None] = {}
        self._hooked = sum(has_hooks(module) for _, module in subject.named_wrappers())

    @contextmanager
    def calling(self, module: nn.Module) -> Iterator[None]:
        """A call of `module`: its hooks may run meanwhile."""
        hooked = has_hooks(module)
        self._hooked += hooked
        try:
            yield
        finally:
            self._hooked -= hooked

    @contextmanager
    def packing(self, name: str, is_torchs: bool) -> Iterator[None]:
        """Autograd lets a hook pack a tensor that it saves."""
        self.packers |= {} if is_torchs else {f"the hook {name} on saved tensors": None}
        before, self.packs = self.packs, None if is_torchs else name
        self.has_packed = True
        try:
            yield
        finally:
            self.packs = before

    def module_hook_registered(self) -> None:
        """From now on there are hooks to look for, whichever module is called."""
        self._hooked += 1

    def hook(self, *, possible: bool) -> str | None:
        """The hook that is running: on a module that is called, or anywhere where one is `possible`."""
        if self.packs:
            return self.packs
        return self._finder.hook() if self._hooked or possible else None

    def attribute_set(self, module: nn.Module, name: str) -> None:
        """Remember the line that set an attribute of a module."""
        key = (id(module), name)
        self._written(f"it sets `{name}`")
        if self._finder.is_in_torch():
            self._lines.set_by_torch(key)
        else:
            self._lines.set_by(self._finder.current(), key)
