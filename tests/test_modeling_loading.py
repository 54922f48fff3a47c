"""Tests of initial weights, saving, loading, tying and resizing."""

import json
import math

import pytest
import torch
from conftest import (
    EACH_MODEL,
    LM_HEADS,
    MODELS,
    POSITIONS,
    SHAPES,
    model_name,
    output_of,
    tiny_config,
    tiny_inputs,
    tiny_labels,
    tiny_tokens,
)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

from hf_transformer_block import (
    TransformerBlockConfig,
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForSequenceClassification,
    TransformerBlockForTokenClassification,
    TransformerBlockModel,
)


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")


def load_report(model_class, folder, **kwargs) -> tuple[nn.Module, set[str]]:
    """Loads, and returns the names of the missing weights; there must be no other trouble."""
    model, report = model_class.from_pretrained(folder, output_loading_info=True, **kwargs)
    assert not report["mismatched_keys"]
    assert not report["error_msgs"]
    return model, set(report["missing_keys"])


@pytest.mark.parametrize("style", ["post_norm", "pre_norm", "tutorial"])
@pytest.mark.parametrize("shape", SHAPES)
def test_initial_weights_are_the_documented_ones(shape, style):
    config = tiny_config(
        shape,
        block_style=style,
        hidden_size=64,
        vocab_size=401,
        num_hidden_layers=3,
        num_decoder_layers=5 if shape == "encoder-decoder" else None,
        position_embedding="learned",
        initializer_range=0.03,
        qk_norm=style != "tutorial",
    )
    model = TransformerBlockModel(config)
    seen = set()
    for name, parameter in model.named_parameters():
        kind = name.split(".")[-2]
        if "norm" in kind:
            expected = 1.0 if name.endswith("weight") else 0.0
            assert (parameter == expected).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
        else:
            depth = 5 if name.startswith("decoder") else 3
            scaled = style == "pre_norm" and kind in ("o_proj", "down_proj")
            std = 0.03 / math.sqrt(2 * depth) if scaled else 0.03
            if style != "pre_norm" and not kind.startswith("embed"):
                std = math.sqrt(2 / sum(parameter.shape))
            margin = 6 / math.sqrt(2 * parameter.numel())
            assert parameter.std().item() == pytest.approx(std, rel=margin), name
            assert abs(parameter.mean().item()) < 6 * std / math.sqrt(parameter.numel()), name
            seen.add(kind)
    assert seen >= {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "up_proj",
        "down_proj",
        "embed_tokens",
        "embed_positions",
    }


@pytest.mark.parametrize("positions", POSITIONS)
@EACH_MODEL
def test_IN3_models_are_built_on_the_meta_device(model_class, shape, positions):
    with torch.device("meta"):
        model = model_class(tiny_config(shape, position_embedding=positions, qk_norm=True))
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}


def test_the_names_of_the_weights_are_the_checkpoint_format():
    config = tiny_config("encoder-decoder", num_hidden_layers=1, position_embedding="learned", gated_mlp=True)
    block = [f"mlp.{name}_proj" for name in ("gate", "up", "down")] + ["mlp_norm"]
    attention = [f"{name}_proj" for name in "qkvo"]
    block += [f"self_attn.{name}" for name in attention] + ["self_attn_norm"]
    cross = [f"cross_attn.{name}" for name in attention] + ["cross_attn_norm"]
    names = {f"model.encoder.layers.0.{name}" for name in block}
    names |= {f"model.decoder.layers.0.{name}" for name in block + cross}
    expected = {f"{name}.{kind}" for name in names for kind in ("weight", "bias")} | {"lm_head.weight"}
    for stack in ("encoder", "decoder"):
        expected |= {f"model.{stack}.embed_tokens.weight", f"model.{stack}.embed_positions.weight"}
    assert set(TransformerBlockForConditionalGeneration(config).state_dict()) == expected
    config = tiny_config("decoder", block_style="pre_norm", qk_norm=True, num_hidden_layers=1)
    names = set(TransformerBlockForCausalLM(config).state_dict())
    assert {"model.norm.weight", "model.norm.bias", "lm_head.weight", "model.embed_tokens.weight"} < names
    assert {f"model.layers.0.self_attn.{name}_norm.weight" for name in "qk"} < names


def tables(model: nn.Module) -> list[nn.Parameter]:
    """Returns every table of the vocabulary."""
    base = model.base_model
    stacks = (base.encoder, base.decoder) if model.config.is_encoder_decoder else (base,)
    heads = [model.lm_head.weight] if hasattr(model, "lm_head") else []
    return [*(stack.embed_tokens.weight for stack in stacks), *heads]


