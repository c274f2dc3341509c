"""Run a model, or the program captured from it, once, and note everything that can be compared."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.observe.compile_flags import compiled_functions_run_eagerly
from whence._torch.observe.generators import Kind, seed_all, set_states, states
from whence._torch.pytrees import tree_flatten, tree_map_only, tree_unflatten, whole_leaves, with_whole_leaves
from whence._torch.sizes.drawn_numbers import DRAWN
from whence._torch.subclasses.fully_sharded import sharding_kept
from whence._torch.subclasses.wrapper_subclasses import plain_parts
from whence._torch.tensors import (
    PLAIN_TENSORS,
    attributes_set_on,
    has_no_numbers,
    negated,
    same_bits,
    untouched,
)
from whence.errors import StaleCapture, UsageError
from whence.hierarchy.run.wrapper_subclasses import holder_of
from whence.program import FlatProgram
from whence.program.arguments.convention import whole_paths_of
from whence.program.state import state_of_loss
from whence.provenance import ModulePath
from whence.schema import InputKind, OutputKind
from whence.tracing.reads.attribute_reads import tensor_attributes
from whence.tracing.sandbox.module_snapshot import modules_restored
from whence.tracing.steps.enclosed_state import around_modules
from whence.tracing.target.subject import Subject, plain_tensors, state_tensors

SEED = 20
_TRIED = 64
_OUTSIDE: Mapping[Kind, str] = MappingProxyType(
    {"python": "Python's generator", "numpy": "NumPy's generator"}
)
_STATE = (InputKind.PARAMETER, InputKind.BUFFER)


@dataclass(frozen=True)
class Run:
    """What one run gave and changed, by name."""

    outputs: dict[str, Any]
    gradients: dict[str, Any]
    state: dict[str, Tensor]
    inputs: dict[str, Any]
    generators: dict[str, Any]


def refuse_without_numbers(subject: Subject, inputs: tuple[Any, Any]) -> None:
    """Raise `UsageError` where a model or its inputs have shapes alone, and no two runs can be compared."""
    named = [(str(row.paths[0]), row.tensor) for row in state_tensors(subject)]
    named += [("an argument", leaf) for leaf in whole_leaves(inputs) if isinstance(leaf, Tensor)]
    if without := list(dict.fromkeys(name for name, tensor in named if has_no_numbers(tensor))):
        raise UsageError(
            f"nothing of {subject.name} can be compared: {', '.join(without)} has a shape and no numbers",
            remedy="verify with a model and inputs that are not on the meta device, nor fake; "
            "program.check says whether the capture holds for this model",
        )


# Generators are the process's: what a run in another thread drew meanwhile would be missing here.
_one_at_a_time = threading.RLock()


@contextmanager
def same_start(
    subject: Subject, inputs: tuple[Any, Any], constants: Sequence[Tensor] = (), seed: int = SEED
) -> Iterator[tuple[Any, Any]]:
    """The same seed, state and inputs for every run, of which other threads wait for the end; afterwards
    everything is as it was before.

    Gives copies of the inputs. The model's own tensors are used, and written back; so are `constants`, which
    are tensors from outside that it reads.
    """
    with _one_at_a_time, _same_start(subject, inputs, constants, seed) as given:
        yield given


@contextmanager
def _same_start(
    subject: Subject, inputs: tuple[Any, Any], constants: Sequence[Tensor], seed: int
) -> Iterator[tuple[Any, Any]]:
    modules = list(subject.named_modules())
    rows = state_tensors(subject)
    tensors = [*(row.tensor for row in rows), *(held for held in constants if held.is_leaf)]
    plain = [*(row.tensor for row in plain_tensors(rows)), *constants]
    before = [(tensor, tensor.grad, tensor.requires_grad) for tensor in tensors]
    numbers = numbers_kept(plain)
    generators = states()
    around = around_modules(modules)
    around.look_at(tensor_attributes(rows))
    with untouched({id(tensor): tensor for tensor in (*tensors, *plain)}.values()):
        try:
            with modules_restored(modules), sharding_kept(module for _, module in modules):
                for tensor in tensors:
                    tensor.grad = None
                seed_all(seed)
                yield copied(inputs)
        finally:
            around.restore()
            set_states(generators)
            for tensor, gradient, required in before:
                if tensor.requires_grad != required:
                    tensor.requires_grad_(required)
                tensor.grad = gradient
            numbers()


def numbers_kept(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """A way back to the numbers that tensors have now."""
    numbers = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore() -> None:
        for tensor, value in numbers:
            _write_back(tensor, value)

    return restore


def _write_back(tensor: Tensor, value: Tensor) -> None:
    if has_no_numbers(tensor) or same_bits(tensor, value):
        return
    with torch.no_grad():
        tensor.copy_(value)


def copied(inputs: tuple[Any, Any]) -> tuple[Any, Any]:
    """Copies of the tensors among inputs."""
    leaves = whole_leaves(inputs)
    copies: dict[int, Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in copies:
            twin = _copy(leaf).requires_grad_(leaf.requires_grad)
            copies[id(leaf)] = nn.Parameter(twin, leaf.requires_grad) if type(leaf) is nn.Parameter else twin
            if type(leaf) in PLAIN_TENSORS:
                vars(copies[id(leaf)]).update(attributes_set_on(leaf))
    args, kwargs = with_whole_leaves(inputs, [copies.get(id(leaf), leaf) for leaf in leaves])
    return args, kwargs


def _copy(tensor: Tensor) -> Tensor:
    parts, spec = tree_flatten(tensor)
    copied: Tensor = tree_unflatten([*map(_copy_of_plain, parts)], spec)
    return copied


def _copy_of_plain(tensor: Tensor) -> Tensor:
    """A copy laid out alike: a model may ask for the strides of one that is expanded, or has gaps. One that
    stands for the conjugate, or the negative, of what lies in memory is a copy of that which does so, too."""
    if tensor.is_conj():
        return _copy_of_plain(tensor.detach().conj()).conj()
    if tensor.is_neg():
        return negated(_copy_of_plain(negated(tensor.detach())))
    copied = tensor.detach().clone()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return copied
    if copied.stride() == tensor.stride():
        return copied
    memory, place = tensor.detach().untyped_storage().clone(), tensor.storage_offset()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        memory, place, tensor.shape, tensor.stride()
    )


def seed_of_its_way(program: FlatProgram, run: Callable[[int], Any]) -> int:
    """A seed from which the program draws what it decided at capture; `run` runs it from one.

    Raises `StaleCapture` where values that are not drawn decide otherwise, and where nothing is found.
    """
    if not any(decision.drawn for decision in program.decisions):
        return SEED
    for seed in range(SEED, SEED + _TRIED):
        if not _is_stale(run, seed):
            return seed
    return SEED


def _is_stale(run: Callable[[int], Any], seed: int) -> bool:
    try:
        run(seed)
    except StaleCapture:
        return True
    return False


def run_eager(
    program: FlatProgram,
    subject: Subject,
    args: Any,
    kwargs: Any,
    *,
    answers: AbstractContextManager[None] | None = None,
) -> Run:
    """The model as it is; `answers` are for code that asks whether it is being compiled."""
    with answers or nullcontext(), compiled_functions_run_eagerly(spares_operators=True):
        result = subject.call(*args, **kwargs)
        loss = None if program.loss_function is None else program.loss_function(result)
    beside = ((row, program.state[row.name]) for row in state_of_loss(program) if row.kind in _STATE)
    tensors = {path: held for row, held in beside for path in (row.path, *row.aliases)}
    tensors |= {str(path): row.tensor for row in state_tensors(subject) for path in row.paths}
    return _finish(program, (args, kwargs), result, loss, tensors)


def run_module(module: nn.Module, program: FlatProgram, args: Any, kwargs: Any) -> Run:
    result, loss = module.forward(*args, **kwargs), None  # past hooks for all modules, which are inside
    if program.signature.outputs_of(OutputKind.LOSS):
        loss, result = result
    held = {path: holder_of(module, ModulePath.parse(path)) for path in _paths(program)}
    return _finish(program, (args, kwargs), result, loss, held)


def _paths(program: FlatProgram) -> list[str]:
    rows = [row for row in program.signature.state if row.kind in _STATE]
    names = {row.name for row in rows}
    found = [(row.path, *row.aliases) for row in rows if row.part is None]
    found += [(whole.path, *whole.aliases) for whole in program.signature.wholes if names & {*whole.parts}]
    return [path for paths in found for path in paths]


def _finish(
    program: FlatProgram,
    inputs: tuple[Any, Any],
    result: Any,
    loss: Tensor | None,
    tensors: dict[str, Tensor],
) -> Run:
    differentiated = loss is not None or not program.circumstances.opaque
    if differentiated:
        try:
            differentiate(whole_leaves(result), loss)
        except RuntimeError:
            if program.signature.outputs_of(OutputKind.GRADIENT):
                raise
            differentiated = False  # the model writes to what its backward needs: eager has none
    run = noted(program, inputs, result, tensors)
    outputs = {} if loss is None else {"loss": loss.detach()}
    return replace(run, outputs=outputs | run.outputs, gradients=run.gradients if differentiated else {})


def noted(
    program: FlatProgram,
    inputs: tuple[Any, Any],
    result: Any,
    tensors: Mapping[str, Tensor],
    others: Mapping[str, Tensor] | None = None,
) -> Run:
    """What a run on these inputs gave, and left in tensors; `others` are state without gradients."""
    arguments = arguments_by_path(inputs)
    held = {**tensors, **arguments}
    wanted = [(name, tensor) for name, tensor in held.items() if tensor.requires_grad and tensor.is_leaf]
    return Run(
        outputs=outputs_by_name(program, result),
        gradients=each((name, tensor.grad) for name, tensor in wanted),
        state=each({**tensors, **(others or {})}.items()),
        inputs=each(arguments.items()),
        generators=_generators(program),
    )


def _generators(program: FlatProgram) -> dict[str, Any]:
    """Where torch's generator is, and those of Python and NumPy where the program draws from them."""
    held: dict[str, Any] = {"state of the CPU generator": torch.get_rng_state()}
    if any(node.target is DRAWN for node in program.nodes()):
        now = states()
        held |= {f"state of {name}": hash(now[kind]) for kind, name in _OUTSIDE.items()}
    return held


