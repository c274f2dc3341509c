"""The second oracle: a forward program beside `torch.export`, operation for operation.

The exported program is decomposed with the composite operators of PyTorch's own table, but for those that
whence keeps whole, too. Every operation that differs must be listed here, with its reason.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan
from torch._ops import OpOverload

import whence
from tests.checks import captured
from tests.models import MODEL_CASES, ModelCase, sampled_cases
from whence._torch.operators.composites import COMPOSITES


@dataclass(frozen=True)
class Difference:
    """Operations that only one side has, and why."""

    reason: str
    exported: frozenset[str] = frozenset()
    captured: frozenset[str] = frozenset()


def ops(*names: str) -> frozenset[str]:
    """Full operator names."""
    return frozenset(f"aten.{name}" for name in names)


EVERYWHERE = (
    Difference(
        "export asserts the dtype of every `.to()` in the graph", ops("_assert_tensor_metadata.default")
    ),
    Difference("export turns a dropout that is off into a copy", ops("clone.default")),
)
BY_TAG = {
    "rng": Difference(
        "decomposed, an export replaces dropout by native_dropout, which draws other numbers",
        ops("native_dropout.default"),
        ops("dropout.default"),
    ),
    "experts": Difference(
        "experts ask whether they are compiled: export is told so, and they take a fallback of their own",
        frozenset({"transformers.grouped_mm_fallback.default"}),
        ops("_grouped_mm.default"),
    ),
    "no_grad": Difference(
        "we keep the gradient stopped where no_grad stopped it", captured=ops("detach.default")
    ),
}
_MASKS = Difference(
    "we drop what nothing reads; export keeps masks that were computed for nothing",
    ops("add.Tensor", "arange.default", "expand.default", "le.Tensor", "unsqueeze.default"),
)
_PACKED = Difference(
    "export is told that it compiles, and looks for packed sequences, which eager has none of",
    ops(
        *("bitwise_and.Tensor", "cat.default", "cumsum.default", "eq.Tensor", "index.Tensor", "ne.Scalar"),
        *("new_ones.default", "slice.Tensor", "sub.Tensor"),
    ),
)
_OTHER_MASKS = Difference(
    "export says that it compiles, we say what eager does: masks are made another way",
    ops("ge.Scalar"),
    ops("arange.default", "ge.Tensor", "view.default"),
)
_LITERALS = Difference(
    "a tensor literal is lifted and copied once; export folds the copy, or writes it through a view",
    ops("slice.Tensor", "copy.default", "select.int"),
    ops("lift_fresh_copy.default", "clone.default", "reshape.default", "fill.Scalar"),
)
_VIEWS = Difference(
    "what the model writes in place is a view of what a linear computed, which is taken apart then, and has "
    "the layout of the piece afterwards: other kernels run on other strides",
    ops("linear.default", "select.int", "copy.default", "slice.Tensor"),
    ops(
        *("t.default", "addmm.default", "view.default", "clone.default", "reshape.default"),
        "slice_scatter.default",
    ),
)
_DECODERS = "gpt2 gpt2_dropout llama llama_checkpoint mistral qwen2 llama_grouped gemma2 gpt_neox mixtral"
BY_NAME: dict[str, tuple[Difference, ...]] = {
    **dict.fromkeys((*_DECODERS.split(), "olmoe"), (_MASKS, _PACKED)),
    **dict.fromkeys(("opt", "clip"), (_MASKS,)),
    **dict.fromkeys(("vit", "wav2vec2"), (_MASKS, _OTHER_MASKS)),
    **dict.fromkeys(("deberta_v2", "constants"), (_LITERALS,)),
    **dict.fromkeys(("gru", "inplace_views"), (_VIEWS,)),
    "llama_grouped": (
        _MASKS,
        _PACKED,
        Difference("export repeats keys and values, eager hands them on", ops("_unsafe_view.default")),
    ),
    "qwen2_moe": (
        _MASKS,
        _PACKED,
        Difference("the mask of a window is computed for nothing", ops("gt.Tensor")),
    ),
    "swin": (
        Difference(
            "decompositions run without gradients, where another kernel of attention lays its result out so "
            "that `contiguous` copies nothing; copies of dropouts hide it on the oldest release",
            captured=ops("clone.default"),
        ),
    ),
    "t5": (_MASKS, _OTHER_MASKS, _LITERALS),
    "bart": (_MASKS, _LITERALS),
    "whisper": (_MASKS, _PACKED, _LITERALS),
    "segformer": (
        Difference(
            "export spells upsampling and batch normalisation in its own overloads",
            ops("upsample_bilinear2d.vec", "_native_batch_norm_legit_no_training.default"),
            ops("upsample_bilinear2d.default", "native_batch_norm.default", "batch_norm.default"),
        ),
    ),
    "unet": (
        Difference(
            "export spells upsampling in its own overload",
            ops("upsample_nearest2d.vec"),
            ops("upsample_nearest2d.default"),
        ),
    ),
    "autocast": (
        Difference(
            "under autocast composites are taken apart: what is cast is in the graph",
            ops("linear.default", "layer_norm.default", "scaled_dot_product_attention.default"),
            ops(
                *("_scaled_dot_product_flash_attention_for_cpu.default", "addmm.default", "t.default"),
                *("native_layer_norm.default", "view.default", "_unsafe_view.default"),
            ),
        ),
    ),
    "distillation": (
        Difference(
            "where the model turns gradients off, composites are as eager takes them apart there",
            ops("linear.default", "layer_norm.default"),
            ops("t.default", "addmm.default", "native_layer_norm.default", "view.default"),
        ),
    ),
}


def composites() -> dict[OpOverload, object]:
    """PyTorch's decompositions of composite operators that whence takes apart."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    table = torch.export.default_decompositions()
    whole = {composite.operator for composite in COMPOSITES.values()}
    return {
        op: rule
        for op, rule in table.items()
        if isinstance(op, OpOverload) and op.has_kernel_for_dispatch_key(key) and op not in whole
    }


