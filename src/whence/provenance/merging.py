"""Where an operation comes from that a pass made of others."""

from collections.abc import Callable, Sequence

from whence.provenance.origin import CallSite, Origin
from whence.schema import Phase, Quality

_LATEST = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
Around = Callable[[Sequence[CallSite | None]], CallSite | None]
"""The innermost call around several; None is the program."""


def merged(origins: Sequence[Origin], around: Around, name: str) -> Origin:
    """The origin of an operation that the pass `name` put in the place of those with `origins`.

    It names every call that contributed, and its place is the innermost call around all their places. Its
    phase is the latest of theirs, its line that of the last. Nobody saw it run, so it is `inferred` at best.
    """
    last = origins[-1]
    unknown = any(origin.quality is Quality.NONE for origin in origins)
    return Origin(
        phase=max((origin.phase for origin in origins), key=_LATEST.index),
        calls=tuple(dict.fromkeys(call for origin in origins for call in origin.calls)),
        quality=Quality.NONE if unknown else Quality.INFERRED,
        source=last.source,
        forward=last.forward,
        place=around([origin.place for origin in origins]),
        recomputed=all(origin.recomputed for origin in origins),
        hook=last.hook if len({origin.hook for origin in origins}) == 1 else None,
        passes=(*dict.fromkeys(step for origin in origins for step in origin.passes if step != name), name),
    )
