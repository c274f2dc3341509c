"""A program that runs on live state: a model's tensors, an optimizer's, and gradients, changed in place."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from whence._torch.autograd.nodes import below_autograd
from whence._torch.graphs import has_classes_of_its_own, hold_classes_of_its_own, own_copy, with_code
from whence._torch.observe.attribute_reads import own_attributes
from whence._torch.observe.compile_flags import unread
from whence._torch.observe.generators import set_states, states
from whence._torch.observe.training_steps import Optimizers, as_one_optimizer, is_optimizer, members_of
from whence._torch.sizes.numbers import stays
from whence._torch.tensors import autocast_state, without_autocast
from whence.errors import CallError, CaptureError, Fault, StaleCapture, UsageError
from whence.execution.in_place import InPlace, Placing
from whence.execution.live_run import AGAIN, Live, of
from whence.execution.own_memory import certainly_own
from whence.execution.running import take
from whence.guards.check import Checked
from whence.guards.guarded import stale_capture
from whence.hierarchy.emit.differentiable import laid_out, without_gradients
from whence.hierarchy.emit.source import run_as
from whence.hierarchy.value_shapes import described_at
from whence.program import FlatProgram, Input, Whole
from whence.program.arguments.fitting import other_autocast
from whence.program.arguments.host_state import HostEffect, HostPlace
from whence.program.arguments.optimizer_arguments import Step
from whence.program.arguments.variants import alone
from whence.program.names import NamedOnly
from whence.program.queries.failing import OF_OPERATIONS, refuse_failed
from whence.program.queries.memory_order import in_any_layout
from whence.program.state import with_state
from whence.schema import InputKind, OutputKind
from whence.tracing.target.subject import Subject, subject_of, tensors_by_name

Check = Callable[[tuple[Any, ...], dict[str, Any]], Checked]
"""Looks whether the capture holds for a call."""
Again = Callable[[tuple[Any, ...], dict[str, Any], Sequence[HostPlace]], "Bound"]
"""Captures a step once more, with these arguments, as it goes now; other ways change what is at places."""
_MOST_WAYS = 16
"""Programs of one step that are kept beside the first."""


class Bound:
    """Runs a program on the tensors that a model and an optimizer have, and changes them as eager would.

    It is called as what was captured is. Everything that the program changes is written in place, under no
    gradient: parameters, buffers, arguments, the optimizer's state. A step leaves each `.grad` as eager does;
    a joint program with a loss adds gradients to `.grad`, and returns `(loss, outputs)`. `variants` run where
    they alone admit the arguments. Where numbers or values decide otherwise than at capture, a step is
    captured `again`, and that program is kept for the way that the step went then.
    """

    def __init__(
        self,
        program: FlatProgram,
        model: object,
        optimizer: object,
        check: Check,
        variants: "tuple[Bound, ...]" = (),
        again: Again | None = None,
    ) -> None:
        self.variants = variants
        self.program = with_state(alone(program), "inputs")
        self.model = model
        self.optimizer: Any = as_one_optimizer(optimizer)
        self._check = check
        self._again = again
        self._ways: list[Bound] = []
        self._has_run = False
        self._is_after_first = False
        self._subject = subject_of(model)
        module = _as_run(self.program)
        self._graph = with_code(module).forward  # past hooks for all modules
        self._placing = Placing(self.program, module)
        values = ((node.name, node.meta["val"]) for node in self.program.graph.find_nodes(op="placeholder"))
        self._fakes = {name: fake for name, fake in values if isinstance(fake, Tensor)}
        is_fixed = self.program.convention.sizes is None
        free = in_any_layout(self.program)
        self._laid_out = {name: fake for name, fake in self._fakes.items() if name not in free}
        self._layouts = {name: described_at(fake, {}) for name, fake in self._laid_out.items() if is_fixed}
        self._own = certainly_own(self.program)
        self._decides = any(node.target is stays for node in self.program.graph.nodes)
        UsageError.refuse(_faults_of_state(self.program, self._subject, self.optimizer))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bound":
        """The copy of the program, bound to the copies of the model and the optimizer."""
        held = self.program, self.model, self.optimizer, self._check, self.variants
        return Bound(*deepcopy(held, memo))  # which the step does not run: it is not captured again

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once; raises `CallError` for other inputs, `StaleCapture` where the capture does not hold."""
        return unread(self._called, args, kwargs)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.variants and self.program.convention.faults(args, kwargs):
            for variant in self.variants:
                if not variant.program.convention.faults(args, kwargs):
                    return variant._called(args, kwargs)
        if not self._has_run and self._begins:
            return self._first(args, kwargs)
        return self._one_of_the_ways(args, kwargs)

    @property
    def _begins(self) -> bool:
        """Whether the program is of a later step, and the step itself is to take the first one."""
        return self._is_of_later_steps and self._again is not None

    @property
    def _is_of_later_steps(self) -> bool:
        step = self.program.step
        return step is not None and step.second

    def _taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the step itself gives, where it is another program than later ones."""
        self.program.convention.flatten(args, kwargs)
        self._is_after_first = True
        step: Any = self.program.step
        return take(step.call, args, kwargs)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A first step, which the step itself takes, unless it was taken before; or the one after it."""
        try:
            result = self._one_of_the_ways(args, kwargs)
        except StaleCapture:
            if self._is_after_first:
                raise
            return self._taken(args, kwargs)
        self._has_run = not self._is_after_first
        return result

    def _one_of_the_ways(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program, or that of another way, the one that ran last first; a new one where none fits.

        Where one of them is of later steps, the step itself takes the first one, and each that begins anew.
        What it leaves may be things of its own, which the capture could not know: the next one is captured
        as it goes then.
        """
        stale = None
        ways = [*self._ways] or [self]
        for way in ways:
            found = self._found(way, args, kwargs, self._advanced, self._moved)
            if not isinstance(found, StaleCapture):
                self._ways.sort(key=lambda other, way=way: other is not way)  # type: ignore[misc]
                self._is_after_first = False
                return found
            stale = found
        if self._begins_anew:
            return self._taken(args, kwargs)
        try:
            way = self._other_way(args, kwargs, stale)
        finally:
            del stale, found  # or what is raised would hold this frame, which holds it
        self._ways = [way, *(self._ways or (self,))]
        return self._taken(args, kwargs) if way._is_of_later_steps else way(*args, **kwargs)

    @property
    def _advanced(self) -> Set[tuple[int, str]]:
        """What steps of several ways advance in the optimizer's groups; of one way it is no constant."""
        steps = [way.program.step for way in self._ways if way.program.step is not None]
        return {(slot.group, slot.key) for step in steps for slot in step.numbers}

    def _moved(self) -> list[HostPlace]:
        """What steps of several ways change around them; of one way it is no constant."""
        return [place for way in self._ways or (self,) for place in _places_changed(way.program)]

    def _found(self, way: "Bound", *given: Any) -> Any:
        try:
            return way._attempt(*given)
        except StaleCapture as stale:
            if not self._is_after_first:
                raise
            return stale

    @property
    def _begins_anew(self) -> bool:
        known = (self, *self._ways)
        is_known = self._again is not None and any(way._is_of_later_steps for way in known)
        return is_known and not self._is_after_first

    def _other_way(self, args: tuple[Any, ...], kwargs: dict[str, Any], stale: Any) -> "Bound":
        """The step captured as it goes now; raises `stale` where it cannot be."""
        try:
            if self._again is None:
                raise stale
            if len(self._ways) > _MOST_WAYS:
                stale.why = f"the step has gone {len(self._ways)} ways already, and this is another one"
                stale.remedy = (
                    "pass what decides as a tensor, or run the steps that go other ways as they are"
                )
                raise stale
            return self._again(args, kwargs, self._moved())
        except CaptureError as error:
            stale.why = f"captured as it goes now, it is refused: {error.what}"
            stale.remedy = error.remedy
            raise stale from error
        finally:
            del stale  # or it would hold this frame, which holds it

    def _attempt(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        advanced: Set[tuple[int, str]],
        moved: Callable[[], Sequence[HostPlace]],
    ) -> Any:
        """What a run gives; a `StaleCapture`, which is not raised, where the step goes another way."""
        program = self.program
        if torch.is_inference_mode_enabled() and _trains(program):
            raise _in_inference_mode()
        flat = program.convention.flatten(args, kwargs)
        checked = self._check(args, kwargs) if program.guards.rows else Checked([])
        if checked.violations:
            return _stale_in_places(program, checked, moved())
        if checked.changes and not _settles(program):
            raise _changes_itself(checked.changes)
        if not self._subject.is_current:  # a module has taken the place of another
            self._subject = subject_of(self.model)
        begun = Live(program, tensors_by_name(self._subject), flat, self.optimizer)
        if lost := begun.lost() or begun.moved(advanced) or begun.unbegun():
            return StaleCapture.of(lost)
        begun.refuse()
        if other := begun.with_gradient():
            return StaleCapture.of(other)
        undo = begun.begin()
        values = begun.values()
        StaleCapture.refuse(self._converted(values))
        state = autocast_state()
        if state != program.circumstances.autocast:
            raise other_autocast(program.circumstances.autocast, state)
        drawn = states() if self._decides else None
        try:
            with self._recording_nothing(), without_autocast(state):
                arguments = self._arguments(values, program.convention.bound(flat))
                placed, results = self._computed(values, arguments)
        except StaleCapture as error:  # values decide otherwise
            undo()
            if drawn is not None:
                set_states(drawn)
            return error
        given = [*map(_without_history, results)] if self._is_forward else results
        result = begun.finished(values, given, self._own, placed)
        self._leave(program.guards.leaves)
        if not program.convention.returned:
            return result
        has_loss = bool(program.signature.outputs_of(OutputKind.LOSS))
        return program.convention.handed_back(args, kwargs, result, has_loss)

    def _leave(self, effects: Sequence[HostEffect]) -> None:
        """Put what every run leaves where that is known, and not in a module of another model."""
        known = [effect for effect in effects if not effect.place.is_lost]
        is_in_modules = any(effect.place.is_of_module for effect in known)
        modules = self._subject.named_modules() if is_in_modules else ()
        own = {id(own_attributes(module)) for _, module in modules}
        for effect in known:
            if not effect.place.is_of_module or id(effect.place.holder) in own:
                effect.done({})

    def _computed(self, values: Mapping[str, Any], arguments: Sequence[Any]) -> tuple[InPlace | None, Any]:
        """What the graph gives, and where it has written in place."""
        placed = self._placing.graph(values, arguments)
        try:
            return placed, (self._graph if placed is None else placed.run)(*arguments)
        except OF_OPERATIONS as error:
            refuse_failed(self.program, error)
            raise

    @property
    def _is_forward(self) -> bool:
        """Whether the program is at a level at which operators look at the grad mode and at histories."""
        return not (self.program.has_backward or self.program.step is not None)

    def _recording_nothing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._is_forward else below_autograd()

    def _converted(self, values: Mapping[str, Any]) -> list[Fault]:
        """State of another dtype, or on another kind of device, where no guard has looked at it."""
        rows = () if self.program.guards.rows else self.program.signature.state
        pairs = [(row.path, values[row.name], self._fakes[row.name]) for row in rows]
        return [
            Fault(
                f"{path} is {now.dtype} on {now.device}, and was {then.dtype} on {then.device} at capture",
                why="casts, constants and kernels in the graph are those of the capture",
                remedy=AGAIN,
            )
            for path, now, then in pairs
            if now.dtype is not then.dtype or now.device.type != then.device.type
        ]

    def _arguments(self, values: Mapping[str, Any], sizes: Mapping[str, int]) -> list[Any]:
        """The inputs in order, in the memory layout of the capture where operations rely on it."""
        layouts = self._layouts or {name: described_at(fake, sizes) for name, fake in self._laid_out.items()}
        given = [(row.name, values[row.name]) for row in self.program.signature.inputs]
        if not self._is_forward:
            given = [(name, value.detach() if isinstance(value, Tensor) else value) for name, value in given]
        return [
            laid_out(value, layouts[name]) if isinstance(value, Tensor) and name in layouts else value
            for name, value in given
        ]


def _stale_in_places(program: FlatProgram, checked: Checked, places: Sequence[HostPlace]) -> StaleCapture:
    """What is violated, raised unless it is all at places that steps of several ways change around them."""
    if all(_is_at(violation.guard.what, places) for violation in checked.violations):
        return stale_capture(program, checked)
    raise stale_capture(program, checked)


def _as_run(program: FlatProgram) -> fx.GraphModule:
    """The graph of a program, where what asks for the grad mode hears that of the model's own code, views of
    inputs that are taken as they lie may be copies, and numbers of NumPy's are what they are."""
    off, view = program.facts.turned_off, torch.ops.aten.view.default
    is_turned = program.convention.any_layout and program.graph.find_nodes(op="call_function", target=view)
    has_literals = has_classes_of_its_own(program.graph)
    if not (off or is_turned or has_literals):
        return program.graph_module
    module = own_copy(program.graph_module)
    if has_literals:
        hold_classes_of_its_own(module)
    for node in module.graph.find_nodes(op="call_function", target=view) if is_turned else ():
        node.target = run_as(view)
    for node in module.graph.nodes:
        if node.name in off:
            node.target, node.args = without_gradients, (node.target, *node.args)
    module.recompile()
    return module


def _without_history(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def _faults_of_state(program: FlatProgram, subject: Subject, optimizer: object) -> Sequence[Fault]:
    found, step = [], program.step or Step(call=program.graph_module)
    if program.signature.inputs_of(InputKind.TANGENT):
        what = "the program takes the gradients of its outputs, and nothing says which"
        found.append(Fault(what, remedy="capture with backward=loss, or call program.module()"))
    leaves = {row.name for row in program.signature.inputs_of(InputKind.USER)}
    rows = (row for row in program.signature.wholes if row.gradient is not None)
    given = [row.path for row in rows if not leaves.isdisjoint(row.parts)]
    if given:
        what = f"{', '.join(given)} requires a gradient, and is made of other tensors"
        found.append(Fault(what, remedy="call program.module()"))
    if changing := list(_changing(program)):
        what = f"{', '.join(changing)} would change shape or dtype"
        found.append(Fault(what, remedy="call program.module()"))
    if program.circumstances.is_foreign:
        found.append(Fault("the graph was made by others", remedy="call program.module()"))
    if step.outside:
        what = f"the file does not say what {', '.join(row.path for row in step.outside)} was at capture"
        found.append(Fault(what, why="the step reads it", remedy=AGAIN))
    if any(place.is_lost for place in step.places):
        what = "the step changes objects of Python's that are not in a file"
        found.append(Fault(what, remedy="capture the step where they are"))
    if theirs := [row.path for row in _of_another_model(program, step, subject)]:
        what = f"the step changes {', '.join(theirs)} of the captured model, and this is another one"
        found.append(Fault(what, remedy="bind the captured model, or capture the step of this one"))
    for call in step.calls:
        if not any(call.optimizer is member for member in members_of(optimizer)):
            what = f"the step calls {call.path}, and that schedule is not this optimizer's"
            found.append(
                Fault(what, remedy="bind the captured optimizer, or capture a step without schedules")
            )
    if step.groups and not is_optimizer(optimizer):
        found.append(Fault("the program needs an optimizer", remedy="write program.bind(model, optimizer)"))
    elif not step.groups and optimizer is not None:
        found.append(Fault("the program knows no optimizer", remedy="write program.bind(model)"))
    elif isinstance(optimizer, Optimizer | Optimizers):
        found += other_optimizer(program, tensors_by_name(subject), optimizer)
    return found


def _of_another_model(program: FlatProgram, step: Step, subject: Subject) -> Iterator[HostPlace]:
    """What the step changes in modules of the captured model, or in what they hold, where this is another
    one."""
    captured = None if program.guards.of is None else program.guards.of.target()
    modules = captured.modules() if isinstance(captured, nn.Module) else ()
    own = {id(module) for _, module in subject.named_modules()}
    theirs = {id(own_attributes(module)) for module in modules if id(module) not in own}
    return (place for place in step.places if place.is_within(theirs))


def _changing(program: FlatProgram) -> Iterator[str]:
    """State and arguments that become tensors of another kind, which in place they cannot."""
    nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
    for row in program.signature.outputs_of(OutputKind.MUTATION):
        before, now = nodes[of(row)], nodes[str(row.node)]
        if not isinstance(now, Tensor):
            continue  # a number, which the optimizer holds
        if (
            before.dtype != now.dtype
            or len(before.shape) != len(now.shape)
            or any(_is_other(*pair) for pair in zip(before.shape, now.shape, strict=True))
        ):
            yield row.path


def _is_other(before: Any, now: Any) -> bool:
    """Whether two sizes are numbers that differ."""
    return type(before) is int and type(now) is int and before != now


def other_optimizer(
    program: FlatProgram, tensors: dict[str, Tensor], optimizer: Optimizer | Optimizers
) -> list[Fault]:
    """In what an optimizer of these tensors is not like that of a step."""
    step: Any = program.step
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    held: tuple[Input | Whole, ...] = (*program.signature.state, *program.signature.wholes)
    rows = {path: row.path for row in held for path in (row.path, *row.aliases)}
    groups = tuple(
        tuple(rows.get(names.get(id(p), ""), "a tensor from outside the model") for p in group["params"])
        for group in optimizer.param_groups
    )
    if issubclass(step.optimizer_class, NamedOnly):
        what = f"{program.name} was loaded from a file, and has the class of its optimizer by name"
        return [Fault(what, remedy="whence.load(path, model=...) with the model that it is bound to")]
    if type(optimizer) is not step.optimizer_class:
        what = (
            f"the program was captured with {step.optimizer_class.__name__}, not {type(optimizer).__name__}"
        )
        return [Fault(what, remedy=AGAIN)]
    if groups == step.groups:
        return []
    what = "the optimizer's groups do not hold the parameters that they held at capture, in order"
    return [Fault(what, remedy="make the optimizer as the captured one was made")]


def _places_changed(program: FlatProgram) -> Iterator[HostPlace]:
    """Where a step puts something around it, and not what it reads alone."""
    if program.step is not None:
        written = {of(row) for row in program.signature.outputs_of(OutputKind.MUTATION)}
        yield from (row.place for row in program.step.counted if row.input in written)
        yield from (row.place for row in program.step.effects)


_ABOUT = ("closure ", "the length of ", "the keys of ")


def _is_at(what: str, places: Sequence[HostPlace]) -> bool:
    """Whether what a guard is about is at one of these places, or in what is there."""
    for words in _ABOUT:
        what = what.removeprefix(words)
    paths = [place.path for place in places]
    paths += [place.path.partition(".")[2] for place in places if place.is_of_module]
    return any(what == path or what.startswith((f"{path}.", f"{path}[")) for path in paths)


def _settles(program: FlatProgram) -> bool:
    """Whether a model that changes in its first run what it reads does the same ever after."""
    settled = program.guards.settled
    return settled is not None and not settled.changes


def _changes_itself(names: Sequence[str]) -> StaleCapture:
    return StaleCapture(
        f"the model changes {', '.join(names)} when it runs, and reads it",
        why="the program leaves that out, so the next run would find it as it was",
        remedy="where only the first run does so, run the model once before; else keep it in a buffer, "
        "or what a step counts in an object around the model",
    )


def _trains(program: FlatProgram) -> bool:
    """Whether gradients are left, which are to be added to and read later."""
    return program.step is not None or bool(program.signature.outputs_of(OutputKind.GRADIENT))


def _in_inference_mode() -> CallError:
    return CallError(
        "the program trains, and torch.inference_mode() is on",
        why="gradients and state of the optimizer that are made in it cannot be written outside of it",
        remedy="call it outside of torch.inference_mode(); under torch.no_grad() it runs, too",
    )
