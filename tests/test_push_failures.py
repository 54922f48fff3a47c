"""Tests of what a push says when it fails, is interrupted, or is given something odd, against a local Hub."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from conftest import load_script, tiny_config
from local_hub import Fault
from pushing import (
    HERE,
    ONLY_LFS,
    REPOSITORY,
    ROOT,
    api_of,
    commits,
    push,
    run_script,
    staged_model,
)
from safetensors.torch import load_file, save_file

from hf_transformer_block import TransformerBlockForCausalLM
from hf_transformer_block.hub import check_access
from hf_transformer_block.probe import compute
from hf_transformer_block.proof import probe
from hf_transformer_block.publishing import publish
from hf_transformer_block.staging import staged_model as staged_folder


AGAIN = "; running it again is safe"


def interrupt() -> None:
    """Does what Ctrl-C does to the main thread, while a thread of the Hub's runs this."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def pushes(hub, saved, monkeypatch, capsys):
    """Runs the script on the saved folder, as alice; in processes of its own, too, it knows no other Hub."""
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return lambda *flags: run_script(monkeypatch, capsys, saved, REPOSITORY, *flags)


def test_ctrl_c_says_what_it_left(hub, tmp_path):
    staged = staged_model(tmp_path)
    api_of(hub).create_repo(REPOSITORY)
    hub.faults.append(Fault("POST", "/v1/xorbs" if hub.xet else "/preupload", hook=interrupt, delay=0.1))
    with pytest.raises(KeyboardInterrupt, match="whether alice/small gets the commit is unknown"):
        push(hub, staged)
    hub.faults.append(Fault("POST", "/commit/", lose_answer=True, hook=interrupt))
    with pytest.raises(KeyboardInterrupt) as error:
        push(hub, staged)
    assert str(error.value).startswith(f"interrupted, but alice/small has commit {commits(hub)[0]}")
    assert len(commits(hub)) == 2


@ONLY_LFS
def test_ctrl_c_in_the_script_says_so_before_the_commit_and_after_it(hub, pushes):
    hub.faults.append(Fault("GET", "/whoami", hook=interrupt, delay=0.1))
    assert pushes()[0] == f"push_to_hub.py: interrupted; nothing was pushed{AGAIN}"
    hub.faults.append(Fault("POST", "/tag/", hook=interrupt, delay=0.1))
    error, _ = pushes("--tag", "v1")
    commit = commits(hub)[0]
    assert error.startswith(
        f"push_to_hub.py: interrupted, but alice/small has commit {commit} with all files"
    )
    assert error.endswith(AGAIN)


@ONLY_LFS
def test_a_first_push_that_fails_says_that_it_made_a_repository_and_a_branch(hub, pushes, waits):
    hub.faults.append(Fault("POST", "/commit/", status=403, times=99))
    error, _ = pushes("--branch", "next")
    made = "the branch next was made for this push; the repository alice/small was made for this push"
    assert "nothing was pushed" in error
    assert error.endswith(f"; {made}")
    error, _ = pushes("--branch", "next")
    assert "nothing was pushed" in error
    assert "was made" not in error


@ONLY_LFS
def test_ctrl_c_after_the_first_commit_tells_no_contradiction(hub, pushes):
    hub.faults.append(Fault("POST", "/commit/", lose_answer=True, hook=interrupt))
    error, _ = pushes()
    assert "has commit" in error
    assert "nothing was pushed" not in error
    assert error.endswith(f"; the repository alice/small was made for this push{AGAIN}")


@ONLY_LFS
@pytest.mark.parametrize(
    ("way", "flags", "what"),
    [("/repos/create", [], "repository alice/small"), ("/branch/", ["--branch", "next"], "branch next")],
)
def test_a_request_to_make_something_that_is_cut_off_may_have_made_it(
    hub, pushes, waits, monkeypatch, way, flags, what
):
    monkeypatch.setattr("hf_transformer_block.publishing.prove_folder", lambda *args: None)
    hub.faults.append(Fault("POST", way, status=403))
    assert "may have been made" not in pushes(*flags)[0]
    for fault in ({"hook": interrupt, "delay": 0.1}, {"lose_answer": True, "times": 99}):
        if api_of(hub).repo_exists(REPOSITORY):
            api_of(hub).delete_repo(REPOSITORY)
        hub.faults[:] = [Fault("POST", way, **fault)]
        error, _ = pushes(*flags)
        assert "nothing was pushed" in error
        assert f"; the {what} may have been made" in error


@ONLY_LFS
@pytest.mark.usefixtures("pushes")
def test_ctrl_c_after_everything_says_that_all_is_done(hub, saved):
    place, is_there = check_access(api_of(hub), HERE)

    def say(line: str) -> None:
        if "from_pretrained" in line:
            raise KeyboardInterrupt

    card, license = ROOT / "model_card.md", ROOT / "LICENSE"
    with staged_folder(saved, card, license) as staged, pytest.raises(KeyboardInterrupt) as error:
        publish(saved, staged, place, is_there, say)
    assert str(error.value) == f"interrupted, but all is done: alice/small has commit {commits(hub)[0]}"


