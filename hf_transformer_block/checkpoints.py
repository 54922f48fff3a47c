"""Checkpoints that outlive kills, full disks and damage, and the signals that ask a run to stop."""

import ctypes
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import StateDictType

from .reading import hash_file


logger = logging.getLogger(__name__)
MANIFEST = "manifest.json"


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Returns the folders of a run's finished checkpoints, oldest first; `damage` says which are whole."""
    return sorted((Path(output_dir) / "checkpoints").glob("step-*[0-9]"))


def folder_of(output_dir: str | Path, step: int) -> Path:
    """Returns where the checkpoint of a step is or would be."""
    return Path(output_dir) / "checkpoints" / f"step-{step:08d}"


def register_state(accelerator: Accelerator, *objects: object) -> None:
    """Adds objects with a state_dict to checkpoints, which store tied weights once, as `save_pretrained`."""
    accelerator.register_for_checkpointing(*objects)

    def drop_tied(models: list[nn.Module], states: list[dict], output_dir: str) -> None:
        # there are no states where an engine saves its own
        for model, state in zip(models, states, strict=False):
            tied = accelerator.unwrap_model(model).all_tied_weights_keys
            for name in [name for name in state if name.removeprefix("module.") in tied]:
                del state[name]

    accelerator.register_save_state_pre_hook(drop_tied)


def fingerprint(file: Path) -> list[int | str]:
    """Returns the size in bytes and the SHA-256 of a file's content."""
    return [file.stat().st_size, hash_file(file)]


def damage(folder: Path) -> str:
    """Returns "" for a whole checkpoint, else what is wrong with it."""
    name = MANIFEST
    try:
        for name, (size, digest) in json.loads((folder / MANIFEST).read_text(encoding="utf-8")).items():
            found = fingerprint(folder / name)
            if found[0] != size:
                return f"{name}: {found[0]} instead of {size} bytes"
            if found[1] != digest:
                return f"{name}: checksum differs"
    except (OSError, ValueError) as error:
        return f"{name}: {getattr(error, 'strerror', None) or 'not readable'}"
    return ""


def read_state(folder: Path) -> dict:
    """Returns a checkpoint's `state`, and `writer` as of `writer_of`."""
    return json.loads((folder / "state.json").read_text(encoding="utf-8"))


def sync(path: Path) -> None:
    """Returns when a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear(partial: Path) -> None:
    """Creates the empty folder for a checkpoint, and removes what interrupted ones left beside it."""
    for pattern in ("step-*.partial", "step-*.old"):
        for left in partial.parent.glob(pattern):
            shutil.rmtree(left)
    partial.mkdir(parents=True)


def discard(folder: Path) -> None:
    """Deletes a checkpoint, which first loses its name and so never looks finished."""
    shutil.rmtree(folder.rename(folder.with_suffix(".old")), ignore_errors=True)


def finish(partial: Path, folder: Path, content: dict) -> None:
    """Adds state.json and the manifest to what the processes wrote; renames all when it is on the disk."""
    (partial / "state.json").write_text(json.dumps(content), encoding="utf-8")
    paths = sorted(partial.rglob("*"))
    manifest = {path.relative_to(partial).as_posix(): fingerprint(path) for path in paths if path.is_file()}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*paths, partial / MANIFEST, partial):
        sync(path)
    if folder.exists():  # a damaged one, which the run went back behind
        discard(folder)
    partial.rename(folder)
    sync(folder.parent)


def attempt(write: Callable[..., None], *args: Any) -> str:
    """Returns "" if all was written, else why the system refused."""
    try:
        write(*args)
    except CheckpointException as error:  # of torch's sharded files; every process gets it
        process, (cause, _) = next(iter(error.failures.items()))
        return f"its files of process {process}: {cause!r}"
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save turns the system's into its own
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def agree(accelerator: Accelerator, fault: str) -> str:
    """Returns the first process's fault that is not "", the same on all processes."""
    faults = gather_object([fault and f"process {accelerator.process_index}: {fault}"])
    return next(filter(None, faults), "")


def may_fail_alone(accelerator: Accelerator) -> bool:
    """Whether a process whose write failed reaches the others, which wait for nothing else from it."""
    if accelerator.distributed_type == DistributedType.FSDP:
        kind = accelerator.state.fsdp_plugin.state_dict_type
        return kind == StateDictType.SHARDED_STATE_DICT  # the others are gathered between two files
    return accelerator.distributed_type != DistributedType.DEEPSPEED  # has barriers between its files


def writer_of(accelerator: Accelerator) -> str:
    """Says who writes a checkpoint: only as many processes under the same engine can read it."""
    return f"{accelerator.num_processes} process(es) under {accelerator.distributed_type.value}"


def warn_of_fault(folder: Path, fault: str) -> None:
    """Says why a checkpoint is not there, and which is."""
    place = next(parent for parent in folder.absolute().parents if parent.exists())
    good = next((found.name for found in reversed(checkpoints(folder.parents[1]))), "none")
    logger.warning(
        "checkpoint %s could not be written (%s; %.3f GB are free in %s): training goes on, and the newest "
        "good checkpoint is %s",
        *(folder.name, fault, shutil.disk_usage(place).free / 1e9, place, good),
    )


