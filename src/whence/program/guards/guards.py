"""What a capture assumed, as data; also sorted for checking: by holder, by class, and the rest."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from whence._torch.autograd.switches import READ
from whence.program.arguments.host_state import HostEffect
from whence.program.arguments.optimizer_arguments import Outside
from whence.program.guards.expectations import ExpectedConstant, ExpectedFunction, ExpectedTensor, Reference
from whence.program.guards.rows import Guard, Holder, Unguarded
from whence.program.names import Said
from whence.program.plain import AsJSON, plain_fields
from whence.program.queries.notebook import OpensInNotebook
from whence.schema import GuardKind

STRUCTURE = "the arguments"
APART = "tensors of their own"
SAME = "one tensor or several"
GLOBAL_HOOKS = "hooks of all modules"
"""Names of guards that are about no holder."""

_COMMON = (GuardKind.CLASS, GuardKind.SUBMODULE, GuardKind.CODE, GuardKind.TRAINING)
_SECTIONS = {
    "called": (GuardKind.CALLABLE,),
    "variables": (GuardKind.VARIABLE,),
    "inputs": (GuardKind.INPUT, GuardKind.SIZE, GuardKind.ALIASING),
    "process": (GuardKind.MODE, GuardKind.HOOKS),
}
_WIDTH = 72
_MANY_ENTRIES = 8
"""Entries of one container that have a line each."""


@dataclass(frozen=True, eq=False, repr=False)
class Guards(Sequence[Guard], OpensInNotebook, AsJSON):
    """Everything a capture assumed, in the order it was read, and what it does not watch.

    `holders` are the modules and objects that guards speak of, parents before children. `of` gives the
    captured callable while it lives: only there can an object be expected to be the same. `settled` are the
    guards once the model has run: for a model whose run changes what it read, and that does the same
    afterwards. The capture holds where all of either hold. `changes` are
    attributes that the model reads and then writes when it runs, which a program does not write; plain values
    that every run puts in such places, `leaves`, a bound one does. `variables` are where the guards of that
    kind look, in their order. `spelled` are names of attributes that code may find on tensors and functions.
    Tensors with numbers in `any_layout` may lie in memory as they like.
    `said` is what the file said of them that they were read from.
    """

    rows: tuple[Guard, ...] = ()
    holders: tuple[Holder, ...] = ()
    unguarded: tuple[Unguarded, ...] = ()
    of: Reference | None = None
    settled: "Guards | None" = None
    changes: tuple[str, ...] = ()
    variables: tuple[Outside, ...] = ()
    leaves: tuple[HostEffect, ...] = ()
    spelled: frozenset[str] = frozenset()
    any_layout: frozenset[int] = frozenset()
    said: Said | None = None

    @cached_property
    def plan(self) -> "GuardPlan":
        """The same, sorted by what they speak of."""
        return _plan_of(self)

    def in_mode_of_now(self, name: str) -> "Guards":
        """The same, and that a mode of torch is as it is now."""
        if not self.rows or any(guard.name == name for guard in self.rows):
            return self
        read, reason = READ[name]
        row = Guard(GuardKind.MODE, name, ExpectedConstant(read()), reason, name)
        settled = None if self.settled is None else self.settled.in_mode_of_now(name)
        return replace(self, rows=(*self.rows, row), settled=settled)

    def laid_out(self) -> "Guards":
        """The same for a program that takes no tensor as it lies."""
        settled = None if self.settled is None else self.settled.laid_out()
        free = self.any_layout or settled is not self.settled
        return replace(self, any_layout=frozenset(), settled=settled) if free else self

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __iter__(self) -> Iterator[Guard]:
        return iter(self.rows)

    def about(self, text: str) -> list[Guard]:
        """The guards whose subject contains `text`: a module path, an attribute, an input."""
        return [guard for guard in self.rows if text in guard.what]

    def __repr__(self) -> str:
        return f"<{len(self.rows):,} guards>"

    def __str__(self) -> str:
        return page(
            self.rows, self.holders, self.unguarded, () if self.settled is None else self.settled.rows
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "guards": [guard.to_dict() for guard in self.rows],
            "unguarded": [plain_fields(row, "what", "why") for row in self.unguarded],
        }


@dataclass(frozen=True)
class HolderPlan:
    """The guards of one holder.

    A module that was called `has_mode`: its mode is guarded. `of_class` are guards that its class answers, so
    that the instance must have nothing of their names.
    """

    holder: Holder
    has_mode: bool
    guards: tuple[Guard, ...]
    of_class: tuple[Guard, ...]

    @property
    def shadowed(self) -> tuple[str, ...]:
        """Names that the class answers; `__call__` is looked up on classes only."""
        return tuple(guard.name for guard in self.of_class if guard.name != "__call__")


@dataclass(frozen=True)
class GuardPlan:
    """Guards ready to be checked.

    `modules` are the holders that are found by name, parents first; other holders are met where a guard
    expects them.
    """

    guards: Guards
    holders: tuple[HolderPlan, ...]
    modules: tuple[HolderPlan, ...]
    classes: dict[type, tuple[Guard, ...]]
    callables: tuple[Guard, ...]
    modes: tuple[Guard, ...]
    variables: tuple[tuple[Guard, Outside], ...]
    inputs: tuple[Guard, ...]
    settled: "GuardPlan | None" = None

    @cached_property
    def strided(self) -> frozenset[int]:
        """Positions of the inputs whose strides may have decided something."""
        rows = [(guard.expected, guard.positions) for guard in self.inputs]
        tensors = [(row.facts, at) for row, at in rows if isinstance(row, ExpectedTensor)]
        return frozenset(position for facts, at in tensors if facts.strides is not None for position in at)


def _plan_of(guards: Guards) -> GuardPlan:
    classes: dict[type, list[Guard]] = {}
    held: dict[int, list[Guard]] = {row.number: [] for row in guards.holders}
    for guard in guards:
        if guard.holder is not None:
            held[guard.holder].append(guard)
        elif guard.owner is not None:
            classes.setdefault(guard.owner, []).append(guard)
    rows = tuple(_holder_plan(row, held[row.number], classes.get(row.type, [])) for row in guards.holders)
    modules = tuple(row for row in rows if row.holder.is_found_by_name)
    variables = [guard for guard in guards if guard.kind is GuardKind.VARIABLE]
    inputs = tuple(guard for guard in guards if guard.positions or guard.name in (STRUCTURE, APART, SAME))
    return GuardPlan(
        guards=replace(guards),  # those that have this plan would have it in a circle
        holders=rows,
        modules=modules,
        classes={kind: tuple(found) for kind, found in classes.items()},
        callables=tuple(guard for guard in guards if guard.kind is GuardKind.CALLABLE),
        modes=tuple(guard for guard in guards if guard.kind is GuardKind.MODE or guard.name == GLOBAL_HOOKS),
        variables=tuple(zip(variables, guards.variables, strict=True)),
        inputs=inputs,
        settled=None if guards.settled is None else guards.settled.plan,
    )


def _holder_plan(holder: Holder, guards: Sequence[Guard], of_class: Sequence[Guard]) -> HolderPlan:
    own = {guard.name for guard in guards}
    return HolderPlan(
        holder=holder,
        has_mode=any(guard.kind is GuardKind.TRAINING for guard in guards),
        guards=tuple(guards),
        of_class=tuple(guard for guard in of_class if guard.name not in own),
    )


@dataclass(frozen=True)
class Group:
    """Guards on modules (or other objects) of one class, and how many of those there are."""

    owner: type
    paths: tuple[str, ...]
    guards: tuple[Guard, ...]


def page(
    guards: Sequence[Guard],
    holders: Sequence[Holder],
    unguarded: Sequence[Unguarded],
    settled: Sequence[Guard] = (),
) -> str:
    """All guards, folded: a model of many equal layers prints as one of them."""
    lines = [f"{len(guards):,} guards"]
    for group in _guard_groups(guards, holders):
        lines += ["", *_group_lines(group)]
    others = [guard for guard in guards if guard.owner is None]
    for title, kinds in _SECTIONS.items():
        rows = [guard for guard in others if guard.kind in kinds]
        lines += ["", title, *_section_lines(rows)] if rows else []
    lines += _settled_lines(guards, settled)
    lines += ["", "not guarded", *(f"  {row}" for row in unguarded)] if unguarded else []
    return "\n".join(lines)


def _section_lines(rows: Sequence[Guard]) -> Iterator[str]:
    """A line for each, one for a container with many entries, and one for all functions of variables."""
    functions = [row.what for row in rows if _is_about_function(row)]
    by_name: dict[str, list[Guard]] = {}
    for guard in rows:
        if not _is_about_function(guard):
            by_name.setdefault(guard.what.partition("[")[0], []).append(guard)
    for name, same in by_name.items():
        if len(same) <= _MANY_ENTRIES:
            yield from (_line(guard.what, guard, 1, 1) for guard in same)
        else:
            source = "" if same[-1].source is None else f"  {same[-1].source.short}"
            yield f"  {name:<24} {len(same)} with its entries{source}"
    yield from [f"  {'functions':<24} {', '.join(functions)}"] if functions else []


def _is_about_function(guard: Guard) -> bool:
    return guard.kind is GuardKind.VARIABLE and isinstance(guard.expected, ExpectedFunction)


def _settled_lines(guards: Sequence[Guard], settled: Sequence[Guard]) -> list[str]:
    """What the model's first run changes of what it read; the capture holds before and after."""
    before = {guard.what: str(guard.expected) for guard in guards}
    changed = [guard for guard in settled if before.get(guard.what, "") != str(guard.expected)]
    if not changed:
        return []
    return ["", "or, once the model has run,", *(_line(guard.what, guard, 1, 1) for guard in changed)]


