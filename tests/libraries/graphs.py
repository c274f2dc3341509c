"""torch_geometric: messages along edges, with scatter and gather."""

from typing import Any

import torch
from torch import Tensor, nn, randn

from tests.libraries.rows import Rows, decided, given

row = Rows()
COUNTS = decided(
    r"a number \(int\(\)\)|decides by the number",
    "the greatest number of a group, read from a tensor, is a size",
    decide=("forward", "joint"),
)


def edges() -> Tensor:
    return torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])


def graph(**more: Any) -> Any:
    return given(randn(4, 4), edges(), **more)


@row("torch_geometric.nn", graph)
def gcn(library: Any) -> nn.Module:
    return library.GCNConv(4, 4)


@row("torch_geometric.nn", graph)
def gcn_without_loops(library: Any) -> nn.Module:
    return library.GCNConv(4, 4, add_self_loops=False)


@row("torch_geometric.nn", graph)
def gat(library: Any) -> nn.Module:
    return library.GATConv(4, 4, heads=2)


@row("torch_geometric.nn", graph)
def gat_without_loops(library: Any) -> nn.Module:
    return library.GATv2Conv(4, 4, heads=2, add_self_loops=False, dropout=0.2)


@row("torch_geometric.nn", lambda: graph(edge_attr=randn(5, 3)))
def gat_with_edges(library: Any) -> nn.Module:
    return library.GATConv(4, 4, heads=2, add_self_loops=False, edge_dim=3)


@row("torch_geometric.nn", graph)
def sage(library: Any) -> nn.Module:
    return library.SAGEConv(4, 4, aggr="max")


@row("torch_geometric.nn", graph)
def gin(library: Any) -> nn.Module:
    return library.GINConv(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), train_eps=True)


@row("torch_geometric.nn", graph)
def transformer(library: Any) -> nn.Module:
    return library.TransformerConv(4, 4, heads=2, beta=True)


@row("torch_geometric.nn", lambda: graph(edge_attr=torch.rand(5, 2)))
def spline_free_edge_network(library: Any) -> nn.Module:
    return library.NNConv(4, 4, nn.Sequential(nn.Linear(2, 16)))


@row("torch_geometric.nn", lambda: given(randn(4, 4), torch.zeros(4, 3), edges()))
def point_net(library: Any) -> nn.Module:
    return library.PointNetConv(nn.Linear(7, 4), nn.Linear(4, 4), add_self_loops=False)


@row("torch_geometric.nn", graph)
def edge_convolution(library: Any) -> nn.Module:
    return library.EdgeConv(nn.Sequential(nn.Linear(8, 4), nn.ReLU()))


@row("torch_geometric.nn", lambda: given(randn(4, 4), edges(), torch.tensor([0, 1, 0, 1, 1])), **COUNTS)
def relational(library: Any) -> nn.Module:
    return library.RGCNConv(4, 4, num_relations=2)


@row("torch_geometric.nn", graph)
def several_aggregations(library: Any) -> nn.Module:
    return library.SAGEConv(4, 4, aggr=["mean", "std", "min"])


@row("torch_geometric.nn", graph)
def graph_sage(library: Any) -> nn.Module:
    return library.GraphSAGE(in_channels=4, hidden_channels=8, num_layers=2, out_channels=3, norm="GraphNorm")


@row("torch_geometric.nn", lambda: given(randn(4, 4), edges(), torch.tensor([0, 0, 1, 1]), 2))
def pooled(library: Any) -> nn.Module:
    layers = [
        (library.GraphConv(4, 4), "x, edges -> x"),
        nn.ReLU(),
        (library.global_mean_pool, "x, batch, size -> x"),
        nn.Linear(4, 2),
    ]
    return library.Sequential("x, edges, batch, size", layers)


@row(
    "torch_geometric.nn",
    lambda: given(randn(4, 4), edges(), None, None, torch.tensor([0, 0, 1, 1])),
    **COUNTS,
)
def top_k_pooled(library: Any) -> nn.Module:
    return library.TopKPooling(4, ratio=0.5)


@row("torch_geometric.nn", lambda: given(randn(1, 4, 4), torch.ones(1, 4, 4)))
def dense_graph(library: Any) -> nn.Module:
    return library.DenseGCNConv(4, 4)


def two_kinds() -> Any:
    joined = {("a", "to", "b"): torch.tensor([[0, 1, 2], [0, 1, 1]])}
    return given({"a": randn(3, 4), "b": randn(2, 4)}, joined)


@row("torch_geometric.nn", two_kinds)
def heterogeneous(library: Any) -> nn.Module:
    return library.HeteroConv({("a", "to", "b"): library.SAGEConv((4, 4), 3)})


@row("torch_geometric.nn", lambda: given(randn(4, 4), torch.tensor([0, 0, 1, 1]), dim_size=2))
def attentional_aggregation(library: Any) -> nn.Module:
    return library.AttentionalAggregation(nn.Linear(4, 1))


@row("torch_geometric.nn", lambda: given(randn(4, 4), torch.tensor([0, 0, 1, 1])), **COUNTS)
def set_to_set(library: Any) -> nn.Module:
    return library.Set2Set(4, processing_steps=2)


@row("torch_geometric.nn", graph)
def jumping_knowledge(library: Any) -> nn.Module:
    return library.GIN(4, 8, num_layers=2, jk="lstm", out_channels=3)
