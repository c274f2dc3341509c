"""`program.track`: real passes over real models, and origins that are carried or missed aloud."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx import subgraph_rewriter
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from torch.utils._pytree import tree_leaves

import whence
from tests.checks import backward_of, differing, gradients, state
from tests.models import case
from tests.program.small import Stack, counted_program, sine_loss, stack_program
from whence import Phase, Quality
from whence.hierarchy.plan.planning import plan
from whence.program.wellformed import check

aten = torch.ops.aten
Pass = Callable[[whence.Edit], None]


def merge_equal(edit: whence.Edit) -> None:
    result = CSEPass()(edit.graph_module)
    assert result is not None
    edit.graph_module = result.graph_module


def drop_dead(edit: whence.Edit) -> None:
    node = next(node for node in edit.graph.nodes if node.op == "call_function")
    with edit.graph.inserting_after(node):
        unused = edit.graph.call_function(aten.neg.default, (node,))
    edit.replaced(unused, node)
    edit.graph.eliminate_dead_code()


def split_addmm(edit: whence.Edit) -> None:
    """`addmm` becomes `mm` and `add`; what `mm` was made from follows from who reads it."""
    for node in edit.graph.find_nodes(op="call_function", target=aten.addmm.default):
        bias, left, right = node.args
        with edit.graph.inserting_before(node):
            product = edit.graph.call_function(aten.mm.default, (left, right))
            total = edit.graph.call_function(aten.add.Tensor, (product, bias))
        node.replace_all_uses_with(total)
        edit.graph.erase_node(node)


def fuse_addmm(edit: whence.Edit) -> None:
    """`mm` and the `add` behind it become `addmm`."""
    for node in edit.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        product, bias = node.args
        if (
            not isinstance(product, fx.Node)
            or product.target is not aten.mm.default
            or len(product.users) > 1
        ):
            continue
        with edit.graph.inserting_before(node):
            fused = edit.graph.call_function(aten.addmm.default, (bias, *product.args))
        node.replace_all_uses_with(fused)
        edit.graph.erase_node(node)
        edit.graph.erase_node(product)


def move_late(edit: whence.Edit) -> None:
    """Every operation right before the first that reads it: those of a call end up apart."""
    for node in reversed(list(edit.graph.nodes)):
        if node.op == "call_function" and node.users and node.target not in (aten.bernoulli.p,):
            order = {other: at for at, other in enumerate(edit.graph.nodes)}
            min(node.users, key=order.__getitem__).prepend(node)


KEEPING_BITS: list[Pass] = [merge_equal, drop_dead, move_late]


def program_of(name: str, mode: str) -> tuple[whence.Program, tuple[Any, ...]]:
    row = case(name)
    model, args, kwargs = row.make()
    return whence.capture(model, args, kwargs, backward=backward_of(row, mode)), (model, args, kwargs)


def bits(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Results, gradients and state of one run."""
    torch.manual_seed(3)
    result = module(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    leaves = tree_leaves(result)
    if leaves[0].requires_grad and leaves[0].ndim == 0:
        leaves[0].backward()
    found = {f"output {at}": leaf for at, leaf in enumerate(leaves)}
    return {name: value.detach() for name, value in found.items()} | gradients(module) | state(module)


def tree_is_flat(program: whence.Program, args: Any, kwargs: Any) -> None:
    """The tree gives what the flat program gives, bit for bit."""
    flat, tree = (module(copy=True) for module in (program.module, program.unflatten))
    assert differing(bits(flat, args, kwargs), bits(tree, args, kwargs)) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", ["forward", "loss"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_passes_over_transformers(name: str, mode: str) -> None:
    """After each pass the program is eager's bit for bit, and so is the tree, which flattens no call.

    Gradients of a forward-only program are autograd's, which adds up in the order of the edited graph.
    """
    program, (model, args, kwargs) = program_of(name, mode)
    for edit_graph in KEEPING_BITS:
        with program.track(edit_graph.__name__) as edit:
            edit_graph(edit)
        program = edit.program
    result = program.verify(model, args, kwargs)
    rows = [row for row in result.rows if mode == "loss" or row.kind != "gradient"]
    assert [row.name for row in rows if not row.equal] == []
    assert plan(program).flattened == ()
    tree_is_flat(program, args, kwargs)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "mode"), [("gpt2", "forward"), ("gpt2", "loss"), ("bert", "loss")])
