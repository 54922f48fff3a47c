"""Readers of local files, plain or gzipped: text, tables, JSON and CoNLL-like columns."""

import csv
import gzip
import hashlib
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pyarrow.parquet import ParquetFile


KINDS = {".jsonl": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
# bytes that are not UTF-8 become surrogates, and so make one row bad, not a file
TEXT = {"encoding": "utf-8-sig", "errors": "surrogateescape"}
PIECE = 2**16  # characters


def kind_of(file: str) -> str:
    """Returns a file's kind by its name, .gz aside: jsonl, json, csv, tsv, parquet, else text."""
    return KINDS.get(Path(file.removesuffix(".gz")).suffix, "text")


@contextmanager
def opened(file: str) -> Iterator[BinaryIO]:
    """Opens a file, unzipped if its name ends in .gz; raises ValueError where it cannot be read."""
    try:
        with gzip.open(file) if file.endswith(".gz") else open(file, "rb") as handle:
            yield handle
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"{file} is no whole gzip file: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}") from error


def is_unicode(value: Any) -> bool:
    """Returns whether no text in a value holds bytes that are not UTF-8."""
    if isinstance(value, str):
        return value.isascii() or not re.search("[\ud800-\udfff]", value)
    if isinstance(value, dict):
        return all(map(is_unicode, value.values()))
    return not isinstance(value, list) or all(map(is_unicode, value))


def hash_file(file: str | Path) -> str:
    """Returns the sha256 of a file."""
    digest = hashlib.sha256()
    with open(file, "rb") as handle:
        while block := handle.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def read_lines(file: str) -> Iterator[str]:
    r"""Yields the lines of a text without their ends, \n or \r\n."""
    with opened(file) as handle:
        for line in io.TextIOWrapper(handle, newline="\n", **TEXT):
            yield line.removesuffix("\n").removesuffix("\r")


def read_pieces(file: str) -> Iterator[tuple[str, bool]]:
    r"""
    Yields a text with Unix line ends in pieces of about `PIECE` characters, and whether each is the last.

    Pieces end with a line; a line that is longer is cut at a space, or anywhere. Raises ValueError if the
    text is nothing but space.
    """
    piece, rest, is_blank = "", "", True
    with opened(file) as handle:
        text = io.TextIOWrapper(handle, newline="\n", **TEXT)
        while chunk := text.read(PIECE):
            rest += chunk
            # never between \r and \n
            cut = rest.rfind("\n") + 1 or rest.rfind(" ") + 1 or len(rest.removesuffix("\r"))
            if piece:
                yield piece, False
            piece, rest = rest[:cut].replace("\r\n", "\n"), rest[cut:]
            is_blank = is_blank and not piece.strip()
    if is_blank and not rest.strip():
        raise ValueError(f"{file} is empty")
    yield piece + rest, True


