"""
Turns a checkpoint of transformers into a folder of this family, with the same logits in float32.

    python scripts/convert.py Helsinki-NLP/opus-mt-en-de runs/en-de     an id on the Hub
    python scripts/convert.py my-llama runs/my-llama                    a folder

Known are GPT-2, Llama, Mistral, Qwen2 and Qwen3 as causal language models, and Marian translators. Weights,
their dtype, generation config and tokenizer are kept. What the family cannot represent (a sliding window,
experts, quantised weights and so on) is refused by name, before anything is written. The two models are
compared on random tokens first, so it takes twice the checkpoint's memory, or four times if its weights are
16-bit. The folder holds the family's code too, so AutoModel loads it anywhere.
"""

import argparse
import os
import tempfile
import textwrap
from json import JSONDecodeError
from pathlib import Path
from pickle import UnpicklingError


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file, is_sentencepiece_available

from hf_transformer_block.convert import convert, convert_config


# one of them is in every folder that has a tokenizer
TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "source.spm"),
)
SNIPPET = """
from transformers import {auto}{and_tokenizer}

{tokenizer}model = {auto}.from_pretrained({folder!r}, trust_remote_code=True)"""


def require_free(folder: Path) -> None:
    """Raises ValueError if the folder exists and holds something: conversion deletes nothing."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder: give another OUT, or move it away")


def shorten(error: Exception) -> str:
    """Returns the beginning of a library's message, as one line."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" ...")


def load_config(name: str) -> PreTrainedConfig:
    """Returns a checkpoint's configuration; raises ValueError unless our block can represent it."""
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except StrictDataclassError as error:
        raise ValueError(f"{name} has a broken config.json: {shorten(error.__cause__ or error)}") from error
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(
            f"{name} is no folder with a checkpoint and no id on the Hub: {shorten(error)}"
        ) from error
    convert_config(config)
    return config


def find_file(name: str, file: str) -> str | None:
    """Returns the path of a checkpoint's file, fetched from the Hub if need be, or None if it has none."""
    return cached_file(name, file, _raise_exceptions_for_missing_entries=False)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """Returns the checkpoint's tokenizer, or None where there is none."""
    if not any(find_file(name, file) for file in TOKENIZER_FILES):
        return None
    if find_file(name, "source.spm") and not is_sentencepiece_available():
        raise ValueError(f"the tokenizer of {name} needs sentencepiece: pip install sentencepiece sacremoses")
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the reader of tokenizer.json raises nothing more specific
        raise ValueError(f"the tokenizer of {name} cannot be loaded: {shorten(error)}") from error


def load_model(name: str, config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a checkpoint in its own dtype; raises ValueError if weights are too many, too few or broken."""
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    try:
        model, report = auto.from_pretrained(
            name, dtype="auto", output_loading_info=True, ignore_mismatched_sizes=True
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
                f"{keys[0]}; models with another head, or none, cannot be converted"
            )
    return model


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Writes into a hidden folder beside the final one and renames it: a failure leaves nothing behind."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as hidden:
        written = Path(hidden, folder.name)
        model.save_pretrained(written)
        if tokenizer is not None:
            tokenizer.save_pretrained(written)
        require_free(folder)
        if folder.exists():
            folder.rmdir()
        written.rename(folder)


def megabytes(*sizes: int) -> str:
    """Returns the sum of sizes in bytes, for people."""
    return f"{sum(sizes) / 1e6:,.1f} MB"


def run(source: str, out: str) -> None:
    """Converts, one line of report for each stage."""
    folder = Path(out).resolve()
    require_free(folder)
    config = load_config(source)
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        print("tokenizer: none beside the source")
    else:
        print(f"tokenizer: {type(tokenizer).__name__}, {len(tokenizer):,} tokens")
    theirs = load_model(source, config)
    dtype = str(theirs.dtype).removeprefix("torch.")
    size = megabytes(*(weight.nbytes for weight in theirs.parameters()))
    print(f"source: {type(theirs).__name__}, {theirs.num_parameters():,} parameters, {dtype}, {size}")
    ours = convert(theirs)
    print(f"converted: {type(ours).__name__}, {ours.num_parameters():,} parameters, same logits in float32")
    save(ours, tokenizer, folder)
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    print(f"saved: {out}, {len(sizes)} files, {megabytes(*sizes)}; load it anywhere with")
    auto = "AutoModelForSeq2SeqLM" if ours.config.is_encoder_decoder else "AutoModelForCausalLM"
    loads = f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r}, trust_remote_code=True)\n"
    print(
        SNIPPET.format(
            auto=auto,
            and_tokenizer="" if tokenizer is None else ", AutoTokenizer",
            tokenizer="" if tokenizer is None else loads,
            folder=str(folder),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", metavar="SOURCE", help="Folder, or id on the Hub.")
    parser.add_argument("out", metavar="OUT", help="Folder to make; an existing one must be empty.")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        run(arguments.source, arguments.out)
    except (ValueError, OSError) as error:
        raise SystemExit(f"convert.py: {' '.join(str(error).split())}") from error
    except KeyboardInterrupt:
        raise SystemExit("convert.py: interrupted, nothing is written") from None


if __name__ == "__main__":
    main()
