"""
Tests of models spread over two real processes (gloo): FSDP2 and tensor parallelism equal one process.

One `torchrun` of `distributed_worker.py` runs all cases of a table; the tests compare what each rank found
with this process, and one more process, without this package, loads the folders that sharded models saved.
"""

import itertools
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CLASSES, LANGUAGE_HEADS, tiny_inputs, tiny_labels, tiny_preset, tiny_tokens
from distributed_worker import WORLD_SIZE, outputs_of, state_of, tensors, train
from remote_loader import run as outputs_in_evaluation
from remote_loader import strangers_process
from safetensors.torch import load_file
from torch.testing import assert_close

import hf_transformer_block
from hf_transformer_block.modeling_hf_transformer_block import CACHE


WORKER = Path(__file__).with_name("distributed_worker.py")
MODERN = {"preset": "modern", "num_key_value_heads": 2}
LEARNED = {"position_embedding": "learned"}
QK_NORM = {"qk_norm": True}
BIAS = {"lm_head_bias": True}
UNTIED = {"tie_word_embeddings": False, **BIAS}
TUTORIAL = {"preset": "tutorial"}
ODD = {"vocab_size": 61}
# without repetitions every step asks for another token
GENERATION = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "no_repeat_ngram_size": 1}
CAUSAL, MASKED, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
CLASSIFIER = "AutoModelForSequenceClassification"
BY_HAND, BY_TRANSFORMERS = "shard_by_hand", "shard_by_transformers"

# name: how it is loaded, architecture, auto class, configuration
SPLIT = {
    "decoder": ("remote", "decoder", CAUSAL, MODERN | QK_NORM),
    "decoder-untied": ("direct", "decoder", CAUSAL, UNTIED),
    "decoder-odd": ("direct", "decoder", CAUSAL, MODERN | ODD),
    "encoder": ("remote", "encoder", MASKED, BIAS),
    "encoder-tutorial": ("direct", "encoder", MASKED, TUTORIAL),
    "encoder-classifier": ("direct", "encoder", CLASSIFIER, LEARNED | QK_NORM),
    "encoder-decoder": ("remote", "encoder-decoder", SEQ2SEQ, {"num_decoder_layers": 1}),
    "encoder-decoder-untied": ("direct", "encoder-decoder", SEQ2SEQ, MODERN | QK_NORM | UNTIED),
}
# name: the same, then the worker's function, the units besides blocks and root, the optimizer
SHARDED = {
    "decoder": ("remote", "decoder", CAUSAL, MODERN | ODD, BY_HAND, [], "AdamW"),
    "encoder-untied-head": ("direct", "encoder", MASKED, UNTIED | ODD, BY_HAND, ["lm_head"], "SGD"),
    "encoder-decoder": ("remote", "encoder-decoder", SEQ2SEQ, ODD, BY_HAND, [], "SGD"),
    "decoder-untied-plan": ("remote", "decoder", CAUSAL, MODERN | UNTIED | ODD, BY_TRANSFORMERS, None, "SGD"),
    "encoder-plan": ("direct", "encoder", MASKED, LEARNED, BY_TRANSFORMERS, None, "AdamW"),
    "encoder-decoder-plan": ("direct", "encoder-decoder", SEQ2SEQ, BIAS, BY_TRANSFORMERS, None, "AdamW"),
}


def every_split() -> dict:
    """Returns every class of every shape, and every language head tied and untied, loaded both ways."""
    table = {}
    for source, (name, preset) in itertools.product(
        ("remote", "direct"), {"vaswani": {}, "modern": MODERN}.items()
    ):
        for architecture, autos in CLASSES.items():
            for auto in autos:
                ways = {"tied": BIAS, "untied": UNTIED} if auto in LANGUAGE_HEADS.values() else {"": {}}
                for way, tie in ways.items():
                    key = f"{source}-{architecture}-{auto}-{name}-{way}"
                    table[key] = (source, architecture, auto, {**preset, **tie, "qk_norm": name == "modern"})
    return table


