"""What a run leaves behind: the machine and the results, as JSON."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.results import Result, result_from_dict


@dataclass(frozen=True)
class Machine:
    """Where and when; `load` is what the machine was doing already, as the average over a minute."""

    torch: str
    python: str
    processor: str
    cores: int
    threads: int
    load: float
    date: str

    @classmethod
    def here(cls) -> Self:
        """This one, now."""
        return cls(
            torch=torch.__version__,
            python=platform.python_version(),
            processor=_processor(),
            cores=os.cpu_count() or 1,
            threads=torch.get_num_threads(),
            load=round(os.getloadavg()[0], 2),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"torch {self.torch}, {threads}, {self.cores} cores ({self.processor}), load {self.load:g}"


@dataclass(frozen=True)
class Report:
    """One run."""

    machine: Machine
    results: tuple[Result, ...]

    def write(self, path: Path) -> None:
        """As JSON, one line for each field, so that two runs can be compared line by line."""
        results = [result.to_dict() for result in self.results]
        path.write_text(json.dumps({"machine": asdict(self.machine), "results": results}, indent=1) + "\n")


def read(path: Path) -> Report:
    """The inverse of `Report.write`."""
    data: dict[str, Any] = json.loads(path.read_text())
    return Report(Machine(**data["machine"]), tuple(map(result_from_dict, data["results"])))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
