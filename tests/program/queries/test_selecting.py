import pytest
import torch
from torch import fx, nn

import whence
from tests.program.small import counted_program, sine_loss, stack_program
from whence.program.node_records import origin_of


@pytest.fixture(scope="module")
def forward() -> whence.Program:
    return stack_program()


@pytest.fixture(scope="module")
def joint() -> whence.Program:
    return stack_program(sine_loss)


def paths(nodes: list[fx.Node]) -> set[str]:
    return {str(site.path) for node in nodes for site in origin_of(node).calls}


def operations(nodes: list[fx.Node]) -> list[str]:
    return [str(node.target) for node in nodes]


def test_path_includes_everything_below_it(forward: whence.Program) -> None:
    """A layer's path finds what the layer does itself and what its children do."""
    assert paths(forward.select("layers.0")) == {
        "layers.0",
        "layers.0.attention",
        "layers.0.mlp.0",
        "layers.0.mlp.1",
    }


def test_path_glob_takes_every_layer(forward: whence.Program) -> None:
    """`*` stands for one segment: the same module of every layer."""
    assert paths(forward.select("layers.*.attention")) == {"layers.0.attention", "layers.1.attention"}


def test_path_glob_includes_descendants(forward: whence.Program) -> None:
    """A glob that fits a container finds the operations of the modules in it."""
    assert paths(forward.select("layers.*.mlp")) == {f"layers.{i}.mlp.{j}" for i in (0, 1) for j in (0, 1)}


def test_double_star_finds_modules_at_any_depth(forward: whence.Program) -> None:
    """`**.attention` needs no knowledge of what is around it."""
    assert forward.select("**.attention") == forward.select("layers.*.attention")


def test_path_of_a_container_that_is_never_called(forward: whence.Program) -> None:
    """A module list has no call of its own, and still stands for what is in it."""
    assert forward.select("layers") == forward.select("layers.*")


@pytest.mark.parametrize("pattern", ["**", ":: aten.*", "** :: *", ":: :: forward"])
def test_open_parts_fit_everything(forward: whence.Program, pattern: str) -> None:
    """A part left out, or a bare star, fits all operations."""
    every = [node for node in forward.nodes() if node.op == "call_function"]
    assert forward.select(pattern) == every


def test_placeholders_are_not_operations(forward: whence.Program) -> None:
    """Inputs and the output node are never selected."""
    assert {node.op for node in forward.select("**")} == {"call_function"}


@pytest.mark.parametrize(
    "operation", ["aten.linear", "aten.linear.default", "aten.linea?", "*.linear", "aten.line*"]
)
def test_operation_with_or_without_overload(forward: whence.Program, operation: str) -> None:
    """`aten.linear` and `aten.linear.default` are one operation, and globs work on both."""
    assert operations(forward.select(f"layers.0 :: {operation}")) == ["aten.linear.default"] * 2


def test_operation_glob_takes_a_namespace(forward: whence.Program) -> None:
    """`aten.*` is every ATen operation."""
    assert forward.select("layers.0 :: aten.*") == forward.select("layers.0")


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_phase_keeps_its_own(joint: whence.Program, phase: str) -> None:
    """A phase finds operations of that phase only."""
    assert {origin_of(node).phase.value for node in joint.select(f"head :: :: {phase}")} == {phase}


def test_phases_together_are_the_whole(joint: whence.Program) -> None:
    """Forward and backward of a module are all it does."""
    found = [*joint.select("head :: :: forward"), *joint.select("head :: :: backward")]
    assert found == joint.select("head")


def test_three_parts_narrow_together(joint: whence.Program) -> None:
    """Path, operation and phase each take away what they do not fit."""
    found = joint.select("layers.*.attention :: aten.mm :: backward")
    assert paths(found) == {"layers.0.attention", "layers.1.attention"}
    assert operations(found) == ["aten.mm.default"] * len(found)


def test_selection_is_in_graph_order(joint: whence.Program) -> None:
    """What is found comes in the order of the graph."""
    order = list(joint.nodes())
    found = joint.select("**.mlp :: aten.mm")
    assert found == sorted(found, key=order.index)


def test_accumulated_sum_belongs_to_every_contributor() -> None:
    """A sum of two modules' gradients is found under the path of either."""
    program = counted_program(sine_loss)
    (total,) = [node for node in program.nodes() if len(origin_of(node).calls) > 1]
    assert total in program.select("first")
    assert total in program.select("second")


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layers.0.atention", "layers.0.attention"),
        ("attention", "**.attention"),
        ("layers.7", "layers."),
        ("Layers.0", "layers.0"),
        ("haed", "head"),
        ("type=Liner", "there are Linear"),
    ],
)
def test_unknown_module_names_near_misses(forward: whence.Program, pattern: str, hint: str) -> None:
    """A path that fits no module says which paths are close."""
    with pytest.raises(whence.SelectionError, match="no module fits") as caught:
        forward.select(pattern)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("operation", "hint"), [("aten.liner", "aten.linear"), ("linear", "aten.linear"), ("aten.conv", "aten.")]
)
def test_unknown_operation_names_near_misses(forward: whence.Program, operation: str, hint: str) -> None:
    """An operation that is not there says which ones are."""
    with pytest.raises(whence.SelectionError, match="no operation fits") as caught:
        forward.select(f"layers.0 :: {operation}")
    assert hint in str(caught.value)


def test_unknown_phase_names_the_phases(forward: whence.Program) -> None:
    """A phase that does not exist lists those that do."""
    with pytest.raises(whence.SelectionError, match="'backwards' is not a phase") as caught:
        forward.select("head :: :: backwards")
    assert "forward, backward, optimizer" in str(caught.value)


