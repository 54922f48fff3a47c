"""What of a training folder goes to the Hub: a clean copy of the files of a model, and of nothing else."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.dynamic_module_utils import get_relative_import_files

from .card import is_edited, published_card
from .card_checks import front_matter
from .folders import read_json, read_text, shaped


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
        *(".env*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_dsa*", "id_ecdsa*"),
        *("id_ed25519*", ".ssh", ".aws", ".netrc", "_netrc", ".pypirc", ".npmrc", "kaggle.json"),
        *("token", "tokens", "stored_tokens", "*credentials*", "secret", "secret.*", "secrets*"),
        *("client_secret*", "password*"),
    ),
    "a cache": ("__pycache__", ".cache", "*.pyc", ".ipynb_checkpoints"),
}
START = r"(?<![A-Za-z0-9])"  # \b would not see one behind the "Ġ" of byte-level tokens
PLAIN = r"[^\s:/@\"'<>{}()$*\\\x00-\x1f\x7f-\uffff]+"
SECRETS = {
    "a Hugging Face token": START + r"(hf|api_org)_[A-Za-z0-9]{20,}",
    "a GitHub token": START + r"(gh[opsur]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{40,})",
    "a Slack token": START + r"xox[abprs]-[A-Za-z0-9-]{10,}",
    "an AWS key": START + r"AKIA[0-9A-Z]{16}(?![A-Za-z0-9])",
    "a Google key": START + r"AIza[A-Za-z0-9_-]{35}",
    "an API key": START + r"sk-[A-Za-z0-9_-]{32,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "an address with a password": rf"[A-Za-z]://{PLAIN}:{PLAIN}@\w",
    "a key or a password": (
        r"(?i:(api|secret|access)[_-]?key|client_?secret|(access|auth|api)[_-]?token|passwo?r?d)[\"']?"
        r"[ \t]*[:= \t][ \t]*[\"']?(?=[A-Za-z+/_-]*[0-9])[A-Za-z0-9+/_-]{20,}"
    ),
}
# a path of somebody's machine: in a text by its beginning, in JSON also as the whole of a string
HOME = (
    r"(?<![\w.])(/home/|/root/|/Users/|[A-Za-z]:\\+Users\\|/(mnt|media|data|scratch|Volumes)/[\w.-]+)"
    r"[^\s\"'`]*"
)
WHOLE_PATH = r"/[\w.-]+(/[\w.-]+)+/?|[A-Za-z]:[\\/]\S+"


@dataclass(frozen=True)
class Staged:
    """A clean folder, ready to push."""

    folder: Path
    files: dict[str, int]  # name -> bytes
    left_out: list[str]  # names in the training folder which stay there
    is_whole: bool = True  # else the model card alone
    is_edited: bool = False  # README.md differs from what the records give
    inside: str = ""  # the folder of the model in a Space, which has other files beside it

    @property
    def has_tokenizer(self) -> bool:
        return (self.folder / self.inside / "tokenizer_config.json").exists()


def modules_of(names: Iterable[Any]) -> set[str]:
    """Returns the files of the classes in an auto_map, of which an entry may hold several or None."""
    classes = [name for entry in names for name in (entry if isinstance(entry, list | tuple) else [entry])]
    # "user/repository--module.Class" is another repository's
    return {f"{name.split('.')[0]}.py" for name in classes if name and "--" not in name}


def users_files(folder: Path, config: dict[str, Any]) -> set[str]:
    """Returns the files of modules which model and tokenizer name, and of those that they import."""
    with shaped(folder / "config.json"):
        pipelines = [entry["impl"] for entry in config.get("custom_pipelines", {}).values()]
        modules = modules_of([*config["auto_map"].values(), *pipelines])
    if (file := folder / "tokenizer_config.json").is_file():
        with shaped(file):
            modules |= modules_of(read_json(file).get("auto_map", {}).values())
    for name in sorted(modules):
        if (folder / name).is_file():
            read_text(folder / name)  # what follows would not name it
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
    for name in ("auto_map", "architecture"):
        if name not in config:
            raise ValueError(
                f"{file} has no {name}, so {folder} is not a model of this family: give one that is"
            )
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


def check_secrets(file: Path, text: str) -> None:
    """Raises ValueError, which does not show it, for what looks like a token or a key."""
    text = re.sub(r"\\(u[0-9A-Fa-f]{4}|[bfnrt])", " ", text)  # as JSON writes what stands before one
    for what, pattern in SECRETS.items():
        if found := re.search(pattern, text):
            shown = found[0][:6]
            raise ValueError(f"{file} holds what looks like {what} ({shown}...): remove it, and revoke it")


def check_text(file: Path, text: str) -> None:
    """Raises ValueError for text that looks like a token or a path of this machine, or is no strict JSON."""
    check_secrets(file, text)
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
        with shaped(index):
            shards = set(read_json(index)["weight_map"].values())
    elif "model.safetensors" not in names:
        raise ValueError(f"{folder} holds no model.safetensors: let the training finish, or save the model")
    found = {name for name in names if name.endswith(".safetensors")}
    if missing := sorted(shards - found):
        raise ValueError(f"{folder} lacks {missing[0]}, which {index.name} names: save the model again")
    if extra := sorted(found - shards):
        raise ValueError(f"{folder / extra[0]} is not part of the model: delete it")
    for name in sorted(shards):
        try:
            with safe_open(folder / name, "pt") as weights:  # reads the header, and compares sizes
                about = weights.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{folder / name} is no whole safetensors file ({error}): save it again"
            ) from error
        check_text(folder / name, json.dumps(about))


def check_file(folder: Path, file: Path) -> None:
    """Raises ValueError for what is no plain file of the folder."""
    inside = folder.resolve()
    # the library's cache keeps snapshots/COMMIT/name as links to blobs/ beside snapshots/
    roots = (inside, inside.parent.parent / "blobs")
    if not file.is_file() or not any(file.resolve().is_relative_to(root) for root in roots):
        raise ValueError(f"{file} is no plain file of that folder: put the file itself there")


def find_files(folder: Path) -> list[Path]:
    """Returns the files of a model; raises ValueError if one is missing, or one must not be published."""
    config = read_config(folder)
    refuse_dangerous(folder)
    modules = users_files(folder, config)
    patterns = (*MODEL_FILES, *modules)
    found = sorted(file for file in folder.iterdir() if any(fnmatch(file.name, name) for name in patterns))
    names = {file.name for file in found}
    if missing := sorted(modules - names):
        raise ValueError(f"{folder} lacks {missing[0]}, which its config.json names: save the model again")
    for file in found:
        check_file(folder, file)
    check_weights(folder, names)
    return found


def check_content(file: Path) -> None:
    """Raises ValueError for a file that holds what nobody means to publish, but for numbers and README.md."""
    if file.name in VOCABULARIES or (file.suffix in BINARY and file.suffix != ".safetensors"):
        check_secrets(file, file.read_text(encoding="utf-8", errors="replace"))
    elif file.suffix != ".safetensors" and file.name != "README.md":
        check_text(file, read_text(file))


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
    found = find_files(folder)
    names = {file.name for file in found}
    check_text(folder / "README.md", card)
    for file in found:
        check_content(file)
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
    find_files(folder)  # of a folder that is no model's there is no card
    text = template.read_text(encoding="utf-8")
    card = published_card(folder, text, **card_options)
    is_apache = front_matter(card).get("license") == "apache-2.0"
    with tempfile.TemporaryDirectory() as target:
        whole = stage(folder, target, card, license_file if is_apache else None)
        whole = replace(whole, is_edited=is_edited(folder, text))
        only = {"files": {"README.md": whole.files["README.md"]}, "left_out": [], "is_whole": False}
        yield replace(whole, **only) if card_only else whole
