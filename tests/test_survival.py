"""
Tests that every weight and buffer survives saving and every way of loading, bit for bit.

All classes, ours and those that transformers makes of the folder's code, are loaded into memory full of NaN.
"""

from functools import cache

import pytest
import torch
from conftest import EACH_LM_HEAD, EACH_MODEL, output_of, tiny_inputs, tiny_preset
from torch import nn
from torch.testing import assert_close
from transformers.dynamic_module_utils import get_class_from_dynamic_module


PRESETS = {
    "vaswani": {},
    "modern": {"preset": "modern", "num_key_value_heads": 2},
    "tutorial": {"preset": "tutorial", "position_embedding": "learned"},
    "untied": {
        "tie_word_embeddings": False,
        "lm_head_bias": True,
        "qk_norm": True,
        "position_embedding": "rotary",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        },
    },
}
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WAYS = {
    "plain": {},
    "auto": {"dtype": "auto"},
    "float32": {"dtype": "float32"},
    **{name: {"dtype": dtype} for name, dtype in HALF.items()},
    "device_map": {"device_map": "cpu"},
    "device_map_half": {"device_map": {"": "cpu"}, "dtype": torch.bfloat16},
}


def dirty_memory() -> None:
    """Leaves NaN in freed memory, in blocks as small as a buffer and as large as a whole model."""
    sizes = (1, 2, 4, 8, 16, 32, 64, 256, 1024, 2**14, 2**18)
    blocks = [torch.full((size,), torch.nan) for size in sizes for _ in range(max(1, min(50, 2**16 // size)))]
    del blocks


def load(head, folder, **kwargs) -> nn.Module:
    """Loads into dirty memory; nothing may be missing."""
    dirty_memory()
    model, report = head.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not any(
        report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
    )
    return model


def assert_same_tensors(loaded: nn.Module, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Weights are those of the model, rounded to `dtype`; buffers keep their float32."""
    for kind in ("named_parameters", "named_buffers"):
        found, expected = dict(getattr(loaded, kind)()), dict(getattr(model, kind)())
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value.to(dtype if kind == "named_parameters" else value.dtype)), (
                name
            )
            assert found[name].dtype == (dtype if kind == "named_parameters" else value.dtype), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves each model once, whole and in shards; returns it, the folder and its inputs."""

    @cache
    def save(head, shape, preset):
        torch.manual_seed(0)
        model = head(tiny_preset(shape=shape, **{"preset": "vaswani", **PRESETS[preset]})).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # the initial ones and zeros could be drawn anew
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        folder = tmp_path_factory.mktemp("saved")
        model.save_pretrained(folder / "whole")
        model.save_pretrained(folder / "shards", max_shard_size="10KB")
        assert len(list((folder / "shards").glob("*.safetensors"))) > 2
        return model, folder, tiny_inputs(model.config)

    return save


@cache
def class_of_folder(folder, name: str):
    """Returns the class that transformers makes of a folder's code, where AutoModel would prefer ours."""
    found = get_class_from_dynamic_module(f"modeling_hf_transformer_block.{name}", str(folder))
    assert found.__module__.startswith("transformers_modules.")
    return found


@pytest.mark.parametrize("preset", PRESETS)
@EACH_MODEL
def test_in1_two_generations_are_equal_to_the_bit(model_class, shape, preset, saved, tmp_path):
    model, folder, inputs = saved(model_class, shape, preset)
    before = output_of(model, inputs)
    first = load(model_class, folder / "whole")
    assert_same_tensors(first, model)
    assert torch.equal(output_of(first, inputs), before)
    first.save_pretrained(tmp_path, max_shard_size="10KB")
    second = load(model_class, tmp_path)
    assert_same_tensors(second, model)
    assert torch.equal(output_of(second, inputs), before)


@pytest.mark.parametrize("way", WAYS)
@EACH_MODEL
def test_in1_every_way_to_load_and_the_code_of_the_folder(model_class, shape, way, saved):
    model, folder, inputs = saved(model_class, shape, "modern")
    remote = class_of_folder(folder / "whole", model_class.__name__)
    form = ["whole", "shards"][list(WAYS).index(way) % 2]
    asked = WAYS[way].get("dtype")
    dtype = asked if isinstance(asked, torch.dtype) else torch.float32
    ours, theirs = (load(each, folder / form, **WAYS[way]) for each in (model_class, remote))
    for loaded in (ours, theirs):
        assert_same_tensors(loaded, model, dtype)
        assert loaded.config.dtype == dtype
    assert torch.equal(output_of(theirs, inputs), output_of(ours, inputs))
    if dtype == torch.float32:
        assert torch.equal(output_of(ours, inputs), output_of(model, inputs))


def blocks_on_disk(model: nn.Module) -> dict[str, str]:
    """Returns a device_map that keeps only the blocks on disk."""
    places = {}
    for name, module in model.named_modules():
        if not list(module.children()) and not any(f"{place}." in f"{name}." for place in places):
            places[name] = "cpu"
        elif isinstance(module, nn.ModuleList):
            places[name] = "disk"
    return places


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize(("source", "preset"), [("direct", "untied"), ("remote", "modern")])
@EACH_MODEL
def test_blocks_on_disk_compute_and_are_saved_the_same(model_class, shape, source, preset, saved, tmp_path):
    model, folder, inputs = saved(model_class, shape, preset)
    own = model_class if source == "direct" else class_of_folder(folder / "whole", model_class.__name__)
    form = "whole" if source == "direct" else "shards"
    where = {"device_map": blocks_on_disk(model), "offload_folder": tmp_path / "offloaded"}
    loaded = load(own, folder / form, **where)
    on_disk = {name for name, value in loaded.named_parameters() if value.device.type == "meta"}
    assert on_disk == {name for name, _ in model.named_parameters() if ".layers." in f".{name}"}
    for name, buffer in model.named_buffers():
        assert torch.equal(loaded.get_buffer(name), buffer), name
    assert torch.equal(output_of(loaded, inputs), output_of(model, inputs))
    loaded.save_pretrained(tmp_path / "again")
    assert_same_tensors(load(model_class, tmp_path / "again"), model)


@pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)
@EACH_LM_HEAD
def test_a_model_in_half_precision_answers_as_its_weights_say(head, shape, dtype, saved):
    """The truth is a float32 model of the rounded weights; a rounded `inv_freq` would turn otherwise."""
    model, folder, inputs = saved(head, shape, "modern")
    loaded = load(head, folder / "whole", dtype=dtype)
    rounded = head(model.config)
    rounded.load_state_dict({name: value.float() for name, value in loaded.state_dict().items()})
    scale = output_of(rounded, inputs).abs().max()
    assert_close(
        output_of(loaded, inputs).float() / scale,
        output_of(rounded, inputs) / scale,
        rtol=0,
        atol=4 * torch.finfo(dtype).eps,
    )
