"""Tests that every cache writes what whole forwards without a cache write."""

import copy
import dataclasses
import math
import warnings

import pytest
import torch
from conftest import EACH_GENERATIVE, GENERATIVE, SHAPES, TINY, attending, model_name, pad, tiny_tokens
from tiny import EACH_PRESET, NEW, STATIC, assert_varied, build, by_hand, weaken, write, writer
from torch.testing import assert_close
from transformers import (
    CompileConfig,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    cache_utils,
)
from transformers.cache_utils import Cache, DynamicLayer, QuantizedCache
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_transformer_block import TransformerBlockForCausalLM
from hf_transformer_block.convert import convert
from hf_transformer_block.modeling_hf_transformer_block import CACHE


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")

ENCODER_DECODER = SHAPES[2]


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@EACH_PRESET
@EACH_GENERATIVE
def test_AT4_a_filled_cache_is_one_forward_in_float64(head, shape, preset, kind, backend):
    """In unequal parts, the first of them longer than a row's padding and the others not."""
    model = build(head, shape, preset).double()
    ids, mask = tiny_tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    name, mask_name, source = "input_ids", "attention_mask", {}
    if shape == ENCODER_DECODER:
        name, mask_name = "decoder_input_ids", "decoder_attention_mask"
        source = {"input_ids": tiny_tokens(2, 5), "attention_mask": torch.tensor([[1] * 5, [0, 0, 1, 1, 1]])}
    filled = DynamicCache()
    if kind is StaticCache:
        filled = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=16)
    parts, start = [], 0
    with attending(model, backend), torch.no_grad():
        full = model(**source, **{name: ids, mask_name: mask}, use_cache=False).logits
        for size in (5, 1, 1, 3, 2):
            end = start + size
            target = {name: ids[:, start:end], mask_name: mask[:, :end]}
            outputs = model(**source, **target, cache=filled, use_cache=True)
            parts.append(outputs.logits)
            start, filled = end, outputs[CACHE]
    real = mask.bool()
    assert_close(
        torch.cat(parts, dim=1)[real], full[real], rtol=0, atol=1e-6 if backend == "eager" else 1e-13
    )


@EACH_PRESET
def test_GN8_chunked_prefill_of_left_padded_prompts(preset):
    model = writer(TransformerBlockForCausalLM, "decoder", preset)
    rows = [tiny_tokens(length) for length in (11, 6, 1)]
    expected = torch.stack([by_hand(model, row) for row in rows])
    assert_varied(expected)
    ids, mask = pad(rows, "left").values()
    for kwargs in ({}, STATIC):
        assert torch.equal(write(model, ids, attention_mask=mask, **kwargs), expected)
        for size in (3, 4, 20):
            chunked = write(model, ids, attention_mask=mask, prefill_chunk_size=size, **kwargs)
            assert torch.equal(chunked, expected)


@pytest.mark.parametrize("backend", ["sdpa", "paged|eager"])
@EACH_PRESET
def test_continuous_batching_writes_what_one_row_writes(preset, backend):
    """The longest prompt is prefilled in parts, the blocks are small, and requests wait for one another."""
    model = writer(TransformerBlockForCausalLM, "decoder", preset)
    rows = [tiny_tokens(length) for length in (19, 1, 6, 4, 9)]
    expected = torch.stack([by_hand(model, row) for row in rows])
    assert_varied(expected)
    model.set_attn_implementation(backend)
    names = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    pages = {"page_size" if "page_size" in names else "block_size": 4}
    written = model.generate_batch(
        [row.tolist() for row in rows],
        generation_config=GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=24, max_batch_tokens=16, return_logprobs=True, **pages
        ),
        warmup=False,
        progress_bar=False,
    )
    written = [written[name] for name in sorted(written, key=lambda name: int(name.split("_")[-1]))]
    assert [(request.status, request.error) for request in written] == [(RequestStatus.FINISHED, None)] * 5
    assert [request.prompt_ids for request in written] == [row.tolist() for row in rows]
    assert [request.generated_tokens for request in written] == expected.tolist()
    model.set_attn_implementation("sdpa")
    for row, request, tokens in zip(rows, written, expected, strict=True):
        log_p = model(torch.cat([row, tokens])[None]).logits[0, len(row) - 1 : -1].log_softmax(dim=-1)
        ours = log_p.gather(1, tokens[:, None])[:, 0]
        assert_close(torch.tensor(request.logprobs), ours, rtol=0, atol=5e-6)


