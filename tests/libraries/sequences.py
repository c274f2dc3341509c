"""Transformers, state spaces and quantizers of sequences: x-transformers, perceiver and others."""

from typing import Any

import torch
from torch import Tensor, nn, randn

import whence
from tests.libraries.rows import OWN_FUNCTION, Applied, Rows, decided, given, refused, untrained

row = Rows()
READS_A_FLAG = decided(
    "initted",
    "the codebook keeps in a buffer whether it has been initialised, and asks it in every run",
    decide=("forward",),
)
NAMES_ONCE = "einx parses an expression once in a process, and gives the parts random names"


def ids(length: int = 6) -> Any:
    return given(torch.randint(0, 20, (2, length)))


def numbers(*shape: int) -> Any:
    return given(randn(shape))


def decoder(x_transformers: Any, **settings: Any) -> nn.Module:
    layers = x_transformers.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **settings)
    return x_transformers.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers)


@row("x_transformers", ids)
def plain_decoder(x_transformers: Any) -> nn.Module:
    return decoder(x_transformers)


@row("x_transformers", ids)
def rotary_gated_decoder(x_transformers: Any) -> nn.Module:
    return decoder(x_transformers, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)


@row("x_transformers", ids)
def decoder_with_dropout(x_transformers: Any) -> nn.Module:
    return decoder(x_transformers, attn_dropout=0.2, ff_dropout=0.2)


@row("x_transformers", ids)
def flash_decoder(x_transformers: Any) -> nn.Module:
    return decoder(x_transformers, attn_flash=True, attn_kv_heads=1)


@row("x_transformers", ids)
def talking_heads_decoder(x_transformers: Any) -> nn.Module:
    return decoder(x_transformers, attn_pre_talking_heads=True, attn_qk_norm=True, attn_gate_values=True)


@row("x_transformers", ids, warm=NAMES_ONCE)
def t5_bias_decoder(x_transformers: Any) -> nn.Module:
    return decoder(x_transformers, rel_pos_bias=True, sandwich_norm=True, shift_tokens=1)


@row("x_transformers", ids)
def sparse_attention_decoder(x_transformers: Any) -> nn.Module:
    return decoder(x_transformers, attn_sparse_topk=2)


@row("x_transformers", ids)
def macaron_residual_attention_decoder(x_transformers: Any) -> nn.Module:
    return decoder(x_transformers, macaron=True, residual_attn=True, scale_residual=True)


@row("x_transformers", ids, warm="its first run makes a table of distances")
def alibi_encoder(x_transformers: Any) -> nn.Module:
    layers = x_transformers.Encoder(dim=16, depth=1, heads=2, attn_dim_head=8, alibi_pos_bias=True)
    return x_transformers.TransformerWrapper(num_tokens=20, max_seq_len=16, attn_layers=layers)


@row(
    "x_transformers",
    lambda: given(torch.randint(0, 20, (2, 6)), mask=torch.arange(6).expand(2, 6) < 4),
    warm=NAMES_ONCE,
)
def masked_encoder_with_memory(x_transformers: Any) -> nn.Module:
    layers = x_transformers.Encoder(dim=16, depth=1, heads=2, attn_dim_head=8, attn_num_mem_kv=2)
    return x_transformers.TransformerWrapper(
        num_tokens=20, max_seq_len=16, num_memory_tokens=2, attn_layers=layers
    )


@row("x_transformers", lambda: numbers(2, 6, 8))
def continuous_encoder(x_transformers: Any) -> nn.Module:
    layers = x_transformers.Encoder(dim=16, depth=1, heads=2)
    return x_transformers.ContinuousTransformerWrapper(
        dim_in=8, dim_out=4, max_seq_len=16, attn_layers=layers
    )


