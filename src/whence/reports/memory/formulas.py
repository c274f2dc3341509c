"""What memory takes over the names of open sizes, as Python source.

Where the peak is may depend on sizes. While an operation runs, a sum of products of sizes is alive; one that
is at least another, whatever the sizes are (of two and more), makes that no peak. What is left over are all
places where the peak can be, and it is the largest of what is alive there.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import fx

from whence._torch.sizes.symbols import is_multiple, spelled_sum, terms_of
from whence.reports.cost import is_open
from whence.reports.memory.storages import Storages

Terms = Counter[object]
"""A sum of products of sizes, each with how often it occurs."""


def formulas_in(storages: Storages) -> tuple[dict[str, str], dict[str, str]]:
    """Of `kept bytes`, and of `peak bytes` where one place has the peak at all sizes; and what is alive at
    each place that can have it. Those are left out to which something adds that has no formula."""
    if storages.undecided or not any(is_open(node.meta.get("val")) for node in storages.nodes):
        return {}, {}
    formulas: dict[str, str] = {}
    if not any(map(storages.is_unknown, storages.readings)):
        formulas["kept bytes"] = spelled_sum(_sum(storages, storages.readings))
    peaks = {} if storages.has_more_than_shapes_say else _peaks(storages)
    if len(peaks) == 1:
        (formulas["peak bytes"],) = peaks.values()
    return formulas, peaks


def _sum(storages: Storages, bases: Mapping[fx.Node, object]) -> Terms:
    found = Terms()
    for base in bases:
        found.update(terms_of(storages.open_size(base)))
    return found


def _peaks(storages: Storages) -> dict[str, str]:
    found: list[tuple[fx.Node, Terms]] = []
    for node, alive in _alive(storages):
        if not any(_covers(terms, alive) for _, terms in found):
            found = [(other, terms) for other, terms in found if not _covers(alive, terms)]
            found.append((node, alive))
    return {node.name: spelled_sum(terms) for node, terms in found}


def _alive(storages: Storages) -> Iterator[tuple[fx.Node, Terms]]:
    """What is alive while each node runs."""
    alive, changes = Terms(), [(Terms(), Terms()) for _ in range(len(storages.nodes) + 1)]
    for base in storages.size:
        terms = terms_of(storages.open_size(base))
        for first, last in storages.spans[base]:
            changes[first][0].update(terms)
            changes[last][1].update(terms)
    for node, (begins, ends) in zip(storages.nodes, changes, strict=False):
        alive.update(begins)
        meanwhile = Terms(alive)
        meanwhile.update(terms_of(storages.open_unread(node)))
        yield node, meanwhile
        alive.subtract(ends)


def _covers(more: Terms, less: Terms) -> bool:
    """Whether a sum is at least another, whatever the sizes are."""
    over = {term: more[term] - less[term] for term in more if more[term] > less[term]}
    for term in less.keys() | more.keys():
        missing = less[term] - more[term]
        for other in over if missing > 0 else ():
            taken = min(missing, over[other]) if is_multiple(other, term) else 0
            over[other] -= taken
            missing -= taken
        if missing > 0:
            return False
    return True
