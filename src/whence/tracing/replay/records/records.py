"""All that was recorded to be used again, and where it was."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from whence.schema import Phase
from whence.tracing.log.events import Marked
from whence.tracing.objections import Doubt
from whence.tracing.replay.records.markers import Markers
from whence.tracing.replay.records.template import Application, Rehearsal, Template


@dataclass(frozen=True)
class Records:
    """The markers in the graph, the recorded calls, and the calls that they stand for."""

    markers: Markers
    templates: list[Template] = field(default_factory=list)
    applications: list[Application] = field(default_factory=list)

    def rehearsals(self) -> Iterator[Rehearsal]:
        """Every backward that was rehearsed."""
        return (rehearsal for template in self.templates for rehearsal in template.rehearsals.values())

    def check(self, returned: Sequence[fx.Node | None], marks: Mapping[fx.Node, Marked]) -> None:
        """Raise `Doubt` where a record was used for what it does not stand for.

        `returned` are the results of the run.
        """
        for template in self._used():
            if any(_escapes(node, template, returned, marks) for node in template.recorded):
                raise Doubt(template.kind, "something inside it is used outside")

    def _used(self) -> list[Template]:
        """The templates that stood for a call."""
        return list({id(a.template): a.template for a in self.applications}.values())

    def inside_templates(self) -> dict[fx.Node, type]:
        """What was computed inside recorded calls that stood for others, with the class of each."""
        return {node: template.kind for template in self._used() for node in template.recorded}

    def forget(self) -> None:
        """Let go of all tensors of the run."""
        for application in self.applications:
            application.backwards.clear()  # their logs lead to autograd's nodes, too
        for template in self.templates:
            template.rehearsals.clear()
        self.applications.clear()
        self.templates.clear()


def _escapes(
    node: fx.Node, template: Template, returned: Sequence[fx.Node | None], marks: Mapping[fx.Node, Marked]
) -> bool:
    """Whether a value inside a recorded call, which it does not return, is used outside in the forward."""
    if node in template.given_out:
        return False
    users = (user for user in node.users if user not in template.nodes and user in marks)
    return node in returned or any(marks[user].phase is not Phase.BACKWARD for user in users)
