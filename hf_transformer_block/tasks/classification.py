"""Classification of whole texts and of each word in a sentence."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ..metrics import accuracy, class_scores, entity_scores, is_bio
from ..modeling_hf_transformer_block import (
    TransformerBlockForSequenceClassification,
    TransformerBlockForTokenClassification,
)
from ..reading import kind_of, pick, read_columns, read_lines, read_records
from .base import BadRow, Batch, Example, Row, Scores, Task, pad, pad_inputs, read_text, show_pairs


def read_label(value: Any) -> str:
    """Returns a label as text; raises BadRow unless it is a text or a whole number."""
    if not isinstance(value, (str, int)):
        raise BadRow(f"its label is of type {type(value).__name__}, not a text or a whole number")
    label = str(value).strip()
    if not label:
        raise BadRow("its label is empty")
    return label


@dataclass(frozen=True)
class Classification(Task):
    """
    What both have in common: labels.

    Attributes:
        text_column: column of the texts, or of the lists of words.
        label_column: column of their labels.
        labels: the classes, in the order of the model's outputs; see `learn_labels`.
    """

    text_column: str = "text"
    label_column: str = "label"
    labels: tuple[str, ...] = ()

    def row_labels(self, row: Row) -> list[str]:
        """Returns all labels of a row."""
        raise NotImplementedError

    def learn_labels(self, rows: Any) -> "Classification":
        labels = {label for row in rows for label in self.row_labels(row)}
        if len(labels) < 2:
            raise ValueError(f"the training rows have no labels to tell apart, only {sorted(labels)}")
        return replace(self, labels=tuple(sorted(labels)))

    def config_values(self) -> dict[str, Any]:
        if not self.labels:
            return {}
        numbers = {label: number for number, label in enumerate(self.labels)}
        return {"id2label": dict(enumerate(self.labels)), "label2id": numbers}

    def number_labels(self, labels: Sequence[str]) -> tuple[list[int], str]:
        """Returns the numbers of labels, -100 for an unknown one, and why they cannot be used, or ""."""
        numbers = {label: number for number, label in enumerate(self.labels)}
        unknown = [label for label in labels if label not in numbers]
        known = ", ".join(self.labels[:20]) + ", ..." * (len(self.labels) > 20)
        why = f"its label {unknown[0]!r} is unknown (known: {known})" if unknown else ""
        return [numbers.get(label, -100) for label in labels], why

    def encode_texts(
        self, tokenizer: PreTrainedTokenizerBase, texts: list[str], is_training: bool, **options: Any
    ) -> tuple[BatchEncoding, dict[str, list]]:
        """Returns texts as tokens, cut to fit, with the columns `length`, `dropped` and `cut`."""
        encoded = tokenizer(texts, truncation=True, max_length=self.max_length, **options)
        is_long = [bool(encoding.overflowing) for encoding in encoded.encodings]
        too_long = f"it is longer than {self.max_length} tokens"
        lengths = [len(ids) for ids in encoded["input_ids"]]
        reasons = [
            "it has no tokens" if not length else too_long if long and is_training else ""
            for length, long in zip(lengths, is_long, strict=True)
        ]
        cut = [long and not is_training for long in is_long]
        return encoded, {"length": lengths, "dropped": reasons, "cut": cut}


@dataclass(frozen=True)
class TextClassification(Classification):
    """
    Names the class of a text, or of a pair of texts.

    Attributes:
        text_pair_column: column of the second text of a pair.
        label_until: what ends a label early: with ":" the label of TREC's "DESC:manner" is "DESC".
    """

    text_pair_column: str | None = None
    label_until: str | None = None

    name: ClassVar[str] = "text-classification"
    architecture: ClassVar[str] = "encoder"
    model_class: ClassVar[type[PreTrainedModel]] = TransformerBlockForSequenceClassification
    metrics: ClassVar[dict[str, bool]] = {"accuracy": True, "macro_f1": True, "micro_f1": True, "loss": False}

    def read(self, files: Sequence[str]) -> Iterator[Row]:
        """Yields the rows of tables, and of text files with lines "LABEL text", apart by a space or a tab."""
        for file in files:
            if kind_of(file) != "text":
                yield from read_records(file)
                continue
            for line in read_lines(file):
                label, *text = re.split(r"[ \t]+", line, maxsplit=1)
                yield {self.label_column: label, self.text_column: "".join(text)}

    def parse(self, raw: Row) -> Row:
        row = {"text": read_text(pick(raw, self.text_column, "--text_column"), "text")}
        if self.text_pair_column:
            second = pick(raw, self.text_pair_column, "--text_pair_column")
            row["text_pair"] = read_text(second, "second text")
        label = read_label(pick(raw, self.label_column, "--label_column"))
        return {**row, "label": read_label(label.split(self.label_until)[0]) if self.label_until else label}

    def texts(self, row: Row) -> list[str]:
        return [row[name] for name in ("text", "text_pair") if name in row]

    def row_labels(self, row: Row) -> list[str]:
        return [row["label"]]

    def config_values(self) -> dict[str, Any]:
        return {**super().config_values(), "problem_type": "single_label_classification"}

    def encode(
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, is_training: bool
    ) -> dict[str, list]:
        pairs = {"text_pair": rows["text_pair"]} if self.text_pair_column else {}
        encoded, columns = self.encode_texts(tokenizer, rows["text"], is_training, **pairs)
        numbered = [self.number_labels([label]) for label in rows["label"]]
        reasons = zip(columns["dropped"], numbered, strict=True)
        return {
            **columns,
            "input_ids": encoded["input_ids"],
            "labels": [numbers[0] for numbers, _ in numbered],
            "row": rows["row"],
            "dropped": [reason or unknown for reason, (_, unknown) in reasons],
        }

    def collate(self, examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> Batch:
        labels = torch.tensor([example["labels"] for example in examples])
        return {**pad_inputs(examples, tokenizer.pad_token_id), "labels": labels}

    def predict(self, outputs: Any, batch: Batch) -> list[int]:
        """Returns the number of the most likely class, per example."""
        return outputs.logits.argmax(dim=-1).tolist()

    def write(self, rows: Any, examples: Any, predictions: list[int]) -> list[str]:
        return [self.labels[number] for number in predictions]

    def show(self, rows: Any, answers: list[str]) -> list[str]:
        first = rows[:4]
        return show_pairs(first["text"], answers, first["label"])

    def score(self, rows: Any, examples: Any, predictions: list[int]) -> Scores:
        return class_scores(predictions, list(examples["labels"]))


@dataclass(frozen=True)
class TokenClassification(Classification):
    """
    Names the class of each word of a sentence.

    A word's class is read at its first sub-word. In files of columns `text_column` and `label_column` may be
    numbers, from 0; else the first column has the words and the last one the labels.
    """

    name: ClassVar[str] = "token-classification"
    architecture: ClassVar[str] = "encoder"
    model_class: ClassVar[type[PreTrainedModel]] = TransformerBlockForTokenClassification
    metrics: ClassVar[dict[str, bool]] = {"f1": True, "accuracy": True, "loss": False}

    def read(self, files: Sequence[str]) -> Iterator[Row]:
        """Yields the rows of tables with lists (jsonl, json, parquet); other files have a word a line."""
        for file in files:
            if kind_of(file) in ("jsonl", "json", "parquet"):
                yield from read_records(file)
                continue
            for name in (self.text_column, self.label_column):
                if not name.isdecimal() and name not in ("text", "label"):
                    raise ValueError(
                        f"{file} has no names for its columns, as {name!r}: give a number, from 0"
                    )
            for lines in read_columns(file):
                width = len(lines[0])
                word, label = (
                    int(name) if name.isdecimal() else default
                    for name, default in ((self.text_column, 0), (self.label_column, width - 1))
                )
                if word == label or max(word, label) >= width:
                    raise ValueError(
                        f"{file} has {width} columns: words cannot be in column {word} and labels in {label} "
                        f"(from 0): give --text_column and --label_column"
                    )
                yield {
                    self.text_column: [cells[word] for cells in lines],
                    self.label_column: [cells[label] for cells in lines],
                }

    def parse(self, raw: Row) -> Row:
        words = pick(raw, self.text_column, "--text_column")
        labels = pick(raw, self.label_column, "--label_column")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise BadRow("its words are not a list of texts")
        if not isinstance(labels, list) or len(labels) != len(words):
            raise BadRow("its labels are not a list as long as that of its words")
        if not any(map(str.strip, words)):
            raise BadRow("it has no words")
        return {"words": words, "labels": [read_label(label) for label in labels]}

    def texts(self, row: Row) -> list[str]:
        return [" ".join(row["words"])]

    def row_labels(self, row: Row) -> list[str]:
        return row["labels"]

    def encode(
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, is_training: bool
    ) -> dict[str, list]:
        """`labels` are those of the tokens, `words` the numbers of the words which these belong to."""
        sentences = [" ".join(words) for words in rows["words"]]
        encoded, columns = self.encode_texts(tokenizer, sentences, is_training, return_offsets_mapping=True)
        columns |= {"input_ids": encoded["input_ids"], "row": rows["row"], "labels": [], "words": []}
        columns["word_labels"] = []
        for index, (words, names) in enumerate(zip(rows["words"], rows["labels"], strict=True)):
            numbers, unknown = self.number_labels(names)
            first = first_tokens(words, encoded["offset_mapping"][index])
            columns["labels"].append([-100 if word is None else numbers[word] for word in first])
            columns["words"].append([word for word in first if word is not None])
            columns["word_labels"].append(numbers)
            columns["dropped"][index] = columns["dropped"][index] or unknown
        return columns

    def collate(self, examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> Batch:
        return {**pad_inputs(examples, tokenizer.pad_token_id), "labels": pad(examples, "labels", -100)}

    def predict(self, outputs: Any, batch: Batch) -> list[list[int]]:
        """Returns the numbers of the most likely classes of the words in order, per example."""
        chosen, counts = outputs.logits.argmax(dim=-1).cpu(), batch["labels"].cpu() != -100
        return [row[mask].tolist() for row, mask in zip(chosen, counts, strict=True)]

    def write(self, rows: Any, examples: Any, predictions: list[list[int]]) -> list[str]:
        """Returns the labels of each sentence's words, "-" for words that were cut off."""
        lines = []
        for words, labels, chosen in zip(
            examples["words"], examples["word_labels"], predictions, strict=True
        ):
            found = {word: self.labels[number] for word, number in zip(words, chosen, strict=True)}
            lines.append(" ".join(found.get(word, "-") for word in range(len(labels))))
        return lines

    def show(self, rows: Any, answers: list[str]) -> list[str]:
        first = rows[:4]
        sentences, truths = ([" ".join(words) for words in first[name]] for name in ("words", "labels"))
        return show_pairs(sentences, answers, truths)

    def score(self, rows: Any, examples: Any, predictions: list[list[int]]) -> Scores:
        """
        Returns accuracy over words and, for BIO labels, precision, recall and F1 of entities.

        Words that were cut off count as wrong, and as outside of entities. For other labels F1 is the words'
        micro F1, which equals accuracy.
        """
        guesses, truths = [], []
        columns = (examples["words"], examples["word_labels"], predictions)
        for words, labels, chosen in zip(*columns, strict=True):
            found = dict(zip(words, chosen, strict=True))
            guesses.append([found.get(word, -1) for word in range(len(labels))])
            truths.append(labels)
        right = accuracy([g for guess in guesses for g in guess], [t for truth in truths for t in truth])
        if not is_bio(self.labels):
            return {"accuracy": right, "f1": right}
        names = [*self.labels, "O"]  # -1 is the last
        tags = [[[names[number] for number in row] for row in rows] for rows in (guesses, truths)]
        return {"accuracy": right, **entity_scores(*tags)}


def first_tokens(words: list[str], offsets: list[tuple[int, int]]) -> list[int | None]:
    """
    Returns, per token of words joined by spaces, the word it is the first token of, or None.

    `offsets` are the tokens' first character and the one after their last.
    """
    text = " ".join(words)
    owners = [index for index, word in enumerate(words) for _ in f"{word} "]
    first: list[int | None] = []
    seen: set[int | None] = {None}
    for start, end in offsets:
        # a token may hold the space before its word
        word = next((owners[place] for place in range(start, end) if not text[place].isspace()), None)
        first.append(None if word in seen else word)
        seen.add(word)
    return first