@pytest.mark.parametrize("tied", [True, False])
@EACH_MODEL
def test_TW1_ST1_tied_tables_are_one_tensor_in_memory_and_in_the_file(model_class, shape, tied, tmp_path):
    model = model_class(tiny_config(shape, tie_word_embeddings=tied))
    count = len(tables(model))
    model.save_pretrained(tmp_path)
    loaded, missing = load_report(model_class, tmp_path)
    assert not missing
    for built in (model, loaded):
        assert len({id(table) for table in tables(built)}) == (1 if tied else count)
    assert [path.name for path in tmp_path.glob("*.*") if path.suffix != ".py"].count(
        "model.safetensors"
    ) == 1
    assert not list(tmp_path.glob("*.bin"))
    stored = load_file(tmp_path / "model.safetensors")
    assert sum(len(tensor) == 61 for tensor in stored.values()) == (1 if tied else count)
    assert set(stored) <= set(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(tables(model), tables(loaded), strict=True))


@pytest.mark.parametrize("size", [70, 40], ids=["up", "down"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("model_class", "shape"), MODELS[:6], ids=model_name)
def test_resizing_reaches_every_table(model_class, shape, tied, size, tmp_path):
    model = model_class(tiny_config(shape, tie_word_embeddings=tied))
    inputs = {name: ids % 40 for name, ids in tiny_inputs(model.config).items()}
    kept, before, output = (
        min(size, 61),
        [table.detach().clone() for table in tables(model)],
        output_of(model, inputs),
    )
    embeddings = model.resize_token_embeddings(size)
    assert embeddings is model.get_input_embeddings()
    assert embeddings.num_embeddings == model.config.vocab_size == size
    assert {len(table) for table in tables(model)} == {size}
    assert len({id(table) for table in tables(model)}) == (1 if tied else len(before))
    for old, new in zip(before, tables(model), strict=True):
        assert torch.equal(old[:kept], new[:kept])
    width = kept if model_class is not TransformerBlockModel else None
    assert_close(output_of(model, inputs)[..., :width], output[..., :width], rtol=0, atol=1e-6)
    if hasattr(model, "lm_head"):
        assert output_of(model, inputs).shape[-1] == model.lm_head.out_features == size
        labels = tiny_labels(model, inputs)["labels"] % 40
        model.train()(**inputs, labels=labels).loss.backward()
        assert all(table.grad.shape == (size, 32) for table in tables(model))
    model.save_pretrained(tmp_path)
    loaded, missing = load_report(model_class, tmp_path)
    assert not missing
    assert torch.equal(output_of(loaded, inputs), output_of(model, inputs))


@pytest.mark.parametrize("scale", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("model_class", "shape"), MODELS[:6], ids=model_name)
def test_new_words_are_drawn_as_the_first_ones(model_class, shape, tied, scale):
    values = {"initializer_range": 0.05, "scale_embeddings": scale, "tie_word_embeddings": tied}
    model = model_class(tiny_config(shape, **values))
    model.resize_token_embeddings(2061, mean_resizing=False)
    for table in tables(model):
        first, new = table[:61], table[61:]
        assert new.std().item() == pytest.approx(first.std().item(), rel=0.1)
        assert abs(new.mean().item()) < 0.02 * new.std().item()


def test_resizing_pads_to_a_multiple_and_no_size_changes_nothing():
    for tied in (True, False):
        model = TransformerBlockForConditionalGeneration(
            tiny_config("encoder-decoder", tie_word_embeddings=tied)
        )
        assert model.resize_token_embeddings().num_embeddings == 61
        model.resize_token_embeddings(62, pad_to_multiple_of=16)
        assert {len(table) for table in tables(model)} == {64}


@EACH_MODEL
def test_input_embeddings_can_be_set(model_class, shape):
    model = model_class(tiny_config(shape))
    table = nn.Embedding(61, 32)
    model.set_input_embeddings(table)
    assert model.get_input_embeddings() is table
    if shape == "encoder-decoder":
        assert model.base_model.decoder.embed_tokens is table
    if hasattr(model, "lm_head"):
        model.tie_weights()
        assert {id(weight) for weight in tables(model)} == {id(table.weight)}


@pytest.mark.parametrize(("head", "shape"), MODELS[3:], ids=model_name)
def test_IN6_base_and_head_load_each_other(head, shape, tmp_path):
    model = head(tiny_config(shape, tie_word_embeddings=False))
    inputs = tiny_inputs(model.config)
    states = output_of(model.base_model, inputs)
    model.save_pretrained(tmp_path / "head")
    base, missing = load_report(TransformerBlockModel, tmp_path / "head")
    assert not missing
    assert torch.equal(output_of(base, inputs), states)
    base.save_pretrained(tmp_path / "base")
    again, missing = load_report(head, tmp_path / "base")
    assert missing
    assert {name.split(".")[0] for name in missing} <= {"lm_head", "classifier", "qa_outputs"}
    assert torch.equal(output_of(again.base_model, inputs), states)


def test_a_new_head_is_drawn_and_the_rest_is_kept(tmp_path):
    config = tiny_config("encoder", num_labels=50, block_style="pre_norm", hidden_size=64)
    model = TransformerBlockForSequenceClassification(config)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    lost = [
        "classifier.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.self_attn.o_proj.bias",  # whose weight is there and must stay
    ]
    drawn = {name: stored.pop(name) for name in lost}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, missing = load_report(TransformerBlockForSequenceClassification, tmp_path)
    assert missing == drawn.keys()
    for name, parameter in loaded.named_parameters():
        if name not in drawn:
            assert torch.equal(parameter, stored[name]), name
        elif name.endswith("weight"):
            std = 0.2 / (2 if "down_proj" in name else 1)
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
            assert not torch.equal(parameter, drawn[name])
    other, missing = load_report(TransformerBlockForTokenClassification, tmp_path)
    assert missing == drawn.keys()
    assert other.num_labels == 50


def test_a_state_dict_given_by_position_is_saved(tmp_path):
    model = TransformerBlockForCausalLM(tiny_config("decoder"))
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, True, {**state})
    loaded, missing = load_report(TransformerBlockForCausalLM, tmp_path)
    assert not missing
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_sharded_and_then_whole(tmp_path):
    model = TransformerBlockForConditionalGeneration(tiny_config("encoder-decoder"))
    inputs = tiny_inputs(model.config)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    loaded, missing = load_report(TransformerBlockForConditionalGeneration, tmp_path)
    assert not missing
    assert torch.equal(output_of(loaded, inputs), output_of(model, inputs))