def _guard_groups(guards: Sequence[Guard], holders: Sequence[Holder]) -> Iterator[Group]:
    paths: dict[type, list[str]] = {}
    for holder in holders:
        paths.setdefault(holder.type, []).append(holder.path)
    rows: dict[type, list[Guard]] = {}
    for guard in guards:
        if guard.owner is not None:
            rows.setdefault(guard.owner, []).append(guard)
    for kind, found in rows.items():
        yield Group(kind, tuple(paths.get(kind, ())), tuple(found))


def _group_lines(group: Group) -> Iterator[str]:
    count = len(group.paths)
    yield " · ".join(
        [group.owner.__name__, *([f"{count} of them"] if count > 1 else []), _where(group.paths)]
    )
    common = _common_line(group)
    yield from [f"  {common}"] if common else []
    folded: dict[tuple[str, str], list[Guard]] = {}
    for guard in group.guards:
        if guard.kind not in _COMMON and not _is_unhooked(guard):
            folded.setdefault((_short_name(guard), str(guard.expected)), []).append(guard)
    for (name, _), same in folded.items():
        yield _line(name, same[0], len(same), count)


def _common_line(group: Group) -> str:
    """Class, code, mode and hooks in one line: what is guarded for every module that was called."""
    training = {guard.expected for guard in group.guards if guard.kind is GuardKind.TRAINING}
    code = [guard for guard in group.guards if _is_notable(guard)]
    own = [guard.name for guard in code if str(guard.expected).endswith(f".{guard.name}")]
    words = [f"code of {', '.join(own)}"] if own else []
    words += [f"{guard.name} is {guard.expected}" for guard in code if guard.name not in own]
    modes = sorted("training" if mode == ExpectedConstant(True) else "eval" for mode in training)
    words += [f"{' and '.join(modes)} mode"] if modes else []
    words += ["no hooks"] if any(map(_is_unhooked, group.guards)) else []
    return " · ".join(words)


