"""Tests of scripts/train.py against what happens to runs: kills, signals, damage, full disks, NaN."""

import json
import math
import multiprocessing
import os
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_transformer_block.checkpoints import checkpoints, damage


datasets = pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
TINY = (
    "--hidden_size 32 --num_hidden_layers 1 --num_attention_heads 2 --intermediate_size 32 --tokenizer word "
    "--warmup_steps 5 --max_length 24 --seed 3 --learning_rate 1e-2 --max_steps 40 --eval_steps 8 "
    "--eval_pairs 3 --save_steps 3 --logging_steps 1"
)
PAIRS = f"--train_files DATA/a.txt DATA/b.txt --tokens_per_batch 60 {TINY}"
KINDS = {
    "pairs": PAIRS,
    "pairs, averaged": f"{PAIRS} --ema_decay 0.9",
    "packed": f"--task causal-lm --train_files DATA/texts.jsonl --batch_size 4 {TINY}",
    # 1,900 rows, of which 500 are held out and 1,000, or 50 updates, are drawn from together
    "stream": f"--train_files DATA/pairs.jsonl --streaming --batch_size 20 {TINY} --max_steps 70",
}
# starts a process of its own in a tenth of a second, as all imports are made once
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["jinja2", "sacrebleu", "hf_transformer_block.preparing", "hf_transformer_block.run"]
)


def work(words: list[str], log: Path, environ: dict[str, str], cache: Path, largest_file: int | None) -> None:
    """Is `python scripts/train.py`, which prints into `log`; its other files can be limited in size."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environ)
    if "WORLD_SIZE" in environ:
        torch.set_num_threads(1)  # as the launcher does
    datasets.config.HF_DATASETS_CACHE = cache
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    sys.argv = ["scripts/train.py", *words]
    runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="__main__")


@dataclass
class Training:
    """A training in a folder, started again and again with the same flags, by one or two processes."""

    folder: Path
    flags: str
    processes: int = 1

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def words(self, *more: str) -> list[str]:
        return [*self.flags.split(), "--output_dir", str(self.out), *more]

    def start(self, *more: str, largest_file: int | None = None) -> list[multiprocessing.Process]:
        """Starts the processes as a launcher would."""
        self.log.unlink(missing_ok=True)
        environ = {"ACCELERATE_USE_CPU": "true"}
        if self.processes > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        started = []
        for rank in range(self.processes):
            if self.processes > 1:
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                environ = {**environ, **ranks, "WORLD_SIZE": str(self.processes)}
            arguments = (self.words(*more), self.log, environ, self.folder / "cache", largest_file)
            started.append(FORKS.Process(target=work, args=arguments))
            started[-1].start()
        return started

    def run(self, *more: str, largest_file: int | None = None) -> str:
        """Returns what a run to the end prints."""
        started = self.start(*more, largest_file=largest_file)
        assert self.codes(started) == [0] * self.processes, self.printed()
        return self.printed()

    def codes(self, started: list[multiprocessing.Process]) -> list[int | None]:
        """Returns the exit codes of processes that must come to an end."""
        for process in started:
            process.join(120)
        codes = [process.exitcode for process in started]
        for process in started:
            process.kill()
        return codes

    def printed(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def kill(
        self, started: list[multiprocessing.Process], when: Callable[[], bool], after: float = 0
    ) -> bool:
        """Kills the processes `after` seconds after `when`; returns whether they were running."""
        wait(lambda: when() or any(process.exitcode is not None for process in started))
        time.sleep(after)
        were_running = [process.exitcode is None for process in started]
        for process in reversed(started):
            process.kill()
        killed = -signal.SIGKILL in self.codes(started)
        return killed and all(were_running)

    def lines(self) -> list[dict]:
        """Returns metrics.jsonl without what differs between equal runs."""
        file = self.out / "metrics.jsonl"
        *lines, _ = file.read_text().split("\n") if file.exists() else [""]
        return [
            {name: value for name, value in json.loads(line).items() if name != "timing"} for line in lines
        ]

    @property
    def step(self) -> int:
        """The newest update that metrics.jsonl knows."""
        lines = self.lines()  # once, for the training may replace the file meanwhile
        return lines[-1]["step"] if lines else 0

    def metrics(self) -> dict:
        """Returns what equal runs write into metrics.json."""
        metrics = json.loads((self.out / "metrics.json").read_text())
        return {name: metrics[name] for name in ("history", "best_step", "scores")}

    def partial(self) -> list[Path]:
        return list((self.out / "checkpoints").glob("*.partial"))

    def steps(self) -> list[int]:
        """Returns the updates whose checkpoints are there, and makes sure that these are whole."""
        found = checkpoints(self.out)
        assert [damage(folder) for folder in found] == [""] * len(found)
        return [int(folder.name.removeprefix("step-")) for folder in found]

    def copy(self, folder: Path) -> "Training":
        """Returns the same training in another folder, as far as it has come."""
        return Training(shutil.copytree(self.folder, folder), self.flags)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def assert_equal(resumed: Training, whole: Training) -> None:
    """Makes sure that an interrupted training left what the uninterrupted one did, bit by bit."""
    assert resumed.lines() == whole.lines()
    assert [line["step"] for line in whole.lines() if "loss" in line] == [*range(1, whole.step + 1)]
    assert resumed.metrics() == whole.metrics()
    weights = [(training.out / "model.safetensors").read_bytes() for training in (resumed, whole)]
    assert weights[0] == weights[1]
    assert not resumed.partial()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder of tiny files: numbers in words and these reversed, and the same as texts and as a table."""
    folder = tmp_path_factory.mktemp("data")
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    rows = [[words[int(digit)] for digit in str(37 * index + 100)] for index in range(1900)]
    pairs = [(" ".join(row), " ".join(reversed(row))) for row in rows]
    (folder / "a.txt").write_text("".join(f"{source}\n" for source, _ in pairs[:60]))
    (folder / "b.txt").write_text("".join(f"{target}\n" for _, target in pairs[:60]))
    (folder / "c.txt").write_text("".join(f"{source}\n" for source, _ in pairs[60:80]))
    (folder / "d.txt").write_text("".join(f"{target}\n" for _, target in pairs[61:81]))
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in pairs)
    )
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"{source} . {target}"}) + "\n" for source, target in pairs[:120])
    )
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Training:
    """An uninterrupted run on pairs."""
    training = Training(tmp_path_factory.mktemp("whole"), PAIRS.replace("DATA", str(data)))
    training.run()
    assert training.metrics()["best_step"] == 16
    return training


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory) -> Training:
    """The same run, which a signal stopped after two checkpoints."""
    training = Training(tmp_path_factory.mktemp("stopped"), PAIRS.replace("DATA", str(data)))
    started = training.start()
    wait(lambda: training.step > 3 or started[0].exitcode is not None)
    os.kill(started[0].pid, signal.SIGTERM)
    assert training.codes(started) == [0], training.printed()
    assert training.steps()[-1] < 15  # the best evaluation, of update 16, is still to come
    return training


