"""Tests of the scripts as users run them: flags, messages, one and two processes, kill and resume."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import load_script, tiny_config
from safetensors.torch import load_file


pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')

from transformers import AutoTokenizer

from hf_transformer_block import TransformerBlockForCausalLM
from hf_transformer_block.building import build_model, build_task
from hf_transformer_block.run import Progress
from hf_transformer_block.tasks import CausalLM, Translation
from hf_transformer_block.vocabulary import train_tokenizer


ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("HFTB_DATA", ROOT.parent / "shared" / "data"))
# two gloo processes on a CPU, where `--cpu --num_processes 2` would start one
TWO_PROCESSES = "--config_file scripts/accelerate/cpu_ddp.yaml"
TINY = (
    "--hidden_size 32 --num_hidden_layers 1 --num_attention_heads 2 --intermediate_size 32 --batch_size 16 "
    "--warmup_steps 5 --max_length 24 --eval_steps 8 --eval_pairs 3 --seed 3"
)
needs_shakespeare = pytest.mark.skipif(
    not (DATA / "tinyshakespeare").is_dir(),
    reason="runs where HFTB_DATA or ../shared/data holds tinyshakespeare",
)


def command(arguments: str, launch: str = "") -> list[str]:
    """Returns an `accelerate launch` of scripts/train.py."""
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", *launch.split()]
    return [*accelerate, "scripts/train.py", *arguments.split()]


def run(arguments: list[str], **env: str) -> subprocess.CompletedProcess:
    """Runs a command in the project's folder and returns it, with all that it printed in stdout."""
    return subprocess.run(
        arguments,
        cwd=ROOT,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )


def train(arguments: str, launch: str = "", **env: str) -> str:
    """Runs a training that must succeed and returns what it printed."""
    done = run(command(arguments, launch), **env)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    """Two parallel files of 60 lines: numbers in words, and the words reversed."""
    folder = tmp_path_factory.mktemp("pairs")
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    rows = [[words[int(digit)] for digit in str(37 * index + 100)] for index in range(60)]
    (folder / "a.txt").write_text("\n".join(" ".join(row) for row in rows) + "\n")
    (folder / "b.txt").write_text("\n".join(" ".join(row[::-1]) for row in rows) + "\n")
    return f"--train_files {folder / 'a.txt'} {folder / 'b.txt'} --tokenizer word"


@pytest.fixture(scope="module")
def train_script():
    return load_script("train")


@pytest.mark.parametrize(
    ("script", "default"),
    [("train", "(default: bpe)"), ("evaluate", "(default: source)")],
)
def test_help_teaches_the_flags_with_their_defaults(script, default):
    done = run([sys.executable, f"scripts/{script}.py", "--help"])
    assert done.returncode == 0
    assert f"scripts/{script}.py" in done.stdout
    assert default in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--task translate --train_files x", "--task translate is unknown; did you mean 'translation'?"),
        ("--task causal-lm", "--task causal-lm needs --train_files or --dataset_name"),
        ("--metric_for_best_model blue", "is no score of translation; did you mean 'bleu'?"),
        ("--ema_decay 1", "--ema_decay 1.0 must be between 0 and 1, as in 0.999"),
        ("--train_files a b --dataset_name c", "are two sources of data: give one of them"),
        (
            "--train_files a b --streaming --num_train_epochs 2",
            "which --streaming does not know: --max_steps",
        ),
        ("--task masked-lm --train_files a --bad_rows skip", "--bad_rows skip is unknown"),
        (
            "--task text-classification --train_files a --label_smoothing 0.1",
            "--label_smoothing is for language models and translation, not for text-classification",
        ),
        ("--report_to tensorbord", "--report_to tensorbord is unknown; did you mean 'tensorboard'?"),
        ("--label_smoothing 1", "--label_smoothing 1.0 must be below 1"),
        ("--test_files a b", "--validation_files and --test_files need --train_files or --dataset_name"),
        ("--max_grad_norm 0", "--max_grad_norm 0.0 must be above 0"),
        ("--preset modem", "--preset modem is unknown; did you mean 'modern'?"),
        ("--batch_size 0", "--batch_size 0 must be at least 1"),
        ("--batch_size many", "argument --batch_size"),
        ("--config nowhere.yaml", "there is no recipe nowhere.yaml (the project's own: "),
        ("--learning_rates 3", "--learning_rates is unknown; did you mean '--learning_rate'?"),
        ("--config BAD", "unknown key 'learning_rat'; did you mean 'learning_rate'?"),
        ("--config FAST", "argument --learning_rate"),
        ("--eval_pairs 0", "--eval_pairs 0 must be at least 1"),
        ("--resume --overwrite", "give one of them"),
        ("--push_to_hub ''", "--push_to_hub '' is no repository: write user/name"),
        ("--push_to_hub ' '", "--push_to_hub ' ' is no repository: write user/name"),
    ],
)
def test_bad_flags_are_refused_by_name(train_script, arguments, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.yaml").write_text("learning_rat: 3\n")
    (tmp_path / "fast.yaml").write_text("learning_rate: fast\n")
    for name in ("bad", "fast"):
        arguments = arguments.replace(name.upper(), str(tmp_path / f"{name}.yaml"))
    monkeypatch.setattr(sys, "argv", ["train.py", *shlex.split(arguments)])
    with pytest.raises(SystemExit):
        train_script.parse_arguments("", train_script.RECIPES)
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"hidden_size": 30}, "hidden_size=30 is not divisible by num_attention_heads=4"),
        ({"dropout": 2.0}, "dropout=2.0 must be at least 0 and below 1"),
        ({"config_overrides": "qk_nrom: true"}, "has no field 'qk_nrom'; did you mean 'qk_norm'?"),
        ({"config_overrides": "qk_norm"}, "--config_overrides gives no value for 'qk_norm'"),
        ({"config_overrides": "a: ]"}, "--config_overrides 'a: ]' is no 'key: value, ...'"),
    ],
)
def test_models_that_cannot_be_are_refused(train_script, flags, message):
    arguments = train_script.Arguments(**flags)
    with pytest.raises(ValueError, match=re.escape(message)):
        train_script.build_config(arguments, Translation())


