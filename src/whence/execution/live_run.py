"""One run of a program on live state: what it takes, and where it puts what it gives."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from whence._torch.files import hook_in_words
from whence._torch.observe.attribute_reads import NOTHING
from whence._torch.observe.hooks import gradient_hooks
from whence._torch.observe.training_steps import note_step, optimizer_hooks, own_values
from whence._torch.plain_values import same_objects
from whence._torch.pytrees import tree_unflatten
from whence._torch.subclasses.wrapper_subclasses import is_composed, plain_parts
from whence._torch.tensors import count_writes, write_all
from whence.errors import CallError, Fault, StaleCapture
from whence.execution.in_place import InPlace
from whence.execution.own_memory import in_own_memory
from whence.program import FlatProgram
from whence.program.arguments.convention import refuse_overlap
from whence.program.arguments.host_state import HostNumber
from whence.program.arguments.optimizer_arguments import (
    OWN,
    GroupSlot,
    Initial,
    Setting,
    StateHome,
    StateSlot,
    Step,
    home_of,
    inside,
    is_number,
    put_inside,
)
from whence.program.names import InWords
from whence.program.signature import Input, Output, Part
from whence.schema import InputKind, OutputKind

AGAIN = "capture again"
_IN_THE_STEP = (
    "; a number that moves is an input where the step sets it, of what it counts or is given as a tensor: "
    "group[...] = number"
)
_OF_A_FILE = "it is a constant of the program, and a file keeps of a function its name alone"
_WARM = (
    "the optimizer had taken steps when it was captured; what it begins with is not known",
    "take one step with this optimizer, or capture with one that has not taken any",
)
_SECOND = (
    "the optimizer's first step makes it, which is another program than those that follow",
    "take one step with this optimizer",
)
"""Why state has to be there, and what to do."""


class Live:
    """What one run of a program takes, and where it puts what it gives."""

    def __init__(
        self,
        program: FlatProgram,
        tensors: Mapping[str, Tensor],
        flat: Sequence[Any],
        optimizer: Optimizer | None,
    ) -> None:
        self.program = program
        self.tensors = tensors
        self.optimizer: Any = optimizer
        step = program.step or Step(call=program.graph_module)
        now = step.as_kept_now()
        self.step, self.is_lost = now or step, now is None
        self._leaves = dict(
            zip((row.name for row in program.signature.inputs_of(InputKind.USER)), flat, strict=True)
        )
        self._rows = {row.name: row for row in program.signature.inputs}
        self._state: Any = {} if self.optimizer is None else self.optimizer.state
        self._in_states: dict[str, Any] = {}

    # --- before ------------------------------------------------------------------------------------------

    def lost(self) -> list[Fault]:
        """What the step keeps around itself and is gone: it begins anew, or goes another way."""
        places = self.step.lost if self.is_lost else ()
        return [
            Fault(
                f"what held `{place.path}` at capture is not there, or holds something else",
                why="the step changes it, and would find another thing there",
                remedy=AGAIN,
            )
            for place in places
        ]

    def moved(self, advanced: Set[tuple[int, str]]) -> list[Fault]:
        """Constants of this way that another way of the step advances."""
        rows = [row for row in self.step.settings if (row.group, row.key) in advanced]
        return [*self._other_settings(rows)] if rows else []

    def unbegun(self) -> list[Fault]:
        """State that is not there, where the first step is another program: it begins, or begins anew."""
        return self._unbegun if self.step.second else []

    @cached_property
    def _unbegun(self) -> list[Fault]:
        """State that is missing, of which nobody knows what it begins with."""
        self._in_states = {slot.input: self._in_state(slot) for slot in self.step.states}
        slots = (slot for slot in self.step.states if slot.initial is None)
        paths = [self._row(slot).path for slot in slots if self._in_states[slot.input] is NOTHING]
        homes = [home for home, is_made in self.step.touched if not is_made]
        paths += [home.path for home in homes if self.tensors.get(home.owner) not in self._states(home)]
        why, remedy = _SECOND if self.step.second else _WARM
        return [Fault(f"{path} does not exist", why=why, remedy=remedy) for path in paths]

    def _states(self, home: StateHome) -> Any:
        return inside(self.optimizer, home.member).state if home.member else self._state

    def refuse(self) -> None:
        """Raise `StaleCapture` naming everything in which optimizer and gradients are not as they must be."""
        StaleCapture.refuse(self._other_actors())
        StaleCapture.refuse(self._other_parameters())
        settings = self._other_settings(self.step.settings)
        faults = [*settings, *self._other_numbers(), *self._hooked(), *self._unbegun, *self._other_state()]
        StaleCapture.refuse(faults)
        CallError.refuse(self._going_on())
        names = [*self._leaves]
        rows = self.program.signature.outputs_of(OutputKind.MUTATION)
        written = {of(row) for row in rows}
        at = [names.index(name) for name in names if name in written]
        paths = {self._rows[name].path for name in written}
        state = ((path, held, path in paths) for path, held in self.tensors.items())
        refuse_overlap(self.program.convention, at, [*self._leaves.values()], state if written else ())

    def _going_on(self) -> Iterator[Fault]:
        """Tensors with a gradient that were computed of others: eager's backward does not end there."""
        given = [row for row in self.program.signature.outputs_of(OutputKind.GRADIENT) if row.node]
        for row in (self._rows[of(row)] for row in given):
            held = self._leaves.get(row.name) if row.kind is InputKind.USER else self.tensors.get(row.path)
            if held is not None and not held.is_leaf:
                yield Fault(
                    f"{row.path} came of other tensors that require a gradient",
                    why="eager's backward goes on through what made it, and a bound program's ends there",
                    remedy="detach it, or call program.module(), which autograd goes through",
                )

    def _other_actors(self) -> Iterator[Fault]:
        """The step must find the model, the optimizer and schedules of the capture where it found them, with
        the methods that they had."""
        for row in self.step.replaced:
            done = "call" if isinstance(row.value, FunctionType) else "train or advance"
            yield Fault(
                f"`{row.path}` is another {type(row.value).__name__} than at capture",
                why=f"the step would {done} that one",
                remedy=AGAIN,
            )

    def _other_parameters(self) -> Iterator[Fault]:
        """Each group must hold the parameters that the model has now, and no others."""
        held = [group["params"] for group in self._groups]
        named = [[self.tensors.get(name) for name in names] for names in self.step.groups]
        if len(held) == len(named) and all(map(same_objects, held, named)):
            return
        known = {id(tensor) for group in held for tensor in group}
        missing = [
            name for names in self.step.groups for name in names if id(self.tensors.get(name)) not in known
        ]
        yield Fault(
            f"the optimizer does not hold {', '.join(missing)}"
            if missing
            else "the optimizer's groups have changed",
            why="parameters were replaced, or groups edited; eager trains only what the optimizer holds",
            remedy="make the optimizer anew of the model's parameters, and bind the program to it",
        )

    def _other_settings(self, rows: Iterable[Setting]) -> Iterator[Fault]:
        now = {
            Setting(number, key, None).path: value
            for number, group in enumerate(self._groups)
            for key, value in group.items()
        }
        if self.optimizer is not None:
            now |= {Setting(OWN, key, None).path: value for key, value in own_values(self.optimizer).items()}
        for row in rows:
            if not _is_as_it_was(row, now.get(row.path, NOTHING)):
                moves = row.group != OWN and is_number(row.value) and is_number(now.get(row.path))
                yield Fault(
                    f"`{row.path}` was {row.value!r} at capture, is {now.get(row.path)!r} now",
                    why=_OF_A_FILE if isinstance(row.value, InWords) else "it is a constant of the program",
                    remedy=f"{AGAIN}{_IN_THE_STEP if moves else ''}",
                )

    def _other_numbers(self) -> Iterator[Fault]:
        for slot in self.step.numbers:
            row, value = self._row(slot), home_of(self.optimizer, slot.group).get(slot.key)
            if _kind(value) != _kind(row.value) and not (value is None and slot.initial is not None):
                what = f"`{row.path}` was {_kind(row.value)} at capture, is {_kind(value)} now"
                yield Fault(what, remedy=AGAIN)
        for counted in self.step.counted:
            if not counted.fits:
                then, now = " or ".join(counted.kinds), _kind(counted.value)
                then = f"a tensor ({then})" if counted.spec else f"a number ({then})"
                what = f"`{counted.place.path}` was {then} at capture, is {now} now"
                yield Fault(what, why="the step advances it, and it is an input", remedy=AGAIN)
            elif isinstance(counted.value, Tensor):
                yield from self._other_tensor(counted)
        for moved in self.step.cycled:
            if type(moved.now(self._groups)) is not float:
                yield Fault(
                    f"what is at `{moved.path}`, or beside it, is not what it was at capture",
                    why="the number there is an input, and those beside it are constants of the program",
                    remedy=AGAIN,
                )

    def _other_tensor(self, counted: HostNumber) -> Iterator[Fault]:
        then, now = self._rows[counted.input].value, counted.value
        if (then.shape, then.dtype, then.device) != (now.shape, now.dtype, now.device):
            what, other = (f"{held.dtype} {list(held.shape)} on {held.device}" for held in (then, now))
            what = f"`{counted.place.path}` was a tensor {what} at capture, is {other} now"
            yield Fault(what, why="it is an input, whose shape is that of the capture", remedy=AGAIN)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def _hooked(self) -> list[Fault]:
        hooks = [] if self.optimizer is None else optimizer_hooks(self.optimizer)
        what = f"there are hooks on the optimizer's step: {'; '.join(map(hook_in_words, hooks))}"
        why = "there were none at capture, and the program does not run them"
        return [Fault(what, why=why, remedy="remove them")] * bool(hooks) + [*self._hooked_gradients()]

    def _hooked_gradients(self) -> Iterator[Fault]:
        """Hooks on gradients that are others now; a forward that asks for none of these calls none."""
        is_forward, differentiated = not self.program.has_backward, self.program.circumstances.differentiated
        then = {id(self.tensors[name]): hooks for name, hooks in self.step.hooked}
        for name, tensor in self.tensors.items():
            wanted = then.get(id(tensor), ())
            if is_forward and name not in differentiated:
                continue
            if (now := gradient_hooks(tensor)) != list(wanted):
                held = [", ".join(hooks) or "none" for hooks in (wanted, now)]
                yield Fault(
                    f"the gradient hooks of {name} were {held[0]} at capture, are {held[1]} now",
                    why="what they did in the capture is part of the program, and a run calls none",
                    remedy=AGAIN,
                )

    def _row(self, slot: StateSlot | GroupSlot) -> Input:
        return self._rows[slot.input]

    def _other_state(self) -> Iterator[Fault]:
        """State that is of another kind, made of other things, or holds other constants."""
        for slot in self.step.states:
            found, row = self._in_states[slot.input], self._rows[slot.input]
            if found is not NOTHING and _kind(found) != _kind(row.value):
                what = f"`{row.path}` was {_kind(row.value)} at capture, is {_kind(found)} now"
                yield Fault(what, remedy=AGAIN)
        inputs = {(slot.home, slot.way) for slot in self.step.states} if self.step.frames else set()
        for frame in self.step.frames:
            taken = {way[1:] for home, way in inputs if home == frame.home and way[0] == frame.key}
            for part in frame.other_parts(self._pieces(frame.home).get(frame.key, NOTHING), taken):
                yield Fault(
                    f"{frame.home.spelled(frame.key)}{part.spelled} is not what it was at capture",
                    why="tensors and numbers of the state are inputs; what holds them, and all else in it, "
                    "is part of the program",
                    remedy=AGAIN,
                )

    def _in_state(self, slot: StateSlot) -> Any:
        """What is there now; `NOTHING` where nothing is. Most of it is a tensor of a parameter's."""
        if slot.within or slot.member or slot.parameter not in self.tensors:
            return inside(self._pieces(slot.home), slot.way)
        tensor = self.tensors[slot.parameter]
        return self._state[tensor].get(slot.key, NOTHING) if tensor in self._state else NOTHING

    def _pieces(self, home: StateHome) -> dict[Any, Any]:
        return home.pieces(self.optimizer, self.tensors)

    def with_gradient(self) -> list[Fault]:
        """Gradients that are there, or are not, other than at capture."""
        held = [name for name in sorted(self.step.without_gradient) if self.tensors[name].grad is not None]
        rows = self.program.signature.outputs_of(OutputKind.GRADIENT) if self.program.step is not None else ()
        held += [row.path for row in rows if row.of in self._leaves and self._leaves[row.of].grad is not None]
        absent = [name for name in sorted(self.step.with_gradient) if self.tensors[name].grad is None]
        return [
            Fault(
                f"{', '.join(absent)} have no gradients, and had some when the step was captured",
                why="eager would leave None where the program leaves zeros",
                remedy="take one step before",
            )
        ] * bool(absent) + [
            Fault(
                f"{', '.join(held)} have gradients, and had none when the step was captured",
                why="eager would add to them; the program puts new ones in their place",
                remedy="call zero_grad() before the step, or capture a step that begins with zero_grad()",
            )
        ] * bool(held) or [*self._made_otherwise()]

    def _made_otherwise(self) -> Iterator[Fault]:
        """Gradients of before that are not made of other tensors as they were."""
        for name, parameter in self.step.gradients:
            part, gradient = self._rows[name].part, self.tensors[parameter].grad
            access = "" if part is None else part.access
            now = Part.of(f"{parameter}.grad", gradient, access) if is_composed(gradient) else None
            if part != now:
                yield Fault(
                    f"{parameter}.grad was {part or 'a plain tensor'} at capture, is {now} now", remedy=AGAIN
                )

    def begin(self) -> Callable[[], None]:
        """Make the state that the optimizer's first step would make; gives a way back."""
        made: list[tuple[dict[Any, Any], Any]] = []
        empty = [(StateHome(parameter), key, Initial(None)) for parameter, key in self.step.empty]
        absent = [slot for slot in self.step.states if self._in_states.get(slot.input, NOTHING) is NOTHING]
        begun = [(slot.home, slot.way[0], slot.initial) for slot in absent]
        for home, key, initial in (*begun, *empty):
            state = self._begun(home, made)
            if key not in state and initial is not None:
                state[key] = initial.made()
                made.append((state, key))
        for home, _ in self.step.touched:
            self._begun(home, made)
        for number in self.step.numbers:
            group = home_of(self.optimizer, number.group)
            if number.initial is not None and number.key not in group:
                group[number.key] = number.initial.value
                made.append((group, number.key))
        return partial(_unmake, made)

    def _begun(self, home: StateHome, made: list[tuple[dict[Any, Any], Any]]) -> dict[Any, Any]:
        """The state of a parameter, which the optimizer makes where there is none."""
        if home.owner not in self.tensors:
            return home.begun(self.optimizer, self.tensors)
        states, tensor = self._states(home), self.tensors[home.owner]
        if tensor not in states:
            made.append((states, tensor))
        return states[tensor]  # type: ignore[no-any-return]

    def values(self) -> dict[str, Any]:
        """Every input by its name."""
        rows = self.program.signature.inputs
        held = {row.name: found for row in rows if (found := self._tensor(row)) is not None}
        held |= dict(self._gradients_of_before())
        known = self._in_states
        held |= {
            slot.input: self._in_state(slot) if (now := known.get(slot.input, NOTHING)) is NOTHING else now
            for slot in self.step.states
        }
        held |= {slot.input: home_of(self.optimizer, slot.group)[slot.key] for slot in self.step.numbers}
        held |= {slot.input: slot.now(self.optimizer.param_groups) for slot in self.step.cycled}
        held |= {slot.input: slot.value for slot in self.step.counted}
        return held | self._leaves

    def _gradients_of_before(self) -> Iterator[tuple[str, Tensor]]:
        """The inputs that are gradients, or their parts, in order."""
        names: dict[str, list[str]] = {}
        for name, parameter in self.step.gradients:
            names.setdefault(parameter, []).append(name)
        for parameter, inputs in names.items():
            parts = [part for _, part in plain_parts(self.tensors[parameter].grad)]
            yield from zip(inputs, parts, strict=True)

    def _tensor(self, row: Input) -> Tensor | None:
        paths = (row.path, *row.aliases)
        known = (self.tensors[path] for path in paths if path in self.tensors)
        return next(known, self.program.state.get(row.name))

    # --- afterwards --------------------------------------------------------------------------------------

    def finished(
        self, values: Mapping[str, Any], results: Sequence[Any], own: Set[str], placed: InPlace | None
    ) -> Any:
        """Write what has changed, fill gradients, and give what was captured to be returned.

        Outputs that are `own` lie in memory that nothing else looks into; what was `placed` is there already.
        """
        rows = list(zip(self.program.signature.outputs, results, strict=True))
        found = {**values, **{row.node: value for row, value in rows if row.node is not None}}
        with torch.no_grad():
            there = frozenset() if placed is None else placed.placed
            new = in_own_memory([pair for pair in rows if pair[0].name not in there], values, own)
            written = [row for row, _ in rows if row.name in new and row.kind is OutputKind.MUTATION]
            write_all([values[of(row)] for row in written], [new[row.name] for row in written])
            found |= {str(row.node): values[of(row)] for row, _ in rows if row.name in there}
            found |= {str(row.node): values[of(row)] for row in written}
            if placed is not None:
                count_writes([values[name] for name in placed.written])
            self._advance({of(row): value for row, value in rows if row.kind is OutputKind.MUTATION})
            for name in self.step.cleared:
                self.tensors[name].grad = None
            same = {id(self.tensors[name]) for name in self.step.zeroed}
            gradients = [row for row, value in rows if row.kind is OutputKind.GRADIENT and value is not None]
            for tensor, gradient in self._arrived({of(row): new[row.name] for row in gradients}, values):
                self._fill(tensor, gradient, same)
        found |= {row.name: found[str(row.node)] for row, _ in rows if row.kind is OutputKind.EFFECT}
        if self.optimizer is not None:
            note_step(self.optimizer)
        for call in self.step.calls:
            call.done(found)
        for effect in self.step.effects:  # some put there what a schedule has left
            effect.done(found)
        result = self.program.result.filled(found)
        loss = self.program.signature.outputs_of(OutputKind.LOSS)
        return (found[str(loss[0].node)], result) if loss else result

    def _advance(self, values: Mapping[str, Any]) -> None:
        """Put new numbers where the optimizer keeps them."""
        numbers = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        for slot in self.step.states if numbers else ():
            if slot.input in numbers:
                put_inside(self._pieces(slot.home), slot.way, numbers[slot.input])
        for number in self.step.numbers if numbers else ():
            if number.input in numbers:
                home_of(self.optimizer, number.group)[number.key] = numbers[number.input]
        for counted in self.step.counted:
            if counted.input in numbers:
                counted.place.put(numbers[counted.input])

    def _arrived(
        self, gradients: dict[str, Tensor], values: Mapping[str, Any]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The gradient of each tensor; that of one which is made of others is made of theirs."""
        for whole in self.program.signature.wholes:
            if whole.gradient is not None:
                names = whole.parts[: whole.gradient.num_leaves]  # it may be made otherwise than the tensor
                parts = [gradients.pop(name, None) for name in names]
                yield self.tensors[whole.path], tree_unflatten(parts, whole.gradient)
        for name, gradient in gradients.items():
            yield values[name], gradient

    def _fill(self, tensor: Tensor, gradient: Tensor, kept: Set[int]) -> None:
        """`.grad` as eager leaves it: a step says itself what it holds, any other backward adds to it."""
        if tensor.grad is not None and id(tensor) in kept:
            tensor.grad.copy_(gradient)
        elif self.program.step is not None or tensor.grad is None:
            tensor.grad = gradient
        else:
            tensor.grad.add_(gradient)


def _is_as_it_was(row: Setting, now: object) -> bool:
    """What a rate began with may be absent: schedules note it, and optimizers do not read it."""
    if row.is_beginning and (now is NOTHING or isinstance(now, Tensor)):
        return True
    return type(now) is type(row.value) and bool(now == row.value)


def _kind(value: object) -> str:
    kinds = {float: "a number", int: "a number"}
    return "a tensor" if isinstance(value, Tensor) else kinds.get(type(value), f"a {type(value).__name__}")


def of(row: Output) -> str:
    """The input that a row is the new value, or the gradient, of."""
    return str(row.of)


def _unmake(made: Sequence[tuple[dict[Any, Any], Any]]) -> None:
    for held, key in reversed(made):
        del held[key]
