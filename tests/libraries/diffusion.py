"""diffusers: autoencoders, U-Nets and transformers that denoise."""

from typing import Any

import torch
from torch import nn, randn

from tests.libraries.rows import Applied, Rows, given

row = Rows()
IMAGE = (1, 3, 8, 8)
LATENT = (1, 4, 8, 8)


def time(step: float = 3) -> torch.Tensor:
    return torch.tensor([step])


@row("diffusers", lambda: given(randn(IMAGE), 3))
def unet(diffusers: Any) -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )


@row("diffusers", lambda: given(randn(LATENT), time(), randn(1, 5, 16)))
def conditional_unet(diffusers: Any) -> nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    )


@row("diffusers", lambda: given(randn(1, 14, 64), 1))
def one_dimensional_unet(diffusers: Any) -> nn.Module:
    return diffusers.UNet1DModel(
        sample_size=64,
        in_channels=14,
        out_channels=14,
        extra_in_channels=0,
        block_out_channels=(32, 32),
        down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
        up_block_types=("UpResnetBlock1D",),
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock",
        act_fn="mish",
        use_timestep_embedding=True,
        time_embedding_type="positional",
        norm_num_groups=8,
        layers_per_block=1,
    )


@row("diffusers", lambda: given(randn(1, 4, 16, 16), 1, randn(1, 5, 16), randn(1, 3, 128, 128)))
def controlnet(diffusers: Any) -> nn.Module:
    return diffusers.ControlNetModel(
        block_out_channels=(32, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
        conditioning_embedding_out_channels=(16, 32, 32, 32),
    )


@row("diffusers", lambda: given(randn(IMAGE)))
def autoencoder(diffusers: Any) -> nn.Module:
    return diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)


@row("diffusers", lambda: given(randn(IMAGE), sample_posterior=True))
def sampled_autoencoder(diffusers: Any) -> nn.Module:
    return diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)


@row("diffusers", lambda: given(randn(IMAGE)))
def tiny_autoencoder(diffusers: Any) -> nn.Module:
    return diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )


@row("diffusers", lambda: given(randn(IMAGE)))
def quantizing_autoencoder(diffusers: Any) -> nn.Module:
    return diffusers.VQModel(block_out_channels=(32,), norm_num_groups=8, latent_channels=3)


@row("diffusers", lambda: given(randn(1, 3, 5, 8, 8)))
def video_autoencoder(diffusers: Any) -> nn.Module:
    return diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 2,
        up_block_types=("CogVideoXUpBlock3D",) * 2,
        block_out_channels=(8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=2,
    )


@row("diffusers", lambda: given(randn(LATENT), timestep=torch.tensor([1]), class_labels=torch.tensor([1])))
def dit(diffusers: Any) -> nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )


def flux_inputs() -> Any:
    return given(
        hidden_states=randn(1, 4, 4),
        encoder_hidden_states=randn(1, 3, 8),
        pooled_projections=randn(1, 8),
        timestep=time(1.0),
        img_ids=torch.zeros(4, 3),
        txt_ids=torch.zeros(3, 3),
    )


@row("diffusers", flux_inputs)
def flux(diffusers: Any) -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
    )


@row(
    "diffusers",
    lambda: given(
        hidden_states=randn(LATENT),
        encoder_hidden_states=randn(1, 3, 8),
        pooled_projections=randn(1, 8),
        timestep=torch.tensor([1]),
    ),
)
def stable_diffusion_3(diffusers: Any) -> nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        out_channels=4,
    )


@row("diffusers", lambda: given(randn(LATENT), randn(1, 3, 8), timestep=torch.tensor([1])))
def pixart(diffusers: Any) -> nn.Module:
    return diffusers.PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        cross_attention_dim=16,
        out_channels=8,
        caption_channels=8,
        use_additional_conditions=False,
    )


@row("diffusers", lambda: given(randn(1, 8), 1, randn(1, 8), randn(1, 5, 8)))
def prior(diffusers: Any) -> nn.Module:
    return diffusers.PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        embedding_dim=8,
        num_embeddings=5,
        additional_embeddings=4,
    )


class Noising:
    """The loss of a denoiser on what a scheduler has made noisy."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def __call__(self, denoiser: nn.Module, image: torch.Tensor, noise: torch.Tensor, step: Any) -> Any:
        noisy = self.scheduler.add_noise(image, noise, step)
        return (denoiser(noisy, step).sample - noise).square().mean()


@row("diffusers", lambda: given(randn(IMAGE), randn(IMAGE), torch.tensor([7])))
def noised_by_a_scheduler(diffusers: Any) -> nn.Module:
    return Applied(Noising(diffusers.DDPMScheduler()), unet(diffusers))
