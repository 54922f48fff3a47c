"""
Trains a Transformer of the family and leaves a folder that AutoModel loads.

    accelerate launch scripts/train.py                                    dates in 16 languages -> ISO 8601
    accelerate launch scripts/train.py --config scripts/recipes/X.yaml    a recipe; flags override it
    accelerate launch scripts/train.py --train_files my.en my.de --output_dir runs/en-de
    accelerate launch scripts/train.py --task causal-lm --train_files my.txt --output_dir runs/writer
"""

import json
import os
import platform
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import accelerate
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

import hf_transformer_block
from hf_transformer_block import (
    TransformerBlockConfig,
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
)


try:
    import jinja2
    import yaml
    from datasets import Dataset
    from matplotlib.figure import Figure
    from tqdm.auto import tqdm

    from hf_transformer_block import training
    from hf_transformer_block.arguments import RUN_FLAGS, Arguments, parse_arguments
    from hf_transformer_block.data import (
        TOKENIZERS,
        read_pairs,
        read_texts,
        tokenize_pairs,
        tokenize_stream,
        train_tokenizer,
    )
    from hf_transformer_block.dates import date_pairs
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "hf_transformer_block[train]"') from error


RECIPES = Path(__file__).parent / "recipes"
CARD = Path(__file__).parents[1] / "model_card.md"
WRITTEN = ("*.json", "*.safetensors", "*_hf_transformer_block.py", "training_curve.png", "README.md")


@dataclass
class Split:
    """Texts as they were read, and the examples made of them."""

    texts: Dataset
    examples: Dataset


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
            has_begun = training.checkpoints(folder) or (folder / "config.json").exists()
            if has_begun and not arguments.overwrite:
                check_resumable(arguments, record)
            else:
                delete_run(folder)
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is there already and holds no run: give another --output_dir")
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(asdict(arguments), indent=2, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"cannot write into {folder}: {error.strerror}; give another --output_dir"
        ) from error


def read_files(arguments: Arguments, files: list[str]) -> Dataset:
    """Returns the pairs or the documents of files."""
    if arguments.task == "translation":
        return read_pairs(files, arguments.source_column, arguments.target_column)
    return read_texts(files, arguments.text_column)


def read_data(arguments: Arguments) -> dict[str, Dataset]:
    """Returns the texts of "train", "validation" and, if there is one, "test"."""
    if arguments.train_files is None:
        sizes = {"train": 60_000, "validation": 500, "test": 2_000}
        return {split: Dataset.from_list(date_pairs(split, size)) for split, size in sizes.items()}
    data = {"train": read_files(arguments, arguments.train_files)}
    if arguments.validation_files:
        data["validation"] = read_files(arguments, arguments.validation_files)
    elif arguments.task == "translation":
        if len(data["train"]) < 2:
            raise ValueError(
                "one pair is too few to train on and to validate: give more, or --validation_files"
            )
        size = max(1, len(data["train"]) // 20)
        halves = data["train"].train_test_split(test_size=size, seed=arguments.seed)
        data = {"train": halves["train"], "validation": halves["test"]}
    else:
        text = "\n".join(data["train"]["text"])
        end = len(text) * 9 // 10
        parts = {"train": text[:end], "validation": text[end:]}
        data = {name: Dataset.from_dict({"text": [part]}) for name, part in parts.items()}
    if arguments.test_files:
        data["test"] = read_files(arguments, arguments.test_files)
    return data


def prepare_tokenizer(arguments: Arguments, train: Dataset) -> None:
    """Saves the run's tokenizer, trained on the texts or copied from a ready one, unless it is there."""
    folder = Path(arguments.output_dir)
    if (folder / "tokenizer_config.json").exists():
        return
    translates = arguments.task == "translation"
    if arguments.tokenizer in TOKENIZERS:
        texts = (text for column in train.column_names for text in train[column])
        tokenizer = train_tokenizer(
            texts, arguments.tokenizer, arguments.vocab_size, arguments.max_length, ends_texts=translates
        )
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        except OSError as error:
            raise ValueError(
                f"the tokenizer {arguments.tokenizer!r} is neither bpe, char or word nor a folder or id that "
                f"loads: {error}"
            ) from error
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        ends_texts = tokenizer.eos_token_id in tokenizer("a")["input_ids"][-1:]
        if tokenizer.eos_token_id is None or (translates and not ends_texts):
            raise ValueError(
                f"the tokenizer {arguments.tokenizer} must have an eos token, and for translation end "
                f"every text with it: choose another, or bpe, char or word"
            )
    tokenizer.save_pretrained(folder)


def prepare_splits(
    arguments: Arguments, accelerator: Accelerator
) -> tuple[dict[str, Split], PreTrainedTokenizerBase]:
    """Returns the data and the tokenizer; the main process does the work, the others read its results."""
    with accelerator.main_process_first():
        data = read_data(arguments)
        if accelerator.is_main_process:
            prepare_tokenizer(arguments, data["train"])
    tokenizer = AutoTokenizer.from_pretrained(arguments.output_dir)
    tokenize = tokenize_pairs if arguments.task == "translation" else tokenize_stream
    with accelerator.main_process_first():
        splits = {
            name: Split(texts, tokenize(texts, tokenizer, arguments.max_length))
            for name, texts in data.items()
        }
    for name, split in splits.items():
        dropped = len(split.texts) - len(split.examples) if arguments.task == "translation" else 0
        too_long = f" ({dropped} of more than {arguments.max_length} tokens left out)" if dropped else ""
        accelerator.print(f"{name}: {len(split.examples):,} examples{too_long}")
    return splits, tokenizer


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
    try:
        overrides = yaml.safe_load(f"{{{arguments.config_overrides}}}")
    except yaml.YAMLError as error:
        raise ValueError(
            f"--config_overrides {arguments.config_overrides!r} is no 'key: value, ...'"
        ) from error
    if unset := [key for key, value in overrides.items() if value is None]:
        raise ValueError(f"--config_overrides gives no value for {unset[0]!r}: write 'key: value'")
    try:
        return getattr(TransformerBlockConfig, arguments.preset)(**{**values, **overrides})
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__)) from error


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
    # else the library's default: 20 tokens, and none beyond the last position whatever the prompt's length
    if translates or config.position_embedding in ("rotary", "none"):
        model.generation_config.max_new_tokens = arguments.max_length
    model.generation_config.num_beams = arguments.num_beams
    return model


