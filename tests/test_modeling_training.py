"""Tests of training: gradients of every parameter, dropout, gradient checkpointing and torch.compile."""

import warnings

import pytest
import torch
from conftest import (
    EACH_LM_HEAD,
    LM_HEADS,
    MODELS,
    assert_same_step,
    checkpoint,
    model_name,
    step,
    tiny_config,
    tiny_inputs,
    tiny_labels,
    tiny_tokens,
)
from torch import nn
from torch.testing import assert_close

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForSequenceClassification,
    TransformerBlockModel,
)
from hf_transformer_block.modeling_hf_transformer_block import CACHE, TransformerBlockDropout


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")

HEADS = MODELS[3:]
EACH_HEAD = pytest.mark.parametrize(("head", "shape"), HEADS, ids=model_name)
MODERN = {
    "block_style": "pre_norm",
    "norm_type": "rms_norm",
    "gated_mlp": True,
    "position_embedding": "rotary",
}


@pytest.mark.parametrize(
    "kwargs",
    [
        {"position_embedding": "learned"},
        {**MODERN, "num_key_value_heads": 2, "qk_norm": True},
        {"tie_word_embeddings": False},
        {"block_style": "tutorial"},
    ],
    ids=["learned", "modern", "untied", "tutorial"],
)
@EACH_HEAD
def test_AC6_every_parameter_gets_a_gradient(head, shape, kwargs):
    model = head(tiny_config(shape, **kwargs)).train()
    inputs = tiny_inputs(model.config, batch=4)
    gradients = step(model, {**inputs, **tiny_labels(model, inputs)})
    del gradients["loss"]
    assert gradients.keys() == dict(model.named_parameters()).keys()
    # what adds one number to all scores changes no softmax: its true gradient is 0
    for name in [name for name in gradients if name.endswith(("k_proj.bias", "qa_outputs.bias"))]:
        del gradients[name]
    assert not [name for name, grad in gradients.items() if grad.abs().max() == 0]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("head", "shape", "rate"),
    [
        *((head, shape, rate) for head, shape in LM_HEADS for rate in ("dropout", "attention_dropout")),
        (TransformerBlockForSequenceClassification, "encoder", "classifier_dropout"),
    ],
    ids=model_name,
)
def test_TU6_each_rate_has_an_effect_in_training_only(head, shape, rate, implementation):
    model = head(tiny_config(shape, attn_implementation=implementation, **{rate: 0.5}))
    inputs = tiny_inputs(model.config)
    asked = {} if rate == "classifier_dropout" else {"logits_to_keep": 0}
    first, second = (model.train()(**inputs, **asked).logits for _ in range(2))
    assert (first - second).abs().max() > 1e-2
    first, second = (model.eval()(**inputs).logits for _ in range(2))
    assert torch.equal(first, second)
    without = head(tiny_config(shape, attn_implementation=implementation))
    without.load_state_dict(model.state_dict())
    assert_close(without.train()(**inputs).logits, first, rtol=0, atol=1e-6)


def test_dropout_stands_where_the_paper_has_it():
    """On a stack's embeddings and on each residual branch: 2 in an encoder's block, 3 in a decoder's."""
    model = TransformerBlockModel(tiny_config("encoder-decoder", dropout=0.25, num_decoder_layers=3)).train()
    calls = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            assert module.p == 0.25
            module.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    model(**tiny_inputs(model.config))
    assert calls == [(2, 7, 32)] * (1 + 2 * 2) + [(2, 5, 32)] * (1 + 3 * 3)


