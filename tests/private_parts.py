"""Everything private of PyTorch that a source uses, found in its syntax tree.

That is names that are imported or reached (`torch._C.DispatchKey`), also in modules that are looked up when
they are loaded; attributes of objects (`tensor._version`), spelled as attributes or texts; and variables of
PyTorch's own frames. Of an attribute and of a variable only the last name is known, after a dot or a colon.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

PYTHONS = frozenset(
    {
        *("_getframe", "_current_frames", "_is_owned", "_replace", "_showwarnmsg", "_urandom"),
        *("_abc", "_collections_abc", "_functools", "_io", "_operator", "_py_abc", "_random", "_thread"),
        *("_weakrefset", "_fields", "_field_defaults"),
    }
)
"""Private names of Python's own library."""
OURS = frozenset(
    {
        "_whence_captured",
        "_whence_class_asked",
        "_whence_layout",
        "_whence_left_out",
        "_whence_missed",
        "_whence_writes",
        "_whence_outline",
        "_by_",
        "_inner",
        "_plan",
        "_require",
    }
)
"""Texts and attributes of our own, in another file than the one that defines them."""
TRANSFORMERS = frozenset({"_sliding_window_tensor"})
"""Attributes of the caches of transformers, which their own tests run."""
OPERATORS = ("_upsample_", "_local_scalar_dense", "_foreach_", "_fused_")
"""Names of operators in texts, and what some begin with; operators keep theirs."""
PIECES = frozenset({"_ns", "_saved_", "_backward", "_memo", "_memo_vc", "_memo_epoch", "_optimizer_"})
"""Beginnings and endings: of what autograd nodes save, of operators, of what fakes and optimizers hold."""
_LOCALS = "_LOCALS"
"""How constants are called that list variables of PyTorch's functions."""


@dataclass(frozen=True, order=True)
class Use:
    """A private thing and where it is used; `runs` where a test can see that it is: inside a function."""

    name: str
    first: int
    last: int
    runs: bool


def is_private(name: str) -> bool:
    """Whether a dotted name lies in torch's private parts; operators (torch.ops.aten._softmax) do not."""
    top, *inner = name.split(".")
    if top != "torch" or inner[:1] == ["ops"]:
        return False
    return inner[:2] == ["fx", "experimental"] or any(re.match("_[^_]", part) for part in inner)


def uses(source: str, ours: Collection[str] = ()) -> list[Use]:
    """All uses in a file; `ours` are the attributes of the classes that its own may inherit from."""
    return _uses_in(ast.parse(source), ours)


def _uses_in(tree: ast.Module, ours: Collection[str]) -> list[Use]:
    return sorted(set(_Finder(tree, ours).found()))


def uses_by_name(sources: Mapping[str, str]) -> dict[str, list[tuple[str, Use]]]:
    """The uses in all files, by name."""
    trees = {file: ast.parse(source) for file, source in sources.items()}
    ours = {name for tree in trees.values() for name in _defined(ast.walk(tree))}
    found: dict[str, list[tuple[str, Use]]] = {}
    for file in sources:
        for use in _uses_in(trees.pop(file), ours):
            found.setdefault(use.name, []).append((file, use))
    return found


