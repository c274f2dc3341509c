"""How a captured callable is called: from arguments as a person writes them to flat values, and back.

A call need not be spelled as the example was: keywords may come in any order, a positional argument may be
given by keyword, and an argument left at its default may be written out. What must agree is which values
arrive; everything that does not is reported at once.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Size, Tensor
from torch.nn import Parameter

from whence._torch.pytrees import (
    KeyPath,
    TreeSpec,
    composition_of,
    key_segments,
    spelled,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
    whole_paths,
)
from whence._torch.sizes.exported_sizes import Limits, is_open
from whence._torch.tensors import share_memory
from whence.errors import CallError, Fault
from whence.program.arguments.binding import (
    CallSpelling,
    Shape,
    arguments_by_name,
    binding_faults,
    spelling_of,
)
from whence.program.arguments.containers import handed_back
from whence.program.arguments.fitting import ArgumentFault, ExpectedLeaves, InputQuery, Misfit, refusal
from whence.program.arguments.open_sizes import Sizes, sizes_within
from whence.program.signature import Part, in_words
from whence.schema import TensorFact

_LEAVES = frozenset({Tensor, Parameter, bool, int, float, str, type(None)})
"""Kinds of arguments that hold no others."""
Adapter = Callable[[TreeSpec, TreeSpec, list[Any]], Sequence[Any]]
"""Takes the captured structure, the given one and the given leaves; returns leaves for the captured one."""


@dataclass(frozen=True)
class Convention:
    """The structure of `(args, kwargs)` and of the result, and what each leaf of the arguments was.

    `parameters` is the Python signature of the callable where it has one. `leaves` are fake tensors or
    constants, in flat order; `paths` their spelled accesses. `same` pairs leaves that were one tensor.
    `reads_memory` is true where the program looks at tensors by their strides (`as_strided`).
    `any_layout` are the paths of those, and of state, that it takes as they lie (others are laid out as
    at capture), `layouts` of those whose strides the model asked for, `facts` what else it asked of
    which, and `questions` what the arguments themselves answered. `sizes` says which sizes may vary, and
    how far; None where all are those of the capture. Of an exported program `limits` are the smallest and
    largest value of every size that it left open, by its symbol, and `adapter` makes the leaves of
    another structure fit. `returned` are containers that the callable changes and gives back: where each
    is in the arguments, and where in the result.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    parameters: inspect.Signature | None = None
    same: tuple[tuple[int, int], ...] = ()
    reads_memory: bool = False
    any_layout: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset()
    sizes: Sizes | None = None
    limits: Mapping[str, Limits] = field(default_factory=dict)
    adapter: Adapter | None = None
    returned: tuple[tuple[str, str], ...] = ()
    facts: tuple[tuple[str, TensorFact], ...] = ()
    questions: tuple[InputQuery, ...] = ()

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call in the captured order; raises `CallError` naming every misfit."""
        flat = self.in_order(args, kwargs)
        if not self.expected.fit(flat) and (faults := self.expected.faults(flat)):
            raise refusal(faults)
        return flat

    def faults(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ArgumentFault, ...]:
        """Everything that keeps arguments from fitting."""
        try:
            self.flatten(args, kwargs)
        except CallError as error:
            return error.misfits
        return ()

    @cached_property
    def expected(self) -> ExpectedLeaves:
        """What the leaves of a call must be."""
        asked = self.layouts, self.facts, self.questions
        return ExpectedLeaves(self.leaves, self.paths, self.varying, self.same, self.reads_memory, *asked)

    def watched(self, strided: frozenset[int]) -> ExpectedLeaves:
        """The same with all that may have decided something: `strided` are tensors whose strides may have,
        but for those that are taken as they lie, of which kernels choose as in eager."""
        if strided not in self._watched:
            laid_out = frozenset(at for at in strided if self.paths[at] not in self.any_layout)
            self._watched[strided] = replace(self.expected, watched=laid_out)
        return self._watched[strided]

    @cached_property
    def _watched(self) -> dict[frozenset[int], ExpectedLeaves]:
        return {}

    def in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call in the captured order, whatever they are; raises `CallError` for another
        structure."""
        if self.is_flat(args, kwargs):
            return [*args, *kwargs.values()]
        flat, spec = tree_flatten((args, kwargs))
        if spec == self.spec:
            return flat
        if self.adapter is not None:
            return self._adapted(spec, flat)
        spelling = self.spelling(len(args), tuple(kwargs))
        if changed := spelling.changed(args, kwargs):
            raise refusal([_of_default(*row) for row in changed])
        flat, spec = tree_flatten(spelling.arranged(args, kwargs))
        if not same_structure(spec, self.spec):
            raise self._other_structure(_shape_of(spec, flat))
        return flat

    def handed_back(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, has_loss: bool) -> Any:
        """A result, in which containers that were given and changed are themselves, and changed."""
        if not self.returned:
            return result
        arguments = self.spelling(len(args), tuple(kwargs)).arranged(args, kwargs)
        before = "[1]" if has_loss else ""
        return handed_back({here: before + there for here, there in self.returned}, arguments, result)

    def is_flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has the captured structure, and that nests nothing: most calls have, and to flatten
        them takes longer than all else that is done about arguments."""
        if (len(args), tuple(kwargs)) != self.flat_call:
            return False
        return _LEAVES.issuperset(map(type, args)) and _LEAVES.issuperset(map(type, kwargs.values()))

    @cached_property
    def flat_call(self) -> tuple[int, tuple[str, ...]] | None:
        """How many positional arguments the captured call had, and its keywords, where all are leaves."""
        args, kwargs = self.spec.children()
        if not all(argument.is_leaf() for argument in (*args.children(), *kwargs.children())):
            return None
        return args.num_children, tuple(kwargs.context)

    @property
    def shown(self) -> str:
        """The captured arguments as they were written, each leaf described."""
        return _shape_of(self.spec, self.leaves)

    @cached_property
    def varying(self) -> Sizes | None:
        """The sizes that may vary, and how far, whoever left them open; None where all are fixed."""
        if self.sizes is not None or not any(map(is_open, self.leaves)):
            return self.sizes
        return sizes_within(self.leaves, self.paths, self.limits)

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` of the captured structure over these leaves."""
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return args, kwargs

    def bound(self, flat: Sequence[Any]) -> dict[str, int]:
        """The sizes of a call that has been checked, by name."""
        return {} if self.sizes is None else self.sizes.bound(flat)

    def _adapted(self, spec: TreeSpec, flat: list[Any]) -> list[Any]:
        adapted = self.adapter(self.spec, spec, flat)  # type: ignore[misc]
        if len(adapted) != len(self.leaves):
            words = f"the adapter returned {len(adapted)} values, and the program takes {len(self.leaves)}"
            raise self._other_structure(_shape_of(spec, flat), words)
        return list(adapted)

    def _other_structure(self, found: str, words: str = "") -> CallError:
        words = words or f"expected {self.shown}, got {found}"
        return refusal([ArgumentFault(Misfit.STRUCTURE, "the arguments", self.shown, found, words)])

    def spelling(self, count: int, keywords: tuple[str, ...]) -> CallSpelling:
        """How a call with so many positional arguments and such keywords is read; raises `CallError` for one
        that does not bind."""
        shape = count, keywords
        if shape not in self._spellings:
            parameters, own = self.parameters, self.spec.children()
            args, kwargs = (None,) * count, dict.fromkeys(keywords)
            if parameters is not None and (problems := binding_faults(parameters, args, kwargs)):
                what = Misfit.BINDING, "the arguments", parameters, shape
                rows = [ArgumentFault(*what, words) for words in problems]
                raise refusal(rows, why=f"the captured callable takes {parameters}")
            captured = own[0].num_children, tuple(own[1].context)
            self._spellings[shape] = spelling_of(parameters, captured, shape)
        return self._spellings[shape]

    @cached_property
    def _spellings(self) -> dict[Shape, CallSpelling]:
        return {}


