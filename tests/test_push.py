"""Tests of the one commit that a push is, on both transports: faults, races, requests, and what is loaded."""

import threading
from dataclasses import replace

import pytest
import torch
from local_hub import Fault
from pushing import (
    CARD,
    HERE,
    IDS,
    ONLY_LFS,
    REPOSITORY,
    api_of,
    commits,
    contents,
    downloaded,
    push,
    staged_model,
)
from transformers import AutoModel

from hf_transformer_block import TransformerBlockModel
from hf_transformer_block.hub import Pushed
from hf_transformer_block.staging import Staged


pytestmark = pytest.mark.usefixtures("waits")


def test_a_push_is_one_commit_of_the_staged_files_and_a_second_one_none(hub, tmp_path):
    staged = staged_model(tmp_path)
    pushed = push(hub, staged)
    assert pushed.is_new
    assert commits(hub)[0] == pushed.commit
    assert len(commits(hub)) == 2  # the Hub's own "initial commit" is the other one
    assert downloaded(hub, pushed.commit) == contents(staged)
    assert push(hub, staged) == replace(pushed, is_new=False)
    assert len(commits(hub)) == 2


def test_files_of_an_earlier_push_go_and_those_of_others_stay(hub, tmp_path):
    first = push(hub, staged_model(tmp_path, 1, max_shard_size="20kB"))
    api_of(hub).upload_file(path_or_fileobj=b"mine", path_in_repo="notes.txt", repo_id=REPOSITORY)
    staged = staged_model(tmp_path, 2)
    second = push(hub, staged)
    assert downloaded(hub, second.commit) == contents(staged) | {"notes.txt": b"mine"}
    assert "model.safetensors.index.json" in downloaded(hub, first.commit)  # history keeps them
    assert len(commits(hub)) == 4


def test_each_revision_loads_its_own_weights(hub, tmp_path):
    api, pushes = api_of(hub), []
    for seed in (1, 2):
        pushes.append(push(hub, staged_model(tmp_path, seed)))
    api.create_tag(REPOSITORY, tag="v1", revision=pushes[0].commit)
    for revision, seed in ((pushes[0].commit, 1), ("v1", 1), (pushes[1].commit, 2), ("main", 2)):
        loaded = AutoModel.from_pretrained(REPOSITORY, revision=revision, trust_remote_code=True)
        original = TransformerBlockModel.from_pretrained(tmp_path / f"saved-{seed}")
        assert torch.equal(loaded(IDS).last_hidden_state, original(IDS).last_hidden_state), revision


def test_a_pull_request_to_somebody_else_changes_nothing_until_it_is_merged(hub, tmp_path):
    first, staged = push(hub, staged_model(tmp_path, 1)), staged_model(tmp_path, 2)
    place = replace(HERE, create_pr=True)
    pushed = push(hub, staged, place, token="hf_bob")
    assert pushed.revision == "refs/pr/1"
    assert commits(hub)[0] == first.commit
    loaded = AutoModel.from_pretrained(REPOSITORY, revision="refs/pr/1", trust_remote_code=True)
    original = TransformerBlockModel.from_pretrained(tmp_path / "saved-2")
    assert torch.equal(loaded(IDS).last_hidden_state, original(IDS).last_hidden_state)
    assert push(hub, staged, place, token="hf_bob") == replace(pushed, is_new=False)  # no second one
    api_of(hub).merge_pull_request(REPOSITORY, 1)
    assert downloaded(hub, "main") == contents(staged)
    push(hub, staged_model(tmp_path, 3))
    again = push(hub, staged, place, token="hf_bob")  # the merged request is no offer any more
    assert (again.revision, again.is_new) == ("refs/pr/2", True)
    own = push(hub, staged, place)  # nor is somebody else's request ours
    assert (own.revision, own.is_new) == ("refs/pr/3", True)


def test_a_branch_leaves_main_alone(hub, tmp_path):
    first = push(hub, staged_model(tmp_path, 1))
    api_of(hub).create_branch(REPOSITORY, branch="next")
    second = push(hub, staged_model(tmp_path, 2), replace(HERE, branch="next"))
    assert commits(hub)[0] == first.commit
    assert commits(hub, "next") == [second.commit, *commits(hub)]


def test_the_card_alone_leaves_every_other_file(hub, tmp_path):
    staged = staged_model(tmp_path)
    push(hub, staged)
    (staged.folder / "README.md").write_text(f"{CARD}More.\n", encoding="utf-8")
    uploads = len(hub.requests("(PUT /lfs|POST /v1/xorbs)"))
    card = Staged(staged.folder, {"README.md": 1}, [], is_whole=False)
    pushed = push(hub, card)
    assert downloaded(hub, pushed.commit) == contents(staged)
    assert len(hub.requests("(PUT /lfs|POST /v1/xorbs)")) == uploads
    assert push(hub, card) == replace(pushed, is_new=False)


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("path", ["/preupload/", "/commit/", "/api/models/alice/small/tree"])
def test_a_hub_that_fails_for_a_while_gets_the_push_once(hub, tmp_path, status, path):
    staged = staged_model(tmp_path)
    api_of(hub).create_repo(REPOSITORY)
    method = "GET" if "tree" in path else "POST"
    hub.faults.append(Fault(method, path, status=status, times=2))
    pushed = push(hub, staged)
    assert hub.faults[0].times == 0
    assert len(commits(hub)) == 2
    assert downloaded(hub, pushed.commit) == contents(staged)


