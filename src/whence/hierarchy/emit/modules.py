"""Make the modules of a plan."""

from collections.abc import Mapping
from copy import deepcopy
from types import MethodType

from torch import Tensor, nn

from whence.errors import Place, UsageError
from whence.hierarchy.plan.plan import ROOT_CALL, Plan
from whence.hierarchy.run.bodies import captured_of
from whence.hierarchy.run.calls import CallBody, Compiler
from whence.hierarchy.tree import CAPTURED_MODE, OWN_NAMES, Tree, TreeList, forward_as
from whence.program import ModuleRecord, Program
from whence.program.copying import copy_results
from whence.program.state import state_of_loss
from whence.provenance import ROOT, ModulePath
from whence.schema import InputKind, Phase

_LISTS = frozenset({"Sequential", "ModuleList"})
_CONTAINERS: dict[str, type[nn.Module]] = {
    "ModuleList": nn.ModuleList,
    "ModuleDict": nn.ModuleDict,
    "Sequential": nn.Sequential,
    "ParameterList": nn.ParameterList,
    "ParameterDict": nn.ParameterDict,
}


def emit(plan: Plan, *, copy: bool = False) -> Tree:
    """The tree of a plan. It shares the captured model's tensors unless `copy` is asked for."""
    program = plan.program
    called = _by_first_name(program, calls_by_path(plan))
    state = dict(program.state)
    root = _root(program)
    made: dict[ModulePath, nn.Module] = {ROOT: root}
    for record in program.modules:
        module = (
            made[record.same_as]
            if record.same_as is not None
            else _module(record, called.get(record.path, ()))
        )
        if record.path == ROOT:
            module = root
            vars(root)["type_name"] = record.type
        else:
            _attach(_parent(made, root, record.path), record.path.name, module)
        made[record.path] = module
        if record.same_as is None:
            _fill(module, record, state)
    _give_calls(root, called.get(ROOT, ()))
    _sign(root)
    for record in program.modules:
        _order_children(made[record.path], record)
    add_constants(root, program)
    _point_to_root(root, plan, made)
    say_inlined(plan, made)
    return deepcopy(root, copy_results(program.state.values(), {})) if copy else root


def say_inlined(plan: Plan, made: Mapping[ModulePath, nn.Module]) -> None:
    """Say of modules that were called and have no graph why not."""
    reasons = {flat.number: f": {flat.reason}" for flat in plan.flattened if flat.phase is Phase.FORWARD}
    for row in plan.program.calls:
        holder = captured_of(made[row.site.path]) if row.site.path in made else None
        if holder is not None and not holder.calls:
            words = f"its operations are part of its caller's graph{reasons.get(row.number, '')}"
            vars(holder)["inlined"] = words


def _root(program: Program) -> Tree:
    listed = any(record.path == ROOT and record.container in _LISTS for record in program.modules)
    return TreeList(program.name) if listed else Tree(program.name)


def calls_by_path(plan: Plan) -> dict[ModulePath, tuple[CallBody, ...]]:
    """The captured calls of each module."""
    compiler = Compiler(plan)
    found: dict[ModulePath, list[CallBody]] = {}
    for number in plan.calls:
        path = ROOT if number == ROOT_CALL else plan.site(number).path
        found.setdefault(path, []).append(CallBody(plan, number, compiler))
    return {path: tuple(calls) for path, calls in found.items()}


def _by_first_name(
    program: Program, called: Mapping[ModulePath, tuple[CallBody, ...]]
) -> dict[ModulePath, tuple[CallBody, ...]]:
    """The captured calls of each module, under the first of its names, whichever it was called by."""
    first = {record.path: record.same_as for record in program.modules if record.same_as is not None}
    found: dict[ModulePath, tuple[CallBody, ...]] = {}
    for path, calls in called.items():
        name = first.get(path, path)
        found[name] = (*found.get(name, ()), *calls)
    return found


def _module(record: ModuleRecord, calls: tuple[CallBody, ...]) -> nn.Module:
    if record.container == record.type and not calls:
        return _CONTAINERS[record.container]()
    module = TreeList(record.type) if record.container in _LISTS else Tree(record.type)
    _give_calls(module, calls)
    return module


