"""Proves that a stranger who loads a model gets what its author has."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from huggingface_hub import get_token
from safetensors.torch import load_file


PROBE = Path(__file__).with_name("probe.py")


def probe(model: str | Path, revision: str | None = None, *, is_stranger: bool, has_tokenizer: bool) -> dict:
    """
    Returns what a model computes on fixed inputs, in a process of its own with an empty cache.

    The user's token is lent only to the process that loads from the Hub, never to a folder's code.

    Raises:
        ValueError: it does not load, or is not fit, with that process's error.
    """
    request = {"model": str(model.resolve() if isinstance(model, Path) else model), "revision": revision}
    request |= {"is_stranger": is_stranger, "has_tokenizer": has_tokenizer}
    with tempfile.TemporaryDirectory() as home:
        caches = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_MODULES_CACHE", "HF_XET_CACHE")
        tokens = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")
        environment = {name: value for name, value in os.environ.items() if name not in caches + tokens}
        environment |= {"HF_HOME": home, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        if "PYTHONPATH" in environment:  # relative to a folder which the process leaves
            paths = environment["PYTHONPATH"].split(os.pathsep)
            environment["PYTHONPATH"] = os.pathsep.join(str(Path(path).resolve()) for path in paths)
        if revision is None:
            environment["HF_HUB_OFFLINE"] = "1"
        elif token := get_token():
            environment["HF_TOKEN"] = token
        result = f"{home}/result.safetensors"
        command = [sys.executable, "-c", PROBE.read_text(encoding="utf-8"), json.dumps(request), result]
        done = subprocess.run(
            command, env=environment, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            errors = re.findall(r"^\w[\w.]*(?:Error|Exception)\b.*", done.stderr, flags=re.MULTILINE)
            told = errors[-1] if errors else f"exit code {done.returncode}"
            is_unfit = told.startswith("UnfitError: ")  # of probe.py, which has loaded it
            raise ValueError(told.removeprefix("UnfitError: ") if is_unfit else f"it does not load: {told}")
        return load_file(result)


def check_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Returns the largest difference of two probes; raises ValueError if it is more than rounding."""
    if ours.keys() != theirs.keys():
        raise ValueError(f"it returns {sorted(theirs)} where the original returns {sorted(ours)}")
    differences = [0.0]
    for name, original in ours.items():
        if original.shape != theirs[name].shape:
            raise ValueError(
                f"its {name} have shape {tuple(theirs[name].shape)}, not {tuple(original.shape)}"
            )
        differences += [float((original - theirs[name]).abs().max())] if original.numel() else []
        if not torch.allclose(original, theirs[name], rtol=1e-5, atol=1e-5):
            raise ValueError(f"its {name} differ by {differences[-1]:.3g} from the original's")
    return max(differences)


def prove(original: dict[str, torch.Tensor], model: Path | str, revision: str | None = None) -> str:
    """
    Compares a stranger's model with the original, and returns how it went.

    Args:
        original: what `probe` gave for the training's folder.
        model: staged folder, or id on the Hub with a commit as `revision`.

    Raises:
        ValueError: the stranger cannot load it, or gets other numbers.
    """
    difference = check_same(
        original, probe(model, revision, is_stranger=True, has_tokenizer="tokens" in original)
    )
    where = "from the Hub" if revision else "from its files"
    return f"loads {where} without this package; largest difference of logits {difference:.3g}"
