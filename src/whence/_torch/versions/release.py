"""The release of PyTorch that is installed, and those that whence was tried with."""

import re
import warnings

import torch

from whence.errors import UntriedRelease

TRIED = ("2.13", "2.14", "2.15")
"""The releases that all tests were run with."""


def release() -> str:
    """The installed release, as PyTorch spells it."""
    return str(torch.__version__)


def is_tried(version: str) -> bool:
    """Whether a release, repaired or in any build, was tried; what comes before it was not."""
    found = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version)
    return found is not None and found[1] in TRIED


def warn_if_untried(version: str) -> None:
    """Say once that nobody has tried this release."""
    if not is_tried(version):
        warnings.warn(
            f"nobody has tried whence with PyTorch {version}, only with {', '.join(TRIED)}: "
            f"`whence doctor` tells what is as expected, and `verify` whether a program is right",
            UntriedRelease,
            stacklevel=3,
        )
