"""What code can ask of a tensor beside its numbers and its shape, and a fake one cannot answer for a real
one.

Where the argument of a call comes from decides it: a leaf or not, written to before, a view, of which class.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from whence._torch.tensors import CLASS_ASKED, LEFT_OUT, MISSED, PLAIN_ATTRIBUTES, attributes_set_on

CLASS = "__class__"
HOOKS = "_backward_hooks"
"""Hooks on the gradient of a tensor, which run where a model asks for that itself."""
Answer = bool | int | float | str | None
_HAS, _ATTRIBUTE = "hasattr ", "attribute "

_TENSOR: Any = Tensor
QUESTIONS: Mapping[Any, str] = MappingProxyType(
    {
        **{
            getattr(_TENSOR, name).__get__: name
            for name in ("is_leaf", "retains_grad", "output_nr", "_version")
        },
        **{getattr(_TENSOR, name): name for name in ("is_shared", "is_neg", "is_conj", "_is_view")},
        **{getattr(torch, name): name for name in ("is_neg", "is_conj")},
        **{getattr(_TENSOR, name).__get__: name for name in ("grad", "grad_fn", "_base", HOOKS)},
        Tensor.storage_offset: "storage_offset",
    }
)
"""What torch functions ask."""

_ASKED = frozenset({*QUESTIONS.values(), CLASS})
"""The names of most questions."""

IN_PYTHON = frozenset({"is_shared"})
"""What PyTorch asks from Python, on behalf of whoever calls it."""

HELD = frozenset({"grad", "grad_fn", "_base", HOOKS})
"""What is an object, or None."""


def asked_of(tensor: Tensor, question: str) -> Answer:
    """What a tensor answers; of an object whether there is none. Raises `LookupError` for no question: other
    names are of methods, which change it."""
    if not is_question(question):
        raise LookupError(f"{question!r} is no question")
    if question == CLASS:
        return type(tensor).__name__
    if question.startswith((_HAS, _ATTRIBUTE)):
        held = attributes_set_on(tensor)
        name = question.removeprefix(_HAS).removeprefix(_ATTRIBUTE)
        return name in held if question.startswith(_HAS) else _plain(held.get(name))
    with torch._C.DisableTorchFunction():
        if question in ("storage_offset", "is_shared") and tensor.layout is not torch.strided:
            return 0
        if question == "_version" and tensor.is_inference():
            return None  # it keeps no count
        if question == "grad" and not tensor.is_leaf:
            return True  # PyTorch warns of the question
        found = getattr(tensor, question)
        found = found() if callable(found) and question not in HELD else found
    if question == HOOKS:
        return not found  # an empty dictionary, where they have been removed
    return found is None if question in HELD else found


def _plain(value: object) -> Answer:
    return value if type(value) in PLAIN_ATTRIBUTES else type(value).__name__  # type: ignore[return-value]


def all_asked_of(tensor: Tensor) -> dict[str, Answer]:
    """What a tensor answers to every question of torch functions."""
    return {question: asked_of(tensor, question) for question in QUESTIONS.values()}


def spelled(question: str, of: str) -> str:
    """The question as code asks it."""
    if question == CLASS:
        return f"type({of})"
    if question.startswith(_HAS):
        return f"hasattr({of}, {question.removeprefix(_HAS)!r})"
    question = question.removeprefix(_ATTRIBUTE)
    return f"{of}.{question} is None" if question in HELD else f"{of}.{question}"


def as_code(question: str, of: str) -> str | None:
    """What asks a tensor the same, as code that tracers read; None where that fails for some tensors."""
    if question == CLASS:
        return f"type({of}).__name__"
    if question.startswith(_HAS):
        return f"hasattr({of}, {question.removeprefix(_HAS)!r})"
    if question.startswith(_ATTRIBUTE):
        return f"getattr({of}, {question.removeprefix(_ATTRIBUTE)!r}, None)"
    if question == HOOKS:
        return f"(not {of}.{question})"
    if question in ("grad_fn", "_base"):
        return f"({of}.{question} is None)"
    if question in ("is_leaf", "retains_grad", "output_nr"):
        return f"{of}.{question}"
    return f"{of}.{question}()" if question in ("is_neg", "is_conj") else None


def note_class_asked(thing: object, kinds: object = nn.Parameter) -> None:
    """Code asks whether a fake tensor is of one of these classes."""
    if isinstance(thing, FakeTensor) and _tell_apart(kinds):
        vars(thing)[CLASS_ASKED] = True


def is_question(name: str) -> bool:
    """Whether this names a question."""
    return name in _ASKED or name.startswith((_HAS, _ATTRIBUTE))


def with_attributes_of(fake: Tensor, tensor: Tensor) -> None:
    """Let a fake tensor answer with what somebody has set on the one whose twin it is: numbers, texts and
    flags. Other things are refused where code looks for them."""
    if held := attributes_set_on(tensor):
        vars(fake)[LEFT_OUT] = held


def asked_unheard(fake: object, tensor: Tensor) -> Iterator[tuple[str, Answer]]:
    """What code has asked of a fake tensor past torch functions, and the answers of that whose twin it is."""
    if not isinstance(fake, FakeTensor):
        return
    held = vars(fake)
    asked = [CLASS] if CLASS_ASKED in held else []
    there = attributes_set_on(tensor)
    for name in sorted(held.get(MISSED, ())):
        if not name.startswith("__"):
            asked.append((_ATTRIBUTE if name in there else _HAS) + name)
    yield from ((question, asked_of(tensor, question)) for question in asked)


def put_after_looking(fake: object) -> Iterator[tuple[str, Any]]:
    """The attributes that code has set on a fake tensor after it looked for them, with what they are now."""
    if isinstance(fake, FakeTensor):
        asked, held = vars(fake).get(MISSED, ()), attributes_set_on(fake)
        yield from ((name, held[name]) for name in sorted(asked) if name in held)


def _tell_apart(kinds: object) -> bool:
    """Whether a parameter is of these classes, and another tensor is not."""
    if isinstance(kinds, tuple):
        return any(map(_tell_apart, kinds))
    return isinstance(kinds, type) and issubclass(kinds, Tensor) and kinds is not Tensor
