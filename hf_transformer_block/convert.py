"""
Models of transformers that one of our blocks can represent, as models of ours: GPT-2, Llama and Marian kinds.

Whatever has no counterpart here is refused by name, and equal logits are the condition of every result.
"""

import copy
import math

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.func import functional_call
from transformers import (
    GenerationConfig,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MarianMTModel,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from .configuration_hf_transformer_block import TransformerBlockConfig
from .modeling_hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockPreTrainedModel,
    sinusoidal_positions,
)


SOURCES = {
    "gpt2": GPT2LMHeadModel,
    "llama": LlamaForCausalLM,
    "marian": MarianMTModel,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
TOLERANCE = 1e-4  # of the largest logit; float32 rounds a deep model to 1e-5, another formula does not

# Fields that a configuration may carry, and the only values that leave the computation ours. A class of
# transformers may not read them, but then the weights were made for another one.
NEUTRAL = {
    "quantization_config": (),
    "auto_map": (),
    "pruned_heads": ({},),
    "add_cross_attention": (False,),
    "attention_chunk_size": (),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("logit_scale", "logits_scaling", "attention_multiplier"), (1,)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), (1,)),
    **dict.fromkeys(("query_pre_attn_scalar", "clip_qkv", "no_rope_layers"), ()),
    **dict.fromkeys(("use_mrope", "use_qk_norm", "qk_layernorm", "rope_interleave"), (False,)),
}
GPT2_NEUTRAL = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
}
MARIAN_NEUTRAL = {
    **dict.fromkeys(("normalize_before", "normalize_embedding", "add_final_layer_norm"), (False,)),
    "static_position_embeddings": (True,),
    **dict.fromkeys(("activation_dropout", "encoder_layerdrop", "decoder_layerdrop"), (0,)),
}
ROPE_FIELDS = {
    *("rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor"),
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor", "long_factor"),
    *("low_freq_factor", "high_freq_factor", "partial_rotary_factor"),
}
REMEDIES = {
    "quantization_config": "take the checkpoint that was not quantised",
    "auto_map": "the code beside the weights may compute something else; delete the field if it does not",
    **dict.fromkeys(
        ("activation_dropout", "encoder_layerdrop", "decoder_layerdrop"),
        "it acts in training only: set it to 0 to do without",
    ),
}

GPT2_NAMES = {
    "transformer.h.": "model.layers.",
    "transformer.wte.": "model.embed_tokens.",
    "transformer.wpe.": "model.embed_positions.",
    "transformer.ln_f.": "model.norm.",
    ".ln_1.": ".self_attn_norm.",
    ".ln_2.": ".mlp_norm.",
    ".attn.c_proj.": ".self_attn.o_proj.",
    ".mlp.c_fc.": ".mlp.up_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
}
LLAMA_NAMES = {".input_layernorm.": ".self_attn_norm.", ".post_attention_layernorm.": ".mlp_norm."}
MARIAN_NAMES = {
    ".self_attn_layer_norm.": ".self_attn_norm.",
    ".encoder_attn_layer_norm.": ".cross_attn_norm.",
    ".final_layer_norm.": ".mlp_norm.",
    ".encoder_attn.": ".cross_attn.",
    ".out_proj.": ".o_proj.",
    ".fc1.": ".mlp.up_proj.",
    ".fc2.": ".mlp.down_proj.",
}


def refuse(config: PreTrainedConfig, field: str, remedy: str | None = None) -> None:
    """Raises ValueError: a field of the source has a value which our block cannot represent."""
    remedy = remedy or REMEDIES.get(field, "keep using transformers' own class")
    raise ValueError(
        f"{config.model_type}: {field}={getattr(config, field)!r} cannot be represented; {remedy}"
    )


def require_neutral(config: PreTrainedConfig, fields: dict[str, tuple]) -> None:
    """Raises ValueError for a field that is set to something else than the values given for it."""
    for field, values in fields.items():
        if (value := getattr(config, field, None)) is not None and value not in values:
            refuse(config, field)