def test_dropout_on_a_cpu_drops_each_element_alike_and_keeps_the_mean():
    dropout = TransformerBlockDropout(0.3).train()
    states = torch.randn(512, 1000, requires_grad=True)
    dropped = dropout(states)
    dropped.sum().backward()
    kept = states.grad != 0
    scale = 256 / (256 - 77)  # 77 / 256 is the multiple of 1 / 256 next to 0.3
    assert_close(states.grad, kept * scale, rtol=0, atol=0)
    assert_close(dropped, states * kept * scale, rtol=1e-6, atol=0)
    rates = [1 - kept.flatten()[lane::8].double().mean().item() for lane in range(8)]
    assert max(abs(rate - 77 / 256) for rate in rates) < 6 * 0.46 / 64_000**0.5  # six standard errors
    neighbours = torch.stack([kept[:, :-1].flatten(), kept[:, 1:].flatten()]).double()
    assert abs(torch.corrcoef(neighbours)[0, 1]) < 6 / 511_000**0.5


@pytest.mark.parametrize(
    ("p", "dtype"), [(0.001, torch.float32), (1.0, torch.float32), (0.5, torch.bfloat16)]
)
def test_dropout_at_its_ends_is_torchs(p, dtype):
    dropout, states = TransformerBlockDropout(p).train(), torch.randn(3, 1001, dtype=dtype)
    torch.manual_seed(0)
    ours = dropout(states)
    torch.manual_seed(0)
    torchs = nn.functional.dropout(states, p)
    if p == 0.5:  # drawn otherwise: one of two values in either
        assert_close(ours[ours != 0], 2 * states[ours != 0], rtol=0, atol=0)
    else:
        assert_close(ours, torchs, rtol=0, atol=0)
    assert torch.equal(dropout.eval()(states), states)


def test_dropout_scales_what_it_keeps():
    model = TransformerBlockModel(tiny_config(attention_dropout=0.5, attn_implementation="eager")).train()
    recorded = []
    model.layers[0].self_attn.register_forward_hook(lambda module, args, output: recorded.append(output[1]))
    ids = tiny_tokens(8, 6)
    model(ids)
    model.eval()(ids)
    dropped, whole = recorded
    kept = dropped > 0
    visible = whole > 0
    assert_close(dropped[kept], 2 * whole[kept], rtol=1e-6, atol=0)
    assert 0.4 < kept.sum() / visible.sum() < 0.6


