"""Caches of transformers are containers as soon as a capture meets one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import whence

MODEL = """
import torch, whence
from torch.utils import _pytree
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64
)
model, ids = LlamaForCausalLM(config), torch.randint(3, 60, (2, 5))
assert DynamicCache not in _pytree.SUPPORTED_NODES
"""

CAPTURES = {
    "a forward that returns it": """
program = whence.capture(model, (ids,))
assert type(program.unflatten()(ids).past_key_values) is DynamicCache
assert program.verify(model, (ids,)).ok
""",
    "a joint graph that returns it": """
program = whence.capture(model, (ids,), {"labels": ids}, backward=lambda outputs: outputs.loss)
assert program.verify(model, (ids,), {"labels": ids}).ok
assert program.replay.replayed
""",
    "a forward that is given it": """
with torch.no_grad():
    given = {"input_ids": ids[:, :1], "past_key_values": model(ids).past_key_values}
program = whence.capture(model, (), given)
assert "kwargs['past_key_values'].layers[1].values" in [row.path for row in program.signature.inputs]
assert program.verify(model, (), given).ok
""",
    "a forward that is given an empty one with a sliding window": """
from transformers import MistralConfig, MistralForCausalLM, StaticCache

kept = {name: getattr(config, name) for name in ("num_hidden_layers", "hidden_size", "intermediate_size")}
config = MistralConfig(**kept, num_attention_heads=4, num_key_value_heads=2, vocab_size=64, sliding_window=8)
model = MistralForCausalLM(config).eval()
for make in (lambda: StaticCache(config=config, max_cache_len=20), lambda: DynamicCache(config=config)):
    expected, given = make(), make()
    with torch.no_grad():
        program = whence.capture(model, (ids,), {"past_key_values": make()})
        model(ids, past_key_values=expected)
        program.module()(ids, past_key_values=given)
    for layer, found in zip(expected.layers, given.layers):
        assert found.is_sliding and torch.equal(found.keys, layer.keys)
        assert found.get_seq_length() == layer.get_seq_length() == 5
""",
    "a program that was loaded without its model": """
import pickle
from transformers.cache_utils import DynamicLayer

program = pickle.loads(pickle.dumps(whence.capture(model, (ids,))))
(layer, *_) = program.module()(ids).past_key_values.layers
assert type(layer) is DynamicLayer and layer.device == ids.device
assert program.verify(model, (ids,)).ok
""",
    "a step that returns it": """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step(ids):
    outputs = model(ids, labels=ids)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return outputs

program = whence.capture_step(step, (ids,), model=model, optimizer=optimizer)
assert program.verify(model, (ids,)).ok
""",
}


ONE_BY_ONE = """
import os
for name, code in captures.items():
    if (child := os.fork()) == 0:
        exec(code)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.mark.sweep
def test_in_a_fresh_process() -> None:
    """Nobody has registered a class there: each capture is the first of a process that has only imported."""
    code = f"{MODEL}\ncaptures = {CAPTURES!r}\n{ONE_BY_ONE}"
    subprocess.run([sys.executable, "-c", code], check=True)


KEPT = """
import sys
made, capture = [], whence.api.capture
whence.api.capture = lambda *args, **options: (made.append(1), capture(*args, **options))[1]
model.eval()
program = whence.cached(model, (ids[:1] * 0,), {"past_key_values": DynamicCache()}, directory=sys.argv[1])
print(len(made), type(program.module()(ids[:1] * 0, past_key_values=DynamicCache()).past_key_values).__name__)
"""


@pytest.mark.sweep
def test_a_program_that_returns_one_is_kept(tmp_path: Path) -> None:
    """A process that finds it has opened no cache: it captured every such model again, and did not say so."""
    command = [sys.executable, "-c", MODEL + KEPT, str(tmp_path)]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    assert runs == ["1 DynamicCache\n", "0 DynamicCache\n"]


STATES: dict[str, dict[str, Any]] = {
    "FalconMamba": {"state_size": 4, "num_hidden_layers": 2},
    "Lfm2": {
        "layer_types": ["conv", "full_attention"],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "FalconH1": {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "mamba_n_groups": 1,
    },
    "MiniMax": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 2,
        "head_dim": 8,
    },
}
"""Models whose layers keep other states than keys and values, alone or beside them."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", STATES)
def test_layers_with_states_of_their_own(name: str) -> None:
    """A cache that a forward makes, and a step that goes on from it, are eager's."""
    library: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 50}
    model = getattr(library, f"{name}ForCausalLM")(getattr(library, f"{name}Config")(**sizes, **STATES[name]))
    model.eval()
    prompt, key = torch.randint(3, 50, (2, 5)), "cache_params" if "Mamba" in name else "past_key_values"
    with torch.no_grad():
        program = whence.capture(model, (prompt,))
        assert program.verify(model, (prompt,)).ok
        expected, given = model(prompt), program.unflatten()(prompt)
        assert type(given[key]) is type(expected[key])
        for _ in range(2):
            token = expected.logits[:, -1:].argmax(-1)
            step = whence.capture(model, (token,), {key: given[key]}).module()
            expected, given = model(token, **{key: expected[key]}), step(token, **{key: given[key]})
            assert torch.equal(given.logits, expected.logits)
