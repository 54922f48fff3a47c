"""Tests of scripts/export.py as users run it, of its refusals, and of the code in docs/serving.md."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import load_script, tiny_config, tiny_tokenizer
from safetensors.torch import load_file, save_file
from sources import build
from transformers import ByT5Tokenizer

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForSequenceClassification,
    TransformerBlockModel,
)
from hf_transformer_block.vocabulary import train_tokenizer


pytest.importorskip("ctranslate2", reason='runs after pip install "hf_transformer_block[export]"')
pytest.importorskip("onnxscript", reason='runs after pip install "hf_transformer_block[export]"')
pytest.importorskip("onnxruntime", reason='runs after pip install "hf_transformer_block[export]"')

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "serving.md").read_text("utf-8"), re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
TEXTS = ["A man rides a bicycle. Two dogs play. Once upon a time It was How far is it? 0123456789"]
# who serves a model has neither this package nor torch
ELSEWHERE = 'import sys\nfor name in ("hf_transformer_block", "torch"):\n    sys.modules[name] = None\n'


@pytest.fixture(scope="module")
def script():
    return load_script("export")


@pytest.fixture
def run(script, monkeypatch, capsys):
    """Runs scripts/export.py in this process; returns what it printed, or the last line of its error."""

    def run_script(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["export.py", *map(str, arguments)])
        monkeypatch.setattr(script.transformers.utils.logging, "set_verbosity_error", lambda: None)
        try:
            script.main()
        except SystemExit as exit:
            if isinstance(exit.code, str):
                return exit.code
            printed = capsys.readouterr()
            return printed.err.splitlines()[-1] if exit.code else printed.out
        return capsys.readouterr().out

    return run_script


def save(head: type, folder: Path, architecture: str, **fields) -> torch.nn.Module:
    """Saves a tiny model, and a tokenizer which knows the letters of the page."""
    tokenizer = train_tokenizer(iter(TEXTS), "char", 60, 64, architecture)
    model = head(tiny_config(architecture, vocab_size=len(tokenizer), max_position_embeddings=200, **fields))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def serve(code: str, folder: Path) -> str:
    """Runs code in a process of its own and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE + code], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_page_tells_the_truth(run, tmp_path, monkeypatch):
    assert (len(PYTHON), len(COMMANDS)) == (4, 4)
    monkeypatch.chdir(tmp_path)
    save(TransformerBlockForConditionalGeneration, Path("runs/en-de"), "encoder-decoder")
    save(TransformerBlockForCausalLM, Path("runs/writer"), "decoder")
    labels = {0: "DESC", 1: "NUM"}
    save(TransformerBlockForSequenceClassification, Path("runs/topics"), "encoder", id2label=labels)
    for command in COMMANDS:
        words = shlex.split(command)
        assert words[:2] == ["python", "scripts/export.py"]
        assert "\nsaved: " in run(*words[2:])
    printed = [serve(code, tmp_path) for code in PYTHON]
    assert [len(text.splitlines()) for text in printed] == [2, 2, 1, 1]
    assert re.fullmatch(r"\['(DESC|NUM)', '(DESC|NUM)'\]\n", printed[2])


