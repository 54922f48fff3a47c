"""Tests of the push against a local Hub, by its own clients: rights, one commit, faults, races, loading."""

import json
import re
import runpy
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import tiny_config
from hub_fixtures import client_env
from huggingface_hub import HfApi
from local_hub import Fault, LocalHub
from safetensors.torch import save_file
from transformers import AutoModel

from hf_transformer_block import TransformerBlockForConditionalGeneration, TransformerBlockModel
from hf_transformer_block.hub import Place, Push, Pushed
from hf_transformer_block.staging import Staged, stage
from hf_transformer_block.vocabulary import train_tokenizer


ROOT = Path(__file__).parents[1]
REPOSITORY = "alice/small"
HERE = Place(REPOSITORY)
CARD = "---\nlicense: mit\nlibrary_name: transformers\n---\n# A card\n"
IDS = torch.arange(10).view(2, 5)
ONLY_LFS = pytest.mark.parametrize("hub", ["lfs"], indirect=True)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Waits milliseconds where a push waits seconds."""
    monkeypatch.setattr("hf_transformer_block.hub.WAITS", (0.01,) * 4)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)


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
    return Push(api, staged, REPOSITORY, place).run("Push the model")


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


def test_a_hub_that_fails_for_good_gets_nothing_and_it_is_said(hub, tmp_path):
    staged = staged_model(tmp_path)
    api_of(hub).create_repo(REPOSITORY)
    hub.faults.append(Fault("POST", "/commit/", status=503, times=99))
    with pytest.raises(ValueError, match=r"failed: .*503.*; nothing was pushed: run again, which is safe"):
        push(hub, staged)
    assert len(commits(hub)) == 1
    hub.faults.clear()
    assert push(hub, staged).is_new


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


def run_script(monkeypatch, capsys, *words: object) -> tuple[str | None, str]:
    """Runs scripts/push_to_hub.py here; returns with what it exits, None for success, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["push_to_hub.py", *map(str, words)])
    try:
        runpy.run_path(str(ROOT / "scripts/push_to_hub.py"), run_name="__main__")
    except SystemExit as error:
        return error.code, capsys.readouterr().out
    return None, capsys.readouterr().out


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a saved model and no records."""
    torch.manual_seed(0)
    TransformerBlockModel(tiny_config("encoder")).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


@ONLY_LFS
@pytest.mark.parametrize(
    ("token", "flags", "message"),
    [
        (None, [], "no token: `hf auth login`, or set HF_TOKEN"),
        ("hf_wrong", [], "the Hub refuses the token: "),
        ("hf_reader", [], "the token of alice may only read"),
        ("hf_bob", [], "alice/small: bob may write to bob; push there, or --create-pr"),
        ("hf_alice", ["--private"], "alice/small is there and public: make it private in its settings"),
        ("hf_alice", ["--license", "Apache 2.0"], "Apache 2.0"),
        ("hf_alice", ["--language", "german"], "german"),
    ],
)
def test_who_may_not_push_learns_it_before_anything_is_written(
    hub, saved, monkeypatch, capsys, token, flags, message
):
    api_of(hub).create_repo(REPOSITORY)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    before = len(hub.log)
    error, _ = run_script(monkeypatch, capsys, saved, REPOSITORY, *flags)
    assert message in error
    assert "\n" not in error
    assert token is None or token not in error
    assert len(commits(hub)) == 1
    assert {record.method for record in hub.log[before:]} <= {"GET", "HEAD"}


@ONLY_LFS
def test_a_dry_run_touches_no_network(hub, saved, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    error, out = run_script(monkeypatch, capsys, saved, "small", "--dry-run", "--tag", "v1")
    assert error is None
    assert not hub.log
    size = (saved / "model.safetensors").stat().st_size
    assert re.search(rf"{size / 1000:.3g} kB  model\.safetensors", out)
    assert 'revision = "v1"' in out


@ONLY_LFS
def test_a_new_card_and_a_tag_for_what_is_there(hub, saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    card = [saved, REPOSITORY, "--card-only", "--license", "mit", "--language", "en", "de"]
    error, _ = run_script(monkeypatch, capsys, *card)
    assert error == "push_to_hub.py: alice/small is not there yet: push the model without --card-only"
    (tmp_path / "staged").mkdir()
    first = push(hub, stage(saved, tmp_path / "staged", CARD))
    error, out = run_script(monkeypatch, capsys, *card, "--tag", "v1")
    assert error is None
    commit = commits(hub)[0]
    assert f"commit {commit} on main" in out
    assert api_of(hub).list_repo_refs(REPOSITORY).tags[0].target_commit == commit
    before, after = downloaded(hub, first.commit), downloaded(hub, "v1")
    assert b"license: mit" in after["README.md"]
    assert before | {"README.md": after["README.md"]} == after
    error, out = run_script(monkeypatch, capsys, *card, "--tag", "v1")
    assert error is None
    assert "nothing to do" in out
    error, _ = run_script(monkeypatch, capsys, *card[:-1], "--tag", "v1")
    assert f"alice/small has a tag v1 already, at {commit[:8]}: give another --tag" in error
    assert commits(hub)[0] == commit


@ONLY_LFS
def test_a_planted_file_stops_the_push(hub, saved, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    (saved / "optimizer.pt").write_bytes(b"x")
    error, _ = run_script(monkeypatch, capsys, saved, REPOSITORY)
    assert "optimizer.pt is a pickle" in error
    assert not hub.log


def test_the_script_proves_what_it_pushed_and_strangers_load_it(hub, tmp_path):
    """In processes of their own: push a translator, private and tagged; load it; load it offline."""
    tokenizer = train_tokenizer(iter(["a b c d"]), "char", 60, 64, "encoder-decoder")
    tokenizer.save_pretrained(tmp_path / "saved")
    config = tiny_config("encoder-decoder", vocab_size=len(tokenizer), initializer_range=0.5)
    TransformerBlockForConditionalGeneration(config).save_pretrained(tmp_path / "saved")

    def run(*words: object, token: str | None = "hf_alice") -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, *map(str, words)],
            env=client_env(hub, tmp_path / f"home-{token}", token),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    done = run(ROOT / "scripts/push_to_hub.py", "saved", "small", "--private", "--tag", "v1")
    assert done.returncode == 0, done.stderr
    assert "loads from its files without this package; largest difference of logits 0" in done.stdout
    assert "loads from the Hub without this package; largest difference of logits 0" in done.stdout
    assert "hf_alice" not in done.stdout + done.stderr
    api = api_of(hub)
    info = api.model_info(REPOSITORY)
    assert info.private
    assert api.list_repo_refs(REPOSITORY).tags[0].target_commit == info.sha
    # the printed snippet and the README's, by somebody who has no package
    snippet = done.stdout[done.stdout.index("from transformers import") :]
    assert f'revision="{info.sha}", trust_remote_code=True' in snippet
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "my-name/" in block]
    assert len(blocks) == 1
    code = f"""
