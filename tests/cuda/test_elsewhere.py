"""Programs for a CUDA device: from fakes everywhere, and equal to those of the device where there is one."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn
from torch.export import Dim

import whence
from tests.cuda.architectures import ARCHITECTURES, Pinned, Residual, llama
from tests.cuda.devices import on_a_device
from tests.cuda.listings import golden, listed
from whence._torch.versions.grouped_heads import GROUPED_EVERYWHERE
from whence.demo import GPT, GPTConfig, next_token_loss
from whence.errors import UnsupportedOperator, UsageError

GROUPED = {} if GROUPED_EVERYWHERE else {"aten.clone.default": 2}
NORMALIZED = {
    "aten._batch_norm_with_update_functional.default": 1,
    "aten._native_batch_norm_legit_functional.default": -1,
}
LAYOUTS = {"t5": {"aten.clone.default": -4}, "llama": GROUPED, "residual": NORMALIZED}
"""Copies that are none there, as kernels of attention give other strides; and how cuDNN's writes are said."""
JOINT = list(ARCHITECTURES)


def operations(program: whence.Program) -> list[str]:
    """The operators of a program, in order."""
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def values(nodes: Iterator[fx.Node]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the values."""
    for node in nodes:
        held = node.meta.get("val")
        for value in held if isinstance(held, (tuple, list)) else [held]:
            if isinstance(value, Tensor):
                yield node.name, value


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_forward_is_that_of_the_cpu_but_for_devices(name: str) -> None:
    """Composites stay whole, so kernels do not matter; every value is there."""
    model, args, kwargs = ARCHITECTURES[name]()
    here = whence.capture(model, args, kwargs)
    there = whence.capture(model, args, kwargs, device="cuda")
    more, less = (Counter(operations(program)) for program in (there, here))
    more.subtract(less)
    assert {key: count for key, count in more.items() if count} == LAYOUTS.get(name, {})
    assert {name for name, value in values(there.nodes()) if value.device.type != "cuda"} == set()
    assert [row.path for row in there.signature.inputs] == [row.path for row in here.signature.inputs]


OF_SIZES = ("aten.sym_size.int", "<built-in function mul>")
"""What a program computes only where sizes are open."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["bert", "vit", "residual", "recurrent", "bert in bfloat16"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "joint"])
def test_open_sizes_take_the_same_operators(name: str, backward: bool) -> None:
    """Kernels are chosen as for a size that is a number."""
    batch, found = {0: Dim("batch", min=2, max=1000)}, list[Counter[str]]()
    for varies in (False, True):
        model, args, kwargs = ARCHITECTURES[name]()
        shapes: Any = dict.fromkeys(kwargs, batch) or (batch,)
        asked = shapes if varies else None
        program = whence.capture(
            model, args, kwargs, backward=backward, device="cuda:sm90", dynamic_shapes=asked
        )
        found.append(Counter(each for each in operations(program) if each not in OF_SIZES))
    fixed, varying = found
    assert (fixed - varying, varying - fixed) in [(Counter(), Counter()), RECURRENT]


RECURRENT = Counter({"aten.lstm.input": 1}), Counter({"aten._cudnn_rnn.default": 1})
"""A forward with open sizes has what cuDNN is asked for; one without has the composite."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("capability", ["sm80", "sm90"])
@pytest.mark.parametrize("name", JOINT)
def test_a_backward_runs_on_fakes_that_are_there(name: str, capability: str) -> None:
    """Every value, every gradient; every node has an origin."""
    model, args, kwargs = ARCHITECTURES[name]()
    program = whence.capture(model, args, kwargs, backward=True, device=f"cuda:{capability}")
    assert {name for name, value in values(program.nodes()) if value.device.type != "cuda"} == set()
    wanted = {row.name for row in program.signature.inputs if row.kind == "parameter"}
    gradients = {row.of for row in program.signature.outputs if row.kind == "gradient"}
    assert gradients >= wanted
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    assert all(program.where(node).quality != "none" for node in nodes)
    assert not any("for_cpu" in operation for operation in operations(program))


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (torch.float32, "aten._scaled_dot_product_efficient_attention"),
        (torch.bfloat16, "aten._scaled_dot_product_cudnn_attention"),
    ],
)
def test_attention_takes_the_kernel_of_the_capability(dtype: torch.dtype, kernel: str) -> None:
    """In the forward and the backward, and what is taken for granted is named."""
    model, args, kwargs = ARCHITECTURES["bert"]()
    program = whence.capture(model.to(dtype), args, kwargs, backward=True, device="cuda:sm90")
    found = Counter(operations(program))
    assert (found[f"{kernel}.default"], found[f"{kernel}_backward.default"]) == (2, 2)
    settled = torch.cuda.is_available()  # and known then
    assert settled or any("cuDNN is newer than 9.15" in words for words in program.presumed)


def test_equal_layers_are_replayed() -> None:
    """As on the CPU."""
    model, args, kwargs = llama()
    program = whence.capture(model, args, kwargs, backward=True, device="cuda:sm80")
    assert "LlamaDecoderLayer: 1 traced, 1 replayed" in str(program.replay)


def test_statistics_of_a_batch_norm_are_given_back() -> None:
    """CuDNN writes them in place; the program holds the operator that runs it on copies."""
    program = whence.capture(Residual(), (torch.randn(2, 3, 8, 8),), device="cuda", backward=True)
    assert any("cuDNN is there, and normalises batches" in words for words in program.presumed)
    assert {row.path for row in program.signature.outputs if row.kind == "mutation"} >= {"norm.running_mean"}
    found = Counter(operations(program))
    names = ("_batch_norm_with_update_functional", "cudnn_batch_norm_backward")
    assert [found[f"aten.{name}.default"] for name in names] == [1, 1]


def test_pages_of_the_host_are_pinned() -> None:
    """Between two copies, of which the second does not wait."""
    program = whence.capture(Pinned(), (torch.randn(4, 8),), device="cuda")
    names = operations(program)
    assert names[1:4] == ["aten._to_copy.default", "aten._pin_memory.default", "aten._to_copy.default"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_network_is_one_operator(kind: Any) -> None:
    """And one in the backward, with the gradients of all weights; the batch first is a view."""
    model = kind(4, 6, 2, batch_first=True, bidirectional=True)
    program = whence.capture(model, (torch.randn(2, 5, 4),), device="cuda", backward=True)
    found = Counter(operations(program))
    assert [found[f"aten.{name}.default"] for name in ("_cudnn_rnn", "_cudnn_rnn_backward")] == [1, 1]
    output = program.node(str(program.signature.outputs[0].node)).meta["val"]
    assert output.stride() == torch.empty(5, 2, 12).transpose(0, 1).stride()
    shapes = {row.path: tuple(row.value.shape) for row in program.signature.inputs if row.kind == "parameter"}
    gradients = [row for row in program.signature.outputs if row.kind == "gradient" and row.path in shapes]
    assert {row.path: tuple(program.node(str(row.node)).meta["val"].shape) for row in gradients} == shapes


def test_dropout_between_recurrent_layers_is_refused() -> None:
    """Its state is cuDNN's own, and eager mode does not repeat it either."""
    model = nn.GRU(4, 6, 2, dropout=0.5)
    with pytest.raises(UnsupportedOperator, match="dropout between the layers of a recurrent network"):
        whence.capture(model, (torch.randn(5, 2, 4),), device="cuda", backward=True)


class Factored(nn.Module):
    """Calls an operator that PyTorch has a kernel for, and no rule on fakes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.geqrf(x)[0]


def test_an_operator_without_a_rule_is_named() -> None:
    """Its kernel is not here, and was looked for: an error of PyTorch's own."""
    with pytest.raises(UnsupportedOperator, match="cannot run this on fake tensors") as caught:
        whence.capture(Factored(), (torch.randn(4, 3),), device="cuda")
    assert "geqrf" in str(caught.value)


def small(dtype: torch.dtype = torch.float32) -> whence.Program:
    """A joint program for a device."""
    model = GPT(GPTConfig(16, 4, 16, 2, 2)).to(dtype)
    return whence.capture(model, (torch.arange(4)[None],), device="cuda:sm90", backward=next_token_loss)


def attempts() -> dict[str, Any]:
    """What would run the program."""
    program, args = small(), (torch.arange(4)[None],)
    model = GPT(GPTConfig(16, 4, 16, 2, 2))
    return {
        "module": program.module,
        "unflatten": program.unflatten,
        "verify": lambda: program.verify(model, args),
        "run": lambda: program.run(args),
        "first": lambda: program.first(args),
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
@pytest.mark.parametrize("name", ["module", "unflatten", "verify", "run", "first"])
def test_such_a_program_does_not_run_here(name: str) -> None:
    """It says so, and what to do."""
    with pytest.raises(UsageError) as caught:
        attempts()[name]()
    assert "was captured for cuda:0:sm90 and cannot run here" in str(caught.value)
    assert "program.bind(model.to('cuda'))" in str(caught.value)


def test_its_guards_name_the_device() -> None:
    """A model on the CPU is not the captured one, and a bound program runs on nothing else."""
    program, model = small(), GPT(GPTConfig(16, 4, 16, 2, 2))
    found = [str(row) for row in program.check(model, (torch.arange(4)[None],))]
    assert any("on cuda:0" in words and "is Parameter" in words for words in found)
    with pytest.raises(whence.CallError, match="was on cuda:0"):
        program.bind(model)(torch.arange(4)[None])


def test_everything_that_only_looks_works(tmp_path: Path) -> None:
    """Figures, pages, selections, files."""
    program = small()
    assert program.cost()
    assert str(program.report())
    assert program.memory()
    assert str(program)
    assert program.to_json()
    assert program.select(":: aten.mm.default :: backward")
    program.save(tmp_path / "small.whence", weights=False)
    again = whence.load(tmp_path / "small.whence")
    assert (again.device, again.presumed) == (program.device, program.presumed)
    assert operations(again) == operations(program)


def test_the_operations_of_a_small_gpt() -> None:
    """Those of its joint program on sm90, counted."""
    assert_expected_inline(
        table(small(torch.bfloat16)),
        """\
  2 aten.embedding.default
  2 aten.arange.default
 14 aten.add.Tensor
  5 aten.native_layer_norm.default
 46 <built-in function getitem>
 55 aten.view.default
 45 aten.t.default
  8 aten.addmm.default
  4 aten.permute.default
  6 aten.select.int
  2 aten._scaled_dot_product_cudnn_attention.default
  6 aten.detach.default
  4 aten.transpose.int
  2 aten.gelu.default
 19 aten.mm.default
  1 aten.remainder.Scalar
  1 aten._log_softmax.default
  1 aten.nll_loss_forward.default
  1 aten.ones_like.default
  1 aten.nll_loss_backward.default
  1 aten._log_softmax_backward_data.default
  5 aten.native_layer_norm_backward.default
  9 aten.sum.dim_IntList
  2 aten.gelu_backward.default
  2 aten._scaled_dot_product_cudnn_attention_backward.default
  6 aten.select_backward.default
  2 aten.clone.default
  2 aten.embedding_dense_backward.default""",
    )


def table(program: whence.Program) -> str:
    """The operators in the order in which they first come, with how often they do."""
    names = [name.replace("_unsafe_view", "view") for name in operations(program)]  # releases differ in that
    return "\n".join(f"{count:3} {name}" for name, count in Counter(names).items())


@pytest.mark.sample(6)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "joint"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_program_from_fakes_is_that_of_a_device(name: str, backward: bool) -> None:
    """Node for node what was recorded on one, with dtypes, shapes and strides: `tests/golden/cuda`."""
    if name == "llama" and GROUPED_EVERYWHERE:
        pytest.skip("the device had a release whose kernels of attention take no groups of heads")
    head, recorded = golden(name, backward=backward).read_text().split("\n", 1)
    assert head.startswith("# NVIDIA")
    assert listed(name, backward, capability="cuda:sm90") == recorded


@on_a_device
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", JOINT)
def test_a_program_for_the_device_is_that_of_the_device(name: str, backward: bool) -> None:
    """Operation for operation, where there is a device to ask."""
    model, args, kwargs = ARCHITECTURES[name]()
    capability = "cuda:sm{}{}".format(*torch.cuda.get_device_capability())
    there = whence.capture(model, args, kwargs, backward=backward, device=capability)
    moved = [{key: on(value) for key, value in kwargs.items()}, tuple(map(on, args))]
    here = whence.capture(model.to("cuda"), moved[1], moved[0], backward=backward)  # type: ignore[arg-type]
    assert operations(there) == operations(here)


def on(value: Any) -> Any:
    """A value on the device."""
    return value.to("cuda") if isinstance(value, Tensor) else value


@on_a_device
def test_bisect_draws_the_same_numbers_on_the_device() -> None:
    """Its generator is in every run where it was before."""
    model, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).cuda(),
        torch.randn(8, 4).cuda(),
    )
    program = whence.capture(model, (x,))
    before = torch.cuda.get_rng_state()
    assert whence.bisect(program, [lambda _: None, lambda _: None], (x,)) is None
    assert program.first((x,), differs_from=program.apply(lambda _: None)) is None
    assert not torch.equal(torch.cuda.get_rng_state(), before)  # of the last run, which is the program's own