def test_split_and_fuse(name: str, mode: str) -> None:
    """One node becomes two, and two become one: they come from where the first came from."""
    program, (model, args, kwargs) = program_of(name, mode)
    before = [str(program.where(node).place) for node in program.select("** :: aten.addmm")]
    with program.track("split") as edit:
        split_addmm(edit)
    program = edit.program
    products = [
        node for node in program.select("** :: aten.mm :: forward") if "split" in program.where(node).passes
    ]
    assert [str(program.where(node).place) for node in products] == before
    assert {program.where(node).quality for node in products} == {Quality.INFERRED}
    tree_is_flat(program, args, kwargs)
    with program.track("fuse") as edit:
        fuse_addmm(edit)
    program = edit.program
    fused = program.select("** :: aten.addmm")
    assert [str(program.where(node).place) for node in fused] == before
    assert {program.where(node).passes for node in fused} == {("split", "fuse")}
    tree_is_flat(program, args, kwargs)
    rows = program.verify(model, args, kwargs).rows
    assert [row.name for row in rows if not row.equal] == []


def test_origins_stay() -> None:
    """A pass that only moves and removes leaves every origin as it was."""
    program = stack_program(sine_loss)
    before = {node.name: program.where(node) for node in program.graph.nodes}
    with program.track("move") as edit:
        move_late(edit)
    program = edit.program
    assert {node.name: program.where(node) for node in program.graph.nodes} == before