class _Finder:
    def __init__(self, tree: ast.Module, ours: Collection[str]) -> None:
        nodes = list(ast.walk(tree))
        self.tree = tree
        self.ours = ours
        self.known = dict(_imports(nodes))
        self.texts = dict(_constants(nodes))
        self.known |= {name: found for name, value in _assigned(nodes) if (found := self.dotted(value))}
        self.own = set(_defined(nodes))
        self.reads_frames = any(map(_is_locals, nodes))

    def found(self) -> Iterator[Use]:
        for node, runs in _walked(self.tree, runs=False):
            for name in self.names(node):
                first = getattr(node, "lineno", 1)
                yield Use(name, first, getattr(node, "end_lineno", first), runs)

    def names(self, node: ast.AST) -> Iterator[str]:
        """What this piece of the tree uses."""
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from filter(is_private, (f"{module}.{alias.name}" for alias in names))
            case ast.Import(names=names):
                yield from filter(is_private, (alias.name for alias in names))
            case ast.Call(func=ast.Name(id="getattr")):
                yield from filter(is_private, [self.dotted(node)])
            case ast.Attribute(attr=attr):
                dotted = self.dotted(node)
                if dotted:
                    yield from filter(is_private, [_public_end_cut(dotted)])
                elif self._is_foreign(node):
                    yield f".{attr}"
            case ast.Name(id=name, ctx=ast.Load()):
                yield from filter(is_private, [_public_end_cut(self.known.get(name, ""))])
            case ast.Constant(value=str(text)) if re.fullmatch(r"_[a-z]\w*", text):
                if text not in PYTHONS | OURS | TRANSFORMERS | PIECES and not text.startswith(OPERATORS):
                    yield f".{text}"
            case ast.FunctionDef() | ast.AsyncFunctionDef() if self.reads_frames:
                yield from (f":{name}" for name in _frame_variables(node))
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.startswith(_LOCALS):
                pieces = (piece.value for piece in ast.walk(value) if isinstance(piece, ast.Constant))
                yield from (f":{piece!s}" for piece in pieces)

    def _is_foreign(self, node: ast.Attribute) -> bool:
        """Whether a private attribute is one of somebody else's, as far as this file says."""
        if not re.match("_[^_]", node.attr) or node.attr in PYTHONS | OURS:
            return False
        is_self = isinstance(node.value, ast.Name) and node.value.id == "self"
        return node.attr not in self.own and not (is_self and node.attr in self.ours)

    def dotted(self, node: ast.expr | None) -> str:
        """The absolute name of an expression that leads into torch, else the empty text."""
        match node:
            case ast.Name(id=name):
                return self.known.get(name, "")
            case ast.Attribute(value=value, attr=attr):
                owner = self.dotted(value)
                return owner and f"{owner}.{attr}"
            case ast.Call(func=ast.Name(id="getattr"), args=[of, ast.Constant(value=str(attr)), *_]):
                owner = self.dotted(of)
                return owner and f"{owner}.{attr}"
            case ast.Call(func=ast.Attribute(attr="get" | "import_module"), args=[name, *_]):
                return self._module(name)
            case ast.Subscript(value=ast.Attribute(attr="modules"), slice=name):
                return self._module(name)
            case ast.IfExp(body=body):
                return self.dotted(body)
        return ""

    def _module(self, node: ast.expr) -> str:
        text = self.texts.get(node.id) if isinstance(node, ast.Name) else getattr(node, "value", None)
        return text if isinstance(text, str) and text.startswith("torch.") else ""


def _public_end_cut(name: str) -> str:
    """`torch._C.DispatchKey` for `torch._C.DispatchKey.__members__`."""
    return name.partition(".__")[0]


def _walked(node: ast.AST, runs: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Every piece of a tree but documentation, and whether it is inside a function."""
    yield node, runs
    inside = runs or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    body = getattr(node, "body", None)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        is_body = child is body or (isinstance(body, list) and any(child is part for part in body))
        yield from _walked(child, inside if is_body else runs)


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Local name and what it stands for, of every absolute import."""
    for node in nodes:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    top = alias.name.partition(".")[0]
                    yield alias.asname or top, alias.name if alias.asname else top
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from ((alias.asname or alias.name, f"{module}.{alias.name}") for alias in names)


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Names that are given a value, in functions, too."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                yield name, value


def _constants(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for name, value in _assigned(nodes):
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield name, value.value


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names of functions, classes, fields and attributes that a file defines."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Store()):
                yield attr


def _frame_variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The variables of frames that a function reads by name, from `f_locals` or what was assigned from it."""
    held = {name for name, value in _assigned(ast.walk(function)) if _is_locals(value)}
    for node in ast.walk(function):
        match node:
            case ast.Subscript(value=of, slice=ast.Constant(value=str(name))):
                pass
            case ast.Call(func=ast.Attribute(value=of, attr="get"), args=[ast.Constant(value=str(name)), *_]):
                pass
            case _:
                continue
        if _is_locals(of) or (isinstance(of, ast.Name) and of.id in held):
            yield name


def _is_locals(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "f_locals"
