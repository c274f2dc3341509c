"""Errors of PyTorch's own machinery: fake tensors that cannot do what real ones can.

`torch._subclasses` is where fake tensors are run, `torch.fx.experimental` where they are recorded.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getfile
from pathlib import Path
from traceback import walk_tb

from torch import set_printoptions
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

_MACHINERY = tuple(f"{Path(getfile(kind)).parent}{os.sep}" for kind in (FakeTensor, ProxyTorchDispatchMode))
_TEXT = getfile(set_printoptions)
_BROKEN = (
    *("INTERNAL ASSERT FAILED", "its data is not allocated yet", "to a python object of type FakeTensor"),
    *(
        "argument of type: <class 'torch.storage",
        "Values and compressed tensor instance need to be on the same",
    ),
    *("There was no fake impl registered", "Couldn't swap ", "'SymInt'", "of type SymInt"),
    *("operator prim::", "Backward0 returned an invalid gradient", ", in aten::", "Could not run 'aten::"),
)


def let_go_of_guards(error: BaseException | None) -> None:
    """End what an error's frames hold: the text of a tensor is made under a guard that sits in a variable,
    and would set this thread's dispatch keys whenever the error is forgotten."""
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            if frame.f_code.co_filename == _TEXT:
                frame.clear()
        error = error.__context__


def is_of_fake_tensors(error: BaseException) -> bool:
    """Whether an error comes of recording, and not of what the model does: eager may well run it.

    Either it was raised in that machinery, or C++ says that it met a tensor without numbers,
    that a derivative failed which PyTorch has in TorchScript alone, or that a kernel does not know a fake one
    (quantised and compressed tensors, storages).
    """
    if not isinstance(error, Exception):
        return False
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    file = frames[-1].f_code.co_filename if frames else ""
    return file.startswith(_MACHINERY) or any(text in str(error) for text in _BROKEN)


_LOGGERS = tuple(
    logging.getLogger(name)
    for name in (
        *("torch._subclasses.fake_tensor", "torch.fx.experimental.recording"),
        "torch.fx.experimental.symbolic_shapes",
    )
)
"""They write errors that are raised, and answered, into the log, with their whole history."""


@contextmanager
def failures_unlogged() -> Iterator[None]:
    """Inside the block PyTorch does not log what this thread's fake tensors and symbols cannot do."""
    here = threading.get_ident()

    def is_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != here or record.levelno < logging.WARNING

    for logger in _LOGGERS:
        logger.addFilter(is_elsewhere)
    try:
        yield
    finally:
        for logger in _LOGGERS:
            logger.removeFilter(is_elsewhere)
