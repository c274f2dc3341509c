import pytest
from expecttest import assert_expected_inline

import whence
from tests.checks import captured
from tests.program.small import stack_program


@pytest.fixture(scope="module")
def calls() -> whence.Calls:
    return stack_program().calls


def test_calls_are_in_the_order_made(calls: whence.Calls) -> None:
    """Callers come before what they call, and calls in the order in which the model made them."""
    layer = ["", ".attention", ".mlp", ".mlp.0", ".mlp.1"]
    expected = ["", *(f"layers.0{p}" for p in layer), *(f"layers.1{p}" for p in layer), "head"]
    assert [str(call.site) for call in calls] == expected


def test_length_counts_module_calls(calls: whence.Calls) -> None:
    """The program itself is not counted among the calls."""
    assert len(calls) == len(list(calls)) == 12


def test_program_is_number_zero(calls: whence.Calls) -> None:
    """The captured callable is the first row, and its own caller."""
    assert (calls.program.number, calls.program.parent) == (0, 0)


def test_call_by_path(calls: whence.Calls) -> None:
    """A call is found by the path of its module and which time it was called."""
    call = calls.at("layers.1.mlp", 0)
    assert (str(call.site.path), call.site.index, call.site.type) == ("layers.1.mlp", 0, "Sequential")


def test_children_are_the_calls_made_directly(calls: whence.Calls) -> None:
    """The children of a call are what it called itself, not what those called in turn."""
    assert [str(c.site) for c in calls.children(calls.at("layers.0"))] == [
        "layers.0.attention",
        "layers.0.mlp",
    ]


def test_chain_goes_out_to_the_model(calls: whence.Calls) -> None:
    """The chain of a call is the call and its callers, innermost first, without the program."""
    chain = calls.chain(calls.at("layers.0.mlp.0"))
    assert [str(call.site) for call in chain] == ["layers.0.mlp.0", "layers.0.mlp", "layers.0", ""]


def test_call_knows_what_it_took_and_gave(calls: whence.Calls) -> None:
    """A call's inputs and outputs are structures over nodes of the graph."""
    layer, attention = calls.at("layers.0"), calls.at("layers.0.attention")
    assert layer.inputs is not None and attention.inputs is not None and attention.outputs is not None
    assert layer.inputs.names == attention.inputs.names == ("features",)
    assert attention.outputs.names == ("linear",)


@pytest.mark.parametrize(("path", "index", "made"), [("layers.0", 1, 1), ("layers", 0, 0), ("nowhere", 0, 0)])
def test_call_that_was_not_made(calls: whence.Calls, path: str, index: int, made: int) -> None:
    """Asking for a call that was not made says how often the module was called."""
    with pytest.raises(whence.SelectionError, match=f"called {made} times"):
        calls.at(path, index)


def test_calls_as_text() -> None:
    """The tree of calls names each path and class; a long run of equal layers is shown once."""
    assert_expected_inline(
        str(stack_program(depth=4).calls),
        """\
(root): Stack
  layers.0 … 3  × 4: Layer
    layers.0.attention: Linear
    layers.0.mlp: Sequential
      layers.0.mlp.0: Linear
      layers.0.mlp.1: ReLU
  head: Linear""",
    )


def test_calls_of_one_module_as_text() -> None:
    """Calls of one module are a run, too."""
    assert_expected_inline(
        str(captured("shared_layer", "forward").calls),
        """\
(root): SharedLayer
  block  × 4: Mlp
    block.norm: LayerNorm
    block.up: Linear
    block.down: Linear
    block.dropout: Dropout
  head: Linear""",
    )


def test_neighbours_with_names_of_their_own_are_shown() -> None:
    """Modules of one class that are called by name are all there."""
    lines = str(captured("llama", "forward").calls)
    assert "k_proj: Linear" in lines and "v_proj: Linear" in lines
