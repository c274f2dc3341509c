"""The table of constructions from third-party libraries; each row is tiny and has random weights."""

from tests.libraries import (
    adapters,
    diffusion,
    geometry,
    graphs,
    optimizers,
    probabilistic,
    sequences,
    vision,
)
from tests.libraries.rows import LibraryCase

_FILES = (adapters, diffusion, geometry, graphs, optimizers, probabilistic, sequences, vision)

ROWS: tuple[LibraryCase, ...] = tuple(row for file in _FILES for row in file.row.written)
LIBRARIES = sorted({name.partition(".")[0] for row in ROWS for name in row.libraries})
