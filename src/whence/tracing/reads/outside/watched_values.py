"""Objects that code names outside of the model: what is read of them, wherever that is, may decide."""

from collections.abc import Callable
from types import CodeType
from typing import Any

from whence._torch.observe.attribute_reads import NOTHING
from whence.dependence.lookup import static_attribute
from whence.dependence.snapshots import attributes_and_slots
from whence.program.arguments.optimizer_arguments import Outside
from whence.provenance import Source
from whence.tracing.reads.code_words import NO_WORDS
from whence.tracing.reads.held_values import attribute_of, is_computed
from whence.tracing.reads.named_values import NamedValues


class WatchedValues(NamedValues):
    """Collects values, and what is read of objects among them, which `observe` has told of their reads."""

    def __init__(
        self,
        is_user: Callable[[CodeType], bool],
        is_inside: Callable[[object], bool],
        observe: Callable[[object], bool],
    ) -> None:
        super().__init__(is_user, is_inside)
        self._observe = observe
        self._places: dict[int, tuple[Outside, dict[str, Any]]] = {}

    def read(self, holder: object, name: str, where: Callable[[], tuple[object, Source | None]]) -> bool:
        """An attribute of an object was looked up, and `where`; False for an object that no code names."""
        if (place := self._places.get(id(holder))) is None:
            return False
        found, before = place
        own, held = attributes_and_slots(holder), static_attribute(holder, name)
        is_written = name in own and before.get(name, NOTHING) is not held
        if not is_written and not is_computed(held):
            self.walk(attribute_of(found, name, held), where()[1], NO_WORDS)
        return True

    def _watch(self, found: Outside) -> None:
        """Note what an object holds, which may be written before it is read."""
        held = found.value
        if id(held) not in self._places and self._observe(held):
            self._places[id(held)] = found, dict(attributes_and_slots(held))
