"""Select nodes by module, operation and phase."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

from torch import fx

from whence._torch.operators.schemas import op_name
from whence._torch.record.annotations import said_of
from whence.errors import Fault, SelectionError
from whence.program.calls import Call, Calls
from whence.program.node_records import origin_of
from whence.program.queries.marks import marked
from whence.program.signature import Input, Output, Signature
from whence.provenance import CallSite, ModulePath, PathPattern
from whence.schema import Aspect, InputKind, Phase

if TYPE_CHECKING:
    from whence.program.program import FlatProgram


SEPARATOR = "::"
TYPE, KIND = "type=", "kind="
NOT_OPERATIONS = frozenset({"placeholder", "output"})
_SAID = re.compile(r"(\w+)=(.*)", re.DOTALL)
Row = TypeVar("Row", Input, Output)


@dataclass(frozen=True)
class Selection:
    """A parsed pattern; None leaves that part open.

    `index` is which call of a module (`lin@1` is the second), `type` a glob over the classes of modules,
    `said` a key of annotations and a glob over what it says. `kind` is that of inputs, which are meant then.
    """

    path: PathPattern | None
    operation: str | None
    phase: Phase | None
    index: int | None = None
    type: str | None = None
    said: tuple[str, str] | None = None
    mark: Aspect | None = None
    kind: InputKind | None = None


def parse(pattern: str, calls: Calls) -> Selection:
    """Read `path :: operation :: phase` or `path :: phase`; raises `SelectionError` for unknown words."""
    path, operation, last = _pattern_parts(pattern)
    kind, said = path.removeprefix(TYPE) if path.startswith(TYPE) else None, None
    if kind is None and (found := _SAID.fullmatch(path)):
        said = (found[1], found[2])
    path, index = _numbered("" if kind or said else path, calls)
    asks = operation.removeprefix(KIND) if operation.startswith(KIND) else ""
    if asks or operation == KIND:
        _one_of(asks, InputKind, "kind of input")
    return Selection(
        PathPattern.parse(path) if path and path != "**" else None,
        operation if operation and operation != "*" and not asks else None,
        Phase(last) if last in set(Phase) else None,
        index,
        kind,
        said,
        Aspect(last) if last in set(Aspect) else None,
        InputKind(asks) if asks else None,
    )


def _pattern_parts(pattern: str) -> tuple[str, str, str]:
    """Its three parts, of which the second may be left out, and the first where a kind of input is meant."""
    parts = [part.strip() for part in pattern.split(SEPARATOR)]
    if len(parts) > 3 or not pattern.strip():
        raise SelectionError(f"{pattern!r} is not a pattern", remedy="write path :: operation :: phase")
    if parts[0].startswith(KIND):
        parts.insert(0, "")
    if len(parts) == 2 and parts[1] in {*Phase, *Aspect}:
        parts.insert(1, "")
    path, operation, last = [*parts, "", ""][:3]
    if last and last not in {*Phase, *Aspect}:
        others = f", and {', '.join(Aspect)} can stand in their place"
        raise SelectionError(f"{last!r} is not a phase", remedy=f"the phases are {', '.join(Phase)}{others}")
    return path, operation, last


def _one_of(word: str, words: Iterable[str], what: str) -> None:
    known = list(words)
    if word not in known:
        raise SelectionError(f"{word!r} is no {what}", remedy=f"there are {', '.join(known)}")


def _numbered(path: str, calls: Calls) -> tuple[str, int | None]:
    """A path and the number of a call behind it; what a module is named counts as its name."""
    name, at, index = path.rpartition("@")
    if not at or any(str(above) == path for call in calls for above in call.site.path.prefixes()):
        return path, None
    if not index.isdigit():
        raise SelectionError(f"{index!r} is no number of a call", remedy="write path@0 for the first call")
    return name, int(index)


def select(program: "FlatProgram", pattern: str) -> list[fx.Node]:
    """The operations, or inputs, that fit; raises `SelectionError` naming near misses when none does."""
    wanted, calls = parse(pattern, program.calls), program.calls
    if wanted.kind is not None:
        return _selected_inputs(program, wanted, pattern)
    operations = [node for node in program.nodes() if node.op not in NOT_OPERATIONS]
    fits_path = _path_test(wanted, calls)
    by_path = [node for node in operations if fits_path(node)]
    if not by_path:
        what = "module" if wanted.said is None else "annotation"
        raise SelectionError(f"no {what} fits {pattern!r}", remedy=_near(wanted, pattern, operations, calls))
    by_operation = [
        node for node in by_path if wanted.operation is None or _is_operation(node, wanted.operation)
    ]
    if not by_operation:
        here = sorted({op_name(node.target) for node in by_path})
        raise SelectionError(f"no operation fits {pattern!r}", remedy=_suggest(wanted.operation or "", here))
    return _in_phase(program, wanted, pattern, by_operation)


def _in_phase(program: "FlatProgram", wanted: Selection, pattern: str, nodes: list[fx.Node]) -> list[fx.Node]:
    if wanted.mark is not None:
        held = marked(program, wanted.mark)
        if found := [node for node in nodes if node in held]:
            return found
        why = f"{len(held):,} operations are {wanted.mark}, none of them here" if held else "no operation is"
        raise SelectionError(f"nothing that is {wanted.mark} fits {pattern!r}", why=why)
    found = [node for node in nodes if wanted.phase in (None, origin_of(node).phase)]
    if not found:
        phases = sorted({origin_of(node).phase.value for node in nodes})
        raise SelectionError(
            f"nothing in that phase fits {pattern!r}", remedy=f"found only in {', '.join(phases)}"
        )
    return found


def _selected_inputs(program: "FlatProgram", wanted: Selection, pattern: str) -> list[fx.Node]:
    """The placeholders, and the reads of attributes, of inputs of a kind that the modules of a path hold."""
    if wanted.phase or wanted.mark or wanted.said or wanted.index is not None:
        raise SelectionError(
            f"{pattern!r} asks inputs for a phase, a call or an annotation", why="they have none"
        )
    rows = (*program.signature.attributes, *program.signature.inputs)
    names = {row.name for row in rows if row.kind is wanted.kind and _is_held(row, wanted)}
    found = [node for node in program.graph.nodes if node.name in names]
    if not found:
        kinds = dict.fromkeys(row.kind.value for row in rows)
        raise SelectionError(f"no input fits {pattern!r}", remedy=f"there are {', '.join(kinds)}")
    return found


def _is_held(row: Input, wanted: Selection) -> bool:
    if wanted.type is not None:
        return row.module_type is not None and fnmatchcase(row.module_type, wanted.type)
    if wanted.path is None:
        return True
    above = (each for path in row.attribute_paths for each in path.prefixes())
    return row.module is not None and any(map(wanted.path.matches, above))


def _is_operation(node: fx.Node, operation: str) -> bool:
    name = op_name(node.target)
    return any(fnmatchcase(spelling, operation) for spelling in (name, name.rpartition(".")[0]))


def _path_test(wanted: Selection, calls: Calls) -> Callable[[fx.Node], bool]:
    if wanted.said is not None:
        key, text = wanted.said
        return lambda node: any(fnmatchcase(each, text) for each in _regions_said(said_of(node).get(key)))
    if (wanted.path, wanted.index, wanted.type) == (None, None, None):
        return lambda _node: True
    sites = {(call.site.path, call.site.index): _call_fits(wanted, call, calls) for call in calls}
    return lambda node: any(sites.get((site.path, site.index), False) for site in origin_of(node).calls)


def _regions_said(said: object) -> Iterator[str]:
    """What an annotation says, and the regions around the one that it names."""
    if said is not None:
        parts = str(said).split(".")
        yield from (".".join(parts[:count]) for count in range(len(parts), 0, -1))


def _call_fits(wanted: Selection, call: Call, calls: Calls) -> bool:
    """Whether a call, or one above it, is meant; a path may be that of a container, which nobody calls."""
    if wanted.index is None and wanted.path is not None:
        return any(map(wanted.path.matches, _paths_above(call.number, calls)))
    return any(_is_meant(wanted, caller.site) for caller in calls.chain(call))


def _is_meant(wanted: Selection, site: CallSite) -> bool:
    if wanted.type is not None:
        return fnmatchcase(site.type, wanted.type)
    return site.index == wanted.index and (wanted.path is None or wanted.path.matches(site.path))


def select_calls(program: "FlatProgram", pattern: str) -> list[Call]:
    """The calls that a pattern names, by path, number or class, and that hold an operation that fits the
    rest of it; raises `SelectionError` naming near misses when there is none."""
    wanted, calls = parse(pattern, program.calls), program.calls
    named = [call for call in calls if wanted.path is None or wanted.path.matches(call.site.path)]
    named = [call for call in named if wanted.index in (None, call.site.index)]
    named = [call for call in named if wanted.type is None or fnmatchcase(call.site.type, wanted.type)]
    if not named:
        raise SelectionError(f"no call fits {pattern!r}", remedy=near_paths(pattern, calls))
    if (wanted.operation, wanted.phase, wanted.said, wanted.mark, wanted.kind) == (None,) * 5:
        return named
    sites = {site for node in select(program, pattern) for site in origin_of(node).calls}
    holding = {number for site in sites for number in calls.around(site)}
    if found := [call for call in named if call.number in holding]:
        return found
    raise SelectionError(f"no call fits {pattern!r}", why="what fits it is in no call")


def _paths_above(number: int, calls: Calls) -> Iterable[ModulePath]:
    for caller in calls.chain(calls.rows[number]):
        yield from caller.site.path.prefixes()


def _near(wanted: Selection, pattern: str, nodes: Iterable[fx.Node], calls: Calls) -> str:
    if wanted.said is None:
        return near_paths(pattern, calls)
    key = wanted.said[0]
    said = dict.fromkeys(str(said_of(node)[key]) for node in nodes if key in said_of(node))
    return _suggest(wanted.said[1], list(said)) if said else f"no operation is annotated with {key}"


def near_paths(pattern: str, calls: Calls, others: Iterable[str] = ()) -> str:
    """Paths, classes, or other names, that somebody may have meant by a pattern that fits none."""
    wanted = pattern.split(SEPARATOR)[0].strip()
    if wanted.startswith(TYPE):
        return _suggest(wanted.removeprefix(TYPE), list(dict.fromkeys(call.site.type for call in calls)))
    called, at, _ = wanted.rpartition("@")
    if at and (sites := [str(call.site) for call in calls if str(call.site.path) == called]):
        return f"the calls are {sites[0]}" + (f" to {sites[-1]}" if sites[1:] else " alone")
    paths = dict.fromkeys(str(path) for call in calls for path in call.site.path.prefixes())
    ending = [path for path in paths if PathPattern.parse(f"**.{wanted}").matches(ModulePath.parse(path))]
    if ending:
        return f"paths start at the root: did you mean {', '.join(ending[:3])}, or **.{wanted}?"
    return _suggest(wanted, [*paths, *others])


def _suggest(wanted: str, candidates: Sequence[str]) -> str:
    close = get_close_matches(wanted, candidates, n=3, cutoff=0.4) or list(candidates[:5])
    return f"there are {', '.join(text or '(root)' for text in close) or 'none'}"


def preserved_calls(calls: Calls, patterns: Sequence[str], entry: int) -> frozenset[int]:
    """The numbers of the calls whose path fits a pattern, without `entry`, the model itself.

    Raises `SelectionError` naming every pattern that fits no call, and near misses.
    """
    found: set[int] = set()
    faults: list[Fault] = []
    for text in patterns:
        pattern = PathPattern.parse(text)
        fitting = {row.number for row in calls if row.number != entry and pattern.matches(row.site.path)}
        found |= fitting
        if not fitting:
            faults.append(Fault(f"no module that is called fits {text!r}", remedy=near_paths(text, calls)))
    SelectionError.refuse(faults)
    return frozenset(found)


def find_input(signature: Signature, name: str) -> Input:
    """By placeholder name, fully qualified name, alias or pytree path; raises `SelectionError`.

    The name of a tensor that is made of several finds its part where there is only one, and else names them.
    """
    rows = (*signature.attributes, *signature.inputs)
    ways = (lambda row: (row.name,), lambda row: (row.path, *row.aliases), _whole)
    known = [text for row in rows for text in (row.name, row.path, *row.aliases)]
    return _only("input", name, _rows_called(name, rows, ways), known)


def _whole(row: Input | Output) -> tuple[str, ...]:
    return () if row.part is None else (row.part.whole,)


def find_output(signature: Signature, name: str) -> Output:
    """By name, path or node, or through the input it belongs to; raises `SelectionError`."""
    rows = signature.outputs
    ways = (lambda row: (row.name,), lambda row: (row.path,), lambda row: (row.node,), _whole)
    owner = next((row.name for row in signature.inputs if name in (row.name, row.path, *row.aliases)), None)
    belonging = [row for row in rows if owner is not None and row.of == owner]
    known = [text for row in rows for text in (row.name, row.path)]
    return _only("output", name, _rows_called(name, rows, ways) or belonging, known)


def _rows_called(name: str, rows: Sequence[Row], ways: Iterable[Callable[[Row], Iterable[Any]]]) -> list[Row]:
    """What is called so in the first of these ways in which anything is."""
    return next(filter(None, ([row for row in rows if name in way(row)] for way in ways)), [])


def _only(what: str, name: str, found: Sequence[Row], known: Sequence[str]) -> Row:
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(row.name for row in found)
        raise SelectionError(f"{name!r} fits several: {names}", remedy="use one of these names")
    close = get_close_matches(name, known, n=3)
    remedy = (
        f"did you mean {', '.join(close)}?"
        if close
        else f"the {what}s are listed by print(program.signature)"
    )
    raise SelectionError(f"no {what} is called {name!r}", remedy=remedy)
