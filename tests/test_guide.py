"""Tests that the guide is true: the blocks of each page run from top to bottom, and print what it shows."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command_parser
from conftest import tiny_config
from ecosystem.servers import free_port
from hub_client import ONLY_LFS, api_of
from hub_fixtures import TOKENS, client_env
from huggingface_hub import CommitOperationAdd
from safetensors.torch import load_file
from transformers import AutoConfig


pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')

from hf_transformer_block import TransformerBlockForCausalLM
from hf_transformer_block.arguments import Arguments
from hf_transformer_block.tutorial import PARTS
from hf_transformer_block.vocabulary import train_tokenizer


ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
# stand-ins for Slurm: a job of two nodes without GPUs, both of which are this machine
SLURM = {
    "sbatch": 'SLURM_JOB_ID={port} SLURM_JOB_NODELIST="here[1-2]" SLURM_NNODES=2 exec bash "$1"',
    "scontrol": '[ "$*" = "show hostnames here[1-2]" ] && printf "127.0.0.1\\n127.0.0.1\\n"',
    "srun": """while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@"
wait "$first\"""",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Returns the language and the text of every block."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def assert_shown(shown: str, printed: str) -> None:
    """A page's "text" holds lines that the block before it printed, in this order; "..." is anything."""
    lines = [line.strip() for line in shown.splitlines() if line.strip() not in ("", "...")]
    assert lines
    rest = printed
    for line in lines:
        pattern = ".*".join(map(re.escape, line.split("...")))
        found = re.search(pattern, rest)
        assert found, f"{line!r} is not in the rest of what was printed:\n{rest}\n--- in full:\n{printed}"
        rest = rest[found.end() :]


def run_block(language: str, code: str, folder: Path, env: dict[str, str], seconds: float = 600) -> str:
    """Runs a block in a process of its own; returns what it printed, and leaves nothing running."""
    with subprocess.Popen(
        [*RUN[language], code],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{code}\n{printed[-5000:]}"
    return printed


def run_page(
    name: str, folder: Path, env: dict[str, str], meanwhile: tuple[str, Callable[[], None]] = ("", list)
) -> None:
    """Runs the blocks of a page in their order; `meanwhile` is a block's text, and what happens before it."""
    printed, ran, shown = "", 0, 0
    for language, code in blocks(GUIDE / f"{name}.md"):
        if language in RUN:
            if meanwhile[0] and meanwhile[0] in code:
                meanwhile[1]()
            printed = run_block(language, code, folder, env)
            ran += 1
        elif language == "text":
            assert_shown(code, printed)
            shown += 1
    assert ran > 1
    assert shown, "a page that shows no output would hide a wrong one"


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of the project, which the page may change."""
    folder = tmp_path / "project"
    without = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("docs", "hf_transformer_block", "scripts", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=without)
    for name in ("pyproject.toml", "README.md", "LICENSE", "model_card.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def env(project, tmp_path) -> dict[str, str]:
    """What a reader's shell holds: the project's Python first, a Hugging Face home of its own, no GPU."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    env |= {"PYTHONPATH": str(project), "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    return env | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "TRACKIO_DIR": str(tmp_path / "logs")}


def write_slurm(folder: Path) -> None:
    """Writes the stand-ins for Slurm's commands; the job's number is such that its port is free."""
    folder.mkdir()
    job = next(port - 20000 for port in iter(free_port, None) if 20000 <= port < 60000)
    for name, text in SLURM.items():
        (folder / name).write_text("#!/bin/bash\n" + text.replace("{port}", str(job)) + "\n")
        (folder / name).chmod(0o755)


