"""Tests of the local Hub with the unmodified huggingface_hub: bytes, commits, rights, races and faults."""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from conftest import tiny_config
from hub_fixtures import TOKENS, client_env
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, constants, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from local_hub import Fault, LocalHub
from local_hub.cards import check_card
from torch.testing import assert_close

from hf_transformer_block import TransformerBlockModel


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


def test_pull_requests_are_merged(hub, api, tmp_path):
    for path in ("kept.txt", "gone.txt"):
        add(api, path, b"old")
    weights, other = noise(100_000), api_of(hub, "hf_bob")
    folder = write_folder(tmp_path / "folder", {WEIGHTS: weights, "new/a.txt": b"a"})
    proposal = other.upload_folder(
        repo_id=MODEL, folder_path=folder, create_pr=True, delete_patterns="gone.txt"
    )
    number = int(re.search(r"\d+$", api.get_discussion_details(MODEL, 1).git_reference)[0])
    assert load(api, WEIGHTS, revision=f"refs/pr/{number}") == weights
    assert not api.file_exists(MODEL, WEIGHTS)
    assert status_of(other.merge_pull_request, MODEL, number) == 403
    add(api, "kept.txt", b"new")
    add(other, "new/b.txt", b"b", revision="refs/pr/1")
    assert api.list_repo_refs(MODEL, include_pull_requests=True).pull_requests[0].name == "1"
    api.merge_pull_request(MODEL, number)
    assert api.list_repo_files(MODEL) == [".gitattributes", "kept.txt", WEIGHTS, "new/a.txt", "new/b.txt"]
    assert (load(api, "kept.txt"), load(api, WEIGHTS)) == (b"new", weights)
    details = api.get_discussion_details(MODEL, number)
    assert (details.status, details.merge_commit_oid) == ("merged", api.model_info(MODEL).sha)
    assert (details.author, details.title) == ("bob", proposal.commit_message)
    assert status_of(api.merge_pull_request, MODEL, number) == 409


def test_pull_requests_conflict(hub, api):
    add(api, "a.txt", b"ours or theirs")
    add(api_of(hub, "hf_bob"), "a.txt", b"theirs", create_pr=True)
    add(api, "a.txt", b"ours")
    assert api.get_discussion_details(MODEL, 1).conflicting_files == ["a.txt"]
    assert status_of(api.merge_pull_request, MODEL, 1) == 409
    assert load(api, "a.txt") == b"ours"


def test_branches_and_tags(hub, api):
    first = add(api, "a.txt", b"1")
    api.create_branch(MODEL, branch="try/it")
    api.create_tag(MODEL, tag="v1.0", revision=first)
    second = add(api, "a.txt", b"2", revision="try/it")
    found = api.list_repo_refs(MODEL)
    assert {branch.name: branch.target_commit for branch in found.branches} == {
        "main": first,
        "try/it": second,
    }
    assert {tag.name: tag.target_commit for tag in found.tags} == {"v1.0": first}
    assert [load(api, "a.txt", revision=name) for name in ("main", "try/it", "v1.0")] == [b"1", b"2", b"1"]
    assert status_of(add, api, "a.txt", b"3", revision="v1.0") == 400
    assert status_of(api.create_branch, MODEL, branch="try/it") == 409
    assert status_of(api.create_tag, MODEL, tag="v1.0") == 409
    assert status_of(api.delete_branch, MODEL, branch="main") == 403
    api.delete_branch(MODEL, branch="try/it")
    api.delete_tag(MODEL, tag="v1.0")
    assert len(api.list_repo_refs(MODEL).branches + api.list_repo_refs(MODEL).tags) == 1


