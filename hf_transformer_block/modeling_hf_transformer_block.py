# Copyright 2026 The hf_transformer_block authors. Licensed under the Apache License, Version 2.0.
"""
The Transformer block and the models made of it: encoder, decoder, encoder-decoder and their heads.

Letters in shapes: B batch, L target length, S source length, D hidden, H heads, K head size, V vocabulary.
"""

import copy
import inspect
import math
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    Seq2SeqLMOutput,
    Seq2SeqModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_hf_transformer_block import TransformerBlockConfig


if TYPE_CHECKING:  # never runs, but transformers searches the text and takes that file where this one goes
    from .pipeline_hf_transformer_block import (
        TransformerBlockTranslationPipeline as TransformerBlockTranslationPipeline,
    )


logger = logging.get_logger(__name__)

# After 5.19 transformers renamed `past_key_values` to `cache`, in arguments and in outputs. Here it is always
# `cache`; CACHE is the installed library's name, for its functions and outputs, and a forward so decorated
# takes either name.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def takes_either_cache_name(forward: Callable) -> Callable:
    """Lets a forward with an argument `cache` be called with `past_key_values` as well."""

    def rename(*args, past_key_values: Cache | None, **kwargs):
        return forward(*args, cache=past_key_values, **kwargs)

    if CACHE == "cache":
        rename = deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(forward)

    @wraps(forward)
    def forward_with_either(*args, **kwargs):
        return (rename if "past_key_values" in kwargs else forward)(*args, **kwargs)

    forward_with_either.__signature__ = inspect.signature(forward)  # `generate` asks for it with every token
    return forward_with_either


def update_cache(
    cache: Cache, key: torch.Tensor, value: torch.Tensor, layer_idx: int, kwargs: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stores keys and values (B, H, L, K), returns all of them; `kwargs` go to the attention function."""
    if CACHE != "cache" and not hasattr(cache, "get_seq_length"):
        kwargs["cache"] = cache  # before the renaming, attention functions filled a paged cache themselves
        return key, value
    return cache.update(key, value, layer_idx, kwargs=kwargs)


def read_cache(cache: Cache, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the stored keys and values (B, H, S, K); an offloaded layer comes back for the moment."""
    layer = cache.layers[layer_idx]
    if cache.offloading:
        layer.prefetch()
    key, value = layer.keys, layer.values
    if cache.offloading:
        layer.offload()
    return key, value


def sinusoidal_positions(position_ids: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """
    Returns sin(p / 10000^(2i/D)) for i < D/2, then the cosines of the same: (B, L) -> (B, L, D), float32.

    Source: "Attention Is All You Need", section 3.5; the halves stand side by side, as in its authors' code.
    """
    exponents = torch.arange(0, hidden_size, 2, device=position_ids.device, dtype=torch.float32) / hidden_size
    angles = position_ids[..., None].float() * 10000.0**-exponents  # (B, L) -> (B, L, D/2)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class TransformerBlockRotaryEmbedding(nn.Module):
    """
    Returns the cosines and sines that rotate queries and keys, (B, L, K) each, in `hidden_states`' dtype.

    Source: RoFormer, arXiv 2104.09864; scaling variants: `transformers.modeling_rope_utils`. The class and
    buffer names are those by which transformers refills the buffers after loading.
    """

    def __init__(self, config: TransformerBlockConfig):
        super().__init__()
        self.config = config
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        self.rope_type = config.rope_parameters["rope_type"]
        compute = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = compute(config)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: TransformerBlockConfig, **kwargs
    ) -> tuple[torch.Tensor, float]:
        """Returns theta^(-2i/R) for i < R/2, where R <= K features of a head are rotated, and factor 1."""
        rotated = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float) / rotated
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0

    @dynamic_rope_update
    def forward(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(hidden_states.device, torch.float32)
        angles = torch.cat([angles, angles], dim=-1)  # (B, L, K/2) -> (B, L, K)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is an ordinary one on a CPU; no compiler, tracer or forward-mode looks on."""
    is_seen = torch.compiler.is_compiling() or torch.jit.is_tracing() or forward_ad._current_level >= 0
    return tensor.device.type == "cpu" and type(tensor) is torch.Tensor and not is_seen


class Rotation(torch.autograd.Function):
    """
    Rotates feature i of R together with i + R/2: (B, H, L, R) by cosines and sines (B, 1, L, R).

    It makes few passes over the states and over their gradient, where torch's own gradients make more.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rotated = states * cos
        (first, second), (sin_first, sin_second) = states.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        rotated_first, rotated_second = rotated.chunk(2, dim=-1)
        rotated_first -= second * sin_first
        rotated_second += first * sin_second
        return rotated

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return Rotation.apply(grad, cos, -sin.roll(sin.shape[-1] // 2, -1)), None, None


def turn(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates all features (B, H, L, R) by angles (B, 1, L, R)."""
    if states.requires_grad and not cos.requires_grad and cos.dtype.itemsize >= 4 and is_plain(states):
        return Rotation.apply(states.to(cos.dtype), cos, sin)
    half = states.shape[-1] // 2  # slices: of chunks, ExecuTorch makes the traced batch the only one
    return states * cos + torch.cat([-states[..., half:], states[..., :half]], dim=-1) * sin


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first R features of every head (B, H, L, K), feature i together with i + R/2."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # (B, L, R) -> (B, 1, L, R)
    if (size := cos.shape[-1]) < states.shape[-1]:
        return torch.cat([turn(states[..., :size], cos, sin), states[..., size:]], dim=-1)
    return turn(states, cos, sin)


def inverse_root_mean_square(hidden_states: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns 1 / sqrt(mean(x^2) + eps), (..., D) -> (..., 1)."""
    norm = torch.linalg.vector_norm(hidden_states, dim=-1, keepdim=True)
    return torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / hidden_states.shape[-1]).rsqrt_()


class RootMeanSquareNorm(torch.autograd.Function):
    """
    x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467) of (..., D), by operations that are fast on a CPU.

    It keeps its inputs alone, where torch's keeps several more tensors of that size.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return hidden_states * inverse_root_mean_square(hidden_states, eps) * weight

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.eps = inputs[2]

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden_states, weight = ctx.saved_tensors
        with torch.autocast("cpu", enabled=False):
            scale = inverse_root_mean_square(hidden_states, ctx.eps)
            normed = hidden_states * scale
            by_weight = grad * normed
            along = (by_weight @ weight).unsqueeze(-1) / -weight.shape[0]
            weight_grad = by_weight.reshape(-1, weight.shape[0]).sum(0)
            return torch.addcmul(grad * weight, normed, along) * scale, weight_grad, None


class TransformerBlockRMSNorm(nn.RMSNorm):
    """nn.RMSNorm; on a CPU it trains faster in float32 and float64."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        is_exact = hidden_states.dtype == self.weight.dtype and hidden_states.dtype.itemsize >= 4
        if not (self.training and is_exact and is_plain(hidden_states)):
            return super().forward(hidden_states)
        # checkpointing first runs without gradients, and then must get the same numbers
        has_gradients = torch.is_grad_enabled() and (hidden_states.requires_grad or self.weight.requires_grad)
        norm = RootMeanSquareNorm.apply if has_gradients else RootMeanSquareNorm.forward
        return norm(hidden_states, self.weight, self.eps)


def build_norm(config: TransformerBlockConfig, size: int) -> nn.Module:
    """Returns the norm of the configuration over the last `size` features; torch computes both in float32."""
    norm = TransformerBlockRMSNorm if config.norm_type == "rms_norm" else nn.LayerNorm
    return norm(size, eps=config.norm_eps)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns softmax(Q K^T * scaling + mask) V as (B, L, H, K) and the probabilities as (B, H, L, S).

    `key` and `value` may have fewer heads than `query`; each serves a group of query heads. The mask is
    boolean (True: may see) or added to the scores. A row that may see nothing yields zeros, as SDPA does.
    """
    # (B, H / groups, S, K) -> (B, H, S, K)
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scaling  # (B, H, L, S)
    if attention_mask is None:
        probabilities = scores.softmax(dim=-1)
    else:
        lowest = torch.finfo(attention_mask.dtype if attention_mask.is_floating_point() else scores.dtype).min
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask > lowest
        if attention_mask.is_floating_point():
            scores = scores + attention_mask.clamp(min=lowest)
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        probabilities = scores.softmax(dim=-1).masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)
    probabilities = F.dropout(probabilities.to(query.dtype), p=dropout, training=module.training)
    return torch.matmul(probabilities, value).transpose(1, 2).contiguous(), probabilities


