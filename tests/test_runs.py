"""Tests of scripts/train.py from files to scored folders: all tasks, bad data, streams, processes."""

import csv
import gzip
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import load_script
from safetensors.torch import load_file


pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')

from accelerate.state import AcceleratorState, GradientState

from hf_transformer_block.card import check_card, is_edited
from hf_transformer_block.tasks import TASKS


ROOT = Path(__file__).parents[1]
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
# long enough to see a loss fall
TINY = (
    "--hidden_size 32 --num_hidden_layers 1 --num_attention_heads 2 --intermediate_size 32 --tokenizer word "
    "--warmup_steps 5 --max_length 24 --seed 3 --learning_rate 1e-2 --dropout 0 --batch_size 16 "
    "--max_steps 24 --eval_steps 12 --logging_steps 1"
)
AUTO = {
    "translation": "AutoModelForSeq2SeqLM",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}
LEFT_BEHIND = {
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "metrics.json"),
    *("metrics.jsonl", "run.json", "training_curve.png", "README.md", "arguments.json", "checkpoints"),
}


def numbers(first: int, count: int) -> list[list[str]]:
    """Returns numbers of three to five digits, in words."""
    return [[WORDS[int(digit)] for digit in str(37 * index + 100)] for index in range(first, first + count)]


def parity(number: list[str]) -> str:
    return "odd" if WORDS.index(number[-1]) % 2 else "even"


def question(first: list[str], others: list[list[str]]) -> dict:
    """Returns a paragraph of SQuAD whose context says of several numbers how they read backwards."""
    facts = [f"{' '.join(number)} is {' '.join(reversed(number))} ." for number in [*others, first]]
    context, answer = " ".join(facts), " ".join(reversed(first))
    answers = [{"text": answer, "answer_start": context.rindex(answer)}]
    return {
        "context": context,
        "qas": [{"id": answer, "question": f"what is {' '.join(first)}", "answers": answers}],
    }


def write(folder: Path, task: str, name: str, rows: list[list[str]]) -> list[Path]:
    """Returns the files of a task's rows, each task in another of the formats."""
    texts = [" ".join(number) for number in rows]
    if task == "translation":
        files = [folder / f"{name}.a", folder / f"{name}.b"]
        files[0].write_text("".join(f"{text}\n" for text in texts))
        files[1].write_text("".join(f"{' '.join(reversed(number))}\n" for number in rows))
        return files
    if task == "causal-lm":
        (file := folder / f"{name}.txt").write_text("".join(f"{text} .\n" for text in texts))
    elif task == "masked-lm":
        file = folder / f"{name}.jsonl.gz"
        file.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    elif task == "text-classification":
        with (file := folder / f"{name}.csv").open("w", newline="") as stream:
            csv.writer(stream).writerows([("text", "label"), *zip(texts, map(parity, rows), strict=True)])
    elif task == "token-classification":
        sentences = [
            "".join(f"{word}\t{'B-BIG' if word > 's' else 'O'}\n" for word in number) for number in rows
        ]
        (file := folder / f"{name}.conll").write_text("\n".join(sentences))
    else:
        paragraphs = [question(rows[index], rows[index - 3 : index]) for index in range(3, len(rows))]
        (file := folder / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return [file]


@pytest.fixture(scope="module")
def run() -> Callable[[str, str], None]:
    """Runs a script's main() in this process, which it leaves as it was."""
    scripts = {name: load_script(name) for name in ("train", "evaluate")}

    def run(name: str, arguments: str) -> None:
        threads = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ACCELERATE_USE_CPU", "true")
            patch.setattr(sys, "argv", [f"scripts/{name}.py", *arguments.split()])
            forget_accelerator()
            try:
                scripts[name].main()
            finally:
                forget_accelerator()
                torch.set_num_threads(threads)

    return run


def forget_accelerator() -> None:
    """Lets the next Accelerator begin as in a process of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory) -> Callable[[str], Path]:
    """Returns the folder of a task's run, with its data, which is made when first asked for."""
    made: dict[str, Path] = {}

    def trained(task: str) -> Path:
        if task not in made:
            folder = made[task] = tmp_path_factory.mktemp(task)
            files, tests = (
                " ".join(map(str, write(folder, task, name, numbers(*span))))
                for name, span in (("train", (0, 80)), ("test", (80, 20)))
            )
            flags = f"--train_files {files} --validation_files {tests} --test_files {tests} --num_beams 2"
            run("train", f"--task {task} {flags} {TINY} --output_dir {folder / 'out'}")
        return made[task]

    return trained


def lines(folder: Path) -> list[dict]:
    """Returns the losses of the updates of a run."""
    entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if "loss" in entry]


