"""Tests of the family against transformers' own classes with the same random weights."""

import pytest
import torch
from conftest import tiny_tokens
from torch import nn
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_transformer_block import TransformerBlockConfig, TransformerBlockModel
from hf_transformer_block.convert import convert


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


@torch.no_grad()
def randomise(model: nn.Module) -> nn.Module:
    """Draws every weight, also those that start at 0 or 1; the larger, the more the written tokens vary."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
    return model.eval()


def copy_linear(ours: nn.Linear, theirs: nn.Module) -> None:
    ours.load_state_dict({name: tensor.clone() for name, tensor in theirs.state_dict().items()})


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.3
    assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def assert_same_text(ours: nn.Module, theirs: nn.Module, ids: torch.Tensor, **kwargs) -> None:
    written = [model.generate(ids, max_new_tokens=12, do_sample=False, **kwargs) for model in (ours, theirs)]
    assert torch.equal(*written)
    assert len(written[0][:, -12:].unique()) > 4


def left_padded(batch: int, length: int, padding: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :padding] = 0
    return {"input_ids": tiny_tokens(batch, length) * mask, "attention_mask": mask}


def test_gpt2():
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=40, **SPECIAL, **no_dropout
    )
    theirs = randomise(GPT2LMHeadModel(config))
    ours = convert(theirs)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    ids = tiny_tokens(2, 20)
    assert_same_logits(ours(ids).logits, theirs(ids).logits)
    ours_loss, theirs_loss = (model(ids, labels=ids).loss for model in (ours, theirs))
    assert_close(ours_loss, theirs_loss, rtol=1e-5, atol=0)
    ours.train()(ids, labels=ids).loss.backward()
    theirs_loss.backward()
    gradient = theirs.transformer.h[1].mlp.c_fc.weight.grad.T
    assert_close(ours.model.layers[1].mlp.up_proj.weight.grad, gradient, rtol=1e-4, atol=1e-5)
    assert_same_text(ours.eval(), theirs, ids)
    assert_same_text(
        ours, theirs, **{"ids" if k == "input_ids" else k: v for k, v in left_padded(2, 9, 4).items()}
    )


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
}


@pytest.mark.parametrize(
    ("rope", "kwargs"),
    [
        ({"rope_type": "default"}, {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ({"rope_type": "default"}, {"num_key_value_heads": 2, "head_dim": 12}),
        ({"rope_type": "default", "rope_theta": 500.0}, {"num_key_value_heads": 1}),
        ({"rope_type": "linear", "factor": 3.0}, {}),
        ({"rope_type": "dynamic", "factor": 2.0}, {}),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, {}),
        ({"rope_type": "llama3", **LLAMA3}, {}),
        ({"rope_type": "longrope", **LONGROPE}, {}),
        ({"rope_type": "proportional", "factor": 2.0}, {}),
        ({"rope_type": "default"}, {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.1}),
    ],
    ids=lambda value: value.get("rope_type") if "rope_type" in value else "-".join(value) or "plain",
)
def test_llama(rope, kwargs):
    config = LlamaConfig(
        intermediate_size=48,
        max_position_embeddings=24,
        rope_parameters={"rope_theta": 10000.0, **rope},
        **SIZES,
        **SPECIAL,
        **{"num_key_value_heads": 2, "tie_word_embeddings": False, **kwargs},
    )
    theirs = randomise(LlamaForCausalLM(config))
    ours = convert(theirs)
    for length in (10, 40, 12):  # below, above and again below the length that a scaling starts from
        ids = tiny_tokens(2, length)
        assert_same_logits(ours(ids).logits, theirs(ids).logits)
    padded = left_padded(2, 9, 4)
    positions = (padded["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    real = padded["attention_mask"].bool()
    # without positions, theirs would count the padding
    theirs_padded = theirs(**padded, position_ids=positions).logits
    assert_same_logits(ours(**padded).logits[real], theirs_padded[real])
    assert_same_text(ours, theirs, tiny_tokens(2, 8))
    assert_same_text(ours, theirs, tiny_tokens(2, 20), num_beams=3)  # beyond position 24 too


@pytest.mark.parametrize(
    ("config_class", "model_class", "kwargs"),
    [
        (MistralConfig, MistralForCausalLM, {"head_dim": 12, "sliding_window": 40}),
        (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
        (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "attention_bias": True}),
    ],
    ids=["mistral", "qwen2", "qwen3"],
)
def test_relatives_of_llama(config_class, model_class, kwargs):
    config = config_class(
        intermediate_size=48,
        num_key_value_heads=2,
        max_position_embeddings=40,
        **SIZES,
        **SPECIAL,
        **kwargs,
    )
    theirs = randomise(model_class(config))
    ours = convert(theirs)
    ids = tiny_tokens(2, 20)
    assert_same_logits(ours(ids).logits, theirs(ids).logits)
    losses = [model(ids, labels=ids).loss for model in (ours, theirs)]
    assert_close(*losses, rtol=1e-5, atol=0)
    assert_same_text(ours, theirs, ids)


@pytest.mark.parametrize(
    ("has_bias", "kwargs"),
    [
        (False, {}),
        (True, {}),
        (False, {"share_encoder_decoder_embeddings": False}),
        (True, {"tie_word_embeddings": False, "scale_embedding": False}),
    ],
    ids=["one table", "bias", "two tables", "three tables, bias"],
)
def test_marian(has_bias, kwargs):
    config = MarianConfig(
        vocab_size=61,
        d_model=32,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        activation_function="swish",
        max_position_embeddings=40,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        **SPECIAL,
        **{"scale_embedding": True, **kwargs},
    )
    theirs = randomise(MarianMTModel(config))
    if has_bias:
        theirs.final_logits_bias.normal_()
    ours = convert(theirs)
    assert ours.config.lm_head_bias == has_bias
    assert ours.config.tie_word_embeddings == (not kwargs)
    source = left_padded(2, 9, 0)
    source["attention_mask"][1, 6:] = 0
    target = tiny_tokens(2, 7)
    assert_same_logits(
        ours(**source, decoder_input_ids=target).logits, theirs(**source, decoder_input_ids=target).logits
    )
    losses = [model(**source, labels=target).loss for model in (ours, theirs)]
    assert_close(*losses, rtol=1e-5, atol=0)
    ids = source.pop("input_ids")
    source["no_repeat_ngram_size"] = 1  # a tied post-norm model that learned nothing likes to repeat
    assert_same_text(ours, theirs, ids, **source)
    assert_same_text(ours, theirs, ids, num_beams=3, **source)


@torch.no_grad()
def from_bert(theirs: BertModel) -> TransformerBlockModel:
    """Returns BERT's blocks; its embeddings have a norm and segments that ours have not."""
    ours = TransformerBlockModel(
        TransformerBlockConfig(
            architecture="encoder",
            position_embedding="none",
            hidden_act=theirs.config.hidden_act,
            scale_embeddings=False,
            dropout=0.0,
            norm_eps=theirs.config.layer_norm_eps,
            intermediate_size=theirs.config.intermediate_size,
            **SIZES,
        )
    )
    for mine, layer in zip(ours.layers, theirs.encoder.layer, strict=True):
        parts = {
            mine.self_attn.q_proj: layer.attention.self.query,
            mine.self_attn.k_proj: layer.attention.self.key,
            mine.self_attn.v_proj: layer.attention.self.value,
            mine.self_attn.o_proj: layer.attention.output.dense,
            mine.self_attn_norm: layer.attention.output.LayerNorm,
            mine.mlp.up_proj: layer.intermediate.dense,
            mine.mlp.down_proj: layer.output.dense,
            mine.mlp_norm: layer.output.LayerNorm,
        }
        for part, source in parts.items():
            copy_linear(part, source)
    return ours.eval()


def test_berts_blocks_give_its_hidden_states():
    theirs = randomise(BertModel(BertConfig(**SIZES, intermediate_size=48, pad_token_id=0)))
    inputs = left_padded(2, 9, padding=3)
    embedded = theirs.embeddings(input_ids=inputs["input_ids"])
    mask = inputs["attention_mask"]
    states = from_bert(theirs)(inputs_embeds=embedded, attention_mask=mask).last_hidden_state
    expected = theirs(input_ids=inputs["input_ids"], attention_mask=mask).last_hidden_state
    assert_same_logits(states[mask.bool()], expected[mask.bool()])
