"""Tests of padding, masks, attention backends, returned attentions, and of what a forward refuses."""

import warnings

import pytest
import torch
from conftest import (
    EACH_LM_HEAD,
    EACH_MODEL,
    LM_HEADS,
    MODELS,
    SHAPES,
    model_name,
    pad,
    tiny_config,
    tiny_inputs,
    tiny_labels,
    tiny_tokens,
)
from torch.testing import assert_close

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForMaskedLM,
    TransformerBlockForSequenceClassification,
    TransformerBlockModel,
)
from hf_transformer_block.modeling_hf_transformer_block import CACHE


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_is_its_rows_and_the_pad_token_is_never_guessed(shape):
    model = TransformerBlockModel(tiny_config(shape)).eval()
    inputs = tiny_inputs(model.config, batch=3)
    inputs["input_ids"][:, 2] = model.config.pad_token_id
    states = model(**inputs).last_hidden_state
    for index in range(3):
        alone = model(**{name: value[index : index + 1] for name, value in inputs.items()}).last_hidden_state
        assert_close(states[index : index + 1], alone, rtol=0, atol=1e-5)
    hidden = {"attention_mask": (torch.arange(7) != 2).long().expand(3, 7)}
    assert not torch.equal(model(**inputs, **hidden).last_hidden_state, states)


def test_AT6_cross_attention_uses_the_sources_mask():
    model = TransformerBlockModel(tiny_config("encoder-decoder")).eval()
    source, target = tiny_tokens(2, 8), tiny_tokens(2, 5)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    states = model(source, attention_mask=mask, decoder_input_ids=target).last_hidden_state
    changed = torch.where(mask == 1, source, tiny_tokens(2, 8))
    assert not torch.equal(changed, source)
    kwargs = {"attention_mask": mask, "decoder_input_ids": target}
    assert_close(model(changed, **kwargs).last_hidden_state, states, rtol=0, atol=0)
    unmasked = model(source, decoder_input_ids=target).last_hidden_state
    assert (unmasked[1] - states[1]).abs().max() > 1e-3


def test_AT5_garbage_at_padded_places_stays_there():
    model = TransformerBlockModel(tiny_config("encoder")).eval()
    ids, mask = pad([tiny_tokens(6), tiny_tokens(4)], "right").values()
    embeds = model.embed_tokens(ids)
    clean = model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
    dirty = torch.where(mask[..., None] == 1, embeds, 1e4)
    states = model(inputs_embeds=dirty, attention_mask=mask).last_hidden_state
    assert_close(states[mask == 1], clean[mask == 1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@EACH_LM_HEAD
def test_AT1_AT2_padding_and_rows_that_see_nothing_stay_finite(head, shape, dtype, implementation):
    model = head(tiny_config(shape, attn_implementation=implementation))
    inputs = tiny_inputs(model.config, batch=3)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, :3] = 0
    inputs["attention_mask"][2] = 0  # nothing at all
    exact = model.eval()(**inputs).logits
    alone = model(**{name: value[:1] for name, value in inputs.items()}).logits
    assert_close(exact[:1], alone, rtol=0, atol=1e-5)

    model = model.to(dtype).train()
    outputs = model(**inputs, labels=tiny_labels(model, inputs)["labels"], logits_to_keep=0)
    assert outputs.logits.isfinite().all()
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype]
    assert (outputs.logits.float() - exact).abs().max() < tolerance * exact.abs().max()
    outputs.loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_AT2_a_row_that_sees_nothing_attends_to_nothing(implementation):
    config = tiny_config("encoder-decoder", attn_implementation=implementation)
    model = TransformerBlockModel(config).eval()
    recorded = {}
    for name, layer in (
        ("self", model.encoder.layers[0].self_attn),
        ("cross", model.decoder.layers[0].cross_attn),
    ):
        layer.o_proj.bias.data.normal_()
        layer.register_forward_hook(lambda layer, args, output, name=name: recorded.update({name: output[0]}))
    mask = torch.tensor([[1] * 7, [0] * 7])
    model(**tiny_inputs(config), attention_mask=mask)
    for name, layer in (
        ("self", model.encoder.layers[0].self_attn),
        ("cross", model.decoder.layers[0].cross_attn),
    ):
        assert_close(recorded[name][1], layer.o_proj.bias.expand_as(recorded[name][1]), rtol=0, atol=0)
        assert not torch.equal(recorded[name][0], recorded[name][1])


