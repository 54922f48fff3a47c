"""
Tests of what serves a saved folder: pipelines of every task, `transformers serve` and `transformers chat`.

Continuous batching is tested in tests/test_exactness_caches.py, our pipeline "translation" in
tests/test_pipeline.py and in a process without the package in tests/test_remote_code.py.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import output_of
from tiny import build
from torch import nn
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast, pipeline

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForMaskedLM,
    TransformerBlockForQuestionAnswering,
    TransformerBlockForSequenceClassification,
    TransformerBlockForTokenClassification,
    TransformerBlockModel,
)

from .conftest import WRITTEN, build_tiny, continue_by_hand, tokenizer_of, words
from .servers import post, serving
from .strangers import as_stranger, assert_remote


pytestmark = pytest.mark.ecosystem
NEEDS = 'runs after pip install "hf_transformer_block[ecosystem]"'
STACKS = pytest.mark.parametrize("shape", ["encoder", "decoder"])
# by default the pages of the cache take most of the machine's memory
PAGES = ("--cb-num-blocks", "32", "--cb-block-size", "16", "--cb-max-batch-tokens", "64")
# the whole of a server for remote code; `serve` looks for the class in transformers
SERVER = """
import transformers
from transformers.cli.transformers import app

transformers.TransformerBlockForCausalLM = transformers.AutoModelForCausalLM
app()
"""


def pipe(folder: Path, task: str, head: type, shape: str, **kwargs):
    """Returns a pipeline of the folder's own code, the model that was saved there, and its tokenizer."""
    torch.manual_seed(5)
    model = build(head, shape, "modern" if shape == "decoder" else "vaswani", initializer_range=0.3, **kwargs)
    model.save_pretrained(folder)
    tokenizer_of(shape).save_pretrained(folder)
    with as_stranger():
        made = pipeline(task, str(folder), trust_remote_code=True, device="cpu")
    assert_remote(made.model)
    return made, model, tokenizer_of(shape)


def logits_of(model: nn.Module, tokenizer: PreTrainedTokenizerFast, *text: str) -> torch.Tensor:
    """Returns the first output for a text, or a pair, by itself."""
    return output_of(model, {"input_ids": torch.tensor([tokenizer(*text)["input_ids"]])})[0]


def scores_of(answer: list[dict], key: str) -> tuple[list, torch.Tensor]:
    return [entry[key] for entry in answer], torch.tensor([entry["score"] for entry in answer])


