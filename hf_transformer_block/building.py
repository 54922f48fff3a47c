"""Task, configuration and model of a training run, as its flags ask."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
import yaml
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from .arguments import Arguments
from .configuration_hf_transformer_block import TransformerBlockConfig, nearest
from .tasks import TASKS, Task


def build_task(arguments: Any, name: str) -> Task:
    """Returns the task with those of its fields that are flags."""
    task = TASKS[name]
    return task(**{f.name: getattr(arguments, f.name) for f in fields(task) if hasattr(arguments, f.name)})


def check_config(build: Callable[..., TransformerBlockConfig], **values: Any) -> TransformerBlockConfig:
    """Returns a configuration; raises ValueError, in one sentence, for fields that do not fit together."""
    try:
        return build(**values)
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__)) from error


def read_overrides(arguments: Arguments) -> dict[str, Any]:
    """Returns the fields of --config_overrides; raises ValueError if it is no 'key: value, ...'."""
    try:
        overrides = yaml.safe_load(f"{{{arguments.config_overrides}}}")
    except yaml.YAMLError as error:
        raise ValueError(
            f"--config_overrides {arguments.config_overrides!r} is no 'key: value, ...'"
        ) from error
    for key in overrides:
        known = [field.name for field in fields(TransformerBlockConfig)]
        if key not in known:
            raise ValueError(
                f"--config_overrides: the configuration has no field {key!r}{nearest(str(key), known)}"
            )
        if hasattr(arguments, key):
            raise ValueError(f"--config_overrides {key}: it is a flag of its own, --{key}")
    if unset := [key for key, value in overrides.items() if value is None]:
        raise ValueError(f"--config_overrides gives no value for {unset[0]!r}: write 'key: value'")
    return overrides


def build_config(arguments: Arguments, task: Task, **tokens: int | None) -> TransformerBlockConfig:
    """Returns the configuration of a fresh model; raises ValueError for flags that do not fit together."""
    values = {
        "architecture": task.architecture,
        "hidden_size": arguments.hidden_size,
        "num_hidden_layers": arguments.num_hidden_layers,
        "num_attention_heads": arguments.num_attention_heads,
        "intermediate_size": arguments.intermediate_size,
        "dropout": 0.1 if arguments.dropout is None else arguments.dropout,
        "max_position_embeddings": arguments.max_length + 1,
        **task.config_values(),
        **tokens,
        **read_overrides(arguments),
    }
    return check_config(getattr(TransformerBlockConfig, arguments.preset), **values)


def load_config(arguments: Arguments, task: Task) -> TransformerBlockConfig:
    """Returns the configuration of --model_name_or_path for a task; raises ValueError if it does not fit."""
    name = arguments.model_name_or_path
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--model_name_or_path {name} is neither a folder nor an id that loads: {error}"
        ) from error
    if config.model_type != TransformerBlockConfig.model_type:
        raise ValueError(
            f"--model_name_or_path {name} is a {config.model_type}, no model of this family: "
            f"scripts/convert.py makes one of a GPT-2, Llama, Mistral, Qwen2, Qwen3 or Marian"
        )
    if not any(name.endswith(task.model_class.__name__) for name in config.auto_map.values()):
        raise ValueError(
            f"--model_name_or_path {name} is a {config.architecture}, which is no model for {task.name}"
        )
    limit = config.max_position_embeddings
    if config.position_embedding in ("learned", "sinusoidal") and arguments.max_length + 1 > limit:
        raise ValueError(
            f"--max_length {arguments.max_length} is too long for {name}, which has {limit} positions: "
            f"--max_length {limit - 1}"
        )
    dropout = {} if arguments.dropout is None else {"dropout": arguments.dropout}
    values = {**config.to_dict(), **dropout, **task.config_values(), **read_overrides(arguments)}
    return check_config(TransformerBlockConfig, **values)


def fine_tuned_model(arguments: Arguments, task: Task) -> PreTrainedModel:
    """Returns the model of --model_name_or_path with the task's head, a new one for other labels."""
    name, config = arguments.model_name_or_path, load_config(arguments, task)
    known = AutoConfig.from_pretrained(name).label2id
    model = task.model_class.from_pretrained(
        name, config=config, dtype="float32", ignore_mismatched_sizes=True
    )
    if hasattr(model, "classifier") and known != config.label2id:
        torch.nn.init.normal_(model.classifier.weight, std=config.initializer_range)
        torch.nn.init.zeros_(model.classifier.bias)
    return model


def fresh_model(arguments: Arguments, task: Task, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Returns a model with fresh weights for the tokenizer's vocabulary."""
    translates = task.architecture == "encoder-decoder"
    start = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    config = build_config(
        arguments,
        task,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=start if translates else None,
    )
    return task.model_class(config)


def build_model(arguments: Arguments, task: Task, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Returns the run's model, fresh or from --model_name_or_path, with its generation settings."""
    if arguments.model_name_or_path:
        model = fine_tuned_model(arguments, task)
    else:
        model = fresh_model(arguments, task, tokenizer)
    if arguments.gradient_checkpointing:
        is_new = hasattr(model, "activation_checkpointing_enable")  # its name from transformers 5.24 on
        model.activation_checkpointing_enable() if is_new else model.gradient_checkpointing_enable()
    if not model.can_generate():
        return model
    # else the library's default: 20 tokens, and none beyond the last position whatever the prompt's length
    if model.config.is_encoder_decoder or model.config.position_embedding in ("rotary", "none"):
        model.generation_config.max_new_tokens = arguments.max_length
    model.generation_config.num_beams = arguments.num_beams
    return model
