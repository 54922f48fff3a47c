"""Tests of lm-eval and sentence-transformers: their scores and vectors are those of plain forwards."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import output_of
from torch import nn
from torch.testing import assert_close

from .conftest import build_tiny, continue_by_hand, tokenizer_of, words
from .strangers import as_stranger, assert_remote


pytestmark = pytest.mark.ecosystem
NEEDS = 'runs after pip install "hf_transformer_block[ecosystem]"'
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
"""
KINDS = {
    "tiny_choices": (
        "multiple_choice",
        """
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    ),
    "tiny_stories": (
        "loglikelihood_rolling",
        """
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    ),
    "tiny_answers": (
        "generate_until",
        """
doc_to_text: "{{question}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["w9"], do_sample: false, max_gen_toks: 8}
metric_list: [{metric: exact_match}]
""",
    ),
}


@torch.no_grad()
def log_likelihoods(model: nn.Module, context: list[int], target: list[int]) -> torch.Tensor:
    """Returns the log-probability of every token of the target behind the context, by one plain forward."""
    wanted = torch.tensor(target)
    if model.config.is_encoder_decoder:
        logits = model(input_ids=torch.tensor([context]), labels=wanted[None]).logits[0]
    else:
        logits = model(torch.tensor([context + target[:-1]])).logits[0, -len(target) :]
    return logits.log_softmax(dim=-1).gather(1, wanted[:, None])[:, 0]


def answer_by_hand(model: nn.Module, question: str) -> str:
    tokenizer = tokenizer_of("decoder")
    written = continue_by_hand(model, tokenizer(question)["input_ids"])
    return tokenizer.decode(written, skip_special_tokens=True).split("w9")[0]


def write_tasks(folder: Path, model: nn.Module) -> dict[str, list[dict]]:
    """Writes three tasks; half of the expected answers are those which the model gives."""
    questions = words(6)
    rows = {
        "tiny_choices": [
            {"question": question, "choices": words(3, longest=4), "answer": index % 3}
            for index, question in enumerate(questions)
        ],
        "tiny_stories": [{"text": " ".join(words(40))}, {"text": " ".join(words(3))}],
        "tiny_answers": [
            {"question": question, "target": answer_by_hand(model, question) if index % 2 else "w5"}
            for index, question in enumerate(questions)
        ],
    }
    for name, (kind, text) in KINDS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file, kind=kind) + text)
    return rows


