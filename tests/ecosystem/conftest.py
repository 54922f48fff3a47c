"""What the tests of the ecosystem share: tiny folders of every head, texts, and fresh processes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import remote_loader
import torch
from conftest import pad, tiny_tokenizer
from tiny import build, by_hand, weaken
from torch import nn
from transformers import PreTrainedTokenizerFast

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForMaskedLM,
    TransformerBlockForSequenceClassification,
)


for name in ("WANDB_DIR", "TRACKIO_DIR"):  # the trackers write into the tests' own home
    os.environ.setdefault(name, os.environ["HF_HOME"])
os.environ["WANDB_MODE"] = "offline"
os.environ["DO_NOT_TRACK"] = "1"

WRITTEN = 8  # tokens
# name of a folder: class, shape, preset, the auto class that loads it
MODELS = {
    "decoder": (TransformerBlockForCausalLM, "decoder", "modern", "AutoModelForCausalLM"),
    "encoder": (TransformerBlockForMaskedLM, "encoder", "vaswani", "AutoModelForMaskedLM"),
    "encoder-decoder": (
        TransformerBlockForConditionalGeneration,
        "encoder-decoder",
        "modern",
        "AutoModelForSeq2SeqLM",
    ),
    "classifier": (
        TransformerBlockForSequenceClassification,
        "encoder",
        "vaswani",
        "AutoModelForSequenceClassification",
    ),
    "reward": (
        TransformerBlockForSequenceClassification,
        "decoder",
        "modern",
        "AutoModelForSequenceClassification",
    ),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ 'w6 ' if message['role'] == 'user' else 'w7 ' }}"
    "{{ message['content'] + ' ' + eos_token + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'w7 ' }}{% endif %}"
)


def build_tiny(name: str, **kwargs) -> nn.Module:
    """Returns a model of `MODELS` whose weights all matter and whose tokens vary."""
    head, shape, preset, _ = MODELS[name]
    torch.manual_seed(31)
    # a decoder with tied weights repeats its last token; the encoder-decoder stays tied
    own = {"decoder": {"tie_word_embeddings": False}, "reward": {"num_labels": 1}}.get(name, {})
    values = {"initializer_range": 0.3, **own, **kwargs}
    return weaken(build(head, shape, preset, **values))


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of single words, which pads where the model of `MODELS` wants it."""
    side = "left" if name == "decoder" else "right"
    tokenizer = tiny_tokenizer(model_max_length=64, padding_side=side)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory) -> Callable[..., Path]:
    """Returns the folder of a model of `MODELS`, saved with its tokenizer when first asked for."""

    @cache
    def folder_of(name: str, **kwargs) -> Path:
        folder = tmp_path_factory.mktemp(name) / f"tiny-{name}"
        build_tiny(name, **kwargs).save_pretrained(folder)
        tokenizer_of(name).save_pretrained(folder)
        return folder

    return folder_of


def words(count: int, longest: int = 9) -> list[str]:
    """Returns random texts, of 3 to `longest` words that are in the vocabulary."""
    lengths = torch.randint(3, longest + 1, (count,)).tolist()
    return [" ".join(f"w{index}" for index in torch.randint(8, 61, (length,))) for length in lengths]


def encode(name: str, texts: list[str]) -> dict[str, torch.Tensor]:
    """Returns padded ids and their mask."""
    tokenizer = tokenizer_of(name)
    return pad([torch.tensor(tokenizer(text)["input_ids"]) for text in texts], tokenizer.padding_side)


def continue_by_hand(model: nn.Module, ids: list[int]) -> list[int]:
    """Returns the `WRITTEN` most likely tokens of a decoder, up to the end token."""
    written, end = by_hand(model, torch.tensor(ids))[:WRITTEN].tolist(), model.config.eos_token_id
    return written[: written.index(end) + 1] if end in written else written


def load_afresh(tmp_path: Path, folder: Path, auto: str, inputs: dict[str, torch.Tensor]) -> dict:
    """Returns what a process without our package finds in a folder: "parameters", "outputs", "class", ..."""
    # not `strangers_process`, for which deprecations are errors: where hqq is installed, transformers imports
    # it, and it a part of torch that warns
    jobs, results = tmp_path / "jobs.json", tmp_path / "results.pt"
    arguments = {"inputs": {name: value.tolist() for name, value in inputs.items()}}
    arguments |= {"folder": str(folder), "autos": [auto]}
    jobs.write_text(json.dumps({"loaded": ["load", arguments]}))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    line = [sys.executable, remote_loader.__file__, str(jobs), str(results)]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = torch.load(results, weights_only=False)
    loaded = found["found"]["loaded"]
    assert "error" not in loaded, loaded["error"]
    assert found["attempts"] == []
    report = loaded[auto]
    assert not report["missing_keys"], report["missing_keys"]
    assert not report["unexpected_keys"], report["unexpected_keys"]
    return report
