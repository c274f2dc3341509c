"""PyTorch's own tables take seconds to load, and all that is tested with them is slow."""

import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Leave the folder out where no slow test shall run."""
    return True if "not slow" in config.option.markexpr else None