def require_equal(config: PreTrainedConfig, first: str, second: str, reason: str) -> None:
    """Raises ValueError unless two fields have one value, for ours have one field for both."""
    values = getattr(config, first), getattr(config, second)
    if values[0] != values[1]:
        raise ValueError(
            f"{config.model_type}: {first}={values[0]!r} and {second}={values[1]!r} differ: {reason}"
        )


def require_full_attention(config: PreTrainedConfig) -> None:
    """Raises ValueError if a layer sees less of the past than all of it, up to the longest sequence."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    if layer_types - {"full_attention", "sliding_attention"}:
        refuse(config, "layer_types")
    window = getattr(config, "sliding_window", None)
    # Qwen's layers slide where layer_types says so; Mistral's, and the library's caches, in any window
    follows_types = config.model_type in ("qwen2", "qwen3")
    slides = "sliding_attention" in layer_types or (window is not None and not follows_types)
    if slides and (window is None or window < config.max_position_embeddings):
        longest = f"is below max_position_embeddings={config.max_position_embeddings}"
        refuse(config, "sliding_window", f"it {longest}: lower that to the window, or set the window to null")


def convert_rope(config: PreTrainedConfig) -> dict:
    """Returns the rotary parameters of a Llama or one of its kind; raises ValueError for what it ignores."""
    rope = dict(config.rope_parameters)
    if unknown := sorted(set(rope) - ROPE_FIELDS):
        refuse(config, "rope_parameters", f"{unknown[0]!r} is unknown: delete it if it means nothing")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        refuse(config, "rope_parameters", "its class rotates whole heads: delete partial_rotary_factor")
    return rope


def special_id(config: PreTrainedConfig | GenerationConfig, field: str) -> int | list[int] | None:
    """Returns the id of a special token; the first Llamas say -1 for none."""
    value = getattr(config, field)
    return None if value == -1 else value


def convert_gpt2(config: PreTrainedConfig) -> dict:
    """Returns the fields of our configuration for a GPT-2."""
    require_neutral(config, GPT2_NEUTRAL)
    require_equal(config, "embd_pdrop", "resid_pdrop", "one dropout serves both: set them to one value")
    return {
        "architecture": "decoder",
        "block_style": "pre_norm",
        "position_embedding": "learned",
        "scale_embeddings": False,
        "intermediate_size": config.n_inner,
        "hidden_act": config.activation_function,
        "dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
        "norm_eps": config.layer_norm_epsilon,
        "initializer_range": config.initializer_range,
    }


def reads_bias(config: PreTrainedConfig, field: str) -> bool:
    """Returns a bias's field where the class of the source has it; one that was added means nothing there."""
    return field in type(config).__dataclass_fields__ and getattr(config, field)


def convert_llama(config: PreTrainedConfig) -> dict:
    """Returns the fields of our configuration for a Llama, Mistral, Qwen2 or Qwen3."""
    return {
        "architecture": "decoder",
        "block_style": "pre_norm",
        "norm_type": "rms_norm",
        "position_embedding": "rotary",
        "scale_embeddings": False,
        "gated_mlp": True,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None),
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.hidden_act,
        "rope_parameters": convert_rope(config),
        "qk_norm": config.model_type == "qwen3",
        # a Qwen2 has biases, always, in all projections but the last; elsewhere the field says it
        "attention_bias": config.model_type == "qwen2" or reads_bias(config, "attention_bias"),
        "mlp_bias": reads_bias(config, "mlp_bias"),
        "dropout": 0.0,
        "attention_dropout": config.attention_dropout or 0.0,
        "norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
    }


