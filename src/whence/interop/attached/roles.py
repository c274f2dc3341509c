"""What each input and output of a graph from elsewhere is: what was said, and what the graph says itself.

In this order: words (`inputs`, `outputs`); descriptors; the identity of tensors, among the arguments that the
graph was traced with or in its attributes; names that Dynamo gave; the order that `state_first` stands for.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from whence._torch.export.descriptors import DescribedValue, described
from whence._torch.pytrees import tree_flatten
from whence.errors import Fault
from whence.interop.graphs.lift_state import ATTRIBUTE
from whence.program.arguments.convention import paths_of
from whence.program.signature import describe
from whence.schema import InputKind, OutputKind
from whence.tracing.target.subject import StateTensor

_SAY = "say it: attach(..., inputs=[...]) with a qualified name or the user's own name for each input"
_SAY_OUTPUTS = (
    "say it: attach(..., outputs=[...]) with 'loss', 'output', 'gradient of NAME', 'new NAME', or 'gradients'"
)


@dataclass(frozen=True)
class GraphWords:
    """What the caller says about a graph."""

    args: tuple[Any, ...] | None = None
    kwargs: Mapping[str, Any] | None = None
    inputs: Sequence[str] | None = None
    outputs: Sequence[str | None] | None = None
    state_first: bool = False
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Any]:
        """The flat arguments that the graph was traced with, or none."""
        return tree_flatten((self.args or (), dict(self.kwargs or {})))[0]

    @property
    def paths(self) -> tuple[str, ...]:
        """How each of them is reached."""
        return paths_of(self.args or (), dict(self.kwargs or {}))


@dataclass(frozen=True)
class Slot:
    """What one input is. `leaf` is its position among the arguments, `of` that of the result of a tangent."""

    node: fx.Node
    kind: InputKind
    path: str
    state: StateTensor | None = None
    leaf: int | None = None
    of: int | None = None


@dataclass(frozen=True)
class Result:
    """What one output is; `of` names the state, or the path of the argument, that it belongs to."""

    value: Any
    kind: OutputKind
    of: str | None = None


@dataclass(frozen=True)
class Told:
    """All inputs and outputs, and everything that does not fit."""

    slots: list[Slot] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


class Teller:
    """Finds out what the inputs are, one after the other."""

    def __init__(self, state: Sequence[StateTensor], words: GraphWords, nodes: Sequence[fx.Node]) -> None:
        self.rows = {str(path): row for row in state for path in row.paths}
        self.words = words
        self.faults: list[Fault] = []
        self._by_tensor = {id(row.tensor): row for row in state}
        self._dynamo = {re.sub(r"\W", "_", name): row for name, row in self.rows.items()}
        self._open = [node for node in nodes if ATTRIBUTE not in node.meta]
        self._knows_state = len(self._open) < len(nodes) or any(map(self._is_state, nodes))
        self._leaves = self._match_leaves()
        self._ordered = list(state) if words.state_first else []
        self._taken: list[int] = []

    def _match_leaves(self) -> dict[fx.Node, int]:
        """The argument that each input takes: all leaves in order, or all tensors among them."""
        if self.words.args is None and self.words.kwargs is None:
            return {}
        open_nodes = [node for node in self._open if not self._is_state(node)]
        positions = list(range(len(self.words.leaves)))
        tensors = [at for at in positions if isinstance(self.words.leaves[at], Tensor)]
        for nodes in (self._open, open_nodes):
            for found in (positions, tensors):
                if len(nodes) == len(found):
                    return dict(zip(nodes, found, strict=True))
        what = f"the graph takes {len(open_nodes)} inputs besides its state"
        what += f", and args and kwargs hold {len(tensors)}"
        self.faults.append(
            Fault(f"{what} tensors", remedy="pass the arguments that the graph was traced with")
        )
        return {}

    def _is_state(self, node: fx.Node) -> bool:
        known = described(node.meta.get("desc"))
        told = known is not None and (known.state is not None or known.role == "tangent")
        return told or self._of_dynamo(node) is not None

    def slot(self, at: int, node: fx.Node) -> Slot:
        """What the input number `at` is."""
        if ATTRIBUTE in node.meta:
            return self._attribute(node)
        if self.words.inputs is not None:
            return self._worded(node, self.words.inputs, at)
        known = described(node.meta.get("desc"))
        if known is not None:
            return self._described(node, known)
        if (row := self._of_dynamo(node)) is not None:
            return _state_slot(node, row)
        if node in self._leaves:
            held = self.words.leaves[self._leaves[node]]
            row = self._by_tensor.get(id(held))
            return self._argument(node, self._leaves[node]) if row is None else _state_slot(node, row)
        if self._ordered:
            return _state_slot(node, self._ordered.pop(0))
        return self._unsaid(node)

    def _attribute(self, node: fx.Node) -> Slot:
        row = self._by_tensor.get(id(node.meta[ATTRIBUTE])) or self._named(str(node.meta["target"]))
        if row is not None:
            return _state_slot(node, row)
        return Slot(node, InputKind.CONSTANT, str(node.meta["target"]))

    def _worded(self, node: fx.Node, words: Sequence[str], at: int) -> Slot:
        word = words[at] if at < len(words) else node.name
        row = self.rows.get(word)
        return Slot(node, InputKind.USER, word, leaf=self._next()) if row is None else _state_slot(node, row)

    def _described(self, node: fx.Node, known: DescribedValue) -> Slot:
        if known.state is not None and not known.role:
            row = self._named(known.state)
            if row is not None:
                return _state_slot(node, row)
            self.faults.append(
                Fault(f"{node.name} is {known.state}, which the model does not have", remedy=_SAY)
            )
        elif known.role == "tangent" and known.result is not None:
            return Slot(node, InputKind.TANGENT, f"result {known.result}", of=known.result)
        elif known.argument is not None and not known.role:
            at = self._leaves.get(node)
            return self._argument(node, known.argument) if at is None else self._argument(node, at)
        else:
            what = f"{node.name} is a {known.other or known.role}, which a program has no place for"
            self.faults.append(Fault(what, remedy="export the joint graph without it"))
        return Slot(node, InputKind.USER, node.name, leaf=self._next())

    def _named(self, name: str) -> StateTensor | None:
        flat = self.words.names.get(name, name)
        return self.rows.get(flat) or self.rows.get(name) or self._dynamo.get(_dynamo_tail(name))

    def _of_dynamo(self, node: fx.Node) -> StateTensor | None:
        name = str(node.target)
        return self._named(name) if name.startswith("L_") and "desc" not in node.meta else None

    def _argument(self, node: fx.Node, leaf: int) -> Slot:
        paths = self.words.paths
        return Slot(node, InputKind.USER, paths[leaf] if leaf < len(paths) else f"args[{leaf}]", leaf=leaf)

    def _next(self) -> int:
        self._taken.append(len(self._taken))
        return self._taken[-1]

    def _unsaid(self, node: fx.Node) -> Slot:
        if not self.words.state_first and self.rows and not self._knows_state:
            self.faults.append(Fault(f"it is not known what the input {node.name} is", remedy=_SAY))
        at = self._next()
        return Slot(node, InputKind.USER, f"args[{at}]", leaf=at)


def _state_slot(node: fx.Node, row: StateTensor) -> Slot:
    return Slot(node, row.kind, str(row.paths[0]), state=row)


def _dynamo_tail(name: str) -> str:
    """`head_weight` for `L_self_modules_head_parameters_weight_`, or `L__self___head_weight`."""
    text = re.sub(r"^L_+[a-z]+_+?(?=modules_|parameters_|buffers_)", "_", name)
    if text != name:
        return re.sub(r"_?(?:modules|parameters|buffers)_", "_", text).strip("_")
    return re.sub(r"^L__\w+?___", "", name)


def told(
    nodes: Sequence[fx.Node], returned: Sequence[Any], state: Sequence[StateTensor], words: GraphWords
) -> Told:
    """What all inputs and outputs are, with every fault."""
    if words.inputs is not None and (faults := list(_word_faults("inputs", words.inputs, _SAY))):
        return Told(faults=faults)
    teller = Teller(state, words, nodes)
    open_nodes = [node for node in nodes if ATTRIBUTE not in node.meta]
    positions = {node: at for at, node in enumerate(open_nodes)}
    slots = [teller.slot(positions.get(node, -1), node) for node in nodes]
    results, faults = _results(returned, slots, words, teller.rows)
    counted = _count_faults(words, open_nodes, teller.rows)
    return Told(slots, results, [*teller.faults, *counted, *_slot_faults(slots), *faults])


def _count_faults(
    words: GraphWords, nodes: Sequence[fx.Node], rows: Mapping[str, StateTensor]
) -> Iterator[Fault]:
    if words.inputs is not None and len(words.inputs) != len(nodes):
        yield Fault(f"inputs names {len(words.inputs)} inputs, and the graph has {len(nodes)}", remedy=_SAY)

    known = [word for word in words.inputs or () if word in rows]
    for word in sorted({word for word in known if known.count(word) > 1}):
        yield Fault(f"several inputs are said to be {word}", remedy=_SAY)


def _slot_faults(slots: Sequence[Slot]) -> Iterator[Fault]:
    """State that has another shape or dtype than in the model."""
    for slot in slots:
        if slot.state is None:
            continue
        tensor, value = slot.state.tensor, slot.node.meta.get("val")
        if isinstance(value, Tensor) and (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            what = f"{slot.node.name} is {describe(value)}, and {slot.path} is {describe(tensor)}"
            yield Fault(what, remedy="pass the model the graph was made from, and the state in its order")


def _results(
    returned: Sequence[Any], slots: Sequence[Slot], words: GraphWords, rows: Mapping[str, StateTensor]
) -> tuple[list[Result], list[Fault]]:
    if words.outputs is None:
        return _described_results(returned, slots)
    faults = list(_word_faults("outputs", words.outputs, _SAY_OUTPUTS))
    if faults:
        return [Result(value, OutputKind.USER) for value, _ in returned], faults
    expanded = _expanded(words.outputs, len(returned), rows)
    if len(expanded) != len(returned):
        what = f"outputs names {len(expanded)} outputs, and the graph returns {len(returned)}"
        return [Result(value, OutputKind.USER) for value, _ in returned], [Fault(what, remedy=_SAY_OUTPUTS)]
    results = []
    for word, (value, _) in zip(expanded, returned, strict=True):
        if word is None:
            results.append(
                Result(value, OutputKind.USER if isinstance(value, fx.Node) else OutputKind.GRADIENT)
            )
            continue
        kind, of = _output_of_word(word)
        owner = next((s for s in slots if of is not None and of in _spellings(s)), None)
        if of is not None and owner is None:
            faults.append(
                Fault(f"the output {word!r} belongs to {of}, which is no input", remedy=_SAY_OUTPUTS)
            )
        elif owner is not None and _differs(value, owner.node):
            found, wanted = _result_in_words(value), _result_in_words(owner.node)
            what = f"the output {word!r} is {found}, and {of} is {wanted}"
            faults.append(Fault(what, remedy=_SAY_OUTPUTS))
        if kind is OutputKind.LOSS and not _is_single_number(value):
            faults.append(
                Fault(f"the output 'loss' is {_result_in_words(value)}, not one number", remedy=_SAY_OUTPUTS)
            )
        results.append(Result(value, kind, None if owner is None else owner.path))
    return results, faults


def _is_single_number(value: Any) -> bool:
    held = value.meta.get("val") if isinstance(value, fx.Node) else None
    return isinstance(held, Tensor) and not held.dim()


def _spellings(slot: Slot) -> tuple[str, ...]:
    return (slot.path, *(map(str, slot.state.paths) if slot.state else ()))


def _word_faults(what: str, words: object, remedy: str) -> Iterator[Fault]:
    """What is no list of words, where None says nothing of an output."""
    if isinstance(words, str) or not isinstance(words, Sequence):
        yield Fault(f"{what} is {words!r}, and not a list", remedy=remedy)
        return
    for word in words:
        if not isinstance(word, str) and (what == "inputs" or word is not None):
            yield Fault(f"{what} holds {word!r}, which is no word", remedy=remedy)


def _output_of_word(word: str) -> tuple[OutputKind, str | None]:
    if word == "loss":
        return OutputKind.LOSS, None
    for start, kind in (("gradient of ", OutputKind.GRADIENT), ("new ", OutputKind.MUTATION)):
        if word.startswith(start):
            return kind, word.removeprefix(start)
    return OutputKind.USER, None


def _expanded(words: Sequence[str | None], count: int, rows: Mapping[str, StateTensor]) -> list[str | None]:
    """`gradients`, `new parameters` and `new buffers` stand for one output each of the model's, in order."""
    room = count - sum(word not in _ALL for word in words)
    found: list[str | None] = []
    for word in words:
        found += _every(word, rows, room) if word is not None and word in _ALL else [word]
    return found