def test_every_task_has_a_run_here():
    assert AUTO.keys() == TASKS.keys()


@pytest.mark.parametrize("task", AUTO)
def test_a_task_trains_from_files_to_a_scored_folder(task, trained, run, tmp_path, capsys):
    folder = trained(task)
    out = folder / "out"
    assert {file.name for file in out.iterdir()} >= LEFT_BEHIND
    assert (out / "training_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not list((out / "checkpoints").glob("*.partial"))
    metrics = json.loads((out / "metrics.json").read_text())
    losses = [entry["loss"] for entry in lines(out)]
    assert [entry["step"] for entry in lines(out)] == [*range(1, 25)]
    assert [entry["step"] for entry in metrics["history"]] == [12, 24]
    assert metrics["history"][0]["train_loss"] == pytest.approx(sum(losses[:12]) / 12, rel=1e-9)
    assert sum(losses[-3:]) < sum(losses[:3])
    [start] = json.loads((out / "run.json").read_text())
    assert start["arguments"]["max_steps"] == 24
    assert {*start["data"]} == {"train", "validation", "test"}
    card = (out / "README.md").read_text()
    assert "On the test split, local files (" in card
    assert str(folder) not in card + (out / "metrics.json").read_text()
    check_card(card, out)
    assert not is_edited(out, (ROOT / "model_card.md").read_text())

    model, info = getattr(transformers, AUTO[task]).from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert type(model) is TASKS[task].model_class
    assert model.num_parameters() == metrics["parameters"]
    assert len(transformers.AutoTokenizer.from_pretrained(out)) <= model.config.vocab_size

    capsys.readouterr()
    for snippet in re.findall("```python\n(.*?)```", card, re.DOTALL):
        assert 'model_id = "."' in snippet
        exec(snippet.replace('model_id = "."', f'model_id = "{out}"'), {})
        assert capsys.readouterr().out.strip()

    files = " ".join(map(str, sorted(folder.glob("test.*"))))
    run("evaluate", f"{out} --files {files} --output_file {tmp_path / 'answers'}")
    printed = capsys.readouterr().out
    answers = (tmp_path / "answers").read_text().splitlines()
    assert len(answers) == {"causal-lm": 1, "masked-lm": 0, "question-answering": 17}.get(task, 20)
    scores = json.loads(printed[printed.index("{\n") :])
    assert scores == pytest.approx(metrics["scores"], abs=1e-5)
    assert math.isfinite(scores["loss"])
    assert {*TASKS[task].metrics} <= {*scores}


def test_a_card_edited_by_hand_outlives_the_next_start(trained, run, tmp_path, capsys):
    data, card = trained("text-classification") / "train.csv", tmp_path / "out" / "README.md"
    flags = f"--task text-classification --train_files {data} {TINY} --max_steps 1 --output_dir {card.parent}"
    run("train", flags)
    assert "rows held out of the training data" in card.read_text()
    assert "was started" not in card.read_text()
    edited = card.read_text() + "\n## Thanks\n"
    card.write_text(edited)
    run("train", f"{flags} --resume")
    assert card.read_text() == edited
    assert "README.md was edited and stays as it is" in capsys.readouterr().out
    card.unlink()
    run("train", f"{flags} --resume")
    assert "was started 3 times; these are the seconds of the last start alone" in card.read_text()
    run("train", f"{flags} --resume")
    assert "was started 4 times" in card.read_text()


def test_fine_tuning_goes_on_from_the_weights(trained, run, tmp_path):
    folder = trained("translation")
    files = " ".join(str(folder / name) for name in ("train.a", "train.b"))
    flags = f"--train_files {files} --model_name_or_path {folder / 'out'} {TINY} --max_steps 2"
    run("train", f"{flags} --output_dir {tmp_path / 'out'}")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "beginning from the weights of `out`" in card
    assert "license: unknown" in card
    assert "base_model" not in card
    assert str(folder) not in card + (tmp_path / "out" / "metrics.json").read_text()
    before, after = lines(folder / "out"), lines(tmp_path / "out")
    assert after[0]["loss"] < before[0]["loss"] - 0.5
    assert after[0]["loss"] == pytest.approx(before[-1]["loss"], abs=0.2)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (
        folder / "out" / "tokenizer.json"
    ).read_text()


def test_a_masked_language_model_becomes_a_classifier(trained, run, tmp_path):
    start, data = trained("masked-lm") / "out", trained("text-classification")
    flags = (
        f"--task text-classification --train_files {data / 'train.csv'} --model_name_or_path {start} {TINY}"
    )
    run("train", f"{flags} --max_steps 2 --learning_rate 1e-9 --output_dir {tmp_path / 'out'}")
    before, after = (load_file(folder / "model.safetensors") for folder in (start, tmp_path / "out"))
    shared = [name for name in before if name.startswith("model.")]
    assert len(shared) > 5
    for name in shared:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-7)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["id2label"] == {"0": "even", "1": "odd"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ('--config_overrides "qk_nrom":1', "has no field 'qk_nrom'; did you mean 'qk_norm'?"),
        ("--model_name_or_path nowhere", "--model_name_or_path nowhere is neither a folder nor an id"),
        ('--config_overrides "rope_parameters":3', "rope_parameters"),
    ],
)
def test_models_that_cannot_be_continued_are_refused(flags, message, trained, run, tmp_path):
    start, data = trained("masked-lm") / "out", trained("text-classification")
    arguments = f"--task text-classification --train_files {data / 'train.csv'} --model_name_or_path {start}"
    arguments += f" {TINY} {flags}"
    with pytest.raises(SystemExit, match=f"train.py: .*{re.escape(message)}"):
        run("train", f"{arguments} --output_dir {tmp_path / 'out'}")