def _give_calls(module: Tree, calls: tuple[CallBody, ...]) -> None:
    module.__dict__["calls"] = (*module.calls, *(call for call in calls if not call.is_recomputation))
    module.bodies.update({call.number: call for call in calls})
    if module.calls and (parameters := module.calls[0].parameters) is not None:
        module.__dict__["__signature__"] = parameters


def _sign(root: Tree) -> None:
    """Give the root's `forward` the original's signature; paths in an export would go through a child's."""
    if root.calls and (parameters := root.calls[0].parameters) is not None:
        root.__dict__["forward"] = MethodType(forward_as(parameters), root)


def _parent(made: dict[ModulePath, nn.Module], root: Tree, path: ModulePath) -> nn.Module:
    return made.get(path.parent, root)


def _attach(parent: nn.Module, name: str, module: nn.Module) -> None:
    parent._modules[name] = module
    if isinstance(parent, nn.ParameterList):
        parent._size = max(parent._size, int(name) + 1)


def _order_children(module: nn.Module, record: ModuleRecord) -> None:
    """Submodules in the model's order, those that are None among them."""
    children = {name: module._modules[name] for name in record.children if name in module._modules}
    module._modules.clear()
    module._modules.update(children)


def _fill(module: nn.Module, record: ModuleRecord, state: dict[str, Tensor]) -> None:
    for name, held in record.parameters:
        tensor = None if held is None else state[held]
        if isinstance(module, nn.ParameterList | nn.ParameterDict):
            _add_entry(module, name, tensor)
        else:
            module._parameters[name] = tensor  # type: ignore[assignment]
    for name, held, persistent in record.buffers:
        module._buffers[name] = None if held is None else state[held]
        module._non_persistent_buffers_set |= set() if persistent else {name}
    for name in record.absent:
        module._modules[name] = None
    for name, held in record.tensors:
        if name in OWN_NAMES:
            raise _taken(record, name)
        if held in state:
            setattr(module, name, state[held])
    module.__dict__["training"] = record.training
    if isinstance(module, Tree):
        module.__dict__[CAPTURED_MODE] = record.training


def _taken(record: ModuleRecord, name: str) -> UsageError:
    return UsageError(
        f"{record.type} holds a tensor as its plain attribute {name}",
        where=Place(str(record.path)),
        why="the modules of a tree have that name for what was captured",
        remedy=f"give the attribute another name, or register it: register_buffer({name!r}, …)",
    )


def _add_entry(module: nn.ParameterList | nn.ParameterDict, name: str, tensor: Tensor | None) -> None:
    if isinstance(module, nn.ParameterDict):
        module[name] = tensor
        return
    module._parameters[name] = tensor  # type: ignore[assignment]
    module._size = max(
        module._size, int(name) + 1
    )  # a list may hold other things than parameters between them


def add_constants(root: nn.Module, program: Program) -> None:
    """Tensors that no module of the model holds live at the root, as plain attributes.

    Those of a loss function are in a module that is no part of the hierarchy: the tree has the model's state.
    """
    held = {name for record in program.modules for _, name in record.tensors}
    for row in program.signature.state:
        if row.module is None and row.name in program.state and row.name not in held:
            root.__dict__.setdefault(row.path, program.state[row.name])
    for row in state_of_loss(program):
        for path in row.attribute_paths:
            _add_beside(root, path, program.state[row.name], row.kind)


def _add_beside(root: nn.Module, path: ModulePath, tensor: Tensor, kind: InputKind) -> None:
    holder = root
    for segment in path.parent:
        holder = holder.__dict__.setdefault(segment, nn.Module())
    registers = {InputKind.PARAMETER: "_parameters", InputKind.BUFFER: "_buffers"}
    register = holder.__dict__[registers[kind]] if kind in registers else holder.__dict__
    register[path.name] = tensor


def _point_to_root(root: Tree, plan: Plan, made: dict[ModulePath, nn.Module]) -> None:
    """A module that calls another which is not below it finds it from the root."""
    for number in plan.calls:
        path = plan.site(number).path
        for callers in plan.callers.values():
            around = plan.site(callers[number]).path
            if not path.is_within(around):
                made[around].__dict__["whence_root"] = root
