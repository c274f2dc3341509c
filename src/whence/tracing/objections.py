"""What turns up, while a run goes on, against using what was recorded."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from whence._torch.tensors import without_functions, writes_to
from whence.tracing.reuse import AnotherAttempt, Reuse


class Doubt(AnotherAttempt):
    """A record turned out not to stand for a call it was used for: the capture begins again without it.

    `kind` is the class whose calls are not replayed then; None stands for all of them.
    """

    def __init__(self, kind: type | None, why: str) -> None:
        super().__init__(lambda assumed: assumed.but_for(kind, why), why)


def composite_opened() -> AnotherAttempt:
    """The model uses what a composite operator is made of: the capture begins again and takes all apart."""
    return AnotherAttempt(lambda reuse: replace(reuse, composites=False), "a composite is opened")


def result_opened() -> AnotherAttempt:
    """A result has become a container of tensors: the capture begins again, and looks into it everywhere."""
    return AnotherAttempt(lambda assumed: assumed, "a result is a container now")


class Objections:
    """Collects doubts about records that were used, and faults of the calls that are being watched.

    `_lent` are the tensors that replayed calls took and gave, by classes, with how often each had been
    written.
    """

    def __init__(self, reuse: Reuse) -> None:
        self._reuse = reuse
        self._doubts: list[AnotherAttempt] = []
        self._watched: list[list[str]] = []
        self._lent: list[tuple[type, list[tuple[Tensor, int]]]] = []

    @contextmanager
    def told_to(self, faults: list[str]) -> Iterator[None]:
        """What happens inside the block that is not for other calls is added to `faults`."""
        self._watched.append(faults)
        try:
            yield
        finally:
            self._watched.pop()

    def unfit(self, reason: str) -> None:
        """Something has happened that is not for other calls."""
        for faults in self._watched:
            faults.append(reason)

    def distrust(self, reason: str) -> None:
        """Something has happened that shows whether calls are replayed."""
        if self._replays:
            self._doubts.append(Doubt(None, reason))

    def give_up(self, reason: str) -> None:
        """Raise `Doubt` where calls are replayed: from here on, records would not even run."""
        if self._replays:
            raise self.remembered(Doubt(None, reason))

    @property
    def _replays(self) -> bool:
        return self._reuse.wanted and None not in self._reuse.without

    def remembered(self, doubt: AnotherAttempt) -> AnotherAttempt:
        """A doubt, which is remembered: the model may catch what is raised while it runs."""
        self._doubts.insert(0, doubt)
        return doubt

    def lend(self, kind: type, tensors: Iterable[Tensor]) -> None:
        """A replayed call takes or gives these: nobody may write to them."""
        self._lent.append((kind, [(tensor, writes_to(tensor)) for tensor in tensors]))

    def look_for_writes(self) -> None:
        """Look for writes to what replayed calls take or give; what comes from now on does not matter."""
        with without_functions():
            for kind, tensors in self._lent:
                if any(writes_to(tensor) != before for tensor, before in tensors):
                    self.remembered(Doubt(kind, "what it takes or gives is written in place afterwards"))
            self.release()

    def release(self) -> None:
        """Let go of what would hold itself: results lead to autograd's nodes, and those to their calls."""
        self._lent.clear()

    def check(self) -> None:
        """Raise `Doubt` if there is one, or if somebody has written to what was lent."""
        self.look_for_writes()
        for doubt in self._doubts:
            raise doubt
