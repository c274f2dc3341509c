"""Run one command, and say how it ended."""

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from whence.cli.commands import COMMANDS, JSON
from whence.cli.completion import SHELLS, script
from whence.cli.printing import FAILED, OK, USAGE
from whence.errors import CaptureError, SelectionError, UsageError, WhenceError
from whence.execution.doctor import version_of
from whence.models import imported

_PIPED_WIDTH = 200
_LAST_LINES = 12
_PURPOSE = "Capture what a PyTorch model computes, and know where every value came from."
_HELP = """\
models:
  package.module:factory      a function that returns (module, args) or (module, args, kwargs)
  hf:Architecture(option=1)   one of transformers' architectures, with random weights
  file.whence                 a program that program.save wrote; verify and check take its model, too

examples:
  whence demo
  whence show my_package.models:make --backward --depth 2
  whence show my_package.models:make --select "layers.*.mlp :: aten.mm :: backward"
  whence report "hf:LlamaForCausalLM(num_hidden_layers=2, hidden_size=64)" --device h100 --sort "kept bytes"
  whence diff before.whence after.whence --html diff.html
  whence graph my_package.models:make --format dot | dot -Tsvg > model.svg
  whence verify my_package.models:make --by call --json
  whence check before.whence my_package.models:make

exit status:
  0  all is well
  1  a check failed, or the model could not be captured
  2  bad usage

completion:
  eval "$(whence --completion bash)"          in ~/.bashrc
  eval "$(command whence --completion zsh)"   in ~/.zshrc: zsh has a whence of its own
  whence --completion fish | source           in ~/.config/fish/config.fish
"""


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
        for module in getattr(options, "modules", ()):
            imported(module)
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


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; `run` of what it finds is the command's function, None without one."""
    made = argparse.ArgumentParser(
        prog="whence",
        description=_PURPOSE,
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"whence {version_of('whence')}")
    made.add_argument(
        "--completion", choices=SHELLS, help="print what teaches a shell to complete commands and options"
    )
    made.set_defaults(run=None)
    commands = made.add_subparsers(title="commands", metavar="COMMAND")
    for each in COMMANDS:
        command = commands.add_parser(each.name, help=each.purpose, description=each.purpose)
        command.set_defaults(run=each.run)
        for option in (*each.options, JSON):
            command.add_argument(*option.names, **option.settings)
    return made