def _is_notable(guard: Guard) -> bool:
    """Whether code is worth a word: not when a class calls what Module gives it."""
    return guard.kind is GuardKind.CODE and "_wrapped_call_impl" not in str(guard.expected)


def _is_unhooked(guard: Guard) -> bool:
    return guard.kind is GuardKind.HOOKS and str(guard.expected) == "none"


def _short_name(guard: Guard) -> str:
    if guard.kind is GuardKind.STRUCTURE:
        return guard.what.partition(" of ")[0]
    if guard.kind is GuardKind.ALIASING:
        return guard.what
    return guard.name


def _line(name: str, guard: Guard, times: int, of: int) -> str:
    expected = str(guard.expected)
    shown = expected if len(expected) <= _WIDTH else f"{expected[:_WIDTH]}…"
    words = [f"  {name:<24} {shown}"]
    words += [f"in {times}"] if 1 < times < of or (times == 1 and of > 1) else []
    words += [] if guard.source is None else [guard.source.short]
    return "  ".join(words)


def _where(paths: Sequence[str]) -> str:
    """Paths that differ in single segments as one pattern; otherwise the first of them."""
    if not paths:
        return "a base class"
    if len(paths) == 1:
        return paths[0] or "the model"
    split = [path.split(".") for path in paths]
    if len({len(segments) for segments in split}) == 1:
        return ".".join(_either(column) for column in zip(*split, strict=True))
    return f"{paths[0]} … {paths[-1]}"


def _either(segments: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(segments))
    return distinct[0] if len(distinct) == 1 else "*"
