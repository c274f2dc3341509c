"""How a person calls one module of a tree, and what its gradients are then.

Inside the tree a call passes flat values. Alone, it takes the arguments the original takes and gives back
what the original gives; its gradients are the contributions its own autograd nodes made, in the order they
arrived.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from whence._torch.sizes.exported_sizes import is_open
from whence._torch.sizes.symbols import is_symbolic, names_in, spelled
from whence.hierarchy.plan.plan import ROOT_CALL, Plan, first_within
from whence.program import Constant, Contribution, Convention, Named, Structure
from whence.program.arguments.convention import paths_of, repeated_positions
from whence.program.arguments.open_sizes import Sizes, sizes_of
from whence.provenance import ModulePath
from whence.schema import InputKind, OutputKind


@dataclass(frozen=True)
class GradientInterface:
    """How gradients enter and leave a call.

    `tangents` pairs a value the call gives with the value its backward takes for it. `terms` are, for each
    value the call takes (inputs and parameters by name), the values that add up to its gradient, in order.
    `parameters` says where the module holds the parameters among them. `refusal` is the reason why the call
    cannot be differentiated alone. `rewritten` is the state that the backward writes once more: its value
    after the forward, the one after the backward, and where the module holds it.
    """

    tangents: tuple[tuple[str, str], ...]
    terms: Mapping[str, tuple[str, ...]]
    parameters: tuple[tuple[str, ModulePath], ...]
    frozen: tuple[tuple[str, ModulePath], ...]
    refusal: str = ""
    rewritten: tuple[tuple[str, str, ModulePath], ...] = ()


@dataclass(frozen=True)
class Interface:
    """A call as a person makes it.

    `leaves` names the value of each flat argument (None for constants). `state` are body inputs that the
    module reads from itself. `writes` pairs new values with the attribute, or the position of the argument,
    they replace. `hidden` are body inputs that no argument supplies. `sizes` are body inputs that follow from
    the sizes of the arguments, each with how; so are results that are nothing else.
    """

    convention: Convention
    leaves: tuple[str | None, ...]
    state: tuple[tuple[str, ModulePath], ...]
    result: Structure
    writes: tuple[tuple[str, ModulePath | int], ...]
    hidden: tuple[str, ...]
    gradients: GradientInterface | None
    loss: str | None = None
    sizes: tuple[tuple[str, str], ...] = ()


def interface_of(plan: Plan, number: int) -> Interface | None:
    """The interface of a call; None where the capture could not describe its arguments."""
    program = plan.program
    call = program.calls.rows[number]
    leaves: tuple[str | None, ...]
    if number == ROOT_CALL:
        convention, result = program.convention, program.result
        leaves = tuple(row.name for row in program.signature.inputs_of(InputKind.USER))
    elif call.inputs is None or call.outputs is None:
        return None
    else:
        convention, result = _call_convention(plan, call.inputs, call.parameters), call.outputs
        leaves = tuple(leaf.name if isinstance(leaf, Named) else None for leaf in call.inputs.leaves)
    state = tuple(_own_state(plan, number, leaves))
    sizes = () if number == ROOT_CALL else tuple(_size_rows(plan, number, convention.sizes, result.names))
    known = {*leaves, *(name for name, _ in (*state, *sizes))}
    loss = next((row.node for row in program.signature.outputs_of(OutputKind.LOSS)), None)
    return Interface(
        convention=convention,
        leaves=leaves,
        state=state,
        result=result,
        writes=tuple(_state_writes(plan, number, leaves)),
        hidden=tuple(name for name in plan.calls[number].forward.inputs if name not in known),
        gradients=_gradient_interface(plan, number, leaves, result) if program.has_backward else None,
        loss=loss if number == ROOT_CALL else None,
        sizes=sizes,
    )


def _call_convention(plan: Plan, inputs: Structure, parameters: inspect.Signature | None) -> Convention:
    values = {
        row.name: row.value for row in (*plan.program.signature.inputs, *plan.program.signature.attributes)
    }
    values |= {name: plan.nodes[name].meta["val"] for name in inputs.names if name not in values}
    leaves = [
        values[leaf.name] if isinstance(leaf, Named) else leaf.value if isinstance(leaf, Constant) else leaf
        for leaf in inputs.leaves
    ]
    args, kwargs = Structure(inputs.spec, tuple(map(Constant, leaves))).filled({})
    same = repeated_positions([leaf.name if isinstance(leaf, Named) else None for leaf in inputs.leaves])
    paths = paths_of(args, kwargs)
    is_fixed = plan.program.convention.sizes is None and not any(map(is_open, leaves))
    sizes = None if is_fixed else sizes_of(leaves, paths)
    return Convention(inputs.spec, tuple(leaves), paths, parameters, same, sizes=sizes)


def _size_rows(
    plan: Plan, number: int, known: Sizes | None, returned: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Body inputs and results that are sizes, and how they follow from those of the arguments."""
    names = {reading.name for reading in known.readings} if known is not None else set()
    body = plan.calls[number].forward
    for name in dict.fromkeys((*body.inputs, *(name for name in returned if name not in body.outputs))):
        value = plan.nodes[name].meta.get("val")
        if is_symbolic(value) and names_in(value) <= names:
            yield name, spelled(value)


