"""Edit the graph of a program, and carry along where its operations come from."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic

from torch import fx
from typing_extensions import TypeVar

from whence._torch.graphs import fake_result, nested_graph, own_copy, replacements_told
from whence.errors import Fault, LostProvenance, Place, SelectionError, UsageError
from whence.program import FlatProgram
from whence.program.arguments.variants import alone
from whence.program.queries.history import History, PassEntry, changes_of
from whence.program.wellformed import Broken, shown
from whence.program.wellformed import faults as rules_broken
from whence.rewriting.edits.after import After, Told, after
from whence.rewriting.edits.before import WorkingCopy, before, clean, mark_of
from whence.rewriting.edits.carry import carried, carried_faults
from whence.rewriting.edits.faults import faults_of
from whence.rewriting.edits.origins import NodeSources, sources_of, write_origins

P = TypeVar("P", bound=FlatProgram, default=Any)
_STALE = "take nodes inside the block, from edit.graph or edit.node(name)"


class Edit(Generic[P]):
    """A block of edits of one program: the graph to edit, and what is said about new nodes.

    `graph_module` and `graph` are a working copy; a pass that returns another graph module gives it back by
    assignment. `program` is the program before the edits inside the block, and the edited one behind it.
    `options` is what the history of the program says of the pass besides its name.
    """

    def __init__(self, program: P, name: str, options: str, old: WorkingCopy) -> None:
        self.name, self.options = name, options
        self.program = program
        self._module = old.working
        self._old = old
        self._said: dict[fx.Node, tuple[str, ...]] = {}

    @property
    def graph_module(self) -> fx.GraphModule:
        """The graph module to edit; assign what a pass returns."""
        return self._module

    @graph_module.setter
    def graph_module(self, module: fx.GraphModule) -> None:
        if not isinstance(module, fx.GraphModule):
            raise UsageError(f"expected a torch.fx.GraphModule, got {type(module).__name__}")
        self._module = module

    @property
    def graph(self) -> fx.Graph:
        """The graph to edit."""
        return self.graph_module.graph

    def node(self, name: str) -> fx.Node:
        """The node of that name in the graph to edit; raises `SelectionError`."""
        found: fx.Node | None = next((node for node in self.graph.nodes if node.name == name), None)
        if found is None:
            raise SelectionError(f"no node is called {name!r}")
        return found

    def replaced(self, new: fx.Node, *olds: fx.Node | str) -> None:
        """Say that `new` stands in the place of `olds`, which may be gone: it comes from where they came.

        Its origin names all their calls, lies in the innermost call around them, and is `inferred`.
        """
        if not olds:
            raise UsageError("edit.replaced(new, *olds) was given no old nodes")
        names = [name for old in olds for name in self._name(old)]
        self._said[new] = (*self._said.get(new, ()), *names)

    def split(self, old: fx.Node | str, *news: fx.Node) -> None:
        """Say that `news` together stand in the place of `old`: each comes from where it came from."""
        for new in news:
            self.replaced(new, old)

    def _name(self, node: fx.Node | str) -> tuple[str, ...]:
        """The nodes of before that a node is or was made from."""
        if isinstance(node, fx.Node) and node in self._said:
            return self._said[node]
        name = node if isinstance(node, str) else self._old.names.get(node) or mark_of(node) or node.name
        if name not in self._old.nodes:
            raise SelectionError(
                f"{name!r} was not in the graph before the block", remedy="name nodes that the block replaces"
            )
        return (name,)


@contextmanager
def track(program: P, name: str, options: str = "") -> Iterator[Edit[P]]:
    """Edits of a copy of the program's graph inside the block; at its end `edit.program` is the edited one.

    Raises `LostProvenance`, naming every node, where it is not known what a new node was made from, or the
    graph does not fit the signature any more. The block edits one graph: variants of the program stay behind,
    with a warning.
    """
    if program.variants:
        warnings.warn(
            f"the edited {program.name} has none of its {len(program.variants)} variant(s): a block edits "
            "one graph. program.apply(pass_) takes them along, and each of program.variants can be edited",
            stacklevel=4,
        )
        program = alone(program)
    told: Told = []
    old = before(program)
    edit = Edit(program, name, options, old)
    with replacements_told(old.working, lambda node, new: told.append((node, new))):
        yield edit
    edit.program = _finished_edit(edit, old, told)


def _finished_edit(edit: Edit[P], old: WorkingCopy, told: Told) -> P:
    _refuse_stale_nodes(old)
    module = _with_state(edit, old)
    graph = module.graph
    said = _said(edit, graph)
    now = after(old, graph, told)
    sources = sources_of(old, now, said)
    broken = faults_of(old, now, sources)
    if not broken:
        _name_inputs(old, now)
        evaluate(graph)
        broken = faults_of(old, now, sources)
    if not broken:
        write_origins(old, now, sources, edit.name)
        broken = list(carried_faults(old, now))
    if not broken:
        edited = carried(edit.program, old, now, module, sources)
        edited = edited.with_changes(history=History((*edited.history, _entry(edit, old, now, sources))))
        broken = rules_broken(edited)
    if broken:
        raise _error(edit.name, graph, broken)
    clean(graph)
    return edited


def _with_state(edit: Edit, old: WorkingCopy) -> fx.GraphModule:
    """What the block left, as a module of our own. State that it holds as attributes stays as inputs do: what
    removes operations that nobody reads takes their nodes along."""
    module = edit.graph_module
    read = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    gone = [row for row in old.program.signature.attributes if row.path not in read]
    if module is not old.working:
        module = own_copy(module, old.program.name)
    behind_inputs = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(behind_inputs):
        for row in gone:
            module.graph.create_node("get_attr", row.path).meta = dict(old.nodes[row.name].meta)
    if not gone or module is old.working:
        return module
    return own_copy(module, old.program.name, {row.path: old.program.state[row.name] for row in gone})


def _entry(edit: Edit[P], old: WorkingCopy, now: After, sources: NodeSources) -> PassEntry:
    left = sum(node.op == "call_function" for node in now.graph.nodes)
    gone = [node for name, node in old.nodes.items() if name not in now.kept]
    gone += [old.nodes[name] for name in now.changed.values()]
    new = [node for node in now.graph.nodes if node in sources.of]
    edited = list(now.edited(old))
    changes = changes_of(gone, new, edited)
    return PassEntry(edit.name, edit.options, left, len(new), len(gone), changes, len(edited))


def _said(edit: Edit, graph: fx.Graph) -> dict[fx.Node, tuple[str, ...]]:
    """What was said, about nodes of the final graph, which may be copies."""
    names = {node.name: node for node in graph.nodes}
    return {
        (node if node.graph is graph else names[node.name]): olds
        for node, olds in edit._said.items()
        if node.graph is graph or node.name in names
    }


def _name_inputs(old: WorkingCopy, now: After) -> None:
    """Inputs keep their names and what they stand for, also in a graph that a pass wrote anew."""
    for name, node in now.kept.items():
        if node.op == "placeholder":
            node.meta.setdefault("val", old.nodes[name].meta.get("val"))
        if node.op == "placeholder" and node.name != name:
            node.name = node.target = name
        if node.op == "get_attr" and nested_graph(node) is None:
            node.name = name


def evaluate(graph: fx.Graph) -> None:
    """New nodes say what they compute."""
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            node.meta["val"] = fake_result(node.target, node.args, node.kwargs)


def _refuse_stale_nodes(old: WorkingCopy) -> None:
    """The program's own graph must be as it was: nodes taken before the block are not for editing."""
    if not old.is_untouched:
        raise LostProvenance("nodes that were taken before the block were edited in it", remedy=_STALE)


def _error(name: str, graph: fx.Graph, broken: list[Broken]) -> LostProvenance:
    place = Place(line=f"the pass {name!r}")
    error = LostProvenance.of(Fault(each.what, place, remedy=each.remedy) for each in broken)
    error.shown = shown(graph, broken)
    return error
