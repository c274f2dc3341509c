"""The tree of calls used here: the program 0 calls the model 1, whose blocks 2 and 5 call 3, 4 and 6, 7."""

import pytest

from whence.provenance.places import accumulation_place, ancestors, common_ancestor

PARENTS = (0, 0, 1, 2, 2, 1, 5, 5)
PROGRAM, MODEL, BLOCK, ATTENTION, MLP, NEXT, NEXT_ATTENTION, NEXT_MLP = range(8)


def test_ancestors_go_from_the_scope_out() -> None:
    """The chain begins with the scope itself and ends with the program."""
    assert ancestors(PARENTS, ATTENTION) == [ATTENTION, BLOCK, MODEL, PROGRAM]


def test_program_is_its_only_ancestor() -> None:
    """Nothing is around the program."""
    assert ancestors(PARENTS, PROGRAM) == [PROGRAM]


@pytest.mark.parametrize(
    ("scopes", "expected"),
    [
        ([ATTENTION], ATTENTION),
        ([ATTENTION, MLP], BLOCK),
        ([ATTENTION, BLOCK], BLOCK),
        ([ATTENTION, NEXT_MLP], MODEL),
        ([ATTENTION, MLP, NEXT], MODEL),
        ([ATTENTION, PROGRAM], PROGRAM),
    ],
)
def test_common_ancestor_is_the_innermost(scopes: list[int], expected: int) -> None:
    """The innermost scope that contains all of them, which may be one of them."""
    assert common_ancestor(PARENTS, scopes) == expected


@pytest.mark.parametrize(
    ("contributors", "expected"),
    [
        ([ATTENTION, ATTENTION], ATTENTION),
        ([ATTENTION, MLP], BLOCK),
        ([NEXT_MLP, ATTENTION], MODEL),
        ([NEXT_MLP, NEXT_ATTENTION, ATTENTION], MODEL),
        ([PROGRAM, ATTENTION], PROGRAM),
    ],
)
def test_leaf_is_summed_where_its_users_meet(contributors: list[int], expected: int) -> None:
    """The sum over the uses of a parameter lies in the common ancestor of the calls that use it."""
    assert accumulation_place(PARENTS, contributors, PROGRAM) == expected


def test_consumers_inside_one_call_keep_the_sum_there() -> None:
    """A value from elsewhere that one block uses twice is summed inside that block."""
    assert accumulation_place(PARENTS, [NEXT_MLP, NEXT_ATTENTION], ATTENTION) == NEXT


def test_one_consumer_twice_keeps_the_sum_to_itself() -> None:
    """A value from elsewhere that one call uses twice is summed inside that call."""
    assert accumulation_place(PARENTS, [NEXT_MLP, NEXT_MLP], ATTENTION) == NEXT_MLP


def test_producer_that_consumes_last_takes_the_sum() -> None:
    """When the newest gradient comes from the producer itself, the sum lies inside the producer."""
    assert accumulation_place(PARENTS, [NEXT, ATTENTION], ATTENTION) == ATTENTION


def test_producer_inside_its_last_consumer_is_summed_in_the_consumer() -> None:
    """A value made inside the block that also uses it last is summed in that block."""
    assert accumulation_place(PARENTS, [NEXT, BLOCK], ATTENTION) == BLOCK


def test_consumers_around_the_producer_meet_outside_it() -> None:
    """When the newest gradient comes from beside the producer, the sum lies where the two meet."""
    assert accumulation_place(PARENTS, [BLOCK, MLP], ATTENTION) == BLOCK


def test_order_of_arrival_decides() -> None:
    """The same two consumers place the sum differently when they arrive the other way round."""
    assert accumulation_place(PARENTS, [ATTENTION, NEXT], ATTENTION) == MODEL
    assert accumulation_place(PARENTS, [NEXT, ATTENTION], ATTENTION) == ATTENTION


def test_residual_is_summed_by_the_block_that_made_it() -> None:
    """A value that a block makes, adds again and gives to a child is summed in the block."""
    assert accumulation_place(PARENTS, [BLOCK, MLP], BLOCK) == BLOCK


def test_third_gradient_of_a_residual_stream() -> None:
    """A stream read by the next block and twice by its own has its last sum in its own."""
    assert accumulation_place(PARENTS, [NEXT, BLOCK, MLP], BLOCK) == BLOCK


def test_early_sum_of_a_stream_stays_outside() -> None:
    """While only later blocks have contributed, the sum lies where they and the producer meet."""
    assert accumulation_place(PARENTS, [MODEL, NEXT], BLOCK) == MODEL


def test_program_is_the_place_of_the_program_s_own_values() -> None:
    """A value made outside all modules and used inside two of them is summed where those meet."""
    assert accumulation_place(PARENTS, [MLP, ATTENTION], PROGRAM) == BLOCK
