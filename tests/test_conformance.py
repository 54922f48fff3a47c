"""
One small test for each kind that transformers' own test suites check and no other file here does.

Those suites are in no release, so that CI cannot run them; docs/conformance.md says how they end.
"""

import pytest
import torch
from conftest import (
    EACH_MODEL,
    LM_HEADS,
    SHAPES,
    model_name,
    tiny_config,
    tiny_inputs,
    tiny_preset,
    tiny_tokenizer,
    tiny_tokens,
)
from torch.testing import assert_close
from transformers import pipeline
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForMaskedLM,
    TransformerBlockForSequenceClassification,
    TransformerBlockForTokenClassification,
    TransformerBlockModel,
)


PRESETS = ("vaswani", "modern")


@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_a_mask_of_a_shared_prefix_is_that_of_single_rows(preset):
    """Three continuations of one prefix stand side by side in one row, each seeing the prefix and itself."""
    model = TransformerBlockForCausalLM(tiny_preset(preset, "decoder", num_key_value_heads=2)).eval()
    prefix, ends = tiny_tokens(3), tiny_tokens(3)
    rows = torch.stack([torch.cat([prefix, end[None]]) for end in ends])
    visible = torch.zeros(6, 6, dtype=torch.bool)
    visible[:, :3] = torch.ones(6, 3, dtype=torch.bool).tril()
    visible[3:, 3:] = torch.eye(3, dtype=torch.bool)
    positions = torch.tensor([[0, 1, 2, 3, 3, 3]])
    packed = torch.cat([prefix, ends])[None]
    additive = torch.zeros(6, 6).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected = model(rows).logits[:, -1]
    for mask in (visible[None, None], additive[None, None]):
        logits = model(packed, attention_mask=mask, position_ids=positions).logits[0, 3:]
        assert_close(logits, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_recorded_outputs_keep_their_gradients(shape):
    model = TransformerBlockModel(tiny_config(shape, attn_implementation="eager"))
    outputs = model(**tiny_inputs(model.config), output_hidden_states=True, output_attentions=True)
    recorded = [
        value
        for name, values in outputs.items()
        if name.endswith(("hidden_states", "attentions"))
        for value in values[:2]
    ]
    assert len(recorded) == (10 if shape == "encoder-decoder" else 4)
    for value in recorded:
        value.retain_grad()
    outputs.last_hidden_state[..., 0].sum().backward()
    for value in recorded:
        assert value.grad.abs().sum() > 0


@EACH_MODEL
def test_another_number_of_labels_or_words_loads_when_told_to(model_class, shape, tmp_path):
    model = model_class(tiny_config(shape, num_labels=3))
    model.save_pretrained(tmp_path)
    sizes = {"vocab_size": 50, "num_labels": 5}
    with pytest.raises(RuntimeError, match="mismatch"):
        model_class.from_pretrained(tmp_path, **sizes)
    loaded = model_class.from_pretrained(tmp_path, **sizes, ignore_mismatched_sizes=True)
    assert loaded.get_input_embeddings().weight.shape == (50, 32)
    old = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        if parameter.shape == old[name].shape:
            assert torch.equal(parameter, old[name]), name
        else:
            assert parameter.isfinite().all(), name
            assert parameter.ndim == 1 or parameter.std() > 0, name
    inputs = {name: ids.clamp(max=49) for name, ids in tiny_inputs(model.config).items()}
    for output in loaded(**inputs).to_tuple():
        assert not isinstance(output, torch.Tensor) or output.isfinite().all()


@pytest.mark.parametrize("rope_type", ["linear", "dynamic", "yarn"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_scaled_rotary_positions_turn_every_stack(shape, rope_type):
    """Below and above the length a model was trained on, from which a dynamic scaling starts."""
    rope = {"rope_type": rope_type, "factor": 10.0, "rope_theta": 10000.0}
    config = tiny_preset("modern", shape, max_position_embeddings=16, rope_parameters=rope)
    scaled, exact = TransformerBlockModel(config).eval(), TransformerBlockModel(config).eval()
    exact.load_state_dict(scaled.state_dict())

    def turn(states, position_ids):
        frequencies, scaling = 10000.0 ** (-torch.arange(4).double() / 4), 1.0
        if rope_type == "linear":
            position_ids = position_ids / 10.0
        else:
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=position_ids.max() + 1)
        angles = position_ids.double()[..., None] * frequencies.double().repeat(2)
        return (angles.cos() * scaling).float(), (angles.sin() * scaling).float()

    stacks = (exact.encoder, exact.decoder) if shape == "encoder-decoder" else (exact,)
    for stack in stacks:
        stack.rotary_emb.forward = turn
    for length in (6, 24):
        inputs = tiny_inputs(config, length=length)
        expected = exact(**inputs).last_hidden_state
        assert_close(scaled(**inputs).last_hidden_state, expected, rtol=0, atol=5e-6)


@pytest.mark.logs_deprecation
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("task", "head", "shape"),
    [
        ("feature-extraction", TransformerBlockModel, "encoder"),
        ("fill-mask", TransformerBlockForMaskedLM, "encoder"),
        ("text-generation", TransformerBlockForCausalLM, "decoder"),
        ("text-classification", TransformerBlockForSequenceClassification, "encoder"),
        ("text-classification", TransformerBlockForSequenceClassification, "decoder"),
        ("zero-shot-classification", TransformerBlockForSequenceClassification, "encoder"),
        ("token-classification", TransformerBlockForTokenClassification, "encoder"),
    ],
)
def test_EC5_a_pipeline_says_what_the_model_says(task, head, shape, preset):
    tokenizer = tiny_tokenizer(model_input_names=["input_ids", "attention_mask"])
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    names = {"id2label": labels, "label2id": {name: index for index, name in labels.items()}}
    model = head(tiny_preset(preset, shape, num_key_value_heads=2, **names)).eval()
    texts = ["w5 w6 w7 w8 w9 <mask> w10", "w9 w11 <mask>"]
    pipe = pipeline(task, model=model, tokenizer=tokenizer, batch_size=2)
    inputs = [tokenizer(text, return_tensors="pt", return_token_type_ids=False) for text in texts]
    with torch.no_grad():
        if task == "text-generation":
            said = [
                out[0]["generated_token_ids"]
                for out in pipe(texts, max_new_tokens=6, do_sample=False, return_tensors=True)
            ]
            for ids, row in zip(said, inputs, strict=True):
                assert ids[-6:] == model.generate(**row, max_new_tokens=6)[0, -6:].tolist()
        elif task == "feature-extraction":
            for said, row in zip(pipe(texts), inputs, strict=True):
                states = model(**row).last_hidden_state
                assert_close(torch.tensor(said)[:, : states.shape[1]], states, rtol=0, atol=1e-5)
        elif task == "fill-mask":
            for said, row in zip(pipe(texts, top_k=3), inputs, strict=True):
                best = model(**row).logits[0, row.input_ids[0] == 3].softmax(-1)[0].topk(3)
                assert [word["token"] for word in said] == best.indices.tolist()
                assert [word["score"] for word in said] == pytest.approx(best.values.tolist(), abs=1e-5)
        elif task == "text-classification":
            for said, row in zip(pipe(texts), inputs, strict=True):
                best = model(**row).logits.softmax(-1).max(dim=-1)
                assert said["label"] == labels[best.indices.item()]
                assert said["score"] == pytest.approx(best.values.item(), abs=1e-5)
        elif task == "zero-shot-classification":
            said = pipe("w5 w6 w7", ["w11", "w12"], hypothesis_template="w8 w9 {}")
            rows = [tokenizer("w5 w6 w7", f"w8 w9 {word}", return_tensors="pt") for word in said["labels"]]
            entailed = torch.cat([model(row.input_ids).logits[:, 2] for row in rows]).softmax(dim=0)
            assert said["scores"] == pytest.approx(entailed.tolist(), abs=1e-5)
        else:
            for said, row in zip(pipe(texts, ignore_labels=[]), inputs, strict=True):
                best = model(**row).logits[0].softmax(-1).max(dim=-1)
                assert [word["entity"] for word in said] == [labels[i] for i in best.indices.tolist()]


@pytest.mark.filterwarnings("ignore:While compiling:UserWarning")  # the library's collector of outputs
@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_an_exported_decoder_with_a_static_cache_is_the_model(preset):
    model = TransformerBlockForCausalLM(
        tiny_preset(preset, "decoder", num_key_value_heads=2, max_position_embeddings=32)
    ).eval()
    model.generation_config.update(
        use_cache=True,
        cache_implementation="static",
        cache_config={"batch_size": 1, "max_cache_len": 32, "device": "cpu"},
    )
    ids, positions = tiny_tokens(1, 5), torch.arange(5)
    expected = model(ids, use_cache=False).logits
    exported = TorchExportableModuleForDecoderOnlyLM(model).export(input_ids=ids, cache_position=positions)
    assert_close(exported.module()(input_ids=ids, cache_position=positions), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("head", "shape"), LM_HEADS[:2], ids=model_name)
def test_a_tiny_model_learns_one_batch_by_heart(head, shape, preset):
    """Loss and gradient norm fall by nine tenths in 300 updates of Adam, from weights drawn with 0.02."""
    model = head(tiny_preset(preset, shape, num_key_value_heads=2, initializer_range=0.02)).train()
    ids = torch.tensor([([*range(1, 20)] * 4)[:64]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        history.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        optimizer.step()
    for first, last in zip(history[0], history[-1], strict=True):
        assert last < 0.1 * first