import sys
sys.modules["hf_transformer_block"] = None
{snippet}
{blocks[0].replace("my-name/en-de", REPOSITORY)}
import json
inputs = tokenizer("a b", return_tensors="pt")
logits = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
print(json.dumps([logits.tolist(), translate("a b", max_new_tokens=5)]))
"""
    original = TransformerBlockForConditionalGeneration.from_pretrained(tmp_path / "saved")
    inputs = tokenizer("a b", return_tensors="pt")
    logits = original(**inputs, decoder_input_ids=inputs["input_ids"]).logits
    text = tokenizer.decode(original.generate(**inputs, max_new_tokens=5)[0], skip_special_tokens=True)
    loaded = run("-c", code)
    assert loaded.returncode == 0, loaded.stderr
    found, translations = json.loads(loaded.stdout.splitlines()[-1])
    assert torch.equal(torch.tensor(found), logits)
    assert translations == [{"translation_text": text}]
    refused = run("-c", code, token=None)
    assert refused.returncode == 1
    assert "private repository" in refused.stderr
    hub.stop()
    offline = run("-c", f"import os; os.environ['HF_HUB_OFFLINE'] = '1'\n{code}")
    assert offline.returncode == 0, offline.stderr
    assert json.loads(offline.stdout.splitlines()[-1]) == [found, translations]


@ONLY_LFS
def test_transformers_own_push_to_hub_works_as_well(hub, saved, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    model = TransformerBlockModel.from_pretrained(saved)
    model.push_to_hub(REPOSITORY)
    loaded = AutoModel.from_pretrained(REPOSITORY, trust_remote_code=True)
    assert torch.equal(loaded(IDS).last_hidden_state, model.eval()(IDS).last_hidden_state)


@pytest.mark.slow
def test_a_large_push_needs_no_memory_for_the_weights(hub, tmp_path):
    """By LFS; Xet keeps several blocks of 64 MiB on their way, whatever the size of the model."""
    staged = staged_model(tmp_path)
    (staged.folder / "model.safetensors").unlink()
    save_file({"weight": torch.randn(75_000_000)}, staged.folder / "model.safetensors")
    api_of(hub).create_repo(REPOSITORY)
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom huggingface_hub import HfApi\n"
        "from hf_transformer_block.hub import Place, Push\n"
        "from hf_transformer_block.staging import Staged\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "staged = Staged(Path(sys.argv[1]), {'model.safetensors': 1}, [])\n"
        f"Push(HfApi(), staged, {REPOSITORY!r}, Place({REPOSITORY!r})).run('Push the model')\n"
        "print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, staged.folder],
        env=client_env(hub, tmp_path / "home", "hf_alice"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < (400 if hub.xet else 100) * 10**6
    assert len(commits(hub)) == 2


def start_training(hub: LocalHub, folder: Path, token: str, *launcher: str) -> subprocess.CompletedProcess:
    """Trains a reverser of digits for a moment, and pushes it."""
    rows = [" ".join(str(37 * number + 100)) for number in range(200)]
    (folder / "train.a").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    (folder / "train.b").write_text("".join(f"{row[::-1]}\n" for row in rows), encoding="utf-8")
    shape = "--hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2 --tokenizer word --batch_size 16"
    flags = f"--train_files train.a train.b --output_dir run --max_steps 4 --push_to_hub {REPOSITORY} {shape}"
    command = [*(launcher or [sys.executable]), str(ROOT / "scripts/train.py"), *flags.split()]
    home = folder / "home"
    environment = client_env(hub, home, token) | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


@ONLY_LFS
def test_a_training_that_cannot_push_does_not_begin(hub, tmp_path):
    done = start_training(hub, tmp_path, "hf_reader")
    assert done.returncode == 1
    assert "train.py: the token of alice may only read" in done.stderr
    assert not (tmp_path / "run/arguments.json").exists()
    assert not api_of(hub).repo_exists(REPOSITORY)


@ONLY_LFS
@pytest.mark.slow
def test_a_training_of_two_processes_ends_in_one_commit(hub, tmp_path):
    config = str(ROOT / "scripts/accelerate/cpu_ddp.yaml")
    done = start_training(hub, tmp_path, "hf_alice", "accelerate", "launch", "--config_file", config)
    assert done.returncode == 0, done.stderr
    assert "translation: 2 process(es)" in done.stdout
    assert len(commits(hub)) == 2
    files = downloaded(hub, "main")
    assert files["model.safetensors"] == (tmp_path / "run/model.safetensors").read_bytes()
    assert b'model_id = "alice/small"' in files["README.md"]
    assert b"model-index" in files["README.md"]
    assert not {"arguments.json", "run.json", "metrics.jsonl"} & files.keys()
    assert done.stdout.count(f"commit {commits(hub)[0]} on main") == 1
    again = subprocess.run(
        [sys.executable, ROOT / "scripts/push_to_hub.py", "run", REPOSITORY],
        env=client_env(hub, tmp_path / "home", "hf_alice"),
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert "nothing to do: main of alice/small holds these very files" in again.stdout, again.stderr


@ONLY_LFS
def test_a_folder_that_strangers_cannot_load_is_not_pushed(hub, saved, monkeypatch, capsys):
    file = saved / "modeling_hf_transformer_block.py"
    file.write_text(f"import hf_transformer_block\n{file.read_text(encoding='utf-8')}", encoding="utf-8")
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    error, _ = run_script(monkeypatch, capsys, saved, REPOSITORY)
    assert "does not load by itself, so it was not pushed" in error
    assert not api_of(hub).repo_exists(REPOSITORY)


def test_a_killed_push_leaves_nothing_and_the_next_one_finishes_it(hub, saved, tmp_path):
    push_code = (
        "import sys\nfrom pathlib import Path\nfrom huggingface_hub import HfApi\n"
        "from hf_transformer_block.hub import Place, Push\nfrom hf_transformer_block.staging import stage\n"
        "staged = stage(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_text())\n"
        f"Push(HfApi(), staged, {REPOSITORY!r}, Place({REPOSITORY!r})).run('Push the model')"
    )
    (tmp_path / "card.md").write_text(CARD, encoding="utf-8")
    (tmp_path / "target").mkdir()
    api_of(hub).create_repo(REPOSITORY)
    command = [sys.executable, "-c", push_code, saved, tmp_path / "target", tmp_path / "card.md"]
    environment = client_env(hub, tmp_path / "home", "hf_alice")
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    method, path = ("POST", "/v1/xorbs/") if hub.xet else ("PUT", "/lfs/")
    hub.faults.append(Fault(method, path, after_bytes=1000, hook=process.kill))
    assert process.wait() == -9
    assert len(commits(hub)) == 1
    shutil.rmtree(tmp_path / "target")
    (tmp_path / "target").mkdir()
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True)
    assert len(commits(hub)) == 2
    assert downloaded(hub, "main")["model.safetensors"] == (saved / "model.safetensors").read_bytes()
