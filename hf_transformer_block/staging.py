"""What of a training folder goes to the Hub: a clean copy of the files of a model, and of nothing else."""

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.dynamic_module_utils import get_relative_import_files

from .card import published_card
from .card_checks import front_matter


MODEL_FILES = (
    *("config.json", "generation_config.json"),
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"),
    *("configuration_hf_transformer_block.py", "modeling_hf_transformer_block.py"),
    "pipeline_hf_transformer_block.py",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "source.spm", "target.spm"),
    *("chat_template.jinja", "README.md", "LICENSE", "training_curve.png", "metrics.json"),
)
BINARY = (".safetensors", ".png", ".model", ".spm")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt")  # words of anybody's texts
DANGEROUS = {
    "a pickle, which can run code where it is loaded": (
        *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib", "*.npy", "*.npz", "*.h5"),
    ),
    "an optimizer's or trainer's state": ("optimizer*", "scheduler*", "rng_state*", "trainer_state*"),
    "no part of a model, and may hold secrets": (
        ".env*",
        "*.pem",
        "*.key",
        "id_rsa*",
        "id_ed25519*",
        ".netrc",
        "token",
        "stored_tokens",
    ),
    "a cache": ("__pycache__", ".cache", "*.pyc", ".ipynb_checkpoints"),
}
SECRETS = {
    "a Hugging Face token": r"\b(hf|api_org)_[A-Za-z0-9]{20,}",
    "a GitHub token": r"\b(gh[opsur]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40,})",
    "an AWS key": r"\bAKIA[0-9A-Z]{16}\b",
    "an API key": r"\bsk-[A-Za-z0-9_-]{32,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}
# a path of somebody's machine: in a text by its beginning, in JSON also as the whole of a string
HOME = r"(?<![\w.])(/home/|/root/|/Users/|[A-Za-z]:\\+Users\\)[^\s\"'`]*"
WHOLE_PATH = r"/[\w.-]+(/[\w.-]+)+/?|[A-Za-z]:[\\/]\S+"


@dataclass(frozen=True)
class Staged:
    """A clean folder, ready to push."""

    folder: Path
    files: dict[str, int]  # name -> bytes
    left_out: list[str]  # names in the training folder which stay there
    is_whole: bool = True  # else the model card alone


def read_json(file: Path) -> Any:
    """Returns a file's content; raises ValueError unless it is strict JSON, which has no NaN."""

    def refuse(number: str) -> None:
        raise ValueError(
            f"{file} holds {number}, which JSON has no number for: mend the metric, or remove it"
        )

    def finite(number: str) -> float:
        return float(number) if math.isfinite(float(number)) else refuse(number)

    try:
        return json.loads(file.read_text(encoding="utf-8"), parse_constant=refuse, parse_float=finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON ({error}): save the model again") from error


def users_files(folder: Path, config: dict[str, Any]) -> set[str]:
    """Returns the files of modules which model and tokenizer name, and of those that they import."""
    named = [*config["auto_map"].values()]
    named += [entry["impl"] for entry in config.get("custom_pipelines", {}).values()]
    if (file := folder / "tokenizer_config.json").is_file():
        named += read_json(file).get("auto_map", {}).values()
    classes = [name for entry in named for name in (entry if isinstance(entry, list | tuple) else [entry])]
    # "user/repository--module.Class" is another repository's
    modules = {f"{name.split('.')[0]}.py" for name in classes if name and "--" not in name}
    for name in sorted(modules):
        if (folder / name).is_file():
            modules |= {Path(file).name for file in get_relative_import_files(folder / name)}
    return modules


def read_config(folder: Path) -> dict[str, Any]:
    """Returns a folder's configuration; raises ValueError unless it holds a saved model of the family."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} holds no config.json: give a folder that train.py or save_pretrained wrote"
        )
    config = read_json(file)
    if not isinstance(config, dict) or "auto_map" not in config:
        raise ValueError(f"{file} has no auto_map: only models of this family load by their own code")
    return config


def refuse_dangerous(folder: Path) -> None:
    """Raises ValueError for a file which nobody means to publish, rather than leave it out without a word."""
    for file in sorted(folder.iterdir()):
        for what, patterns in DANGEROUS.items():
            if any(fnmatch(file.name.lower(), pattern) for pattern in patterns):
                raise ValueError(f"{file} is {what}: move it out of the folder before you push")


def strings(node: Any) -> Iterator[str]:
    """Yields every string of a JSON value, and every key."""
    if isinstance(node, dict):
        node = [*node.keys(), *node.values()]
    if isinstance(node, list):
        for child in node:
            yield from strings(child)
    elif isinstance(node, str):
        yield node


def check_text(file: Path, text: str) -> None:
    """Raises ValueError for text that looks like a token or a path of this machine, or is no strict JSON."""
    for what, pattern in SECRETS.items():
        if found := re.search(pattern, text):
            shown = found[0][:6]
            raise ValueError(f"{file} holds what looks like {what} ({shown}...): remove it, and revoke it")
    texts = list(strings(read_json(file))) if file.suffix == ".json" else [text]
    for part in texts:
        found = re.search(HOME, part) or (file.suffix == ".json" and re.fullmatch(WHOLE_PATH, part))
        if found:
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


def check_file(folder: Path, file: Path) -> None:
    """Raises ValueError for what is no plain file of the folder, or holds what nobody means to publish."""
    inside = folder.resolve()
    # the library's cache keeps snapshots/COMMIT/name as links to blobs/ beside snapshots/
    roots = (inside, inside.parent.parent / "blobs")
    if not file.is_file() or not any(file.resolve().is_relative_to(root) for root in roots):
        raise ValueError(f"{file} is no plain file of that folder: put the file itself there")
    if file.suffix not in BINARY and file.name not in VOCABULARIES and file.name != "README.md":
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not UTF-8 ({error.reason} at byte {error.start}): mend it"
            ) from error
        check_text(file, text)


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
    modules = users_files(folder, config)
    patterns = (*MODEL_FILES, *modules)
    found = sorted(file for file in folder.iterdir() if any(fnmatch(file.name, name) for name in patterns))
    names = {file.name for file in found}
    if missing := sorted(modules - names):
        raise ValueError(f"{folder} lacks {missing[0]}, which its config.json names: save the model again")
    check_weights(folder, names)
    check_text(folder / "README.md", card)
    for file in found:
        check_file(folder, file)
        if file.name != "README.md":
            copy_file(file, target / file.name)
    (target / "README.md").write_text(card, encoding="utf-8")
    if license_file and "LICENSE" not in names:
        shutil.copyfile(license_file, target / "LICENSE")
    left_out = sorted(file.name for file in folder.iterdir() if file.name not in names)
    files = {file.name: file.stat().st_size for file in sorted(target.iterdir())}
    return Staged(target, files, left_out)


@contextmanager
def staged_model(
    folder: Path, template: Path, license_file: Path, *, card_only: bool = False, **card_options
) -> Iterator[Staged]:
    """
    Yields a clean folder with what of a training's folder goes to the Hub.

    Args:
        template: the card's, as model_card.md.
        license_file: of Apache 2.0, which goes along where the card names it.
        card_only: pushes the card and no other file.
        card_options: of `published_card`.

    Raises:
        ValueError: something must not be published, or is missing.
    """
    card = published_card(folder, template.read_text(encoding="utf-8"), **card_options)
    is_apache = front_matter(card).get("license") == "apache-2.0"
    with tempfile.TemporaryDirectory() as target:
        whole = stage(folder, target, card, license_file if is_apache else None)
        size = whole.files["README.md"]
        yield Staged(whole.folder, {"README.md": size}, [], is_whole=False) if card_only else whole