def every_sharding() -> dict:
    """Returns every language head, tied and untied, in every way to shard it, loaded both ways."""
    table = {}
    ways = {"root": (BY_HAND, []), "head": (BY_HAND, ["lm_head"]), "plan": (BY_TRANSFORMERS, None)}
    for source, (architecture, auto) in itertools.product(("remote", "direct"), LANGUAGE_HEADS.items()):
        for (name, tie), (way, (job, units)) in itertools.product(
            {"tied": {}, "untied": UNTIED}.items(), ways.items()
        ):
            if (name, way) == ("tied", "head"):
                continue  # torch refuses to put one weight into two units
            preset = MODERN if source == "direct" else {}
            optimizer = "SGD" if source == "direct" else "AdamW"
            key = f"{source}-{architecture}-{name}-{way}"
            table[key] = (source, architecture, auto, preset | tie, job, units, optimizer)
    return table


TABLES = {
    "split": SPLIT,
    "every_split": every_split(),
    "sharded": SHARDED,
    "every_sharding": every_sharding(),
}


def cases(*tables: str):
    """Runs a test over the cases of the tables; those of every class or head are slow."""
    return pytest.mark.parametrize(
        ("table", "name"),
        [
            pytest.param(table, name, marks=[pytest.mark.slow] if table.startswith("every") else [])
            for table in tables
            for name in TABLES[table]
        ],
    )


