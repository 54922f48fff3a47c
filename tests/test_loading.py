"""Tests of loading: bad data by either policy, the cache, many processes, folders as data sets, streams."""

import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from hf_transformer_block.loading import Origin, encode, load
from hf_transformer_block.reading import kind_of, pick, read_lines, read_records
from hf_transformer_block.tasks.base import BadRow, Task
from hf_transformer_block.vocabulary import train_tokenizer


@dataclass(frozen=True)
class Lines(Task):
    """
    Texts with a label: lines or tables, of which "?" is an unknown label.

    Attributes:
        log: file that every parse writes a line to; pause: how long each takes, in seconds.
    """

    text_column: str = "text"
    log: str = ""
    pause: float = 0.0

    def read(self, files: Sequence[str]) -> Iterator[dict]:
        for file in files:
            if kind_of(file) == "text":
                yield from ({"text": line, "label": "a"} for line in read_lines(file))
            else:
                yield from read_records(file)

    def parse(self, raw: dict) -> dict:
        if self.log:
            with open(self.log, "a") as log:
                log.write("x\n")
        time.sleep(self.pause)
        text, label = pick(raw, self.text_column, "--text_column"), raw.get("label")
        if not text:
            raise BadRow("its text is empty")
        if label == "?":
            raise BadRow("its label '?' is unknown (known: a, b)")
        return {"text": text, "label": label}

    def texts(self, row: dict) -> list[str]:
        return [row["text"]]

    def encode(self, rows: dict, tokenizer, is_training: bool) -> dict[str, list]:
        ids = tokenizer(rows["text"])["input_ids"]
        is_long = [len(row) > self.max_length for row in ids]
        return {
            "input_ids": [row[: self.max_length] for row in ids],
            "length": list(map(len, ids)),
            "row": rows["row"],
            "dropped": [
                f"it is longer than {self.max_length} tokens" if long and is_training else ""
                for long in is_long
            ],
            "cut": [long and not is_training for long in is_long],
        }


@dataclass(frozen=True)
class Sides(Task):
    """Pairs of lines of two files, which are read side by side."""

    def read(self, files: Sequence[str]) -> Iterator[dict]:
        if len(files) != 2:
            raise ValueError("two files, please")
        yield from ({"a": a, "b": b} for a, b in zip(*map(read_lines, files), strict=True))

    def parse(self, raw: dict) -> dict:
        if not raw["b"]:
            raise BadRow("its b is empty")
        return raw


@pytest.fixture
def write(tmp_path):
    """Returns a function that writes a file of the test's folder and returns its path."""

    def write(name: str, content: str | bytes) -> str:
        raw = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return str(tmp_path / name)

    return write


def texts(rows) -> list[str]:
    """Returns the texts of rows, whose numbers are in order."""
    rows = list(rows)
    assert [row["row"] for row in rows] == list(range(len(rows)))
    return [row["text"] for row in rows]


