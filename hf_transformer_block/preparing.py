"""The data of a training run: where its rows come from, its tokenizer, and its examples on every process."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator
from datasets import Dataset, IterableDataset, get_dataset_split_names
from datasets.exceptions import DatasetsError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .arguments import Arguments
from .dates import date_pairs
from .loading import Origin, load, make_split, report
from .tasks import Split, Task
from .vocabulary import TOKENIZERS, train_tokenizer


HELD_OUT, SEEN = 500, 100_000  # rows of a stream: held out for validation; read to make tokenizer and labels
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}


@dataclass
class Data:
    """Rows by split, where they came from, and what was left out of them and why."""

    rows: dict[str, Dataset | IterableDataset]
    is_embedded: bool = False
    fingerprints: dict[str, dict] = field(default_factory=dict)
    dropped: dict[str, Counter] = field(default_factory=dict)


def read_dates() -> Data:
    """Returns the embedded data set: dates as people write them, and in ISO 8601."""
    sizes = {"train": 60_000, "validation": 500, "test": 2_000}
    rows = {split: Dataset.from_list(date_pairs(split, size)) for split, size in sizes.items()}
    numbered = {split: data.add_column("row", range(len(data))) for split, data in rows.items()}
    return Data(numbered, is_embedded=True)


def hub_origins(name: str, config_name: str | None) -> dict[str, Origin]:
    """Returns the splits of a data set of the Hub, or a folder; raises ValueError without training data."""
    try:
        names = get_dataset_split_names(name, config_name)
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(f"--dataset_name {name} does not load: {error}") from error
    found = {split: next((n for n in known if n in names), None) for split, known in SPLITS.items()}
    if found["train"] is None:
        raise ValueError(f"--dataset_name {name} has no split 'train' but {names}")
    return {split: Origin((), name, config_name, known) for split, known in found.items() if known}


def origins(arguments: Arguments) -> dict[str, Origin]:
    """Returns where the rows of each split come from."""
    files = {
        "train": arguments.train_files,
        "validation": arguments.validation_files,
        "test": arguments.test_files,
    }
    found = {split: Origin(files=tuple(names)) for split, names in files.items() if names}
    if arguments.dataset_name:
        found = hub_origins(arguments.dataset_name, arguments.dataset_config_name) | found
    return found


def read_data(arguments: Arguments, task: Task) -> Data:
    """Returns the rows of "train", "validation" and, if there is one, "test"."""
    if arguments.train_files is None and arguments.dataset_name is None:
        return read_dates()
    data = Data({})
    for split, origin in origins(arguments).items():
        loaded = load(task, origin, arguments.bad_rows, streaming=arguments.streaming)
        is_stream = arguments.streaming and split != "train"
        data.rows[split] = Dataset.from_list(list(loaded.rows)) if is_stream else loaded.rows
        data.fingerprints[split], data.dropped[split] = loaded.fingerprint, loaded.dropped
    if "validation" not in data.rows and arguments.streaming:
        train = data.rows["train"]
        if next(iter(train.skip(HELD_OUT)), None) is None:
            raise ValueError(
                f"the stream has no more than {HELD_OUT} rows, which all would be held out: give "
                f"--validation_files, or leave --streaming out"
            )
        data.rows["validation"] = Dataset.from_list(list(train.take(HELD_OUT)))
        data.rows["train"] = train.skip(HELD_OUT)
    elif "validation" not in data.rows:
        halves = task.hold_out(data.rows["train"], arguments.seed)
        data.rows["train"], data.rows["validation"] = halves
    return data


def load_tokenizer(name: str, task: Task) -> PreTrainedTokenizerBase:
    """Returns a ready tokenizer; raises ValueError if it lacks what the task needs."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"the tokenizer {name!r} is neither bpe, char or word nor a folder or id that loads: {error}"
        ) from error
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    missing = {"pad": tokenizer.pad_token_id is None}
    if task.architecture != "encoder":
        missing["eos"] = tokenizer.eos_token_id is None
    if task.name == "masked-lm":
        missing["mask"] = tokenizer.mask_token_id is None
    if lacks := [kind for kind, is_missing in missing.items() if is_missing]:
        raise ValueError(
            f"the tokenizer {name} has no {lacks[0]} token: choose another, or bpe, char or word"
        )
    is_translation = task.architecture == "encoder-decoder"
    if is_translation and tokenizer.eos_token_id not in tokenizer("a")["input_ids"][-1:]:
        raise ValueError(
            f"the tokenizer {name} does not end a text with its eos token, as translation needs: choose "
            f"another, or bpe, char or word"
        )
    return tokenizer


def prepare_tokenizer(arguments: Arguments, task: Task, rows: Dataset) -> None:
    """Saves the run's tokenizer, trained on the rows or copied from a ready one, unless it is there."""
    folder = Path(arguments.output_dir)
    if (folder / "tokenizer_config.json").exists():
        return
    name = arguments.model_name_or_path or arguments.tokenizer
    if name in TOKENIZERS:
        texts = (text for row in rows for text in task.texts(row))
        tokenizer = train_tokenizer(
            texts,
            name,
            arguments.vocab_size,
            arguments.max_length,
            task.architecture,
            mask=task.name == "masked-lm",
        )
    else:
        tokenizer = load_tokenizer(name, task)
    tokenizer.save_pretrained(folder)


def prepare_data(
    arguments: Arguments, accelerator: Accelerator, task: Task
) -> tuple[Task, PreTrainedTokenizerBase, dict[str, Split], Data]:
    """
    Returns the task with its labels, the tokenizer, the splits and what is to be known about their data.

    On each machine one process works and the others read what it wrote into the cache.
    """
    with accelerator.local_main_process_first():
        data = read_data(arguments, task)
    train = data.rows["train"]
    seen = Dataset.from_list(list(train.take(SEEN))) if arguments.streaming else train
    task = task.learn_labels(seen)
    if accelerator.is_main_process:
        prepare_tokenizer(arguments, task, seen)
    accelerator.wait_for_everyone()
    tokenizer = AutoTokenizer.from_pretrained(arguments.output_dir)
    splits = {}
    for split, rows in data.rows.items():
        is_training = split == "train"
        if is_training and arguments.streaming:
            splits[split] = Split(rows, None, data.dropped[split])
            accelerator.print("train: read as it comes")
            continue
        with accelerator.local_main_process_first():
            splits[split], dropped, cut = make_split(task, rows, tokenizer, is_training, arguments.bad_rows)
        data.dropped[split] = data.dropped.get(split, Counter()) + dropped
        made, used = len(splits[split].examples), len(splits[split].rows)
        size = f"{made:,} examples" + (f" of {used:,} rows" if made != used else "")
        accelerator.print(report(split, size, data.dropped[split], cut))
    return task, tokenizer, splits, data
