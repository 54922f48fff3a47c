"""What every test shares: seeds, quiet and offline libraries, deprecations as errors, and tiny models."""

import importlib.util
import os
import random
import shutil
import tempfile
from pathlib import Path


# before torch and huggingface_hub are imported, which read them once; every pytest worker has its own cache
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_transformer_block-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
if "PYTEST_XDIST_WORKER" in os.environ:  # a core for each worker
    os.environ["OMP_NUM_THREADS"] = "1"

import logging
import warnings
from contextlib import contextmanager

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.testing import assert_close

from hf_transformer_block import (
    TransformerBlockConfig,
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForMaskedLM,
    TransformerBlockForQuestionAnswering,
    TransformerBlockForSequenceClassification,
    TransformerBlockForTokenClassification,
    TransformerBlockModel,
)


pytest_plugins = ["hub_client", "hub_fixtures"]
SHAPES = ("encoder", "decoder", "encoder-decoder")
POSITIONS = ("sinusoidal", "learned", "rotary", "none")
# every class in every shape that fits it
MODELS = (
    *((TransformerBlockModel, shape) for shape in SHAPES),
    (TransformerBlockForCausalLM, "decoder"),
    (TransformerBlockForMaskedLM, "encoder"),
    (TransformerBlockForConditionalGeneration, "encoder-decoder"),
    *(
        (head, shape)
        for head in (
            TransformerBlockForSequenceClassification,
            TransformerBlockForTokenClassification,
            TransformerBlockForQuestionAnswering,
        )
        for shape in ("encoder", "decoder")
    ),
)
LM_HEADS = MODELS[3:6]
GENERATIVE = (LM_HEADS[0], LM_HEADS[2])
READERS = {
    "AutoModelForSequenceClassification": "TransformerBlockForSequenceClassification",
    "AutoModelForTokenClassification": "TransformerBlockForTokenClassification",
    "AutoModelForQuestionAnswering": "TransformerBlockForQuestionAnswering",
}
# the same by name, and by the auto class that loads it
CLASSES = {
    "encoder": {
        "AutoModel": "TransformerBlockModel",
        "AutoModelForMaskedLM": "TransformerBlockForMaskedLM",
        **READERS,
    },
    "decoder": {
        "AutoModel": "TransformerBlockModel",
        "AutoModelForCausalLM": "TransformerBlockForCausalLM",
        **READERS,
    },
    "encoder-decoder": {
        "AutoModel": "TransformerBlockModel",
        "AutoModelForSeq2SeqLM": "TransformerBlockForConditionalGeneration",
    },
}
LANGUAGE_HEADS = {
    "encoder": "AutoModelForMaskedLM",
    "decoder": "AutoModelForCausalLM",
    "encoder-decoder": "AutoModelForSeq2SeqLM",
}


def model_name(value) -> str | None:
    """Names the cases of `MODELS` in pytest's output."""
    return value.__name__.removeprefix("TransformerBlock") if isinstance(value, type) else None


EACH_MODEL = pytest.mark.parametrize(("model_class", "shape"), MODELS, ids=model_name)
EACH_LM_HEAD = pytest.mark.parametrize(("head", "shape"), LM_HEADS, ids=model_name)
EACH_GENERATIVE = pytest.mark.parametrize(("head", "shape"), GENERATIVE, ids=model_name)


def pytest_configure(config):
    """Makes a deprecation which our own code causes an error."""
    config.addinivalue_line(
        "markers", "logs_deprecation: old names are used, by the test or by transformers itself"
    )
    for category in ("FutureWarning", "DeprecationWarning"):
        config.addinivalue_line("filterwarnings", f"error::{category}:hf_transformer_block")
    transformers.utils.logging.disable_progress_bar()


