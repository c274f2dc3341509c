"""Make the modules of a plan, or put its calls into instances of the user's own classes."""

from collections.abc import Mapping

from torch import Tensor, nn

from whence.errors import Place, UsageError
from whence.hierarchy.emit.calls import CallBody, Compiler
from whence.hierarchy.emit.user_classes import instances
from whence.hierarchy.plan.plan import ROOT_CALL, Plan
from whence.hierarchy.run.captured import CAPTURED_MODE, captured_of
from whence.hierarchy.tree import OWN_NAMES, Tree, TreeList, sign_forward
from whence.program import FlatProgram, ModuleRecord
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
Made = Mapping[ModulePath, nn.Module]
"""The new modules under all of their names."""


def emit(plan: Plan, *, onto: object = None) -> nn.Module:
    """The tree of a plan, as instances of the classes of `onto` where one is given.

    It shares the captured model's tensors. Raises `UsageError` naming every module
    of `onto` that does not fit.
    """
    program, called = plan.program, _calls_by_path(plan)
    made = _trees(program, called) if onto is None else instances(program, onto)
    for record in program.modules:
        _fill_module(made[record.path], record, program.state)
        if onto is None:
            _order_children(made[record.path], record)
    for path, calls in called.items():
        if path in made and (held := captured_of(made[path])) is not None:
            held.give(calls)
    root = made[ROOT]
    if isinstance(root, Tree):
        _sign(made, root)
    add_constants(root, program)
    _point_to_root(root, plan, made)
    _say_inlined(plan, made)
    return root


def _calls_by_path(plan: Plan) -> dict[ModulePath, tuple[CallBody, ...]]:
    compiler = Compiler(plan)
    found: dict[ModulePath, list[CallBody]] = {}
    for number in plan.calls:
        path = ROOT if number == ROOT_CALL else plan.site(number).path
        found.setdefault(path, []).append(CallBody(plan, number, compiler))
    return {path: tuple(calls) for path, calls in found.items()}


def _trees(program: FlatProgram, called: Mapping[ModulePath, object]) -> dict[ModulePath, nn.Module]:
    first = {record.path: record.same_as for record in program.modules if record.same_as is not None}
    are_called = {first.get(path, path) for path in called}
    made: dict[ModulePath, nn.Module] = {ROOT: _root_module(program)}
    for record in program.modules:
        if record.same_as is not None:
            made[record.path] = made[record.same_as]
        elif record.path != ROOT:
            made[record.path] = _module_of_record(record, is_called=record.path in are_called)
        if record.path != ROOT:
            _attach(made.get(record.path.parent, made[ROOT]), record.path.name, made[record.path])
    return made


def _root_module(program: FlatProgram) -> Tree:
    record = next((record for record in program.modules if record.path == ROOT), None)
    kind = TreeList if record is not None and record.container in _LISTS else Tree
    return kind(program.name if record is None else record.type)


def _module_of_record(record: ModuleRecord, *, is_called: bool) -> nn.Module:
    if record.container == record.type and not is_called:
        return _CONTAINERS[record.container]()
    return TreeList(record.type) if record.container in _LISTS else Tree(record.type)


def _attach(parent: nn.Module, name: str, module: nn.Module) -> None:
    parent._modules[name] = module
    if isinstance(parent, nn.ParameterList):
        parent._size = max(parent._size, int(name) + 1)


def _order_children(module: nn.Module, record: ModuleRecord) -> None:
    """Submodules in the model's order, those that are None among them."""
    children = {name: module._modules[name] for name in record.children if name in module._modules}
    module._modules.clear()
    module._modules.update(children)


def _fill_module(module: nn.Module, record: ModuleRecord, state: Mapping[str, Tensor]) -> None:
    for name, held in record.parameters:
        module._parameters[name] = None if held is None else state[held]  # type: ignore[assignment]
        if isinstance(module, nn.ParameterDict) and name not in module:
            module[name] = module._parameters[name]
        if isinstance(module, nn.ParameterList):  # which may hold other things between them
            module._size = max(module._size, int(name) + 1)
    for name, held, persistent in record.buffers:
        module._buffers[name] = None if held is None else state[held]
        module._non_persistent_buffers_set |= set() if persistent else {name}
    for name in record.absent:
        module._modules[name] = None
    for name, held in record.tensors:
        if isinstance(module, Tree) and name in OWN_NAMES:
            raise _plain_tensor_held(record, name)
        if held in state:
            module.__dict__[name] = state[held]
    module.__dict__["training"] = record.training
    if captured_of(module) is not None:
        module.__dict__[CAPTURED_MODE] = record.training


def _plain_tensor_held(record: ModuleRecord, name: str) -> UsageError:
    return UsageError(
        f"{record.type} holds a tensor as its plain attribute {name}",
        where=Place(str(record.path)),
        why="the modules of a tree have that name for what was captured",
        remedy=f"give the attribute another name, or register it: register_buffer({name!r}, …)",
    )


def _sign(made: Made, root: Tree) -> None:
    """Give modules the originals' signatures; the root's `forward`, too: an export goes by its names."""
    for module in made.values():
        calls = module.calls if isinstance(module, Tree) else ()
        if calls and (parameters := calls[0].parameters) is not None:
            module.__dict__["__signature__"] = parameters
            if module is root:
                sign_forward(root, parameters)


def add_constants(root: nn.Module, program: FlatProgram) -> None:
    """Tensors that no module of the model holds live at the root, as plain attributes.

    Those of a loss function are in a module that is no part of the hierarchy: the tree has the model's state.
    """
    held = {name for record in program.modules for _, name in record.tensors}
    for row in program.signature.state:
        if row.module is None and row.name in program.state and row.name not in held:
            root.__dict__.setdefault(row.path, program.state[row.name])
    for row in state_of_loss(program):
        for path in row.attribute_paths:
            holder = root
            for segment in path.parent:
                holder = holder.__dict__.setdefault(segment, nn.Module())
            registers = {InputKind.PARAMETER: "_parameters", InputKind.BUFFER: "_buffers"}
            register = holder.__dict__[registers[row.kind]] if row.kind in registers else holder.__dict__
            register[path.name] = program.state[row.name]


def _point_to_root(root: nn.Module, plan: Plan, made: Made) -> None:
    """A module that calls another which is not below it finds it from the root."""
    for number in plan.calls:
        path = plan.site(number).path
        for callers in plan.callers.values():
            around = plan.site(callers[number]).path
            if not path.is_within(around):
                captured_of(made[around]).whence_root = root


def _say_inlined(plan: Plan, made: Made) -> None:
    """Say of modules that were called and have no graph why not."""
    reasons = {flat.number: f": {flat.reason}" for flat in plan.flattened if flat.phase is Phase.FORWARD}
    for row in plan.program.calls:
        holder = captured_of(made[row.site.path]) if row.site.path in made else None
        if holder is not None and not holder.calls:
            holder.inlined = f"its operations are part of its caller's graph{reasons.get(row.number, '')}"
