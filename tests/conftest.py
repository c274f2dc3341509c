import gc
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.known_bugs import known_bug
from tests.sampling import is_drawn, mark_sweeps
from tests.scheduling import pytest_xdist_make_scheduler

__all__ = ["pytest_xdist_make_scheduler"]

settings.register_profile("few", max_examples=3)
settings.register_profile("conformance", max_examples=50)
settings.load_profile("few")
torch.set_num_threads(1)  # two workers share two cores
gc.set_threshold(700, 10, 1000)  # looking through all that tests have loaded takes seconds each time


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many of the sweeps run."""
    parser.addoption("--one-in", type=int, default=1, help="run one in so many of the sweeps")
    parser.addoption("--draw", default="", help="which of them: others for each text")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Expect the failures that are known; rows of long tables that are in no sample are for the sweeps."""
    mark_sweeps(items)
    one_in, draw = config.getoption("--one-in"), config.getoption("--draw")
    sweeps = [item for item in items if item.get_closest_marker("sweep")]
    left = {item for item in sweeps if not is_drawn(item.nodeid, one_in, draw)}
    config.hook.pytest_deselected(items=[*left])
    items[:] = [item for item in items if item not in left]
    for item in items:
        if reason := known_bug(item.nodeid):
            item.add_marker(pytest.mark.xfail(strict=True, reason=reason))


def pytest_unconfigure() -> None:
    """Look once for what nobody holds, where pytest looks five times through all that tests have loaded."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _compiles_afresh() -> None:
    """A limit counts what a process has compiled: beyond it a test would run what it is to compile."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def group_of_two() -> Iterator[None]:
    """A group of two processes, of which one is here and nothing is sent."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()
