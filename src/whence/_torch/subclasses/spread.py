"""How DTensors are spread over processes, as data: a file holds it, and the processes are found again by it.

What leads to a mesh is its groups: collectives in a graph name them.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import SymInt

from whence._torch.pytrees import TreeSpec
from whence._torch.subclasses.fully_sharded import is_distributed, is_distributed_class
from whence._torch.subclasses.wrapper_subclasses import Composition, axes_of, groups_of, place_on

_DISTRIBUTED, _MESH = "torch.distributed.tensor", "device_mesh"


@dataclass(frozen=True)
class Mesh:
    """The mesh of a DTensor: its kind of device, the axes with their sizes, the groups of these, and where on
    them this process is."""

    device: str
    axes: tuple[tuple[str, int], ...]
    groups: tuple[str, ...]
    place: tuple[int, ...]


@dataclass(frozen=True)
class Spread:
    """How a DTensor is made, in the place of what its class takes for that: `order` is what PyTorch says of
    the order in which axes split one dimension."""

    mesh: Mesh
    placements: tuple[str, ...]
    order: str
    dtype: torch.dtype

    def __str__(self) -> str:
        axes = zip(self.placements, self.mesh.axes, strict=False)
        words = ", ".join(f"{placement} over {name} of {size}" for placement, (name, size) in axes)
        return f"{words} (groups {', '.join(self.mesh.groups)}, place {', '.join(map(str, self.mesh.place))})"


def mesh_facts(mesh: Any) -> Mesh:
    """What is known of a mesh."""
    return Mesh(mesh.device_type, axes_of(mesh), groups_of(mesh), place_on(mesh))


def content_of_spread(value: Any) -> object | None:
    """What a mesh is, or a placement over one, as one comparable value; None for anything else."""
    library: Any = sys.modules.get(_DISTRIBUTED)
    if library is None:
        return None
    kind = type(value)  # no value is asked for its class: some refuse to be looked at
    if library.DeviceMesh in kind.__mro__:
        return astuple(mesh_facts(value))
    is_ours = library.Placement in kind.__mro__ and kind.__module__.startswith(_DISTRIBUTED)
    return repr(value) if is_ours else None


def meshes_of(tensors: Iterable[Any]) -> dict[Mesh, Any]:
    """The meshes over which tensors are spread."""
    return {mesh_facts(each.device_mesh): each.device_mesh for each in tensors if is_distributed(each)}


def spread_layout(layout: Composition) -> Composition | None:
    """The layout of a DTensor with a `Spread` as its context; None for any other."""
    if not is_distributed_class(layout.kind):
        return None
    if isinstance(layout.context, Spread):
        return layout
    placements, meta, *order, _ = layout.context
    mesh = mesh_facts(dict(layout.rest)[_MESH])
    spread = Spread(mesh, tuple(map(repr, placements)), repr(order), meta.dtype)
    return replace(layout, context=spread, rest=())


def distributed(
    spread: Spread, names: tuple[str, ...], sizes: tuple[Any, Any], follows: Any, meshes: Mapping[Mesh, Any]
) -> Composition:
    """The layout of a DTensor; its context stays a `Spread` where its mesh is not here."""
    library = importlib.import_module(_DISTRIBUTED)
    shape, strides = sizes
    layout = Composition(library.DTensor, names, spread, shape, strides, (), follows)
    made = [_placement(text, library) for text in spread.placements]
    mesh = meshes.get(spread.mesh)
    if mesh is None or None in made or any(isinstance(size, SymInt) for size in (*shape, *strides)):
        return layout
    part = torch.empty(0, dtype=spread.dtype, device=mesh.device_type)
    whole = library.DTensor.from_local(
        part, mesh, made, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )
    context = whole.__tensor_flatten__()[1]
    if repr([*context[2:-1]]) != spread.order:
        return layout
    return replace(layout, context=(*context[:-1], False), rest=((_MESH, mesh),))


def _placement(text: str, library: Any) -> Any:
    name, _, told = text.removesuffix(")").partition("(")
    kinds: Mapping[str, Callable[[], Any]] = {
        "Shard": lambda: library.Shard(int(told.removeprefix("dim="))),
        "Replicate": library.Replicate,
        "Partial": lambda: library.Partial(told),
    }
    return kinds[name]() if name in kinds else None


def out_of_reach(spec: TreeSpec) -> Iterator[Mesh]:
    """The meshes that a structure needs, and that are not here."""
    if not spec.is_leaf():
        context = getattr(spec.context, "context", None)
        if isinstance(context, Spread):
            yield context.mesh
        for child in spec.children():
            yield from out_of_reach(child)