def convert_marian(config: PreTrainedConfig) -> dict:
    """Returns the fields of our configuration for a Marian."""
    require_neutral(config, MARIAN_NEUTRAL)
    alike = "our encoder and decoder are built alike; keep using transformers' own class"
    require_equal(config, "encoder_attention_heads", "decoder_attention_heads", alike)
    require_equal(config, "encoder_ffn_dim", "decoder_ffn_dim", alike)
    vocabulary = "ours read and write one vocabulary; keep using transformers' own class"
    require_equal(config, "vocab_size", "decoder_vocab_size", vocabulary)
    return {
        "architecture": "encoder-decoder",
        "num_decoder_layers": config.decoder_layers,
        "intermediate_size": config.encoder_ffn_dim,
        "hidden_act": config.activation_function,
        "scale_embeddings": config.scale_embedding,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "norm_eps": 1e-5,
        "initializer_range": config.init_std,
        "decoder_start_token_id": config.decoder_start_token_id,
        # without a shared table the head is still tied to the decoder's: ours ties all three or none
        "tie_word_embeddings": config.tie_word_embeddings and config.share_encoder_decoder_embeddings,
    }


def convert_config(config: PreTrainedConfig) -> TransformerBlockConfig:
    """
    Returns our configuration for one of transformers; whether a Marian has logits' biases, its weights say.

    Raises:
        ValueError: there is no counterpart; the message names the field, its value and what to do.
    """
    if config.model_type not in SOURCES:
        raise ValueError(
            f"model_type={config.model_type!r} cannot be converted (known: {', '.join(SOURCES)}); keep using "
            f"transformers' own class"
        )
    is_encoder_decoder = config.model_type == "marian"
    require_neutral(config, {"is_encoder_decoder": (is_encoder_decoder,), **NEUTRAL})
    require_full_attention(config)
    kinds = {"gpt2": convert_gpt2, "marian": convert_marian}
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "use_cache": config.use_cache,
        **{name: special_id(config, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
        **kinds.get(config.model_type, convert_llama)(config),
    }
    try:
        return TransformerBlockConfig(**fields)
    except StrictDataclassError as error:
        raise ValueError(f"{config.model_type}: {error.__cause__ or error}") from error


def require_source(source: nn.Module) -> None:
    """Raises ValueError for a model that is not, in every weight, one of the classes of `SOURCES`."""
    if type(source) not in SOURCES.values():
        names = ", ".join(cls.__name__ for cls in SOURCES.values())
        raise ValueError(
            f"{type(source).__name__} cannot be converted (known: {names}); load the checkpoint with one of "
            f"them, and merge an adapter first"
        )
    if len(dtypes := {str(parameter.dtype) for parameter in source.parameters()}) > 1:
        raise ValueError(f"the weights are of {' and '.join(sorted(dtypes))}: give them one dtype")
    if any(parameter.is_meta for parameter in source.parameters()):
        raise ValueError("some weights are offloaded: load the model without device_map")
    for name, buffer in source.named_buffers():
        if name.endswith("inv_freq") and buffer.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"{name} was rounded to {buffer.dtype}, which no loaded checkpoint does: load the model with "
                f"from_pretrained(dtype={buffer.dtype}) instead of casting it"
            )


def sinusoids_like(table: torch.Tensor) -> torch.Tensor:
    """Returns the positions that ours compute, (N, D) in float32, for a table of that shape."""
    positions = torch.arange(len(table), device=table.device).unsqueeze(0)
    return sinusoidal_positions(positions, table.shape[1]).squeeze(0)


def require_sinusoids(name: str, table: torch.Tensor) -> None:
    """Raises ValueError if a Marian's table of positions does not hold the paper's sines and cosines."""
    difference = (table.float() - sinusoids_like(table)).abs().max().item()
    if not difference <= max(1e-3, torch.finfo(table.dtype).eps):  # float32 angles of far positions
        raise ValueError(
            f"marian: {name} differs by {difference:.2g} from the sinusoidal positions, and ours are always "
            f"computed; keep using transformers' own class, or delete the table from the checkpoint"
        )


