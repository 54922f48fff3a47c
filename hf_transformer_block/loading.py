"""From files and data sets of the Hub to rows, and from rows to examples: each made once, or streamed."""

import hashlib
import inspect
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from datasets import Dataset, Features, IterableDataset
from datasets.exceptions import DatasetGenerationError, DatasetsError
from transformers import PreTrainedTokenizerBase

from . import batches, reading
from .folders import save_tokenizer
from .reading import hash_file, is_unicode
from .tasks.base import BadRow, Example, Row, Split, Task


REMEDY = "mend it, or --bad_rows drop leaves such rows out"


@dataclass(frozen=True)
class Origin:
    """Where one split's rows come from: local files, or a data set of the Hub or of a local folder."""

    files: tuple[str, ...] = ()
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    split: str = "train"


@dataclass
class Loaded:
    """Rows with a column `row`, their number; how often each reason dropped one; what identifies the data."""

    rows: Dataset | IterableDataset
    dropped: Counter[str]
    fingerprint: dict[str, Any]


def name_labels(value: Any, feature: Any) -> Any:
    """Returns a value of a data set with the names of its labels for their numbers; no label is None."""
    if isinstance(feature, datasets.ClassLabel):
        return None if value is None or value < 0 else feature.int2str(value)
    if isinstance(feature, datasets.List | datasets.LargeList) and value is not None:
        return [name_labels(item, feature.feature) for item in value]
    if isinstance(feature, dict) and value is not None:
        return {name: name_labels(item, feature[name]) for name, item in value.items()}
    return value


def open_dataset(origin: Origin, streaming: bool) -> Dataset | IterableDataset:
    """Returns a split of a data set of the Hub or of a folder; raises ValueError if it cannot be loaded."""
    name, config = origin.dataset_name, origin.dataset_config_name
    try:
        return datasets.load_dataset(name, config, split=origin.split, streaming=streaming)
    except (DatasetsError, OSError, ValueError) as error:
        raise ValueError(f"cannot load {name} ({origin.split}): {error.__cause__ or error}") from error


def read_raw(task: Task, origin: Origin, data: Dataset | IterableDataset | None) -> Iterator[Row]:
    """Yields the rows of files, or of the data set that was opened, as they are."""
    if data is None:
        yield from task.read(origin.files)
    else:
        yield from (name_labels(raw, data.features) for raw in data)


def locate(task: Task, origin: Origin, number: int) -> str:
    """Says where the `number`th row is: in which file, unless files are read side by side."""
    if not origin.files:
        return f"{origin.dataset_name} ({origin.split}), row {number}"
    before = 0
    try:
        for file in origin.files[:-1]:
            count = sum(1 for _ in task.read([file]))
            if number <= before + count:
                return f"{file}, row {number - before}"
            before += count
    except ValueError:  # one of two parallel files means nothing by itself
        return f"{' and '.join(origin.files)}, row {number}"
    return f"{origin.files[-1]}, row {number - before}"


def parse_rows(
    task: Task,
    origin: Origin,
    data: Dataset | IterableDataset | None,
    bad_rows: str,
    dropped: Counter[str],
) -> Iterator[Row]:
    """Yields the good rows, numbered, and counts why others are dropped; raises ValueError, see `load`."""
    kept = 0
    for number, raw in enumerate(read_raw(task, origin, data), start=1):
        try:
            if not is_unicode(raw):
                raise BadRow("it is not UTF-8: iconv -t UTF-8 converts a file")
            row = task.parse(raw)
        except BadRow as error:
            if bad_rows == "error":
                where = locate(task, origin, number)
                raise ValueError(f"{where}: {error}; {REMEDY}") from error
            dropped[str(error)] += 1
            continue
        except ValueError as error:
            raise ValueError(f"{locate(task, origin, number)}: {error}") from error
        yield {**row, "row": kept}
        kept += 1
    if not kept:
        where = " and ".join(origin.files) or f"{origin.dataset_name} ({origin.split})"
        raise ValueError(f"{where} {'holds no good row: ' + tell(dropped) if dropped else 'is empty'}")


def tell(dropped: Counter[str]) -> str:
    """Returns the reasons with their counts, the most frequent first."""
    return "; ".join(f"{reason} ({count:,} times)" for reason, count in dropped.most_common())


def identify_file(file: str, streaming: bool) -> dict[str, Any]:
    """Returns what shows that a file changed: its sha256, or its time where it may be too long to read."""
    try:
        facts = {"file": Path(file).name, "bytes": os.path.getsize(file)}
        if streaming:
            return {**facts, "modified": os.path.getmtime(file)}
        return {**facts, "sha256": hash_file(file)}
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error


def identify_task(task: Task) -> list[str]:
    """Returns a task's fields and the contents of the modules that read and encode its data."""
    modules = {inspect.getfile(kind) for kind in type(task).__mro__ if issubclass(kind, Task)}
    modules |= {__file__, batches.__file__, reading.__file__}
    return [repr(task), *sorted(map(hash_file, modules))]


