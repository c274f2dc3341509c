"""Programs with graphs in graphs, and with all that `select` has words for."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint

import whence

PATTERNS = (
    *("lin@0", "lin@1", "lin@7", "@1", "**@0 :: aten.addmm", "lin", "**.up", "mlp", "mlp.*", "m?p", "[lm]*"),
    *(
        "type=Linear",
        "type=Lin* :: backward",
        "type=*[!r]",
        "type=",
        "type=Many :: aten.cond*",
        "[]l]in",
        "[!]",
    ),
    *(
        "[z-a]*",
        "[a-l]in",
        "li[!m]",
        "[m-]*",
        "** :: *",
        "* :: *",
        ":: aten.*",
        ":: aten.mm",
        ":: *.mm",
        "::",
    ),
    *("region=gate", "region=gate.*", "region=gate.in*", "region=*", "region=none", "stage=1", "stage=[12]"),
    *("region=gate :: backward", "region=gate :: aten.sin", "type=Linear :: saved", "mlp :: forward"),
    *(":: loss", ":: recomputed", ":: saved", ":: random", ":: forward", ":: backward", ":: optimizer"),
    *("mlp :: recomputed", "lin@1 :: saved", "drop :: random", ":: sideways", "a :: b :: c :: d", "", " "),
    *("kind=parameter", "kind=buffer", "kind=user", "kind=constant", "kind=optimizer_state", "kind=tangent"),
    *("mlp :: kind=parameter", "type=Linear :: kind=parameter", "** :: kind=buffer", "kind=", "kind=mother"),
    *("lin@1 :: kind=parameter", "kind=parameter :: forward", "args* :: kind=user", "*.up :: kind=parameter"),
    *(
        ":: true_graph_*",
        ":: *_graph_*",
        "lin :: *",
        "** :: aten.sin :: forward",
        ":: cond",
        "lin@x",
        "(root)",
    ),
)


class Mlp(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        out: Tensor = self.down(self.up(x).relu())
        return out


def _step(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    return carried + row, carried * row


class Many(nn.Module):
    """A layer that is called twice, a checkpoint, a dropout, regions, branches in branches, a map."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.mlp, self.drop = nn.Linear(4, 4), Mlp(), nn.Dropout(0.5)
        self.scale = torch.ones(4)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        """All of them."""
        x = self.drop(self.lin(self.lin(x)) * self.scale + self.shift)
        x = checkpoint(self.mlp, x, use_reentrant=False)
        with whence.region("gate"):
            x = x.sin()
            with whence.region("inner"):
                x = x.cos()
        with torch.fx.traceback.annotate({"stage": 1}):
            x = x.exp()
        x = torch.cond(x.sum() > 0, _branching, torch.sin, (x,))
        return mapped(_doubled, x)


def _doubled(row: Tensor, *_others: Any) -> Tensor:
    return row.tanh() * 2


def _branching(x: Tensor) -> Any:
    return torch.cond(x.mean() > 1, lambda y: y.sin() + 1, lambda y: (y * 2).cos(), (x,))


def joint() -> whence.Program:
    """Forward and backward of all of it."""
    return whence.capture(Many(), (torch.randn(3, 4),), backward=lambda y: y.square().mean())


def step() -> whence.Program:
    """A whole training step with a loop in it, and state of an optimizer."""
    model = nn.Sequential(nn.Linear(4, 4), Mlp())
    optimizer = torch.optim.Adam(model.parameters())

    def training(x: Tensor) -> Any:
        optimizer.zero_grad()
        out = model(x)
        total, rows = scan(_step, out[0].clone(), out, dim=0)
        loss = (total + rows).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return whence.capture_step(training, (torch.randn(3, 4),), model=model, optimizer=optimizer)


def full_names(program: whence.Program) -> dict[Any, str]:
    """Of each node: the names of the nodes that hold its graph, and its own."""
    found: dict[Any, str] = {}
    open_graphs: list[tuple[Any, str]] = []
    for node in program.nodes():
        while open_graphs and open_graphs[-1][0] is not node.graph:
            open_graphs.pop()
        if not open_graphs:
            open_graphs.append((node.graph, ""))
        found[node] = open_graphs[-1][1] + node.name
        inner = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(inner, torch.fx.GraphModule):
            open_graphs.append((inner.graph, f"{found[node]}/"))
    return found


def selected(program: whence.Program) -> dict[str, list[str] | None]:
    """What each pattern selects; None where `select` has nothing to give."""
    names = full_names(program)
    found: dict[str, list[str] | None] = {}
    for pattern in PATTERNS:
        try:
            found[pattern] = [names[node] for node in program.select(pattern)]
        except whence.errors.SelectionError:
            found[pattern] = None
    return found
