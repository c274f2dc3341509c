"""Hooks on modules, tensors and parameters: rows 72 to 79, without what they say about recompiling."""

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whence
from tests.checks import taken
from tests.upstream.checks import equal, faithful, hooks, trains_alike
from tests.upstream.modules import Block

X = torch.randn(3, 4)


def add_one(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A forward hook."""
    return output + 1


def double_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook."""
    return tuple(2 * value for value in args)


def test_row_72_forward_hook_of_a_child() -> None:
    """What a hook of a child computes is in the graph, in the child's call, and says that it is a hook."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    handle = model[0].register_forward_hook(add_one)
    program = faithful(model, X)
    trains_alike(program, model, X)
    [node] = program.select("0 :: aten.add.Tensor :: forward")
    origin = program.where(node)
    assert (origin.hook, [str(call) for call in origin.calls]) == ("add_one", ["0"])
    assert origin.quality is whence.Quality.EXACT
    assert origin.source is not None
    assert origin.source.line == add_one.__code__.co_firstlineno + 2
    assert "hook add_one" in str(origin)
    handle.remove()
    assert hooks(faithful(model, X)) == []


def test_row_73_hook_of_the_root() -> None:
    """A hook of the captured module itself is in the graph, too, and does not run twice."""
    model = Block()
    model.register_forward_pre_hook(double_input)
    model.register_forward_hook(add_one)
    program = faithful(model, X)
    trains_alike(program, model, X)
    assert hooks(program) == ["double_input", "add_one"]
    assert len(program.select("** :: aten.add.Tensor")) == 1


def test_row_74_hooks_of_built_in_modules_fire_once() -> None:
    """Hooks of torch's own modules fire once at capture, and their operations run in every run."""
    seen = SimpleQueue[str]()  # a list would be as before after the capture

    def note(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen.put(type(module).__name__)
        return output * 2

    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())
    for module in model:
        module.register_forward_hook(note)
    whence.capture(model, (X,), backward=True)
    assert taken(seen) == ["Linear", "LayerNorm", "GELU"]
    faithful(model, X)


def test_row_75_backward_hooks() -> None:
    """Full backward hooks and pre-hooks are part of the backward, and say so."""
    model = nn.Sequential(Block(), nn.Tanh(), nn.Linear(4, 4))

    def scaled(module: nn.Module, before: Any, after: Any) -> Any:
        return tuple(3 * gradient for gradient in before)

    def shifted(module: nn.Module, after: Any) -> Any:
        return tuple(gradient - 1 for gradient in after)

    model[1].register_full_backward_hook(scaled)
    model[2].register_full_backward_pre_hook(shifted)
    program = faithful(model, X)
    trains_alike(program, model, X)
    assert hooks(program) == ["shifted", "scaled"]
    [scaling] = [node for node in program.nodes() if (program.where(node).hook or "").endswith("scaled")]
    assert program.where(scaling).phase is whence.Phase.BACKWARD
    assert [str(call) for call in program.where(scaling).calls] == ["1"]
    [shifting] = [node for node in program.nodes() if (program.where(node).hook or "").endswith("shifted")]
    assert [str(call) for call in program.where(shifting).calls] == ["2"]


ORDER: list[str] = []


class Bound(nn.Module):
    """Registers its own methods as hooks of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_forward_hook(self.last, with_kwargs=True)
        self.linear.register_forward_hook(self.first, prepend=True)
        self.linear.register_forward_pre_hook(self.before, with_kwargs=True)
        self.linear.register_forward_hook(self.always, always_call=True)

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        ORDER.append("before")
        return (), {"input": kwargs["input"] * 2}

    def first(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        ORDER.append("first")
        return output + 1

    def last(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        ORDER.append("last")
        return output * kwargs["input"]

    def always(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        ORDER.append("always")
        return output - 3

    def forward(self, x: Tensor) -> Any:
        return self.linear(input=x)


@pytest.mark.filterwarnings("ignore:each run of the model changes ORDER")
def test_row_76_methods_keywords_and_order() -> None:
    """Bound methods, `prepend`, `with_kwargs` and `always_call`: every hook once, in eager's order; what they
    write down is given back."""
    ORDER.clear()
    model, names = Bound(), ["before", "first", "last", "always"]
    program = whence.capture(model, (X,), backward=True)
    assert ORDER == []
    assert hooks(program) == names
    assert program.where(program.select("** :: aten.sub.Tensor")[0]).hook == "Bound.always"
    faithful(model, X)


def test_row_77_hook_that_writes_outside() -> None:
    """What a pre-hook notes outside is undone, and not repeated by the program; the model is as before."""
    seen: list[str] = []

    def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(str(tuple((args[0] * 2).shape)))

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_pre_hook(note)
    program = whence.capture(model, (X,))
    with pytest.warns(UserWarning, match="each run of the model changes seen"):
        assert equal(program.module()(X), program.unflatten()(X))
    assert seen == []
    assert program.verify(model, (X,)).ok


def test_row_78_hook_registered_during_forward_and_kept() -> None:
    """A hook that forward puts on a tensor or a child, with its handle kept on self, is in the program."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.handles: list[Any] = []
            self.handle: Any = None

        def forward(self, x: Tensor) -> Any:
            if self.handle is None:
                self.handle = self.linear.register_forward_hook(add_one)
            x = self.linear(x)
            if x.requires_grad:
                self.handles.append(x.register_hook(tripled))
            return x

    def tripled(gradient: Tensor) -> Tensor:
        return gradient * 3

    model = Keeping()
    program = whence.capture(model, (X,), backward=True)
    assert hooks(program) == ["add_one", "tripled"]
    assert (model.handle, model.handles) == (None, [])
    assert not model.linear._forward_hooks
    assert program.verify(model, (X,)).ok


def test_row_79_hooks_of_state_dicts() -> None:
    """Hooks of state dicts do not run at capture, and still work on the model."""
    seen: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_state_dict_pre_hook(lambda *_: seen.append("save"))
    model.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    model.register_load_state_dict_pre_hook(lambda *_: seen.append("load"))
    model.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    program = whence.capture(model, (X,), backward=True)
    program.module().load_state_dict(program.unflatten().state_dict())
    assert seen == []
    assert program.verify(model, (X,)).ok
    model.load_state_dict(model.state_dict())
    assert seen == ["save", "saved", "load", "loaded"]


def test_hooks_for_all_modules() -> None:
    """Hooks registered for all modules are in the program, in eager's order; so are backward ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def halved(module: nn.Module, before: Any, after: Any) -> Any:
        return tuple(None if gradient is None else gradient / 2 for gradient in before)

    everywhere: Any = torch.nn.modules.module
    with (
        everywhere.register_module_forward_pre_hook(double_input),
        everywhere.register_module_forward_hook(add_one),
        everywhere.register_module_full_backward_hook(halved),
    ):
        program = whence.capture(model, (X.clone().requires_grad_(),), backward=True)
    assert hooks(program) == ["double_input", "add_one", "halved"]
    assert len(program.select("** :: aten.add.Tensor :: forward")) == 3


def test_hooks_for_all_modules_run_once() -> None:
    """What runs a program calls no module: hooks that are part of it run in it alone. A module of it would be
    called, so there is none while they are there."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    guarded = whence.capture(model, (X,)).guarded(model, on_violation="recapture")
    everywhere: Any = torch.nn.modules.module
    with (
        everywhere.register_module_forward_pre_hook(double_input),
        everywhere.register_module_forward_hook(add_one),
    ):
        expected = model(X)
        assert torch.equal(guarded(X), expected)
        program = whence.capture(model, (X,))
        assert program.verify(model, (X,)).ok
        assert torch.equal(program.bind(model)(X), expected)
        for make in (program.module, program.unflatten, lambda: program.unflatten(onto=model)):
            with pytest.raises(whence.UsageError, match="captured with hooks on all modules"):
                make()
    assert torch.equal(program.unflatten()(X), expected)


def test_tensor_hook_is_inferred() -> None:
    """A hook on an activation runs between autograd's nodes: its place is a deduction, and says so."""

    class Hooking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            x.register_hook(clamped)
            return x * x

    def clamped(gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)

    model = Hooking()
    program = faithful(model, X)
    [node] = program.select("** :: aten.clamp.default")
    origin = program.where(node)
    assert (origin.hook or "").endswith("clamped")
    assert origin.quality is whence.Quality.INFERRED
    assert [str(call) for call in origin.calls] == ["linear"]


def test_hook_on_the_result_is_inferred() -> None:
    """A hook on what the model returns runs before anything of the backward: it is no seed of the loss."""

    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            x = self.linear(x)
            x.register_hook(lambda gradient: gradient * 9)
            return x

    model = Returning()
    for backward in (True, lambda output: output.sum()):
        program = whence.capture(model, (X,), backward=backward)
        assert program.verify(model, (X,)).ok
        [node] = [node for node in program.nodes() if program.where(node).hook]
        assert program.where(node).quality is whence.Quality.INFERRED
        assert [str(call) for call in program.where(node).calls] == ["linear"]


def test_hook_between_sums() -> None:
    """A hook on a value that is used twice runs after the sum: sum and hook keep their own origins."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            x = self.first(x)
            x.register_hook(plus_one)
            return self.left(x) + self.right(x)

    def plus_one(gradient: Tensor) -> Tensor:
        return gradient + 1

    model = Twice()
    program = faithful(model, X)
    trains_alike(program, model, X)
    nodes = program.select("** :: aten.add.Tensor :: backward")
    assert [program.where(node).quality for node in nodes] == ["accumulated", "inferred"]
    assert [bool(program.where(node).hook) for node in nodes] == [False, True]


def test_decorated_and_callable_hooks_have_names() -> None:
    """A hook behind a decorator is called as the user wrote it; an object by its class."""

    class Object:
        def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            return output * 5

    @torch.enable_grad()
    def decorated(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output - 7

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(decorated)
    model[0].register_forward_hook(Object())
    assert hooks(faithful(model, X)) == ["decorated", "__call__"]


def test_modules_called_by_a_hook() -> None:
    """A module that a hook calls has its own call site, and its operations say which hook called it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def again(module: nn.Module, args: Any, output: Tensor) -> Any:
        return model[1](output)

    model[0].register_forward_hook(again)
    program = faithful(model, X)
    calls = [str(call.site) for call in program.calls]
    assert calls == ["", "0", "1", "1@1"]
    marked = {str(program.where(node).calls[0]) for node in program.nodes() if program.where(node).hook}
    assert marked == {"1"}


class OnNodes(nn.Module):
    """Puts hooks on nodes of autograd's graph, and on what autograd saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(doubled, halved):
            x = self.linear(x)
        left: Any = x.sin()
        right: Any = x.cos()
        left.grad_fn.register_prehook(before)
        right.grad_fn.register_hook(after)
        return left * right


def doubled(tensor: Tensor) -> Tensor:
    """Packs a tensor that is saved."""
    return tensor * 2


def halved(tensor: Tensor) -> Tensor:
    """Unpacks what was doubled."""
    return tensor / 2


def before(received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A hook before a node."""
    return (received[0] * 3,)


def after(produced: tuple[Tensor, ...], _received: Any) -> tuple[Tensor, ...]:
    """A hook after a node."""
    return (produced[0] * 7,)


def test_hooks_on_nodes_and_saved_tensors() -> None:
    """Hooks on autograd's nodes, and those that pack saved tensors, say so."""
    model = OnNodes()
    program = whence.capture(model, (X,), backward=True)
    assert set(hooks(program)) == {"doubled", "halved", "before", "after"}
    unpacked = [program.where(node) for node in program.select("** :: aten.div.Tensor :: backward")]
    assert [origin.forward for origin in unpacked] == ["addmm"]
    assert [str(call) for origin in unpacked for call in origin.calls] == ["linear"]
    assert program.verify(model, (X,)).ok


def test_hook_inside_a_checkpoint() -> None:
    """A hook of a checkpointed module runs again in the recomputation, and says so both times."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.linear.register_forward_hook(lambda module, args, output: output.sin())

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.linear, x, use_reentrant=False) * 2

    model = Checkpointed()
    program = whence.capture(model, (X,), backward=True)
    assert program.verify(model, (X,)).ok
    marked = [program.where(node) for node in program.nodes() if program.where(node).hook]
    assert [(origin.phase, origin.recomputed) for origin in marked] == [
        (whence.Phase.FORWARD, False),
        (whence.Phase.BACKWARD, True),
    ]


def test_hook_that_removes_itself() -> None:
    """A hook for the first call alone is no part of the next: refused, and still on the model."""
    model = nn.Sequential(nn.Linear(4, 4))

    def once(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        handle.remove()
        return output + 1

    handle = model[0].register_forward_hook(once)
    with pytest.raises(whence.LostState, match=r"changes 0\._forward_hooks while it runs"):
        whence.capture(model, (X,))
    assert len(model[0]._forward_hooks) == 1
    model(X)
    assert len(model[0]._forward_hooks) == 0
    assert whence.capture(model, (X,)).verify(model, (X,)).ok


def test_hook_of_the_loss_function() -> None:
    """A hook that the loss function puts on the result belongs to the call that made the result."""

    def loss(output: Tensor) -> Tensor:
        output.register_hook(lambda gradient: gradient * 5)
        return output.sum()

    model = nn.Sequential(nn.Linear(4, 4))
    program = whence.capture(model, (X,), backward=loss)
    assert program.verify(model, (X,)).ok
    [origin] = [program.where(node) for node in program.nodes() if program.where(node).hook]
    assert (origin.quality, [str(call) for call in origin.calls]) == ("inferred", ["0"])


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameter_hooks_are_refused(kind: str) -> None:
    """Hooks on parameters are refused for a backward: all of them, each with its name and line."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def clip(gradient: Tensor) -> None:
        return None

    def other(gradient: Tensor) -> None:
        return None

    register: Callable[[Tensor, Any], Any] = getattr(Tensor, kind)
    register(model[0].weight, clip)
    register(model[1].bias, other)
    with pytest.raises(whence.UnsupportedHook) as caught:
        whence.capture(model, (X,), backward=True)
    for path, hook in (("0.weight", clip), ("1.bias", other)):
        assert path in caught.value.what
        assert f"{hook.__qualname__} at {__file__}:{hook.__code__.co_firstlineno}" in caught.value.what
    assert whence.capture(model, (X,)).verify(model, (X,)).ok


@pytest.mark.parametrize("backward", [False, True, lambda output: output[1].sum()])
def test_hook_on_an_input_is_refused(backward: Any) -> None:
    """A hook that forward puts on what it is given acts on the gradients that others send there, too."""

    class Returning(nn.Module):
        def forward(self, x: Tensor) -> Any:
            x.register_hook(lambda gradient: gradient * 2)
            return x, x.sin()

    with pytest.raises(whence.errors.UnsupportedHook, match=r"is put on the input `x` \(args\[0\]\)"):
        whence.capture(Returning(), (X.clone().requires_grad_(),), backward=backward)
