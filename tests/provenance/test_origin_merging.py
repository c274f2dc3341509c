"""Where an operation comes from that a pass made of others."""

from collections.abc import Sequence

import pytest

from whence import CallSite, ModulePath, Origin, Phase, Quality, Source
from whence.provenance.origin import merged

LEFT, RIGHT = (CallSite(ModulePath.parse(name), 0, "Linear") for name in ("left", "right"))


def nowhere(_: Sequence[CallSite | None]) -> CallSite | None:
    return None


def origin(call: CallSite = LEFT, quality: Quality = Quality.EXACT, **options: object) -> Origin:
    return Origin(Phase.FORWARD, (call,), quality, place=call, **options)  # type: ignore[arg-type]


def test_every_contributor_is_named() -> None:
    """All calls once, in order; the place is what encloses them."""
    found = merged([origin(LEFT), origin(RIGHT), origin(LEFT)], nowhere, "fuse")
    assert (found.calls, found.place, found.passes) == ((LEFT, RIGHT), None, ("fuse",))


@pytest.mark.parametrize(
    ("qualities", "expected"),
    [
        ([Quality.EXACT], Quality.INFERRED),
        ([Quality.EXACT, Quality.ACCUMULATED], Quality.INFERRED),
        ([Quality.INFERRED, Quality.NONE], Quality.NONE),
    ],
)
def test_quality_is_not_overstated(qualities: list[Quality], expected: Quality) -> None:
    """Nobody saw it run: inferred, and none where one of them is not known."""
    assert merged([origin(quality=each) for each in qualities], nowhere, "fuse").quality is expected


def test_the_latest_phase_and_the_last_line() -> None:
    """It cannot run before what it was made of; a hook only where all agree; each pass once, in order."""
    line = Source("model.py", 3, "forward")
    first = origin(hook="a", passes=("fuse", "cse"), recomputed=True)
    last = Origin(Phase.BACKWARD, (RIGHT,), source=line, forward="mm")
    found = merged([last, first, last], nowhere, "fuse")
    assert (found.phase, found.source, found.forward) == (Phase.BACKWARD, line, "mm")
    assert (found.hook, found.recomputed, found.passes) == (None, False, ("cse", "fuse"))