def test_equal_operations_name_all_callers() -> None:
    """Of two equal operations one is left: it names both calls, stays in its own, and is inferred."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Tanh(), nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) + 2 * self.right(x)

    model, x = Twice(), torch.randn(3)
    program = whence.capture(model, (x,))
    with program.track("cse") as edit:
        merge_equal(edit)
    program = edit.program
    origin = program.where("tanh")
    assert [str(call) for call in origin.calls] == ["left", "right"]
    assert (str(origin.place), origin.quality) == ("left", Quality.INFERRED)
    assert program.select("right :: aten.tanh") == [program.node("tanh")]
    assert program.verify(model, (x,)).ok
    tree: Any = program.unflatten()
    assert torch.equal(tree(x), model(x))
    assert torch.equal(tree.left(x), model.left(x))


def test_fused_across_modules_lies_in_the_call_around() -> None:
    """What is made of operations of two calls lies in their common ancestor and names both."""
    program = stack_program()
    with program.track("fuse") as edit:
        relu = edit.node("relu")
        product = relu.args[0]
        assert isinstance(product, fx.Node)
        with edit.graph.inserting_before(relu):
            fused = edit.graph.call_function(aten.clamp_min.default, (product, 0))
        relu.replace_all_uses_with(fused)
        edit.graph.erase_node(relu)
        edit.replaced(fused, relu, product)
    program = edit.program
    origin = program.where(fused)
    assert [str(call) for call in origin.calls] == ["layers.0.mlp.0", "layers.0.mlp.1"]
    assert str(origin.place) == "layers.0.mlp"
    assert program.node(fused.name).meta["val"].shape == (3, 4)


def test_pattern_rewriter() -> None:
    """What `replace_pattern` puts in comes from what it took out."""

    def pattern(x: Any, w: Any) -> Any:
        return aten.relu.default(aten.linear.default(x, w))

    def replacement(x: Any, w: Any) -> Any:
        return aten.clamp_min.default(aten.linear.default(x, w), 0)

    program, x = stack_program(), torch.randn(3, 4)
    expected = program.module()(x)
    with program.track("rewrite") as edit:
        assert len(subgraph_rewriter.replace_pattern(edit.graph_module, pattern, replacement)) == 2
    program = edit.program
    made = program.select("layers.1.mlp :: aten.clamp_min")
    assert [str(call) for call in program.where(made[0]).calls] == ["layers.1.mlp.0", "layers.1.mlp.1"]
    assert torch.equal(program.unflatten()(x), expected)


def test_written_state_stays_written() -> None:
    """Histories of buffers follow the pass."""
    program = counted_program(sine_loss)
    with program.track("add") as edit:
        add = edit.node(str(program.output("steps").node))
        with edit.graph.inserting_before(add):
            twin = edit.graph.call_function(aten.add.Tensor, add.args)
        add.replace_all_uses_with(twin)
        edit.graph.erase_node(add)
    program = edit.program
    assert program.output("steps").node == twin.name
    tree = program.unflatten(copy=True)
    tree(torch.randn(3, 4))
    assert int(tree.state_dict()["steps"]) == 1


def test_state_as_attributes() -> None:
    """A program whose state is attributes is edited, too."""
    model, x = Stack(), torch.randn(3, 4)
    program = whence.capture(model, (x,), state="attributes")
    with program.track("cse") as edit:
        merge_equal(edit)
    program = edit.program
    assert program.verify(model, (x,)).ok
    assert program.with_state("inputs").verify(model, (x,)).ok


def without_dead_code(module: fx.GraphModule) -> fx.GraphModule:
    module.graph.eliminate_dead_code()
    return module


def written_anew(module: fx.GraphModule) -> fx.GraphModule:
    """Another module, that holds what its graph reads and nothing else."""
    without_dead_code(module)
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)


def read_under_another_name(module: fx.GraphModule) -> fx.GraphModule:
    for node in module.graph.find_nodes(op="get_attr"):
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.get_attr(str(node.target)))
        module.graph.erase_node(node)
    return module


@pytest.mark.parametrize(
    "pass_", [whence.rewriting.DeadCode(), without_dead_code, written_anew, read_under_another_name]
)
def test_state_that_nobody_reads_stays(pass_: Any) -> None:
    """A pass that removes what nobody reads leaves the state of the program, attributes as inputs."""
    model, x = Stack(), torch.randn(3, 4)
    model.register_buffer("unread", torch.ones(2))
    model.add_module("spare", nn.Linear(4, 4))
    program = whence.capture(model, (x,), state="attributes").apply(pass_)
    check(program)
    assert program.verify(model, (x,)).ok
    assert set(program.unflatten().state_dict()) == set(model.state_dict())
    assert program.with_state("inputs").verify(model, (x,)).ok


def test_graph_of_a_copy() -> None:
    """A pass may copy the whole graph module and give back the copy."""
    program, x = stack_program(), torch.randn(3, 4)
    expected, before = program.module()(x), str(program)
    with program.track("copy") as edit:
        edit.graph_module = copy.deepcopy(edit.graph_module)
    program = edit.program
    assert str(program) == before
    assert torch.equal(program.unflatten()(x), expected)


def test_modules_made_before_stay() -> None:
    """A tree that was made before a pass, and had not run yet, is what it was."""
    program, x = stack_program(), torch.randn(3, 4)
    tree, expected = program.unflatten(), stack_program().module()(x)
    with program.track("double") as edit:
        for relu in edit.graph.find_nodes(op="call_function", target=aten.relu.default):
            relu.target = aten.neg.default
    program = edit.program
    assert torch.equal(tree(x), expected)
    assert not torch.equal(program.unflatten()(x), expected)
    assert program.where("relu").quality is Quality.INFERRED


def test_calls_whose_operations_are_apart_are_regrouped() -> None:
    """Operations of two independent calls in turns are two calls again."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (nn.Sequential(nn.Tanh(), nn.ReLU(), nn.Sigmoid()) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) + self.right(x + 1)

    model, x = Branches(), torch.randn(3, requires_grad=True)
    program = whence.capture(model, (x,), backward=lambda y: y.sum())
    with program.track("interleave") as edit:
        late = (*program.select("left.1 :: :: forward"), *program.select("left.2 :: :: forward"))
        left = [edit.node(node.name) for node in late]
        anchor = edit.node(program.select("right.0 :: aten.tanh")[0].name)
        for node in left:
            anchor.append(node)
            anchor = node
    program = edit.program
    places = [str(program.where(node).place)[:4] for node in program.select("*.* :: :: forward")]
    assert places[0] == "left" and "righ" in places[: places[::-1].index("left")]
    found = plan(program)
    assert found.flattened == ()
    assert torch.equal(program.unflatten()(x)[1], model(x))


def test_call_that_cannot_be_one_is_flat_with_the_reason() -> None:
    """Where a value leaves a call and comes back, the call stays in its caller's graph."""
    program = stack_program()
    with program.track("across") as edit:
        relu, head = edit.node("relu"), next(iter(edit.node("relu").users))
        with edit.graph.inserting_before(head):
            outside = edit.graph.call_function(aten.neg.default, (relu,))
            back = edit.graph.call_function(aten.neg.default, (outside,))
        head.replace_input_with(relu, back)
        edit.replaced(outside, head)
        edit.replaced(back, relu)
    program = edit.program
    reasons = {str(program.calls.rows[flat.number].site): flat.reason for flat in plan(program).flattened}
    assert "layers.0.mlp.1" in reasons
    assert "comes back before it has finished" in reasons["layers.0.mlp.1"]
    x = torch.randn(3, 4)
    assert torch.equal(program.unflatten()(x), program.module()(x))