@row("x_transformers", lambda: numbers(1, 3, 8, 8))
def vit(x_transformers: Any) -> nn.Module:
    layers = x_transformers.Encoder(dim=16, depth=1, heads=2)
    return x_transformers.ViTransformerWrapper(image_size=8, patch_size=4, num_classes=3, attn_layers=layers)


@row("x_transformers", ids)
def autoregressive_loss(x_transformers: Any) -> nn.Module:
    return x_transformers.AutoregressiveWrapper(decoder(x_transformers))


@row("x_transformers", lambda: given(torch.randint(0, 20, (2, 6)), torch.randint(0, 20, (2, 5))))
def encoder_and_decoder(x_transformers: Any) -> nn.Module:
    return x_transformers.XTransformer(
        dim=16,
        enc_num_tokens=20,
        enc_depth=1,
        enc_heads=2,
        enc_max_seq_len=8,
        dec_num_tokens=20,
        dec_depth=1,
        dec_heads=2,
        dec_max_seq_len=8,
    )


@row("local_attention.transformer", lambda: ids(32))
def local_transformer(transformer: Any) -> nn.Module:
    return transformer.LocalTransformer(
        num_tokens=20, dim=16, depth=2, max_seq_len=32, local_attn_window_size=8, heads=2, dim_head=8
    )


@row(
    "local_attention",
    lambda: given(*(randn(1, 2, 16, 8) for _ in range(3))),
    **untrained("it has no parameters"),
)
def local_attention(library: Any) -> nn.Module:
    return library.LocalAttention(dim=8, window_size=4, causal=True, look_backward=1, autopad=True)


@row("perceiver_pytorch", lambda: numbers(1, 4, 4, 3))
def perceiver(library: Any) -> nn.Module:
    return library.Perceiver(
        input_channels=3,
        num_freq_bands=2,
        max_freq=4.0,
        depth=2,
        num_latents=4,
        latent_dim=8,
        num_classes=3,
        cross_dim_head=4,
        latent_dim_head=4,
        latent_heads=2,
        weight_tie_layers=True,
    )


@row("perceiver_pytorch", lambda: given(randn(1, 6, 8), queries=randn(3, 8)))
def perceiver_io(library: Any) -> nn.Module:
    return library.PerceiverIO(
        dim=8,
        queries_dim=8,
        depth=1,
        num_latents=4,
        latent_dim=8,
        cross_dim_head=4,
        latent_dim_head=4,
        latent_heads=2,
    )


def quantized(quantizer: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), quantizer)


@row("vector_quantize_pytorch", lambda: numbers(2, 6, 8), **READS_A_FLAG)
def moving_average_quantizer(library: Any) -> nn.Module:
    return quantized(library.VectorQuantize(dim=8, codebook_size=16))


@row("vector_quantize_pytorch", lambda: numbers(2, 6, 8), **READS_A_FLAG)
def kmeans_quantizer(library: Any) -> nn.Module:
    return quantized(library.VectorQuantize(dim=8, codebook_size=4, kmeans_init=True, kmeans_iters=2))


@row("vector_quantize_pytorch", lambda: numbers(2, 6, 8), **READS_A_FLAG)
def residual_quantizer(library: Any) -> nn.Module:
    return quantized(library.ResidualVQ(dim=8, codebook_size=16, num_quantizers=2))


@row("vector_quantize_pytorch", lambda: numbers(2, 6, 8), warm=NAMES_ONCE)
def simple_quantizer(library: Any) -> nn.Module:
    return quantized(library.SimVQ(dim=8, codebook_size=16))


@row(
    "vector_quantize_pytorch",
    lambda: numbers(2, 8, 6),
    **decided(
        "a branch",
        "in training it compares its values with what is decoded from their indices",
        "joint",
        "steps",
        decide=("joint",),
    ),
)
def latent_quantizer(library: Any) -> nn.Module:
    return library.LatentQuantize(levels=[3, 5], dim=8)


@row("vector_quantize_pytorch", lambda: numbers(2, 6, 2))
def finite_scalar_quantizer(library: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), library.FSQ(levels=[3, 5]))


