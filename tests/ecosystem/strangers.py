"""How tests load a folder's own code in this process, where the package is known and would be preferred."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_transformer_block import TransformerBlockConfig


@contextmanager
def as_stranger() -> Iterator[None]:
    """Lets transformers forget the package, so that `trust_remote_code=True` takes the folder's code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(CONFIG_MAPPING._extra_content, TransformerBlockConfig.model_type)
        yield


def assert_remote(model: nn.Module) -> None:
    assert type(model).__module__.startswith("transformers_modules."), type(model)


def load_remote(auto: str, folder: Path, **kwargs) -> nn.Module:
    """Loads a folder through an auto class, with the folder's code."""
    with as_stranger():
        model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **kwargs)
    assert_remote(model)
    return model
