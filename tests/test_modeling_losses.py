"""Tests of the losses of every head against float64, of the chunked loss, and of which logits come back."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import EACH_LM_HEAD, MODELS, tiny_config, tiny_inputs, tiny_labels, tiny_tokens
from torch.testing import assert_close

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForMaskedLM,
    TransformerBlockForQuestionAnswering,
    TransformerBlockForSequenceClassification,
    TransformerBlockForTokenClassification,
)
from hf_transformer_block.modeling_hf_transformer_block import CACHE, ChunkedCrossEntropy, shift_tokens_right


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")

HEADS = MODELS[3:]


def float64_sum(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Sums -log p(label), or its smoothed form, over the labels that are not -100, one by one."""
    total = torch.zeros((), dtype=torch.float64)
    for row, label in zip(logits.double().flatten(0, -2), labels.flatten().tolist(), strict=True):
        if label != -100:
            log_p = row - row.exp().sum().log()
            total += -(1 - smoothing) * log_p[label] - smoothing * log_p.mean()
    return total


def lm_batch(model):
    """Returns inputs, labels with some ignored, and the labels where they are predicted."""
    inputs = tiny_inputs(model.config, batch=3)
    labels = tiny_labels(model, inputs)["labels"]
    labels[0, :2], labels[2, 1:] = -100, -100
    if not isinstance(model, TransformerBlockForCausalLM):
        return inputs, labels, labels
    return inputs, labels, torch.cat([labels[:, 1:], torch.full((3, 1), -100)], dim=1)


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@EACH_LM_HEAD
def test_language_model_losses_are_their_formula(head, shape, train):
    model = head(tiny_config(shape))
    inputs, labels, targets = lm_batch(model)
    logits = model.eval()(**inputs).logits
    model.train(train)
    count = (targets != -100).sum()
    for smoothing in (0.0, 0.1):
        total = float64_sum(logits, targets, smoothing)
        kwargs = {"labels": labels, "label_smoothing": smoothing}
        for divisor, given in [(count, None), (40, 40), (40, torch.tensor(40))]:
            loss = model(**inputs, **kwargs, num_items_in_batch=given).loss
            assert_close(loss.double(), total / divisor, rtol=2e-6, atol=0)
        torchs = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
        assert_close(model(**inputs, **kwargs).loss.double(), torchs, rtol=2e-6, atol=0)


def test_LT2_a_causal_head_shifts_once():
    model = TransformerBlockForCausalLM(tiny_config("decoder"))
    ids = torch.tensor([[5, 9, 30]])
    log_p = model.eval()(ids).logits.double().log_softmax(dim=-1)[0]
    by_hand = -(log_p[0, 9] + log_p[1, 30]) / 2
    for train in (False, True):
        assert_close(model.train(train)(ids, labels=ids).loss.double(), by_hand, rtol=1e-6, atol=0)


def test_LT2_an_encoder_decoder_shifts_its_input_and_not_its_labels():
    config = tiny_config("encoder-decoder", decoder_start_token_id=2)
    model = TransformerBlockForConditionalGeneration(config)
    source, labels = tiny_tokens(1, 4), torch.tensor([[5, 9, 30]])
    log_p = (
        model.eval()(source, decoder_input_ids=torch.tensor([[2, 5, 9]]))
        .logits.double()
        .log_softmax(dim=-1)[0]
    )
    by_hand = -(log_p[0, 5] + log_p[1, 9] + log_p[2, 30]) / 3
    for train in (False, True):
        assert_close(model.train(train)(source, labels=labels).loss.double(), by_hand, rtol=1e-6, atol=0)
    ignored = torch.tensor([[5, -100, 30], [-100, 7, -100]])
    expected = torch.tensor([[2, 5, 0], [2, 0, 7]])
    assert torch.equal(shift_tokens_right(ignored, config), expected)
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(ignored), expected)
    assert ignored[0, 1] == -100


