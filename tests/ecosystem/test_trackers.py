"""Tests that tensorboard, trackio and wandb hold the numbers of metrics.jsonl, and those of the Trainer."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import tiny_tokens


pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')
pytestmark = pytest.mark.ecosystem

ROOT = Path(__file__).parents[2]
TRACKERS = ["tensorboard", "trackio", "wandb"]
TINY = (
    "--hidden_size 32 --num_hidden_layers 1 --num_attention_heads 2 --intermediate_size 32 --tokenizer word "
    "--max_length 16 --learning_rate 1e-2 --batch_size 8 --max_steps 6 --eval_steps 3 --logging_steps 1"
)


def read_tensorboard(folder: Path, project: str) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for events in folder.rglob("events.out.tfevents.*"):
        tracked = EventAccumulator(str(events)).Reload()
        for name in tracked.Tags()["scalars"]:
            found[name] = {event.step: event.value for event in tracked.Scalars(name)}
    return found


def read_trackio(folder: Path, project: str) -> dict[str, dict[int, float]]:
    """In a process of its own, for trackio reads its folder when it is imported."""
    code = (
        "import json, sys, trackio; from trackio.sqlite_storage import SQLiteStorage as storage\n"
        "[run] = storage.get_runs(sys.argv[1])\n"
        "print('LOGS', json.dumps(storage.get_logs(sys.argv[1], run)))"
    )
    env = {**os.environ, "TRACKIO_DIR": str(folder / "trackio")}
    done = subprocess.run([sys.executable, "-c", code, project], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("LOGS ")]
    return by_name(json.loads(line.removeprefix("LOGS ")), "step")


def read_chunks(data: bytes) -> Iterator[bytes]:
    """Yields the records of LevelDB's log format, which wandb writes: chunks in blocks of 32 KiB."""
    place, record = 7, b""  # after the header
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part of a record
            yield record
            record = b""


def read_wandb(folder: Path, project: str) -> dict[str, dict[int, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.rglob("run-*.wandb")
    records = map(Record.FromString, read_chunks(file.read_bytes()))
    entries = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
    ]
    return by_name(list(filter(None, entries)), "_step")


def by_name(entries: list[dict], step: str) -> dict[str, dict[int, float]]:
    """Returns the numbers of a log, {name: {step: number}}."""
    found: dict[str, dict[int, float]] = {}
    for entry in entries:
        for name, value in entry.items():
            if isinstance(value, int | float):
                found.setdefault(name, {})[entry[step]] = value
    return found


READERS = {"tensorboard": read_tensorboard, "trackio": read_trackio, "wandb": read_wandb}


@pytest.fixture(params=TRACKERS)
def tracker(request) -> str:
    pytest.importorskip(request.param, reason='runs after pip install "hf_transformer_block[ecosystem]"')
    return request.param


def command(tracker: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Returns a training with a tracker, and the environment that keeps its files in the folder."""
    texts = [" ".join(f"w{index}" for index in row) for row in tiny_tokens(40, 5).tolist()]
    for name, order in (("train.a", 1), ("train.b", -1)):
        lines = [" ".join(text.split()[::order]) for text in texts]
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    flags = [*TINY.split(), "--train_files", str(folder / "train.a"), str(folder / "train.b")]
    flags += ["--output_dir", str(folder / "out"), "--report_to", tracker]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    env |= {"TRACKIO_DIR": str(folder / "trackio"), "PYTHONPATH": str(ROOT)}
    return [sys.executable, str(ROOT / "scripts" / "train.py"), *flags], env


def test_a_run_tells_its_tracker_what_it_writes_into_metrics_jsonl(tracker, tmp_path):
    line, env = command(tracker, tmp_path)
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    tracked = READERS[tracker](tmp_path, "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = {entry["step"]: entry["loss"] for entry in lines if "loss" in entry}
    assert [*losses] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "learning_rate", "grad_norm", "epoch"):
        expected = {entry["step"]: entry[name] for entry in lines if name in entry}
        assert tracked[f"train/{name}"] == pytest.approx(expected, rel=1e-5), name
    evaluated = {entry["step"]: entry["eval_loss"] for entry in lines if "eval_loss" in entry}
    assert [*evaluated] == [3, 6]
    assert tracked["eval/loss"] == pytest.approx(evaluated, rel=1e-5)


TRAINER = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
folder, tracker, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(5, 53).view(8, 6)]
arguments = TrainingArguments(
    output_dir=out, run_name="run", project="out", report_to=[tracker], logging_steps=1, max_steps=4,
    per_device_train_batch_size=2, save_strategy="no", use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
print("HISTORY", json.dumps([entry for entry in trainer.state.log_history if "loss" in entry]))
"""


def test_the_librarys_trainer_tells_its_tracker_the_losses(tracker, folder_of, tmp_path):
    env = {**os.environ, "WANDB_MODE": "offline", "WANDB_PROJECT": "out", "WANDB_DIR": str(tmp_path)}
    env |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "TENSORBOARD_LOGGING_DIR": str(tmp_path / "events")}
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, str(folder_of("decoder")), tracker, str(tmp_path / "out")],
        **{"env": env, "cwd": tmp_path, "capture_output": True, "text": True, "timeout": 600},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("HISTORY ")]
    history = json.loads(line.removeprefix("HISTORY "))
    assert len(history) == 4
    tracked = READERS[tracker](tmp_path, "out")
    for name in ("loss", "grad_norm", "learning_rate"):
        expected = {entry["step"]: entry[name] for entry in history}
        # wandb counts its own steps, and has the Trainer's beside them
        steps = tracked.get("train/global_step", {step: step for step in expected})
        found = {steps[step]: value for step, value in tracked[f"train/{name}"].items()}
        assert found == pytest.approx(expected, rel=1e-5), name
