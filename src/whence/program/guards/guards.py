"""What a capture assumed, as data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from whence.program.arguments.optimizer_arguments import Outside
from whence.program.guards.expectations import Reference
from whence.program.guards.page import page
from whence.program.guards.rows import Guard, Holder, Unguarded
from whence.program.queries.plain import OpensInNotebook, plain_fields


@dataclass(frozen=True, eq=False, repr=False)
class Guards(Sequence[Guard], OpensInNotebook):
    """Everything a capture assumed, in the order it was read, and what it does not watch.

    `holders` are the modules and objects that guards speak of, parents before children. `of` gives the
    captured callable while it lives: only there can an object be expected to be the same. `settled` are the
    guards once the model has run: for a model whose run changes what it read, and that does the same
    afterwards. The capture holds where all of either hold. `changes` are
    attributes that the model reads and then writes when it runs, which a program does not write. `variables`
    are where the guards of that kind look, in their order.
    """

    rows: tuple[Guard, ...] = ()
    holders: tuple[Holder, ...] = ()
    unguarded: tuple[Unguarded, ...] = ()
    of: Reference | None = None
    settled: "Guards | None" = None
    changes: tuple[str, ...] = ()
    variables: tuple[Outside, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __iter__(self) -> Iterator[Guard]:
        return iter(self.rows)

    def about(self, text: str) -> list[Guard]:
        """The guards whose subject contains `text`: a module path, an attribute, an input."""
        return [guard for guard in self.rows if text in guard.what]

    def __repr__(self) -> str:
        return f"<{len(self.rows):,} guards>"

    def __str__(self) -> str:
        return page(
            self.rows, self.holders, self.unguarded, () if self.settled is None else self.settled.rows
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "guards": [guard.to_dict() for guard in self.rows],
            "unguarded": [plain_fields(row, "what", "why") for row in self.unguarded],
        }
