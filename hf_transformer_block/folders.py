"""Folders of models: read whole, with whatever is wrong told by its file, and written whole or not at all."""

import json
import math
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file, is_sentencepiece_available


# one of them is in every folder that has a tokenizer
TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "source.spm"),
)


def require_free(folder: Path) -> None:
    """Raises ValueError if the folder exists and holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder: give another one, or move it away")


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yields a hidden folder beside the final one, renamed at the end; of a failure only new parents stay."""
    require_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as hidden:
        written = Path(hidden, folder.name)
        written.mkdir()
        yield written
        require_free(folder)
        if folder.exists():
            folder.rmdir()
        written.rename(folder)


def read_text(file: Path) -> str:
    """Returns a file's text; raises ValueError if it has none."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 ({error.reason} at byte {error.start}): mend it") from error
    except IsADirectoryError as error:
        raise ValueError(f"{file} is a folder: put the file itself there") from error


def read_json(file: Path) -> dict[str, Any]:
    """Returns a file's object; raises ValueError unless it is one in strict JSON, which has no NaN."""

    def refuse(number: str) -> None:
        raise ValueError(
            f"{file} holds {number}, which JSON has no number for: put a finite one there, or take it out"
        )

    def finite(number: str) -> float:
        return float(number) if math.isfinite(float(number)) else refuse(number)

    try:
        content = json.loads(read_text(file), parse_constant=refuse, parse_float=finite)
    except JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON ({error}): save the model again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is a JSON {type(content).__name__}, no object: save the model again")
    return content


@contextmanager
def shaped(file: Path) -> Iterator[None]:
    """Turns what Python says of a value that has another shape than the code expects into a ValueError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} has not the shape that save_pretrained gives it ({error}): save the model again"
        ) from error


def human(size: float) -> str:
    """Returns a number of bytes as people say it."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:  # from there three digits would be 1e+03
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def describe_files(folder: Path) -> str:
    """Returns how many files a folder holds, and how large they are."""
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    return f"{len(sizes)} files, {human(sum(sizes))}"


def shorten(error: Exception) -> str:
    """Returns the beginning of a library's message, as one line."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def find_file(name: str, file: str) -> str | None:
    """Returns the path of a checkpoint's file, fetched from the Hub if need be, or None if it has none."""
    return cached_file(name, file, _raise_exceptions_for_missing_entries=False)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """Returns a checkpoint's tokenizer, or None where there is none; raises ValueError if it is broken."""
    if not any(find_file(name, file) for file in TOKENIZER_FILES):
        return None
    if find_file(name, "source.spm") and not is_sentencepiece_available():
        raise ValueError(f"the tokenizer of {name} needs sentencepiece: pip install sentencepiece sacremoses")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the reader of tokenizer.json raises nothing more specific
        raise ValueError(f"the tokenizer of {name} cannot be loaded: {shorten(error)}") from error


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> list[Path]:
    """Saves a tokenizer, and returns its files."""
    tokenizer("")  # forgets the padding and truncation of the last call, which would be saved as well
    return [Path(file) for file in tokenizer.save_pretrained(folder)]


def load_config(name: str) -> PreTrainedConfig:
    """Returns a model's configuration; raises ValueError if there is none, or a broken one."""
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except StrictDataclassError as error:
        raise ValueError(f"{name} has a broken config.json: {shorten(error.__cause__ or error)}") from error
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(
            f"{name} is no folder with a model and no id on the Hub: {shorten(error)}"
        ) from error


def load_whole(loader: type, name: str, **kwargs: Any) -> PreTrainedModel:
    """Returns `loader.from_pretrained`; raises ValueError if weights are too many, too few or broken."""
    try:
        model, report = loader.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
    except (RuntimeError, SafetensorError, UnpicklingError, EOFError, JSONDecodeError) as error:
        raise ValueError(
            f"{name} has broken weights, or others than its config.json: {shorten(error)}"
        ) from error
    for key, stored, built in sorted(report["mismatched_keys"]):
        raise ValueError(f"{name} has other sizes than its config.json: {key} is {stored}, not {built}")
    for problem in ("missing", "unexpected"):
        # the first GPT-2 checkpoints store a constant
        keys = sorted(key for key in report[f"{problem}_keys"] if not key.endswith(".attn.masked_bias"))
        if keys:
            raise ValueError(
                f"{name} is no whole {type(model).__name__}: {len(keys)} {problem} weights, such as "
                f"{keys[0]}; take a checkpoint that was saved with this head"
            )
    return model
