"""What whence relies on in PyTorch's symbols for sizes."""

import subprocess
import sys

import pytest
import sympy
import torch
from torch import fx
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import _config
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StrictMinMaxConstraint,
    free_symbols,
    free_unbacked_symbols,
)
from torch.utils._sympy.functions import ToFloat
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges

from whence._torch.sizes import environment as size_environment
from whence._torch.sizes.environment import SizeEnvironment, unknown_condition
from whence._torch.sizes.expressions import linear
from whence._torch.sizes.symbols import (
    Assumed,
    assumed_of,
    expression,
    is_symbolic,
    mode_for_sizes,
    names_in,
    number_of,
    sized_like,
    spelled,
    undecided_bookkeeping,
)


def environment() -> SizeEnvironment:
    """A new environment."""
    found = mode_for_sizes(vary=True).shape_env
    assert isinstance(found, SizeEnvironment)
    return found


@pytest.mark.canary("torch._guards.Source")
def test_pytorch_makes_a_symbol_of_a_size_between_bounds() -> None:
    """`ShapeEnv.create_symbol` takes `DimDynamic.DYNAMIC`, a source and bounds, and admits 0 and 1."""
    assert issubclass(SizeEnvironment, ShapeEnv)
    assert hasattr(Source, "name")
    limits = StrictMinMaxConstraint(vr=ValueRanges(1, 8), warn_only=False)
    env = environment()
    symbol = env.create_symbol(4, env_source("x"), DimDynamic.DYNAMIC, limits)
    assert (env.var_to_range[symbol].lower, env.var_to_range[symbol].upper) == (1, 8)
    assert ValueRanges(0, int_oo).upper == int_oo
    assert ToFloat(sympy.Symbol("n", integer=True)).args == (sympy.Symbol("n", integer=True),)


def env_source(name: str) -> Source:
    """A source as whence makes it."""
    source: Source = size_environment._Named(name)
    return source


