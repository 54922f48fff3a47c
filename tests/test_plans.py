"""Tests that the plans for several devices name modules which the models have."""

import re

import pytest
from conftest import MODELS, model_name, tiny_config


@pytest.mark.parametrize("style", ["post_norm", "pre_norm"])
@pytest.mark.parametrize(("head", "shape"), MODELS, ids=model_name)
def test_every_pattern_of_the_plans_matches_a_module(head, shape, style):
    config = tiny_config(shape, block_style=style, gated_mlp=style == "pre_norm")
    modules = dict(head(config).named_modules())
    stacks = ["encoder.", "decoder."] if shape == "encoder-decoder" else [""]
    prefixes = [("" if hasattr(head, "make_masks") else "model.") + stack for stack in stacks]
    assert config.base_model_tp_plan
    for pattern in config.base_model_tp_plan:
        expression = "|".join(re.escape(prefix + pattern).replace(r"\*", r"\d+") for prefix in prefixes)
        found = [name for name in modules if re.fullmatch(expression, name)]
        is_twice = shape == "encoder-decoder" and "cross_attn" not in pattern
        assert len(found) == config.num_hidden_layers * (1 + is_twice), pattern
    for plan in (head._tp_plan, head._fsdp_plan):
        assert set(plan or {}) <= set(modules)


def test_projections_shared_by_heads_are_not_split():
    assert tiny_config("encoder", block_style="tutorial", scale_embeddings=False).base_model_tp_plan is None