@row("vector_quantize_pytorch", lambda: numbers(2, 6, 4))
def lookup_free_quantizer(library: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), library.LFQ(dim=4, codebook_size=16))


def rotated(rotary: Any, linear: nn.Module, x: Tensor) -> Tensor:
    return rotary.rotate_queries_or_keys(linear(x))


@row(
    "rotary_embedding_torch",
    lambda: numbers(1, 2, 6, 8),
    **refused(
        whence.LostState,
        "cached_freqs_seq_len",
        "its first run counts in Python how long a cache it made",
        *("forward", "joint"),
    ),
)
def rotary_that_caches(library: Any) -> nn.Module:
    return Applied(rotated, library.RotaryEmbedding(dim=4), nn.Linear(8, 8))


@row("rotary_embedding_torch", lambda: numbers(1, 2, 6, 8), warm="its first run fills the cache")
def rotary_that_has_cached(library: Any) -> nn.Module:
    return Applied(rotated, library.RotaryEmbedding(dim=4), nn.Linear(8, 8))


@row("rotary_embedding_torch", lambda: numbers(1, 2, 6, 8))
def rotary_without_cache(library: Any) -> nn.Module:
    return Applied(rotated, library.RotaryEmbedding(dim=4, cache_if_possible=False), nn.Linear(8, 8))


@row("einops.layers.torch", lambda: numbers(1, 3, 4, 4))
def rearranging_layers(layers: Any) -> nn.Module:
    return nn.Sequential(
        layers.Rearrange("b c (h a) w -> b (c a) h w", a=2),
        nn.Conv2d(6, 4, 1),
        layers.Reduce("b c h w -> b c", "mean"),
    )


@row("einops.layers.torch", lambda: numbers(2, 6, 8))
def einstein_mix(layers: Any) -> nn.Module:
    return layers.EinMix("b t (h c) -> b t (h d)", weight_shape="h c d", bias_shape="h d", h=2, c=4, d=3)


def packed(einops: Any, linear: nn.Module, image: Tensor, token: Tensor) -> Any:
    flat, shapes = einops.pack([image, token], "b * c")
    return einops.unpack(linear(flat), shapes, "b * c")


@row("einops", lambda: given(randn(2, 3, 3, 8), randn(2, 8)))
def packing(einops: Any) -> nn.Module:
    return Applied(PackedBy(einops), nn.Linear(8, 8))


class PackedBy:
    """`packed` with the library bound."""

    def __init__(self, einops: Any) -> None:
        self.einops = einops

    def __call__(self, linear: nn.Module, image: Tensor, token: Tensor) -> Any:
        return packed(self.einops, linear, image, token)


@row("einx", lambda: numbers(2, 6, 8), warm=NAMES_ONCE)
def einx_normalized(einx: Any) -> nn.Module:
    return Applied(MeanBy(einx), nn.Linear(8, 8))


class MeanBy:
    """A norm and a product over axes that are named."""

    def __init__(self, einx: Any) -> None:
        self.einx = einx

    def __call__(self, linear: nn.Module, x: Tensor) -> Any:
        hidden = self.einx.subtract("b t c, b c", linear(x), self.einx.mean("b [t] c", x))
        return self.einx.dot("b t [c], b s [c] -> b t s", hidden, x)


@row("hyper_connections", lambda: numbers(2, 6, 8))
def hyper_connected(library: Any) -> nn.Module:
    init, expand, reduce = library.get_init_and_expand_reduce_stream_functions(2)
    return nn.Sequential(expand, init(dim=8, branch=nn.Linear(8, 8)), reduce)


@row("mambapy.mamba", lambda: numbers(1, 8, 8), forward_alone=OWN_FUNCTION)
def mamba(library: Any) -> nn.Module:
    return library.Mamba(library.MambaConfig(d_model=8, n_layers=2, d_state=4))
