"""What the tests of the local Hub share: a client, its files, and requests that no client would send."""

import hashlib
import random
import shutil
import subprocess
from email.message import Message
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError
from local_hub import LocalHub


MODEL = "alice/model-v1.5"
WEIGHTS = "model.safetensors"
UPLOAD = {
    False: ("PUT", "/lfs/"),
    True: ("POST", "/v1/xorbs/"),
}  # how large files travel without and with Xet
ONLY_LFS = pytest.mark.parametrize("hub", ["lfs"], indirect=True)
ONLY_XET = pytest.mark.parametrize("hub", ["xet"], indirect=True)
NEEDS_GIT = pytest.mark.skipif(shutil.which("git") is None, reason="runs where git is installed")


def api_of(hub: LocalHub, token: str | bool = "hf_alice") -> HfApi:
    return HfApi(endpoint=hub.url, token=token)


def noise(size: int) -> bytes:
    return random.randbytes(size)


def add(api: HfApi, path: str, content: bytes, **options) -> str:
    """Commits one file and returns the commit."""
    operations = [CommitOperationAdd(path, content)]
    return api.create_commit(MODEL, operations, commit_message=f"Add {path}", **options).oid


def load(api: HfApi, path: str, **options) -> bytes:
    """Loads a file into an empty cache."""
    shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)
    return Path(api.hf_hub_download(MODEL, path, **options)).read_bytes()


def status_of(action, *arguments, **options) -> int:
    """Returns the status of the error that a client raises."""
    with pytest.raises(HfHubHTTPError) as error:
        action(*arguments, **options)
    return error.value.response.status_code


def ask(url: str, method: str = "GET", body: bytes = b"", **headers: str) -> tuple[int, Message, bytes]:
    """Sends a request as no client would; returns status, headers and body of the answer."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc)
    connection.request(method, f"{parts.path}?{parts.query}", body, headers)
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def git(*words: str | Path) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


@pytest.fixture
def api(hub):
    """The owner of an empty public model."""
    api = api_of(hub)
    api.create_repo(MODEL)
    return api
