"""Tests of the translation pipeline: what it writes, what it refuses, and what a configuration says of it."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from conftest import SHAPES, tiny_config, tiny_tokenizer
from tiny import build
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, pipeline
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_transformer_block import TransformerBlockConfig, TransformerBlockForConditionalGeneration
from hf_transformer_block.pipeline_hf_transformer_block import TransformerBlockTranslationPipeline


PIPELINE = Path(inspect.getfile(TransformerBlockTranslationPipeline))
TEXTS = ["w5 w6 w7 w8", "w31 w12", "w40 w41 w42 w6 w50 w13", "w9"]
BLANK = ["", " \n"]
USERS = {"my-task": {"impl": "mine.MyPipeline", "pt": ["AutoModel"]}}
THEIRS = {"translation": {"impl": "user/other--theirs.Pipeline", "pt": ["AutoModelForSeq2SeqLM"]}}
OURS = {
    "impl": "pipeline_hf_transformer_block.TransformerBlockTranslationPipeline",
    "pt": ["AutoModelForSeq2SeqLM"],
    "type": "text",
}


def translator_model(position="learned", **kwargs):
    """Returns an encoder-decoder whose translations vary and have 10 tokens, all of them words."""
    torch.manual_seed(1)
    values = {"position_embedding": position, "block_style": "pre_norm", "scale_embeddings": False}
    values |= {"tie_word_embeddings": False, "eos_token_id": None, "initializer_range": 0.5, **kwargs}
    model = build(TransformerBlockForConditionalGeneration, "encoder-decoder", "vaswani", **values)
    model.generation_config.update(max_new_tokens=10, suppress_tokens=[0, 1, 2, 3, 4])
    return model


def translator(model, **kwargs):
    tokenizer = tiny_tokenizer(model_max_length=32)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A </s>", None, [("</s>", 2)])
    return TransformerBlockTranslationPipeline(model=model, tokenizer=tokenizer, device="cpu", **kwargs)


def by_hand(translate, texts, **options):
    """Returns what tokenizer, generate and decode give, one text at a time; [text, ...] for several."""
    found = []
    for text in texts:
        ids = translate.model.generate(**translate.tokenizer(text, return_tensors="pt"), **options)
        found.append(
            [{"translation_text": translate.tokenizer.decode(row, skip_special_tokens=True)} for row in ids]
        )
    return [rows[0] if len(rows) == 1 else rows for rows in found]


@pytest.fixture(scope="module")
def model():
    return translator_model()


@pytest.fixture
def translate(model):
    return translator(model)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"max_new_tokens": 4},
        {"num_beams": 3, "num_return_sequences": 2},
        {"generation_config": GenerationConfig(max_new_tokens=6, num_beams=2)},
    ],
    ids=["plain", "beams", "short", "several", "config"],
)
def test_translates_as_tokenizer_generate_and_decode_do(translate, options, batch_size):
    expected = by_hand(translate, TEXTS, **options)
    assert len({str(one) for one in expected}) == len(TEXTS)
    assert translate(TEXTS, batch_size=batch_size, **options) == expected
    assert translate(tuple(TEXTS), batch_size=batch_size, **options) == expected
    first = expected[0] if "num_return_sequences" in options else expected[:1]
    assert translate(TEXTS[0], **options) == first


def test_options_given_once_hold_for_every_call(model):
    translate = translator(model, num_beams=3, max_new_tokens=5, batch_size=2)
    assert translate(TEXTS) == by_hand(translate, TEXTS, num_beams=3, max_new_tokens=5)
    assert translate(TEXTS, num_beams=1) == by_hand(translate, TEXTS, max_new_tokens=5)


def test_a_generator_is_translated_one_by_one(translate):
    assert list(translate(text for text in TEXTS)) == [[one] for one in translate(TEXTS)]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_white_space_has_an_empty_translation(translate, batch_size):
    mixed = [TEXTS[0], *BLANK, TEXTS[1]]
    first, *empty, last = translate(mixed, batch_size=batch_size)
    assert [first, last] == translate([TEXTS[0], TEXTS[1]])
    assert empty == [{"translation_text": ""}] * 2
    assert translate(BLANK[1]) == [{"translation_text": ""}]
    assert translate([]) == []


def test_a_text_without_any_token_has_an_empty_translation(translate):
    translate.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A", None, [])
    assert translate(["", TEXTS[0]], batch_size=2)[0] == {"translation_text": ""}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, r"the input is None of type NoneType: give a text or a list"),
        (b"w5", r"the input is b'w5' of type bytes"),
        ({"role": "user", "content": "w5"}, r"the input is \{'role': .* of type dict"),
        ([*TEXTS, 3], r"input 4 of the list is 3 of type int"),
        ([[TEXTS[0]]], r"input 0 of the list is \['w5 w6 w7 w8'\] of type list"),
        ((text for text in (TEXTS[0], None)), r"the input is None"),
        (range(10**6), r"the input is range\(0, 1000000\) of type range"),
    ],
    ids=["none", "bytes", "chat", "number", "nested", "generator", "range"],
)
def test_what_is_no_text_is_refused_by_name(translate, inputs, message):
    with pytest.raises(TypeError, match=message):
        list(translate(inputs))


def test_a_misspelt_option_is_refused(translate):
    with pytest.raises(ValueError, match="num_beam"):
        translate(TEXTS[0], num_beam=3)


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
def test_a_text_beyond_the_last_position_is_refused_unless_it_may_be_cut(position, library_logs):
    translate = translator(translator_model(position))
    long = " ".join(["w5 w9 w7 w8"] * 16)  # 64 tokens and the end's
    with pytest.raises(ValueError, match=r"'w5 w9 .*'\.\.\. has 65 tokens, and .* for 64 .*truncation=True"):
        translate([TEXTS[0], long])
    assert library_logs == []
    whole = " ".join(long.split()[:63])
    assert translate(whole) == by_hand(translate, [whole])
    cut = " ".join(long.split()[:31])  # model_max_length is 32
    assert translate(long, truncation=True) == by_hand(translate, [cut])
    assert translate([long, TEXTS[0]], truncation=True, batch_size=2) == by_hand(translate, [cut, TEXTS[0]])


def test_without_a_table_of_positions_a_long_text_is_read_whole_and_the_tokenizer_warns(library_logs):
    translate = translator(translator_model("rotary"))
    long = " ".join(["w5 w9 w7 w8"] * 20)
    assert translate(long) == by_hand(translate, [long])
    assert "longer than the specified maximum" in library_logs[0]
    cut = " ".join(long.split()[:31])
    assert translate(long, truncation=True) == by_hand(translate, [cut])


@pytest.mark.parametrize(
    ("settings", "options", "length"),
    [
        ({}, {}, 64),  # every position of the decoder
        ({"max_new_tokens": 6}, {}, 6),
        ({"max_length": 6}, {}, 5),  # the first token is not written
        ({"max_new_tokens": 6}, {"max_length": 9}, 8),
        ({}, {"generation_config": GenerationConfig(max_new_tokens=7)}, 7),
    ],
)
def test_length_is_the_callers_else_the_models_else_the_default(settings, options, length, library_logs):
    model = translator_model()
    model.generation_config.update(**{"max_new_tokens": None, **settings})
    words = translator(model)(TEXTS[0], **options)[0]["translation_text"].split()
    assert len(words) == length
    assert library_logs == []


def test_a_long_model_writes_256_tokens_by_default():
    model = translator_model("rotary", max_position_embeddings=1024)
    model.generation_config.max_new_tokens = None
    assert len(translator(model)(TEXTS[0])[0]["translation_text"].split()) == 256


def test_a_decoder_and_a_missing_tokenizer_are_refused(model):
    with pytest.raises(ValueError, match="tokenizer="):
        TransformerBlockTranslationPipeline(model=model)
    model = torch.nn.Module()
    model.config = tiny_config("decoder")
    with pytest.raises(ValueError, match="needs an encoder-decoder"):
        translator(model)


@pytest.mark.parametrize("shape", SHAPES)
def test_only_an_encoder_decoder_names_the_pipeline(shape):
    expected = {"translation": OURS} if shape == "encoder-decoder" else {}
    config = tiny_config(shape)
    assert getattr(config, "custom_pipelines", {}) == expected
    assert TransformerBlockConfig(**config.to_dict()).to_dict() == config.to_dict()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_users_own_pipelines_stay(shape):
    ours = {"translation": OURS} if shape == "encoder-decoder" else {}
    old = {"translation": {"impl": f"user/old--{OURS['impl']}", "pt": ["AutoModel"]}}
    for loaded, expected in (
        (USERS, {**ours, **USERS}),
        (THEIRS, THEIRS),
        (old, ours),
        ({"translation": OURS}, ours),
        (None, ours),
    ):
        assert getattr(tiny_config(shape, custom_pipelines=loaded), "custom_pipelines", {}) == expected


def test_a_pipeline_made_from_a_folder_can_be_saved_and_made_again(translate, tmp_path):
    translate.save_pretrained(tmp_path / "first")
    made = pipeline("translation", str(tmp_path / "first"), trust_remote_code=True, device="cpu")
    assert type(made) is get_class_from_dynamic_module(OURS["impl"], str(tmp_path / "first"))
    assert made(TEXTS) == translate(TEXTS)
    made.save_pretrained(tmp_path / "second")
    folders = [tmp_path / "first", tmp_path / "second"]
    files, again = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    name = "tokenizer_config.json"  # where the library notes how a tokenizer was loaded
    assert {**again, name: None} == {**files, name: None}
    assert json.loads(files["config.json"])["custom_pipelines"] == {"translation": OURS}
    assert files[PIPELINE.name] == PIPELINE.read_bytes()


def test_code_runs_only_where_it_is_trusted(translate, tmp_path):
    translate.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        pipeline("translation", str(tmp_path))
