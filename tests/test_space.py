"""Tests of `push_to_hub.py --space`: what the local Hub holds afterwards runs, and translates."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from conftest import load_script, tiny_config
from hub_fixtures import client_env
from huggingface_hub import snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError
from pushing import ONLY_LFS, ROOT, api_of, run_script, start_python
from tiny import writer
from transformers import pipeline


pytest.importorskip("gradio", reason='runs after pip install "hf_transformer_block[ecosystem]"')

from gradio_client import Client

from hf_transformer_block import TransformerBlockForConditionalGeneration, TransformerBlockModel
from hf_transformer_block.vocabulary import train_tokenizer


SPACE, MODEL = "alice/demo", "alice/small"
TEXTS = ("A man rides a bicycle.", "Two dogs play in the snow.")
OURS = {"README.md", "app.py", "plot_attention.py", "requirements.txt"}


@pytest.fixture
def translator(tmp_path) -> Path:
    """A folder with a random translator whose words vary."""
    tokenizer = train_tokenizer(iter(TEXTS), "bpe", 320, 64, "encoder-decoder")
    model = writer(
        TransformerBlockForConditionalGeneration, "encoder-decoder", "vaswani", vocab_size=len(tokenizer)
    )
    model.generation_config.max_new_tokens = 12
    model.save_pretrained(tmp_path / "translator")
    tokenizer.save_pretrained(tmp_path / "translator")
    (tmp_path / "translator/notes.txt").write_text("mine", encoding="utf-8")
    return tmp_path / "translator"


@pytest.fixture
def pushes(hub, monkeypatch, capsys):
    """Runs the script as alice, in this process."""
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if not hub.xet:
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    return lambda *words: run_script(monkeypatch, capsys, *words)


def commits(hub) -> list[str]:
    found = api_of(hub).list_repo_commits(SPACE, repo_type="space")
    return [commit.commit_id for commit in found]


@contextmanager
def served(hub, folder: Path, home: Path):
    """Starts a Space's app.py as the Hub does, in a process without this package; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = client_env(hub, home) | {"GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1"}
    code = "import runpy, sys; sys.modules['hf_transformer_block'] = None; sys.path[0] = sys.argv[1]; "
    code += "sys.argv = ['app.py']; runpy.run_path(sys.path[0] + '/app.py', run_name='__main__')"
    log = home.with_suffix(".log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], cwd=home.parent, env=env, stdout=log, stderr=log
    )
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
        while True:
            assert process.poll() is None, Path(log.name).read_text()
            assert time.monotonic() < end, Path(log.name).read_text()
            try:
                urllib.request.urlopen(url).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()
        log.close()


@pytest.mark.slow
def test_a_space_comes_back_from_the_hub_and_translates(hub, translator, tmp_path):
    api_of(hub).create_repo(MODEL)
    done = start_python(hub, tmp_path, ROOT / "scripts/push_to_hub.py", translator, "small", "--space", SPACE)
    assert done.returncode == 0, done.stderr
    commit = commits(hub)[0]
    assert f"{hub.url}/spaces/{SPACE}: commit {commit} on main" in done.stdout
    assert "left out: notes.txt" in done.stdout
    proof = "loads from its files without this package; largest difference of logits 0"
    assert f"back from the Hub, the model {proof}" in done.stdout
    assert len(commits(hub)) == 2
    assert api_of(hub).list_repo_files(MODEL) == [".gitattributes"]  # the Space only links to it

    snapshot = Path(snapshot_download(SPACE, repo_type="space", token="hf_alice"))
    assert snapshot.name == commit
    in_the_model = {file.name for file in translator.iterdir()} - {"notes.txt"} | {"README.md"}
    found = {file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file()}
    assert found - {".gitattributes"} == OURS | {f"model/{name}" for name in in_the_model}
    for name in in_the_model - {"README.md"}:
        assert (snapshot / "model" / name).read_bytes() == (translator / name).read_bytes()
    assert f"models:\n- {MODEL}\n" in (snapshot / "README.md").read_text(encoding="utf-8")
    assert f'model_id = "{MODEL}"' in (snapshot / "model/README.md").read_text(encoding="utf-8")
    with served(hub, snapshot, tmp_path / "home-space") as url:
        client = Client(url, verbose=False)
        expected = pipeline("translation", str(translator), trust_remote_code=True)(list(TEXTS))
        for text, translation in zip(TEXTS, expected, strict=True):
            shown, _ = client.predict(text, api_name="/answer")
            assert shown == translation["translation_text"]
        assert expected[0] != expected[1]


@ONLY_LFS
def test_a_space_says_what_it_needs(translator, pushes, hub):
    error, out = pushes(translator, "--space", SPACE, "--license", "mit", "--dry-run")
    assert error is None
    assert not hub.log
    card = out[out.index("---\n") :]
    data = yaml.safe_load(card.split("---\n")[1])
    assert data == {
        "title": "demo",
        "sdk": "gradio",
        "sdk_version": version("gradio"),
        "python_version": f"{sys.version_info.major}.{sys.version_info.minor}",
        "app_file": "app.py",
        "license": "mit",
    }
    error, out = pushes(translator, MODEL, "--space", SPACE, "--dry-run")
    assert yaml.safe_load(out[out.index("---\n") :].split("---\n")[1])["models"] == [MODEL]


@ONLY_LFS
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "small",
            "alice/small, to which the Space would link, is not on the Hub, or is private: push it first",
        ),
        ("bob/small", "bob/small, to which the Space would link, is not on the Hub"),
        (
            "https://huggingface.co/alice/small",
            "is an address: give the repository's name alone, alice/small",
        ),
    ],
)
def test_a_space_links_to_no_model_that_is_not_there(translator, pushes, hub, name, message):
    error, _ = pushes(translator, name, "--space", SPACE)
    assert message in error
    assert not api_of(hub).repo_exists(SPACE, repo_type="space")


