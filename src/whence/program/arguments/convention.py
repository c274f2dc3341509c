"""How a captured callable is called: from arguments as a person writes them to flat values, and back.

A call need not be spelled as the example was: keywords may come in any order, a positional argument may be
given by keyword, and an argument left at its default may be written out. What must agree is which values
arrive; everything that does not is reported at once.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Size, Tensor
from torch.nn import Parameter

from whence._torch.pytrees import (
    TreeSpec,
    composition_of,
    key_segments,
    spelled,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
    whole_leaves,
    with_whole_leaves,
)
from whence._torch.sizes.exported_sizes import Limits, OpenSizes, is_open
from whence._torch.sizes.symbols import SYMBOLIC, is_symbolic
from whence.errors import CallError
from whence.program.arguments.open_sizes import Sizes, sizes_within, told
from whence.program.arguments.python_binding import binding_faults
from whence.program.calls import Absent
from whence.program.signature import Part, describe

_LEAVES = frozenset({Tensor, Parameter, bool, int, float, str, type(None)})
"""Kinds of arguments that hold no others."""
Adapter = Callable[[TreeSpec, TreeSpec, list[Any]], Sequence[Any]]
"""Takes the captured structure, the given one and the given leaves; returns leaves for the captured one."""


@dataclass(frozen=True)
class Convention:
    """The structure of `(args, kwargs)` and of the result, and what each leaf of the arguments was.

    `parameters` is the Python signature of the callable where it has one. `leaves` are fake tensors or
    constants, in flat order; `paths` their spelled accesses. `same` pairs leaves that were one tensor.
    `reads_memory` is true where the program looks at tensors by their strides (`as_strided`), and `layouts`
    are the paths of those whose strides the model asked for. `sizes` says
    which sizes may vary, and how far; None where all are those of the capture. Of an exported program
    `limits` are the smallest and largest value of every size that it left open, by its symbol, and `adapter`
    makes the leaves of another structure fit.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    paths: tuple[str, ...]
    parameters: inspect.Signature | None = None
    same: tuple[tuple[int, int], ...] = ()
    reads_memory: bool = False
    layouts: frozenset[str] = frozenset()
    sizes: Sizes | None = None
    limits: Mapping[str, Limits] = field(default_factory=dict)
    adapter: Adapter | None = None

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call in the captured order; raises `CallError` naming every misfit."""
        return self.checked(self.spelled_out(args, kwargs))

    def checked(self, flat: list[Any]) -> list[Any]:
        """The leaves as they are, where the program takes them; raises `CallError` naming every misfit."""
        self._check(flat)
        return flat

    def spelled_out(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call in the captured order, whatever they are; raises `CallError` for another
        structure."""
        if self.is_flat(args, kwargs):
            return [*args, *kwargs.values()]
        flat, spec = tree_flatten((args, kwargs))
        if spec == self.spec:
            return flat
        if self.adapter is not None:
            return self._adapted(spec, flat)
        flat, spec = tree_flatten(self.respelled(args, kwargs))
        if not same_structure(spec, self.spec):
            raise CallError(
                "the arguments have another structure than those of the capture",
                why=f"expected {self.shown}, got {_shape_of(spec, flat)}",
                remedy="call it as it was captured, or capture again with these arguments",
            )
        return flat

    def is_flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call has the captured structure, and that nests nothing: most calls have, and to flatten
        them takes longer than all else that is done about arguments."""
        if (len(args), tuple(kwargs)) != self._flat_call:
            return False
        return _LEAVES.issuperset(map(type, args)) and _LEAVES.issuperset(map(type, kwargs.values()))

    @cached_property
    def _flat_call(self) -> tuple[int, tuple[str, ...]] | None:
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
        if self.sizes is not None or not self._open_positions:
            return self.sizes
        return sizes_within(self.leaves, self.paths, self.limits)

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` of the captured structure over these leaves."""
        args, kwargs = tree_unflatten(list(leaves), self.spec)
        return args, kwargs

    def _adapted(self, spec: TreeSpec, flat: list[Any]) -> list[Any]:
        adapted = self.adapter(self.spec, spec, flat)  # type: ignore[misc]
        if len(adapted) != len(self.leaves):
            raise CallError(
                f"the adapter returned {len(adapted)} values, and the program takes {len(self.leaves)}",
                remedy=f"return one value for each of {', '.join(self.paths)}",
            )
        return list(adapted)

    def _check(self, flat: Sequence[Any]) -> None:
        misfits = [(at, problem) for at, given in enumerate(flat) if (problem := self._misfit(at, given))]
        problems = [problem for _, problem in misfits]
        if self.sizes is not None and not problems:
            self._check_sizes(self.sizes, flat)
        if (self.reads_memory or self.layouts) and not problems:
            problems += self._misplaced(flat)
        if self.sizes is None:
            problems += OpenSizes(self.limits).faults(self._open(flat))
        problems += [
            f"{self.paths[first]} and {self.paths[second]} were one tensor at capture, and are two now"
            for first, second in self.same
            if flat[first] is not flat[second]
        ]
        if problems:
            remedy = "capture again with these inputs"
            if sizes := self._other_sizes(flat):
                remedy += f", or with a dynamic_shapes that lets {sizes} vary"
            error = CallError("the arguments do not fit the capture", why="; ".join(problems), remedy=remedy)
            error.misfits = tuple(misfits)
            raise error

    def _misplaced(self, flat: Sequence[Any]) -> list[str]:
        """The leaves whose layout matters and is another."""
        rows = zip(self.paths, self.leaves, flat, strict=True)
        wanted = (row for row in rows if self.reads_memory or row[0] in self.layouts)
        return [problem for row in wanted if (problem := misplaced(*row, asked=not self.reads_memory))]

    def _open(self, flat: Sequence[Any]) -> list[tuple[str, Any, Any]]:
        """The leaves whose sizes the capture left open."""
        return [(self.paths[at], self.leaves[at], flat[at]) for at in self._open_positions]

    @cached_property
    def _open_positions(self) -> tuple[int, ...]:
        return tuple(at for at, leaf in enumerate(self.leaves) if is_open(leaf))

    def _other_sizes(self, flat: Sequence[Any]) -> str:
        """The dimensions that have another size than at capture, in tensors of the same rank."""
        rows = zip(self.paths, self.leaves, flat, strict=True)
        tensors = (row for row in rows if isinstance(row[1], Tensor) and isinstance(row[2], Tensor))
        found = [
            f"dim {dim} of `{path}`"
            for path, expected, given in tensors
            if len(expected.shape) == len(given.shape)
            for dim, size in enumerate(expected.shape)
            if not is_symbolic(size) and size != given.shape[dim]
        ]
        return " and ".join(found)

    def _misfit(self, at: int, given: Any) -> str | None:
        expected = self.leaves[at]
        if self.sizes is None or not isinstance(expected, (Tensor, *SYMBOLIC)):
            return misfit(self.paths[at], expected, given)
        return self._misfit_of_size(self.sizes, at, given)

    def _misfit_of_size(self, sizes: Sizes, at: int, given: Any) -> str | None:
        """How a value that may have other sizes differs in anything else."""
        path, expected = self.paths[at], self.leaves[at]
        if not isinstance(expected, Tensor):
            is_number = type(given) is int
            return None if is_number else f"{path} was a whole number at capture, is {describe(given)}"
        if not isinstance(given, Tensor):
            return f"{path} was a tensor {describe(expected)} at capture, is {given!r}"
        if expected.dtype != given.dtype or not sizes.admits(at, given.shape):
            return f"{path} was {describe(expected)} at capture, is {describe(given)}"
        return None

    def _check_sizes(self, sizes: Sizes, flat: Sequence[Any]) -> None:
        broken = [told(rule, flat) for rule in sizes.broken(flat)]
        if broken:
            raise CallError(
                "the capture does not hold for these sizes",
                why="; ".join(broken),
                remedy="pass inputs of an admitted size (print(program.shapes) lists them), or capture again "
                "with a dynamic_shapes, or an example, that admits this one",
            )

    def bound(self, flat: Sequence[Any]) -> dict[str, int]:
        """The sizes of a call that has been checked, by name."""
        return {} if self.sizes is None else self.sizes.bound(flat)

    def respelled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call as the capture spelled its own, where the same arguments can be given so."""
        if self.parameters is None:
            return args, kwargs
        captured_args, captured_kwargs = tree_unflatten(list(self.leaves), self.spec)
        given = arguments_by_name(self.parameters, args, kwargs)
        expected = arguments_by_name(self.parameters, captured_args, captured_kwargs)
        given = _with_defaults(self.parameters, given, expected)
        if set(given) != set(expected):
            return args, kwargs
        positional = list(arguments_by_name(self.parameters, captured_args, {}, partial=True))
        new_args = tuple(given[name] for name in positional)
        return new_args, {name: given[name] for name in captured_kwargs}


def arguments_by_name(
    parameters: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], *, partial: bool = False
) -> dict[str, Any]:
    """Arguments under the names of the parameters they bind to; the members of `*args` as `*0`, `*1`, …"""
    try:
        bound = parameters.bind_partial(*args, **kwargs) if partial else parameters.bind(*args, **kwargs)
    except TypeError as error:
        problems = [str(error)] if partial else binding_faults(parameters, args, kwargs)
        raise CallError("; ".join(problems), why=f"the captured callable takes {parameters}") from error
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        match parameters.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                named |= {f"*{position}": item for position, item in enumerate(value)}
            case inspect.Parameter.VAR_KEYWORD:
                named |= value
            case _:
                named[name] = value
    return named


def _with_defaults(
    parameters: inspect.Signature, given: dict[str, Any], expected: dict[str, Any]
) -> dict[str, Any]:
    """Drop arguments that only write out a default, add those the capture wrote out."""

    def default(name: str) -> Any:
        parameter = parameters.parameters.get(name)
        return inspect.Parameter.empty if parameter is None else parameter.default

    kept = {
        name: value
        for name, value in given.items()
        if name in expected or not _same_value(default(name), value)
    }
    missing = {name: default(name) for name in expected if name not in kept}
    return kept | {name: value for name, value in missing.items() if value is not inspect.Parameter.empty}


def misfit(path: str, expected: Any, given: Any) -> str | None:
    """Say in words how `given` differs from what was captured, or None."""
    if isinstance(expected, Absent):
        return None
    if is_open(expected):
        return _misfit_but_for_size(path, expected, given)
    if not isinstance(expected, Tensor):
        return (
            None
            if _same_constant(expected, given)
            else f"{path} was {expected!r} at capture, is {describe(given)}"
        )
    if not isinstance(given, Tensor):
        return f"{path} was a tensor {describe(expected)} at capture, is {given!r}"
    if expected.shape != given.shape or expected.dtype != given.dtype:
        return f"{path} was {describe(expected)} at capture, is {describe(given)}"
    return None


def _misfit_but_for_size(path: str, expected: Any, given: Any) -> str | None:
    if isinstance(expected, Tensor) and not isinstance(given, Tensor):
        return f"{path} was a tensor {describe(expected)} at capture, is {given!r}"
    if isinstance(expected, Tensor) and expected.dtype != given.dtype:
        return f"{path} was {describe(expected)} at capture, is {describe(given)}"
    return None


def misplaced(path: str, expected: Any, given: Any, *, asked: bool = False) -> str | None:
    """Say in words how the memory layout of a tensor differs from the capture's, or None.

    It matters because the program reads memory, or because the model `asked` for it.
    """
    if not isinstance(expected, Tensor) or is_open(expected) or expected.stride() == given.stride():
        return None
    why = "the model asked for them" if asked else "the program reads memory"
    return f"{path} had strides {expected.stride()} at capture, has {given.stride()}; {why}"


def _same_constant(expected: Any, given: Any) -> bool:
    if expected is given:
        return True
    if type(expected) is not type(given) or isinstance(given, Tensor):
        return False
    if isinstance(expected, float):  # nan is itself, and the two zeros differ
        return repr(expected) == repr(given)
    return bool(expected == given)


def _same_value(default: Any, given: Any) -> bool:
    """Whether an argument only writes out a default."""
    if isinstance(default, tuple | list) and type(default) is type(given) and len(default) == len(given):
        return all(map(_same_value, default, given))
    return _same_constant(default, given)


def same_structure(left: TreeSpec, right: TreeSpec) -> bool:
    """Whether two structures agree; dict and OrderedDict with equal keys in equal order are one kind."""
    if left == right:
        return True
    if left.is_leaf() or right.is_leaf() or _kind(left) is not _kind(right) or left.context != right.context:
        return False
    ours, theirs = left.children(), right.children()
    return len(ours) == len(theirs) and all(map(same_structure, ours, theirs))


def _kind(spec: TreeSpec) -> Any:
    """The container that counts: rebuilt from its leaves, a `torch.Size` is a plain tuple."""
    return {OrderedDict: dict, Size: tuple}.get(spec.type, spec.type)


def _shape_of(spec: TreeSpec, leaves: Sequence[Any]) -> str:
    args, kwargs = tree_unflatten([_Leaf(describe(leaf)) for leaf in leaves], spec)
    spelled_args = [repr(value) for value in args]
    return f"({', '.join([*spelled_args, *(f'{name}={value!r}' for name, value in kwargs.items())])})"


@dataclass(frozen=True)
class _Leaf:
    text: str

    def __repr__(self) -> str:
        return self.text


def repeated_positions(keys: Sequence[Hashable | None]) -> tuple[tuple[int, int], ...]:
    """Pairs of a key's first position and each later one; None is no key."""
    first: dict[Hashable, int] = {}
    held = [(position, key) for position, key in enumerate(keys) if key is not None]
    return tuple((first[key], at) for at, key in held if first.setdefault(key, at) != at)


