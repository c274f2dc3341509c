"""Guards print as a page."""

import re

import torch
import transformers
from torch import Tensor, nn

import whence
from tests.guards.changes import inputs_of
from whence.program.guards.expectations import ExpectedConstant

SCALE = 0.5


class Classifier(nn.Module):
    """Two equal blocks, a hook, a flag, a global and a loose tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.norm.register_forward_hook(halve)
        self.verbose = False
        self.center = torch.zeros(4)
        self.widths = (4, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        if self.verbose or len(self.widths) > 2:
            x = x * SCALE
        result: Tensor = self.head(self.norm(x) - self.center)
        return result


def halve(module: nn.Module, args: object, output: Tensor) -> Tensor:
    """A forward hook."""
    return output / 2


PAGE = """\
60 guards

Classifier · the model
  code of forward · training mode · no hooks
  verbose                  False  LINE
  widths                   (4, 2)  LINE
  center                   Tensor float32[4]  LINE

ModuleList · blocks
  submodules               0, 1  LINE

Linear · 3 of them · blocks.0 … head
  code of forward · training mode · no hooks
  weight                   Parameter float32[4, 4], requires grad  in 2  LINE
  bias                     Parameter float32[4], requires grad  in 2  LINE
  weight                   Parameter float32[2, 4], requires grad  in 1  LINE
  bias                     None  in 1  LINE

BatchNorm1d · norm
  code of forward, _check_input_dim · training mode
  hooks                    forward hook halve  LINE
  momentum                 0.1  LINE
  track_running_stats      True  LINE
  num_batches_tracked      Tensor int64[]  LINE
  running_mean             Tensor float32[4]  LINE
  running_var              Tensor float32[4]  LINE
  weight                   Parameter float32[4], requires grad  LINE
  bias                     Parameter float32[4], requires grad  LINE
  eps                      1e-05  LINE

_BatchNorm · a base class
  code of forward

variables
  global SCALE             0.5  LINE
  replaced functions of PyTorch and Python ()
  variables with names of Python's own ()

inputs
  the arguments            (f32[3, 4], mask=None)
  args[0]                  Tensor float32[3, 4]
  kwargs['mask']           None

process
  grad mode                True
  autocast                 ()
  default device           device(type='cpu')
  modes of torch           ()
  default dtype            torch.float32
  deterministic algorithms 0
  float32 matmul precision 'highest'
  mkldnn                   True
  attention kernels        ('flash', 'efficient', 'math', 'cudnn')
  fast path of encoders    True
  order of attention       [1, 2, 0, 3, 4]
  hooks of all modules     none

not guarded
  functions called from forward: that forward itself and the methods it looks up are the same is guarded, \
and so are numbers, texts, flags, tensors and functions that they name, or that functions name which they \
call, in variables and on objects, classes and tensors around; what else such an object leads to is not, nor \
what is called further on, or closed over by functions of libraries\
"""


def test_page_of_a_model() -> None:
    """A class of modules is described once; inputs, the process and what is not guarded follow."""
    guards = whence.capture(Classifier(), (torch.ones(3, 4),), {"mask": None}).guards
    assert re.sub(r"  \w+\.py:\d+", "  LINE", str(guards)) == PAGE


def test_a_deep_model_prints_a_page() -> None:
    """Thirty-two layers take no more room than two."""

    def printed(layers: int) -> str:
        config = transformers.LlamaConfig(
            num_hidden_layers=layers, hidden_size=16, intermediate_size=24, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=20, use_cache=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).eval()
        return str(whence.capture(model, *inputs_of("llama")).guards)

    page = printed(32)
    assert len(page.splitlines()) == len(printed(2).splitlines())
    assert len(page.partition("\nvariables\n")[0].splitlines()) < 80
    assert "LlamaAttention · 32 of them · model.layers.*.self_attn" in page


def test_guards_are_data() -> None:
    """Each guard says what, what is expected, how strictly, why, and where it was read."""
    guards = whence.capture(Classifier(), (torch.ones(3, 4),)).guards
    (row,) = [row for row in guards.to_dict()["guards"] if row["what"] == "norm.momentum"]
    assert row["source"].partition(":")[0] == __file__
    assert {key: value for key, value in row.items() if key != "source"} == {
        "kind": "attribute",
        "what": "norm.momentum",
        "expected": "0.1",
        "strictness": "equal",
        "module": "norm",
        "reason": "the model read it, and what it decided is part of the program",
    }
    assert [guard.what for guard in guards.about("momentum")] == ["norm.momentum"]
    assert len(guards) == len(list(guards)) == len(guards.to_dict()["guards"])


def test_sets_have_one_order() -> None:
    """Whatever order a process, or a file, has them in."""
    assert str(ExpectedConstant(set("cab"))) == "{'a', 'b', 'c'}"
    assert str(ExpectedConstant(frozenset({10, 9}))) == "frozenset({10, 9})"
    assert (str(ExpectedConstant(set())), str(ExpectedConstant(frozenset()))) == ("set()", "frozenset()")
