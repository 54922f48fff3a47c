"""What the tests of the push share: staged models, and what the local Hub holds afterwards."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_config
from hub_fixtures import client_env
from huggingface_hub import HfApi
from local_hub import LocalHub


pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')

from hf_transformer_block import TransformerBlockModel
from hf_transformer_block.hub import Place, Push, Pushed
from hf_transformer_block.staging import Staged, stage


ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts/push_to_hub.py"
REPOSITORY = "alice/small"
HERE = Place(REPOSITORY)
CARD = "---\nlicense: mit\nlibrary_name: transformers\n---\n# A card\n"
IDS = torch.arange(10).view(2, 5)
ONLY_LFS = pytest.mark.parametrize("hub", ["lfs"], indirect=True)


def staged_model(folder: Path, seed: int = 0, **options) -> Staged:
    """A staged tiny encoder; other seeds have other weights."""
    torch.manual_seed(seed)
    TransformerBlockModel(tiny_config("encoder")).save_pretrained(folder / f"saved-{seed}", **options)
    (folder / f"staged-{seed}").mkdir()
    return stage(folder / f"saved-{seed}", folder / f"staged-{seed}", CARD)


def api_of(hub: LocalHub, token: str = "hf_alice") -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def push(hub: LocalHub, staged: Staged, place: Place = HERE, token: str = "hf_alice") -> Pushed:
    """Pushes into a repository that is made if it is not there."""
    api = api_of(hub, token)
    if not api.repo_exists(REPOSITORY):
        api.create_repo(REPOSITORY)
    return Push(api, staged, place).run("Push the model")


def commits(hub: LocalHub, revision: str = "main") -> list[str]:
    return [commit.commit_id for commit in api_of(hub).list_repo_commits(REPOSITORY, revision=revision)]


def downloaded(hub: LocalHub, revision: str) -> dict[str, bytes]:
    """Returns the files of a revision, as they come back."""
    api = api_of(hub)
    names = set(api.list_repo_files(REPOSITORY, revision=revision)) - {".gitattributes"}
    return {
        name: Path(api.hf_hub_download(REPOSITORY, name, revision=revision)).read_bytes() for name in names
    }


def contents(staged: Staged) -> dict[str, bytes]:
    return {name: (staged.folder / name).read_bytes() for name in staged.files}


def run_script(monkeypatch, capsys, *words: object) -> tuple[str | None, str]:
    """Runs scripts/push_to_hub.py here; returns with what it exits, None for success, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["push_to_hub.py", *map(str, words)])
    try:
        runpy.run_path(str(ROOT / "scripts/push_to_hub.py"), run_name="__main__")
    except SystemExit as error:
        return error.code, capsys.readouterr().out
    return None, capsys.readouterr().out


def start(hub: LocalHub, folder: Path, *words: object, **environment: str) -> subprocess.CompletedProcess:
    """Runs a command in a folder, as alice, who has an empty cache in home-alice."""
    env = client_env(hub, folder / "home-alice", "hf_alice") | environment
    command = [str(word) for word in words]
    return subprocess.run(
        command, env=env, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def start_python(hub: LocalHub, folder: Path, *words: object, **environment: str):
    """Runs Python as `start` does."""
    return start(hub, folder, sys.executable, *words, **environment)