def readable(plan: Plan, name: str, number: int) -> ModulePath | None:
    """The attribute path by which the module of a call holds a piece of state."""
    row = plan.program.input(name)
    return first_within(row.attribute_paths, plan.program.calls.rows[number].site.path)


def _own_state(plan: Plan, number: int, leaves: tuple[str | None, ...]) -> Iterator[tuple[str, ModulePath]]:
    """Body inputs that are state of the module, or a value its state had when the call was made."""
    state = {row.name for row in plan.program.signature.state}
    for name in plan.calls[number].forward.inputs:
        holder = name if name in state else plan.program.facts.holders.get(name)
        if name not in leaves and holder in state and (path := readable(plan, holder, number)) is not None:
            yield name, path


def _state_writes(
    plan: Plan, number: int, leaves: tuple[str | None, ...]
) -> Iterator[tuple[str, ModulePath | int]]:
    given = set(plan.calls[number].forward.outputs)
    state = {row.name for row in plan.program.signature.state}
    for name, history in plan.program.facts.versions.items():
        last = next((value for value in reversed(history) if value in given), None)
        if last is None and number == ROOT_CALL:
            last = history[-1]
        if last is None:
            continue
        if name in leaves:
            yield last, leaves.index(name)
        elif name in state and (path := readable(plan, name, number)) is not None:
            yield last, path


def _gradient_interface(
    plan: Plan, number: int, leaves: tuple[str | None, ...], result: Structure
) -> GradientInterface:
    return _root_gradients(plan) if number == ROOT_CALL else _inner_gradients(plan, number, leaves, result)


def _rewritten(plan: Plan, number: int) -> Iterator[tuple[str, str, ModulePath]]:
    """State that a checkpoint writes again in the backward: its values before and after, and its place."""
    call, versions = plan.calls[number], plan.program.facts.versions
    after = () if call.backward is None else call.backward.outputs
    again = (row.name for row in plan.program.signature.state if versions.get(row.name, ("",))[-1] in after)
    for name in again:
        between = [value for value in versions[name] if value in call.forward.outputs]
        if between and (path := readable(plan, name, number)) is not None:
            yield between[-1], versions[name][-1], path


