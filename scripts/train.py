"""
Trains a Transformer of the family and leaves a folder that AutoModel loads.

    accelerate launch scripts/train.py                                    dates in 16 languages -> ISO 8601
    accelerate launch scripts/train.py --config scripts/recipes/X.yaml    a recipe; flags override it
    accelerate launch scripts/train.py --train_files my.en my.de --output_dir runs/en-de
    accelerate launch scripts/train.py --task causal-lm --train_files my.txt --output_dir runs/writer
    accelerate launch scripts/train.py --task text-classification --train_files my.csv --output_dir runs/tags

Interrupted, by whatever? The same command with --resume goes on from the newest whole checkpoint.
"""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, set_seed
from huggingface_hub import HfApi


try:
    from hf_transformer_block import card, checkpoints, hub, records, training
    from hf_transformer_block.arguments import RUN_FLAGS, Arguments, parse_arguments
    from hf_transformer_block.building import build_config, build_task, load_config
    from hf_transformer_block.dates import LANGUAGES
    from hf_transformer_block.preparing import Data, prepare_data
    from hf_transformer_block.publishing import list_files, publish
    from hf_transformer_block.run import Run, describe
    from hf_transformer_block.staging import staged_model
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "hf_transformer_block[train]"') from error


RECIPES = Path(__file__).parent / "recipes"
ROOT = Path(__file__).parents[1]
CARD, LICENSE = ROOT / "model_card.md", ROOT / "LICENSE"
WRITTEN = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("configuration_hf_transformer_block.py", "modeling_hf_transformer_block.py"),
    *("pipeline_hf_transformer_block.py", "README.md"),
    *("arguments.json", "run.json", "metrics.json", "metrics.jsonl", "training_curve.png"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "chat_template.jinja"),
)


def check_resumable(arguments: Arguments, record: Path) -> None:
    """Raises ValueError unless the run that left `record` may be continued with these arguments."""
    if not arguments.resume:
        raise ValueError(f"{record.parent} holds a run: --resume continues it, --overwrite deletes it")
    before, now = json.loads(record.read_text(encoding="utf-8")), asdict(arguments)
    for name in sorted(set(now) - set(RUN_FLAGS)):
        if before.get(name) != now[name]:
            raise ValueError(f"--resume needs the run's --{name} {before.get(name)}, not {now[name]}")


def delete_run(folder: Path) -> None:
    """Deletes what a run wrote into its folder, and nothing else."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for pattern in WRITTEN:
        for file in folder.glob(pattern):
            file.unlink()


def prepare_folder(arguments: Arguments) -> None:
    """Creates the output folder; raises ValueError if it holds something that is not to be overwritten."""
    folder = Path(arguments.output_dir)
    record = folder / "arguments.json"
    try:
        if record.exists():
            has_begun = checkpoints.checkpoints(folder) or (folder / "config.json").exists()
            if has_begun and not arguments.overwrite:
                check_resumable(arguments, record)
            else:
                delete_run(folder)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is there already and holds no run: give another --output_dir")
        folder.mkdir(parents=True, exist_ok=True)
        records.replace_file(record, json.dumps(asdict(arguments), indent=2, ensure_ascii=False))
    except OSError as error:
        raise ValueError(
            f"cannot write into {folder}: {error.strerror}; give another --output_dir"
        ) from error


def without_folder(value: object) -> object:
    """Returns a flag's value, an absolute path without its folder, which would say who ran it."""
    if isinstance(value, list):
        return [without_folder(item) for item in value]
    is_path = isinstance(value, str) and Path(value).is_absolute()
    return Path(value).name if is_path else value


def hub_id(name: str | None) -> str | None:
    """Returns the name of a model or data set unless it is a folder of this machine."""
    return None if name is None or Path(name).is_dir() else name