def unknown_node(edit: whence.Edit) -> None:
    relu = edit.node("relu")
    with edit.graph.inserting_after(relu):
        added = edit.graph.call_function(aten.neg.default, (relu,))
    relu.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)


def new_input(edit: whence.Edit) -> None:
    with edit.graph.inserting_before(next(iter(edit.graph.nodes))):
        edit.graph.placeholder("extra")


def input_gone(edit: whence.Edit) -> None:
    bias = edit.node("p_head_bias")
    bias.replace_all_uses_with(edit.node("p_head_weight"))
    edit.graph.erase_node(bias)


def inputs_in_another_order(edit: whence.Edit) -> None:
    first, second = list(edit.graph.nodes)[:2]
    first.prepend(second)


def output_gone(edit: whence.Edit) -> None:
    last = next(iter(reversed(edit.graph.nodes)))
    last.args = (last.args[0][1:],)


def output_of_another_shape(edit: whence.Edit) -> None:
    last = next(iter(reversed(edit.graph.nodes)))
    last.args = ((edit.node("relu"),),)


def output_replaced_by_a_constant(edit: whence.Edit) -> None:
    last = next(iter(reversed(edit.graph.nodes)))
    last.args = ((None,),)


def read_before_made(edit: whence.Edit) -> None:
    relu = edit.node("relu")
    relu.append(relu.args[0])  # type: ignore[arg-type]


def method(edit: whence.Edit) -> None:
    relu = edit.node("relu")
    relu.op, relu.target = "call_method", "relu"


def foreign_attribute(edit: whence.Edit) -> None:
    edit.graph_module.register_buffer("table", torch.zeros(3, 4))
    relu = edit.node("relu")
    with edit.graph.inserting_before(relu):
        relu.args = (edit.graph.get_attr("table"),)


def write_in_place(edit: whence.Edit) -> None:
    edit.node("relu").target = aten.relu_.default


FAILING: list[tuple[Pass, str]] = [
    (unknown_node, r"it is not known what neg_default \(aten.neg.default\) was made from"),
    (new_input, "extra is a new input, which the signature does not have"),
    (input_gone, "the input p_head_bias is gone"),
    (inputs_in_another_order, "the inputs are in another order"),
    (output_gone, "the graph returns 0 values, and the signature has 1"),
    (output_of_another_shape, r"the output output was f32\[3, 2\], and is f32\[3, 4\]"),
    (output_replaced_by_a_constant, "the output output was .*, and is None"),
    (read_before_made, "relu reads linear_1 before it is made"),
    (method, "relu is a call_method of relu"),
    (foreign_attribute, "table reads table, which is not in the signature"),
    (write_in_place, r"relu \(aten.relu_.default\) changes an input"),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("edit_graph", "message"), FAILING, ids=lambda row: getattr(row, "__name__", ""))
def test_what_a_pass_must_not_do(edit_graph: Pass, message: str) -> None:
    """It is named, and the program is as it was before."""
    program, x = stack_program(), torch.randn(3, 4)
    before, module, expected = str(program), program.graph_module, program.module()(x)
    with pytest.raises(whence.LostProvenance, match=message), program.track("bad") as edit:
        edit_graph(edit)
    assert str(program) == before
    assert program.graph_module is module
    check(program)
    assert torch.equal(program.unflatten()(x), expected)


def test_everything_is_named_at_once_with_the_program() -> None:
    """Several faults are one error, and the graph shows each at its node."""
    program = stack_program()
    with pytest.raises(whence.LostProvenance) as caught, program.track("bad") as edit:
        unknown_node(edit)
        new_input(edit)
    assert len(caught.value.faults) == 2
    text = str(caught.value)
    assert "edit.replaced(new, *olds)" in text
    assert "= aten.neg.default(relu)\n      ^ it is not known what neg" in text