def test_what_it_prints_runs_elsewhere(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = save(TransformerBlockForConditionalGeneration, Path("ours"), "encoder-decoder")
    model.generation_config.update(num_beams=3, max_new_tokens=9, bad_words_ids=[[0]], forced_eos_token_id=2)
    model.save_pretrained("ours")
    report, code = run("ours", "theirs", "--format", "ctranslate2", "--quantization", "int8").split("\n\n", 1)
    assert [line.split(":")[0] for line in report.split("\n")] == [
        "model",
        "tokenizer",
        "checked in float32",
        "checked in int8",
        "saved",
    ]
    assert "checked in float32: 8 of 8 greedy texts for random tokens are the same" in report
    code, left_out = code.rsplit("\n\n", 1)
    assert left_out == "settings of generation which this leaves out: forced_eos_token_id\n"
    options = "beam_size=3, suppress_sequences=[['<pad>']], min_decoding_length=0, max_decoding_length=9"
    assert f"translate_batch(tokens, {options})" in code
    assert len(serve(code, tmp_path).splitlines()) == 2
    save(TransformerBlockForCausalLM, Path("writer"), "decoder")
    code = run("writer", "writes", "--format", "ctranslate2").split("\n\n", 1)[1]
    assert len(serve(code, tmp_path).splitlines()) == 2
    names = {file.name for file in Path("writes").iterdir()}
    assert names == {"config.json", "model.bin", "tokenizer.json", "tokenizer_config.json", "vocabulary.json"}


@pytest.mark.parametrize(
    ("head", "architecture"),
    [
        (TransformerBlockForConditionalGeneration, "encoder-decoder"),
        (TransformerBlockForCausalLM, "decoder"),
    ],
)
def test_a_tokenizer_without_a_file_is_loaded_by_transformers(head, architecture, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 384, "eos_token_id": 1, "max_position_embeddings": 64}
    head(tiny_config(architecture, **sizes)).save_pretrained("ours")
    ByT5Tokenizer().save_pretrained("ours")
    code = run("ours", "it's theirs", "--format", "ctranslate2").split("\n\n", 1)[1]
    assert not Path("it's theirs", "tokenizer.json").exists()
    assert 'AutoTokenizer.from_pretrained("it\'s theirs")' in code
    assert serve(code, tmp_path).count("\n") >= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nowhere", "is no folder with a model and no id on the Hub"),
        ("broken", "is no folder with a model and no id on the Hub"),
        (
            "field",
            "has a broken config.json: num_attention_heads=4 is not divisible by num_key_value_heads=3",
        ),
        ("llama", "is a llama, no model of this family: scripts/convert.py makes one of a GPT-2, Llama"),
        ("class", "was saved from MyModel, which is no class of this family"),
        (
            "missing",
            "is no whole TransformerBlockForCausalLM: 1 missing weights, such as model.layers.0.mlp.up_",
        ),
        ("corrupt", "has broken weights, or others than its config.json: "),
        ("tokenizer", "has no tokenizer, and a model of ctranslate2 reads and writes its tokens: "),
        ("base", "a TransformerBlockModel (architecture='decoder') writes no text: ctranslate2 takes"),
    ],
)
def test_bad_models_are_refused_in_one_line(change, message, run, tmp_path):
    folder = tmp_path / "ours"
    head = TransformerBlockModel if change == "base" else TransformerBlockForCausalLM
    model = build("llama") if change == "llama" else head(tiny_config("decoder"))
    model.save_pretrained(folder)
    if change != "tokenizer":
        tiny_tokenizer().save_pretrained(folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    if change == "broken":
        config.write_text("{")
    if change in ("field", "class"):
        fields = {"num_key_value_heads": 3} if change == "field" else {"architectures": ["MyModel"]}
        config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    if change == "missing":
        kept = {name: weight for name, weight in load_file(weights).items() if "0.mlp.up_proj.w" not in name}
        save_file(kept, weights, metadata={"format": "pt"})
    if change == "corrupt":
        weights.write_bytes(b"half of a download")
    name = tmp_path / "nowhere" if change == "nowhere" else folder
    error = run(name, tmp_path / "new" / "theirs", "--format", "ctranslate2")
    assert error.startswith("export.py: ")
    assert message in error
    assert "\n" not in error
    assert not list(tmp_path.glob("new/*"))


def test_bad_flags_and_a_missing_extra_are_refused_first(run, script, tmp_path, monkeypatch):
    out = tmp_path / "new" / "theirs"
    error = run("ours", out, "--format", "onnx", "--quantization", "int8")
    assert (
        "error: --quantization int8 is for --format ctranslate2: export without it, then onnxruntime" in error
    )
    assert "choose from" in run("ours", out, "--format", "gguf")
    assert "--format" in run("ours", out)
    monkeypatch.setattr(script, "find_spec", lambda name: None)
    install = 'pip install "hf_transformer_block[export]"'
    for format, needed in (("ctranslate2", "ctranslate2"), ("onnx", "onnx")):
        error = run("ours", out, "--format", format)
        assert error == f"export.py: --format {format} needs {needed}: {install}"
    assert not out.parent.exists()


def test_the_users_files_are_safe(run, script, tmp_path, monkeypatch):
    save(TransformerBlockForCausalLM, tmp_path / "ours", "decoder")
    out = tmp_path / "theirs"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    arguments = (tmp_path / "ours", out, "--format", "ctranslate2")
    assert f"{out} exists and is not an empty folder: give another one, or move it away" in run(*arguments)
    assert [file.name for file in out.iterdir()] == ["notes.txt"]
    (out / "notes.txt").unlink()

    def fail(*args):
        (args[2] / "model.bin").write_bytes(b"half")
        raise OSError("No space left on device")

    def interrupt(*args):
        (args[2] / "model.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    for stop, message in ((fail, "No space left on device"), (interrupt, "interrupted, nothing is written")):
        with monkeypatch.context() as patch:
            patch.setattr(script, "export_to_ctranslate2", stop)
            assert run(*arguments) == f"export.py: {message}"
        assert not list(out.iterdir())
        assert sorted(folder.name for folder in tmp_path.iterdir()) == ["ours", "theirs"]
    assert "\nsaved: " in run(*arguments)
    assert (out / "model.bin").exists()
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["ours", "theirs"]


def test_help_teaches(run):
    printed = run("--help")
    assert (
        "python scripts/export.py runs/en-de served/en-de --format ctranslate2 --quantization int8" in printed
    )
    assert "There is no cache of keys and values" in printed
    assert "What a format cannot represent is refused by name" in printed