def test_a_classifier_of_other_labels_gets_a_new_head(trained, run, tmp_path):
    folder = trained("text-classification")
    (tmp_path / "three.csv").write_text(
        (folder / "train.csv").read_text().replace("even", "two", 1) + "four five,three\n" * 9
    )
    for name, words in (("three", {"two", "even", "odd", "three"}), ("other", {"straight", "crooked"})):
        if name == "other":
            text = (folder / "train.csv").read_text()
            (tmp_path / "other.csv").write_text(text.replace("even", "straight").replace("odd", "crooked"))
        flags = f"--task text-classification --train_files {tmp_path / name}.csv {TINY} --max_steps 1"
        start = f"--model_name_or_path {folder / 'out'} --learning_rate 1e-9"
        run("train", f"{flags} {start} --output_dir {tmp_path / name}")
        assert {*json.loads((tmp_path / name / "config.json").read_text())["label2id"]} == words
        before, after = (load_file(f / "model.safetensors") for f in (folder / "out", tmp_path / name))
        assert torch.allclose(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
        heads = before["classifier.weight"], after["classifier.weight"]
        assert heads[0].shape != heads[1].shape or not torch.allclose(*heads, atol=1e-3)


def test_a_data_set_gives_its_splits_by_their_names(run, tmp_path, capsys):
    folder = tmp_path / "numbers"
    folder.mkdir()
    for name, count in (("train", 40), ("dev", 6), ("test", 5)):
        rows = [{"text": " ".join(number), "label": parity(number)} for number in numbers(0, count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    splits = "".join(f"  - split: {n}\n    path: {n}.jsonl\n" for n in ("train", "dev", "test"))
    only = "  - split: dev\n    path: dev.jsonl\n"
    configs = f"- config_name: whole\n  data_files:\n{splits}- config_name: small\n  data_files:\n{only}"
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    flags = f"--task text-classification --dataset_name {folder} {TINY} --max_steps 1 --output_dir {tmp_path}"
    run("train", f"{flags}/out --dataset_config_name whole")
    printed = capsys.readouterr().out
    for split, count in (("train", 40), ("validation", 6), ("test", 5)):
        assert f"{split}: {count} examples" in printed
    card = (tmp_path / "out" / "README.md").read_text()
    assert "the data set numbers" in card
    assert "\ndatasets:" not in card  # it is a folder, not on the Hub
    assert str(tmp_path) not in card
    run("evaluate", f"{tmp_path / 'out'} --dataset_name {folder} --dataset_config_name whole --split dev")
    assert "read: 6 rows" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="has no split 'train' but \\['dev'\\]"):
        run("train", f"{flags}/none --dataset_config_name small")
    with pytest.raises(SystemExit, match="does not load"):
        run("train", f"{flags}/none --dataset_config_name large")


def test_a_stream_holds_out_its_beginning_and_trains_on_the_rest(run, tmp_path, capsys):
    rows = numbers(0, 600)
    pairs = [{"source": " ".join(number), "target": " ".join(reversed(number))} for number in rows]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    flags = f"--train_files {tmp_path / 'pairs.jsonl'} --streaming {TINY} --eval_pairs 3"
    run("train", f"{flags} --batch_size 10 --output_dir {tmp_path / 'out'}")
    assert "validation: 500 examples" in capsys.readouterr().out
    history = json.loads((tmp_path / "out" / "metrics.json").read_text())["history"]
    assert {entry["targets"] for entry in history} == {sum(len(number) + 1 for number in rows[:500])}
    # 100 rows are left: ten batches an epoch
    assert [entry["epoch"] for entry in lines(tmp_path / "out")] == [0] * 10 + [1] * 10 + [2] * 4
    assert history[-1]["loss"] < history[0]["loss"] < 3


def test_what_a_stream_left_out_is_told(run, tmp_path, capsys):
    pairs = [{"source": " ".join(number), "target": " ".join(reversed(number))} for number in numbers(0, 100)]
    for index in (5, 50, 95):
        pairs[index]["target"] = " "
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs[:5]))
    files = f"--train_files {tmp_path / 'pairs.jsonl'} --validation_files {tmp_path / 'validation.jsonl'}"
    run("train", f"{files} --streaming {TINY} --max_steps 9 --output_dir {tmp_path / 'out'}")
    assert "left out: 3 because its target is empty" in capsys.readouterr().out


