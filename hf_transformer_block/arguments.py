"""The flags of scripts/train.py: defaults, then a recipe, then the command line."""

import argparse
import importlib.util
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from .configuration_hf_transformer_block import nearest
from .tasks import TASKS


# may differ between a run and its continuation
RUN_FLAGS = ("config", "output_dir", "resume", "overwrite", "report_to", "logging_steps", "push_to_hub")
KNOWN = {
    "task": tuple(TASKS),
    "preset": ("vaswani", "modern", "tutorial"),
    "lr_scheduler_type": ("cosine", "linear", "inverse_sqrt", "constant_with_warmup"),
    "bad_rows": ("drop", "error"),
    "report_to": (None, "tensorboard", "trackio", "wandb"),
}
COUNTS = (
    *("vocab_size", "max_length", "max_steps", "num_train_epochs", "batch_size", "tokens_per_batch"),
    *("gradient_accumulation_steps", "eval_steps", "eval_batch_size", "eval_pairs", "num_beams"),
    *("early_stopping_patience", "logging_steps", "save_steps"),
)


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
    resume: bool = flag(False, "Continue from the newest checkpoint in output_dir that is whole.")
    overwrite: bool = flag(False, "Delete the run that output_dir holds and begin anew.")

    task: str = flag("translation", f"{', '.join(TASKS)}; translation is any text to any text.")
    train_files: list[str] | None = flag(
        None,
        "translation: one table (jsonl, csv, tsv, parquet) or two parallel text files; causal-lm, masked-lm: "
        "texts or tables; text-classification: a table, or lines of 'LABEL text'; token-classification: "
        "CoNLL-like columns or a table; question-answering: SQuAD's json or a table. Plain or .gz, UTF-8. "
        "Without files: the embedded dates.",
    )
    validation_files: list[str] | None = flag(
        None, "As train_files. Without: 1 row in 20, or the last tenth of a text."
    )
    test_files: list[str] | None = flag(
        None, "As train_files, scored once at the end. Without: the validation."
    )
    dataset_name: str | None = flag(None, "Data set of the Hub, or a folder of one, instead of files.")
    dataset_config_name: str | None = flag(None, "Its configuration, where it has several.")
    streaming: bool = flag(False, "Read the training data as it comes, for data larger than memory and disk.")
    bad_rows: str = flag(
        "drop",
        "Rows that cannot be used (empty, not UTF-8, an unknown label, too long): 'drop' leaves them out and "
        "counts them, 'error' stops at the first.",
    )
    source_column: str = flag("source", "translation: column of the text; translation.en reads nested ones.")
    target_column: str = flag("target", "translation: column of its translation.")
    text_column: str = flag("text", "Column of the texts; token-classification: of the lists of words.")
    text_pair_column: str | None = flag(None, "text-classification: column of a second text.")
    label_column: str = flag(
        "label", "Column of the label, or of the list of a sentence's; in CoNLL-like files a number, from 0."
    )
    label_until: str | None = flag(
        None, "text-classification: what ends a label early, as ':' makes DESC of DESC:manner."
    )
    bleu_tokenize: str | None = flag(
        None, "translation: sacreBLEU's tokenizer, 'none' for tokenized texts. Without: by their script."
    )
    tokenizer: str = flag("bpe", "bpe, char or word: trained on the spot; or the path or id of a ready one.")
    vocab_size: int = flag(8000, "Most tokens of a tokenizer that is trained on the spot.")
    max_length: int = flag(128, "Longest source or target, or length of a block of text, in tokens.")

    model_name_or_path: str | None = flag(
        None,
        "Model of this family to start from, a folder or an id of the Hub: its tokenizer and shape are kept.",
    )
    preset: str = flag("modern", "Block to begin from: vaswani, modern or tutorial.")
    hidden_size: int = flag(256, "Width of the model.")
    num_hidden_layers: int = flag(4, "Blocks (of each stack).")
    num_attention_heads: int = flag(4, "Attention heads.")
    intermediate_size: int | None = flag(None, "Width of the MLP. Without: 4 * hidden_size.")
    dropout: float | None = flag(None, "Dropout rate. Without: 0.1, or that of model_name_or_path.")
    config_overrides: str = flag(
        "", "Other fields of TransformerBlockConfig, as in 'qk_norm: true, num_key_value_heads: 2'."
    )

    max_steps: int = flag(5000, "Optimizer updates.")
    num_train_epochs: int | None = flag(None, "Times through the data, instead of max_steps.")
    batch_size: int = flag(64, "Examples of one update, over all processes.")
    tokens_per_batch: int | None = flag(
        None,
        "Most tokens of one update instead: number of examples * length of the longest (of its longer side).",
    )
    gradient_accumulation_steps: int = flag(
        1, "Parts into which each process cuts its share of an update: saves memory, changes no result."
    )
    learning_rate: float = flag(1e-3, "Highest learning rate of AdamW.")
    lr_scheduler_type: str = flag("cosine", "cosine, linear, inverse_sqrt or constant_with_warmup.")
    warmup_steps: int | None = flag(
        None, "Updates until the highest learning rate. Without: 200, or a tenth of a shorter run."
    )
    weight_decay: float = flag(0.01, "Weight decay of AdamW, on matrices only.")
    max_grad_norm: float = flag(1.0, "Gradients longer than this are scaled down to it.")
    label_smoothing: float = flag(
        0.0, "Language models: probability that targets spread over the vocabulary."
    )
    gradient_checkpointing: bool = flag(
        False, "Compute activations twice instead of keeping them: saves memory."
    )
    ema_decay: float | None = flag(
        None,
        "Evaluate and save a moving average of the weights, of this decay (0.999: the last 1,000 updates).",
    )
    seed: int = flag(0, "Seed of the weights, the order of examples, dropout, and which rows are held out.")

    eval_steps: int = flag(500, "Updates between evaluations.")
    eval_batch_size: int = flag(256, "Examples at a time in evaluation, on each process.")
    eval_pairs: int = flag(200, "translation: validation pairs that each evaluation translates.")
    num_beams: int = flag(1, "Beams of the final translation, kept in the generation config.")
    metric_for_best_model: str | None = flag(
        None,
        "Score whose best evaluation gives the final model, by its name there. Without: the task's own.",
    )
    early_stopping_patience: int | None = flag(None, "Stop after this many evaluations without a better one.")
    save_steps: int = flag(500, "Updates between checkpoints.")
    logging_steps: int = flag(50, "Updates between lines of metrics.jsonl.")
    report_to: str | None = flag(None, "Tracker to log to as well: tensorboard, trackio or wandb.")
    push_to_hub: str | None = flag(
        None, "Repository, as user/name, to push the model to in the end, as scripts/push_to_hub.py does."
    )


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
    text, folder = recipe.read_text(encoding="utf-8"), os.environ.get("HFTB_DATA", "")
    if "${HFTB_DATA}" in text and not (folder and Path(folder).is_dir()):
        parser.error(f"{recipe} reads data sets: set HFTB_DATA to the folder that holds them, not {folder!r}")
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
            known = list(filter(None, known))
            parser.error(f"--{name} {value} is unknown{nearest(value, known)} (known: {', '.join(known)})")
    for name in COUNTS:
        if (value := getattr(arguments, name)) is not None and value < 1:
            parser.error(f"--{name} {value} must be at least 1")
    for name in ("learning_rate", "max_grad_norm"):
        if not (value := getattr(arguments, name)) > 0:
            parser.error(f"--{name} {value} must be above 0")
    for name in ("warmup_steps", "weight_decay", "label_smoothing", "dropout"):
        if not ((value := getattr(arguments, name)) or 0) >= 0:
            parser.error(f"--{name} {value} must not be negative")
    if arguments.label_smoothing >= 1:
        parser.error(f"--label_smoothing {arguments.label_smoothing} must be below 1")
    check_combinations(parser, arguments)


