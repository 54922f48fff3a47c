"""Model cards: the metadata above a README, and a stand-in for the Hub's check, which is not public."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

from hf_transformer_block.licenses import LICENSES


LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*|multilingual|code")
FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)


def as_list(value: Any) -> list[Any]:
    """Returns a value of a card that may be one or several."""
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def front_matter(text: str) -> dict[str, Any]:
    """Returns the metadata of a README, {} if it has none; raises ValueError if nobody can read them."""
    match = FRONT_MATTER.match(text)
    try:
        data = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        raise ValueError(f"YAML: {error}") from error
    if data is not None and not isinstance(data, dict):
        raise ValueError(f"Metadata must be a mapping, got {data!r}")
    return data or {}


def result_errors(where: str, result: dict[str, Any]) -> Iterator[str]:
    required = {"task": ["type"], "dataset": ["type", "name"]}
    for part, keys in required.items():
        yield from (
            f'"{where}.{part}.{key}" is required' for key in keys if not (result.get(part) or {}).get(key)
        )
    metrics = result.get("metrics") or []
    if not metrics:
        yield f'"{where}.metrics" is required'
    for index, metric in enumerate(metrics):
        missing = [key for key in ("type", "value") if metric.get(key) is None]
        yield from (f'"{where}.metrics[{index}].{key}" is required' for key in missing)


def model_index_errors(models: list[dict[str, Any]]) -> Iterator[str]:
    for index, model in enumerate(models):
        if not model.get("name"):
            yield f'"model-index[{index}].name" is required'
        for number, result in enumerate(model.get("results") or []):
            yield from result_errors(f"model-index[{index}].results[{number}]", result)


def metadata_errors(data: dict[str, Any]) -> Iterator[str]:
    for license_id in as_list(data.get("license")):
        if license_id not in LICENSES:
            yield f'"license" must be one of the Hub\'s ids, got {license_id!r}'
    for key in ("tags", "datasets", "metrics"):
        if not isinstance(data.get(key) or [], str | list):
            yield f'"{key}" must be a string or a list'
    for language in as_list(data.get("language")):
        if not (isinstance(language, str) and LANGUAGE.fullmatch(language)):
            yield f'"language" must be an ISO 639 code, got {language!r} (quote "no": YAML reads it as false)'
    if not re.fullmatch(r"[a-z0-9\-]+", str(data.get("pipeline_tag") or "none")):
        yield f'"pipeline_tag" must be a task, got {data["pipeline_tag"]!r}'
    yield from model_index_errors(as_list(data.get("model-index")))


def space_errors(data: dict[str, Any]) -> Iterator[str]:
    """Yields what keeps the Hub from running a Space."""
    if data.get("sdk") not in ("gradio", "docker", "static"):
        yield f'"sdk" must be gradio, docker or static, got {data.get("sdk")!r}'
    for key in ("sdk_version", "python_version", "app_file", "title"):
        if not isinstance(data.get(key, ""), str):
            yield f'"{key}" must be a string, got {data[key]!r}'
    for model in as_list(data.get("models")):
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(model)):
            yield f'"models" must be ids on the Hub, got {model!r}'


def check_card(text: str, kind: str = "model") -> tuple[list[str], list[str]]:
    """Returns the errors and the warnings about a README."""
    try:
        data = front_matter(text)
    except ValueError as error:
        return [str(error)], []
    warnings = []
    if not data:
        warnings.append("empty or missing yaml metadata in repo card")
    if data.get("license") == "other" and not data.get("license_name"):
        warnings.append('"license: other" should come with license_name and license_link')
    errors = [*metadata_errors(data), *(space_errors(data) if kind == "space" else ())]
    return errors, warnings
