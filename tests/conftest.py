"""What every test shares: seeds, quiet and offline libraries, deprecations as errors, and tiny models."""

import os
import random
import shutil
import tempfile


# before torch and huggingface_hub are imported, which read them once; every pytest worker has its own cache
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="hf_transformer_block-tests-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
if "PYTEST_XDIST_WORKER" in os.environ:  # a core for each worker
    os.environ["OMP_NUM_THREADS"] = "1"

import logging

import pytest
import torch
import transformers

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


def model_name(value) -> str | None:
    """Names the cases of `MODELS` in pytest's output."""
    return value.__name__.removeprefix("TransformerBlock") if isinstance(value, type) else None


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


def tiny_config(architecture: str = "decoder", **kwargs) -> TransformerBlockConfig:
    """Returns a small configuration without dropout, with weights large enough to make tokens matter."""
    values = {
        "architecture": architecture,
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "initializer_range": 0.2,
    }
    return TransformerBlockConfig(**{**values, **kwargs})


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
