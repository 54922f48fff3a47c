"""Tests of generation: every way to write the same tokens writes the same tokens."""

import pytest
import torch
from conftest import LM_HEADS, POSITIONS, model_name, tiny_config, tiny_tokens
from torch import nn
from torch.testing import assert_close
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache

from hf_transformer_block import (
    TransformerBlockConfig,
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
)
from hf_transformer_block.modeling_hf_transformer_block import CACHE


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")

GENERATIVE = (LM_HEADS[0], LM_HEADS[2])
EACH_GENERATIVE = pytest.mark.parametrize(("head", "shape"), GENERATIVE, ids=model_name)
NEW = 12


def writer(head, shape: str, **kwargs) -> nn.Module:
    """Returns a model whose tokens vary and which never stops early; encoder and decoder differ in depth."""
    values = {
        "initializer_range": 0.3,
        "block_style": "pre_norm",
        "tie_word_embeddings": False,
        "eos_token_id": None,
    }
    if shape == "encoder-decoder":
        values |= {"num_hidden_layers": 1, "num_decoder_layers": 3}
    torch.manual_seed(4)  # one with which tokens vary
    model = head(tiny_config(shape, **{**values, **kwargs})).eval()
    for table in {model.get_input_embeddings(), getattr(model.model, "decoder", model.model).embed_tokens}:
        torch.nn.init.normal_(table.weight, std=0.3)  # far above the positions
    return model


def write(model: nn.Module, ids: torch.Tensor, **kwargs):
    """Generates `NEW` tokens greedily."""
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


def assert_varied(tokens: torch.Tensor) -> None:
    """A model that repeats one token would agree with everything."""
    rows = tokens[:, -NEW:]
    assert len(rows.unique()) > 4, rows
    assert sum(len(row.unique()) for row in rows) > 2 * len(rows), rows