def _of_default(name: str, default: Any, value: Any) -> ArgumentFault:
    found = shown_call((value,), {})[1:-1]
    words = f"{name} was left out at capture, where it is {default!r}, and is {found} now"
    return ArgumentFault(Misfit.DEFAULT, name, default, value, words)


def same_structure(left: TreeSpec, right: TreeSpec) -> bool:
    """Whether two structures agree; dict and OrderedDict with equal keys in equal order are one kind."""
    if left == right:
        return True
    if left.is_leaf() or right.is_leaf() or left.context != right.context:
        return False
    if _counts_as(left) is not _counts_as(right):
        return False
    ours, theirs = left.children(), right.children()
    return len(ours) == len(theirs) and all(map(same_structure, ours, theirs))


def _counts_as(spec: TreeSpec) -> Any:
    """The container that counts: rebuilt from its leaves, a `torch.Size` is a plain tuple."""
    return {OrderedDict: dict, Size: tuple}.get(spec.type, spec.type)


def _shape_of(spec: TreeSpec, leaves: Sequence[Any]) -> str:
    args, kwargs = tree_unflatten([_Leaf(in_words(leaf)) for leaf in leaves], spec)
    spelled_args = [repr(value) for value in args]
    return f"({', '.join([*spelled_args, *(f'{name}={value!r}' for name, value in kwargs.items())])})"