@pytest.mark.logs_deprecation  # transformers' assisted decoding uses an old way of its own
@pytest.mark.parametrize("preset", ["vaswani", "modern"])
@EACH_GENERATIVE
def test_assistants_and_prompt_lookup_save_forwards_and_change_nothing(head, shape, preset):
    model = writer(head, shape, preset)
    row = tiny_tokens(4).repeat(3)
    expected = by_hand(model, row)[None]
    assert_varied(expected)
    calls = []
    model.register_forward_pre_hook(lambda *args: calls.append(1))
    assert torch.equal(write(model, row[None], prompt_lookup_num_tokens=3), expected)
    smaller = writer(head, shape, preset, num_hidden_layers=1)
    calls.clear()
    assert torch.equal(write(model, row[None], assistant_model=smaller), expected)
    assert len(calls) <= NEW
    calls.clear()
    twin = copy.deepcopy(model)  # every proposal is accepted
    twin._forward_pre_hooks.clear()
    twin.generation_config.num_assistant_tokens = 4
    twin.generation_config.assistant_confidence_threshold = 0.0
    assert torch.equal(write(model, row[None], assistant_model=twin), expected)
    assert len(calls) <= math.ceil(NEW / 5) + 1


@pytest.mark.parametrize(
    ("head", "shape", "preset", "backend"),
    [
        *((*model, "modern", "eager") for model in GENERATIVE),
        *(pytest.param(*model, "modern", "inductor", marks=pytest.mark.slow) for model in GENERATIVE),
    ],
    ids=model_name,
)
def test_TC1_generate_compiled_with_a_static_cache(head, shape, preset, backend):
    model = writer(head, shape, preset)
    rows = [tiny_tokens(length) for length in (6, 3)]
    expected = torch.stack([by_hand(model, row) for row in rows])
    assert_varied(expected)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True  # generate compiles on accelerators only, unless so told
    batch = pad(rows, "left")
    kwargs = {"cache_implementation": "static", "compile_config": config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler
        written = write(model, batch["input_ids"], attention_mask=batch["attention_mask"], **kwargs)
    assert torch.equal(written, expected)
    assert "unique_graphs" in torch._dynamo.utils.counters["stats"]


class Stream:
    """Stands in for an accelerator's stream."""

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def wait_stream(self, other):
        pass


@EACH_GENERATIVE
def test_offloaded_layers_are_read_only_after_they_came_back(head, shape, monkeypatch):
    """Without an accelerator: an offloaded layer holds NaN until the library prefetches it."""
    away = {}

    def offload(layer):
        if layer.is_initialized and layer not in away:
            away[layer] = layer.keys, layer.values
            layer.keys, layer.values = (torch.full_like(states, torch.nan) for states in away[layer])

    def prefetch(layer):
        if layer in away:
            layer.keys, layer.values = away.pop(layer)

    monkeypatch.setattr(DynamicLayer, "offload", offload)
    monkeypatch.setattr(DynamicLayer, "prefetch", prefetch)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: Stream())
    model = writer(head, shape, "modern", num_hidden_layers=3)
    ids = tiny_tokens(2, 6)
    expected = write(model, ids)
    assert_varied(expected)
    assert torch.equal(write(model, ids, cache_implementation="offloaded"), expected)
    assert away


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs on a machine with CUDA")
@pytest.mark.parametrize("kind", ["offloaded", "offloaded_static"])
@EACH_GENERATIVE
def test_offloaded_caches_write_the_same(head, shape, kind):
    model = writer(head, shape, "vaswani").to("cuda")
    ids = tiny_tokens(2, 6).to("cuda")
    assert torch.equal(write(model, ids, cache_implementation=kind), write(model, ids))


RESIDUAL = 4


