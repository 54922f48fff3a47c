"""The flags of scripts/train.py: defaults, then a recipe, then the command line."""

import argparse
import os
from dataclasses import dataclass, field, fields
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from .configuration_hf_transformer_block import nearest


RUN_FLAGS = ("config", "output_dir", "resume", "overwrite")  # may differ between a run and its continuation
KNOWN = {
    "task": ("translation", "causal-lm"),
    "preset": ("vaswani", "modern", "tutorial"),
    "lr_scheduler_type": ("cosine", "linear", "inverse_sqrt", "constant_with_warmup"),
}


def flag(default, help: str):
    """Returns a field of `Arguments` with its line of --help."""
    return field(default=default, metadata={"help": help})


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
        "", "Other fields of TransformerBlockConfig, as in 'qk_norm=true,num_key_value_heads=2'."
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
    max_grad_norm: float = flag(1.0, "Norm to which gradients are clipped.")
    label_smoothing: float = flag(0.0, "Probability mass that targets spread over the vocabulary.")
    seed: int = flag(0, "Seed of the weights, the order of examples and dropout.")

    eval_steps: int = flag(500, "Updates between evaluations.")
    eval_batch_size: int = flag(256, "Examples at a time in evaluation.")
    eval_pairs: int = flag(200, "Validation pairs that each evaluation translates.")
    num_beams: int = flag(1, "Beams of the final translation, kept in the generation config.")
    save_steps: int = flag(500, "Updates between checkpoints.")
    save_total_limit: int = flag(2, "Checkpoints to keep.")


def parse_arguments(description: str, recipes: Path) -> Arguments:
    """
    Returns the flags over the recipe over the defaults; without --train_files the recipe is dates.yaml.

    Exits with a message that names the flag, its value and the remedy.
    """
    parser = HfArgumentParser(
        Arguments, description=description, formatter_class=HelpFormatter, allow_abbrev=False
    )
    first, _ = HfArgumentParser(Arguments, add_help=False, allow_abbrev=False).parse_known_args()
    recipe = Path(first.config) if first.config else None
    if recipe is None and first.train_files is None:
        recipe = recipes / "dates.yaml"
    if recipe is not None:
        parser.set_defaults(**read_recipe(parser, recipe, recipes))
    arguments, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        flags = [f"--{field.name}" for field in fields(Arguments)]
        parser.error(f"{unknown[0]} is unknown{nearest(unknown[0], flags)} (--help lists all flags)")
    for name, known in KNOWN.items():
        if (value := getattr(arguments, name)) not in known:
            parser.error(
                f"--{name} {value} is unknown{nearest(value, list(known))} (known: {', '.join(known)})"
            )
    for name in (
        "max_steps",
        "batch_size",
        "eval_steps",
        "eval_batch_size",
        "save_steps",
        "save_total_limit",
    ):
        if (value := getattr(arguments, name)) < 1:
            parser.error(f"--{name} {value} must be at least 1")
    if arguments.micro_batch_size is not None and arguments.micro_batch_size < 1:
        parser.error(f"--micro_batch_size {arguments.micro_batch_size} must be at least 1")
    return arguments


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows default values, and the description with its line breaks."""


def read_recipe(parser: HfArgumentParser, recipe: Path, recipes: Path) -> dict:
    """
    Returns the values of a recipe, ${HFTB_DATA} being the folder of the data sets that recipes use.

    Exits if there is no such recipe, or if it has a key that is no flag.
    """
    if not recipe.is_file():
        known = ", ".join(sorted(map(str, recipes.glob("*.yaml"))))
        parser.error(f"there is no recipe {recipe} (the project's own: {known})")
    text = recipe.read_text(encoding="utf-8").replace(
        "${HFTB_DATA}", os.environ.get("HFTB_DATA", "../shared/data")
    )
    values = yaml.safe_load(text)
    if not isinstance(values, dict):
        parser.error(f"{recipe} must hold lines of 'flag: value'")
    names = [field.name for field in fields(Arguments)]
    for key in values:
        if key not in names:
            parser.error(f"{recipe} has an unknown key {key!r}{nearest(str(key), names)}")
    return values
