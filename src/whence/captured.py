"""A captured program with everything that can be asked of it, and how it is captured."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.optim import Optimizer

from whence import hierarchy, interop, rewriting, tracing
from whence.dependence.asking import Failed, attempt
from whence.dependence.observed import Observed
from whence.errors import CaptureError, InvalidShapes, SpecialisedShapes, UsageError, WhenceError
from whence.execution import validity
from whence.execution.bound import Bound, Check
from whence.execution.taken_step import step_taken
from whence.execution.values.first import First, first_difference, first_nonfinite
from whence.execution.values.reading import ValueKey, Values, run
from whence.execution.values.step_inputs import given_to
from whence.execution.verify import Verification, refuse_unknown, verify
from whence.execution.verify_step import runs_itself, verify_step, with_step
from whence.guards import Guarded
from whence.guards.memory import Remembered
from whence.hierarchy import Tree
from whence.program import FlatProgram
from whence.program.arguments.variants import fitting
from whence.program.guards.rows import Violation
from whence.program.state import deep_copy, refuse_elsewhere, view_faults, with_state
from whence.reported import Reported
from whence.rewriting import Edit, GraphPass, Pass
from whence.schema import OnViolation
from whence.tracing.answers import warn_if_told
from whence.tracing.options import decide_faults, option_faults
from whence.tracing.sandbox.capture_lock import without_collection
from whence.tracing.target.subject import one_module

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, eq=False, repr=False)
class Program(Reported):
    """A captured program, with everything that can be asked of it."""

    variants: tuple["Program", ...] = ()

    def __copy__(self) -> Self:
        """The same program, which may be edited by itself (`track`); graph and tensors are shared."""
        return self.with_changes()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The program with a graph and tensors of its own: training a tree of it does not train the model."""
        return deep_copy(self, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """A program travels as the file that `save` writes; raises `NotStorable` for what no file holds."""
        return loaded, (interop.bytes_of(self, weights=True), "a pickled program")

    def with_state(self, state: str) -> Self:
        """The same program with its state as `"inputs"` (placeholders) or `"attributes"` (`get_attr`)."""
        return with_state(self, state)

    def module(self, *, copy: bool = False) -> Tree:
        """The program as one flat runnable module with the original's calling convention.

        With a loss function it returns `(loss, outputs)`. It shares the captured model's tensors unless
        `copy`.
        """
        return hierarchy.flat_module(self, copy=copy)

    @overload
    def unflatten(self, *, copy: bool = False) -> Tree: ...

    @overload
    def unflatten(self, *, onto: M, copy: bool = False) -> M: ...

    def unflatten(self, *, onto: nn.Module | None = None, copy: bool = False) -> nn.Module:
        """The tree of modules: the original's hierarchy, names and state, each module with its own graphs.

        It shares the captured model's tensors unless `copy`, so training the tree trains the model.
        With `onto`, the captured model or another instance of its class, every module is an instance of the
        user's own class, with its methods and the attributes of that instance (shared, but for modules among
        them), made without `__init__`; only `forward` is the captured one. Parameters and buffers are those
        of the captured model, also where `onto` is another instance, which is left as it is. Raises
        `UsageError` naming every module that does not fit, or cannot be made.
        """
        return hierarchy.unflatten(self, onto=onto, copy=copy)

    @property
    def flat_calls(self) -> tuple[hierarchy.DissolvedCall, ...]:
        """The calls that have no graph of their own in the tree: which, in which phase, and why.

        Their operations are in their caller's graph. Nearly always there is none.
        """
        return hierarchy.flat_calls(self)

    def check(
        self, model: object, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None
    ) -> list[Violation]:
        """Everything the capture relied on that is otherwise now; an empty list means that it still holds.

        `model` may be the captured one, a copy, or another instance of its class. Without `args` and `kwargs`
        only the model and the process are looked at. Nothing runs and nothing is raised, whatever is given:
        what does not fit is a violation. A program that was loaded from a file without a model raises
        `UsageError`: it has classes and code by name alone.

        A program that was read, attached or captured with `strict=True` has no guards on the model, because
        nobody watched what its graph assumes of it. There the arguments alone are looked at: everything for
        which a call would be refused is a violation, and an empty list says nothing of the model. Without
        arguments that is a `UsageError`.
        """
        if not self.guards.rows and (args is not None or kwargs is not None):
            return validity.check_inputs(self, args, kwargs)
        model = one_module(model)
        if args is not None or kwargs is not None:
            found = attempt(lambda: fitting(self, () if args is None else args, kwargs))
            program = self if isinstance(found, Failed) else found
            return validity.violations_in_turn(program, model, args, kwargs)
        every = (validity.violations_in_turn(each, model, None, None) for each in (self, *self.variants))
        return [*{str(violation): violation for found in every for violation in found}.values()]

    def guarded(self, model: Callable[..., Any], on_violation: str = "raise") -> Guarded:
        """A callable that checks every call before it runs the program on the state of `model`.

        Where a guard does not hold it raises `StaleCapture` (`"raise"`), warns and runs the model itself
        (`"warn"`), or captures the model again with these arguments (`"recapture"`): with what the first
        capture was asked for, and with fixed sizes where its `dynamic_shapes` do not allow these arguments.
        """
        backward = self.loss_function or self.has_backward
        view = "attributes" if self.signature.attributes else "inputs"

        def again(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
            wanted = self.circumstances
            recapture = partial(
                capture,
                model,
                args,
                kwargs,
                backward=backward,
                state=view,
                preserve_calls=wanted.preserve_calls,
                strict=wanted.strict,
                decide=wanted.decide,
            )
            try:
                return recapture(dynamic_shapes=wanted.dynamic_shapes, variants=wanted.variants)
            except (InvalidShapes, SpecialisedShapes):  # these inputs are not among those that were asked for
                return recapture()

        return validity.guarded(self, model, on_violation, again)

    def bind(self, model: object, optimizer: object = None, *, on_violation: str = "recapture") -> Bound:
        """A callable that runs the program on live state, and changes it in place.

        It is called as what was captured is, and returns what that returns, without gradients: parameters,
        buffers, arguments, the state of `optimizer`, and `.grad` are afterwards what eager makes of them. A
        program of `capture_step` needs an optimizer with the captured one's groups; state that it has not
        made yet is made as its first step would. A joint program with a loss returns `(loss, outputs)`, and
        adds gradients to `.grad`.

        `model` may be another instance of the captured class. Raises `UsageError` for what cannot be bound; a
        call raises `StaleCapture` where anything that the program relies on is otherwise, such as a value in
        the optimizer's groups, and `CallError` for other inputs. Nothing is changed then.

        Where a step that nobody has edited goes another way than at capture (a branch by a number that it
        counts, or by a value; gradients that are there) it is captured again, with that call's arguments, and
        each way has its program from then on; so is a first step taken by the step itself where it is another
        program than all others. With `on_violation="raise"`, or for another model than the step runs, all of
        these raise `StaleCapture`, too.
        """
        if on_violation not in (OnViolation.RECAPTURE, OnViolation.RAISE):
            raise UsageError(
                f"on_violation cannot be {on_violation!r} here", remedy='use "recapture" or "raise"'
            )
        held = one_module(model)
        variants = tuple(each.bind(model, optimizer, on_violation=on_violation) for each in self.variants)
        again = partial(_another_way, self, held, optimizer)
        is_own = on_violation == OnViolation.RECAPTURE and runs_itself(self, held, optimizer)
        return Bound(self, held, optimizer, self._checks(held), variants, again if is_own else None)

    def to_exported_program(self) -> ExportedProgram:
        """The program as a `torch.export.ExportedProgram` with the program's own tensors.

        PyTorch runs, saves, loads and decomposes it; origins are in `nn_module_stack` and `stack_trace`.
        Raises `NotExportable` for a joint program, a written constant and inputs that are one tensor.
        """
        refuse_elsewhere(self)
        return interop.to_exported_program(self)

    def track(self, name: str) -> AbstractContextManager[Edit[Self]]:
        """Edit a copy of the graph in a `with` block, and carry along where its operations come from.

        Inside the block `edit.graph` is for the pass `name` to edit; a pass that returns another graph module
        gives it back as `edit.graph_module`. Behind the block `edit.program` is the edited program, and this
        one is as it was. Operations that are still there keep their origins. New ones take theirs from copied
        metadata, from the operations they replace (n to 1: all calls are named), or from those who read them
        (1 to n); or from what `edit.replaced(new, *olds)` and `edit.split(old, *news)` say. Their quality is
        `inferred`, and `Origin.passes` names the pass.

        Raises `LostProvenance` naming every node of which it is not known what it was made from, and
        everything in which the graph does not fit the signature any more.
        """
        return rewriting.track(self, name)

    def apply(self, *passes: Pass | GraphPass) -> Self:
        """The program that one or several passes make of this one, which stays as it is.

        A pass is an object with a `name` and a method `rewrite(edit)`, as `whence.rewriting.Decompose` is, or
        a function over a `torch.fx.GraphModule` as PyTorch has them, which returns None, another one, or a
        `PassResult`.
        Origins are carried along as by `track`, with the same errors.
        """
        program = self
        for each in passes:
            program = rewriting.apply(program, each)
        return program

    def decompose(self, table: Any = None) -> Self:
        """The program with operators taken apart into others, which come from where those came from.

        None takes apart what PyTorch itself writes in terms of others (`linear`, `matmul`, `layer_norm`,
        `scaled_dot_product_attention`, …), as eager does in the grad mode of this moment; `"core"` lowers to
        PyTorch's core ATen operators by its own table, which computes other last bits; a mapping from
        operators to functions is a table of your own. Raises `UsageError` for another table, and
        `UnsupportedOperator` naming what cannot be written with other operators.
        """
        return self.apply(rewriting.Decompose(table))

    def to(self, *where: str | torch.device | torch.dtype) -> Self:
        """The program on another device, or with another floating point dtype, as a module moves.

        It has copies of the state, and is what a capture of the moved model would give. Devices in the graph
        are exchanged, dtypes that the model names stay. Raises `UsageError` that says why a program cannot
        be moved: one with a backward, and one whose model asked for a dtype.
        """
        return rewriting.moved(self, *where)

    def verify(
        self,
        model: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        optimizer: object = None,
        step: Callable[..., Any] | None = None,
        atol: float | None = None,
        by: str | None = None,
    ) -> Verification:
        """Run eager and the program from the same seed, and compare everything bit for bit.

        `model` may be another instance than the captured one; of a step it is the captured one, with the
        captured `optimizer`, since that is what the step runs, and the `step` itself where the program was
        loaded from a file. All are left as they were. With `atol` the answer says whether all is `close`,
        too; `ok` is about bits all the same. `by="call"` also compares what each call of a module returns,
        and the gradient of that where one backward alone reaches it, and no hook of the model's changed it.
        """
        refuse_unknown(by, atol)
        program = with_step(self, step, optimizer)
        if program.step is None:
            found = verify(fitting(program, args, kwargs), model, args, kwargs, by)
        else:
            held = one_module(model)
            found = verify_step(program, held, (args, kwargs or {}), optimizer, self._checks(held), by)
        return replace(found, atol=atol)

    def run(
        self,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        read: ValueKey | Sequence[ValueKey] = (),
        patch: Mapping[Any, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        optimizer: object = None,
    ) -> Values:
        """Run the graph on these arguments and the captured tensors, with values on the way; nothing changes.

        `read` names nodes, modules (`"layers.3.mlp"`: what it returned), calls (`"lin@0"`) and patterns of
        `select` (`"type=Linear"`, `"layers.* :: backward"`), in every phase. What may mean several is a
        dictionary, by call or node. `patch` gives all that a key means another value, or a function that
        makes one of what was there; what comes later is computed from that, also where a checkpoint runs
        again. A backward goes on through it without the derivative of the patch. A tangent is one unless
        `inputs` gives it, as it does other inputs; `optimizer` gives those of a step as it is now. Raises
        `SelectionError` for what is not there, `CallError` for other arguments, `UsageError` for no value.
        """
        program, given = given_to(self, args, kwargs, inputs, optimizer)
        return run(program, given, read=read, patch=patch or {})

    def first(
        self,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        differs_from: FlatProgram | None = None,
        inputs: Mapping[str, Any] | None = None,
        optimizer: object = None,
    ) -> First | None:
        """The first operation whose value is not finite, in the backward, too, with its call and line.

        That is one that makes a NaN of what holds none, or an infinity of what is finite that is not written
        down. With `differs_from`, another program of these arguments (before a pass, of another model), the
        first whose value is not bit for bit that of the node of that name there. Raises what `run` raises.
        """
        program, given = given_to(self, args, kwargs, inputs, optimizer)
        if differs_from is None:
            return first_nonfinite(program, given)
        return first_difference(program, fitting(differs_from, args, kwargs), given)

    def save(self, path: str | Path, *, weights: bool = True) -> None:
        """Write the program to a file: plain data and safetensors in a zip, in the form of
        `docs/saved-programs.md`.

        All of it is there: graph, signature, origins, calls, guards, open sizes, constants. Without `weights`
        parameters and buffers are left out. Raises `NotStorable` naming everything that a file cannot hold;
        then no file is written.
        """
        interop.saved_to(path, interop.bytes_of(self, weights=weights))

    def _checks(self, model: object) -> Check:
        return partial(validity.check, self, model, memory=Remembered())


def capture_step(
    step: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    model: nn.Module | Mapping[str, nn.Module] | Sequence[nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer] | None = None,
    dynamic_shapes: Any = None,
    reuse: bool = True,
    decide: str | None = None,
    device: str | None = None,
) -> Program:
    """Record a whole training step: forward, backward, and what the optimizer does.

    `step` is a function of yours that runs `model`, calls `loss.backward()`, `optimizer.step()`,
    `zero_grad()` and the like; `args` and `kwargs` are what it takes. It runs once or twice on fake tensors;
    model, gradients, optimizer and random numbers are as they were afterwards, also after an error. Several
    models are captured as one that holds them, in a dictionary by name (`g.weight`), in a row by number
    (`0.weight`); the groups of several optimizers are numbered through.

    The program is functional. Its inputs are parameters and buffers of `model`, the state of `optimizer`
    (`InputKind.OPTIMIZER_STATE`, called `o_layers_0_weight_exp_avg`, with the path
    `optimizer.state['layers.0.weight']['exp_avg']` and `of` the parameter), learning rates
    (`optimizer.param_groups[0]['lr']`) and the arguments. Every new value of these is an output of kind
    `mutation`, every gradient that the step leaves in `.grad` one of kind `gradient`, and what `step` returns
    are user outputs. What the optimizer, clipping and `zero_grad` compute has the phase `optimizer`; where it
    is about one parameter alone, its origin names the first call of the module that holds it.

    Other values in the optimizer's groups are constants, in `program.step.settings`, that `bind` compares in
    every call; so is a learning rate by which the optimizer decides. An optimizer that has not taken a step
    yet is captured as all steps from then on are, if its state begins as constants, as Adam's does.
    `dynamic_shapes`, `reuse` and `decide` are those of `capture`; where the model runs again after a
    backward, nothing is replayed. With `device` (`"cuda:sm90"`) it is the program of that device, which need
    not be here: model and optimizer are fakes there for the run (`presumed`).

    Numbers that the step advances around it (`self.global_step += 1`), tensors that it replaces there
    (`self.hidden = hidden.detach()`), and gradients of the step before are inputs, too
    (`InputKind.STEP_STATE`); what it appends to lists, or puts under names and keys, are `effect` outputs.

    Raises `UnsupportedStep` for what one program cannot repeat, and everything that `capture` raises.
    """
    UsageError.refuse(decide_faults(decide))
    given = tracing.Given(args, kwargs, dynamic_shapes, decide=decide, device=device)
    return _captured_step(step, given, one_module(model), optimizer, reuse=reuse)


def _captured_step(step: Any, given: tracing.Given, held: Any, optimizer: Any, **known: Any) -> Program:
    run = partial(tracing.capture_step, step, given, held, optimizer, **known)
    taking = partial(step_taken, step, (given.args, given.kwargs or {}), held, optimizer)
    program = _of_any_step(run, taking, is_here=given.device is None)
    warn_if_told(program.asked)
    before = validity.found_before(program, held) if program.step.second else ()  # type: ignore[union-attr]
    noted = replace(program.step, graph=program.graph_module, before=before)  # type: ignore[type-var]
    return program.with_changes(step=noted).under(dynamic_shapes=given.dynamic_shapes, decide=given.decide)


def _of_any_step(run: Callable[[], tuple[FlatProgram, Observed]], taking: Any, *, is_here: bool) -> Program:
    """The program of the step as it goes now; that of all later ones where the first one is another."""
    try:
        return _traced(run)
    except CaptureError as error:
        if not error.of_first_step:
            raise
        first = error
    try:
        with taking(instead=None if is_here else first) as taken:
            program: Program = taken.given_back(_traced(run, taken.made), first)
    except WhenceError as later:
        raise (first if not isinstance(later, CaptureError) or later.of_first_step else later) from None
    finally:
        del first  # or it would hold this frame, which holds it
    return program.with_changes(step=replace(program.step, second=True))  # type: ignore[type-var]


def _another_way(of: Program, model: Any, optimizer: Any, args: Any, kwargs: Any, moved: Any) -> Bound:
    """The step as it goes with these arguments, bound; other ways change what is at the `moved` places."""
    wanted, step = of.circumstances, of.step
    given = tracing.Given(args, kwargs, wanted.dynamic_shapes, decide=wanted.decide)
    way = _captured_step(step.call, given, model, optimizer, moved=moved)  # type: ignore[union-attr]
    return way.bind(model, optimizer, on_violation="raise")


def capture(
    model: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    backward: bool | Callable[[Any], Tensor] = False,
    dynamic_shapes: Any = None,
    state: str = "inputs",
    reuse: bool = True,
    strict: bool = False,
    preserve_calls: str | Sequence[str] = (),
    decide: str | None = None,
    variants: bool = False,
    device: str | None = None,
) -> Program:
    """Record what `model` computes on these example inputs, as one functional graph.

    `model` is a module, a bound method, or any callable. Nothing is computed and no weight is copied: the run
    uses fake tensors, and the model is as it was afterwards, also after an error. Lazy modules alone are
    initialised from the example first, as the model's first call would do it, and stay so.
    Modules compiled by `torch.compile` are captured as written, data-parallel ones as the module inside, and
    those that `fully_shard` manages as before it, with shards as state: the local computation, without the
    averaging of gradients. Hooks run once, and what they compute is part of the program.

    `backward=False` records the forward; `True` also the backward, with one tangent input for every
    differentiable output; a function of the outputs records the backward of the scalar it returns. What that
    function holds is state of the program, too, below `loss`: `loss.weight` is a parameter of a loss module.
    With `reuse`, a module that must do what an equal one did before is not run: what was recorded then is
    written once more, and `program.replay` says which, and why others had to run. The program is the same.
    `dynamic_shapes` says which sizes may vary, in torch.export's words: `Dim` (with bounds, `2 * dim`,
    `dim + 1`), `Dim.AUTO`, `Dim.DYNAMIC`, `Dim.STATIC`, a number or None, for each dimension of each tensor
    and for whole numbers, arranged by the names or the positions of the arguments; or a `ShapesCollection` or
    `AdditionalInputs`. The program then holds for every admitted size, and `program.shapes` lists them. A
    model that allows less than was asked raises `SpecialisedShapes`; with None all sizes are those of the
    example.
    `state="inputs"` makes parameters and buffers placeholders, `"attributes"` makes them `get_attr` nodes.
    With `strict`, PyTorch's bytecode front end (`torch.export.export(strict=True)`) reads a module's code,
    where tracing runs it. What it assumed it does not say: such a program has no guards. While it reads, it
    turns oneDNN off for the whole process (`torch.backends.mkldnn`), also for what other threads compute.
    With `decide="example"` the example decides what values of tensors decide (`program.decisions`), in place
    of an error; a run whose values decide otherwise raises `StaleCapture` before it changes anything.
    With `variants`, sizes that a branch excludes (`if batch == 1`) are numbers in programs of their own,
    `program.variants`, and all that is called with arguments takes the one that admits them.
    `preserve_calls` are patterns of module paths (`"blocks.*.mlp"`): in the program's tree these modules take
    the originals' arguments, also those that nothing reads, and another may replace each (`set_submodule`).
    With `device` (`"cuda:sm90"`) copies over fake tensors run, for one that need not be here (`presumed`).

    Raises a `CaptureError` that names module, line, reason and remedy, and holds what had been recorded until
    then in `partial`. An error of the model's own stays that, with a note that a capture was running.
    """
    patterns = (preserve_calls,) if isinstance(preserve_calls, str) else tuple(preserve_calls)
    faults = [*option_faults(backward, strict, patterns, decide, device), *view_faults(state)]
    UsageError.refuse([*faults, *tracing.variant_faults(variants, dynamic_shapes, strict)])
    given = tracing.Given(args, kwargs, dynamic_shapes, patterns, decide=decide, device=device)
    at = partial(_captured_at, model, given, backward, reuse)
    program = full(interop.strict_program(model, given, backward)) if strict else at(())
    program = tracing.with_variants_at(program, at) if variants else program
    warn_if_told(program.asked)
    asked = {"dynamic_shapes": dynamic_shapes, "preserve_calls": patterns, "strict": strict, "decide": decide}
    return program.under(**asked, variants=variants).with_state(state)


def _captured_at(
    model: Any, given: tracing.Given, backward: Any, reuse: bool, numbers: tuple[tracing.Numbers, ...]
) -> Program:
    numbered = replace(given, numbers=numbers)
    return _traced(partial(tracing.capture, model, numbered, backward, reuse=reuse))


def _traced(run: Callable[[], tuple[FlatProgram, Observed]], made: Sequence[Tensor] = ()) -> Program:
    """The program of a run, with what it assumed; what it sets context variables to ends with it. Tensors
    that were `made` for it are others in another run."""

    def captured() -> Program:
        traced, observed = run()
        program = full(traced)
        return program.with_changes(guards=validity.guards_for(program, observed, run, made))

    return copy_context().run(without_collection, captured)


def loaded(content: bytes, name: str, model: Any = None, *, loss: Any = None, binds: bool = True) -> Program:
    """The program in the bytes of a file; beside a `model` and its `loss`, on their tensors if it `binds`."""
    return full(interop.program_of(content, name, model, loss=loss, binds=binds)[0])


def full(program: FlatProgram) -> Program:
    """A program, with everything that can be asked of it."""
    held = {field.name: getattr(program, field.name) for field in fields(program)}
    return Program(**{**held, "variants": tuple(map(full, program.variants))})
