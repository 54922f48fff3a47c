"""
Models of the family in CTranslate2's format: decoders for its Generator, encoder-decoders for its Translator.

Whatever CTranslate2 cannot compute is refused by name, and every export must have equal log-probabilities,
and mostly equal texts, in float32.
"""

import tempfile
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from ctranslate2.specs import (
    TransformerDecoderModelSpec,
    TransformerDecoderSpec,
    TransformerEncoderSpec,
    TransformerSpec,
)
from ctranslate2.specs.attention_spec import MultiHeadAttentionSpec, RotaryScalingType
from ctranslate2.specs.common_spec import Activation, LayerNormSpec, LinearSpec
from ctranslate2.specs.transformer_spec import FeedForwardSpec
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .convert import TOLERANCE
from .export_ctranslate2_check import Comparison, compare
from .export_ctranslate2_options import end_token_id, list_tokens, start_token_id
from .folders import save_tokenizer
from .modeling_hf_transformer_block import (
    TransformerBlock,
    TransformerBlockAttention,
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockMLP,
    TransformerBlockStack,
    sinusoidal_positions,
)


ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU,
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), Activation.GELUTanh),
    "quick_gelu": Activation.GELUSigmoid,
    **dict.fromkeys(("silu", "swish"), Activation.SWISH),
}
ROPE_FIELDS = {"rope_type", "rope_theta", "factor", "partial_rotary_factor"}


def require_representable(model: PreTrainedModel) -> None:
    """Raises ValueError, with the remedy, for a model that CTranslate2 cannot compute."""
    config, elsewhere = model.config, "export it to onnx"
    if not isinstance(model, (TransformerBlockForCausalLM, TransformerBlockForConditionalGeneration)):
        raise ValueError(
            f"a {type(model).__name__} (architecture={config.architecture!r}) writes no text: ctranslate2 "
            f"takes TransformerBlockForCausalLM and TransformerBlockForConditionalGeneration; {elsewhere}"
        )
    if config.block_style == "tutorial":
        raise ValueError(
            f"block_style='tutorial' shares projections among heads, which ctranslate2 cannot do; {elsewhere}"
        )
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(
            f"hidden_act={config.hidden_act!r} is unknown to ctranslate2 (known: {', '.join(ACTIVATIONS)}); "
            f"{elsewhere}"
        )
    if config.qk_norm and config.is_encoder_decoder:
        raise ValueError(
            f"qk_norm=True normalises each head, which ctranslate2 does not in the attention to a source; "
            f"{elsewhere}"
        )
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") not in ("default", "linear") or set(rope) - ROPE_FIELDS:
        raise ValueError(
            f"rope_parameters={rope} cannot be told to ctranslate2, which takes rope_type 'default' and "
            f"'linear' here; {elsewhere}"
        )


def to_array(weight: torch.Tensor) -> np.ndarray:
    """Returns a copy, for the specification quantises its arrays in place."""
    return weight.detach().float().numpy().copy()


def set_linear(spec: LinearSpec, *layers: nn.Linear) -> None:
    """Fuses layers of one input: CTranslate2 computes queries, keys and values at once."""
    spec.weight = to_array(torch.cat([layer.weight for layer in layers]))
    if layers[0].bias is not None:
        spec.bias = to_array(torch.cat([layer.bias for layer in layers]))


def set_norm(spec: LayerNormSpec, norm: nn.Module) -> None:
    spec.gamma = to_array(norm.weight)
    if isinstance(norm, nn.LayerNorm):
        spec.beta = to_array(norm.bias)


def set_attention(
    spec: MultiHeadAttentionSpec, attention: TransformerBlockAttention, norm: nn.Module
) -> None:
    query, key, value = attention.q_proj, attention.k_proj, attention.v_proj
    is_self = len(spec.linear) == 2
    fused = [(query, key, value)] if is_self else [(query,), (key, value)]
    for linear, layers in zip(spec.linear, [*fused, (attention.o_proj,)], strict=True):
        set_linear(linear, *layers)
    set_norm(spec.layer_norm, norm)
    if attention.config.qk_norm:
        rms_norm = attention.config.norm_type == "rms_norm"
        spec.q_norm, spec.k_norm = (LayerNormSpec(rms_norm=rms_norm) for _ in range(2))
        set_norm(spec.q_norm, attention.q_norm)
        set_norm(spec.k_norm, attention.k_norm)


def set_mlp(spec: FeedForwardSpec, mlp: TransformerBlockMLP, norm: nn.Module) -> None:
    set_linear(spec.linear_0, mlp.gate_proj if mlp.is_gated else mlp.up_proj)  # the one that is activated
    if mlp.is_gated:
        set_linear(spec.linear_0_noact, mlp.up_proj)
    set_linear(spec.linear_1, mlp.down_proj)
    set_norm(spec.layer_norm, norm)


def set_block(spec: object, block: TransformerBlock) -> None:
    set_attention(spec.self_attention, block.self_attn, block.self_attn_norm)
    if block.has_cross_attention:
        set_attention(spec.attention, block.cross_attn, block.cross_attn_norm)
    set_mlp(spec.ffn, block.mlp, block.mlp_norm)