def test_LT7_shift_labels_win_over_labels():
    model = TransformerBlockForCausalLM(tiny_config("decoder"))
    ids, shifted = tiny_tokens(2, 5), tiny_tokens(2, 5)
    expected = float64_sum(model.eval()(ids).logits, shifted) / 10
    for train in (False, True):
        for labels in (None, ids):
            outputs = model.train(train)(ids, labels=labels, shift_labels=shifted)
            assert_close(outputs.loss.double(), expected, rtol=1e-6, atol=0)
            assert outputs.get(CACHE) is None


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("given", [None, 0, torch.tensor(0), 12])
@EACH_LM_HEAD
def test_all_labels_ignored_is_exactly_zero(head, shape, given, train):
    model = head(tiny_config(shape)).train(train)
    inputs, labels, _ = lm_batch(model)
    loss = model(**inputs, labels=torch.full_like(labels, -100), num_items_in_batch=given).loss
    loss.backward()
    assert loss.item() == 0
    assert all(parameter.grad.abs().max() == 0 for parameter in model.parameters())


@EACH_LM_HEAD
def test_micro_batches_add_up_to_the_batch(head, shape):
    model = head(tiny_config(shape)).train()
    inputs, labels, targets = lm_batch(model)
    whole = model(**inputs, labels=labels).loss
    parts = [
        model(
            **{name: value[row : row + 1] for name, value in inputs.items()},
            labels=labels[row : row + 1],
            num_items_in_batch=(targets != -100).sum(),
        ).loss
        for row in range(3)
    ]
    assert_close(sum(parts), whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(
    ("vocab_size", "rows"),
    # a chunk has 1024 rows up to 2048 words, and 256 from 8192 words on
    [(61, 70), (61, 2100), (5, 1), (8192, 256), (20000, 257), (20000, 600)],
)
def test_the_chunked_loss_is_the_loss_of_full_logits(vocab_size, rows, smoothing):
    hidden = torch.randn(rows, 16, requires_grad=True)
    weight = (torch.randn(vocab_size, 16) * 0.3).requires_grad_()
    bias = torch.randn(vocab_size, requires_grad=True)
    labels = torch.randint(0, vocab_size, (rows,))
    labels[::3] = -100
    loss = ChunkedCrossEntropy.apply(hidden, weight, bias, labels, smoothing)
    exact_hidden, exact_weight, exact_bias = (
        tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)
    )
    logits = exact_hidden @ exact_weight.T + exact_bias
    exact = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    assert_close(loss.double(), exact, rtol=1e-6, atol=1e-9)
    (loss * 3).backward()
    (exact * 3).backward()
    assert_close(hidden.grad.double(), exact_hidden.grad, rtol=1e-5, atol=2e-6)
    assert_close(weight.grad.double(), exact_weight.grad, rtol=1e-5, atol=max(2e-6, rows * 5e-9))
    assert_close(bias.grad.double(), exact_bias.grad, rtol=1e-5, atol=max(2e-6, rows * 5e-9))


def test_the_chunked_loss_holds_gradients_that_half_precision_cannot_sum():
    rows = 100_000
    hidden, weight = torch.ones(rows, 8, dtype=torch.float16), torch.zeros(5, 8, dtype=torch.float16)
    loss = (
        ChunkedCrossEntropy.apply(hidden, weight.requires_grad_(), None, torch.full((rows,), 3), 0.0) / rows
    )
    loss.backward()
    expected = torch.full((5, 8), 0.2)  # softmax of zeros, less one for the label
    expected[3] = -0.8
    assert_close(weight.grad.float(), expected, rtol=0, atol=1e-3)