def save_checkpoint(accelerator: Accelerator, output_dir: str | Path, state: dict, keep: int = 2) -> bool:
    """
    Writes weights, optimizer, random states, what is registered and `state`; all processes call it together.

    Keeps the newest `keep` checkpoints and that of `state["best_step"]`. Returns False, after a warning, if
    it could not be written: older ones are as they were, and training may go on. Raises RuntimeError where
    the engine lets the other processes wait for the one that failed.
    """
    folder = folder_of(output_dir, state["step"])
    partial = folder.with_suffix(".partial")
    is_main = accelerator.is_main_process
    fault = agree(accelerator, attempt(clear, partial) if is_main else "")
    if not fault:
        fault = attempt(accelerator.save_state, str(partial))
        if fault and accelerator.num_processes > 1 and not may_fail_alone(accelerator):
            raise RuntimeError(
                f"checkpoint {folder.name} could not be written: {fault}; free space and resume"
            )
        fault = agree(accelerator, fault)
    if not fault:
        content = {"writer": writer_of(accelerator), "state": state}
        fault = agree(accelerator, attempt(finish, partial, folder, content) if is_main else "")
    if is_main and fault:
        shutil.rmtree(partial, ignore_errors=True)
        warn_of_fault(folder, fault)
    elif is_main:
        found = checkpoints(output_dir)
        # those behind this one are damaged, else the run would not have gone back
        kept = [one for one in found if one <= folder][-keep:]
        for old in set(found) - {*kept, folder_of(output_dir, state.get("best_step") or 0)}:
            attempt(discard, old)
    return not fault


def newest_whole(candidates: list[Path]) -> Path | None:
    """Returns the last undamaged of some checkpoints, and warns of those behind it."""
    names = ["the beginning", *(candidate.name for candidate in candidates)]
    for index in reversed(range(len(candidates))):
        fault = damage(candidates[index])
        if not fault:
            return candidates[index]
        logger.warning(
            "checkpoint %s is damaged (%s): going back to %s", names[index + 1], fault, names[index]
        )
    return None


def restore(accelerator: Accelerator, find: Callable[[], Path | None]) -> dict | None:
    """Restores, on all processes, the checkpoint that the main process finds, and returns its state."""
    folder = broadcast_object_list([find() if accelerator.is_main_process else None])[0]
    if folder is None:
        return None
    content, now = read_state(folder), writer_of(accelerator)
    if content["writer"] != now:
        raise ValueError(f"checkpoint {folder.name} is of {content['writer']}, not {now}: launch as before")
    accelerator.load_state(str(folder))
    return content["state"]


def load_newest(accelerator: Accelerator, output_dir: str | Path) -> dict | None:
    """
    Restores the newest undamaged checkpoint and returns its state, None where there is none.

    Raises ValueError for a checkpoint of another number of processes or another engine.
    """
    return restore(accelerator, lambda: newest_whole(checkpoints(output_dir)))


def load_step(accelerator: Accelerator, output_dir: str | Path, step: int) -> dict | None:
    """Does the same for the checkpoint of a step; None, and changes nothing, if that is damaged or gone."""
    folder = folder_of(output_dir, step)

    def find() -> Path | None:
        fault = damage(folder)
        if fault:
            logger.warning("checkpoint %s cannot be used (%s)", folder.name, fault)
        return None if fault else folder

    return restore(accelerator, find)


def follow_launcher() -> None:
    """
    Asks for SIGTERM when the `accelerate launch` that started this process ends, on Linux.

    For one process it passes no signal on, and a training that `kill` was meant for would live on.
    """
    command = Path(f"/proc/{os.getppid()}/cmdline")
    if command.exists() and b"accelerate" in command.read_bytes():
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG of prctl(2)


class StopSignal:
    """
    Notes SIGTERM and SIGINT while entered, in `asked`, so that a run can stop between two updates.

    A second SIGINT raises KeyboardInterrupt. Only the main thread can enter it.
    """

    NAMES = ("SIGTERM", "SIGINT")

    def __init__(self) -> None:
        self.asked: str | None = None

    def __enter__(self) -> "StopSignal":
        self._before = {name: signal.signal(signal.Signals[name], self._note) for name in self.NAMES}
        return self

    def __exit__(self, *error: object) -> None:
        for name, handler in self._before.items():
            signal.signal(signal.Signals[name], handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == self.asked == "SIGINT":
            raise KeyboardInterrupt
        self.asked = name

    def agreed(self, accelerator: Accelerator) -> str | None:
        """Returns the signal that any process got; all ask together, and so stop at the same update."""
        got = torch.tensor([float(name == self.asked) for name in self.NAMES], device=accelerator.device)
        counts = accelerator.reduce(got).tolist()
        return next((name for name, count in zip(self.NAMES, counts, strict=True) if count), None)
