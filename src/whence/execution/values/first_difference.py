"""Which module is the first whose result differs?

Eager is watched call by call; the program's graph is walked node by node. The calls are compared in the
order in which they finish, so the innermost module at fault is named before those around it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whence._torch.observe.module_calls import ObservedCall, observed_modules
from whence._torch.pytrees import tree_flatten
from whence.execution.compare import same_bits
from whence.execution.values.walk import inputs_of, walk
from whence.program import Named, Program
from whence.program.node_records import origin_of
from whence.provenance import CallSite
from whence.schema import Phase
from whence.tracing.recording.call_names import CallNames
from whence.tracing.target.subject import Subject


def first_divergence(program: Program, subject: Subject, args: Any, kwargs: Any) -> str | None:
    """The call site, class and source line of the first difference in the forward; None if there is none."""
    rng = torch.get_rng_state()
    values = _forward_values(program, (args, kwargs))
    torch.set_rng_state(rng)
    watcher = _Watcher(subject)
    with observed_modules(watcher):
        subject.call(*args, **kwargs)
    calls = {(call.site.path, call.site.index): call for call in program.calls}
    for site, leaves in watcher.finished:
        call = calls.get((site.path, site.index))
        if call is None:
            return f"{site} ({site.type}) runs in eager and not in the program"
        if call.outputs is None:
            continue  # it runs in a branch, which may not be the one that is taken
        for leaf, value in zip(call.outputs.leaves, leaves, strict=False):
            if isinstance(leaf, Named) and leaf.name in values and not _agree(values[leaf.name], value):
                return f"{site or '(root)'} ({site.type}), at {origin_of(program.node(leaf.name)).source}"
    return None


def _agree(found: Any, expected: Any) -> bool:
    are_tensors = isinstance(found, Tensor) and isinstance(expected, Tensor)
    return not are_tensors or same_bits(expected, found)


def _forward_values(program: Program, flat: tuple[Any, Any]) -> dict[str, Any]:
    """What nodes of the forward hold; copies of state and arguments, which eager may write."""
    values: dict[str, Any] = {}
    with torch.no_grad():
        for node, now in walk(program, inputs_of(program, *flat, {})):
            held = now[node.name]
            if node.op != "call_function" and isinstance(held, Tensor):
                values[node.name] = held.clone()
            elif origin_of(node).phase is Phase.FORWARD:
                values[node.name] = held
    return values


class _Watcher:
    """Notes what every module call returns, in the order in which they finish."""

    def __init__(self, subject: Subject) -> None:
        self.finished: list[tuple[CallSite, list[Any]]] = []
        self._names = CallNames(subject)

    @contextmanager
    def called(self, module: nn.Module, _args: Any, _kwargs: Any) -> Iterator[ObservedCall]:
        path = self._names.path(module)
        if path is None:
            yield ObservedCall(lambda _result: None)
            return
        with self._names.calling(module, path) as site:
            yield ObservedCall(lambda result: self._note(site, result))

    def accessed(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        self._names.reached(parent, name, child)

    def _note(self, site: CallSite, result: Any) -> None:
        leaves, _ = tree_flatten(result)
        self.finished.append(
            (site, [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        )
