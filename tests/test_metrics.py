"""Tests of the scores: by hand, against sacreBLEU, and values of seqeval, scikit-learn and MLQA's script."""

import math

import pytest
import sacrebleu

from hf_transformer_block.metrics import (
    accuracy,
    bits_per_byte,
    bleu_tokenizer,
    class_scores,
    entity_scores,
    find_entities,
    is_bio,
    score_translations,
    squad_scores,
)


ENGLISH = ["The cat sat on the mat.", "It isn't so, is it?"]
CHINESE = ["我在2019年去了北京。", "他不喜欢BBC的新闻吗?"]
JAPANESE = ["私は昨日、東京タワーに行きました。", "これは本です。"]
KOREAN = ["나는 어제 서울에 갔다.", "이것은 책이다."]


def split(*sentences: str) -> list[list[str]]:
    return [sentence.split() for sentence in sentences]


def test_exact_match_and_bits_by_hand():
    scores = score_translations(["2024-03-05", "2024-03-06"], ["2024-03-05", "2024-03-05"])
    assert scores["exact_match"] == 50
    assert accuracy([1, 2, 3], [1, 0, 3]) == pytest.approx(200 / 3)
    assert bits_per_byte(loss=math.log(4), tokens=6, num_bytes=12) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("references", "tokenizer"), [(ENGLISH, "13a"), (CHINESE, "zh"), (JAPANESE, "char"), (KOREAN, "char")]
)
def test_bleu_and_chrf_are_those_of_sacrebleu(references, tokenizer):
    hypotheses = [references[0].replace("a", "e"), references[1][:-1]]
    scores = score_translations(hypotheses, references)
    bleu = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenizer).score
    assert 0 < bleu < 100
    assert scores["bleu"] == pytest.approx(bleu, abs=1e-12)
    assert scores["chrf"] == pytest.approx(sacrebleu.corpus_chrf(hypotheses, [references]).score, abs=1e-12)
    assert scores["bleu_signature"] == (
        f"nrefs:1|case:mixed|eff:no|tok:{tokenizer}|smooth:exp|version:{sacrebleu.__version__}"
    )
    assert scores["chrf_signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0")


def test_bleu_of_texts_that_are_tokenized_already():
    scores = score_translations(["a cat is n't here ."], ["a dog is n't here ."], tokenize="none")
    # n-grams of 6 words: 5 of 6, 3 of 5, 2 of 4, 1 of 3
    assert scores["bleu"] == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert "tok:none" in scores["bleu_signature"]


@pytest.mark.parametrize(
    ("texts", "tokenizer"),
    [(["12:30", "—"], "13a"), (["iPhone 12 的 GPS"], "13a"), (["GPS 在手机里面的"], "zh"), ([""], "13a")],
)
def test_most_letters_decide_the_tokenizer(texts, tokenizer):
    assert bleu_tokenizer(texts) == tokenizer


# values of scikit-learn 1.9.1
@pytest.mark.parametrize(
    ("predictions", "references", "accuracy", "macro_f1"),
    [
        ("aabbcda", "abbbcaa", 71.42857142857143, 61.66666666666667),  # d is predicted but never true
        ("xxxx", "yyyy", 0, 0),
        ("aab", "aab", 100, 100),
    ],
)
def test_class_scores(predictions, references, accuracy, macro_f1):
    scores = class_scores(predictions, references)
    assert scores == pytest.approx({"accuracy": accuracy, "macro_f1": macro_f1, "micro_f1": accuracy})


def test_entities_begin_and_end_as_in_conlleval():
    (tags,) = split("B-PER I-PER B-PER O I-LOC I-x-y I-x-y O B-LOC I-PER")
    expected = {(0, 1, "PER"), (2, 2, "PER"), (4, 4, "LOC"), (5, 6, "x-y"), (8, 8, "LOC"), (9, 9, "PER")}
    assert find_entities(tags) == expected


def test_entity_scores():
    predictions = split(
        *("B-PER I-PER O B-LOC", "I-PER I-LOC B-LOC O I-LOC", "O O B-x-y I-x-y I-PER", "B-PER B-PER I-PER O")
    )
    references = split(
        *("B-PER I-PER O B-LOC", "B-PER I-LOC I-LOC O B-LOC", "O B-x-y I-x-y I-x-y O", "B-PER I-PER I-PER O")
    )
    # values of seqeval 1.2.2: 4 entities of 10 that were found and 7 that there are
    assert entity_scores(predictions, references) == pytest.approx(
        {"precision": 40, "recall": 57.14285714285714, "f1": 47.05882352941176}
    )
    nothing = split("O O", "O")
    assert entity_scores(nothing, nothing) == {"precision": 0, "recall": 0, "f1": 0}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("O", "B-PER", "I-PER"), True),
        (("I-LOC", "O"), True),
        (("NOUN", "VERB"), False),
        (("O",), False),
        (("O", "S-PER"), False),
        (("O", "B-"), False),
    ],
)
def test_bio_labels_are_recognised(labels, expected):
    assert is_bio(labels) is expected


def test_squad_scores():
    predictions = ["The Denver Broncos!", "gold-themed things", "in 2016, Santa Clara", "nothing"]
    references = [
        ["Denver Broncos", "Broncos"],
        ["the gold themed initiatives", "gold-themed"],
        ["Santa Clara, California"],
        ["Levi's Stadium"],
    ]
    # values of torchmetrics 1.9.0: 1, 2/3, 4/7 and 0
    assert squad_scores(predictions, references) == pytest.approx(
        {"exact_match": 25, "f1": 55.95238095238095}
    )


def test_chinese_answers_are_compared_by_character():
    predictions = ["在“1893年”", "里昂·席勒", "the 39岁", "17 秒时拦截"]
    references = [["1893年"], ["里昂席勒"], ["39 岁"], ["17秒"]]
    # values of MLQA's script: 4/5, 1, 4/5 and 4/7
    assert squad_scores(predictions, references) == pytest.approx(
        {"exact_match": 25, "f1": 79.28571428571429}
    )


def test_a_question_without_answer_wants_none():
    assert squad_scores(["", "so", ""], [[], [], ["so"]]) == pytest.approx(
        {"exact_match": 100 / 3, "f1": 100 / 3}
    )
    assert squad_scores(["the"], [["a"]]) == {"exact_match": 100, "f1": 100}
