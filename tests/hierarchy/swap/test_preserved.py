"""Modules that keep the original's calling convention in the tree, and others in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch import Tensor, nn

import whence

WIDTH = 4


class Structured(nn.Module):
    """Takes a nested tuple and dict, a constant, an argument it does not read, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, pair: tuple[Tensor, dict[str, Tensor]], unused: Tensor, *, scale: int = 1, mask: Any = None
    ) -> dict[str, Any]:
        first, named = pair
        return {"sum": self.linear(first) * scale + named["y"], "pair": (first.sin(), None), "n": scale}


class Around(nn.Module):
    """Calls a structured module, and goes on with what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Structured()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner((x, {"y": x.cos()}), x.exp(), scale=3)
        return self.head(out["sum"]).relu() + out["pair"][0]


class Repeated(nn.Module):
    """Calls one module three times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x) + x) * self.block(x)


class Counting(nn.Module):
    """Changes a buffer in every call."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.count


class Counted(nn.Module):
    """Calls a counting module twice and reads its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.inner(x) + self.inner(x)
        return total + self.inner.count


X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


def newcomer(model: nn.Module, path: str) -> nn.Module:
    """A copy of a submodule with other weights."""
    torch.manual_seed(1)
    copied = deepcopy(model.get_submodule(path))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return copied


def trained(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The loss, the gradient of the input, and those of the parameters."""
    model.zero_grad()
    given = x.clone().requires_grad_()
    result = model(given)
    loss = result if result.ndim == 0 else (result.sin() * result).sum()
    loss.backward()
    return [loss.detach(), given.grad, *(held.grad for held in model.parameters())]


def same(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    """Whether all are the same bits."""
    return len(one) == len(other) and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def check_swap(make: Callable[[], nn.Module], path: str, backward: Any) -> None:
    """The tree with another module in it does what the eager model with that module does."""
    torch.manual_seed(0)
    model = make()
    example = X.clone().requires_grad_(bool(backward))
    tree = whence.capture(model, (example,), backward=backward, preserve_calls=path).unflatten(copy=True)
    new = newcomer(model, path)
    eager = deepcopy(model)
    eager.set_submodule(path, deepcopy(new))
    tree.set_submodule(path, new)
    with torch.no_grad():
        assert torch.equal(tree(X), eager(X))
    assert same(trained(tree, X), trained(eager, X))
    assert same(trained(tree, X), trained(eager, X))
    for (name, held), (other, expected) in zip(
        tree.state_dict().items(), eager.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(held, expected)


@pytest.mark.parametrize("backward", [False, True])
def test_nested_arguments(backward: bool) -> None:
    """Rows 123-126: nested tuple, dict, keyword, constant, None and unused arguments; dict out; swapped."""
    check_swap(Around, "inner", backward)


def test_called_alone() -> None:
    """Rows 123-125: a preserved module takes the original's arguments and returns what it returned."""
    model = Around()
    inner: Any = whence.capture(model, (X,), preserve_calls=["inner"]).unflatten().get_submodule("inner")
    arguments = ((X, {"y": X.cos()}), X.exp())
    given, expected = inner(*arguments, scale=3), model.inner(*arguments, scale=3)
    assert torch.equal(given["sum"], expected["sum"])
    assert torch.equal(given["pair"][0], expected["pair"][0])
    assert given["pair"][1] is None
    assert given["n"] == 3


@pytest.mark.parametrize("backward", [False, True])
def test_inner_leaf(backward: bool) -> None:
    """Row 127: a leaf inside a preserved module."""
    check_swap(Around, "inner.linear", backward)


@pytest.mark.parametrize("backward", [False, True])
def test_all_calls_are_replaced(backward: bool) -> None:
    """Row 134 and defect 18: one set_submodule replaces all calls."""
    check_swap(Repeated, "block", backward)


def test_state_dict_is_whole() -> None:
    """Defect 1: a preserved module called several times keeps all its state."""
    model = Repeated()
    tree = whence.capture(model, (X,), preserve_calls=["block"]).unflatten()
    assert list(tree.state_dict()) == list(model.state_dict())


def test_buffer_changed_in_each_call() -> None:
    """Rows 98, 99: a buffer updated by each of several calls and read outside; the module swapped."""
    check_swap(Counted, "inner", False)


class Wrapped(nn.Module):
    """A module called without gradients, one that is a no-op, and a trainable head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Identity()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = self.inner(x)
        return self.head(self.idle(x) + frozen)


@pytest.mark.parametrize("backward", [False, True])
def test_inside_no_grad(backward: bool) -> None:
    """Defect 9: a preserved module inside no_grad is replaced, and records no gradients."""
    check_swap(Wrapped, "inner", backward)


def test_module_without_operations() -> None:
    """Defect 7: a preserved module without operations is called alone; what would be lost is refused."""
    tree: Any = whence.capture(Wrapped(), (X,), preserve_calls=["idle"]).unflatten()
    expected = tree(X)
    assert torch.equal(tree.idle(X), X)
    tree.idle = nn.Dropout(0.0)
    assert torch.equal(tree(X), expected)
    tree.idle = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(whence.CallError, match="Linear in the place of idle does not fit: its result is new"):
        tree(X)


class Layers(nn.Module):
    """Hands a buffer of its own to each layer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.arange(float(WIDTH)))
        self.layers = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.scale.expand(x.shape[0], WIDTH)) + x
        return x