@NEEDS_GIT
def test_git_reads_what_clients_wrote(hub, api, tmp_path):
    weights = noise(100_000)
    add(api, "deep/a.txt", b"a")
    add(api_of(hub, "hf_bob"), WEIGHTS, weights, create_pr=True)
    api.merge_pull_request(MODEL, 1)
    api.create_tag(MODEL, tag="v1")
    bare = hub.repos.get(MODEL).git.path
    assert git("--git-dir", bare, "fsck", "--full", "--strict") == ""
    clone = tmp_path / "clone"
    git("clone", "--quiet", bare, clone)
    assert git("-C", clone, "rev-parse", "HEAD", "v1").split() == [api.model_info(MODEL).sha] * 2
    assert len(git("-C", clone, "log", "--format=%an").split()) == 4
    assert (clone / "deep" / "a.txt").read_bytes() == b"a"
    assert f"oid sha256:{hashlib.sha256(weights).hexdigest()}\nsize 100000" in (clone / WEIGHTS).read_text()


def test_a_hub_continues_where_an_earlier_one_stopped(hub, api):
    weights = noise(100_000)
    add(api, WEIGHTS, weights)
    add(api_of(hub, "hf_bob"), "a.txt", b"a", create_pr=True)
    info = api.model_info(MODEL)
    hub.stop()
    with pytest.raises(Exception, match="Connection refused"):
        api.whoami()
    hub.start()
    api = api_of(hub)
    restarted = LocalHub(hub.root, TOKENS, xet=hub.xet)
    assert restarted.repos.get(MODEL).metadata == hub.repos.get(MODEL).metadata
    assert api.model_info(MODEL) == info
    assert load(api, WEIGHTS) == weights


@ONLY_LFS
def test_parts_are_joined_and_orphans_cleared(hub, api):
    hub.multipart_over, hub.part_size = 100_000, 30_000
    weights, incoming = noise(130_001), hub.large_files.incoming
    hub.faults.append(Fault("PUT", "/parts/.*/3", status=400))
    with pytest.raises(RuntimeError, match=WEIGHTS):
        add(api, WEIGHTS, weights)
    orphans = [path for path in incoming.rglob("*") if path.is_file()]
    assert sorted(path.name for path in orphans) == ["1", "2"]
    add(api, WEIGHTS, weights)
    assert [record.received for record in hub.requests("PUT /parts/")[3:]] == [30_000] * 4 + [10_001]
    assert not list(incoming.iterdir())
    assert load(api, WEIGHTS) == weights
    hub.faults.append(Fault("PUT", "/parts/.*/3", status=400))
    with pytest.raises(RuntimeError, match=WEIGHTS):
        add(api, WEIGHTS, noise(130_001))
    assert list(incoming.iterdir())
    assert not list(LocalHub(hub.root, TOKENS).large_files.incoming.iterdir())


@pytest.mark.parametrize("agreed", [False, True])
def test_racing_commits(hub, api, agreed):
    """Two commits arrive at once; only one may follow a parent on which both insist."""
    start, barrier = api.model_info(MODEL).sha, threading.Barrier(2)
    hub.faults.append(Fault("POST", "/commit/", hook=barrier.wait, times=2))
    parent = {"parent_commit": start} if agreed else {}
    with ThreadPoolExecutor() as pool:
        racers = [pool.submit(add, api, path, noise(1000), **parent) for path in ("a.bin", "b.bin")]
    errors = [error for racer in racers if (error := racer.exception())]
    made = [racer.result() for racer in racers if not racer.exception()]
    assert [error.response.status_code for error in errors] == [412] * agreed
    history = [commit.commit_id for commit in api.list_repo_commits(MODEL)]
    assert (len(history), set(history)) == (3 - agreed, {*made, start})
    assert sum(api.file_exists(MODEL, path) for path in ("a.bin", "b.bin")) == 2 - agreed


def test_hooks_act_in_the_middle(hub, api):
    """Another commit arrives while the Hub holds ours."""
    start = api.model_info(MODEL).sha
    hub.faults.append(Fault("POST", "/commit/", hook=lambda: add(api, "other.txt", b"other")))
    assert status_of(add, api, "a.txt", b"a", parent_commit=start) == 412
    assert [commit.title for commit in api.list_repo_commits(MODEL)] == ["Add other.txt", "initial commit"]


