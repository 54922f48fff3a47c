"""Language models on plain text: a decoder that writes on, an encoder that fills masks."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import training
from ..batches import pack
from ..metrics import bits_per_byte
from ..modeling_hf_transformer_block import TransformerBlockForCausalLM, TransformerBlockForMaskedLM
from ..reading import is_unicode, kind_of, pick, read_pieces, read_records
from .base import BadRow, Batch, Evaluator, Example, Row, Scores, Split, Task, pad


def read_document(file: str) -> Iterator[tuple[str, bool]]:
    """Yields a text in pieces, and whether each ends it; a line that is not UTF-8 is a piece by itself."""
    for piece, is_end in read_pieces(file):
        if is_unicode(piece):
            yield piece, is_end
            continue
        lines = re.split(r"(?<=\n)", piece)
        yield from ((line, False) for line in lines if not is_unicode(line))
        yield "".join(filter(is_unicode, lines)), is_end


@dataclass(frozen=True)
class LanguageModeling(Task):
    """
    What both have in common: documents, in rows of which a long one takes several, packed into blocks.

    Attributes:
        text_column: column of a table that holds the documents; a text file is one document.
    """

    text_column: str = "text"

    def read(self, files: Sequence[str]) -> Iterator[Row]:
        for file in files:
            if kind_of(file) == "text":
                yield from ({self.text_column: text, "ends": ends} for text, ends in read_document(file))
            else:
                yield from read_records(file, [self.text_column])

    def parse(self, raw: Row) -> Row:
        text = pick(raw, self.text_column, "--text_column")
        if not isinstance(text, str):
            raise BadRow(f"its text is {text!r} instead of a text")
        if not text:
            raise BadRow("its text is empty")
        return {"text": text, "ends": raw.get("ends", True)}

    def texts(self, row: Row) -> list[str]:
        return [row["text"]]

    def hold_out(self, rows: Dataset, seed: int) -> tuple[Dataset, Dataset]:
        """Holds out a seeded twentieth of the documents, or the last tenth of their text if they are few."""
        if len(rows) >= 20 and all(rows["ends"]):
            return super().hold_out(rows, seed)
        lengths = [len(text) for text in rows["text"]]
        left, number = sum(lengths) * 9 // 10, 0
        while left >= lengths[number]:
            left, number = left - lengths[number], number + 1
        row = rows[number]
        halves = [
            Dataset.from_list([{**row, "text": text, "ends": ends}], rows.features)
            for text, ends in ((row["text"][:left], True), (row["text"][left:], row["ends"]))
        ]
        if number == 0 and not left:
            raise ValueError(
                "the text is too short to train on and to validate: give more, or --validation_files"
            )
        # of no rows, there is no data set
        before = [rows.select(range(number))] if number else []
        after = [rows.select(range(number + 1, len(rows)))] if number + 1 < len(rows) else []
        train = [*before, halves[0]] if left else before
        return concatenate_datasets(train), concatenate_datasets([halves[1], *after])


@dataclass(frozen=True)
class CausalLM(LanguageModeling):
    """Predicts each token of a document from those before it, at most `max_length` of them."""

    name: ClassVar[str] = "causal-lm"
    architecture: ClassVar[str] = "decoder"
    model_class: ClassVar[type[PreTrainedModel]] = TransformerBlockForCausalLM
    metrics: ClassVar[dict[str, bool]] = {"loss": False, "perplexity": False, "bits_per_byte": False}

    def encode(
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, is_training: bool
    ) -> dict[str, list]:
        encoded = tokenizer(rows["text"], add_special_tokens=False, verbose=False)["input_ids"]
        ends = [[tokenizer.eos_token_id] if end else [] for end in rows["ends"]]
        documents = [ids + end for ids, end in zip(encoded, ends, strict=True)]
        blocks = pack(zip(documents, rows["ends"], strict=True), self.max_length)
        return {
            "input_ids": [block["input_ids"] for block in blocks],
            "labels": [block["labels"] for block in blocks],
            "position_ids": [block["position_ids"] for block in blocks],
            "length": [len(block["input_ids"]) for block in blocks],
            "row": [rows["row"][0]] * len(blocks),
            "dropped": [""] * len(blocks),
            "cut": [False] * len(blocks),
        }

    def collate(self, examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> Batch:
        return {
            "input_ids": pad(examples, "input_ids", tokenizer.pad_token_id),
            "labels": pad(examples, "labels", -100),
            "position_ids": pad(examples, "position_ids", 0),
        }

    def count_targets(self, batch: Batch) -> torch.Tensor:
        return (batch["labels"][:, 1:] != -100).sum()  # a causal model predicts no first token

    def evaluate(self, evaluator: Evaluator, split: Split) -> tuple[Scores, list[str]]:
        """Returns loss, perplexity and bits per byte, and how the model goes on after the first tokens."""
        result, _ = evaluator.predict(self, split)
        num_bytes = sum(len(text.encode()) for text in split.rows["text"])
        num_bytes -= given_bytes(split.rows, evaluator.tokenizer)
        result["perplexity"] = math.exp(min(result["loss"], 700))
        result["bits_per_byte"] = bits_per_byte(result["loss"], result["targets"], max(1, num_bytes))
        half = max(1, self.max_length // 2)
        prompt = split.examples[0]["input_ids"][:half]
        parts = evaluator.accelerator, evaluator.model, evaluator.tokenizer
        return result, [training.write_on(*parts, prompt, half)]

    def show(self, rows: Any, answers: list[str]) -> list[str]:
        return [repr(answer) for answer in answers]


def given_bytes(rows: Dataset, tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the UTF-8 bytes of the documents' first tokens, which nothing predicts."""
    starts = [True, *rows["ends"][:-1]]
    beginnings = [text[:64] for text, starts_here in zip(rows["text"], starts, strict=True) if starts_here]
    offsets = tokenizer(beginnings, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    # of a character that the first token shares with the second nothing is given away
    ends = [
        min([end for _, end in first[:1]] + [start for start, _ in first[1:2]] or [0]) for first in offsets
    ]
    return sum(len(text[:end].encode()) for text, end in zip(beginnings, ends, strict=True))


@dataclass(frozen=True)
class MaskedLM(LanguageModeling):
    """
    Fills tokens that were hidden: 15 % of them, of which 80 % are masked, 10 % random, 10 % left as they are.

    Masks are drawn anew in each epoch. Source: Devlin et al., "BERT", https://arxiv.org/abs/1810.04805; Liu
    et al., "RoBERTa", https://arxiv.org/abs/1907.11692.
    """

    name: ClassVar[str] = "masked-lm"
    architecture: ClassVar[str] = "encoder"
    model_class: ClassVar[type[PreTrainedModel]] = TransformerBlockForMaskedLM
    metrics: ClassVar[dict[str, bool]] = {"loss": False, "accuracy": True}

    def encode(
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, is_training: bool
    ) -> dict[str, list]:
        prefix, suffix = frame(tokenizer)
        room = self.max_length - len(prefix) - len(suffix)
        if room < 1:
            raise ValueError(
                f"--max_length {self.max_length} leaves no room beside the special tokens: raise it"
            )
        stretches = []
        for ids in tokenizer(rows["text"], add_special_tokens=False, verbose=False)["input_ids"]:
            stretches += [prefix + ids[i : i + room] + suffix for i in range(0, len(ids), room)]
        blocks: list[list[list[int]]] = []
        for stretch in stretches:
            if not blocks or sum(map(len, blocks[-1])) + len(stretch) > self.max_length:
                blocks.append([])
            blocks[-1].append(stretch)
        return {
            "input_ids": [[token for stretch in block for token in stretch] for block in blocks],
            "position_ids": [[i for stretch in block for i in range(len(stretch))] for block in blocks],
            "length": [sum(map(len, block)) for block in blocks],
            "row": [rows["row"][0]] * len(blocks),
            "dropped": [""] * len(blocks),
            "cut": [False] * len(blocks),
        }

    def collate(self, examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> Batch:
        masked = [self.hide(example, tokenizer) for example in examples]
        return {
            "input_ids": pad(masked, "input_ids", tokenizer.pad_token_id),
            "labels": pad(masked, "labels", -100),
            "position_ids": pad(masked, "position_ids", 0),
        }

    def example(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> str:
        return f"{' '.join(row['text'].split()[:8])} {tokenizer.mask_token}"

    def hide(self, example: Example, tokenizer: PreTrainedTokenizerBase) -> Example:
        """Returns the example with hidden tokens and their `labels`; `draw` decides, on any process."""
        generator = torch.Generator().manual_seed(example["draw"])
        ids = torch.tensor(example["input_ids"])
        is_text = torch.isin(ids, torch.tensor(tokenizer.all_special_ids), invert=True)
        is_hidden = is_text & (torch.rand(len(ids), generator=generator) < 0.15)
        kind = torch.rand(len(ids), generator=generator)
        random_ids = torch.randint(len(tokenizer), (len(ids),), generator=generator)
        hidden = ids.masked_fill(is_hidden & (kind < 0.8), tokenizer.mask_token_id)
        hidden = torch.where(is_hidden & (kind >= 0.9), random_ids, hidden)
        labels = ids.masked_fill(~is_hidden, -100)
        return {**example, "input_ids": hidden.tolist(), "labels": labels.tolist()}

    def predict(self, outputs: Any, batch: Batch) -> list[tuple[int, int]]:
        """Returns, per example, how many hidden tokens were found, and how many there were."""
        is_hidden = batch["labels"] != -100
        is_right = is_hidden & (outputs.logits.argmax(-1) == batch["labels"])
        return list(zip(is_right.sum(1).tolist(), is_hidden.sum(1).tolist(), strict=True))

    def score(self, rows: Any, examples: Any, predictions: list[Any]) -> Scores:
        found, hidden = map(sum, zip(*predictions, strict=True))
        return {"accuracy": 100 * found / max(1, hidden)}


def frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Returns the special tokens that the tokenizer puts before and after a text."""
    whole, inner = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    start = next(i for i in range(len(whole)) if whole[i : i + len(inner)] == inner)
    return whole[:start], whole[start + len(inner) :]
