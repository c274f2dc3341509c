"""Nodes that do nothing, and hold the place where something began or ended until the graph is done."""

from torch import fx

from whence._torch.record.recorder import Recorder


class Markers:
    """All markers of one graph, in the order in which they were put there."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.nodes: list[fx.Node] = []

    def put(self, *values: fx.Node) -> fx.Node:
        """A marker at the end of the graph, which holds on to `values`."""
        marker = self._recorder.marker(values)
        self.nodes.append(marker)
        return marker

    def remove(self, graph: fx.Graph) -> None:
        """Take them all away."""
        for marker in reversed(self.nodes):
            graph.erase_node(marker)
        self.nodes.clear()
