"""The rows of the table, in order, with their targets."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks import captures, files, floors, meta, running, scaling, viewer
from benchmarks.results import Figures, Result, Subject, Target, amount, faster, longer
from benchmarks.timing import Repeats

EXPORT = "torch.export, strict=False"
OFFICIAL_JOINT = "Dynamo + AOT joint"
UNFLATTEN = "torch.export.unflatten"
DEPTHS = (125, 250, 500, 1000)


@dataclass(frozen=True)
class Row:
    """One line of the table, not yet measured; rows of one process share it, and what they measured."""

    subject: Subject
    target: Target | None
    measure: Callable[[], Figures]
    process: str

    def run(self) -> Result:
        """Measure it."""
        return Result(self.subject, self.target, self.measure())


@dataclass(frozen=True)
class Depth:
    """How a model of some depth is measured, and how many times faster each road should be."""

    layers: int
    repeats: Repeats
    forward: float
    joint: float
    unflatten: float


def full() -> list[Row]:
    """Everything."""
    five = Repeats(5, 5)
    return [
        *_captures(Depth(32, five, forward=8, joint=10, unflatten=8)),
        *_captures(Depth(126, Repeats(5, 2), forward=20, joint=20, unflatten=12)),
        _dynamic(32, five),
        *_varying(32, five),
        *_running(repeats=200),
        *_guards(),
        *_meta(),
        *_files(32, Repeats(5, 5)),
        *_scaling(),
        *_viewer(),
        *_floors(32, repeats=5),
        *_floors(126, repeats=5),
    ]


def smoke() -> list[Row]:
    """What tells in under a minute whether a ratio has fallen far below its target: in one process."""
    rows = [
        *_captures(Depth(32, Repeats(3, 1), forward=8, joint=10, unflatten=8)),
        *_running(repeats=50),
        *_floors(32, repeats=1),
    ]
    return [replace(row, process="smoke") for row in rows]


TABLES = {"full": full, "smoke": smoke}


def _captures(depth: Depth) -> Iterator[Row]:
    """Each in a process of its own: PyTorch's roads leave graphs behind, which slow down what follows."""
    layers = depth.layers
    subject = partial(Subject, "Capture and unflatten", layers=layers)
    forward = subject(f"forward-{layers}", "forward capture", EXPORT)
    yield Row(forward, faster(depth.forward), partial(captures.forward, layers, depth.repeats), forward.name)
    joint = subject(f"joint-{layers}", "joint capture", OFFICIAL_JOINT)
    yield Row(joint, faster(depth.joint), partial(captures.joint, layers, depth.repeats), joint.name)
    unflatten = subject(f"unflatten-{layers}", "unflatten", UNFLATTEN)
    often = Repeats(
        depth.repeats.ours, depth.repeats.ours
    )  # theirs is short: a collection may double one run
    measure = partial(captures.unflatten, layers, often)
    yield Row(unflatten, faster(depth.unflatten), measure, unflatten.name)


def _dynamic(layers: int, repeats: Repeats) -> Row:
    """A sequence length that may vary."""
    subject = Subject("Capture and unflatten", "dynamic", "forward, dynamic length", EXPORT, layers)
    return Row(subject, faster(8), partial(captures.dynamic, layers, repeats), "dynamic")


def _varying(layers: int, repeats: Repeats) -> Iterator[Row]:
    """What sizes that may vary cost."""
    for name, against, reuse in (
        ("varying", "fixed sizes", True),
        ("varying-traced", "fixed sizes, no replay", False),
    ):
        subject = partial(Subject, "Sizes that may vary", against=against, layers=layers)
        measure = partial(captures.varying, layers, repeats, reuse=reuse)
        forward, joint = (
            subject(f"{name}-forward", "forward capture"),
            subject(f"{name}-joint", "joint capture"),
        )
        yield Row(forward, longer(1.5), partial(measure, differentiated=False), name)
        yield Row(joint, longer(1.5), partial(measure, differentiated=True), name)
    check = Subject("Sizes that may vary", "varying-check", "check of an input")
    yield Row(check, amount(30), partial(running.check_of_sizes, 32), "varying")


