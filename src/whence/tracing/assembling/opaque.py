"""What a forward-only program ran and autograd cannot repeat from it."""

from collections.abc import Iterator, Mapping

import torch

from whence._torch.observe.hooks import has_backward_hooks
from whence._torch.operators.schemas import differentiated_by_result, short_name
from whence.rewriting.functionalize import Functional
from whence.tracing.assembling.leaves import BETWEEN_RESULTS
from whence.tracing.attribution.wrapper_subclasses import OPAQUE
from whence.tracing.recording.run import Recorded
from whence.tracing.target.subject import Subject

_SCATTER = torch.ops.aten.as_strided_scatter.default
_RRELU = torch.ops.aten.rrelu_with_noise_functional.default


def unrepeatable(
    functions: Mapping[int, str], recorded: Recorded, functional: Functional, *, between: bool
) -> tuple[str, ...]:
    """What a forward-only program ran and autograd cannot repeat from it.

    A backward pass inside the model that is differentiated again unpacks saved results as detached tensors;
    autograd remembers where they came from, and the graph does not. The derivative of functional rrelu reads
    the noise before it was drawn, and that of `as_strided_scatter` keeps only the written region. Some
    derivatives are computed from the result in place, with other numbers. A tensor that is made of others is
    differentiated as one, whatever its class does with the others. Hooks on what autograd saves may give it
    something else back.
    """
    if recorded.backward.roots:
        return ()
    log = recorded.session.log
    unpacked = any(node.users for node in log.unpacked)
    nodes = list(functional.graph.nodes)
    reasons = {
        "a backward pass inside the model": unpacked,
        "rrelu in training": any(node.target is _RRELU and node.args[4:5] == (True,) for node in nodes),
        "a write through as_strided": any(node.target is _SCATTER for node in nodes),
        OPAQUE: bool(log.composed),
    }
    reasons |= {
        f"{short_name(source.target)} (its derivative in place is another one)": True
        for node in nodes
        if (source := functional.sources.get(node)) is not None and differentiated_by_result(source, node)
    }
    return (
        *dict.fromkeys(functions.values()),
        *(() if recorded.session.run.grad_modes.records else _backward_hooks(recorded.session.run.subject)),
        *log.lost,
        *([BETWEEN_RESULTS] if between else []),
        *recorded.session.run.watch.packers,
        *(reason for reason, found in reasons.items() if found),
    )


def _backward_hooks(subject: Subject) -> Iterator[str]:
    """Hooks that nothing calls in a run without gradients, and eager does in one with them."""
    for path, module in subject.named_modules():
        if has_backward_hooks(module):
            yield f"the backward hooks of {path or 'the model'}"
