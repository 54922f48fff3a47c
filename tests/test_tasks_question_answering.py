"""Tests of question answering: rows of files, windows and the answer's place in them, loss and scores."""

import itertools
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import tiny_config
from datasets import Dataset
from tokenizers import normalizers
from torch.nn import functional as F

from hf_transformer_block.tasks import QuestionAnswering
from hf_transformer_block.tasks.base import BadRow, Evaluator, Split
from hf_transformer_block.tasks.question_answering import LONGEST_ANSWER, best_span
from hf_transformer_block.vocabulary import train_tokenizer


DATA = Path(os.environ.get("HFTB_DATA", Path(__file__).parents[2] / "shared" / "data"))
WORDS = [f"word{index}" for index in range(100)]
CONTEXT = " ".join(WORDS)
WRONG_ANSWERS = "its answers are not as in SQuAD, {'text': "


def row_of(answer: str | None, question: str = "Which word?", context: str = CONTEXT) -> dict:
    """Returns a row, of which None is no answer."""
    texts = [] if answer is None else [answer]
    starts = [context.index(text) for text in texts]
    return {"question": question, "context": context, "answers": {"text": texts, "answer_start": starts}}


def tokenizer_of(kind: str = "bpe", architecture: str = "encoder", texts=(CONTEXT, "Which?")):
    return train_tokenizer(iter(texts), kind, 400, 64, architecture)


def encode(task, rows: list[dict], tokenizer, is_training: bool = False) -> tuple[Dataset, Dataset]:
    """Returns rows, numbered from 10 on, and their examples."""
    data = Dataset.from_list([{**row, "row": 10 + number} for number, row in enumerate(rows)])
    return data, Dataset.from_dict(task.encode(data.to_dict(), tokenizer, is_training))


def pointing_at(start: int, end: int, length: int, value: float = 5.0) -> np.ndarray:
    """Returns a model's scores that favour a span."""
    scores = np.zeros((2, length), dtype=np.float32)
    scores[0, start], scores[1, end] = value, value
    return scores


def test_nested_and_flat_files_give_the_same_rows(tmp_path):
    rows = [row_of("word7"), row_of(None), row_of("word50 word51", "And then?")]
    questions = [
        {
            "id": str(number),
            "question": row["question"],
            "answers": [
                {"text": text, "answer_start": start}
                for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
            ],
        }
        for number, row in enumerate(rows)
    ]
    nested = {"data": [{"title": "x", "paragraphs": [{"context": CONTEXT, "qas": questions}]}]}
    (tmp_path / "x.json").write_text(json.dumps(nested))
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Dataset.from_list(rows).to_parquet(tmp_path / "x.parquet")
    task = QuestionAnswering()
    for name in ("x.json", "x.jsonl", "x.parquet"):
        assert [task.parse(raw) for raw in task.read([str(tmp_path / name)])] == rows, name
    assert task.texts(rows[0]) == ["Which word?", CONTEXT]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": " "}, "its question is empty"),
        ({"context": None}, "its context is of type NoneType, not a text"),
        ({"answers": ["word7"]}, WRONG_ANSWERS),
        ({"answers": {"text": ["word7"]}}, WRONG_ANSWERS),
        ({"answers": {"text": ["word7"], "answer_start": []}}, WRONG_ANSWERS),
        ({"answers": {"text": ["word7"], "answer_start": ["42"]}}, WRONG_ANSWERS),
        ({"answers": {"text": ["word7"], "answer_start": [1]}}, "not at its answer_start"),
        ({"answers": {"text": ["word99"], "answer_start": [-6]}}, "not at its answer_start"),
        ({"answers": {"text": [""], "answer_start": [0]}}, "not at its answer_start"),
    ],
)
def test_bad_rows_are_refused(changes, message):
    with pytest.raises(BadRow, match=message):
        QuestionAnswering().parse({**row_of("word7"), **changes})


def test_a_missing_column_is_an_error():
    with pytest.raises(ValueError, match=r"no column 'answers' but \['question', 'context'\]: give") as error:
        QuestionAnswering().parse({"question": "x", "context": "y"})
    assert not isinstance(error.value, BadRow)