def test_uploads_outlive_a_failing_storage(hub, api):
    """Each of several clients meets a fault, all at once, as each waits before it tries again."""
    upload, faults = UPLOAD[hub.xet], [{"status": 503}, {"after_bytes": 40_000}]
    faults += [] if hub.xet else [{"status": 500}, {"status": 429}]  # hf_xet waits longer
    hub.faults.extend(Fault(*upload, **fault) for fault in faults)
    files = {f"{index}.safetensors": noise(100_000) for index in range(len(faults))}
    with ThreadPoolExecutor() as pool:
        list(pool.map(add, [api] * len(files), files, files.values()))
    requests = hub.requests(" ".join(upload))
    failed = sorted((record.status, record.received) for record in requests if record.status != 200)
    assert failed == sorted((fault.get("status", 0), fault.get("after_bytes", 0)) for fault in faults)
    sent = [record.received for record in requests if record.status == 200]
    assert len(sent) == len(files)
    assert min(sent) >= 100_000
    assert {path: load(api, path) for path in files} == files


@ONLY_LFS
def test_downloads_outlive_a_broken_connection(hub, api):
    weights = noise(100_000)
    add(api, WEIGHTS, weights)
    hub.faults.append(Fault("GET", "/lfs/", after_bytes=40_000))
    assert load(api, WEIGHTS) == weights
    assert len(hub.requests("GET /lfs/")) == 2


@ONLY_LFS
def test_a_commit_whose_answer_is_lost_is_made(hub, api, tmp_path):
    folder = write_folder(tmp_path / "folder", {WEIGHTS: noise(1000)})
    hub.faults.append(Fault("POST", "/commit/", lose_answer=True))
    with pytest.raises(Exception, match="disconnected"):
        api.upload_folder(repo_id=MODEL, folder_path=folder)
    made = api.model_info(MODEL).sha
    assert len(api.list_repo_commits(MODEL)) == 2
    assert api.upload_folder(repo_id=MODEL, folder_path=folder).oid == made


def test_faults_choose_their_requests_and_end(hub, api):
    hub.faults.append(Fault("POST", "/commit/", status=418, times=2))
    hub.faults.append(Fault("GET", "whoami", delay=0.2))
    assert api.whoami()["name"] == "alice"
    assert [status_of(add, api, "a.txt", b"a") for _ in range(2)] == [418, 418]
    add(api, "a.txt", b"a")
    assert [fault.times for fault in hub.faults] == [0, 0]
    hub.faults.append(Fault("GET", "whoami", hook=lambda: 1 / 0))
    with pytest.raises(HfHubHTTPError, match="501"):
        api.whoami()


def test_a_killed_upload_leaves_nothing(hub, api, tmp_path):
    weights = noise(3_000_000)
    code = (
        f"from huggingface_hub import HfApi; HfApi().upload_folder(repo_id={MODEL!r}, folder_path='folder')"
    )
    write_folder(tmp_path / "folder", {WEIGHTS: weights})
    before = api.model_info(MODEL).sha
    client = subprocess.Popen(
        [sys.executable, "-c", code], env=client_env(hub, tmp_path / "home", "hf_alice"), cwd=tmp_path
    )
    hub.faults.append(Fault(*UPLOAD[hub.xet], after_bytes=1_000_000, hook=client.kill))
    assert client.wait(60) == -9
    assert [record.received for record in hub.requests(" ".join(UPLOAD[hub.xet]))] == [1_000_000]
    assert api.model_info(MODEL).sha == before
    assert not hub.requests("POST .*/commit/")
    add(api, WEIGHTS, weights)
    assert not list(hub.large_files.incoming.iterdir())
    assert load(api, WEIGHTS) == weights


CARDS = {
    "license: Apache 2.0": "license",
    "license: [mit, MIT]": "license",
    "language: no": "language",
    "language: English": "language",
    "tags: {a: b}": "tags",
    "pipeline_tag: Text Generation": "pipeline_tag",
    "model-index: [{results: []}]": "model-index[0].name",
    "model-index: [{name: a, results: [{dataset: {name: b, type: b}, metrics: []}]}]": "task.type",
    "model-index: [{name: a, results: [{metrics: [{type: bleu}]}]}]": "metrics[0].value",
    "license: [": "YAML",
    "- mit": "mapping",
}


