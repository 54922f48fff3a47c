"""Tests of text and token classification: rows of files, labels among sub-words, loss and scores."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import tiny_config
from datasets import Dataset
from tokenizers import normalizers
from torch.nn import functional as F

from hf_transformer_block.metrics import find_entities, is_bio
from hf_transformer_block.tasks import TextClassification, TokenClassification
from hf_transformer_block.tasks.base import BadRow, Evaluator, Split
from hf_transformer_block.vocabulary import train_tokenizer


DATA = Path(os.environ.get("HFTB_DATA", Path(__file__).parents[2] / "shared" / "data"))
ROWS = [{"text": "a fine, fine film", "label": "good"}, {"text": "so dull", "label": "bad"}]
TAGS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")


def needs(name: str):
    """Marks a test that reads a folder of the data sets."""
    reason = f"runs where HFTB_DATA or ../shared/data holds {name}"
    missing = pytest.mark.skipif(not (DATA / name).is_dir(), reason=reason)
    return lambda test: pytest.mark.data(missing(test))


def write(path, text: str) -> str:
    raw = text.encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return str(path)


def parsed(task, *files: str) -> list[dict]:
    """Returns the rows of files, numbered; those that are refused are left out."""
    rows = []
    for raw in task.read(files):
        try:
            rows.append(task.parse(raw))
        except BadRow:
            continue
    return [{**row, "row": number} for number, row in enumerate(rows)]


def tokenizer_of(kind: str, *texts: str, architecture: str = "encoder"):
    return train_tokenizer(iter(texts), kind, 300, 64, architecture)


def encode(task, rows: list[dict], tokenizer, is_training: bool = False) -> Dataset:
    """Returns the examples of rows, numbered."""
    numbered = [{**row, "row": number} for number, row in enumerate(rows)]
    return Dataset.from_dict(task.encode(Dataset.from_list(numbered).to_dict(), tokenizer, is_training))


def build_model(task, tokenizer, shape: str = "encoder"):
    values = {**task.config_values(), "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    return task.model_class(tiny_config(shape, **values)).eval()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_kind_of_file_gives_the_same_texts(tmp_path, suffix):
    lines = {
        "space.txt": "good a fine, fine film\nbad so dull\n",
        "tab": "good\ta fine, fine film\nbad\tso dull",
    }
    tables = {
        "x.csv": 'text,label\n"a fine, fine film",good\nso dull,bad\n',
        "x.tsv": "label\ttext\ngood\ta fine, fine film\nbad\tso dull\n",
        "x.jsonl": "\n".join(map(json.dumps, ROWS)),
    }
    task = TextClassification()
    files = [write(tmp_path / f"{name}{suffix}", text) for name, text in {**lines, **tables}.items()]
    for file in files:
        assert [task.parse(raw) for raw in task.read([file])] == ROWS, file
    assert len(list(task.read(files))) == 2 * len(files)


def test_pairs_other_columns_and_whole_numbers(tmp_path):
    file = str(tmp_path / "x.parquet")
    Dataset.from_dict({"s": ["one", "two"], "t": ["eins", "drei"], "same": [1, 0]}).to_parquet(file)
    task = TextClassification(text_column="s", text_pair_column="t", label_column="same")
    rows = parsed(task, file)
    assert [(row["text"], row["text_pair"], row["label"]) for row in rows] == [
        ("one", "eins", "1"),
        ("two", "drei", "0"),
    ]
    assert task.texts(rows[0]) == ["one", "eins"]
    task, tokenizer = task.learn_labels(rows), tokenizer_of("char", "abcdefghijklmnopqrstuvwxyz")
    ids = encode(task, rows, tokenizer)["input_ids"][0]
    assert ids == tokenizer("one", "eins")["input_ids"]
    assert tokenizer.decode(ids) == "<s>one</s>eins</s>"


def test_labels_may_end_early():
    task = TextClassification(label_until=":")
    assert task.parse({"text": "Who?", "label": "HUM:ind"})["label"] == "HUM"
    assert task.parse({"text": "Who?", "label": "HUM"})["label"] == "HUM"


@pytest.mark.parametrize(
    ("line", "message"),
    [("", "its text is empty"), ("good", "its text is empty"), (" fine", "its label is empty")],
)
def test_lines_without_text_or_label_are_bad_rows(tmp_path, line, message):
    task = TextClassification()
    (raw,) = task.read([write(tmp_path / "x.txt", f"{line}\n")])
    with pytest.raises(BadRow, match=message):
        task.parse(raw)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"text": 3, "label": "a"}, "its text is of type int, not a text"),
        ({"text": "x", "label": None}, "its label is of type NoneType, not a text or a whole number"),
        ({"text": "x", "label": 2.5}, "its label is of type float, not"),
        ({"text": "x", "label": " "}, "its label is empty"),
    ],
)
def test_values_that_are_no_texts_are_bad_rows(raw, message):
    with pytest.raises(BadRow, match=message):
        TextClassification().parse(raw)


def test_a_missing_column_is_an_error_with_its_flag():
    with pytest.raises(
        ValueError, match=r"no column 'label' but \['text', 'stars'\]: give --label_column"
    ) as error:
        TextClassification().parse({"text": "x", "stars": 3})
    assert not isinstance(error.value, BadRow)


def test_labels_are_learnt_and_others_are_refused_by_name():
    task = TextClassification().learn_labels(ROWS)
    assert task.labels == ("bad", "good")
    assert task.config_values() == {
        "id2label": {0: "bad", 1: "good"},
        "label2id": {"bad": 0, "good": 1},
        "problem_type": "single_label_classification",
    }
    examples = encode(task, [*ROWS, {"text": "so so", "label": "fair"}], tokenizer_of("char", "abc"), True)
    assert list(examples["dropped"]) == ["", "", "its label 'fair' is unknown (known: bad, good)"]
    assert list(examples["labels"])[:2] == [1, 0]
    with pytest.raises(ValueError, match=r"no labels to tell apart, only \['bad'\]"):
        TextClassification().learn_labels(ROWS[1:])


@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
def test_long_texts_are_left_out_of_training_and_cut_in_evaluation(architecture):
    tokenizer = tokenizer_of("char", "abcdefg", architecture=architecture)
    most = 6 - len(tokenizer("")["input_ids"])
    task = TextClassification(max_length=6, labels=("no", "yes"))
    rows = [{"text": "abcdefg"[:length], "label": "no"} for length in (most, most + 1)]
    training, evaluation = (encode(task, rows, tokenizer, is_training) for is_training in (True, False))
    assert list(training["dropped"]) == ["", "it is longer than 6 tokens"]
    assert (list(training["cut"]), list(evaluation["cut"])) == ([False, False], [False, True])
    assert list(evaluation["dropped"]) == ["", ""]
    assert list(evaluation["length"]) == [len(ids) for ids in evaluation["input_ids"]] == [6, 6]
    assert evaluation["input_ids"][0] == evaluation["input_ids"][1]


def test_a_text_without_tokens_is_left_out():
    tokenizer = tokenizer_of("char", "a-", architecture="decoder")
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("-", "")
    rows = [{"text": "--", "label": "no"}, {"text": "-a", "label": "yes"}]
    examples = encode(TextClassification(labels=("no", "yes")), rows, tokenizer)
    assert list(examples["dropped"]) == ["it has no tokens", ""]


@pytest.mark.parametrize("shape", ["encoder", "decoder"])
def test_loss_and_scores_of_texts_by_hand(shape):
    tokenizer = tokenizer_of("char", "abcdefgh", architecture=shape)
    rows = [{"text": "abcdefgh"[i:], "label": "nyx"[i % 3]} for i in range(7)]
    task = TextClassification().learn_labels(rows)
    examples, model = encode(task, rows, tokenizer), build_model(task, tokenizer, shape)
    alone = [model(input_ids=torch.tensor([ids])).logits[0] for ids in examples["input_ids"]]
    truths = [task.labels.index(row["label"]) for row in rows]
    loss = sum(
        F.cross_entropy(scores, torch.tensor(truth)).item()
        for scores, truth in zip(alone, truths, strict=True)
    )
    right = sum(int(scores.argmax()) == truth for scores, truth in zip(alone, truths, strict=True))
    split = Split(Dataset.from_list(rows), examples)
    scores, _ = task.evaluate(Evaluator(Accelerator(cpu=True), model, tokenizer, 3), split)
    assert scores["loss"] == pytest.approx(loss / 7, abs=1e-6)
    assert scores["targets"] == 7
    assert scores["accuracy"] == scores["micro_f1"] == pytest.approx(100 * right / 7)
    assert scores.keys() >= task.metrics.keys()
    muted = task.mute(task.collate([examples[0]], tokenizer))
    assert task.count_targets(muted) == 0
    assert model(**muted, num_items_in_batch=1).loss == 0


SENTENCE = {
    "words": ["The", "Ångström", "-", "café", "in", "New York"],
    "labels": ["O", *TAGS[:3], "O", "B-LOC"],
}


@pytest.mark.parametrize("kind", ["bpe", "char", "word"])
@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
def test_a_word_is_labelled_at_its_first_token(kind, architecture):
    text = " ".join(SENTENCE["words"])
    tokenizer = tokenizer_of(kind, text, architecture=architecture)
    task = TokenClassification(labels=TAGS)
    example = encode(task, [SENTENCE], tokenizer, True)[0]
    starts = [len(" ".join(SENTENCE["words"][:i])) + (i > 0) for i in range(6)]
    encoding = tokenizer(text)
    tokens = [encoding.char_to_token(start) for start in starts]
    assert None not in tokens
    labels = [-100] * len(encoding["input_ids"])
    for token, label in zip(tokens, SENTENCE["labels"], strict=True):
        labels[token] = TAGS.index(label)
    assert example["input_ids"] == encoding["input_ids"]
    assert example["labels"] == labels
    assert example["words"] == list(range(6))
    assert task.texts(SENTENCE) == [text]


def test_words_without_tokens_do_not_shift_the_others():
    sentence = {"words": ["", "a", " ", "b"], "labels": ["O", "B-PER", "O", "I-PER"]}
    task = TokenClassification(labels=TAGS)
    examples = encode(task, [sentence], tokenizer_of("char", "ab"))
    assert examples[0]["words"] == [1, 3]
    scores = task.score(None, examples, [[TAGS.index("B-PER"), TAGS.index("I-PER")]])
    assert scores == {"accuracy": 50, "precision": 100, "recall": 100, "f1": 100}


def test_words_that_are_cut_off_count_as_wrong():
    sentence = {"words": ["a", "b", "c", "d"], "labels": ["B-PER", "O", "O", "B-LOC"]}
    task = TokenClassification(max_length=5, labels=TAGS)  # <s> "a" " " "b" </s>
    tokenizer = tokenizer_of("char", "a b c d")
    examples = encode(task, [sentence], tokenizer)
    assert list(examples["cut"]) == [True]
    assert examples[0]["words"] == [0, 1]
    assert encode(task, [sentence], tokenizer, True)["dropped"][0] == "it is longer than 5 tokens"
    scores = task.score(None, examples, [[TAGS.index("B-PER"), TAGS.index("O")]])
    assert scores == pytest.approx({"accuracy": 50, "precision": 100, "recall": 50, "f1": 200 / 3})
    nouns = TokenClassification(max_length=5, labels=("NOUN", "VERB"))
    examples = encode(nouns, [{"words": ["a", "b", "c"], "labels": ["NOUN", "VERB", "NOUN"]}], tokenizer)
    assert nouns.score(None, examples, [[0, 0]]) == pytest.approx({"accuracy": 100 / 3, "f1": 100 / 3})


@pytest.mark.parametrize("shape", ["encoder", "decoder"])
def test_loss_and_scores_of_words_by_hand(shape):
    tokenizer = tokenizer_of("bpe", "abc de fghi", architecture=shape)
    words = [["abc", "de"], ["fghi"], ["de", "fghi", "abc", "abc"]]
    rows = [{"words": w, "labels": [TAGS[len(word)] for word in w]} for w in words]
    task = TokenClassification().learn_labels(rows)
    assert task.labels == ("I-LOC", "I-PER", "O")
    examples, model = encode(task, rows, tokenizer), build_model(task, tokenizer, shape)
    loss, chosen, truths = 0.0, [], []
    for example in examples:
        logits = model(input_ids=torch.tensor([example["input_ids"]])).logits[0]
        places = [place for place, label in enumerate(example["labels"]) if label != -100]
        truths += [example["labels"][place] for place in places]
        chosen += logits[places].argmax(dim=-1).tolist()
        loss += F.cross_entropy(logits[places], torch.tensor(truths[-len(places) :]), reduction="sum").item()
    split = Split(Dataset.from_list(rows), examples)
    scores, _ = task.evaluate(Evaluator(Accelerator(cpu=True), model, tokenizer, 2), split)
    assert scores["targets"] == 7
    assert scores["loss"] == pytest.approx(loss / 7, abs=1e-6)
    right = sum(guess == truth for guess, truth in zip(chosen, truths, strict=True))
    assert scores["accuracy"] == pytest.approx(100 * right / 7)
    assert scores.keys() >= task.metrics.keys()


COLUMNS = "-DOCSTART- X O\n\nEU NNP B-ORG\nrejects VBZ O\n \t\nNo DT O\n"


@pytest.mark.parametrize(
    ("flags", "words", "labels"),
    [
        ({}, ["EU", "rejects"], ["B-ORG", "O"]),
        ({"label_column": "1"}, ["EU", "rejects"], ["NNP", "VBZ"]),
        ({"text_column": "1", "label_column": "0"}, ["NNP", "VBZ"], ["EU", "rejects"]),
    ],
)
def test_files_of_columns(tmp_path, flags, words, labels):
    task = TokenClassification(**flags)
    rows = parsed(task, write(tmp_path / "x.conll.gz", COLUMNS))
    assert len(rows) == 2
    assert (rows[0]["words"], rows[0]["labels"]) == (words, labels)


@pytest.mark.parametrize(
    ("flags", "text"), [({"label_column": "3"}, COLUMNS), ({"label_column": "0"}, COLUMNS), ({}, "EU\n")]
)
def test_columns_that_are_not_there_are_errors(tmp_path, flags, text):
    file = write(tmp_path / "x.txt", text)
    with pytest.raises(ValueError, match=r"x\.txt has \d columns: words cannot .*: give --text_column"):
        list(TokenClassification(**flags).read([file]))


def test_tables_of_lists(tmp_path):
    rows = [{"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]}, {"tokens": ["No"], "tags": ["O"]}]
    file = str(tmp_path / "x.parquet")
    Dataset.from_list(rows).to_parquet(file)
    task = TokenClassification(text_column="tokens", label_column="tags")
    jsonl = write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, rows)))
    expected = [{"words": row["tokens"], "labels": row["tags"], "row": n} for n, row in enumerate(rows)]
    assert parsed(task, file) == parsed(task, jsonl) == expected


@pytest.mark.parametrize(
    ("words", "labels", "message"),
    [
        ("EU rejects", ["O", "O"], "its words are not a list of texts"),
        (["EU", None], ["O", "O"], "its words are not a list of texts"),
        (["EU"], ["O", "O"], "its labels are not a list as long as"),
        (["EU"], "O", "its labels are not a list as long as"),
        (["EU"], [None], "its label is of type NoneType"),
        ([], [], "it has no words"),
    ],
)
def test_sentences_that_do_not_fit_their_labels_are_bad_rows(words, labels, message):
    with pytest.raises(BadRow, match=message):
        TokenClassification().parse({"text": words, "label": labels})


def test_a_sentence_with_an_unknown_label_is_refused():
    rows = [{"words": ["a", "b"], "labels": ["O", "B-ORG"]}]
    examples = encode(TokenClassification(labels=TAGS), rows, tokenizer_of("char", "ab"))
    assert examples["dropped"][0] == "its label 'B-ORG' is unknown (known: B-LOC, B-PER, I-LOC, I-PER, O)"


def counts(rows: list[dict]) -> Counter:
    return Counter(row["label"] for row in rows)


# the numbers of the data sets' README


@needs("trec")
def test_trec():
    file = str(DATA / "trec" / "TREC.train.gz")
    expected = {"ENTY": 1250, "HUM": 1223, "DESC": 1162, "NUM": 896, "LOC": 835, "ABBR": 86}
    assert counts(parsed(TextClassification(label_until=":"), file)) == expected
    assert len(counts(parsed(TextClassification(), file))) == 50


@needs("sst2")
def test_sst2():
    rows = parsed(TextClassification(), str(DATA / "sst2" / "stsa.binary.dev.gz"))
    assert counts(rows) == {"0": 428, "1": 444}


@needs("banking77")
def test_banking77():
    task = TextClassification(label_column="category")
    rows = parsed(task, str(DATA / "banking77" / "test.csv.gz"))
    assert set(counts(rows).values()) == {40}
    names = json.loads((DATA / "banking77" / "categories.json").read_text())
    assert task.learn_labels(rows).labels == tuple(sorted(names))


@needs("ud_english_ewt")
@pytest.mark.parametrize(("flags", "labels"), [({"label_column": "1"}, 17), ({}, 49)])
def test_parts_of_speech(flags, labels):
    task = TokenClassification(**flags)
    rows = parsed(task, str(DATA / "ud_english_ewt" / "train.tsv.gz"))
    assert (len(rows), sum(len(row["words"]) for row in rows)) == (12544, 204577)
    assert len(task.learn_labels(rows).labels) == labels


@needs("wnut17")
@pytest.mark.parametrize(
    ("split", "sentences", "words", "entities"), [("train", 3394, 62730, 1975), ("test", 1287, 23394, 1079)]
)
def test_emerging_entities(split, sentences, words, entities):
    task = TokenClassification()
    rows = parsed(task, str(DATA / "wnut17" / f"{split}.conll.gz"))
    assert (len(rows), sum(len(row["words"]) for row in rows)) == (sentences, words)
    assert sum(len(find_entities(row["labels"])) for row in rows) == entities
    assert is_bio(task.learn_labels(rows).labels)
