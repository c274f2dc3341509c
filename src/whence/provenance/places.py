"""Where a sum of gradients belongs, so that the backward of every module call stays one convex region.

A scope is a number; `parents[scope]` is the scope around it and scope 0 is the program. The rule keeps the
order of floating-point additions, because nothing is regrouped: it only decides which graph holds a sum.
"""

from collections.abc import Sequence

PROGRAM = 0


def ancestors(parents: Sequence[int], scope: int) -> list[int]:
    """The scope itself and every scope around it, innermost first; ends with the program."""
    chain = [scope]
    while chain[-1] != PROGRAM:
        chain.append(parents[chain[-1]])
    return chain


def common_ancestor(parents: Sequence[int], scopes: Sequence[int]) -> int:
    """The innermost scope that contains all of `scopes`."""
    shared = ancestors(parents, scopes[0])
    for scope in scopes[1:]:
        around = set(ancestors(parents, scope))
        shared = [candidate for candidate in shared if candidate in around]
    return shared[0]


def accumulation_place(parents: Sequence[int], contributors: Sequence[int], producer: int) -> int:
    """The scope that holds the sum of the gradients that have arrived so far.

    `contributors` are the scopes of the consumers in order of arrival, the newest last; `producer` is the
    scope that made the value (the program, for a leaf). Where the contributors' common ancestor encloses the
    producer, the sum may sit as deep as the newest contributor and the producer share; otherwise it sits
    with the contributors.
    """
    shared = common_ancestor(parents, contributors)
    if shared in ancestors(parents, producer):
        return common_ancestor(parents, (producer, contributors[-1]))
    return shared