@pytest.mark.parametrize(
    ("kind", "processes"), [("pairs, averaged", 1), ("packed", 1), ("stream", 1), ("pairs", 2)]
)
def test_kills_at_any_moment_change_nothing(kind, processes, data, tmp_path):
    whole = Training(tmp_path / "whole", KINDS[kind].replace("DATA", str(data)), processes)
    whole.run()
    killed = Training(tmp_path / "killed", whole.flags, processes)
    steps = whole.step
    draw = random.Random(f"{kind} {processes}")
    # while it reads; while it writes a checkpoint, which takes a few milliseconds; in each later quarter
    assert killed.kill(killed.start(), lambda: True, after=draw.uniform(0, 1))
    while not killed.partial():
        assert killed.kill(killed.start("--resume"), lambda: bool(killed.partial()))
    kills = 0
    for quarter in (1, 2, 3):
        step = draw.randrange(steps * quarter // 4 + 3, steps * (quarter + 1) // 4 - 2)
        started = killed.start("--resume")
        kills += killed.kill(started, lambda step=step: killed.step >= step, after=draw.uniform(0, 0.05))
    assert kills > 1
    before = killed.steps()
    assert f"continuing after update {before[-1]}" in killed.run("--resume")
    assert_equal(killed, whole)
    assert killed.steps() == whole.steps() == sorted({whole.metrics()["best_step"], steps - 1, steps})


@pytest.mark.parametrize("fault", ["truncated", "flipped"])
def test_a_damaged_checkpoint_is_named_and_left_for_the_one_before(fault, whole, stopped, tmp_path):
    damaged = stopped.copy(tmp_path / fault)
    *_, before, newest = damaged.steps()
    folder = checkpoints(damaged.out)[-1]
    if fault == "truncated":
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(1000)
        message = (
            f"model.safetensors: 1000 instead of {(whole.out / 'model.safetensors').stat().st_size} bytes"
        )
    else:
        content = bytearray((folder / "optimizer.bin").read_bytes())
        content[len(content) // 2] ^= 1
        (folder / "optimizer.bin").write_bytes(content)
        message = "optimizer.bin: checksum differs"
    printed = damaged.run("--resume")
    assert f"step-{newest:08d} is damaged ({message}): going back to step-{before:08d}" in printed
    assert f"continuing after update {before}" in printed
    assert_equal(damaged, whole)
    assert damaged.steps() == whole.steps()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_a_run_with_a_checkpoint(name, whole, data, tmp_path):
    training = Training(tmp_path / name, whole.flags)
    with training.log.open("w") as log:
        command = [sys.executable, "scripts/train.py", *training.words()]
        environ = {**os.environ, "ACCELERATE_USE_CPU": "true"}
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        wait(lambda: training.step > 10 or process.poll() is not None)
        process.send_signal(signal.Signals[name])
        assert process.wait(60) == 0, training.printed()
    step = training.step
    assert f"stopped by {name} after update {step}: --resume goes on from there" in training.printed()
    assert "Traceback" not in training.printed()
    assert training.steps()[-1] == step < 40
    assert f"continuing after update {step}" in training.run("--resume")
    assert_equal(training, whole)


def test_a_signal_to_one_of_two_processes_stops_both(data, tmp_path):
    whole = Training(tmp_path / "whole", PAIRS.replace("DATA", str(data)), processes=2)
    whole.run()
    training = Training(tmp_path / "stopped", whole.flags)
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "scripts/accelerate/cpu_ddp.yaml",
    ]
    environ = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    with training.log.open("w") as log:
        command = [*launch, "scripts/train.py", *training.words()]
        launcher = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        wait(lambda: training.step > 10 or launcher.poll() is not None)
        workers = [
            child
            for child in psutil.Process(launcher.pid).children()
            if "scripts/train.py" in child.cmdline()
        ]
        assert len(workers) == 2
        [other] = [child for child in workers if child.environ()["RANK"] == "1"]
        other.send_signal(signal.SIGTERM)
        assert launcher.wait(120) == 0, training.printed()
    step = training.step
    assert training.printed().count(f"stopped by SIGTERM after update {step}: --resume") == 1
    assert training.steps()[-1] == step < 40
    training.processes = 2
    assert f"continuing after update {step}" in training.run("--resume")
    assert_equal(training, whole)


def contents(training: Training) -> dict[str, bytes]:
    """Returns the files of all checkpoints."""
    folder = training.out / "checkpoints"
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_training_goes_on_where_checkpoints_do_not_fit(whole, stopped, tmp_path):
    """Weights are smaller than the limit, which the optimizer's state is not."""
    full = stopped.copy(tmp_path / "full")
    before = contents(full)
    printed = full.run("--resume", largest_file=100_000)
    assert "Traceback" not in printed
    newest = f"the newest good checkpoint is step-{stopped.steps()[-1]:08d}"
    for step in (12, 16, 39, 40):
        assert f"checkpoint step-{step:08d} could not be written (process 0: " in printed
    assert printed.count(newest) == printed.count("could not be written (process 0: ") > 8
    assert contents(full) == before
    assert full.lines() == whole.lines()
    # the best weights are lost, so the last are the model, and this is said
    scores, history = full.metrics()["scores"], full.metrics()["history"]
    assert scores["loss"] == history[-1]["loss"]
    assert "the best evaluation, after update 16, left no weights: the last ones become" in printed


def test_a_disk_too_full_to_begin_loses_nothing(whole, stopped, tmp_path):
    full = stopped.copy(tmp_path / "full")
    before = contents(full)
    [code] = full.codes(full.start("--resume", largest_file=500))  # arguments.json is larger
    assert code
    assert "train.py: cannot write into" in full.printed()
    assert contents(full) == before
    full.run("--resume")
    assert_equal(full, whole)


def test_a_full_disk_ends_a_run_in_a_sentence_and_loses_nothing(whole, stopped, tmp_path):
    """Neither the curve nor the model fits."""
    full = stopped.copy(tmp_path / "full")
    before = contents(full)
    environ = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_DATASETS_CACHE": str(full.folder / "cache")}
    done = subprocess.run(
        [sys.executable, "scripts/train.py", *full.words("--resume")],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY)),
    )
    assert done.returncode
    assert "Traceback" not in done.stdout, done.stdout[-3000:]
    assert done.stdout.splitlines()[-1].startswith("train.py: ")
    assert contents(full) == before
    full.run("--resume")
    assert_equal(full, whole)