def build(architecture: str, auto: str, config: dict):
    """Returns a model in which every bias matters."""
    config = tiny_preset(shape=architecture, **{"preset": "vaswani", "vocab_size": 62, **config})
    model = getattr(hf_transformer_block, CLASSES[architecture][auto])(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    return model


def lists(values: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: value.tolist() for name, value in values.items()}


def prepare(folder: Path, source: str, architecture: str, auto: str, config: dict, *sharding):
    """Saves a case's model; returns it with the jobs of the ranks and of the stranger."""
    model = build(architecture, auto, config)
    model.save_pretrained(folder / "saved")
    inputs = lists(tiny_inputs(model.config, batch=4))
    load = ["load", {"folder": str(folder / "out"), "autos": [auto], "inputs": inputs}]
    labels = {} if auto == "AutoModel" else tiny_labels(model, tensors(inputs))
    arguments = {
        "folder": str(folder / "saved"),
        "auto": auto,
        "class_name": None if source == "remote" else type(model).__name__,
        "out": str(folder / "out"),
    }
    if sharding:
        job, units, arguments["optimizer"] = sharding
        arguments |= {} if units is None else {"units": units}
        labels["labels"][0, -3:] = -100  # the ranks have unlike numbers of labels
    else:
        job = "split"
        if model.can_generate():
            arguments |= {"prompts": lists({"input_ids": tiny_tokens(3, 7)}), "options": GENERATION}
    arguments["inputs"] = inputs | lists(labels)
    return SimpleNamespace(model=model, folder=folder, job=[job, arguments], load=load)


def launch(folder: Path, jobs: dict) -> list[dict]:
    """Returns what each of two ranks found."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    try:
        process = subprocess.run(
            [sys.executable, *torchrun, str(WORLD_SIZE), str(WORKER), "jobs.json", "results"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"the ranks did not end: {late.stderr[-5000:]}")
    assert process.returncode == 0, f"the ranks failed: {process.stderr[-5000:]}"
    return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in range(WORLD_SIZE)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Runs a table's cases on the ranks, and loads what they sharded, when a test first asks for them."""

    @cache
    def run(table: str) -> dict[str, SimpleNamespace]:
        folder, rows = tmp_path_factory.mktemp(table), TABLES[table]
        torch.manual_seed(0)
        prepared = {name: prepare(folder / f"case_{n}", *rows[name]) for n, name in enumerate(rows)}
        # once the package is imported, transformers prefers it to the code of a folder
        remote_first = sorted(rows, key=lambda name: rows[name][0] != "remote")
        found = launch(folder, {name: prepared[name].job for name in remote_first})
        jobs = {name: case.load for name, case in prepared.items() if "optimizer" in case.job[1]}
        strangers = strangers_process(folder, jobs)["found"] if jobs else {}
        for name, case in prepared.items():
            case.ranks, case.stranger = [results[name] for results in found], strangers.get(name)
        return prepared

    return run


def assert_ran(case: SimpleNamespace) -> None:
    for found in case.ranks:
        assert "error" not in found, found["error"]
        # torch says so of any sharded module that returns logits
        assert [text for text in found["messages"] if "returned a view tensor" not in text] == []


def assert_equal_tensors(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def assert_saved(case: SimpleNamespace) -> None:
    """The ranks saved what one process saves: the same files, and all weights of the model whole."""
    saved, out = case.folder / "saved", case.folder / "out"
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in saved.iterdir())
    texts = [path.name for path in saved.iterdir() if path.suffix in (".py", ".json")]
    assert len(texts) >= 3
    assert [name for name in texts if (out / name).read_bytes() != (saved / name).read_bytes()] == []
    stored, state = load_file(out / "model.safetensors"), case.model.state_dict()
    assert stored.keys() >= load_file(saved / "model.safetensors").keys()  # some tied tables are stored twice
    assert_equal_tensors(stored, {name: state[name] for name in stored})


@cases("split", "every_split")
def test_tensor_parallel_equals_one_process(ranks, table, name):
    case = ranks(table)[name]
    model, arguments = case.model, case.job[1]
    if hasattr(model, "lm_head") and model.config.vocab_size % WORLD_SIZE and CACHE != "cache":
        for found in case.ranks:  # newer versions of transformers split any vocabulary
            assert "must be divisible by the tensor parallel size" in found["error"]
        return
    assert_ran(case)
    state = state_of(model)
    expected = outputs_of(model, arguments["inputs"], arguments.get("prompts"), arguments.get("options"))
    kinds = {"up_proj", "down_proj"}
    kinds |= {"q_proj", "k_proj", "v_proj", "o_proj"} if model.config.block_style != "tutorial" else set()
    kinds |= {"lm_head"} if hasattr(model, "lm_head") and not model.config.tie_word_embeddings else set()
    for found in case.ranks:
        assert {name.split(".")[-2] for name in found["sharded"]} >= kinds
        assert_equal_tensors(found["state"], state)
        assert {"outputs", *expected} <= found.keys()
        for kind in {"outputs", "loss", "gradients"} & expected.keys():
            assert_close(found[kind], expected[kind], rtol=0, atol=5e-6)
        if "generated" in expected:
            assert torch.equal(found["generated"], expected["generated"])
            assert len(expected["generated"][0].unique()) >= 12
    assert_saved(case)


@cases("sharded", "every_sharding")
def test_sharded_training_equals_one_process(ranks, table, name):
    case = ranks(table)[name]
    assert_ran(case)
    model, arguments = case.model, case.job[1]
    losses = train(model, arguments["inputs"], arguments["optimizer"])
    assert losses[-1] < losses[0] - 0.1
    trained = state_of(model)
    for found in case.ranks:
        assert found["blocks"] == model.config.num_hidden_layers + (model.config.num_decoder_layers or 0)
        assert found["losses"] == pytest.approx(losses, rel=0, abs=2e-6)
        assert_close(found["state"], trained, rtol=0, atol=2e-6)
    model.load_state_dict(case.ranks[0]["state"], strict=False)  # tied tables and buffers have one name each
    assert_equal_tensors(state_of(model), case.ranks[1]["state"])
    assert_saved(case)
    assert "error" not in case.stranger, case.stranger["error"]
    loaded = case.stranger[arguments["auto"]]
    assert loaded["class"] == type(model).__name__
    assert loaded["module"].startswith("transformers_modules.")
    assert not [*loaded["missing_keys"], *loaded["mismatched_keys"], *loaded["error_msgs"]]
    assert_equal_tensors({**loaded["parameters"], **loaded["buffers"]}, case.ranks[0]["state"])
    assert_equal_tensors(loaded["outputs"], outputs_in_evaluation(model.eval(), case.load[1]["inputs"]))
