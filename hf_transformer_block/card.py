"""The model card: written from what a training left in its folder, and checked before it is published."""

import json
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCardData, get_local_safetensors_metadata
from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError
from transformers import AutoTokenizer

from . import __version__
from .card_checks import as_list, check_card, front_matter, is_number, is_repo_id, metadata_problems
from .folders import read_text
from .tasks import TASKS


PIPELINE_TAGS = {
    **{name: name for name in TASKS},
    "causal-lm": "text-generation",
    "masked-lm": "fill-mask",
}
# our scores as the library `evaluate` names them (its "bleu" is another than sacreBLEU's), and as people do
SCORES: dict[str, tuple[str, str, dict[str, str] | None]] = {
    "loss": ("loss", "Loss (nats per target)", None),
    "perplexity": ("perplexity", "Perplexity", None),
    "bits_per_byte": ("bits_per_byte", "Bits per byte", None),
    "bleu": ("sacrebleu", "BLEU", None),
    "chrf": ("chrf", "chrF", None),
    "exact_match": ("exact_match", "Exact match (%)", None),
    "accuracy": ("accuracy", "Accuracy (%)", None),
    "precision": ("precision", "Precision (%)", None),
    "recall": ("recall", "Recall (%)", None),
    "f1": ("f1", "F1 (%)", None),
    "macro_f1": ("f1", "Macro F1 (%)", {"average": "macro"}),
    "micro_f1": ("f1", "Micro F1 (%)", {"average": "micro"}),
}
NO_METRICS = ("loss", "bits_per_byte")  # which `evaluate` does not have
COUNTS = ("targets",)  # not a score, but over how much it is a mean
RESUME = "the training command with --resume writes the records anew"


def read_record(folder: Path, name: str) -> dict[str, Any]:
    """Returns a file's JSON object, which may hold NaN: `eval_results` names the score. Raises ValueError."""
    try:
        record = json.loads(read_text(folder / name))
    except FileNotFoundError as error:
        raise ValueError(
            f"{folder} has no {name}: give a folder that train.py or save_pretrained wrote"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / name} is no JSON ({error}): {RESUME}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{folder / name} is a JSON {type(record).__name__}, no object: {RESUME}")
    return record


def count_parameters(folder: Path) -> dict[str, int]:
    """Returns the number of parameters by dtype, by the headers of the weights alone."""
    try:
        return get_local_safetensors_metadata(folder).parameter_count
    except (NotASafetensorsRepoError, SafetensorsParsingError, FileNotFoundError) as error:
        raise ValueError(f"{folder} has no whole safetensors weights ({error}): save the model") from error


def find_head(config: dict[str, Any]) -> str | None:
    """Returns the name of the class that was saved."""
    return next(iter(config.get("architectures") or []), None)


def find_task(config: dict[str, Any], metrics: dict[str, Any] | None) -> str | None:
    """Returns the task of the records, or the one that the head is for; None if it is for none of ours."""
    if metrics is not None:
        return metrics["arguments"]["task"]
    head = find_head(config)
    return next((task.name for task in TASKS.values() if task.model_class.__name__ == head), None)


def find_auto_class(config: dict[str, Any]) -> str:
    """Returns the name of the class of transformers that loads the model with its head."""
    head = find_head(config)
    found = (auto for auto, path in config.get("auto_map", {}).items() if path.split(".")[-1] == head)
    return next(found, "AutoModel")


def find_example(folder: Path, task: str | None) -> Any:
    """Returns an input for a model of which no example is recorded."""
    if task == "question-answering":
        return {"question": "Who wrote it?", "context": "Ada wrote it in 1843."}
    if task == "masked-lm":
        return f"Hello {AutoTokenizer.from_pretrained(folder).mask_token}"
    return "Hello"


def eval_results(metrics: dict[str, Any], pipeline_tag: str) -> list[EvalResult]:
    """Returns every score of the final evaluation; raises ValueError for one that is no finite number."""
    data, scores, results = metrics["data"][metrics["split"]], metrics["scores"], []
    for name, value in scores.items():
        if name in COUNTS or name.endswith("_signature"):
            continue
        if not is_number(value):
            raise ValueError(
                f"the score {name} in metrics.json is {value!r}, which is no finite number: evaluate again, "
                f"or take it out of metrics.json"
            )
        kind, title, arguments = SCORES.get(name, (name, name.replace("_", " "), None))
        if (signature := scores.get(f"{name}_signature")) is not None:
            arguments = {"signature": signature}
        results.append(
            EvalResult(
                task_type=pipeline_tag,
                dataset_type=data["dataset"] or "not-on-the-hub",
                dataset_name=data["dataset"] or data["source"],
                dataset_config=data["config"],
                dataset_split=data["split"] or metrics["split"],
                metric_type=kind,
                metric_name=title,
                metric_value=float(value),
                metric_args=arguments,
            )
        )
    return results


def default_license(metrics: dict[str, Any] | None) -> str:
    """Returns the package's licence where nobody else had a part in the weights, else "unknown"."""
    is_ours = metrics is not None and metrics["started_from"] is None
    return "apache-2.0" if is_ours else "unknown"


def unique(*values: str | None) -> list[str] | None:
    """Returns the values that are there, each once; None if there are none."""
    return list(dict.fromkeys(value for value in values if value is not None)) or None


