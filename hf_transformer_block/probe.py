"""
Loads a model as a stranger does and saves what it computes on fixed inputs; runs as a process of its own.

The first argument is JSON: {"model": folder or id, "revision": or null, "is_stranger": bool,
"has_tokenizer": bool}; the second the safetensors file to write. A stranger has no hf_transformer_block:
imports of it fail, so that only the code beside the weights can have built the model. Else the installed
package builds it.
"""

import importlib
import json
import sys
from typing import Any

import torch
import transformers
from safetensors.torch import save_file


PACKAGE = "hf_transformer_block"
TEXT = "A model is what it computes: 1 + 1 = 2, ja?"


class UnfitError(ValueError):
    """What is wrong with a model that does load, as a whole sentence."""


def check_weights(model: torch.nn.Module, report: dict[str, Any]) -> None:
    """Raises UnfitError, with their names, unless a model's tensors are those of its files, and numbers."""
    mismatched = [
        f"{name} {tuple(found)}, not {tuple(wanted)}" for name, found, wanted in report["mismatched_keys"]
    ]
    broken = [name for name, tensor in model.named_parameters() if not tensor.isfinite().all()]
    for what, names in {
        "lack": report["missing_keys"],
        "hold what the model lacks": report["unexpected_keys"],
        "have another shape than config.json says": mismatched,
        "hold NaN or infinity": broken,
    }.items():
        if names:
            shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise UnfitError(f"the weights {what}: {shown}")


def check_generation(model: torch.nn.Module, ids: torch.Tensor, tokenizer: Any) -> None:
    """Raises UnfitError for settings of a folder with which generation fails, in whatever way."""
    try:
        model.generate(ids, max_new_tokens=2, tokenizer=tokenizer)
    except Exception as error:
        raise UnfitError(f"it cannot generate as its generation_config.json says: {error}") from error


def compute(
    model: str, revision: str | None, is_stranger: bool, has_tokenizer: bool
) -> dict[str, torch.Tensor]:
    """Returns the outputs of a model's own head, and the tokens of a text; generates if the model can."""
    if is_stranger:
        sys.modules[PACKAGE] = None
    else:
        importlib.import_module(PACKAGE)
    where = {"revision": revision, "trust_remote_code": is_stranger}
    config = transformers.AutoConfig.from_pretrained(model, **where)
    named = {auto: name for auto, name in config.auto_map.items() if isinstance(name, str)}
    auto_classes = {name.split(".")[-1]: auto for auto, name in named.items()}
    auto_class = getattr(transformers, auto_classes[config.architectures[0]])
    options = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
    loaded, report = auto_class.from_pretrained(model, **where, **options)
    check_weights(loaded.eval(), report)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, **where) if has_tokenizer else None
    ids = torch.arange(3, 19).remainder(config.vocab_size).view(2, 8)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    decoded = {"decoder_input_ids": ids[:, :5]} if config.is_encoder_decoder else {}
    with torch.inference_mode():
        outputs = loaded(**inputs, **decoded)
        if loaded.can_generate():
            check_generation(loaded, ids[:1, :4], tokenizer)
    results = {
        name: value.contiguous().clone()
        for name, value in outputs.items()
        if name.endswith("logits") or name == "last_hidden_state"
    }
    for name, value in results.items():
        if not value.isfinite().all():
            raise UnfitError(f"the {name} hold NaN or infinity")
    if tokenizer:
        results["tokens"] = torch.tensor(tokenizer(TEXT)["input_ids"])
    return results


if __name__ == "__main__":
    save_file(compute(**json.loads(sys.argv[1])), sys.argv[2])