@pytest.mark.parametrize("kind", ["bpe", "char", "word"])
@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
def test_windows_hold_the_whole_context_and_the_answer(kind, architecture):
    tokenizer = tokenizer_of(kind, architecture)
    task = QuestionAnswering(max_length=48)
    _, windows = encode(task, [row_of("word50 word51")], tokenizer, True)
    whole = tokenizer(CONTEXT, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    question = tokenizer("Which word?", add_special_tokens=False)["input_ids"]
    answer = CONTEXT.index("word50"), CONTEXT.index(" word52")
    assert len(windows) > 2
    rest, found = whole["offset_mapping"], 0
    for window in windows:
        ids, first, offsets = window["input_ids"], window["context_start"], window["offsets"]
        assert window["length"] == len(ids) <= 48
        # each window begins 16 tokens, a third of its length, before the end of the last
        assert [tuple(offset) for offset in offsets] == rest[: len(offsets)]
        rest = rest[len(offsets) - 16 :]
        start = first - len(question) - (architecture == "encoder")  # </s> stands between
        assert ids[start : start + len(question)] == question
        place = window["start_positions"], window["end_positions"]
        if offsets[0][0] <= answer[0] and answer[1] <= offsets[-1][1]:
            found += 1
            (left, _), (_, right) = offsets[place[0] - first], offsets[place[1] - first]
            assert CONTEXT[left:right] == " " * (kind == "bpe") + "word50 word51"
        else:
            assert place == (0, 0)
    assert len(rest) == 16
    assert found > 0
    assert {(window["row"], window["dropped"], window["cut"]) for window in windows} == {(10, "", False)}


def test_long_questions_are_left_out_of_training_and_cut_in_evaluation():
    tokenizer = tokenizer_of("word")
    rows = [row_of("word7", " ".join(WORDS[:16])), row_of("word9", " ".join(WORDS[:17]))]
    task = QuestionAnswering(max_length=48)
    _, training = encode(task, rows, tokenizer, True)
    assert Counter(training["row"])[10] > 1
    assert [(w["row"], w["dropped"]) for w in training if w["dropped"]] == [
        (11, "its question is longer than 16 tokens, a third of the limit")
    ]
    _, evaluation = encode(task, rows, tokenizer)
    windows = [[window for window in evaluation if window["row"] == row] for row in (10, 11)]
    assert [window["input_ids"] for window in windows[0]] == [window["input_ids"] for window in windows[1]]
    assert {window["cut"] for window in windows[0]} == {False}
    assert {window["cut"] for window in windows[1]} == {True}
    assert set(evaluation["dropped"]) == {""}


def test_limits_that_hold_no_context_are_refused():
    with pytest.raises(ValueError, match="--max_length 23 must be at least 24"):
        encode(QuestionAnswering(max_length=23), [row_of("word7")], tokenizer_of())


def test_a_context_without_tokens_is_left_out():
    tokenizer = tokenizer_of("char")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("-", "")
    rows = [row_of(None, "Why?", "--"), row_of("a", "Why?", "-a")]
    _, windows = encode(QuestionAnswering(), rows, tokenizer)
    assert list(windows["dropped"]) == ["its text has no tokens", ""]


@pytest.mark.parametrize("length", [1, 2, LONGEST_ANSWER, 100])
def test_the_best_span_is_found_among_all(length):
    scores = np.random.default_rng(length).normal(size=(2, length)).astype(np.float32)
    scores[0, 0], scores[1, -1] = 9, 9  # too far apart, where there is room
    spans = itertools.product(range(length), repeat=2)
    values = {(i, j): scores[0, i] + scores[1, j] for i, j in spans if i <= j < i + LONGEST_ANSWER}
    start, end = max(values, key=values.get)
    assert best_span(scores) == (pytest.approx(values[start, end]), start, end)


def test_the_best_of_all_windows_answers_each_question():
    task = QuestionAnswering(max_length=48)
    rows = [row_of("word7"), row_of("word99"), row_of("word3"), row_of(None)]
    data, windows = encode(task, rows, tokenizer_of("bpe"))
    predictions = []
    for window in windows:
        place, first = (window["start_positions"], window["end_positions"]), window["context_start"]
        # right; right, if less sure than of nothing elsewhere; wrong: a window's first two tokens; right
        value = {10: 5.0, 11: 5.0 if place[0] else 9.0, 12: 2.0, 13: 5.0}[window["row"]]
        place = (first, first + 1) if window["row"] == 12 else place
        predictions.append(pointing_at(*place, len(window["input_ids"]), value))
    assert task.answers(data, windows, predictions) == {10: "word7", 11: "word99", 12: "word0", 13: ""}
    assert task.score(data, windows, predictions) == {"exact_match": 75, "f1": 75}
    # rows that are not among the examples do not count
    is_kept = [window["row"] != 12 for window in windows]
    kept = windows.select(np.flatnonzero(is_kept))
    scores = task.score(data, kept, list(itertools.compress(predictions, is_kept)))
    assert scores == {"exact_match": 100, "f1": 100}


def test_no_answer_is_given_only_where_questions_may_have_none():
    task, tokenizer, context = QuestionAnswering(), tokenizer_of("word"), " ".join(WORDS[:9])
    rows = [row_of("word7", context=context), row_of(None, context=context)]
    unsure = pointing_at(0, 0, 14)
    unsure[:, 7] = 1
    for chosen, expected in ((rows, {10: "", 11: ""}), (rows[:1], {10: "word3"})):
        data, windows = encode(task, chosen, tokenizer)
        assert windows["context_start"][0] == 4  # <s> Which word? </s>
        assert task.answers(data, windows, [unsure] * len(windows)) == expected
    data, windows = encode(task, rows, tokenizer)
    assert task.score(data, windows, [unsure] * 2) == {"exact_match": 50, "f1": 50}


@pytest.mark.parametrize("shape", ["encoder", "decoder"])
def test_loss_and_predictions_by_hand(shape):
    tokenizer = tokenizer_of("word", shape)
    task = QuestionAnswering(max_length=48)
    rows = [row_of("word7"), row_of("word95"), row_of("word40", context=" ".join(WORDS[35:45]))]
    values = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **task.config_values()}
    model = task.model_class(tiny_config(shape, **values)).eval()
    data, windows = encode(task, rows, tokenizer)
    loss, predictions = 0.0, []
    for window in windows:
        outputs = model(input_ids=torch.tensor([window["input_ids"]]))
        logits = torch.cat([outputs.start_logits, outputs.end_logits])
        truths = torch.tensor([window["start_positions"], window["end_positions"]])
        loss += F.cross_entropy(logits, truths).item()
        predictions.append(logits.detach().numpy())
    scores, _ = task.evaluate(Evaluator(Accelerator(cpu=True), model, tokenizer, 3), Split(data, windows))
    assert scores["targets"] == len(windows) > 5
    assert scores["loss"] == pytest.approx(loss / len(windows), abs=1e-5)
    expected = task.score(data, windows, predictions)
    assert {name: scores[name] for name in expected} == pytest.approx(expected)
    assert scores.keys() >= task.metrics.keys()
    muted = task.mute(task.collate([windows[0]], tokenizer))
    assert task.count_targets(muted) == 0
    assert model(**muted, num_items_in_batch=1).loss == 0


