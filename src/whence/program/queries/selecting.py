"""Select nodes by module, operation and phase."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import fx

from whence._torch.operators.schemas import op_name
from whence.errors import SelectionError
from whence.program.calls import Call, Calls
from whence.program.node_records import origin_of
from whence.provenance import CallSite, ModulePath, PathPattern
from whence.schema import Phase

SEPARATOR = "::"
TYPE = "type="
NOT_OPERATIONS = frozenset({"placeholder", "output"})


@dataclass(frozen=True)
class Selection:
    """A parsed pattern; None leaves that part open.

    `index` is which call of a module (`lin@1` is the second), `type` a glob over the classes of modules.
    """

    path: PathPattern | None
    operation: str | None
    phase: Phase | None
    index: int | None = None
    type: str | None = None


def parse(pattern: str, calls: Calls) -> Selection:
    """Read `path :: operation :: phase` or `path :: phase`; raises `SelectionError` for an unknown phase."""
    parts = [part.strip() for part in pattern.split(SEPARATOR)]
    if len(parts) > 3 or not pattern.strip():
        raise SelectionError(f"{pattern!r} is not a pattern", remedy="write path :: operation :: phase")
    if len(parts) == 2 and parts[1] in set(Phase):
        parts.insert(1, "")
    path, operation, phase = [*parts, "", ""][:3]
    if phase and phase not in set(Phase):
        raise SelectionError(f"{phase!r} is not a phase", remedy=f"the phases are {', '.join(Phase)}")
    kind = path.removeprefix(TYPE) if path.startswith(TYPE) else None
    path, index = _numbered("" if kind else path, calls)
    return Selection(
        PathPattern.parse(path) if path and path != "**" else None,
        operation if operation and operation != "*" else None,
        Phase(phase) if phase else None,
        index,
        kind,
    )


def _numbered(path: str, calls: Calls) -> tuple[str, int | None]:
    """A path and the number of a call behind it; what a module is named counts as its name."""
    name, at, index = path.rpartition("@")
    if not at or any(str(above) == path for call in calls for above in call.site.path.prefixes()):
        return path, None
    if not index.isdigit():
        raise SelectionError(f"{index!r} is no number of a call", remedy="write path@0 for the first call")
    return name, int(index)


def select(nodes: Sequence[fx.Node], calls: Calls, pattern: str) -> list[fx.Node]:
    """The operations among `nodes` that fit; raises `SelectionError` naming near misses when none does."""
    wanted = parse(pattern, calls)
    operations = [node for node in nodes if node.op not in NOT_OPERATIONS]
    fits_path = _path_test(wanted, calls)
    by_path = [node for node in operations if fits_path(node)]
    if not by_path:
        raise SelectionError(f"no module fits {pattern!r}", remedy=near_paths(pattern, calls))
    by_operation = [
        node for node in by_path if wanted.operation is None or _is_operation(node, wanted.operation)
    ]
    if not by_operation:
        here = sorted({op_name(node.target) for node in by_path})
        raise SelectionError(f"no operation fits {pattern!r}", remedy=_suggest(wanted.operation or "", here))
    found = [node for node in by_operation if wanted.phase in (None, origin_of(node).phase)]
    if not found:
        phases = sorted({origin_of(node).phase.value for node in by_operation})
        raise SelectionError(
            f"nothing in that phase fits {pattern!r}", remedy=f"found only in {', '.join(phases)}"
        )
    return found


def _is_operation(node: fx.Node, operation: str) -> bool:
    name = op_name(node.target)
    return any(fnmatchcase(spelling, operation) for spelling in (name, name.rpartition(".")[0]))


def _path_test(wanted: Selection, calls: Calls) -> Callable[[fx.Node], bool]:
    if (wanted.path, wanted.index, wanted.type) == (None, None, None):
        return lambda _node: True
    sites = {(call.site.path, call.site.index): _fits(wanted, call, calls) for call in calls}
    return lambda node: any(sites.get((site.path, site.index), False) for site in origin_of(node).calls)


def _fits(wanted: Selection, call: Call, calls: Calls) -> bool:
    """Whether a call, or one above it, is meant; a path may be that of a container, which nobody calls."""
    if wanted.index is None and wanted.path is not None:
        return any(map(wanted.path.matches, _paths_above(call.number, calls)))
    return any(_is_meant(wanted, caller.site) for caller in calls.chain(call))


def _is_meant(wanted: Selection, site: CallSite) -> bool:
    if wanted.type is not None:
        return fnmatchcase(site.type, wanted.type)
    return site.index == wanted.index and (wanted.path is None or wanted.path.matches(site.path))


def _paths_above(number: int, calls: Calls) -> Iterable[ModulePath]:
    for caller in calls.chain(calls.rows[number]):
        yield from caller.site.path.prefixes()


def near_paths(pattern: str, calls: Calls) -> str:
    """Paths that somebody may have meant by a pattern that fits none."""
    wanted = pattern.split(SEPARATOR)[0].strip()
    paths = dict.fromkeys(str(path) for call in calls for path in call.site.path.prefixes())
    ending = [path for path in paths if PathPattern.parse(f"**.{wanted}").matches(ModulePath.parse(path))]
    if ending:
        return f"paths start at the root: did you mean {', '.join(ending[:3])}, or **.{wanted}?"
    return _suggest(wanted, list(paths))


def _suggest(wanted: str, candidates: Sequence[str]) -> str:
    close = get_close_matches(wanted, candidates, n=3, cutoff=0.4) or list(candidates[:5])
    return f"there are {', '.join(text or '(root)' for text in close)}"
