"""Tests of the configuration: defaults, presets, what it refuses, what it keeps, and its JSON."""

import json

import pytest
import torch
import transformers
from conftest import LM_HEADS, MODELS, SHAPES, model_name, tiny_config
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import hf_transformer_block
from hf_transformer_block import TransformerBlockConfig
from hf_transformer_block import modeling_hf_transformer_block as modeling


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")

HEADS = {
    "encoder": {"MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"},
    "decoder": {"CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"},
    "encoder-decoder": {"Seq2SeqLM"},
}
# what transformers, older transformers, and tools around it really write into a config.json
FOREIGN_KEYS = {
    "_attn_implementation_autoset": True,
    "_commit_hash": "0123abc",
    "_name_or_path": "user/model",
    "add_cross_attention": False,
    "architectures": ["TransformerBlockForCausalLM"],
    "attn_implementation": "eager",
    "auto_map": {"AutoConfig": "user/model--configuration_hf_transformer_block.TransformerBlockConfig"},
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "custom_pipelines": {"my-task": {"impl": "pipeline.MyPipeline", "pt": ["AutoModel"]}},
    "do_sample": True,
    "dtype": "float32",
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": 2,
    "id2label": {"0": "no", "1": "yes", "2": "perhaps"},
    "is_decoder": True,
    "label2id": {"no": 0, "yes": 1, "perhaps": 2},
    "layer_types": ["full_attention", "full_attention"],
    "length_penalty": 1.0,
    "max_length": 20,
    "max_window_layers": 28,
    "mask_token_id": 4,
    "model_max_length": 512,
    "no_repeat_ngram_size": 3,
    "num_beams": 4,
    "num_labels": 3,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "partial_rotary_factor": 1.0,
    "prefix": None,
    "pretraining_tp": 1,
    "problem_type": "regression",
    "pruned_heads": {},
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sentence_transformers": {"version": "5.0.0"},
    "sep_token_id": None,
    "sliding_window": None,
    "suppress_tokens": None,
    "task_specific_params": {"translation": {"num_beams": 4}},
    "temperature": 0.7,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "top_k": 50,
    "top_p": 0.9,
    "torch_dtype": "bfloat16",
    "torchscript": False,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "transformers_version": "4.44.0",
    "typical_p": 1.0,
    "unk_token_id": None,
    "unsloth_fixed": True,
    "unsloth_version": "2025.1.1",
    "use_bfloat16": False,
    "use_mambapy": False,
    "use_sliding_window": False,
}


def refused(**kwargs) -> str:
    """Returns the message with which a configuration refuses its arguments."""
    with pytest.raises((ValueError, TypeError, StrictDataclassError)) as refusal:
        TransformerBlockConfig(**kwargs)
    return str(refusal.value)


def test_defaults_are_the_papers_block_and_derived_fields_are_filled():
    config = TransformerBlockConfig()
    assert config.to_dict() == TransformerBlockConfig.vaswani().to_dict()
    assert (config.block_style, config.norm_type, config.position_embedding) == (
        "post_norm",
        "layer_norm",
        "sinusoidal",
    )
    assert (config.hidden_act, config.gated_mlp, config.dropout, config.scale_embeddings) == (
        "relu",
        False,
        0.1,
        True,
    )
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (32, 8, 1024)
    assert (config.is_encoder_decoder, config.num_decoder_layers, config.decoder_start_token_id) == (
        True,
        6,
        1,
    )
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert config.rope_parameters is None
    assert [TransformerBlockConfig(architecture=shape).classifier_pooling for shape in SHAPES] == [
        "mean",
        "last",
        None,
    ]