@torch.no_grad()
def loss_of(folder: Path, weights: Path, sources: Path, targets: Path) -> float:
    """Returns the mean loss (nats) of a folder's model, with weights of its own or a checkpoint's."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
    assert set(missing) <= set(model.all_tied_weights_keys)
    assert not unexpected
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for source, target in zip(
        sources.read_text().splitlines(), targets.read_text().splitlines(), strict=True
    ):
        labels = tokenizer(target, return_tensors="pt")["input_ids"]
        logits = model(**tokenizer(source, return_tensors="pt"), labels=labels).logits
        total += torch.nn.functional.cross_entropy(logits[0].double(), labels[0], reduction="sum").item()
        count += labels.numel()
    return total / count


def test_losses_that_are_not_finite_end_a_run_before_they_spoil_a_checkpoint(whole, data, tmp_path):
    training = Training(tmp_path / "nan", f"{whole.flags} --learning_rate 1e9 --save_steps 2")
    [code] = training.codes(training.start())
    printed = " ".join(training.printed().split())
    assert code
    assert "Traceback" not in printed
    # the learning rate is 0 in the first update; the weights after the third give no number any more
    found = re.search(
        r"train.py: loss or gradient was not finite in 5 updates in a row, the last being update 8 \(rows "
        r"(.*?) of those to train on; the first begins .*?\); "
        r"the last good checkpoint is step-(\d+)\. Look at these rows",
        printed,
    )
    assert found, printed[-2000:]
    rows = [int(row) for row in found[1].split(", ")]
    assert rows == sorted(set(rows))
    assert 1 <= rows[0] < rows[-1] <= 57
    assert "in update 4 (rows " in printed
    assert training.steps() == [2]
    assert int(found[2]) == 2
    for folder in checkpoints(training.out):
        weights = load_file(folder / "model.safetensors")
        assert all(value.isfinite().all() for value in weights.values())
        loss = loss_of(whole.out, folder / "model.safetensors", data / "a.txt", data / "b.txt")
        assert math.isfinite(loss)


@pytest.mark.parametrize("more", ["", "--ema_decay 0.5"])
def test_early_stopping_saves_the_best_evaluation(more, whole, data, tmp_path):
    validation = [data / "c.txt", data / "d.txt"]  # of other numbers: what is learnt makes it worse
    flags = (
        f"{whole.flags} --validation_files {validation[0]} {validation[1]} --eval_steps 5 --dropout 0 {more}"
    )
    training = Training(tmp_path / "early", f"{flags} --early_stopping_patience 2")
    training.run()
    history, best = training.metrics()["history"], training.metrics()["best_step"]
    losses = {entry["step"]: entry["loss"] for entry in history}
    assert best == min(losses, key=losses.get)
    assert [*losses] == [*range(5, best + 11, 5)]
    assert 5 < best < 30
    assert training.metrics()["scores"]["loss"] == pytest.approx(losses[best], abs=1e-6)
    saved = loss_of(training.out, training.out / "model.safetensors", *validation)
    assert saved == pytest.approx(losses[best], abs=1e-6)
    assert training.steps()[0] == best


def test_a_signal_to_the_launcher_of_one_process_reaches_the_training(data, tmp_path):
    training = Training(
        tmp_path / "launched", KINDS["pairs"].replace("DATA", str(data)) + " --max_steps 9999"
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", "scripts/train.py", *training.words()]
    log = tmp_path / "log"
    environ = {**os.environ, "ACCELERATE_USE_CPU": "true", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    with log.open("w") as stream:
        launcher = subprocess.Popen(launch, cwd=ROOT, env=environ, stdout=stream, stderr=stream)
        wait(lambda: checkpoints(training.out) != [])
        launcher.terminate()
        launcher.wait()
        wait(lambda: "stopped by SIGTERM after update" in log.read_text())
    step = int(re.search(r"stopped by SIGTERM after update (\d+)", log.read_text())[1])
    assert training.steps()[-1] == step
    assert damage(checkpoints(training.out)[-1]) == ""
