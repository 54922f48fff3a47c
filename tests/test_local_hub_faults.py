"""Tests of the local Hub under races and faults."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hub_client import MODEL, ONLY_LFS, UPLOAD, WEIGHTS, add, load, noise, status_of, write_folder
from hub_fixtures import client_env
from huggingface_hub.errors import HfHubHTTPError
from local_hub import Fault


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
