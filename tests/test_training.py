"""Tests of the verbs of training, for every task: an update however it is split, averages, evaluation."""

import copy
import math

import pytest
import torch
from accelerate import Accelerator
from conftest import tiny_config
from torch.nn.utils import parameters_to_vector
from transformers import get_scheduler


pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')

from datasets import Dataset

from hf_transformer_block import TransformerBlockForCausalLM, training
from hf_transformer_block.loading import encode
from hf_transformer_block.tasks import TASKS
from hf_transformer_block.training import ExponentialMovingAverage, build_optimizer, evaluate, update
from hf_transformer_block.vocabulary import train_tokenizer


LETTERS = "abcdefgh"


def rows_of(name: str, size: int) -> Dataset:
    """Returns rows of unequal lengths."""
    texts = [" ".join(LETTERS[(index * k) % 8] for k in range(2 + index % 5)) for index in range(size)]
    columns = {
        "translation": lambda: {
            "source": texts,
            "target": [text[::-1][: 1 + len(text) // 2] for text in texts],
        },
        "causal-lm": lambda: {"text": texts, "ends": [True] * size},
        "masked-lm": lambda: {"text": texts, "ends": [True] * size},
        "text-classification": lambda: {"text": texts, "label": [text[-1] for text in texts]},
        "token-classification": lambda: {
            "words": [text.split() for text in texts],
            "labels": [[letter.upper() for letter in text.split()] for text in texts],
        },
        "question-answering": lambda: {
            "id": [str(index) for index in range(size)],
            "question": ["a b"] * size,
            "context": texts,
            "answers": [{"text": [text[-1]], "answer_start": [len(text) - 1]} for text in texts],
        },
    }[name]()
    return Dataset.from_dict({**columns, "row": list(range(size))})


def prepare(name: str, size: int = 14):
    """Returns task, tokenizer and examples."""
    task, rows = TASKS[name](max_length=24), rows_of(name, size)
    task = task.learn_labels(rows)
    texts = (text for row in rows for text in task.texts(row))
    tokenizer = train_tokenizer(texts, "word", 40, 24, task.architecture, mask=name == "masked-lm")
    examples, _ = encode(task, rows, tokenizer, True, "error")
    return task, tokenizer, [{**example, "draw": draw} for draw, example in enumerate(examples)]


def build(task, tokenizer, **values) -> torch.nn.Module:
    """Returns a model of the task."""
    torch.manual_seed(0)
    values = {"vocab_size": len(tokenizer), "dropout": 0.0, **task.config_values(), **values}
    return task.model_class(tiny_config(task.architecture, **values)).train()


def train(task, tokenizer, examples, pieces: int, model=None, steps: int = 2, max_grad_norm: float = 1.0):
    """Makes updates of plain gradient descent in so many pieces; returns the weights and the last report."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=pieces)
    model = build(task, tokenizer) if model is None else model
    # Adam divides a gradient by its own size, and so would show the rounding of gradients near zero
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scheduler = get_scheduler("constant", optimizer)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(steps):
        batches = training.micro_batches(accelerator, task, tokenizer, examples, pieces)
        report = update(accelerator, model, optimizer, scheduler, batches, task.count_targets, max_grad_norm)
    return parameters_to_vector(model.parameters()).detach(), report


@pytest.mark.parametrize("name", TASKS)
def test_an_update_does_not_depend_on_its_pieces(name):
    task, tokenizer, examples = prepare(name)
    whole, report = train(task, tokenizer, examples, 1)
    assert report.targets > 1
    for pieces in (2, 3, len(examples) + 2):  # of the last, two have no example
        weights, other = train(task, tokenizer, examples, pieces)
        torch.testing.assert_close(weights, whole, atol=1e-6, rtol=0)
        assert other.loss == pytest.approx(report.loss, abs=1e-6)
        assert other.targets == report.targets


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_is_the_mean_over_the_targets_of_every_example(name):
    task, tokenizer, examples = prepare(name)
    model = build(task, tokenizer)
    total = sum(
        model(**task.collate([example], tokenizer), num_items_in_batch=1).loss for example in examples
    )
    targets = sum(int(task.count_targets(task.collate([example], tokenizer))) for example in examples)
    _, report = train(task, tokenizer, examples, 1, model, steps=1)
    assert report.targets == targets
    assert report.loss == pytest.approx(total.item() / targets, abs=2e-6)


def test_an_update_that_is_not_finite_changes_nothing():
    task, tokenizer, examples = prepare("translation")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build(task, tokenizer)
    optimizer = build_optimizer(model, 1e-2, 0.1)
    scheduler = get_scheduler("linear", optimizer, 0, num_training_steps=9)
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = training.micro_batches(accelerator, task, tokenizer, examples, 2)
    arguments = (accelerator, model, optimizer, scheduler, batches, task.count_targets, 1.0)
    assert update(*arguments).is_finite
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    model.lm_head.weight.register_hook(lambda gradient: gradient * float("nan"))
    report = update(*arguments)
    assert not report.is_finite
    assert math.isfinite(report.loss)
    weights, moments, schedule = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
    assert all(torch.equal(weights[name], before[0][name]) for name in weights)
    assert schedule == before[2]
    for index, state in moments["state"].items():
        assert all(torch.equal(state[name], before[1]["state"][index][name]) for name in state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_are_clipped_to_their_length():
    task, tokenizer, examples = prepare("translation")
    before = parameters_to_vector(build(task, tokenizer).parameters()).detach()
    after, report = train(task, tokenizer, examples, 2, steps=1, max_grad_norm=0.01)
    assert report.grad_norm > 0.1
    assert (after - before).norm().item() == pytest.approx(0.05 * 0.01, rel=1e-2)


def test_activation_checkpointing_changes_no_weight():
    task, tokenizer, examples = prepare("translation")
    model = build(task, tokenizer)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    weights, _ = train(task, tokenizer, examples, 2, model)
    torch.testing.assert_close(weights, train(task, tokenizer, examples, 2)[0], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["translation", "causal-lm"])
def test_a_compiled_model_trains_as_one_that_is_not(name):
    task, tokenizer, examples = prepare(name)
    expected, _ = train(task, tokenizer, examples, 2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = build(task, tokenizer)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scheduler = get_scheduler("constant", optimizer)
    compiled, optimizer = accelerator.prepare(torch.compile(model, backend="eager", dynamic=True), optimizer)
    assert training.unwrap(accelerator, compiled) is model
    for _ in range(2):
        batches = training.micro_batches(accelerator, task, tokenizer, examples, 2)
        update(accelerator, compiled, optimizer, scheduler, batches, task.count_targets, 1.0)
    torch.testing.assert_close(parameters_to_vector(model.parameters()), expected, atol=2e-6, rtol=0)


def test_weight_decay_spares_biases_and_norms():
    model = TransformerBlockForCausalLM(tiny_config("decoder"))
    decayed, spared = build_optimizer(model, 1e-3, 0.1).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)].split(".")[-1] for p in decayed["params"]} == {"weight"}
    assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_the_moving_average_is_that_of_its_formula():
    weights = torch.nn.Parameter(torch.zeros(3))
    average, expected = ExponentialMovingAverage([weights], decay=0.5), torch.zeros(3).double()
    for step in range(20):
        with torch.no_grad():
            weights += torch.tensor([1.0, -2.0, 0.5]) * (step + 1)
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weights.detach().double()
    torch.testing.assert_close(average.averages[0].double(), expected, atol=1e-4, rtol=1e-6)
    before = weights.detach().clone()
    with average.applied():
        torch.testing.assert_close(weights.detach().double(), expected, atol=1e-4, rtol=1e-6)
    assert torch.equal(weights, before)

    other = ExponentialMovingAverage([torch.nn.Parameter(torch.ones(3))], decay=0.5)
    other.load_state_dict(copy.deepcopy(average.state_dict()))
    assert other.updates == 20
    assert torch.equal(other.averages[0], average.averages[0])


@pytest.mark.parametrize("name", TASKS)
def test_evaluation_counts_every_example_once(name):
    accelerator = Accelerator(cpu=True)
    task, tokenizer, examples = prepare(name, 11)
    model = build(task, tokenizer, dropout=0.5)
    total = targets = 0
    for example in examples:
        batch = task.collate([example], tokenizer)
        total += model.eval()(**batch, num_items_in_batch=1).loss.item()
        targets += int(task.count_targets(batch))
    model.train()
    data = Dataset.from_list([{k: v for k, v in example.items() if k != "draw"} for example in examples])
    result, predictions = evaluate(accelerator, model, task, data, tokenizer, batch_size=4)
    assert result["targets"] == targets
    assert result["loss"] == pytest.approx(total / targets, abs=2e-6)
    assert len(predictions) == len(examples)
    assert model.training


def test_translations_come_back_in_order():
    accelerator = Accelerator(cpu=True)
    texts = ["a", "bcd", "ab", "abcdef", "c", "fa"]
    tokenizer = train_tokenizer(iter(["abcdef"]), "char", 20, 16, "encoder-decoder")
    values = {"vocab_size": len(tokenizer), "initializer_range": 1.0, "tie_word_embeddings": False}
    model = TASKS["translation"].model_class(tiny_config("encoder-decoder", **values))
    together = training.translate(accelerator, model, tokenizer, texts, batch_size=4, max_new_tokens=5)
    alone = [
        training.translate(accelerator, model, tokenizer, [text], 1, max_new_tokens=5)[0] for text in texts
    ]
    assert together == alone
    assert len(set(together)) > 1


def test_SH4_weights_without_values_are_not_saved(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    model = TransformerBlockForCausalLM(tiny_config("decoder"))
    weights = {name: torch.empty(0) for name in model.state_dict()}  # what ZeRO-3 leaves of them
    monkeypatch.setattr(accelerator, "get_state_dict", lambda model: weights)
    with pytest.raises(ValueError, match="came without its values: set zero3_save_16bit_model: true"):
        training.save_model(accelerator, model, tmp_path)
    assert not list(tmp_path.iterdir())