@pytest.fixture
def bad(tmp_path) -> dict[str, Path]:
    """Files that are good, and files that are not."""
    texts = [" ".join(number) for number in numbers(0, 40)]
    labels = list(map(parity, numbers(0, 40)))
    contents = {
        "a.txt": "\n".join(texts) + "\n",
        "b.txt": "\n".join(reversed(texts)) + "\n",
        "short.txt": "\n".join(texts[:-1]) + "\n",
        "empty.csv": "text,label\n",
        "good.csv": "text,label\n"
        + "".join(f"{text},{label}\n" for text, label in zip(texts, labels, strict=True)),
        "columns.csv": "text,class\n" + "".join(f"{text},odd\n" for text in texts),
        "green.csv": "text,label\none,odd\ntwo,green\nthree,odd\n",
        "latin.csv": "text,label\none,odd\ntwo,even\ncaf\xe9,odd\n",
        "few.jsonl": "".join(json.dumps({"source": text, "target": text}) + "\n" for text in texts),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="latin-1")
    return {name.split(".")[0]: str(tmp_path / name) for name in contents}


LABELS = "--task text-classification --train_files"
REASON = "its label 'green' is unknown (known: even, odd)"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{LABELS} {{columns}}", "no column 'label' but ['text', 'class']: give --label_column"),
        ("--train_files {a} {short}", "{a} has 40 lines but {short} has 39: line n of one must be"),
        (f"{LABELS} {{good}} --validation_files {{empty}}", "{empty} is empty"),
        (
            f"{LABELS} {{good}} --validation_files {{green}} --bad_rows error",
            f"the row that begins 'two': {REASON}; mend it, or --bad_rows drop",
        ),
        (f"{LABELS} {{latin}} --bad_rows error", "{latin}, row 3: it is not UTF-8: iconv -t UTF-8 converts"),
        (
            "--train_files {a} {b} --tokens_per_batch 4",
            "--tokens_per_batch 4 cannot hold an example of 24 tokens: raise it, or lower --max_length 24",
        ),
        ("--train_files {few} --streaming", "--validation_files"),
    ],
)
def test_bad_data_end_a_run_in_one_clear_sentence(flags, message, bad, run, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        run("train", f"{TINY} {flags} --output_dir {tmp_path / 'out'}".format(**bad))
    printed = f"{exit.value}\n{capsys.readouterr().err}"
    [sentence] = [line for line in printed.splitlines() if line.startswith("train.py: ")]
    assert message.format(**bad) in sentence


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("{good} --validation_files {green}", f"validation: 2 examples; left out: 1 because {REASON}"),
        ("{latin} --validation_files {good}", "train: 2 examples; left out: 1 because it is not UTF-8"),
    ],
)
def test_bad_rows_that_may_be_dropped_are_counted(flags, message, bad, run, tmp_path, capsys):
    run("train", f"{TINY} {LABELS} {flags} --max_steps 1 --output_dir {tmp_path / 'out'}".format(**bad))
    assert message in capsys.readouterr().out


