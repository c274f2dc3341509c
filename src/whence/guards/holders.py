"""Which modules and objects guards speak of, and how each is reached."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from whence._torch.observe.wrappers import wrappers_around
from whence._torch.subclasses.fully_sharded import class_as_written
from whence.program.guards.observed import Observed
from whence.program.guards.rows import Holder
from whence.provenance import ModulePath


class Located(NamedTuple):
    """A live module or object with its row; of a module, its other paths and what wraps it."""

    thing: object
    holder: Holder
    aliases: tuple[str, ...] = ()
    wrappers: tuple[nn.Module, ...] = ()

    def spelled(self, name: str) -> str:
        """An attribute of it, as the model's author would write it."""
        return f"{self.holder.path}.{name}" if self.holder.path else name


def located(observed: Observed) -> list[Located]:
    """Modules that were read and those above them, parents first; then objects in the order they were met."""
    modules = _modules(observed)
    paths = {id(row.thing): row.holder.path for row in modules}
    spelled = _object_paths(observed, paths)
    objects = [
        Located(
            thing,
            Holder(number, spelled[id(thing)], class_as_written(type(thing)), isinstance(thing, nn.Module)),
        )
        for number, thing in enumerate(observed.objects, len(modules))
    ]
    return [*modules, *objects]


def _modules(observed: Observed) -> list[Located]:
    wanted = _wanted_paths(observed)
    roots = {path: position for position, (path, _) in enumerate(observed.roots)}
    rows: dict[int, Located] = {}
    numbers: dict[ModulePath, int] = {}
    modules = dict(observed.modules)
    for path, module in observed.modules:
        if path not in wanted:
            continue
        parent = path.parent
        above = numbers.get(parent) if path else None
        names = () if above is None else ((above, path.name),)
        known = rows.get(id(module))
        if known is None:
            holder = Holder(
                len(rows), str(path), class_as_written(type(module)), True, names, roots.get(path)
            )
            rows[id(module)] = Located(module, holder, wrappers=_wrappers(path, module, modules.get(parent)))
        else:
            holder = replace(known.holder, names=(*known.holder.names, *names))
            aliases = (*known.aliases, str(path)) if names else known.aliases
            rows[id(module)] = known._replace(holder=holder, aliases=aliases)
        numbers[path] = rows[id(module)].holder.number
    return list(rows.values())


def _wrappers(path: ModulePath, module: nn.Module, parent: nn.Module | None) -> tuple[nn.Module, ...]:
    """What a module is seen through where its parent holds it."""
    held = None if parent is None or not path else parent._modules.get(path.name)
    return () if held is None or held is module else wrappers_around(held)


def _wanted_paths(observed: Observed) -> set[ModulePath]:
    """The paths of modules that were read or found by a read, and all paths above them."""
    met = {id(read.holder) for read in observed.reads}
    met |= {id(read.value) for read in observed.reads if issubclass(type(read.value), nn.Module)}
    tables = (read.value for read in observed.reads if read.name == "_modules")
    met |= {id(child) for table in tables if isinstance(table, dict) for child in table.values()}
    wanted: set[ModulePath] = {path for path, _ in observed.roots}
    above: ModulePath | None = None
    for path, module in reversed(observed.modules):  # children come after their parents
        if id(module) in met and path.parent != above:
            wanted.update(path.prefixes())
            above = path.parent
        elif id(module) in met:
            wanted.add(path)
    return wanted


def _object_paths(observed: Observed, paths: dict[int, str]) -> dict[int, str]:
    """How each object was reached first: through an attribute, or inside a container that one holds."""
    wanted = {id(thing) for thing in observed.objects}
    found: dict[int, str] = {}
    known = dict(paths)
    for read in observed.reads if wanted else ():
        if id(read.value) not in wanted and not isinstance(read.value, dict | list | tuple):
            continue
        above = known.get(id(read.holder), "")
        spelled = f"{above}.{read.name}" if above else read.name
        for path, value in _inside(read.value, spelled):
            if id(value) in wanted and id(value) not in found:
                found[id(value)] = known[id(value)] = path
    return {identity: found.get(identity, "an object") for identity in wanted}


def _inside(value: object, path: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    yield path, value
    if depth > 10 or not isinstance(value, dict | list | tuple):
        return
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        yield from _inside(item, f"{path}[{key!r}]", depth + 1)
