"""The flags of scripts/train.py: defaults, then a recipe, then the command line."""

import argparse
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from .configuration_hf_transformer_block import nearest


RUN_FLAGS = ("config", "output_dir", "resume", "overwrite")  # may differ between a run and its continuation
KNOWN = {
    "task": ("translation", "causal-lm"),
    "preset": ("vaswani", "modern", "tutorial"),
    "lr_scheduler_type": ("cosine", "linear", "inverse_sqrt", "constant_with_warmup"),
}
COUNTS = (
    *("vocab_size", "max_length", "max_steps", "batch_size", "micro_batch_size"),
    *("eval_steps", "eval_batch_size", "eval_pairs", "num_beams", "save_steps"),
)
DATA = "../shared/data"  # where recipes look for data sets unless HFTB_DATA says otherwise


def flag(default: Any, explanation: str) -> Any:
    """Returns a dataclass field with its default and its line of --help."""
    return field(default=default, metadata={"help": explanation})


@dataclass
class Arguments:
    """What a training run depends on; the defaults suit a small translation model."""

    config: str | None = flag(
        None, "YAML recipe: values for any of these flags; flags given here override it."
    )
    output_dir: str = flag("runs/model", "Folder of the checkpoints, the tokenizer and the final model.")
    resume: bool = flag(False, "Continue from the newest checkpoint in output_dir.")
    overwrite: bool = flag(False, "Delete the run that output_dir holds and begin anew.")

    task: str = flag("translation", "translation (any text to any text) or causal-lm.")
    train_files: list[str] | None = flag(
        None,
        "translation: one file with two columns or two parallel text files; causal-lm: any number of files. "
        "txt, jsonl, csv, tsv or parquet, plain or .gz. Without files: the embedded dates.",
    )
    validation_files: list[str] | None = flag(
        None, "As train_files. Without: 1 pair in 20, or the last tenth of a text."
    )
    test_files: list[str] | None = flag(
        None, "As train_files, scored once at the end. Without: the validation."
    )
    source_column: str = flag("source", "Column of the text to translate.")
    target_column: str = flag("target", "Column of its translation.")
    text_column: str = flag("text", "Column of the documents of a language model.")
    tokenizer: str = flag("bpe", "bpe, char or word: trained on the spot; or the path or id of a ready one.")
    vocab_size: int = flag(8000, "Most tokens of a tokenizer that is trained on the spot.")
    max_length: int = flag(128, "Longest source or target, or length of a block of text, in tokens.")

    preset: str = flag("modern", "Block to begin from: vaswani, modern or tutorial.")
    hidden_size: int = flag(256, "Width of the model.")
    num_hidden_layers: int = flag(4, "Blocks (of each stack).")
    num_attention_heads: int = flag(4, "Attention heads.")
    intermediate_size: int | None = flag(None, "Width of the MLP. Without: 4 * hidden_size.")
    dropout: float = flag(0.1, "Dropout rate.")
    config_overrides: str = flag(
        "", "Other fields of TransformerBlockConfig, as in 'qk_norm: true, num_key_value_heads: 2'."
    )

    max_steps: int = flag(5000, "Optimizer updates.")
    batch_size: int = flag(64, "Examples of one update, over all processes.")
    micro_batch_size: int | None = flag(
        None, "Most examples at a time on one process: saves memory, changes no result."
    )
    learning_rate: float = flag(1e-3, "Highest learning rate of AdamW.")
    lr_scheduler_type: str = flag("cosine", "cosine, linear, inverse_sqrt or constant_with_warmup.")
    warmup_steps: int = flag(200, "Updates until the highest learning rate.")
    weight_decay: float = flag(0.01, "Weight decay of AdamW, on matrices only.")
    label_smoothing: float = flag(0.0, "Probability mass that targets spread over the vocabulary.")
    seed: int = flag(0, "Seed of the weights, the order of examples and dropout.")

    eval_steps: int = flag(500, "Updates between evaluations.")
    eval_batch_size: int = flag(256, "Examples at a time in evaluation.")
    eval_pairs: int = flag(200, "Validation pairs that each evaluation translates.")
    num_beams: int = flag(1, "Beams of the final translation, kept in the generation config.")
    save_steps: int = flag(500, "Updates between checkpoints.")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows default values, and the description with its line breaks."""


def recipe_flags(parser: HfArgumentParser, recipe: Path, recipes: Path) -> list[str]:
    """
    Returns a recipe as flags of the command line, ${HFTB_DATA} being the folder of the data sets it uses.

    Exits if there is no such recipe, or if it has a key that is no flag.
    """
    if not recipe.is_file():
        known = ", ".join(sorted(map(str, recipes.glob("*.yaml"))))
        parser.error(f"there is no recipe {recipe} (the project's own: {known})")
    text, folder = recipe.read_text(encoding="utf-8"), os.environ.get("HFTB_DATA", DATA)
    if "${HFTB_DATA}" in text and not Path(folder).is_dir():
        parser.error(f"{recipe} reads data from the folder that HFTB_DATA names, and {folder} is no folder")
    text = text.replace("${HFTB_DATA}", folder)
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        parser.error(f"{recipe} is no YAML: {error}")
    if not isinstance(values, dict):
        parser.error(f"{recipe} must hold lines of 'flag: value'")
    names = [field.name for field in fields(Arguments)]
    flags = []
    for key, value in values.items():
        if key not in names:
            parser.error(f"{recipe} has an unknown key {key!r}{nearest(str(key), names)}")
        if value is not None:
            flags += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def check_arguments(parser: HfArgumentParser, arguments: Arguments) -> None:
    """Exits for a value that cannot work."""
    for name, known in KNOWN.items():
        if (value := getattr(arguments, name)) not in known:
            hint = nearest(value, list(known))
            parser.error(f"--{name} {value} is unknown{hint} (known: {', '.join(known)})")
    for name in COUNTS:
        if (value := getattr(arguments, name)) is not None and value < 1:
            parser.error(f"--{name} {value} must be at least 1")
    if not arguments.learning_rate > 0:
        parser.error(f"--learning_rate {arguments.learning_rate} must be above 0")
    for name in ("warmup_steps", "weight_decay", "label_smoothing", "dropout"):
        if not (value := getattr(arguments, name)) >= 0:
            parser.error(f"--{name} {value} must not be negative")
    if arguments.resume and arguments.overwrite:
        parser.error("--resume goes on with a run and --overwrite deletes it: give one of them")


def parse_arguments(description: str, recipes: Path) -> Arguments:
    """
    Returns the flags over the recipe over the defaults; without --train_files the recipe is dates.yaml.

    Exits with a message that names the flag, its value and the remedy.
    """
    options = {"formatter_class": HelpFormatter, "allow_abbrev": False}
    parser = HfArgumentParser(Arguments, description=description, **options)
    first, _ = HfArgumentParser(Arguments, add_help=False, allow_abbrev=False).parse_known_args()
    recipe = Path(first.config) if first.config else None
    if recipe is None and first.train_files is None:
        recipe = recipes / "dates.yaml"
    flags = [] if recipe is None else recipe_flags(parser, recipe, recipes)
    arguments, unknown = parser.parse_args_into_dataclasses(
        args=[*flags, *sys.argv[1:]], return_remaining_strings=True
    )
    if unknown:
        names = [f"--{field.name}" for field in fields(Arguments)]
        parser.error(f"{unknown[0]} is unknown{nearest(unknown[0], names)} (--help lists all flags)")
    check_arguments(parser, arguments)
    return arguments
