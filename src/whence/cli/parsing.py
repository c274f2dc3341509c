"""The parser of the command line, and its page of help."""

import argparse

from whence.cli.commands import COMMANDS, JSON
from whence.cli.completion import SHELLS
from whence.execution.doctor import version_of

_PURPOSE = "Capture what a PyTorch model computes, and know where every value came from."
_HELP = """\
models:
  package.module:factory      a function that returns (module, args) or (module, args, kwargs)
  hf:Architecture(option=1)   one of transformers' architectures, with random weights
  file.whence                 a program that program.save wrote (show, report, diff, view, graph)

examples:
  whence demo
  whence show my_package.models:make --backward --depth 2
  whence show my_package.models:make --select "layers.*.mlp :: aten.mm :: backward"
  whence report "hf:LlamaForCausalLM(num_hidden_layers=2, hidden_size=64)" --device h100 --sort "kept bytes"
  whence diff before.whence after.whence --html diff.html
  whence graph my_package.models:make --format dot | dot -Tsvg > model.svg
  whence verify my_package.models:make --json

exit status:
  0  all is well
  1  a check failed, or the model could not be captured
  2  bad usage

completion:
  eval "$(whence --completion bash)"   in ~/.bashrc, and likewise zsh in ~/.zshrc
  whence --completion fish | source    in ~/.config/fish/config.fish
"""


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
