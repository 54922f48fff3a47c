"""Extractive question answering: the stretch of a text that answers a question."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..metrics import squad_scores
from ..modeling_hf_transformer_block import TransformerBlockForQuestionAnswering
from ..reading import pick, read_records
from .base import BadRow, Batch, Example, Row, Scores, Task, pad_inputs, read_text, show_pairs


LONGEST_ANSWER = 30  # tokens, as in transformers' and BERT's question answering
SHORTEST_INPUT = 24  # tokens, so that a third of them is more than any tokenizer's special ones


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """
    Finds the answer to a question in a text, its context.

    A context that does not fit is read in windows which overlap by a third of `max_length`. In a window
    without the answer the right position is 0, where no context begins.
    """

    name: ClassVar[str] = "question-answering"
    architecture: ClassVar[str] = "encoder"
    model_class: ClassVar[type[PreTrainedModel]] = TransformerBlockForQuestionAnswering
    metrics: ClassVar[dict[str, bool]] = {"f1": True, "exact_match": True, "loss": False}

    def read(self, files: Sequence[str]) -> Iterator[Row]:
        """Yields the questions of SQuAD's json files, or of tables with the same columns."""
        for file in files:
            yield from read_records(file)

    def parse(self, raw: Row) -> Row:
        question, context, answers = (
            pick(raw, name, "files with SQuAD's columns question, context and answers")
            for name in ("question", "context", "answers")
        )
        row = {"question": read_text(question, "question"), "context": read_text(context, "context")}
        return {**row, "answers": read_answers(answers, context)}

    def texts(self, row: Row) -> list[str]:
        return [row["question"], row["context"]]

    def cut_questions(
        self, questions: list[str], tokenizer: PreTrainedTokenizerBase
    ) -> tuple[list[str], list[bool]]:
        """Returns questions of at most a third of `max_length`, and which of them were longer."""
        options = {"truncation": True, "max_length": self.max_length // 3, "add_special_tokens": False}
        encoded = tokenizer(questions, return_offsets_mapping=True, **options)
        is_long = [bool(encoding.overflowing) for encoding in encoded.encodings]
        triples = zip(questions, encoded["offset_mapping"], is_long, strict=True)
        return [text[: offsets[-1][1]] if long else text for text, offsets, long in triples], is_long

    def encode(
        self, rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, is_training: bool
    ) -> dict[str, list]:
        """An example is a window; from `context_start` on its tokens are the context's, at `offsets`."""
        if self.max_length < SHORTEST_INPUT:
            raise ValueError(
                f"--max_length {self.max_length} must be at least {SHORTEST_INPUT} to hold a context"
            )
        questions, is_long = self.cut_questions(rows["question"], tokenizer)
        encoded = tokenizer(
            questions,
            rows["context"],
            truncation="only_second",
            max_length=self.max_length,
            stride=self.max_length // 3,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        examples, seen = [], set()
        too_long = f"its question is longer than {self.max_length // 3} tokens, a third of the limit"
        for window, number in enumerate(encoded["overflow_to_sample_mapping"]):
            sides = encoded.sequence_ids(window)
            offsets = [
                o for o, side in zip(encoded["offset_mapping"][window], sides, strict=True) if side == 1
            ]
            why = too_long if is_long[number] and is_training else "" if offsets else "its text has no tokens"
            if not (why and number in seen):  # a row is dropped once
                context_start = sides.index(1) if offsets else 0
                start, end = find_answer(rows["answers"][number], offsets, context_start)
                example = {"start_positions": start, "end_positions": end, "context_start": context_start}
                example |= {"input_ids": encoded["input_ids"][window], "offsets": offsets}
                example |= {"length": len(sides), "row": rows["row"][number]}
                example |= {"dropped": why, "cut": is_long[number] and not is_training}
                examples.append(example)
            seen.add(number)
        return {name: [example[name] for example in examples] for name in examples[0]}

    def collate(self, examples: list[Example], tokenizer: PreTrainedTokenizerBase) -> Batch:
        names = ("start_positions", "end_positions")
        positions = {name: torch.tensor([example[name] for example in examples]) for name in names}
        return {**pad_inputs(examples, tokenizer.pad_token_id), **positions}

    def count_targets(self, batch: Batch) -> torch.Tensor:
        return (batch["start_positions"] != -100).sum()

    def mute(self, batch: Batch) -> Batch:
        muted = torch.full_like(batch["start_positions"], -100)
        return {**batch, "start_positions": muted, "end_positions": muted}

    def predict(self, outputs: Any, batch: Batch) -> list[np.ndarray]:
        """Returns, per window, the scores of each token as first and as last of the answer, (2, L)."""
        return list(torch.stack((outputs.start_logits, outputs.end_logits), dim=1).float().cpu().numpy())

    def answers(self, rows: Any, examples: Any, predictions: list[np.ndarray]) -> dict[int, str]:
        """
        Returns the answer to each question by the number of its row: the best span of all its windows.

        It is "" if position 0 beats that in every window, and some question of the rows has no answer.
        """
        best: dict[int, tuple[float, int, int]] = {}
        nothing: dict[int, float] = {}
        columns = [examples[name] for name in ("row", "offsets", "context_start")]
        for number, offsets, first, scores in zip(*columns, predictions, strict=True):
            score, start, end = best_span(scores[:, first : first + len(offsets)])
            span = (score, offsets[start][0], offsets[end][1])
            best[number] = max(best.get(number, span), span, key=lambda candidate: candidate[0])
            nothing[number] = min(nothing.get(number, np.inf), float(scores[:, 0].sum()))
        may_be_empty = not all(answers["text"] for answers in rows["answers"])
        found = {}
        for number, context in zip(rows["row"], rows["context"], strict=True):
            if number in best:
                score, start, end = best[number]
                is_empty = may_be_empty and nothing[number] > score
                found[number] = "" if is_empty else context[start:end].strip()
        return found

    def write(self, rows: Any, examples: Any, predictions: list[np.ndarray]) -> list[str]:
        return list(self.answers(rows, examples, predictions).values())

    def show(self, rows: Any, answers: list[str]) -> list[str]:
        first = rows[:4]
        truths = [(found["text"] or [""])[0] for found in first["answers"]]
        return show_pairs(first["question"], answers, truths)

    def example(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
        return {name: row[name][:300] for name in ("question", "context")}

    def score(self, rows: Any, examples: Any, predictions: list[np.ndarray]) -> Scores:
        found = self.answers(rows, examples, predictions)
        answers = zip(rows["row"], rows["answers"], strict=True)
        return squad_scores(list(found.values()), [row["text"] for number, row in answers if number in found])


def read_answers(answers: Any, context: str) -> dict[str, list]:
    """Returns SQuAD's answers, none or several; raises BadRow unless the first is where it says."""
    lists = [answers.get(name) for name in ("text", "answer_start")] if isinstance(answers, dict) else [None]
    texts, starts = lists if all(isinstance(values, list) for values in lists) else ([None], [])
    are_texts, are_starts = (
        all(isinstance(value, kind) for value in values) for values, kind in ((texts, str), (starts, int))
    )
    if not (are_texts and are_starts and len(texts) == len(starts)):
        raise BadRow("its answers are not as in SQuAD, {'text': [texts], 'answer_start': [whole numbers]}")
    if texts and not (texts[0] and starts[0] >= 0 and context.startswith(texts[0], starts[0])):
        raise BadRow("its first answer is not at its answer_start in the context")
    return {"text": texts, "answer_start": starts}


def find_answer(
    answers: dict[str, list], offsets: list[tuple[int, int]], context_start: int
) -> tuple[int, int]:
    """Returns the first and the last token of the first answer; 0 and 0 if a window lacks some of it."""
    if not answers["text"] or not offsets:
        return 0, 0
    start = answers["answer_start"][0]
    end = start + len(answers["text"][0])
    inside = [number for number, (left, right) in enumerate(offsets) if right > start and left < end]
    if not inside or offsets[0][0] > start or offsets[-1][1] < end:
        return 0, 0
    return context_start + inside[0], context_start + inside[-1]


def best_span(scores: np.ndarray) -> tuple[float, int, int]:
    """Returns the highest sum of a first and a last token's scores (2, C), and these tokens."""
    ends = np.pad(scores[1], (0, LONGEST_ANSWER - 1), constant_values=-np.inf)
    # (C, 1) + (C, LONGEST_ANSWER): last tokens from the first one on
    sums = scores[0][:, None] + np.lib.stride_tricks.sliding_window_view(ends, LONGEST_ANSWER)
    start, more = divmod(int(sums.argmax()), LONGEST_ANSWER)
    return float(sums[start, more]), start, start + more
