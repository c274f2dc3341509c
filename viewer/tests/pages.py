"""Pages for the tests in a browser, and what they should show: `python -m viewer.tests.pages FOLDER`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

import whence
from viewer.tests import nested
from whence.demo import gpt, next_token_loss
from whence.rewriting import DeadCode

HOSTILE = ("</script><img src=x onerror=hacked=1>", "<!--<script>hacked=1")
PATTERNS = (
    "blocks.*.mlp :: aten.mm :: backward",
    "** :: aten.*view* :: forward",
    "type=LayerNorm :: backward",
    "blocks.[0-2].attention",
    "blocks.[!0-2]",
    "tokens@0",
    "**.up",
    "* :: forward",
)
LAYERS = 136


class Chain(nn.Module):
    """Layers of these names, one after the other."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """All of them."""
        for layer in self.children():
            x = layer(x)
        return x


class Block(nn.Module):
    """Two linear layers, with a norm or without."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.act: nn.Module = nn.ReLU() if has_norm else nn.GELU()
        self.norm = nn.LayerNorm(8) if has_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        changed: Tensor = self.down(self.act(self.up(x)))
        return x + (changed if self.norm is None else self.norm(changed))


def wide(width: int) -> whence.Program:
    """A layer of that width."""
    return whence.capture(nn.Sequential(nn.Linear(4, width)), (torch.ones(2, 4),))


def blocks(has_norm: bool) -> whence.Program:
    """Four of them, and a head."""
    model = nn.Sequential(*(Block(has_norm) for _ in range(4)), nn.Linear(8, 1))
    return whence.capture(model, (torch.randn(3, 8),), backward=lambda y: y.sum())


def large() -> whence.Program:
    """A Llama deeper than the largest, and narrow: some 28,000 operations."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  (seconds, for this page alone)

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=16, intermediate_size=32, vocab_size=64, **heads
    )
    ids = torch.zeros(2, 8, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    return whence.capture(LlamaForCausalLM(config), (), inputs, backward=lambda outputs: outputs.loss)


def passed() -> whence.Program:
    """What went through three passes, of which one has a name that is markup, and edits arguments."""

    def wider(module: fx.GraphModule) -> None:
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.full_like.default):
            node.update_arg(1, 2)
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList):
            node.target = torch.ops.aten.mean.dim

    wider.__name__ = HOSTILE[0]
    return blocks(False).decompose("core").apply(DeadCode(), wider)


def unrolled() -> whence.Program:
    """A function without modules, of more operations than are shown at once."""

    def many(x: Tensor) -> Tensor:
        for _ in range(150):
            x = (x + 1).sin()
        return x

    return whence.capture(many, (torch.randn(3),))


def main(folder: Path) -> None:
    """Write all pages, and `expected.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    model, args = gpt()
    program = whence.capture(model, args, backward=next_token_loss)
    values = {node.name: float(len(node.users)) for node in program.graph.nodes if node.op == "call_function"}
    program.view(folder / "gpt.html", device="h100", values=values)
    chain = whence.capture(Chain(*HOSTILE), (torch.randn(2, 4),), backward=lambda y: y.sum())
    chain.view(folder / "hostile.html")
    blocks(False).view(folder / "compare.html", other=blocks(True))
    wide(8).view(folder / "widths.html", other=wide(12))
    whence.capture(lambda x: x, (torch.randn(2),)).view(folder / "empty.html")
    unrolled().view(folder / "unrolled.html")
    passed().view(folder / "passed.html")
    words = {}
    for name, made in {"nested": nested.joint(), "step": nested.step()}.items():
        made.view(folder / f"{name}.html")
        words[name] = nested.selected(made)
    deep = large()
    deep.view(folder / "large.html")
    selected = {pattern: [node.name for node in program.select(pattern)] for pattern in PATTERNS}
    total = program.report().to_dict()
    expected = {
        "selected": selected,
        "words": words,
        "hostile": HOSTILE,
        "rows": total["rows"],
        "peak": total["memory"]["at"],
    }
    expected["operations"] = sum(node.op == "call_function" for node in deep.nodes())
    (folder / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
