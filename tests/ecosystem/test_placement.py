"""
Tests of where a model's weights lie: on devices that accelerate chooses, and partly on disk.

Every class with its blocks on disk is in tests/test_survival.py, a full device in tests/test_traps.py, tensor
parallelism over two processes in tests/test_distributed.py and its plans in tests/test_plans.py.
"""

import pytest
import torch
from conftest import output_of, tiny_inputs
from torch import nn

from .conftest import MODELS, build_tiny
from .strangers import load_remote


pytestmark = pytest.mark.ecosystem


def second_blocks_on_disk(model: nn.Module) -> dict[str, str]:
    """Returns a device_map that puts the second block of every stack on disk."""
    blocks = [name for name, part in model.named_modules() if type(part).__name__ == "TransformerBlock"]
    inside = tuple(f"{block}." for block in blocks)
    others = [name for name, part in model.named_modules() if not list(part.children())]
    places = {name: "cpu" for name in others if not name.startswith(inside)}
    return {**places, **{block: "disk" if block.endswith(".1") else "cpu" for block in blocks}}


@pytest.mark.parametrize("where", ["cpu", "auto", "sequential", "disk"])
@pytest.mark.parametrize("name", ["encoder", "decoder", "encoder-decoder", "classifier"])
def test_device_maps_change_no_output(name, where, folder_of, tmp_path):
    model = build_tiny(name)
    asked = {"device_map": where}
    if where == "disk":
        asked = {"device_map": second_blocks_on_disk(model), "offload_folder": tmp_path}
    loaded = load_remote(MODELS[name][-1], folder_of(name), **asked)
    on_disk = [key for key, value in loaded.named_parameters() if value.device.type == "meta"]
    assert bool(on_disk) == (where == "disk")
    assert all("layers.1." in key for key in on_disk)
    inputs = tiny_inputs(model.config)
    assert torch.equal(output_of(loaded, inputs), output_of(model, inputs))
    if model.can_generate():
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        ids = inputs["input_ids"]
        assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))
