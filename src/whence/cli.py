"""The command line: a thin handle on the library.

Exit status 0: all is well. 1: a check failed, or the model could not be captured. 2: bad usage.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from whence.api import Program, capture
from whence.api import load as saved
from whence.demo import GPT, GPTConfig, gpt, next_token_loss
from whence.dependence.asking import Failed, attempt
from whence.errors import CaptureError, SelectionError, UsageError, WhenceError
from whence.execution.doctor import diagnosis
from whence.execution.verify import Verification
from whence.models import NamedModel, load
from whence.program.queries.printing import line
from whence.reports.modules import ModuleReport, ModuleRow, folded, module_report
from whence.reports.numbers import scaled
from whence.reports.report import label
from whence.viewer import file_name

OK, FAILED, USAGE = 0, 1, 2
PIPED_WIDTH = 200
SCHEMA = 1
"""The version of what commands print with `--json`, whose schemas are in `schemas/`."""
MOST_SHOWN = 20
LAST_LINES = 12
MODEL_HELP = "package.module:factory, or hf:LlamaForCausalLM(num_hidden_layers=2, hidden_size=64)"
SAVED = ".whence"
SAVED_HELP = f"{MODEL_HELP}; or a file that program.save wrote, called *{SAVED}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    options = _parser().parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPED_WIDTH)
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
    return [] if partial is None else ["", "…", *str(partial).splitlines()[-LAST_LINES:]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="whence",
        description="Capture what a PyTorch model computes, and know where every value came from.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = _command(commands, "demo", _demo, "capture the training step of a small GPT and verify it")
    show = _command(commands, "show", _show, "show a model's calls, operations and signature")
    show.add_argument("model", metavar="MODEL", help=SAVED_HELP)
    show.add_argument(
        "--backward", action="store_true", help="capture the training step, not only the forward"
    )
    show.add_argument(
        "--select", metavar="PATTERN", help="list the operations that fit path :: operation :: phase"
    )
    show.add_argument("--depth", type=_depth, metavar="N", help="how deep the tree of modules goes")
    report = _command(
        commands, "report", _report, "say what each call costs, and what the backward keeps of it"
    )
    report.add_argument("model", metavar="MODEL", help=SAVED_HELP)
    report.add_argument(
        "--forward", action="store_true", help="report on the forward only, not the training step"
    )
    report.add_argument("--depth", type=_depth, metavar="N", help="how deep the tree of modules goes")
    report.add_argument(
        "--sort", metavar="FIGURE", help='the largest first: "forward FLOPs", "kept bytes", …'
    )
    report.add_argument("--where", metavar="PATTERN", help="calls of modules that fit, as layers.*.mlp")
    report.add_argument("--device", metavar="NAME", help="times by a roofline: a100, h100, h200, mi300x")
    report.add_argument(
        "--format", choices=("table", "markdown", "csv"), default="table", help="how it is printed"
    )
    diff = _command(commands, "diff", _diff, "say what differs between the programs of two models")
    diff.add_argument("model", metavar="MODEL", help=SAVED_HELP)
    diff.add_argument("other", metavar="OTHER", help="the model that it is compared with")
    diff.add_argument("--forward", action="store_true", help="compare the forward only")
    view = _view_command(commands)
    verify = _command(commands, "verify", _verify, "compare the captured program with eager, bit for bit")
    verify.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    verify.add_argument(
        "--forward", action="store_true", help="verify the forward only, not the training step"
    )
    check = _command(commands, "check", _check, "say what a capture relied on, and whether it still holds")
    check.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    check.add_argument(
        "other",
        metavar="OTHER",
        nargs="?",
        help="the model that the capture of MODEL is checked on (default: MODEL, built again)",
    )
    check.add_argument(
        "--forward", action="store_true", help="capture the forward only, not the training step"
    )
    check.add_argument("--guards", action="store_true", help="list everything that the capture relied on")
    doctor = _command(commands, "doctor", _doctor, "say what is installed, and whether it is as expected")
    for command in (demo, show, report, diff, view, verify, check, doctor):
        command.add_argument("--json", action="store_true", help="print plain data")
    return parser


def _view_command(commands: Any) -> argparse.ArgumentParser:
    view = _command(commands, "view", _view, "write all of it as one HTML file, to look at in a browser")
    view.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    view.add_argument("--html", metavar="FILE", type=Path, help="where to write (default: whence-CLASS.html)")
    view.add_argument("--other", metavar="OTHER", help="a second model: both, and what differs")
    view.add_argument("--forward", action="store_true", help="the forward only, not the training step")
    view.add_argument("--device", metavar="NAME", help="times by a roofline: a100, h100, h200, mi300x")
    return view


def _depth(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError("a depth is a whole number, 0 or more")
    return int(text)


def _command(commands: Any, name: str, run: Callable[..., int], purpose: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=purpose, description=purpose)
    command.set_defaults(run=run)
    return command


def _demo(options: argparse.Namespace, console: Console) -> int:
    model, args = gpt()
    with console.status("capturing the training step of a GPT") if not options.json else nullcontext():
        program = capture(model, args, backward=next_token_loss)
        verification = program.verify(model, args)
    signature, report = module_report(program, depth=0), program.report()
    path = _demo_page(program)
    if options.json:
        data = {**signature.to_dict(), **report.to_dict(), "verification": verification.to_dict()}
        return _print_json(console, {**data, "page": str(path)}, verification.ok)
    memory = report.memory
    console.print(report.table())
    console.print(_signature_line(signature))
    kept, peak = scaled(memory.kept_bytes), scaled(memory.peak)
    console.print(f"kept for the backward: {kept}B; peak: {peak}B, while {memory.at} runs")
    console.print(str(verification), markup=False)
    console.print(f"see it: open {path} in a browser", markup=False)
    return OK if verification.ok else FAILED


def _demo_page(program: Program) -> Path:
    """Where the command is run, or in the temporary folder where that may not be."""
    try:
        return program.view(Path("whence-demo.html"))
    except OSError:
        return program.view()


def _show(options: argparse.Namespace, console: Console) -> int:
    program = _program(options.model, backward=options.backward)
    if options.select:
        return _show_selection(program, options, console)
    report = module_report(program, depth=options.depth)
    if options.json:
        return _print_json(console, report.to_dict(), ok=True)
    console.print(_tree_table(report))
    console.print(_signature_line(report))
    return OK


def _report(options: argparse.Namespace, console: Console) -> int:
    program = _program(options.model, backward=not options.forward)
    chosen = {name: getattr(options, name) for name in ("depth", "sort", "where", "device")}
    report = program.report(**chosen)
    if options.json:
        return _print_json(console, report.to_dict(), ok=True)
    texts = {"markdown": report.to_markdown, "csv": report.to_csv}
    if options.format in texts:
        console.print(texts[options.format](), markup=False)
    else:
        console.print(report)
    return OK


def _diff(options: argparse.Namespace, console: Console) -> int:
    names = (options.model, options.other)
    before, after = (_program(name, backward=not options.forward) for name in names)
    found = before.diff(after)
    if options.json:
        return _print_json(console, found.to_dict(), found.ok)
    console.print(str(found), markup=False)
    return OK if found.ok else FAILED


def _view(options: argparse.Namespace, console: Console) -> int:
    program = _captured(_built(options.model), backward=not options.forward)
    other = _captured(_built(options.other), backward=not options.forward) if options.other else None
    path = options.html or Path(file_name(program.name))
    try:
        program.view(path, other=other, device=options.device)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    size = path.stat().st_size
    if options.json:
        counts = {"nodes": len(program.graph.nodes), "calls": len(program.calls)}
        return _print_json(console, {"path": str(path), "bytes": size, **counts}, ok=True)
    console.print(f"{path} ({scaled(size)}B): open it in a browser", markup=False)
    return OK


def _show_selection(program: Program, options: argparse.Namespace, console: Console) -> int:
    nodes = program.select(options.select)
    if options.json:
        rows = [
            {"node": node.name, "operation": str(node.target), **_plain(program, node.name)} for node in nodes
        ]
        return _print_json(console, rows, ok=True)
    for node in nodes:
        console.print(line(node), markup=False)
        console.print(f"    {program.where(node)}", markup=False, style="dim")
    return OK


def _plain(program: Program, name: str) -> dict[str, Any]:
    origin = program.where(name)
    return {
        "phase": origin.phase.value,
        "calls": [str(call) for call in origin.calls],
        "quality": origin.quality.value,
        "source": None if origin.source is None else str(origin.source),
        "forward": origin.forward,
    }


def _verify(options: argparse.Namespace, console: Console) -> int:
    named = _built(options.model)
    program = _captured(named, backward=not options.forward)
    verification: Verification = program.verify(named.model, named.args, named.kwargs)
    if options.json:
        return _print_json(console, verification.to_dict(), verification.ok)
    console.print(str(verification), markup=False)
    return OK if verification.ok else FAILED


def _check(options: argparse.Namespace, console: Console) -> int:
    named = _built(options.model)
    program = _captured(named, backward=not options.forward)
    other = _built(options.other or options.model)
    violations = program.check(other.model, other.args, other.kwargs)
    if options.json:
        rows = [violation.to_dict() for violation in violations]
        guards = program.guards.to_dict() if options.guards else {"guards": len(program.guards)}
        return _print_json(console, {"violations": rows, **guards}, ok=not violations)
    if options.guards:
        console.print(str(program.guards), markup=False)
        console.print()
    for violation in violations[:MOST_SHOWN]:
        console.print(str(violation), markup=False)
    if len(violations) > MOST_SHOWN:
        console.print(f"… and {len(violations) - MOST_SHOWN:,} more (--json has all)", markup=False)
    console.print(_held(options, len(program.guards), len(violations)), markup=False)
    return FAILED if violations else OK


def _doctor(options: argparse.Namespace, console: Console) -> int:
    found = diagnosis(_verified_step)
    if options.json:
        return _print_json(console, found.to_dict(), found.ok)
    console.print(str(found), markup=False)
    return OK if found.ok else FAILED


def _verified_step() -> Verification:
    """A training step of a model that takes no time, compared with eager."""
    model, args = GPT(GPTConfig(16, 4, 8, 2, 2)), (torch.arange(4)[None],)
    return capture(model, args, backward=next_token_loss).verify(model, args)


def _held(options: argparse.Namespace, guards: int, violations: int) -> str:
    on = options.other or f"another instance of {options.model}"
    if violations:
        return f"{violations} of {guards:,} guards do not hold on {on}"
    return f"all {guards:,} guards hold on {on}"


def _program(name: str, *, backward: bool) -> Program:
    """The program of a model, or the one in a file, whatever is in that."""
    return saved(name) if name.endswith(SAVED) else _captured(_built(name), backward=backward)


def _built(name: str) -> NamedModel:
    """Build a model; raises `UsageError` when its factory fails."""
    named = attempt(lambda: load(name))
    if not isinstance(named, Failed):
        built: NamedModel = named
        return built
    if isinstance(named.error, WhenceError):
        raise named.error
    error = named.error
    raise UsageError(f"{name} cannot be built: {type(error).__name__}: {error}") from error


def _captured(named: NamedModel, *, backward: bool) -> Program:
    return capture(named.model, named.args, named.kwargs, backward=named.loss if backward else False)


def _print_json(console: Console, data: Any, ok: bool) -> int:
    said = {"schema": SCHEMA, **data} if isinstance(data, dict) else data
    console.print(json.dumps(said, indent=2, allow_nan=False), markup=False)
    return OK if ok else FAILED


def _tree_table(report: ModuleReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("module call", overflow="fold")
    table.add_column("class", style="dim")
    for heading in ("forward", "backward", "parameters"):
        table.add_column(heading, justify="right")
    for shown in folded(report.rows):
        kind = shown.row.type if shown.row.depth else ""
        table.add_row(label(shown), kind, *_figures(shown.row))
    return table


def _figures(row: ModuleRow) -> tuple[str, str, str]:
    return (
        f"{row.forward:,}",
        f"{row.backward:,}" if row.backward else "",
        f"{row.parameters:,}" if row.parameters else "",
    )


def _signature_line(report: ModuleReport) -> str:
    inputs = ", ".join(f"{count} {kind}" for kind, count in report.inputs.items())
    outputs = ", ".join(f"{count} {kind}" for kind, count in report.outputs.items())
    return f"\ninputs: {inputs}\noutputs: {outputs}"


if __name__ == "__main__":
    sys.exit(main())
