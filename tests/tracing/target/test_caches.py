"""Caches of transformers are containers as soon as a capture meets one."""

import subprocess
import sys

import pytest

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
print([row.path for row in program.signature.inputs])
assert "kwargs['past_key_values'].layers[1].values" in [row.path for row in program.signature.inputs]
assert program.verify(model, (), given).ok
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


@pytest.mark.parametrize("name", CAPTURES)
def test_in_a_fresh_process(name: str) -> None:
    """Nobody has registered a class there."""
    subprocess.run([sys.executable, "-c", MODEL + CAPTURES[name]], check=True)
