"""Commands that say whether a program can be trusted: `verify`, `check`, `doctor`; and `demo`."""

import argparse
from pathlib import Path

import torch
from rich.console import Console

from whence.api import Program, capture
from whence.cli.printing import FAILED, OK, print_json, print_page, signature_line
from whence.cli.programs import is_saved, program_and_other, runnable, working
from whence.demo import GPT, GPTConfig, gpt, next_token_loss
from whence.execution.doctor import diagnosis
from whence.execution.verify import Verification
from whence.reports.modules import module_report
from whence.reports.numbers import scaled

_MOST_SHOWN = 20


def verify(options: argparse.Namespace, console: Console) -> int:
    """The program beside eager, bit for bit."""
    program, named = program_and_other(
        options.model, options.other, backward=not options.forward, loss=options.loss
    )
    with working("running both"):
        found: Verification = runnable(program, named, options.loss).verify(
            named.model, named.args, named.kwargs, atol=options.atol, by=options.by
        )
    ok = found.ok or bool(found.close)
    return print_json(console, found.to_dict(), ok=ok) if options.json else print_page(console, found, ok=ok)


def check(options: argparse.Namespace, console: Console) -> int:
    """What a capture relied on, and whether it still holds."""
    again = None if is_saved(options.model) else options.model
    program, other = program_and_other(
        options.model, options.other or again, backward=not options.forward, loss=options.loss, binds=False
    )
    with working("checking"):
        violations = program.check(other.model, other.args, other.kwargs)
    if options.json:
        rows = [violation.to_dict() for violation in violations]
        guards = program.guards.to_dict() if options.guards else {"guards": len(program.guards)}
        return print_json(console, {"violations": rows, **guards}, ok=not violations)
    if options.guards:
        print_page(console, f"{program.guards}\n")
    for violation in violations[:_MOST_SHOWN]:
        print_page(console, violation)
    if len(violations) > _MOST_SHOWN:
        print_page(console, f"… and {len(violations) - _MOST_SHOWN:,} more (--json has all)")
    return print_page(
        console, _check_summary(options, len(program.guards), len(violations)), ok=not violations
    )


def _check_summary(options: argparse.Namespace, guards: int, violations: int) -> str:
    on = options.other or f"another instance of {options.model}"
    if violations:
        return f"{violations} of {guards:,} guards do not hold on {on}"
    return f"all {guards:,} guards hold on {on}"


def doctor(options: argparse.Namespace, console: Console) -> int:
    """What is installed, and whether it is as expected."""
    with working("capturing a training step"):
        found = diagnosis(_verified_step)
    if options.json:
        return print_json(console, found.to_dict(), ok=found.ok)
    return print_page(console, found, ok=found.ok)


def _verified_step() -> Verification:
    """A training step of a model that takes no time, compared with eager."""
    model, args = GPT(GPTConfig(16, 4, 8, 2, 2)), (torch.arange(4)[None],)
    return capture(model, args, backward=next_token_loss).verify(model, args)


def demo(options: argparse.Namespace, console: Console) -> int:
    """The training step of a small GPT, verified."""
    model, args = gpt()
    with working("capturing the training step of a GPT"):
        program = capture(model, args, backward=next_token_loss)
        verification = program.verify(model, args)
    signature, report = module_report(program, depth=0), program.report()
    path = _demo_page(program).resolve()
    if options.json:
        data = {**signature.to_dict(), **report.to_dict(), "verification": verification.to_dict()}
        return print_json(console, {**data, "page": str(path)}, ok=verification.ok)
    memory = report.memory
    console.print(report.table())
    console.print(signature_line(signature))
    kept, peak = scaled(memory.kept_bytes), scaled(memory.peak)
    console.print(f"kept for the backward: {kept}B; peak: {peak}B, while {memory.at} runs")
    console.print(str(verification), markup=False)
    console.print(f"see it: open {path.as_uri()} in a browser", markup=False, soft_wrap=True)
    return OK if verification.ok else FAILED


def _demo_page(program: Program) -> Path:
    """Where the command is run, or in the temporary folder where that may not be."""
    try:
        return program.view(Path("whence-demo.html"))
    except OSError:
        return program.view()