def test_the_chunked_loss_divides_before_half_precision_overflows():
    words = 70_000  # equal logits: exp(logit - largest) sums to more than float16 holds
    hidden, weight = torch.ones(2, 8, dtype=torch.float16), torch.ones(words, 8, dtype=torch.float16)
    weight[3] = 2  # 8 more than the other logits
    loss = ChunkedCrossEntropy.apply(hidden.requires_grad_(), weight, None, torch.tensor([3, -100]), 0.1)
    loss.backward()
    target = math.exp(8) / (math.exp(8) + words - 1)
    assert_close(loss.item(), -math.log(target) + 0.1 * 8 * (1 - 1 / words), rtol=1e-5, atol=0)
    # sum of (probability - smoothed target) * weight; all words but one weigh 1, which cancels
    expected = torch.tensor([[target - 0.9 - 0.1 / words] * 8, [0.0] * 8])
    assert_close(hidden.grad.float(), expected, rtol=2e-3, atol=2e-3)


def test_the_chunked_loss_under_autocast_is_the_loss_of_rounded_factors():
    hidden, weight = torch.randn(300, 16, requires_grad=True), torch.randn(9000, 16, requires_grad=True)
    labels = torch.randint(0, 9000, (300,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = ChunkedCrossEntropy.apply(hidden, weight, None, labels, 0.1)
    loss.backward()
    exact_hidden, exact_weight = (
        tensor.detach().bfloat16().double().requires_grad_() for tensor in (hidden, weight)
    )
    logits = (exact_hidden @ exact_weight.T).bfloat16().double()
    exact = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.1)
    exact.backward()
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert_close(loss.double(), exact, rtol=1e-4, atol=0)
    assert_close(hidden.grad.double(), exact_hidden.grad, rtol=0, atol=0.02)
    assert_close(weight.grad.double(), exact_weight.grad, rtol=0, atol=0.02)


@EACH_LM_HEAD
def test_a_head_with_a_bias_trains_on_its_own_logits(head, shape):
    model = head(tiny_config(shape, lm_head_bias=True))
    torch.nn.init.normal_(model.lm_head.bias)
    inputs = tiny_inputs(model.config)
    labels = tiny_labels(model, inputs)
    assert_close(model.train()(**inputs, **labels).loss, model.eval()(**inputs, **labels).loss)


def test_the_chunked_loss_refuses_a_second_derivative():
    hidden = torch.randn(3, 4, requires_grad=True)
    loss = ChunkedCrossEntropy.apply(hidden, torch.randn(5, 4), None, torch.tensor([1, 2, 3]), 0.0)
    (gradient,) = torch.autograd.grad(loss**2, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"tie_word_embeddings": False}, {"lm_head_bias": True}],
    ids=["tied", "untied", "with a bias"],
)
@EACH_LM_HEAD
def test_a_training_step_is_that_of_full_logits(head, shape, kwargs):
    model = head(tiny_config(shape, **kwargs)).train()
    inputs, labels, _ = lm_batch(model)
    results = []
    for keep in (None, 0):  # chunked, and through all logits
        model.zero_grad()
        outputs = model(**inputs, labels=labels, logits_to_keep=keep)
        assert (outputs.logits is None) == (keep is None)
        outputs.loss.backward()
        results.append([outputs.loss, *(parameter.grad for parameter in model.parameters())])
    assert len(results[0]) > 10
    for chunked, full in zip(*results, strict=True):
        assert_close(chunked, full, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_a_frozen_head_or_body_costs_no_gradient(frozen):
    model = TransformerBlockForCausalLM(tiny_config(tie_word_embeddings=False)).train()
    (model.lm_head if frozen == "weight" else model.model).requires_grad_(False)
    ids = tiny_tokens(2, 6)
    gradients = []
    for keep in (None, 0):
        model.zero_grad()
        model(ids, labels=ids, logits_to_keep=keep).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert ("lm_head.weight" in gradients[0]) == (frozen == "hidden")
    assert len(gradients[0]) == (1 if frozen == "hidden" else len(list(model.model.parameters())))
    for name, gradient in gradients[0].items():
        assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["autocast", "bfloat16", "float16"])
