"""Tests of the verbs of training: an update however it is split, evaluation, translation, checkpoints."""

import math
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from conftest import tiny_config, tiny_tokens
from datasets import Dataset
from safetensors.torch import load_file
from transformers import get_scheduler

from hf_transformer_block import TransformerBlockForCausalLM, TransformerBlockForConditionalGeneration
from hf_transformer_block.data import collate, train_tokenizer
from hf_transformer_block.training import (
    bits_per_byte,
    build_optimizer,
    checkpoints,
    evaluate,
    load_checkpoint,
    register_state,
    save_checkpoint,
    score_translations,
    translate,
    update,
    updates,
)


HEADS = {"decoder": TransformerBlockForCausalLM, "encoder-decoder": TransformerBlockForConditionalGeneration}


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def tiny_dataset(architecture: str, size: int) -> Dataset:
    """Returns examples of unequal lengths."""
    examples = []
    for index in range(size):
        example = {"input_ids": tiny_tokens(2 + index % 7).tolist()}
        if architecture == "encoder-decoder":
            example["labels"] = tiny_tokens(1 + index % 5).tolist()
        examples.append({**example, "length": sum(map(len, example.values()))})
    return Dataset.from_list(examples)


def trainer(accelerator: Accelerator, architecture: str, dropout: float = 0.0, optimizer=None):
    """Returns a prepared model with its optimizer and schedule."""
    torch.manual_seed(0)
    model = HEADS[architecture](tiny_config(architecture, dropout=dropout)).train()
    optimizer = (optimizer or partial(build_optimizer, weight_decay=0.1))(model, 1e-2)
    scheduler = get_scheduler("cosine", optimizer, 2, num_training_steps=20)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, scheduler


@pytest.mark.parametrize("architecture", HEADS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_an_update_does_not_depend_on_its_micro_batches(accelerator, architecture, label_smoothing):
    dataset = tiny_dataset(architecture, 16)
    weights, losses = [], []
    for micro_batch_size in (None, 16, 5, 1):
        # Adam divides a gradient by its own size, and so would show the rounding of gradients near zero
        model, optimizer, scheduler = trainer(
            accelerator, architecture, optimizer=lambda model, rate: torch.optim.SGD(model.parameters(), rate)
        )
        for batch in updates(accelerator, dataset, 16, micro_batch_size, 0, seed=0, numbers=range(3)):
            loss, tokens = update(accelerator, model, optimizer, scheduler, batch, label_smoothing)
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()))
        losses.append(loss)
    for other in range(1, 4):
        torch.testing.assert_close(weights[other], weights[0], atol=1e-6, rtol=0)
        assert losses[other] == pytest.approx(losses[0], abs=1e-6)


def test_an_update_reports_the_mean_loss_per_target_token(accelerator):
    model, optimizer, scheduler = trainer(accelerator, "decoder")
    examples = [{"input_ids": tiny_tokens(length).tolist()} for length in (2, 5, 9)]
    batch = collate(examples, pad_token_id=0)
    logits = model(input_ids=batch["input_ids"]).logits.double().log_softmax(-1)
    expected = [
        -logits[row, position, example["input_ids"][position + 1]]
        for row, example in enumerate(examples)
        for position in range(len(example["input_ids"]) - 1)
    ]
    loss, tokens = update(accelerator, model, optimizer, scheduler, [batch])
    assert tokens == len(expected) == 1 + 4 + 8
    assert loss == pytest.approx(sum(expected).item() / tokens, abs=1e-6)


def test_weight_decay_spares_biases_and_norms():
    model = TransformerBlockForCausalLM(tiny_config("decoder"))
    decayed, spared = build_optimizer(model, 1e-3, 0.1).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)].split(".")[-1] for p in decayed["params"]} == {"weight"}
    assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


@pytest.mark.parametrize("architecture", HEADS)
def test_evaluation_counts_every_example_once(accelerator, architecture):
    model, *_ = trainer(accelerator, architecture, dropout=0.5)
    dataset = tiny_dataset(architecture, 11)
    total = tokens = 0
    for example in dataset:
        batch = collate([example], pad_token_id=0)
        count = len(example["labels"]) if "labels" in example else len(example["input_ids"]) - 1
        total += model.eval()(**batch).loss.item() * count
        tokens += count
    model.train()
    result = evaluate(accelerator, model, dataset, batch_size=4, pad_token_id=0)
    assert result["tokens"] == tokens
    assert result["loss"] == pytest.approx(total / tokens, abs=1e-6)
    assert model.training


def test_translations_come_back_in_order(accelerator):
    texts = ["a", "bcd", "ab", "abcdef", "c", "fa"]
    tokenizer = train_tokenizer(iter(["abcdef"]), "char", 20, 16, ends_texts=True)
    values = {"vocab_size": len(tokenizer), "initializer_range": 1.0, "tie_word_embeddings": False}
    config = tiny_config("encoder-decoder", **values)
    model = TransformerBlockForConditionalGeneration(config)
    together = translate(accelerator, model, tokenizer, texts, batch_size=4, max_new_tokens=5)
    alone = [translate(accelerator, model, tokenizer, [text], 1, max_new_tokens=5)[0] for text in texts]
    assert together == alone
    assert len(set(together)) > 1


def test_scores_against_hand_computed_ones():
    scores = score_translations(["2024-03-05", "2024-03-06"], ["2024-03-05", "2024-03-05"])
    assert scores["exact_match"] == 50
    assert score_translations(["one two three four"], ["one two three four"])["bleu"] == pytest.approx(100)
    assert "version:" in scores["bleu_signature"]
    assert bits_per_byte(loss=math.log(4), tokens=6, num_bytes=12) == pytest.approx(1.0)


@pytest.mark.parametrize("architecture", HEADS)
def test_a_resumed_run_equals_an_uninterrupted_one(architecture, tmp_path):
    dataset = tiny_dataset(architecture, 13)

    def train(start: int, stop: int, resume: bool) -> torch.Tensor:
        accelerator = Accelerator(cpu=True)
        model, optimizer, scheduler = trainer(accelerator, architecture, dropout=0.3)
        register_state(accelerator, scheduler)
        torch.manual_seed(1)
        if resume:
            assert load_checkpoint(accelerator, checkpoints(tmp_path)[-1])["history"] == [start]
        for batch in updates(accelerator, dataset, 4, None, 0, seed=0, numbers=range(start, stop)):
            update(accelerator, model, optimizer, scheduler, batch, 0.1)
        save_checkpoint(accelerator, tmp_path, {"step": stop, "history": [stop]}, keep=2)
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    whole = train(0, 9, resume=False)
    for step in checkpoints(tmp_path):
        step.rename(tmp_path / "whole")
    train(0, 4, resume=False)
    assert torch.equal(train(4, 9, resume=True), whole)


def test_only_whole_checkpoints_count_and_old_ones_go(tmp_path):
    accelerator = Accelerator(cpu=True)
    *_, scheduler = trainer(accelerator, "decoder")
    register_state(accelerator, scheduler)
    for step in (1, 2, 3):
        save_checkpoint(accelerator, tmp_path, {"step": step}, keep=2)
    (tmp_path / "checkpoints" / "step-00000004.partial").mkdir()
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    weights = load_file(checkpoints(tmp_path)[-1] / "model.safetensors")  # ST6: tied weights are stored once
    assert [name for name in weights if "embed" in name or "head" in name] == ["model.embed_tokens.weight"]