def test_ST2_a_transposed_weight_is_saved(tmp_path):
    model = TransformerBlockModel(tiny_config("encoder"))
    weight = torch.randn(32, 32).T
    model.layers[0].self_attn.q_proj.weight = nn.Parameter(weight)
    model.save_pretrained(tmp_path)
    loaded, _ = load_report(TransformerBlockModel, tmp_path)
    assert torch.equal(loaded.layers[0].self_attn.q_proj.weight, weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_CF7_the_stored_dtype_comes_back_unless_another_is_asked(dtype, tmp_path):
    model = TransformerBlockForCausalLM(
        TransformerBlockConfig.modern(
            architecture="decoder", vocab_size=61, hidden_size=32, num_hidden_layers=2
        )
    ).to(dtype)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    loaded = TransformerBlockForCausalLM.from_pretrained(tmp_path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(loaded(tiny_tokens(1, 4) * 0 + 5).logits, model(tiny_tokens(1, 4) * 0 + 5).logits)
    wide = TransformerBlockForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}


def test_RC9_two_saves_write_the_same_configuration(tmp_path):
    for head, shape in LM_HEADS:
        model = head(tiny_config(shape, my_own_key=1))
        first, second = tmp_path / shape / "first", tmp_path / shape / "second"
        model.save_pretrained(first)
        head.from_pretrained(first).save_pretrained(second)
        assert json.loads((first / "config.json").read_text()) == json.loads(
            (second / "config.json").read_text()
        )
        assert json.loads((first / "config.json").read_text())["my_own_key"] == 1


def test_ST4_an_untied_model_from_a_tied_checkpoint_saves(tmp_path):
    tied = TransformerBlockForCausalLM(tiny_config("decoder"))
    tied.save_pretrained(tmp_path / "tied")
    untied = TransformerBlockForCausalLM.from_pretrained(tmp_path / "tied", tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight
    untied.save_pretrained(tmp_path / "untied")
    stored = load_file(tmp_path / "untied" / "model.safetensors")
    assert torch.equal(stored["model.embed_tokens.weight"], tied.lm_head.weight)
    assert "lm_head.weight" in stored
