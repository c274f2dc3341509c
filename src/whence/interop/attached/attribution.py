"""Where the operations of a graph from elsewhere come from, as far as its metadata says.

The stack of modules of a forward node was noted while it was traced: `exact`. An annotation with a module's
name (`custom["module_fqn"]`) does not say which call it was: `inferred`. A node of the backward belongs to
the call of its forward node, by the stack that was copied to it, or by autograd's sequence number where it
is marked as autograd's: `inferred`, for the numbers of sums of gradients are stale. A sum of two gradients
belongs to the innermost call around both. What nobody says anything about is given to the innermost call
around all who use it, `inferred`; where the graph says nothing at all, to the root, with quality `none`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from whence._torch.record.annotations import said_of
from whence.interop.graphs.call_sites import ROOT_MODULE, Sites, sites_of
from whence.interop.graphs.faults import refusal, scope_faults
from whence.interop.graphs.frames import STACK, Frame, Spelling, frames_in, frames_of, source_of
from whence.program.node_records import set_origin
from whence.provenance import ModulePath, Origin
from whence.provenance.places import common_ancestor
from whence.schema import Phase, Quality

_OF_FORWARD = "fwd_nn_module_stack"
_NEVER_CALLED = ("ModuleList", "ModuleDict")
_ADD = torch.ops.aten.add.Tensor
_ONES = torch.ops.aten.ones_like.default


@dataclass(frozen=True)
class Phases:
    """The phase of each operation, and the node that seeds the backward of a loss."""

    of: Mapping[fx.Node, Phase]
    seed: fx.Node | None = None


def phases_of(nodes: Sequence[fx.Node], tangents: Sequence[fx.Node], loss: fx.Node | None) -> Phases:
    """What marks as backward: autograd's mark, or a partitioner's; what follows from a tangent; and, with a
    loss, everything from its seed on, for graphs are recorded in the order in which they ran."""
    seed = next((node for node in nodes if node.target is _ONES and node.args[:1] == (loss,)), None)
    later: set[fx.Node] = set(tangents)
    found: dict[fx.Node, Phase] = {}
    seeded = False
    for node in nodes:
        seeded = seeded or node is seed
        marked = bool(node.meta.get("autograd_backward")) or node.meta.get("partitioner_tag") == "is_backward"
        if seeded or marked or not later.isdisjoint(node.all_input_nodes):
            later.add(node)
        found[node] = Phase.BACKWARD if node in later else Phase.FORWARD
    return Phases(found, seed)


@dataclass(frozen=True)
class Modules:
    """The model's classes by path, and how paths are read."""

    types: Mapping[ModulePath, str]
    spelling: Spelling


def calls_of(nodes: Sequence[fx.Node], phases: Phases, modules: Modules, kind: str) -> Sites:
    differentiated = _differentiated(nodes, phases)
    frames = {node: _stack(node, modules) for node in nodes if phases.of[node] is Phase.FORWARD}
    for node in nodes:
        if phases.of[node] is not Phase.FORWARD:
            copied = node.meta.get(_OF_FORWARD)
            known = frames_in(copied, modules.spelling) if copied else None
            frames[node] = known or (frames[differentiated[node]] if node in differentiated else None)
    if faults := list(scope_faults(frames, modules.types)):
        raise refusal(nodes[0].graph, faults)
    sites = sites_of(nodes, frames, kind)
    homes = dict(sites.homes)
    for node in nodes:
        if terms := [homes[term] for term in _terms(node, phases)]:
            homes[node] = max(ROOT_MODULE, common_ancestor(sites.calls.parents, terms))
    return replace(sites, homes=homes)


def _stack(node: fx.Node, modules: Modules) -> tuple[Frame, ...] | None:
    found = frames_of(node, modules.spelling)
    if found is not None:
        return found
    name = _annotation(node)
    path = None if name is None else modules.spelling.path(name)
    if path is None or path not in modules.types:
        return None
    above = ((each, modules.types[each]) for each in path.prefixes() if each and each in modules.types)
    return tuple(Frame(each, 0, kind, str(each)) for each, kind in above if kind not in _NEVER_CALLED)


def _annotation(node: fx.Node) -> str | None:
    name = said_of(node).get("module_fqn")
    return name if isinstance(name, str) and name else None


def _differentiated(nodes: Sequence[fx.Node], phases: Phases) -> dict[fx.Node, fx.Node]:
    """What each node of autograd's differentiates: the first operation with its number."""
    makers: dict[Any, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        number = node.meta.get("seq_nr")
        if phases.of[node] is Phase.FORWARD and number is not None and number >= 0:
            makers.setdefault(number, node)
    for node in nodes:
        maker = makers.get(node.meta.get("seq_nr"))
        if maker is not None and phases.of[node] is not Phase.FORWARD and node.meta.get("autograd_backward"):
            found[node] = maker
    return found


def write_origins(nodes: Sequence[fx.Node], sites: Sites, phases: Phases) -> None:
    """Write an origin on every operation."""
    differentiated = _differentiated(nodes, phases)
    says_nothing = sites.inferred >= set(nodes)
    for node in nodes:
        forward = phases.of[node] is Phase.FORWARD
        site = sites.calls.rows[sites.homes[node]].site
        maker = differentiated.get(node)
        line = source_of(node) or (None if maker is None else source_of(maker))
        quality = Quality.INFERRED
        if says_nothing:
            quality = Quality.NONE
        elif forward and node not in sites.inferred and node.meta.get(STACK):
            quality = Quality.EXACT
        name = None if maker is None else maker.name
        sums = tuple(dict.fromkeys(sites.calls.rows[sites.homes[term]].site for term in _terms(node, phases)))
        set_origin(node, Origin(phases.of[node], sums or (site,), quality, line, name, site))


def _terms(node: fx.Node, phases: Phases) -> list[fx.Node]:
    """The two gradients that a sum adds up."""
    terms = [term for term in node.all_input_nodes if phases.of.get(term) is Phase.BACKWARD]
    is_sum = node.target is _ADD and phases.of[node] is not Phase.FORWARD and len(terms) == 2
    return terms if is_sum else []
