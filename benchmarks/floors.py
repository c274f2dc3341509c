"""What a capture in Python cannot be faster than: making its nodes, and running the model once."""

import gc
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from benchmarks.captures import joint_program
from benchmarks.models import batch, labelled, llama, llama_on_meta, meta_batch
from benchmarks.results import Figures
from benchmarks.timing import alone


def bare_nodes(layers: int, repeats: int) -> Figures:
    """As many `create_node` as the joint graph has nodes, of one operator, with nothing else done."""
    count = len(joint_program(llama(layers), labelled(batch())).graph.nodes)
    return Figures(None, alone(partial(_chain, count), repeats), "s", f"{count:,} nodes")


def _chain(count: int) -> fx.Graph:
    graph = fx.Graph()
    gc.disable()  # as our capture does: the floor should be one
    node = graph.placeholder("x")
    for _ in range(count - 1):
        node = graph.create_node("call_function", torch.ops.aten.neg.default, (node,))
    gc.enable()
    return graph


def eager_forward(layers: int, repeats: int) -> Figures:
    """One forward on the meta device, recorded by autograd."""
    model, inputs = _eager(layers)
    return Figures(None, alone(lambda: model(**inputs), repeats), "s")


def eager_joint(layers: int, repeats: int) -> Figures:
    """One forward and backward on the meta device."""
    model, inputs = _eager(layers)

    def step() -> None:
        model(**inputs).loss.backward()

    return Figures(None, alone(step, repeats), "s")


def _eager(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    inputs = labelled(meta_batch(2, 32))
    # transformers makes the mask itself only after reading a value, which meta tensors do not have
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool, device="meta")
    model = llama_on_meta(layers)
    model(**inputs, attention_mask=mask).loss.backward()
    return model, {**inputs, "attention_mask": mask}
