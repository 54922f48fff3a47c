"""Tests of what a run leaves behind, of the check of its engine, and of the launcher's configurations."""

import json
import os
import re
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)
from checkpoint_worker import limited
from conftest import MODELS, model_name, tiny_config

from hf_transformer_block import TransformerBlock, records
from hf_transformer_block.records import MetricsLog, check_engine, locked, peak_memory, plot_curve, write_run


ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "scripts" / "accelerate").glob("*.yaml"))


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=me", "-c", "user.email=me@example.com"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_every_start_of_a_run_is_recorded(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    words = [
        "/home/me/scripts/train.py",
        "--train_files",
        "/data/a.en",
        "my file.de",
        "--output_dir=/runs/x/",
    ]
    monkeypatch.setattr(sys, "argv", words)
    write_run(tmp_path, {"seed": 3}, accelerator, {"train": {"sha256": "ab"}})
    write_run(tmp_path, {"seed": 3, "resume": True}, accelerator, {})
    first, second = json.loads((tmp_path / "run.json").read_text())
    assert (first["arguments"], second["arguments"]) == ({"seed": 3}, {"seed": 3, "resume": True})
    assert first["data"] == {"train": {"sha256": "ab"}}
    assert shlex.split(first["command"]) == [
        "train.py",
        "--train_files",
        "a.en",
        "my file.de",
        "--output_dir=x/",
    ]
    assert first["versions"]["torch"] == version("torch")
    assert first["versions"]["python"] == sys.version.split()[0]
    assert first["host"].items() >= {"processes": 1, "engine": "NO", "device": "cpu"}.items()
    assert first["host"]["mixed_precision"] == "no"
    assert first["host"]["cpus"] == os.cpu_count()
    assert abs((datetime.now(timezone.utc) - datetime.fromisoformat(first["started"])).total_seconds()) < 60
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_the_commit_of_the_code_and_whether_it_was_changed(tmp_path):
    folder = tmp_path / "package"
    folder.mkdir()
    assert records.code_version(folder) is None
    git(tmp_path, "init")
    (folder / "a.py").write_text("x = 1\n")
    assert records.code_version(folder) is None  # installed into a project, not part of it
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert records.code_version(folder) == {"commit": commit, "changed": False}
    (tmp_path / "notes.txt").write_text("beside the code\n")
    assert records.code_version(folder) == {"commit": commit, "changed": False}
    (folder / "a.py").write_text("x = 2\n")
    assert records.code_version(folder) == {"commit": commit, "changed": True}


def test_a_resumed_log_equals_an_uninterrupted_one(tmp_path):
    logs = [MetricsLog(tmp_path / name) for name in ("whole", "killed")]
    for log in logs:
        log.file.parent.mkdir()
        assert log.read() == []
        for step in range(1, 7):
            log.write(step, {"loss": 1 / 3 / step, "text": "katt\u2028\u00e5"}, {"seconds": 0.1 * step})
            if step % 3 == 0:
                log.write(
                    step, {"eval_loss": float("nan"), "eval_bleu": 41.02 + step}, {"rate": float("inf")}
                )
    whole, killed = logs
    assert whole.file.read_text().count("\n") == 8
    assert whole.read()[0] == {
        "step": 1,
        "loss": 1 / 3,
        "text": "katt\u2028\u00e5",
        "timing": {"seconds": 0.1},
    }
    assert whole.read()[-1] == {"step": 6, "eval_loss": None, "eval_bleu": 47.02, "timing": {"rate": None}}
    with killed.file.open("a") as stream:
        stream.write('{"step": 7, "lo')
    assert killed.read() == whole.read()
    killed.truncate(4)
    assert [entry["step"] for entry in killed.read()] == [1, 2, 3, 3, 4]
    for step in (5, 6):
        killed.write(step, {"loss": 1 / 3 / step, "text": "katt\u2028\u00e5"}, {"seconds": 0.1 * step})
    killed.write(6, {"eval_loss": float("nan"), "eval_bleu": 41.02 + 6}, {"rate": float("inf")})
    assert killed.file.read_bytes() == whole.file.read_bytes()


