"""Tests of the tokenizers that are trained on the spot."""

import pytest
from transformers import AutoTokenizer

from hf_transformer_block.vocabulary import SPECIAL_TOKENS, TOKENIZERS, train_tokenizer


TEXTS = ["the cat saw the dog", "a dog in 1987"]
FRAMES = {"encoder": (["<s>"], ["</s>"]), "decoder": ([], []), "encoder-decoder": ([], ["</s>"])}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("architecture", FRAMES)
@pytest.mark.parametrize("mask", [False, True])
def test_a_trained_tokenizer_decodes_what_it_encodes(kind, architecture, mask, tmp_path):
    tokenizer = train_tokenizer(iter(TEXTS), kind, 400, 64, architecture, mask)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    before, after = FRAMES[architecture]
    for text in TEXTS:
        ids = loaded(text)["input_ids"]
        assert ids == tokenizer(text)["input_ids"]
        inner = loaded(text, add_special_tokens=False)["input_ids"]
        assert loaded.convert_ids_to_tokens(ids) == before + loaded.convert_ids_to_tokens(inner) + after
        assert loaded.decode(ids, skip_special_tokens=True) == text
        assert not set(inner) & set(loaded.all_special_ids)
    special = [*SPECIAL_TOKENS.values(), *["<mask>"] * mask]
    assert loaded.convert_tokens_to_ids(special) == sorted(loaded.all_special_ids) == list(range(4 + mask))
    assert loaded.mask_token_id == (4 if mask else None)
    assert loaded.padding_side == ("left" if architecture == "decoder" else "right")
    assert loaded.model_max_length == 64


def test_an_encoder_reads_pairs():
    tokenizer = train_tokenizer(iter(TEXTS), "word", 400, 64, "encoder")
    ids = tokenizer("the cat", "a dog")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "the", "cat", "</s>", "a", "dog", "</s>"]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_mask_stands_for_one_token(kind):
    tokenizer = train_tokenizer(iter(TEXTS * 9), kind, 400, 64, "encoder", mask=True)
    whole = tokenizer("a dog in")["input_ids"]
    hidden = {"bpe": "a <mask> in", "word": "a <mask> in", "char": "a <mask>og in"}[kind]
    index = 3 if kind == "char" else 2
    assert tokenizer(hidden)["input_ids"] == [*whole[:index], tokenizer.mask_token_id, *whole[index + 1 :]]


def test_bpe_encodes_any_text_and_keeps_digits_apart():
    tokenizer = train_tokenizer(iter(["1987 1987 1987"]), "bpe", 300, 64, "decoder")
    assert len(tokenizer("1987")["input_ids"]) == 4
    for text in ("猫 & кот", "line\nbreak\ttab", "  two  spaces  "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("kind", ["char", "word"])
def test_the_most_frequent_are_kept(kind):
    tokenizer = train_tokenizer(iter(["a a a b b c"]), kind, 6, 64, "decoder")
    assert len(tokenizer) == 6
    kept = {"char": [" ", "a"], "word": ["a", "b"]}[kind]
    assert tokenizer.convert_tokens_to_ids([*kept, "c"]) == [4, 5, tokenizer.unk_token_id]


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"'bbpe' is unknown \(known: bpe, char, word\)"):
        train_tokenizer(iter(["x"]), "bbpe", 300, 64, "decoder")