@pytest.mark.parametrize("style", ["pre_norm", "post_norm", "tutorial"])
def test_residual_dropout_by_block_style(style):
    model = TransformerBlockModel(tiny_config("encoder", block_style=style)).eval()
    block, states = model.layers[0], torch.randn(1, 4, 32)
    block.dropout = nn.Threshold(torch.inf, 0.0)  # drops everything
    expected = {
        "pre_norm": states,
        "post_norm": block.mlp_norm(block.self_attn_norm(states)),
        "tutorial": torch.zeros_like(states),
    }[style]
    assert_close(block(states), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
@EACH_HEAD
def test_GC2_checkpointing_gives_the_same_step_with_the_cache_on(head, shape, use_reentrant):
    model = head(tiny_config(shape, **MODERN)).train()
    inputs = tiny_inputs(model.config)
    inputs["attention_mask"] = torch.tensor([[1] * 7, [0] * 2 + [1] * 5])
    inputs |= tiny_labels(model, inputs)
    plain = step(model, inputs)
    checkpoint(model, use_reentrant=use_reentrant)
    assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    calls = []
    stack = model.base_model.get_submodule("encoder" if shape == "encoder-decoder" else "")
    stack.layers[0].mlp.register_forward_pre_hook(lambda module, args: calls.append(1))
    cache = {} if shape == "encoder" else {"use_cache": True}
    assert_same_step(step(model, inputs, **cache), plain)
    assert len(calls) == 2  # once more in the backward pass
    assert_same_step(step(model, inputs), plain)


@pytest.mark.parametrize("use_reentrant", [False, True])
@EACH_LM_HEAD
def test_GC3_checkpointing_with_frozen_embeddings(head, shape, use_reentrant):
    model = head(tiny_config(shape)).train()
    model.requires_grad_(False)
    stacks = (model.model.encoder, model.model.decoder) if shape == "encoder-decoder" else (model.model,)
    for stack in stacks:
        for layer in stack.layers:
            layer.self_attn.q_proj.requires_grad_(True)
    inputs = tiny_inputs(model.config)
    inputs |= tiny_labels(model, inputs)
    plain = step(model, inputs)
    checkpoint(model, use_reentrant=use_reentrant)
    model.enable_input_require_grads()
    assert_same_step(step(model, inputs), plain)
    assert len(plain) == 1 + 2 * 2 * len(stacks)


@pytest.mark.logs_deprecation
def test_GC1_checkpointing_by_the_old_name_and_off_again():
    model = TransformerBlockForCausalLM(tiny_config("decoder")).train()
    inputs = {"input_ids": tiny_tokens(2, 5)}
    inputs["labels"] = inputs["input_ids"]
    plain = step(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable()
        assert model.model.gradient_checkpointing
        assert_same_step(step(model, inputs), plain)
        model.gradient_checkpointing_disable()
    assert not model.model.gradient_checkpointing
    assert_same_step(step(model, inputs), plain)


@EACH_LM_HEAD
def test_GC4_two_checkpointed_steps_under_autocast(head, shape):
    steps = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = head(tiny_config(shape)).train()
        inputs = tiny_inputs(model.config)
        inputs |= tiny_labels(model, inputs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if checkpointed:
            checkpoint(model)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
        steps.append({"loss": loss.detach(), **dict(model.named_parameters())})
    assert steps[0]["loss"].isfinite()
    assert_same_step(*steps)


@pytest.mark.parametrize(
    ("shape", "positions"), [("encoder", "sinusoidal"), ("decoder", "rotary"), ("encoder-decoder", "learned")]
)
def test_TC1_a_forward_is_one_graph(shape, positions):
    model = TransformerBlockModel(tiny_config(shape, position_embedding=positions)).eval()
    assert model._can_compile_fullgraph  # what this test proves, generate believes
    torch.compiler.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for length in (6, 8, 9):
        inputs = tiny_inputs(model.config, length=length)
        inputs["attention_mask"] = torch.ones(2, length, dtype=torch.long)
        inputs["attention_mask"][1, :2] = 0
        expected = model(**inputs, use_cache=False).last_hidden_state
        assert_close(compiled(**inputs, use_cache=False).last_hidden_state, expected, rtol=0, atol=1e-5)
    assert 1 <= len(graphs) <= 2  # for one length, then for any


@pytest.mark.parametrize(("head", "shape"), LM_HEADS[::2], ids=model_name)
def test_TC1_a_training_step_compiles(head, shape):
    model = head(tiny_config(shape)).train()
    inputs = tiny_inputs(model.config)
    inputs |= tiny_labels(model, inputs)
    plain = step(model, inputs)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch instantiates an autograd function which it traces
        loss = compiled(**inputs, use_cache=False).loss
    loss.backward()
    assert_same_step({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}, plain)


def test_overfits_one_pair_and_writes_it_back():
    model = TransformerBlockForConditionalGeneration(
        tiny_config("encoder-decoder", initializer_range=0.05)
    ).train()
    source = tiny_tokens(2, 6)
    target = torch.cat([tiny_tokens(2, 5), torch.full((2, 1), 2)], dim=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(80):
        optimizer.zero_grad()
        loss = model(source, labels=target).loss
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    written = model.eval().generate(source, max_new_tokens=6, do_sample=False)
    assert torch.equal(written[:, 1:], target)


def test_TU5_a_deep_pre_norm_stack_has_even_gradients():
    config = tiny_config("decoder", block_style="pre_norm", num_hidden_layers=12, initializer_range=0.02)
    model = TransformerBlockForCausalLM(config).train()
    ids = tiny_tokens(4, 16)
    step(model, {"input_ids": ids, "labels": ids})
    sizes = [layer.mlp.up_proj.weight.grad.norm() for layer in model.model.layers]
    assert max(sizes) < 100 * min(sizes)


def test_no_cache_is_kept_while_an_encoder_decoder_trains():
    model = TransformerBlockForConditionalGeneration(tiny_config("encoder-decoder")).train()
    ids = tiny_tokens(1, 3)
    assert model(ids, labels=ids).get(CACHE) is None