def greedy_by_hand(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Takes the most likely token of whole forwards, without cache or generate."""
    written = ids
    if model.config.is_encoder_decoder:
        written = torch.full((len(ids), 1), model.config.decoder_start_token_id)
    for _ in range(NEW):
        inputs = (ids, None, None, written) if model.config.is_encoder_decoder else (written,)
        logits = model(*inputs, use_cache=False).logits[:, -1]
        written = torch.cat([written, logits.argmax(dim=-1, keepdim=True)], dim=1)
    return written


@pytest.mark.parametrize("positions", POSITIONS)
@EACH_GENERATIVE
def test_GN1_cached_uncached_static_and_by_hand_are_equal(head, shape, positions):
    model = writer(head, shape, position_embedding=positions, num_key_value_heads=2)
    ids = tiny_tokens(3, 6)
    expected = greedy_by_hand(model, ids)
    assert_varied(expected)
    assert torch.equal(write(model, ids), expected)
    assert torch.equal(write(model, ids, use_cache=False), expected)
    static = write(model, ids, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, expected)


@pytest.mark.parametrize("kwargs", [{"num_beams": 4}, {"num_beams": 3, "length_penalty": 2.0}])
@EACH_GENERATIVE
def test_beam_search_with_and_without_cache(head, shape, kwargs):
    model = writer(head, shape)
    ids = tiny_tokens(2, 6)
    kwargs |= {"num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
    cached, uncached = (write(model, ids, use_cache=use_cache, **kwargs) for use_cache in (True, False))
    assert torch.equal(cached.sequences, uncached.sequences)
    assert_close(cached.sequences_scores, uncached.sequences_scores, rtol=0, atol=1e-4)
    assert_varied(cached.sequences)
    assert len(cached.sequences.unique(dim=0)) == 6
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
    model = writer(head, shape, initializer_range=0.1)
    ids = tiny_tokens(2, 6)
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append(write(model, ids, do_sample=True, top_k=0, num_return_sequences=2))
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])
    assert len(samples[0].unique(dim=0)) == 4


@pytest.mark.logs_deprecation  # transformers' assisted decoding uses an old way of its own
@EACH_GENERATIVE
def test_assistants_and_prompt_lookup_do_not_change_the_text(head, shape):
    model = writer(head, shape)
    ids = tiny_tokens(1, 4).repeat(1, 3)
    expected = write(model, ids)
    assert_varied(expected)
    assistant = writer(head, shape, num_hidden_layers=1)
    assert torch.equal(write(model, ids, assistant_model=assistant), expected)
    assert torch.equal(write(model, ids, assistant_model=model), expected)  # every proposal is accepted
    assert torch.equal(write(model, ids, prompt_lookup_num_tokens=3), expected)


def pad(rows: list[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    ids, mask = (
        torch.zeros(len(rows), longest, dtype=torch.long),
        torch.zeros(len(rows), longest, dtype=torch.long),
    )
    for index, row in enumerate(rows):
        where = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[index, where], mask[index, where] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    "kwargs", [{}, {"use_cache": False}, {"num_beams": 3}, {"cache_implementation": "static"}]
)
@pytest.mark.parametrize("positions", POSITIONS)
@EACH_GENERATIVE
def test_GN8_a_padded_batch_writes_what_its_rows_write(head, shape, positions, kwargs):
    model = writer(head, shape, position_embedding=positions)
    if "cache_implementation" in kwargs:
        kwargs = {**kwargs, "disable_compile": True}
    rows = [tiny_tokens(length) for length in (7, 3, 1)]
    alone = torch.cat([write(model, row[None], **kwargs)[:, -NEW:] for row in rows])
    assert_varied(alone)
    for side in ("left", "right") if shape == "encoder-decoder" else ("left",):
        batch = pad(rows, side)
        assert torch.equal(write(model, batch.pop("input_ids"), **batch, **kwargs)[:, -NEW:], alone)


def test_GN8_left_padded_prompts_of_a_decoder_of_an_encoder_decoder():
    model = writer(*GENERATIVE[1])
    sources = tiny_tokens(2, 5)
    prompts = [tiny_tokens(4), tiny_tokens(2)]
    alone = [
        write(model, source[None], decoder_input_ids=prompt[None])[:, -NEW:]
        for source, prompt in zip(sources, prompts, strict=True)
    ]
    batch = pad(prompts, "left")
    decoder = {"decoder_input_ids": batch["input_ids"], "decoder_attention_mask": batch["attention_mask"]}
    assert torch.equal(write(model, sources, **decoder)[:, -NEW:], torch.cat(alone))
    assert_varied(torch.cat(alone))


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("positions", POSITIONS)
@EACH_GENERATIVE
def test_AT4_prefill_and_a_few_tokens_at_a_time_is_one_forward(head, shape, positions, kind):
    model = writer(head, shape, position_embedding=positions)
    ids = tiny_tokens(2, 16)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    if shape == "encoder-decoder":
        encoded = model.model.encoder(tiny_tokens(2, 5))
        whole, name, mask_name = {"encoder_outputs": encoded}, "decoder_input_ids", "decoder_attention_mask"
    else:
        whole, name, mask_name = {}, "input_ids", "attention_mask"
    full = model(**whole, **{name: ids, mask_name: mask}).logits
    if kind is StaticCache:
        cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=20)
    else:
        cache = DynamicCache()
    start, parts = 0, []
    for size in (6, 1, 2, 3, 4):
        end = start + size
        out = model(
            **whole, **{name: ids[:, start:end], mask_name: mask[:, :end]}, cache=cache, use_cache=True
        )
        parts.append(out.logits)
        start, cache = end, out[CACHE]
    real = mask.bool()
    assert_close(torch.cat(parts, dim=1)[real], full[real], rtol=0, atol=2e-4)


@EACH_GENERATIVE
def test_GN3_an_empty_cache_is_no_cache(head, shape):
    model = writer(head, shape)
    ids = tiny_tokens(2, 5)
    inputs = {"decoder_input_ids": ids} if shape == "encoder-decoder" else {}
    assert_close(
        model(ids, **inputs, cache=DynamicCache()).logits, model(ids, **inputs).logits, rtol=0, atol=0
    )


def test_chunked_prefill_writes_the_same():
    model = writer(*GENERATIVE[0])
    ids = tiny_tokens(2, 11)
    expected = write(model, ids)
    assert_varied(expected)
    for size in (4, 5, 20):
        assert torch.equal(write(model, ids, prefill_chunk_size=size), expected)


@EACH_GENERATIVE
def test_inputs_embeds_write_what_their_ids_write(head, shape):
    model = writer(head, shape)
    ids = tiny_tokens(2, 6)
    expected = write(model, ids)[:, -NEW:]
    embeds = model.get_input_embeddings()(ids)
    written = model.generate(inputs_embeds=embeds, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(written[:, -NEW:], expected)
    assert_varied(expected)


def test_GN5_generating_on_with_the_returned_cache():
    model = writer(*GENERATIVE[0])
    ids = tiny_tokens(2, 6)
    expected = write(model, ids)
    first = write(model, ids, max_new_tokens=5, return_dict_in_generate=True)
    rest = write(model, first.sequences, max_new_tokens=NEW - 5, **{CACHE: first[CACHE]})
    assert torch.equal(rest, expected)
    more = torch.cat([first.sequences, tiny_tokens(2, 3)], dim=1)  # a second turn of a conversation
    first = write(model, ids, max_new_tokens=5, return_dict_in_generate=True)
    assert torch.equal(write(model, more, **{CACHE: first[CACHE]}), write(model, more))


@pytest.mark.parametrize("start", [1, 7])
def test_GN9_an_encoder_decoder_starts_with_its_token_and_stops_at_the_end(start):
    model = writer(*GENERATIVE[1], decoder_start_token_id=start)
    source = tiny_tokens(2, 6)
    written = write(model, source)
    assert (written[:, 0] == start).all()
    fed = torch.full((2, 1), start)
    assert torch.equal(written[:, 1], model(source, decoder_input_ids=fed).logits[:, -1].argmax(dim=-1))
    end = written[0, 4].item()
    stopped = write(model, source, eos_token_id=end)[0]
    where = (written[0] == end).nonzero()[0].item()
    assert torch.equal(stopped[: where + 1], written[0, : where + 1])
    assert (stopped[where + 1 :] == model.config.pad_token_id).all()


@EACH_GENERATIVE
def test_attentions_and_hidden_states_of_every_step(head, shape):
    model = writer(head, shape)
    out = write(
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
    config = TransformerBlockConfig.modern(
        architecture="decoder",
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        qk_norm=True,
        initializer_range=0.5,
        eos_token_id=None,
    )
    model = TransformerBlockForCausalLM(config).eval()
    ids = tiny_tokens(2, 6)
    expected = write(model, ids)
    assert_varied(expected)
    model.set_attn_implementation("eager")
    assert torch.equal(write(model, ids), expected)


def test_continuous_batching_writes_what_generate_writes():
    model = writer(*GENERATIVE[0], num_key_value_heads=2)
    prompts = [tiny_tokens(length) for length in (7, 3, 5)]
    expected = torch.cat([write(model, prompt[None])[:, -NEW:] for prompt in prompts])
    assert_varied(expected)
    model.set_attn_implementation("paged|eager")
    written = model.generate_batch(
        [prompt.tolist() for prompt in prompts],
        generation_config=GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32),
        warmup=False,
        progress_bar=False,
    )
    assert [written[name].generated_tokens for name in sorted(written)] == expected.tolist()


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


def test_GN11_a_model_with_an_invalid_generation_config_saves_once_it_is_mended(tmp_path):
    """transformers refuses before it writes the weights, so a training must check before its first step."""
    model = writer(*GENERATIVE[0])
    model.generation_config = GenerationConfig(temperature=0.7, do_sample=False)
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path)
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path)
    loaded = TransformerBlockForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.temperature == 0.7
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
