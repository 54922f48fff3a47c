"""Tests of checkpoints against what happens to them: kills, refused writes, damage and signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from checkpoint_worker import HEADS, Blocker, Trainer, limited, names
from safetensors.torch import load_file
from torch.distributed.fsdp import StateDictType
from transformers import AutoModelForCausalLM

from hf_transformer_block.checkpoints import (
    StopSignal,
    checkpoints,
    damage,
    finish,
    load_newest,
    load_step,
    may_fail_alone,
)


ROOT = Path(__file__).parents[1]
TMPFS = "mount -t tmpfs -o size=1000k tmpfs"


def command(job: str, folder: Path, launch: str = "") -> list[str]:
    """Returns what starts `checkpoint_worker.py`, for several processes under `accelerate launch`."""
    accelerate = ["-m", "accelerate.commands.launch", *launch.split()] if launch else []
    return [sys.executable, *accelerate, "tests/checkpoint_worker.py", job, str(folder)]


def work(arguments: list[str]) -> None:
    """Runs a command in the project's folder that must succeed, and not hang."""
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]


def results(job: str, folder: Path, rank: int = 0) -> dict:
    return json.loads((folder / f"{job}-{rank}.json").read_text())


@pytest.fixture
def trainer() -> Trainer:
    return Trainer(Accelerator(cpu=True))


@pytest.mark.parametrize("architecture", HEADS)
def test_a_resumed_run_equals_an_uninterrupted_one(architecture, tmp_path):
    whole = Trainer(Accelerator(cpu=True), architecture=architecture)
    losses = [whole.update() for _ in range(4)]
    assert whole.save(tmp_path, 4, history=losses)
    losses += [whole.update() for _ in range(5)]

    resumed = Trainer(Accelerator(cpu=True), architecture=architecture)
    state = load_newest(resumed.accelerator, tmp_path)
    assert state == {"step": 4, "history": losses[:4]}
    assert [resumed.update() for _ in range(5)] == losses[4:]
    assert torch.equal(resumed.weights(), whole.weights())
    assert len(set(losses)) == 9


def test_there_is_nothing_to_resume_before_the_first_checkpoint(trainer, tmp_path):
    assert load_newest(trainer.accelerator, tmp_path) is None
    assert load_step(trainer.accelerator, tmp_path, 2) is None


def test_only_finished_checkpoints_count_and_old_ones_go(trainer, tmp_path):
    for step in (1, 2, 3):
        assert trainer.save(tmp_path, step, keep=2)
    for left in ("step-00000003.old", "step-00000004.partial"):
        (tmp_path / "checkpoints" / left).mkdir()
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    weights = load_file(checkpoints(tmp_path)[-1] / "model.safetensors")  # ST6: tied weights are stored once
    assert [name for name in weights if "embed" in name or "head" in name] == ["model.embed_tokens.weight"]
    assert trainer.save(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_the_best_checkpoint_is_kept_and_found(trainer, tmp_path, caplog):
    weights = {}
    for step in range(1, 6):
        trainer.update()
        weights[step] = trainer.weights()
        trainer.save(tmp_path, step, keep=1, best_step=min(step, 2))
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-00000002", "step-00000005"]
    assert load_step(trainer.accelerator, tmp_path, 2)["step"] == 2
    assert torch.equal(trainer.weights(), weights[2])
    assert not caplog.messages
    load_step(trainer.accelerator, tmp_path, 5)
    (checkpoints(tmp_path)[0] / "model.safetensors").unlink()
    assert load_step(trainer.accelerator, tmp_path, 2) is None
    assert torch.equal(trainer.weights(), weights[5])
    message = "checkpoint step-00000002 cannot be used (model.safetensors: No such file or directory)"
    assert caplog.messages == [message]


def truncate(file: Path) -> str:
    size = file.stat().st_size
    os.truncate(file, size // 2)
    return "not readable" if file.name == "manifest.json" else f"{size // 2} instead of {size} bytes"


def flip_a_bit(file: Path) -> str:
    content = bytearray(file.read_bytes())
    content[-1] ^= 16
    file.write_bytes(content)
    return "not readable" if file.name == "manifest.json" else "checksum differs"


@pytest.mark.parametrize("harm", [truncate, flip_a_bit])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "manifest.json"]
)
def test_a_damaged_checkpoint_is_passed_over(trainer, tmp_path, caplog, name, harm):
    trainer.update()
    trainer.save(tmp_path, 32)
    weights = trainer.weights()
    trainer.update()
    trainer.save(tmp_path, 40)
    reason = harm(checkpoints(tmp_path)[-1] / name)
    assert load_newest(trainer.accelerator, tmp_path) == {"step": 32}
    assert torch.equal(trainer.weights(), weights)
    message = f"checkpoint step-00000040 is damaged ({name}: {reason}): going back to step-00000032"
    assert caplog.messages == [message]
    assert trainer.save(tmp_path, 36, keep=1)  # does not keep the damaged one in place of itself
    assert names(tmp_path) == ["step-00000036"]
    harm(checkpoints(tmp_path)[0] / name)
    assert load_newest(trainer.accelerator, tmp_path) is None
    assert caplog.messages[-1].endswith("going back to the beginning")
    assert trainer.save(tmp_path, 36)  # the run comes by again
    assert load_newest(trainer.accelerator, tmp_path) == {"step": 36}


