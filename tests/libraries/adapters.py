"""peft: small trainable parts in a frozen model; and what wraps a model whole."""

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from tests.libraries.rows import OWN_FUNCTION, Rows, decided, given, library_called

row = Rows()
BY_CHANCE = decided(
    "needs the value of gt",
    "in training a random number decides which ranks are left out, also where none are",
    "joint",
    "steps",
    decide=("joint",),
)


def ids() -> Any:
    return given(torch.randint(0, 20, (2, 4)), use_cache=False)


def numbers() -> Any:
    return given(torch.randn(3, 8))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def llama(transformers: Any) -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=20,
    )
    return transformers.LlamaForCausalLM(config)


def gpt(transformers: Any) -> Any:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


@row("peft transformers", ids)
def lora(peft: Any, transformers: Any) -> nn.Module:
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, init_lora_weights=False)
    return peft.get_peft_model(llama(transformers), config)


@row("peft transformers", ids)
def lora_with_dropout(peft: Any, transformers: Any) -> nn.Module:
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_dropout=0.3, use_rslora=True)
    return peft.get_peft_model(llama(transformers), config)


@row("peft transformers", ids)
def lora_on_embedding_and_head(peft: Any, transformers: Any) -> nn.Module:
    config = peft.LoraConfig(
        target_modules=["embed_tokens", "o_proj"], modules_to_save=["lm_head"], r=2, init_lora_weights=False
    )
    return peft.get_peft_model(llama(transformers), config)


@row("peft", numbers)
def two_loras(peft: Any) -> nn.Module:
    config = peft.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(perceptron(), config)
    model.add_adapter("second", config)
    model.set_adapter("second")
    return model


@row("peft", numbers)
def dora(peft: Any) -> nn.Module:
    config = peft.LoraConfig(target_modules=["0", "2"], r=2, use_dora=True, init_lora_weights=False)
    return peft.get_peft_model(perceptron(), config)


@row("peft", numbers, forward_alone=OWN_FUNCTION, **BY_CHANCE)
def loha(peft: Any) -> nn.Module:
    config = peft.LoHaConfig(target_modules=["0", "2"], r=2, init_weights=False)
    return peft.get_peft_model(perceptron(), config)


@row("peft", numbers, **BY_CHANCE)
def lokr(peft: Any) -> nn.Module:
    config = peft.LoKrConfig(target_modules=["0", "2"], r=2, init_weights=False)
    return peft.get_peft_model(perceptron(), config)


@row("peft", numbers)
def oft(peft: Any) -> nn.Module:
    config = peft.OFTConfig(target_modules=["0", "2"], r=0, oft_block_size=4, init_weights=False)
    return peft.get_peft_model(perceptron(), config)


@row("peft", numbers)
def boft(peft: Any) -> nn.Module:
    config = peft.BOFTConfig(target_modules=["0"], boft_block_size=4, init_weights=False)
    return peft.get_peft_model(perceptron(), config)


@row("peft", numbers)
def vera(peft: Any) -> nn.Module:
    return peft.get_peft_model(perceptron(), peft.VeraConfig(target_modules=["0"], r=2))


@row("peft", numbers)
def adalora(peft: Any) -> nn.Module:
    config = peft.AdaLoraConfig(
        target_modules=["0", "2"], init_r=3, target_r=2, total_step=10, tinit=2, tfinal=2
    )
    return peft.get_peft_model(perceptron(), config)


@row("peft", numbers)
def layer_norm_tuning(peft: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    return peft.get_peft_model(model, peft.LNTuningConfig(target_modules=["1"]))


@row("peft transformers", lambda: given(torch.randint(0, 20, (2, 4))))
def ia3(peft: Any, transformers: Any) -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=20
    )
    scaled = peft.IA3Config(
        target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]
    )
    return peft.get_peft_model(transformers.BertModel(config), scaled)


@row("peft transformers", ids)
def prompt_tuning(peft: Any, transformers: Any) -> nn.Module:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(gpt(transformers), config)


@row("peft transformers", ids)
def p_tuning(peft: Any, transformers: Any) -> nn.Module:
    config = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    return peft.get_peft_model(gpt(transformers), config)


@row("peft transformers", lambda: given(torch.randint(0, 20, (2, 4))))
def prefix_tuning(peft: Any, transformers: Any) -> nn.Module:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(gpt(transformers), config)


@row("accelerate", numbers)
def prepared(accelerate: Any) -> nn.Module:
    return accelerate.Accelerator(cpu=True).prepare_model(perceptron())


def optimizer_prepared(model: nn.Module) -> Optimizer:
    """It stands for the one inside, which nobody passes."""
    inside = AdamW(model.parameters(), lr=0.01, fused=True)
    return library_called("accelerate").Accelerator(cpu=True).prepare_optimizer(inside)


@row(
    "accelerate",
    numbers,
    without=dict.fromkeys(("forward", "joint"), "the model is an ordinary one"),
    make_optimizer=optimizer_prepared,
)
def with_a_prepared_optimizer(_accelerate: Any) -> nn.Module:
    return perceptron()


@row("accelerate", numbers)
def with_alignment_hooks(accelerate: Any) -> nn.Module:
    return accelerate.hooks.attach_align_device_hook(model := perceptron(), execution_device="cpu") or model
