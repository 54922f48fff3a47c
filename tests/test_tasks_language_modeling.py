"""Tests of causal and masked language modeling: packed documents, masks, what counts, what is held out."""

import math

import pytest
import torch
from accelerate import Accelerator
from conftest import tiny_config
from torch.testing import assert_close


pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')

from datasets import Dataset

from hf_transformer_block.loading import Origin, encode, load
from hf_transformer_block.tasks import CausalLM, Evaluator, MaskedLM, Split
from hf_transformer_block.tasks.language_modeling import given_bytes
from hf_transformer_block.vocabulary import train_tokenizer


TEXTS = ["abcdefgh" * 3, "cab", "hgfedcba" * 2, "a", "bcd bcd"]


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def rows_of(texts: list[str]) -> Dataset:
    return Dataset.from_dict({"text": texts, "ends": [True] * len(texts), "row": list(range(len(texts)))})


def prepare(task, texts=TEXTS):
    """Returns the task's tokenizer, its examples, and a model in float64."""
    mask = task.name == "masked-lm"
    tokenizer = train_tokenizer(iter(texts), "char", 40, task.max_length, task.architecture, mask=mask)
    examples, _ = encode(task, rows_of(texts), tokenizer, True, "error")
    torch.manual_seed(0)
    config = tiny_config(
        task.architecture, vocab_size=len(tokenizer), max_position_embeddings=64, dropout=0.0
    )
    return tokenizer, examples, task.model_class(config).double().eval()


def test_packed_documents_have_the_loss_of_each_by_itself():
    task = CausalLM(max_length=10)
    tokenizer, examples, model = prepare(task)
    batch = task.collate([*examples], tokenizer)
    assert "attention_mask" not in batch
    assert batch["input_ids"].shape[0] > 3
    packed = model(**batch, num_items_in_batch=1).loss
    alone, targets, previous = 0.0, 0, 0
    for text in TEXTS:  # a document begins anew in each block
        ids = [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id]
        first = previous
        while True:
            edges = [edge for edge in range(0, 200, 10) if edge > first]
            end = min(edges[0] + 1, previous + len(ids))
            part = torch.tensor([ids[first - previous : end - previous]])
            if part.shape[1] > 1:
                alone = alone + model(input_ids=part, labels=part, num_items_in_batch=1).loss
                targets += part.shape[1] - 1
            if end == previous + len(ids):
                break
            first = end - 1
        previous += len(ids)
    assert int(task.count_targets(batch)) == targets
    assert_close(packed, alone, rtol=1e-6, atol=0)  # losses are summed in float32


def test_masked_blocks_have_the_loss_of_each_document_by_itself():
    task = MaskedLM(max_length=12)
    tokenizer, examples, model = prepare(task)
    batch = task.collate([{**example, "draw": index} for index, example in enumerate(examples)], tokenizer)
    packed = model(**batch, num_items_in_batch=1).loss
    alone = 0.0
    for ids, labels, positions in zip(
        *(batch[n] for n in ("input_ids", "labels", "position_ids")), strict=True
    ):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]
        for start, end in zip(starts, starts[1:], strict=False):
            part = {"input_ids": ids[None, start:end], "labels": labels[None, start:end]}
            alone = alone + model(**part, num_items_in_batch=1).loss
    assert_close(packed, alone, rtol=1e-6, atol=0)  # losses are summed in float32
    pieces = [
        piece for example in examples for piece in tokenizer.decode(example["input_ids"]).split("<s>")[1:]
    ]
    assert all(piece.endswith("</s>") for piece in pieces)
    assert "".join(piece.removesuffix("</s>") for piece in pieces) == "".join(TEXTS)


def test_masks_are_those_of_the_paper_and_a_matter_of_the_draw_alone():
    task = MaskedLM(max_length=500)
    tokenizer, examples, _ = prepare(task, ["abcdefgh" * 6_000])
    kinds = {"masked": 0, "kept": 0, "other": 0}
    total = 0
    for draw, example in enumerate(examples):
        hidden = task.hide({**example, "draw": draw}, tokenizer)
        assert hidden == task.hide({**example, "draw": draw}, tokenizer)
        assert hidden["input_ids"] != task.hide({**example, "draw": draw + 999}, tokenizer)["input_ids"]
        rows = zip(example["input_ids"], hidden["input_ids"], hidden["labels"], strict=True)
        for before, after, label in rows:
            if label == -100:
                assert before == after
                continue
            assert label == before
            assert before not in tokenizer.all_special_ids
            kind = "masked" if after == tokenizer.mask_token_id else "kept" if after == before else "other"
            kinds[kind] += 1
        total += len(example["input_ids"]) - 2
    share = sum(kinds.values()) / total
    assert share == pytest.approx(0.15, abs=0.01)
    assert kinds["masked"] / sum(kinds.values()) == pytest.approx(0.8, abs=0.02)
    random = 0.1 * (1 - 1 / len(tokenizer))  # a random token may be the token itself, or the mask
    assert kinds["other"] / sum(kinds.values()) == pytest.approx(random, abs=0.02)


