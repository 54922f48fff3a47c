"""Tiny checkpoints of transformers' own models, which ours are converted from."""

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 60, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **SIZES,
    **SPECIAL,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.1,
}
GPT2 = {
    **SIZES,
    **SPECIAL,
    "n_positions": 64,
    "n_inner": 40,
    "activation_function": "relu",
    "layer_norm_epsilon": 0.1,
}
MARIAN = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "activation_function": "swish",
    "scale_embedding": True,
    "max_position_embeddings": 64,
    "pad_token_id": 60,
    "decoder_start_token_id": 60,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
}
SOURCES = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2),
    "llama": (LlamaForCausalLM, LlamaConfig, LLAMA),
    "mistral": (MistralForCausalLM, MistralConfig, {**LLAMA, "sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {**LLAMA, "tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**LLAMA, "head_dim": 12}),
    "marian": (MarianMTModel, MarianConfig, MARIAN),
}


@torch.no_grad()
def build(kind: str, **kwargs) -> PreTrainedModel:
    """Returns a source with every weight drawn; the larger, the more the written tokens vary."""
    model_class, config_class, fields = SOURCES[kind]
    model = model_class(config_class(**{**fields, **kwargs}))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
    return model.eval()


def auto_class(model: PreTrainedModel) -> type:
    return AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM


def logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    inputs = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **inputs).logits


def write(model: PreTrainedModel, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    mask = torch.ones_like(ids)
    return model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **kwargs)
