"""The commands and their options, as data: of it are made the parser, its help, and what shells complete."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whence.cli import looking, trusting
from whence.reports.formats import FORMS
from whence.reports.formats.node_data import FIGURES

MODEL_HELP = "package.module:factory, or hf:LlamaForCausalLM(num_hidden_layers=2, hidden_size=64)"
SAVED_HELP = f"{MODEL_HELP}; or a file that program.save wrote, called *.whence"


@dataclass(frozen=True)
class Option:
    """An option or an argument of a command, with what `argparse` takes."""

    names: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_flag(self) -> bool:
        """Whether it begins with dashes."""
        return self.names[0].startswith("-")


@dataclass(frozen=True)
class Command:
    """One command: what it runs, what it is for, and its options."""

    name: str
    run: Callable[..., int]
    purpose: str
    options: tuple[Option, ...] = ()


def _option(*names: str, **settings: Any) -> Option:
    return Option(names, settings)


def _depth(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError("a depth is a whole number, 0 or more")
    return int(text)


def _distance(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError("a distance is a number, 0 or more")
    return found


def _size_option(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isdigit():
        raise argparse.ArgumentTypeError("a size is a name and a whole number, as batch=8")
    return name, int(number)


_SAVED = _option("model", metavar="MODEL", help=SAVED_HELP)
_FORWARD = _option("--forward", action="store_true", help="the forward only, not the training step")
_DEPTH = _option("--depth", type=_depth, metavar="N", help="how deep the tree of modules goes")
_DEVICE = _option("--device", metavar="NAME", help="times by a roofline: a100, h100, h200, mi300x")
_OTHER = _option("other", metavar="OTHER", help="the model that it is compared with")
_HTML = _option("--html", metavar="FILE", type=Path, help="write the page of `whence view`, too")
_IMPORT = _option(
    "--import",
    dest="modules",
    metavar="MODULE",
    action="append",
    default=[],
    help="what a file needs to be imported, as transformers.modeling_outputs",
)
_LOSS = _option("--loss", metavar="NAME", help="the loss, package.module:function")
_SIZE = _option(
    "--size",
    dest="sizes",
    type=_size_option,
    metavar="NAME=N",
    action="append",
    default=[],
    help="what an open size is to be",
)
JSON = _option("--json", action="store_true", help="print plain data")

COMMANDS = (
    Command("demo", trusting.demo, "capture the training step of a GPT, and verify it"),
    Command(
        "show",
        looking.show,
        "show its calls, operations and signature",
        (
            _SAVED,
            _option("--backward", action="store_true", help="the training step, not only the forward"),
            _option("--select", metavar="PATTERN", help="operations that fit path :: operation :: phase"),
            _option("--history", action="store_true", help="what passes did to it since the capture"),
            _DEPTH,
            _HTML,
            _IMPORT,
        ),
    ),
    Command(
        "report",
        looking.report,
        "say what each call costs, and what is kept of it",
        (
            _SAVED,
            _FORWARD,
            _DEPTH,
            _option("--sort", metavar="FIGURE", help='the largest first: "forward FLOPs", "kept bytes", …'),
            _option("--where", "--filter", metavar="PATTERN", help="calls that fit, as *.mlp or type=Linear"),
            _option("--measure", action="store_true", help="run kernels once that need memory of their own"),
            _DEVICE,
            _SIZE,
            _option("--format", choices=("table", "markdown", "csv"), default="table", help="how"),
            _HTML,
            _IMPORT,
        ),
    ),
    Command(
        "diff",
        looking.diff,
        "say what differs between two models",
        (_SAVED, _OTHER, _FORWARD, _HTML, _IMPORT),
    ),
    Command(
        "view",
        looking.view,
        "write all of it as one HTML file, for a browser",
        (
            _SAVED,
            _option("--html", metavar="FILE", type=Path, help="where to write (default: whence-CLASS.html)"),
            _option("--other", metavar="OTHER", help="a second model: both, and what differs"),
            _FORWARD,
            _DEVICE,
            _SIZE,
            _IMPORT,
        ),
    ),
    Command(
        "graph",
        looking.graph,
        "write the graph in the format of another tool",
        (
            _SAVED,
            _option("--format", choices=tuple(FORMS), default="dot", help="for which tool (default: dot)"),
            _option("-o", "--output", metavar="FILE", type=Path, help="where to write (default: print it)"),
            _FORWARD,
            _option("--values", choices=FIGURES, help="the numbers of node-data (default: flops)"),
            _option("--device", metavar="NAME", help="whose times a trace has (default: h100)"),
            _SIZE,
            _IMPORT,
        ),
    ),
    Command(
        "verify",
        trusting.verify,
        "compare the program with eager, bit for bit",
        (
            _SAVED,
            _option(
                "other",
                metavar="OTHER",
                nargs="?",
                help="the model that it is compared with (default: MODEL); a file needs one",
            ),
            _FORWARD,
            _option("--by", choices=("call",), help="compare what each call returns, too"),
            _option("--atol", type=_distance, metavar="X", help="end well where nothing differs by more"),
            _LOSS,
            _IMPORT,
        ),
    ),
    Command(
        "check",
        trusting.check,
        "say what it relied on, and whether that holds",
        (
            _SAVED,
            _option(
                "other",
                metavar="OTHER",
                nargs="?",
                help="the model that the capture of MODEL is checked on (default: MODEL, built again); a "
                "file needs one",
            ),
            _FORWARD,
            _LOSS,
            _option("--guards", action="store_true", help="list everything that the capture relied on"),
            _IMPORT,
        ),
    ),
    Command("doctor", trusting.doctor, "say what is installed, and if it is as expected"),
)
