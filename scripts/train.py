"""
Trains a Transformer of the family and leaves a folder that AutoModel loads.

    accelerate launch scripts/train.py                                    dates in 16 languages -> ISO 8601
    accelerate launch scripts/train.py --config scripts/recipes/X.yaml    a recipe; flags override it
    accelerate launch scripts/train.py --task translation --train_files my.en my.de --output_dir runs/en-de
    accelerate launch scripts/train.py --task causal-lm --train_files my.txt --output_dir runs/writer
"""

import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path


os.environ["OMP_WAIT_POLICY"] = os.environ.get(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch starts its threads

import accelerate
import jinja2
import matplotlib.pyplot as plt
import torch
import transformers
import yaml
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

import hf_transformer_block
from hf_transformer_block import (
    TransformerBlockConfig,
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
)
from hf_transformer_block.arguments import RUN_FLAGS, Arguments, parse_arguments
from hf_transformer_block.data import (
    TOKENIZERS,
    read_pairs,
    read_texts,
    tokenise_pairs,
    tokenise_stream,
    train_tokenizer,
)
from hf_transformer_block.dates import date_pairs
from hf_transformer_block.training import (
    bits_per_byte,
    build_optimizer,
    checkpoints,
    evaluate,
    load_checkpoint,
    register_state,
    save_checkpoint,
    score_translations,
    translate,
    update,
    updates,
    use_all_cores,
)


RECIPES = Path(__file__).parent / "recipes"
CARD = Path(__file__).parents[1] / "model_card.md"


def prepare_folder(arguments: Arguments, accelerator: Accelerator) -> None:
    """Creates the output folder, or checks that the run which it holds may be continued or deleted."""
    folder = Path(arguments.output_dir)
    record = folder / "arguments.json"
    if accelerator.is_main_process:
        if arguments.overwrite and record.exists():
            shutil.rmtree(folder)
        if record.exists():
            before, now = json.loads(record.read_text()), asdict(arguments)
            if not arguments.resume:
                raise SystemExit(f"{folder} holds a run: --resume continues it, --overwrite deletes it")
            for name in sorted(set(now) - set(RUN_FLAGS)):
                if before.get(name) != now[name]:
                    raise SystemExit(f"--resume needs the run's --{name} {before.get(name)}, not {now[name]}")
        elif folder.exists() and any(folder.iterdir()):
            raise SystemExit(f"{folder} is not empty and holds no run: give another --output_dir")
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(asdict(arguments), indent=2))
    accelerator.wait_for_everyone()


