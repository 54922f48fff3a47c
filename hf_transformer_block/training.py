"""The verbs of training on Accelerate: optimizer, update, moving average, evaluate, translate."""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, send_to_device
from datasets import Dataset
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .batches import Batch, Example, rank_shares, split_batch


if TYPE_CHECKING:
    from .tasks.base import Task


def use_all_cores(accelerator: Accelerator) -> None:
    """Shares the machine's cores among its CPU processes; `accelerate launch` leaves each with one thread."""
    if accelerator.device.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(torch.get_num_threads(), cores // accelerator.num_processes))


def unwrap(accelerator: Accelerator, model: nn.Module) -> PreTrainedModel:
    """Returns the model that an engine and torch.compile have wrapped."""
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def is_sharded(accelerator: Accelerator, model: nn.Module) -> bool:
    """Returns whether a forward pass needs all processes, as each of them holds a part of the weights."""
    by_engine = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    return by_engine or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def build_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Returns AdamW that decays matrices only: not biases, norms or other vectors."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))


class ExponentialMovingAverage:
    """
    Average of the weights after each update, the recent ones counting most: a <- d a + (1 - d) w.

    d rises from 0.1 to `decay` as min(decay, (1 + n) / (10 + n)) over n updates, so that the random start is
    soon forgotten. Works on sharded weights; its state holds whole tensors.

    Source: Polyak and Juditsky, "Acceleration of stochastic approximation by averaging" (1992).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float):
        self.parameters = list(parameters)
        self.decay = decay
        self.updates = 0
        self.averages = [parameter.detach().clone() for parameter in self.parameters]
        self.whole = self.averages

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights as they are now."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        get_ema_multi_avg_fn(decay)(self.averages, self.parameters, self.updates)
        self.updates += 1

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the weights and their averages."""
        for parameter, average in zip(self.parameters, self.averages, strict=True):
            kept = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(kept)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Lets the model compute with the averages for a while."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    def gather(self) -> None:
        """Makes the averages whole for `state_dict`; all processes call it, before any may fail to write."""
        self.whole = [a.full_tensor() if isinstance(a, DTensor) else a for a in self.averages]

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "averages": self.whole}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for average, saved in zip(self.averages, state["averages"], strict=True):
            saved = saved.to(average.device)
            is_part = isinstance(average, DTensor)
            average.copy_(
                distribute_tensor(saved, average.device_mesh, average.placements) if is_part else saved
            )


def micro_batches(
    accelerator: Accelerator,
    task: "Task",
    tokenizer: PreTrainedTokenizerBase,
    examples: list[Example],
    pieces: int,
) -> list[Batch]:
    """
    Returns this process's part of a batch, in `pieces` on its device.

    A piece without an example of its own is a muted copy of the first: every process has to take part.
    """
    parts = split_batch(examples, accelerator.process_index, accelerator.num_processes, pieces)
    batches = [
        task.collate(part, tokenizer) if part else task.mute(task.collate(examples[:1], tokenizer))
        for part in parts
    ]
    return send_to_device(batches, accelerator.device)


@dataclass
class Update:
    """
    What one optimizer update reports, over all processes.

    Attributes:
        loss: mean over the targets (nats).
        targets: labels that counted.
        grad_norm: length of the gradient before clipping; None where the engine keeps it to itself.
        is_finite: whether loss and gradient were; if not, the weights have stayed as they were.
    """

    loss: float
    targets: int
    grad_norm: float | None
    is_finite: bool


def update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    batches: list[Batch],
    count_targets: Callable[[Batch], torch.Tensor],
    max_grad_norm: float,
    **loss_options: float,
) -> Update:
    """
    Makes one optimizer update of as many micro-batches as the accelerator accumulates.

    Losses are summed over micro-batches and processes and divided by their common number of targets, so the
    update does not depend on how the batch was split. A loss or gradient that is not finite changes nothing.
    """
    targets = accelerator.reduce(sum(map(count_targets, batches)))
    items = targets.clamp(min=1)
    total = torch.zeros((), device=accelerator.device)
    scale = accelerator.num_processes * accelerator.gradient_accumulation_steps  # both are averaged over
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch, num_items_in_batch=items, **loss_options).loss
            accelerator.backward(loss * scale)
        total += loss.detach()
    loss = accelerator.reduce(total).item()
    norm = accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
    norm = None if norm is None else float(norm)
    # fp16 scales the loss so high that gradients overflow now and then: its scaler skips those updates itself
    has_scaler = accelerator.scaler is not None
    is_finite = math.isfinite(loss) and (has_scaler or norm is None or math.isfinite(norm))
    if is_finite or has_scaler:
        optimizer.step()
        if not accelerator.optimizer_step_was_skipped:
            scheduler.step()
    optimizer.zero_grad()
    return Update(loss, int(targets), norm, is_finite)


