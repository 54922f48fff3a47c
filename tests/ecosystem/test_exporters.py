"""
Tests of torch.export and of `transformers.exporters`: what their runtimes compute, against the model.

Our own export to ONNX is tested in tests/test_export_onnx.py, that to CTranslate2 in tests/test_export.py.
"""

import pytest
import torch
from conftest import output_of, tiny_inputs
from torch.export import Dim
from torch.testing import assert_close

from .conftest import build_tiny


pytestmark = pytest.mark.ecosystem
SHAPES = ("encoder", "decoder", "encoder-decoder")
NEEDS = 'runs after pip install "hf_transformer_block[ecosystem]"'
# the modules that a format of transformers.exporters needs; all formats run dynamic batches and lengths
FORMATS = {
    "dynamo": ("DynamoExporter", "DynamoConfig", ()),
    "onnx": ("OnnxExporter", "OnnxConfig", ("onnxscript", "onnxruntime")),
    "executorch": ("ExecutorchExporter", "ExecutorchConfig", ("executorch",)),
}


def masked(config, batch: int, length: int, **kwargs) -> dict[str, torch.Tensor]:
    """Returns inputs whose last row ends in padding."""
    inputs = tiny_inputs(config, batch, length)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, length // 2 :] = 0
    return {**inputs, "attention_mask": mask, **kwargs}


def dynamic(inputs: dict) -> dict:
    """Returns shapes in which batch and length may change."""
    return {
        name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} if isinstance(value, torch.Tensor) else None
        for name, value in inputs.items()
    }


def assert_close_at_real_tokens(found: torch.Tensor, expected: torch.Tensor, inputs: dict, atol: float):
    """A token of padding has no right answer, but in a target every token is real."""
    if "decoder_input_ids" not in inputs:
        is_real = inputs["attention_mask"] == 1
        found, expected = found[is_real], expected[is_real]
    assert expected.abs().max() > 0.5
    assert_close(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("name", [*SHAPES, "classifier"])
def test_torch_export_in_any_batch_and_length(name, strict):
    model = build_tiny(name)
    inputs = masked(model.config, 3, 8, use_cache=False)
    if name in ("encoder", "classifier"):
        inputs.pop("use_cache")
    program = torch.export.export(model, (), inputs, dynamic_shapes=dynamic(inputs), strict=strict)
    for batch, length in ((3, 8), (1, 4), (5, 33)):
        given = {**inputs, **masked(model.config, batch, length)}
        found, expected = program.module()(**given).logits, output_of(model, given)
        assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", FORMATS)
def test_transformers_exporters_compute_the_same(kind, name, tmp_path):
    """The program that was saved and loaded runs: by torch, onnxruntime or executorch's runtime."""
    exporter, config, modules = FORMATS[kind]
    for module in modules:
        pytest.importorskip(module, reason=NEEDS)
    exporters = pytest.importorskip("transformers.exporters", reason="transformers has exporters since 5.20")
    model = build_tiny(name)
    inputs = masked(model.config, 3, 8, use_cache=False)
    given = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    shapes = dynamic(given)
    exported = getattr(exporters, exporter)().export(
        model, dict(inputs), config=getattr(exporters, config)(dynamic=True, dynamic_shapes=shapes)
    )
    exported.save_pretrained(tmp_path)
    loaded = exporters.ExportedModel.from_pretrained(tmp_path, trust_remote_code=True)
    for batch, length in ((3, 8), (1, 5), (4, 20)):
        given = masked(model.config, batch, length)
        found, expected = loaded(**given).logits, output_of(model, given)
        assert_close_at_real_tokens(found, expected, given, atol=2e-5)