@ONLY_LFS
def test_a_bare_name_of_a_model_is_the_users(translator, pushes, hub):
    _, out = pushes(translator, "small", "--space", SPACE, "--dry-run")
    assert "models:\n- your-name/small\n" in out
    assert not hub.log


@ONLY_LFS
def test_a_space_shows_the_card_that_somebody_edited(translator, pushes, hub):
    """One without a licence, which the Space then has not either."""
    (translator / "README.md").write_text("---\nlibrary_name: transformers\n---\nMine.\n", encoding="utf-8")
    error, out = pushes(translator, "--space", SPACE, "--dry-run")
    assert error is None, error
    assert "model/README.md differs from what the records give and goes as it is" in out
    assert "\nmodel/README.md:\n\n---\nlibrary_name: transformers\n---\nMine.\n" in out
    assert "license" not in yaml.safe_load(out[out.index("---\n") :].split("---\n")[1])


@ONLY_LFS
def test_pushed_again_a_space_changes_only_what_differs(translator, pushes, hub):
    error, out = pushes(translator, "--space", SPACE, "--private")
    assert error is None, error
    info = api_of(hub).space_info(SPACE)
    assert info.private
    with pytest.raises(RepositoryNotFoundError):
        api_of(hub, "hf_bob").space_info(SPACE)
    read = api_of(hub).hf_hub_download(SPACE, "requirements.txt", repo_type="space")
    pins = dict(line.split("==") for line in Path(read).read_text(encoding="utf-8").split())
    wanted = {name: version(name).split("+")[0] for name in ("gradio", "matplotlib", "torch", "transformers")}
    assert pins == wanted
    error, out = pushes(translator, "--space", SPACE)
    assert "nothing to do: main of alice/demo holds these very files" in out
    api_of(hub).upload_file(
        path_or_fileobj=b"mine", path_in_repo="notes.txt", repo_id=SPACE, repo_type="space"
    )
    (translator / "generation_config.json").unlink()
    config = json.loads((translator / "config.json").read_text(encoding="utf-8"))
    (translator / "config.json").write_text(json.dumps(config), encoding="utf-8")
    error, out = pushes(translator, "--space", SPACE)
    assert error is None, error
    files = set(api_of(hub).list_repo_files(SPACE, repo_type="space"))
    assert "model/generation_config.json" not in files
    assert {"notes.txt", "model/config.json", *OURS} <= files
    assert len(commits(hub)) == 4


@ONLY_LFS
def test_a_space_beside_a_model_of_the_same_name(translator, pushes, hub):
    assert pushes(translator, "alice/same")[0] is None
    assert pushes(translator, "--space", "alice/same")[0] is None
    files = {
        kind: set(api_of(hub).list_repo_files("alice/same", repo_type=kind)) for kind in ("model", "space")
    }
    assert "app.py" in files["space"] - files["model"]
    assert "config.json" in files["model"] - files["space"]


@ONLY_LFS
def test_a_space_of_others_gets_a_pull_request(translator, pushes, hub):
    api_of(hub, "hf_bob").create_repo("bob/demo", repo_type="space", space_sdk="gradio")
    error, _ = pushes(translator, "--space", "bob/demo")
    assert "bob/demo: alice may write to alice; push there, or --create-pr" in error
    error, out = pushes(translator, "--space", "bob/demo", "--create-pr")
    assert error is None, error
    assert f"open for review: {hub.url}/spaces/bob/demo/discussions/1" in out
    files = api_of(hub).list_repo_files("bob/demo", repo_type="space", revision="refs/pr/1")
    assert "app.py" in files


@ONLY_LFS
def test_secrets_stop_a_space_as_they_stop_a_model(translator, pushes, hub):
    (translator / ".env").write_text("x", encoding="utf-8")
    error, _ = pushes(translator, "--space", SPACE)
    assert re.search(r"\.env is no part of a model, and may hold secrets", error)
    (translator / ".env").unlink()
    config = json.loads((translator / "config.json").read_text(encoding="utf-8"))
    (translator / "config.json").write_text(
        json.dumps(config | {"note": "hf_" + "a1" * 17}), encoding="utf-8"
    )
    error, _ = pushes(translator, "--space", SPACE)
    assert "config.json holds what looks like a Hugging Face token" in error
    assert not api_of(hub).repo_exists(SPACE, repo_type="space")


@ONLY_LFS
def test_a_model_without_a_page_makes_no_space(saved, translator, pushes, hub, tmp_path):
    TransformerBlockModel(tiny_config("encoder")).save_pretrained(saved)
    error, _ = pushes(saved, "--space", SPACE)
    assert "holds TransformerBlockModel, for which there is no page: save a model with a head" in error
    for file in ("tokenizer.json", "tokenizer_config.json"):
        os.remove(translator / file)
    error, _ = pushes(translator, "--space", SPACE)
    assert "holds no tokenizer, which a page needs: save it beside the model" in error
    assert not api_of(hub).repo_exists(SPACE, repo_type="space")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/x"], "give the repository, as in my-name/en-de, or --space my-name/en-de-demo"),
        (["runs/x", "--space", "demo", "--tag", "v1"], "--space: the Hub runs a whole Space from main"),
        (["runs/x", "--space", "demo", "--branch", "b"], "--space: the Hub runs a whole Space from main"),
        (["runs/x", "--space", "demo", "--card-only"], "--space: the Hub runs a whole Space from main"),
    ],
)
def test_flags_that_do_not_fit_a_space(monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["push_to_hub.py", *words])
    with pytest.raises(SystemExit):
        load_script("push_to_hub").parse_arguments()
    assert message in capsys.readouterr().err