def evaluation_batches(accelerator: Accelerator, lengths: list[int], batch_size: int) -> list[list[int]]:
    """Returns this process's batches of example numbers: each example once, as many batches everywhere."""
    index, count = accelerator.process_index, accelerator.num_processes
    most = math.ceil(math.ceil(len(lengths) / count) / batch_size)
    batches = rank_shares(lengths, batch_size, index, count)
    return batches + [[] for _ in range(most - len(batches))]


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    task: "Task",
    examples: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    batch_size: int,
) -> tuple[dict[str, float], list[Any]]:
    """
    Returns the mean loss over all targets (nats) with their number, and the prediction for each example.

    Every example counts once, whatever the number of processes.
    """
    model = accelerator.unwrap_model(model)
    was_training = model.training
    model.eval()
    loss, targets, predictions = 0.0, 0, []
    batches = evaluation_batches(accelerator, list(examples["length"]), batch_size)
    is_main = accelerator.is_main_process
    for numbers in tqdm(batches, desc="evaluate", leave=False, disable=not is_main):
        chosen = [{**examples[number], "draw": number} for number in numbers or [0]]
        batch = task.collate(chosen, tokenizer)
        batch = send_to_device(batch if numbers else task.mute(batch), accelerator.device)
        with accelerator.autocast():
            outputs = model(**batch, num_items_in_batch=1, use_cache=False)
        if numbers:
            loss += outputs.loss.item()
            targets += int(task.count_targets(batch))
            predictions += zip(numbers, task.predict(outputs, batch), strict=True)
    model.train(was_training)
    losses, counts = zip(*gather_object([(loss, targets)]), strict=True)
    everywhere = sorted(gather_object(predictions), key=lambda pair: pair[0])
    return {"loss": sum(losses) / max(1, sum(counts)), "targets": sum(counts)}, [p for _, p in everywhere]


@torch.no_grad()
def translate(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    batch_size: int,
    max_length: int | None = None,
    num_beams: int | None = None,
    max_new_tokens: int | None = None,
) -> list[str]:
    """Returns a translation for every source, on every process; sources of about one length go together."""
    options = {"synced_gpus": is_sharded(accelerator, model) and accelerator.num_processes > 1}
    options |= {} if num_beams is None else {"num_beams": num_beams}
    options |= {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    model = unwrap(accelerator, model)
    was_training = model.training
    model.eval()
    cut = {"truncation": True, "max_length": max_length} if max_length else {"verbose": False}
    encoded = tokenizer(sources, **cut)["input_ids"]
    batches = evaluation_batches(accelerator, [len(ids) for ids in encoded], batch_size)
    outputs = []
    for numbers in tqdm(batches, desc="translate", leave=False, disable=not accelerator.is_main_process):
        inputs = tokenizer.pad({"input_ids": [encoded[n] for n in numbers or [0]]}, return_tensors="pt")
        with accelerator.autocast():
            generated = model.generate(**inputs.to(accelerator.device), **options)
        texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
        outputs += zip(numbers, texts[: len(numbers)], strict=True)
    model.train(was_training)
    return [text for _, text in sorted(gather_object(outputs))]


def save_model(accelerator: Accelerator, model: nn.Module, folder: str | Path) -> None:
    """
    Saves a model as one normal folder, whatever engine trained it; all processes call it.

    Raises ValueError for weights that the engine gave without their values.
    """
    weights, model = accelerator.get_state_dict(model), unwrap(accelerator, model)
    # sharded weights come as tensors of their own, even where two names are one weight
    weights = {
        name: weight for name, weight in (weights or {}).items() if name not in model.all_tied_weights_keys
    }
    if empty := [name for name, weight in weights.items() if not weight.numel()]:
        raise ValueError(
            f"{empty[0]} came without its values: set zero3_save_16bit_model: true in the configuration of "
            f"DeepSpeed"
        )
    model.save_pretrained(folder, is_main_process=accelerator.is_main_process, state_dict=weights)


@torch.no_grad()
def write_on(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    max_new_tokens: int,
) -> str:
    """Returns a prompt and how a language model goes on, sampled; training's random state stays."""
    is_shared = is_sharded(accelerator, model) and accelerator.num_processes > 1
    model = unwrap(accelerator, model)
    was_training = model.training
    model.eval()
    ids = torch.tensor([prompt], device=accelerator.device)
    options = {"do_sample": True, "max_new_tokens": max_new_tokens, "synced_gpus": is_shared}
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices), accelerator.autocast():
        written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    model.train(was_training)
    return tokenizer.decode(written[0], skip_special_tokens=True)