def test_half_precision_steps_are_finite_and_close(mode):
    model = TransformerBlockForCausalLM(
        tiny_config(vocab_size=20000, initializer_range=0.05, max_position_embeddings=100)
    ).train()
    ids = tiny_tokens(3, 100)
    exact = model(ids, labels=ids).loss
    exact.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    if mode != "autocast":
        model.to(getattr(torch, mode))
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        loss = model(ids, labels=ids).loss
    (loss * (1024 if mode == "float16" else 1)).backward()
    assert loss.dtype == torch.float32
    assert_close(loss, exact, rtol=1e-2, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        ours, theirs = parameter.grad.float().flatten(), gradients[name].flatten()
        if not name.endswith("k_proj.bias"):  # their true gradient is 0
            assert F.cosine_similarity(ours, theirs, dim=0) > 0.95, name


@EACH_LM_HEAD
def test_logits_to_keep(head, shape):
    model = head(tiny_config(shape)).eval()
    inputs, labels, targets = lm_batch(model)
    logits = model(**inputs).logits
    assert_close(model(**inputs, logits_to_keep=2).logits, logits[:, -2:], rtol=0, atol=1e-6)
    index = torch.tensor([0, 3])
    kept = model(**inputs, logits_to_keep=index)
    assert_close(kept.logits, logits[:, index], rtol=0, atol=1e-6)
    assert model(**inputs, labels=labels).logits.shape == logits.shape
    for keep, where in [(3, slice(-3, None)), (index, index)]:
        loss = model(**inputs, labels=labels, logits_to_keep=keep).loss
        count = (targets[:, where] != -100).sum()
        assert_close(
            loss.double(), float64_sum(logits[:, where], targets[:, where]) / count, rtol=2e-6, atol=0
        )


@pytest.mark.parametrize("shape", ["encoder", "decoder"])
@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        (None, 4, torch.tensor([3, 0, 2])),
        (None, 4, torch.tensor([3, -100, 2])),
        ("single_label_classification", 4, torch.tensor([3, 0, 2])),
        (None, 4, torch.tensor([[0.0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])),
        ("multi_label_classification", 4, torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])),
        (None, 1, torch.tensor([0.5, -2.0, 7.0])),
        (None, 1, torch.tensor([[1], [-100], [7]])),  # in a regression -100 is a value
        ("regression", 4, torch.tensor([[0.0, 1, 2, 3], [1, 1, 1, 1], [-100.0, 0, 0, 0]])),
    ],
)
def test_sequence_classification_losses(shape, problem, num_labels, labels):
    config = tiny_config(shape, num_labels=num_labels, problem_type=problem)
    model = TransformerBlockForSequenceClassification(config)
    inputs = tiny_inputs(config, batch=3)
    outputs = model(**inputs, labels=labels)
    logits = outputs.logits.double()
    assert logits.shape == (3, num_labels)
    count = 3
    if problem == "regression" or num_labels == 1:
        total = ((logits - labels.view(3, num_labels)) ** 2).mean(dim=1).sum()
    elif labels.ndim == 2:
        p = 1 / (1 + (-logits).exp())
        total = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean(dim=1).sum()
    else:
        total, count = float64_sum(logits, labels), (labels != -100).sum()
    assert_close(outputs.loss.double(), total / count, rtol=1e-6, atol=0)
    loss = model(**inputs, labels=labels, num_items_in_batch=torch.tensor(12)).loss
    assert_close(loss.double(), total / 12, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", ["encoder", "decoder"])
def test_token_classification_and_question_answering_losses(shape):
    model = TransformerBlockForTokenClassification(tiny_config(shape, num_labels=5))
    inputs = tiny_inputs(model.config, batch=3)
    labels = tiny_labels(model, inputs)["labels"]
    labels[1, 2:] = -100
    outputs = model(**inputs, labels=labels)
    total = float64_sum(outputs.logits, labels)
    assert outputs.logits.shape == (3, 7, 5)
    assert_close(outputs.loss.double(), total / 16, rtol=1e-6, atol=0)
    assert_close(
        model(**inputs, labels=labels, num_items_in_batch=9).loss.double(), total / 9, rtol=1e-6, atol=0
    )

    model = TransformerBlockForQuestionAnswering(tiny_config(shape))
    start, end = torch.tensor([0, 6, 7]), torch.tensor([[2], [-1], [99]])  # some outside the input
    outputs = model(**inputs, start_positions=start, end_positions=end)
    first = float64_sum(outputs.start_logits, torch.tensor([0, 6, -100])) / 2
    last = float64_sum(outputs.end_logits, torch.tensor([2, -100, -100]))
    assert_close(outputs.loss.double(), (first + last) / 2, rtol=1e-6, atol=0)
    outside = model(**inputs, start_positions=start + 7, end_positions=end + 99).loss
    assert outside.item() == 0


def test_the_loss_of_an_answer_does_not_depend_on_padding():
    model = TransformerBlockForQuestionAnswering(tiny_config("encoder")).eval()
    ids, answer = (
        tiny_tokens(1, 5),
        {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([3])},
    )
    padded = torch.cat([ids, tiny_tokens(1, 2)], dim=1)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    assert_close(
        model(padded, attention_mask=mask, **answer).loss, model(ids, **answer).loss, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.full((1, 1024), 3), "labels have shape (1, 1024), not (2, 1024)"),  # a whole chunk of the loss
        (torch.full((1024, 2), 3), "labels have shape (1024, 2), not (2, 1024)"),
        (torch.full((2, 1024), 61), "label 61 is outside the 61 classes or tokens (0 to 60)"),
        (torch.full((2, 1024), -1), "label -1 is outside the 61 classes or tokens"),
    ],
)
def test_labels_that_do_not_fit_are_refused_with_the_numbers(labels, message, train):
    model = TransformerBlockForMaskedLM(
        tiny_config("encoder", max_position_embeddings=1024, num_hidden_layers=1)
    ).train(train)
    with pytest.raises(ValueError, match=re.escape(message)):
        model(tiny_tokens(2, 1024), labels=labels)


