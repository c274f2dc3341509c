"""What is captured: a callable, the modules it reaches, and how they are named."""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from whence._torch.observe.attribute_reads import own_attributes
from whence._torch.observe.scripted import is_scripted
from whence._torch.observe.wrappers import seen_through, wrapper_chain
from whence._torch.subclasses.fully_sharded import lasting_parameters, name_of_class
from whence._torch.subclasses.wrapper_subclasses import is_sparse, plain_parts
from whence.dependence.snapshots import same_items
from whence.errors import Fault, NotCallable, Place
from whence.program import ModuleRecord
from whence.program.names import modules_within
from whence.provenance import ROOT, ModulePath
from whence.schema import InputKind
from whence.tracing.source_lines import beginning_of

_KEPT_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


_Modules = tuple[tuple[ModulePath, nn.Module], ...]
_Children = dict[str, nn.Module | None]


@dataclass(frozen=True)
class Subject:
    """A callable to capture.

    `roots` are the modules it reaches and the path each is known by: the module itself at the root, or, for a
    plain function, the modules among its globals and closure under their variable names. `wrappers` are what
    was seen through to reach a module: a compiled or a data-parallel one.
    """

    call: Callable[..., Any]
    roots: tuple[tuple[ModulePath, nn.Module], ...]
    name: str
    is_module: bool
    parameters: inspect.Signature | None
    wrappers: tuple[nn.Module, ...] = ()

    @property
    def place(self) -> Place:
        """Where the callable is: the root of the modules, or no module, and the line where it begins."""
        begins = beginning_of(self.call.forward if isinstance(self.call, nn.Module) else self.call)
        return Place("" if self.is_module else None, str(begins) if begins else None)

    def named_modules(self) -> Iterator[tuple[ModulePath, nn.Module]]:
        """Every module under every name it has, parents before children, in registration order.

        They are those of the first time it is asked: a run that changes them is undone.
        """
        return iter(self._modules)

    @property
    def _modules(self) -> _Modules:
        return self._hierarchy[0]

    @cached_property
    def _hierarchy(self) -> tuple[_Modules, list[tuple[_Children, _Children]]]:
        """The modules, and the table of each with those that it held then."""
        modules = tuple(pair for path, root in self.roots for pair in modules_within(path, root))
        return modules, [(module._modules, dict(module._modules)) for _, module in modules]

    @property
    def is_current(self) -> bool:
        """Whether all modules still hold those that they held."""
        return all(same_items(*pair) for pair in self._hierarchy[1])

    @cached_property
    def state(self) -> tuple["StateTensor", ...]:
        """Its parameters and buffers (`state_tensors`) as they were the first time it was asked."""
        return tuple(state_tensors(self))

    @cached_property
    def things(self) -> tuple[tuple[ModulePath, nn.Module, str, Any], ...]:
        """What modules hold themselves (`own_attributes_of`) the first time that it is asked: the module of
        each with its path, and the name."""
        return tuple(self.things_now())

    def things_now(self) -> Iterator[tuple[ModulePath, nn.Module, str, Any]]:
        """The same as it is now."""
        for path, module in self._modules:
            for name, value in own_attributes_of(module):
                yield path, module, name, value

    def named_wrappers(self) -> Iterator[tuple[ModulePath, nn.Module]]:
        """Modules that wrap others, each under the path of what it wraps."""
        yield from ((ROOT, module) for module in self.wrappers)
        for path, module in self.named_modules():
            for name, child in module._modules.items():
                if child is not None:
                    yield from ((path.child(name), wrapper) for wrapper in wrapper_chain(child))


def subject_of(model: object) -> Subject:
    """Look at what the caller wants captured; raises `NotCallable`, naming all that stands against it."""
    if is_scripted(model):
        raise NotCallable.of([_scripted(model, ROOT)])
    subject = subject_unchecked(model)
    NotCallable.refuse(fault for path, root in subject.roots for fault in _scripted_within(path, root))
    return subject