def test_a_tracker_gets_what_the_files_say(run, trained, tmp_path):
    pytest.importorskip("tensorboard", reason="runs after pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = trained("translation")
    files = " ".join(str(folder / name) for name in ("train.a", "train.b"))
    flags = f"--train_files {files} {TINY} --max_steps 12 --report_to tensorboard"
    run("train", f"{flags} --output_dir {tmp_path / 'out'}")
    [events] = (tmp_path / "out" / "out").glob(
        "events.out.tfevents.*"
    )  # the flags have a folder of their own
    tracked = EventAccumulator(str(events)).Reload()
    found = {event.step: event.value for event in tracked.Scalars("train/loss")}
    assert found == pytest.approx(
        {entry["step"]: entry["loss"] for entry in lines(tmp_path / "out")}, rel=1e-6
    )
    [entry] = json.loads((tmp_path / "out" / "metrics.json").read_text())["history"]
    [event] = tracked.Scalars("eval/loss")
    assert (event.step, event.value) == (12, pytest.approx(entry["loss"], rel=1e-6))


@pytest.mark.slow
def test_two_processes_log_what_one_does(run, tmp_path):
    """Losses and the schedule count updates, not processes."""
    files = " ".join(map(str, write(tmp_path, "translation", "train", numbers(0, 60))))
    flags = (
        f"--train_files {files} {TINY} --tokens_per_batch 60 --gradient_accumulation_steps 2 --max_steps 30"
    )
    run("train", f"{flags} --output_dir {tmp_path / 'one'}")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", "scripts/accelerate/cpu_ddp.yaml", "scripts/train.py"),
            *f"{flags} --output_dir {tmp_path / 'two'}".split(),
        ],
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 process(es) on cpu (MULTI_CPU)" in done.stdout
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [entry["step"] for entry in one] == [*range(1, 31)]
    for before, after in zip(one, two, strict=True):
        assert after["learning_rate"] == before["learning_rate"]
        assert after["epoch"] == before["epoch"]
        for name in ("loss", "grad_norm"):
            assert after[name] == pytest.approx(before[name], abs=1e-5)
