"""Tests of the history of the local Hub: pull requests, branches, tags, git, and a second start."""

import hashlib
import re

import pytest
from hub_client import (
    MODEL,
    NEEDS_GIT,
    ONLY_LFS,
    WEIGHTS,
    add,
    api_of,
    git,
    load,
    noise,
    status_of,
    write_folder,
)
from hub_fixtures import TOKENS
from local_hub import Fault, LocalHub


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