def identify_tokenizer(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the contents of a tokenizer's files."""
    with tempfile.TemporaryDirectory() as folder:
        return [hash_file(file) for file in sorted(save_tokenizer(tokenizer, folder))]


def infer_types(rows: Iterator[Row]) -> Features:
    """Returns the types of the columns by as many rows as it takes to see every type, mostly one."""
    schema = None
    for row in rows:
        seen = pyarrow.Table.from_pylist([row]).schema
        schema = (
            seen if schema is None else pyarrow.unify_schemas([schema, seen], promote_options="permissive")
        )
        if "null" not in str(schema):  # no missing value, no empty list
            break
    return Features.from_arrow_schema(schema)


def write_once(generate: Callable[[Counter[str]], Iterator[Row]], *key: Any) -> tuple[Dataset, Counter[str]]:
    """
    Returns generated rows, memory-mapped, and the counts; what has the same key is found again.

    Rows lie in the cache of `datasets`, which lets one process write at a time.
    """
    fingerprint = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    folder = Path(datasets.config.HF_DATASETS_CACHE, "hf_transformer_block", fingerprint)
    record = folder / "record.json"  # complete before the rows are, as these get their name at the end

    def recorded() -> Iterator[Row]:
        counts: Counter[str] = Counter()
        yield from generate(counts)
        partial_record = record.with_suffix(".partial")  # a killed process leaves no half record
        partial_record.write_text(json.dumps({"counts": counts, "types": types.to_dict()}), encoding="utf-8")
        partial_record.replace(record)

    if record.exists():
        types = Features.from_dict(json.loads(record.read_text(encoding="utf-8"))["types"])
    else:
        types = infer_types(generate(Counter()))
    try:
        rows = Dataset.from_generator(recorded, types, cache_dir=str(folder), fingerprint=fingerprint)
    except (DatasetGenerationError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError):
            raise ValueError(f"cannot write into the cache {folder}: {cause}") from error
        raise cause from None
    return rows, Counter(json.loads(record.read_text(encoding="utf-8"))["counts"])


def load(task: Task, origin: Origin, bad_rows: str, streaming: bool = False) -> Loaded:
    """
    Reads a split; a row that the task refuses is an error ("error") or left out and counted ("drop").

    Without `streaming` all is read at once, or found in the cache if neither data nor code changed since.
    With it rows are read as they are asked for, and `dropped` counts those of the newest pass.

    Raises:
        ValueError: a file or data set cannot be read, lacks a column, has a bad row or no good one.
    """
    data = None if origin.files else open_dataset(origin, streaming)
    if data is None:
        fingerprint: dict[str, Any] = {"files": [identify_file(file, streaming) for file in origin.files]}
    else:
        fingerprint = {key: value for key, value in asdict(origin).items() if key != "files"}
        if not streaming:
            fingerprint["fingerprint"] = data._fingerprint
    generate = partial(parse_rows, task, origin, data, bad_rows)
    if not streaming:
        return Loaded(*write_once(generate, identify_task(task), fingerprint, bad_rows), fingerprint)
    dropped: Counter[str] = Counter()

    def stream() -> Iterator[Row]:
        dropped.clear()
        yield from generate(dropped)

    return Loaded(IterableDataset.from_generator(stream), dropped, fingerprint)


def encode(
    task: Task, rows: Dataset, tokenizer: PreTrainedTokenizerBase, is_training: bool, bad_rows: str
) -> tuple[Dataset, Counter[str]]:
    """
    Returns the examples made of rows, and how often each reason dropped one; "cut" counts what was cut.

    Raises:
        ValueError: an example cannot be used and `bad_rows` is "error", or none can.
    """

    def generate(counts: Counter[str]) -> Iterator[Example]:
        kept = 0
        for batch in rows.iter(1000):
            columns = task.encode(batch, tokenizer, is_training)
            for values in zip(*columns.values(), strict=True):
                example = dict(zip(columns, values, strict=True))
                reason = example.pop("dropped")
                if reason and bad_rows == "error":
                    index = batch["row"].index(example["row"])
                    text = task.texts({name: column[index] for name, column in batch.items()})[0]
                    raise ValueError(f"the row that begins {text[:40]!r}: {reason}; {REMEDY}")
                if reason:
                    counts[reason] += 1
                    continue
                if example.get("cut"):
                    counts["cut"] += 1
                yield example
                kept += 1
        if not kept:
            raise ValueError(f"none of {len(rows):,} rows can be used: {tell(counts)}")

    key = [identify_task(task), rows._fingerprint, identify_tokenizer(tokenizer), is_training, bad_rows]
    return write_once(generate, *key)


def report(split: str, size: str, dropped: Counter, cut: int) -> str:
    """Returns one line on a split's examples and on what was left out or cut."""
    reasons = ", ".join(f"{count:,} because {reason}" for reason, count in dropped.most_common())
    left_out = f"; left out: {reasons}" if reasons else ""
    return f"{split}: {size}{left_out}" + (f"; {cut:,} cut to --max_length" if cut else "")


def make_split(
    task: Task, rows: Dataset, tokenizer: PreTrainedTokenizerBase, is_training: bool, bad_rows: str
) -> tuple[Split, Counter[str], int]:
    """Returns the rows that examples were made of, with these; why others were dropped; how many were cut."""
    examples, dropped = encode(task, rows, tokenizer, is_training, bad_rows)
    cut = dropped.pop("cut", 0)
    if dropped:
        used = set(examples["row"])
        rows = rows.select([index for index, row in enumerate(rows["row"]) if row in used])
    return Split(rows, examples), dropped, cut
