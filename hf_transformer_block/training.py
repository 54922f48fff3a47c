"""The verbs of training on Accelerate: optimizer, updates, update, evaluate, translate, checkpoint."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import sacrebleu
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, send_to_device
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .data import UpdateSampler, collate


Batch = dict[str, torch.Tensor]


def use_all_cores(accelerator: Accelerator) -> None:
    """Shares the machine's cores among its CPU processes; `accelerate launch` leaves each with one thread."""
    if accelerator.device.type == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(torch.get_num_threads(), cores // accelerator.num_processes))


def build_optimizer(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Returns AdamW that decays matrices only: not biases, norms or other vectors."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))


def updates(
    accelerator: Accelerator,
    dataset: Dataset,
    batch_size: int,
    micro_batch_size: int | None,
    pad_token_id: int,
    seed: int,
    numbers: range,
) -> Iterator[list[Batch]]:
    """
    Yields the micro-batches of the optimizer updates with these numbers, on this process's device.

    Args:
        batch_size: examples of one update, over all processes.
        micro_batch_size: most examples at a time on one process; None: its whole share.
    """
    sampler = UpdateSampler(
        list(dataset["length"]),
        batch_size,
        seed,
        numbers,
        accelerator.process_index,
        accelerator.num_processes,
    )
    size = micro_batch_size or batch_size

    def cut(examples: list[dict]) -> list[Batch]:
        return [collate(examples[i : i + size], pad_token_id) for i in range(0, len(examples), size)]

    # with a generator of its own: a loader without one draws a number from the random state that dropout uses
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=cut, generator=torch.Generator())
    for micro_batches in loader:
        yield send_to_device(micro_batches, accelerator.device)


def count_targets(batch: Batch, is_encoder_decoder: bool) -> torch.Tensor:
    """Returns how many tokens a batch predicts: a causal model predicts no first token."""
    labels = batch["labels"] if is_encoder_decoder else batch["labels"][:, 1:]
    return (labels != -100).sum()


def update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    micro_batches: list[Batch],
    label_smoothing: float = 0.0,
    max_grad_norm: float = 1.0,
) -> tuple[float, int]:
    """
    Makes one optimizer update; returns the mean loss per target token (nats) and the number of those tokens.

    Losses are summed over micro-batches and processes and divided by their common number of target tokens, so
    the update does not depend on how the batch was split.
    """
    is_encoder_decoder = accelerator.unwrap_model(model).config.is_encoder_decoder
    tokens = accelerator.reduce(sum(count_targets(batch, is_encoder_decoder) for batch in micro_batches))
    total = torch.zeros((), device=accelerator.device)
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
            loss = model(**batch, num_items_in_batch=tokens, label_smoothing=label_smoothing).loss
            accelerator.backward(loss * accelerator.num_processes)  # the gradients of processes are averaged
        total += loss.detach()
    accelerator.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return accelerator.reduce(total).item(), int(tokens)


def rank_shares(accelerator: Accelerator, lengths: list[int], batch_size: int) -> list[list[int]]:
    """Returns this process's batches of example numbers, longest first, over the whole data set once."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    mine = order[accelerator.process_index :: accelerator.num_processes]
    return [mine[start : start + batch_size] for start in range(0, len(mine), batch_size)]


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, dataset: Dataset, batch_size: int, pad_token_id: int
) -> dict[str, float]:
    """Returns the mean loss (nats per target token) over a data set, each example once, and the tokens."""
    model = accelerator.unwrap_model(model)
    was_training = model.training
    model.eval()
    batches = rank_shares(accelerator, list(dataset["length"]), batch_size)
    loader = DataLoader(
        dataset, batch_sampler=batches, collate_fn=partial(collate, pad_token_id=pad_token_id)
    )
    loss, tokens = 0.0, 0
    for batch in loader:
        batch = send_to_device(batch, accelerator.device)
        with accelerator.autocast():
            loss += model(**batch, num_items_in_batch=1, use_cache=False).loss.item()
        tokens += count_targets(batch, model.config.is_encoder_decoder).item()
    model.train(was_training)
    losses, counts = zip(*gather_object([(loss, tokens)]), strict=True)
    return {"loss": sum(losses) / sum(counts), "tokens": sum(counts)}


def bits_per_byte(loss: float, tokens: int, num_bytes: int) -> float:
    """Returns a model's bits per UTF-8 byte of text, comparable between tokenizers, from nats per token."""
    return loss * tokens / math.log(2) / num_bytes


