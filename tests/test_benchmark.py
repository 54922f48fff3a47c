"""Tests of scripts/benchmark.py: what it compares, what it makes of the times, and one run of it."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import load_script, tiny_config
from torch.utils.flop_counter import FlopCounterMode

from hf_transformer_block import TransformerBlockForCausalLM
from hf_transformer_block.tutorial import TransformerBlock
from hf_transformer_block.vocabulary import train_tokenizer


SCRIPTS = Path(__file__).parents[1] / "scripts"
pytest.importorskip("x_transformers", reason='runs after pip install "hf_transformer_block[bench]"')


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return load_script("benchmark")


@pytest.fixture
def peers(benchmark):
    return benchmark.peers


@pytest.fixture
def shape(peers):
    return peers.Shape(layers=2, width=32, heads=2, inner=64, vocabulary=50, batch=3, length=7)


def flops(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["gpt2", "marian"])
def test_the_bare_products_are_those_of_a_training_step(peers, shape, kind):
    model = getattr(peers, kind)(shape)
    model.set_attn_implementation("eager")
    step = peers.train_step(model, shape, "cpu", torch.float32)
    assert flops(peers.products(shape, "cpu", torch.float32, is_pair=kind == "marian")) == flops(step)


def test_contestants_have_one_size(peers, shape):
    for build in (peers.gpt2, peers.llama, peers.marian):  # a Marian's table of positions is never trained
        theirs = build(shape)
        assert peers.ours(theirs).num_parameters() == theirs.num_parameters(only_trainable=True)
    wide = replace(shape, width=64, inner=256, layers=4)
    encoders = [
        peers.our_encoder(wide).model.layers,
        peers.bert(wide).bert.encoder,
        peers.TorchEncoder(wide).encoder,
    ]
    assert len({sum(weight.numel() for weight in encoder.parameters()) for encoder in encoders}) == 1


@pytest.mark.parametrize("kind", ["bert", "our_encoder", "TorchEncoder", "XTransformers", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_learns(peers, shape, kind, dtype):
    model = getattr(peers, kind)(shape)
    step = peers.train_step(model, shape, "cpu", dtype)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    step()
    changed = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
    assert len(changed) > 0.8 * len(before)


def test_translations_and_continuations_have_the_length_asked_for(peers, shape):
    model = peers.ours(peers.marian(shape))
    assert peers.generate(model, shape, "cpu", 5, num_beams=2)().shape == (3, 6)
    assert peers.generate(peers.llama(shape), shape, "cpu", 5)().shape == (3, 12)
    for folder in (peers.ctranslate2_of_marian(shape), peers.ctranslate2_of_ours(shape)):
        results = peers.translate_by_ctranslate2(folder, shape, "cpu", 5, 2)()
        assert [len(result.hypotheses[0]) for result in results] == [5, 5, 5]


def test_the_block_is_the_tutorials(peers, shape):
    theirs, ours = peers.TutorialBlock(shape.width, shape.heads, 2), TransformerBlock(32, 2, 0.0, 2)
    theirs.load_state_dict({name.removeprefix("attention."): w for name, w in ours.state_dict().items()})
    inputs = torch.randn(2, 9, shape.width)
    torch.testing.assert_close(theirs(inputs), ours(inputs, inputs, inputs, None), rtol=1e-5, atol=1e-5)
    peers.our_block(shape, "cpu")()


def test_ratios_by_hand(benchmark):
    figures = {
        "A": {"median": 3.0, "process_mib": 50.0, "tensors_mib": 30.0},
        "B": {"median": 2.0, "process_mib": 80.0, "tensors_mib": 40.0},
        "ours, slow": {"median": 9.0, "process_mib": 1.0, "tensors_mib": 1.0},
        "ours": {"median": 1.0, "process_mib": 20.0, "tensors_mib": 20.0},
        "limit": {"median": 0.5},
    }
    assert benchmark.summarize(figures) == {
        "peer / ours": 2.0,
        "limit / ours": 0.5,
        "process: memory of ours / of that peer": 0.25,
        "tensors: memory of ours / of that peer": 0.5,
    }


def test_the_peak_of_tensors_is_counted(benchmark):
    def run() -> None:
        first = torch.ones(2**20)  # 4 MiB
        second = first + 1
        del first
        torch.ones(2**18) + second[: 2**18]

    assert benchmark.peak_of_tensors(run) == pytest.approx(8, abs=0.1)


def test_the_bare_products_of_a_token_are_those_of_the_weights(peers, shape):
    model = peers.gpt2(shape)
    weights = [w for name, w in model.named_parameters() if w.ndim == 2 and "wpe" not in name]
    expected = 2 * shape.batch * sum(weight.numel() for weight in weights)
    assert flops(peers.products_of_tokens(shape, "cpu", 3)) == 3 * expected


def test_contestants_take_turns(benchmark):
    order = []
    contestants = {name: lambda name=name: lambda: order.append(name) for name in ("A", "ours")}
    figures = benchmark.measure(benchmark.Case("case", "nothing", contestants), "cpu", 0.0)
    assert order == ["A", "ours"] * 4  # the first turn is not counted
    assert figures["ours"]["rounds"] == 3


@pytest.mark.slow
def test_a_run_writes_what_it_prints(tmp_path):
    file = tmp_path / "figures.json"
    flags = ["--threads", "1", "--output_file", file]
    command = [sys.executable, SCRIPTS / "benchmark.py", "block-2048", *flags]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    results = json.loads(file.read_text())
    assert results["machine"]["threads"] == 1
    assert "benchmark.py" in results["machine"]["command"]
    case = results["cases"]["block-2048"]
    assert set(case["figures"]) == {"tutorial", "ours"}
    for kind in ("process_mib", "tensors_mib"):
        assert case["figures"]["tutorial"][kind] > 200  # its scores alone: 8 heads of 2048 x 2048
    assert f"peer / ours {case['ratios']['peer / ours']:.2f}" in run.stdout


def test_a_case_that_is_none_is_told():
    run = subprocess.run(
        [sys.executable, SCRIPTS / "benchmark.py", "decode-2"], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "there is no case 'decode-2'; known: train-decoder" in run.stderr


@pytest.mark.slow
def test_the_call_that_compiles_writes_what_the_plain_one_does(tmp_path):
    tokenizer = train_tokenizer(iter(["The cat sat on the mat."] * 9), "char", 60, 64, "decoder")
    tokenizer.save_pretrained(tmp_path / "runs" / "writer")
    model = TransformerBlockForCausalLM(tiny_config("decoder", vocab_size=len(tokenizer))).eval()
    model.save_pretrained(tmp_path / "runs" / "writer")
    page = (SCRIPTS.parent / "docs" / "speed.md").read_text("utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = f"{code}\nprint(getattr(model, '_compiled_call', None) is not None)\n"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    *written, is_compiled = run.stdout.splitlines()
    plain = model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=20)
    assert "\n".join(written) == tokenizer.decode(plain[0], skip_special_tokens=True)
    assert is_compiled == "True"