def test_only_the_main_process_writes_the_log(tmp_path):
    log = MetricsLog(tmp_path, is_main_process=False)
    log.write(1, {"loss": 2.0})
    log.truncate(0)
    assert not log.file.exists()


def test_a_full_disk_leaves_out_lines_but_breaks_none(tmp_path, caplog):
    log = MetricsLog(tmp_path)
    log.write(1, {"loss": 2.0})
    for size in (30, 5):  # within the next line, and before it
        with limited(size):
            log.write(2, {"loss": 3.0})
    log.write(3, {"loss": 4.0})
    assert log.read() == [{"step": 1, "loss": 2.0}, {"step": 3, "loss": 4.0}]
    assert len(caplog.messages) == 2
    assert all(message.startswith(f"{log.file} lacks the line of step 2: ") for message in caplog.messages)


@pytest.mark.parametrize(("metric", "labels"), [("loss", 2), ("bleu", 3)])
def test_the_curve_shows_what_was_logged(tmp_path, monkeypatch, metric, labels):
    history = [{"step": step, "loss": 3.0 - step / 9} for step in range(1, 9)]
    history[3]["loss"] = None
    history += [{"step": step, "eval_loss": 2.5, "eval_bleu": 10.0 * step} for step in (4, 8)]
    drawn = []

    class Watched(records.Figure):
        def savefig(self, *args, **kwargs):
            drawn.append(
                {line.get_label(): line.get_xydata().tolist() for a in self.axes for line in a.lines}
            )
            assert len(self.axes[0].get_legend().get_texts()) == labels
            super().savefig(*args, **kwargs)

    monkeypatch.setattr(records, "Figure", Watched)
    plot_curve(history, metric, tmp_path / "curve.png")
    expected = {
        "training loss": [[step, 3.0 - step / 9] for step in range(1, 9) if step != 4],
        "validation loss": [[4, 2.5], [8, 2.5]],
        "validation bleu": [[4, 40.0], [8, 80.0]],
    }
    assert drawn == [dict(list(expected.items())[:labels])]
    height, width, _ = matplotlib.image.imread(tmp_path / "curve.png").shape
    assert width > height > 300


def test_a_curve_without_evaluations_is_drawn_too(tmp_path):
    plot_curve([{"step": 1, "loss": 2.0}], "f1", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


@pytest.mark.skipif(sys.platform != "linux", reason="runs on Linux, whose /proc knows it too")
def test_peak_memory_is_that_of_this_process():
    status = Path("/proc/self/status").read_text()
    expected = 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1))
    assert peak_memory(torch.device("cpu")) == pytest.approx(expected, rel=0.02)


def launch(*arguments: str) -> tuple[SimpleNamespace, dict[str, str]]:
    """Returns what `accelerate launch` makes of its flags, and the environment it gives its processes."""
    flags = [*arguments, "--main_process_port", "0", "x.py"]
    parsed, *_ = _validate_launch_command(launch_command_parser().parse_args(flags))
    if parsed.use_deepspeed:
        parsed.deepspeed_fields_from_accelerate_config = ""
        return parsed, prepare_deepspeed_cmd_env(parsed)[1]
    if parsed.use_fsdp or parsed.multi_gpu:
        return parsed, prepare_multi_gpu_env(parsed)
    return parsed, prepare_simple_launcher_cmd_env(parsed)[1]


FLAGS = "--num_machines 1 --mixed_precision no --dynamo_backend no"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cpu --num_processes 2", "several processes were asked for, but Accelerate started one: on a CPU"),
        (
            "--use_fsdp --num_processes 1",
            "FSDP was asked for, but Accelerate runs NO, as it does without a GPU",
        ),
        ("--use_deepspeed --num_processes 1", "DEEPSPEED was asked for, but Accelerate runs NO"),
    ],
)
def test_engines_that_accelerate_replaces_in_silence(flags, message):
    _, environ = launch(*flags.split(), *FLAGS.split())
    with pytest.raises(ValueError, match=message):
        check_engine(Accelerator(cpu=True), environ)