def describe_split(run: Run, data: Data, name: str) -> dict[str, object]:
    """Returns where a split's rows came from, how many there are, and how many were left out."""
    split, dataset_name = run.splits[name], run.arguments.dataset_name
    origin, dropped = data.fingerprints.get(name, {}), data.dropped.get(name) or split.dropped or {}
    files = origin.get("files", [])
    is_data_set = bool(dataset_name) and not files
    if data.is_embedded:
        source = "dates of 1900 to 2099 as Unicode CLDR writes them"
    elif not origin:
        source = "rows held out of the training data"
    else:
        source = f"the data set {without_folder(dataset_name)}" if is_data_set else "local files"
    return {
        "source": source,
        "dataset": hub_id(dataset_name) if is_data_set else None,
        "config": run.arguments.dataset_config_name if is_data_set else None,
        "split": origin.get("split"),
        "rows": None if split.examples is None else len(split.rows),
        "left_out": sum(dropped.values()),
        "files": files,
    }


def write_results(run: Run, data: Data, scores: dict, seconds: int) -> None:
    """Writes metrics.json, which holds all that the model card says, and the card beside the weights."""
    arguments, folder = run.arguments, run.folder
    template, start = CARD.read_text(encoding="utf-8"), arguments.model_name_or_path
    is_edited = card.is_edited(folder, template)
    metrics = {
        "split": run.final_split,
        "scores": scores,
        "history": run.progress.history,
        "steps": run.progress.step,
        "best_step": run.progress.best_step,
        "seconds": seconds,
        "starts": len(json.loads((folder / "run.json").read_text(encoding="utf-8"))),
        "parameters": run.num_parameters,
        "started_from": start and without_folder(start),
        "base_model": hub_id(start),
        "data": {name: describe_split(run, data, name) for name in run.splits},
        "languages": list(LANGUAGES) if data.is_embedded else [],
        "example": run.task.example(run.splits[run.final_split].rows[0], run.tokenizer),
        "arguments": {name: without_folder(value) for name, value in asdict(arguments).items()},
        "command": records.command_line(sys.argv),
        "code": records.code_version(),
        "versions": records.versions(),
        **records.host_facts(run.accelerator),
    }
    records.replace_file(folder / "metrics.json", json.dumps(metrics, indent=2, ensure_ascii=False))
    if is_edited:
        print(f"{folder / 'README.md'} was edited and stays as it is; delete it to have it written anew")
    else:
        records.replace_file(folder / "README.md", card.render_card(folder, template))


def on_main(accelerator: Accelerator, check: Callable[[], object]) -> None:
    """Checks in the main process, for which the others wait; raises its error as a ValueError in all."""
    fault = ""
    if accelerator.is_main_process:
        try:
            check()
        except (ValueError, OSError) as error:
            fault = str(error) or type(error).__name__
    if fault := broadcast_object_list([fault])[0]:
        raise ValueError(fault)


def check_run(arguments: Arguments, accelerator: Accelerator) -> None:
    """Raises ValueError, before any long work, for what cannot work in the end."""
    records.check_engine(accelerator)
    task = build_task(arguments, arguments.task)
    if arguments.model_name_or_path:
        load_config(arguments, task)
    else:
        build_config(arguments, task, vocab_size=arguments.vocab_size)
    processes = accelerator.num_processes
    if not arguments.tokens_per_batch and arguments.batch_size < processes:
        raise ValueError(f"--batch_size {arguments.batch_size} leaves some of {processes} processes idle")
    if arguments.ema_decay and accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "--ema_decay needs whole weights, which DeepSpeed keeps to itself: leave it out, or use FSDP2"
        )
    if arguments.push_to_hub:  # not after hours of training
        place = hub.Place(arguments.push_to_hub)
        on_main(accelerator, lambda: hub.check_access(HfApi(), place))


