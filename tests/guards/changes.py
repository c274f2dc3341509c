"""Ways to change a model, its inputs or the process after a capture: each a row with the outcome expected."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

_C: Any = torch._C  # not all of it is declared
Change = Callable[[nn.Module], Any]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


# --- architectures ---------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A recurrent tagger with a tied pair, a plain dict, a function and an object among its attributes."""

    scale = 2.0
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.encoder = nn.LSTM(8, 8, batch_first=True)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)])
        self.norms = nn.ModuleDict({"a": nn.LayerNorm(8), "b": nn.LayerNorm(8)})
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))])
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.ones(8))
        self.options: dict[str, Any] = {"power": 2, "clip": [0.0, 1.0]}
        self.activation = torch.tanh
        self.unread = 1
        self.constant = torch.ones(8)

    def mix(self, x: Tensor) -> Tensor:
        """A method of its own."""
        return x * self.scale

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.encoder(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        for norm in self.norms.values():
            x = norm(x)
        for gain in self.gains:
            x = x * gain
        if hasattr(self, "extra"):
            x = x + 1
        x = self.activation(self.mix(x)) + self.shift + self.constant
        result: Tensor = self.head(x ** self.options["power"])
        return result


def llama() -> nn.Module:
    """A decoder."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=20, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def bert() -> nn.Module:
    """An encoder with tied embeddings, in training mode."""
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=24, num_attention_heads=2, vocab_size=20
    )
    return transformers.BertForMaskedLM(config).train()


def resnet() -> nn.Module:
    """Convolutions and batch norms, in training mode."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config).train()


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "bert": bert,
    "resnet": resnet,
    "tagger": Tagger,
}
LEAVES = {
    "llama": "model.layers.1.mlp.up_proj",
    "bert": "bert.encoder.layer.1.output.dense",
    "resnet": "resnet.encoder.stages.1.layers.0.layer.0.convolution",
    "tagger": "blocks.2",
}
ACTIVATIONS = {
    "llama": "model.layers.1.mlp.act_fn",
    "bert": "bert.encoder.layer.0.intermediate.intermediate_act_fn",
    "resnet": "resnet.encoder.stages.1.layers.0.activation",
    "tagger": "blocks.1",
}
ALL = tuple(BUILDERS)
WHOLE = ("llama", "bert", "tagger")
"""Those whose programs have composites whole: what these are made of is decided by each run."""


def make(name: str) -> nn.Module:
    """The architecture of that name, always with the same bits."""
    torch.manual_seed(0)
    return BUILDERS[name]()


def inputs_of(name: str) -> Inputs:
    """Example inputs."""
    if name == "resnet":
        return (torch.ones(2, 3, 16, 16),), {}
    return (torch.arange(12).reshape(2, 6),), {}


# --- changes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One change: what is done, what is reported (None: nothing), and the architectures it is done to.

    `{leaf}` and `{act}` in `reported` stand for the paths of a layer with a weight and of an activation.
    `around` makes the change for the length of the check, for what the process or a class holds.
    """

    name: str
    change: Callable[[str, Any], Any] = lambda *_: None
    reported: str | None = None
    on: tuple[str, ...] = ALL
    around: Callable[[str, nn.Module], Any] = lambda *_: nullcontext()


def leaf(name: str, model: nn.Module) -> Any:
    """A layer with a weight, in the middle of the model."""
    return model.get_submodule(LEAVES[name])


def act(name: str, model: nn.Module) -> Any:
    """An activation in the middle of the model."""
    return model.get_submodule(ACTIVATIONS[name])


def put(model: nn.Module, path: str, value: Any) -> None:
    """Set what is found at a path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, value)


def replace_leaf(make_other: Callable[[nn.Module], Any]) -> Callable[[str, nn.Module], None]:
    """A change that puts another module in the place of the layer."""
    return lambda name, model: put(model, LEAVES[name], make_other(leaf(name, model)))