def arguments_by_path(inputs: tuple[Any, Any]) -> dict[str, Tensor]:
    """The tensors among the arguments of a call."""
    given = zip(whole_paths_of(*inputs), whole_leaves(inputs), strict=True)
    return {path: leaf for path, leaf in given if isinstance(leaf, Tensor)}


def outputs_by_name(program: FlatProgram, result: Any) -> dict[str, Any]:
    """What a run returned, with copies of the tensors."""
    leaves, _ = tree_flatten(result)
    names = [row.name for row in program.signature.outputs_of(OutputKind.USER)]
    pairs = zip(names, leaves, strict=False)
    return {name: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for name, leaf in pairs}


def each(rows: Iterable[tuple[str, Tensor | None]]) -> dict[str, Any]:
    """Copies by name, those of what a tensor is made of by that and the access."""
    return {
        ".".join((name, *access)): None if part is None else part.detach().clone()
        for name, tensor in rows
        for access, part in plain_parts(tensor)
    }


def differentiate(leaves: Sequence[Any], loss: Tensor | None) -> list[Any]:
    """The same backward pass for both: from the loss, or from fixed random gradients of the outputs, which
    are given back."""
    if loss is not None:
        loss.backward()
        return []
    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    generator = torch.Generator().manual_seed(SEED)
    drawn = [_drawn(root.detach(), generator) for root in roots]
    if roots:
        torch.autograd.backward(roots, drawn)
    return drawn


def _drawn(like: Tensor, generator: torch.Generator) -> Any:
    parts, spec = tree_flatten(like)
    numbers = [torch.randn(part.shape, generator=generator, dtype=torch.float32) for part in parts]
    return tree_unflatten([_numbers_laid_out(*pair) for pair in zip(parts, numbers, strict=True)], spec)


def _numbers_laid_out(part: Tensor, drawn: Tensor) -> Tensor:
    """Numbers in the memory layout of a tensor; for a sparse one dense numbers, which autograd takes, too."""
    if part.layout is not torch.strided:
        return drawn.to(part.dtype)
    return torch.empty_like(part).copy_(drawn)


def take(step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a step as it is written; what it returns has no gradients."""
    with torch.enable_grad(), compiled_functions_run_eagerly(spares_operators=True):
        result = step(*args, **kwargs)
    return tree_map_only(Tensor, _without_gradients, result)


def _without_gradients(value: Tensor) -> Tensor:
    return value.detach() if value.grad_fn is not None else value
