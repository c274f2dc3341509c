"""What has to be said of single operators: what their schemas and fake kernels do not say, or say wrong.

One row for each operator that needs a word. A last bit that is wrong, a write that nobody announces, strides
that a fake kernel makes up: a row here, and its test.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from whence._torch.operators import cudnn, symbolic_kernels, views
from whence._torch.operators.fake_layouts import (
    LayoutRule,
    as_on_meta,
    as_pointwise,
    contiguous,
    contiguous_in_training,
    contiguous_on_cpu,
    follows,
    like_new,
)
from whence._torch.operators.symbolic_kernels import (
    SymbolRule,
    attention_on_cpu,
    convolution,
    gru_cell,
    like,
    resampling_backward,
    simple_cell,
    squeezed,
    write_in_place,
    writes_in_place,
)
from whence._torch.operators.views import ViewInverse

aten = torch.ops.aten


@dataclass(frozen=True)
class Operator:
    """What is said of one operator.

    `writes` are the positions of arguments that it writes to without saying so, and `training` that of the
    flag that says whether it trains: without it nothing is written. `twin` is its functional form, where
    naming rules do not lead to it.
    `view` is the inverse of an operator whose result looks into its first argument.
    `fake` is its fake kernel, where PyTorch has none; `layout` corrects what that gives, `on_symbols` is what
    it does where sizes are open, and `kernel` the one in Python that runs there: its C++ kernel takes numbers
    only, unless `takes_symbols`. `keeps_sizes`: its result has the sizes that its arguments have together;
    `selects_sizes`: every size of it is 1, or one of an argument.
    `entry` is the quickest function to reach it by, given a tensor (or a list of them) first: an argument
    parser made for one function takes a quarter less time than the one that reads any operator's schema.
    `reads_memory`: it looks at a tensor through strides of its own, whatever the tensor's are.
    `shares_memory`: it makes a tensor of the very memory of its arguments, and the schema says nothing of it.
    `gives_memory`: nobody has written what it gives. `is_for_tracing`: it says what is known of sizes, to who
    traces. `by_result`: whether a write in place has another derivative than its twin, or one with other last
    bits, because it is computed from what was written. `zeroes_gradient`: zeros are the gradient of what it
    writes to, and its twin gives none. `is_unseen`: autograd does not look at it, whatever its operator says.
    `asks_grad_mode`: its kernel gives other last bits where grad mode is on, whatever requires a gradient.
    `asks_layout`: what its backward computes goes by how its argument lay in memory.
    `gathers` are the positions of arguments that who calls it in eager mode makes contiguous first, and
    `gathers_gradients` of those that autograd does, in a backward.
    `resizes`: where it finds no room in a tensor that it writes, it gives that the size it needs.
    `workspace` is the result that its kernel keeps for the backward, of which the fake one has no size.
    """

    writes: tuple[int, ...] = ()
    training: int | None = None
    twin: OpOverload | None = None
    view: ViewInverse | None = None
    fake: Callable[..., Any] | None = None
    layout: LayoutRule | None = None
    on_symbols: SymbolRule | None = None
    kernel: Callable[..., Any] | None = None
    takes_symbols: bool = False
    keeps_sizes: bool = False
    selects_sizes: bool = False
    entry: Callable[..., Any] | None = None
    reads_memory: bool = False
    shares_memory: bool = False
    gives_memory: bool = False
    is_for_tracing: bool = False
    by_result: Callable[[fx.Node], bool] | None = None
    zeroes_gradient: bool = False
    resizes: bool = False
    is_unseen: bool = False
    asks_grad_mode: bool = False
    workspace: int | None = None
    asks_layout: bool = False
    gathers: tuple[int, ...] = ()
    gathers_gradients: tuple[int, ...] = ()


def _above_threshold(node: fx.Node) -> bool:
    _, threshold, value = node.args
    return bool(value > threshold)  # type: ignore[operator]


def _of_wider(node: fx.Node) -> bool:
    """Whether an operand is wider than what is written: in place its gradient is computed in the dtype that
    is written, and by the twin in its own."""
    values = (arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node))
    tensors = [value for value in values if isinstance(value, Tensor)]
    wider = [each for each in tensors[1:] if each.dim() and _is_wider(each.dtype, tensors[0].dtype)]
    is_handed_on = node.target in _HANDED_ON and node.kwargs.get("alpha", 1) == 1
    return any(not is_handed_on or each.shape != tensors[0].shape for each in wider)


def _is_wider(dtype: torch.dtype, than: torch.dtype) -> bool:
    is_float = dtype.is_floating_point and than.is_floating_point
    return is_float and torch.promote_types(dtype, than) != than


_HANDED_ON = frozenset({aten.add.Tensor, aten.sub.Tensor})
"""What hands a gradient on as it is."""


def _named(names: str, overload: str = "default") -> list[tuple[str, OpOverload]]:
    return [(name, getattr(getattr(aten, name), overload)) for name in names.split()]


def _always(_node: fx.Node) -> bool:
    return True


_RESAMPLED = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
)
_SAME_NAME = "addmm baddbmm bmm cat clone cos embedding exp mm native_layer_norm neg relu reshape"
_SAME_NAME += " rsqrt sigmoid sin tanh"
_SQUEEZED = (aten.squeeze.default, aten.squeeze.dims)
_SQUEEZED_IN_PLACE = (aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims)
_GIVE_MEMORY = (
    *(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default),
    *(aten.empty_strided.default, aten.new_empty_strided.default, aten.empty_permuted.default),
)
_MAKE_SPARSE = (
    aten._sparse_coo_tensor_with_dims_and_tensors.default,
    aten._sparse_compressed_tensor_unsafe.default,
    aten.sparse_compressed_tensor.comp_plain_value_size,
    aten.sparse_compressed_tensor.comp_plain_value,
)
_COMPARE_IN_PLACE = [
    operator
    for overload in ("Scalar", "Tensor")
    for _, operator in _named("eq_ ne_ gt_ ge_ lt_ le_", overload)
]
_LOGICAL_IN_PLACE = [operator for _, operator in _named("logical_and_ logical_or_ logical_xor_ logical_not_")]
_RANDOM_NUMBERS_LIKE = [getattr(aten.randint_like, overload) for overload in aten.randint_like.overloads()]
_SCATTERED = views.scattered(aten.as_strided_scatter.default)

ROWS: Mapping[OpOverload, Operator] = {
    # Normalisation and noise: they write statistics, or noise, and do so only in training.
    aten.native_batch_norm.default: Operator(
        writes=(3, 4), training=5, twin=aten._native_batch_norm_legit_functional.default, layout=follows(0)
    ),
    aten.cudnn_batch_norm.default: Operator(
        writes=(3, 4),
        training=5,
        twin=aten._batch_norm_with_update_functional.default,
        workspace=3,
        layout=follows(0),
        takes_symbols=True,
        gathers=(0,),
    ),
    aten.cudnn_batch_norm_backward.default: Operator(layout=follows(0), gathers=(0, 1)),
    aten.miopen_batch_norm.default: Operator(gathers=(0,)),
    aten.miopen_batch_norm_backward.default: Operator(gathers=(0, 1)),
    aten._batch_norm_with_update_functional.default: Operator(fake=cudnn.normalized, workspace=3),
    aten.mkldnn_rnn_layer.default: Operator(workspace=3, asks_grad_mode=True),
    aten._cudnn_rnn.default: Operator(workspace=3, layout=cudnn.recurrent_laid_out),
    aten._cudnn_rnn_backward.default: Operator(fake=cudnn.recurrent_backward),
    aten.miopen_rnn.default: Operator(workspace=3),
    aten._pin_memory.default: Operator(fake=symbolic_kernels.as_it_lies),
    aten.native_group_norm.default: Operator(layout=follows(0), gathers=(0,)),
    aten.native_group_norm_backward.default: Operator(gathers=(0, 1)),
    aten._weight_norm_interface_backward.default: Operator(gathers=(0,)),
    aten._cdist_backward.default: Operator(gathers=(0,)),
    aten._pdist_forward.default: Operator(gathers=(0,)),
    aten._pdist_backward.default: Operator(gathers=(1, 3)),
    aten._linalg_det.default: Operator(asks_layout=True),
    aten._linalg_slogdet.default: Operator(asks_layout=True),
    aten.roll.default: Operator(layout=follows(0)),
    **{
        getattr(aten, f"{name}_backward").default: Operator(layout=rule)
        for names, rule in (
            ("softplus hardtanh hardswish hardsigmoid logit elu native_dropout", as_pointwise),
            ("mse_loss smooth_l1_loss huber_loss native_layer_norm", contiguous),
            ("binary_cross_entropy", like_new(1)),
            ("native_batch_norm batch_norm", follows(1)),
        )
        for name in names.split()
    },
    aten._log_softmax_backward_data.default: Operator(layout=contiguous),
    aten.log_sigmoid_forward.default: Operator(layout=contiguous_on_cpu),
    aten.pow.Scalar: Operator(layout=contiguous_on_cpu),
    aten.normal.Tensor_Tensor: Operator(layout=contiguous_on_cpu),
    aten.copysign.Tensor: Operator(layout=as_pointwise),
    aten.div.Tensor_mode: Operator(layout=as_pointwise),
    aten.floor_divide.default: Operator(layout=as_pointwise),
    aten.channel_shuffle.default: Operator(layout=follows(0)),
    aten.native_channel_shuffle.default: Operator(layout=follows(0)),
    aten._native_batch_norm_legit.default: Operator(
        twin=aten._native_batch_norm_legit_functional.default, layout=follows(0)
    ),
    aten._batch_norm_with_update.default: Operator(
        twin=aten._batch_norm_with_update_functional.default, layout=follows(0)
    ),
    aten._fused_moving_avg_obs_fq_helper.default: Operator(
        twin=aten._fused_moving_avg_obs_fq_helper_functional.default, resizes=True
    ),
    aten._fused_moving_avg_obs_fq_helper_functional.default: Operator(fake=symbolic_kernels.observed),
    aten.where.self: Operator(fake=symbolic_kernels.chosen),
    aten.rrelu.default: Operator(layout=contiguous_in_training(3)),
    aten.rrelu_with_noise.default: Operator(
        training=4, twin=aten.rrelu_with_noise_functional.default, layout=contiguous_in_training(4)
    ),
    aten.rrelu_with_noise_.default: Operator(twin=aten.rrelu_with_noise_functional.default),
    **dict.fromkeys(
        (aten.batch_norm.default, aten.instance_norm.default), Operator(writes=(3, 4), training=5)
    ),
    aten._native_batch_norm_legit_functional.default: Operator(training=5),
    aten._native_batch_norm_legit_no_training.default: Operator(layout=follows(0)),
    aten._native_batch_norm_legit.no_stats: Operator(layout=follows(0)),
    **{
        operator: Operator(training=2)
        for _, operator in _named("feature_dropout alpha_dropout native_dropout")
    },
    aten.bernoulli_.float: Operator(twin=aten.bernoulli.p, zeroes_gradient=True),
    aten.normal_.default: Operator(twin=aten.normal_functional.default, zeroes_gradient=True),
    # What autograd makes of a write, or of tensors like one, and of their twins and operators not.
    **dict.fromkeys(_COMPARE_IN_PLACE, Operator(zeroes_gradient=True)),
    **dict.fromkeys(_LOGICAL_IN_PLACE, Operator(is_unseen=True)),
    **dict.fromkeys(_RANDOM_NUMBERS_LIKE, Operator(is_unseen=True)),
    aten.threshold_.default: Operator(by_result=_above_threshold),
    aten.elu_.default: Operator(by_result=_always),
    aten.celu_.default: Operator(by_result=_always),
    **dict.fromkeys(
        (aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.pow_.Tensor, aten.atan2_.default),
        Operator(by_result=_of_wider),
    ),
    # Views.
    aten.detach.default: Operator(view=views.same, entry=torch.detach),
    aten.alias.default: Operator(view=views.same),
    aten.lift_fresh.default: Operator(view=views.same),
    aten._conj.default: Operator(view=views.back(aten.conj_physical.default)),
    aten._neg_view.default: Operator(view=views.back(aten.neg.default)),
    aten.t.default: Operator(view=views.again, entry=torch.t),
    aten.transpose.int: Operator(view=views.again, entry=torch.transpose),
    aten.permute.default: Operator(view=views.permuted, entry=torch.permute),
    aten.slice.Tensor: Operator(view=views.scattered(aten.slice_scatter.default)),
    aten.select.int: Operator(view=views.scattered(aten.select_scatter.default), entry=torch.select),
    aten.diagonal.default: Operator(view=views.scattered(aten.diagonal_scatter.default)),
    aten.as_strided.default: Operator(view=_SCATTERED, reads_memory=True, gathers_gradients=(0,)),
    aten.as_strided_scatter.default: Operator(reads_memory=True),
    aten.as_strided_copy.default: Operator(reads_memory=True),
    aten.view_as_real.default: Operator(view=views.back(aten.view_as_complex.default)),
    aten.view_as_complex.default: Operator(
        view=views.back(aten.view_as_real.default), gathers_gradients=(0,)
    ),
    aten.view.dtype: Operator(view=views.retyped),
    aten.view.default: Operator(view=views.reshaped, layout=as_on_meta(aten.view.default), entry=Tensor.view),
    aten._unsafe_view.default: Operator(layout=as_on_meta(aten._unsafe_view.default)),
    aten.unsqueeze.default: Operator(view=views.reshaped, entry=torch.unsqueeze),
    aten._reshape_alias.default: Operator(view=views.reshaped),
    aten.squeeze.dim: Operator(view=views.reshaped, entry=torch.squeeze, on_symbols=squeezed),
    **dict.fromkeys(_SQUEEZED, Operator(view=views.reshaped, on_symbols=squeezed)),
    **dict.fromkeys(_SQUEEZED_IN_PLACE, Operator(on_symbols=squeezed)),
    aten.unbind.int: Operator(view=views.unbound),
    aten.split.Tensor: Operator(view=views.split),
    aten.split_with_sizes.default: Operator(view=views.split),
    aten.expand.default: Operator(entry=Tensor.expand),
    # Arithmetic. The fake kernels of these four are quick ones, written in Python, and not those in C++.
    **{
        operator: Operator(layout=as_on_meta(operator), entry=getattr(torch, name))
        for name, operator in _named("add div mul sub", "Tensor")
    },
    **{operator: Operator(entry=getattr(torch, name)) for name, operator in _named(_SAME_NAME)},
    aten.mean.dim: Operator(selects_sizes=True, entry=torch.mean),
    aten.sum.dim_IntList: Operator(selects_sizes=True, entry=torch.sum),
    aten.amax.default: Operator(selects_sizes=True),
    aten.amin.default: Operator(selects_sizes=True),
    aten.index.Tensor: Operator(selects_sizes=True),
    aten.cumsum.default: Operator(keeps_sizes=True),
    aten._softmax.default: Operator(keeps_sizes=True),
    aten._log_softmax.default: Operator(keeps_sizes=True),
    # Kernels that are chosen by sizes, and kernels that take no symbols.
    aten.convolution.default: Operator(on_symbols=convolution(0, 1, 6, 8)),
    aten.convolution_backward.default: Operator(on_symbols=convolution(1, 2, 7, 9)),
    aten._scaled_dot_product_flash_attention_for_cpu.default: Operator(on_symbols=attention_on_cpu),
    **{
        getattr(aten, f"{name}_backward").default: Operator(on_symbols=resampling_backward)
        for name in _RESAMPLED.split()
    },
    **{
        getattr(aten, name).vec: Operator(kernel=symbolic_kernels.resampled(operator))
        for name, operator in _named(_RESAMPLED)
    },
    **{operator: Operator(takes_symbols=True, layout=follows(0)) for _, operator in _named(_RESAMPLED)},
    aten.dropout.default: Operator(training=2, kernel=symbolic_kernels.dropout),
    aten.istft.default: Operator(kernel=symbolic_kernels.inverse_stft),
    aten.fill_diagonal_.default: Operator(kernel=symbolic_kernels.filled_diagonal),
    aten.multi_margin_loss.default: Operator(takes_symbols=True),
    aten.multilabel_margin_loss_forward.default: Operator(takes_symbols=True),
    aten.multi_margin_loss_backward.default: Operator(on_symbols=like(1)),
    aten.multilabel_margin_loss_backward.default: Operator(on_symbols=like(1)),
    aten.lstm.input: Operator(kernel=symbolic_kernels.lstm_in_layers),
    aten.gru.input: Operator(kernel=symbolic_kernels.stepwise(aten.gru.input, gru_cell)),
    **{
        operator: Operator(kernel=symbolic_kernels.stepwise(operator, partial(simple_cell, function)))
        for operator, function in ((aten.rnn_tanh.input, torch.tanh), (aten.rnn_relu.input, torch.relu))
    },
    # Memory and sizes.
    **dict.fromkeys(_GIVE_MEMORY, Operator(gives_memory=True)),
    **dict.fromkeys(_MAKE_SPARSE, Operator(shares_memory=True)),
    aten.sym_constrain_range.default: Operator(is_for_tracing=True),
    aten.sym_constrain_range_for_size.default: Operator(is_for_tracing=True),
}
_NOTHING = Operator()


def said_of(target: Any) -> Operator:
    """What is said of an operator; nothing of most, and of what is none."""
    return ROWS.get(target, _NOTHING)


def fake_kernel(target: Any) -> Callable[..., Any]:
    """What says what an operator gives, of tensors without numbers: PyTorch's, or that of the table."""
    return said_of(target).fake or target


def rule_on_symbols(target: OpOverload) -> SymbolRule | None:
    """What an operator gives on arguments with open sizes, where that is not for its fake kernel to say."""
    return said_of(target).on_symbols or (write_in_place if writes_in_place(target) else None)