NOT_UTF8 = "it is not UTF-8: iconv -t UTF-8 converts a file"
BAD = {
    "an empty line": ("x.txt", "one\n\ntwo\n\n", 2, "its text is empty"),
    "an empty row of a table": ("x.csv.gz", "text,label\none,a\n\ntwo,b\n", 2, "its text is empty"),
    "a missing value": (
        "x.jsonl",
        '{"text": "one"}\n{"text": null}\n{"text": "two"}',
        2,
        "its text is empty",
    ),
    "undecodable bytes": ("x.txt", b"\xff\xfeone\none\ntwo\xc3\xb6\n", 1, NOT_UTF8),
    "undecodable cells": ("x.tsv", b"text\tlabel\none\ta\nK\xe4se\tb\ntwo\xc3\xb6\ta\n", 2, NOT_UTF8),
    "half a character": ("x.jsonl", '{"text": "\\ud83d"}\n{"text": "one"}\n{"text": "two"}', 1, NOT_UTF8),
    "an unknown label": (
        "x.csv",
        "text,label\none,a\ntwo,b\nthree,?\n",
        3,
        "its label '?' is unknown (known: a, b)",
    ),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_refused_or_counted(write, case, streaming):
    name, content, number, reason = BAD[case]
    file = write(name, content)
    message = f"{file}, row {number}: {reason}; mend it, or --bad_rows drop leaves such rows out"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        list(load(Lines(), Origin((file,)), "error", streaming).rows)
    loaded = load(Lines(), Origin((file,)), "drop", streaming)
    assert [text.rstrip("ö") for text in texts(loaded.rows)] == ["one", "two"]
    assert loaded.dropped == Counter({reason: 2 if case == "an empty line" else 1})


STRUCTURAL = {
    "a missing column": (
        "x.csv",
        "words\none\n",
        r"x\.csv, row 1: no column 'text' but \['words'\]: give --text_column",
    ),
    "a row that lacks it": (
        "x.jsonl",
        '{"text": "one"}\n{"words": "two"}',
        r"x\.jsonl, row 2: no column 'text'",
    ),
    "a line with too few cells": ("x.csv", "text,label\none\n", r"x\.csv has 1 columns, not 2, in line 2"),
    "no rows": ("x.csv", "text,label\n", r"x\.csv is empty$"),
    "nothing": ("x.txt.gz", "", r"x\.txt\.gz is empty$"),
    "no good row": ("x.txt", "\n\n", r"x\.txt holds no good row: its text is empty \(2 times\)"),
    "half a gzip file": ("y.gz", None, r"y\.gz is no whole gzip file"),
    "no file": ("missing.txt", None, r"cannot read .*missing\.txt: No such file or directory"),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", STRUCTURAL)
def test_broken_files_are_refused_by_either_policy(write, tmp_path, case, streaming):
    name, content, message = STRUCTURAL[case]
    file = str(tmp_path / name) if content is None else write(name, content)
    (tmp_path / "y.gz").write_bytes(gzip.compress(b"text\n" * 999)[:-10])
    for policy in ("drop", "error") if case != "no good row" else ("drop",):
        with pytest.raises(ValueError, match=message):
            list(load(Lines(), Origin((file,)), policy, streaming).rows)


def test_the_file_of_a_bad_row_is_named(write):
    files = (write("a.txt", "one\ntwo\n"), write("b.txt", "one\ntwo\n\n"), write("c.txt", "one\n"))
    with pytest.raises(ValueError, match=r"b\.txt, row 3: its text is empty"):
        load(Lines(), Origin(files), "error")
    with pytest.raises(ValueError, match=r"^\S*c\.txt, row 2: its text is empty"):
        load(Lines(), Origin((*files[:1], write("c.txt", "one\n\n"))), "error")
    with pytest.raises(ValueError, match=r"^\S*a\.txt and \S*b\.txt, row 2: its b is empty"):
        load(Sides(), Origin((files[0], write("b.txt", "one\n\n"))), "error")


def test_what_did_not_change_is_not_parsed_again(write, tmp_path):
    log = tmp_path / "log"
    file = write("x.txt", "one\n\nthree\n")
    origin, task = Origin((file,)), Lines(log=str(log))

    def parses(task: Task, origin: Origin, policy: str = "drop") -> int:
        """Loads, checks the rows and returns how many were parsed; the first is, to learn the types."""
        log.write_text("")
        loaded = load(task, origin, policy)
        assert texts(loaded.rows) == [line for line in read_lines(origin.files[0]) if line]
        assert loaded.dropped == Counter({"its text is empty": 1})
        return len(log.read_text().split())

    assert parses(task, origin) == 3 + 1
    assert parses(task, origin) == 0
    os.utime(file, (1, 1))
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "x.txt").write_bytes(Path(file).read_bytes())
    assert parses(task, origin) == parses(task, Origin((str(tmp_path / "copy" / "x.txt"),))) == 0
    assert parses(Lines(log=str(log), max_length=9), origin) == 3 + 1
    write("x.txt", "one\n\nthroe\n")
    assert parses(task, origin) == 3 + 1
    with pytest.raises(ValueError, match="row 2: its text is empty"):
        load(task, origin, "error")


MODULE = """
from dataclasses import dataclass
from test_loading import Whole

@dataclass(frozen=True)
class Edited(Whole):
    def parse(self, raw):
        return {"text": raw["text"].lower()}
"""


def test_a_task_whose_code_changed_parses_again(write, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    origin, found = Origin((write("x.csv", "text\nOne\n"),)), []
    for code in (MODULE, MODULE.replace("lower", "upper")):
        write("edited_task.py", code)
        monkeypatch.delitem(sys.modules, "edited_task", raising=False)
        importlib.invalidate_caches()
        found += texts(load(importlib.import_module("edited_task").Edited(), origin, "error").rows)
    assert found == ["one", "ONE"]


def test_a_cache_that_cannot_be_written_is_named(write, tmp_path, monkeypatch):
    file = write("x.txt", "one\n")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", file)
    with pytest.raises(ValueError, match=r"cannot write into the cache \S*x\.txt/hf_transformer_block/"):
        load(Lines(), Origin((file,)), "error")


LOADER = """
import json, os, pathlib, signal, sys, time
from test_loading import Lines, Origin, load

file, log, *outputs = map(pathlib.Path, sys.argv[1:])

def start(output):
    if pid := os.fork():
        return pid
    loaded = load(Lines(log=str(log), pause=0.01), Origin((str(file),)), "drop")
    output.write_text(json.dumps([loaded.rows.to_list(), loaded.dropped, loaded.rows.cache_files]))
    os._exit(0)

killed = start(outputs[0])
while not log.exists() or len(log.read_text().split()) < 50:
    assert os.waitpid(killed, os.WNOHANG) == (0, 0)
    time.sleep(0.01)
os.kill(killed, signal.SIGKILL)
os.waitpid(killed, 0)
log.unlink()
for pid in [start(output) for output in outputs]:
    assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.slow
def test_processes_share_a_cold_cache_also_after_one_was_killed(write, tmp_path):
    lines = [f"text {number}" for number in range(100)]
    file, log = write("x.txt", "\n".join([*lines, "", ""])), tmp_path / "log"
    outputs = [tmp_path / name for name in ("first", "second")]
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", LOADER, file, log, *outputs], env=environment, check=True)
    first, second = (json.loads(output.read_text()) for output in outputs)
    assert first == second
    assert [row["text"] for row in first[0]] == lines
    assert first[1] == {"its text is empty": 1}
    # once, and once or twice the first row to learn the types
    assert 102 <= len(log.read_text().split()) <= 103


@pytest.fixture
def folder(tmp_path) -> str:
    """Returns a folder of data files, as a data set of the Hub is one."""
    rows = [
        {"text": f"text {number}", "label": number % 2, "nested": {"tags": [1, 0]}} for number in range(5)
    ]
    names = ClassLabel(names=["bad", "good"])
    features = Features({"text": Value("string"), "label": names, "nested": {"tags": List(names)}})
    path = tmp_path / "dataset"
    unlabelled = [{**row, "label": label} for row, label in zip(rows, (-1, None), strict=False)]
    for split, written in (("train", rows), ("test", unlabelled)):
        Dataset.from_list(written, features=features).to_parquet(path / f"{split}.parquet")
    return str(path)


@dataclass(frozen=True)
class Whole(Task):
    """Rows of a table as they are."""

    def read(self, files: Sequence[str]) -> Iterator[dict]:
        yield from read_records(files[0])

    def parse(self, raw: dict) -> dict:
        return raw


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_is_a_data_set_and_labels_get_their_names(folder, streaming):
    train = load(Whole(), Origin(dataset_name=folder), "error", streaming)
    assert texts(train.rows) == [f"text {number}" for number in range(5)]
    assert [row["label"] for row in train.rows] == ["bad", "good", "bad", "good", "bad"]
    assert {json.dumps(row["nested"]) for row in train.rows} == {'{"tags": ["good", "bad"]}'}
    test = load(Whole(), Origin(dataset_name=folder, split="test"), "error", streaming)
    assert len(texts(test.rows)) == 2
    assert [row["label"] for row in test.rows] == [None, None]
    assert test.fingerprint != train.fingerprint
    with pytest.raises(
        ValueError, match=r"dataset \(train\), row 1: no column 'words' but \['text', 'label'"
    ):
        list(load(Lines(text_column="words"), Origin(dataset_name=folder), "error", streaming).rows)


def test_a_data_set_that_does_not_load_is_named(folder):
    with pytest.raises(ValueError, match=r"cannot load \S*dataset \(dev\): .*dev"):
        load(Whole(), Origin(dataset_name=folder, split="dev"), "error")
    with pytest.raises(ValueError, match=r"cannot load nobody/nothing \(train\): "):
        load(Whole(), Origin(dataset_name="nobody/nothing"), "error")


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_a_stream_has_the_same_rows(write, policy):
    lines = [f"text {number}" if number % 7 or policy == "error" else "" for number in range(3000)]
    origin = Origin((write("a.txt.gz", "\n".join(lines)), write("b.csv", "text,label\none,b\n")))
    written, stream = load(Lines(), origin, policy), load(Lines(), origin, policy, streaming=True)
    assert stream.dropped == Counter()
    for _ in range(2):  # a second pass counts anew
        assert list(stream.rows) == written.rows.to_list()
        assert stream.dropped == written.dropped
    assert sum(written.dropped.values()) == (0 if policy == "error" else 429)
    assert list(stream.rows.skip(1234)) == written.rows.to_list()[1234:]
    assert [file["file"] for file in stream.fingerprint["files"]] == ["a.txt.gz", "b.csv"]


def test_a_stream_needs_little_memory(write):
    """20 MB are read with less than 3."""
    origin = Origin((write("x.txt.gz", (b"word " * 199 + b"end!\n") * 20_000),))
    stream = load(Lines(), origin, "error", streaming=True)
    tracemalloc.start()
    size = sum(len(row["text"]) for row in stream.rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 999 * 20_000
    assert peak < 3e6


def test_rows_that_are_read_once_stay_on_disk(write):
    loaded = load(Lines(), Origin((write("x.txt", "one\ntwo\n"),)), "error")
    assert [Path(file["filename"]).is_file() for file in loaded.rows.cache_files] == [True]


def test_types_are_those_of_all_rows(write):
    """Not those of the first thousand, which may all have an empty list or no value."""
    rows = [{"text": "x", "label": None, "answers": {"at": []}}] * 2000
    rows += [
        {"text": "x", "label": "a", "answers": {"at": []}},
        {"text": "x", "label": None, "answers": {"at": [3]}},
    ]
    file = write("x.jsonl", "\n".join(map(json.dumps, rows)))
    loaded = load(Whole(), Origin((file,)), "error")
    assert loaded.rows[2000:]["label"] == ["a", None]
    assert loaded.rows[2000:]["answers"] == [{"at": []}, {"at": [3]}]


@pytest.fixture
def tokenizer():
    return train_tokenizer(iter(["abcdefgh 0123456789"]), "char", 50, 64, "encoder-decoder")


def test_examples_are_made_counted_and_found_again(write, tokenizer, monkeypatch):
    lines = ["ab" * 9] * 1500 + ["abc", "a", "abcdef"]  # a first thousand without any example
    rows = load(Lines(), Origin((write("x.txt", "\n".join(lines)),)), "error").rows
    task = Lines(max_length=4)
    examples, dropped = encode(task, rows, tokenizer, True, "drop")
    assert examples["input_ids"] == [tokenizer("abc")["input_ids"], tokenizer("a")["input_ids"]]
    assert examples["row"] == [1500, 1501]
    assert set(examples.column_names) == {"input_ids", "length", "row", "cut"}
    assert dropped == Counter({"it is longer than 4 tokens": 1501})
    whole, cut = encode(task, rows, tokenizer, False, "error")
    assert [len(ids) for ids in whole["input_ids"]] == [4] * 1501 + [2, 4]
    assert cut == Counter({"cut": 1501})
    monkeypatch.setattr(Lines, "encode", None)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)  # leaves traces in the tokenizer
    again, counts = encode(task, rows, tokenizer, True, "drop")
    assert again.to_list() == examples.to_list()
    assert counts == dropped
    other = train_tokenizer(iter(["abcdefgi"]), "char", 50, 64, "encoder-decoder")
    for changed in (
        (Lines(max_length=5), rows, tokenizer),
        (task, rows.select([0]), tokenizer),
        (task, rows, other),
    ):
        with pytest.raises(TypeError, match="not callable"):
            encode(*changed, True, "drop")


def test_an_example_that_does_not_fit_is_named(write, tokenizer):
    rows = load(Lines(), Origin((write("x.txt", "abc\nabcdef\n"),)), "error").rows
    message = "the row that begins 'abcdef': it is longer than 4 tokens; mend it, or --bad_rows drop leaves"
    with pytest.raises(ValueError, match=message):
        encode(Lines(max_length=4), rows, tokenizer, True, "error")
    with pytest.raises(
        ValueError, match=r"none of 2 rows can be used: it is longer than 1 tokens \(2 times\)"
    ):
        encode(Lines(max_length=1), rows, tokenizer, True, "drop")
