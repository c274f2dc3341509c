"""Every node of every model of the table knows where it came from."""

import pytest

from tests.checks import captured
from tests.models import MODEL_CASES
from whence import Phase, Program, Quality
from whence.program.node_records import has_origin, origin_of

NAMES = [row.name for row in MODEL_CASES]
MODES = ["forward", "loss"]
EVERY_PROGRAM = pytest.mark.parametrize(("name", "mode"), [(name, mode) for name in NAMES for mode in MODES])


def operations(program: Program) -> list[tuple[str, object]]:
    return [
        (n.name, origin_of(n)) for n in program.nodes() if n.op not in ("placeholder", "output", "get_attr")
    ]


@pytest.mark.sample(35)
@EVERY_PROGRAM
def test_every_operation_has_a_sure_origin(name: str, mode: str) -> None:
    """The origin of every operation was seen, or is a sum whose contributors were."""
    program = captured(name, mode)
    nodes = [node for node in program.nodes() if node.op == "call_function"]
    unsure = [n.name for n in nodes if origin_of(n).quality not in (Quality.EXACT, Quality.ACCUMULATED)]
    assert [node.name for node in nodes if not has_origin(node)] == []
    assert unsure == []


@pytest.mark.sample(24)
@EVERY_PROGRAM
def test_every_sum_of_several_calls_is_accumulated(name: str, mode: str) -> None:
    """Only an accumulation names several calls, and quality never says more than is known."""
    nodes = [node for node in captured(name, mode).nodes() if len(origin_of(node).calls) > 1]
    assert {origin_of(node).quality for node in nodes} <= {Quality.ACCUMULATED}


@EVERY_PROGRAM
def test_every_forward_operation_has_a_source_line(name: str, mode: str) -> None:
    """Every operation of the forward points at a line of Python."""
    nodes = [node for node in captured(name, mode).nodes() if node.op == "call_function"]
    forward = [node for node in nodes if origin_of(node).phase is Phase.FORWARD]
    assert [node.name for node in forward if origin_of(node).source is None] == []


@EVERY_PROGRAM
def test_every_operation_of_the_model_belongs_to_a_call(name: str, mode: str) -> None:
    """Outside any module there is nothing but the loss function and sums that reach it."""
    program = captured(name, mode)
    outside = [n for n in program.nodes() if n.op == "call_function" and not origin_of(n).calls]
    if mode == "forward":
        assert [node.name for node in outside] == []
    lines = {origin_of(n).source.file for n in outside if origin_of(n).source}  # type: ignore[union-attr]
    assert all(file.endswith("tests/models.py") or "/torch/" in file for file in lines)


@pytest.mark.parametrize("name", NAMES)
def test_backward_nodes_lead_to_forward_nodes(name: str) -> None:
    """The forward node that a backward node names is there, and runs in the forward."""
    program = captured(name, "loss")
    named = {origin_of(n).forward for n in program.nodes()} - {None}
    assert named
    assert {program.where(str(forward)).phase for forward in named} == {Phase.FORWARD}