def test_bits_per_byte_are_those_of_the_bytes_that_were_predicted(accelerator):
    task = CausalLM(max_length=10)
    texts = ["ab\u00e9c", "dab"]
    tokenizer, examples, model = prepare(task, texts)
    model.float()
    split = Split(rows_of(texts), examples)
    scores, (sample,) = task.evaluate(Evaluator(accelerator, model, tokenizer, 2), split)
    predicted = len("b\u00e9c".encode()) + len("ab")
    assert scores["targets"] == len("b\u00e9c") + len("ab") + 2  # and two ends
    assert scores["bits_per_byte"] == pytest.approx(
        scores["loss"] * scores["targets"] / math.log(2) / predicted
    )
    assert scores["perplexity"] == pytest.approx(math.exp(scores["loss"]))
    assert sample.startswith(texts[0])


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_bytes_that_nothing_predicts_are_those_of_first_tokens(kind):
    texts = ["\u65e5\u672c is far", "x y"]
    tokenizer = train_tokenizer(iter(["x is far y"]), kind, 270, 16, "decoder")
    # of three bytes of a character, the first token is one, which says nothing; a word is unknown, or "x"
    given = {"bpe": 0 + 1, "word": len("\u65e5\u672c".encode()) + 1}[kind]
    assert given_bytes(rows_of(texts), tokenizer) == given


def test_masked_accuracy_counts_hidden_tokens_alone(accelerator):
    task = MaskedLM(max_length=12)
    tokenizer, examples, model = prepare(task)
    with torch.no_grad():  # a model that always answers "c"
        model.lm_head.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(len(tokenizer), dtype=torch.double))
        model.lm_head.bias[tokenizer.convert_tokens_to_ids("c")] = 9.0
    scores, _ = task.evaluate(Evaluator(accelerator, model, tokenizer, 2), Split(rows_of(TEXTS), examples))
    hidden = [
        task.hide({**example, "draw": index}, tokenizer)["labels"] for index, example in enumerate(examples)
    ]
    labels = [label for row in hidden for label in row if label != -100]
    assert scores["targets"] == len(labels) > 3
    c = tokenizer.convert_tokens_to_ids("c")
    assert scores["accuracy"] == pytest.approx(100 * labels.count(c) / len(labels))


def test_a_line_that_is_not_utf8_is_left_out_of_its_document(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"good one\nbad \xff\ngood two\nbad \xfe at the end")
    origin = Origin(files=(str(tmp_path / "text.txt"),))
    loaded = load(CausalLM(), origin, "drop")
    assert loaded.rows.to_list() == [{"text": "good one\ngood two\n", "ends": True, "row": 0}]
    assert sum(loaded.dropped.values()) == 2
    with pytest.raises(ValueError, match=r"text.txt, row 1: it is not UTF-8"):
        load(CausalLM(), origin, "error")


@pytest.mark.parametrize("lengths", [[40], [30, 10], [1, 60], [60, 1], [5, 5, 5, 5], [9, 1], [1, 1]])
def test_a_tenth_of_few_texts_is_held_out_wherever_they_part(lengths):
    texts = ["abcdefghij"[index % 10] * length for index, length in enumerate(lengths)]
    train, validation = CausalLM().hold_out(rows_of(texts), seed=0)
    text = "".join(texts)
    assert "".join(train["text"]) == text[: len(text) * 9 // 10]
    assert "".join(validation["text"]) == text[len(text) * 9 // 10 :]
    assert all(train["text"])
    assert all(validation["text"])


def test_a_text_too_short_to_part_is_refused():
    with pytest.raises(ValueError, match="the text is too short to train on and to validate"):
        CausalLM().hold_out(rows_of(["a"]), seed=0)


def test_the_last_tenth_of_a_text_is_held_out_and_a_twentieth_of_many_documents(tmp_path):
    task = CausalLM()
    text = "".join(f"line {number}\n" for number in range(20_000))
    (tmp_path / "text.txt").write_text(text)
    rows = load(task, Origin(files=(str(tmp_path / "text.txt"),)), "error").rows
    assert len(rows) > 2
    assert sum(rows["ends"]) == 1
    train, validation = task.hold_out(rows, seed=0)
    assert "".join(train["text"]) == text[: len(text) * 9 // 10]
    assert "".join(validation["text"]) == text[len(text) * 9 // 10 :]
    assert train["ends"][-1]
    assert sum(train["ends"]) == 1

    train, validation = task.hold_out(rows_of([f"document {number}" for number in range(60)]), seed=0)
    assert len(validation) == 3
    assert sorted([*train["text"], *validation["text"]]) == sorted(
        f"document {number}" for number in range(60)
    )
