"""What each placeholder and each returned value of a program is, and each random draw, in graph order."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, fx

from whence._torch.graphs import all_nodes
from whence._torch.operators.schemas import op_name
from whence._torch.plain_values import PLAIN_IN_WHOLE
from whence._torch.pytrees import TreeSpec, tree_flatten
from whence._torch.sizes.drawn_numbers import DRAWN
from whence._torch.sizes.symbols import SYMBOLIC, spelled
from whence._torch.subclasses.wrapper_subclasses import groups_of, mesh_of, place_on, placements_of
from whence.program.node_records import origin_of
from whence.program.queries.marks import is_drawn
from whence.program.queries.notebook import OpensInNotebook
from whence.provenance import CallSite, ModulePath, Source
from whence.schema import InputKind, OutputKind, Phase


@dataclass(frozen=True)
class Part:
    """Which tensor it is of a tensor that is made of several (a DTensor, a quantised weight).

    `whole` is the path of that tensor, `type` its class, and `access` leads from it to this one:
    `_local_tensor`, or `a.scale` where its parts are made of others, too. `requires_grad` is what the whole
    does: its gradient is made of those of its parts. Of a DTensor `mesh` has the axes of its mesh, each with
    its name (or number) and how many devices it has, and `placements` how the tensor is spread over each;
    `groups` are the names of their process groups, and `place` is where on the axes this process was.
    """

    whole: str
    type: str
    access: str
    requires_grad: bool = False
    mesh: tuple[tuple[str, int], ...] = ()
    placements: tuple[str, ...] = ()
    groups: tuple[str, ...] = field(default=(), compare=False)
    place: tuple[int, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, whole: str, tensor: Any, access: str, *, requires_grad: bool = False) -> "Part":
        """The part of a tensor to which `access` leads."""
        kind, mesh = type(tensor).__name__, mesh_of(tensor)
        groups, place = (groups_of(tensor.device_mesh), place_on(tensor.device_mesh)) if mesh else ((), ())
        return cls(whole, kind, access, requires_grad, mesh, placements_of(tensor), groups, place)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        told = {name: getattr(self, name) for name in ("whole", "type", "access", "requires_grad")}
        return {**told, "mesh": dict(self.mesh), "placements": list(self.placements)}

    def __str__(self) -> str:
        axes = zip(self.placements, self.mesh, strict=False)
        spread = ", ".join(f"{placement} over {size}" for placement, (_, size) in axes)
        return f"{self.access} of the {self.type} {self.whole}{f', {spread}' if spread else ''}"


@dataclass(frozen=True)
class Input:
    """One placeholder (or, with state as attributes, one attribute) of a program.

    `path` is the fully qualified name for state, and for user inputs the access a person would write:
    `args[0]['mask']`, `kwargs['ids']`. `aliases` are the other names of a tied tensor. `of` is, for a
    tangent, the name of the output it is the gradient of, and for state of an optimizer the path of the
    parameter; its own path is `optimizer.state['layers.0.weight']['exp_avg']`. `value` is a fake tensor
    (shape, dtype, strides, device, `requires_grad`) or, for an input that is not a tensor, the constant it
    was captured with. A tensor that is made of others is several inputs, and `part` says which of them each
    is. `layout_read` says that the model looked at its strides.
    """

    name: str
    kind: InputKind
    path: str
    aliases: tuple[str, ...] = ()
    module: ModulePath | None = None
    module_type: str | None = None
    of: str | None = None
    value: Any = None
    persistent: bool = True
    part: Part | None = None
    layout_read: bool = False

    @property
    def attribute_paths(self) -> tuple[ModulePath, ...]:
        """Where the model holds a piece of state: its path, and its aliases."""
        return tuple(map(ModulePath.parse, (self.path, *self.aliases)))


@dataclass(frozen=True)
class Output:
    """One returned value of a program.

    `of` names the input that a gradient or a mutation belongs to. `node` is the name of the graph node that
    holds the value; it is None for a value that is not computed: a constant (in `value`), or the absent
    gradient of a parameter that nothing used. `part` says which tensor it is of one that is made of several.
    """

    name: str
    kind: OutputKind
    path: str
    of: str | None = None
    node: str | None = None
    value: Any = None
    part: Part | None = None


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor that is made of others.

    `name` is what it would be called as one input, and `path` where it is; `parts` are the inputs that hold
    its plain tensors, in order. `tensor` is the model's own, None for an argument. `gradient` is the
    structure of its gradient over those of the parts, where it has one.
    """

    name: str
    path: str
    parts: tuple[str, ...]
    tensor: Tensor | None = None
    gradient: TreeSpec | None = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Draw:
    """An operation that draws random numbers: what a program takes in besides its inputs.

    `node` is its name, `value` what it makes, `phase`, `call` and `source` say where it came from; `call` is
    None outside of any module. `generator` is whose state it advances: that of a device (`torch.cpu`), or of
    a module of Python's or NumPy's (`random`, `numpy.random`); `time` reads a clock.
    """

    node: str
    operation: str
    value: str
    phase: Phase
    call: CallSite | None
    source: Source | None
    generator: str

    @property
    def library(self) -> str:
        """Who draws: `torch`, `numpy`, or Python's own `random` or `time`."""
        return self.generator.partition(".")[0]

    def __str__(self) -> str:
        called = "" if self.call is None else f"  {str(self.call) or '(root)'}"
        return f"{self.node}: {self.value}  {self.operation}{called}  from {self.generator}"