def test_text_generation_of_texts_and_chats(tmp_path):
    write, model, tokenizer = pipe(tmp_path, "text-generation", TransformerBlockForCausalLM, "decoder")
    options = {"max_new_tokens": WRITTEN, "do_sample": False}
    texts = words(5)
    expected = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        written = continue_by_hand(model, ids)
        # transformers puts no space between the prompt and what was written
        expected.append(text + tokenizer.decode(written, skip_special_tokens=True))
    assert len({text.split()[-1] for text in expected}) > 1
    assert write(texts[0], **options) == [{"generated_text": expected[0]}]
    assert write(texts, batch_size=3, **options) == [[{"generated_text": text}] for text in expected]

    chat = [{"role": "user", "content": texts[0]}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    reply = tokenizer.decode(continue_by_hand(model, ids), skip_special_tokens=True)
    (answer,) = write(chat, **options)
    assert answer["generated_text"][0] == chat[0]
    assert answer["generated_text"][1]["role"] == "assistant"
    assert answer["generated_text"][1]["content"].split() == reply.split()
    assert len(reply.split()) > 2


def test_fill_mask(tmp_path):
    fill, model, tokenizer = pipe(tmp_path, "fill-mask", TransformerBlockForMaskedLM, "encoder")
    texts = ["w8 <mask> w30 w7", "w9 w50 <mask>"]
    for text, answer in zip(texts, fill(texts, top_k=4, batch_size=2), strict=True):
        probabilities = logits_of(model, tokenizer, text)[text.split().index("<mask>")].softmax(dim=-1)
        found, scores = scores_of(answer, "token")
        best = probabilities.topk(4)
        assert found == best.indices.tolist()
        assert_close(scores, best.values, rtol=0, atol=2e-6)
        assert [entry["token_str"] for entry in answer] == tokenizer.convert_ids_to_tokens(found)


@STACKS
def test_text_classification(shape, tmp_path):
    names = {0: "low", 1: "middle", 2: "high"}
    head = TransformerBlockForSequenceClassification
    classify, model, tokenizer = pipe(tmp_path, "text-classification", head, shape, id2label=names)
    texts = words(5)
    for text, answer in zip(texts, classify(texts, top_k=None, batch_size=3), strict=True):
        best = logits_of(model, tokenizer, text).softmax(dim=-1).sort(descending=True)
        found, scores = scores_of(answer, "label")
        assert found == [names[index] for index in best.indices.tolist()]
        assert_close(scores, best.values, rtol=0, atol=2e-6)


@STACKS
def test_zero_shot_classification(shape, tmp_path):
    names = {0: "contradiction", 1: "neutral", 2: "entailment"}
    head = TransformerBlockForSequenceClassification
    both = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
    classify, model, tokenizer = pipe(tmp_path, "zero-shot-classification", head, shape, **both)
    text, labels = "w8 w9 w10 w40", ["w20", "w21", "w22"]
    entails = torch.stack([logits_of(model, tokenizer, text, f"w7 {label}")[2] for label in labels])
    best = entails.softmax(dim=0).sort(descending=True)
    answer = classify(text, candidate_labels=labels, hypothesis_template="w7 {}")
    assert answer["labels"] == [labels[index] for index in best.indices.tolist()]
    assert_close(torch.tensor(answer["scores"]), best.values, rtol=0, atol=2e-6)


@STACKS
def test_token_classification(shape, tmp_path):
    names = {0: "O", 1: "B-PLACE", 2: "I-PLACE"}
    head = TransformerBlockForTokenClassification
    tag, model, tokenizer = pipe(tmp_path, "token-classification", head, shape, id2label=names)
    texts = words(5)
    for text, answer in zip(texts, tag(texts, ignore_labels=[], batch_size=3), strict=True):
        best = logits_of(model, tokenizer, text).softmax(dim=-1).max(dim=-1)
        found, scores = scores_of(answer, "entity")
        assert found == [names[index] for index in best.indices.tolist()]
        assert_close(scores, best.values, rtol=0, atol=2e-6)
        assert [entry["word"] for entry in answer] == text.split()
        assert [text[entry["start"] : entry["end"]] for entry in answer] == text.split()


@STACKS
def test_feature_extraction(shape, tmp_path):
    extract, model, tokenizer = pipe(tmp_path, "feature-extraction", TransformerBlockModel, shape)
    texts = words(3)
    for text, answer in zip(texts, extract(texts), strict=True):
        assert_close(torch.tensor(answer[0]), logits_of(model, tokenizer, text), rtol=0, atol=2e-6)


def test_question_answering_has_no_pipeline_any_more(tmp_path):
    """transformers 5 removed it; tests/test_tasks_question_answering.py tests the answers of our own."""
    head = TransformerBlockForQuestionAnswering
    with pytest.raises(KeyError, match="question-answering"):
        pipe(tmp_path, "question-answering", head, "encoder")


def serve(folder: Path, work: Path, *options: str):
    """Runs `transformers serve`; yields its address."""
    script = work / "server.py"
    script.write_text(SERVER)
    command = [sys.executable, str(script), "serve", str(folder), "--trust-remote-code", "--device", "cpu"]
    return serving([*command, *options], work)


def events_of(stream: str) -> list[dict]:
    """Returns the json of every event."""
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    return [json.loads(event) for event in events if event != "[DONE]"]


def chat_by_hand(model: nn.Module, text: str) -> tuple[list[int], list[int]]:
    """Returns the ids of a chat's first message, and those of the answer."""
    chat = [{"role": "user", "content": text}]
    ids = tokenizer_of("decoder").apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    return ids, continue_by_hand(model, ids)


@pytest.mark.parametrize("options", [(), ("--continuous-batching", *PAGES)], ids=["plain", "continuous"])
def test_serve_streams_what_plain_forwards_write(options, folder_of, tmp_path):
    for module in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(module, reason=NEEDS)
    model, tokenizer = build_tiny("decoder"), tokenizer_of("decoder")
    folder = folder_of("decoder")
    common = {"model": str(folder), "max_tokens": WRITTEN, "temperature": 0.0}
    with serve(folder, tmp_path, *options) as address:
        chats = f"{address}/v1/chat/completions"
        for text in words(3):
            ids, written = chat_by_hand(model, text)
            expected = tokenizer.decode(written, skip_special_tokens=True)
            body = {**common, "messages": [{"role": "user", "content": text}]}
            whole = json.loads(post(chats, {**body, "stream": False}))
            assert whole["choices"][0]["message"]["content"] == expected
            assert whole["usage"]["prompt_tokens"] == len(ids)
            assert whole["usage"]["completion_tokens"] == len(written)
            events = events_of(post(chats, {**body, "stream": True}))
            parts = [event["choices"][0]["delta"].get("content") or "" for event in events]
            assert "".join(parts) == expected
            assert len([part for part in parts if part]) > 1
            plain = json.loads(post(f"{address}/v1/completions", {**common, "prompt": text}))
            written = continue_by_hand(model, tokenizer(text)["input_ids"])
            assert plain["choices"][0]["text"] == tokenizer.decode(written, skip_special_tokens=True)


def test_chat_talks_to_the_server(folder_of, tmp_path):
    for module in ("fastapi", "uvicorn", "openai", "rich"):
        pytest.importorskip(module, reason=NEEDS)
    model, tokenizer = build_tiny("decoder"), tokenizer_of("decoder")
    folder = folder_of("decoder")
    answers = {text: chat_by_hand(model, text)[1] for text in words(20)}
    text = max(answers, key=lambda text: len(set(answers[text])))
    expected = tokenizer.decode(answers[text], skip_special_tokens=True)
    assert len(set(expected.split())) > 2
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"COLUMNS": "400", "NO_COLOR": "1"}
    with serve(folder, tmp_path) as address:
        command = [sys.executable, "-c", "from transformers.cli.transformers import app; app()", "chat"]
        command += [str(folder), address, "do_sample=False", f"max_new_tokens={WRITTEN}"]
        said = f"{text}\n!exit\n!exit\n"  # the first !exit answers "Continue generating?", if it asks
        options = {"input": said, "capture_output": True, "text": True, "timeout": 240}
        run = subprocess.run(command, cwd=tmp_path, env=environment, check=False, **options)
    assert run.returncode == 0, run.stderr[-3000:]
    assert " ".join(expected.split()) in re.sub(r"\s+", " ", run.stdout), run.stdout[-3000:]
