"""Tests that the plans for several devices name modules which the models have, and all that they should."""

import re

import pytest
from conftest import MODELS, model_name, tiny_config


STYLES = {
    "post_norm": {},
    "pre_norm": {
        "gated_mlp": True,
        "qk_norm": True,
        "scale_embeddings": False,
        "position_embedding": "rotary",
    },
    "tutorial": {},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("head", "shape"), MODELS, ids=model_name)
def test_every_rule_of_the_plans_matches_a_module_of_each_stack(head, shape, style):
    config = tiny_config(shape, block_style=style, **STYLES[style])
    model = head(config)
    modules = dict(model.named_modules())
    stacks = ["encoder.", "decoder."] if shape == "encoder-decoder" else [""]
    prefixes = [("" if model.base_model is model else "model.") + stack for stack in stacks]
    for plan in (model._tp_plan, model._fsdp_plan):
        for rule in plan:
            found = [name for name in modules if re.fullmatch(re.escape(rule).replace(r"\*", r"\d+"), name)]
            assert len(found) == (config.num_hidden_layers if "*" in rule else 1), rule
    rules = {prefix + rule for prefix in prefixes for rule in config.base_model_tp_plan}
    if shape == "encoder-decoder":
        rules = {rule for rule in rules if "encoder." not in rule or "cross_attn" not in rule}
    head_rule = {"lm_head"} if hasattr(model, "lm_head") else set()
    assert model._tp_plan.keys() == rules | head_rule
    layers = {f"{prefix}layers.*" for prefix in prefixes}
    norms = {f"{prefix}norm" for prefix in prefixes}
    assert (
        model._fsdp_plan.keys()
        == {f"{prefix}embed_tokens" for prefix in prefixes} | layers | norms | head_rule
    )


@pytest.mark.parametrize("style", STYLES)
def test_every_linear_layer_and_norm_of_the_heads_is_in_the_plan(style):
    config = tiny_config("encoder-decoder", block_style=style, **STYLES[style])
    kinds = {rule.split(".")[-1]: how for rule, how in config.base_model_tp_plan.items()}
    attention = {} if style == "tutorial" else {"o_proj": "rowwise"} | {f"{n}_proj": "colwise" for n in "qkv"}
    norms = {f"{name}_norm": "replicated_with_grad_allreduce" for name in "qk"} if config.qk_norm else {}
    gate = {"gate_proj": "colwise"} if config.gated_mlp else {}
    mlp = {"up_proj": "colwise", "down_proj": "rowwise"}
    assert kinds == {"embed_tokens": "embedding_rowwise", **attention, **norms, **mlp, **gate}


@pytest.mark.parametrize(
    ("shape", "kwargs", "has_one"),
    [
        ("decoder", STYLES["pre_norm"], True),
        ("encoder", {"position_embedding": "none", "scale_embeddings": False}, True),
        ("decoder", {"position_embedding": "rotary"}, False),  # scales what a later stage gets as embeddings
        ("decoder", {"scale_embeddings": False}, False),  # and adds positions to it
        ("encoder-decoder", STYLES["pre_norm"], False),
    ],
)
def test_only_stacks_that_add_nothing_to_embeddings_have_a_pipeline_plan(shape, kwargs, has_one):
    plan = tiny_config(shape, **kwargs).base_model_pp_plan
    assert (list(plan) if plan else None) == (["embed_tokens", "layers", "norm"] if has_one else None)
