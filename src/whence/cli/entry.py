"""Run one command, and say how it ended."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from whence.cli.commands import COMMANDS
from whence.cli.completion import script
from whence.cli.parsing import parser
from whence.cli.printing import FAILED, OK, USAGE
from whence.errors import CaptureError, SelectionError, UsageError, WhenceError

_PIPED_WIDTH = 200
_LAST_LINES = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    reader = parser()
    options = reader.parse_args(arguments)
    if options.completion is not None:
        sys.stdout.write(script(options.completion))
        return OK
    if options.run is None:
        reader.error(f"a command is missing: {', '.join(command.name for command in COMMANDS)}")
    return _ran(options)


def _ran(options: argparse.Namespace) -> int:
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    try:
        return int(options.run(options, console))
    except (UsageError, SelectionError) as error:
        print_error(str(error))
        return USAGE
    except WhenceError as error:
        print_error("\n".join([str(error), *_last_recorded(error)]))
        return FAILED


def print_error(text: str) -> None:
    """Write an error for a person."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"whence: {text}", markup=False)


def _last_recorded(error: WhenceError) -> list[str]:
    """The end of what had been recorded when a capture stopped."""
    partial = error.partial if isinstance(error, CaptureError) else None
    return [] if partial is None else ["", "…", *str(partial).splitlines()[-_LAST_LINES:]]
