"""Sizes in a program: where their nodes come from, what modules do with them, and what they may not be."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import whence
from tests.checks import leaves_no_trace
from tests.models import case
from whence.program.wellformed import check

BATCH, LENGTH = Dim("batch", max=64), Dim("length", max=64)


class Heads(nn.Module):
    """Splits and joins heads, so that it computes with sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        heads = self.project(hidden).view(batch, length, 2, 4).transpose(1, 2).contiguous()
        return heads.view(batch * 2, length * 4).view(batch, 2, length, 4).transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """Four equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Heads() for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden) + hidden
        return hidden


def square(result: Tensor) -> Tensor:
    """A loss."""
    return result.square().mean()


@pytest.fixture(params=[False, True, square], ids=["forward", "tangents", "loss"])
def program(request: pytest.FixtureRequest) -> whence.Program:
    """The stack with two open sizes."""
    torch.manual_seed(0)
    shapes = ({0: BATCH, 1: LENGTH},)
    hidden = torch.randn(3, 5, 8, requires_grad=bool(request.param))
    return whence.capture(Stack(), (hidden,), dynamic_shapes=shapes, backward=request.param)


@pytest.mark.sample(2)
def test_each_size_is_read_once(program: whence.Program) -> None:
    """A size of an input is one node, outside all modules; what is computed of it belongs to who computes."""
    sizes = [node for node in program.graph.nodes if "sym_size" in str(node.target)]
    assert [program.where(node).calls for node in sizes] == [(), ()]
    products = [node for node in program.graph.nodes if node.name.startswith("mul") and not node.name[3:4]]
    expected = ["layers.0.project"] if program.has_backward else ["layers.0"]  # where linear is whole
    assert [str(program.where(node).calls[0]) for node in products] == expected
    check(program)


@pytest.mark.sample(2)
def test_equal_layers_stay_equal(program: whence.Program) -> None:
    """Sizes do not tell layers apart."""
    assert [group.type for group in program.layers()] == ["Heads"]
    assert len(program.layers()[0].forward) == 4


@pytest.mark.sample(2)
def test_the_tree_runs_at_every_size(program: whence.Program) -> None:
    """The tree and each of its modules take other sizes, and train."""
    tree = program.unflatten(copy=True)
    for shape in ((3, 5, 8), (1, 1, 8), (7, 2, 8), (64, 3, 8)):
        hidden = torch.randn(shape, requires_grad=program.has_backward)
        layer = tree.get_submodule("layers.2")
        assert layer(hidden).shape == shape
        if program.has_backward:
            layer(hidden).sum().backward()
            assert hidden.grad is not None


@pytest.mark.sample(2)
def test_an_empty_batch(program: whence.Program) -> None:
    """Nothing in the model asks for a size of 0, so the program holds for it."""
    model = Stack()
    model.load_state_dict(program.unflatten().state_dict())
    empty = torch.randn(0, 5, 8, requires_grad=program.has_backward)
    assert program.verify(model, (empty,)).ok


class HeadsOfOneBatch(nn.Module):
    """Attention over two arguments that are cut into heads by the batch of the first."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        keys, queries = (value.reshape(x.shape[0], -1, 2, 4).transpose(1, 2) for value in (x, y))
        return nn.functional.scaled_dot_product_attention(queries, keys, keys)


def test_a_length_that_divides_by_a_batch() -> None:
    """Where there is no batch there is no length either: such a call is refused, and others are right."""
    auto = {0: Dim.AUTO, 1: Dim.AUTO}
    model = HeadsOfOneBatch()
    program = whence.capture(
        model, (torch.randn(3, 5, 8), torch.randn(3, 6, 8)), dynamic_shapes={"x": auto, "y": auto}
    )
    assert program.verify(model, (torch.randn(2, 7, 8), torch.randn(2, 4, 8))).ok
    with pytest.raises(whence.CallError, match=r"dim 0 of `args\[0\]` is 0"):
        program.module()(torch.randn(0, 7, 8), torch.randn(0, 4, 8))


