"""Tests of scripts/push_to_hub.py and of trainings that end on the Hub, against a local Hub."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_config, tiny_tokenizer
from hub_fixtures import client_env
from local_hub import Fault, LocalHub
from pushing import (
    CARD,
    IDS,
    ONLY_LFS,
    REPOSITORY,
    ROOT,
    SCRIPT,
    api_of,
    commits,
    downloaded,
    push,
    run_script,
    staged_model,
    start,
    start_python,
)
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer, pipeline

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForMaskedLM,
    TransformerBlockForSequenceClassification,
    TransformerBlockModel,
)
from hf_transformer_block.proof import check_same
from hf_transformer_block.staging import stage
from hf_transformer_block.vocabulary import train_tokenizer


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
    tiny_tokenizer().save_pretrained(saved)
    card = [saved, REPOSITORY, "--card-only", "--license", "mit", "--language", "en", "de"]
    error, _ = run_script(monkeypatch, capsys, *card)
    assert error == "push_to_hub.py: alice/small is not there yet: push the model without --card-only"
    (tmp_path / "staged").mkdir()
    first = push(hub, stage(saved, tmp_path / "staged", CARD))
    error, out = run_script(monkeypatch, capsys, *card, "--tag", "v1")
    assert error is None
    commit = commits(hub)[0]
    assert f"commit {commit} on main" in out
    assert "tagged v1" in out
    assert "tokenizer = AutoTokenizer.from_pretrained" in out
    assert api_of(hub).list_repo_refs(REPOSITORY).tags[0].target_commit == commit
    before, after = downloaded(hub, first.commit), downloaded(hub, "v1")
    assert b"license: mit" in after["README.md"]
    assert before | {"README.md": after["README.md"]} == after
    error, out = run_script(monkeypatch, capsys, *card, "--tag", "v1")
    assert error is None
    assert "nothing to do" in out
    error, _ = run_script(monkeypatch, capsys, *card[:-1], "--tag", "v1")
    assert f"alice/small has a tag v1 already, at {commit[:8]}: give another --tag" in error
    TransformerBlockModel(tiny_config("encoder")).save_pretrained(saved)  # other weights
    for branch in ([], ["--branch", "new"]):
        error, _ = run_script(monkeypatch, capsys, *card, *branch)
        assert "holds another model.safetensors than the card is about" in error
    assert commits(hub)[0] == commit


@ONLY_LFS
@pytest.mark.parametrize("name", ["bad name/x", "a/b/c", "a/b--c", "a/" + "b" * 97])
def test_impossible_repositories_are_refused_first(hub, saved, monkeypatch, capsys, name):
    for words in ([name], ["--space", name], [name, "--dry-run"], ["--space", name, "--dry-run"]):
        error, _ = run_script(monkeypatch, capsys, saved, *words)
        assert f"{name!r} is no name of a repository, as user/name: " in error
    assert not hub.log


@ONLY_LFS
@pytest.mark.parametrize(
    "flags",
    [
        *(
            ["--tag", name]
            for name in ("a b", "main", "v" * 300, "../v1", "v1.lock", "refs/tags/v1", "0" * 40)
        ),
        *(["--branch", name] for name in ("fe at", "refs/pr/1", "a//b", "ümläut")),
    ],
)
def test_names_that_git_or_readers_would_trip_over_are_refused_first(hub, saved, monkeypatch, capsys, flags):
    for more in ([], ["--dry-run"]):
        error, _ = run_script(monkeypatch, capsys, saved, REPOSITORY, *flags, *more)
        assert re.search(f"{flags[0]} .* is (no name of a|the name of a branch)", error)
    assert not hub.log


@ONLY_LFS
def test_a_planted_file_stops_the_push(hub, saved, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    (saved / "optimizer.pt").write_bytes(b"x")
    error, _ = run_script(monkeypatch, capsys, saved, REPOSITORY)
    assert "optimizer.pt is a pickle" in error
    assert {record.method for record in hub.log} == {"GET"}


@pytest.fixture
def translator(tmp_path: Path) -> Path:
    """A folder with a translator that has learnt nothing, and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(iter(["a b c d"]), "char", 60, 64, "encoder-decoder")
    config = tiny_config("encoder-decoder", vocab_size=len(tokenizer), initializer_range=0.5)
    TransformerBlockForConditionalGeneration(config).save_pretrained(tmp_path / "translator")
    tokenizer.save_pretrained(tmp_path / "translator")
    return tmp_path / "translator"


