"""Translation, or any text to any text: pairs, an encoder-decoder, BLEU and chrF of what it writes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import training
from ..metrics import score_translations
from ..modeling_hf_transformer_block import TransformerBlockForConditionalGeneration
from ..reading import kind_of, pick, read_lines, read_records
from .base import Batch, Evaluator, Example, Row, Scores, Split, Task, pad, pad_inputs, read_text, show_pairs


@dataclass(frozen=True)
class Translation(Task):
    """
    Writes a target text for a source text.

    Attributes:
        source_column: column of a table that holds the source.
        target_column: column of its translation.
        bleu_tokenize: sacreBLEU's tokenizer, "none" for texts that are tokenized; by default the script's.
    """

    source_column: str = "source"
    target_column: str = "target"
    bleu_tokenize: str | None = field(default=None, repr=False)

    name: ClassVar[str] = "translation"
    architecture: ClassVar[str] = "encoder-decoder"
    model_class: ClassVar[type[PreTrainedModel]] = TransformerBlockForConditionalGeneration
    metrics: ClassVar[dict[str, bool]] = {"loss": False, "bleu": True, "chrf": True, "exact_match": True}

    def read(self, files: Sequence[str]) -> Iterator[Row]:
        if len(files) == 2:
            yield from self.read_parallel(*files)
        elif len(files) == 1 and kind_of(files[0]) != "text":
            yield from read_records(files[0], [self.source_column, self.target_column])
        else:
            raise ValueError(
                f"translation reads one table with two columns (jsonl, csv, tsv, parquet) or two parallel "
                f"texts, not {', '.join(files)}; a text by itself is for --task causal-lm"
            )

    def read_parallel(self, source: str, target: str) -> Iterator[Row]:
        """Yields the pairs of line n and line n; raises ValueError for files of unequal length."""
        lines, counts = [read_lines(source), read_lines(target)], [0, 0]
        while True:
            pair = [next(side, None) for side in lines]
            if None in pair:
                break
            counts = [count + 1 for count in counts]
            yield {self.source_column: pair[0], self.target_column: pair[1]}
        counts = [
            count + (text is not None) + sum(1 for _ in side)
            for count, text, side in zip(counts, pair, lines, strict=True)
        ]
        if counts[0] != counts[1]:
            raise ValueError(
                f"{source} has {counts[0]} lines but {target} has {counts[1]}: line n of one must be the "
                f"translation of line n of the other"
            )

    def parse(self, raw: Row) -> Row:
        return {
            "source": read_text(pick(raw, self.source_column, "--source_column"), "source"),
            "target": read_text(pick(raw, self.target_column, "--target_column"), "target"),
        }

    def texts(self, row: Row) -> list[str]:
        return [row["source"], row["target"]]

    def encode(
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, is_training: bool
    ) -> dict[str, list]:
        names = ("source", "target")
        whole = sides = [tokenizer(rows[name], verbose=False)["input_ids"] for name in names]
        if not is_training:  # where half a pair would teach something wrong
            cut = {"truncation": True, "max_length": self.max_length}
            sides = [tokenizer(rows[name], **cut)["input_ids"] for name in names]
        lengths = [max(len(source), len(target)) for source, target in zip(*whole, strict=True)]
        too_long = f"it is longer than {self.max_length} tokens"
        is_long = [length > self.max_length for length in lengths]
        return {
            "input_ids": sides[0],
            "labels": sides[1],
            "length": [min(length, self.max_length) for length in lengths],
            "row": rows["row"],
            "dropped": [too_long if long and is_training else "" for long in is_long],
            "cut": [long and not is_training for long in is_long],
        }

    def collate(self, examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> Batch:
        return {**pad_inputs(examples, tokenizer.pad_token_id), "labels": pad(examples, "labels", -100)}

    def count_tokens(self, example: Example) -> int:
        return len(example["input_ids"]) + len(example["labels"])

    def evaluate(self, evaluator: Evaluator, split: Split) -> tuple[Scores, list[str]]:
        result, _ = evaluator.predict(self, split)
        pairs = split.rows[: evaluator.num_pairs]
        hypotheses = training.translate(
            evaluator.accelerator,
            evaluator.model,
            evaluator.tokenizer,
            pairs["source"],
            evaluator.batch_size,
            self.max_length,
            evaluator.num_beams,
        )
        return result | score_translations(hypotheses, pairs["target"], self.bleu_tokenize), hypotheses

    def show(self, rows: Any, answers: list[str]) -> list[str]:
        first = rows[:4]
        return show_pairs(first["source"], answers, first["target"])
