import pytest

from whence.hierarchy.plan.planning import CyclicError, topological


def ranked(*parts: str | int) -> dict[str | int, int]:
    return {part: rank for rank, part in enumerate(parts)}


def test_parts_come_after_what_they_wait_for() -> None:
    """A part runs after all parts it waits for, whatever its rank."""
    waits: dict[str, set[str]] = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert topological(waits, ranked("a", "b", "c")) == ("c", "b", "a")


def test_rank_decides_among_the_ready() -> None:
    """Among the parts that are ready the one of the lowest rank runs first."""
    waits: dict[str, set[str]] = {"a": set(), "b": set(), "c": {"a"}}
    assert topological(waits, ranked("b", "a", "c")) == ("b", "a", "c")


def test_nodes_and_calls_are_ordered_together() -> None:
    """Nodes are names and calls are numbers, and both are parts of one order."""
    waits: dict[str | int, set[str | int]] = {"add": {3}, 3: {"mul"}, "mul": set()}
    assert topological(waits, ranked("mul", 3, "add")) == ("mul", 3, "add")


def test_newly_ready_part_of_a_lower_rank_runs_before_a_higher_one() -> None:
    """A part that becomes ready late still runs before parts of a higher rank."""
    waits: dict[str, set[str]] = {"d": set(), "a": {"d"}, "b": set(), "c": set()}
    assert topological(waits, ranked("d", "a", "b", "c")) == ("d", "a", "b", "c")


def test_order_does_not_depend_on_the_order_of_the_mapping() -> None:
    """The same parts in another order of insertion come out the same."""
    waits: dict[str, set[str]] = {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"b", "c"}}
    backwards = dict(reversed(waits.items()))
    rank = ranked("a", "c", "b", "d")
    assert topological(waits, rank) == topological(backwards, rank) == ("a", "c", "b", "d")


def test_nothing_is_in_order() -> None:
    """No parts give no order."""
    assert topological({}, {}) == ()


@pytest.mark.parametrize(
    ("waits", "circle"),
    [
        ({"a": {"b"}, "b": {"a"}}, {"a", "b"}),
        ({"a": {"a"}}, {"a"}),
        ({"a": set(), "b": {"d", "a"}, "c": {"b"}, "d": {"c"}, "e": {"d"}}, {"b", "c", "d"}),
    ],
)
def test_circle_is_named(waits: dict[str, set[str]], circle: set[str]) -> None:
    """Parts that wait for each other raise an error with exactly the parts on the circle."""
    with pytest.raises(CyclicError) as caught:
        topological(waits, ranked(*waits))
    assert caught.value.parts == circle
    assert all(part in str(caught.value) for part in circle)
