"""
Tests of quantized weights on a CPU, by torchao, bitsandbytes and optimum-quanto.

A model keeps its answers but for the bits it lost, writes what its logits say, and comes back from a folder.
"""

from contextlib import nullcontext

import pytest
import torch
from conftest import output_of, tiny_inputs
from tiny import by_hand
from torch import nn
from transformers import BitsAndBytesConfig, HqqConfig, QuantoConfig, TorchAoConfig

from .conftest import MODELS, build_tiny
from .strangers import load_remote


pytestmark = pytest.mark.ecosystem
NEEDS = 'runs after pip install "hf_transformer_block[ecosystem]"'
SHAPES = ("encoder", "decoder", "encoder-decoder")
WIDE = {"hidden_size": 64, "intermediate_size": 128}  # groups of 32 or 64 weights have a scale of their own


def int8_weight_only() -> TorchAoConfig:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def int8_dynamic() -> TorchAoConfig:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return TorchAoConfig(Int8DynamicActivationInt8WeightConfig())


def int4() -> TorchAoConfig:
    from torchao.quantization import IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


def nf4() -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


# the module it needs, its configuration, and how far the logits may be from the float ones, in parts of their
# norm; measured: two thirds of it in the worst shape (random weights are harder to round than trained ones)
WAYS = {
    "torchao-int8": ("torchao", int8_weight_only, 0.035),
    "torchao-int8-dynamic": ("torchao", int8_dynamic, 0.065),
    "torchao-int4": ("torchao", int4, 0.5),
    "bitsandbytes-int8": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True), 0.05),
    "bitsandbytes-nf4": ("bitsandbytes", nf4, 0.5),
    "quanto-int8": ("optimum.quanto", lambda: QuantoConfig(weights="int8"), 0.035),
    "quanto-int4": ("optimum.quanto", lambda: QuantoConfig(weights="int4"), 0.55),
}


def projections(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the linear layers of the blocks."""
    return {name: part for name, part in model.named_modules() if name.endswith("_proj")}


def is_quantized(layer: nn.Module) -> bool:
    weight = getattr(layer, "weight", None)
    return type(layer) is not nn.Linear or type(weight) is not nn.Parameter or not weight.is_floating_point()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_quantized_models_answer_write_and_come_back(way, name, folder_of, tmp_path):
    module, configuration, tolerance = WAYS[way]
    pytest.importorskip(module, reason=NEEDS)
    model, auto = build_tiny(name, **WIDE), MODELS[name][-1]
    quantized = load_remote(
        auto, folder_of(name, **WIDE), quantization_config=configuration(), device_map="cpu"
    )
    assert projections(quantized).keys() == projections(model).keys()
    assert all(is_quantized(layer) for layer in projections(quantized).values())
    saves = module != "optimum.quanto"
    with nullcontext() if saves else pytest.raises(ValueError, match="quanto and is not serializable"):
        quantized.save_pretrained(tmp_path)  # first: bitsandbytes 0.50 spoils 4 bits that have computed
    inputs = tiny_inputs(model.config)
    logits = output_of(quantized, inputs)
    assert 0 < distance(logits, output_of(model, inputs)) < tolerance
    if model.can_generate():
        options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        row = inputs["input_ids"][0]
        assert torch.equal(quantized.generate(row[None], **options)[0, -10:], by_hand(quantized, row))
    if saves:
        again = load_remote(auto, tmp_path, device_map="cpu")
        assert torch.equal(output_of(again, inputs), logits)


def test_hqq_waits_for_transformers(folder_of):
    """transformers 5 quantizes no weights by hqq while it loads them, of whatever model."""
    pytest.importorskip("hqq", reason="runs after pip install hqq")
    with pytest.raises(NotImplementedError, match="HQQ is not available yet"):
        load_remote(
            MODELS["decoder"][-1], folder_of("decoder", **WIDE), quantization_config=HqqConfig(nbits=8)
        )