def test_draws_keep_their_order() -> None:
    """Two dropouts that change places would draw each other's numbers."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    program = whence.capture(model, (torch.randn(4),))
    first, second, *_ = [node.name for node in program.graph.nodes if "dropout" in node.name]
    with pytest.raises(whence.LostProvenance, match=f"{second} draws"), program.track("move") as edit:
        source = edit.node(second).args[0]
        assert isinstance(source, fx.Node)
        placeholder = next(iter(edit.graph.nodes))
        edit.node(second).args = (placeholder, *edit.node(second).args[1:])
        edit.node(first).prepend(edit.node(second))


def test_nodes_from_before_the_block_are_not_for_editing() -> None:
    """Editing them is an error: the block is about a copy of the graph."""
    program = stack_program()
    with pytest.raises(whence.LostProvenance, match="taken before the block"), program.track("late"):
        program.node("relu").target = aten.neg.default


def test_error_of_the_pass_goes_through() -> None:
    """The program is as it was before."""
    program = stack_program()
    before = str(program)
    with pytest.raises(ZeroDivisionError), program.track("broken") as edit:
        edit.graph.erase_node(next(iter(reversed(edit.graph.nodes))))
        raise ZeroDivisionError
    assert str(program) == before


def test_program_of_before_stays() -> None:
    """Blocks of one program know nothing of each other: each makes a program of its own."""
    program = stack_program()
    before = str(program)
    with program.track("outer") as outer, program.track("inner") as inner:
        merge_equal(outer)
        for relu in inner.graph.find_nodes(op="call_function", target=aten.relu.default):
            relu.target = aten.neg.default
    assert str(program) == str(outer.program) == before != str(inner.program)
    check(program)


def test_misuse_of_the_helper() -> None:
    """Names that are not there, and calls without old nodes, say so."""
    program = stack_program()
    with program.track("misuse") as edit:
        with pytest.raises(whence.UsageError, match="no old nodes"):
            edit.replaced(edit.node("relu"))
        with pytest.raises(whence.SelectionError, match="was not in the graph before the block"):
            edit.replaced(edit.node("relu"), "nowhere")
        with pytest.raises(whence.SelectionError, match="no node is called 'nowhere'"):
            edit.node("nowhere")
        with pytest.raises(whence.UsageError, match=r"expected a torch.fx.GraphModule"):
            edit.graph_module = edit.graph  # type: ignore[assignment]
    program = edit.program


def test_merged_gradients_are_not_told_apart_silently() -> None:
    """A module alone refuses a backward of what was merged with others; the whole trains."""
    program = stack_program(sine_loss)
    with program.track("merge") as edit:
        total = next(n for n in edit.graph.nodes if program.where(n.name).quality is Quality.ACCUMULATED)
        first, second = total.args
        with edit.graph.inserting_before(total):
            fused = edit.graph.call_function(aten.add.Tensor, (second, first))
        total.replace_all_uses_with(fused)
        edit.graph.erase_node(total)
        edit.replaced(fused, total)
    program = edit.program
    assert program.unflatten()(torch.randn(3, 4))[0].backward() is None
    assert program.where(fused).phase is Phase.BACKWARD
    assert len(program.where(fused).calls) == 2


def test_preserved_calls_keep_their_values() -> None:
    """A pass may not remove what a preserved call is to return."""
    model = nn.Sequential(nn.Tanh(), nn.ReLU())
    program = whence.capture(model, (torch.randn(3),), preserve_calls=["0"])
    with pytest.raises(whence.LostProvenance, match="its calls are preserved"), program.track("fuse") as edit:
        relu = edit.node("relu")
        tanh = relu.args[0]
        with edit.graph.inserting_before(relu):
            fused = edit.graph.call_function(aten.sigmoid.default, (tanh.args[0],))  # type: ignore[union-attr]
        relu.replace_all_uses_with(fused)
        edit.graph.eliminate_dead_code()


class Masks(nn.Module):
    """Two equal masks, which are drawn one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(self.drop(x.sin()), self.drop(x.sin()))


class Filled(nn.Module):
    """Two equal tensors, each filled in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.empty_like(x), torch.empty_like(x)
        return first.copy_(x).add_(1) * second.copy_(x).add_(1) + x.sum()


def test_random_numbers_that_a_pass_merges() -> None:
    """Operations that draw are never equal: the pass is refused, and the program is as it was."""
    model, x = Masks(), torch.randn(2, 4)
    program = whence.capture(model, (x,))
    refused = pytest.raises(
        whence.LostProvenance, match="2 operations drew random numbers or gave nothing, and 1"
    )
    with refused, program.track("cse") as edit:
        merge_equal(edit)
    assert program.verify(model, (x,)).ok


def test_values_that_were_written_and_become_one() -> None:
    """Their histories are one."""
    model, x = Filled(), torch.randn(2, 4)
    program = whence.capture(model, (x,))
    with program.track("cse") as edit:
        merge_equal(edit)
    program = edit.program
    assert all(program.facts.written.values())
    assert torch.equal(program.unflatten()(x), model(x))
    assert torch.equal(program.module()(x), model(x))
