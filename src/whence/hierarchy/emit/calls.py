"""Captured calls, ready to run: by their caller in the tree, or alone, by a person."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from types import CodeType, FunctionType
from typing import Any, Self

import torch
from torch import Tensor, fx, nn

from whence._torch.subclasses.fully_sharded import whole
from whence._torch.subclasses.wrapper_subclasses import carries_gradients
from whence._torch.tensors import autocast_state, without_autocast
from whence.errors import CallError
from whence.hierarchy.emit.differentiable import CapturedFunction, Differentiation, laid_out
from whence.hierarchy.emit.differentiated_state import ModuleTensors
from whence.hierarchy.emit.generated_call import GeneratedCall, carries_gradient, generated_call
from whence.hierarchy.emit.graphs import as_graph, interpreted
from whence.hierarchy.emit.inner_calls import ChildCall, child_call
from whence.hierarchy.emit.source import FunctionSource, write
from whence.hierarchy.emit.traced_calls import Alone, alone, on_proxies, plain_body, plain_call
from whence.hierarchy.plan.plan import ROOT_CALL, CallPlan, Half, Plan, Region
from whence.hierarchy.plan.planning import plan as plan_of
from whence.hierarchy.run.gradient_pieces import GradientPieces, pieces_of
from whence.hierarchy.run.interface import GradientInterface, Interface, interface_of
from whence.hierarchy.run.wrapper_subclasses import differentiable_leaves
from whence.hierarchy.swap.preserved import CallPlace
from whence.hierarchy.swap.refusal import Refusal
from whence.hierarchy.swap.state import (
    Replacing,
    Touched,
    newcomers,
    places,
    places_written,
    refuse_half,
    touched_of,
)
from whence.hierarchy.swap.unpreserved import refuse_lost
from whence.hierarchy.value_shapes import described_at
from whence.program.arguments.convention import refuse_overlap
from whence.program.arguments.fitting import Misfit, other_autocast, refuse_other_modes
from whence.program.program import FlatProgram
from whence.program.queries.failing import OF_OPERATIONS, refuse_failed
from whence.program.queries.memory_order import in_any_layout
from whence.program.queries.printing import marked
from whence.provenance import ModulePath
from whence.provenance.origin import GENERATED_FILE, GENERATED_LINES, GENERATED_NODES
from whence.schema import InputKind, Phase

Function = tuple[FunctionType, tuple[int, ...]]
"""The code of a body, and the numbers of the calls it makes."""
Runnable = tuple[FunctionType, tuple[ChildCall, ...]]
"""The code of a body, and the calls it makes."""


class _OfThisProcess:
    """What is the same for every copy of a tree in this process."""

    def __deepcopy__(self, _memo: object) -> Self:
        return self


@dataclass
class Compiler(_OfThisProcess):
    """Compiles the bodies of a plan when they are first needed, and draws their graphs.

    Equal calls share both; so do bodies that are equal as source share their code.
    """

    plan: Plan
    flat: bool = False
    codes: dict[str, CodeType] = field(default_factory=dict)
    functions: dict[tuple[Half, int], Function] = field(default_factory=dict)
    graphs: dict[Region, fx.Graph] = field(default_factory=dict)
    plain: dict[int, Function] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        """The program travels, with constants: other tensors are the tree's. Plan and code are made again."""
        program = self.plan.program
        rows = (row for row in program.signature.state if row.kind is InputKind.CONSTANT)
        held = {row.name: program.state[row.name] for row in rows if row.name in program.state}
        return _compiler_of, (program.with_changes(state=held, variants=()), self.flat)

    @cached_property
    def touched(self) -> dict[str, Touched]:
        """The state that preserved modules hold."""
        return touched_of(self.plan)

    @cached_property
    def gradient_pieces(self) -> GradientPieces:
        return pieces_of(self.plan)

    def function(self, half: Half, number: int) -> Runnable:
        """One half of a call, and the calls that its code makes."""
        first = self.plan.first[number]
        if (half, first) not in self.functions:
            self.functions[half, first] = self._compiled(half, first)
        function, calls = self.functions[half, first]
        return function, tuple(child_call(*way, half) for way in self._ways(calls, number))

    def plain_body(self, number: int) -> Callable[..., tuple[Any, ...]]:
        """The forward of a call as tracers read it."""
        first = self.plan.first[number]
        if first not in self.plain:
            self.plain[first] = self._written(write(self.plan, Phase.FORWARD, first, readable=True))
        function, calls = self.plain[first]
        return plain_body(function, [plain_call(*way) for way in self._ways(calls, number)])

    def _ways(self, calls: Sequence[int], caller: int) -> Iterator[tuple[ModulePath, bool, CallPlace]]:
        """The path of each called module, whether it begins at its caller, or else at the root; its place.

        `calls` are those that the first of equal callers makes.
        """
        plan, around = self.plan, self.plan.site(caller).path
        for call in calls:
            called = plan.numbering.moved(call, plan.first[caller], caller)
            path = plan.site(called).path
            inside = path.is_within(around)
            yield path.relative_to(around) if inside else path, inside, CallPlace(plan, called)

    def graph(self, phase: Phase, number: int) -> fx.Graph:
        first = self.plan.first[number]
        if (phase, first) not in self.graphs:
            self.graphs[phase, first] = as_graph(self.plan, phase, first)
        return self.graphs[phase, first]

    def _compiled(self, half: Half, number: int) -> Function:
        kept = self.gradient_pieces if half is Half.IN_PIECES else None
        return self._written(write(self.plan, half.phase, number, kept=kept))

    def _written(self, source: FunctionSource) -> Function:
        code = self.codes.get(source.text)
        if code is None:
            code = self.codes[source.text] = compile(source.text, GENERATED_FILE, "exec")
        names = {**source.names, GENERATED_LINES: source.lines, GENERATED_NODES: source.nodes}
        exec(code, names)
        return names["run"], source.calls


