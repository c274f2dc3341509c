"""Every model of the table gives one program, whether or not what is equal is replayed."""

import pytest

import whence
from tests.checks import backward_of, captured
from tests.models import MODES, ModelCase, case, sampled_cases
from tests.sameness import differences


def traced(name: str, mode: str) -> whence.Program:
    """The program of a case, with nothing replayed."""
    row = case(name)
    model, args, kwargs = row.make()
    return whence.capture(model, args, kwargs, backward=backward_of(row, mode), reuse=False)


@pytest.mark.sample(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("row", sampled_cases())
def test_program_is_the_same_with_and_without_reuse(row: ModelCase, mode: str) -> None:
    """Node for node, with its signature, origins, calls, adjoints and guards.

    The program that tests share may be older than caches of the library that were filled since: what fills
    one is guarded where it ran.
    """
    plain = traced(row.name, mode)
    found = differences(plain, captured(row.name, mode))
    assert differences(plain, captured.__wrapped__(row.name, mode)) == {} if found else found == {}
    assert len(plain.replay) == 0


REPLAYED = {
    "gpt2": "GPT2Block",
    "llama": "LlamaDecoderLayer",
    "gemma2": "Gemma2MLP",
    "opt": "OPTDecoderLayer",
    "gpt_neox": "GPTNeoXLayer",
    "qwen2_moe": "Qwen2MoeMLP",
    "bert": "BertLayer",
    "distilbert": "TransformerBlock",
    "electra": "ElectraLayer",
    "t5": "T5LayerFF",
    "bart": "BartDecoderLayer",
    "whisper": "WhisperEncoderLayer",
    "vit": "ViTLayer",
    "swin": "SwinMLP",
    "clip": "CLIPEncoderLayer",
    "wav2vec2": "Wav2Vec2EncoderLayer",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REPLAYED)
def test_layers_of_real_models_are_replayed(name: str) -> None:
    """What makes a model deep is replayed in its training step."""
    assert captured(name, "loss").replay[REPLAYED[name]].replayed > 0
