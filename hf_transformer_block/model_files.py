"""Reads the texts of a model's folder; whatever is wrong with one is told by its name."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
    except json.JSONDecodeError as error:
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