def evaluate(folder: Path, tasks: Path, names: list[str], backend: str) -> tuple[dict, dict[str, list[dict]]]:
    """Returns what the command line prints in its files: the scores, and the samples in their order."""
    arguments = f"pretrained={folder},trust_remote_code=True,dtype=float32,backend={backend}"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments]
    command += ["--tasks", ",".join(names), "--include_path", str(tasks), "--output_path", str(tasks / "out")]
    command += ["--log_samples", "--device", "cpu", "--batch_size", "4"]
    run = subprocess.run(command, cwd=tasks, env=os.environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    (results,) = (tasks / "out").rglob("results_*.json")
    samples = {}
    for name in names:
        (file,) = (tasks / "out").rglob(f"samples_{name}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        samples[name] = sorted(lines, key=lambda line: line["doc_id"])
    return json.loads(results.read_text())["results"], samples


def check_choices(model: nn.Module, rows: list[dict], scores: dict, samples: list[dict]) -> None:
    encode, hits, hits_by_length = tokenizer_of("decoder"), [], []
    for row, sample in zip(rows, samples, strict=True):
        context = encode(row["question"])["input_ids"]
        expected = [log_likelihoods(model, context, encode(text)["input_ids"]) for text in row["choices"]]
        expected = torch.stack([each.sum() for each in expected])
        found = [float(response[0][0]) for response in sample["resps"]]
        assert_close(torch.tensor(found), expected, rtol=0, atol=2e-4)
        by_length = expected / torch.tensor([len(text) for text in row["choices"]])
        hits.append(int(expected.argmax()) == row["answer"])
        hits_by_length.append(int(by_length.argmax()) == row["answer"])
    assert scores["acc,none"] == sum(hits) / len(hits)
    assert scores["acc_norm,none"] == sum(hits_by_length) / len(hits_by_length)


def check_stories(model: nn.Module, rows: list[dict], scores: dict, samples: list[dict]) -> None:
    """Every token counts once; a window is as long as the positions, and the last one is full as well."""
    limit, total = model.config.max_position_embeddings, 0.0
    for row, sample in zip(rows, samples, strict=True):
        ids = tokenizer_of("decoder")(row["text"])["input_ids"]
        whole, expected = [model.config.bos_token_id, *ids], 0.0
        for start in range(0, len(ids), limit):
            end = min(start + limit, len(ids))
            first = max(0, end - limit) if start else 0
            expected += float(log_likelihoods(model, whole[first : start + 1], ids[start:end]).sum())
        assert abs(float(sample["resps"][0][0]) - expected) < 2e-3
        total += expected
    assert len(tokenizer_of("decoder")(rows[0]["text"])["input_ids"]) > 2 * limit
    count = sum(len(re.split(r"\s+", row["text"])) for row in rows)
    size = sum(len(row["text"].encode()) for row in rows)
    assert math.isclose(scores["word_perplexity,none"], math.exp(-total / count), rel_tol=1e-4)
    assert math.isclose(scores["byte_perplexity,none"], math.exp(-total / size), rel_tol=1e-4)
    assert math.isclose(scores["bits_per_byte,none"], -total / size / math.log(2), rel_tol=1e-4)


def check_answers(model: nn.Module, rows: list[dict], scores: dict, samples: list[dict]) -> None:
    found = [sample["resps"][0][0] for sample in samples]
    assert found == [answer_by_hand(model, row["question"]) for row in rows]
    assert len(set(found)) > 3
    expected = [text == row["target"] for text, row in zip(found, rows, strict=True)]
    assert scores["exact_match,none"] == sum(expected) / len(expected) > 0


CHECKS = {"tiny_choices": check_choices, "tiny_stories": check_stories, "tiny_answers": check_answers}


@pytest.mark.parametrize(("name", "backend"), [("decoder", "causal"), ("encoder-decoder", "seq2seq")])
def test_lm_evals_scores_are_those_of_plain_forwards(name, backend, folder_of, tmp_path):
    pytest.importorskip("lm_eval", reason=NEEDS)
    model = build_tiny(name)
    tasks = list(KINDS) if backend == "causal" else ["tiny_choices"]
    rows = write_tasks(tmp_path, model)
    scores, samples = evaluate(folder_of(name), tmp_path, tasks, backend)
    for task in tasks:
        CHECKS[task](model, rows[task], scores[task], samples[task])


@torch.no_grad()
def pool(model: nn.Module, texts: list[str]) -> torch.Tensor:
    """Returns the mean state of every text by itself; of a decoder, the last one, the library's choice."""
    encode = tokenizer_of("encoder")
    rows = [model.base_model(torch.tensor([encode(text)["input_ids"]])) for text in texts]
    states = [row.last_hidden_state[0] for row in rows]
    if model.config.architecture == "decoder":
        return torch.stack([state[-1] for state in states])
    return torch.stack([state.mean(dim=0) for state in states])


def plain_folder(folder: Path, name: str, **kwargs) -> Path:
    """Saves a model whose tokenizer knows no chats, for sentence-transformers would make each text one."""
    build_tiny(name, **kwargs).save_pretrained(folder)
    tokenizer = tokenizer_of(name)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return folder


def sentence_transformer(folder: Path):
    """Returns a SentenceTransformer of the folder's own code."""
    sentences = pytest.importorskip("sentence_transformers", reason=NEEDS)
    with as_stranger():
        model = sentences.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    assert_remote(model[0].auto_model if hasattr(model[0], "auto_model") else model[0].model)
    return model


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_sentence_vectors_are_pooled_states_and_come_back(name, tmp_path):
    texts = words(5)
    model = sentence_transformer(plain_folder(tmp_path / "first", name))
    model.save_pretrained(str(tmp_path / "second"))
    expected = pool(build_tiny(name), texts)
    for each in (model, sentence_transformer(tmp_path / "second")):
        vectors = each.encode(texts, batch_size=2, convert_to_tensor=True)
        assert_close(vectors.clone(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_sentence_transformers_trains(name, tmp_path):
    """The loss of the first step is the one computed by hand; the trained vectors are saved."""
    datasets = pytest.importorskip("datasets", reason=NEEDS)
    sentences = pytest.importorskip("sentence_transformers", reason=NEEDS)
    losses_of_library = pytest.importorskip("sentence_transformers.sentence_transformer.losses", reason=NEEDS)
    anchors, positives = words(6), words(6)
    model = sentence_transformer(plain_folder(tmp_path / "start", name))
    arguments = sentences.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "run"),
        max_steps=6,
        per_device_train_batch_size=6,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    )
    trainer = sentences.SentenceTransformerTrainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"anchor": anchors, "positive": positives}),
        loss=losses_of_library.MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    first, second = (
        nn.functional.normalize(pool(build_tiny(name), texts), dim=-1) for texts in (anchors, positives)
    )
    expected = nn.functional.cross_entropy(20 * first @ second.T, torch.arange(6))
    assert abs(losses[0] - float(expected)) < 2e-4
    assert losses[-1] < 0.9 * losses[0]
    model.save_pretrained(str(tmp_path / "trained"))
    vectors = model.encode(anchors, convert_to_tensor=True)
    again = sentence_transformer(tmp_path / "trained").encode(anchors, convert_to_tensor=True)
    assert not torch.allclose(vectors, pool(build_tiny(name), anchors), atol=1e-3)
    assert_close(again, vectors, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["classifier", "reward"])
def test_cross_encoders_score_pairs_and_come_back(name, tmp_path):
    sentences = pytest.importorskip("sentence_transformers", reason=NEEDS)
    pairs = list(zip(words(5), words(5), strict=True))
    model, encode = build_tiny(name, num_labels=1), tokenizer_of(name)
    rows = [torch.tensor([encode(*pair)["input_ids"]]) for pair in pairs]
    expected = torch.cat([output_of(model, {"input_ids": row})[0] for row in rows]).sigmoid()
    folder = plain_folder(tmp_path / "first", name, num_labels=1)
    for _ in range(2):
        with as_stranger():
            encoder = sentences.CrossEncoder(str(folder), trust_remote_code=True, device="cpu")
        scores = encoder.predict(pairs, batch_size=2, convert_to_tensor=True)
        assert_close(scores, expected, rtol=0, atol=2e-6)
        folder = tmp_path / "second"
        encoder.save_pretrained(str(folder))
