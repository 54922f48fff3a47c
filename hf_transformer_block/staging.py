"""What of a training folder goes to the Hub: a clean copy of the files of a model, and of nothing else."""

import json
import re
import shutil
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open


MODEL_FILES = (
    *("config.json", "generation_config.json"),
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"),
    *("configuration_hf_transformer_block.py", "modeling_hf_transformer_block.py"),
    "pipeline_hf_transformer_block.py",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "source.spm", "target.spm"),
    *("chat_template.jinja", "README.md", "LICENSE", "training_curve.png", "metrics.json"),
)
DANGEROUS = {
    "a pickle, which can run code where it is loaded": (
        *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib", "*.npy", "*.npz", "*.h5"),
    ),
    "an optimizer's or trainer's state": ("optimizer*", "scheduler*", "rng_state*", "trainer_state*"),
    "secret": (".env*", "*.pem", "*.key", "id_rsa*", "id_ed25519*", ".netrc", "token", "stored_tokens"),
    "a cache": ("__pycache__", ".cache", "*.pyc", ".ipynb_checkpoints"),
}
SECRETS = {
    "a Hugging Face token": r"\b(hf|api_org)_[A-Za-z0-9]{20,}",
    "a GitHub token": r"\b(gh[opsur]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40,})",
    "an AWS key": r"\bAKIA[0-9A-Z]{16}\b",
    "an API key": r"\bsk-[A-Za-z0-9_-]{32,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}
HOME = r"(?<![\w.])(/home/|/root/|/Users/|[A-Za-z]:\\+Users\\)[^\s\"'`]*"


@dataclass(frozen=True)
class Staged:
    """A clean folder, ready to push."""

    folder: Path
    files: dict[str, int]  # name -> bytes
    left_out: list[str]  # names in the training folder which stay there
    is_whole: bool = True  # else the model card alone


def users_files(config: dict[str, Any]) -> set[str]:
    """Returns the modules, as files, that a configuration names besides ours."""
    named = [*config.get("auto_map", {}).values()]
    named += [entry["impl"] for entry in config.get("custom_pipelines", {}).values()]
    names = [name for entry in named for name in (entry if isinstance(entry, list | tuple) else [entry])]
    return {f"{name.split('--')[-1].split('.')[0]}.py" for name in names if name}


def read_config(folder: Path) -> dict[str, Any]:
    """Returns a folder's configuration; raises ValueError unless it holds a saved model of the family."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} holds no config.json: give a folder that train.py or save_pretrained wrote"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no JSON ({error}): save the model again") from error
    if "auto_map" not in config:
        raise ValueError(f"{file} has no auto_map: only models of this family load by their own code")
    return config


def refuse_dangerous(folder: Path) -> None:
    """Raises ValueError for a file which nobody means to publish, rather than leave it out without a word."""
    for file in sorted(folder.iterdir()):
        for what, patterns in DANGEROUS.items():
            if any(fnmatch(file.name.lower(), pattern) for pattern in patterns):
                raise ValueError(f"{file} is {what}: move it out of the folder before you push")


def check_json(file: Path) -> None:
    """Raises ValueError for text that is no strict JSON, or that holds an absolute path."""

    def refuse(number: str) -> None:
        raise ValueError(
            f"{file} holds {number}, which JSON has no number for: mend the metric, or remove it"
        )

    def values(node: Any) -> list[str]:
        if isinstance(node, dict):
            return [text for value in node.values() for text in values(value)]
        if isinstance(node, list):
            return [text for value in node for text in values(value)]
        return [node] if isinstance(node, str) else []

    try:
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON ({error}): save the model again") from error
    for text in values(content):
        if re.match(r"/[^/\s]+/[^/]|[A-Za-z]:[\\/]", text):
            raise ValueError(f"{file} holds the path {text!r} of this machine: put a name in its place")


def check_text(file: Path) -> None:
    """Raises ValueError for a text file with something that looks like a token, or a path of this machine."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}): mend it") from error
    for what, pattern in SECRETS.items():
        if found := re.search(pattern, text):
            shown = found[0][:6]
            raise ValueError(f"{file} holds what looks like {what} ({shown}...): remove it, and revoke it")
    if file.suffix != ".json" and (found := re.search(HOME, text)):
        raise ValueError(f"{file} holds the path {found[0]!r} of this machine: put a name in its place")


def check_weights(folder: Path, names: set[str]) -> None:
    """Raises ValueError unless the weights are whole safetensors files, all of them there."""
    index = folder / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index.name in names:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    elif "model.safetensors" not in names:
        raise ValueError(f"{folder} holds no model.safetensors: let the training finish, or save the model")
    found = {name for name in names if name.endswith(".safetensors")}
    if missing := sorted(shards - found):
        raise ValueError(f"{folder} lacks {missing[0]}, which {index.name} names: save the model again")
    if extra := sorted(found - shards):
        raise ValueError(f"{folder / extra[0]} is not part of the model: delete it")
    for name in sorted(shards):
        try:
            with safe_open(folder / name, "pt"):  # reads the header, and compares sizes
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{folder / name} is no whole safetensors file ({error}): save it again"
            ) from error


def copy_file(file: Path, target: Path) -> None:
    """Copies a file; weights, which may be large, as a symbolic link where the system has them."""
    if file.suffix == ".safetensors":
        try:
            target.symlink_to(file.resolve())
            return
        except OSError:
            pass
    shutil.copyfile(file, target)


def stage(folder: str | Path, target: str | Path, card: str, license_file: Path | None = None) -> Staged:
    """
    Copies what belongs to a model into an empty folder.

    Args:
        folder: what train.py or `save_pretrained` left.
        target: an empty folder.
        card: text that becomes README.md.
        license_file: goes along as LICENSE, unless the folder has one of its own.

    Raises:
        ValueError: for a folder that lacks something, or holds what is not to be published; it is named.
    """
    folder, target = Path(folder), Path(target)
    config = read_config(folder)
    refuse_dangerous(folder)
    patterns = (*MODEL_FILES, *users_files(config))
    found = sorted(file for file in folder.iterdir() if any(fnmatch(file.name, name) for name in patterns))
    names = {file.name for file in found}
    for missing in sorted(users_files(config) - names):
        raise ValueError(f"{folder} lacks {missing}, which its config.json names: save the model again")
    check_weights(folder, names)
    for file in found:
        if not file.is_file():
            raise ValueError(f"{file} is no plain file: put the file itself into the folder")
        copy_file(file, target / file.name)
    (target / "README.md").write_text(card, encoding="utf-8")
    if license_file and "LICENSE" not in names:
        shutil.copyfile(license_file, target / "LICENSE")
    for file in sorted(target.iterdir()):
        if file.suffix not in (".safetensors", ".png", ".model", ".spm"):
            check_text(file)
        if file.suffix == ".json" and not file.name.startswith(("tokenizer.", "vocab.")):
            check_json(file)
    left_out = sorted(file.name for file in folder.iterdir() if file.name not in names)
    files = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
    return Staged(target, files, left_out)