def position_table(stack: TransformerBlockStack) -> torch.Tensor:
    """Returns what is added at each position, (max_position_embeddings, D)."""
    config = stack.config
    if config.position_embedding == "learned":
        return stack.embed_positions.weight
    if config.position_embedding == "sinusoidal":
        positions = torch.arange(config.max_position_embeddings)
        return sinusoidal_positions(positions[None], config.hidden_size)[0]
    # without a table, CTranslate2 would add one of its own
    return torch.zeros(config.max_position_embeddings, config.hidden_size)


def build_stack(stack: TransformerBlockStack) -> TransformerEncoderSpec | TransformerDecoderSpec:
    """Returns the specification of an encoder or a decoder, with its weights."""
    config = stack.config
    values = {
        "pre_norm": config.block_style == "pre_norm",
        "activation": ACTIVATIONS[config.hidden_act],
        "ffn_glu": config.gated_mlp,
        "rms_norm": config.norm_type == "rms_norm",
        "num_heads_kv": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "qk_norm": config.qk_norm,
    }
    if config.position_embedding == "rotary":
        rope = config.rope_parameters
        values["rotary_dim"] = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        values |= {"rotary_interleave": False, "rotary_base": rope["rope_theta"]}
        if rope["rope_type"] == "linear":
            values |= {"rotary_scaling_type": RotaryScalingType.Linear}
            values |= {"rotary_scaling_factor": rope["factor"]}
    if stack.is_decoder:
        values["with_encoder_attention"] = config.is_encoder_decoder
    build = TransformerDecoderSpec if stack.is_decoder else TransformerEncoderSpec
    spec = build(len(stack.layers), config.num_attention_heads, **values)
    spec.scale_embeddings = config.scale_embeddings
    embeddings = spec.embeddings if stack.is_decoder else spec.embeddings[0]
    embeddings.weight = to_array(stack.embed_tokens.weight)
    if config.position_embedding != "rotary":
        spec.position_encodings.encodings = to_array(position_table(stack))
    if config.block_style == "pre_norm":
        set_norm(spec.layer_norm, stack.norm)
    for block_spec, block in zip(spec.layer, stack.layers, strict=True):
        set_block(block_spec, block)
    return spec


def build_spec(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> TransformerSpec | TransformerDecoderModelSpec:
    """Returns the specification of a model, with weights, vocabulary and special tokens."""
    config = model.config
    tokens = list_tokens(tokenizer, config.vocab_size)
    if config.is_encoder_decoder:
        spec = TransformerSpec(build_stack(model.model.encoder), build_stack(model.model.decoder))
        spec.register_source_vocabulary(tokens)
        spec.register_target_vocabulary(tokens)
        spec.config.decoder_start_token = tokens[start_token_id(model)]
    else:
        spec = TransformerDecoderModelSpec(build_stack(model.model))
        spec.register_vocabulary(tokens)
    set_linear(spec.decoder.projection, model.lm_head)
    end = tokens[end_token_id(model)]
    spec.config.eos_token = end
    spec.config.bos_token = end if config.bos_token_id is None else tokens[config.bos_token_id]
    # a name which is in no vocabulary would get an id which is in no table
    spec.config.unk_token = end if tokenizer.unk_token is None else tokenizer.unk_token
    spec.config.layer_norm_epsilon = float(config.norm_eps)
    return spec


def save_spec(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, stored: str) -> None:
    """Writes model.bin, config.json and the vocabulary."""
    spec = build_spec(model, tokenizer)
    spec.validate()
    spec.optimize(quantization=stored)
    spec.save(str(folder))


def export(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, quantization: str = "float32"
) -> dict[str, Comparison]:
    """
    Writes a model and its tokenizer for CTranslate2 into a folder, and returns how equal they are by dtype.

    Args:
        model: in float32, for evaluation.
        tokenizer: saved along; its tokens are the vocabulary.
        folder: an empty one.
        quantization: "float32", "float16", "bfloat16" or "int8", how the weights are stored.

    Raises:
        ValueError: CTranslate2 cannot represent the model or the tokenizer, or got other numbers or
            mostly other texts in float32.
    """
    require_representable(model)
    with tempfile.TemporaryDirectory() as whole:
        save_spec(model, tokenizer, Path(whole), "float32")
        found = compare(model, tokenizer, Path(whole), "float32")
    if not found.difference <= TOLERANCE * found.largest or 2 * found.equal < found.sequences:
        raise ValueError(
            f"ctranslate2 {ctranslate2.__version__} computes something else: its log-probabilities differ by "
            f"{found.difference:.3g}, where the largest is {found.largest:.3g}, and {found.equal} of "
            f"{found.sequences} greedy texts are the same; try another version, or export it to onnx"
        )
    comparisons = {"float32": found}
    save_spec(model, tokenizer, folder, quantization)
    if quantization != "float32":
        comparisons[quantization] = compare(model, tokenizer, folder, quantization)
    save_tokenizer(tokenizer, folder)
    return comparisons