def gradients(model, inputs) -> list[torch.Tensor]:
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return [outputs.loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
@EACH_LM_HEAD
def test_AB2_sdpa_is_eager_forward_and_backward(head, shape, positions):
    model = head(tiny_config(shape, position_embedding=positions, num_key_value_heads=2)).eval()
    assert model.config._attn_implementation == "sdpa"
    inputs = tiny_inputs(model.config, batch=3)
    inputs["attention_mask"] = pad([tiny_tokens(7), tiny_tokens(5), tiny_tokens(2)], "left")["attention_mask"]
    inputs |= tiny_labels(model, inputs)
    fast = gradients(model, inputs)
    model.set_attn_implementation("eager")
    for ours, theirs in zip(gradients(model, inputs), fast, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert "attn_implementation" not in model.config.to_json_string()


def test_unknown_attention_names_the_known_ones():
    with pytest.raises(ValueError, match="eager"):
        TransformerBlockModel(tiny_config(attn_implementation="spda"))


@pytest.mark.parametrize("kind", ["bool", "float", "heads"])
@pytest.mark.parametrize("shape", ["encoder", "decoder"])
def test_four_dimensional_masks_are_taken_as_they_are(shape, kind):
    model = TransformerBlockModel(tiny_config(shape, position_embedding="none")).eval()
    ids = tiny_tokens(2, 6)
    visible = torch.rand(2, 4 if kind == "heads" else 1, 6, 6) < 0.5
    visible |= torch.eye(6, dtype=torch.bool)
    masks = [visible]
    if kind == "float":  # the lowest number, minus infinity, and biases on what may be seen
        masks = [torch.where(visible, 0.0, low) for low in (torch.finfo(torch.float32).min, -torch.inf)]
        masks.append(torch.where(visible, torch.randn(2, 1, 6, 6), -torch.inf))
    fast = [model(ids, attention_mask=mask).last_hidden_state for mask in masks]
    if kind == "float":
        assert torch.equal(fast[0], fast[1])
        assert (fast[0] - fast[2]).abs().max() > 1e-2
    model.set_attn_implementation("eager")
    for mask, expected in zip(masks, fast, strict=True):
        outputs = model(ids, attention_mask=mask, output_attentions=True)
        assert_close(outputs.last_hidden_state, expected, rtol=0, atol=1e-5)
        for probabilities in outputs.attentions:
            assert torch.equal(probabilities > 0, visible.expand(2, 4, 6, 6))


def test_a_causal_four_dimensional_mask_is_the_default():
    model = TransformerBlockModel(tiny_config("decoder")).eval()
    ids = tiny_tokens(2, 6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    assert_close(model(ids, attention_mask=causal)[0], model(ids)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@EACH_MODEL
def test_AB1_attentions_are_real_in_every_backend(model_class, shape, implementation):
    config = tiny_config(shape, attn_implementation=implementation, num_key_value_heads=2)
    model = model_class(config).eval()
    inputs = tiny_inputs(config)
    inputs["attention_mask"] = pad([tiny_tokens(7), tiny_tokens(4)], "right")["attention_mask"]
    outputs = model(**inputs, output_attentions=True)
    plain = model(**inputs)
    name = next(name for name in ("start_logits", "last_hidden_state", "logits") if name in outputs)
    real = inputs["attention_mask"].bool() if outputs[name].shape[1] == 7 else slice(None)
    assert_close(outputs[name][real], plain[name][real], rtol=0, atol=1e-5)
    sizes = {"attentions": (7, 7)}
    if shape == "encoder-decoder":
        sizes = {"encoder_attentions": (7, 7), "decoder_attentions": (5, 5), "cross_attentions": (5, 7)}
    for field, size in sizes.items():
        assert len(outputs[field]) == 2, field
        for probabilities in outputs[field]:
            assert probabilities.shape == (2, 4, *size)
            assert_close(probabilities.sum(dim=-1), torch.ones(2, 4, size[0]), rtol=0, atol=1e-5)
        if size[1] == 7:
            assert outputs[field][0][1, :, :, 4:].abs().max() == 0
        assert plain.get(field) is None
    assert model.config._attn_implementation == implementation
    if implementation == "sdpa":
        model.set_attn_implementation("eager")
        eager = model(**inputs, output_attentions=True)
        for field in sizes:
            assert_close(outputs[field], eager[field], rtol=0, atol=1e-6)


def test_AB1_attentions_by_configuration():
    model = TransformerBlockModel(tiny_config(attn_implementation="eager")).eval()
    model.config.output_attentions = True
    assert len(model(tiny_tokens(1, 3)).attentions) == 2


ENCODER_DECODER = "encoder-decoder"


@pytest.mark.parametrize(
    ("shape", "inputs", "message"),
    [
        ("encoder", {}, "give either input_ids or inputs_embeds"),
        ("encoder", {"input_ids": [[3]], "inputs_embeds": 1}, "not both and not neither"),
        ("encoder", {"input_ids": [[3, 61]]}, r"token id 61 is outside the vocabulary \(0 to 60\)"),
        ("decoder", {"input_ids": [[3, -100]]}, r"token id -100 is outside the vocabulary \(0 to 60\)"),
        (ENCODER_DECODER, {"input_ids": [[3]], "decoder_input_ids": [[99]]}, "token id 99 is outside"),
        (
            "encoder",
            {"input_ids": [[3, 4]], "attention_mask": [[1]]},
            r"shape \(1, 1\); give .* \(1, 0 \+ 2\)",
        ),
        ("decoder", {"input_ids": [[3, 4]], "attention_mask": [[1, 1, 1]]}, r"has shape \(1, 3\)"),
        ("decoder", {"input_ids": [[3, 4]], "attention_mask": [[1, 1], [1, 1]]}, r"has shape \(2, 2\)"),
        ("decoder", {"input_ids": [[3, 4]], "attention_mask": [1, 1]}, r"has shape \(2,\)"),
        ("decoder", {"input_ids": [[3, 4]], "attention_mask": [[[[1]]]]}, r"has shape \(1, 1, 1, 1\)"),
        (
            "decoder",
            {"input_ids": [[3]], "attention_mask": [[[[1]]]]},
            "int64 is ambiguous; give a boolean one",
        ),
        ("decoder", {"input_ids": [[], []]}, r"the input is empty: it has shape \(2, 0\)"),
        (ENCODER_DECODER, {"input_ids": [[3, 4]]}, "needs decoder_input_ids or decoder_inputs_embeds"),
        (
            ENCODER_DECODER,
            {"input_ids": [[3, 4]], "attention_mask": [[1]], "decoder_input_ids": [[3]]},
            r"shape \(1, 1\)",
        ),
        (
            ENCODER_DECODER,
            {"input_ids": [[3, 4]], "decoder_input_ids": [[3]], "decoder_attention_mask": [[1, 1]]},
            r"shape \(1, 2\); give .* \(1, 0 \+ 1\)",
        ),
        (
            ENCODER_DECODER,
            {"encoder_outputs": 2, "attention_mask": [[1]], "decoder_input_ids": [[3]]},
            r"\(1, 2\)",
        ),
        (
            "decoder",
            {"input_ids": [[3]], "decoder_input_ids": [[3]]},
            "has one stack and takes input_ids only",
        ),
        ("encoder", {"input_ids": [[3]], "encoder_outputs": 2}, "need architecture='encoder-decoder'"),
    ],
)
def test_a_forward_refuses_with_the_numbers(shape, inputs, message):
    model = TransformerBlockModel(tiny_config(shape))
    embeds = {"inputs_embeds": torch.zeros(1, 1, 32), "encoder_outputs": (torch.zeros(1, 2, 32),)}
    inputs = {name: embeds[name] if name in embeds else torch.tensor(value) for name, value in inputs.items()}
    with pytest.raises(ValueError, match=message):
        model(**inputs)


@pytest.mark.parametrize(
    ("shape", "inputs", "message"),
    [
        ("decoder", {"input_ids": (3,)}, r"input_ids are \(batch, length\) .*, not \(3,\)"),
        ("encoder", {"inputs_embeds": (2, 3)}, r"inputs_embeds \(batch, length, hidden_size\), not \(2, 3\)"),
        ("decoder", {"position_ids": (2, 4)}, r"position_ids have shape \(2, 4\), not \(2, 5\)"),
        ("decoder", {"attention_mask": (2, 3, 5, 5)}, r"shape \(2, 3, 5, 5\); give .*1 or 4 heads, 5"),
        ("encoder", {"attention_mask": (2, 1, 5, 4)}, r"shape \(2, 1, 5, 4\); give .*= \(2, 0 \+ 5\)"),
        (
            ENCODER_DECODER,
            {"attention_mask": (2, 1, 5, 5)},
            r"the decoder reads it too.*needs \(batch, length\)",
        ),
        (ENCODER_DECODER, {"decoder_input_ids": (3, 2)}, "target has a batch of 3 but the source of 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_the_numbers(shape, inputs, message):
    model = TransformerBlockModel(tiny_config(shape))
    tensors = {"input_ids": tiny_tokens(2, 5)}
    if shape == ENCODER_DECODER:
        tensors["decoder_input_ids"] = tiny_tokens(2, 2)
    for name, size in inputs.items():
        if name == "inputs_embeds":
            del tensors["input_ids"]
        tensors[name] = torch.ones(size, dtype=torch.bool if "mask" in name else torch.long)
    with pytest.raises(ValueError, match=message):
        model(**tensors)


def test_positions_below_zero_and_labels_without_a_head_are_refused():
    model = TransformerBlockModel(tiny_config("decoder"))
    with pytest.raises(ValueError, match="position -1 is outside 0 to 63"):
        model(tiny_tokens(1, 2), position_ids=torch.tensor([[-1, 0]]))
    with pytest.raises(ValueError, match="has no loss: give labels to a model with a head"):
        model(tiny_tokens(1, 2), labels=tiny_tokens(1, 2))


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_GN12_positions_beyond_the_last(kind):
    message = r"position 6 is outside 0 to 5, .*max_position_embeddings=6: shorten the input to 6 tokens"
    for head, shape in LM_HEADS:
        config = tiny_config(shape, position_embedding=kind, max_position_embeddings=6)
        model = head(config).eval()
        target = {"decoder_input_ids": tiny_tokens(1, 6)} if shape == ENCODER_DECODER else {}
        model(tiny_tokens(1, 6), **target)
        with pytest.raises(ValueError, match=message):
            model(tiny_tokens(1, 7), **target)
        if target:
            with pytest.raises(ValueError, match=message):
                model(tiny_tokens(1, 6), decoder_input_ids=tiny_tokens(1, 7))
        if shape != "encoder":
            model.generation_config.eos_token_id = None
            with pytest.raises(ValueError, match=r"position 6 is outside 0 to 5"):
                model.generate(tiny_tokens(1, 4), max_new_tokens=8, do_sample=False)
    TransformerBlockModel(tiny_config(position_embedding="rotary", max_position_embeddings=6))(
        tiny_tokens(1, 9)
    )


def test_labels_need_a_pad_token_where_they_make_the_decoders_input():
    model = TransformerBlockForConditionalGeneration(tiny_config(ENCODER_DECODER, pad_token_id=None))
    with pytest.raises(ValueError, match="labels need pad_token_id"):
        model(tiny_tokens(1, 3), labels=tiny_tokens(1, 3))


def test_pooling_needs_a_two_dimensional_mask():
    model = TransformerBlockForSequenceClassification(tiny_config("decoder"))
    with pytest.raises(ValueError, match=r"shape \(1, 1, 3, 3\); pooling needs \(batch, length\)"):
        model(tiny_tokens(1, 3), attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.bool))


@pytest.mark.logs_deprecation
@pytest.mark.parametrize(("head", "shape"), LM_HEADS[:1] + LM_HEADS[2:], ids=model_name)
def test_GN1_the_old_name_of_the_cache_works(head, shape):
    model = head(tiny_config(shape)).eval()
    inputs = tiny_inputs(model.config, batch=1)
    target = "decoder_input_ids" if shape == ENCODER_DECODER else "input_ids"
    full = model(**inputs).logits[:, -1]
    cache = model(**{**inputs, target: inputs[target][:, :-1]})[CACHE]
    rest = {**inputs, target: inputs[target][:, -1:]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = model(**rest, past_key_values=cache)
    assert_close(old.logits[:, -1], full, rtol=0, atol=1e-5)
    assert old.past_key_values is old[CACHE]
    expected = {"`past_key_values` is deprecated"} if CACHE == "cache" else set()
    assert {str(warning.message)[:31] for warning in caught} == expected
    cache = model(**{**inputs, target: inputs[target][:, :-1]})[CACHE]
    assert_close(model(**rest, cache=cache).logits[:, -1], full, rtol=0, atol=1e-5)


def test_GN4_only_these_classes_generate():
    for model_class, _ in MODELS:
        generative = model_class in (TransformerBlockForCausalLM, TransformerBlockForConditionalGeneration)
        assert model_class.can_generate() == generative
        assert model_class.is_backend_compatible()  # serving engines bring their own attention
    assert not hasattr(TransformerBlockForMaskedLM, "generate")


@torch.no_grad()
def test_a_short_target_mask_counts_the_rest_as_padding_and_says_so(caplog):
    model = TransformerBlockForConditionalGeneration(tiny_config("encoder-decoder")).eval()
    ids, target = tiny_tokens(2, 5), tiny_tokens(2, 6)
    short = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    whole = torch.cat([short, torch.zeros(2, 2, dtype=torch.long)], dim=1)
    logits = [
        model(ids, decoder_input_ids=target, decoder_attention_mask=mask).logits for mask in (short, whole)
    ]
    assert torch.equal(*logits)
    assert "4 columns for 6 tokens" in caplog.text
    cache = model(ids, decoder_input_ids=target)[CACHE]
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1\).* \(2, 6 \+ 2\)"):
        model(ids, decoder_input_ids=target[:, :2], decoder_attention_mask=short[:, :1], cache=cache)


def test_a_short_mask_of_a_target_prompt_is_refused_by_name():
    model = TransformerBlockForConditionalGeneration(tiny_config("encoder-decoder")).eval()
    prompt = {
        "decoder_input_ids": torch.tensor([[1, 5, 6]]),
        "decoder_attention_mask": torch.ones(1, 2, dtype=torch.long),
    }
    with pytest.raises(ValueError, match="decoder_attention_mask has 2 columns for 3 tokens"):
        model.generate(tiny_tokens(1, 4), **prompt, max_new_tokens=2)