def test_classes_that_are_none_are_refused_with_the_numbers():
    for head, labels in (
        (TransformerBlockForTokenClassification, torch.full((2, 7), 2)),
        (TransformerBlockForSequenceClassification, torch.tensor([0, 2])),
    ):
        with pytest.raises(ValueError, match="label 2 is outside the 2 classes"):
            head(tiny_config("encoder"))(tiny_tokens(2, 7), labels=labels)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("shape", "pooling"), [("encoder", "mean"), ("encoder", "cls"), ("decoder", "last")])
def test_pooling_reads_the_real_tokens(shape, pooling, side):
    model = TransformerBlockForSequenceClassification(tiny_config(shape, classifier_pooling=pooling)).eval()
    ids = tiny_tokens(3, 6)
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1] = torch.tensor([0, 0, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 0, 0])
    states = model.model(ids, attention_mask=mask).last_hidden_state
    real = states[1][mask[1] == 1]
    pooled = {"mean": real.mean(dim=0), "cls": real[0], "last": real[-1]}[pooling]
    logits = model(ids, attention_mask=mask).logits
    assert_close(logits[1], model.classifier(pooled), rtol=0, atol=1e-6)
    alone = ids[1:2][:, mask[1] == 1]
    assert_close(model(alone).logits, logits[1:2], rtol=0, atol=1e-5)


def test_LT3_every_head_has_its_own_loss(library_logs):
    """transformers picks one by class name when it is asked, and logs so when the name says nothing."""
    assert HEADS
    for head, shape in HEADS:
        model = head(tiny_config(shape))
        inputs = tiny_inputs(model.config)
        assert model(**inputs, **tiny_labels(model, inputs)).loss.requires_grad
    assert not [message for message in library_logs if "loss" in message]