def paths_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """The spelled access of every leaf: `args[0]['mask']`, `kwargs['ids']`."""
    pairs, _ = tree_flatten_with_path((args, kwargs))
    return tuple(("args", "kwargs")[path[0].idx] + spelled(path[1:]) for path, _ in pairs)  # type: ignore[attr-defined]


def argument_parts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Part | None, ...]:
    """For every leaf, which part of a tensor that is made of several it is."""
    return (*parts_in(args, "args"), *parts_in(kwargs, "kwargs"))


def parts_in(value: Any, root: str) -> list[Part | None]:
    """The same for the leaves of a value that is called `root`."""
    return [
        None
        if row is None
        else Part(f"{root}{row[0]}", type(row[1]).__name__, row[2], bool(row[1].requires_grad))
        for row in composition_of(value)
    ]


def whole_paths_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """As `paths_of`, with one path for a tensor that is made of others."""
    leaves = whole_leaves((args, kwargs))
    return paths_of(*with_whole_leaves((args, kwargs), [0] * len(leaves)))


def names_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], parameters: inspect.Signature | None
) -> tuple[str, ...]:
    """A name for every leaf, from the callable's own argument names: `x`, `batch_mask`, `states_0`."""
    pairs, _ = tree_flatten_with_path((args, kwargs))
    positional = _positional_names(parameters, len(args))
    return tuple(_leaf_name(positional, key_segments(path)) for path, _ in pairs)


def _positional_names(parameters: inspect.Signature | None, count: int) -> list[str]:
    names = [f"args_{position}" for position in range(count)]
    if parameters is None:
        return names
    own = [
        parameter.name
        for parameter in parameters.parameters.values()
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    rest = next(
        (p.name for p in parameters.parameters.values() if p.kind is inspect.Parameter.VAR_POSITIONAL), "args"
    )
    return [*own[:count], *(f"{rest}_{position}" for position in range(count - len(own)))]


def _leaf_name(positional: Sequence[str], segments: Sequence[str]) -> str:
    side, first, *rest = segments
    head = positional[int(first)] if side == "0" else first
    return "_".join([head, *rest])


def shown_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Arguments as they are written, each leaf described."""
    flat, spec = tree_flatten((args, kwargs))
    return _shape_of(spec, flat)