def write_sample(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    length: int,
) -> None:
    """Prints how a language model goes on after the first half of `length` tokens."""
    if not accelerator.is_main_process:
        return
    prompt = torch.tensor([ids[: max(1, length // 2)]], device=accelerator.device)
    model = accelerator.unwrap_model(model)
    was_training = model.training
    written = model.eval().generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=True, max_new_tokens=max(1, length // 2)
    )
    model.train(was_training)
    tqdm.write(f"  {tokenizer.decode(written[0], skip_special_tokens=True)!r}")


@torch.random.fork_rng()
def evaluate_split(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Arguments,
    split: Split,
    num_pairs: int | None = None,
    num_beams: int = 1,
) -> dict[str, float | str]:
    """Returns loss and scores (of the first pairs) and prints samples; training's random state stays."""
    size, pad = arguments.eval_batch_size, tokenizer.pad_token_id
    if arguments.task == "causal-lm":
        write_sample(accelerator, model, tokenizer, split.examples[0]["input_ids"], arguments.max_length)
        return training.evaluate_text(accelerator, model, split.examples, split.texts, size, pad)
    result = training.evaluate(accelerator, model, split.examples, size, pad)
    pairs = split.examples[:num_pairs]
    sources, references = pairs["source"], pairs["target"]
    hypotheses = training.translate(accelerator, model, tokenizer, sources, size, num_beams=num_beams)
    if accelerator.is_main_process:
        for source, hypothesis, reference in list(zip(sources, hypotheses, references, strict=True))[:4]:
            wrong = "" if hypothesis == reference else f"   (should be: {reference})"
            tqdm.write(f"  {source}  ->  {hypothesis}{wrong}")
    return result | training.score_translations(hypotheses, references)


def describe(scores: dict[str, float | str]) -> str:
    """Returns scores in one line; signatures are in metrics.json."""
    return ", ".join(f"{name} {score:.5g}" for name, score in scores.items() if not isinstance(score, str))


def prepare_training(
    accelerator: Accelerator, arguments: Arguments, tokenizer: PreTrainedTokenizerBase
) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, dict]:
    """Returns model, optimizer, schedule and state, from the newest checkpoint or from fresh weights."""
    model = build_model(arguments, tokenizer)
    optimizer = training.build_optimizer(model, arguments.learning_rate, arguments.weight_decay)
    scheduler = get_scheduler(
        arguments.lr_scheduler_type, optimizer, arguments.warmup_steps, num_training_steps=arguments.max_steps
    )
    # the schedule is not prepared, so that it counts updates, not processes
    model, optimizer = accelerator.prepare(model, optimizer)
    training.register_state(accelerator, scheduler)
    set_seed(arguments.seed, device_specific=True)
    state = {"step": 0, "loss_sum": 0.0, "updates": 0, "history": []}
    if arguments.resume:
        found = training.checkpoints(Path(arguments.output_dir))
        if found:
            state = training.load_checkpoint(accelerator, found[-1])
        accelerator.print(f"continuing from {found[-1]}" if found else "no checkpoint yet: beginning anew")
    return model, optimizer, scheduler, state


def train(
    accelerator: Accelerator,
    arguments: Arguments,
    tokenizer: PreTrainedTokenizerBase,
    splits: dict[str, Split],
) -> tuple[PreTrainedModel, list[dict]]:
    """Trains to the end and returns the model and the evaluations."""
    model, optimizer, scheduler, state = prepare_training(accelerator, arguments, tokenizer)
    batches = training.updates(
        accelerator,
        splits["train"].examples,
        arguments.batch_size,
        arguments.micro_batch_size,
        tokenizer.pad_token_id,
        arguments.seed,
        range(state["step"], arguments.max_steps),
    )
    is_main = accelerator.is_main_process
    bar = tqdm(total=arguments.max_steps, initial=state["step"], desc="train", disable=not is_main)
    model.train()
    for step, micro_batches in enumerate(batches, start=state["step"] + 1):
        began = time.perf_counter()
        loss, tokens = training.update(
            accelerator, model, optimizer, scheduler, micro_batches, arguments.label_smoothing
        )
        state |= {"step": step, "loss_sum": state["loss_sum"] + loss, "updates": state["updates"] + 1}
        speed = tokens / (time.perf_counter() - began)
        bar.set_postfix_str(f"loss {loss:.3f}, {speed:.0f} target tokens/s", refresh=False)
        bar.update()
        is_last = step == arguments.max_steps
        if step % arguments.eval_steps == 0 or is_last:
            scores = evaluate_split(
                accelerator, model, tokenizer, arguments, splits["validation"], arguments.eval_pairs
            )
            entry = {"step": step, "train_loss": state["loss_sum"] / state["updates"], **scores}
            state |= {"loss_sum": 0.0, "updates": 0, "history": [*state["history"], entry]}
            if is_main:
                tqdm.write(describe(entry))
        if step % arguments.save_steps == 0 or is_last:
            training.save_checkpoint(accelerator, Path(arguments.output_dir), state)
    bar.close()
    return model, state["history"]


def plot(history: list[dict], file: Path) -> None:
    """Draws the training curve."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    steps = [entry["step"] for entry in history]
    axes.plot(steps, [entry["train_loss"] for entry in history], ".-", label="training")
    axes.plot(steps, [entry["loss"] for entry in history], "o-", label="validation")
    axes.set(xlabel="optimizer updates", ylabel="loss (nats per target token)")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def write_records(
    arguments: Arguments, accelerator: Accelerator, model: PreTrainedModel, results: dict, example: str
) -> None:
    """Writes metrics.json, the training curve and the model card beside the weights."""
    folder = Path(arguments.output_dir)
    versions = {"python": platform.python_version(), "hf_transformer_block": hf_transformer_block.__version__}
    versions |= {module.__name__: module.__version__ for module in (torch, transformers, accelerate)}
    flags = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    metrics = {
        **results,
        "parameters": model.num_parameters(),
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "command": shlex.join(["scripts/train.py", *flags]),
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
    training.use_all_cores(accelerator)
    set_seed(arguments.seed)
    processes = accelerator.num_processes
    try:
        build_config(arguments, vocab_size=arguments.vocab_size)  # before any long work
        if arguments.batch_size < processes:
            raise ValueError(f"--batch_size {arguments.batch_size} leaves some of {processes} processes idle")
        if accelerator.is_main_process:
            prepare_folder(arguments)
        accelerator.wait_for_everyone()
        splits, tokenizer = prepare_splits(arguments, accelerator)
        if arguments.batch_size > len(splits["train"].examples):
            raise ValueError(
                f"--batch_size {arguments.batch_size} is more than the "
                f"{len(splits['train'].examples)} training examples: lower it"
            )
    except ValueError as error:
        raise SystemExit(f"train.py: {error}") from error
    accelerator.print(
        f"{arguments.task}, {len(tokenizer)} tokens; {processes} process(es) on {accelerator.device.type} "
        f"({accelerator.distributed_type.value}), {torch.get_num_threads()} threads each, mixed precision "
        f"{accelerator.mixed_precision}"
    )
    model, history = train(accelerator, arguments, tokenizer, splits)
    name = "test" if "test" in splits else "validation"
    scores = evaluate_split(
        accelerator, model, tokenizer, arguments, splits[name], num_beams=arguments.num_beams
    )
    state_dict, folder = accelerator.get_state_dict(model), arguments.output_dir
    model = accelerator.unwrap_model(model)
    model.save_pretrained(folder, is_main_process=accelerator.is_main_process, state_dict=state_dict)
    if accelerator.is_main_process:
        seconds = round(time.perf_counter() - began)
        results = {"split": name, "scores": scores, "history": history, "seconds": seconds}
        example = next(iter(splits[name].texts[0].values()))[:60]
        write_records(arguments, accelerator, model, results, example)
        print(f"{name}: {describe(scores)}")
        print(f"{model.num_parameters():,} parameters, {seconds} s; saved in {folder}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
