"""Tests that checkpoints of transformers become models of ours: the same text, or a refusal by name."""

import re

import pytest
import torch
from conftest import tiny_tokens
from safetensors.torch import load_file
from sources import LLAMA, SIZES, SOURCES, auto_class, build, logits, write
from torch.testing import assert_close
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, LlamaModel

from hf_transformer_block.convert import convert, convert_config


@pytest.mark.parametrize("kind", SOURCES)
def test_a_saved_copy_writes_the_sources_text(kind, tmp_path):
    build(kind).save_pretrained(tmp_path / "theirs")
    theirs = auto_class(build(kind)).from_pretrained(tmp_path / "theirs")
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    ours = convert(theirs)
    assert type(ours).__name__.startswith("TransformerBlockFor")
    assert not ours.training
    ours.save_pretrained(tmp_path / "ours")
    loaded = auto_class(theirs).from_pretrained(tmp_path / "ours")
    assert type(loaded) is type(ours)
    ids = tiny_tokens(2, 12)
    expected = logits(theirs, ids)
    assert expected.std() > 0.3
    for model in (ours, loaded):
        assert_close(logits(model, ids), expected, rtol=1e-5, atol=1e-5)
    varied = {"no_repeat_ngram_size": 1} if kind == "marian" else {"eos_token_id": None}
    for beams in (1, 3):
        written = [
            write(model, ids, max_new_tokens=15, num_beams=beams, **varied) for model in (loaded, theirs)
        ]
        assert torch.equal(*written)
        assert len(written[0][:, -15:].unique()) > 4
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(0)
    after = theirs.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)  # the source keeps its own weights


def test_generation_settings_are_the_sources():
    theirs = build("marian")
    theirs.generation_config.update(num_beams=3, bad_words_ids=[[60], [5]], max_length=20, length_penalty=0.6)
    ours = convert(theirs)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.generation_config is not theirs.generation_config
    ids = tiny_tokens(3, 9)
    assert torch.equal(write(ours, ids), write(theirs, ids))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "marian"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_dtypes_are_kept(kind, dtype, tmp_path):
    build(kind).to(dtype).save_pretrained(tmp_path / "theirs")
    auto = auto_class(build(kind))
    ours = convert(auto.from_pretrained(tmp_path / "theirs"))
    ours.save_pretrained(tmp_path / "ours")
    assert {tensor.dtype for tensor in load_file(tmp_path / "ours" / "model.safetensors").values()} == {dtype}
    assert auto.from_pretrained(tmp_path / "ours").dtype == ours.dtype == dtype
    exact = [auto.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("ours", "theirs")]
    ids = tiny_tokens(2, 12)
    assert_close(*(logits(model, ids) for model in exact), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.2, "initializer_range": 0.05}),
        ("llama", {"attention_dropout": 0.2, "initializer_range": 0.05}),
        ("marian", {"dropout": 0.3, "attention_dropout": 0.2, "init_std": 0.05}),
    ],
)
def test_what_acts_in_training_or_generation_only_is_kept(kind, fields):
    _, config_class, tiny = SOURCES[kind]
    config = config_class(**{**tiny, **fields, "use_cache": False, "eos_token_id": [2, 7]})
    ours = convert_config(config)
    dropout = 0.0 if kind == "llama" else 0.3
    assert (ours.dropout, ours.attention_dropout, ours.initializer_range) == (dropout, 0.2, 0.05)
    assert (ours.eos_token_id, ours.pad_token_id, ours.use_cache) == ([2, 7], 60, False)
    assert ours.bos_token_id == config.bos_token_id
    assert ours.decoder_start_token_id == (60 if kind == "marian" else None)
    assert ours.max_position_embeddings == 64


def test_the_first_llamas_have_no_padding_token():
    model_class, config_class, tiny = SOURCES["llama"]
    llama = model_class(config_class(**{**tiny, "pad_token_id": None}))
    llama.config.pad_token_id = llama.generation_config.pad_token_id = -1
    ours = convert(llama)
    assert (ours.config.pad_token_id, ours.generation_config.pad_token_id) == (None, None)


def test_the_mode_is_kept():
    theirs = build("llama").train()
    assert convert(theirs).training
    assert theirs.training


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mistral", {"sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}),
    ],
)
def test_windows_that_hide_nothing_are_none(kind, fields):
    theirs = build(kind, **fields)
    ours = convert(theirs)
    assert getattr(ours.config, "sliding_window", None) is None
    ids = tiny_tokens(2, 40)
    assert_close(logits(ours, ids), logits(theirs, ids), rtol=1e-5, atol=1e-5)
    written = [write(model, ids, max_new_tokens=20, eos_token_id=None) for model in (ours, theirs)]
    assert torch.equal(*written)


def test_models_that_are_no_whole_source_are_refused():
    class Other(LlamaForCausalLM):
        pass

    config = LlamaConfig(**LLAMA)
    mixed, cast = build("llama"), build("llama").bfloat16()
    mixed.lm_head.half()
    for model, message in (
        (Other(config), "Other cannot be converted (known: GPT2LMHeadModel, LlamaForCausalLM, MarianMTModel"),
        (LlamaModel(config), "LlamaModel cannot be converted"),
        (BertModel(BertConfig(**SIZES, intermediate_size=48)), "BertModel cannot be converted"),
        (mixed, "the weights are of torch.float16 and torch.float32: give them one dtype"),
        (cast, "model.rotary_emb.inv_freq was rounded to torch.bfloat16"),
        (LlamaForCausalLM(config).to("meta"), "some weights are offloaded"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            convert(model)


def test_another_computation_is_refused():
    theirs = build("llama")
    theirs.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: 1.01 * output)
    with pytest.raises(
        ValueError, match="the converted model is not the source: logits of up to .* differ by"
    ):
        convert(theirs)
    theirs = build("marian")
    theirs.model.decoder.embed_positions.weight[3, 5] += 0.01
    with pytest.raises(
        ValueError, match="decoder.embed_positions.weight differs by 0.01 from the sinusoidal"
    ):
        convert(theirs)
    theirs = build("llama")
    theirs.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="unexpected keys: model.layers.0.mlp.extra.bias"):
        convert(theirs)