def test_a_capture_with_symbols_leaves_no_trace() -> None:
    """Kernels, settings and the model are as before, also after an error."""
    model, args = Stack(), (torch.randn(3, 5, 8),)
    with leaves_no_trace(model):
        whence.capture(model, args, dynamic_shapes=({0: BATCH, 1: LENGTH},))
    with leaves_no_trace(model), pytest.raises(whence.SpecialisedShapes):
        whence.capture(model, args, dynamic_shapes=({2: LENGTH},))
    assert not torch.fx.experimental._config.backed_size_oblivious


@pytest.mark.parametrize("size", [0, 1])
def test_zero_and_one_are_kept(size: int) -> None:
    """An example of 0 or 1 is fixed: an error where it was asked to vary, a rule where it need not."""
    x = torch.randn(size, 5, 8)
    with pytest.raises(whence.SpecialisedShapes, match="special") as caught:
        whence.capture(Stack(), (x,), dynamic_shapes=({0: BATCH},))
    assert caught.value.dimensions[0].zero_one
    program = whence.capture(Stack(), (x,), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    assert program.shapes["args[0]"].shape == (size, "hidden_1", 8)
    (violation,) = program.check(Stack(), (torch.randn(4, 5, 8),))
    assert "special" in str(violation)


class Point(NamedTuple):
    """Two tensors."""

    x: Tensor
    y: Tensor


class Containers(nn.Module):
    """Takes and gives containers of many kinds."""

    def forward(self, point: Point, *rest: Tensor, scale: float = 2.0, **more: Any) -> Any:
        named = collections.OrderedDict(sum=point.x + point.y, kept=point.x)
        counted = collections.defaultdict(list, {"rest": [item * scale for item in rest]})
        return named, counted, Point(more["last"], more["last"]), point.x.shape[0], None


def test_sizes_inside_containers() -> None:
    """Named tuples, ordered and default dicts, `*args` and `**kwargs`; keywords in any order."""
    model = Containers()
    shapes = {
        "point": [{0: BATCH}, {0: BATCH}],
        "rest": [{0: Dim.AUTO}, None],
        "more": {"last": {0: 2 * BATCH}, "flag": None},
    }
    args = (Point(torch.randn(3), torch.randn(3)), torch.randn(4), torch.randn(5))
    program = whence.capture(model, args, {"last": torch.randn(6), "flag": True}, dynamic_shapes=shapes)
    other = (Point(torch.randn(7), torch.randn(7)), torch.randn(2), torch.randn(5))
    last = torch.randn(14)
    assert program.verify(model, other, {"flag": True, "last": last}).ok
    result = program.module()(*other, flag=True, last=last)
    assert isinstance(result[0], collections.OrderedDict)
    assert isinstance(result[1], collections.defaultdict)
    assert isinstance(result[2], Point)
    assert result[2].x is result[2].y
    assert result[3:] == (7, None)


class Selects(nn.Module):
    """Results whose sizes depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        kept = rows[mask]
        return self.head(kept).sum() + kept.shape[0] + mask.nonzero().sum()


@pytest.mark.parametrize("backward", [False, True])
def test_sizes_that_only_a_run_knows(backward: bool) -> None:
    """A mask selects any number of rows, also none, forward and backward."""
    model = Selects()
    mask = torch.tensor([True, False, True])
    shapes = ({0: BATCH}, {0: BATCH})
    program = whence.capture(model, (torch.randn(3, 4), mask), dynamic_shapes=shapes, backward=backward)
    for count in (3, 1, 9):
        for chosen in (torch.rand(count) > 0.5, torch.zeros(count, dtype=torch.bool)):
            assert program.verify(model, (torch.randn(count, 4), chosen)).ok
            program.unflatten()(torch.randn(count, 4), chosen)


class TwoRoads(nn.Module):
    """One result has a size that only a run knows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, rows: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(rows[mask]), self.second(rows)


def test_a_gradient_that_does_not_arrive() -> None:
    """A result that nobody differentiates gets zeros of its size in that run."""
    model, mask = TwoRoads(), torch.tensor([True, False, True])
    program = whence.capture(
        model, (torch.randn(3, 4), mask), dynamic_shapes=({0: BATCH}, {0: BATCH}), backward=True
    )
    tree = program.unflatten(copy=True)
    rows = torch.randn(5, 4)
    for module in (tree, model):
        module(rows, torch.tensor([True] * 4 + [False]))[1].sum().backward()
    found, expected = tree.get_submodule("second").get_parameter("weight").grad, model.second.weight.grad
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)
    assert tree.get_submodule("first").get_parameter("weight").grad is None