@dataclass(frozen=True)
class Signature(OpensInNotebook):
    """A row of `inputs` per placeholder, of `outputs` per returned value, of `attributes` per `get_attr`.

    `wholes` are the tensors that are made of several inputs. `draws` are read off the graph, `graph_module`.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    attributes: tuple[Input, ...] = ()
    wholes: tuple[Whole, ...] = ()
    graph_module: fx.GraphModule | None = field(default=None, compare=False, repr=False)

    @property
    def draws(self) -> tuple[Draw, ...]:
        """The operations that draw random numbers, in graph order, those of branches and loops included."""
        nodes = () if self.graph_module is None else all_nodes(self.graph_module)
        return tuple(_draw(node) for node in nodes if is_drawn(node))

    @property
    def state(self) -> tuple[Input, ...]:
        """Parameters, buffers and constants, whichever way the graph reads them."""
        kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT)
        return tuple(row for row in (*self.attributes, *self.inputs) if row.kind in kinds)

    @property
    def requires_gradients(self) -> bool:
        """Whether one of the inputs requires a gradient: where none does, autograd has nothing to record."""
        rows = (*self.attributes, *self.inputs)
        wholes = (row.part.requires_grad for row in rows if row.part is not None)
        return any(wholes) or any(getattr(row.value, "requires_grad", False) for row in rows)

    def inputs_of(self, *kinds: InputKind) -> tuple[Input, ...]:
        """The placeholders of these kinds."""
        return tuple(row for row in self.inputs if row.kind in kinds)

    def outputs_of(self, *kinds: OutputKind) -> tuple[Output, ...]:
        """The returned values of these kinds."""
        return tuple(row for row in self.outputs if row.kind in kinds)

    def __repr__(self) -> str:
        return f"<{len(self.inputs):,} inputs, {len(self.outputs):,} outputs>"

    def __str__(self) -> str:
        rows = [*map(_input_line, (*self.attributes, *self.inputs)), *map(_output_line, self.outputs)]
        rows += [f"  in   random    {draw}" for draw in self.draws]
        return "\n".join(rows)


def _draw(node: fx.Node) -> Draw:
    origin, made = origin_of(node), node.meta.get("val")
    call = origin.calls[0] if origin.calls else None
    told = (node.name, op_name(node.target), describe(made), origin.phase, call, origin.source)
    return Draw(*told, generator=_generator(node))


def _generator(node: fx.Node) -> str:
    """The module of a function that draws outside of torch, else the generator of the device."""
    if node.target is DRAWN:
        return str(node.args[0]).rpartition(".")[0]
    made = next((leaf for leaf in tree_flatten(node.meta.get("val"))[0] if isinstance(leaf, Tensor)), None)
    return "torch" if made is None else f"torch.{made.device}"


def _input_line(row: Input) -> str:
    notes = [f"= {', '.join(row.aliases)}"] if row.aliases else []
    notes += [f"of {row.of}"] if row.of else []
    notes += [f"({row.part})"] if row.part else []
    return " ".join([f"  in   {row.kind.value:<9} {row.name}: {describe(row.value)}  {row.path}", *notes])


def _output_line(row: Output) -> str:
    held = row.node if row.node is not None else repr(row.value)
    notes = [f"of {row.of}"] if row.of else []
    notes += [f"({row.part})"] if row.part else []
    return " ".join([f"  out  {row.kind.value:<9} {row.name} <- {held}  {row.path}", *notes])


SHORT_DTYPES = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64"}


def describe(value: Any) -> str:
    """`f32[2, 8, 64]` for a tensor, `(f32[2], f32[2])` for several, the literal for anything else."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, SYMBOLIC):
        return spelled(value)
    if not _is_array(value):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{SHORT_DTYPES.get(dtype, dtype)}[{', '.join(map(spelled, value.shape))}]"


def in_words(value: Any) -> str:
    """The same of an argument, which may be anything: one of a class that nobody knows is named by that, for
    it may print what it holds."""
    is_known = type(value) in PLAIN_IN_WHOLE or isinstance(value, (Enum, type, *SYMBOLIC)) or _is_array(value)
    return describe(value) if is_known else f"a {type(value).__name__}"


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")
