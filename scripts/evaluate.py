"""
Scores a saved folder, or a model of the Hub, by the measures of its task.

    python scripts/evaluate.py runs/dates                                     on dates that training never saw
    python scripts/evaluate.py runs/en-de --files test.en test.de --num_beams 5
    python scripts/evaluate.py runs/writer --files book.txt
    python scripts/evaluate.py runs/labels --files test.csv --output_file answers.txt
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

from accelerate import Accelerator
from transformers import AutoConfig, AutoTokenizer, HfArgumentParser, PreTrainedConfig


try:
    from datasets import Dataset

    from hf_transformer_block import training
    from hf_transformer_block.arguments import Arguments as TrainingArguments
    from hf_transformer_block.arguments import HelpFormatter, flag
    from hf_transformer_block.building import build_task
    from hf_transformer_block.loading import Origin, load, make_split, report
    from hf_transformer_block.preparing import read_dates
    from hf_transformer_block.tasks import TASKS, Evaluator, Task
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is missing: pip install "hf_transformer_block[train]"') from error


def same_flag(name: str) -> object:
    """Returns a flag of scripts/train.py."""
    field = TrainingArguments.__dataclass_fields__[name]
    return flag(field.default, field.metadata["help"])


@dataclass
class Arguments:
    """What to score, and on what."""

    files: list[str] | None = flag(
        None, "Files as for training. Without, for a translation model: the embedded dates of the test split."
    )
    dataset_name: str | None = flag(None, "Data set of the Hub, or a folder of one, instead of files.")
    dataset_config_name: str | None = same_flag("dataset_config_name")
    split: str = flag("test", "Its split.")
    source_column: str = same_flag("source_column")
    target_column: str = same_flag("target_column")
    text_column: str = same_flag("text_column")
    text_pair_column: str | None = same_flag("text_pair_column")
    label_column: str = same_flag("label_column")
    label_until: str | None = same_flag("label_until")
    bleu_tokenize: str | None = same_flag("bleu_tokenize")
    bad_rows: str = same_flag("bad_rows")
    batch_size: int = flag(64, "Examples at a time, on each process.")
    num_beams: int | None = flag(None, "Beams of a translation. Without: the model's generation config.")
    output_file: str | None = flag(None, "File for the answers (translations, labels, ...), one a line.")


def task_of(config: PreTrainedConfig, arguments: Arguments) -> Task:
    """Returns the task that a saved model was trained for; raises ValueError if it has no head for one."""
    name = (config.architectures or ["none"])[0]
    found = [task for task in TASKS.values() if task.model_class.__name__ == name]
    if not found:
        heads = ", ".join(task.model_class.__name__ for task in TASKS.values())
        raise ValueError(f"the model is a {name}, whose task is not known (known: {heads})")
    task = replace(build_task(arguments, found[0].name), max_length=config.max_position_embeddings - 1)
    if hasattr(task, "labels"):
        task = replace(task, labels=tuple(config.id2label[number] for number in range(config.num_labels)))
    return task


def read_rows(task: Task, arguments: Arguments, accelerator: Accelerator) -> Dataset:
    """Returns the rows to score the model on, and says which were left out."""
    if arguments.files is None and arguments.dataset_name is None:
        if task.name != "translation":
            raise ValueError(f"a model for {task.name} has no data of its own: give --files")
        return read_dates().rows["test"]
    data_set = (arguments.dataset_name, arguments.dataset_config_name, arguments.split)
    loaded = load(task, Origin(tuple(arguments.files or ()), *data_set), arguments.bad_rows)
    accelerator.print(report("read", f"{len(loaded.rows):,} rows", loaded.dropped, 0))
    return loaded.rows


def main() -> None:
    parser = HfArgumentParser(
        Arguments, description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", help="Folder, or id on the Hub.")
    arguments, named = parser.parse_args_into_dataclasses()
    for name in ("batch_size", "num_beams"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            parser.error(f"--{name} {value} must be at least 1")
    if arguments.output_file and not Path(arguments.output_file).parent.is_dir():
        parser.error(f"--output_file {arguments.output_file}: there is no folder for it")
    accelerator = Accelerator()
    training.use_all_cores(accelerator)
    try:
        task = task_of(AutoConfig.from_pretrained(named.model), arguments)
        model = task.model_class.from_pretrained(named.model).to(accelerator.device)
        tokenizer = AutoTokenizer.from_pretrained(named.model)
        with accelerator.local_main_process_first():
            rows = read_rows(task, arguments, accelerator)
            split, dropped, cut = make_split(task, rows, tokenizer, False, arguments.bad_rows)
        accelerator.print(report("scored", f"{len(split.examples):,} examples", dropped, cut))
        size, beams = arguments.batch_size, arguments.num_beams
        evaluator = Evaluator(accelerator, model, tokenizer, size, num_beams=beams)
        scores, answers = task.evaluate(evaluator, split)
        if arguments.output_file and accelerator.is_main_process:
            text = "".join(" ".join(answer.split("\n")) + "\n" for answer in answers)
            Path(arguments.output_file).write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        raise SystemExit(f"evaluate.py: {error}") from error
    if accelerator.is_main_process:
        print(json.dumps(scores, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