def build_metadata(
    config: dict[str, Any], metrics: dict[str, Any] | None, options: dict[str, Any]
) -> ModelCardData:
    """Returns what stands above the card; raises ValueError for what the Hub would not take."""
    task, results, recorded = find_task(config, metrics), [], []
    is_base = find_head(config) == "TransformerBlockModel"
    tag = "feature-extraction" if is_base else PIPELINE_TAGS.get(task)
    if metrics is not None:
        results = eval_results(metrics, tag)
        recorded = [part["dataset"] for part in metrics["data"].values()]
    repo_id, license = options["repo_id"], options["license"]
    data = ModelCardData(
        language=unique(*(metrics["languages"] if metrics is not None else ()), *(options["language"] or ())),
        license=default_license(metrics) if license is None else license,
        library_name="transformers",
        pipeline_tag=tag,
        tags=["custom_code", config["model_type"], config["architecture"]],
        base_model=metrics["base_model"] if metrics is not None else None,
        datasets=unique(*recorded, *(options["datasets"] or ())),
        metrics=unique(*(result.metric_type for result in results if result.metric_type not in NO_METRICS)),
        model_name=(repo_id or f"{config['model_type']}-{task}").split("/")[-1] if results else None,
        eval_results=results or None,
    )
    if problems := metadata_problems(data.to_dict()):
        raise ValueError("; ".join(problems))
    return data


def template_values(folder: Path, config: dict[str, Any], metrics: dict[str, Any] | None) -> dict[str, Any]:
    """Returns what a template may use besides the metadata and the options."""
    has_tokenizer, example = (folder / "tokenizer_config.json").exists(), None
    if metrics is not None:
        example = metrics["example"]
    elif has_tokenizer:
        example = find_example(folder, find_task(config, metrics))
    return {
        "config": config,
        "metrics": metrics,
        "has_records": metrics is not None,
        "parameters": count_parameters(folder),
        "auto_class": find_auto_class(config),
        "has_tokenizer": has_tokenizer,
        "has_curve": (folder / "training_curve.png").exists(),
        "has_pipeline": "translation" in config.get("custom_pipelines", {}),
        "example": example,
        "version": __version__ if metrics is None else metrics["versions"]["hf_transformer_block"],
    }


def grouped(number: int) -> str:
    """Returns a number with commas between thousands; raises TypeError if it is none."""
    if not isinstance(number, int):
        raise TypeError(f"{str(number)!r} is no whole number")  # str() names a value that is missing
    return f"{number:,}"


def compile_template(text: str) -> jinja2.Template:
    """Returns a template that raises UndefinedError for a value that is missing."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["grouped"] = grouped
    environment.filters["python"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(text)


def render_card(
    folder: str | Path,
    template: str,
    *,
    license: str | None = None,
    language: list[str] | None = None,
    datasets: list[str] | None = None,
    repo_id: str | None = None,
    revision: str | None = None,
) -> str:
    """
    Returns the card of a folder, the same text for the same folder and options.

    Args:
        folder: what train.py or `save_pretrained` left; of the records only metrics.json is read.
        template: Jinja2, as in the project's model_card.md.
        license: id of the Hub's list; None is `default_license`.
        language: ISO 639 codes, besides those of the records.
        datasets: ids on the Hub, besides those of the records.
        repo_id: where the model can be loaded from; None is the folder itself.
        revision: tag, branch or commit there; None is "main".

    Raises:
        ValueError: a value is missing, or the Hub would not take it.
    """
    folder = Path(folder)
    if repo_id is not None and not is_repo_id(repo_id):
        raise ValueError(f"{repo_id!r} is no id on the Hub: write user/name")
    options = {"license": license, "language": language, "datasets": datasets, "repo_id": repo_id}
    config = read_record(folder, "config.json")
    metrics = read_record(folder, "metrics.json") if (folder / "metrics.json").exists() else None
    compiled = compile_template(template)
    try:
        data = build_metadata(config, metrics, options)
        values = template_values(folder, config, metrics)
        values |= {"metadata": data.to_yaml(), "card": data, "repo_id": repo_id, "revision": revision}
        return compiled.render(values)
    except (AttributeError, IndexError, KeyError, TypeError, jinja2.UndefinedError) as error:
        raise ValueError(
            f"the card of {folder} needs a value that metrics.json or config.json lacks or has in another "
            f"shape ({error}): {RESUME}"
        ) from error


def read_card(folder: Path) -> str:
    """Returns README.md, without the mark that some editors put first."""
    return read_text(folder / "README.md").removeprefix("\ufeff")


def is_edited(folder: str | Path, template: str) -> bool:
    """Returns whether a folder's README.md is another than `render_card` writes for the folder alone."""
    folder = Path(folder)
    if not (folder / "README.md").exists():
        return False
    try:
        return read_card(folder) != render_card(folder, template)
    except ValueError:  # it is no text, or the records do not say what it was
        return True


def published_card(folder: str | Path, template: str, **options: Any) -> str:
    """
    Returns the card to publish: README.md if somebody edited it, else `render_card` with the options.

    Raises:
        ValueError: `check_card` finds something, or an option contradicts the edited card.
    """
    if is_edited(folder, template):
        text = read_card(Path(folder))
        if options.get("repo_id"):  # what train.py writes for the folder itself
            text = text.replace('model_id = "."', f'model_id = "{options["repo_id"]}"')
        check_card(text, folder)
        data = front_matter(text)
        for name in ("license", "language", "datasets"):
            has = as_list(data.get(name))
            if lacking := [value for value in as_list(options.get(name)) if value not in has]:
                raise ValueError(
                    f"README.md was edited by hand and has no {name} {lacking[0]!r}, only {has}: change it "
                    f"there, or delete README.md to have it written anew"
                )
        return text
    text = render_card(folder, template, **options)
    check_card(text, folder)
    return text
