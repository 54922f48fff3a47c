"""Tests of the export to ONNX: what onnxruntime computes with a graph, against the model."""

import json
from pathlib import Path

import pytest
import torch
from conftest import (
    GENERATIVE,
    MODELS,
    model_name,
    pad,
    tiny_config,
    tiny_inputs,
    tiny_tokenizer,
    tiny_tokens,
)
from tiny import PRESETS, build
from torch import nn
from torch.testing import assert_close
from transformers.modeling_outputs import ModelOutput

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForQuestionAnswering,
)


pytest.importorskip("onnxscript", reason='runs after pip install "hf_transformer_block[export]"')
pytest.importorskip("onnxruntime", reason='runs after pip install "hf_transformer_block[export]"')

import onnxruntime

from hf_transformer_block import export_onnx
from hf_transformer_block.export_onnx import export


# both presets by turns, for an export takes seconds; what they differ in stands in the stacks
ALL = [(*case, ("vaswani", "modern")[number % 2]) for number, case in enumerate(MODELS)]
ALL += [(case[0], case[1], "tutorial") for case in MODELS[:1]]
ALL += [(*case, preset) for case in GENERATIVE for preset in PRESETS if preset.startswith("vaswani-")]


def run(folder: Path, name: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the outputs of a graph by name."""
    session = onnxruntime.InferenceSession(folder / f"{name}.onnx", providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    assert [given.name for given in session.get_inputs()] == list(inputs)
    values = session.run(names, {key: tensor.numpy() for key, tensor in inputs.items()})
    return {key: torch.from_numpy(value) for key, value in zip(names, values, strict=True)}


def run_exported(folder: Path, is_pair: bool, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns what one graph computes, or two of them one after the other."""
    stack = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    if not is_pair:
        return run(folder, "model", stack)
    decoder = {
        "decoder_input_ids": inputs["decoder_input_ids"],
        "encoder_hidden_states": run(folder, "encoder", stack)["last_hidden_state"],
        "encoder_attention_mask": inputs["attention_mask"],
    }
    return run(folder, "decoder", decoder)


def assert_same(theirs: dict[str, torch.Tensor], ours: ModelOutput, is_real: torch.Tensor) -> None:
    """Compares every output; those of padding, which nobody reads, may differ."""
    assert theirs
    for name, value in theirs.items():
        mine = ours[name]
        if mine.ndim > 1 and mine.shape[1] == is_real.shape[1]:
            mine, value = mine[is_real], value[is_real]
        assert mine.abs().max() > 0.1
        assert_close(value, mine, rtol=1e-5, atol=2e-5, msg=name)


def check(model: nn.Module, folder: Path) -> None:
    """Exports a model and compares it in shapes from one token to the last position, padded on both sides."""
    config, is_pair = model.config, model.config.is_encoder_decoder
    found = export(model, None, folder)
    assert found.keys() == ({"encoder.onnx", "decoder.onnx"} if is_pair else {"model.onnx"})
    assert all(comparison.difference < 1e-5 * comparison.largest for comparison in found.values())
    batches = [pad([tiny_tokens(size) for size in sizes], "right") for sizes in ((1,), (9, 3, 5), (64, 30))]
    if config.architecture == "decoder":
        batches.append(pad([tiny_tokens(size) for size in (9, 3, 5)], "left"))
    for inputs in batches:
        is_real = inputs["attention_mask"].bool()
        if is_pair:
            inputs["decoder_input_ids"] = tiny_tokens(len(is_real), 4)
            is_real = torch.ones(len(is_real), 4, dtype=torch.bool)
        with torch.no_grad():
            ours = model(**inputs)
        assert_same(run_exported(folder, is_pair, inputs), ours, is_real)


def test_a_decoder_in_any_shape(tmp_path, recwarn):
    check(build(TransformerBlockForCausalLM, "decoder", "modern"), tmp_path)
    assert not recwarn.list


@pytest.mark.slow
@pytest.mark.parametrize(("model_class", "shape", "preset"), ALL, ids=model_name)
def test_every_class_in_any_shape(model_class, shape, preset, tmp_path):
    check(build(model_class, shape, preset), tmp_path)


ROTATIONS = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotations_scaled_once_and_for_all(kind, tmp_path):
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROTATIONS[kind]}
    check(build(TransformerBlockForCausalLM, "decoder", "modern", rope_parameters=rope), tmp_path)


def test_rotations_that_change_with_the_length_are_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = build(TransformerBlockForCausalLM, "decoder", "modern", rope_parameters=rope)
    with pytest.raises(ValueError, match="rope_type='dynamic' turns by other angles in longer texts"):
        export(model, None, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_torch_cannot_trace_is_refused_in_one_line(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.onnx.OnnxExporterError("Failed to export\nbecause") from TypeError(
            "no such operator\nhere"
        )

    monkeypatch.setattr(torch.onnx, "export", fail)
    model = build(TransformerBlockForCausalLM, "decoder", "modern")
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"cannot make model.onnx of this model: no such operator$"):
        export(model, None, tmp_path)
    assert model.config._attn_implementation == "eager"


def test_the_folder_of_a_reader(tmp_path, monkeypatch):
    model = TransformerBlockForQuestionAnswering(tiny_config("encoder", id2label={0: "no", 1: "yes"}))
    model.eval().set_attn_implementation("eager")
    tokenizer = tiny_tokenizer()
    tokenizer(["w5", "w6 w7"], padding=True)  # which its file would keep
    export(model, tokenizer, tmp_path)
    assert model.config._attn_implementation == "eager"
    assert json.loads((tmp_path / "tokenizer.json").read_text())["padding"] is None
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes"}
    assert {"eos_token_id", "pad_token_id"} < config.keys()
    assert not {"auto_map", "_name_or_path"} & config.keys()
    inputs = tiny_inputs(model.config) | {"attention_mask": torch.ones(2, 7, dtype=torch.long)}
    assert_same(run(tmp_path, "model", inputs), model(**inputs), inputs["attention_mask"].bool())
    monkeypatch.setattr(
        export_onnx, "write_graph", lambda *args: None
    )  # the graph stays that of other weights
    nn.init.normal_(model.qa_outputs.weight)
    with pytest.raises(ValueError, match=r"something else: values of model.onnx differ by \d"):
        export(model, tokenizer, tmp_path)


@pytest.mark.slow
def test_weights_beyond_one_file_lie_beside_the_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(export_onnx, "LARGEST_FILE", 0)
    check(build(TransformerBlockForConditionalGeneration, "encoder-decoder", "vaswani"), tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        *("config.json", "encoder.onnx", "encoder.onnx.data", "decoder.onnx", "decoder.onnx.data")
    }
