"""Tests of the local Hub with the unmodified huggingface_hub: bytes, folders and rights."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_config
from hub_client import (
    MODEL,
    ONLY_XET,
    UPLOAD,
    WEIGHTS,
    add,
    api_of,
    ask,
    git_oid,
    load,
    noise,
    status_of,
    write_folder,
)
from hub_fixtures import TOKENS, client_env
from huggingface_hub import CommitOperationAdd, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch.testing import assert_close

from hf_transformer_block import TransformerBlockModel


def test_files_return_as_they_were(hub, api, tmp_path):
    files = {
        "README.md": "---\nlicense: mit\ntags: [tiny]\n---\nHöhe".encode(),
        "config.json": b'{"model_type": "x", "auto_map": {}}',
        "deep/er/ünicode name.txt": b"text\r\n",
        "empty.txt": b"",
        WEIGHTS: noise(3_000_000),
        "more/without-suffix": b"\0" * 70_000,
    }
    commit = api.upload_folder(repo_id=MODEL, folder_path=write_folder(tmp_path / "folder", files)).oid
    snapshot = Path(api.snapshot_download(MODEL))
    assert snapshot.name == commit
    assert {path: (snapshot / path).read_bytes() for path in files} == files
    assert {path: load(api, path) for path in files} == files
    info = api.model_info(MODEL, files_metadata=True)
    assert (info.sha, info.private, info.card_data.license) == (commit, False, "mit")
    assert {"transformers", "safetensors", "x", "tiny", "custom_code", "license:mit"} == set(info.tags)
    found = {file.rfilename: file for file in info.siblings if file.rfilename != ".gitattributes"}
    assert found.keys() == files.keys()
    large = {path for path, file in found.items() if file.lfs}
    assert large == {WEIGHTS, "more/without-suffix"}
    for path, content in files.items():
        assert found[path].size == len(content)
        if path in large:
            assert found[path].lfs.sha256 == hashlib.sha256(content).hexdigest()
        else:
            assert found[path].blob_id == git_oid(content)
    used = [bool(hub.requests(f"^{method} {path}")) for method, path in UPLOAD.values()]
    assert used == [not hub.xet, hub.xet]
    stored = [record.token for record in hub.log if record.storage]
    assert stored
    assert not TOKENS.keys() & set(stored)


def test_unchanged_files_do_not_travel_again(hub, api, tmp_path):
    folder = write_folder(tmp_path / "folder", {WEIGHTS: noise(100_000), "a.txt": b"a"})
    first = api.upload_folder(repo_id=MODEL, folder_path=folder).oid
    hub.log.clear()
    assert api.upload_folder(repo_id=MODEL, folder_path=folder).oid == first
    assert not hub.requests("/commit/|PUT /lfs/")


@ONLY_XET
def test_chunks_travel_once(hub, api):
    first = noise(2_000_000)
    second = first[:900_000] + noise(300_000) + first[900_000:]
    for path, content in ((WEIGHTS, first), ("longer.safetensors", second)):
        add(api, path, content)
    sent = [record.received for record in hub.requests("POST /v1/xorbs/")]
    assert (len(sent), sent[0] > 2_000_000, 300_000 < sent[1] < 900_000) == (2, True, True)
    assert (load(api, WEIGHTS), load(api, "longer.safetensors")) == (first, second)


def test_processes_load_by_environment(hub, api, tmp_path):
    weights = noise(200_000)
    api.update_repo_settings(MODEL, visibility="private")
    add(api, WEIGHTS, weights)
    code = f"from huggingface_hub import hf_hub_download; print(hf_hub_download({MODEL!r}, {WEIGHTS!r}))"
    env = client_env(hub, tmp_path / "home", "hf_reader")
    for offline in ("0", "1"):
        hub.log.clear()
        command = [sys.executable, "-c", code]
        environment = {**env, "HF_HUB_OFFLINE": offline}
        path = subprocess.check_output(command, env=environment, stdin=subprocess.DEVNULL, text=True).strip()
        assert Path(path).read_bytes() == weights
        assert bool(hub.log) == (offline == "0")
    assert Path(path).is_relative_to(tmp_path / "home")


def test_transformers_pushes_and_loads(hub, tmp_path):
    model = TransformerBlockModel(tiny_config())
    model.push_to_hub(MODEL, token="hf_alice", private=True)
    again = TransformerBlockModel.from_pretrained(MODEL, token="hf_reader")
    assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    with pytest.raises(OSError, match="private repository"):
        TransformerBlockModel.from_pretrained(MODEL, token=False, cache_dir=tmp_path / "other cache")


def test_commits_need_the_parent_they_expect(hub, api):
    start = api.model_info(MODEL).sha
    first = add(api, "a.txt", b"1", parent_commit=start)
    assert status_of(add, api, "a.txt", b"2", parent_commit=start) == 412
    second = add(api, WEIGHTS, noise(1000), parent_commit=first)
    api.delete_file("a.txt", MODEL)
    history = api.list_repo_commits(MODEL)
    assert [commit.title for commit in history[1:]] == [f"Add {WEIGHTS}", "Add a.txt", "initial commit"]
    assert [commit.commit_id for commit in history[1:]] == [second, first, start]
    assert load(api, "a.txt", revision=first) == b"1"
    assert not api.file_exists(MODEL, "a.txt")
    assert status_of(api.delete_folder, "none", MODEL) == 404


def test_missing_files_are_remembered(hub, api):
    with pytest.raises(EntryNotFoundError):
        load(api, "none.txt")
    assert try_to_load_from_cache(MODEL, "none.txt") not in (None, "")
    with pytest.raises(RevisionNotFoundError):
        load(api, "none.txt", revision="none")


def test_folders_and_paths_are_listed_in_pages(hub, api, monkeypatch):
    paths = ["a.txt", "b/c.txt", "b/d/e.txt", "f.bin"]
    api.create_commit(MODEL, [CommitOperationAdd(path, b"x") for path in paths], commit_message="Add")
    monkeypatch.setattr("local_hub.read_routes.PAGE", 2)
    assert api.list_repo_files(MODEL) == [".gitattributes", *paths]
    assert [entry.path for entry in api.list_repo_tree(MODEL, "b")] == ["b/c.txt", "b/d"]
    assert len(hub.requests("/tree/.*cursor=")) == 3  # of seven entries
    found = api.get_paths_info(MODEL, ["f.bin", "b/d", "none"])
    assert [(entry.path, hasattr(entry, "size")) for entry in found] == [("f.bin", True), ("b/d", False)]


def test_gitignore_is_honoured(hub, api, tmp_path):
    files = {".gitignore": b"*.log\nruns/\n# c.txt\n", "a.log": b"", "runs/b.txt": b"", "c.txt": b"c"}
    api.upload_folder(repo_id=MODEL, folder_path=write_folder(tmp_path / "folder", files))
    assert api.list_repo_files(MODEL) == [".gitattributes", ".gitignore", "c.txt"]


def test_strangers_see_nothing_private(hub, api):
    add(api, "a.txt", b"a")
    api.update_repo_settings(MODEL, visibility="private")
    assert load(api_of(hub, "hf_reader"), "a.txt") == b"a"
    for token, status in ((False, 401), ("hf_bob", 404)):
        with pytest.raises(RepositoryNotFoundError):
            api_of(hub, token).model_info(MODEL)
        assert status_of(load, api_of(hub, token), "a.txt") == status
    with pytest.raises(HfHubHTTPError, match="Invalid credentials in Authorization header"):
        api_of(hub, "hf_wrong").model_info(MODEL)


def test_only_owners_with_a_token_to_write_may_write(hub, api):
    add(api, "a.txt", b"a")
    before = api.list_repo_refs(MODEL)
    for token, status in (("hf_bob", 403), ("hf_reader", 403), ("hf_wrong", 401), (False, 401)):
        other = api_of(hub, token)
        for content in (b"text", noise(1000) + b"\0"):
            assert status_of(add, other, "b", content) == status
        assert status_of(other.create_branch, MODEL, branch="b") == status
        assert status_of(other.delete_repo, MODEL) == status
        assert status_of(other.create_repo, "alice/other") == status
    assert status_of(add, api_of(hub, "hf_reader"), "b", b"b", create_pr=True) == 403
    assert api.list_repo_refs(MODEL) == before
    assert not api.repo_exists("alice/other")
    roles = [
        api_of(hub, token).whoami()["auth"]["accessToken"]["role"] for token in ("hf_alice", "hf_reader")
    ]
    assert roles == ["write", "read"]


def test_gated_files_are_for_the_owner(hub, api):
    add(api, "a.txt", b"a")
    api.update_repo_settings(MODEL, gated="manual")
    api.auth_check(MODEL)
    assert load(api, "a.txt") == b"a"
    for token in (False, "hf_bob"):
        assert api_of(hub, token).model_info(MODEL).gated == "manual"
        with pytest.raises(GatedRepoError):
            load(api_of(hub, token), "a.txt")
        with pytest.raises(GatedRepoError):
            api_of(hub, token).auth_check(MODEL)


def test_repositories_are_created_once_and_deleted(hub, api):
    assert status_of(api.create_repo, MODEL) == 409
    assert api.create_repo(MODEL, private=True, exist_ok=True).repo_id == MODEL
    assert not api.model_info(MODEL).private  # as on the Hub
    for name in ("x" * 97, "a--b", ".a", "a.git", "a/b"):
        body = json.dumps({"name": name}).encode()
        assert ask(f"{hub.url}/api/repos/create", "POST", body, Authorization="Bearer hf_alice")[0] == 400
    api.delete_repo(MODEL)
    assert not api.repo_exists(MODEL)
    api.create_repo(MODEL)
    assert len(api.list_repo_commits(MODEL)) == 1
