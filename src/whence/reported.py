"""What can be read off a captured program: costs, differences, pages, plain data; nothing runs for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whence.program import FlatProgram
from whence.program.plain import AsJSON
from whence.reports.cost import Cost, cost_of
from whence.reports.devices import Device
from whence.reports.diff import Diff, diff_of
from whence.reports.figures import figures_of
from whence.reports.formats import text_of
from whence.reports.formats.network import network
from whence.reports.memory import Memory, memory_of
from whence.reports.plain import plain
from whence.reports.report import Report, chosen, report_of
from whence.viewer import page, written


class Reported(FlatProgram, AsJSON):
    """A program, with the questions that its graph answers."""

    def cost(self, device: str | Device | None = None, *, sizes: Mapping[str, int] | None = None) -> Cost:
        """FLOPs by phase, bytes moved, and parameters of every call, read from shapes; nothing runs.

        FLOPs are those of `torch.utils.flop_counter.FlopCounterMode`, with `beyond` for what it leaves out
        and `gaps` for what nobody has a formula for. A `device` ("a100", "h100", "h200", "mi300x", or a
        `Device` with peaks of your own) gives seconds by a roofline. Open sizes are those of the example,
        or of `sizes`, by name. Raises `UsageError` for a device that is not listed, and for sizes that only
        data decide.
        """
        return cost_of(self, device, sizes)

    def memory(self, *, sizes: Mapping[str, int] | None = None, measure: bool = False) -> Memory:
        """What the backward keeps of the forward, and the peak by liveness in the program's order, in bytes.

        Read from shapes as `cost` is, by storages: a view is no memory of its own. What kernels need for
        themselves is in no shape, and named in `gaps`. With `measure` kernels that need any (convolutions,
        recurrent layers, the backward of batch norms) run once on zeros, where the program is one for this
        CPU, and what they took is in all figures; `UsageError` is raised where a profiler is running, which
        that would end. What an allocator rounds up is not counted.
        """
        return memory_of(self, sizes, measure=measure)

    def report(
        self,
        depth: int | None = None,
        *,
        sort: str | None = None,
        where: str | None = None,
        device: str | Device | None = None,
        sizes: Mapping[str, int] | None = None,
        measure: bool = False,
    ) -> Report:
        """Both for every call on a page: a table, CSV, Markdown or plain data; equal layers are one row.

        `depth` limits how deep rows go, and `sort` is a figure ("forward FLOPs", "kept bytes", …), the
        largest first. `where` is a pattern as `select` takes them: rows are calls that it names by path,
        number or class (`layers.*.mlp`, `lin@1`, `type=Linear`), of those the ones that hold an operation
        that fits the rest of it (`:: aten.mm.default`, `:: backward`, `region=gate`); figures are those of
        whole calls. `measure` is that of `memory`. Raises what `cost` and `select` raise.
        """
        return chosen(self, report_of(self, device, sizes, measure=measure), depth, sort, where)

    def diff(self, other: FlatProgram) -> Diff:
        """What differs from this program to another, by provenance: calls, operations, shapes, signature.

        Operations are compared within their call and phase, by operator and by what they make; layers that
        changed alike are told once. `ok` where nothing differs. Neither runs.
        """
        return diff_of(self, other)

    def view(
        self,
        path: str | Path | None = None,
        *,
        other: FlatProgram | None = None,
        values: Mapping[str, float] | None = None,
        device: str | Device | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Path:
        """Write all of it as one HTML file, which needs no server and no network, and return its path.

        The page shows the tree of calls with what `report` says of each, the graph of a call with forward and
        backward beside each other, where each node comes from, and memory over time. With `other` both
        programs are on it, with what `diff` says. `values` are numbers of your own for nodes, by name, to
        colour by; a node of a nested graph is called `true_graph_0/sin`. Without `path` it is a new file in
        the temporary folder. Raises what `report` raises, `SelectionError` for values of nodes that there are
        not, and `OSError` where nothing can be written.
        """
        figures = figures_of(self, device, sizes, values)
        if other is None:
            return written(page(figures), self.name, path)
        others = figures_of(other, device, sizes)
        return written(page(figures, others, self.diff(other).to_dict()), self.name, path)

    def to_text(
        self,
        form: str,
        device: str | Device | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
        values: str | Mapping[str, float] | None = None,
    ) -> str:
        """The program as other tools read it, as the text of a file.

        `"model-explorer"`: JSON whose layers are phases, then modules; graphs that nodes run are subgraphs.
        `"node-data"`: JSON with a number for each of its nodes, `values`: "flops", "bytes" that are
        moved, "kept" by the backward, "seconds", or numbers of your own by name. `"trace"`: JSON for Perfetto
        and Chrome, operations one behind another, each as long as `cost(device)` says ("h100", if none is
        named), and memory. `"dot"`: for Graphviz, calls are clusters. `"tlparse"`: a log of artefacts for
        `tlparse`. `"json"`: what `to_dict` says. Raises `UsageError` for other forms and figures,
        `SelectionError` for values of nodes that there are not, and what `cost` raises.
        """
        return text_of(self, form, device, sizes, values)

    def to_networkx(self, *, sizes: Mapping[str, int] | None = None) -> Any:
        """The graph as a `networkx.MultiDiGraph`: nodes by name, with operator, phase, call, line, FLOPs.

        Nodes of nested graphs are in it, as `true_graph_0/sin`.
        """
        return network(figures_of(self, sizes=sizes))

    def to_dict(self) -> dict[str, Any]:
        """Signature, calls, nodes, origins and guards as plain data, in the form of `docs/schema.md`."""
        return plain(self)
