"""What an operator's schema says: what it changes, which results are views, its functional twin."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from operator import getitem
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, can_auto_functionalize
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from whence._torch.graphs import nodes_in
from whence._torch.operators.table import said_of
from whence._torch.sizes.numbers import stays

__all__ = [
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "Traits",
    "functional_twin",
    "op_name",
    "traits",
]

aten = torch.ops.aten
MAY_COPY = frozenset((aten.reshape.default, aten.contiguous.default, aten.flatten.using_ints))
"""Each run decides by sizes whether they copy: they stay whole where these vary."""
WRAPPER = auto_functionalized
"""Runs an operator on copies of what it writes to, and gives its results and the copies."""


@dataclass(frozen=True)
class Traits:
    """`mutates`: positions of changed arguments. `viewed`: that of the argument the results look into."""

    mutates: tuple[int, ...] = ()
    viewed: int | None = None
    moves_view: bool = False
    random: bool = False


ASSERT = torch.ops.aten._assert_scalar.default
"""Raises in a run where a condition does not hold; gives nothing."""


_ASKED_BY_KERNELS = frozenset({torch.ops.aten.size.default, torch.ops.aten.stride.default})
"""Operators of TorchScript alone, as which a kernel in C++ that takes numbers asks for sizes."""


@cache
def is_composite(target: Any) -> bool:
    """Whether an operator is written in terms of others, so that its schema need not say what it does."""
    if not isinstance(target, OpOverload) or target in _ASKED_BY_KERNELS:
        return False
    return target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def op_name(target: Any) -> str:
    """`aten.mm.default` for an operator, the plain name for any other callable."""
    if isinstance(target, OpOverload):
        return _spelled(target)
    return getattr(target, "__name__", str(target))


_spelled = cache(str)


def may_give(target: object, value: object) -> bool:
    """Whether an operator gives such a thing, as far as its schema says: one tensor, or so many values."""
    if value is None or not isinstance(target, OpOverload):
        return True
    kinds = [str(row.type) for row in target._schema.returns]
    if kinds == ["Tensor"]:
        return isinstance(value, Tensor)
    return len(kinds) < 2 or (isinstance(value, tuple | list) and len(value) == len(kinds))


def gives_tensors(target: object) -> bool:
    """Whether it is an operator of PyTorch's own that gives so many tensors, whatever it is given."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return False
    return {str(row.type) for row in target._schema.returns} == {"Tensor"}


def overloads_of(target: object) -> tuple[OpOverload, ...]:
    """An operator, or all overloads of one name; none for anything else."""
    if isinstance(target, OpOverload):
        return (target,)
    if isinstance(target, OpOverloadPacket):
        return tuple(getattr(target, name) for name in target.overloads())
    return ()


def short_name(target: Any) -> str:
    """What a node that calls `target` is called: `mm` for `aten.mm.default`."""
    return target._opname if isinstance(target, OpOverload) else op_name(target)


def entry_point(target: Any, args: Sequence[Any] = ()) -> Any:
    """The C++ function behind an operator for these arguments; it costs a Python frame less per operation."""
    if not isinstance(target, OpOverload):
        return target
    has_tensor = bool(args) and isinstance(args[0], (fx.Node, list))
    return (said_of(target).entry or target._op) if has_tensor else target._op


@cache
def traits(target: Any) -> Traits:
    """Read the schema of an operator; anything else has no traits."""
    if not isinstance(target, OpOverload):
        return Traits()
    arguments = target._schema.arguments
    mutates = tuple(
        i for i, argument in enumerate(arguments) if argument.alias_info and argument.alias_info.is_write
    )
    mutates = mutates or said_of(target).writes
    return Traits(
        mutates=mutates,
        viewed=None if mutates else _viewed_argument(target),
        moves_view=torch.Tag.inplace_view in target.tags,
        random=torch.Tag.nondeterministic_seeded in target.tags,
    )


@cache
def makes_memory(target: Any) -> bool:
    """Whether an operator of PyTorch's certainly gives memory of its own, and writes to no other."""
    if not isinstance(target, OpOverload) or target.namespace != "aten" or is_composite(target):
        return False
    is_silent = said_of(target).shares_memory or target in _SILENT_VIEWS
    return not (is_silent or traits(target).mutates or any(row.alias_info for row in target._schema.returns))


_aten = torch.ops.aten
_SILENT_VIEWS = frozenset(
    {
        *(_aten._unsafe_view.default, _aten.lift.default, _aten.unsafe_chunk.default),
        *(_aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default),
        *(_aten.pixel_shuffle.default, _aten.pixel_unshuffle.default),
    }
)
"""Operators that give the memory of their argument, of which their schemas say nothing."""