def subject_unchecked(model: object) -> Subject:
    """The same, whatever kinds of modules are inside."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise NotCallable(f"{model.__name__} is a class", remedy=f"pass an instance: {model.__name__}(...)")
    if isinstance(model, nn.Module):
        inner = seen_through(model)
        wrappers = wrapper_chain(model)
        return Subject(inner, ((ROOT, inner),), name_of_class(inner), True, module_signature(inner), wrappers)
    if not callable(model):
        raise NotCallable(
            f"expected a module or a callable, got {type(model).__name__}",
            remedy="pass the model itself, a function, or a bound method such as model.encode",
        )
    owner, method = _owner(model)
    if owner is not None:
        return Subject(model, ((ROOT, owner),), f"{name_of_class(owner)}.{method}", False, _signature(model))
    name = getattr(model, "__name__", type(model).__name__)
    return Subject(model, tuple(_captured_modules(model)), name, False, _signature(model))


def one_module(model: object) -> object:
    """Several modules of one step, by name or in a row, in a container; anything else as it is."""
    modules = list(model.values()) if isinstance(model, dict) else model
    if not isinstance(modules, list | tuple) or not all(isinstance(each, nn.Module) for each in modules):
        return model
    if not isinstance(model, dict):
        return nn.ModuleList(modules)
    return nn.ModuleDict(model) if all(isinstance(key, str) and "." not in key for key in model) else model


def step_subject(step: object, model: object) -> Subject:
    """A training step of a model; raises `NotCallable`."""
    if not isinstance(model, nn.Module):
        raise NotCallable(
            f"the model of a step is a {type(model).__name__}",
            remedy="pass the module whose parameters the step changes; several in an nn.ModuleDict",
        )
    if not callable(step) or isinstance(step, nn.Module | type):
        raise NotCallable(
            f"the step is a {type(step).__name__}",
            remedy="pass a function that runs forward, loss.backward() and optimizer.step()",
        )
    within = subject_of(model)
    name = getattr(step, "__name__", type(step).__name__)
    return replace(within, call=step, name=name, is_module=False, parameters=_signature(step))


def _scripted_within(path: ModulePath, module: nn.Module, above: tuple[int, ...] = ()) -> Iterator[Fault]:
    """The scripted ones among a module and those inside it; nothing is seen inside a scripted one."""
    if is_scripted(module):
        yield _scripted(module, path)
        return
    within = (*above, id(module))
    for name, child in module._modules.items():
        if child is not None and id(child) not in above:
            yield from _scripted_within(path.child(name), seen_through(child), within)


def _scripted(model: object, path: ModulePath) -> Fault:
    return Fault(
        f"{type(model).__name__} cannot be captured",
        where=Place(str(path) or None),
        why="TorchScript does not run through Python",
        remedy="capture the module it was scripted from",
    )


def _owner(model: object) -> tuple[nn.Module | None, str]:
    """The module that a bound method belongs to, also behind `functools.partial`, and the method's name."""
    while isinstance(model, functools.partial):
        model = model.func
    owner = getattr(model, "__self__", None)
    return (owner if isinstance(owner, nn.Module) else None), getattr(model, "__name__", "method")


def module_signature(module: nn.Module) -> inspect.Signature | None:
    """How a module is called; a captured module declares the signature of its original."""
    declared = vars(module).get("__signature__")
    return declared if isinstance(declared, inspect.Signature) else _signature(module.forward)


class Signatures:
    """How modules are called, read once for each class."""

    def __init__(self) -> None:
        self._of: dict[type, inspect.Signature | None] = {}

    def of(self, module: nn.Module) -> inspect.Signature | None:
        """The Python signature of a module's forward."""
        held = own_attributes(module)
        if "forward" in held or "__signature__" in held:
            return module_signature(module)
        kind = type(module)
        if kind not in self._of:
            self._of[kind] = module_signature(module)
        return self._of[kind]


