"""e3nn and kornia: equivariant layers, filters and warps."""

import math
from typing import Any

import torch
from torch import Tensor, nn, randn

import whence
from tests.libraries.rows import Applied, Rows, given, refused, untrained

row = Rows()
NOTHING = "it has no parameters"


def images() -> Any:
    return given(torch.rand(1, 3, 8, 8))


@row("e3nn.o3", lambda: given(randn(2, 10)))
def equivariant_linear(o3: Any) -> nn.Module:
    return o3.Linear("4x0e+2x1o", "3x0e+2x1o")


@row("e3nn.o3", lambda: given(randn(2, 5), randn(2, 4)))
def tensor_product(o3: Any) -> nn.Module:
    return o3.FullyConnectedTensorProduct("2x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o")


@row("e3nn.o3", lambda: given(randn(2, 5)))
def tensor_square(o3: Any) -> nn.Module:
    return o3.TensorSquare("2x0e+1x1o", "2x0e+1x1o")


@row("e3nn.o3", lambda: given(randn(2, 3)), **untrained(NOTHING))
def spherical_harmonics(o3: Any) -> nn.Module:
    return o3.SphericalHarmonics([0, 1, 2], normalize=True)


@row("e3nn.o3", lambda: given(randn(2, 5), randn(2, 5)), **untrained(NOTHING))
def full_tensor_product(o3: Any) -> nn.Module:
    return o3.FullTensorProduct("2x0e+1x1o", "2x0e+1x1o")


@row("e3nn.nn", lambda: given(randn(2, 6)), **untrained(NOTHING))
def gate(library: Any) -> nn.Module:
    return library.Gate("2x0e", [torch.relu], "1x0e", [torch.sigmoid], "1x1o")


@row("e3nn.nn", lambda: given(randn(4, 5)))
def equivariant_batch_norm(library: Any) -> nn.Module:
    return library.BatchNorm("2x0e+1x1o")


@row("e3nn.nn", lambda: given(randn(4, 3)))
def radial_network(library: Any) -> nn.Module:
    return library.FullyConnectedNet([3, 8, 2], torch.nn.functional.silu)


def convolved(
    product: nn.Module, radial: nn.Module, harmonics: nn.Module, x: Tensor, positions: Tensor, edges: Tensor
) -> Tensor:
    source, target = edges
    along = positions[target] - positions[source]
    messages = product(x[source], harmonics(along), radial(along.norm(dim=-1, keepdim=True)))
    return torch.zeros_like(x).index_add(0, target, messages)


@row("e3nn.o3 e3nn.nn", lambda: given(randn(4, 5), randn(4, 3), torch.tensor([[0, 1, 2], [1, 2, 3]])))
def equivariant_convolution(o3: Any, library: Any) -> nn.Module:
    product = o3.FullyConnectedTensorProduct("2x0e+1x1o", "1x0e+1x1o", "2x0e+1x1o", shared_weights=False)
    radial = library.FullyConnectedNet([1, 4, product.weight_numel], torch.tanh)
    harmonics = o3.SphericalHarmonics("1x0e+1x1o", normalize=True)
    return Applied(convolved, product, radial, harmonics)


@row("kornia.filters", images, **untrained(NOTHING))
def sobel(filters: Any) -> nn.Module:
    return filters.Sobel()


@row("kornia.filters", images, **untrained(NOTHING))
def gaussian_blur(filters: Any) -> nn.Module:
    return filters.GaussianBlur2d((3, 3), (1.0, 1.0))


@row("kornia.filters", images, **untrained(NOTHING))
def median_blur(filters: Any) -> nn.Module:
    return filters.MedianBlur((3, 3))


@row("kornia.filters", images, **untrained(NOTHING))
def canny(filters: Any) -> nn.Module:
    return filters.Canny(hysteresis=False)


@row("e3nn.nn", lambda: given(randn(4, 4)), **untrained(NOTHING))
def activation_on_the_sphere(library: Any) -> nn.Module:
    return library.S2Activation("1x0e+1x1o", torch.tanh, 6)


@row("kornia.filters", images, **untrained(NOTHING))
def canny_with_hysteresis(filters: Any) -> nn.Module:
    return filters.Canny()


@row("kornia.losses", lambda: given(torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16)), **untrained(NOTHING))
def similarity_loss(losses: Any) -> nn.Module:
    return losses.SSIMLoss(5)


@row("kornia.losses", lambda: given(randn(2, 3, 4, 4), torch.randint(0, 3, (2, 4, 4))), **untrained(NOTHING))
def focal_loss(losses: Any) -> nn.Module:
    return losses.FocalLoss(alpha=0.5, reduction="mean")


@row("kornia.color", images, **untrained(NOTHING))
def lab_colors(color: Any) -> nn.Module:
    return nn.Sequential(color.RgbToLab(), color.LabToRgb())


class Warp:
    """An affine warp by learned numbers."""

    def __init__(self, warp: Any) -> None:
        self.warp = warp

    def __call__(self, linear: nn.Module, x: Tensor, p: Tensor) -> Any:
        return self.warp(x, linear(p).view(1, 2, 3), (8, 8))


# Told that it is being compiled, kornia computes the normalizing transform from tensors, not from numbers.
@row("kornia.geometry", lambda: given(randn(1, 3, 8, 8), randn(1, 6)))
def learned_warp(library: Any) -> nn.Module:
    return Applied(Warp(library.warp_affine), nn.Linear(6, 6))


@row("kornia.geometry", lambda: given(torch.rand(1, 3, 8, 8)), **untrained(NOTHING))
def rotation(library: Any) -> nn.Module:
    return library.transform.Rotate(torch.tensor([math.degrees(0.3)]))


@row("kornia.augmentation", images, **untrained(NOTHING))
def random_flip(library: Any) -> nn.Module:
    return library.RandomHorizontalFlip(p=0.5)


@row("kornia.augmentation", images, **untrained(NOTHING))
def normalizing(library: Any) -> nn.Module:
    return library.Normalize(mean=torch.zeros(3), std=torch.ones(3))


@row(
    "kornia.augmentation",
    images,
    **untrained(NOTHING),
    **refused(
        whence.DataDependent,
        "whether item decides",
        "the order in which it changes colors is drawn at random",
        "forward",
    ),
)
def color_jitter(library: Any) -> nn.Module:
    return library.ColorJiggle(0.1, 0.1, 0.1, 0.1, p=1.0)


@row("kornia.feature", lambda: given(torch.rand(2, 1, 32, 32)))
def hard_net(library: Any) -> nn.Module:
    return library.HardNet(pretrained=False)