def quantized_cache(kind: str, config) -> QuantizedCache:
    """Returns a cache which keeps its prompt in few bits, and then all, each time `RESIDUAL` tokens came."""
    if kind == "fp8":
        if not hasattr(cache_utils, "Fp8QuantizedLayer"):
            pytest.skip("runs on versions of transformers that have an fp8 cache")
        return QuantizedCache(backend="fp8", config=config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hqq uses torch.jit, which is deprecated
        pytest.importorskip("hqq.core.quantize", reason="runs where the package hqq is installed")
    bits = int(kind.removeprefix("hqq"))
    return QuantizedCache(backend="hqq", config=config, nbits=bits, q_group_size=16, residual_length=RESIDUAL)


class RoundedLayer(DynamicLayer):
    """What a quantised layer shows to attention, from full-precision tensors that are rounded in place."""

    def __init__(self, kind: str, quantized):
        super().__init__()
        self.kind, self.quantized, self.scales, self.recent = kind, quantized, {}, 0

    def rounded(self, states: torch.Tensor, name: str) -> torch.Tensor:
        if self.kind == "fp8":  # scaled by the largest number of the prompt; 448 is the largest of the format
            scale = self.scales.setdefault(name, states.abs().max() / 448)
            return (states / scale).to(torch.float8_e4m3fn).float() * scale
        self.quantized.keys = states.new_zeros(0)  # it reads dtype and device there
        return self.quantized._dequantize(self.quantized._quantize(states.contiguous(), axis=0))

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:  # a prompt reads itself unrounded
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = self.rounded(key_states, "keys"), self.rounded(value_states, "values")
            return key_states, value_states
        if self.kind == "fp8":
            key_states, value_states = self.rounded(key_states, "keys"), self.rounded(value_states, "values")
        keys = self.keys = torch.cat([self.keys, key_states], dim=-2)
        values = self.values = torch.cat([self.values, value_states], dim=-2)
        self.recent += key_states.shape[-2]
        if self.kind != "fp8" and self.recent == RESIDUAL:
            self.recent = 0
            self.keys, self.values = self.rounded(keys, "keys"), self.rounded(values, "values")
        return keys, values


EACH_KIND = pytest.mark.parametrize("kind", ["fp8", "hqq8", "hqq4", "hqq2"])


@EACH_KIND
@pytest.mark.parametrize("preset", ["vaswani", "modern"])
@torch.no_grad()
def test_a_quantised_cache_is_rounded_keys_and_values(preset, kind):
    model = writer(TransformerBlockForCausalLM, "decoder", preset)
    ids, prompt = tiny_tokens(2, 16), 6
    quantized = quantized_cache(kind, model.config)
    rounded = Cache(layers=[RoundedLayer(kind, copy.deepcopy(layer)) for layer in quantized.layers])
    caches = (quantized, rounded, DynamicCache())
    ours, theirs, plain = (model(ids[:, :prompt], cache=filled).logits for filled in caches)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, plain)
    differences = []
    for index in range(prompt, ids.shape[1]):
        step = ids[:, index : index + 1]
        ours, theirs, plain = (model(step, cache=filled).logits for filled in caches)
        assert_close(ours, theirs, rtol=0, atol=1e-6)
        differences.append((ours - plain).abs().max())
    assert max(differences) > 1e-4  # the rounding shows


@EACH_KIND
@torch.no_grad()
def test_a_quantised_cache_does_to_llama_what_it_does_to_our_modern_decoder(kind):
    config = LlamaConfig(
        **{name: value for name, value in TINY.items() if name != "dropout"},
        num_key_value_heads=2,
        eos_token_id=None,
        pad_token_id=0,
    )
    llama = weaken(LlamaForCausalLM(config)).eval()
    model = convert(llama)
    ids = tiny_tokens(2, 6)
    written = [
        writing.generate(
            ids,
            max_new_tokens=2 * NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            **{CACHE: quantized_cache(kind, writing.config)},
        )
        for writing in (model, llama)
    ]
    assert torch.equal(written[0].sequences, written[1].sequences)
    assert_varied(written[0].sequences[:, 6:])
    assert_close(torch.stack(written[0].logits), torch.stack(written[1].logits), rtol=0, atol=1e-6)
