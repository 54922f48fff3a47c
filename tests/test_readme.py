"""Tests that the README tells the truth: its Python runs, its commands parse, its paths exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import load_script, tiny_config

from hf_transformer_block import TransformerBlockForConditionalGeneration
from hf_transformer_block.vocabulary import train_tokenizer


ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
ON_THE_HUB = "my-name/"  # in blocks which test_push_script.py runs
PYTHON = [code for language, code in BLOCKS if language == "python" and ON_THE_HUB not in code]
COMMANDS = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]


@pytest.mark.parametrize("number", range(3))
def test_python_runs(number, tmp_path):
    assert len(PYTHON) == 3
    tokenizer = train_tokenizer(
        iter(["March 5, 2024 5. März 2024年3月5日"]), "char", 60, 64, "encoder-decoder"
    )
    tokenizer.save_pretrained(tmp_path / "runs" / "dates")  # what the main job leaves, untrained
    model = TransformerBlockForConditionalGeneration(
        tiny_config("encoder-decoder", vocab_size=len(tokenizer))
    )
    model.save_pretrained(tmp_path / "runs" / "dates")
    done = subprocess.run(
        [sys.executable, "-c", PYTHON[number]], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_commands_use_flags_and_files_that_exist(monkeypatch):
    from hf_transformer_block.arguments import parse_arguments

    assert len(COMMANDS) == 9
    install = 'pip install -c constraints.txt -e ".[train]" && accelerate launch scripts/train.py'
    tests = 'pip install -c constraints.txt -e ".[test]" && pytest -n 2 --dist loadfile'
    assert COMMANDS[:2] == [install, tests]
    assert "--config_file scripts/accelerate/cpu_ddp.yaml" in COMMANDS[-1]  # which test_scripts runs
    evaluate_flags = Path(ROOT / "scripts" / "evaluate.py").read_text(encoding="utf-8")
    for command in COMMANDS:
        words = shlex.split(command)
        script = next((word for word in words if word.endswith(".py")), None)
        if script == "scripts/train.py":
            monkeypatch.setattr(sys, "argv", words[words.index(script) :])
            parse_arguments("", ROOT / "scripts" / "recipes")
        elif script == "scripts/convert.py":
            assert len(words) == 4  # SOURCE and OUT
        elif script == "scripts/push_to_hub.py":
            monkeypatch.setattr(sys, "argv", words[words.index(script) :])
            load_script("push_to_hub").parse_arguments()
        elif script is not None:
            assert script == "scripts/evaluate.py"
            flags = [word.removeprefix("--") for word in words if word.startswith("--")]
            assert flags
            assert all(f"    {flag}: " in evaluate_flags for flag in flags)


def test_paths_exist():
    paths = re.findall(r"`((?:scripts|docs|tests|hf_transformer_block)/[\w./-]+)`", README)
    assert paths
    assert all((ROOT / path).exists() for path in paths)


def test_the_conformance_page_names_tests_that_exist():
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    pairs = re.findall(r"`(test_\w+\.py)::(test_\w+)`", page)
    matrix = page[page.index("## Exactness") : page.index("## Versions")]
    names = re.findall(r"`(test_\w+)`", matrix)
    assert pairs
    assert len(names) > 15
    assert [pair for pair in pairs if f"def {pair[1]}(" not in files.get(pair[0], "")] == []
    assert [name for name in names if f"def {name}(" not in "".join(files.values())] == []
    assert all((ROOT / path).exists() for path in re.findall(r"`(tests/test_\w+\.py)`", page))