@pytest.mark.parametrize("error", [ValueError("too few rows"), OSError("disk is gone"), OSError()])
def test_any_fault_of_the_main_process_is_told_to_all(train_script, error):
    def check() -> None:
        raise error

    with pytest.raises(ValueError, match=str(error) or "OSError"):
        train_script.on_main(Accelerator(cpu=True), check)


@pytest.mark.parametrize("preset", ["vaswani", "modern"])
def test_GN12_a_fresh_writer_does_not_run_past_its_last_position(train_script, preset):
    tokenizer = train_tokenizer(iter(["abcd" * 9]), "char", 50, 16, "decoder")
    arguments = train_script.Arguments(task="causal-lm", preset=preset, max_length=16, hidden_size=32)
    model = build_model(arguments, CausalLM(max_length=16), tokenizer)
    model.generation_config.eos_token_id = None
    written = model.generate(**tokenizer("abcd", return_tensors="pt"), do_sample=False)
    assert written.shape[1] == {"vaswani": 17, "modern": 20}[preset]  # all positions; 16 new tokens


def test_the_command_line_overrides_the_recipe(train_script, tmp_path, monkeypatch):
    recipe = (
        "learning_rate: 3.0e-3\nmax_steps: 7\ntrain_files: [a, b]\nintermediate_size: null\nresume: true\n"
    )
    (tmp_path / "x.yaml").write_text(recipe)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(tmp_path / "x.yaml"), "--max-steps", "9"])
    arguments = train_script.parse_arguments("", train_script.RECIPES)
    assert (arguments.learning_rate, arguments.max_steps, arguments.train_files) == (3e-3, 9, ["a", "b"])
    assert arguments.resume
    assert arguments.batch_size == train_script.Arguments().batch_size


def test_a_missing_file_is_one_clear_line(tmp_path):
    flags = f"--train_files {tmp_path / 'nowhere.txt'} --task causal-lm --output_dir {tmp_path / 'out'}"
    done = run([sys.executable, "scripts/train.py", *flags.split()])
    assert done.returncode != 0
    assert f"train.py: cannot read {tmp_path / 'nowhere.txt'}: No such file or directory" in done.stdout
    assert "Traceback" not in done.stdout


def test_recipes_are_runs(train_script, tmp_path, monkeypatch, capsys):
    recipes = sorted((ROOT / "scripts" / "recipes").glob("*.yaml"))
    assert recipes
    monkeypatch.setenv("HFTB_DATA", str(tmp_path))
    for recipe in recipes:
        monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(recipe)])
        arguments = train_script.parse_arguments("", train_script.RECIPES)
        train_script.build_config(arguments, build_task(arguments, arguments.task), vocab_size=99)
        assert arguments.train_files is None or all(
            str(tmp_path) in f or "runs/" in f for f in arguments.train_files
        )
    monkeypatch.delenv("HFTB_DATA")
    with pytest.raises(SystemExit):
        train_script.parse_arguments("", train_script.RECIPES)
    assert "set HFTB_DATA to the folder that holds them, not ''" in capsys.readouterr().err