@pytest.fixture
def cached() -> None:
    """Caches of transformers are containers."""
    whence.register_caches()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen2"])
def test_decode_with_a_growing_cache(name: str, cached: None) -> None:
    """One capture of a step, twenty tokens: each is eager's, bit for bit."""
    model, *_ = case(name).make()
    model.eval()
    prompt, past = torch.randint(3, 100, (2, 5)), Dim("past")
    with torch.no_grad():
        eager, cache = (model(prompt, use_cache=True).past_key_values for _ in range(2))
        example = {"input_ids": prompt[:, :1], "past_key_values": cache, "use_cache": True}
        count = 2 * len(cache.layers)
        shapes = {"input_ids": None, "past_key_values": [{2: past}] * count, "use_cache": None}
        step = whence.capture(model, (), example, dynamic_shapes=shapes).module()
        token = prompt[:, -1:]
        for _ in range(20):
            expected = model(token, past_key_values=eager, use_cache=True).logits
            given = step(input_ids=token, past_key_values=cache, use_cache=True)
            cache = given.past_key_values
            assert torch.equal(given.logits, expected)
            token = expected[:, -1:].argmax(-1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen2"])
def test_a_static_cache_is_written_in_place(name: str, cached: None) -> None:
    """Prefill and decode steps write the cache that is passed, as eager does: one capture, twenty tokens."""
    cache_type = pytest.importorskip("transformers").StaticCache
    model, *_ = case(name).make()
    model.eval()
    prompt = torch.randint(3, 100, (2, 5))
    with torch.no_grad():
        eager, given = (cache_type(config=model.config, max_cache_len=32) for _ in range(2))
        for cache in (eager, given):
            model(prompt, past_key_values=cache)
        token = prompt[:, :1]
        example = {"input_ids": token, "past_key_values": given, "use_cache": True}
        program = whence.capture(model, (), example)
        assert program.verify(model, (), example).ok
        step = program.module()
        for _ in range(20):
            expected = model(token, past_key_values=eager).logits
            assert torch.equal(step(**example | {"input_ids": token}).logits, expected)
            token = expected[:, -1:].argmax(-1)


@pytest.mark.sweep
def test_decode_beside_an_encoder(cached: None) -> None:
    """The cache of a decoder that looks at an encoder: the step that is captured gives it back, filled."""
    model, _, kwargs, *_ = case("t5").make()
    model.eval()
    inputs = {name: value for name, value in kwargs.items() if name != "use_cache"} | {"use_cache": True}
    with torch.no_grad():
        assert whence.capture(model, (), inputs).verify(model, (), inputs).ok
        eager, given = (model(**inputs) for _ in range(2))
        token = torch.zeros(len(eager.logits), 1, dtype=torch.long)
        outputs = (given.encoder_last_hidden_state,)
        example = {"encoder_outputs": outputs, "decoder_input_ids": token, "use_cache": True}
        step = whence.capture(model, (), example | {"past_key_values": given.past_key_values}).module()
        found = step(**example, past_key_values=given.past_key_values)
        expected = model(**example, past_key_values=eager.past_key_values)
    assert torch.equal(found.logits, expected.logits)
    assert found.past_key_values.is_updated == expected.past_key_values.is_updated
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


def sliding(kind: str, window: int) -> Any:
    """A decoder of two layers with attention in a window, in both or in the first."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": window}
    family = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{family}Config")(**sizes, **heads)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["Mistral", "Gemma2", "Gemma3"])
def test_decode_with_a_sliding_window(kind: str, cached: None) -> None:
    """Twenty tokens, through the window and past it: a program says when another capture is needed."""
    model, prompt = sliding(kind, window=5), torch.randint(3, 50, (2, 3))
    with torch.no_grad():
        assert whence.capture(model, (prompt,), {"use_cache": True}).verify(
            model, (prompt,), {"use_cache": True}
        )
        eager, cache = (model(prompt, use_cache=True).past_key_values for _ in range(2))
        token, steps = prompt[:, -1:], list[Any]()
        for _ in range(20):
            inputs = {"input_ids": token, "past_key_values": cache, "use_cache": True}
            if not steps or steps[-1].check(model, (), inputs):
                layers = [[{2: Dim.AUTO}] * 2 + [Dim.AUTO] * layer.is_sliding for layer in cache.layers]
                shapes = {
                    "input_ids": None,
                    "past_key_values": [row for layer in layers for row in layer],
                    "use_cache": None,
                }
                steps.append(whence.capture(model, (), inputs, dynamic_shapes=shapes))
                run = steps[-1].module()
            expected = model(token, past_key_values=eager, use_cache=True).logits
            given = run(**inputs)
            cache = given.past_key_values
            assert torch.equal(given.logits, expected)
            token = expected[:, -1:].argmax(-1)
    assert len(steps) == 3  # while the window fills, when it is full, and past that
    assert [layer.get_seq_length() for layer in cache.layers] == [23, 23]
    assert "cumulative_length` must be at least" in str(steps[2].shapes) or "cumulative" in str(
        steps[2].shapes
    )


@pytest.mark.sweep
def test_a_static_cache_with_a_window(cached: None) -> None:
    """Its layers are written in place; the count of tokens is a number that the program gives back."""
    cache_type = pytest.importorskip("transformers").StaticCache
    model, prompt = sliding("Gemma2", window=6), torch.randint(3, 50, (2, 3))
    with torch.no_grad():
        eager, cache = (cache_type(config=model.config, max_cache_len=32) for _ in range(2))
        for each in (eager, cache):
            model(prompt, past_key_values=each)
        for _ in range(8):
            inputs = {"input_ids": prompt[:, :1], "past_key_values": cache, "use_cache": True}
            given = whence.capture(model, (), inputs).module()(**inputs)
            assert torch.equal(given.logits, model(prompt[:, :1], past_key_values=eager).logits)
            cache = given.past_key_values


def test_a_cache_that_keeps_more_than_its_window(cached: None) -> None:
    """A cache that keeps what came before the window, to go back, is another one, and is captured, too."""
    model, token = sliding("Mistral", window=5), torch.randint(3, 50, (2, 1))
    with torch.no_grad():
        wide, plain = (model(torch.randint(3, 50, (2, 9)), use_cache=True).past_key_values for _ in range(2))
        wide.layers[0].activate_past_recording()
        program = whence.capture(model, (token,), {"past_key_values": wide})
        assert program.verify(model, (token,), {"past_key_values": wide}).ok
        with pytest.raises(whence.CallError):
            program.module()(token, past_key_values=plain)


def test_a_cache_that_holds_an_object_is_refused(cached: None) -> None:
    """Nobody knows what else than tensors and plain values is."""
    model = sliding("Mistral", window=5)
    cache = model(torch.randint(3, 50, (2, 3)), use_cache=True).past_key_values
    cache.layers[0].extra = object()
    with pytest.raises(whence.UsageError, match="a cache that holds a object cannot be captured"):
        whence.capture(model, (torch.randint(3, 50, (2, 1)),), {"past_key_values": cache})


def test_a_saved_tensor_that_is_written_is_named() -> None:
    """Autograd refuses it; where sizes vary its own message cannot be made."""

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept = x.sigmoid()
            doubled = kept * 2
            kept.add_(1)
            return doubled + kept

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(whence.UnsupportedMutation) as caught:
        whence.capture(Writes(), (x,), backward=True, dynamic_shapes=({0: Dim("rows")},))
    assert "a tensor that SigmoidBackward0 saved for its backward was written in place" in str(caught.value)
    assert "test_symbols.py" in str(caught.value.where)


def test_pieces_of_a_size_that_varies() -> None:
    """What a chunk asks of a size divides by a quotient of it, which is no number for a size of 0."""

    class Pieces(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            first, second, third = x.chunk(3, dim=1)
            return first * second + third

    model, x = Pieces(), torch.randn(2, 6)
    program = whence.capture(model, (x,), dynamic_shapes=({1: Dim.AUTO},))
    assert program.verify(model, (torch.randn(2, 12),)).ok
    for size in (0, 4, 7):
        with pytest.raises(whence.CallError, match=r"must be such that .* // 3"):
            program.module()(torch.randn(2, size))


def test_what_is_suggested_of_two_sizes_works() -> None:
    """One is a multiple and gets a new name; the other, which follows from it, is spelled by that name."""

    class Related(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Any:
            x = x * 2 if x.shape[0] % 2 == 0 else x
            return (x - 1 if y.shape[0] == x.shape[0] + 1 else x), y

    model, inputs = Related(), (torch.randn(6, 5), torch.randn(7, 5))
    with pytest.raises(whence.SpecialisedShapes) as caught:
        whence.capture(model, inputs, dynamic_shapes=({0: Dim("a")}, {0: Dim("c")}))
    program = whence.capture(model, inputs, dynamic_shapes=caught.value.suggested)
    assert program.verify(model, (torch.randn(8, 5), torch.randn(9, 5))).ok


class Added(nn.Module):
    """Takes two tensors, or one twice."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


@pytest.mark.parametrize("dims", [(Dim.DYNAMIC, Dim.DYNAMIC), (Dim("n"), Dim("n")), (Dim.DYNAMIC, Dim.AUTO)])
def test_size_of_one_tensor_in_two_places(dims: Any) -> None:
    """It is one size, whichever of the places asks for it."""
    x, other = torch.randn(3, 4), torch.randn(5, 4)
    program = whence.capture(Added(), (x, x), dynamic_shapes=tuple({0: dim} for dim in dims))
    assert torch.equal(program.unflatten()(other, other), other + other)
    assert program.check(Added(), (other, other)) == []


@pytest.mark.parametrize("shapes", [({0: Dim("n")}, {0: Dim("k")}), (None, {0: Dim.DYNAMIC})])
def test_one_tensor_has_no_two_sizes(shapes: Any) -> None:
    """What is asked of it in one place and not in the other is a contradiction, and is said to be one."""
    x = torch.randn(3, 4)
    with pytest.raises(whence.InvalidShapes, match="something else of the same tensor"):
        whence.capture(Added(), (x, x), dynamic_shapes=shapes)


MARGINS: dict[str, Callable[..., Tensor]] = {
    "multi_margin": lambda x: F.multi_margin_loss(x, torch.arange(x.shape[0]) % 5),
    "multi_margin_rows": lambda x: F.multi_margin_loss(
        x, torch.arange(x.shape[0]) % 5, p=2, reduction="none"
    ),
    "multilabel_margin": lambda x: F.multilabel_margin_loss(x, torch.zeros_like(x, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", MARGINS)
def test_losses_with_margins(name: str) -> None:
    """PyTorch's kernels for open sizes compute their gradients in other steps than eager does."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(5) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return MARGINS[name](x * self.scale)

    torch.manual_seed(0)
    model, shapes = Scaled(), ({0: Dim("batch", max=64)},)
    program = whence.capture(model, (torch.randn(7, 5),), backward=torch.sum, dynamic_shapes=shapes)
    assert all(program.verify(model, (torch.randn(batch, 5),)).ok for batch in (7, 2, 33))
