"""See models whose parameters FSDP manages (`fully_shard`) as they were before it did.

FSDP gives a module another class, registers a shard of each parameter in its place, and puts hooks around the
call that register the whole parameters and take them away again. A capture takes the place of these hooks: it
registers stand-ins of the whole parameters, and nothing is gathered.

`fully_shard.state` leads to what FSDP keeps about a module. Everything is asked of modules that are loaded:
importing FSDP to ask would take a second.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

_FSDP = "torch.distributed.fsdp"
_SYNCHRONISED = {"reduce_grads": True, "all_reduce_grads": True, "_partial_reduce_output": None}
"""What FSDP does at the end of a backward that is not one of several that accumulate."""


def is_sharded(module: object) -> bool:
    """Whether FSDP, the new or the old, wraps the module."""
    loaded: Any = sys.modules.get(_FSDP)
    return loaded is not None and isinstance(module, loaded.FSDPModule | loaded.FullyShardedDataParallel)


def can_be_put_aside(module: nn.Module) -> bool:
    """Whether the class of a sharded module is the one that `fully_shard` made of the user's."""
    loaded: Any = sys.modules.get(_FSDP)
    return loaded is not None and loaded.FSDPModule in type(module).__bases__


def is_part_of_a_group(module: nn.Module) -> bool:
    """Whether FSDP manages parameters of the module, for itself or for a module above it."""
    return bool(vars(module).get("_is_fsdp_managed_module", False))


# --- as the user wrote it ----------------------------------------------------------------------------


def class_as_written(kind: type) -> type:
    """The class that `fully_shard` replaced by `kind`, or `kind` itself."""
    loaded: Any = sys.modules.get(_FSDP)
    if loaded is None or loaded.FSDPModule not in kind.__bases__:
        return kind
    return kind.__bases__[-1]


def name_of_class(module: nn.Module) -> str:
    """What a module calls its class, without the prefix that FSDP puts before it."""
    name: str = module._get_name()
    return class_as_written(type(module)).__name__ if name == type(module).__name__ else name


def is_of_sharding(function: object) -> bool:
    """Whether FSDP made a hook, or a method that it wraps."""
    loaded, code = sys.modules.get(_FSDP), getattr(function, "__code__", None)
    return loaded is not None and code is not None and code.co_filename.startswith(*loaded.__path__)


# --- what FSDP keeps ---------------------------------------------------------------------------------


def _states(modules: Iterable[nn.Module]) -> list[Any]:
    """What FSDP keeps about the modules that it wraps, once for each group."""
    loaded: Any = sys.modules.get(_FSDP)
    found = [loaded.fully_shard.state(module) for module in modules if can_be_put_aside(module)]
    return list({id(state): state for state in found}.values())


def _parameter_groups(modules: Iterable[nn.Module]) -> Iterator[Any]:
    return (group for state in _states(modules) for group in state._fsdp_param_groups)