def test_presets_set_fields_and_give_way_to_arguments():
    modern = TransformerBlockConfig.modern(architecture="decoder", hidden_act="gelu")
    assert (modern.block_style, modern.norm_type, modern.position_embedding) == (
        "pre_norm",
        "rms_norm",
        "rotary",
    )
    assert (modern.hidden_act, modern.gated_mlp, modern.attention_bias, modern.mlp_bias, modern.dropout) == (
        "gelu",
        True,
        False,
        False,
        0.0,
    )
    assert modern.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    tutorial = TransformerBlockConfig.tutorial(embed_size=64, heads=4, num_layers=3, forward_expansion=2)
    assert (tutorial.architecture, tutorial.block_style) == ("encoder", "tutorial")
    assert (tutorial.hidden_size, tutorial.num_attention_heads) == (64, 4)
    assert (tutorial.num_hidden_layers, tutorial.intermediate_size) == (3, 128)
    assert (tutorial.embed_size, tutorial.heads, tutorial.num_layers) == (64, 4, 3)
    assert not {"embed_size", "heads", "num_layers", "forward_expansion"} & set(
        json.loads(tutorial.to_json_string())
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"hidden_size": 30, "num_attention_heads": 4},
            "hidden_size=30 is not divisible by num_attention_heads=4",
        ),
        ({"norm_eps": float("nan")}, "norm_eps=nan must not be negative"),
        ({"num_labels": 0}, "num_labels=0 must be at least 1"),
        (
            {"position_embedding": "rotary", "rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
            "rope_theta=-1.0 in rope_parameters must be above 0",
        ),
        (
            {"position_embedding": "rotary", "head_dim": 5},
            "head_dim=5 times partial_rotary_factor=1.0 is 5, which must be even",
        ),
        (
            {
                "position_embedding": "rotary",
                "head_dim": 6,
                "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5},
            },
            "head_dim=6 times partial_rotary_factor=0.5 is 3, which must be even",
        ),
        (
            {"hidden_size": 33, "num_attention_heads": 3},
            "sinusoidal positions need an even hidden_size, not 33",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads=8 is not divisible by num_key_value_heads=3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be at least 1"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"hidden_size": -8}, "hidden_size=-8 must be at least 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
        ({"head_dim": -4}, "head_dim=-4 must be at least 1"),
        ({"intermediate_size": 0}, "intermediate_size=0 must be at least 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings=0 must be at least 1"),
        ({"num_decoder_layers": 0}, "num_decoder_layers=0 must be at least 1"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1 must be at least 0"),
        ({"classifier_dropout": 1.5}, "classifier_dropout=1.5 must be at least 0 and below 1"),
        ({"norm_eps": -1e-5}, "norm_eps=-1e-05 must not be negative"),
        ({"initializer_range": 0}, "initializer_range=0 must be above 0"),
        ({"pad_token_id": -1}, "pad_token_id=-1 is outside the vocabulary (0 to 31999)"),
        ({"bos_token_id": 32000}, "bos_token_id=32000 is outside the vocabulary (0 to 31999)"),
        ({"eos_token_id": [2, 40000]}, "eos_token_id=40000 is outside the vocabulary"),
        ({"decoder_start_token_id": 99999}, "decoder_start_token_id=99999 is outside the vocabulary"),
        ({"bos_token_id": None}, "an encoder-decoder needs decoder_start_token_id"),
        ({"architecture": "decode"}, "architecture='decode' is unknown; did you mean 'decoder'?"),
        ({"norm_type": "rmsnorm"}, "norm_type='rmsnorm' is unknown; did you mean 'rms_norm'?"),
        ({"block_style": "prenorm"}, "block_style='prenorm' is unknown; did you mean 'pre_norm'?"),
        (
            {"position_embedding": "rotery"},
            "did you mean 'rotary'? (known: sinusoidal, learned, rotary, none)",
        ),
        ({"hidden_act": "rellu"}, "hidden_act='rellu' is unknown; did you mean 'relu'?"),
        (
            {"position_embedding": "rotary", "rope_parameters": {"rope_type": "yarm", "rope_theta": 1e4}},
            "rope_type='yarm' is unknown; did you mean 'yarn'?",
        ),
        ({"rope_parameters": {"rope_theta": 1e4}}, "needs position_embedding='rotary', not 'sinusoidal'"),
        ({"num_atention_heads": 4}, "no field 'num_atention_heads'; did you mean 'num_attention_heads'?"),
        ({"forward_expension": 4}, "no field 'forward_expension'; did you mean 'forward_expansion'?"),
        ({"embed_sizes": 4}, "no field 'embed_sizes'; did you mean 'embed_size'?"),
        ({"architecture": "decoder", "num_decoder_layers": 2}, "num_decoder_layers=2 needs architecture="),
        ({"format_version": 2}, "format_version=2 but the code knows up to 1: pip install --upgrade"),
        (
            {"architecture": "encoder", "block_style": "tutorial", "num_key_value_heads": 2},
            "num_key_value_heads=2 must equal num_attention_heads=8",
        ),
        (
            {"architecture": "encoder", "block_style": "tutorial", "head_dim": 16},
            "num_attention_heads=8 times head_dim=16 must be hidden_size=256",
        ),
        ({"architecture": "decoder", "classifier_pooling": "cls"}, "classifier_pooling='cls' does not fit"),
        ({"architecture": "encoder", "classifier_pooling": "last"}, "(known: mean, cls)"),
        ({"architecture": "decoder", "sliding_window": 8}, "sliding_window=8 is not supported"),
        (
            {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
            "layer_types=['sliding_attention'] is not supported",
        ),
        ({"hidden_size": "16"}, "'hidden_size' expected int, got str"),
        ({"hidden_size": 16.0}, "'hidden_size' expected int, got float"),
        ({"dropout": "0.1"}, "'dropout'"),
        ({"use_cache": "yes"}, "'use_cache' expected bool, got str"),
        ({"architecture": None}, "'architecture' expected str, got NoneType"),
        ({"forward_expansion": "4"}, "forward_expansion='4' must be a whole number"),
    ],
)
def test_refuses(kwargs, message):
    assert message in refused(**kwargs)


def test_positional_arguments_are_refused():
    with pytest.raises(ValueError, match="keyword arguments"):
        TransformerBlockConfig("encoder")


def test_int_for_float_and_null_for_optional_are_taken():
    config = tiny_config(
        dropout=0, norm_eps=1, pad_token_id=None, eos_token_id=[2, 5], classifier_dropout=None
    )
    assert (config.dropout, config.norm_eps, config.pad_token_id, config.eos_token_id) == (0, 1, None, [2, 5])


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (head, shape)
        for head in dict.fromkeys(model for model, _ in MODELS[3:])
        for shape in SHAPES
        if (head, shape) not in MODELS
    ],
    ids=model_name,
)
def test_a_head_that_does_not_fit_is_refused_by_name(model, shape):
    with pytest.raises(ValueError, match=f"{model.__name__} needs architecture=.*, not '{shape}'.*AutoModel"):
        model(tiny_config(shape))


