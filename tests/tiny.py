"""Models of every preset whose weights all matter, and the ways in which tests let them write text."""

import pytest
import torch
from conftest import tiny_preset
from torch import nn


PRESETS = {
    "vaswani": {},
    "vaswani-learned": {"position_embedding": "learned", "tie_word_embeddings": False},
    "vaswani-none": {"position_embedding": "none", "num_key_value_heads": 1},
    "modern": {"num_key_value_heads": 2, "qk_norm": True},
    "tutorial": {},
}
EACH_PRESET = pytest.mark.parametrize("preset", PRESETS)
NEW = 10
STATIC = {"cache_implementation": "static", "disable_compile": True}


@torch.no_grad()
def build(model_class: type, shape: str, preset: str, **kwargs) -> nn.Module:
    """Returns a tiny model of a preset, with every bias and norm away from 0 and 1."""
    config = tiny_preset(preset.split("-")[0], shape, **{**PRESETS[preset], **kwargs})
    model = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@torch.no_grad()
def weaken(model: nn.Module) -> nn.Module:
    """Makes the branches weak, so that the tokens which a model writes vary."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(0.1)
    return model


def writer(head, shape: str, preset: str, **kwargs) -> nn.Module:
    """Returns a model of a preset which never stops early and whose tokens vary."""
    torch.manual_seed(31)  # many others give models that soon repeat one token
    values = {"tie_word_embeddings": False, "eos_token_id": None, "initializer_range": 0.3}
    return weaken(build(head, shape, preset, **{**values, **kwargs}))


def generate(model: nn.Module, ids: torch.Tensor | None, **kwargs):
    """Generates `NEW` tokens greedily."""
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


def write(model: nn.Module, ids: torch.Tensor | None, **kwargs) -> torch.Tensor:
    """Returns the tokens alone which `generate` adds."""
    return generate(model, ids, **kwargs)[:, -NEW:]


@torch.no_grad()
def by_hand(model: nn.Module, row: torch.Tensor, prompt: torch.Tensor | None = None) -> torch.Tensor:
    """Takes the most likely token of whole forwards of one row, without cache, padding or generate."""
    if model.config.is_encoder_decoder:
        start = torch.tensor([model.config.decoder_start_token_id])
        source, name = {"input_ids": row[None]}, "decoder_input_ids"
        written = start if prompt is None else torch.cat([start, prompt])
    else:
        source, name, written = {}, "input_ids", row
    for _ in range(NEW):
        logits = model(**source, **{name: written[None]}, use_cache=False).logits
        written = torch.cat([written, logits[0, -1:].argmax(dim=-1)])
    return written[-NEW:]


def assert_varied(tokens: torch.Tensor) -> None:
    """A model that repeats one token would agree with everything."""
    assert sum(len(row.unique()) for row in tokens) > 2 * len(tokens), tokens
    assert len(tokens.unique(dim=0)) == len(tokens), tokens
