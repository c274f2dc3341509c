"""The one table of models that every integration test reads.

Every case is tiny, has random weights, and computes the same bits when run again from the same seed.

    hf                  from transformers
    rng                 forward draws random numbers: seed before each run
    buffers             forward changes a buffer
    mutates_inputs      forward changes an input: give each run inputs of its own
    mutates_parameters  forward changes a parameter
    inplace             the model's own code writes in place
    tied                one parameter under several names
    shared_weight       one parameter used at several places under one name
    frozen              a parameter that takes no gradient
    parametrized        a parameter computed by torch.nn.utils.parametrizations
    loop                one module called several times
    experts             a mixture of experts
    custom_op           captured through an operator that transformers registers
    custom_function     a torch.autograd.Function
    checkpoint          computes regions again in backward
    autocast, no_grad   a region under that mode
    double_backward     calls autograd inside forward
    closure, hooks      operations outside any module's own forward
    pytree              structured inputs or outputs
    aliases             outputs that share memory with each other, an input or a parameter
    constants           tensors that are neither parameters nor persistent buffers
    complex             complex numbers
    no_export           torch.export refuses it
    asks                asks whether it is being compiled, and if so computes other last bits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests import zoo

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ModelCase:
    """A model, example inputs and a scalar loss; the tags say what is special about it."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[Any], Tensor]
    training: bool = False
    tags: frozenset[str] = frozenset()

    def make(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The model, its positional and its keyword arguments: the same bits at every call."""
        torch.manual_seed(0)
        model = self.build().train(self.training)
        torch.manual_seed(1)
        args, kwargs = self.inputs()
        return model, args, kwargs


def case(name: str) -> ModelCase:
    """The case called `name`."""
    return _BY_NAME[name]


# Losses


def mean_sine(output: Tensor) -> Tensor:
    """A scalar with a gradient everywhere; a mean square would be constant behind a LayerNorm."""
    return output.float().sin().mean()


def mean_sines(outputs: Iterable[Tensor]) -> Tensor:
    """The sum of `mean_sine` over several outputs."""
    return torch.stack([mean_sine(output) for output in outputs]).sum()


def own_loss(outputs: Any) -> Tensor:
    """The loss a Hugging Face model computed from its labels."""
    return outputs.loss


def logits_loss(outputs: Any) -> Tensor:
    """For a Hugging Face model given no labels."""
    return mean_sine(outputs.logits)


def _prediction_loss(outputs: zoo.Prediction) -> Tensor:
    return mean_sines([outputs.logits, *outputs.hidden])


def _aliases_loss(outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]) -> Tensor:
    return mean_sines(outputs[:5]) * outputs[5]


# Inputs


def tokens(batch: int = 2, length: int = 8) -> Tensor:
    """Token ids, the first three kept free for padding and other special tokens."""
    return torch.randint(3, 100, (batch, length))


def image() -> Tensor:
    """Two images of 32 by 32."""
    return torch.randn(2, 3, 32, 32)


def classes(count: int = 5) -> Tensor:
    """Two class labels."""
    return torch.randint(0, count, (2,))


def features(*shape: int) -> Tensor:
    """Random numbers, two sequences of eight unless another shape is asked for."""
    return torch.randn(*(shape or (2, 8, zoo.WIDTH)))


def padding_mask(length: int = 8) -> Tensor:
    """One full sequence and one that is three tokens shorter."""
    return (torch.arange(length) < torch.tensor([[length], [length - 3]])).long()


def _sequence_inputs() -> Inputs:
    return (features(),), {}


def _cached_inputs() -> Inputs:
    cache = {"keys": features(2, 6, zoo.WIDTH), "values": features(2, 6, zoo.WIDTH)}
    return (features(2, 1, zoo.WIDTH), torch.tensor([3])), cache


# Hugging Face


def _pretrained(architecture: str, **config: Any) -> Any:
    model_type = getattr(transformers, architecture)
    return model_type(model_type.config_class(**config))


def _checkpointed(architecture: str, **config: Any) -> nn.Module:
    model = _pretrained(architecture, **config)
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def _causal_inputs() -> Inputs:
    ids = tokens()
    return (), {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def _masked_inputs() -> Inputs:
    return (), {"input_ids": tokens(), "attention_mask": padding_mask(), "labels": tokens()}


def _sequence_to_sequence_inputs() -> Inputs:
    arguments = {"input_ids": tokens(), "attention_mask": padding_mask(), "labels": tokens(length=6)}
    return (), {**arguments, "use_cache": False}


def _speech_inputs() -> Inputs:
    return (), {"input_features": features(2, 8, 32), "labels": tokens(length=6), "use_cache": False}


def _image_inputs() -> Inputs:
    return (), {"pixel_values": image(), "labels": classes()}


# Wide enough that every gradient stands clear of rounding; the default 0.02 starves attention of them.
_INITIAL = 0.2
_SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _encoder_sizes(**overrides: Any) -> dict[str, Any]:
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": _INITIAL}
    widths = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    return {**layers, **widths, **overrides}


def _decoder_sizes(**overrides: Any) -> dict[str, Any]:
    return _encoder_sizes(**{"num_key_value_heads": 4, **_SPECIAL_TOKENS, **overrides})


def _vision_sizes(**overrides: Any) -> dict[str, Any]:
    return {"image_size": 32, "initializer_range": _INITIAL, **overrides}


def _patch_sizes(**overrides: Any) -> dict[str, Any]:
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    return _vision_sizes(patch_size=8, hidden_size=32, intermediate_size=64, **layers, **overrides)


def _bart_sizes(**overrides: Any) -> dict[str, Any]:
    layers = {"encoder_layers": 2, "decoder_layers": 2, "init_std": _INITIAL}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"vocab_size": 100, "d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    return {**layers, **heads, **widths, **_SPECIAL_TOKENS, **overrides}


_GPT2 = {
    **dict(vocab_size=100, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=_INITIAL),
    **_SPECIAL_TOKENS,
}
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, output_router_logits=True)
# The default, "grouped_mm": the gradients of "batched_mm" depend on which thread adds first.
_GROUPED = ("experts", "inplace", "custom_op")


def _hf(
    name: str,
    architecture: str,
    inputs: Callable[[], Inputs],
    config: dict[str, Any],
    *tags: str,
    loss: Callable[[Any], Tensor] = own_loss,
    training: bool = False,
) -> ModelCase:
    build = partial(_pretrained, architecture, **config)
    return ModelCase(name, build, inputs, loss, training, frozenset({"hf", *tags}))


def _plain(
    name: str,
    build: Callable[[], nn.Module],
    *tags: str,
    inputs: Callable[[], Inputs] = _sequence_inputs,
    loss: Callable[[Any], Tensor] = mean_sine,
    training: bool = False,
) -> ModelCase:
    return ModelCase(name, build, inputs, loss, training, frozenset(tags))


_DECODERS = (
    _hf("gpt2", "GPT2LMHeadModel", _causal_inputs, _GPT2, "tied"),
    _hf("gpt2_dropout", "GPT2LMHeadModel", _causal_inputs, _GPT2, "tied", "rng", training=True),
    _hf("llama", "LlamaForCausalLM", _causal_inputs, _decoder_sizes()),
    ModelCase(
        "llama_checkpoint",
        partial(_checkpointed, "LlamaForCausalLM", **_decoder_sizes()),
        _causal_inputs,
        own_loss,
        training=True,
        tags=frozenset({"hf", "checkpoint"}),
    ),
    _hf("mistral", "MistralForCausalLM", _causal_inputs, _decoder_sizes(sliding_window=4)),
    _hf("qwen2", "Qwen2ForCausalLM", _causal_inputs, _decoder_sizes()),
    # Told that it is being compiled, transformers repeats keys and values itself instead of asking
    # `scaled_dot_product_attention` to: the same outputs, gradients that are rounded otherwise.
    _hf("llama_grouped", "LlamaForCausalLM", _causal_inputs, _decoder_sizes(num_key_value_heads=2)),
    _hf(
        "gemma2",
        "Gemma2ForCausalLM",
        _causal_inputs,
        _decoder_sizes(head_dim=8, query_pre_attn_scalar=8, sliding_window=4),
        "tied",
    ),
    _hf("gpt_neox", "GPTNeoXForCausalLM", _causal_inputs, _decoder_sizes()),
    _hf(
        "opt",
        "OPTForCausalLM",
        _causal_inputs,
        dict(
            vocab_size=100,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            init_std=0.2,
        ),
        "tied",
    ),
    _hf(
        "mamba",
        "MambaForCausalLM",
        _causal_inputs,
        dict(vocab_size=100, hidden_size=32, state_size=4, num_hidden_layers=2),
        "tied",
    ),
    _hf(
        "mixtral",
        "MixtralForCausalLM",
        _causal_inputs,
        _decoder_sizes(num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
        *_GROUPED,
    ),
    _hf("olmoe", "OlmoeForCausalLM", _causal_inputs, _decoder_sizes(**_EXPERTS), *_GROUPED),
    _hf("qwen2_moe", "Qwen2MoeForCausalLM", _causal_inputs, _decoder_sizes(**_EXPERTS), *_GROUPED),
)

_ENCODERS = (
    _hf("bert", "BertForMaskedLM", _masked_inputs, _encoder_sizes(), "tied"),
    _hf("roberta", "RobertaForMaskedLM", _masked_inputs, _encoder_sizes(pad_token_id=1), "tied"),
    _hf(
        "distilbert",
        "DistilBertForMaskedLM",
        _masked_inputs,
        dict(vocab_size=100, dim=32, hidden_dim=64, n_layers=2, n_heads=4, max_position_embeddings=32),
        "tied",
    ),
    _hf("albert", "AlbertForMaskedLM", _masked_inputs, _encoder_sizes(embedding_size=16), "tied", "loop"),
    _hf(
        "deberta_v2",
        "DebertaV2ForMaskedLM",
        _masked_inputs,
        _encoder_sizes(relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"]),
        "tied",
        "inplace",
    ),
    _hf("electra", "ElectraForMaskedLM", _masked_inputs, _encoder_sizes(embedding_size=16), "tied"),
)

_ENCODER_DECODERS = (
    _hf(
        "t5",
        "T5ForConditionalGeneration",
        _sequence_to_sequence_inputs,
        dict(
            vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
        "tied",
        "inplace",
    ),
    _hf(
        "bart", "BartForConditionalGeneration", _sequence_to_sequence_inputs, _bart_sizes(), "tied", "inplace"
    ),
    _hf(
        "whisper",
        "WhisperForConditionalGeneration",
        _speech_inputs,
        _bart_sizes(
            num_mel_bins=8, max_source_positions=16, max_target_positions=16, decoder_start_token_id=1
        ),
        "tied",
        "frozen",
        "inplace",
    ),
)

_VISION = (
    _hf("vit", "ViTForImageClassification", _image_inputs, _patch_sizes(num_labels=5)),
    _hf(
        "convnext",
        "ConvNextForImageClassification",
        _image_inputs,
        _vision_sizes(
            num_stages=2, hidden_sizes=[16, 32], depths=[1, 1], layer_scale_init_value=0.1, num_labels=5
        ),
    ),
    _hf(
        "swin",
        "SwinForImageClassification",
        _image_inputs,
        _vision_sizes(
            patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5
        ),
    ),
    _hf(
        "resnet",
        "ResNetForImageClassification",
        _image_inputs,
        dict(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=5),
        "buffers",
        "inplace",
        training=True,
    ),
    _hf(
        "segformer",
        "SegformerForSemanticSegmentation",
        lambda: ((), {"pixel_values": image(), "labels": torch.randint(0, 5, (2, 32, 32))}),
        dict(
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=32,
            initializer_range=_INITIAL,
            num_labels=5,
        ),
    ),
    _hf(
        "clip",
        "CLIPModel",
        lambda: ((), {"input_ids": tokens(), "pixel_values": image(), "return_loss": True}),
        dict(
            text_config=_encoder_sizes(projection_dim=16, **_SPECIAL_TOKENS),
            vision_config=_patch_sizes(projection_dim=16),
            projection_dim=16,
        ),
    ),
    _plain("unet", zoo.UNet, inputs=lambda: ((image(), torch.rand(2)), {})),
    _plain(
        "diffusion_transformer",
        zoo.DiffusionTransformer,
        inputs=lambda: ((image(), torch.rand(2), classes()), {}),
    ),
)

_AUDIO = (
    _hf(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        lambda: ((features(2, 640),), {}),
        _encoder_sizes(
            conv_dim=[16, 16],
            conv_stride=[5, 4],
            conv_kernel=[10, 4],
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            mask_time_prob=0.0,
        ),
        "parametrized",
        loss=logits_loss,
    ),
)

_TRANSFORMERS = (
    _plain(
        "transformer",
        partial(nn.Transformer, zoo.WIDTH, 4, 1, 1, 64, batch_first=True),
        inputs=lambda: ((features(), features(2, 6, zoo.WIDTH)), {}),
    ),
    _plain(
        "transformer_encoder_dropout",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(zoo.WIDTH, 4, 64, batch_first=True), 2),
        "rng",
        inputs=lambda: ((features(),), {"src_key_padding_mask": padding_mask() == 0}),
        training=True,
    ),
)

_RECURRENT = (
    _plain("lstm", zoo.LstmClassifier, inputs=lambda: ((tokens(),), {})),
    _plain("gru", zoo.GruForecaster, "loop", inputs=lambda: ((features(2, 8, 4),), {})),
)

_PARAMETERS = (
    _plain("tied_autoencoder", zoo.TiedAutoencoder, "shared_weight"),
    _plain("tied_language_model", zoo.TiedLanguageModel, "tied", inputs=lambda: ((tokens(),), {})),
    _plain("named_branches", zoo.NamedBranches),
    _plain("partly_frozen", zoo.PartlyFrozen, "frozen", "shared_weight"),
    _plain("weight_norm", zoo.WeightNormed, "parametrized"),
    _plain("spectral_norm", zoo.SpectralNormed, "parametrized", "buffers", "no_grad", training=True),
)

_CALLS = (
    _plain("shared_layer", zoo.SharedLayer, "loop"),
    _plain(
        "shared_module",
        zoo.SharedAcrossNames,
        "tied",
        "loop",
        inputs=lambda: ((features(), features(2, 5, zoo.WIDTH)), {}),
    ),
    _plain("dense_experts", zoo.DenseExperts, "experts"),
    _plain("hooked", zoo.Hooked, "hooks"),
    _plain("closure", zoo.ClosureOps, "closure"),
)

_REGIONS = (
    _plain("autocast", zoo.MixedPrecision, "autocast"),
    _plain("distillation", zoo.Distillation, "no_grad", "frozen"),
    _plain(
        "momentum_teacher",
        zoo.MomentumTeacher,
        "no_grad",
        "frozen",
        "inplace",
        "mutates_parameters",
        training=True,
    ),
    _plain("checkpoint", zoo.Checkpointed, "checkpoint"),
    _plain("checkpoint_dropout", partial(zoo.Checkpointed, dropout=0.1), "checkpoint", "rng", training=True),
    _plain(
        "energy_forces",
        zoo.EnergyForces,
        "double_backward",
        "no_export",
        inputs=lambda: ((features(2, 5, 3).requires_grad_(),), {}),
        loss=mean_sines,
    ),
)

_WRITES = (
    _plain(
        "inplace_activations",
        zoo.InplaceActivations,
        "inplace",
        "buffers",
        inputs=lambda: ((image(),), {}),
        training=True,
    ),
    _plain("inplace_views", zoo.InplaceViews, "inplace"),
    _plain("running_statistics", zoo.RunningStatistics, "buffers", "inplace", training=True),
    _plain("cached_attention", zoo.CachedAttention, "inplace", "mutates_inputs", inputs=_cached_inputs),
)

_VALUES = (
    _plain("custom_function", zoo.QuantizedGate, "custom_function"),
    _plain(
        "dict_to_dataclass",
        zoo.DictToPrediction,
        "pytree",
        inputs=lambda: (({"tokens": tokens(), "mask": padding_mask().float()},), {}),
        loss=_prediction_loss,
    ),
    _plain("aliased_outputs", zoo.AliasedOutputs, "pytree", "aliases", loss=_aliases_loss),
    _plain("constants", zoo.ConstantTensors, "constants"),
    _plain("fourier", zoo.FourierMixer, "complex"),
    _plain("variational", zoo.VariationalAutoencoder, "rng", loss=mean_sines),
)

MODEL_CASES: tuple[ModelCase, ...] = (
    *_DECODERS,
    *_ENCODERS,
    *_ENCODER_DECODERS,
    *_VISION,
    *_AUDIO,
    *_TRANSFORMERS,
    *_RECURRENT,
    *_PARAMETERS,
    *_CALLS,
    *_REGIONS,
    *_WRITES,
    *_VALUES,
)
_BY_NAME = {row.name: row for row in MODEL_CASES}
_OF_A_KIND = frozenset(
    {
        *("gpt2_dropout", "llama", "llama_checkpoint", "mixtral", "mamba", "bert", "albert", "t5", "whisper"),
        *("resnet", "swin", "wav2vec2", "lstm", "tied_language_model", "weight_norm", "shared_layer"),
        *("shared_module", "dense_experts", "hooked", "autocast", "momentum_teacher", "checkpoint_dropout"),
        *("inplace_views", "custom_function", "cached_attention", "aliased_outputs", "variational"),
    }
)
"""Each shows what no other one does; in most tests the rest are for the conformance run."""


MODES = ("forward", "loss", pytest.param("tangents", marks=pytest.mark.slow))
"""The modes of a capture. A loss shows what tangents show, but for how the backward begins: in most tests
that mode is for the conformance run."""


def sampled_cases(rows: Iterable[ModelCase] = MODEL_CASES) -> list[Any]:
    """Rows for a test that takes long: those like others run with the slow tests."""
    return [
        pytest.param(row, id=row.name, marks=() if row.name in _OF_A_KIND else pytest.mark.slow)
        for row in rows
    ]
