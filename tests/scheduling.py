"""Which tests run in one process: those of one model of the table, and of the others those of one file.

What has been captured once, and fixtures of a file, are there for all of them. Marks (`xdist_group`) would
say the same, but are lost: pytest-xdist 3.8 writes them into `_nodeid`, which pytest 9.2 does not read.
"""

import re
from collections.abc import Collection
from functools import cache
from importlib import import_module
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


def scope_of(test: str, models: Collection[str]) -> str:
    """The model that a test is about, as the name of its row says, or its file."""
    file, _, name = test.partition("::")
    _, _, row = name.partition("[")
    return next((word for word in re.split(r"[-\]]", row) if word in models), file)


@cache
def models() -> frozenset[str]:
    """The names of the models in the table, which is loaded only where there are several processes."""
    return frozenset(case.name for case in import_module("tests.models").MODEL_CASES)


class ByModelOrFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """In the order of the tests, so that no long file is left for the end."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid, models())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByModelOrFile | None:
    """What `--dist loadgroup` stands for."""
    return ByModelOrFile(config, log) if config.getvalue("dist") == "loadgroup" else None
