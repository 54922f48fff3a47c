"""Tests of generation: every way to write the same tokens writes the same tokens."""

import pytest
import torch
from conftest import EACH_GENERATIVE, GENERATIVE, POSITIONS, pad, tiny_config, tiny_tokens
from tiny import NEW, STATIC, assert_varied, by_hand, generate, write, writer
from torch import nn
from torch.testing import assert_close
from transformers import DynamicCache

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
)
from hf_transformer_block.modeling_hf_transformer_block import CACHE


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")


def pre_norm_writer(head, shape: str, **kwargs) -> nn.Module:
    """Returns a model whose tokens vary and which never stops early; encoder and decoder differ in depth."""
    values = {
        "initializer_range": 0.3,
        "block_style": "pre_norm",
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    if shape == "encoder-decoder":
        values |= {"num_hidden_layers": 1, "num_decoder_layers": 3}
    return head(tiny_config(shape, **{**values, **kwargs})).eval()


@pytest.mark.parametrize("positions", POSITIONS)
@EACH_GENERATIVE
def test_GN1_cached_uncached_static_and_by_hand_are_equal(head, shape, positions):
    model = pre_norm_writer(head, shape, position_embedding=positions, num_key_value_heads=2)
    ids = tiny_tokens(3, 6)
    expected = torch.stack([by_hand(model, row) for row in ids])
    assert_varied(expected)
    for kwargs in ({}, {"use_cache": False}, STATIC):
        assert torch.equal(write(model, ids, **kwargs), expected)


@pytest.mark.parametrize("kwargs", [{"num_beams": 4}, {"num_beams": 3, "length_penalty": 2.0}])
@EACH_GENERATIVE
def test_beam_search_with_and_without_cache(head, shape, kwargs):
    model = pre_norm_writer(head, shape)
    ids = tiny_tokens(2, 6)
    kwargs |= {"num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    cached, uncached = (generate(model, ids, use_cache=use_cache, **kwargs) for use_cache in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    assert_close(cached.sequences_scores, uncached.sequences_scores, rtol=0, atol=1e-4)
    assert_varied(cached.sequences[:, -NEW:])
    scores = cached.sequences_scores.view(2, 3)
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    # the score is the sum of the written tokens' log-probabilities over length^penalty
    written = cached.sequences
    prompt = 1 if shape == "encoder-decoder" else ids.shape[1]
    sources = ids.repeat_interleave(3, dim=0)
    inputs = (sources, None, None, written) if shape == "encoder-decoder" else (written,)
    log_p = model(*inputs).logits.log_softmax(dim=-1)[:, prompt - 1 : -1]
    total = log_p.gather(2, written[:, prompt:, None]).sum(dim=(1, 2))
    expected = total / NEW ** kwargs.get("length_penalty", 1.0)
    assert_close(cached.sequences_scores, expected, rtol=1e-4, atol=1e-4)


@EACH_GENERATIVE
def test_sampling_follows_the_seed(head, shape):
    model = pre_norm_writer(head, shape, initializer_range=0.1)
    ids = tiny_tokens(2, 6)
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append(write(model, ids, do_sample=True, top_k=0, num_return_sequences=2))
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])
    assert len(samples[0].unique(dim=0)) == 4


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"use_cache": False}, {"num_beams": 3}, STATIC],
    ids=["dynamic", "uncached", "beams", "static"],
)
@pytest.mark.parametrize("positions", POSITIONS)
@EACH_GENERATIVE
def test_GN8_a_padded_batch_writes_what_its_rows_write(head, shape, positions, kwargs):
    model = pre_norm_writer(head, shape, position_embedding=positions)
    rows = [tiny_tokens(length) for length in (7, 3, 1)]
    alone = torch.cat([write(model, row[None], **kwargs) for row in rows])
    assert_varied(alone)
    for side in ("left", "right") if shape == "encoder-decoder" else ("left",):
        batch = pad(rows, side)
        assert torch.equal(write(model, batch.pop("input_ids"), **batch, **kwargs), alone)