def _compiler_of(program: FlatProgram, flat: bool) -> Compiler:
    return Compiler(plan_of(program, flat=flat), flat)


def _call_of(compiler: Compiler, number: int) -> "CallBody":
    return CallBody(compiler.plan, number, compiler)


@dataclass(frozen=True)
class CallBody(_OfThisProcess):
    """One captured call of one module."""

    plan: Plan
    number: int
    compiler: Compiler
    _functions: dict[Half, Runnable] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        return f"<call {self.name or '(root)'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _call_of, (self.compiler, self.number)

    @property
    def name(self) -> str:
        """`layer`, `layer@1`, `layer@2`."""
        return self.plan.site(self.number).name

    @property
    def parameters(self) -> inspect.Signature | None:
        """The Python signature of the original."""
        program = self.plan.program
        row = program.calls.rows[self.plan.original(self.number)]
        return row.parameters if self.number else program.convention.parameters

    @property
    def is_recomputation(self) -> bool:
        """Whether it repeats a call in the backward, for a checkpoint."""
        return self.plan.original(self.number) != self.number

    @cached_property
    def call_plan(self) -> CallPlan:
        """What the call computes."""
        return self.plan.calls[self.number]

    @cached_property
    def interface(self) -> Interface | None:
        """How a person makes the call."""
        return interface_of(self.plan, self.number)

    @cached_property
    def held(self) -> ModuleTensors | None:
        """The tensors of the module that the call is differentiated with; None in a forward-only program."""
        gradients = None if self.interface is None else self.interface.gradients
        return None if gradients is None else ModuleTensors(self.plan, self.number, gradients)

    def graph(self, phase: Phase) -> fx.Graph | None:
        """The call's graph in a phase: that of the first call that equals it, whose values it names."""
        if Phase(phase) is Phase.BACKWARD and not self.plan.program.has_backward:
            return None
        return self.compiler.graph(Phase(phase), self.number)

    def function(self, half: Half) -> Runnable:
        """One half of the call, and the calls that its code makes."""
        if half not in self._functions:
            self._functions[half] = self.compiler.function(half, self.number)
        return self._functions[half]

    def run_forward(self, module: nn.Module, *values: Any) -> tuple[Any, ...]:
        """The forward on flat values; last comes what is kept, if anything."""
        function, calls = self.function(Half.FORWARD)
        return function(module, calls, *values)  # type: ignore[no-any-return]

    def run_backward(self, module: nn.Module, half: Half, *values: Any) -> tuple[Any, ...]:
        """The backward on what was kept, if anything, and flat values."""
        function, calls = self.function(half)
        return function(module, calls, *values)  # type: ignore[no-any-return]

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call was captured with such arguments."""
        interface = self.interface
        is_whole = interface is not None and not interface.hidden
        return is_whole and not interface.convention.faults(args, kwargs)  # type: ignore[union-attr]

    def differentiates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether arguments that fit have a gradient where they require one."""
        gradients, convention = self.alone.gradients, self.alone.convention
        if gradients is None or not torch.is_grad_enabled():
            return True
        leaves = self.alone.leaves
        known = {*gradients.terms, *(leaves[second] for _, second in convention.same)}
        pairs = zip(leaves, convention.flatten(args, kwargs), strict=True)
        return not gradients.refusal and all(name in known for name, leaf in pairs if carries_gradient(leaf))

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call as a person makes it; state that it changes is changed in place."""
        interface = self.alone
        flat = self._flattened(interface, args, kwargs)
        refuse_overlap(interface.convention, self._written, flat, self._beside(module))
        for position, wanted in self._turned:
            flat[position].requires_grad_(wanted)
        state = autocast_state()
        if state != self.plan.program.circumstances.autocast:
            raise other_autocast(self.plan.program.circumstances.autocast, state)
        refuse_other_modes(self.plan.program.circumstances.modes)
        with without_autocast(state) if state else nullcontext():
            leaves = self._differentiable(interface, flat, (args, kwargs))
            try:
                replacing = self._replacing(module)
                body = partial(self._body, replacing, interface.convention.bound(flat))
                result = self.generated.run(body, module, flat, leaves, self._took(module, replacing))
                return interface.convention.handed_back(args, kwargs, result, interface.loss is not None)
            except OF_OPERATIONS as error:
                if isinstance(error, AttributeError):
                    refuse_lost(self.plan, self.number, module)
                refuse_failed(self.plan.program, error)
                raise

    def readable_body(self) -> Callable[..., tuple[Any, ...]]:
        """The forward on the module and flat values, for tracers to read."""
        return self.compiler.plain_body(self.number)

    def readable_call(self, count: int, names: tuple[str, ...]) -> Alone:
        """The call with so many positional arguments and such keywords, for tracers to read."""
        return alone(self.alone, self, (count, names))

    def interpreted(self, module: nn.Module) -> fx.Graph:
        """What it computes, as a graph that `torch.fx.Interpreter` runs on its module."""
        return interpreted(self, module)

    def run_on_proxies(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the call on what `torch.fx` puts in the place of arguments."""
        return on_proxies(self, module, (args, kwargs))

    def _flattened(self, interface: Interface, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call; an error about some of them shows them in the program."""
        try:
            return interface.convention.flatten(args, kwargs)
        except CallError as error:
            rows = ((interface.leaves[at], row) for row in error.misfits for at in row.positions[:1])
            notes = {name: [row.words] for name, row in rows if name is not None and row.kind is Misfit.VALUE}
            error.shown = marked(self.plan.program.graph, notes, around=0)
            raise

    def _differentiable(self, interface: Interface, flat: list[Any], arguments: Any) -> list[Any]:
        if interface.convention.is_flat(*arguments):
            return flat
        return differentiable_leaves(flat, arguments, interface.leaves, self.plan.program.signature.wholes)

    @cached_property
    def _written(self) -> tuple[int, ...]:
        return tuple(target for _, target in self.alone.writes if isinstance(target, int))

    def _beside(self, module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
        """State of the module where anything is written, and whether that is."""
        written = {str(target) for _, target in self.alone.writes if not isinstance(target, int)}
        for name, held in (
            chain(module.named_parameters(), module.named_buffers()) if self.alone.writes else ()
        ):
            yield name, held, name in written

    @cached_property
    def _turned(self) -> list[tuple[int, bool]]:
        """The arguments that the model lets require gradients, or no more, and leaves so."""
        rows = zip(self.alone.leaves, self.alone.convention.leaves, strict=True)
        values = [(name and self.plan.nodes[name].meta["val"], given) for name, given in rows]
        return [
            (position, value.requires_grad)
            for position, (value, given) in enumerate(values)
            if isinstance(value, Tensor) and value.requires_grad != given.requires_grad
        ]

    @cached_property
    def generated(self) -> GeneratedCall:
        """What is done around the body when a person makes the call."""
        return generated_call(self.alone, self)

    @cached_property
    def in_any_layout(self) -> frozenset[str]:
        """The inputs that are taken as they lie, by name."""
        program = self.plan.program
        return in_any_layout(program) if self.number in (0, program.calls.entry) else frozenset()

    def _laid_out(self, values: Sequence[Any], sizes: Mapping[str, int]) -> list[Any]:
        """Inputs in the memory layout of the capture, where operations rely on it."""
        nodes, names = self.plan.nodes, self.call_plan.forward.inputs
        return [
            laid_out(value, described_at(nodes[name].meta["val"], sizes))
            if isinstance(value, Tensor) and name not in self.in_any_layout
            else value
            for name, value in zip(names, values, strict=True)
        ]

    @property
    def alone(self) -> Interface:
        """How a person makes the call; raises `CallError` where it cannot be made alone."""
        interface = self.interface
        if interface is None or interface.hidden:
            site = self.plan.site(self.number)
            hidden = (
                ", ".join(interface.hidden) if interface else "arguments that are not tensors or constants"
            )
            why = f"it needs {hidden}, computed outside it and not among its arguments"
            if interface is None and not self.call_plan.forward.steps:
                why = "what it computes is part of its caller's graph, in a branch or a loop"
            raise CallError(f"{site} cannot be called alone", why=why, remedy="call the module around it")
        return interface

    def _body(self, replacing: Replacing, sizes: Mapping[str, int], module: nn.Module, *values: Any) -> Any:
        """The body on what a person gave, differentiably."""
        outputs = self._outputs(self._laid_out(values, sizes), module, replacing)
        outputs |= self._refused({name: outputs[name].detach().requires_grad_() for name in self._own_leaves})
        return [outputs[name] for name in self.call_plan.forward.outputs]

    def _outputs(self, inputs: Sequence[Any], module: nn.Module, replacing: Replacing) -> dict[str, Any]:
        interface, names, held = self.alone, self.call_plan.forward.outputs, self.held
        if held is None or not self.call_plan.forward.steps:  # it hands on what it was given
            outputs = dict(zip(names, self.run_forward(module, *inputs), strict=True))
            return self._refused(outputs, chain(inputs, module.parameters()))
        gradients, parameters = held.gradients, held.parameters(module, replacing)
        held.refuse_thawed(module, interface, inputs, replacing)
        new, own, tied = held.of_newcomers(parameters, replacing)
        if not torch.is_grad_enabled() or not any(map(carries_gradient, (*parameters, *inputs, *new))):
            return dict(zip(names, self.run_forward(module, *inputs), strict=False))
        inside = self.number != ROOT_CALL and bool(self.plan.program.calls.preserved)  # perhaps of a newcomer
        half = Half.IN_PIECES if inside or replacing.modules else Half.BACKWARD
        watched = tuple(held.watched(module, parameters))
        run = Differentiation(self, module, self.call_plan, gradients, watched, half, own, tied)
        taken = run.taken((*map(whole, parameters), *inputs))
        outputs = dict(zip(names, CapturedFunction.apply(run, *taken, *run.new), strict=True))
        return self._unreached_refused(interface, gradients, outputs)

    @cached_property
    def _own_leaves(self) -> tuple[str, ...]:
        """Results that require gradients and lead to no input: the model made leaves of them."""
        if self.plan.program.has_backward or self.number != ROOT_CALL:
            return ()
        results = [self.plan.nodes[name] for name in self.alone.result.names]
        made = [node for node in results if node.op == "call_function"]
        return tuple(
            node.name for node in made if isinstance(x := node.meta["val"], Tensor) and x.requires_grad
        )

    @cached_property
    def _places(self) -> tuple[tuple[int, ModulePath], ...]:
        return tuple(places(self.plan, self.number))

    def _replacing(self, module: nn.Module) -> Replacing:
        """What took captured modules' places; raises `CallError` where the graph cannot go on with it."""
        if not self.plan.program.calls.preserved:
            return Replacing(self.plan, {}, {}, module)
        refuse_half(self.plan, self.number, module)
        found = newcomers(self.plan, self._places, module, self.plan.site(self.number).path)
        if not found:
            return Replacing(self.plan, {}, {}, module)
        replacing = Replacing(self.plan, self.compiler.touched, found, module)
        trains = self.plan.program.has_backward and torch.is_grad_enabled()
        replacing.refuse(self.number, trains=trains)
        return replacing

    @cached_property
    def places_written(self) -> tuple[tuple[int, ModulePath], ...]:
        """The calls of modules that hold state which the call writes, with their paths."""
        targets = (target for _, target in self.alone.writes if not isinstance(target, int))
        return tuple(places_written(self.plan, self.number, targets))

    def _took(self, module: nn.Module, replacing: Replacing) -> Callable[[tuple[str, ...]], bool] | None:
        """Which state belongs to a module in another's place: that has written it, preserved or not."""
        around = self.plan.site(self.number).path
        writing = newcomers(self.plan, self.places_written, module, around)
        return replace(replacing, modules={**writing, **replacing.modules}).took_within(around)

    def _unreached_refused(
        self, interface: Interface, gradients: GradientInterface, outputs: dict[str, Any]
    ) -> dict[str, Any]:
        """Results that carried a gradient in eager, and get none in the captured backward, refuse one."""
        reached = {name for name, _ in gradients.tangents}
        known = self.plan.program.facts.differentiable
        unreached = [
            name
            for name in interface.result.names
            if name in outputs and name in known and name not in reached
        ]
        is_loss = interface.loss is not None
        if not unreached or (is_loss and torch.compiler.is_compiling()):  # another capture reads it as it is
            return outputs
        reason = f"the captured program used no gradient of {', '.join(unreached)}"
        tensors = [outputs[name].detach().requires_grad_() for name in unreached]
        return outputs | dict(zip(unreached, Refusal.apply(reason, *tensors), strict=True))

    def _refused(self, outputs: dict[str, Any], given: Iterable[Any] = ()) -> dict[str, Any]:
        """Outputs of a forward-only program that autograd must not differentiate raise when it tries.

        Where something `given` requires a gradient, one that carries none may owe it to what is not captured.
        """
        opaque = self.plan.program.circumstances.opaque
        if not opaque:
            return outputs
        carrying = {name: value for name, value in outputs.items() if carries_gradient(value)}
        if torch.is_grad_enabled() and any(map(carries_gradient, given)):
            floats = [
                name
                for name, value in outputs.items()
                if isinstance(value, Tensor) and carries_gradients(value)
            ]
            carrying = {name: outputs[name].detach().requires_grad_() for name in floats} | carrying
        reason = f"it ran {', '.join(opaque)}, whose part in the backward was not captured"
        refusing = Refusal.apply(reason, *carrying.values()) if carrying else ()
        return outputs | dict(zip(carrying, refusing, strict=True))

    @cached_property
    def needs(self) -> dict[str, frozenset[str]]:
        """For every gradient, the incoming gradients it is computed from."""
        interface = self.interface
        if interface is None or interface.gradients is None:
            return {}
        needs = {name: frozenset({name}) for _, name in interface.gradients.tangents}
        for node in self.plan.nodes.values():
            if node.name in self.plan.regions and node.name not in needs:
                sources = [needs[s.name] for s in node.all_input_nodes if s.name in needs]
                if sources:
                    needs[node.name] = frozenset().union(*sources)
        return needs