def prepare_gpt2(source: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    """Transposes what a GPT-2 keeps transposed, and splits its queries, keys and values."""
    for name, module in source.named_modules():
        if isinstance(module, Conv1D):
            weights[f"{name}.weight"] = weights[f"{name}.weight"].T
    for name in [name for name in weights if ".attn.c_attn." in name]:
        for part, tensor in zip("qkv", weights.pop(name).chunk(3), strict=True):
            weights[name.replace(".attn.c_attn.", f".self_attn.{part}_proj.")] = tensor


def prepare_marian(source: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    """Takes away the tables that ours compute or share, and the logits' bias where it is 0."""
    for name in [name for name in weights if name.endswith(".embed_positions.weight")]:
        require_sinusoids(name, weights.pop(name))
    weights.pop("model.shared.weight", None)  # both stacks hold it as well, or tables of their own
    bias = weights.pop("final_logits_bias")
    if bias.any():
        weights["lm_head.bias"] = bias.squeeze(0)


def prepare_qwen2(source: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    """Gives a Qwen2 the bias of 0 that it lacks in the output projections of its attention."""
    for name in [name for name in weights if name.endswith(".o_proj.weight")]:
        weights[name.replace(".weight", ".bias")] = weights[name].new_zeros(len(weights[name]))


def convert_weights(source: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Returns copies of the source's weights under our names."""
    weights = {name: tensor.detach() for name, tensor in source.state_dict().items()}
    kind = source.config.model_type
    if prepare := {"gpt2": prepare_gpt2, "marian": prepare_marian, "qwen2": prepare_qwen2}.get(kind):
        prepare(source, weights)
    names = {"gpt2": GPT2_NAMES, "marian": MARIAN_NAMES}.get(kind, LLAMA_NAMES)
    converted = {}
    for name, tensor in weights.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        converted[name] = tensor.clone(memory_format=torch.contiguous_format)
    return converted


@torch.no_grad()
def compute_logits(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the logits in float32 or better, whatever the dtype of the weights, which stay as they are."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if model.config.model_type == "marian":  # half precision has rounded its table, and ours is no weight
        tables = [name for name in weights if name.endswith(".embed_positions.weight")]
        weights |= {name: sinusoids_like(weights[name]) for name in tables}
    dtype = torch.promote_types(model.dtype, torch.float32)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    mode = model.training
    logits = functional_call(model.eval(), weights, kwargs={**inputs, "use_cache": False}).logits
    model.train(mode)
    return logits


def require_same_logits(source: PreTrainedModel, model: TransformerBlockPreTrainedModel) -> None:
    """Raises ValueError unless both models give random tokens the same logits, to `TOLERANCE`."""
    config = model.config
    length = min(64, config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    inputs = {"input_ids": torch.randint(config.vocab_size, (2, length), generator=generator)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, : math.ceil(length / 2)].flip(1)
    inputs = {name: ids.to(source.device) for name, ids in inputs.items()}
    theirs, ours = compute_logits(source, inputs), compute_logits(model, inputs)
    difference, largest = (theirs - ours).abs().max().item(), theirs.abs().max().item()
    if not difference <= TOLERANCE * largest:
        raise ValueError(
            f"the converted model is not the source: logits of up to {largest:.3g} differ by {difference:.3g}"
        )


def convert(source: PreTrainedModel) -> TransformerBlockPreTrainedModel:
    """
    Returns a model of ours with a copy of the source's weights, which gives the same logits.

    Dtype, device, mode and generation config are the source's. A Marian without a shared table becomes a
    model without tied weights.

    Args:
        source: a GPT2LMHeadModel, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM or
            MarianMTModel.

    Raises:
        ValueError: the source is or has something that ours cannot represent; the message names it.

    Example:
        >>> convert(LlamaForCausalLM.from_pretrained("my-llama")).save_pretrained("my-model")
    """
    require_source(source)
    config = convert_config(source.config)  # refuses before the work of copying
    weights = convert_weights(source)
    config.lm_head_bias = "lm_head.bias" in weights
    is_pair = config.is_encoder_decoder
    head = TransformerBlockForConditionalGeneration if is_pair else TransformerBlockForCausalLM
    model, report = head.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=source.dtype,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, report[problem])):
            raise ValueError(f"the source's weights have {problem.replace('_', ' ')}: {', '.join(names[:3])}")
    model.generation_config = copy.deepcopy(source.generation_config)
    model.generation_config.pad_token_id = special_id(source.generation_config, "pad_token_id")
    model.to(source.device).train(source.training)
    require_same_logits(source, model)
    return model