def split_cells(file: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the rows of a .csv or .tsv as cells, with the number of their (last) line."""
    if kind_of(file) == "tsv":
        yield from ((number, line.split("\t")) for number, line in enumerate(read_lines(file), start=1))
        return
    csv.field_size_limit(2**31 - 1)  # else no document longer than 131,072 characters
    with opened(file) as handle:
        reader = csv.reader(io.TextIOWrapper(handle, newline="", **TEXT), strict=True)
        try:
            for cells in reader:
                yield reader.line_num, cells
        except csv.Error as error:
            raise ValueError(f"cannot read {file}: line {reader.line_num}: {error}") from error


def read_delimited(file: str, columns: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yields the rows of a .csv or .tsv; a blank line is a row of empty cells."""
    lines = split_cells(file)
    first, header = next(lines, (1, []))
    if kind_of(file) == "tsv" and header and not set(columns) <= set(header):
        lines, header = itertools.chain([(first, header)], lines), list(columns)
    if twice := [name for index, name in enumerate(header) if name in header[:index]]:
        raise ValueError(f"{file} has two columns {twice[0]!r}: rename one")
    for number, cells in lines:
        if len(cells) != len(header):
            if any(map(str.strip, cells)):
                raise ValueError(
                    f"{file} has {len(cells)} columns, not {len(header)}, in line {number}: {str(cells)[:80]}"
                )
            cells = [""] * len(header)
        yield dict(zip(header, cells, strict=True))


def read_objects(file: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a .jsonl; a blank line is one whose values are all empty."""
    columns: Sequence[str] = ()
    for number, line in enumerate(read_lines(file), start=1):
        try:
            value = json.loads(line) if line.strip() else dict.fromkeys(columns, "")
        except json.JSONDecodeError as error:
            raise ValueError(f"cannot read {file}: line {number} is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ValueError(f"cannot read {file}: line {number} is no object but {line[:40]!r}")
        columns = columns or list(value)
        yield value


def flatten_questions(articles: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the questions of SQuAD's articles, each with its context."""
    for paragraph in itertools.chain.from_iterable(article["paragraphs"] for article in articles):
        for question in paragraph["qas"]:
            answers = question.get("answers", [])
            yield {
                "id": question["id"],
                "context": paragraph["context"],
                "question": question["question"],
                "answers": {name: [answer[name] for answer in answers] for name in ("text", "answer_start")},
            }


def read_json(file: str) -> Iterator[dict[str, Any]]:
    """Yields the objects of a .json, which is read whole: a list, SQuAD's articles, or in truth a .jsonl."""
    with opened(file) as handle:
        text = io.TextIOWrapper(handle, **TEXT).read()
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        yield from read_objects(file)
        return
    if isinstance(value, dict):
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"cannot read {file}: it is neither a list of objects nor SQuAD's articles")
    try:
        yield from flatten_questions(value) if value and "paragraphs" in value[0] else value
    except (KeyError, TypeError) as error:
        raise ValueError(f"cannot read {file}: its articles are not those of SQuAD: {error!r}") from error


def read_parquet(file: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a .parquet; one that is gzipped is read whole."""
    with opened(file) as handle:
        source = io.BytesIO(handle.read()) if file.endswith(".gz") else handle
        try:
            for batch in ParquetFile(source).iter_batches(batch_size=1000):
                yield from batch.to_pylist()
        except ValueError as error:
            raise ValueError(f"cannot read {file}: {error}") from error


def read_records(file: str, columns: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """
    Yields the rows of a .csv, .tsv, .jsonl, .json or .parquet, plain or gzipped.

    The first line of a .csv or .tsv names its columns; a .tsv whose first line lacks some of `columns` has no
    such line and holds just these. A .tsv has no quotes. Raises ValueError for a file that breaks the rules.
    """
    kind = kind_of(file)
    if kind == "text":
        raise ValueError(
            f"{file} is no table: name it .csv, .tsv, .jsonl, .json or .parquet (then .gz or not)"
        )
    if kind in ("csv", "tsv"):
        return read_delimited(file, columns)
    return {"jsonl": read_objects, "json": read_json, "parquet": read_parquet}[kind](file)


def read_columns(file: str) -> Iterator[list[list[str]]]:
    """
    Yields the sentences of a CoNLL-like file: lines of cells, apart by tabs or spaces, then a blank line.

    Raises ValueError where lines differ in their cells. CoNLL-U's comments and -DOCSTART- are left out.
    """
    sentence: list[list[str]] = []
    width = 0
    for number, line in enumerate(read_lines(file), start=1):
        cells = line.split("\t") if "\t" in line else line.split()
        # before its first word, a sentence may have comments; but "# O" may be a word, too
        is_comment = not sentence and line.startswith("# ") and len(cells) != width
        if is_comment or line.startswith("-DOCSTART-"):
            continue
        if not line.strip():
            if sentence:
                yield sentence
            sentence = []
            continue
        width = width or len(cells)
        if len(cells) != width:
            raise ValueError(
                f"{file} has {len(cells)} columns, not {width}, in line {number}: {str(cells)[:80]}"
            )
        sentence.append(cells)
    if sentence:
        yield sentence


def pick(raw: dict[str, Any], name: str, flag: str) -> Any:
    """Returns a column's value; "a.b" is b of a. Raises ValueError that names the columns and `flag`."""
    if name in raw:
        return raw[name]
    value: Any = raw
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            known = list(value if isinstance(value, dict) else raw)
            raise ValueError(f"no column {name!r} but {known}: give {flag}")
        value = value[part]
    return value