def test_a_block_that_takes_too_long_leaves_nothing_running(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        run_block("bash", "(sleep 3; touch late) & sleep 30", tmp_path, dict(os.environ), seconds=1)
    time.sleep(3)
    assert not (tmp_path / "late").exists()


def test_a_server_that_does_not_start_is_not_waited_for(tmp_path):
    (block,) = [code for _, code in blocks(GUIDE / "tools.md") if "until curl" in code]
    env = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PORT": str(free_port())}
    with pytest.raises(AssertionError, match="until curl"):
        run_block("bash", block.replace("app()", "+"), tmp_path, env, seconds=30)
    assert "SyntaxError" in (tmp_path / "serve.log").read_text()


def test_every_page_is_in_the_list_and_runs_here():
    listed = re.findall(r"\(([\w-]+)\.md\)", (GUIDE / "README.md").read_text(encoding="utf-8"))
    pages = {page.stem for page in GUIDE.glob("*.md")} - {"README"}
    assert set(listed) == pages
    tests = Path(__file__).read_text(encoding="utf-8")
    assert [page for page in pages if f'"{page}"' not in tests] == []


def test_links_of_the_guide_lead_somewhere():
    links = 0
    for page in [*GUIDE.glob("*.md"), ROOT / "README.zh-CN.md"]:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("https://"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
                links += 1
        for path in re.findall(r"`((?:scripts|docs|tests|hf_transformer_block)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
    assert links > 5


@pytest.mark.slow
def test_the_page_of_own_data_translates_what_it_has_not_seen(project, env):
    run_page("own-data", project, env)
    wanted, found = ((project / name).read_text("utf-8").split() for name in ("test.de", "answers.de"))
    assert len(wanted) == len(found) == 58
    assert sum(map(str.__eq__, wanted, found)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("page", ["fine-tune", "from-the-tutorial"])
def test_a_page_runs_from_top_to_bottom(page, project, env):
    for module in ("peft", "trl") if page == "fine-tune" else ():
        pytest.importorskip(module, reason='runs after pip install "hf_transformer_block[ecosystem]"')
    run_page(page, project, env)


@pytest.mark.ecosystem
def test_the_page_of_tools_runs_from_top_to_bottom(project, env):
    for module in ("lm_eval", "openai", "sentence_transformers", "tensorboard", "torchao"):
        pytest.importorskip(module, reason='runs after pip install "hf_transformer_block[ecosystem]"')
    run_page("tools", project, env | {"PORT": str(free_port()), "MASTER_PORT": str(free_port())})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="runs where git is installed")
def test_a_changed_block_trains_loads_and_is_refused_by_the_original(project, env):
    run_page("change-the-block", project, env)
    with pytest.raises(ValueError, match="position_embedding='alibi' is unknown"):
        AutoConfig.from_pretrained(project / "runs" / "alibi", trust_remote_code=True)


@pytest.mark.slow
def test_two_processes_two_machines_and_a_slurm_job(project, env, tmp_path):
    write_slurm(tmp_path / "slurm")
    del env["ACCELERATE_USE_CPU"]  # which the commands say themselves
    env |= {"PATH": f"{tmp_path / 'slurm'}{os.pathsep}{env['PATH']}", "PORT": str(free_port())}
    run_page("several-gpus", project, env)
    two, slurm = (load_file(project / "runs" / name / "model.safetensors") for name in ("two", "slurm"))
    assert two.keys() == slurm.keys()
    for name, weight in two.items():
        torch.testing.assert_close(slurm[name], weight, rtol=0, atol=1e-6)


def test_launchers_flags_and_files_exist():
    """Of the commands, as far as no machine here can run them."""
    text = (GUIDE / "several-gpus.md").read_text(encoding="utf-8")
    commands = re.findall(r"accelerate launch((?:[^`]|\\\n)*?)scripts/train\.py", text)
    assert len(commands) > 5
    known = {option for action in launch_command_parser()._actions for option in action.option_strings}
    flags = {flag for command in commands for flag in re.findall(r"(--\w+)", command)}
    assert {"--config_file", "--num_machines", "--num_processes", "--machine_rank"} <= flags
    assert flags - {"--cpu"} <= known
    files = set(re.findall(r"([\w-]+\.yaml)", text)) - {"dates-small.yaml"}
    assert files == {file.name for file in (ROOT / "scripts" / "accelerate").glob("*.yaml")}
    trained = {
        flag for flag in re.findall(r"train\.py (--.*)", text) for flag in re.findall(r"--(\w+)", flag)
    }
    assert trained
    assert trained <= {field.name for field in fields(Arguments)}


@pytest.fixture
def my_name(monkeypatch) -> None:
    """Lets a user of that name into the Hub that is started next."""
    monkeypatch.setitem(TOKENS, "hf_mine", "my-name")


@ONLY_LFS
@pytest.mark.slow
def test_a_pinned_model_loads_whatever_becomes_of_its_branch(my_name, hub, project, env, tmp_path):
    folder, api = tmp_path / "writer", api_of(hub, "hf_mine")
    tokenizer = train_tokenizer(iter(["abcdefgh"]), "char", 50, 16, "decoder")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    TransformerBlockForCausalLM(tiny_config(vocab_size=len(tokenizer), eos_token_id=None)).save_pretrained(
        folder
    )
    (folder / "extra").mkdir()
    (folder / "extra" / "evil.py").write_text("raise RuntimeError('nobody has read this')\n")
    api.create_repo("my-name/writer")
    api.upload_folder(repo_id="my-name/writer", folder_path=folder)
    api.create_tag("my-name/writer", tag="v1")

    def move_main() -> None:
        code = b"raise RuntimeError('this code was not there when you looked')\n"
        change = [CommitOperationAdd("configuration_hf_transformer_block.py", code)]
        api.create_commit("my-name/writer", change, commit_message="Change the code")

    online = {name: env[name] for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS")}
    run_page(
        "loading-safely", project, client_env(hub, tmp_path / "reader") | online, ("pinned = {", move_main)
    )


def test_the_chinese_readme_has_the_blocks_of_the_english_one():
    english, chinese = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")
    )
    assert BLOCK.findall(english)
    assert BLOCK.findall(chinese) == BLOCK.findall(english)
    heads = [re.findall(r"^#+ ", BLOCK.sub("", text), re.MULTILINE) for text in (english, chinese)]
    assert len(heads[1]) == len(heads[0]) + 1  # the way from the tutorial
    own = chinese[chinese.index("## 从教程代码到本项目") : chinese.index("## 许可证")]
    rows = [re.findall(r"^\|.*\|$", text, re.MULTILINE) for text in (english, chinese.replace(own, ""))]
    assert len(rows[1]) == len(rows[0])
    named = [
        set(re.findall(r"`((?:scripts|docs|hf_transformer_block)/[\w./-]+|--[\w-]+)", t))
        for t in (english, chinese)
    ]
    assert named[0] <= named[1]
    numbers = [
        [sorted(re.findall(r"\d+(?:[.,]\d+)*", part)) for part in re.split("^## ", text, flags=re.MULTILINE)]
        for text in (english, chinese.replace(own, ""))
    ]
    assert sum(map(len, numbers[0])) > 100
    assert numbers[1] == numbers[0]


def test_the_chinese_table_of_parts_is_the_one_that_converts():
    page = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    for theirs, ours in PARTS.items():
        assert f"`{theirs}`" in page
        assert f"`{ours}`" in page