@pytest.mark.data
@pytest.mark.skipif(
    not (DATA / "xquad").is_dir(), reason="runs where HFTB_DATA or ../shared/data holds xquad"
)
@pytest.mark.parametrize("language", ["en", "de", "zh"])
def test_every_answer_of_xquad_is_found_where_it_is(language):
    task = QuestionAnswering(max_length=384)
    rows = [task.parse(raw) for raw in task.read([str(DATA / "xquad" / f"xquad.{language}.json.gz")])]
    assert len(rows) == 1190
    rows = rows[:200]
    tokenizer = tokenizer_of("char", texts=[text for row in rows for text in task.texts(row)])
    data, windows = encode(task, rows, tokenizer)
    assert len(windows) > len(rows)
    predictions = []
    for window in windows:
        place = (window["start_positions"], window["end_positions"])
        predictions.append(pointing_at(*place, window["length"], 5.0 if place[0] else 0.0))
    answers = [row["answers"]["text"][0] for row in rows]
    short = [len(answer) <= LONGEST_ANSWER for answer in answers]  # a token is a character
    found = task.answers(data, windows, predictions).values()
    hits = [guess == answer.strip() for guess, answer in zip(found, answers, strict=True)]
    assert hits == short
    assert 100 < sum(short) < len(rows)