def test_a_base_is_one_symbol_for_each_name() -> None:
    """The same name is the same size, and is spelled by its name."""
    env = environment()
    batch = env.base("batch", 4, 0, None)
    assert expression(batch) == expression(env.base("batch", 4, 0, None))
    assert spelled(2 * batch + 1) == "1 + 2*batch"
    assert spelled(batch // 2) == "batch // 2"
    assert names_in(batch * 3) == {"batch"}
    assert linear(expression(3 * batch - 1))[1:] == (3, -1)  # type: ignore[index]
    assert linear(expression(batch // 2)) is None


def test_a_decision_is_noted_with_its_place() -> None:
    """Python's questions about sizes become decisions; what they fix is a number afterwards."""
    env = environment()
    env.listen(where=lambda: "here")
    size = env.base("seq", 6, 0, None)
    assert size > 4
    assert bool(size == 6)
    assert [decision.place for decision in env.decisions] == ["here", "here"]
    assert not is_symbolic(size)
    assert number_of(size) == 6


@pytest.mark.canary("torch.fx.experimental._config.backed_size_oblivious")
def test_bookkeeping_decides_nothing() -> None:
    """`backed_size_oblivious` keeps fake tensors from asking whether a size is 1."""
    env = environment()
    mode = mode_for_sizes(vary=True)
    size = env.base("n", 3, 0, None)
    with undecided_bookkeeping(wanted=True):
        assert _config.backed_size_oblivious
        sized_like(mode, torch.zeros(3, 4), [size, 4]).is_contiguous()
    assert not _config.backed_size_oblivious
    assert not env.decisions


def test_a_fake_tensor_is_laid_out_as_the_example() -> None:
    """Strides follow from sizes in the order of the example's."""
    mode = mode_for_sizes(vary=True)
    assert isinstance(mode.shape_env, SizeEnvironment)
    size = mode.shape_env.base("n", 3, 0, None)
    fake = sized_like(mode, torch.zeros(4, 3).t(), [size, 4])
    assert isinstance(fake, FakeTensor)
    assert [spelled(stride) for stride in fake.stride()] == ["1", "n"]


@pytest.mark.canary("torch._C._set_conj", "torch._C._set_neg")
def test_a_fake_tensor_stands_for_a_conjugate_as_the_example() -> None:
    """Or for a negative; it is no view of another."""
    mode = mode_for_sizes(vary=True)
    assert isinstance(mode.shape_env, SizeEnvironment)
    size = mode.shape_env.base("n", 3, 0, None)
    plain = torch.zeros(3, 4, dtype=torch.complex64)
    for example in (plain, plain.conj(), torch._neg_view(plain), torch._neg_view(plain.conj())):
        fake = sized_like(mode, example, [size, 4])
        assert (fake.is_conj(), fake.is_neg()) == (example.is_conj(), example.is_neg())
        assert not fake._is_view()


@pytest.mark.canary(
    "torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC",
    "torch.fx.experimental.symbolic_shapes.StrictMinMaxConstraint",
    "torch.utils._sympy.reference.PythonReferenceAnalysis",
)
def test_sizes_are_computed_on_proxies() -> None:
    """`sympy_interp` with `PythonReferenceAnalysis` turns an expression into operations."""
    env = environment()
    size = env.base("n", 6, 0, None)
    tracer = fx.Tracer()
    tracer.root, tracer.graph = torch.nn.Module(), fx.Graph()
    proxy = fx.Proxy(tracer.graph.placeholder("n"), tracer)
    sympy_interp(PythonReferenceAnalysis, {expression(size): proxy}, expression(size * 2))
    assert [node.op for node in tracer.graph.nodes] == ["placeholder", "call_function"]
    assert free_symbols(size) == {expression(size)}


@pytest.mark.canary(
    "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
    "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols",
)
def test_a_size_that_only_a_run_knows_cannot_decide() -> None:
    """PyTorch raises `GuardOnDataDependentSymNode`, which says what could not be decided."""
    env = environment()
    size = env.create_unbacked_symint()
    assert len(free_unbacked_symbols(size)) == 1
    with pytest.raises(GuardOnDataDependentSymNode) as caught:
        bool(size > 2)
    assert unknown_condition(caught.value)[0].endswith("> 2")


@pytest.mark.canary("torch.utils._sympy.printers.PythonPrinter")
def test_the_printer_is_pythons() -> None:
    """`PythonPrinter` prints what Python evaluates."""
    assert PythonPrinter().doprint(expression(7)) == "7"


def test_a_statement_goes_through_check_with() -> None:
    """`torch._check` requires things by `torch._check_with`, whose frame tells it from other needs."""
    assert "_check_with" in torch._check.__code__.co_names


@pytest.mark.sweep
def test_importing_whence_leaves_sympy_out() -> None:
    """Sizes that vary bring sympy, which takes long to import; nothing else does."""
    code = "import sys, whence; sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_assumptions_of_a_tracer_are_read() -> None:
    """PyTorch's `ShapeEnv` lists the conditions that it met and ranges; what is settled is not told."""

    def decides(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] * x.shape[1] > 6 and x.shape[1] == 3 else x

    graph = make_fx(decides, tracing_mode="symbolic")(torch.ones(4, 3))
    values = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    name = spelled(values[0].shape[0])
    found = assumed_of(values)
    assert (name, 2, None) in found.limits
    assert found.conditions == ((f"3*{name} > 6", frozenset({name})),)
    assert not found.of_data
    assert assumed_of([torch.ones(2), 3]) == Assumed((), (), False)


@pytest.mark.parametrize("names", [("a", "z"), ("z", "a"), ("rows", "x_0"), ("x_0", "rows")])
def test_of_equal_sizes_the_one_that_yields_is_replaced(names: tuple[str, str]) -> None:
    """Whatever they are called, and in whichever order they are compared."""
    for yields in (0, 1):
        environment = SizeEnvironment()
        both = [environment.base(name, 5, 0, None, yields=at == yields) for at, name in enumerate(names)]
        assert both[0] == both[1]
        stays, goes = environment.bases[names[1 - yields]], environment.bases[names[yields]]
        assert environment.is_free(stays) and environment.replace(goes) == stays
