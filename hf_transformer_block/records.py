"""What a run leaves behind so that it can be understood: run.json, metrics.jsonl, a curve, and its engine."""

import fcntl
import json
import logging
import math
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, str_to_bool
from matplotlib.figure import Figure

from . import __version__


logger = logging.getLogger(__name__)
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")


def replace_file(file: Path, text: str) -> None:
    """Writes a file so that a kill leaves either the old or the new one."""
    new = file.with_name(f"{file.name}.new")
    with new.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(file)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder; raises ValueError if one is in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ValueError(
            f"cannot write into {folder}: {error.strerror}; give another --output_dir"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ValueError(
            f"another run is writing into {folder}: wait for it, or give another --output_dir"
        ) from error
    except OSError:  # not every network's file system has locks
        logger.warning("%s cannot be locked: start no second run into it", folder)
    try:
        yield
    finally:
        os.close(descriptor)


def versions() -> dict[str, str]:
    """Returns the versions of Python, of this package and of those that a result depends on."""
    found = {"python": platform.python_version(), "hf_transformer_block": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def code_version(folder: Path = Path(__file__).parent) -> dict[str, str | bool] | None:
    """Returns the git commit of a folder's code and whether it was changed since; None without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", ".")  # not some other project that has this one installed inside
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain", "."))}
    except (OSError, subprocess.SubprocessError):
        return None


def command_line(words: list[str]) -> str:
    """Returns a command as a shell takes it; absolute paths lose their folders, which say who ran it."""
    return shlex.join(re.sub(r"(^|=)/.*/(?=[^/])", r"\1", word) for word in words)


def host_facts(accelerator: Accelerator) -> dict[str, Any]:
    """Returns what the run's speed and its last digits depend on."""
    device = accelerator.device
    return {
        "processes": accelerator.num_processes,
        "engine": accelerator.distributed_type.value,
        "mixed_precision": accelerator.mixed_precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def write_run(
    output_dir: str | Path, arguments: dict[str, Any], accelerator: Accelerator, fingerprints: dict[str, Any]
) -> None:
    """Appends to run.json, a list with an entry for each start, what ran where on which data."""
    if not accelerator.is_main_process:
        return
    file = Path(output_dir) / "run.json"
    starts = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    start = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "arguments": arguments,
        "data": fingerprints,
        "code": code_version(),
        "versions": versions(),
        "host": host_facts(accelerator),
    }
    replace_file(file, json.dumps([*starts, start], indent=2, ensure_ascii=False))


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values with None for the numbers that JSON cannot write."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


class MetricsLog:
    """
    The lines of metrics.jsonl, written by the main process: `{"step": 8, "loss": 2.5, "timing": {...}}`.

    Numbers that are not finite become null. `timing` holds what differs between two equal runs.
    """

    def __init__(self, output_dir: str | Path, is_main_process: bool = True) -> None:
        self.file = Path(output_dir) / "metrics.jsonl"
        self.is_main_process = is_main_process

    def write(self, step: int, values: Mapping[str, Any], timing: Mapping[str, float] | None = None) -> None:
        """Appends a line; on a full disk it is left out, with a warning."""
        if not self.is_main_process:
            return
        entry = {"step": step, **finite(values)} | ({"timing": finite(timing)} if timing else {})
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n"
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("ab", buffering=0) as stream:
                if stream.write(line.encode()) < len(line.encode()):
                    stream.truncate(size)  # else the next line would go on where this one broke off
                    raise OSError("no space is left")
        except OSError as error:
            logger.warning("%s lacks the line of step %d: %s", self.file, step, error.strerror or error)

    def read(self) -> list[dict[str, Any]]:
        """Returns the entries; a last line that a kill cut short does not count."""
        if not self.file.exists():
            return []
        *lines, _ = self.file.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines]

    def truncate(self, step: int) -> None:
        """Drops the lines after a step, which a run that resumes there writes again."""
        if self.is_main_process and self.file.exists():
            kept = [json.dumps(entry, ensure_ascii=False) for entry in self.read() if entry["step"] <= step]
            replace_file(self.file, "".join(f"{line}\n" for line in kept))


def plot_curve(history: list[dict[str, Any]], metric: str, file: str | Path) -> None:
    """
    Draws the training and the validation loss, and the validation's `metric` on an axis of its own.

    Args:
        history: entries of metrics.jsonl, with `loss`, or `eval_loss` and `eval_` + metric.
        metric: name of the task's score; "loss" when it has no other.
    """
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.set(xlabel="optimizer updates", ylabel="loss (nats per target)")
    scores = axes if metric == "loss" else axes.twinx()
    curves = [(axes, "loss", "training loss", "C0-"), (axes, "eval_loss", "validation loss", "C1o-")]
    if metric != "loss":
        scores.set_ylabel(metric)
        curves.append((scores, f"eval_{metric}", f"validation {metric}", "C2s--"))
    lines = []
    for where, name, label, style in curves:
        points = [(entry["step"], entry[name]) for entry in history if entry.get(name) is not None]
        lines += where.plot(*zip(*points, strict=True), style, label=label, markersize=4) if points else []
    axes.legend(handles=lines)
    figure.savefig(file, dpi=120, bbox_inches="tight")


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes held so far: of tensors on a GPU, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def check_engine(accelerator: Accelerator, environ: Mapping[str, str] = os.environ) -> None:
    """Raises ValueError where Accelerate, without a word, runs something else than its launcher asked for."""
    runs, processes = accelerator.distributed_type, accelerator.num_processes
    asked = int(environ.get("WORLD_SIZE", 1))
    if processes != asked:
        raise ValueError(
            f"{asked} processes were started, but Accelerate runs each alone: "
            "without a GPU set ACCELERATE_USE_CPU=true"
        )
    # what the launcher leaves where it starts one of several CPU processes: a port without a rank
    if "KMP_BLOCKTIME" in environ and "MASTER_PORT" in environ and "RANK" not in environ:
        raise ValueError(
            "several processes were asked for, but Accelerate started one: on a CPU leave --cpu away and use "
            "ACCELERATE_USE_CPU=true accelerate launch --config_file scripts/accelerate/cpu_ddp.yaml"
        )
    for engine in (DistributedType.FSDP, DistributedType.DEEPSPEED):
        if str_to_bool(environ.get(f"ACCELERATE_USE_{engine.value}", "false")) and runs != engine:
            raise ValueError(
                f"{engine.value} was asked for, but Accelerate runs {runs.value}, as it does without a GPU: "
                "take scripts/accelerate/cpu_ddp.yaml there"
            )