def _running(repeats: int) -> Iterator[Row]:
    subject = partial(Subject, "Running what was captured", against="eager", layers=4)
    forward = subject("tree-forward", "forward of the tree")
    yield Row(forward, longer(1.0), partial(running.tree_forward, 4, repeats), "running")
    flat = subject("flat-forward", "forward of the flat module")
    yield Row(flat, longer(1.05), partial(running.flat_forward, 4, repeats), "running")
    step = subject("training-step", "forward + backward of the tree")
    yield Row(step, longer(1.1), partial(running.training_step, 4, repeats), "running")


def _guards() -> Iterator[Row]:
    subject = partial(Subject, "Check of all guards", against="eager forward", layers=32)
    alone = subject("guard-check", "each repeated by itself")
    yield Row(alone, longer(0.03), partial(running.guard_check, 32), "guards")
    between = subject("guard-check-between", "between forwards")
    yield Row(between, longer(0.05), partial(running.guard_check_between, 32), "guards")
    anew = subject("guard-check-anew", "nothing remembered")
    yield Row(anew, longer(0.25), partial(running.guard_check_anew, 32), "guards")


def _meta() -> Iterator[Row]:
    subject = partial(Subject, "Large models on meta")
    time = subject("meta-405b", "405 B, joint capture", layers=126)
    yield Row(time, amount(5), partial(meta.joint_time, "405b"), "405b")
    memory = subject("meta-405b-memory", "405 B, memory added", layers=126)
    yield Row(memory, amount(2), partial(meta.memory, "405b"), "405b")
    small = subject("meta-8b-memory", "8 B, memory added", layers=32)
    yield Row(small, amount(1), partial(meta.memory, "8b"), "8b")


def _files(layers: int, repeats: Repeats) -> Iterator[Row]:
    subject = partial(Subject, "Programs in files", layers=layers)
    save = subject(f"save-{layers}", "save a forward program, with weights", "torch.export.save")
    yield Row(save, faster(2), partial(files.saving, layers, repeats), "files")
    load = subject(f"load-{layers}", "load it", "torch.export.load")
    yield Row(load, faster(5), partial(files.loading, layers, repeats), "files")
    kept = subject(f"cached-{layers}", "joint program from a cache, checked", "capturing it")
    yield Row(kept, faster(1.5), partial(files.instead_of_capture, layers, repeats), "files")
    large = partial(Subject, "Programs in files", layers=126)
    for what, most in (("save", 3), ("load", 1), ("diff", 4)):
        row = large(f"{what}-405b", f"{what} a joint program of 405 B")
        yield Row(row, amount(most), partial(files.large, what, 5), "files-405b")


def _scaling() -> Iterator[Row]:
    """A thousand layers have a target of their own; the cost of a node must not grow with the depth."""
    subject = partial(Subject, "Joint capture by depth")
    for layers in DEPTHS:
        depth = subject(f"depth-{layers}", "joint capture", layers=layers)
        target = amount(25) if layers == 1000 else None
        yield Row(depth, target, partial(scaling.joint, layers), "depth")
    deep, shallow = DEPTHS[-1], DEPTHS[0]
    growth = subject("depth-growth", "cost of a node", f"at {shallow} layers", deep)
    yield Row(growth, amount(1.5), partial(scaling.growth, deep, shallow), "depth")


def _viewer() -> Iterator[Row]:
    """The page of a model as deep as the largest, in Chromium."""
    subject = partial(Subject, "The page of a joint program", layers=viewer.LAYERS)
    size = subject("viewer-size", "size of the file")
    yield Row(size, amount(6), viewer.size, "viewer")
    paint = subject("viewer-paint", "until it is painted")
    yield Row(paint, amount(2), viewer.paint, "viewer")
    opening = subject("viewer-open", "until a call is open, the slowest")
    yield Row(opening, amount(300), viewer.opening, "viewer")


def _floors(layers: int, repeats: int) -> Iterator[Row]:
    subject = partial(Subject, "Floors", layers=layers)
    nodes = subject(f"floor-nodes-{layers}", "bare fx nodes of the joint graph")
    yield Row(nodes, None, partial(floors.bare_nodes, layers, repeats), "floors")
    forward = subject(f"floor-forward-{layers}", "eager forward on meta")
    yield Row(forward, None, partial(floors.eager_forward, layers, repeats), "floors")
    joint = subject(f"floor-joint-{layers}", "eager forward + backward on meta")
    yield Row(joint, None, partial(floors.eager_joint, layers, repeats), "floors")