def _viewed_argument(target: OpOverload) -> int | None:
    if not any(result.alias_info for result in target._schema.returns):
        return None
    return next((i for i, argument in enumerate(target._schema.arguments) if argument.alias_info), None)


def written_arguments(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call that an operator writes to, in the order of its schema."""
    if not isinstance(target, OpOverload):
        return []
    training = said_of(target).training
    if training is not None and (len(args) <= training or args[training] is not True):
        return []
    names = [argument.name for argument in target._schema.arguments]
    positions = traits(target).mutates
    values = [args[i] if i < len(args) else kwargs.get(names[i]) for i in positions]
    return [value for value in values if value is not None]


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The values that an operation of a graph writes to, those in lists among them."""
    return nodes_in(written_arguments(node.target, node.args, node.kwargs))


def looked_into(node: fx.Node) -> fx.Node | None:
    """The argument into whose memory the result of a node looks, or may look."""
    viewed = 0 if node.target is getitem else traits(node.target).viewed
    seen = () if viewed is None else node.args[viewed : viewed + 1]
    return next((source for source in chain(written_nodes(node), seen) if isinstance(source, fx.Node)), None)


def owner_of(node: fx.Node) -> fx.Node:
    """The first value that looks into the memory of one: an input, or what an operator has made."""
    source = looked_into(node)
    if source is None or (node.target is getitem and looked_into(source) is None):
        return node
    return owner_of(source)


def without_outputs(target: OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments without those that only say where to write."""
    outputs = {argument.name for argument in target._schema.arguments if argument.is_out}
    return {name: value for name, value in kwargs.items() if name not in outputs}


def reads_memory(target: Any) -> bool:
    """Whether an operator looks at a tensor through strides of its own, whatever the tensor's are."""
    return said_of(target).reads_memory


def arguments_of_twin(target: OpOverload, twin: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of a call as its twin takes them: one that always trains is not told so."""
    at = said_of(target).training
    if at is None or len(args) <= len(twin._schema.arguments):
        return args
    return (*args[:at], *args[at + 1 :])


def missing_defaults(
    target: OpOverload, twin: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments that a call left at `target`'s default, and for which `twin` has none."""
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    left = twin._schema.arguments[len(args) :]
    return {
        argument.name: defaults[argument.name]
        for argument in left
        if not argument.has_default_value() and argument.name not in kwargs and argument.name in defaults
    }


def has_size_of_data(target: Any) -> bool:
    """Whether the size of an operator's result depends on the values of its arguments."""
    return isinstance(target, OpOverload) and torch.Tag.dynamic_output_shape in target.tags


def draws(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of an operator draws random numbers; attention and recurrent networks do only with a
    dropout above zero."""
    if not traits(target).random:
        return False
    rates = [name for name in _RATES if any(name == each.name for each in target._schema.arguments)]
    given = named_arguments(target, args, kwargs)
    return not rates or any(given.get(name) for name in rates)


def other_arguments(target: Any, positional: int, names: Sequence[str]) -> str:
    """What an operator has against a call with so many arguments and these keywords; empty if nothing."""
    if not isinstance(target, OpOverload):
        is_function = isinstance(target, FunctionType | BuiltinFunctionType)
        is_higher = isinstance(target, HigherOrderOperator)
        called = target.__call__ if is_higher else target if is_function else None
        takes = called is None or _takes(called, positional, names)
        return "" if takes else f"with {positional + len(names)} arguments"
    arguments = target._schema.arguments
    in_place = [each.name for each in arguments if not each.kwarg_only]
    if positional > len(in_place):
        return f"with {positional} arguments"
    given = {*in_place[:positional], *names}
    if unknown := [name for name in names if name not in {each.name for each in arguments}]:
        return f"with the argument {', '.join(unknown)}"
    needed = [each.name for each in arguments if not each.has_default_value() and each.name not in given]
    return f"without the argument {', '.join(needed)}" if needed else ""


def _takes(function: Callable[..., Any], positional: int, names: Sequence[str]) -> bool:
    """Whether a function takes such a call; of some Python does not say what they take."""
    try:
        inspect.signature(function).bind(*range(positional), **dict.fromkeys(names))
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)
    return True


def named_arguments(target: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that were given, by the names that the operator's schema has for them."""
    names = (argument.name for argument in target._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def gives_back(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call returns its first argument itself where that has the wanted dtype and place."""
    if not isinstance(target, OpOverload) or target.overloadpacket is not aten.to:
        return False
    given = named_arguments(target, args, kwargs)
    return not given.get("copy") and given.get("memory_format") in (None, torch.preserve_format)


_RATES = ("dropout_p", "dropout")
"""How schemas call the share of numbers that is dropped, where the default is none."""


@cache
def acts(target: Any) -> bool:
    """Whether an operator is called for what it does: it gives nothing, and writes to no argument."""
    if not isinstance(target, OpOverload) or said_of(target).is_for_tracing:
        return target is stays
    return not target._schema.returns and not target._schema.is_mutable


def keeps_its_place(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a run is another one without the call of an operator, or with it elsewhere."""
    return acts(target) or draws(target, args, kwargs)


def brings_derivative(target: Any) -> bool:
    """Whether an operator finds its derivative by itself: it was defined outside PyTorch and has one of its
    own, or it runs functions that autograd looks into."""
    if isinstance(target, HigherOrderOperator):
        return True
    if not isinstance(target, OpOverload) or target.namespace in ("aten", "prim", "prims"):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "Autograd")


def differentiated_by_result(written: fx.Node, twin: fx.Node) -> bool:
    """Whether a write in place has another derivative than its twin, or one with other last bits."""
    by_result = said_of(written.target).by_result
    return by_result is not None and by_result(twin)


@cache
def functional_twin(target: OpOverload) -> OpOverload | None:
    """The operator that computes what `target` writes, and writes nothing; None if there is none.

    Found by PyTorch's naming rule (`add_.Tensor` or `add.out`, and `add.Tensor`), checked against the
    schema, or said in the table.
    """
    if (twin := said_of(target).twin) is not None:
        return twin
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), re.sub(r"_$", "", name), None)
    if packet is None:
        return None
    arguments = [(a.name, str(a.type)) for a in target._schema.arguments if not a.is_out]
    if not name.endswith("_") and len(arguments) == len(target._schema.arguments):
        return None
    twins = (
        getattr(packet, overload) for overload in sorted(packet.overloads(), key=target._overloadname.__ne__)
    )
    return next((twin for twin in twins if _is_twin(twin, arguments)), None)


_FOR_OPTIMIZERS = ("_foreach_", "_fused_")


@cache
def in_place_twin(target: Any) -> OpOverload | None:
    """The operator of PyTorch's that writes what `target` computes for each element into its arguments."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, f"{name}_", None)
    twin = None if packet is None else getattr(packet, target._overloadname, None)
    is_by_element = is_elementwise(target) or name.startswith(_FOR_OPTIMIZERS)
    return twin if is_by_element and twin is not None and functional_twin(twin) is target else None


def is_wrapped(target: OpOverload) -> bool:
    """Whether `WRAPPER` can run an operator that writes to arguments: its schema says all that it does."""
    return target.namespace not in ("aten", "prim", "prims") and can_auto_functionalize(target)


def _is_twin(candidate: OpOverload, arguments: list[tuple[str, str]]) -> bool:
    taken = [(argument.name, str(argument.type)) for argument in candidate._schema.arguments]
    return taken == arguments and not traits(candidate).mutates


def is_elementwise(target: Any) -> bool:
    """Whether an operator computes each element from the elements in its place."""
    return isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags


_FUNCTIONS_OF_PYTHON = (
    "triton",
    "autograd_function",
    "custom_function",
    "print",
    "call_delegate",
    "compiled",
)
"""Parts of the names of operators that run functions of Python's, which no file holds."""


def operator_named(
    namespace: str, packet: str, overload: str | None = None
) -> OpOverload | OpOverloadPacket | None:
    """The operator, or without `overload` all those of one name; None where there is none."""
    are_names = namespace.isidentifier() and packet.isidentifier()
    if not are_names or namespace in vars(type(torch.ops)):
        return None
    try:
        found = getattr(getattr(torch.ops, namespace), packet)
        found = found if overload is None else getattr(found, overload)
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, OpOverload | OpOverloadPacket) else None


def higher_order_named(name: str) -> HigherOrderOperator | None:
    """The higher-order operator of that name; None for one that runs Python's functions, and for none."""
    if not name.isidentifier() or any(part in name for part in _FUNCTIONS_OF_PYTHON):
        return None
    try:
        found = getattr(torch.ops.higher_order, name)
    except AttributeError:
        return None
    return found if isinstance(found, HigherOrderOperator) else None