def _signature(call: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(call)
    except (TypeError, ValueError):  # builtins have none
        return None


def _captured_modules(function: Callable[..., Any]) -> Iterator[tuple[ModulePath, nn.Module]]:
    """Modules a callable names: in its closure, globals and attributes, or among a partial's arguments."""
    while isinstance(function, functools.partial):
        yield from _modules_in(_arguments_of(function), ROOT)
        function = function.func
    if isinstance(function, nn.Module):
        yield ROOT, seen_through(function)
        return
    for held in closure_values(function):
        yield from _modules_in(held, ROOT)


def _arguments_of(function: "functools.partial[Any]") -> dict[str, Any]:
    return {**{f"args_{i}": value for i, value in enumerate(function.args)}, **function.keywords}


def closure_values(function: Callable[..., Any]) -> Iterator[Mapping[str, Any]]:
    """What a callable names: in its closure, globals and attributes, or among a partial's arguments."""
    while isinstance(function, functools.partial):
        yield _arguments_of(function)
        function = function.func
    if inspect.isfunction(inspect.unwrap(function)):
        scope = inspect.getclosurevars(inspect.unwrap(function))
        yield {**scope.globals, **scope.nonlocals}
    elif hasattr(function, "__dict__"):
        yield vars(function)


def _modules_in(names: Mapping[str, Any], path: ModulePath) -> Iterator[tuple[ModulePath, nn.Module]]:
    """Modules among named values, also inside lists, tuples and dicts."""
    for name, value in names.items():
        here = path.child(name)
        if isinstance(value, nn.Module):
            yield here, seen_through(value)
        elif isinstance(value, list | tuple) and any(isinstance(item, nn.Module) for item in value):
            yield from _modules_in({str(i): item for i, item in enumerate(value)}, here)
        elif isinstance(value, dict) and any(isinstance(item, nn.Module) for item in value.values()):
            yield from _modules_in({str(key): item for key, item in value.items()}, here)


_ORDINARY = frozenset({type(None), bool, int, float, str, dict, OrderedDict, set})


def module_records(subject: Subject, names: dict[int, str]) -> tuple[ModuleRecord, ...]:
    """The hierarchy as data; `names` gives the program input of a tensor by its identity."""
    first: dict[int, ModulePath] = {}
    loose: dict[int, dict[str, str]] = {}
    for _, module, name, value in subject.things:
        if isinstance(value, Tensor) and id(value) in names:
            loose.setdefault(id(module), {})[name] = names[id(value)]
    records = []
    for path, module in subject.named_modules():
        same_as = first.setdefault(id(module), path)
        tensors = tuple(loose.get(id(module), {}).items())
        records.append(_record(path, module, names, tensors, None if same_as is path else same_as))
    return tuple(records)


def _record(
    path: ModulePath,
    module: nn.Module,
    names: dict[int, str],
    tensors: tuple[tuple[str, str], ...],
    same_as: ModulePath | None,
) -> ModuleRecord:
    def held(tensor: Tensor | None) -> str | None:
        return None if tensor is None or is_sparse(tensor) else names[id(tensor)]

    kinds = type(module).__mro__
    container = next((kind.__name__ for kind in _KEPT_CONTAINERS if kind in kinds), None)
    loose, children = module._non_persistent_buffers_set, module._modules
    return ModuleRecord(
        path=path,
        type=name_of_class(module),
        container=container,
        training=module.training,
        parameters=tuple([(name, held(tensor)) for name, tensor in module._parameters.items()]),
        buffers=tuple([(name, held(tensor), name not in loose) for name, tensor in module._buffers.items()]),
        absent=tuple([name for name, child in children.items() if child is None]),
        same_as=same_as,
        children=tuple(children),
        tensors=tensors,
    )


def own_attributes_of(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes that a module holds itself, but for flags, numbers and the tables of every module."""
    return [(name, value) for name, value in own_attributes(module).items() if type(value) not in _ORDINARY]


class StateTensor(NamedTuple):
    """A parameter, buffer or tensor attribute of the model, under all its names.

    Of one that is made of other tensors, `access` leads from the whole to this one.
    """

    tensor: Tensor
    paths: tuple[ModulePath, ...]
    is_parameter: bool
    persistent: bool
    owner: str
    access: tuple[str, ...] = ()
    whole: "StateTensor | None" = None

    @property
    def kind(self) -> InputKind:
        """What it is as an input of a program."""
        return InputKind.PARAMETER if self.is_parameter else InputKind.BUFFER

    @property
    def is_initialised(self) -> bool:
        """Whether it has a shape; what belongs to a lazy module gets one in its first call."""
        return not is_lazy(self.tensor)


def plain_tensors(state: Sequence[StateTensor]) -> list[StateTensor]:
    """Every plain tensor of the state: those that tensors are made of, in the place of these, once each."""
    found: dict[int, StateTensor] = {}
    for row in state:
        for access, tensor in plain_parts(row.tensor):
            paths = tuple(_path_inside(path, access) for path in row.paths)
            part = row._replace(tensor=tensor, paths=paths, access=access, whole=row) if access else row
            found.setdefault(id(tensor), part)
    return list(found.values())


def _path_inside(path: ModulePath, access: Sequence[str]) -> ModulePath:
    return functools.reduce(ModulePath.child, access, path)


def state_tensors(subject: Subject) -> list[StateTensor]:
    """Parameters, then buffers, each once however many names it has.

    Of parameters that FSDP manages they are the shards, also while modules hold the whole. Sparse buffers
    that are in no checkpoint (`left_out`) are none of it.
    """
    lasting = lasting_parameters(module for _, module in subject.named_modules())
    found: dict[int, StateTensor] = {}
    for wants_parameters in (True, False):
        for path, module in subject.named_modules():
            for name, tensor in (module._parameters if wants_parameters else module._buffers).items():
                persistent = name not in module._non_persistent_buffers_set
                if tensor is not None and not (is_sparse(tensor) and not persistent):
                    held = lasting.get(id(tensor), tensor)
                    _add(found, held, path.child(name), wants_parameters, persistent, name_of_class(module))
    return list(found.values())


def left_out(subject: Subject) -> Iterator[tuple[ModulePath, Tensor]]:
    """Sparse tensors that modules hold, but for those in checkpoints: whoever reads one is refused."""
    for path, module in subject.named_modules():
        for name in module._non_persistent_buffers_set:
            if (tensor := module._buffers.get(name)) is not None and is_sparse(tensor):
                yield path.child(name), tensor
    yield from ((path, tensor) for path, tensor in loose_tensors(subject) if is_sparse(tensor))


def _add(
    found: dict[int, StateTensor],
    tensor: Tensor,
    path: ModulePath,
    is_parameter: bool,
    persistent: bool,
    owner: str,
) -> None:
    known = found.get(id(tensor))
    if known is None:
        found[id(tensor)] = StateTensor(tensor, (path,), is_parameter, persistent, owner)
    elif path not in known.paths:
        found[id(tensor)] = StateTensor(
            tensor, (*known.paths, path), known.is_parameter, known.persistent or persistent, known.owner
        )


def loose_tensors(subject: Subject) -> Iterator[tuple[ModulePath, Tensor]]:
    """Tensors that modules hold as plain attributes."""
    for path, _, name, value in subject.things:
        if isinstance(value, Tensor):
            yield path.child(name), value


def attribute_names(subject: Subject) -> dict[int, tuple[ModulePath, str]]:
    """Tensors that modules hold as plain attributes, by identity: constants with a name."""
    return {id(tensor): (path, owner) for path, owner, tensor in named_attributes(subject)}


def named_attributes(subject: Subject) -> Iterator[tuple[ModulePath, str, Tensor]]:
    """The same, each with its path and the class of who holds it."""
    for path, module, tensor in _loose(subject.things):
        yield path, name_of_class(module), tensor


def _loose(
    things: Iterable[tuple[ModulePath, nn.Module, str, Any]],
) -> Iterator[tuple[ModulePath, nn.Module, Tensor]]:
    """The tensors among things, and what those are made of, with their paths and who holds them."""
    for path, module, name, value in things:
        if isinstance(value, Tensor):
            for access, tensor in _with_parts(value):
                yield _path_inside(path.child(name), access), module, tensor


def _with_parts(tensor: Tensor) -> Iterator[tuple[Sequence[str], Tensor]]:
    yield (), tensor
    yield from plain_parts(tensor)


def tensors_by_name(subject: Subject) -> dict[str, Tensor]:
    """Every tensor that a module of the hierarchy holds under a name now, by its path."""
    rows = state_tensors(subject)
    rows += [row for row in plain_tensors(rows) if row.access]
    state = {str(path): row.tensor for row in rows for path in row.paths}
    loose = {str(path): tensor for path, _, tensor in _loose(subject.things_now())}
    return loose | state
