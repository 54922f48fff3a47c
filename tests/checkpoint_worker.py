"""
What a process of its own does with checkpoints, because its test kills it, fills its disk or starts two.

`checkpoint_worker.py JOB FOLDER` runs one of the functions below and saves what it returns, as JSON, in
FOLDER/JOB-RANK.json.
"""

import json
import logging
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from hf_transformer_block import (
    TransformerBlockConfig,
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
)
from hf_transformer_block.checkpoints import (
    StopSignal,
    checkpoints,
    load_newest,
    register_state,
    save_checkpoint,
)
from hf_transformer_block.records import check_engine


MESSAGES = []
HEADS = {"decoder": TransformerBlockForCausalLM, "encoder-decoder": TransformerBlockForConditionalGeneration}


class Trainer:
    """A tiny model with dropout, whose updates depend on all that a checkpoint has to hold."""

    def __init__(self, accelerator: Accelerator, *registered: object, architecture: str = "decoder") -> None:
        torch.manual_seed(0)
        config = TransformerBlockConfig(
            architecture=architecture,
            vocab_size=61,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            dropout=0.3,
        )
        model = HEADS[architecture](config).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        # not prepared: it would count processes too
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        register_state(accelerator, self.scheduler, *registered)
        torch.manual_seed(1 + accelerator.process_index)

    def update(self) -> float:
        """Makes one update on random tokens and returns its loss."""
        ids = torch.randint(3, 61, (2, 9))
        loss = self.model(input_ids=ids, labels=ids).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self, folder: Path, step: int, keep: int = 9, **state: object) -> bool:
        return save_checkpoint(self.accelerator, folder, {"step": step, **state}, keep)

    def weights(self) -> torch.Tensor:
        """Returns a copy of all weights as one vector."""
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


@contextmanager
def limited(size: int | None):
    """Lets the kernel refuse this process's files beyond a size in bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[1] if size is None else size, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder: Path) -> list[str]:
    """Returns everything that is in the folder of checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def filled(folder: Path) -> dict:
    """Saves until the disk is full, goes back, and saves again after making room."""
    trainer = Trainer(Accelerator(cpu=True))
    step, losses = 0, {}
    while trainer.save(folder, step := step + 1):
        losses[step] = trainer.update()
    found = {"step": step, "full": names(folder), "state": load_newest(trainer.accelerator, folder)}
    found |= {"before": losses[step - 1], "after": trainer.update()}
    for old in checkpoints(folder)[:2]:
        shutil.rmtree(old)
    return {**found, "again": trainer.save(folder, step), "messages": MESSAGES}


class Blocker:
    """A registered object that keeps the write of a checkpoint waiting once it is armed."""

    file: Path | None = None

    def state_dict(self) -> dict:
        if self.file:
            self.file.touch()
            time.sleep(600)
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def blocked(folder: Path) -> dict:
    """Saves twice, notes the next loss, and stays in the middle of the third checkpoint."""
    blocker = Blocker()
    trainer = Trainer(Accelerator(cpu=True), blocker)
    trainer.update()
    trainer.save(folder, 1)
    trainer.update()
    trainer.save(folder, 2)
    (folder / "losses.json").write_text(json.dumps([trainer.update() for _ in range(2)]))
    blocker.file = folder / "inside"
    trainer.save(folder, 3)
    return {}


def two(folder: Path) -> dict:
    """Resumes, lets either process fail, damages a file and sends a signal, on two processes under DDP."""
    accelerator = Accelerator()
    check_engine(accelerator)
    trainer, rank = Trainer(accelerator), accelerator.process_index
    trainer.update()
    trainer.save(folder, 1)
    found = {"engine": accelerator.distributed_type.value, "losses": [trainer.update() for _ in range(3)]}
    found["state"] = load_newest(accelerator, folder)
    found["resumed"] = [trainer.update() for _ in range(3)]
    for process in range(2):
        with limited(999 if rank == process else None):
            found[f"{process} fails"] = [trainer.save(folder, 2), names(folder)]
    trainer.save(folder, 2)
    if accelerator.is_main_process:
        (checkpoints(folder)[1] / "random_states_1.pkl").write_bytes(b"")
    found["damaged"] = load_newest(accelerator, folder)
    found["after"] = [trainer.update() for _ in range(3)]
    with StopSignal() as stop:
        found["quiet"] = stop.agreed(accelerator)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        found |= {"asked": stop.asked, "agreed": stop.agreed(accelerator)}
    return {**found, "messages": MESSAGES}


def sharded(folder: Path) -> dict:
    """Resumes and lets a process fail under Accelerate's own FSDP2, which it would not choose on a CPU."""
    accelerator = Accelerator()
    try:
        check_engine(accelerator)
    except ValueError as error:
        MESSAGES.append(str(error))
    plugin = FullyShardedDataParallelPlugin()  # as the launcher's configuration says
    AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    PartialState._shared_state |= {"distributed_type": DistributedType.FSDP}
    check_engine(accelerator)
    trainer, rank = Trainer(accelerator), accelerator.process_index
    found = {"units": [type(m).__name__ for m in trainer.model.modules() if type(m).__name__[:4] == "FSDP"]}
    head, embedding = trainer.model.lm_head.weight, trainer.model.get_input_embeddings().weight
    found |= {"tied": head is embedding, "whole": len(head), "here": len(head.to_local())}
    found["version"] = 2 if accelerator.is_fsdp2 else 1
    trainer.update()
    trainer.save(folder, 1)
    found["losses"] = [trainer.update() for _ in range(3)]
    found["state"] = load_newest(accelerator, folder)
    found["resumed"] = [trainer.update() for _ in range(3)]
    with limited(3000 if rank == 1 else None):
        found["1 fails"] = [trainer.save(folder, 2), names(folder)]
    found["lifted"] = trainer.save(folder, 2)
    found["sums"] = {
        name: value.full_tensor().double().sum().item() for name, value in trainer.model.named_parameters()
    }
    weights, model = accelerator.get_state_dict(trainer.model), accelerator.unwrap_model(trainer.model)
    model.save_pretrained(folder / "model", is_main_process=rank == 0, state_dict=weights)
    return {**found, "messages": MESSAGES}


def main(job: str, folder: str) -> None:
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: MESSAGES.append(record.getMessage())
    logging.getLogger("hf_transformer_block").addHandler(handler)
    found = globals()[job](Path(folder))
    Path(folder, f"{job}-{PartialState().process_index}.json").write_text(json.dumps(found))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