@pytest.mark.parametrize("backward", [False, True])
def test_buffer_of_the_root_as_argument(backward: bool) -> None:
    """Rows 130 and 169: a buffer of the root is an argument of each layer; a nested name."""
    check_swap(Layers, "layers.1", backward)


class Writing(nn.Module):
    """Writes its argument in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        return self.linear(x)


class Written(nn.Module):
    """Reads what the inner module wrote into the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Writing()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x


def test_argument_written_by_the_newcomer() -> None:
    """Row 100: an input that a child writes is read by the parent, after the child was replaced, too."""
    model = Written()
    tree = whence.capture(model, (X.clone(),), preserve_calls=["inner"]).unflatten(copy=True)
    new = newcomer(model, "inner")
    model.set_submodule("inner", new)
    tree.set_submodule("inner", new)
    given, expected = X.clone(), X.clone()
    assert torch.equal(tree(given), model(expected))
    assert torch.equal(given, expected)


class Branching(nn.Module):
    """Calls a module with and without an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Optional()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.inner(x, x.sin()) + self.inner(x, None)


class Optional(nn.Module):
    """Does something else without its second argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.linear(x) if other is None else self.linear(x * other)


@pytest.mark.parametrize("backward", [False, True])
def test_specialised_calls(backward: bool) -> None:
    """Row 133: a preserved module called three times with two specialisations."""
    check_swap(Branching, "inner", backward)
    model = Branching()
    inner: Any = whence.capture(model, (X,), preserve_calls=["inner"]).unflatten().get_submodule("inner")
    assert torch.equal(inner(X, X.sin()), model.inner(X, X.sin()))
    assert torch.equal(inner(X), model.inner(X))


def test_hook_fires_for_every_call() -> None:
    """Defect 14: a hook on a module that is called three times fires three times, on the newcomer, too."""
    model, seen = Repeated(), list[int]()
    tree = whence.capture(model, (X,), preserve_calls=["block"]).unflatten()
    for module in (tree.get_submodule("block"), newcomer(model, "block")):
        tree.set_submodule("block", module)
        seen.clear()
        module.register_forward_hook(lambda module, args, result: seen.append(1))
        tree(X)
        assert len(seen) == 3


def test_sizes_that_vary() -> None:
    """Rows 128 and 170: with sizes left open, the newcomer takes other sizes than those of the capture."""
    model = Around()
    shapes = ({0: torch.export.Dim("batch", min=2)},)
    tree = whence.capture(model, (X,), dynamic_shapes=shapes, preserve_calls=["inner"]).unflatten(copy=True)
    new = newcomer(model, "inner")
    model.set_submodule("inner", new)
    tree.set_submodule("inner", new)
    x = torch.randn(7, WIDTH)
    assert torch.equal(tree(x), model(x))


class Wide(nn.Module):
    """Returns another shape than the structured module, under the same names."""

    def forward(self, pair: Any, unused: Tensor, *, scale: int = 1, mask: Any = None) -> dict[str, Any]:
        return {"sum": unused.double(), "pair": (unused.sum(), None), "n": scale + 1}