@pytest.mark.parametrize("metadata", CARDS)
def test_cards_with_mistakes(metadata):
    errors, _ = check_card(f"---\n{metadata}\n---\n# Title")
    assert any(CARDS[metadata] in error for error in errors)


def test_cards_are_checked_before_they_are_committed(hub, api):
    good = "---\nlicense: apache-2.0\nlanguage: [en, de]\npipeline_tag: translation\n---\n# Title"
    bad, before = good.replace("apache-2.0", "Apache 2.0"), api.model_info(MODEL).sha
    with pytest.raises(ValueError, match="must be one of the Hub's ids"):
        add(api, "README.md", bad.encode())
    with pytest.raises(ValueError, match="Apache 2.0"):
        ModelCard(bad).validate()
    assert api.model_info(MODEL).sha == before
    ModelCard(good).validate()
    add(api, "README.md", good.encode())
    assert load(api, "README.md").decode() == good
    assert check_card(good) == ([], [])
    assert check_card("# Title")[1] == ["empty or missing yaml metadata in repo card"]


def test_the_storage_refuses_tokens_of_the_hub(hub, api):
    weights = noise(1000)
    add(api, WEIGHTS, weights)
    place = ask(f"{hub.url}/{MODEL}/resolve/main/{WEIGHTS}")[1]["Location"]
    assert place.startswith(hub.storage_url)
    assert ask(place)[::2] == (200, weights)
    assert ask(place, Range="bytes=100-199")[::2] == (206, weights[100:200])
    assert ask(place, Range="bytes=1000-")[0] == 416
    assert ask(place, Authorization="Bearer hf_alice")[0] == 400
    assert ask(place, "PUT", weights)[0] == 403
    assert ask(place.split("?")[0])[0] == 403
    shards = ask(f"{hub.storage_url}/v1/shards", "POST", Authorization="Bearer hf_alice")
    assert shards[0] == (401 if hub.xet else 404)


def test_commits_of_other_clients_are_checked(hub, api):
    def commit(**change) -> int:
        lines = [{"key": "header", "value": {"summary": "Add"}}, change]
        url = f"{hub.url}/api/models/{MODEL}/commit/main"
        body = "\n".join(map(json.dumps, lines)).encode()
        return ask(url, "POST", body, Authorization="Bearer hf_alice")[0]

    for path in ("../a", "/a", "a//b", ".git/config", "a/./b"):
        assert commit(key="file", value={"path": path, "content": ""}) == 400
    if hub.xet:  # somebody promises another sha256
        add(api, WEIGHTS, noise(1000))
        recipe = next((hub.root / "xet" / "recipes").iterdir())
        shutil.copy(recipe, recipe.with_name(f"{'0' * 64}.json"))
    assert commit(key="lfsFile", value={"path": WEIGHTS, "oid": "0" * 64}) == 400
    assert not list(hub.large_files.incoming.iterdir())
    assert commit(key="rename", value={"path": "a"}) == 400
    assert commit(key="file", value={"path": ".gitattributes/a", "content": ""}) == 400
    assert commit(key="file", value={"path": "a", "content": ""}) == 200


@ONLY_LFS
def test_command_line(hub, tmp_path):
    command = [sys.executable, "-m", "local_hub", "--root", str(tmp_path / "other"), "--port", "0"]
    server = subprocess.Popen(
        [*command, "--token", "hf_carol=carol"],
        cwd=Path(__file__).parent,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        endpoint = server.stderr.readline().strip().removeprefix("HF_ENDPOINT=")
        assert HfApi(endpoint=endpoint, token="hf_carol").whoami()["name"] == "carol"
        assert server.stderr.readline() == "GET /api/whoami-v2 200\n"
    finally:
        server.terminate()
        server.wait(10)
        server.stderr.close()
