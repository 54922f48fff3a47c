"""The local Hub as a fixture, and the environment in which other processes reach it."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_config
from huggingface_hub import constants, hf_api
from local_hub import LocalHub

from hf_transformer_block import TransformerBlockModel


TOKENS = {"hf_alice": "alice", "hf_bob": "bob", "hf_reader": "alice:read"}


@pytest.fixture(params=["lfs", "xet"])
def hub(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalHub]:
    """Runs a Hub on either transport, and points the clients of this process to it, with an empty cache."""
    with LocalHub(tmp_path / "hub", TOKENS, xet=request.param == "xet") as hub:
        # huggingface_hub reads its environment only once
        settings = {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_TELEMETRY": True,
            "HF_HUB_DISABLE_XET": not hub.xet,
            "HF_HUB_OFFLINE": False,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        # huggingface_hub's functions are methods of an object with an endpoint; transformers keeps another
        monkeypatch.setattr(hf_api.api, "endpoint", hub.url)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1,localhost")
        yield hub


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a saved model and no records."""
    torch.manual_seed(0)
    TransformerBlockModel(tiny_config("encoder")).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a push would have slept; neither it nor the client does."""
    slept: list[float] = []
    for module, sleep in (
        ("hf_transformer_block.hub", slept.append),
        ("huggingface_hub.utils._http", lambda seconds: None),
    ):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(**{**vars(time), "sleep": sleep}))
    return slept


def client_env(hub: LocalHub, home: Path, token: str | None = None) -> dict[str, str]:
    """Returns the environment of a process that knows no other Hub, and keeps its cache in `home`."""
    foreign = re.compile(r"(HF|HUGGING_FACE|TRANSFORMERS)_|.*_proxy$", re.IGNORECASE)
    env = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    env |= {} if hub.xet else {"HF_HUB_DISABLE_XET": "1"}
    return env if token is None else {**env, "HF_TOKEN": token}