def test_a_connection_that_drops_in_an_upload_is_made_anew(hub, tmp_path):
    staged = staged_model(tmp_path)
    method, path = ("POST", "/v1/xorbs/") if hub.xet else ("PUT", "/lfs/")
    hub.faults.append(Fault(method, path, after_bytes=1000))
    pushed = push(hub, staged)
    assert hub.faults[0].times == 0
    assert downloaded(hub, pushed.commit) == contents(staged)
    assert len(commits(hub)) == 2


@pytest.mark.parametrize("create_pr", [False, True])
def test_a_commit_whose_answer_is_lost_is_found_and_not_made_again(hub, tmp_path, create_pr):
    staged = staged_model(tmp_path)
    api_of(hub).create_repo(REPOSITORY)
    hub.faults.append(Fault("POST", "/commit/", lose_answer=True))
    pushed = push(hub, staged, replace(HERE, create_pr=create_pr))
    assert pushed.is_new
    assert pushed.revision == ("refs/pr/1" if create_pr else "main")
    assert len(commits(hub, pushed.revision)) == 2
    assert len(commits(hub)) == (1 if create_pr else 2)
    assert downloaded(hub, pushed.commit) == contents(staged)


def test_a_hub_that_fails_for_good_gets_nothing_and_it_is_said(hub, tmp_path, waits):
    staged = staged_model(tmp_path)
    api_of(hub).create_repo(REPOSITORY)
    hub.faults.append(Fault("POST", "/commit/", status=503, times=99))
    with pytest.raises(ValueError, match=r"failed: .*503.*; nothing was pushed: run again, which is safe"):
        push(hub, staged)
    assert len(commits(hub)) == 1
    assert waits == [1, 2, 4, 8]
    hub.faults.clear()
    assert push(hub, staged).is_new


def test_an_upload_that_is_refused_is_told_in_a_sentence(hub, tmp_path):
    staged = staged_model(tmp_path)
    api_of(hub).create_repo(REPOSITORY)
    hub.faults.append(Fault("POST" if hub.xet else "PUT", "/v1/xorbs/|/lfs/", status=403, times=99))
    with pytest.raises(ValueError, match="the push to alice/small failed: .*; nothing was pushed") as error:
        push(hub, staged)
    assert "\n" not in str(error.value)
    assert len(commits(hub)) == 1


@ONLY_LFS
def test_a_commit_that_is_forbidden_says_what_to_look_at(hub, tmp_path, waits):
    staged = staged_model(tmp_path)
    api_of(hub).create_repo(REPOSITORY)
    hub.faults.append(Fault("POST", "/commit/", status=403, times=99))
    with pytest.raises(ValueError, match="nothing was pushed: check what the token may do"):
        push(hub, staged)
    assert waits == []


@ONLY_LFS
def test_a_card_that_the_hub_refuses_is_told_in_a_line(hub, tmp_path):
    staged = staged_model(tmp_path)
    (staged.folder / "README.md").write_text("---\nlicense: Apache 2.0\n---\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match="the Hub refuses the card, so nothing was pushed: .*license"
    ) as error:
        push(hub, staged)
    assert "\n" not in str(error.value)


def test_a_hub_that_goes_away_leaves_the_push_unknown(hub, tmp_path):
    staged = staged_model(tmp_path)
    api_of(hub).create_repo(REPOSITORY)

    def leave():
        hub.faults.append(Fault("GET", "/api/models", status=500, times=99))

    hub.faults.append(Fault("POST", "/commit/", lose_answer=True, hook=leave))
    with pytest.raises(ValueError, match="whether it was made is unknown, for the Hub does not answer"):
        push(hub, staged)
    hub.faults.clear()
    assert not push(hub, staged).is_new  # it had been made
    assert len(commits(hub)) == 2


def test_of_two_pushes_at_once_one_wins_and_the_other_says_so(hub, tmp_path):
    api_of(hub).create_repo(REPOSITORY)
    hub.faults.append(Fault("POST", "/commit/", hook=threading.Barrier(2).wait, times=2))
    results = []

    def push_one(staged: Staged) -> None:
        try:
            results.append(push(hub, staged))
        except ValueError as error:
            results.append(str(error))

    both = [staged_model(tmp_path, seed) for seed in (1, 2)]
    threads = [threading.Thread(target=push_one, args=[staged]) for staged in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lost = next(result for result in results if isinstance(result, str))
    won = next(result for result in results if isinstance(result, Pushed))
    assert lost.startswith("somebody else has pushed to alice/small meanwhile, so nothing was pushed")
    assert commits(hub)[0] == won.commit
    assert len(commits(hub)) == 2
    assert downloaded(hub, "main") in [contents(staged) for staged in both]