@pytest.mark.parametrize("key", FOREIGN_KEYS)
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_that_tools_write_are_not_refused(shape, key):
    TransformerBlockConfig.modern(architecture=shape, num_hidden_layers=2, **{key: FOREIGN_KEYS[key]})
    tiny_config(shape, **{key: FOREIGN_KEYS[key]})


def test_all_foreign_keys_at_once_and_unknown_ones_survive_two_saves(tmp_path):
    assert len(FOREIGN_KEYS) > 60
    kept = {"my_own_key": {"a": [1, 2]}, "quantization_config": FOREIGN_KEYS["quantization_config"]}
    config = tiny_config("decoder", **FOREIGN_KEYS, my_own_key=kept["my_own_key"])
    config.save_pretrained(tmp_path / "first")
    TransformerBlockConfig.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    first, second = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("first", "second")
    )
    assert first == second
    assert first.items() >= kept.items()
    assert first["id2label"] == FOREIGN_KEYS["id2label"]
    assert first["dtype"] == "float32"


@pytest.mark.parametrize("shape", SHAPES)
def test_json_round_trip_is_equal(shape):
    config = TransformerBlockConfig.modern(
        architecture=shape, qk_norm=True, num_key_value_heads=2, num_labels=5
    )
    loaded = TransformerBlockConfig(**json.loads(config.to_json_string()))
    assert loaded.to_dict() == config.to_dict()
    assert loaded.num_labels == 5


@pytest.mark.parametrize("shape", SHAPES)
def test_auto_map_holds_every_class_that_fits(shape):
    config = tiny_config(shape, auto_map={"AutoModel": "user/other--modeling.Wrong"})
    expected = {"AutoConfig", "AutoModel", *(f"AutoModelFor{head}" for head in HEADS[shape])}
    assert set(config.auto_map) == expected
    assert not [value for value in config.auto_map.values() if "--" in value]
    for auto, value in config.auto_map.items():
        module, name = value.split(".")
        assert getattr(getattr(hf_transformer_block, module), name).__name__ == name, auto
    for model, fitting in LM_HEADS:
        assert (model.__name__ in {value.split(".")[1] for value in config.auto_map.values()}) == (
            fitting == shape
        )


def test_CF4_dtypes_become_strings():
    config = tiny_config(dtype=torch.bfloat16, my_own_key={"dtype": torch.float16})
    written = json.loads(config.to_json_string())
    assert written["dtype"] == "bfloat16"
    assert written["my_own_key"] == {"dtype": "float16"}
    assert TransformerBlockConfig(**written).dtype == torch.bfloat16


def test_CF5_old_rope_fields_give_the_angles_of_the_new_ones():
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    configs = [
        TransformerBlockConfig.modern(architecture="decoder", **fields)
        for fields in (
            {"rope_parameters": new},
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        )
    ]
    truth = 500.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32) / 4
    for config in configs:
        inv_freq = modeling.TransformerBlockRotaryEmbedding(config).inv_freq
        torch.testing.assert_close(inv_freq.double(), truth, rtol=1e-6, atol=0)
        assert config.rope_parameters.items() >= new.items()
    plain = modeling.TransformerBlockRotaryEmbedding(TransformerBlockConfig.modern()).inv_freq
    default = 10000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    torch.testing.assert_close(plain.double(), default, rtol=1e-6, atol=0)


def test_the_decoders_text_config_has_its_depth_and_its_first_token():
    config = tiny_config("encoder-decoder", num_decoder_layers=5, decoder_start_token_id=7)
    text = config.get_text_config(decoder=True)
    assert (text.num_hidden_layers, text.decoder_start_token_id) == (5, 7)
    assert config.num_hidden_layers == config.get_text_config(encoder=True).num_hidden_layers == 2
    assert config.get_text_config() is config
    for config in (tiny_config("decoder"), tiny_config("encoder-decoder")):  # nothing differs: no copy
        assert config.get_text_config(decoder=True) is config


def test_AM5_the_model_type_is_ours():
    assert CONFIG_MAPPING_NAMES
    assert TransformerBlockConfig.model_type not in CONFIG_MAPPING_NAMES


def test_AM7_class_names_are_ours():
    names = {
        name
        for name, value in vars(modeling).items()
        if getattr(value, "__module__", "") == modeling.__name__
    }
    names = {name for name in names if isinstance(getattr(modeling, name), type)} | {"TransformerBlockConfig"}
    assert len(names) > 10
    assert not names & set(dir(transformers))


def test_the_configuration_ignores_the_cache_at_evaluation():
    assert {"cache", "past_key_values"} <= set(TransformerBlockConfig.keys_to_ignore_at_inference)