def test_no_flipped_bit_goes_unseen(tmp_path):
    partial, folder = tmp_path / "new.partial", tmp_path / "new"
    (partial / "inside").mkdir(parents=True)
    (partial / "inside" / "weights").write_bytes(os.urandom(40))
    finish(partial, folder, {"writer": "me", "state": {"step": 1}})
    assert damage(folder) == ""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    assert len(files) == 3
    for file in files:
        content = file.read_bytes()
        for bit in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            assert damage(folder), (file.name, bit)
        file.write_bytes(content)
    assert damage(folder) == ""


def test_writes_that_the_kernel_refuses_cost_no_checkpoint(trainer, tmp_path, caplog):
    trainer.update()
    trainer.save(tmp_path, 1)
    sizes = {file.name: file.stat().st_size for file in checkpoints(tmp_path)[0].iterdir()}
    assert sizes["optimizer.bin"] > 2 * sizes["model.safetensors"] > 2 * 9999
    history = ["x" * 2 * sizes["optimizer.bin"]]  # in state.json, the last file
    limits = [sizes["model.safetensors"] - 9999, sizes["optimizer.bin"] - 9999, sizes["optimizer.bin"] + 99]
    for size, error in zip(limits, ("SafetensorError", "RuntimeError", "OSError"), strict=True):
        caplog.clear()
        with limited(size):
            assert not trainer.save(tmp_path, 2, history=history)
        assert names(tmp_path) == ["step-00000001"]
        [message] = caplog.messages
        assert message.startswith(f"checkpoint step-00000002 could not be written (process 0: {error}: ")
        assert message.endswith("training goes on, and the newest good checkpoint is step-00000001")
    assert trainer.save(tmp_path, 2, history=history)
    assert [damage(folder) for folder in checkpoints(tmp_path)] == ["", ""]


def test_a_folder_that_cannot_be_made_is_a_fault_too(trainer, tmp_path, caplog):
    (tmp_path / "checkpoints").write_text("")
    assert not trainer.save(tmp_path, 1)
    assert "NotADirectoryError" in caplog.messages[0]
    assert caplog.messages[0].endswith("newest good checkpoint is none")


def mounts_tmpfs(tmp_path: Path) -> bool:
    try:
        done = subprocess.run(["unshare", "-rm", "sh", "-c", f"{TMPFS} {tmp_path}"], capture_output=True)
    except FileNotFoundError:
        return False
    return done.returncode == 0


@pytest.mark.slow
def test_a_full_disk_costs_no_checkpoint(tmp_path):
    if not mounts_tmpfs(tmp_path):
        pytest.skip("runs on Linux where `unshare -rm` may mount a tmpfs")
    disk = tmp_path / "disk"
    disk.mkdir()
    run = " ".join(command("filled", disk))
    work(["unshare", "-rm", "sh", "-c", f"{TMPFS} {disk} && {run} && cp {disk}/*.json {tmp_path}"])
    found = results("filled", tmp_path)
    assert found["step"] > 2
    assert found["full"] == [f"step-{step:08d}" for step in range(1, found["step"])]
    assert found["state"] == {"step": found["step"] - 1}
    assert found["after"] == found["before"]
    assert found["again"]
    assert len(found["messages"]) == 1
    assert "; 0.000 GB are free in " in found["messages"][0]


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_write_costs_no_checkpoint(tmp_path, caplog):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command("blocked", tmp_path), cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "inside").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    partial = tmp_path / "checkpoints" / "step-00000003.partial"
    assert {"model.safetensors", "optimizer.bin"} <= {file.name for file in partial.iterdir()}
    assert not (partial.with_suffix("")).exists()

    trainer = Trainer(Accelerator(cpu=True), Blocker())
    assert load_newest(trainer.accelerator, tmp_path) == {"step": 2}
    assert [trainer.update() for _ in range(2)] == json.loads((tmp_path / "losses.json").read_text())
    assert not caplog.messages
    assert trainer.save(tmp_path, 3)
    assert not partial.exists()


