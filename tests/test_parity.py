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
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_transformer_block import (
    TransformerBlockConfig,
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockModel,
)


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


@torch.no_grad()
def from_gpt2(theirs: GPT2LMHeadModel) -> TransformerBlockForCausalLM:
    width = theirs.config.n_embd
    ours = TransformerBlockForCausalLM(
        TransformerBlockConfig(
            architecture="decoder",
            block_style="pre_norm",
            position_embedding="learned",
            hidden_act=theirs.config.activation_function,
            scale_embeddings=False,
            dropout=0.0,
            norm_eps=theirs.config.layer_norm_epsilon,
            max_position_embeddings=theirs.config.n_positions,
            **SIZES,
            **SPECIAL,
        )
    )
    ours.model.embed_tokens.weight.copy_(theirs.transformer.wte.weight)
    ours.model.embed_positions.weight.copy_(theirs.transformer.wpe.weight)
    ours.model.norm.load_state_dict(theirs.transformer.ln_f.state_dict())
    for block, layer in zip(ours.model.layers, theirs.transformer.h, strict=True):
        for index, projection in enumerate(
            (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
        ):
            part = slice(index * width, (index + 1) * width)
            projection.weight.copy_(layer.attn.c_attn.weight[:, part].T)
            projection.bias.copy_(layer.attn.c_attn.bias[part])
        for linear, conv in (
            (block.self_attn.o_proj, layer.attn.c_proj),
            (block.mlp.up_proj, layer.mlp.c_fc),
            (block.mlp.down_proj, layer.mlp.c_proj),
        ):
            linear.weight.copy_(conv.weight.T)
            linear.bias.copy_(conv.bias)
        block.self_attn_norm.load_state_dict(layer.ln_1.state_dict())
        block.mlp_norm.load_state_dict(layer.ln_2.state_dict())
    return ours.eval()


def test_gpt2():
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=40, **SPECIAL)
    theirs = randomise(GPT2LMHeadModel(config))
    ours = from_gpt2(theirs)
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


@torch.no_grad()
def from_llama(theirs: nn.Module, **kwargs) -> TransformerBlockForCausalLM:
    """Copies a Llama, or a relative of it that has the same names."""
    config = theirs.config
    ours = TransformerBlockForCausalLM(
        TransformerBlockConfig.modern(
            architecture="decoder",
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
            tie_word_embeddings=config.tie_word_embeddings,
            **SIZES,
            **SPECIAL,
            **kwargs,
        )
    )
    names = {"input_layernorm": "self_attn_norm", "post_attention_layernorm": "mlp_norm"}
    weights = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name] = tensor.clone()
    ours.load_state_dict(weights)
    return ours.eval()


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
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
    ours = from_llama(theirs)
    for length in (10, 40, 12):  # below, above and again below the length that a scaling starts from
        ids = tiny_tokens(2, length)
        assert_same_logits(ours(ids).logits, theirs(ids).logits)
    padded = left_padded(2, 9, 4)
    positions = (padded["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    real = padded["attention_mask"].bool()
    theirs_padded = theirs(
        **padded, position_ids=positions
    ).logits  # which count the padding if none are given
    assert_same_logits(ours(**padded).logits[real], theirs_padded[real])
    assert_same_text(ours, theirs, tiny_tokens(2, 8))
    assert_same_text(ours, theirs, tiny_tokens(2, 20), num_beams=3)  # beyond position 24 too


def test_qwen3_normalises_queries_and_keys():
    config = Qwen3Config(
        intermediate_size=48,
        head_dim=16,
        num_key_value_heads=2,
        max_position_embeddings=40,
        **SIZES,
        **SPECIAL,
    )
    theirs = randomise(Qwen3ForCausalLM(config))
    ours = from_llama(theirs, qk_norm=True)
    ids = tiny_tokens(2, 20)
    assert_same_logits(ours(ids).logits, theirs(ids).logits)


@torch.no_grad()
def from_marian(theirs: MarianMTModel) -> TransformerBlockForConditionalGeneration:
    config = theirs.config
    ours = TransformerBlockForConditionalGeneration(
        TransformerBlockConfig(
            num_decoder_layers=config.decoder_layers,
            intermediate_size=config.encoder_ffn_dim,
            hidden_act=config.activation_function,
            decoder_start_token_id=config.decoder_start_token_id,
            max_position_embeddings=config.max_position_embeddings,
            dropout=0.0,
            **SIZES,
            **SPECIAL,
        )
    )
    assert theirs.final_logits_bias.abs().max() == 0
    names = {
        "self_attn_layer_norm": "self_attn_norm",
        "encoder_attn_layer_norm": "cross_attn_norm",
        "encoder_attn": "cross_attn",
        "final_layer_norm": "mlp_norm",
        "out_proj": "o_proj",
        "fc1": "mlp.up_proj",
        "fc2": "mlp.down_proj",
    }
    weights = {}
    for name, tensor in theirs.state_dict().items():
        if "embed_positions" in name or name in ("final_logits_bias", "model.shared.weight"):
            continue
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name] = tensor.clone()
    ours.load_state_dict(weights)
    return ours.eval()


def test_marian():
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
        scale_embedding=True,
        max_position_embeddings=40,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        **SPECIAL,
    )
    theirs = randomise(MarianMTModel(config))
    ours = from_marian(theirs)
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