def operations(graph: fx.Graph) -> Counter[str]:
    """How often each operator appears."""
    return Counter(
        str(node.target)
        for node in graph.nodes
        if node.op == "call_function" and isinstance(node.target, OpOverload)
    )


def differences(case: ModelCase) -> list[Difference]:
    """The differences that are explained for a model."""
    tagged = [BY_TAG[tag] for tag in sorted(case.tags) if tag in BY_TAG]
    return [*EVERYWHERE, *tagged, *BY_NAME.get(case.name, ())]


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", sampled_cases(case for case in MODEL_CASES if "no_export" not in case.tags))
def test_forward_equals_export_but_for_listed_differences(case: ModelCase) -> None:
    """Every operation that only one of the two programs has is explained."""
    model, args, kwargs = case.make()
    exported = torch.export.export(model, args, kwargs, strict=False).run_decompositions(composites())
    theirs = operations(exported.graph)
    ours = operations(captured(case.name, "forward").graph)
    explained = differences(case)
    only_theirs = set(theirs - ours) - frozenset().union(*(row.exported for row in explained))
    only_ours = set(ours - theirs) - frozenset().union(*(row.captured for row in explained))
    assert (sorted(only_theirs), sorted(only_ours)) == ([], [])


def test_an_unexplained_difference_is_found() -> None:
    """The comparison sees one operation more or less."""
    graph = whence.capture(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), (torch.ones(1, 2),)
    ).graph
    counted = operations(graph)
    assert counted - Counter({"aten.linear.default": 1}) == Counter({"aten.relu.default": 1})


class Attends(torch.nn.Module):
    """Attention, a norm and a layer in the branches of a `cond`, and in the body of a `scan`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def attended(self, x: Tensor) -> Tensor:
        heads = self.linear(self.norm(x)).unflatten(-1, (2, 4)).transpose(-2, -3)
        return (
            torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            .transpose(-2, -3)
            .flatten(-2)
        )

    def forward(self, x: Tensor) -> Any:
        chosen = torch.cond(
            x.sum() > 0, self.attended, lambda x: self.linear(x @ x.transpose(1, 2) @ x), (x,)
        )
        return scan(lambda carry, row: (carry + self.attended(row), row.sin()), chosen[0] * 0, chosen)[0]


@pytest.mark.sample(1)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # in eager
@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.sweep
def test_functions_are_at_the_level_of_export(captures: bool, runs: bool) -> None:
    """Composites stay in them, whole, and so the kernels are those of the grad mode that runs the program."""
    torch.manual_seed(0)
    model, x = Attends(), torch.randn(3, 5, 8)
    with torch.set_grad_enabled(captures):
        program = whence.capture(model, (x,))
    exported = torch.export.export(model, (x,)).run_decompositions(composites())
    whole = {str(composite.operator) for composite in COMPOSITES.values()}
    for name in ("true_graph_0", "false_graph_0", "scan_combine_graph_0"):
        theirs, ours = (operations(getattr(of.graph_module, name).graph) for of in (exported, program))
        assert ours == theirs and not ours.keys().isdisjoint(whole)
    for each in (x, -x):
        with torch.set_grad_enabled(runs):
            assert torch.equal(program.module()(each), model(each))
            assert torch.equal(program.unflatten()(each), model(each))
