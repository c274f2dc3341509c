"""Canaries: the memory layouts of kernels, real and fake."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import whence
from whence._torch.operators.table import said_of
from whence._torch.record.direct_recording import laid_out

aten = torch.ops.aten
INPUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 3, 4, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(5, 3, 4, 2).permute(3, 1, 2, 0),
    "three dimensions": lambda: torch.randn(2, 4, 3).transpose(1, 2),
}


def batch_norm_arguments(x: Tensor) -> tuple[object, ...]:
    return (x, torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3), True, 0.1, 1e-5)


@pytest.mark.canary("torch._prims_common.suggest_memory_format")
@pytest.mark.parametrize("layout", INPUTS)
def test_batch_norm_is_laid_out_as_by_the_kernel(layout: str) -> None:
    """After the correction the fake result of batch norm has the strides of the real one."""
    target, x = aten.native_batch_norm.default, INPUTS[layout]()
    real = target(*batch_norm_arguments(x))
    mode = FakeTensorMode()
    arguments = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in batch_norm_arguments(x)]
    with mode:
        corrected = laid_out(target, tuple(arguments), {}, target(*arguments))
    assert corrected[0].stride() == real[0].stride()


VIEWED = [
    ((1, 64, 32), (0, 2, 1), (1, 32, 8, 8)),
    ((2, 1, 6), (1, 0, 2), (1, 2, 2, 3)),
    ((1, 6, 4), (0, 2, 1), (1, 1, 4, 6)),
    ((1, 1, 6), (0, 2, 1), (1, 6, 1, 1)),
    ((3, 4, 1), (1, 0, 2), (4, 3, 1, 1)),
    ((2, 3, 4), (0, 1, 2), (2, 3, 2, 2)),
]


@pytest.mark.parametrize(("shape", "order", "wanted"), VIEWED)
def test_dimension_of_size_one_is_laid_out_as_by_the_kernel(
    shape: tuple[int, ...], order: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    """After the correction a fake view has the strides of the real one, also where the size is 1."""
    x = torch.randn(shape).permute(order)
    fake = (mode := FakeTensorMode()).from_tensor(x)
    with mode:
        result = aten.view.default(fake, list(wanted))
        corrected = laid_out(aten.view.default, (fake, list(wanted)), {}, result)
    assert corrected.stride() == x.view(wanted).stride()
    assert corrected.untyped_storage()._cdata == fake.untyped_storage()._cdata


@pytest.mark.parametrize("function", [aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor])
def test_number_leaves_the_layout(function: OpOverload) -> None:
    """Arithmetic with a number keeps the strides of a dimension of size 1, as the kernel does."""
    x = torch.randn(1, 64, 32).transpose(1, 2).view(1, 32, 8, 8)
    with FakeTensorMode():
        fake = torch.empty_strided(x.shape, x.stride())
        corrected = laid_out(function, (fake, 2.0), {}, function(fake, 2.0))
    assert corrected.stride() == function(x, 2.0).stride()


def of_channels(name: str, x: Tensor, *rest: object) -> tuple[object, ...]:
    """What normalisation over three channels takes."""
    scale, shift = torch.ones(3), torch.zeros(3)
    if name == "norm_backward":
        given = (x * 2, x, scale, shift, scale, shift, scale, True, 1e-5, [True] * 3)
        return (*given, torch.empty(0, dtype=torch.uint8)) if rest else given
    return (x, scale, shift, shift, scale, *rest)


CALLS: dict[OpOverload, Callable[[Tensor, Tensor], tuple[object, ...]]] = {
    aten.softplus_backward.default: lambda g, x: (g, x, 1, 20),
    aten.elu_backward.default: lambda g, x: (g, 1.0, 1.0, 1.0, False, x),
    aten.native_dropout_backward.default: lambda g, x: (g, x > 0, 2.0),
    aten.mse_loss_backward.default: lambda g, x: (g, x, x, 0),
    aten.smooth_l1_loss_backward.default: lambda g, x: (g, x, x, 0, 1.0),
    aten.huber_loss_backward.default: lambda g, x: (g, x, x, 0, 1.0),
    aten.binary_cross_entropy_backward.default: lambda g, x: (g, x.sigmoid(), x.sigmoid(), None, 0),
    aten._log_softmax_backward_data.default: lambda g, x: (g, x, -1, torch.float32),
    aten.log_sigmoid_forward.default: lambda _, x: (x,),
    aten.pow.Scalar: lambda _, x: (2.0, x),
    aten.rrelu.default: lambda _, x: (x, 0.1, 0.3, True),
    aten.rrelu_with_noise.default: lambda _, x: (x, torch.empty(x.shape), 0.1, 0.3, True),
    aten.copysign.Tensor: lambda _, x: (x, torch.tensor(1.0)),
    aten.floor_divide.default: lambda _, x: (x, torch.tensor(2.0)),
    aten.normal.Tensor_Tensor: lambda _, x: (x, x.abs()),
    aten.native_layer_norm_backward.default: lambda g, x: (
        *(g, x, [4], torch.zeros(2, 3, 1), torch.ones(2, 3, 1)),
        *(torch.ones(4), torch.zeros(4), [True] * 3),
    ),
    aten._native_batch_norm_legit.default: lambda _, x: of_channels("norm", x, True, 0.1, 1e-5),
    aten._native_batch_norm_legit_no_training.default: lambda _, x: of_channels("norm", x, 0.1, 1e-5),
    aten._native_batch_norm_legit.no_stats: lambda _, x: (x, None, None, True, 0.1, 1e-5),
    aten._batch_norm_with_update.default: lambda _, x: of_channels("norm", x, 0.1, 1e-5),
    aten.native_batch_norm_backward.default: lambda _, x: of_channels("norm_backward", x),
    aten.batch_norm_backward.default: lambda _, x: of_channels("norm_backward", x, "reserve"),
}
"""Calls whose fake result lies otherwise where a gradient, or a value, is permuted."""


@pytest.mark.parametrize("permuted", ["gradient", "value", "both"])
@pytest.mark.parametrize("target", CALLS, ids=str)
def test_permuted_argument_is_laid_out_as_by_the_kernel(target: OpOverload, permuted: str) -> None:
    """After the correction fake results have the strides of the real ones."""
    gradient, value = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    if permuted != "value":
        gradient = gradient.transpose(1, 2).contiguous().transpose(1, 2)
    if permuted != "gradient":
        value = value.transpose(1, 2).contiguous().transpose(1, 2)
    arguments = CALLS[target](gradient, value)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(each) if isinstance(each, Tensor) else each for each in arguments]
    with mode:
        corrected = laid_out(target, tuple(fakes), {}, target(*fakes))
    real = target(*arguments)
    pairs = zip(tree_leaves(real), tree_leaves(corrected), strict=True)
    assert all(one.stride() == other.stride() for one, other in pairs)


@pytest.mark.parametrize(
    "function",
    [F.softplus, F.hardtanh, F.hardswish, F.hardsigmoid, torch.logit],
    ids=lambda each: each.__name__,
)
def test_derivative_is_laid_out_as_by_the_kernel(function: Callable[[Tensor], Tensor]) -> None:
    """A gradient that comes permuted stays so: what reshapes it is a copy in eager, and was a view."""
    layer, x = torch.nn.Linear(8, 4), torch.rand(2, 16, 8)
    optimizer = torch.optim.SGD(layer.parameters())

    def step(x: Tensor) -> Tensor:
        loss = function(layer(x)).transpose(1, 2).contiguous().sin().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    program = whence.capture_step(step, (x,), model=layer, optimizer=optimizer)
    assert program.verify(layer, (x,)).ok


OPEN: dict[str, Callable[[Tensor], Tensor]] = {
    "softplus": F.softplus,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "logit": lambda x: torch.logit(x.sigmoid()),
    "elu": F.elu,
    "batch norm": lambda x: F.batch_norm(x.mT, None, None, training=True).mT,
    "batch norm in evaluation": lambda x: F.batch_norm(x.mT, torch.zeros(4), torch.ones(4)).mT,
    "log sigmoid": F.logsigmoid,
    "power of a number": lambda x: 2.0**x,
}


@pytest.mark.parametrize("order", ["given", "permuted"])
@pytest.mark.parametrize("name", OPEN)
def test_open_sizes_are_laid_out_as_by_the_kernel(name: str, order: str) -> None:
    """With a batch of any size, too, results and their gradients lie as eager's: sums are its bits."""
    first, last, x = torch.nn.Linear(8, 4), torch.nn.Linear(4, 4), torch.rand(2, 16, 8)
    model = torch.nn.ModuleList([first, last])
    optimizer = torch.optim.SGD(model.parameters())

    def step(x: Tensor) -> Tensor:
        hidden = first(x) if order == "given" else first(x.transpose(0, 1).contiguous()).transpose(0, 1)
        found = OPEN[name](hidden)
        loss = last(found).mT.contiguous().sin().sum() + found.mT.contiguous().cos().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    sizes = ({0: torch.export.Dim("batch", max=64)},)
    program = whence.capture_step(step, (x,), model=model, optimizer=optimizer, dynamic_shapes=sizes)
    assert program.verify(model, (torch.rand(5, 16, 8),)).ok


