"""What a model asks of the machine that it runs on, which is not the one that it is captured for."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp import autocast

from whence._torch.elsewhere.target import Elsewhere
from whence._torch.patching import patched
from whence.errors import UnsupportedOperator


@contextmanager
def asked_of_the_machine(elsewhere: Elsewhere) -> Iterator[None]:
    """Inside the block this thread's questions for a device are noted, and autocast there is refused."""
    here = threading.get_ident()
    available, begin = torch.cuda.is_available, autocast.__init__

    def is_available() -> bool:
        asking = sys._getframe(1)
        if threading.get_ident() == here and not _is_of_torch(asking.f_globals.get("__name__", "")):
            where = f"{asking.f_code.co_filename}:{asking.f_lineno}"
            elsewhere.presume(f"torch.cuda.is_available() answered as on this machine, at {where}")
        return available()

    def starts(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == here and device_type != "cpu" and _is_on(*args, **kwargs):
            raise UnsupportedOperator(
                f"autocast({device_type!r}) cannot be recorded for {elsewhere.device.type} yet",
                why="which dtypes it gives there is decided below what is recorded",
                remedy="capture a model in the dtype that it shall compute in: model.to(torch.bfloat16)",
            )
        begin(self, device_type, *args, **kwargs)

    with patched(torch.cuda, "is_available", is_available), patched(autocast, "__init__", starts):
        yield


def _is_of_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def _is_on(_dtype: Any = None, enabled: bool = True, _cache: Any = None, **_named: Any) -> bool:
    return enabled