@pytest.fixture(scope="module")
def ddp(tmp_path_factory) -> Path:
    """The folder in which two processes under DDP have been."""
    folder = tmp_path_factory.mktemp("ddp")
    work(command("two", folder, "--config_file scripts/accelerate/cpu_ddp.yaml"))
    return folder


@pytest.mark.slow
def test_two_processes_agree(ddp):
    main, other = (results("two", ddp, rank) for rank in range(2))
    for found in (main, other):
        assert found["engine"] == "MULTI_CPU"
        assert found["state"] == found["damaged"] == {"step": 1}
        assert found["losses"] == found["resumed"] == found["after"]
        assert not found["0 fails"][0]
        assert not found["1 fails"][0]
        assert (found["quiet"], found["agreed"]) == (None, "SIGTERM")
    assert main["losses"] != other["losses"]
    assert main["0 fails"][1] == main["1 fails"][1] == ["step-00000001"]
    assert (main["asked"], other["asked"]) == (None, "SIGTERM")
    assert not other["messages"]
    assert "(process 0: SafetensorError" in main["messages"][0]
    assert "(process 1: RuntimeError" in main["messages"][1]
    assert main["messages"][2].startswith(
        "checkpoint step-00000002 is damaged (random_states_1.pkl: 0 instead"
    )
    with pytest.raises(
        ValueError, match=r"is of 2 process\(es\) under MULTI_CPU, not 1 process\(es\) under NO"
    ):
        load_newest(Trainer(Accelerator(cpu=True)).accelerator, ddp)


@pytest.mark.slow
def test_two_processes_agree_under_fsdp2(ddp, tmp_path):
    work(command("sharded", tmp_path, "--config_file scripts/accelerate/fsdp2.yaml --mixed_precision no"))
    main, other = (results("sharded", tmp_path, rank) for rank in range(2))
    for rank, found in enumerate((main, other)):
        assert (found["version"], found["units"].count("FSDPTransformerBlock")) == (2, 2)
        assert found["losses"] == pytest.approx(results("two", ddp, rank)["losses"], abs=1e-5)
        assert found["losses"] == found["resumed"]
        assert (found["tied"], found["whole"], found["here"]) == (True, 61, 31 - rank)
        assert (found["state"], found["1 fails"][0], found["lifted"]) == ({"step": 1}, False, True)
        assert found["messages"][0].startswith("FSDP was asked for, but Accelerate runs MULTI_CPU")
    assert main["1 fails"][1] == ["step-00000001"]
    assert "(process 0: its files of process 1: OSError(27" in main["messages"][1]
    saved, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values())
    assert saved.config.architectures == ["TransformerBlockForCausalLM"]
    assert [file.name for file in (tmp_path / "model").glob("*.safetensors")] == ["model.safetensors"]
    sums = {name: value.double().sum().item() for name, value in saved.named_parameters()}
    assert sums == pytest.approx(main["sums"], abs=1e-12)


@pytest.mark.parametrize(
    ("engine", "kind", "expected"),
    [
        ("MULTI_GPU", None, True),
        ("FSDP", "SHARDED_STATE_DICT", True),
        ("FSDP", "FULL_STATE_DICT", False),
        ("DEEPSPEED", None, False),
    ],
)
def test_where_one_process_cannot_fail_alone_training_stops(engine, kind, expected):
    plugin = SimpleNamespace(state_dict_type=kind and StateDictType[kind])
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator = SimpleNamespace(distributed_type=DistributedType[engine], state=state)
    assert may_fail_alone(accelerator) is expected


def test_signals_are_noted_and_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignal() as stop:
        assert stop.asked is None
        for number in (signal.SIGTERM, signal.SIGINT):  # as the launcher and the terminal send them
            os.kill(os.getpid(), number)
            assert stop.asked == number.name
        assert stop.agreed(Accelerator(cpu=True)) == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