@ONLY_LFS
@pytest.mark.parametrize("address", ["https://huggingface.co/alice/small", "hf.co/alice/small/tree/main"])
def test_an_address_is_no_name_and_the_name_is_told(hub, saved, monkeypatch, capsys, address):
    for flags in ([], ["--dry-run"]):
        error, _ = run_script(monkeypatch, capsys, saved, address, *flags)
        assert (
            error == f"push_to_hub.py: {address} is an address: give the repository's name alone, alice/small"
        )
    assert not hub.log


@ONLY_LFS
def test_the_network_that_is_switched_off_is_told(hub, pushes, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error, _ = pushes()
    assert error == "push_to_hub.py: HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set: unset it to push"


@ONLY_LFS
def test_a_card_loads_from_where_it_is_pushed(hub, saved, monkeypatch, capsys):
    for flags, revision in (
        ([], "main"),
        (["--branch", "next"], "next"),
        (["--branch", "next", "--tag", "v1"], "v1"),
        (["--create-pr"], "main"),
    ):
        _, out = run_script(monkeypatch, capsys, saved, REPOSITORY, "--dry-run", *flags)
        assert f'revision = "{revision}"' in out


@ONLY_LFS
def test_a_card_that_the_records_do_not_give_is_told(hub, saved, monkeypatch, capsys):
    say = "README.md differs from what the records give and goes as it is: delete it"
    train = load_script("train")
    card = train.card.render_card(saved, train.CARD.read_text(encoding="utf-8"))
    for text, is_told in ((card, False), (f"{card}\nMine.\n", True)):
        (saved / "README.md").write_text(text, encoding="utf-8")
        error, out = run_script(monkeypatch, capsys, saved, REPOSITORY, "--dry-run")
        assert error is None
        assert (say in out) == is_told


@pytest.fixture
def writer(tmp_path: Path) -> Path:
    """A folder with a saved model that writes texts."""
    torch.manual_seed(0)
    TransformerBlockForCausalLM(tiny_config("decoder")).save_pretrained(tmp_path / "writer")
    return tmp_path / "writer"


def spoil(folder: Path, what: str) -> None:
    """Makes something about a model's folder wrong."""
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    if what == "lack":
        del weights[name]
    elif what == "hold what the model lacks":
        weights["extra.weight"] = torch.zeros(2)
    elif what == "hold NaN or infinity":
        weights[name][0, 0] = torch.nan
    elif what == "have another shape than config.json says":
        weights[name] = weights[name][:-1].clone()
    else:
        (folder / "generation_config.json").write_text(what, encoding="utf-8")
        return
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("lack", r"q_proj\.weight"),
        ("hold what the model lacks", r"extra\.weight"),
        ("hold NaN or infinity", r"q_proj\.weight"),
        ("have another shape than config.json says", r"q_proj\.weight \(31, 32\), not \(32, 32\)"),
        ('{"num_beams": "x"}', "str"),
        ('{"do_sample": true, "temperature": 0.0}', "temperature"),
    ],
)
def test_weights_and_settings_that_do_not_fit_are_told_by_name(writer, what, named):
    sound = {"model": str(writer), "revision": None, "is_stranger": False, "has_tokenizer": False}
    assert compute(**sound)["logits"].isfinite().all()
    spoil(writer, what)
    told = "it cannot generate as its generation_config.json says" if "{" in what else f"the weights {what}"
    with pytest.raises(ValueError, match=f"{told}: .*{named}"):
        compute(**sound)


@ONLY_LFS
def test_a_folder_that_we_cannot_load_either_is_named(hub, saved, pushes):
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    (saved / "config.json").write_text(json.dumps(config | {"hidden_size": 64}), encoding="utf-8")
    error, _ = pushes()
    told = "the weights have another shape than config.json says: "
    assert f"{saved} is not fit for others, so it was not pushed: {told}" in error
    assert not api_of(hub).repo_exists(REPOSITORY)


def test_settings_with_which_a_model_cannot_generate_are_no_fault_of_its_loading(writer):
    spoil(writer, '{"num_beams": "x"}')
    with pytest.raises(ValueError, match="^it cannot generate as its generation_config.json says: "):
        probe(writer, is_stranger=False, has_tokenizer=False)


@ONLY_LFS
def test_a_training_whose_push_is_interrupted_says_where_the_model_is(hub, saved, monkeypatch):
    folder = saved.rename(saved.with_name("my run"))
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    hub.faults.append(Fault("GET", "/whoami", hook=interrupt, delay=0.1))
    with pytest.raises(ValueError, match="interrupted; nothing was pushed") as error:
        load_script("train").push(folder, REPOSITORY)
    assert f"saved in {folder}: `python scripts/push_to_hub.py '{folder}' alice/small` pushes it" in str(
        error.value
    )