def what_it_says(folder: Path) -> list:
    """Returns the logits of a translator for "a b", and its translation."""
    model = TransformerBlockForConditionalGeneration.from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)("a b", return_tensors="pt")
    logits = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
    text = AutoTokenizer.from_pretrained(folder).decode(
        model.generate(**inputs, max_new_tokens=5)[0], skip_special_tokens=True
    )
    return [logits.tolist(), [{"translation_text": text}]]


def test_the_script_proves_what_it_pushed_and_strangers_load_it(hub, tmp_path, translator):
    """In processes of their own: push, private and tagged; the printed code and the README's; offline."""
    done = start_python(hub, tmp_path, SCRIPT, "translator", "small", "--private", "--tag", "v1")
    assert done.returncode == 0, done.stderr
    assert "loads from its files without this package; largest difference of logits 0" in done.stdout
    assert "loads from the Hub without this package; largest difference of logits 0" in done.stdout
    assert "hf_alice" not in done.stdout + done.stderr
    commit = api_of(hub).model_info(REPOSITORY).sha
    assert api_of(hub).model_info(REPOSITORY).private
    assert api_of(hub).list_repo_refs(REPOSITORY).tags[0].target_commit == commit
    assert b'model_id = "alice/small"' in downloaded(hub, "v1")["README.md"]
    snippet = done.stdout[done.stdout.index("from transformers import") :]
    assert f'revision="{commit}", trust_remote_code=True' in snippet
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "my-name/" in block]
    assert len(blocks) == 1
    code = f"""
import json, sys
sys.modules["hf_transformer_block"] = None
{snippet}
{blocks[0].replace("my-name/en-de", REPOSITORY)}
inputs = tokenizer("a b", return_tensors="pt")
logits = model(**inputs, decoder_input_ids=inputs["input_ids"]).logits
print(json.dumps([logits.tolist(), translate("a b", max_new_tokens=5)]))
"""
    expected = what_it_says(translator)
    loaded = start_python(hub, tmp_path, "-c", code)
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout.splitlines()[-1]) == expected
    hub.stop()
    offline = start_python(hub, tmp_path, "-c", code, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert json.loads(offline.stdout.splitlines()[-1]) == expected


@ONLY_LFS
def test_the_token_of_the_login_file_pushes_a_private_model_that_others_do_not_see(hub, tmp_path, saved):
    (tmp_path / "login").mkdir()
    (tmp_path / "login/token").write_text("hf_alice", encoding="utf-8")
    environment = client_env(hub, tmp_path / "login")
    command = [sys.executable, SCRIPT, saved, REPOSITORY, "--private"]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "AutoTokenizer" not in done.stdout  # it has none
    for token in (False, "hf_bob"):
        with pytest.raises(OSError, match="private repository"):
            AutoModel.from_pretrained(REPOSITORY, trust_remote_code=True, token=token)
    loaded = AutoModel.from_pretrained(REPOSITORY, trust_remote_code=True, token="hf_alice")
    original = TransformerBlockModel.from_pretrained(saved)
    assert torch.equal(loaded(IDS).last_hidden_state, original(IDS).last_hidden_state)


@ONLY_LFS
@pytest.mark.slow
def test_a_branch_and_a_pull_request_by_the_script(hub, tmp_path, saved):
    push(hub, staged_model(tmp_path, 1))
    done = start_python(hub, tmp_path, SCRIPT, saved, REPOSITORY, "--branch", "try/this")
    assert done.returncode == 0, done.stderr
    commit = commits(hub, "try/this")[0]
    assert f"commit {commit} on try/this" in done.stdout
    done = start_python(hub, tmp_path, SCRIPT, saved, REPOSITORY, "--create-pr")
    assert done.returncode == 0, done.stderr
    assert f"commit {commits(hub, 'refs/pr/1')[0]} on refs/pr/1" in done.stdout
    assert len(commits(hub)) == 2


@ONLY_LFS
@pytest.mark.parametrize(
    ("head", "shape", "task", "text"),
    [
        (TransformerBlockForCausalLM, "decoder", "text-generation", "w5 w6"),
        (TransformerBlockForMaskedLM, "encoder", "fill-mask", "w5 <mask> w7"),
        (TransformerBlockForSequenceClassification, "encoder", "text-classification", "w5 w6"),
    ],
)
def test_pipelines_load_by_id_and_revision(hub, tmp_path, head, shape, task, text):
    head(tiny_config(shape)).save_pretrained(tmp_path / "saved")
    tiny_tokenizer().save_pretrained(tmp_path / "saved")
    (tmp_path / "staged").mkdir()
    pushed = push(hub, stage(tmp_path / "saved", tmp_path / "staged", CARD))
    options = {"max_new_tokens": 4, "do_sample": False} if task == "text-generation" else {}
    there = pipeline(task, REPOSITORY, revision=pushed.commit, trust_remote_code=True)
    here = pipeline(task, str(tmp_path / "saved"), trust_remote_code=True)
    assert there(text, **options) == here(text, **options)


@ONLY_LFS
def test_transformers_own_push_to_hub_works_as_well(hub, saved, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    model = TransformerBlockModel.from_pretrained(saved)
    model.push_to_hub(REPOSITORY)
    loaded = AutoModel.from_pretrained(REPOSITORY, trust_remote_code=True)
    assert torch.equal(loaded(IDS).last_hidden_state, model.eval()(IDS).last_hidden_state)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory as Linux tells it")
def test_a_large_push_needs_no_memory_for_the_weights(hub, tmp_path):
    """By LFS; Xet keeps several blocks of 64 MiB on their way, whatever the size of the model."""
    staged = staged_model(tmp_path)
    (staged.folder / "model.safetensors").unlink()
    save_file({"weight": torch.randn(75_000_000)}, staged.folder / "model.safetensors")
    api_of(hub).create_repo(REPOSITORY)
    code = (
        "import re, sys\nfrom pathlib import Path\nfrom huggingface_hub import HfApi\n"
        "from hf_transformer_block.hub import Place, Push\n"
        "from hf_transformer_block.staging import Staged\n"
        "def kilobytes(name):\n"
        "    return int(re.search(rf'{name}:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])\n"
        "before = kilobytes('VmRSS')\n"
        "staged = Staged(Path(sys.argv[1]), {'model.safetensors': 1}, [])\n"
        f"Push(HfApi(), staged, Place({REPOSITORY!r})).run('Push the model')\n"
        "print(1024 * (kilobytes('VmHWM') - before))"  # the most that it ever held
    )
    done = start_python(hub, tmp_path, "-c", code, staged.folder)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < (400 if hub.xet else 100) * 10**6
    assert len(commits(hub)) == 2


def start_training(hub: LocalHub, folder: Path, *launcher: str, **environment: str):
    """Trains a reverser of digits for a moment, and pushes it."""
    rows = [" ".join(str(37 * number + 100)) for number in range(200)]
    (folder / "train.a").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    (folder / "train.b").write_text("".join(f"{row[::-1]}\n" for row in rows), encoding="utf-8")
    shape = "--hidden_size 16 --num_hidden_layers 1 --num_attention_heads 2 --tokenizer word --batch_size 16"
    flags = f"--train_files train.a train.b --output_dir run --max_steps 4 --push_to_hub small {shape}"
    environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | environment
    return start(hub, folder, *launcher, ROOT / "scripts/train.py", *flags.split(), **environment)


@ONLY_LFS
def test_a_training_that_cannot_push_does_not_begin(hub, tmp_path):
    done = start_training(hub, tmp_path, sys.executable, HF_TOKEN="hf_reader")
    assert done.returncode == 1
    assert "train.py: the token of alice may only read" in done.stderr
    assert not (tmp_path / "run/arguments.json").exists()
    assert not api_of(hub).repo_exists(REPOSITORY)


@ONLY_LFS
@pytest.mark.slow
def test_two_processes_that_cannot_push_both_say_so_and_end(hub, tmp_path):
    config = str(ROOT / "scripts/accelerate/cpu_ddp.yaml")
    done = start_training(
        hub, tmp_path, *("accelerate", "launch", "--config_file", config), HF_TOKEN="hf_reader"
    )
    assert done.returncode == 1
    assert done.stderr.count("train.py: the token of alice may only read") == 2
    assert "distributed_c10d" not in done.stderr  # as where one waits for the other


@ONLY_LFS
@pytest.mark.slow
def test_a_training_of_two_processes_ends_in_one_commit(hub, tmp_path):
    config = str(ROOT / "scripts/accelerate/cpu_ddp.yaml")
    done = start_training(hub, tmp_path, "accelerate", "launch", "--config_file", config)
    assert done.returncode == 0, done.stderr
    assert "translation: 2 process(es)" in done.stdout
    assert len(commits(hub)) == 2
    files = downloaded(hub, "main")
    assert files["model.safetensors"] == (tmp_path / "run/model.safetensors").read_bytes()
    assert b'model_id = "alice/small"' in files["README.md"]
    assert b"model-index" in files["README.md"]
    assert not {"arguments.json", "run.json", "metrics.jsonl"} & files.keys()
    assert done.stdout.count(f"commit {commits(hub)[0]} on main") == 1
    again = start_python(hub, tmp_path, SCRIPT, "run", "small")
    assert "nothing to do: main of alice/small holds these very files" in again.stdout, again.stderr


@ONLY_LFS
def test_a_folder_that_strangers_cannot_load_is_not_pushed(hub, saved, monkeypatch, capsys):
    file = saved / "modeling_hf_transformer_block.py"
    file.write_text(f"import hf_transformer_block\n{file.read_text(encoding='utf-8')}", encoding="utf-8")
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    error, _ = run_script(monkeypatch, capsys, saved, REPOSITORY)
    assert "is not fit for others, so it was not pushed: it does not load: " in error
    assert not api_of(hub).repo_exists(REPOSITORY)


@ONLY_LFS
def test_weights_that_change_on_their_way_are_found(hub, saved, monkeypatch, capsys):
    """What the Hub serves is compared with the original, and not with itself."""

    def spoil():
        (file,) = (file for file in (hub.root / "lfs").rglob("*") if len(file.name) == 64)
        with file.open("r+b") as stream:
            stream.seek(-4000, os.SEEK_END)
            stream.write(struct.pack("<1000f", *[0.5] * 1000))

    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub.faults.append(Fault("POST", "/commit/", hook=spoil))
    error, _ = run_script(monkeypatch, capsys, saved, REPOSITORY)
    assert (
        f"alice/small has commit {commits(hub)[0]}, but from there its last_hidden_state differ by" in error
    )


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"logits": torch.tensor([1.0, 2.1])}, "its logits differ by 0.1 from the original's"),
        ({"logits": torch.tensor([1.0])}, r"its logits have shape \(1,\), not \(2,\)"),
        (
            {"other": torch.tensor([1.0, 2.0])},
            r"it returns \['other'\] where the original returns \['logits'\]",
        ),
        ({"logits": torch.tensor([1.0, torch.nan])}, "its logits differ by nan"),
    ],
)
def test_another_models_numbers_are_refused(theirs, message):
    ours = {"logits": torch.tensor([1.0, 2.0])}
    assert check_same(ours, {"logits": torch.tensor([1.0, 2.000001])}) == pytest.approx(1e-6, rel=0.1)
    with pytest.raises(ValueError, match=message):
        check_same(ours, theirs)


@ONLY_LFS
@pytest.mark.parametrize("path", ["/whoami", "/api/models/alice/small"])
def test_a_hub_that_is_down_is_not_a_wrong_token(hub, saved, monkeypatch, capsys, waits, path):
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    hub.faults.append(Fault("GET", path, status=503, times=99))
    error, _ = run_script(monkeypatch, capsys, saved, REPOSITORY)
    assert re.search("cannot (reach the Hub|read alice/small): .*503.*; nothing was pushed: try again", error)


def test_a_killed_push_leaves_nothing_and_the_next_one_finishes_it(hub, saved, tmp_path):
    push_code = (
        "import sys\nfrom pathlib import Path\nfrom huggingface_hub import HfApi\n"
        "from hf_transformer_block.hub import Place, Push\nfrom hf_transformer_block.staging import stage\n"
        "staged = stage(sys.argv[1], sys.argv[2], Path(sys.argv[3]).read_text())\n"
        f"Push(HfApi(), staged, Place({REPOSITORY!r})).run('Push the model')"
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
