"""
What each of several gloo processes does with saved folders, under `torchrun`.

`torchrun ... distributed_worker.py JOBS.json RESULTS` runs jobs, {name: [function below, its arguments]}, and
saves what each returns, or the traceback of its error, in RESULTS-RANK.pt. Jobs on remote code come first,
for once this process has imported the package, transformers prefers it.
"""

import importlib
import json
import logging
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path


if __name__ == "__main__":
    # each rank copies the remote code for itself, for one may read while another writes
    os.environ["HF_MODULES_CACHE"] = str(Path(os.environ["HF_HOME"]) / f"modules-{os.environ['RANK']}")

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig


PACKAGE = "hf_transformer_block"
WORLD_SIZE = 2
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    # so large an eps keeps the noise of tiny gradients out of the steps
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-2),
}


def tensors(values: dict[str, list]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def train(model, inputs, optimizer: str, steps: int = 3, ranks: int = 1) -> list[float]:
    """Takes optimizer steps on this rank's rows of one batch; returns the losses of the whole batch."""
    inputs = tensors(inputs)
    count = (inputs["labels"][:, 1:] if model.config.architecture == "decoder" else inputs["labels"]) != -100
    rank = dist.get_rank() if ranks > 1 else 0
    rows = {name: value.chunk(ranks)[rank] for name, value in inputs.items()}
    optimizer, losses = OPTIMIZERS[optimizer](model.parameters()), []
    for _ in range(steps):
        loss = model.train()(**rows, num_items_in_batch=count.sum()).loss
        (loss * ranks).backward()  # FSDP averages gradients over the ranks
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without its sharding."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(model) -> dict[str, torch.Tensor]:
    """Returns every parameter and buffer, whole."""
    return {name: whole(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}


def load(folder: str, auto: str, class_name: str | None, **kwargs):
    """Loads through an auto class and the folder's code, or with `class_name` through the package's class."""
    if class_name is None:
        assert PACKAGE not in sys.modules
        model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **kwargs)
        assert model.config.__class__.__module__.startswith("transformers_modules.")
        return model
    return getattr(importlib.import_module(PACKAGE), class_name).from_pretrained(folder, **kwargs)


def shard_by_hand(
    folder: str, auto: str, class_name: str | None, out: str, inputs: dict, optimizer: str, units: list[str]
) -> dict:
    """Loads, shards every block, `units` and the root by torch's `fully_shard`, trains and saves."""
    model = load(folder, auto, class_name)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    blocks = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    for module in [*blocks, *(model.get_submodule(name) for name in units), model]:
        fully_shard(module, mesh=mesh)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    losses = train(model, inputs, optimizer, ranks=WORLD_SIZE)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model.save_pretrained(out, state_dict=get_model_state_dict(model, options=options))
    return {"losses": losses, "state": state_of(model), "blocks": len(blocks)}


def shard_by_transformers(
    folder: str, auto: str, class_name: str | None, out: str, inputs: dict, optimizer: str
) -> dict:
    """Loads sharded by transformers' own FSDP, trains and saves."""
    model = load(folder, auto, class_name, distributed_config=DistributedConfig(fsdp_size=WORLD_SIZE))
    assert isinstance(model, FSDPModule)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    losses = train(model, inputs, optimizer, ranks=WORLD_SIZE)
    model.save_pretrained(out)
    blocks = [module for module in model.modules() if type(module).__name__ == "FSDPTransformerBlock"]
    return {"losses": losses, "state": state_of(model), "blocks": len(blocks)}


def outputs_of(model, inputs: dict, prompts: dict | None, options: dict | None) -> dict:
    """Returns the outputs, the loss and gradients in training, and the generated tokens."""
    inputs = tensors(inputs)
    labels = {
        name: inputs.pop(name) for name in ("labels", "start_positions", "end_positions") if name in inputs
    }
    found = {}
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    found["outputs"] = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    if prompts is not None:
        found["generated"] = model.generate(**tensors(prompts), **options)
    if labels:
        loss = model.train()(**inputs, **labels).loss
        loss.backward()
        found["loss"] = whole(loss)
        found["gradients"] = {name: whole(value.grad) for name, value in model.named_parameters()}
    return found


def split(
    folder: str,
    auto: str,
    class_name: str | None,
    out: str,
    inputs: dict,
    prompts: dict | None = None,
    options: dict | None = None,
) -> dict:
    """Loads in tensor parallel, runs, and saves."""
    model = load(folder, auto, class_name, distributed_config=DistributedConfig(tp_size=WORLD_SIZE))
    sharded = [name for name, value in model.named_parameters() if isinstance(value, DTensor)]
    found = outputs_of(model, inputs, prompts, options)
    model.save_pretrained(out)
    return {**found, "state": state_of(model), "sharded": sharded}


def main(jobs: str, results: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    assert dist.get_world_size() == WORLD_SIZE
    messages, found = [], {}
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("transformers").addHandler(handler)
    for name, (function, arguments) in json.loads(Path(jobs).read_text()).items():
        messages.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found[name] = globals()[function](**arguments)
            except Exception:
                found[name] = {"error": traceback.format_exc()}
        found[name]["messages"] = [*messages, *(str(warning.message) for warning in caught)]
    torch.save(found, f"{results}-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
