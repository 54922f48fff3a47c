"""What the Hub wants of a model card, checked without it: the metadata above a README, and what it shows."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import yaml
from babel import Locale
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id

from .licenses import LICENSES


# the Hub's tasks of text alone, as @huggingface/tasks names them
TEXT_TASKS = (
    *("text-classification", "token-classification", "table-question-answering", "question-answering"),
    *("zero-shot-classification", "translation", "summarization", "feature-extraction", "text-generation"),
    *("fill-mask", "sentence-similarity", "text-ranking", "text-retrieval", "multiple-choice", "other"),
)
FENCED = re.compile(r"^(`{3,}|~{3,})[^\n]*\n.*?^\1", re.DOTALL | re.MULTILINE)
IMAGE = re.compile(r"!\[[^\]]*\]\(\s*<?([^)\s>]+)|<img\b[^>]*\bsrc=[\"']([^\"']+)")


def as_list(value: Any) -> list[Any]:
    """Returns a value that may be one, several or none."""
    return value if isinstance(value, list) else [] if value is None else [value]


def front_matter(text: str) -> dict[str, Any]:
    """Returns the metadata above a card; raises ValueError if there are none that can be read."""
    match = REGEX_YAML_BLOCK.search(text)
    if match is None:
        raise ValueError("README.md does not begin with metadata: put them first, between two lines of ---")
    try:
        data = yaml.safe_load(match[2])
    except (yaml.YAMLError, ValueError) as error:  # the latter for a date that does not exist
        reason = " ".join(str(error).split())
        raise ValueError(f"README.md: the metadata are no YAML ({reason}): mend that line") from error
    if not isinstance(data, dict):
        raise ValueError(
            f"README.md: the metadata are {data!r}, no lines of 'key: value': write license: mit"
        )
    return data


def is_language(code: Any) -> bool:
    """Returns whether it is an ISO 639 code; of three letters any is taken, for there are thousands."""
    if code in ("multilingual", "code"):
        return True
    has_shape = isinstance(code, str) and re.fullmatch("[a-z]{2,3}", code)
    return bool(has_shape) and (len(code) == 3 or code in Locale("en").languages)


def is_repo_id(name: Any) -> bool:
    """Returns whether it may be the id of a repository: user/name, or an old name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_number(value: Any) -> bool:
    """Returns whether it is a plain finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def license_problems(data: dict[str, Any]) -> Iterator[str]:
    for name in as_list(data.get("license")):
        if str(name) not in LICENSES:
            yield (
                f"license {name!r} is not in the Hub's list: take one of it, as apache-2.0 or mit, or "
                f"other with license_name and license_link"
            )
        elif name == "other" and not (data.get("license_name") and data.get("license_link")):
            yield "license 'other' says nothing: add license_name and license_link, or take another"


def metric_problems(where: str, metric: Any) -> Iterator[str]:
    kind = metric.get("type") if isinstance(metric, dict) else None
    if not kind:
        yield f"{where}.type is missing: name the metric, as in accuracy"
    elif not is_number(value := metric.get("value")):
        hint = " (YAML reads 1e-4 as text: write 1.0e-4)" if isinstance(value, str) else ""
        yield f"{where}: {kind} is {value!r}, no plain finite number{hint}: mend it, or take it out"


def result_problems(where: str, result: Any) -> Iterator[str]:
    result = result if isinstance(result, dict) else {}
    for part, keys in {"task": ["type"], "dataset": ["type", "name"]}.items():
        has = result.get(part) if isinstance(result.get(part), dict) else {}
        yield from (f"{where}.{part}.{key} is missing: fill it in" for key in keys if not has.get(key))
    metrics = as_list(result.get("metrics"))
    if not metrics:
        yield f"{where}.metrics is empty: add a type and a value, or take the result out"
    for number, metric in enumerate(metrics):
        yield from metric_problems(f"{where}.metrics[{number}]", metric)


def model_index_problems(data: dict[str, Any]) -> Iterator[str]:
    for number, model in enumerate(as_list(data.get("model-index"))):
        where = f"model-index[{number}]"
        if not isinstance(model, dict) or not model.get("name"):
            yield f"{where}.name is missing: give the model a name"
            continue
        if not as_list(model.get("results")):
            yield f"{where}.results is empty: add a result, or take model-index out"
        for index, result in enumerate(as_list(model.get("results"))):
            yield from result_problems(f"{where}.results[{index}]", result)


def metadata_problems(data: dict[str, Any]) -> list[str]:
    """Returns what the Hub would not take of a card's metadata, a sentence each that says what to do."""
    problems = [*license_problems(data)]
    for code in as_list(data.get("language")):
        if not is_language(code):
            hint = "put no into quotes, for YAML reads it as false" if code is False else "write en, deu, ..."
            problems.append(f"language {code!r} is no ISO 639 code: {hint}; others go under language_bcp47")
    tag = data.get("pipeline_tag")
    if tag is not None and tag not in TEXT_TASKS:
        problems.append(f"pipeline_tag {tag!r} is no task of text: take one of {', '.join(TEXT_TASKS)}")
    for key in ("base_model", "datasets"):
        problems += [
            f"{key} {name!r} is no id on the Hub: write user/name, or take it out"
            for name in as_list(data.get(key))
            if not is_repo_id(name)
        ]
    for key in ("tags", "metrics"):
        problems += [
            f"{key}: {value!r} is no text: put it in quotes, or take it out"
            for value in as_list(data.get(key))
            if not isinstance(value, str)
        ]
    return [*problems, *model_index_problems(data)]


def text_problems(text: str, folder: Path) -> Iterator[str]:
    prose = FENCED.sub("", text)
    left = [("[More Information Needed]", text), ("path/to/", text), ("{{", prose), ("{%", prose)]
    for placeholder, where in left:
        if placeholder in where:
            yield f"the card still holds {placeholder!r}: fill it in, or take the line out"
    for names in IMAGE.findall(prose):
        name = "".join(names)
        if not re.match("https?:|data:", name) and not (folder / unquote(name)).is_file():
            yield f"the card shows {name}, which {folder} lacks: put the file there, or take the line out"


def check_card(text: str, folder: str | Path) -> None:
    """Raises ValueError, with a line for each problem, for a card that cannot be published."""
    problems = [*metadata_problems(front_matter(text)), *text_problems(text, Path(folder))]
    if problems:
        raise ValueError("README.md: " + "\n".join(problems))