@pytest.mark.parametrize(("more_is_better", "scores", "best"), [(False, [3, 2, 4], 1), (True, [3, 2, 4], 2)])
def test_the_best_evaluation_is_no_nan(more_is_better, scores, best):
    progress = Progress()
    assert not progress.judge(float("nan"), more_is_better)
    assert (progress.best_step, progress.without_better) == (None, 1)
    for progress.step, score in enumerate(scores):
        progress.judge(score, more_is_better)
    assert (progress.best_step, progress.best_score) == (best, scores[best])
    assert progress.without_better == len(scores) - 1 - best


@pytest.mark.slow
def test_two_processes_train_as_one_and_save_one_folder(pairs, tmp_path):
    files = pairs.split(" --")[0].removeprefix("--train_files ")
    flags = (
        f"{pairs} {TINY} --max_steps 24 --dropout 0 --validation_files {files} --test_files {files} "
        f"--num_beams 2 --label_smoothing 0.1 --lr_scheduler_type linear --gradient_accumulation_steps 2 "
        f"--eval_batch_size 7"
    )
    one = train(f"{flags} --output_dir {tmp_path / 'one'}")
    two = train(f"{flags} --output_dir {tmp_path / 'two'}", TWO_PROCESSES)
    assert "1 process(es) on cpu (NO)" in one
    assert "2 process(es) on cpu (MULTI_CPU)" in two
    metrics = [json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("one", "two")]
    assert [m["processes"] for m in metrics] == [1, 2]
    assert len(metrics[0]["history"]) == 3
    for before, after in zip(metrics[0]["history"], metrics[1]["history"], strict=True):
        for loss in ("train_loss", "loss"):
            assert after[loss] == pytest.approx(before[loss], abs=2e-4)
    assert {f.name for f in (tmp_path / "one").iterdir()} == {f.name for f in (tmp_path / "two").iterdir()}
    assert two.count("saved in") == 1
    assert metrics[0]["split"] == "test"
    assert "On the test split" in (tmp_path / "one" / "README.md").read_text()
    assert str(tmp_path) not in (tmp_path / "one" / "README.md").read_text()
    config = json.loads((tmp_path / "one" / "generation_config.json").read_text())
    assert (config["num_beams"], config["max_new_tokens"]) == (2, 24)


@pytest.mark.slow
def test_sharded_processes_train_as_whole_ones_and_save_one_folder(pairs, tmp_path):
    flags = (
        f"{pairs} {TINY} --max_steps 16 --dropout 0 --tokens_per_batch 60 --ema_decay 0.9 --num_beams 2 "
        f"--gradient_accumulation_steps 2 --save_steps 8 --output_dir"
    )
    train(f"{flags} {tmp_path / 'ddp'}", TWO_PROCESSES)
    launch = "--config_file scripts/accelerate/fsdp2.yaml --mixed_precision no"
    sharded = command(f"{flags} {tmp_path / 'fsdp'}", launch)
    sharded[sharded.index("scripts/train.py")] = "tests/fsdp2_train.py"
    refused = run(command(f"{flags} {tmp_path / 'refused'}", launch))
    assert "train.py: FSDP was asked for, but Accelerate runs MULTI_CPU" in refused.stdout
    done = run(sharded)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 process(es) on cpu (FSDP)" in done.stdout
    ddp, fsdp = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("ddp", "fsdp"))
    assert len(ddp["history"]) == 2
    for before, after in zip(
        [*ddp["history"], ddp["scores"]], [*fsdp["history"], fsdp["scores"]], strict=True
    ):
        assert after["loss"] == pytest.approx(before["loss"], abs=1e-4)
    whole, gathered = (load_file(tmp_path / name / "model.safetensors") for name in ("ddp", "fsdp"))
    assert whole.keys() == gathered.keys()
    assert all(torch.allclose(whole[name], gathered[name], atol=1e-5) for name in whole)
    names = {file.name for file in (tmp_path / "ddp").iterdir()}
    assert names == {file.name for file in (tmp_path / "fsdp").iterdir()}

    shutil.rmtree(tmp_path / "fsdp" / "checkpoints" / "step-00000016")
    (tmp_path / "fsdp" / "model.safetensors").unlink()
    done = run([*sharded, "--resume"])
    assert "continuing after update 8" in done.stdout, done.stdout[-3000:]
    resumed = load_file(tmp_path / "fsdp" / "model.safetensors")
    assert all(torch.equal(gathered[name], resumed[name]) for name in gathered)