def test_misfit_in_words() -> None:
    """What differs in the newcomer's result is said in words, all at once."""
    tree = whence.capture(Around(), (X,), preserve_calls=["inner"]).unflatten()
    tree.set_submodule("inner", Wide())
    with pytest.raises(whence.CallError) as raised:
        tree(X)
    told = str(raised.value)
    assert "Wide in the place of inner does not fit" in told
    for part in ("f64[3, 4], and was f32[3, 4]", "f32[], and was f32[3, 4]", "is 4, and was 3"):
        assert part in told
    tree.set_submodule("inner", nn.Flatten())
    with pytest.raises(TypeError, match="unexpected keyword"):
        tree(X)


def test_other_structure_is_refused() -> None:
    """A newcomer that returns another structure is refused."""
    tree = whence.capture(Repeated(), (X,), preserve_calls=["block"]).unflatten()
    tree.set_submodule("block", nn.LSTM(WIDTH, WIDTH))
    with pytest.raises(whence.CallError, match="LSTM in the place of block does not fit: it returned"):
        tree(X)


def test_not_preserved() -> None:
    """A module of a joint tree that was not preserved cannot be replaced, and the error says how it can."""
    tree = whence.capture(Repeated(), (X,), backward=True).unflatten()
    tree.set_submodule("block", nn.Identity())
    with pytest.raises(whence.CallError, match="capture with preserve_calls"):
        tree(X)


def test_pattern_that_fits_nothing() -> None:
    """A pattern that fits no called module names what there is."""
    with pytest.raises(whence.SelectionError, match=r"no module that is called fits 'blok'[\s\S]*block"):
        whence.capture(Repeated(), (X,), preserve_calls=["block", "blok"])
    with pytest.raises(whence.UsageError, match="strict"):
        whence.capture(Repeated(), (X,), backward=True, strict=True, preserve_calls=["block"])


