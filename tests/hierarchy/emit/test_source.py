"""The Python functions that a tree runs."""

import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import whence
from tests.checks import captured
from tests.program.small import sine_loss, stack_program
from whence.hierarchy.emit.source import attribute, write
from whence.hierarchy.plan.plan import Plan
from whence.hierarchy.plan.planning import plan
from whence.provenance import ModulePath
from whence.schema import Phase


def text(planned: Plan, path: str, phase: Phase = Phase.FORWARD) -> str:
    number = next(number for number in planned.calls if str(planned.site(number)) == path)
    return write(planned, phase, number).text


def test_forward_function() -> None:
    """A forward takes the module, the calls it makes and its inputs, and returns its outputs."""
    assert_expected_inline(
        text(plan(stack_program()), "layers.0"),
        """\
def run(module, calls, v0):
    v1,  = calls[0](module, v0)
    v2,  = calls[1](module, v1)
    del v1
    v3 = aten_add_Tensor(v0, v2)
    del v0, v2
    return (v3, )
""",
    )


def test_forward_function_reads_its_own_state() -> None:
    """A function reads parameters from its own module."""
    assert_expected_inline(
        text(plan(stack_program()), "layers.0.attention"),
        """\
def run(module, calls, v0):
    v1 = module.weight
    if v1 is not None and (v1.dtype is not float32 or v1.device != device_cpu):
        refuse_moved(module, ('weight',), v1, float32, device_cpu)
    v2 = aten_linear_default(v0, v1)
    del v0, v1
    return (v2, )
""",
    )


def test_forward_function_of_a_joint_program() -> None:
    """Where there is a backward, what it needs is returned last."""
    assert_expected_inline(
        text(plan(stack_program(sine_loss)), "layers.1.mlp.1"),
        """\
def run(module, calls, v0):
    v1 = aten_relu_default(v0)
    del v0
    v2 = aten_detach_default(v1)
    return (v1, (v2, ), )
""",
    )


def test_backward_function() -> None:
    """A backward takes what was kept and the gradients of the outputs, and returns gradients."""
    assert_expected_inline(
        text(plan(stack_program(sine_loss)), "layers.1.mlp.1", Phase.BACKWARD),
        """\
def run(module, calls, kept, v0):
    v1,  = kept
    kept.clear()
    v2 = aten_detach_default(v1)
    del v1
    v3 = aten_threshold_backward_default(v0, v2, 0)
    del v2, v0
    return (v3, )
""",
    )


def test_equal_layers_have_equal_source() -> None:
    """Two layers that compute the same have the same text, so they are compiled once."""
    planned = plan(stack_program(sine_loss, depth=3))
    for phase in Phase.FORWARD, Phase.BACKWARD:
        assert text(planned, "layers.1.attention", phase) == text(planned, "layers.2.attention", phase)


def test_calls_are_named_by_their_position() -> None:
    """The calls that a function makes are listed in the order in which its code makes them."""
    planned = plan(stack_program())
    number = next(number for number in planned.calls if str(planned.site(number)) == "layers.0")
    called = write(planned, Phase.FORWARD, number).calls
    assert [str(planned.site(call)) for call in called] == ["layers.0.attention", "layers.0.mlp"]


def test_attribute_that_is_no_identifier() -> None:
    """A segment that Python could not write after a dot is read by `getattr`."""
    assert attribute("module", ModulePath(("layers", "0", "weight"))) == "module.layers._modules['0'].weight"


def test_values_are_deleted_after_their_last_use() -> None:
    """Every local value that is not returned is deleted once nothing needs it."""
    source = text(plan(captured("gpt2", "forward")), "transformer.h.0.mlp")
    assert "del " in source


class Special(nn.Module):
    """Uses constants that have no literal: infinity, NaN, a dtype, a device, an empty list."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.masked_fill(x > 0, float("-inf")).to(torch.float64)
        x = torch.nan_to_num(x, nan=float("nan"), neginf=-1e300)
        return x.sum(dim=[]) + torch.full((2,), float("inf"), dtype=torch.float64, device="cpu").clamp(
            max=1.5
        )


def test_constants_without_a_literal() -> None:
    """Infinities, NaN, dtypes and devices arrive in the function as the objects they are."""
    model, x = Special(), torch.randn(3)
    assert torch.equal(whence.capture(model, (x,)).unflatten()(x), model(x))
