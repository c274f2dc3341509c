"""Record what runs on this thread into an fx graph, on fake tensors.

This is PyTorch's make_fx machinery (`ProxyTorchDispatchMode` over `FakeTensorMode`) entered directly:
`make_fx` itself runs through `fx.Tracer.trace`, which patches `nn.Module` and flags for every thread.

The model's own tensors are not swapped for fake ones, but recognised where they reach an operation and
replaced there, below autograd: closures, hooks and ties work by themselves, and other threads see nothing.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    has_proxy_slot,
    track_tensor_tree,
)
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack

from whence._torch.autograd.switches import modes_found_again, switches, turned_inside
from whence._torch.fakes import DEVICE, FakeMaker, fake_of
from whence._torch.function_tracer import FunctionTracer, untold
from whence._torch.graphs import Appender, name_exactly
from whence._torch.higher_order.function_graphs import functions_traced
from whence._torch.lifetimes import Lifetimes
from whence._torch.observe.generators import without_default_generator
from whence._torch.observe.scripted import BEGIN_REGION, END_REGION, object_among, takes_objects
from whence._torch.operators.cudnn import by_cudnn, is_for_cudnn, keeps_dropout_state
from whence._torch.operators.remembered_results import Results
from whence._torch.operators.sampled_results import Samples
from whence._torch.operators.schemas import ASSERT, HigherOrderOperator
from whence._torch.operators.values_alone import without_vectors
from whence._torch.plain_values import PLAIN
from whence._torch.pytrees import tree_map_only
from whence._torch.record.adopted import Adopted, Inferred, fresh_like, fresh_pair_like
from whence._torch.record.annotations import note_function
from whence._torch.record.constant_answers import ASKING, constant_fold
from whence._torch.record.direct_recording import (
    ComposedMet,
    GraphTracer,
    NotPlain,
    is_plain,
    run_on_fakes,
    snapshot_of,
)
from whence._torch.record.function_mode import FunctionMode
from whence._torch.record.listener import RecordingListener
from whence._torch.record.symbolic_dispatch import kernels_for_symbols
from whence._torch.refusals import dropout_kept_by_cudnn, object_met, refuse_switched
from whence._torch.sizes.nodes import SizeNodes, Slots
from whence._torch.sizes.symbols import SYMBOLIC, environment_of, sized_like, spelled
from whence._torch.subclasses.wrapper_subclasses import is_composed
from whence._torch.tensors import PLAIN_TENSORS

__all__ = ["Recorder", "RecordingListener"]

_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_infers = torch.is_inference_mode_enabled
_proxy_of = operator.attrgetter("proxy")
STAND_IN = "whence_stand_in"
"""What nodes are called that stand in the recording for others, which replace them in the end."""


def _hold_on(*_values: object) -> None:
    """What a marker calls, if anybody ran it."""


class Recorder(ProxyTorchDispatchMode):
    """A recording in progress: a graph, and the fake tensor that stands for each real one.

    `listening` makes who is told of it, who may ask the recording. With `keeps_composites`, operators that
    are made of others are recorded whole. `functions` is who sees the user's functions begin.
    """

    supports_higher_order_operators = True
    function_mode = FunctionMode
    is_inside_composite = False
    is_told_of_views = False
    """Whether results that are views have to share memory: those that are remembered do not."""
    decider: Any = None

    def __init__(
        self,
        listening: Callable[["Recorder"], RecordingListener],
        fake_mode: FakeTensorMode,
        *,
        keeps_composites: bool = False,
        is_joint: bool = False,
        functions: FunctionTracer | None = None,
    ) -> None:
        super().__init__(GraphTracer(self._recorded), "fake")
        self.listener = listener = listening(self)
        self.fake_mode = fake_mode
        self.keeps_composites, self.is_joint = keeps_composites, is_joint
        self.functions = functions or FunctionTracer()
        self._fakes = FakeMaker(fake_mode)
        self.adopted = Adopted(fake_mode, self._fakes, self.tracer)
        self.environment = environment_of(fake_mode)
        self.sizes: SizeNodes | None = None
        self.inferred, self.lifetimes = Inferred(), Lifetimes()
        self._results = Results()
        self._samples = Samples(fake_mode)
        self.switches = switches()
        self.literals: dict[fx.Node, Tensor] = {}
        """What the model made of numbers while it ran, by placeholders."""
        if self.environment is not None:
            stated = partial(listener.model.stated, called=False)
            self.environment.listen(where=listener.model.reading, required=self._require, stated=stated)
            tracer: Any = self.tracer
            self.sizes = SizeNodes(self.environment, self._append_size, listener.user_of_sizes, tracer)
            tracer.symnode_tracker = Slots(self.sizes)

    def _recorded(self, node: fx.Node) -> None:
        self.listener.recorded(node)

    def _append_size(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = self.tracer.graph.create_node("call_function", target, args, kwargs)
        self.listener.size_recorded(node)
        return node

    @contextmanager
    def deciding(self, decider: Any) -> Iterator[None]:
        """Inside the block values of the example decide."""
        self.decider = decider
        sizes = self.environment
        try:
            with nullcontext() if sizes is None else sizes.listening(decide=decider.by_symbols):
                yield
        finally:
            self.decider = None

    def _require(self, condition: Any, otherwise: str | None) -> bool:
        """Append an assertion of what the model states of numbers that only a run knows; whether it could."""
        if self.sizes is None or not (sizes := self.sizes).knows(condition):
            return False
        args = (sizes.argument(condition), otherwise or self.listener.model.required(spelled(condition)))
        self._append_size(ASSERT, args, {}).meta["val"] = None
        return True

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What a torch function gives that is not recorded as one."""
        if not is_for_cudnn(func, args):
            return self.functions.told(func, *args, **kwargs)
        if keeps_dropout_state(args) and not self.is_inside_composite:
            raise dropout_kept_by_cudnn(self.listener.model.here())
        return self.functions.told(by_cudnn, func, *args)

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What Python computes of sizes is written down where an operation uses it."""
        return func(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch is to keep its compiler out of every dispatch; that costs as much as a node does."""
        return False

    @property
    def nested(self) -> nn.Module:
        """Holds the graphs of functions that operators run, by the names of the nodes that read them."""
        return self.tracer.root  # type: ignore[union-attr]

    @property
    def graph(self) -> fx.Graph:
        """The graph recorded so far."""
        return self.tracer.graph

    def placeholder(self, tensor: Tensor, name: str) -> fx.Node:
        """Give a fake `tensor` a placeholder."""
        node = self._named_placeholder(name)
        track_tensor_tree(tensor, fx.Proxy(node, self.tracer), constant=None, tracer=self.tracer)
        node.meta["val"] = tensor
        return node

    def _named_placeholder(self, name: str) -> fx.Node:
        node = self.tracer.graph.create_node("placeholder", name, name=name)
        name_exactly(node, name)
        return node

    def adopt(self, tensor: Tensor, name: str) -> fx.Node:
        """Let the real (or the caller's own fake) `tensor` be known by a placeholder from now on."""
        return self.adopt_all([(tensor, name)])[0]

    def adopt_all(self, named: Sequence[tuple[Tensor, str]]) -> list[fx.Node]:
        """Adopt many tensors, each under its name."""
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            return [
                self.placeholder(tensor, name)
                if isinstance(tensor, FakeTensor)
                else self._adopted_as(tensor, name)
                for tensor, name in named
            ]

    def _adopted_as(self, tensor: Tensor, name: str) -> fx.Node:
        node = self._named_placeholder(name)
        self.adopted.add(tensor, node)
        return node

    def real_of(self, node: fx.Node) -> Tensor | None:
        """The real tensor that a placeholder is for."""
        return self.adopted.real.get(node)

    def fake_input(self, tensor: Tensor, name: str) -> tuple[Tensor, fx.Node]:
        """A fake twin of a user input, a leaf of its own, with its placeholder."""
        leaf = tensor if tensor.is_leaf else tensor.detach().requires_grad_()
        twin: Tensor = leaf if isinstance(leaf, FakeTensor) else fake_of(self.fake_mode, leaf)
        self.inferred.take(twin, leaf)
        return twin, self.placeholder(twin, name)

    def sized_input(self, tensor: Tensor, name: str, sizes: Sequence[Any]) -> tuple[Tensor, fx.Node]:
        """A fake twin of a user input with these sizes, some of them symbols, and its placeholder."""
        twin = sized_like(self.fake_mode, tensor, sizes)
        self.inferred.take(twin, tensor)
        return twin, self.placeholder(twin, name)

    def constant_input(self, value: object, name: str) -> fx.Node:
        """A placeholder for a user input that is not a tensor."""
        node = self._named_placeholder(name)
        node.meta["val"] = value
        return node

    def tangent(self, output: Tensor, name: str) -> tuple[Tensor, fx.Node]:
        """A fake gradient for `output`, with its placeholder."""
        with disable_proxy_modes_tracing(), torch.no_grad():
            fake = torch.empty_like(self.stand_in(output))
        return fake, self.placeholder(fake, name)

    def fresh(self, likes: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Fake tensors that nobody knows, each like one of `likes`."""
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            return tuple([fresh_like(self._fakes, like) for like in likes])

    def _fresh_shown(self, likes: Sequence[Tensor]) -> list[tuple[Tensor, Any]]:
        """The same, each with what shows it in the graph."""
        with unset_fake_temporarily(), disable_proxy_modes_tracing():
            return [fresh_pair_like(self._fakes, like) for like in likes]

    def stand_for(
        self, arguments: tuple[fx.Node, ...], likes: Sequence[Tensor], shown: Sequence[Tensor] | None = None
    ) -> tuple[fx.Node, list[Tensor]]:
        """Append a node that stands for others, with fresh results that are like `likes`.

        What the graph shows as its values is `shown`, where that is given: it is nobody else's to change.
        """
        append, node = Appender(self.graph), self.marker(arguments)
        self.listener.recorded(node)
        made = self._fresh_shown(likes) if shown is None else zip(self.fresh(likes), shown, strict=True)
        fresh: list[Tensor] = []
        for position, (result, value) in enumerate(made):
            name, read = f"result{position}_{node.name}", (node, position)
            item = append("call_function", name, operator.getitem, read, {})
            self.track(result, item, value)
            self.listener.recorded(item, node)
            fresh.append(result)
        return node, fresh

    def marker(self, values: tuple[fx.Node, ...]) -> fx.Node:
        """Append a node that does nothing but hold on to values; the listener is not told."""
        return self.tracer.graph.create_node("call_function", _hold_on, values, {}, STAND_IN)

    def stand_in_placeholder(self, like: Tensor) -> tuple[fx.Node, Tensor]:
        """A placeholder that is no input of the program, for a fresh tensor."""
        (fresh,) = self.fresh([like])
        return self.placeholder(fresh, STAND_IN), fresh

    def calls_of_functions(self) -> Mapping[Any, int]:
        """How often each torch function has been called."""
        return self.tracer.torch_fn_counts

    def count_functions(self, more: Mapping[Any, int]) -> None:
        """Torch functions would have been called so often."""
        counts = self.tracer.torch_fn_counts
        for function, count in more.items():
            counts[function] = counts.get(function, 0) + count

    def node_of(self, tensor: Tensor) -> fx.Node | None:
        """The node whose value `tensor` is now, if the recording knows it."""
        adopted, key = self.adopted, id(tensor)
        known = adopted.stand_ins.get(key)
        if known is None and key in adopted.nodes:
            return adopted.nodes[key]
        proxy = get_proxy_slot(known if known is not None else tensor, self.tracer, None, _proxy_of)
        return None if proxy is None else proxy.node

    def holds_data_of(self, tensor: Tensor) -> bool:
        """Whether the model holds or made a tensor; an uninitialised parameter gets its data once."""
        if isinstance(tensor, FakeTensor):
            return self.node_of(tensor) is not None
        return isinstance(tensor, PLAIN_TENSORS) and not is_lazy(tensor)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for `tensor`, or the tensor itself."""
        known = self.adopted.stand_in(tensor)
        return tensor if known is None else known

    def forget(self) -> None:
        """Let go of every tensor: what is alive afterwards is held by somebody else."""
        self.adopted.forget()
        self.literals.clear()

    def results_alive(self) -> dict[fx.Node, Tensor]:
        """The operations whose results somebody but the graph's own metadata still holds, with these."""
        return dict(self.tracer.results_alive())  # type: ignore[union-attr]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record everything that runs on this thread inside the block."""
        symbols = kernels_for_symbols(self.environment is not None)
        with symbols, self.fake_mode, self.function_mode(self), self, modes_found_again():
            yield

    def watching_functions(self) -> AbstractContextManager[Any]:
        """Look at torch functions also where PyTorch has put that aside, as it does in a backward."""
        is_watching = any(isinstance(mode, FunctionMode) for mode in _get_current_function_mode_stack())
        return nullcontext() if is_watching else self.function_mode(self)

    def recognised(self, value: Any) -> Any:
        """`value` with every tensor the recording has a stand-in for replaced by it."""
        if isinstance(value, Tensor):
            return self._recognise(value)
        if not isinstance(value, (list, tuple)):
            return value
        return type(value)([self.recognised(item) for item in value])

    def _recognise(self, tensor: Tensor) -> Tensor:
        known = self.adopted.stand_in(tensor)
        if known is not None:
            return known
        if has_proxy_slot(tensor, self.tracer):
            return tensor
        if isinstance(tensor, FakeTensor) and self.keeps_composites:
            if self.is_inside_composite:
                return tensor
            raise self.listener.model.composite_opened()
        if is_composed(tensor):
            raise ComposedMet(tensor)
        if not isinstance(tensor, (FakeTensor, *PLAIN_TENSORS)):
            return tensor
        self.adopt(tensor, self.listener.met_tensor(tensor))
        return self.stand_in(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return untold(self._heard, func, types, args, kwargs)

    def _heard(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if _infers():
            return self.inferred.around(self._entered, func, types, args, kwargs)
        return self.inferred.noted(func, self._entered(func, types, args, kwargs))

    def _entered(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self._run_functions(func, args, kwargs or {})
        if func is BEGIN_REGION or func is END_REGION:
            return func(*args, **(kwargs or {}))
        if self.environment is None:
            return self._dispatched(func, types, args, kwargs)
        with self.environment.kernels():
            return self._dispatched(func, types, args, kwargs)

    def _run_functions(self, operator: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        """Record an operator that runs functions by its rule, with graphs that the listener makes."""
        rule: Any = self.listener.model.branches.rule_for(operator)
        rule = rule or operator.python_key_table.get(ProxyTorchDispatchMode)
        try:
            if rule is None:
                raise self.listener.model.branches.refused(operator, "PyTorch has no rule that records it")
            args, kwargs = tree_map_only(Tensor, self._recognise, (args, kwargs))
        except ComposedMet as met:
            raise self.listener.model.branches.composed(operator, *met.args) from met
        with functions_traced(self.listener.model.branches.traced, self.fake_mode):
            return self.functions.told(rule, self, *args, **kwargs)

    def _dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        kwargs = kwargs or {}
        refuse_switched(func, turned_inside(self.switches), (args, kwargs), self.listener.model.here)
        if func is _LIFT_FRESH:
            self._know_literal(args[0])
        else:
            try:
                args = without_vectors(func, self.tracer.torch_fn_metadata, self.recognised(args))
                kwargs = {key: self.recognised(value) for key, value in kwargs.items()}
            except ComposedMet as met:
                self.listener.model.composed_met(*met.args)
                return NotImplemented
        if takes_objects(func):
            args, kwargs = without_default_generator(args, kwargs)
            if (strange := object_among((*args, *kwargs.values()))) is not None:
                raise object_met(func, strange, self.listener.model.here())
        if self.environment is not None:
            self._results.follow(func, args, kwargs, self.node_of)
        if self.is_inside_composite:
            return self._result_of(func, args, kwargs)[0]
        try:
            is_asking = func in ASKING or self.decider is not None
            if is_asking and (known := constant_fold(self, func, args, kwargs)) is not None:
                return known
            if is_plain(func, args):
                with suppress(NotPlain):
                    return self._record_directly(func, args, kwargs)
            tell = untold if func.namespace == "aten" else self.functions.told  # fake kernels are the user's
            return tell(super().__torch_dispatch__, func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise self.listener.model.value_needed(func, args, self.tracer.torch_fn_metadata) from error

    def _record_directly(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on fake tensors and append its node: what PyTorch's mode does for the common case.

        Anything uncommon among the arguments (symbolic sizes, known constants, subclasses) goes the long way.
        """
        node_args = self.as_nodes(args)
        node_kwargs = {key: self.as_nodes(value) for key, value in kwargs.items()}
        result, shown = self._result_of(func, args, kwargs)
        name = func.overloadpacket.__name__
        node = self.graph.create_node("call_function", func, node_args, node_kwargs, name)
        note_function(self.tracer, node)
        if self.environment is not None and self.environment.pending_fresh_unbacked_symbols:
            self.listener.recorded(node)
            track_tensor_tree(result, fx.Proxy(node, self.tracer), constant=None, tracer=self.tracer)
            return result
        self.track(result, node, shown)
        self.listener.recorded(node)
        if not isinstance(result, Tensor):
            for position, part in enumerate(result):
                self.track_part(node, position, part)
        return result

    def track_part(self, node: fx.Node, position: int, part: Any) -> None:
        """Append a node for one of several results, if it is a tensor, or for a list of them and for each."""
        if not isinstance(part, Tensor | list):
            return
        item = self.tracer.graph.create_node("call_function", operator.getitem, (node, position), {})
        note_function(self.tracer, item)
        self.track(part, item)
        self.listener.recorded(item)
        for at, each in enumerate(part if isinstance(part, list) else ()):
            self.track_part(item, at, each)

    def _result_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """What an operator gives, and what stands for that in the graph where it is there already."""
        if self.environment is None or self.is_told_of_views:
            return run_on_fakes(func, args, kwargs, self.environment), None

        def run() -> Any:
            known = self._samples.result(func, args, kwargs)
            return run_on_fakes(func, args, kwargs, self.environment) if known is None else known

        return self._results.of(func, args, kwargs, run)

    def track(self, result: Any, node: fx.Node, shown: Any = None) -> None:
        """Let a result be known as the value of a node."""
        seen = snapshot_of(result) if shown is None else shown
        if not isinstance(result, Tensor):
            node.meta["val"] = tuple(seen)
            return
        node.meta["val"] = seen
        self.tracer.tensor_tracker[result] = _ProxyTensor(fx.Proxy(node, self.tracer), None)
        self.lifetimes.follow(result, node)

    def as_nodes(self, value: Any) -> Any:
        """Arguments of an operator as a node takes them; raises `NotPlain`."""
        kind = type(value)
        if kind is FakeTensor:
            slot = self.tracer.tensor_tracker.get(value)
            if slot is None or slot.constant is not None:
                raise NotPlain
            return slot.proxy.node
        if kind in PLAIN:
            return value
        if kind is list or kind is tuple:
            return kind([self.as_nodes(item) for item in value])
        if kind in SYMBOLIC and self.sizes is not None:
            return self.sizes.argument(value)
        raise NotPlain

    def _know_literal(self, literal: Tensor) -> None:
        """`torch.tensor([...])` makes a real tensor first: it becomes an input whose value `item()` knows."""
        if has_proxy_slot(literal, self.tracer):
            return
        node = self.adopt(literal, self.listener.met_tensor(literal))
        self.literals[node] = literal
        self.listener.made_of_numbers(node.name)
        track_tensor_tree(literal, fx.Proxy(node, self.tracer), constant=None, tracer=self.tracer)
        node.meta["val"] = self.stand_in(literal)