def has_hooks(module: nn.Module) -> bool:
    """Returns whether a tool listens to the calls of a module, or has taken them over."""
    hooks = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )
    return any(hooks) or "forward" in vars(module)


def is_bare(layer: nn.Module) -> bool:
    """Returns False for a layer that a tool has wrapped, replaced, hooked or sharded: it must be called."""
    is_linear = type(layer) is nn.Linear and type(layer.weight) is nn.Parameter
    return (
        is_linear and layer.weight.shape == (layer.out_features, layer.in_features) and not has_hooks(layer)
    )


def is_half_on_cpu(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor stands on a CPU that computes in half precision."""
    is_half = tensor.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cpu")
    return tensor.device.type == "cpu" and is_half


def join(layers: tuple[nn.Linear, ...]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Returns the weights and the biases of layers one below the other; None if the layers must be called."""
    if not all(is_bare(layer) and layer.weight.device.type == "cpu" for layer in layers):
        return None
    has_bias = {layer.bias is not None for layer in layers}
    if len(has_bias) > 1:
        return None
    bias = torch.cat([layer.bias for layer in layers]) if has_bias == {True} else None
    return torch.cat([layer.weight for layer in layers]), bias


def project(inputs: torch.Tensor, *layers: nn.Linear) -> tuple[torch.Tensor, ...]:
    """
    Returns what linear layers make of one input (..., I); a CPU trains them by one product with all weights.

    The weights stay those of the layers, whom tools and checkpoints know. Elsewhere their copy, kept for the
    backward pass, costs more than it saves: memory on a GPU, time for the few tokens of a step of generation.
    """
    is_worth_it = len(layers) > 1 and layers[0].training and is_plain(inputs)
    joined = join(layers) if is_worth_it else None
    if joined is None:
        return tuple(layer(inputs) for layer in layers)
    return F.linear(inputs, *joined).split_with_sizes([layer.out_features for layer in layers], dim=-1)


class TransformerBlockAttention(nn.Module):
    """
    Multi-head attention, "Attention Is All You Need" section 3.2: softmax(Q K^T / sqrt(K)) V in every head.

    Queries come from `hidden_states` (B, L, D); keys and values from `key_value_states` (B, S, D), or from
    `hidden_states` in self-attention. In the tutorial's style all heads share (K, K) projections and the
    scores are divided by sqrt(D).
    """

    def __init__(self, config: TransformerBlockConfig, layer_idx: int, is_causal: bool = False):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        # a configuration's field takes microseconds to read, and a step of generation few milliseconds
        self.head_dim, self.attention_dropout = config.head_dim, config.attention_dropout
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.shares_projection = config.block_style == "tutorial"
        self.scaling = (config.hidden_size if self.shares_projection else config.head_dim) ** -0.5

        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        if self.shares_projection:
            inputs, outputs, bias = config.head_dim, (config.head_dim,) * 3, False
        else:
            inputs, outputs, bias = (
                config.hidden_size,
                (query_size, key_size, key_size),
                config.attention_bias,
            )
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(inputs, size, bias=bias) for size in outputs)
        self.o_proj = nn.Linear(
            query_size, config.hidden_size, bias=config.attention_bias or self.shares_projection
        )
        self.q_norm = build_norm(config, config.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = build_norm(config, config.head_dim) if config.qk_norm else nn.Identity()

    def heads(self, states: torch.Tensor, *projections: nn.Linear) -> list[torch.Tensor]:
        """Projects and splits into heads: (B, L, D) -> (B, L, H, K) by each of the projections."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        states = states.view(shape) if self.shares_projection else states
        return [projected.view(shape) for projected in project(states, *projections)]

    def project_states(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        cache: Cache | None,
        kwargs: dict,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries (B, H, L, K), and keys and values (B, H, S, K) with those of the cache."""
        is_cross_attention = key_value_states is not None
        is_cached = False
        if isinstance(cache, EncoderDecoderCache):
            is_cached = is_cross_attention and cache.is_updated.get(self.layer_idx, False)
            if is_cross_attention:
                cache.is_updated[self.layer_idx] = True
            cache = cache.cross_attention_cache if is_cross_attention else cache.self_attention_cache
        if not is_cross_attention:
            query, key, value = self.heads(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        else:
            (query,) = self.heads(hidden_states, self.q_proj)
            if not is_cached:  # the source does not change while the target grows
                key, value = self.heads(key_value_states, self.k_proj, self.v_proj)
        query = self.q_norm(query).transpose(1, 2)  # (B, L, H, K) -> (B, H, L, K)
        if is_cached:
            key, value = read_cache(cache, self.layer_idx)
        else:
            key, value = self.k_norm(key).transpose(1, 2), value.transpose(1, 2)
        if position_embeddings is not None:
            query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if cache is not None and not is_cached:
            key, value = update_cache(cache, key, value, self.layer_idx, kwargs)
        return query, key, value

    @takes_either_cache_name
    def forward(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        output_attentions: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output (B, L, D), and the probabilities (B, H, L, S) if the backend has them."""
        query, key, value = self.project_states(
            hidden_states, key_value_states, position_embeddings, cache, kwargs
        )
        backend = "eager" if output_attentions else self.config._attn_implementation
        # serving engines find the layers that attend by this look-up and its call, in the text of a forward
        interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        dtype, context = value.dtype, nullcontext()
        if self.training and backend == "sdpa" and is_half_on_cpu(value):
            # backward, torch's kernel takes 15 times as long in bfloat16 for 16 tokens, thrice for 128
            query, key, value = query.float(), key.float(), value.float()
            if attention_mask is not None and attention_mask.is_floating_point():
                attention_mask = attention_mask.float()
            context = torch.autocast("cpu", enabled=False)
        with context:
            attention, probabilities = interface(
                self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
        # (B, L, H, K) -> (B, L, H * K)
        attention = attention.to(dtype).reshape(*hidden_states.shape[:-1], -1)
        return self.o_proj(attention), probabilities


SILU = (nn.SiLU, type(ACT2FN["silu"]))


class SiLUGating(torch.autograd.Function):
    """silu(gate) * up (arXiv 2002.05202), both (..., I); it keeps these alone, and makes silu(gate) again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)
        sigmoid = gate.sigmoid()  # the operation above has no gradient of its own
        return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


class TransformerBlockMLP(nn.Module):
    """Position-wise feed-forward network: down(act(up(x))), or down(act(gate(x)) * up(x)) when gated."""

    def __init__(self, config: TransformerBlockConfig):
        super().__init__()
        if config.gated_mlp:
            self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.is_gated = config.gated_mlp

    def let_through(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Returns act(gate) * up."""
        if self.training and isinstance(self.act_fn, SILU) and not has_hooks(self.act_fn) and is_plain(gate):
            return SiLUGating.apply(gate, up)
        return self.act_fn(gate) * up

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.is_gated:
            gate, up = project(hidden_states, self.gate_proj, self.up_proj)
            return self.down_proj(self.let_through(gate, up))
        return self.down_proj(self.act_fn(self.up_proj(hidden_states)))


class TransformerBlockDropout(nn.Dropout):
    """
    nn.Dropout; on a CPU four times as fast, for it takes a byte per element: `p` rounds to 1/256.

    torch draws 53 random bits per element one after the other, an eighth of a small model's training step.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return hidden_states
        dropped = round(256 * self.p)
        if dropped in (0, 256) or not is_plain(hidden_states):
            return super().forward(hidden_states)
        words = torch.randint(-(2**63), 2**63 - 1, (hidden_states.numel() // 8 + 1,), device="cpu")
        is_kept = words.view(torch.uint8)[: hidden_states.numel()].view(hidden_states.shape) >= dropped
        return hidden_states * is_kept.to(hidden_states.dtype).mul_(256 / (256 - dropped))


class TransformerBlock(GradientCheckpointingLayer):
    """
    Self-attention, cross-attention (decoder of an encoder-decoder) and MLP, each with residual and norm.

    "post_norm": x = norm(x + dropout(f(x))); "pre_norm": x = x + dropout(f(norm(x)));
    "tutorial": x = dropout(norm(f(x) + x)).
    """

    def __init__(self, config: TransformerBlockConfig, layer_idx: int, is_decoder: bool):
        super().__init__()
        self.block_style = config.block_style
        self.has_cross_attention = is_decoder and config.is_encoder_decoder
        self.self_attn = TransformerBlockAttention(config, layer_idx, is_causal=is_decoder)
        self.self_attn_norm = build_norm(config, config.hidden_size)
        if self.has_cross_attention:
            self.cross_attn = TransformerBlockAttention(config, layer_idx)
            self.cross_attn_norm = build_norm(config, config.hidden_size)
        self.mlp = TransformerBlockMLP(config)
        self.mlp_norm = build_norm(config, config.hidden_size)
        self.dropout = TransformerBlockDropout(config.dropout)
        if config.block_style == "pre_norm":
            depth = config.num_decoder_layers if self.has_cross_attention else config.num_hidden_layers
            attentions = [self.self_attn, self.cross_attn] if self.has_cross_attention else [self.self_attn]
            for projection in (*(attention.o_proj for attention in attentions), self.mlp.down_proj):
                projection.initial_std = config.initializer_range * (2 * depth) ** -0.5
        else:  # Xavier's, as the paper's authors: behind a norm, narrower projections learn far slower
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    module.initial_std = (2 / (module.in_features + module.out_features)) ** 0.5

    def read(self, norm: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns what a sub-layer reads from the residual stream."""
        return norm(hidden_states) if self.block_style == "pre_norm" else hidden_states

    def write(self, norm: nn.Module, hidden_states: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        """Returns the residual stream after a sub-layer's update."""
        if self.block_style == "pre_norm":
            return hidden_states + self.dropout(update)
        if self.block_style == "post_norm":
            return norm(hidden_states + self.dropout(update))
        return self.dropout(norm(hidden_states + update))

    @takes_either_cache_name
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        update, _ = self.self_attn(
            self.read(self.self_attn_norm, hidden_states),
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            position_ids=position_ids,
            cache=cache,
            **kwargs,
        )
        hidden_states = self.write(self.self_attn_norm, hidden_states, update)
        if self.has_cross_attention:
            update, _ = self.cross_attn(
                self.read(self.cross_attn_norm, hidden_states),
                key_value_states=encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                cache=cache,
                **kwargs,
            )
            hidden_states = self.write(self.cross_attn_norm, hidden_states, update)
        update = self.mlp(self.read(self.mlp_norm, hidden_states))
        return self.write(self.mlp_norm, hidden_states, update)


class TransformerBlockPreTrainedModel(PreTrainedModel):
    """What every model of the family shares: its configuration, its initial weights and what it supports."""

    config: TransformerBlockConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    is_complete = False
    _no_split_modules = ["TransformerBlock"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": TransformerBlock,
        "attentions": OutputRecorder(TransformerBlockAttention, index=1, layer_name="self_attn"),
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draws weights from N(0, initializer_range^2), or their own `initial_std`; biases 0, norms 1."""
        super()._init_weights(module)
        # the library visits only modules with parameters of their own, so a block cannot do it for its parts
        if hasattr(module, "initial_std"):
            init.normal_(module.weight, std=module.initial_std)

    def __init_subclass__(cls, **kwargs):
        """Lets a class whose `__init__` forgets `post_init` fail when it is built, not when it is loaded."""
        super().__init_subclass__(**kwargs)
        if "__init__" not in vars(cls):
            return
        build = cls.__init__

        @wraps(build)
        def build_and_check(self, *args, **kwargs):
            build(self, *args, **kwargs)
            if type(self) is cls and not self.is_complete:
                raise TypeError(f"{cls.__name__}.__init__ must end with self.post_init()")

        cls.__init__ = build_and_check

    def post_init(self) -> None:
        super().post_init()
        self.is_complete = True

    def init_parallel_plans(self) -> None:
        """Keeps the rules that name a part of this model: the configuration's name those of any stack."""
        super().init_parallel_plans()
        names = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in self.named_modules()}
        for plan in (self._tp_plan, self._fsdp_plan):  # an encoder has no cross-attention, a pair no layers
            for name in plan.keys() - names:
                del plan[name]

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *args, **kwargs
    ) -> None:
        """
        Saves as the library does, under our class's name where torch's FSDP2 has put its own above it.

        Our files go along with classes that have none (a notebook's), for config.json names them. Settings of
        generation which the library refuses are refused after the weights are written, not before.
        """
        own = next(base for base in type(self).__mro__ if not base.__module__.startswith("torch."))
        for name in ("__module__", "__name__", "__qualname__"):
            setattr(type(self), name, getattr(own, name))
        if is_main_process and not os.path.isfile(save_directory):
            os.makedirs(save_directory, exist_ok=True)
            for name in (__file__, "pipeline_hf_transformer_block.py"):
                shutil.copy(os.path.join(os.path.dirname(__file__), name), save_directory)
        try:
            super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        except ValueError as error:
            settings = getattr(self, "generation_config", None)
            if settings is None:
                raise
            self.generation_config = type(settings).from_model_config(self.config)
            kwargs.pop("push_to_hub", None)
            try:
                super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
            finally:
                self.generation_config = settings
            raise ValueError(
                f"the weights are saved in {save_directory}, but with default settings of generation: the "
                f"model's own are refused: {error}"
            ) from error

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resizes every table of the vocabulary; the library's method leaves an untied decoder's as it is."""
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        decoder = getattr(self.base_model, "decoder", None)
        if decoder is not None and not self.config.tie_word_embeddings:
            decoder.resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        return embeddings


def reads_values(tensor: torch.Tensor) -> bool:
    """Returns whether a check may look at the tensor's values."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not torch.jit.is_tracing()


def same_document(position_ids: torch.Tensor | None) -> Callable | None:
    """
    Returns whether two tokens of a row are of one document, as a function (row, head, query, key) -> bool.

    Documents are packed into a row by positions that do not go on by 1, the rule of transformers for causal
    masks. None where every row is one document.
    """
    if position_ids is None:
        return None
    starts = torch.diff(position_ids, prepend=position_ids[:, :1] - 1) != 1
    if not torch.compiler.is_compiling() and not torch.jit.is_tracing() and not starts.any():
        return None
    document = starts.cumsum(-1)
    return lambda row, head, query, key: document[row, query] == document[row, key]


def check_tokens(
    config: TransformerBlockConfig,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> None:
    """
    Raises ValueError, with the numbers, for wrong shapes and for ids outside the vocabulary.

    Values are read on the CPU only, where it costs microseconds; on an accelerator it would stall the queue.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(
            "give either input_ids or inputs_embeds (decoder_... for the target), not both and not neither"
        )
    tokens = inputs_embeds if input_ids is None else input_ids
    if tokens.ndim != (3 if input_ids is None else 2):
        raise ValueError(
            f"input_ids are (batch, length) and inputs_embeds (batch, length, hidden_size), not "
            f"{tuple(tokens.shape)}"
        )
    batch, length = tokens.shape[:2]
    if length == 0:
        raise ValueError(f"the input is empty: it has shape {tuple(tokens.shape)}")
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, length), (1, length)):
        raise ValueError(f"position_ids have shape {tuple(position_ids.shape)}, not ({batch}, {length})")
    if input_ids is not None and input_ids.numel() and reads_values(input_ids):
        lowest, highest = (int(bound) for bound in torch.aminmax(input_ids))
        if lowest < 0 or highest >= config.vocab_size:
            raise ValueError(
                f"token id {lowest if lowest < 0 else highest} is outside the vocabulary (0 to "
                f"{config.vocab_size - 1}); use the tokenizer saved with the model, or "
                f"model.resize_token_embeddings"
            )


def check_labels(labels: torch.Tensor, shape: tuple[int, ...], num_classes: int) -> None:
    """Raises ValueError, with the numbers, for a wrong shape or a label that is neither a class nor -100."""
    if tuple(labels.shape) != tuple(shape):
        raise ValueError(f"labels have shape {tuple(labels.shape)}, not {tuple(shape)}")
    if not reads_values(labels):
        return
    wrong = labels[((labels < 0) & (labels != -100)) | (labels >= num_classes)]
    if wrong.numel():
        raise ValueError(
            f"label {int(wrong[0])} is outside the {num_classes} classes or tokens (0 to {num_classes - 1}); "
            f"-100 is for what does not count"
        )


def check_mask(
    config: TransformerBlockConfig,
    attention_mask: torch.Tensor | None,
    batch: int,
    length: int,
    past_length: int | None,
) -> None:
    """Raises ValueError, with the numbers, for a mask of a wrong shape or dtype; `past_length` None: any."""
    if not isinstance(attention_mask, torch.Tensor):
        return
    shape = tuple(attention_mask.shape)
    fits = past_length is None or shape[-1] == past_length + length
    if attention_mask.ndim == 2 and shape[0] == batch and fits:
        return
    heads = (1, config.num_attention_heads)
    if (
        attention_mask.ndim == 4
        and shape[0] in (1, batch)
        and shape[1] in heads
        and shape[2] == length
        and fits
    ):
        if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
            raise ValueError(
                f"a 4-dimensional attention_mask of {attention_mask.dtype} is ambiguous; give a boolean one "
                f"(True: may see) or a floating one that is added to the scores"
            )
        return
    raise ValueError(
        f"attention_mask has shape {shape}; give (batch, cached + new tokens) = ({batch}, {past_length} + "
        f"{length}) with 1 for real tokens, or (batch, 1 or {heads[1]} heads, {length}, cached + new tokens)"
    )


def check_pair(target: torch.Tensor, encoded: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Raises ValueError, with the numbers, for a target or a source's mask that does not fit the source."""
    if target.shape[0] != encoded.shape[0]:
        raise ValueError(f"the target has a batch of {target.shape[0]} but the source of {encoded.shape[0]}")
    if attention_mask is not None and attention_mask.shape != encoded.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} but encoder_outputs are of "
            f"(batch, length) = {tuple(encoded.shape[:2])}"
        )


def complete_mask(
    attention_mask: torch.Tensor | None, length: int, cache: Cache | None
) -> torch.Tensor | None:
    """Returns a target's mask; what it lacks counts as padding, for Bart's and T5's callers rely on it."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
        return attention_mask
    missing = length - attention_mask.shape[1]
    if missing <= 0 or (cache is not None and cache.get_seq_length()):
        return attention_mask
    logger.warning_once(
        f"decoder_attention_mask has {attention_mask.shape[1]} columns for {length} tokens: the last ones "
        f"count as padding, as everywhere in transformers"
    )
    return F.pad(attention_mask, (0, missing))


def count_positions(
    attention_mask: torch.Tensor | None, length: int, past_length: int | torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Returns the positions of `length` new tokens: (B, L), padding not counted; (1, L) without any."""
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
        positions = ((attention_mask.to(device) != 0).cumsum(dim=-1) - 1).clamp(min=0)
        if isinstance(past_length, int):
            return positions[:, past_length : past_length + length]
        return positions[:, -length:]
    return (torch.arange(length, device=device) + past_length).unsqueeze(0)


class TransformerBlockStack(TransformerBlockPreTrainedModel):
    """
    Embeddings, positions, blocks and final norm: an encoder or a decoder.

    As a decoder it sees the past only and keeps a cache; in an encoder-decoder it reads the source as well.
    """

    _can_record_outputs = {
        **TransformerBlockPreTrainedModel._can_record_outputs,
        "cross_attentions": OutputRecorder(TransformerBlockAttention, index=1, layer_name="cross_attn"),
    }

    def __init__(self, config: TransformerBlockConfig, is_decoder: bool):
        super().__init__(config)
        self.is_decoder = is_decoder
        depth = (
            config.num_decoder_layers
            if is_decoder and config.is_encoder_decoder
            else config.num_hidden_layers
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        if config.position_embedding == "rotary":
            self.rotary_emb = TransformerBlockRotaryEmbedding(config)
        self.dropout = TransformerBlockDropout(config.dropout)
        self.layers = nn.ModuleList([TransformerBlock(config, index, is_decoder) for index in range(depth)])
        self.norm = (
            build_norm(config, config.hidden_size) if config.block_style == "pre_norm" else nn.Identity()
        )
        self.gradient_checkpointing = False
        self.post_init()

    def prepare_cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """Returns the cache to fill: none for an encoder, the caller's, or a new one."""
        if not self.is_decoder or (cache is None and not use_cache):
            return None
        fits = isinstance(cache, EncoderDecoderCache) or not self.config.is_encoder_decoder
        if cache is not None and fits:
            return cache
        config = self.config.get_text_config(decoder=True)
        cache = DynamicCache(config=config) if cache is None else cache
        return EncoderDecoderCache(cache, DynamicCache(config=config)) if config.is_encoder_decoder else cache

    def make_masks(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        cache: Cache | None,
        encoder_hidden_states: torch.Tensor | None,
        encoder_attention_mask: torch.Tensor | None,
        output_attentions: bool | None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the masks of self- and cross-attention, each in the form its backend reads."""
        config = self.config
        if output_attentions and config._attn_implementation != "eager":  # only eager shows its probabilities
            config = copy.copy(config)
            config._attn_implementation = "eager"
        if self.is_decoder:
            mask = create_causal_mask(
                config, hidden_states, attention_mask, position_ids=position_ids, **{CACHE: cache}
            )
        else:
            same = None if attention_mask is not None else same_document(position_ids)
            mask = create_bidirectional_mask(config, hidden_states, attention_mask, and_mask_function=same)
        if encoder_hidden_states is None:
            return mask, None
        return mask, create_bidirectional_mask(
            config, hidden_states, encoder_attention_mask, encoder_hidden_states=encoder_hidden_states
        )

    def add_positions(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Adds sinusoidal or learned positions (B, L) -> (B, L, D); raises ValueError beyond the last."""
        limit = self.config.max_position_embeddings
        if position_ids.numel() and reads_values(position_ids):
            first, last = (int(bound) for bound in torch.aminmax(position_ids))
            if first < 0 or last >= limit:
                raise ValueError(
                    f"position {first if first < 0 else last} is outside 0 to {limit - 1}, the positions of "
                    f"max_position_embeddings={limit}: shorten the input to {limit} tokens, or train with a "
                    f"larger max_position_embeddings"
                )
        if self.config.position_embedding == "learned":
            return hidden_states + self.embed_positions(position_ids)
        positions = sinusoidal_positions(position_ids, self.config.hidden_size)
        return hidden_states + positions.to(hidden_states.dtype)

    @takes_either_cache_name
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        is_fresh = cache is None
        cache = self.prepare_cache(cache, use_cache)
        own_cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        # the paged cache of continuous batching has no single length; its caller gives positions and masks
        past_length = own_cache.get_seq_length() if hasattr(own_cache, "get_seq_length") else 0
        check_tokens(self.config, input_ids, inputs_embeds, position_ids)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        grows = own_cache is None or not getattr(own_cache, "is_compileable", True)
        check_mask(self.config, attention_mask, *hidden_states.shape[:2], past_length if grows else None)
        if self.config.scale_embeddings:
            hidden_states = hidden_states * math.sqrt(self.config.hidden_size)
        # the library takes restarting position_ids for packed sequences, but only where it is shown no cache;
        # positions of our own are counted afterwards
        mask, cross_mask = self.make_masks(
            hidden_states,
            attention_mask,
            position_ids,
            None if is_fresh else own_cache,
            encoder_hidden_states,
            encoder_attention_mask,
            output_attentions,
        )
        if position_ids is None:
            length, device = hidden_states.shape[1], hidden_states.device
            position_ids = count_positions(attention_mask, length, past_length, device)
        position_embeddings = None
        if self.config.position_embedding == "rotary":
            position_embeddings = self.rotary_emb(hidden_states, position_ids)
        elif self.config.position_embedding != "none":
            hidden_states = self.add_positions(hidden_states, position_ids)
        hidden_states = self.dropout(hidden_states)

        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                mask,
                encoder_hidden_states,  # by position: reentrant checkpointing loses gradients of keywords
                encoder_attention_mask=cross_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                output_attentions=bool(output_attentions),
                **{CACHE: cache},
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.norm(hidden_states), **{CACHE: cache}
        )


class TransformerBlockModel(TransformerBlockStack):
    """
    The model without a head: one stack as "encoder" or "decoder", two of them as "encoder-decoder".

    Returns hidden states (B, L, D); for an encoder-decoder those of the decoder.
    """

    _can_record_outputs = TransformerBlockPreTrainedModel._can_record_outputs

    def __init__(self, config: TransformerBlockConfig):
        if not config.is_encoder_decoder:
            super().__init__(config, is_decoder=config.architecture == "decoder")
            return
        super(TransformerBlockStack, self).__init__(config)  # it is not a stack but has two
        if config.tie_word_embeddings:
            self._tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}
        self.encoder = TransformerBlockStack(config, is_decoder=False)
        self.decoder = TransformerBlockStack(config, is_decoder=True)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens if self.config.is_encoder_decoder else self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        if not self.config.is_encoder_decoder:
            self.embed_tokens = value
            return
        self.encoder.embed_tokens = value
        if self.config.tie_word_embeddings:
            self.decoder.embed_tokens = value

    @takes_either_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions | Seq2SeqModelOutput:
        source = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        if kwargs.get("labels") is not None:
            raise ValueError("TransformerBlockModel has no loss: give labels to a model with a head")
        target = decoder_inputs_embeds if decoder_input_ids is None else decoder_input_ids
        if not self.config.is_encoder_decoder:
            if target is not None or encoder_outputs is not None:
                raise ValueError(
                    f"architecture={self.config.architecture!r} has one stack and takes input_ids only; "
                    f"decoder inputs and encoder outputs need architecture='encoder-decoder'"
                )
            return super().forward(**source, use_cache=use_cache, return_dict=True, cache=cache, **kwargs)
        if target is None:
            raise ValueError(
                "an encoder-decoder needs decoder_input_ids or decoder_inputs_embeds (its head: or labels)"
            )
        if attention_mask is not None and attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; the decoder reads it too, so the "
                f"source of an encoder-decoder needs (batch, length), with 1 for real tokens"
            )
        if encoder_outputs is None:
            encoder_outputs = self.encoder(**source, return_dict=True, **kwargs)
        elif isinstance(encoder_outputs, (tuple, list)):
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        encoded = encoder_outputs.last_hidden_state
        check_pair(target, encoded, attention_mask)
        decoder_attention_mask = complete_mask(decoder_attention_mask, target.shape[1], cache)
        outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoded,
            encoder_attention_mask=attention_mask,
            use_cache=use_cache,
            return_dict=True,
            cache=cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            **{CACHE: outputs.get(CACHE)},
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=encoded,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


def count_labels(labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None) -> torch.Tensor | int:
    """Returns what a summed loss is divided by: the caller's count, or that of labels which are not -100."""
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, torch.Tensor):
        count = count.to(labels.device)
    return count + (count == 0)  # the sum over no label is 0 already


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items_in_batch: torch.Tensor | int | None,
    label_smoothing: float,
) -> torch.Tensor:
    """
    Returns the sum of the cross-entropies (nats, float32) of logits (..., V) over the number of labels.

    Labels of -100 are ignored. `num_items_in_batch` is the number of labels of a batch that is spread over
    several calls or processes; None: of this call. Without any label the loss and its gradients are 0. Label
    smoothing as in arXiv 1512.00567.
    """
    labels = labels.to(logits.device).flatten()
    total = F.cross_entropy(
        logits.float().flatten(0, -2),
        labels,
        reduction="sum",
        label_smoothing=label_smoothing,
        ignore_index=-100,
    )
    return total / count_labels(labels, num_items_in_batch)


def cross_entropy_gradient_(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float
) -> torch.Tensor:
    """
    Turns logits (N, V) into softmax - (1 - smoothing) * one-hot in place; returns the losses (N,), float32.

    Rows without a label become 0. Smoothing's even share of both is left out, see `smooth_`. A CPU takes few
    rows at a time, which its cache holds through all the steps.
    """
    few = max(1, 2**19 // logits.shape[1]) if logits.device.type == "cpu" else logits.shape[0]
    is_real = (labels != -100).unsqueeze(1)
    targets = labels.unsqueeze(1).masked_fill(~is_real, 0)
    is_real = is_real.float()
    losses = torch.empty_like(is_real)
    for start in range(0, labels.shape[0], few):
        rows = slice(start, start + few)
        target, is_counted = targets[rows], is_real[rows]
        values = logits[rows].float()
        wanted = values.gather(1, target)
        peak = values.amax(dim=-1, keepdim=True)
        partition = values.sub_(peak).exp_().sum(dim=-1, keepdim=True)
        losses[rows] = (peak + partition.log() - (1.0 - label_smoothing) * wanted) * is_counted
        values.mul_(is_counted / partition).scatter_add_(1, target, is_counted * (label_smoothing - 1.0))
        if values.dtype != logits.dtype:
            logits[rows] = values
    return losses.squeeze(1)


def smooth_(
    total: torch.Tensor,
    grads: list[torch.Tensor | None],
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    shares: torch.Tensor,
) -> None:
    """
    Takes a share (N,) of every word's logit off the loss and its gradients, in place.

    The sum of a token's logits is its product with the sum of the rows of the weight, so the logits are not
    needed: the gradients have rank one.
    """
    rows = weight.sum(dim=0, dtype=torch.float32)
    shared = shares @ hidden_states.float()  # (N,), (N, D) -> (D,)
    total -= shared @ rows
    if bias is not None:
        total -= shares.sum() * bias.sum(dtype=torch.float32)
    hidden_grad, weight_grad, bias_grad = grads
    if hidden_grad is not None:
        hidden_grad -= torch.outer(shares, rows).to(hidden_grad.dtype)
    if weight_grad is not None:
        weight_grad -= shared
    if bias_grad is not None:
        bias_grad -= shares.sum()


def add_(total: torch.Tensor, more: torch.Tensor) -> None:
    """Adds to a float32 total in place; on a CPU, which copies the other dtype first, in parts."""
    few = 1024 if is_plain(total) else total.shape[0]
    for part, more_part in zip(total.split(few), more.split(few), strict=True):
        part += more_part


class ChunkedCrossEntropy(torch.autograd.Function):
    """
    Output projection and summed cross-entropy in one, chunk by chunk, so that logits (N, V) never exist.

    The gradients are made chunk by chunk in the forward pass, where each chunk's probabilities are at hand.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        label_smoothing: float,
    ) -> torch.Tensor:
        """(N, D), (V, D), (V,) or None, (N,) -> scalar float32."""
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        device, vocab_size = hidden_states.device.type, weight.shape[0]
        ctx.dtypes = (hidden_states.dtype, weight.dtype, None if bias is None else bias.dtype)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        hidden_grad = torch.empty_like(hidden_states) if wants_hidden else None
        # sums over all tokens, which half precision cannot hold: float32 up to the end
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        bias_grad = torch.zeros_like(bias, dtype=torch.float32) if wants_bias else None
        total = hidden_states.new_zeros((), dtype=torch.float32)
        # 8 MiB of logits, but 256 rows keep products efficient, and half precision can sum 1024
        size = min(1024, max(256, 2**23 // dtype.itemsize // vocab_size))
        with torch.autocast(device, enabled=False):
            for start in range(0, labels.shape[0], size):
                rows = slice(start, start + size)
                hidden = hidden_states[rows]
                grad = F.linear(hidden, weight, bias)
                total += cross_entropy_gradient_(grad, labels[rows], label_smoothing).sum()
                if wants_bias:
                    bias_grad += grad.sum(0, dtype=torch.float32)
                if wants_hidden:
                    torch.mm(grad, weight, out=hidden_grad[rows])
                if wants_weight and dtype == torch.float32:
                    weight_grad.addmm_(grad.t(), hidden)
                elif wants_weight:
                    add_(weight_grad, grad.t() @ hidden)
            if label_smoothing:
                shares = (labels != -100).float() * (label_smoothing / vocab_size)
                smooth_(total, [hidden_grad, weight_grad, bias_grad], hidden_states, weight, bias, shares)
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, total_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = (
            None if grad is None else (grad * total_grad).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *grads, None, None


class TransformerBlockLMMixin:
    """
    The output projection of the language-model heads: logits when they are needed, else only the loss.

    The heads find `label_smoothing` and `shift_labels` among their keywords: were they named arguments, the
    library's Trainer would evaluate no batch without them, for it counts every "...label..." as a label.
    """

    def project(
        self,
        hidden_states: torch.Tensor,
        labels: torch.Tensor | None,
        logits_to_keep: int | torch.Tensor | None,
        num_items_in_batch: torch.Tensor | int | None,
        label_smoothing: float,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """
        Returns the loss (None without labels) and the logits (B, L, V) of the positions to keep.

        In training with labels the logits are None, and never made, unless `logits_to_keep` asks for them (0:
        all). `labels` (B, L) stand where they are predicted: a causal head has shifted them.
        """
        head = self.lm_head
        if labels is not None:
            check_labels(labels, hidden_states.shape[:2], self.config.vocab_size)
        if self.training and labels is not None and logits_to_keep is None and is_bare(head):
            labels = labels.to(hidden_states.device).flatten()
            total = ChunkedCrossEntropy.apply(
                hidden_states.flatten(0, -2), head.weight, head.bias, labels, label_smoothing
            )
            return total / count_labels(labels, num_items_in_batch), None
        if isinstance(logits_to_keep, torch.Tensor):
            hidden_states = hidden_states[:, logits_to_keep]
            labels = None if labels is None else labels[:, logits_to_keep]
        elif logits_to_keep:
            hidden_states = hidden_states[:, -logits_to_keep:]
            labels = None if labels is None else labels[:, -logits_to_keep:]
        logits = head(hidden_states)
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch, label_smoothing)
        return loss, logits


def require_architecture(config: TransformerBlockConfig, head: str, *fitting: str) -> None:
    """Raises ValueError if a head does not fit the architecture."""
    if config.architecture not in fitting:
        fits = ", ".join(sorted(set(config.auto_map) - {"AutoConfig"}))
        raise ValueError(
            f"{head} needs architecture={' or '.join(map(repr, fitting))}, not {config.architecture!r}, "
            f"which loads through {fits}"
        )


class TransformerBlockForCausalLM(TransformerBlockLMMixin, TransformerBlockPreTrainedModel, GenerationMixin):
    """A decoder that predicts the next token; it owns the shift: `labels` are `input_ids`, -100 ignored."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: TransformerBlockConfig):
        super().__init__(config)
        require_architecture(config, type(self).__name__, "decoder")
        self.model = TransformerBlockModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @takes_either_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """The keyword `shift_labels` (B, L) stands where it is predicted already; it wins over `labels`."""
        shift_labels = kwargs.pop("shift_labels", None)
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        if use_cache is None and not (labels is None and shift_labels is None):
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            cache=cache,
            **kwargs,
        )
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        loss, logits = self.project(
            outputs.last_hidden_state, shift_labels, logits_to_keep, num_items_in_batch, label_smoothing
        )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: outputs.get(CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class TransformerBlockForMaskedLM(TransformerBlockLMMixin, TransformerBlockPreTrainedModel):
    """An encoder that predicts the tokens which were masked in its input; other `labels` are -100."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: TransformerBlockConfig):
        super().__init__(config)
        require_architecture(config, type(self).__name__, "encoder")
        self.model = TransformerBlockModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        loss, logits = self.project(
            outputs.last_hidden_state, labels, logits_to_keep, num_items_in_batch, label_smoothing
        )
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def shift_tokens_right(labels: torch.Tensor, config: TransformerBlockConfig) -> torch.Tensor:
    """Returns the decoder's input for `labels` (B, L): the start token, then all labels but the last."""
    if config.pad_token_id is None:
        raise ValueError(
            "labels need pad_token_id in the configuration, the decoder's input where a label is -100"
        )
    shifted = labels.roll(1, dims=-1)
    shifted[:, 0] = config.decoder_start_token_id
    return shifted.masked_fill(shifted == -100, config.pad_token_id)


class TransformerBlockForConditionalGeneration(
    TransformerBlockLMMixin, TransformerBlockPreTrainedModel, GenerationMixin
):
    """An encoder-decoder that writes a target for a source; `labels` are its tokens, -100 ignored."""

    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: TransformerBlockConfig):
        super().__init__(config)
        require_architecture(config, type(self).__name__, "encoder-decoder")
        self.model = TransformerBlockModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()

    @wraps(GenerationMixin.prepare_inputs_for_generation)  # generate reads the names of its arguments
    def prepare_inputs_for_generation(self, input_ids, *args, **kwargs) -> dict:
        mask = kwargs.get("decoder_attention_mask")
        if mask is not None and mask.ndim == 2 and kwargs.get("decoder_position_ids") is None:
            if mask.shape[1] != input_ids.shape[1]:
                raise ValueError(
                    f"decoder_attention_mask has {mask.shape[1]} columns for {input_ids.shape[1]} tokens"
                )
            # for a static cache the library makes it 4-dimensional, which knows no positions any more
            kwargs["decoder_position_ids"] = count_positions(mask, mask.shape[1], 0, mask.device)
        return super().prepare_inputs_for_generation(input_ids, *args, **kwargs)

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        return shift_tokens_right(labels, self.config)

    @takes_either_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        decoder_position_ids: torch.LongTensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        if labels is not None:
            if use_cache is None:
                use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = shift_tokens_right(labels, self.config)
        label_smoothing = kwargs.pop("label_smoothing", 0.0)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_position_ids=decoder_position_ids,
            decoder_inputs_embeds=decoder_inputs_embeds,
            encoder_outputs=encoder_outputs,
            use_cache=use_cache,
            return_dict=True,
            cache=cache,
            **kwargs,
        )
        loss, logits = self.project(
            outputs.last_hidden_state, labels, logits_to_keep, num_items_in_batch, label_smoothing
        )
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(loss=loss, logits=logits, **rest)


