"""Switches of the process that decide what torch does: as they were at capture."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.backends import cuda

from whence._torch.observe.hooks import global_hooks
from whence._torch.tensors import active_modes, autocast_state, default_device
from whence.dependence.describe import Describer
from whence.dependence.hooks import described_hooks
from whence.program import Program
from whence.program.guards.expectations import ExpectedConstant, Hooks
from whence.program.guards.rows import Guard
from whence.schema import GuardKind, Strictness


@dataclass(frozen=True)
class Mode:
    """One switch: how it is read, and what it decides."""

    read: Callable[[], object]
    reason: str


def _attention_kernels() -> tuple[str, ...]:
    """The kernels that scaled_dot_product_attention may choose among."""
    switches = {
        "flash": cuda.flash_sdp_enabled,
        "efficient": cuda.mem_efficient_sdp_enabled,
        "math": cuda.math_sdp_enabled,
        "cudnn": cuda.cudnn_sdp_enabled,
    }
    return tuple(name for name, is_enabled in switches.items() if is_enabled())


MODES = {
    "grad mode": Mode(torch.is_grad_enabled, "modules branch on it, and gradients end where it is off"),
    "autocast": Mode(autocast_state, "the casts it makes are operations of the program"),
    "default dtype": Mode(torch.get_default_dtype, "tensors made inside the model have it"),
    "default device": Mode(default_device, "tensors made inside the model are put there"),
    "deterministic algorithms": Mode(
        torch.are_deterministic_algorithms_enabled, "operators choose another kernel, and refuse some"
    ),
    "attention kernels": Mode(_attention_kernels, "another kernel adds up in another order"),
    "modes of torch": Mode(active_modes, "they see every operation, and may change it"),
    "float32 matmul precision": Mode(
        torch.get_float32_matmul_precision, "the last bits of matrix products depend on it"
    ),
}

GLOBAL_HOOKS = "hooks of all modules"


def mode_guards(program: Program) -> Iterator[Guard]:
    """One guard for each switch; a program with its own backward does not depend on grad mode."""
    for name, mode in MODES.items():
        if name == "grad mode" and program.has_backward:
            continue
        yield Guard(GuardKind.MODE, name, ExpectedConstant(mode.read()), Strictness.EQUAL, mode.reason, name)
    yield Guard(
        GuardKind.HOOKS,
        GLOBAL_HOOKS,
        described_global_hooks(Describer({})),
        Strictness.IDENTITY,
        "they run in every module call, and what they did is part of the program",
        GLOBAL_HOOKS,
    )


def described_global_hooks(describer: Describer) -> Hooks:
    """The hooks that fire for every module now."""
    rows = ((kind.removesuffix("s"), hook) for kind, hooks in global_hooks().items() for hook in hooks)
    return described_hooks(list(rows), describer)