def test_one_process_runs_as_asked():
    _, environ = launch("--cpu", "--num_processes", "1", *FLAGS.split())
    check_engine(Accelerator(cpu=True), environ)
    check_engine(Accelerator(cpu=True), {})


@pytest.mark.parametrize("engine", ["MULTI_GPU", "FSDP", "DEEPSPEED"])
def test_engines_that_run_as_asked(engine):
    accelerator = SimpleNamespace(distributed_type=DistributedType[engine], num_processes=2)
    asked = {} if engine == "MULTI_GPU" else {f"ACCELERATE_USE_{engine}": "true"}
    check_engine(accelerator, {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1", **asked})
    accelerator.num_processes = 1
    with pytest.raises(ValueError, match="2 processes were started, but Accelerate runs each alone"):
        check_engine(accelerator, {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1", **asked})


ENGINES = {
    "one_gpu": ("NO", 1, "bf16"),
    "ddp": ("MULTI_GPU", 2, "bf16"),
    "cpu_ddp": ("MULTI_GPU", 2, "no"),
    "fsdp2": ("FSDP", 2, "bf16"),
    "deepspeed_zero2": ("DEEPSPEED", 2, "bf16"),
    "deepspeed_zero3": ("DEEPSPEED", 2, "bf16"),
}


def test_accelerate_takes_every_configuration():
    assert sorted(file.stem for file in CONFIGS) == sorted(ENGINES)
    for file in CONFIGS:
        config = load_config_from_file(str(file))
        values = (config.distributed_type.value, config.num_processes, config.mixed_precision)
        assert values == ENGINES[file.stem], file.stem
        parsed, environ = launch("--config_file", str(file))
        assert parsed.num_processes == values[1]
        assert environ["ACCELERATE_MIXED_PRECISION"] == values[2]
        used = {name for name in ("FSDP", "DEEPSPEED") if environ.get(f"ACCELERATE_USE_{name}") == "true"}
        assert used == {values[0]} & {"FSDP", "DEEPSPEED"}
        assert f"accelerate launch --config_file scripts/accelerate/{file.name} scripts/" in file.read_text()


def configured(monkeypatch, name: str, prefix: str) -> None:
    """Sets the variables that a configuration's launch would set for a plugin."""
    _, environ = launch("--config_file", str(ROOT / "scripts" / "accelerate" / f"{name}.yaml"))
    for variable, value in environ.items():
        if variable.startswith(prefix):
            monkeypatch.setenv(variable, value)


@pytest.mark.parametrize(("model_class", "shape"), MODELS, ids=model_name)
def test_fsdp2_shards_block_by_block(model_class, shape, monkeypatch):
    configured(monkeypatch, "fsdp2", "FSDP_")
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.state_dict_type.name) == (2, "SHARDED_STATE_DICT")
    assert plugin.reshard_after_forward is True
    model = model_class(tiny_config(shape))
    plugin.set_auto_wrap_policy(model)
    is_unit = fsdp2_prepare_auto_wrap_policy(plugin, model)
    units = [module for module in model.modules() if is_unit(module)]
    assert {type(unit) for unit in units} >= {TransformerBlock}
    blocks = 4 if shape == "encoder-decoder" else 2
    assert sum(isinstance(unit, TransformerBlock) for unit in units) == blocks


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_stages(stage, monkeypatch):
    configured(monkeypatch, f"deepspeed_zero{stage}", "ACCELERATE_")
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.gradient_clipping) == (stage, 1.0)
    assert plugin.gradient_accumulation_steps == 1
    assert plugin.zero3_save_16bit_model == (stage == 3)


def test_a_folder_takes_one_run_at_a_time(tmp_path):
    message = r"another run is writing into .*run: wait for it, or"
    with locked(tmp_path / "run"), pytest.raises(ValueError, match=message):
        locked(tmp_path / "run").__enter__()
    with locked(tmp_path / "run"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write into .*file: .*; give another --output_dir"):
        locked(tmp_path / "file").__enter__()
