"""Tests that what must be one number is one: backends, padding, packing, causality, gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    EACH_LM_HEAD,
    EACH_MODEL,
    SHAPES,
    assert_same_step,
    attending,
    checkpoint,
    pad,
    step,
    tiny_inputs,
    tiny_labels,
    tiny_tokens,
)
from tiny import EACH_PRESET, PRESETS, build
from torch import nn
from torch.testing import assert_close

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForQuestionAnswering,
    TransformerBlockModel,
)


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")

BACKENDS = ("sdpa", "eager", "flex_attention")
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES)
EACH_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
EACH_PRESET_AND_BACKEND = pytest.mark.parametrize(
    ("preset", "backend"),
    [*((preset, backend) for preset in PRESETS for backend in BACKENDS[:2]), ("modern", BACKENDS[2])],
)


@EACH_PRESET_AND_BACKEND
@EACH_SHAPE
def test_AB2_every_backend_in_float32_is_sdpa_in_float64(shape, preset, backend):
    model = build(TransformerBlockModel, shape, preset)
    inputs = tiny_inputs(model.config, batch=3)
    inputs["attention_mask"] = pad([tiny_tokens(7), tiny_tokens(4), tiny_tokens(1)], "left")["attention_mask"]
    exact = copy.deepcopy(model).double()(**inputs).last_hidden_state
    with attending(model, backend), torch.no_grad():
        states = model(**inputs).last_hidden_state
    real = slice(None) if shape == "encoder-decoder" else inputs["attention_mask"].bool()
    assert exact[real].std() > 0.5
    assert_close(states[real].double(), exact[real], rtol=0, atol=5e-6)


@EACH_PRESET_AND_BACKEND
@EACH_SHAPE
def test_GN8_padding_on_either_side_changes_nothing_in_float64(shape, preset, backend):
    model = build(TransformerBlockModel, shape, preset).double()
    rows = [tiny_tokens(length) for length in (7, 4, 1)]
    targets = [tiny_tokens(length) for length in (1, 6, 3)]
    is_pair = shape == "encoder-decoder"
    with attending(model, backend), torch.no_grad():
        for side in ("left", "right"):
            inputs = pad(rows, side, pad_id=9)
            mask = inputs["attention_mask"]
            if is_pair:
                inputs["decoder_input_ids"], mask = pad(targets, side, pad_id=9).values()
                inputs["decoder_attention_mask"] = mask
            states = model(**inputs).last_hidden_state
            for index, (row, target) in enumerate(zip(rows, targets, strict=True)):
                alone = model(row[None], **({"decoder_input_ids": target[None]} if is_pair else {}))[0][0]
                tolerance = 2e-6 if backend == "eager" else 1e-13  # eager's softmax is float32's
                assert_close(states[index, mask[index] == 1], alone, rtol=0, atol=tolerance)


LENGTHS = (4, 1, 6)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


def block_mask(causal: bool) -> torch.Tensor:
    """Returns (1, 1, L, L): each sequence of `LENGTHS` sees itself only."""
    blocks = torch.block_diag(*(torch.ones(length, length) for length in LENGTHS)).bool()
    return (blocks.tril() if causal else blocks)[None, None]


@EACH_BACKEND
@EACH_PRESET
@pytest.mark.parametrize("shape", ["encoder", "decoder"])
def test_packed_is_unpacked_in_float64(shape, preset, backend):
    model = build(TransformerBlockModel, shape, preset).double()
    rows = [tiny_tokens(1, length) for length in LENGTHS]
    ids = torch.cat(rows, dim=1)
    with attending(model, backend), torch.no_grad():
        alone = torch.cat([model(row)[0] for row in rows], dim=1)
        packed = [model(ids, position_ids=POSITIONS, use_cache=False)[0]]
        if backend != "flex_attention":
            mask = block_mask(causal=shape == "decoder")
            packed.append(model(ids, attention_mask=mask, position_ids=POSITIONS)[0])
            if model.config.position_embedding in ("rotary", "none"):  # only distances count
                packed.append(model(ids, attention_mask=mask)[0])
    assert (model(ids)[0] - alone).abs().max() > 0.1
    # eager's softmax and the angles of other positions are float32's
    is_double = backend != "eager" and model.config.position_embedding != "rotary"
    for states in packed:
        assert_close(states, alone, rtol=0, atol=1e-13 if is_double else 2e-6)


@pytest.mark.parametrize("kind", ["positions", "block mask"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@EACH_PRESET
def test_packed_losses_and_gradients_are_those_of_the_parts(preset, backend, kind):
    model = build(TransformerBlockForCausalLM, "decoder", preset, attn_implementation=backend).train()
    rows = [tiny_tokens(1, length) for length in LENGTHS]
    count = sum(LENGTHS) - len(LENGTHS)  # nothing predicts the first token of a sequence
    parts = step_sum(model, [{"input_ids": row, "labels": row, "num_items_in_batch": count} for row in rows])
    ids = torch.cat(rows, dim=1)
    labels = ids.masked_fill(POSITIONS == 0, -100)
    packed = {"input_ids": ids, "labels": labels, "position_ids": POSITIONS}
    if kind == "block mask":
        packed["attention_mask"] = block_mask(causal=True)
    assert_same_step(step(model, packed), parts, atol=5e-7)


def step_sum(model: nn.Module, parts: list[dict]) -> dict[str, torch.Tensor]:
    """Returns the sum of the losses of several backwards, and of their gradients."""
    model.zero_grad()
    loss = sum(model(**part).loss for part in parts)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@EACH_BACKEND
@pytest.mark.parametrize("preset", ["vaswani", "vaswani-learned", "modern"])
def test_decoder_position_ids_pack_and_shift_targets(preset, backend):
    model = build(TransformerBlockModel, "encoder-decoder", preset).double()
    source = tiny_tokens(1, 5)
    rows = [tiny_tokens(1, length) for length in LENGTHS]
    tolerance = 2e-6 if backend == "eager" else 1e-13
    with attending(model, backend), torch.no_grad():
        alone = [model(source, decoder_input_ids=row)[0] for row in rows]
        packed = model(
            source,
            decoder_input_ids=torch.cat(rows, dim=1),
            decoder_position_ids=POSITIONS,
            use_cache=False,
        )
        assert_close(packed[0], torch.cat(alone, dim=1), rtol=0, atol=tolerance)
        ids, mask = pad([row[0] for row in rows], "left").values()
        batch = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        states = model(source.expand(3, -1), **batch, decoder_position_ids=positions)[0]
        for index, row in enumerate(alone):
            assert_close(states[index, mask[index] == 1], row[0], rtol=0, atol=tolerance)
        moved = model(source.expand(3, -1), **batch, decoder_position_ids=positions + 1)[0]
        # rotary positions are relative, and the source has none that could move with them
        changes = (moved - states)[mask == 1].abs().max()
        assert changes < 2e-6 if preset == "modern" else changes > 1e-2


@EACH_BACKEND
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("preset", ["vaswani", "modern", "tutorial"])
@pytest.mark.parametrize("shape", ["decoder", "encoder-decoder"])
def test_a_changed_token_moves_nothing_before_it(shape, preset, depth, backend):
    model = build(TransformerBlockModel, shape, preset, num_hidden_layers=depth)
    ids = tiny_tokens(1, 8)
    source = {"input_ids": tiny_tokens(1, 5)} if shape == "encoder-decoder" else {}
    name = "decoder_input_ids" if source else "input_ids"
    with attending(model, backend), torch.no_grad():
        before = model(**source, **{name: ids}).last_hidden_state[0]
        for index in range(8) if backend != "flex_attention" else (1, 5):
            changed = ids.clone()
            changed[0, index] = (ids[0, index] + 2) % 58 + 3
            after = model(**source, **{name: changed}).last_hidden_state[0]
            moved = (after - before).abs().amax(dim=-1)
            assert moved[:index].sum() == 0
            assert moved[index:].min() > 1e-4


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("preset", ["vaswani", "modern"])
def test_no_gradient_flows_to_later_tokens(preset, depth, backend):
    model = build(TransformerBlockForCausalLM, "decoder", preset, num_hidden_layers=depth)
    model.set_attn_implementation(backend)
    embeds = torch.randn(1, 6, 32, requires_grad=True)
    logits = model(inputs_embeds=embeds).logits
    for index in range(6):
        (gradient,) = torch.autograd.grad(logits[0, index].max(), embeds, retain_graph=True)
        sizes = gradient[0].abs().amax(dim=-1)
        assert sizes[index + 1 :].sum() == 0
        assert sizes[: index + 1].min() > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("preset", ["vaswani", "modern", "tutorial"])
@EACH_MODEL
def test_AT2_half_precision_is_finite_forward_and_backward(model_class, shape, preset, backend, dtype):
    """One row is real, one is padded on the left and one sees nothing; then the same for one token each."""
    model = build(model_class, shape, preset, attn_implementation=backend).to(dtype).train()
    for length in (6, 1):
        model.zero_grad()
        mask = torch.ones(3, length, dtype=torch.long)
        mask[1, : length // 2] = 0
        mask[2] = 0
        inputs = {"input_ids": tiny_tokens(3, length), "attention_mask": mask}
        if shape == "encoder-decoder":
            inputs |= {"decoder_input_ids": tiny_tokens(3, length), "decoder_attention_mask": mask}
        if model_class is TransformerBlockModel:
            loss = model(**inputs).last_hidden_state.float().square().mean()
        else:
            loss = model(**inputs, **tiny_labels(model, inputs)).loss
        assert loss.isfinite()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient.isfinite().all() for gradient in gradients)
        # one token has no next one to predict, and is the only place where an answer can be
        is_decided = length == 1 and model_class in (
            TransformerBlockForCausalLM,
            TransformerBlockForQuestionAnswering,
        )
        assert (max(gradient.abs().max() for gradient in gradients) > 0) != is_decided


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("preset", ["vaswani", "modern", "tutorial"])
@EACH_LM_HEAD
def test_GC2_checkpointing_draws_the_same_dropout(head, shape, preset, use_reentrant):
    model = build(head, shape, preset, dropout=0.2, attention_dropout=0.1).train()
    inputs = tiny_inputs(model.config)
    inputs |= tiny_labels(model, inputs)
    steps = []
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint(model, use_reentrant=use_reentrant)
        torch.manual_seed(1)
        steps.append(step(model, inputs))
    other = step(model, inputs)  # the next draw
    assert (other["loss"] - steps[0]["loss"]).abs() > 1e-3
    # under reentrant checkpointing the decoder's layers add up the encoder's gradient in another order
    assert_same_step(steps[1], steps[0], atol=1e-6 if shape == "encoder-decoder" else 0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("preset", ["vaswani", "vaswani-learned", "modern", "tutorial"])
@EACH_LM_HEAD
def test_AC1_gradients_are_those_of_the_float64_loss(head, shape, preset, smoothing):
    """With a count of labels from elsewhere and ignored labels, through the chunked loss."""
    model = build(head, shape, preset).train()
    inputs = tiny_inputs(model.config, batch=3)
    labels = tiny_labels(model, inputs)["labels"]
    labels[0, :2], labels[2, 1:] = -100, -100
    ours = step(model, inputs, labels=labels, label_smoothing=smoothing, num_items_in_batch=23)
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    targets = labels
    logits = exact(**inputs).logits
    if shape == "decoder":
        logits, targets = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=smoothing
    )
    (total / 23).backward()
    theirs = {"loss": total.detach() / 23, **{name: p.grad for name, p in exact.named_parameters()}}
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert_close(gradient.double(), theirs[name], rtol=1e-5, atol=1e-6, msg=name)