def push(folder: Path, repo_id: str) -> None:
    """Pushes the finished model; raises ValueError, and the model is still in its folder."""
    try:
        place, is_there = hub.check_access(HfApi(), hub.Place(repo_id))
        with staged_model(folder, CARD, LICENSE, repo_id=place.repo_id) as staged:
            print(list_files(staged))
            publish(folder, staged, place, is_there, print)
    except (ValueError, OSError, KeyboardInterrupt) as error:
        words = str(error) or hub.INTERRUPTED
        command = shlex.join(["python", "scripts/push_to_hub.py", str(folder), repo_id])
        raise ValueError(
            f"the push did not end well ({words}), but the model is saved in {folder}: `{command}` pushes it"
        ) from error


def start(arguments: Arguments, accelerator: Accelerator) -> tuple[Run, Data]:
    """Returns the run, ready to train; raises ValueError if something about it cannot work."""
    check_run(arguments, accelerator)
    accelerator.print(
        f"{arguments.task}: {accelerator.num_processes} process(es) on {accelerator.device.type} "
        f"({accelerator.distributed_type.value}), {torch.get_num_threads()} threads each, mixed "
        f"precision {accelerator.mixed_precision}"
    )
    on_main(accelerator, lambda: prepare_folder(arguments))
    task = build_task(arguments, arguments.task)
    task, tokenizer, splits, data = prepare_data(arguments, accelerator, task)
    run = Run(arguments, accelerator, task, tokenizer, splits)
    records.write_run(run.folder, asdict(arguments), accelerator, data.fingerprints)
    accelerator.print(f"{run.num_parameters:,} parameters, {len(tokenizer):,} tokens")
    return run, data


def finish(run: Run, data: Data, began: float) -> None:
    """Saves and describes the trained model; raises ValueError if there is no room for it."""
    scores, samples = run.finish()
    if not run.accelerator.is_main_process:
        return
    seconds = round(time.perf_counter() - began)
    if fault := checkpoints.attempt(lambda: write_results(run, data, scores, seconds)):
        raise ValueError(f"the results could not be written ({fault}): make room, then --resume")
    print(*(f"  {line}" for line in samples), f"{run.final_split}: {describe(scores)}", sep="\n")
    print(f"{run.num_parameters:,} parameters, {seconds} s; saved in {run.folder}")


def train(arguments: Arguments, accelerator: Accelerator) -> bool:
    """Trains, and leaves the model, or a checkpoint to go on from; returns whether it came to the end."""
    began = time.perf_counter()
    run, data = start(arguments, accelerator)
    if arguments.report_to:
        flags = {
            name: value for name, value in asdict(arguments).items() if isinstance(value, int | float | str)
        }
        accelerator.init_trackers(run.folder.name, flags, {"wandb": {"dir": arguments.output_dir}})
    if stopped_by := run.train():
        step = run.progress.step
        accelerator.print(f"stopped by {stopped_by} after update {step}: --resume goes on from there")
        return False
    finish(run, data, began)
    return True


def main() -> None:
    arguments = parse_arguments(__doc__, RECIPES)
    accelerator = Accelerator(
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        log_with=arguments.report_to,
        project_dir=arguments.output_dir,
    )
    accelerator.gradient_accumulation_steps = (
        arguments.gradient_accumulation_steps
    )  # whatever the launcher says
    training.use_all_cores(accelerator)
    checkpoints.follow_launcher()
    set_seed(arguments.seed)
    folder, is_main = Path(arguments.output_dir), accelerator.is_main_process
    try:
        with records.locked(folder) if is_main else nullcontext():
            is_finished = train(arguments, accelerator)
            accelerator.wait_for_everyone()
            accelerator.end_training()
            # now no other process waits, however long it takes
            if is_finished and is_main and arguments.push_to_hub:
                push(folder, arguments.push_to_hub)
    except (ValueError, OSError) as error:
        raise SystemExit(f"train.py: {error}") from error
    except KeyboardInterrupt as error:
        raise SystemExit("train.py: interrupted; --resume goes on from the newest checkpoint") from error


if __name__ == "__main__":
    main()