def read_data(arguments: Arguments) -> dict[str, Dataset]:
    """Returns the texts of "train", "validation" and "test"."""
    if arguments.train_files is None:
        sizes = {"train": 60_000, "validation": 500, "test": 2_000}
        return {split: Dataset.from_list(date_pairs(split, size)) for split, size in sizes.items()}

    def read(files: list[str]) -> Dataset:
        if arguments.task == "translation":
            return read_pairs(files, arguments.source_column, arguments.target_column)
        return read_texts(files, arguments.text_column)

    train = read(arguments.train_files)
    if arguments.validation_files:
        validation = read(arguments.validation_files)
    elif arguments.task == "translation":
        split = train.train_test_split(test_size=max(1, len(train) // 20), seed=arguments.seed)
        train, validation = split["train"], split["test"]
    else:
        text = "\n".join(train["text"])
        end = len(text) * 9 // 10
        train, validation = (Dataset.from_dict({"text": [part]}) for part in (text[:end], text[end:]))
    test = read(arguments.test_files) if arguments.test_files else validation
    return {"train": train, "validation": validation, "test": test}


def prepare_tokenizer(
    arguments: Arguments, accelerator: Accelerator, train: Dataset
) -> PreTrainedTokenizerBase:
    """Returns the run's tokenizer, which the main process trains on the texts or copies from a ready one."""
    folder = Path(arguments.output_dir)
    if accelerator.is_main_process and not (folder / "tokenizer_config.json").exists():
        translates = arguments.task == "translation"
        if arguments.tokenizer in TOKENIZERS:
            texts = (text for column in train.column_names for text in train[column])
            tokenizer = train_tokenizer(
                texts, arguments.tokenizer, arguments.vocab_size, arguments.max_length, ends_texts=translates
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
            tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
            ends_texts = tokenizer.eos_token_id in tokenizer("a")["input_ids"][-1:]
            if tokenizer.eos_token_id is None or (translates and not ends_texts):
                raise SystemExit(
                    f"the tokenizer {arguments.tokenizer} must have an eos token, and for translation end "
                    f"every text with it: choose another, or bpe, char or word"
                )
        tokenizer.save_pretrained(folder)
    accelerator.wait_for_everyone()
    return AutoTokenizer.from_pretrained(folder)


def tokenise(
    arguments: Arguments, tokenizer: PreTrainedTokenizerBase, data: dict[str, Dataset]
) -> tuple[dict[str, Dataset], dict[str, int]]:
    """Returns the examples of every split, and how many were dropped for their length."""
    if arguments.task == "causal-lm":
        streams = {
            name: tokenise_stream(texts, tokenizer, arguments.max_length) for name, texts in data.items()
        }
        return streams, dict.fromkeys(data, 0)
    pairs = {name: tokenise_pairs(pairs, tokenizer, arguments.max_length) for name, pairs in data.items()}
    return {name: kept for name, (kept, _) in pairs.items()}, {
        name: drop for name, (_, drop) in pairs.items()
    }


def build_config(arguments: Arguments, **tokens: int | None) -> TransformerBlockConfig:
    """Returns the model's configuration; raises ValueError for flags that do not fit together."""
    values = {
        "architecture": "encoder-decoder" if arguments.task == "translation" else "decoder",
        "hidden_size": arguments.hidden_size,
        "num_hidden_layers": arguments.num_hidden_layers,
        "num_attention_heads": arguments.num_attention_heads,
        "intermediate_size": arguments.intermediate_size,
        "dropout": arguments.dropout,
        "max_position_embeddings": arguments.max_length + 1,
        **tokens,
    }
    for override in filter(None, arguments.config_overrides.split(",")):
        if "=" not in override:
            raise ValueError(f"--config_overrides has {override!r} where 'key=value' belongs")
        key, value = override.split("=", 1)
        values[key.strip()] = yaml.safe_load(value)
    return getattr(TransformerBlockConfig, arguments.preset)(**values)


def build_model(arguments: Arguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Returns a model with fresh weights for the tokenizer's vocabulary."""
    translates = arguments.task == "translation"
    start = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    config = build_config(
        arguments,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=start if translates else None,
    )
    model = (TransformerBlockForConditionalGeneration if translates else TransformerBlockForCausalLM)(config)
    model.generation_config.max_new_tokens = arguments.max_length
    model.generation_config.num_beams = arguments.num_beams
    return model


@torch.random.fork_rng()
def evaluate_run(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Arguments,
    texts: Dataset,
    examples: Dataset,
    num_pairs: int,
    num_beams: int = 1,
) -> dict[str, float | str]:
    """Returns loss and scores on a split and prints samples; training's random state stays as it was."""
    result = evaluate(accelerator, model, examples, arguments.eval_batch_size, tokenizer.pad_token_id)
    if arguments.task == "causal-lm":
        num_bytes = sum(len(text.encode()) for text in texts["text"])
        bits = bits_per_byte(result["loss"], result["tokens"], num_bytes)
        show_text(accelerator, model, tokenizer, texts["text"][0][:20], arguments.max_length - 20)
        return result | {"perplexity": math.exp(result["loss"]), "bits_per_byte": bits}
    pairs = texts.select(range(min(len(texts), num_pairs)))
    sources, references = list(pairs["source"]), list(pairs["target"])
    hypotheses = translate(
        accelerator, model, tokenizer, sources, arguments.eval_batch_size, num_beams=num_beams
    )
    show_translations(accelerator, sources[:4], hypotheses, references)
    return result | score_translations(hypotheses, references)


def show_text(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    length: int,
) -> None:
    """Prints a sampled continuation of a prompt."""
    if accelerator.is_main_process and length > 0:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(accelerator.device)
        model = accelerator.unwrap_model(model).eval()
        written = model.generate(**inputs, do_sample=True, max_new_tokens=length)
        model.train()
        tqdm.write(f"  {tokenizer.decode(written[0], skip_special_tokens=True)!r}")


def show_translations(
    accelerator: Accelerator, sources: list[str], hypotheses: list[str], references: list[str]
) -> None:
    """Prints sources with their translations."""
    if accelerator.is_main_process:
        for source, hypothesis, reference in zip(sources, hypotheses, references, strict=False):
            wrong = "" if hypothesis == reference else f"   (should be: {reference})"
            tqdm.write(f"  {source}  ->  {hypothesis}{wrong}")


def describe(scores: dict[str, float | str]) -> str:
    """Returns scores in one line."""
    return ", ".join(
        f"{name} {score if isinstance(score, str) else format(score, '.5g')}"
        for name, score in scores.items()
    )


def plot(history: list[dict], file: Path) -> None:
    """Draws the training curve."""
    figure, axes = plt.subplots(figsize=(7, 4))
    steps = [entry["step"] for entry in history]
    axes.plot(steps, [entry["train_loss"] for entry in history], label="training")
    axes.plot(steps, [entry["loss"] for entry in history], "o-", label="validation")
    axes.set(xlabel="optimizer updates", ylabel="loss (nats per target token)")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)


def train(
    accelerator: Accelerator,
    arguments: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    data: dict[str, Dataset],
    examples: dict[str, Dataset],
) -> tuple[PreTrainedModel, list[dict]]:
    """Trains from the newest checkpoint, or from fresh weights; returns the model and the evaluations."""
    folder = Path(arguments.output_dir)
    model = build_model(arguments, tokenizer)
    optimizer = build_optimizer(model, arguments.learning_rate, arguments.weight_decay)
    scheduler = get_scheduler(
        arguments.lr_scheduler_type, optimizer, arguments.warmup_steps, num_training_steps=arguments.max_steps
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    register_state(accelerator, scheduler)  # which is not prepared: it counts updates, not processes
    set_seed(arguments.seed, device_specific=True)
    state = {"step": 0, "history": []}
    if arguments.resume and (found := checkpoints(folder)):
        state = load_checkpoint(accelerator, found[-1])
        accelerator.print(f"continuing from {found[-1]}")

    is_main = accelerator.is_main_process
    bar = tqdm(total=arguments.max_steps, initial=state["step"], desc="train", disable=not is_main)
    batches = updates(
        accelerator,
        examples["train"],
        arguments.batch_size,
        arguments.micro_batch_size,
        tokenizer.pad_token_id,
        arguments.seed,
        state["step"],
        arguments.max_steps,
    )
    losses, tokens, started = [], 0, time.perf_counter()
    model.train()
    for step, micro_batches in enumerate(batches, start=state["step"] + 1):
        loss, count = update(
            accelerator,
            model,
            optimizer,
            scheduler,
            micro_batches,
            arguments.max_grad_norm,
            arguments.label_smoothing,
        )
        losses, tokens = [*losses, loss], tokens + count
        bar.update()
        speed = tokens / (time.perf_counter() - started)
        bar.set_postfix_str(f"loss {loss:.3f}, {speed:.0f} target tokens/s", refresh=False)
        if step % arguments.eval_steps == 0 or step == arguments.max_steps:
            scores = evaluate_run(
                accelerator,
                model,
                tokenizer,
                arguments,
                data["validation"],
                examples["validation"],
                arguments.eval_pairs,
            )
            entry = {"step": step, "train_loss": sum(losses) / len(losses), **scores}
            state["history"].append(entry)
            if is_main:
                tqdm.write(describe(entry))
            losses, tokens, started = [], 0, time.perf_counter()
        if step % arguments.save_steps == 0 or step == arguments.max_steps:
            save_checkpoint(accelerator, folder, state | {"step": step}, arguments.save_total_limit)
    bar.close()
    return model, state["history"]


def write_records(
    arguments: Arguments, accelerator: Accelerator, model: PreTrainedModel, metrics: dict, example: str
) -> None:
    """Writes metrics.json, the training curve and the model card beside the weights."""
    folder = Path(arguments.output_dir)
    versions = {"python": platform.python_version(), "hf_transformer_block": hf_transformer_block.__version__}
    versions |= {module.__name__: module.__version__ for module in (torch, transformers, accelerate)}
    metrics |= {
        "parameters": model.num_parameters(),
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "command": shlex.join(["accelerate", "launch", *sys.argv]),
        "versions": versions,
    }
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2, ensure_ascii=False), encoding="utf-8")
    plot(metrics["history"], folder / "training_curve.png")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    card = environment.from_string(CARD.read_text(encoding="utf-8")).render(
        arguments=arguments,
        config=model.config,
        source="local files"
        if arguments.train_files
        else "dates of 1900 to 2099 as Unicode CLDR writes them",
        example=example,
        **metrics,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    began = time.perf_counter()
    arguments = parse_arguments(__doc__, RECIPES)
    accelerator = Accelerator()
    use_all_cores(accelerator)
    set_seed(arguments.seed)
    try:
        build_config(arguments, vocab_size=arguments.vocab_size)  # before any long work
        prepare_folder(arguments, accelerator)
        with accelerator.main_process_first():
            data = read_data(arguments)
        tokenizer = prepare_tokenizer(arguments, accelerator, data["train"])
        with accelerator.main_process_first():
            examples, dropped = tokenise(arguments, tokenizer, data)
    except ValueError as error:
        raise SystemExit(f"train.py: {error}") from error
    sizes = ", ".join(f"{len(examples[name])} {name} ({dropped[name]} too long)" for name in examples)
    processes = f"{accelerator.num_processes} process(es) on {accelerator.device.type}"
    accelerator.print(
        f"{arguments.task}, examples: {sizes}; {len(tokenizer)} tokens; {processes} "
        f"({accelerator.distributed_type.value}), {torch.get_num_threads()} threads each, mixed precision "
        f"{accelerator.mixed_precision}"
    )
    model, history = train(accelerator, arguments, tokenizer, data, examples)
    test = evaluate_run(
        accelerator,
        model,
        tokenizer,
        arguments,
        data["test"],
        examples["test"],
        len(data["test"]),
        arguments.num_beams,
    )
    state_dict = accelerator.get_state_dict(model)
    model = accelerator.unwrap_model(model)
    model.save_pretrained(
        arguments.output_dir, is_main_process=accelerator.is_main_process, state_dict=state_dict
    )
    if accelerator.is_main_process:
        seconds = round(time.perf_counter() - began)
        metrics = {"test": test, "history": history, "seconds": seconds}
        example = next(iter(data["test"][0].values()))[:60]
        write_records(arguments, accelerator, model, metrics, example)
        print(f"test: {describe(test)}")
        print(f"{model.num_parameters():,} parameters, {seconds} s; saved in {arguments.output_dir}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
