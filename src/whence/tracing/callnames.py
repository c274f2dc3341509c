"""By which path, and for which time, a module is being called."""

from torch import nn

from whence.provenance import CallSite, ModulePath
from whence.tracing.subject import Subject


class CallNames:
    """Names module calls while a model runs.

    A module with several names is known by the one it was last reached through, as the model's own code
    spells it.
    """

    def __init__(self, subject: Subject) -> None:
        self._names: dict[int, tuple[ModulePath, ...]] = {}
        for path, module in subject.named_modules():
            self._names[id(module)] = (*self._names.get(id(module), ()), path)
        self._current = {identity: paths[0] for identity, paths in self._names.items()}
        self._counts: dict[ModulePath, int] = {}

    def path(self, module: nn.Module) -> ModulePath | None:
        """The path of a module now; None for one that the model did not have when it started."""
        return self._current.get(id(module))

    def reached(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        """`child` was read as the submodule `name` of `parent`."""
        names = self._names.get(id(child), ())
        around = self._current.get(id(parent))
        if len(names) > 1 and around is not None and (path := around.child(name)) in names:
            self._current[id(child)] = path

    def next_site(self, module: nn.Module, path: ModulePath) -> CallSite:
        """The call site of a call of `module` that begins now."""
        index = self._counts.get(path, 0)
        self._counts[path] = index + 1
        return CallSite(path, index, type(module).__name__)
