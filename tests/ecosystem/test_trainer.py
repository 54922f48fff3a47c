"""Tests that transformers' Trainer and Seq2SeqTrainer train, resume, generate and save our models."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.cache_utils import Cache

from .conftest import MODELS, build_tiny, load_afresh, tokenizer_of, words


pytestmark = pytest.mark.ecosystem

SHAPES = ["decoder", "encoder", "encoder-decoder", "classifier"]
EACH_SHAPE = pytest.mark.parametrize("name", SHAPES)
EACH_GENERATIVE = pytest.mark.parametrize("name", ["decoder", "encoder-decoder"])
RATE = 0.05


def rows_of(name: str, count: int) -> list[dict]:
    """Returns examples, each with another number of labels."""
    tokenizer, rows = tokenizer_of(name), []
    for index, text in enumerate(words(count)):
        ids = tokenizer(text)["input_ids"]
        row = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if name == "classifier":
            row["labels"] = index % 2
        elif name == "decoder":  # the first words are a prompt
            row["labels"] = [-100] * 2 + ids[2:]
        elif name == "encoder":
            row["labels"] = [token if place % 2 else -100 for place, token in enumerate(ids)]
            row["input_ids"] = [3 if place % 2 else token for place, token in enumerate(ids)]
        else:
            row["labels"] = [*reversed(ids[: 2 + index % 4]), tokenizer.eos_token_id]
        rows.append(row)
    return rows


def collator_of(name: str, model: nn.Module):
    tokenizer = tokenizer_of(name)
    if name == "classifier":
        return DataCollatorWithPadding(tokenizer)
    if name == "encoder-decoder":
        return DataCollatorForSeq2Seq(tokenizer, model)
    return DataCollatorForTokenClassification(tokenizer)


def trainer_of(name: str, model: nn.Module, folder, rows: list[dict] | None, **kwargs) -> Trainer:
    """Returns the trainer of a shape, by plain gradient descent without clipping."""
    makers = {"encoder-decoder": (Seq2SeqTrainer, Seq2SeqTrainingArguments)}
    trainer, arguments = makers.get(name, (Trainer, TrainingArguments))
    own = {key: kwargs.pop(key) for key in ("eval_dataset", "compute_metrics", "callbacks") if key in kwargs}
    values = {
        **{"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0.0},
        **{"per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no", "report_to": []},
        **{"use_cpu": True, "disable_tqdm": True},
    }
    return trainer(
        model,
        arguments(output_dir=str(folder), **{**values, **kwargs}),
        data_collator=collator_of(name, model),
        train_dataset=rows,
        processing_class=tokenizer_of(name),
        **own,
    )


def loss_by_hand(name: str, model: nn.Module, batch: dict) -> torch.Tensor:
    """Returns the mean over all labels of a batch, from logits alone."""
    labels = batch["labels"]
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    if name == "decoder":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)


def assert_same_weights(model: nn.Module, expected: dict[str, torch.Tensor], atol: float) -> None:
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for weight, value in found.items():
        assert_close(value.detach(), expected[weight], rtol=0, atol=atol, msg=weight)


@EACH_SHAPE
def test_four_batches_of_one_are_one_batch_of_four(name, tmp_path):
    """By hand: one step down the gradient of the mean over all labels, not of the mean of means."""
    model, rows = build_tiny(name), rows_of(name, 4)
    by_hand = copy.deepcopy(model)
    loss = loss_by_hand(name, by_hand, dict(collator_of(name, model)(rows)))
    loss.backward()
    expected = {key: (p - RATE * p.grad).detach() for key, p in by_hand.named_parameters()}
    assert max((expected[key] - p).abs().max() for key, p in model.named_parameters()) > 1e-2
    ways = {
        "whole": {},
        "accumulated": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        "checkpointed": {"activation_checkpointing": True},
    }
    for way, options in ways.items():
        trained = copy.deepcopy(model)
        trainer = trainer_of(name, trained, tmp_path, rows, max_steps=1, **options)
        trainer.train()
        assert_same_weights(trained, expected, atol=2e-6)
        assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), abs=1e-4), way


@EACH_SHAPE
def test_a_resumed_training_ends_like_the_uninterrupted_one(name, tmp_path):
    """With dropout and AdamW, from the middle of an epoch; the checkpoint also loads in a fresh process."""
    rows = rows_of(name, 10)
    options = {"per_device_train_batch_size": 2, "max_steps": 7, "optim": "adamw_torch", "max_grad_norm": 1.0}
    options |= {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 3}
    model = build_tiny(name, dropout=0.1)
    trainer_of(name, model, tmp_path / "whole", rows, **options).train()
    expected = {key: p.detach().clone() for key, p in model.named_parameters()}
    again = build_tiny(name, dropout=0.1, initializer_range=0.1)
    resumed = trainer_of(name, again, tmp_path / "resumed", rows, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert [entry["step"] for entry in resumed.state.log_history if "loss" in entry] == [*range(1, 8)]
    assert_same_weights(again, expected, atol=0)

    inputs = {"input_ids": torch.randint(5, 61, (2, 6))}
    if name == "encoder-decoder":
        inputs["decoder_input_ids"] = torch.randint(5, 61, (2, 4))
    found = load_afresh(tmp_path, tmp_path / "resumed" / "checkpoint-7", MODELS[name][3], inputs)
    assert found["module"].startswith("transformers_modules.")
    for weight, value in found["parameters"].items():
        assert torch.equal(value, expected[weight]), weight
    logits = again.eval()(**inputs).logits.detach()
    assert_close(found["outputs"]["logits"], logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_an_evaluation_that_generates_writes_what_generate_does(num_beams, tmp_path):
    name, seen = "encoder-decoder", []
    model, rows = build_tiny(name, tie_word_embeddings=False).eval(), rows_of(name, 6)
    tokenizer = tokenizer_of(name)

    def texts_of(ids) -> list[str]:
        ids = torch.as_tensor(ids)
        return tokenizer.batch_decode(ids.masked_fill(ids == -100, 0), skip_special_tokens=True)

    def length_of(prediction) -> dict[str, float]:
        seen.append(prediction)
        return {"words": sum(len(text.split()) for text in texts_of(prediction.predictions)) / 6}

    expected = []
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        written = model.generate(ids, max_length=9, num_beams=num_beams, do_sample=False)
        expected += texts_of(written)
    assert len(set(expected)) == 6
    assert all(len(set(text.split())) > 2 for text in expected)
    trainer = trainer_of(
        name,
        model,
        tmp_path,
        None,
        eval_dataset=rows,
        compute_metrics=length_of,
        predict_with_generate=True,
        generation_max_length=9,
        generation_num_beams=num_beams,
        per_device_eval_batch_size=2,
    )
    metrics = trainer.evaluate()
    assert texts_of(seen[0].predictions) == expected
    assert texts_of(seen[0].label_ids) == texts_of(collator_of(name, model)(rows)["labels"])
    assert metrics["eval_words"] == sum(len(text.split()) for text in expected) / 6
    batches = (dict(collator_of(name, model)(rows[start : start + 2])) for start in range(0, 6, 2))
    losses = [loss_by_hand(name, model, batch).item() for batch in batches]
    assert metrics["eval_loss"] == pytest.approx(sum(losses) / 3, abs=1e-5)


class LivingCaches(TrainerCallback):
    """Counts the caches in memory after each batch of an evaluation."""

    def __init__(self):
        self.counts = []

    def on_prediction_step(self, args, state, control, **kwargs):
        gc.collect()
        self.counts.append(sum(issubclass(type(thing), Cache) for thing in gc.get_objects()))


@EACH_GENERATIVE
def test_a_prediction_keeps_logits_alone_and_no_cache(name, tmp_path):
    """Without labels and with a model that makes caches, which would fill the memory batch by batch."""
    model, rows, living = build_tiny(name).eval(), rows_of(name, 6), LivingCaches()
    for row in rows:
        labels = row.pop("labels")
        if name == "encoder-decoder":
            row["decoder_input_ids"] = (labels * 3)[:5]
        row |= {key: (value * 3)[:5] for key, value in row.items()}
    options = {"per_device_eval_batch_size": 2, "use_cache": True, "callbacks": [living]}
    trainer = trainer_of(name, model, tmp_path, None, **options)
    trainer.data_collator = lambda batch: {key: torch.tensor([row[key] for row in batch]) for key in batch[0]}
    batch = trainer.data_collator(rows)
    assert model.config.use_cache
    assert any(isinstance(value, Cache) for value in model(**batch).values())
    predicted = trainer.predict(rows).predictions
    assert_close(torch.from_numpy(predicted), model(**batch).logits.detach(), rtol=0, atol=1e-5)
    assert len(living.counts) == 3
    assert max(living.counts) <= 2  # an encoder-decoder's holds two in one; of the last batch at most
    assert living.counts[-1] <= living.counts[0]
