"""By which path, and for which time, a module is being called."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from whence._torch.observe.wrappers import seen_through
from whence._torch.subclasses.fully_sharded import name_of_class
from whence.provenance import CallSite, ModulePath
from whence.tracing.target.subject import Subject


class CallNames:
    """Names module calls while a model runs.

    A module with several names is known by the one that its caller last reached it through, as the model's
    own code spells it; one that the caller was handed, by the one that the nearest caller around it read.
    """

    def __init__(self, subject: Subject) -> None:
        self._names: dict[int, tuple[ModulePath, ...]] = {}
        for path, module in subject.named_modules():
            self._names[id(module)] = (*self._names.get(id(module), ()), path)
        self._current = {identity: paths[0] for identity, paths in self._names.items()}
        self._reached: list[dict[int, list[ModulePath]]] = [{}]
        self._counts: dict[ModulePath, int] = {}

    def path(self, module: nn.Module) -> ModulePath | None:
        """The path a call of `module` would have now; None for a module the model did not start with."""
        reached = self._read(module)
        return reached[-1] if reached else self._current.get(id(module))

    def _read(self, module: nn.Module) -> list[ModulePath]:
        """The names by which the nearest caller that has read a module did so, the newest last."""
        frames = (frame.get(id(module)) for frame in reversed(self._reached))
        return next(filter(None, frames), [])

    def is_reached(self, module: nn.Module) -> bool:
        """Whether the module that is running has read `module` by a name, and not called it since."""
        return bool(self._reached[-1].get(id(module)))

    def names_of(self, module: nn.Module) -> tuple[ModulePath, ...]:
        """All names of a module."""
        return self._names.get(id(module), ())

    def reached(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        """`child` was read as the submodule `name` of `parent`, by the module that is running."""
        child = seen_through(child)
        names = self._names.get(id(child), ())
        around = self._current.get(id(parent))
        if len(names) > 1 and around is not None and (path := around.child(name)) in names:
            self._reached[-1].setdefault(id(child), []).append(path)
            self._current[id(child)] = path

    @contextmanager
    def calling(self, module: nn.Module, path: ModulePath) -> Iterator[CallSite]:
        """A call of `module` by that path; its submodules are found below it."""
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        self._use_up(module)
        before = self._current[id(module)]
        self._current[id(module)] = path
        self._reached.append({})
        try:
            yield CallSite(path, index, name_of_class(module))
        finally:
            self._reached.pop()
            self._current[id(module)] = before

    def repeat(self, site: CallSite, before: ModulePath, now: ModulePath) -> CallSite:
        """The call, inside a call of the module `now`, that `site` was inside one of the module `before`."""
        path = site.path.moved(before, now)
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        return CallSite(path, index, site.type)

    def _use_up(self, module: nn.Module) -> None:
        """In `second(first(x))` Python reads `second` first: a call takes the newest name with it."""
        reached = self._read(module)
        if len(reached) > 1:
            reached.pop()