def _root_gradients(plan: Plan) -> GradientInterface:
    signature = plan.program.signature
    outputs = {row.name: row.node for row in signature.outputs}
    tangents = [(outputs[row.of], row.name) for row in signature.inputs_of(InputKind.TANGENT) if row.of]
    if plan.program.facts.seed:
        tangents = [(outputs["loss"], plan.program.facts.seed)]
    rows = {row.of: row.node for row in signature.outputs_of(OutputKind.GRADIENT)}
    terms = {name: (node,) if node else () for name, node in rows.items() if name is not None}
    return GradientInterface(
        tangents=tuple((output, tangent) for output, tangent in tangents if output is not None),
        terms=terms,
        parameters=_state_held(plan, ROOT_CALL, list(terms)),
        frozen=_state_held(plan, ROOT_CALL, _frozen(plan)),
        rewritten=tuple(_rewritten(plan, ROOT_CALL)),
    )


def _frozen(plan: Plan) -> list[str]:
    rows = plan.program.signature.state
    parameters = [row for row in rows if row.kind is InputKind.PARAMETER]
    return [row.name for row in parameters if not (row.part or row.value).requires_grad]


def _state_held(plan: Plan, number: int, names: list[str]) -> tuple[tuple[str, ModulePath], ...]:
    state = {row.name for row in plan.program.signature.state}
    return tuple(
        (name, path) for name in names if name in state and (path := readable(plan, name, number)) is not None
    )


def _inner_gradients(
    plan: Plan, number: int, leaves: tuple[str | None, ...], result: Structure
) -> GradientInterface:
    facts = plan.program.facts
    backward = plan.calls[number].backward
    entering = () if backward is None else backward.inputs
    inside = frozenset(plan.program.calls.within(number))
    tangents: list[tuple[str, str]] = []
    unclear: list[str] = []
    for output in result.names:
        met = [name for name in entering if name in _gradient_nodes(facts.contributions(output))]
        through = _passed_through(facts.contributions(output), inside)
        tangents += [(output, name) for name in (met or through)[:1]]
        unclear += [output] if len(met) > 1 else []
    names = [name for _, name in tangents]
    missing = [name for name in entering if name not in names]
    shared = [name for name in names if names.count(name) > 1]
    candidates = [*(leaf for leaf in leaves if leaf), *(row.name for row in plan.program.signature.state)]
    terms = {
        name: found for name in candidates if (found := _within(facts.contributions(name), inside, plan))
    }
    reasons = {
        "gradients of several results arrive as one value": shared or unclear,
        "its backward needs values computed outside it": missing,
        "a pass merged the gradients of": sorted(
            {name for name, scope in facts.unclear if name in candidates and scope in inside}
        ),
        "a checkpoint, which may be around it, writes state again in the backward": [
            str(path) for _, _, path in _rewritten(plan, number)
        ],
        "its backward is part of its caller's": []
        if backward and (backward.steps or not terms)
        else _reasons_flattened(plan, number),
    }
    refusal = "; ".join(f"{reason}: {', '.join(found)}" for reason, found in reasons.items() if found)
    return GradientInterface(
        tuple(tangents),
        terms,
        _state_held(plan, number, list(terms)),
        _state_held(plan, number, _frozen(plan)),
        refusal,
    )


def _reasons_flattened(plan: Plan, number: int) -> list[str]:
    return [flat.reason for flat in plan.flattened if flat.number == number]


def _gradient_nodes(parts: Sequence[Contribution]) -> set[str]:
    """Every node that is a gradient of the value: contributions and running sums."""
    return {name for part in parts for name in (part.node, part.sum) if name}


def _passed_through(parts: Sequence[Contribution], inside: frozenset[int]) -> list[str]:
    """The gradient of a value whose own backward hands it on unchanged, so that no node reads it."""
    if not parts or any(part.scope in inside for part in parts):
        return []
    return [parts[-1].sum or parts[-1].node]


def _within(parts: Sequence[Contribution], inside: frozenset[int], plan: Plan) -> tuple[str, ...]:
    """What the call contributed to a gradient; sums that were made inside the call stand for their parts."""
    terms: list[str] = []
    for part in parts:
        if part.scope not in inside:
            continue
        summed_here = part.sum is not None and plan.regions.get(part.sum, (None, -1))[1] in inside
        terms = [part.sum] if summed_here and part.sum else [*terms, part.node]
    return tuple(terms)