class TransformerBlockForSequenceClassification(TransformerBlockPreTrainedModel):
    """
    Classifies, or scores, a whole sequence: one pooled state of a stack, (B, D) -> (B, num_labels).

    `problem_type` None: regression for one label, else by the dtype of `labels`: integers (B,) are classes,
    floats (B, num_labels) are independent labels.
    """

    def __init__(self, config: TransformerBlockConfig):
        super().__init__(config)
        require_architecture(config, type(self).__name__, "encoder", "decoder")
        self.num_labels = config.num_labels
        self.model = TransformerBlockModel(config)
        self.dropout = nn.Dropout(
            config.dropout if config.classifier_dropout is None else config.classifier_dropout
        )
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def pool(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Returns the mean of the real tokens, the first or the last of them: (B, L, D) -> (B, D)."""
        if attention_mask is None:
            attention_mask = hidden_states.new_ones(hidden_states.shape[:2], dtype=torch.long)
        if attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; pooling needs (batch, length), to "
                f"know the real tokens"
            )
        is_real = attention_mask.to(hidden_states.device) != 0
        if self.config.classifier_pooling == "mean":
            weights = is_real.to(hidden_states.dtype).unsqueeze(-1)
            return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        index = torch.arange(is_real.shape[1], device=is_real.device)
        if self.config.classifier_pooling == "cls":
            chosen = torch.where(is_real, index, is_real.shape[1] - 1).amin(dim=1)
        else:
            chosen = torch.where(is_real, index, 0).amax(dim=1)
        rows = torch.arange(chosen.shape[0], device=chosen.device)  # len() would be a constant in an export
        return hidden_states[rows, chosen]

    @takes_either_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            cache=cache,
            **kwargs,
        )
        logits = self.classifier(self.dropout(self.pool(outputs.last_hidden_state, attention_mask)))
        loss = None if labels is None else self.loss(logits, labels.to(logits.device), num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    def loss(
        self, logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None
    ) -> torch.Tensor:
        """Returns the loss of `problem_type`, averaged over the examples (and over independent labels)."""
        problem = self.config.problem_type
        if problem is None:
            by_dtype = (
                "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
            )
            problem = "regression" if self.config.num_labels == 1 else by_dtype
        if problem == "single_label_classification":
            check_labels(labels.flatten(), logits.shape[:1], self.config.num_labels)
            return cross_entropy(logits, labels, num_items_in_batch, label_smoothing=0.0)
        labels = labels.view_as(logits).float()
        elementwise = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
        total = elementwise(logits.float(), labels, reduction="none").mean(dim=-1).sum()
        examples = labels.new_zeros(len(labels))  # each of them counts, for -100 is a value here
        return total / count_labels(examples, num_items_in_batch)


class TransformerBlockForTokenClassification(TransformerBlockPreTrainedModel):
    """Classifies every token of a stack, (B, L, D) -> (B, L, num_labels); `labels` of -100 are ignored."""

    def __init__(self, config: TransformerBlockConfig):
        super().__init__(config)
        require_architecture(config, type(self).__name__, "encoder", "decoder")
        self.num_labels = config.num_labels
        self.model = TransformerBlockModel(config)
        self.dropout = nn.Dropout(
            config.dropout if config.classifier_dropout is None else config.classifier_dropout
        )
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @takes_either_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            cache=cache,
            **kwargs,
        )
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            check_labels(labels, logits.shape[:2], self.config.num_labels)
            loss = cross_entropy(logits, labels, num_items_in_batch, label_smoothing=0.0)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class TransformerBlockForQuestionAnswering(TransformerBlockPreTrainedModel):
    """
    Finds the answer to a question inside a text: scores of each token, (B, L), as its first and its last.

    A position outside the input (an answer that was cut off) is ignored in the loss.
    """

    def __init__(self, config: TransformerBlockConfig):
        super().__init__(config)
        require_architecture(config, type(self).__name__, "encoder", "decoder")
        self.model = TransformerBlockModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @takes_either_cache_name
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        use_cache: bool | None = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            cache=cache,
            **kwargs,
        )
        # (B, L, 2) -> 2 of (B, L)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            length = start_logits.shape[1]
            losses = []
            for logits, positions in ((start_logits, start_positions), (end_logits, end_positions)):
                if attention_mask is not None and attention_mask.ndim == 2:  # no answer lies in the padding
                    logits = logits.masked_fill(attention_mask == 0, torch.finfo(logits.dtype).min)
                positions = positions.view(-1)
                positions = positions.masked_fill((positions < 0) | (positions >= length), -100)
                losses.append(cross_entropy(logits, positions, num_items_in_batch, label_smoothing=0.0))
            loss = sum(losses) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


TransformerBlockModel.register_for_auto_class("AutoModel")
TransformerBlockForCausalLM.register_for_auto_class("AutoModelForCausalLM")
TransformerBlockForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
TransformerBlockForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
TransformerBlockForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
TransformerBlockForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
TransformerBlockForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")
