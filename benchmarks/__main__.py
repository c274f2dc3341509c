"""`python -m benchmarks [NAME …]`: run the benchmarks, or those named, and print one line each."""

import argparse
import sys

from rich.console import Console

from benchmarks.measuring import Result
from benchmarks.memory import BENCHMARKS as MEMORY
from benchmarks.time import BENCHMARKS as TIME

BENCHMARKS = {**TIME, **MEMORY}


def main() -> int:
    """Exit status 1 when a limit is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BENCHMARKS)}")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    console = Console(highlight=False, soft_wrap=True)
    results: list[Result] = []
    for name in options.names or BENCHMARKS:
        with console.status(name):
            result = BENCHMARKS[name]()
        console.print(str(result), markup=False)
        results.append(result)
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
