"""Numbers of Python and NumPy are drawn by an operator as they are by the functions themselves."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from whence._torch.sizes.drawn_numbers import DRAWN, are_whole_or_one, draw_of

CALLS: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
    ("random.random", random.random, (), {}),
    ("random.uniform", random.uniform, (1, 2.5), {}),
    ("random.randint", random.randint, (0, 9), {}),
    ("random.randrange", random.randrange, (0, 10, 2), {}),
    ("random.gauss", random.gauss, (), {"mu": 1.0, "sigma": 0.5}),
    ("random.choice", random.choice, ("abcdef",), {}),
    ("random.choices", random.choices, ("abcdef",), {"k": 3, "weights": [1, 2, 3, 4, 5, 6]}),
    ("random.sample", random.sample, (range(5, 50), 4), {}),
    ("numpy.random.rand", np.random.rand, (), {}),
    ("numpy.random.randint", np.random.randint, (1, 7), {}),
    ("numpy.random.beta", np.random.beta, (0.5, 0.5), {}),
    ("numpy.random.choice", np.random.choice, (5,), {}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_a_draw_is_the_function_s(call: tuple[str, Any, tuple[Any, ...], dict[str, Any]]) -> None:
    """The same number from the same seed, by the function, noted down, and by the operator."""
    name, function, args, kwargs = call
    found, places = [], []
    draw = draw_of(name, args, kwargs)
    assert draw is not None
    for way in range(3):
        random.seed(1)
        np.random.seed(1)
        if way == 0:
            found.append(function(*args, **kwargs))
        elif way == 1:
            places.append(draw.by(function))
            found.append(draw.finished(places[0]))
        else:
            assert are_whole_or_one(places[0])
            count = len(places[0]) if isinstance(places[0], list) else -1
            made = DRAWN(draw.function, draw.arguments, not isinstance(places[0], float), count)
            found.append(draw.finished(made.tolist()))
    assert found[0] == found[1] == found[2]


def test_an_order_is_drawn() -> None:
    """What is shuffled is put into the same order."""
    expected, held = list("abcdefg"), list("abcdefg")
    random.seed(3)
    random.shuffle(expected)
    random.seed(3)
    draw = draw_of("random.shuffle", (held,), {})
    assert draw is not None
    draw.finished(draw.by(random.shuffle))
    assert held == expected


def test_other_functions_draw_nothing() -> None:
    """Nothing else is called, whatever a file says."""
    assert draw_of("random.seed", (0,), {}) is None
    assert draw_of("random.uniform", (torch.ones(()), 2), {}) is None
    with pytest.raises(ValueError, match="draws no numbers"):
        DRAWN("os.getpid", "[[], {}]", True, -1)