def test_module_of_another_tree() -> None:
    """A module of another tree is a newcomer like any other, and not taken for the original."""
    model, other = Repeated(), Repeated()
    tree = whence.capture(model, (X,), preserve_calls=["block"]).unflatten(copy=True)
    tree.set_submodule("block", whence.capture(other, (X,)).unflatten().get_submodule("block"))
    model.block = other.block
    assert torch.equal(tree(X), model(X))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).eval()


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=32, n_embd=8, n_layer=2, n_head=2, n_positions=16)
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "pattern", "path"),
    [
        (llama, "model.layers.*.mlp", "model.layers.1.mlp"),
        (llama, "model.layers.*.self_attn", "model.layers.0.self_attn"),
        (gpt2, "transformer.h.*.mlp", "transformer.h.0.mlp"),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_transformers(make: Callable[[], nn.Module], pattern: str, path: str, backward: bool) -> None:
    """Rows 123, 169 on real models: the eager module in the tree equals eager bit for bit, trained too."""
    torch.manual_seed(0)
    model, tokens = make(), torch.randint(0, 32, (2, 5))
    arguments = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    loss: Any = (lambda out: out.loss) if backward else False
    tree = whence.capture(model, (), arguments, backward=loss, preserve_calls=[pattern]).unflatten(copy=True)
    for other in (deepcopy(model.get_submodule(path)), newcomer(model, path)):
        tree.set_submodule(path, other)
        eager = deepcopy(model)
        eager.set_submodule(path, deepcopy(other))
        expected, given = eager(**arguments), tree(**arguments)
        given = given[1] if backward else given
        assert torch.equal(given.logits, expected.logits)
        tree.zero_grad()
        (tree(**arguments)[0] if backward else given.loss).backward()
        expected.loss.backward()
        pairs = zip(tree.named_parameters(), eager.named_parameters(), strict=True)
        differing = [name for (name, one), (_, two) in pairs if not same([one.grad], [two.grad])]
        assert differing == []


def test_exported_program() -> None:
    """Row 169: what torch.export preserved can be replaced in our tree of the exported program, too."""
    model = Around()
    exported = torch.export.export(model, (X,), preserve_module_call_signature=("inner", "head"))
    tree = whence.unflatten(exported)
    for path in ("inner", "head"):
        new = newcomer(model, path)
        model.set_submodule(path, deepcopy(new))
        tree.set_submodule(path, new)
    assert same(trained(tree, X), trained(model, X))


def test_trainable_newcomer_in_a_frozen_model() -> None:
    """Where a gradient can flow to the input, a trainable module in a frozen model trains, retained, too."""
    model = Around().requires_grad_(False)
    example = X.clone().requires_grad_()
    tree = whence.capture(model, (example,), backward=True, preserve_calls=["inner"]).unflatten(copy=True)
    new = newcomer(model, "inner").requires_grad_()
    eager = deepcopy(model)
    eager.set_submodule("inner", deepcopy(new))
    tree.set_submodule("inner", new)
    found = []
    for one in (tree, eager):
        loss = one(X.clone().requires_grad_()).sum()
        parameters = [held for held in one.parameters() if held.requires_grad]
        found.append([*torch.autograd.grad(loss, parameters, retain_graph=True)])
        found.append([*torch.autograd.grad(loss, parameters)])
    assert same(found[0], found[2])
    assert same(found[1], found[3])


def test_copied_after_the_swap() -> None:
    """A tree with a newcomer is copied with it."""
    model = Around()
    tree = whence.capture(model, (X,), preserve_calls=["inner"]).unflatten()
    tree.set_submodule("inner", newcomer(model, "inner"))
    assert torch.equal(deepcopy(tree)(X), tree(X))


class Tied(nn.Module):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


@pytest.mark.parametrize("path", ["first", "second"])
@pytest.mark.parametrize("backward", [False, True])
def test_tied_weight(path: str, backward: bool) -> None:
    """A module with a tied weight is replaced; the other keeps the weight, and its gradient."""
    check_swap(Tied, path, backward)


class Checkpointed(nn.Module):
    """Runs a module under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def test_checkpoint() -> None:
    """A checkpointed module is replaced; training one in a joint tree that is run again inside is refused."""
    check_swap(Checkpointed, "inner", False)
    check_swap(Checkpointed, "inner.0", False)
    check_swap(Checkpointed, "inner", True)
    model = Checkpointed()
    example = X.clone().requires_grad_()
    tree = whence.capture(model, (example,), backward=True, preserve_calls="inner.0").unflatten(copy=True)
    tree.set_submodule("inner.0", newcomer(model, "inner.0"))
    with pytest.raises(whence.CallError, match="checkpoint computes the original again"):
        tree(example)


class ThroughAView(nn.Module):
    """Writes a tensor through a view, and hands it to a module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 1.5
        hidden[:, 1:].mul_(0.5)
        return self.inner(hidden) * hidden


def test_argument_written_through_a_view() -> None:
    """The newcomer gets the tensor as it was written; in a joint tree that is refused by name."""
    check_swap(ThroughAView, "inner", False)
    model, example = ThroughAView(), X.clone().requires_grad_()
    tree = whence.capture(model, (example,), backward=True, preserve_calls="inner").unflatten(copy=True)
    tree.set_submodule("inner", newcomer(model, "inner"))
    with pytest.raises(whence.CallError, match="written through a view"):
        tree(example)


class Normed(nn.Module):
    """Normalises over the batch in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


@pytest.mark.parametrize("backward", [False, True])
def test_batch_norm(backward: bool) -> None:
    """The newcomer changes its own statistics, and the captured graph does not."""
    check_swap(Normed, "norm", backward)


def test_inside_autocast() -> None:
    """The newcomer runs under the autocast of the capture."""
    model = Normed().eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tree = whence.capture(model, (X,), preserve_calls=["head"]).unflatten(copy=True)
        new = newcomer(model, "head")
        tree.set_submodule("head", new)
        model.set_submodule("head", new)
        assert torch.equal(tree(X), model(X))


def test_captured_again_after_the_swap() -> None:
    """A tree with a newcomer is a model: it is captured again."""
    model = Around()
    tree = whence.capture(model, (X,), preserve_calls=["inner"]).unflatten(copy=True)
    new = newcomer(model, "inner")
    tree.set_submodule("inner", new)
    model.set_submodule("inner", new)
    assert torch.equal(whence.capture(tree, (X,)).module()(X), model(X))


def test_the_path_to_preserve_is_named() -> None:
    """A module in a captured backward was replaced: the error names a path with which that works."""
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.ReLU()), torch.randn(2, 4)
    tree = whence.capture(model, (x,), backward=torch.sum).unflatten()
    tree.set_submodule("0", nn.Linear(4, 4))
    with pytest.raises(whence.CallError, match=r"0.0.weight is not there(.|\n)*preserve_calls=\['0'\]"):
        tree(x)
    tree = whence.capture(model, (x,), backward=torch.sum, preserve_calls=["0"]).unflatten()
    tree.set_submodule("0", nn.Linear(4, 4))
    tree(x)[0].backward()
