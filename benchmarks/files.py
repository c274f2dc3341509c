"""Programs in files, beside PyTorch's exported programs, and beside capturing again."""

from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import torch

import whence
from benchmarks.captures import joint_program
from benchmarks.meta import LENGTH
from benchmarks.models import batch, labelled, large_llama, llama, loss, meta_batch
from benchmarks.results import Figures
from benchmarks.timing import Repeats, Work, alone, compared


def saving(layers: int, repeats: Repeats) -> Figures:
    """`program.save` with weights against `torch.export.save`."""
    pair = _Pair(layers)
    return compared(pair.save, pair.save_theirs, repeats)


def loading(layers: int, repeats: Repeats) -> Figures:
    """`whence.load` with weights against `torch.export.load`."""
    pair = _Pair(layers)
    pair.save()
    pair.save_theirs()
    return compared(pair.load, pair.load_theirs, repeats)


def large(what: str, repeats: int) -> Figures:
    """Seconds to save or load a joint program of 405 B on meta, or to compare it with itself."""
    program, path = _large()
    program.save(path)
    works: dict[str, Work] = {"save": partial(program.save, path), "load": partial(whence.load, path)}
    works["diff"] = partial(program.diff, program)
    note = f"{len(program.graph.nodes):,} nodes, {_mebibytes(path)} MiB"
    return Figures(alone(works[what], repeats), None, "s", note)


def instead_of_capture(layers: int, repeats: Repeats) -> Figures:
    """A joint program from a cache, guards and code checked, against its capture."""
    model, inputs, folder = llama(layers), labelled(batch()), mkdtemp()
    kept = partial(whence.cached, model, (), inputs, directory=folder, backward=loss)
    kept()
    return compared(kept, partial(whence.capture, model, (), inputs, backward=loss), repeats)


class _Pair:
    """One forward program of ours and of PyTorch's, with a file for each."""

    def __init__(self, layers: int) -> None:
        model, folder = llama(layers), Path(mkdtemp())
        self.ours, self.theirs = folder / "ours.whence", folder / "theirs.pt2"
        self.program = whence.capture(model, (), batch())
        self.exported = torch.export.export(model, (), batch(), strict=False)

    def save(self) -> None:
        """Ours."""
        self.program.save(self.ours)

    def save_theirs(self) -> None:
        """PyTorch's."""
        torch.export.save(self.exported, self.theirs)

    def load(self) -> object:
        """Ours."""
        return whence.load(self.ours)

    def load_theirs(self) -> object:
        """PyTorch's."""
        return torch.export.load(self.theirs)


@cache
def _large() -> tuple[whence.Program, Path]:
    inputs = labelled(meta_batch(1, LENGTH))
    return joint_program(large_llama("405b"), inputs), Path(mkdtemp()) / "405b.whence"


def _mebibytes(path: Path) -> float:
    return round(path.stat().st_size / 2**20, 1)