def check_combinations(parser: HfArgumentParser, arguments: Arguments) -> None:
    """Exits for flags that contradict each other."""
    metric, metrics = arguments.metric_for_best_model, list(TASKS[arguments.task].metrics)
    if metric is not None and metric not in metrics:
        hint = nearest(metric, metrics)
        parser.error(
            f"--metric_for_best_model {metric} is no score of {arguments.task}{hint} (known: {metrics})"
        )
    if not 0 <= arguments.seed < 2**32:
        parser.error(f"--seed {arguments.seed} must be between 0 and {2**32 - 1}")
    if arguments.ema_decay is not None and not 0 < arguments.ema_decay < 1:
        parser.error(f"--ema_decay {arguments.ema_decay} must be between 0 and 1, as in 0.999")
    if arguments.report_to and importlib.util.find_spec(arguments.report_to) is None:
        parser.error(f"--report_to {arguments.report_to} is not installed: pip install {arguments.report_to}")
    if arguments.push_to_hub is not None and not arguments.push_to_hub.strip():
        parser.error(f"--push_to_hub {arguments.push_to_hub!r} is no repository: write user/name")
    if arguments.resume and arguments.overwrite:
        parser.error("--resume goes on with a run and --overwrite deletes it: give one of them")
    if arguments.train_files and arguments.dataset_name:
        parser.error("--train_files and --dataset_name are two sources of data: give one of them")
    if arguments.streaming and arguments.num_train_epochs:
        parser.error(
            "--num_train_epochs needs the length of the data, which --streaming does not know: --max_steps"
        )
    if arguments.label_smoothing and not arguments.task.endswith(("lm", "translation")):
        parser.error(f"--label_smoothing is for language models and translation, not for {arguments.task}")
    longest = arguments.max_length + (arguments.task == "causal-lm")  # blocks share a token
    if arguments.tokens_per_batch and arguments.tokens_per_batch < longest:
        parser.error(
            f"--tokens_per_batch {arguments.tokens_per_batch} cannot hold an example of {longest} tokens: "
            f"raise it, or lower --max_length {arguments.max_length}"
        )
    embedded = arguments.train_files is None and arguments.dataset_name is None
    if embedded and (arguments.validation_files or arguments.test_files):
        parser.error("--validation_files and --test_files need --train_files or --dataset_name")
    if embedded and arguments.task != "translation":
        parser.error(f"--task {arguments.task} needs --train_files or --dataset_name")


def parse_arguments(description: str, recipes: Path) -> Arguments:
    """
    Returns the flags over the recipe over the defaults; without --train_files the recipe is dates.yaml.

    Exits with a message that names the flag, its value and the remedy.
    """
    options = {"formatter_class": HelpFormatter, "allow_abbrev": False}
    usage = "accelerate launch scripts/train.py [--FLAG VALUE ...]"
    parser = HfArgumentParser(Arguments, description=description, usage=usage, **options)
    first, _ = HfArgumentParser(Arguments, add_help=False, allow_abbrev=False).parse_known_args()
    recipe = Path(first.config) if first.config else None
    if recipe is None and first.train_files is None and first.dataset_name is None:
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
