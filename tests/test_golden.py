"""The same answers on every release of PyTorch: signatures, selections and origins, in tables that are kept.

Each of `golden/*.txt` was written by one release and holds for all. EXPECTTEST_ACCEPT=1 writes them anew.
"""

import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import fx

import whence
from tests.models import case
from whence.schema import Phase

GOLDEN = Path(__file__).parent / "golden"
MODELS = (
    *("gpt2", "llama", "llama_checkpoint", "gemma2", "mamba", "bert", "albert", "t5", "vit", "resnet"),
    *("unet", "transformer_encoder_dropout", "lstm", "weight_norm", "shared_module", "hooked", "autocast"),
    *("inplace_views", "custom_function", "variational"),
)
PATTERNS = ("**", "*", ":: aten.mm", ":: aten.addmm :: forward", ":: :: backward", "** :: aten.sum")
SAME_OPERATORS = {"aten._unsafe_view.default": "aten.view.default"}
"""What releases call otherwise: a linear of more than two dimensions ends in `view` until PyTorch 2.14, and
in `_unsafe_view` since 2.15. Both give the same bits, and the derivative of both is `view`."""
DIFFERENT = {
    "inplace_views-2.14": "at its bound, the derivative of a clamp is 0 since 2.14: `gt` where `ge` was",
    "inplace_views-2.15": "the same; and a write to the result of a linear goes to no view of it any more",
    "t5-2.15": "a number that is written into a slice is one (`fill`), and no constant tensor any more",
}
"""Tables of one release, each with the reason for which another does not hold."""


def table(name: str) -> str:
    """What whence says of one model, in a page."""
    example = case(name)
    model, args, kwargs = example.make()
    program = whence.capture(model, args, kwargs, backward=example.loss)
    nodes = [node for node in program.nodes() if node.op == "call_function"]
    inputs, outputs = program.signature.inputs, program.signature.outputs
    rows = [
        f"{name}: {len(nodes)} operations, digest {digest(map(str, told(program, nodes)))}",
        f"inputs: {digest(f'{row.name} {row.kind.value} {row.path} {row.of}' for row in inputs)}",
        *counted(row.kind.value for row in inputs),
        f"outputs: {digest(f'{row.kind.value} {row.path} {row.of}' for row in outputs)}",
        *counted(row.kind.value for row in outputs),
        *(f"select {pattern}: {selected(program, pattern, nodes)}" for pattern in PATTERNS),
        *by_call(program, nodes),
    ]
    return "\n".join([*rows, ""])


def told(program: whence.Program, nodes: Sequence[fx.Node]) -> Iterator[tuple[object, ...]]:
    """Each operation and all of its origin, with positions in the place of names."""
    position = {node.name: at for at, node in enumerate(nodes)}
    for node in nodes:
        origin = program.where(node)
        calls = [str(call) for call in origin.calls]
        function = None if origin.source is None else origin.source.function
        forward = None if origin.forward is None else position.get(origin.forward)
        yield operator(node), origin.phase.value, origin.quality.value, calls, function, forward


def operator(node: fx.Node) -> str:
    """The operation of a node, by the name that it has in all releases."""
    name = str(node.target) if "." in str(node.target) else getattr(node.target, "__name__", "")
    return SAME_OPERATORS.get(name, name)


def selected(program: whence.Program, pattern: str, nodes: Sequence[fx.Node]) -> str:
    """How many operations fit, and which."""
    position = {node: at for at, node in enumerate(nodes)}
    try:
        found = [position[node] for node in program.select(pattern) if node in position]
    except whence.SelectionError:
        return "nothing"
    return f"{len(found)}, digest {digest(map(str, found))}"


def by_call(program: whence.Program, nodes: Sequence[fx.Node]) -> Iterator[str]:
    """Operations by phase, quality and call; calls that a number tells apart are counted together."""
    found: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for node in nodes:
        origin = program.where(node)
        calls = " + ".join(sorted({re.sub(r"\d+", "N", str(call)) or "(root)" for call in origin.calls}))
        found[str(origin.phase.value), origin.quality.value, calls][operator(node)] += 1
    order = [str(phase.value) for phase in Phase]
    for phase, quality, calls in sorted(found, key=lambda key: (order.index(key[0]), *key[1:])):
        yield f"{phase} {quality} {calls}"
        yield from counted_as(found[phase, quality, calls])


def counted(values: Iterable[str]) -> Iterator[str]:
    return counted_as(Counter(values))


def counted_as(counts: Counter[str]) -> Iterator[str]:
    short = {name: name.removeprefix("aten.").removesuffix(".default") for name in counts}
    yield "  " + ", ".join(f"{counts[name]} {short[name]}" for name in sorted(counts))


def digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_every_release(name: str) -> None:
    """Signature, selections and the origin of every operation are what other releases answer."""
    ours = f"{name}-{'.'.join(torch.__version__.split('.')[:2])}"
    file = GOLDEN / f"{ours if ours in DIFFERENT else name}.txt"
    found = table(name)
    if "EXPECTTEST_ACCEPT" in os.environ:
        file.write_text(found)
    assert found == file.read_text()


def test_every_table_is_of_a_model() -> None:
    """There are twenty, and none is left over; those of one release really differ from the others."""
    assert len(MODELS) == 20
    tables = {file.stem: file.read_text() for file in GOLDEN.glob("*.txt")}
    assert set(tables) == {*MODELS, *DIFFERENT}
    assert all(tables[name] != tables[name.partition("-")[0]] for name in DIFFERENT)