def pytest_unconfigure(config):
    """Removes this worker's cache."""
    shutil.rmtree(os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture(autouse=True)
def seeded():
    """Draws the same random numbers in every test, whichever run before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def library_logs(request):
    """Collects what transformers warns about in its log; fails a test that used something deprecated."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)
    if not request.node.get_closest_marker("logs_deprecation"):
        assert not [message for message in messages if "deprecated" in message]


def load_script(name: str):
    """Returns a file of scripts/ as a module."""
    path = Path(__file__).parents[1] / "scripts" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# no dropout, and weights large enough to make tokens matter
TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "initializer_range": 0.2,
}


def tiny_config(architecture: str = "decoder", **kwargs) -> TransformerBlockConfig:
    """Returns a small configuration."""
    return TransformerBlockConfig(**{"architecture": architecture, **TINY, **kwargs})


def tiny_preset(preset: str, shape: str, **kwargs) -> TransformerBlockConfig:
    """Returns a small configuration of `TransformerBlockConfig`'s presets."""
    return getattr(TransformerBlockConfig, preset)(**{"architecture": shape, **TINY, **kwargs})


def tiny_tokenizer(**kwargs) -> transformers.PreTrainedTokenizerFast:
    """Returns a tokenizer of single words, "w5" to "w60", for `tiny_config`'s vocabulary."""
    vocabulary = ["<pad>", "<s>", "</s>", "<mask>", "<unk>", *(f"w{index}" for index in range(5, 61))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "mask", "unk")}
    special |= {"bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special, **kwargs)


def tiny_tokens(*shape: int) -> torch.Tensor:
    """Returns random ids of `tiny_config`'s vocabulary which are not special."""
    return torch.randint(3, 61, shape)


def tiny_inputs(config: TransformerBlockConfig, batch: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """Returns ids for any shape: in an encoder-decoder the target is two tokens shorter than the source."""
    inputs = {"input_ids": tiny_tokens(batch, length)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tiny_tokens(batch, length - 2)
    return inputs


def tiny_labels(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns labels that fit a head."""
    batch, length = inputs["input_ids"].shape
    if isinstance(model, TransformerBlockForSequenceClassification):
        return {"labels": torch.randint(0, model.config.num_labels, (batch,))}
    if isinstance(model, TransformerBlockForTokenClassification):
        return {"labels": torch.randint(0, model.config.num_labels, (batch, length))}
    if isinstance(model, TransformerBlockForQuestionAnswering):
        return {name: torch.randint(0, length, (batch,)) for name in ("start_positions", "end_positions")}
    return {"labels": tiny_tokens(*inputs.get("decoder_input_ids", inputs["input_ids"]).shape)}


def pad(rows: list[torch.Tensor], side: str, pad_id: int = 0) -> dict[str, torch.Tensor]:
    """Returns a batch of ids (B, L) and its mask, from rows of unequal length."""
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), pad_id), torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        where = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[index, where], mask[index, where] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def output_of(model: nn.Module, inputs: dict) -> torch.Tensor:
    return model.eval()(**inputs, return_dict=False)[0]


@contextmanager
def attending(model: nn.Module, backend: str):
    """Switches the backend; without a compiler torch computes flex attention step by step, and warns."""
    model.set_attn_implementation(backend)
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        if backend == "flex_attention":
            warnings.simplefilter("ignore")
        yield
    model.set_attn_implementation("sdpa")


def checkpoint(model: nn.Module, **kwargs) -> None:
    """Switches checkpointing on by the installed library's name."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(
            **({"activation_checkpointing_kwargs": kwargs} if kwargs else {})
        )
    else:
        model.gradient_checkpointing_enable(**({"gradient_checkpointing_kwargs": kwargs} if kwargs else {}))


def step(model: nn.Module, inputs: dict, **kwargs) -> dict[str, torch.Tensor]:
    """Returns the loss and all gradients of one backward."""
    model.zero_grad()
    loss = model(**inputs, **kwargs).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }


def assert_same_step(ours: dict, theirs: dict, atol: float = 1e-6) -> None:
    assert len(ours) > 1
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert_close(gradient, theirs[name], rtol=1e-5, atol=atol, msg=name)