def test_phase_without_a_match_says_where_there_is_one(forward: whence.Program) -> None:
    """Nothing in the backward of a forward program says that it is found in the forward."""
    with pytest.raises(whence.SelectionError, match="found only in forward"):
        forward.select("head :: :: backward")


@pytest.mark.parametrize("pattern", ["", "  ", "a :: b :: forward :: d"])
def test_not_a_pattern(forward: whence.Program, pattern: str) -> None:
    """An empty text and a fourth part are no patterns, and the error shows the form."""
    with pytest.raises(whence.SelectionError, match="path :: operation :: phase"):
        forward.select(pattern)


def test_selection_error_is_a_lookup_error(forward: whence.Program) -> None:
    """Code that expects Python's own error for something not found keeps working."""
    with pytest.raises(LookupError):
        forward.select("nowhere")


def test_calls_by_number_and_class() -> None:
    """`lin@1` is the second call of a module alone, `type=` a glob over classes of modules."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.act = nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.act(self.lin(self.lin(x)))
            return result

    program = whence.capture(Twice(), (torch.randn(2, 4),))
    linears = program.select("type=Linear")
    assert [str(program.where(node).place) for node in linears] == ["lin", "lin@1", "act.1"]
    assert program.select("lin@0") + program.select("lin@1") == program.select("lin") == linears[:2]
    assert program.select("type=Seq* :: aten.linear") == linears[2:]
    with pytest.raises(whence.SelectionError, match="no number of a call"):
        program.select("lin@last")
    with pytest.raises(whence.SelectionError, match="the calls are lin to lin@1"):
        program.select("lin@2")
    with pytest.raises(whence.SelectionError, match=r"the calls are act\.1 alone"):
        program.select("act.1@1")
    with pytest.raises(whence.SelectionError, match="no module fits"):
        program.select("type=Conv2d")


BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Named(nn.Module):
    """Regions, one in the other, an annotation of PyTorch's, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with whence.region("mixing"):
            x = self.lin(x)
            with whence.region("shape"):
                x = x.sin()
        with torch.fx.traceback.annotate({"stage": 1}):
            return self.norm(x) * self.scale * torch.tensor([1.0, 2.0, 3.0, 4.0])


@pytest.fixture(scope="module")
def named() -> whence.Program:
    return whence.capture(Named(), (torch.randn(3, 4),), backward=sine_loss)


def test_regions_of_the_user(named: whence.Program) -> None:
    """A region has the regions inside it, and its backward; their names are globs."""
    mixing, shape = named.select("region=mixing :: forward"), named.select("region=mixing.shape")
    assert operations(mixing) == ["aten.t.default", "aten.addmm.default", "aten.sin.default"]
    assert operations(shape) == ["aten.sin.default", "aten.cos.default", "aten.mul.Tensor"]
    assert named.select("region=*.shape") == shape
    assert named.select("region=mixing :: aten.mm :: backward")


def test_annotations_of_others(named: whence.Program) -> None:
    """What `torch.fx.traceback.annotate` says, under any key."""
    assert {str(named.where(node).place) for node in named.select("stage=1")} == {"norm", ""}
    with pytest.raises(whence.SelectionError) as caught:
        named.select("stage=2")
    assert "there are 1" in caught.value.remedy
    with pytest.raises(whence.SelectionError, match="no annotation fits") as caught:
        named.select("step=2")
    assert "no operation is annotated with step" in caught.value.remedy


def test_a_region_changes_nothing(named: whence.Program) -> None:
    """It is no part of what a capture depends on."""
    model = Named()
    program, x = whence.capture(model, (torch.randn(3, 4),)), torch.randn(3, 4)
    assert program.check(model, (x,)) == [] and program.verify(model, (x,)).ok


@pytest.mark.parametrize(
    ("pattern", "paths_of"),
    [
        ("kind=user", ["args[0]"]),
        ("kind=parameter", ["lin.weight", "lin.bias", "norm.weight", "norm.bias"]),
        ("lin :: kind=parameter", ["lin.weight", "lin.bias"]),
        (
            "type=BatchNorm* :: kind=buffer",
            ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"],
        ),
        ("kind=constant", ["scale", "lifted_tensor_0"]),
    ],
)
def test_inputs_by_kind(named: whence.Program, pattern: str, paths_of: list[str]) -> None:
    """Placeholders of a kind, and of the modules of a path or a class."""
    found = [named.input(node.name).path for node in named.select(pattern)]
    assert sorted(found) == sorted(paths_of)


def test_attributes_by_kind() -> None:
    """State that a graph reads by `get_attr`, too."""
    program = whence.capture(Named(), (torch.randn(3, 4),), state="attributes")
    assert {node.op for node in program.select("lin :: kind=parameter")} == {"get_attr"}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("kind=weight", "'weight' is no kind of input"),
        ("kind=", "'' is no kind of input"),
        ("kind=tangent", "no input fits"),
        ("norm :: kind=constant", "no input fits"),
        ("lin :: kind=parameter :: forward", "they have none"),
        ("stage=1 :: kind=parameter", "they have none"),
    ],
)
def test_inputs_that_are_not_there(named: whence.Program, pattern: str, message: str) -> None:
    """Each says what there is, or why it cannot be asked."""
    with pytest.raises(whence.SelectionError, match=message):
        named.select(pattern)


def test_constants_have_an_origin(named: whence.Program) -> None:
    """The call and line that read it first: attributes of the model and literals, in plain data, too."""
    for node in named.select("kind=constant"):
        origin = named.where(node)
        assert origin.quality == "inferred" and origin.source is not None
        assert origin.source.function == "Named.forward" and str(origin.calls[0]) == ""
        (row,) = (row for row in named.to_dict()["nodes"] if row["name"] == node.name)
        assert row["origin"]["source"] == str(origin.source)
    assert named.where("p_lin_weight").quality == "none"
