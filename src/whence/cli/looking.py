"""Commands that look at a program: `show`, `report`, `diff`, `view`, `graph`."""

import argparse
from pathlib import Path

from rich.console import Console

from whence.api import Program
from whence.cli.printing import OK, print_json, print_page, signature_line, tree_table
from whence.cli.programs import not_written, program_of, working, write_page
from whence.program.plain import plain_fields
from whence.program.queries.printing import line
from whence.reports.modules import module_report
from whence.reports.numbers import scaled
from whence.viewer import file_name


def show(options: argparse.Namespace, console: Console) -> int:
    """Calls, operations and signature."""
    program = program_of(options.model, backward=options.backward)
    if options.html:
        write_page(program, options.html)
    if options.select:
        return _show_selection(program, options, console)
    if options.history:
        found = program.history
        return print_json(console, found.to_dict()) if options.json else print_page(console, found)
    report = module_report(program, depth=options.depth)
    if options.json:
        return print_json(console, report.to_dict())
    console.print(tree_table(report))
    console.print(signature_line(report))
    return OK


def _show_selection(program: Program, options: argparse.Namespace, console: Console) -> int:
    nodes = program.select(options.select)
    if options.json:
        told = ("phase", "calls", "quality", "source", "forward")
        rows = [
            {"node": node.name, "operation": str(node.target), **plain_fields(program.where(node), *told)}
            for node in nodes
        ]
        return print_json(console, rows)
    for node in nodes:
        console.print(line(node), markup=False)
        console.print(f"    {program.where(node)}", markup=False, style="dim")
    return OK


def report(options: argparse.Namespace, console: Console) -> int:
    """What calls cost, and what the backward keeps."""
    program = program_of(options.model, backward=not options.forward)
    chosen = {name: getattr(options, name) for name in ("depth", "sort", "where", "device", "measure")}
    with working("counting"):
        found = program.report(**chosen, sizes=dict(options.sizes))
    if options.html:
        write_page(program, options.html, device=options.device, sizes=dict(options.sizes))
    if options.json:
        return print_json(console, found.to_dict())
    texts = {"markdown": found.to_markdown, "csv": found.to_csv}
    if options.format in texts:
        return print_page(console, texts[options.format]())
    console.print(found)
    return OK


def diff(options: argparse.Namespace, console: Console) -> int:
    """What differs between two programs."""
    names = (options.model, options.other)
    before, after = (program_of(name, backward=not options.forward) for name in names)
    with working("comparing"):
        found = before.diff(after)
    if options.html:
        write_page(before, options.html, other=after)
    if options.json:
        return print_json(console, found.to_dict(), ok=found.ok)
    return print_page(console, found, ok=found.ok)


def view(options: argparse.Namespace, console: Console) -> int:
    """All of it as one HTML file."""
    program = program_of(options.model, backward=not options.forward)
    other = program_of(options.other, backward=not options.forward) if options.other else None
    path = options.html or Path(file_name(program.name))
    write_page(program, path, other=other, device=options.device, sizes=dict(options.sizes))
    size = path.stat().st_size
    if options.json:
        counts = {"nodes": len(program.graph.nodes), "calls": len(program.calls)}
        return print_json(console, {"path": str(path), "bytes": size, **counts})
    return print_page(console, f"{path} ({scaled(size)}B): open it in a browser")


def graph(options: argparse.Namespace, console: Console) -> int:
    """The graph in the format of another tool, printed or in a file."""
    program = program_of(options.model, backward=not options.forward)
    with working(f"writing {options.format}"):
        text = program.to_text(
            options.format, options.device, sizes=dict(options.sizes), values=options.values
        )
    if options.output is not None:
        try:
            options.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise not_written(options.output, error) from error
    if options.json:
        place = {"text": text} if options.output is None else {"path": str(options.output)}
        counts = {"bytes": len(text.encode()), "nodes": len(program.graph.nodes)}
        return print_json(console, {"format": options.format, **counts, **place})
    return OK if options.output is not None else print_page(console, text.rstrip("\n"))