def _give_gradients(_: str, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def _step(name: str, model: nn.Module) -> None:
    _give_gradients(name, model)
    torch.optim.AdamW(model.parameters()).step()


def _new_parameters(_: str, model: nn.Module) -> None:
    renewed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, old in list(module._parameters.items()):
            if old is not None and not isinstance(module, nn.LSTM):
                new = renewed.setdefault(id(old), nn.Parameter(old.detach() * 2))
                module._parameters[key] = new


def _with_weight(work: Callable[[Tensor], Tensor]) -> Callable[[str, nn.Module], None]:
    def change(name: str, model: nn.Module) -> None:
        layer = leaf(name, model)
        layer.weight = nn.Parameter(work(layer.weight.detach()))

    return change


def _hook(*_: Any) -> None:
    return None


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of a class, changed for a while."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def switched(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """A switch of the process, changed for a while."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextmanager
def global_hook(*_: Any) -> Iterator[None]:
    """A hook on every module, for a while."""
    handle = nn.modules.module.register_module_forward_hook(_hook)
    try:
        yield
    finally:
        handle.remove()


class FunctionMode(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _class_forward(name: str, model: nn.Module) -> Any:
    return patched(type(leaf(name, model)), "forward", lambda self, *_: self)


def _config(field: str, value: Any) -> Callable[[str, nn.Module], None]:
    def change(_: str, model: Any) -> None:
        setattr(model.config, field, value)

    return change


def _with_hooked_wrapper(name: str, model: nn.Module) -> None:
    compiled: Any = torch.compile(leaf(name, model), backend="eager")
    compiled.register_forward_hook(_hook)
    put(model, LEAVES[name], compiled)


KERNELS = [
    *(SDPBackend.MATH, SDPBackend.FLASH_ATTENTION),
    *(SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION),
]
TRANSFORMERS = ("llama", "bert", "resnet")
CHANGES: tuple[Row, ...] = (
    Row("nothing"),
    Row("state loaded", lambda _, m: m.load_state_dict(copy.deepcopy(m.state_dict()))),
    Row("optimizer step", _step),
    Row("gradients set", _give_gradients),
    Row("gradients emptied", lambda _, m: m.zero_grad()),
    Row("weights scaled in place", lambda _, m: [p.data.mul_(2) for p in m.parameters()]),
    Row("new parameters of the same kind", _new_parameters),
    Row("weight replaced by its like", _with_weight(lambda w: w * 2)),
    Row("buffer values changed", lambda _, m: [b.zero_() for b in m.buffers()]),
    Row("hook put on and removed", lambda n, m: leaf(n, m).register_forward_hook(_hook).remove()),
    Row("state_dict hook", lambda n, m: leaf(n, m)._register_state_dict_hook(_hook)),
    Row("unread attribute added", lambda n, m: setattr(leaf(n, m), "note", "mine")),
    Row("unread parameter added", lambda _, m: m.register_parameter("spare", nn.Parameter(torch.ones(3)))),
    Row("unused submodule added", lambda _, m: m.add_module("spare", nn.Linear(2, 2))),
    Row("mode flipped and flipped back", lambda _, m: m.train(not m.training).train(not m.training)),
    Row("moved to the device it is on", lambda _, m: m.to("cpu", torch.float32)),
    Row("weight in another layout", _with_weight(lambda w: w.mT.contiguous().mT)),
    Row("layer replaced by its like", replace_leaf(copy.deepcopy)),
    Row("activation replaced by its like", lambda n, m: put(m, ACTIVATIONS[n], copy.deepcopy(act(n, m)))),
    Row("layer compiled", replace_leaf(lambda old: torch.compile(old, backend="eager"))),
    Row("forward set to itself", lambda n, m: setattr(leaf(n, m), "forward", leaf(n, m).forward)),
    Row("unread option changed", _config("name_or_path", "elsewhere"), on=TRANSFORMERS),
    Row("options copied", lambda _, m: put(m, "config", copy.deepcopy(m.config)), on=TRANSFORMERS),
    Row("unread number changed", lambda _, m: setattr(m, "unread", 2), on=("tagger",)),
    Row("dict replaced by its like", lambda _, m: setattr(m, "options", dict(m.options)), on=("tagger",)),
    #
    Row("mode of the model", lambda _, m: m.train(not m.training), "training"),
    Row("mode of a layer", lambda n, m: leaf(n, m).train(not leaf(n, m).training), "{leaf}.training"),
    Row("all frozen", lambda _, m: m.requires_grad_(False), "{leaf}.weight"),
    Row("one frozen", lambda n, m: leaf(n, m).weight.requires_grad_(False), "{leaf}.weight"),
    Row("all double", lambda _, m: m.double(), "{leaf}.weight"),
    Row("one half", lambda n, m: leaf(n, m).half(), "{leaf}.weight"),
    Row("all on meta", lambda _, m: m.to("meta"), "{leaf}.weight"),
    Row("larger weight", _with_weight(lambda w: torch.cat([w, w])), "{leaf}.weight"),
    Row("weight no parameter", lambda n, m: _plain(leaf(n, m), "weight"), "{leaf}.weight"),
    Row("weight removed", lambda n, m: leaf(n, m)._parameters.pop("weight"), "{leaf}.weight"),
    Row("weight None", lambda n, m: leaf(n, m).register_parameter("weight", None), "{leaf}.weight"),
    Row(
        "bias given",
        lambda n, m: leaf(n, m).register_parameter("bias", nn.Parameter(torch.ones(24))),
        "{leaf}.bias",
        on=("llama", "resnet"),
    ),
    Row("forward hook", lambda n, m: leaf(n, m).register_forward_hook(_hook), "hooks of {leaf}"),
    Row("forward pre-hook", lambda _, m: m.register_forward_pre_hook(_hook), "hooks of the model"),
    Row(
        "forward hook with kwargs",
        lambda n, m: leaf(n, m).register_forward_hook(_hook, with_kwargs=True),
        "hooks of {leaf}",
    ),
    Row(
        "forward hook that is always called",
        lambda n, m: act(n, m).register_forward_hook(_hook, always_call=True),
        "hooks of {act}",
    ),
    Row("backward hook", lambda n, m: leaf(n, m).register_full_backward_hook(_hook), "hooks of {leaf}"),
    Row("backward pre-hook", lambda n, m: act(n, m).register_full_backward_pre_hook(_hook), "hooks of {act}"),
    Row("hook on all modules", reported="hooks of all modules", around=global_hook),
    Row("forward of a layer", lambda n, m: setattr(leaf(n, m), "forward", _hook), "{leaf}.forward"),
    Row("forward of the model", lambda _, m: setattr(m, "forward", _hook), "forward"),
    Row(
        "forward in a partial",
        lambda n, m: setattr(leaf(n, m), "forward", functools.partial(leaf(n, m).forward, 1)),
        "{leaf}.forward",
    ),
    Row("forward of a class", reported="{class}.forward", around=_class_forward),
    Row("another activation", lambda n, m: put(m, ACTIVATIONS[n], nn.Softplus()), "{act}"),
    Row("a layer skipped", replace_leaf(lambda _: nn.Identity()), "{leaf}"),
    Row("a layer of a subclass", lambda n, m: put(m, LEAVES[n], _subclassed(leaf(n, m))), "{leaf}"),
    Row("a layer None", lambda n, m: put(m, LEAVES[n], None), "{leaf}"),
    Row("a layer deleted", lambda n, m: _delete(m, LEAVES[n]), "{leaf}"),
    Row(
        "weight norm",
        lambda n, m: nn.utils.parametrizations.weight_norm(leaf(n, m)),
        "{leaf}",
    ),
    Row("pruned", lambda n, m: _prune(leaf(n, m)), "{leaf}.weight"),
    Row("compiled layer with a hook", _with_hooked_wrapper, "hooks of {leaf}"),
    Row("wrapped layer", replace_leaf(nn.Sequential), "{leaf}"),
    #
    Row("scalar", lambda _, m: setattr(m.model.layers[1].self_attn, "scaling", 0.5),
        "model.layers.1.self_attn.scaling", on=("llama",)),
    Row("scalar deleted", lambda _, m: delattr(m.model.layers[1].self_attn, "scaling"),
        "model.layers.1.self_attn.scaling", on=("llama",)),
    Row("epsilon", lambda _, m: setattr(m.model.norm, "variance_epsilon", 1e-3),
        "model.norm.variance_epsilon", on=("llama",)),
    Row("dropout", lambda _, m: setattr(m.bert.embeddings.dropout, "p", 0.5),
        "bert.embeddings.dropout.p", on=("bert",)),
    Row("number of another type", lambda _, m: setattr(m.bert.embeddings.LayerNorm, "eps", 1),
        "bert.embeddings.LayerNorm.eps", on=("bert",)),
    Row("momentum", lambda _, m: setattr(m.resnet.embedder.embedder.normalization, "momentum", 0.5),
        "resnet.embedder.embedder.normalization.momentum", on=("resnet",)),
    Row("stride", lambda _, m: setattr(m.resnet.embedder.embedder.convolution, "stride", (1, 1)),
        "resnet.embedder.embedder.convolution.stride", on=("resnet",)),
    Row("checkpointing", lambda _, m: setattr(m.model, "gradient_checkpointing", True),
        "model.gradient_checkpointing", on=("llama",)),
    Row("option of the model", _config("output_hidden_states", True),
        "config.output_hidden_states", on=("llama", "bert")),
    Row("attention of the model", lambda _, m: m.set_attn_implementation("eager"),
        "config._attn_implementation_internal", on=("llama", "bert")),
    Row("buffer of another type", lambda _, m: setattr(m, "shift", m.shift.half()), "shift", on=("tagger",)),
    Row("buffer removed", lambda _, m: delattr(m, "shift"), "shift", on=("tagger",)),
    Row("tensor attribute of another shape", lambda _, m: setattr(m, "constant", torch.ones(1)),
        "constant", on=("tagger",)),
    Row("tie undone", lambda _, m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach().clone())),
        "head.weight", on=("tagger",)),
    Row("tie made", lambda _, m: setattr(m.blocks[2], "weight", m.blocks[0].weight),
        "blocks.2.weight", on=("tagger",)),
    Row("list longer", lambda _, m: m.blocks.append(nn.ReLU()), "submodules of blocks", on=("tagger",)),
    Row("list shorter", lambda _, m: m.blocks.pop(2), "submodules of blocks", on=("tagger",)),
    Row("list in another order", lambda _, m: _reverse(m.blocks), "blocks.0", on=("tagger",)),
    Row("dict renamed", lambda _, m: m.norms.update({"c": m.norms.pop("b")}), "submodules of norms",
        on=("tagger",)),
    Row("dict in another order", lambda _, m: _turn(m.norms), "submodules of norms", on=("tagger",)),
    Row("parameter list longer", lambda _, m: m.gains.append(torch.ones(8)), "gains._size", on=("tagger",)),
    Row("parameter in a list", lambda _, m: m.gains[0].requires_grad_(False), "gains.0", on=("tagger",)),
    Row("dict entry", lambda _, m: m.options.update(power=3), "options", on=("tagger",)),
    Row("list in a dict", lambda _, m: m.options["clip"].append(2.0), "options", on=("tagger",)),
    Row("function", lambda _, m: setattr(m, "activation", torch.sigmoid), "activation", on=("tagger",)),
    Row("method", lambda _, m: setattr(m, "mix", lambda x: x), "mix", on=("tagger",)),
    Row("class attribute shadowed", lambda _, m: setattr(m, "scale", 3.0), "scale", on=("tagger",)),
    Row("class attribute", reported="Tagger.scale", on=("tagger",),
        around=lambda *_: patched(Tagger, "scale", 3.0)),
    Row("absent attribute given", lambda _, m: setattr(m, "extra", True), "extra", on=("tagger",)),
    Row("recurrent layers", lambda _, m: setattr(m.encoder, "num_layers", 2),
        "encoder.num_layers", on=("tagger",)),
    Row("recurrent directions", lambda _, m: setattr(m.encoder, "bidirectional", True),
        "encoder.bidirectional", on=("tagger",)),
    #
    Row("no grad", around=lambda *_: torch.no_grad(), on=WHOLE),
    Row("no grad, of what is taken apart", reported="grad mode", on=("resnet",),
        around=lambda *_: torch.no_grad()),
    Row("autocast", reported="autocast", around=lambda *_: torch.autocast("cpu", dtype=torch.bfloat16)),
    Row("default dtype", reported="default dtype",
        around=lambda *_: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64)),
    Row("default device", reported="default device", around=lambda *_: torch.device("meta")),
    Row("deterministic", reported="deterministic algorithms", around=lambda *_: switched(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)),
    Row("matmul precision", reported="float32 matmul precision", around=lambda *_: switched(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high")),
    Row("inference mode", around=lambda *_: torch.inference_mode(), on=WHOLE),
    Row("mkldnn", reported="mkldnn", around=lambda *_: switched(
        _C._get_mkldnn_enabled, _C._set_mkldnn_enabled, False)),
    Row("a mode of torch", reported="modes of torch", around=lambda *_: FunctionMode()),
    *(Row(f"{backend.name} attention alone", reported="attention kernels",
        around=lambda *_, backend=backend: sdpa_kernel(backend)) for backend in KERNELS),
    Row("attention kernels in another order", reported="order of attention",
        around=lambda *_: sdpa_kernel(KERNELS[::-1], set_priority=True)),
)  # fmt: skip


def _subclassed(layer: nn.Module) -> nn.Module:
    other = copy.deepcopy(layer)
    other.__class__ = type(f"My{type(layer).__name__}", (type(layer),), {})
    return other


def _plain(layer: Any, name: str) -> None:
    weight = layer._parameters.pop(name)
    setattr(layer, name, weight.detach())


def _delete(model: nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    delattr(model.get_submodule(parent), name)


def _prune(layer: nn.Module) -> None:
    prune.identity(layer, "weight")


def _reverse(blocks: nn.ModuleList) -> None:
    blocks[0], blocks[1] = blocks[1], blocks[0]


def _turn(norms: nn.ModuleDict) -> None:
    norms["a"] = norms.pop("a")
