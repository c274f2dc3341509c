"""Containers, looked at while a capture watches, hold what they hold in eager mode."""

import random
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import whence
from tests.checks import taken, verified

LOOKS: dict[str, Callable[[Any], Any]] = {
    "iterated": list,
    "unpacked": lambda held: (lambda first, *rest: [first, rest])(*held),
    "reversed": lambda held: list(reversed(held)),
    "zipped": lambda held: list(zip(held, held, strict=True)),
    "begun twice": lambda held: [next(iter(held)), list(held)],
    "indexed": lambda held: [held[at] for at in range(len(held))],
    "from the end": lambda held: held[-1],
    "sliced": lambda held: [type(held[1:]), *held[1:]],
    "sliced backwards": lambda held: list(held[::-1]),
    "added": lambda held: list(held + held),
    "searched": lambda held: [child in held for child in (None, *held.children())],
    "named": lambda held: [held[name] for name in held],
    "got": lambda held: [held.get("k0", 1), held.get("none", 1)],
    "values": lambda held: [len(held.values()), list(held.values()), None in held.values()],
    "items": lambda held: [len(held.items()), list(held.items()), ("k0", None) in held.items()],
    "reversed views": lambda held: [list(reversed(held.values())), list(reversed(held.items()))],
    "common items": lambda held: sorted(name for name, _ in held.items() & dict(held.items()).items()),
    "as dict": lambda held: dict(held.items()),
    "children": lambda held: [list(held.children()), list(held.named_children())],
    "modules": lambda held: [list(held.modules()), list(held.named_modules(remove_duplicate=False))],
    "parameters": lambda held: [list(held.parameters()), list(held.named_parameters())],
    "nested": lambda held: [list(child) for child in held if isinstance(child, nn.ModuleList)],
}


class Looking(nn.Module):
    """Hands its container to an onlooker, and computes something."""

    def __init__(self, held: nn.Module, onlooker: Callable[[Any], None]) -> None:
        super().__init__()
        self.held, self.onlooker = held, onlooker

    def forward(self, x: Tensor) -> Tensor:
        self.onlooker(self.held)
        return x + 1


def said(thing: Any) -> Any:
    """What a look gave, modules and parameters by identity."""
    match thing:
        case list() | tuple():
            return type(thing), [said(part) for part in thing]
        case dict():
            return [(name, said(part)) for name, part in thing.items()]
        case None | str() | bool() | int():
            return thing
    return (
        list(thing)
        if isinstance(thing, Iterable) and not isinstance(thing, (nn.Module, Tensor))
        else id(thing)
    )


def looked_at(held: Any) -> dict[str, Any]:
    """Each way of looking at a container, with what it gave or how it failed."""
    found: dict[str, Any] = {}
    for name, look in LOOKS.items():
        try:
            found[name] = said(look(held))
        except (TypeError, AttributeError, IndexError, KeyError, StopIteration) as error:
            found[name] = repr(error)
    return found


def container(chance: random.Random, depth: int, pool: list[Any]) -> Any:
    """A container of any kind whose children may be None, shared and containers."""

    def child() -> Any:
        made = chance.choice(["none", "shared", "nested", "linear"])
        if made == "none":
            return None
        if made == "shared" and pool:
            return chance.choice(pool)
        if made == "nested" and depth < 2:
            return container(chance, depth + 1, pool)
        pool.append(nn.Linear(2, 2))
        return pool[-1]

    kind: Any = chance.choice(
        [nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.ParameterList, nn.ParameterDict]
    )
    count = chance.randint(1, 4)
    if issubclass(kind, nn.ParameterList | nn.ParameterDict):
        values = [chance.choice([None, nn.Parameter(torch.ones(2)), "text"]) for _ in range(count)]
        return kind(values if kind is nn.ParameterList else {f"k{at}": v for at, v in enumerate(values)})
    children: list[Any] = [child() for _ in range(count)]
    if kind is nn.ModuleDict:
        return kind({f"k{at}": held for at, held in enumerate(children)})
    return kind(*children) if kind is nn.Sequential else kind(children)


@pytest.mark.parametrize("seed", range(20))
def test_looking_at_a_container(seed: int) -> None:
    """Every way of looking at it gives while a capture watches what it gives in eager mode."""
    held = container(random.Random(seed), 0, [])
    looks = SimpleQueue[dict[str, Any]]()  # a list would be as before after the capture
    whence.capture(Looking(held, lambda held: looks.put(looked_at(held))), (torch.ones(2),))
    expected, seen = looked_at(held), taken(looks)
    assert [name for look in seen for name in LOOKS if look[name] != expected[name]] == []
    assert seen != []


class Optional(nn.Module):
    """Layers as x-transformers has them: lists of a norm that may be missing and a block."""

    def __init__(self) -> None:
        super().__init__()
        norms: list[Any] = [None, nn.LayerNorm(4), None]
        self.layers = nn.ModuleList(nn.ModuleList([norm, nn.Linear(4, 4)]) for norm in norms)

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self.layers
        for norm, block in layers:
            x = block(x if norm is None else norm(x))
        return x


@pytest.mark.parametrize("backward", [False, True])
def test_missing_children_are_unpacked(backward: bool) -> None:
    """The program and the tree run every layer, and the tree has None where the model has it."""
    model, x = Optional(), torch.randn(2, 4)
    tree = verified(model, x, backward=backward).unflatten()
    assert torch.equal(tree(x), model(x))
    layers: Any = tree.layers
    assert [norm is None for norm, _ in layers] == [True, False, True]


class Twice(nn.Module):
    """Holds a list under two names, and calls what is in it by the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList([nn.Sequential(nn.Linear(4, 4))])
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second[0](x)


def test_container_called_by_its_second_name() -> None:
    """A `Sequential` that is called by another name than its first runs in the tree."""
    model, x = Twice(), torch.randn(2, 4)
    tree = verified(model, x).unflatten()
    assert torch.equal(tree(x), model(x))
    assert tree.get_submodule("first.0") is tree.get_submodule("second.0")


class Packed(nn.Module):
    """Runs a layer, or a recurrent one, on packed rows."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layer = kind(4, 4)

    def forward(self, rows: PackedSequence) -> Any:
        if isinstance(self.layer, nn.GRU):
            return self.layer(rows)
        return PackedSequence(self.layer(rows.data), rows.batch_sizes, rows.sorted_indices)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, nn.GRU])
def test_packed_rows(kind: type[nn.Module], backward: bool) -> None:
    """A named tuple with a constructor that looks at its fields comes in and goes out as itself."""
    rows = pack_sequence([torch.randn(length, 4) for length in (2, 3, 1)], enforce_sorted=False)
    model = Packed(kind)
    program = whence.capture(model, (rows,), backward=backward, decide="example")
    assert program.input("args[0].data").kind == "user"
    assert (found := program.verify(model, (rows,))).ok, str(found)
    result, expected = program.unflatten()(rows), model(rows)
    if kind is nn.GRU:
        result, expected = result[0], expected[0]
    assert type(result) is PackedSequence
    assert torch.equal(result.data, expected.data)
