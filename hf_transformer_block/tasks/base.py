"""What every task says about itself: the rows it reads, the examples made of them, batches and scores."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import training
from ..batches import Batch, Example, Row


Scores = dict[str, float | str]


@dataclass
class Split:
    """Rows as they were read, and the examples made of them; of a stream none, and what it dropped so far."""

    rows: Dataset | IterableDataset
    examples: Dataset | None
    dropped: Counter[str] | None = None


class BadRow(ValueError):
    """A row that cannot become an example; the message says why ("its source is empty"), not where."""


@dataclass(frozen=True)
class Evaluator:
    """
    A model under evaluation, and how it is to be done.

    Attributes:
        batch_size: examples at a time, on each process.
        num_pairs: most pairs to translate; None: all.
        num_beams: beams of a translation; None: those of the model's generation config.
    """

    accelerator: Accelerator
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    batch_size: int
    num_pairs: int | None = None
    num_beams: int | None = None

    def predict(self, task: "Task", split: Split) -> tuple[dict[str, float], list[Any]]:
        """Returns the loss of a split and the task's prediction for each example, see `training.evaluate`."""
        return training.evaluate(
            self.accelerator, self.model, task, split.examples, self.tokenizer, self.batch_size
        )


@dataclass(frozen=True)
class Task:
    """
    Base of the tasks. What `repr` shows of one is what its examples depend on: equal ones share cached data.

    Attributes:
        name: as `--task` takes it.
        architecture: shape of the model, see `TransformerBlockConfig`.
        model_class: the model with this task's head.
        metrics: the scores of `evaluate`, and whether more is better; the first chooses the best model.
    """

    max_length: int = 128

    name: ClassVar[str]
    architecture: ClassVar[str]
    model_class: ClassVar[type[PreTrainedModel]]
    metrics: ClassVar[dict[str, bool]] = {"loss": False}

    def read(self, files: Sequence[str]) -> Iterator[Row]:
        """Yields the raw rows of local files; raises ValueError for files that this task cannot read."""
        raise NotImplementedError

    def parse(self, raw: Row) -> Row:
        """Returns a raw row, of a file or of a Hub data set, under this task's names; raises BadRow."""
        raise NotImplementedError

    def texts(self, row: Row) -> list[str]:
        """Returns the texts of a row, for training a tokenizer."""
        raise NotImplementedError

    def example(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Returns what a user would give the model, made of a row: an input for the model card."""
        return textwrap.shorten(self.texts(row)[0], 60, placeholder="")

    def learn_labels(self, rows: Any) -> "Task":
        """Returns the task with the labels that the training rows hold; most tasks have none."""
        return self

    def config_values(self) -> dict[str, Any]:
        """Returns the fields of the configuration that the task decides."""
        return {}

    def encode(
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, is_training: bool
    ) -> dict[str, list]:
        """
        Returns the examples of a batch of rows, column by column.

        Besides what the model needs there are `length`, the tokens that count for a batch's budget; `row`,
        the number of the row (its column of that name); and `dropped`: "" or why this one cannot be used. In
        evaluation nothing is too long: what does not fit is cut, and `cut` says so.
        """
        raise NotImplementedError

    def collate(self, examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> Batch:
        """Returns examples as the padded tensors that the model takes."""
        raise NotImplementedError

    def count_targets(self, batch: Batch) -> torch.Tensor:
        """Returns how many labels of a batch count, as a scalar tensor: what the loss is a mean over."""
        return (batch["labels"] != -100).sum()

    def count_tokens(self, example: Example) -> int:
        """Returns the tokens that a model reads for an example."""
        return len(example["input_ids"])

    def mute(self, batch: Batch) -> Batch:
        """Returns a batch of which no label counts: what a process without examples of its own computes."""
        return {**batch, "labels": torch.full_like(batch["labels"], -100)}

    def predict(self, outputs: Any, batch: Batch) -> list[Any]:
        """Returns, per example, the plain Python values that `score` needs from the model's outputs."""
        return [None] * len(batch["input_ids"])

    def score(self, rows: Any, examples: Any, predictions: list[Any]) -> Scores:
        """Returns the task's scores, beside the loss, for all examples in order."""
        return {}

    def write(self, rows: Any, examples: Any, predictions: list[Any]) -> list[str]:
        """Returns, per row, what the model answers, as people write it; nothing where it answers nothing."""
        return []

    def show(self, rows: Any, answers: list[str]) -> list[str]:
        """Returns a few lines that show the model at work."""
        return []

    def hold_out(self, rows: Dataset, seed: int) -> tuple[Dataset, Dataset]:
        """Returns the rows to train on and those to validate with, a seeded twentieth of all."""
        if len(rows) < 2:
            raise ValueError("one row cannot both train and validate: give more, or --validation_files")
        halves = rows.train_test_split(test_size=max(1, round(len(rows) * 0.05)), seed=seed)
        numbered = [halves[name].remove_columns("row") for name in ("train", "test")]
        train, validation = (part.add_column("row", range(len(part))) for part in numbered)
        return train, validation

    def evaluate(self, evaluator: Evaluator, split: Split) -> tuple[Scores, list[str]]:
        """Returns loss and scores of a split, and the model's answers to its rows, on every process."""
        result, predictions = evaluator.predict(self, split)
        answers = self.write(split.rows, split.examples, predictions)
        return result | self.score(split.rows, split.examples, predictions), answers


def read_text(value: Any, name: str) -> str:
    """Returns a text; raises BadRow if it is none, or empty."""
    if not isinstance(value, str):
        raise BadRow(f"its {name} is of type {type(value).__name__}, not a text")
    if not value.strip():
        raise BadRow(f"its {name} is empty")
    return value


def show_pairs(questions: list[str], answers: list[str], truths: list[str]) -> list[str]:
    """Returns lines "question -> answer", with the truth where it is another."""
    lines = []
    for question, answer, truth in zip(questions, answers, truths, strict=False):
        wrong = "" if answer == truth else f"   (should be: {truth})"
        lines.append(f"{question[:160]}  ->  {answer}{wrong}")
    return lines


def pad(examples: list[Example], column: str, value: int) -> torch.Tensor:
    """Returns a column of lists as one tensor (B, L), each list followed by `value`."""
    rows = [torch.tensor(example[column]) for example in examples]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def pad_inputs(examples: list[Example], pad_token_id: int) -> Batch:
    """Returns `input_ids` and `attention_mask`, (B, L) each, padded on the right."""
    lengths = torch.tensor([len(example["input_ids"]) for example in examples])
    input_ids = pad(examples, "input_ids", pad_token_id)
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths.unsqueeze(1)).long()
    return {"input_ids": input_ids, "attention_mask": attention_mask}
