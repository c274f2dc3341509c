"""Golden texts: run with EXPECTTEST_ACCEPT=1 to write them anew."""

import torch
from expecttest import assert_expected_inline
from torch import nn

import whence
from tests.program.small import counted_program, sine_loss, stack_program


def lines(program: whence.Program) -> list[str]:
    return str(program).splitlines()


def test_forward_program_as_text() -> None:
    """A program prints its signature, then its operations under the calls that made them."""
    assert_expected_inline(
        str(stack_program(depth=1)),
        """\
program Stack
  in   parameter p_layers_0_attention_weight: f32[4, 4]  layers.0.attention.weight
  in   parameter p_layers_0_mlp_0_weight: f32[4, 4]  layers.0.mlp.0.weight
  in   parameter p_head_weight: f32[2, 4]  head.weight
  in   parameter p_head_bias: f32[2]  head.bias
  in   user      features: f32[3, 4]  args[0]
  out  user      output <- linear_2  output

forward  layers.0.attention
  linear: f32[3, 4] = aten.linear.default(features, p_layers_0_attention_weight)

forward  layers.0.mlp.0
  linear_1: f32[3, 4] = aten.linear.default(linear, p_layers_0_mlp_0_weight)

forward  layers.0.mlp.1
  relu: f32[3, 4] = aten.relu.default(linear_1)

forward  layers.0
  add: f32[3, 4] = aten.add.Tensor(features, relu)

forward  head
  linear_2: f32[3, 2] = aten.linear.default(add, p_head_weight, p_head_bias)""",
    )


def test_joint_program_as_text() -> None:
    """Forward and backward, a loss outside any module, a new buffer value, and a sum of two users."""
    assert_expected_inline(
        str(counted_program(sine_loss)),
        """\
program Counted
  in   parameter p_first_weight: f32[4, 4]  first.weight = second.weight
  in   buffer    b_steps: i64[]  steps
  in   user      features: f32[3, 4]  args[0]
  out  loss      loss <- sum_1  loss
  out  user      output <- mul  output
  out  mutation  new_b_steps <- add_1  steps of b_steps
  out  gradient  grad_p_first_weight <- add  first.weight of p_first_weight

forward  (root)
  add_1: i64[] = aten.add.Tensor(b_steps, 1)

forward  first
  t: f32[4, 4] = aten.t.default(p_first_weight)
  mm: f32[3, 4] = aten.mm.default(features, t)

forward  (root)
  relu: f32[3, 4] = aten.relu.default(mm)
  detach: f32[3, 4] = aten.detach.default(relu)

forward  second
  t_1: f32[4, 4] = aten.t.default(p_first_weight)
  mm_1: f32[3, 4] = aten.mm.default(relu, t_1)

forward  (root)
  mul: f32[3, 4] = aten.mul.Tensor(mm_1, add_1)

forward  outside any module
  sin: f32[3, 4] = aten.sin.default(mul)
  sum_1: f32[] = aten.sum.default(sin)

backward  outside any module
  ones_like: f32[] = aten.ones_like.default(sum_1, pin_memory=False, memory_format=torch.preserve_format)
  expand: f32[3, 4] = aten.expand.default(ones_like, [3, 4])
  cos: f32[3, 4] = aten.cos.default(mul)
  mul_1: f32[3, 4] = aten.mul.Tensor(expand, cos)

backward  (root)
  mul_2: f32[3, 4] = aten.mul.Tensor(mul_1, add_1)

backward  second
  t_2: f32[4, 3] = aten.t.default(mul_2)
  mm_2: f32[4, 4] = aten.mm.default(t_2, relu)
  t_3: f32[4, 4] = aten.t.default(mm_2)
  t_4: f32[4, 4] = aten.t.default(t_1)
  mm_3: f32[3, 4] = aten.mm.default(mul_2, t_4)
  t_5: f32[4, 4] = aten.t.default(t_3)

backward  (root)
  detach_1: f32[3, 4] = aten.detach.default(detach)
  threshold_backward: f32[3, 4] = aten.threshold_backward.default(mm_3, detach_1, 0)

backward  first
  t_6: f32[4, 3] = aten.t.default(threshold_backward)
  mm_4: f32[4, 4] = aten.mm.default(t_6, features)
  t_7: f32[4, 4] = aten.t.default(mm_4)
  t_8: f32[4, 4] = aten.t.default(t_7)

backward  second + first
  add: f32[4, 4] = aten.add.Tensor(t_5, t_8)""",
    )


def test_calls_as_text() -> None:
    """One call per line with its class, indented under its caller; two equal neighbours are both shown."""
    assert_expected_inline(
        str(stack_program().calls),
        """\
(root): Stack
  layers.0: Layer
    layers.0.attention: Linear
    layers.0.mlp: Sequential
      layers.0.mlp.0: Linear
      layers.0.mlp.1: ReLU
  layers.1: Layer
    layers.1.attention: Linear
    layers.1.mlp: Sequential
      layers.1.mlp.0: Linear
      layers.1.mlp.1: ReLU
  head: Linear""",
    )


def test_tangents_as_text() -> None:
    """With tangents the signature shows which output each one belongs to."""
    assert_expected_inline(
        str(whence.capture(nn.Linear(4, 2), (torch.randn(3, 4),), backward=True).signature),
        """\
  in   parameter p_weight: f32[2, 4]  weight
  in   parameter p_bias: f32[2]  bias
  in   user      input: f32[3, 4]  args[0]
  in   tangent   tangent_0: f32[3, 2]  output of output
  out  user      output <- addmm  output
  out  gradient  grad_p_weight <- t_3  weight of p_weight
  out  gradient  grad_p_bias <- view  bias of p_bias""",
    )


def test_attributes_as_text() -> None:
    """With state as attributes the signature is the same text, and the program shows where each is read."""
    inputs = stack_program(depth=1)
    attributes = inputs.with_state("attributes")
    assert str(attributes.signature) == str(inputs.signature)
    assert "  p_head_weight: f32[2, 4] = head.weight" in lines(attributes)


def test_text_is_the_same_for_the_same_model() -> None:
    """Two captures of one model print alike."""
    assert lines(stack_program(sine_loss)) == lines(stack_program(sine_loss))
