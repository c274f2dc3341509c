"""The second oracle: a forward program beside `torch.export`, operation for operation.

The exported program is decomposed with the composite operators of PyTorch's own table, but for those that
whence keeps whole, too. Every operation that differs must be listed here, with its reason.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import fx
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
    Difference(
        "we drop what nothing reads; export keeps masks that were computed for nothing",
        ops(
            *(
                "arange.default",
                "add.Tensor",
                "sub.Tensor",
                "ne.Scalar",
                "cumsum.default",
                "new_ones.default",
            ),
            *("index.Tensor", "eq.Tensor", "bitwise_and.Tensor", "le.Tensor", "gt.Tensor", "slice.Tensor"),
            *("cat.default", "select.int", "unbind.int", "expand.default", "unsqueeze.default"),
        ),
    ),
    Difference(
        "a tensor literal is lifted and copied once; export folds the copy, or writes it through a view",
        ops("slice.Tensor", "copy.default", "select.int"),
        ops("lift_fresh_copy.default", "clone.default", "reshape.default", "fill.Scalar"),
    ),
    Difference(
        "what is written into a strided piece has its layout afterwards: other kernels run on other strides",
        captured=ops("slice_scatter.default"),
    ),
    Difference(
        "where the model turns gradients off, composites are as eager takes them apart there",
        ops("linear.default", "layer_norm.default", "matmul.default"),
        ops(
            *("t.default", "addmm.default", "mm.default", "mv.default", "native_layer_norm.default"),
            *("view.default", "_unsafe_view.default"),
        ),
    ),
    Difference(
        "experts ask whether they are compiled: export is told so, and they take a fallback of their own",
        frozenset({"transformers.grouped_mm_fallback.default"}),
        ops("_grouped_mm.default"),
    ),
    Difference("we keep the gradient stopped where no_grad stopped it", captured=ops("detach.default")),
)
BY_TAG = {
    "rng": Difference(
        "decomposed, an export replaces dropout by native_dropout, which draws other numbers",
        ops("native_dropout.default"),
        ops("dropout.default"),
    )
}
BY_NAME = {
    "segformer": Difference(
        "export spells upsampling and batch normalisation in its own overloads",
        ops("upsample_bilinear2d.vec", "_native_batch_norm_legit_no_training.default"),
        ops("upsample_bilinear2d.default", "native_batch_norm.default"),
    ),
    "unet": Difference(
        "export spells upsampling in its own overload",
        ops("upsample_nearest2d.vec"),
        ops("upsample_nearest2d.default"),
    ),
    "autocast": Difference(
        "under autocast composites are taken apart: what is cast is in the graph",
        ops("linear.default", "layer_norm.default", "scaled_dot_product_attention.default"),
        ops(
            *("_scaled_dot_product_flash_attention_for_cpu.default", "addmm.default", "t.default"),
            *("native_layer_norm.default", "view.default", "_unsafe_view.default"),
        ),
    ),
    **dict.fromkeys(
        ("t5", "wav2vec2"),
        Difference(
            "export says that it compiles, we say what eager does: masks are made another way",
            ops("ge.Scalar"),
            ops("arange.default", "ge.Tensor"),
        ),
    ),
    **dict.fromkeys(
        ("gru", "inplace_views"),
        Difference(
            "what the model writes in place is a view of what a linear computed, which is taken apart then",
            ops("linear.default", "select.int", "copy.default", "slice.Tensor"),
            ops("t.default", "addmm.default", "view.default", "clone.default", "reshape.default"),
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
    named = [BY_NAME[case.name]] if case.name in BY_NAME else []
    return [*EVERYWHERE, *tagged, *named]


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