def evaluate_text(
    accelerator: Accelerator,
    model: nn.Module,
    blocks: Dataset,
    texts: Dataset,
    batch_size: int,
    pad_token_id: int,
) -> dict[str, float]:
    """Returns loss and perplexity on the blocks that texts were cut into, and the bits per byte of text."""
    result = evaluate(accelerator, model, blocks, batch_size, pad_token_id)
    num_bytes = sum(len(text.encode()) for text in texts["text"])
    bits = bits_per_byte(result["loss"], result["tokens"], num_bytes)
    return {**result, "perplexity": math.exp(result["loss"]), "bits_per_byte": bits}


@torch.no_grad()
def translate(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    batch_size: int,
    **generation: int,
) -> list[str]:
    """Returns a translation for every source, on every process; sources of about one length go together."""
    model = accelerator.unwrap_model(model)
    was_training = model.training
    model.eval()
    encoded = tokenizer(sources, verbose=False)["input_ids"]
    batches = rank_shares(accelerator, [len(ids) for ids in encoded], batch_size)
    outputs = []
    for batch in tqdm(batches, desc="translate", leave=False, disable=not accelerator.is_main_process):
        inputs = tokenizer.pad({"input_ids": [encoded[index] for index in batch]}, return_tensors="pt")
        generated = model.generate(**inputs.to(accelerator.device), **generation)
        texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
        outputs += zip(batch, texts, strict=True)
    model.train(was_training)
    return [text for _, text in sorted(gather_object(outputs))]


def score_translations(hypotheses: list[str], references: list[str]) -> dict[str, float | str]:
    """Returns exact match (percent), BLEU and chrF with sacreBLEU's signatures."""
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    matches = sum(
        hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True)
    )
    return {
        "exact_match": 100 * matches / len(references),
        "bleu": bleu.corpus_score(hypotheses, [references]).score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": chrf.corpus_score(hypotheses, [references]).score,
        "chrf_signature": str(chrf.get_signature()),
    }


def checkpoints(output_dir: Path) -> list[Path]:
    """Returns the complete checkpoints of a run, oldest first."""
    return sorted((output_dir / "checkpoints").glob("step-*[0-9]"))


def register_state(accelerator: Accelerator, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Adds the schedule to checkpoints, and stores tied weights once, as `save_pretrained` does."""
    accelerator.register_for_checkpointing(scheduler)

    def drop_tied(models: list[nn.Module], states: list[dict], output_dir: str) -> None:
        # there are no states where an engine saves its own
        for model, state in zip(models, states, strict=False):
            tied = accelerator.unwrap_model(model).all_tied_weights_keys
            for name in [name for name in state if name.removeprefix("module.") in tied]:
                del state[name]

    accelerator.register_save_state_pre_hook(drop_tied)


def save_checkpoint(accelerator: Accelerator, output_dir: Path, state: dict, keep: int = 2) -> None:
    """Writes weights, optimizer, schedule, random states and `state` to a folder, renamed when whole."""
    folder = output_dir / "checkpoints" / f"step-{state['step']:08d}"
    partial_folder = folder.with_suffix(".partial")
    if accelerator.is_main_process:
        shutil.rmtree(partial_folder, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial_folder))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (partial_folder / "state.json").write_text(json.dumps(state))
        shutil.rmtree(folder, ignore_errors=True)
        partial_folder.rename(folder)
        for old in checkpoints(output_dir)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_checkpoint(accelerator: Accelerator, folder: Path) -> dict:
    """Restores what `save_checkpoint` wrote and returns its `state`."""
    accelerator.load_state(str(folder))
    return json.loads((folder / "state.json").read_text())
