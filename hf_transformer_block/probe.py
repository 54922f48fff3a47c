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

import torch
import transformers
from safetensors.torch import save_file


PACKAGE = "hf_transformer_block"
TEXT = "A model is what it computes: 1 + 1 = 2, ja?"


def compute(
    model: str, revision: str | None, is_stranger: bool, has_tokenizer: bool
) -> dict[str, torch.Tensor]:
    """Returns the outputs of a model's own head, and the tokens of a text."""
    if is_stranger:
        sys.modules[PACKAGE] = None
    else:
        importlib.import_module(PACKAGE)
    where = {"revision": revision, "trust_remote_code": is_stranger}
    config = transformers.AutoConfig.from_pretrained(model, **where)
    named = {auto: name for auto, name in config.auto_map.items() if isinstance(name, str)}
    auto_classes = {name.split(".")[-1]: auto for auto, name in named.items()}
    auto_class = getattr(transformers, auto_classes[config.architectures[0]])
    loaded = auto_class.from_pretrained(model, **where, dtype=torch.float32).eval()
    ids = torch.arange(3, 19).remainder(config.vocab_size).view(2, 8)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :5]
    with torch.inference_mode():
        outputs = loaded(**inputs)
    results = {
        name: value.contiguous().clone()
        for name, value in outputs.items()
        if name.endswith("logits") or name == "last_hidden_state"
    }
    if has_tokenizer:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, **where)
        results["tokens"] = torch.tensor(tokenizer(TEXT)["input_ids"])
    return results


if __name__ == "__main__":
    save_file(compute(**json.loads(sys.argv[1])), sys.argv[2])
