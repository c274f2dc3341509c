"""monai, torchvision, timm and segmentation_models_pytorch: images and volumes."""

from typing import Any

import torch
from torch import nn, randn

from tests.libraries.rows import Rows, given, untrained

row = Rows()


def numbers(*shape: int) -> Any:
    return given(randn(shape))


def picture(size: int = 32) -> Any:
    return numbers(2, 3, size, size)


@row("monai.networks.nets", lambda: numbers(1, 1, 16, 16))
def monai_unet(nets: Any) -> nn.Module:
    return nets.UNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        channels=(4, 8),
        strides=(2,),
        num_res_units=1,
        dropout=0.1,
    )


@row("monai.networks.nets", lambda: numbers(1, 1, 16, 16, 16))
def unetr(nets: Any) -> nn.Module:
    return nets.UNETR(
        in_channels=1,
        out_channels=2,
        img_size=(16, 16, 16),
        feature_size=4,
        hidden_size=16,
        mlp_dim=16,
        num_heads=2,
    )


@row("monai.networks.nets", lambda: numbers(1, 1, 64, 64))
def swin_unetr(nets: Any) -> nn.Module:
    return nets.SwinUNETR(
        in_channels=1,
        out_channels=2,
        feature_size=12,
        spatial_dims=2,
        depths=(1, 1, 1, 1),
        num_heads=(1, 2, 3, 3),
    )


@row("monai.networks.nets", lambda: numbers(1, 1, 32, 32))
def basic_unet(nets: Any) -> nn.Module:
    return nets.BasicUNet(spatial_dims=2, features=(4, 4, 8, 8, 8, 4))


@row("monai.networks.nets", lambda: numbers(1, 1, 32, 32))
def attention_unet(nets: Any) -> nn.Module:
    return nets.AttentionUnet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,))


@row("monai.networks.nets", lambda: numbers(1, 1, 16, 16))
def segmenting_residual_net(nets: Any) -> nn.Module:
    return nets.SegResNet(spatial_dims=2, init_filters=8, blocks_down=(1, 1), blocks_up=(1,))


@row("monai.networks.nets", lambda: numbers(1, 1, 32, 32))
def dynamic_unet(nets: Any) -> nn.Module:
    return nets.DynUNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 4, 8],
        deep_supervision=True,
        deep_supr_num=1,
    )


@row("monai.networks.nets", lambda: numbers(1, 1, 16, 16))
def monai_vit(nets: Any) -> nn.Module:
    return nets.ViT(
        in_channels=1,
        img_size=(16, 16),
        patch_size=(8, 8),
        hidden_size=16,
        mlp_dim=16,
        num_layers=2,
        num_heads=2,
        classification=True,
        spatial_dims=2,
    )


@row(
    "monai.networks.nets",
    lambda: numbers(1, 1, 32, 32),
    forward_alone="in evaluation it writes to what its backward would need, and eager fails",
)
def monai_autoencoder(nets: Any) -> nn.Module:
    return nets.VarAutoEncoder(
        spatial_dims=2, in_shape=(1, 32, 32), out_channels=1, latent_size=4, channels=(4, 8), strides=(2, 2)
    )


@row("monai.losses", lambda: given(randn(2, 1, 8, 8), torch.ones(2, 1, 8, 8)), **untrained("a loss"))
def dice_loss(losses: Any) -> nn.Module:
    return losses.DiceCELoss(sigmoid=True)


@row("torchvision.models", picture)
def shuffle_net(models: Any) -> nn.Module:
    return models.ShuffleNetV2([2, 1, 1], [8, 8, 16, 32, 32], num_classes=5)


@row("torchvision.models", picture)
def dense_net(models: Any) -> nn.Module:
    """Its checkpoints run batch norms again in the backward, which count the batch once more."""
    return models.DenseNet(4, (2, 2), 8, num_classes=5, memory_efficient=True)


@row("torchvision.models", picture)
def torchvision_vit(models: Any) -> nn.Module:
    return models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=5, dropout=0.1)


@row("torchvision.models", picture)
def torchvision_swin(models: Any) -> nn.Module:
    return models.SwinTransformer([2, 2], 8, [1, 1], [2, 2], [2, 2], num_classes=5)


def timm_row(name: str, size: int = 32, **settings: Any) -> None:
    def build(timm: Any) -> nn.Module:
        return timm.create_model(name, num_classes=5, **settings)

    build.__name__ = name
    row("timm", lambda: picture(size))(build)


timm_row("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=2, num_heads=2)
timm_row("resnet10t", 64)
timm_row("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 8, 8), drop_path_rate=0.2)
timm_row(
    "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(1, 2)
)
timm_row("mobilenetv4_conv_small", 64)
timm_row("eva02_tiny_patch14_224", 28, img_size=28, embed_dim=16, depth=2, num_heads=2)


SMALL = "timm-mobilenetv3_small_minimal_100"


@row("segmentation_models_pytorch", picture)
def smp_unet(smp: Any) -> nn.Module:
    return smp.Unet(SMALL, encoder_weights=None, decoder_channels=(8, 8, 8, 8, 8))


@row("segmentation_models_pytorch", picture)
def smp_fpn(smp: Any) -> nn.Module:
    return smp.FPN(SMALL, encoder_weights=None, decoder_pyramid_channels=16, decoder_segmentation_channels=32)


@row("segmentation_models_pytorch", lambda: numbers(2, 3, 64, 64))
def smp_segformer(smp: Any) -> nn.Module:
    return smp.Segformer(SMALL, encoder_weights=None, decoder_segmentation_channels=8)
