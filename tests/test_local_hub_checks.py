"""Tests of what the local Hub refuses to store, and of its command line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_client import MODEL, ONLY_LFS, WEIGHTS, add, ask, load, noise
from huggingface_hub import HfApi, ModelCard
from local_hub.cards import check_card


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