@pytest.mark.slow
def test_processes_load_remote_code_and_tokenizer_with_cold_caches(tmp_path):
    config = tiny_config("decoder", vocab_size=20)
    TransformerBlockForCausalLM(config).save_pretrained(tmp_path / "model")
    train_tokenizer(iter(["abcd"]), "char", 20, 16, "decoder").save_pretrained(tmp_path / "model")
    worker = tmp_path / "worker.py"
    worker.write_text(
        """
import sys
sys.meta_path = [f for f in sys.meta_path if "hf_transformer_block" not in repr(f)]
sys.modules["hf_transformer_block"] = None  # importing it fails, as where it is not installed
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer
accelerator = Accelerator()
with accelerator.local_main_process_first():
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules")
total = accelerator.reduce(model(**tokenizer("abcd", return_tensors="pt")).logits.sum())
print(f"{accelerator.process_index} of {accelerator.num_processes}: {total.item() / 2:.4f}")
"""
    )
    launch = [sys.executable, "-m", "accelerate.commands.launch", *TWO_PROCESSES.split()]
    done = run([*launch, str(worker), str(tmp_path / "model")], HF_MODULES_CACHE=str(tmp_path / "cold"))
    model = TransformerBlockForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    total = model(**tokenizer("abcd", return_tensors="pt")).logits.sum().item()
    for rank in range(2):
        assert f"{rank} of 2: {total:.4f}" in done.stdout, done.stdout[-2000:]


@pytest.mark.slow
def test_texts_longer_than_the_positions_do_not_end_a_run(pairs, tmp_path):
    long = " ".join(["nine"] * 60)
    (tmp_path / "a.txt").write_text(f"one two\n{long}\nthree\n")
    (tmp_path / "b.txt").write_text("two one\nnine\nthree\n")
    files = f"--validation_files {tmp_path / 'a.txt'} {tmp_path / 'b.txt'} --preset vaswani"
    printed = train(f"{pairs} {files} {TINY} --max_steps 8 --output_dir {tmp_path / 'pairs'}")
    assert "validation: 3 examples; 1 cut to --max_length" in printed
    (tmp_path / "text.txt").write_text("\u732b\u304c\u597d\u304d\u3002" * 999, encoding="utf-8")
    flags = f"--task causal-lm --train_files {tmp_path / 'text.txt'} --preset vaswani --vocab_size 300"
    train(f"{flags} {TINY} --max_steps 8 --output_dir {tmp_path / 'writer'}")
    evaluate = [sys.executable, "scripts/evaluate.py", str(tmp_path / "writer"), "--files"]
    evaluated = run([*evaluate, str(tmp_path / "text.txt")])
    assert '"bits_per_byte"' in evaluated.stdout
    missing = run([*evaluate, "nowhere.txt"])
    assert "evaluate.py: cannot read nowhere.txt: No such file" in missing.stdout


@pytest.mark.slow
def test_the_main_job_reads_dates_it_never_saw(tmp_path):
    folder = tmp_path / "dates"
    train(f"--output_dir {folder}")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["scores"]["exact_match"] >= 99
    done = run([sys.executable, "scripts/evaluate.py", str(folder)])
    assert f'"exact_match": {metrics["scores"]["exact_match"]}' in done.stdout

    code = """
import importlib.util, sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
assert importlib.util.find_spec("hf_transformer_block") is None
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer(sys.argv[2:], padding=True, return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True))
"""
    typed = ["March 5, 2024", "5. März 2024", "2024年3月5日"]
    alone = [
        sys.executable,
        "-c",
        "import sys\nsys.meta_path = [f for f in sys.meta_path if '__editable__' not in "
        f"getattr(f, '__module__', '') and 'hf_transformer_block' not in repr(f)]\n{code}",
    ]
    done = subprocess.run(
        [*alone, str(folder), *typed], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert "['2024-03-05', '2024-03-05', '2024-03-05']" in done.stdout, done.stderr[-2000:]

    card = (folder / "README.md").read_text()
    snippet = re.search("```python\n(.*?)```", card, re.DOTALL).group(1)
    done = subprocess.run(
        [sys.executable, "-c", snippet], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d\n", done.stdout), done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.data
@needs_shakespeare
def test_the_shakespeare_recipe_beats_the_published_loss(tmp_path):
    folder = tmp_path / "shakespeare"
    train(f"--config scripts/recipes/shakespeare-char.yaml --output_dir {folder}", HFTB_DATA=str(DATA))
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["scores"]["targets"] == 111_540  # the whole validation text, and its end, but its first
    assert metrics["scores"]["loss"] <= 1.80  # nats per character; nanoGPT publishes 1.88
    text = tmp_path / "text.txt"
    text.write_text("ROMEO:\nIs the day so young?\n")
    done = run([sys.executable, "scripts/evaluate.py", str(folder), "--files", str(text)])
    assert '"bits_per_byte"' in done.stdout