def test_normalisation_after_attention_over_one_picture() -> None:
    """Group norm asks whether an activation is channels last: with one picture a stride of size 1 decides."""

    def attend(x: Tensor) -> Tensor:
        rows = x.flatten(2).transpose(1, 2).contiguous().sin()
        return F.group_norm(rows.transpose(1, 2).reshape(x.shape), 2) + x

    program = whence.capture(attend, (torch.randn(1, 4, 8, 8, requires_grad=True),), backward=True)
    assert program.verify(attend, (torch.randn(1, 4, 8, 8, requires_grad=True),)).ok


def test_memory_format_is_contiguous_or_channels_last() -> None:
    """`suggest_memory_format` knows these two, and takes a permutation for contiguous."""
    formats = [suggest_memory_format(make()) for make in INPUTS.values()]
    assert formats == [
        torch.contiguous_format,
        torch.channels_last,
        torch.contiguous_format,
        torch.contiguous_format,
    ]


def test_other_operators_are_left_alone() -> None:
    """An operator without a rule keeps its fake result."""
    result = torch.ones(2)
    assert said_of(aten.mm.default).layout is None
    assert laid_out(aten.mm.default, (), {}, result) is result


class Pyramid(nn.Module):
    """A row of pixels becomes a picture of one, which is written in place and grows."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 3, padding=1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        pixel = self.activation(self.first(x.transpose(1, 2).reshape(2, 64, 1, 1)))
        return self.second(F.interpolate(pixel, size=(4, 4), mode="nearest"))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    "activation", [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.Hardtanh(inplace=True), nn.ReLU()]
)
def test_a_picture_of_one_pixel_that_is_written(activation: nn.Module, backward: bool) -> None:
    """It stays channels last, and so does the convolution behind it; a new tensor of a kernel does not."""
    x = torch.randn(2, 1, 64)
    model = Pyramid(activation)
    program = whence.capture(model, (x,), backward=backward)
    result = program.verify(model, (x,))
    assert result.ok, str(result)
    with torch.no_grad():
        assert torch.equal(program.unflatten()(x), model(x))


EITHER_WAY = {
    "one pixel": ((2, 8, 1, 1), (8, 1, 8, 8)),
    "one pixel, odd": ((2, 8, 1, 1), (8, 1, 1, 8)),
    "one picture of one pixel": ((1, 8, 1, 1), (1, 1, 1, 1)),
    "one channel": ((2, 1, 4, 4), (16, 1, 4, 1)),
    "one row": ((2, 8, 1, 4), (32, 1, 32, 8)),
    "channels last": ((2, 8, 4, 4), (128, 1, 32, 8)),
    "one voxel": ((2, 8, 1, 1, 1), (8, 1, 8, 8, 8)),
}
ON_PICTURES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "sum": lambda x: x + x,
    "sum with a number": lambda x: x + 1,
    "sum with a contiguous one": lambda x: x + x.new_ones(x.shape),
    "comparison": lambda x: (x > 0).float(),
    "mask": lambda x: x.masked_fill(x > 0, 0.0),
    "choice": lambda x: torch.where(x > 0, x, -x),
    "other dtype": lambda x: x.double(),
    "nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
    "nearest of the same size": lambda x: F.interpolate(x, size=x.shape[2:], mode="nearest"),
    "exactly nearest": lambda x: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
    "linear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear" if x.dim() == 4 else "trilinear"),
    "group norm": lambda x: F.group_norm(x, 1),
    "batch norm": lambda x: F.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1])),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "pool": lambda x: F.adaptive_avg_pool2d(x, 1) if x.dim() == 4 else F.adaptive_avg_pool3d(x, 1),
    "roll": lambda x: x.roll(1, 1),
    "shuffle": lambda x: F.channel_shuffle(x, min(2, x.shape[1])),
    "flip": lambda x: x.flip(2),
    "sort": lambda x: x.sort(1)[0],
    "softmax": lambda x: x.softmax(1),
    "triangle": lambda x: x.tril(),
    "joined": lambda x: torch.cat([x, x], 1),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
}


@pytest.mark.parametrize("name", ON_PICTURES)
def test_what_could_lie_either_way_lies_as_the_kernel_has_it(name: str) -> None:
    """Contiguous and channels last at once: whichever it is, later kernels go by it."""
    function = ON_PICTURES[name]
    for shape, strides in EITHER_WAY.values():
        numbers = torch.randn(2 * 8 * 16)

        def placed(x: Tensor, shape: tuple[int, ...] = shape, strides: tuple[int, ...] = strides) -> Tensor:
            return function(x.as_strided(shape, strides))

        program = whence.capture(placed, (numbers,))
        (row,) = program.signature.outputs
        assert row.node is not None
        assert program.node(row.node).meta["val"].stride() == placed(numbers).stride(), shape


class Levels(nn.Module):
    """A pyramid of features, the finer level added to the coarser one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.side = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)
        self.last = nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        coarse = self.stem(x.transpose(1, 2).reshape(2, 64, 1, 1))
        level = F.interpolate(coarse, size=(1, 1), mode="nearest")
        level += self.side(coarse)
        return self.last(level)


@pytest.mark.parametrize("backward", [False, True])
def test_level_of_one_pixel_that_is_added_to(backward: bool) -> None:
    """It stays channels last, as resampling has left it."""
    x, model = torch.randn(2, 1, 64), Levels()
    program = whence.capture(model, (x,), backward=backward)
    result = program.verify(model, (x,))
    assert result.ok, str(result)