_ALL = {"gradients": "gradient of", "new parameters": "new", "new buffers": "new"}


def _every(word: str, rows: Mapping[str, StateTensor], room: int) -> list[str]:
    wanted = {
        name: row
        for name, row in rows.items()
        if row.is_parameter is (word != "new buffers") and (word != "gradients" or row.tensor.requires_grad)
    }
    once = [name for name, row in wanted.items() if name == str(row.paths[0])]
    return [f"{_ALL[word]} {name}" for name in (wanted if len(wanted) == room else once)]


def _described_results(
    returned: Sequence[tuple[Any, Any]], slots: Sequence[Slot]
) -> tuple[list[Result], list[Fault]]:
    owners = {slot.node.meta.get("desc"): slot for slot in slots if slot.node.meta.get("desc") is not None}
    named = {_state_or_argument(described(descriptor)): slot.path for descriptor, slot in owners.items()}
    results, faults = [], []
    for value, descriptor in returned:
        known = described(descriptor)
        if named and known is None and value is None:
            results.append(Result(value, OutputKind.GRADIENT))  # of what takes none
        elif known is None or (known.result is not None and not known.role):
            results.append(Result(value, OutputKind.USER))
        elif known.role in ("gradient", "mutation") and _state_or_argument(known) in named:
            results.append(Result(value, OutputKind(known.role), named[_state_or_argument(known)]))
        else:
            what = f"an output is a {known.other or known.role}, which a program has no place for"
            faults.append(Fault(what, remedy=_SAY_OUTPUTS))
    return results, faults


def _state_or_argument(known: DescribedValue | None) -> tuple[str | None, int | None]:
    return (None, None) if known is None else (known.state, known.argument)


def _differs(value: Any, node: fx.Node) -> bool:
    """A gradient has the shape of what it is the gradient of; None stands for one that nothing computed."""
    held, expected = (getattr(each, "meta", {}).get("val") for each in (value, node))
    if not isinstance(value, fx.Node) or not isinstance(held, Tensor) or not isinstance(expected, Tensor):
        return False
    return bool(held.shape != expected.shape)


def _result_in_words(value: Any) -> str:
    return describe(value.meta.get("val")) if isinstance(value, fx.Node) else repr(value)
