"""Patches of one attribute by several threads, and patches that an interrupt has left on."""

import random
import sys
import threading
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from pathlib import Path

import pytest
import torch

from whence._torch.patching import ABSENT, patched, patches_undone, without_patches


class Owner:
    """Something to patch."""

    own = "own"


class Heir(Owner):
    """Has nothing of its own."""


class Frozen(type):
    """Lets nobody change its classes, as that of typing_extensions' singletons does."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise TypeError(name)

    __delattr__ = __setattr__  # type: ignore[assignment]


class FrozenOwner(Owner, metaclass=Frozen):
    """Its metaclass has a say in what is put on it."""


@pytest.mark.parametrize("owner", [Owner, Heir, FrozenOwner])
def test_patch_is_taken_off(owner: type[Owner]) -> None:
    """After the block, and after an error in it, the class has exactly what it had."""
    before = dict(vars(owner))
    with pytest.raises(KeyError), patched(owner, "own", "other"):
        assert owner.own == "other"
        raise KeyError
    assert dict(vars(owner)) == before


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)])
def test_patches_come_off_in_any_order(order: tuple[int, ...]) -> None:
    """Whoever takes a patch off first, the newest that is left is on, and in the end none."""
    stacks = [ExitStack() for _ in order]
    for number, stack in enumerate(stacks):
        stack.enter_context(patched(Owner, "own", f"patch {number}"))
    left = [0, 1, 2]
    for number in order:
        assert Owner.own == f"patch {left[-1]}"
        stacks[number].close()
        left.remove(number)
    assert Owner.own == "own"


def test_somebody_else_s_patch_stays() -> None:
    """What another library has put there meanwhile is its own to take off."""
    with patched(Owner, "own", "patch"):
        Owner.own = "somebody else's"
    assert Owner.own == "somebody else's"
    Owner.own = "own"


def test_patch_left_on_is_found() -> None:
    """A patch whose block was never left is taken off; leaving the block later changes nothing."""
    undo, left_on = patches_undone(), patched(Heir, "own", "left on")
    left_on.__enter__()
    undo()
    undo()
    assert "own" not in vars(Heir)
    Heir.own = "somebody else's"
    left_on.__exit__(None, None, None)
    assert Heir.own == "somebody else's"
    del Heir.own


def test_patches_of_others_stay() -> None:
    """Patches of other threads, and those that were on before, stay on."""
    stack = ExitStack()
    stack.enter_context(patched(Owner, "own", "before"))
    undo = patches_undone()
    thread = threading.Thread(target=lambda: stack.enter_context(patched(Heir, "own", "of a thread")))
    thread.start()
    thread.join()
    undo()
    assert (Owner.own, Heir.own) == ("before", "of a thread")
    stack.close()
    assert (Owner.own, Heir.own) == ("own", "own")


def test_patch_that_somebody_else_puts_back() -> None:
    """It was patched when it was to be taken off: it is seen through, and goes with the next one."""
    with patched(Owner, "own", lambda: "patch"):
        found, Owner.own = Owner.own, "theirs"
    assert Owner.own == "theirs"
    Owner.own = found
    assert without_patches(Owner.own) == "own"
    with patched(Owner, "own", "next"):
        pass
    assert Owner.own == "own"


def test_what_was_there_before_the_patches() -> None:
    """Beneath all that are on, whatever they were put on; and what is no patch is itself."""
    with patched(Owner, "own", "first"), patched(Owner, "own", "second"), patched(Heir, "own", "heir's"):
        assert without_patches(Owner.own) == "own"
        assert without_patches(Heir.own) is ABSENT
        assert without_patches("second, but another") == "second, but another"
    assert without_patches("first") == "first"


@pytest.mark.canary("torch._dynamo.eval_frame.DisableContext._torchdynamo_orig_callable")
def test_what_keeps_the_compiler_from_reading_a_function_is_seen_through() -> None:
    """`torch.compiler.disable`, also twice; but not what compiles a function, nor what another wraps."""
    unread = torch.compiler.disable(torch.compiler.disable(len, reason="one"), reason="two")
    assert without_patches(unread) is len
    for other in (torch.compile(without_patches), wraps(without_patches)(lambda: None)):
        assert without_patches(other) is other


def test_a_module_loaded_meanwhile_gives_back_what_it_took(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`from random import choice` in a module that a capture is the first to load."""
    (tmp_path / "taking_names.py").write_text("from random import choice as chosen\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = random.choice
    with patched(random, "choice", without_patches):  # any function of ours
        loaded = import_module("taking_names")
        assert loaded.chosen is not before
    assert loaded.chosen is before
    del sys.modules["taking_names"]