@EACH_GENERATIVE
def test_GN3_an_empty_cache_is_no_cache(head, shape):
    model = pre_norm_writer(head, shape)
    ids = tiny_tokens(2, 5)
    inputs = {"decoder_input_ids": ids} if shape == "encoder-decoder" else {}
    assert_close(
        model(ids, **inputs, cache=DynamicCache()).logits, model(ids, **inputs).logits, rtol=0, atol=0
    )


@EACH_GENERATIVE
def test_inputs_embeds_write_what_their_ids_write(head, shape):
    model = pre_norm_writer(head, shape)
    ids = tiny_tokens(2, 6)
    expected = write(model, ids)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(write(model, None, inputs_embeds=embeds), expected)
    assert_varied(expected)


def test_GN5_generating_on_with_the_returned_cache():
    model = pre_norm_writer(*GENERATIVE[0])
    ids = tiny_tokens(2, 6)
    expected = generate(model, ids)
    first = generate(model, ids, max_new_tokens=5, return_dict_in_generate=True)
    rest = generate(model, first.sequences, max_new_tokens=NEW - 5, **{CACHE: first[CACHE]})
    assert torch.equal(rest, expected)
    more = torch.cat([first.sequences, tiny_tokens(2, 3)], dim=1)  # a second turn of a conversation
    first = generate(model, ids, max_new_tokens=5, return_dict_in_generate=True)
    assert torch.equal(generate(model, more, **{CACHE: first[CACHE]}), generate(model, more))


@pytest.mark.parametrize("start", [1, 7])
def test_GN9_an_encoder_decoder_starts_with_its_token_and_stops_at_the_end(start):
    model = pre_norm_writer(*GENERATIVE[1], decoder_start_token_id=start)
    source = tiny_tokens(2, 6)
    written = generate(model, source)
    assert (written[:, 0] == start).all()
    fed = torch.full((2, 1), start)
    assert torch.equal(written[:, 1], model(source, decoder_input_ids=fed).logits[:, -1].argmax(dim=-1))
    end = written[0, 4].item()
    stopped = generate(model, source, eos_token_id=end)[0]
    where = (written[0] == end).nonzero()[0].item()
    assert torch.equal(stopped[: where + 1], written[0, : where + 1])
    assert (stopped[where + 1 :] == model.config.pad_token_id).all()


@EACH_GENERATIVE
def test_attentions_and_hidden_states_of_every_step(head, shape):
    model = pre_norm_writer(head, shape)
    out = generate(
        model,
        tiny_tokens(1, 6),
        return_dict_in_generate=True,
        output_attentions=True,
        output_hidden_states=True,
        output_logits=True,
    )
    prefix = "decoder_" if shape == "encoder-decoder" else ""
    layers, first = (3, 1) if shape == "encoder-decoder" else (2, 6)
    assert len(out[f"{prefix}attentions"]) == len(out[f"{prefix}hidden_states"]) == len(out.logits) == NEW
    for step, attentions in enumerate(out[f"{prefix}attentions"]):
        assert len(attentions) == layers
        assert attentions[0].shape[-2:] == (first if step == 0 else 1, first + step)
        assert_close(attentions[-1].sum(dim=-1), torch.ones(attentions[-1].shape[:-1]), rtol=0, atol=1e-5)
    assert {len(states) for states in out[f"{prefix}hidden_states"]} == {layers + 1}
    if prefix:
        assert {step[0].shape[-2:] for step in out.cross_attentions} == {(1, 6)}


def test_modern_decoders_write_the_same_in_every_backend():
    model = writer(*GENERATIVE[0], "modern")
    ids = tiny_tokens(2, 6)
    expected = write(model, ids)
    assert_varied(expected)
    model.set_attn_implementation("eager")
    assert torch.equal(write(model, ids), expected)


def test_generation_keys_in_an_old_config_json_do_no_harm():
    old = tiny_config("decoder", max_length=7, num_beams=3, do_sample=True, forced_bos_token_id=None)
    model = TransformerBlockForCausalLM(old)
    assert not {"max_length", "num_beams", "do_sample"} & set(old.to_dict())
    assert model.generation_config.eos_token_id == 2
    assert model.generation_config.pad_token_id == 0
    seq2seq = TransformerBlockForConditionalGeneration(
        tiny_config("encoder-decoder", decoder_start_token_id=5)
    )
    assert seq2seq.generation_config.decoder_start_token_id == 5