@dataclass(frozen=True)
class _Leaf:
    text: str

    def __repr__(self) -> str:
        return self.text


def tied_positions(leaves: Iterable[object]) -> tuple[tuple[int, int], ...]:
    """Pairs of the leaves that are one tensor."""
    return repeated_positions([id(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves])


def repeated_positions(keys: Sequence[Hashable | None]) -> tuple[tuple[int, int], ...]:
    """Pairs of a key's first position and each later one; None is no key."""
    first: dict[Hashable, int] = {}
    held = [(position, key) for position, key in enumerate(keys) if key is not None]
    return tuple((first[key], at) for at, key in held if first.setdefault(key, at) != at)


def paths_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The spelled access of every leaf: `args[0]['mask']`, `kwargs['ids']`."""
    pairs, _ = tree_flatten_with_path((args, kwargs))
    return tuple(_argument(path) for path, _ in pairs)


def _argument(path: KeyPath) -> str:
    return ("args", "kwargs")[path[0].idx] + spelled(path[1:])  # type: ignore[attr-defined]


def argument_parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Part | None, ...]:
    """For every leaf, which part of a tensor that is made of several it is."""
    return (*parts_in(args, "args"), *parts_in(kwargs, "kwargs"))


def parts_in(value: Any, root: str) -> list[Part | None]:
    """The same for the leaves of a value that is called `root`."""
    return [
        None
        if row is None
        else Part.of(f"{root}{row[0]}", row[1], row[2], requires_grad=bool(row[1].requires_grad))
        for row in composition_of(value)
    ]


def whole_paths_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """As `paths_of`, with one path for a tensor that is made of others."""
    return tuple(map(_argument, whole_paths((args, kwargs))))


def names_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], parameters: inspect.Signature | None
) -> tuple[str, ...]:
    """A name for every leaf, from the callable's own argument names: `x`, `batch_mask`, `states_0`.

    Two may be called alike, `x` and `**{"x": ...}`: the second is `x_again`.
    """
    pairs, _ = tree_flatten_with_path((args, kwargs))
    positional = _positional_names(parameters, len(args))
    names: dict[str, None] = {}
    for path, _ in pairs:
        side, first, *rest = key_segments(path)
        head = positional[int(first)] if side == "0" else first
        name = "_".join([head, *rest])
        while name in names:
            name = "_".join([name, "again"])
        names[name] = None
    return tuple(names)


def _positional_names(parameters: inspect.Signature | None, count: int) -> list[str]:
    if parameters is None:
        return [f"args_{position}" for position in range(count)]
    rows = parameters.parameters.values()
    rest = next((row.name for row in rows if row.kind is inspect.Parameter.VAR_POSITIONAL), "args")
    names = arguments_by_name(parameters, range(count), {})
    return [f"{rest}_{name[1:]}" if name.startswith("*") else name for name in names]


def shown_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Arguments as they are written, each leaf described."""
    flat, spec = tree_flatten((args, kwargs))
    return _shape_of(spec, flat)


def refuse_overlap(
    convention: Convention,
    written: Sequence[int],
    flat: Sequence[Any],
    state: Iterable[tuple[str, Tensor, bool]] = (),
) -> None:
    """An input that is written must not share its memory with another: the capture saw two. `state` are
    tensors beside the arguments, with their names and whether they are written."""
    CallError.refuse(
        Fault(
            f"{one} and {other} share memory, and did not at capture",
            why=f"the program writes {one}, and {other} would not see it",
            remedy="pass a clone of one of them, or capture with the same sharing",
        )
        for one, other in overlaps(convention, written, flat, state)
    )


def overlaps(
    convention: Convention,
    written: Sequence[int],
    flat: Sequence[Any],
    state: Iterable[tuple[str, Tensor, bool]] = (),
) -> list[tuple[str, str]]:
    """What is written, and what shares its memory and did not at capture."""
    paths, same = convention.paths, {frozenset(pair) for pair in convention.same}
    shared = [
        (paths[at], paths[other])
        for at in written
        for other, leaf in enumerate(flat)
        if other != at and frozenset((at, other)) not in same
        if not (other in written and other < at)
        if share_memory(leaf, flat[at])
    ]
    return shared + [
        (name, paths[at]) if is_written else (paths[at], name)
        for name, held, is_written in state
        for at, leaf in enumerate(flat)
        if (is_written or at in written) and share_memory(leaf, held)
    ]