def _managed_parameters(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """What FSDP keeps about each parameter."""
    return (row for group in _parameter_groups(modules) for row in group.fsdp_params)


def _registered_tensor(row: Any) -> Tensor:
    """The tensor that a module holds now in the place of a parameter."""
    place = row._module_info
    tensor: Tensor = place.module._parameters[place.param_name]
    return tensor


def _shard(row: Any) -> Tensor:
    """The parameter that lasts: an assignment since the last call may have replaced the one FSDP knows."""
    tensor: Tensor = _registered_tensor(row) if row.sharded_state.name == "SHARDED" else row.sharded_param
    return tensor


def lasting_parameters(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """The sharded parameters behind those that modules hold only until FSDP frees them, by identity."""
    managed = managed_parameters(modules)
    return {known: lasting for known, lasting in managed.items() if known != id(lasting)}


def managed_parameters(modules: Iterable[nn.Module]) -> dict[int, Tensor]:
    """The sharded parameter behind each that FSDP manages, by identity; modules may hold the whole now."""
    return {id(_registered_tensor(row)): _shard(row) for row in _managed_parameters(modules)}


def sharded_separately(modules: Iterable[nn.Module]) -> list[str]:
    """The names of parameters that were one, and are two since `fully_shard`, each in a group of its own."""
    first: dict[int, Any] = {}
    rows = [(row._orig_param_uid, row) for row in _managed_parameters(modules)]
    return [row._module_info.param_name for uid, row in rows if first.setdefault(uid, row) is not row]


def processes_sharing(module: nn.Module) -> int:
    """How many processes share the parameters of a module and average their gradients."""
    return max((row.sharded_param.device_mesh.size() for row in _managed_parameters([module])), default=1)


def besides_gathering(module: nn.Module) -> list[str]:
    """What FSDP does with the parameters and values of a module besides gathering them, in words."""
    found: dict[str, None] = {}
    for state in _states([module]):
        found |= dict.fromkeys(_casts(state))
        for group in state._fsdp_param_groups:
            found |= dict.fromkeys(_of_group(group))
            found |= dict.fromkeys(words for row in group.fsdp_params for words in _of_parameter(row))
    return list(found)


def _casts(state: Any) -> Iterator[str]:
    policy = state._mp_policy
    rows = [row for group in state._fsdp_param_groups for row in group.fsdp_params]
    dtypes = {row.sharded_param.dtype for row in rows}
    if policy.param_dtype and (policy.cast_forward_inputs or dtypes - {policy.param_dtype}):
        yield f"casts to {policy.param_dtype}"
    if policy.output_dtype:
        yield f"casts outputs to {policy.output_dtype}"
    if policy.reduce_dtype and dtypes - {policy.reduce_dtype}:
        yield f"reduces gradients in {policy.reduce_dtype}"


def _of_group(group: Any) -> Iterator[str]:
    if type(group.offload_policy).__name__ != "OffloadPolicy":
        yield f"moves parameters ({type(group.offload_policy).__name__})"
    if group.gradient_divide_factor not in (None, 1.0):
        yield f"divides gradients by {group.gradient_divide_factor}"
    if group._all_reduce_hook is not None:
        yield "runs a hook on reduced gradients"
    if group.reduce_scatter_unused_params:
        yield "makes gradients for unused parameters"


def _of_parameter(row: Any) -> Iterator[str]:
    if row.is_dtensor:
        yield "shards parameters that were distributed before"
    shard = _shard(row)
    if not is_distributed(shard):
        yield f"no longer knows the parameter {row._module_info.param_name}, which was replaced"
    elif hasattr(shard.to_local(), "fsdp_pre_all_gather"):  # type: ignore[attr-defined]
        yield f"gathers parameters in a way of {type(shard.to_local()).__name__}"  # type: ignore[attr-defined]


# --- put aside ---------------------------------------------------------------------------------------


@contextmanager
def sharding_put_aside(modules: Sequence[nn.Module], mode: FakeTensorMode) -> Iterator[dict[int, Tensor]]:
    """Let modules be as before `fully_shard`, with fake parameters; everything is put back afterwards.

    Gives the sharded parameter for each fake one, by its identity. FSDP itself notices nothing.
    """
    managed = {id(module): module for module in modules if can_be_put_aside(module)}
    sharded: dict[int, Tensor] = {}
    with ExitStack() as back:
        for row in list(_managed_parameters(managed.values())):
            lasting = _shard(row)
            with mode:
                whole = torch.empty(lasting.shape, dtype=lasting.dtype, device=lasting.device)
            fake = nn.Parameter(whole, requires_grad=lasting.requires_grad)
            sharded[id(fake)] = lasting
            back.callback(row._setattr_on_modules, _registered_tensor(row))
            row._setattr_on_modules(fake)
        for module in managed.values():
            back.enter_context(_as_written(module))
        yield sharded


@contextmanager
def _as_written(module: nn.Module) -> Iterator[None]:
    """The class, the hooks and the methods that a module had before `fully_shard`."""
    kind, attributes = type(module), vars(module)
    hooks = [(table, dict(table)) for table in (module._forward_pre_hooks, module._forward_hooks)]
    methods = {name: value for name, value in attributes.items() if is_of_sharding(value)}
    try:
        module.__class__ = class_as_written(kind)
        for table, before in hooks:
            _refill_table(table, {key: hook for key, hook in before.items() if not is_of_sharding(hook)})
        for name, method in methods.items():
            attributes[name] = method.__wrapped__
        yield
    finally:
        module.__class__ = kind
        for table, before in hooks:
            _refill_table(table, before)
        attributes.update(methods)


def _refill_table(table: dict[int, Callable[..., Any]], rows: dict[int, Callable[..., Any]]) -> None:
    table.clear()
    table.update(rows)


# --- run by FSDP -------------------------------------------------------------------------------------


@contextmanager
def sharding_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let FSDP run inside the block, gradients reduced at the end of a backward; its state is given back.

    That is which parameters are registered, and gradients that wait for a later backward.
    """
    managed = list({id(module): module for module in modules if can_be_put_aside(module)}.values())
    were_whole = [_holds_whole(module) for module in managed]
    with ExitStack() as kept:
        for thing, values in _settings(managed):
            kept.callback(vars(thing).update, {name: getattr(thing, name) for name in values})
            vars(thing).update(values)
        for parameter in [
            row._unsharded_param for row in _managed_parameters(managed) if hasattr(row, "_unsharded_param")
        ]:
            kept.callback(setattr, parameter, "grad", parameter.grad)
            parameter.grad = None
        finished = False
        try:
            yield
            finished = True
        finally:
            if not finished:
                _forget_the_iteration(managed)
            for module, was_whole in zip(managed, were_whole, strict=True):
                _put_back(module, was_whole)


def _settings(modules: Sequence[nn.Module]) -> Iterator[tuple[Any, dict[str, Any]]]:
    yield from ((group, _SYNCHRONISED) for group in _parameter_groups(modules))
    yield from ((row, {"unsharded_accumulated_grad": None}) for row in _managed_parameters(modules))
    yield from ((state._state_ctx, {"is_last_backward": True}) for state in _states(modules))


def _holds_whole(module: Any) -> bool:
    return any(row.sharded_state.name == "UNSHARDED" for row in _managed_parameters([module]))


def _put_back(module: Any, was_whole: bool) -> None:
    if was_whole and not _holds_whole(module):
        module.unshard()
    elif not was_whole:
        module.reshard()


def _forget_the_iteration(modules: Sequence[Any]) -> None:
    """After an error FSDP is in the middle of an iteration; this is its own way out."""
    loaded: Any = sys.modules[_FSDP] if modules else None
    for module in modules:
        if loaded.fully_shard.state(module)._is_root:
            module.reset_iter_state()


# --- whole tensors -----------------------------------------------------------------------------------


def is_distributed(tensor: object) -> bool:
    return is_distributed_class(type(tensor))


def is_distributed_class(kind: type) -> bool:
    loaded: Any = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and issubclass(kind, loaded.DTensor)


def whole(tensor: Any) -> Any:
    """All of a distributed tensor, differentiably; anything else as it is.

    The gradient of the whole arrives at the tensor as the shard of this process. `DTensor.full_tensor` would
    give zeros to a parameter that got no gradient.
    """
    return _Whole.apply(tensor) if is_distributed(tensor) else tensor


class _Whole(torch.autograd.Function):
    """From a shard to the whole."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tensor)  # which raises when it was written before the backward
        ctx.mesh, ctx.placements = tensor.device_mesh, tensor.placements
        gathered: Tensor = tensor.full_tensor()
        return gathered.view_as(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        """Every process keeps its part of the gradient, which all of them have."""
        if gradient is None:
            return None
        _unchanged = ctx.saved_tensors
        loaded: Any = sys.modules["torch.distributed.tensor"]
        everywhere = [loaded.Replicate()] * ctx.mesh.ndim
        whole_gradient = loaded.DTensor.from_local(gradient, ctx.mesh, everywhere, run_check=False)
        return whole_gradient.redistribute(placements=ctx.placements)
