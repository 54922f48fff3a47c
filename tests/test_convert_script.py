"""Tests of scripts/convert.py: folders that strangers load, refusals in one line, and safe files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import load_script, tiny_tokenizer, tiny_tokens
from safetensors.torch import load_file, save_file
from sources import LLAMA, SIZES, SOURCES, build, write
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedTokenizerFast,
)

from hf_transformer_block import folders
from hf_transformer_block.convert import convert_config


ROOT = Path(__file__).parents[1]
# what a translator of Helsinki-NLP has in its config.json besides the fields of the class
OPUS = {
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "bad_words_ids": [[60], [5], [7], [9]],
    "classif_dropout": 0.0,
    "max_length": 24,
    "normalize_before": False,
    "normalize_embedding": False,
    "num_beams": 4,
    "no_repeat_ngram_size": 1,
    "static_position_embeddings": True,
}


@pytest.fixture(scope="module")
def script():
    return load_script("convert")


@pytest.fixture
def run(script, monkeypatch, capsys):
    """Runs scripts/convert.py in this process; returns what it printed, or the one line of its error."""

    def run_script(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
        monkeypatch.setattr(script.transformers.utils.logging, "set_verbosity_error", lambda: None)
        try:
            script.main()
        except SystemExit as exit:
            return exit.code if isinstance(exit.code, str) else capsys.readouterr().out
        return capsys.readouterr().out

    return run_script


SLIDING = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1, "layer_types": None}
WINDOW = "sliding_window=32 cannot be represented; it is below max_position_embeddings=64"


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False cannot"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True cannot"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True cannot"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True cannot"),
        ("gpt2", {"embd_pdrop": 0.2}, "embd_pdrop=0.2 and resid_pdrop=0.1 differ: one dropout serves both"),
        ("gpt2", {"bos_token_id": 50256}, "bos_token_id=50256 is outside the vocabulary (0 to 60)"),
        ("llama", {"pad_token_id": 61}, "pad_token_id=61 is outside the vocabulary (0 to 60)"),
        ("llama", {"sliding_window": 32}, WINDOW),
        ("llama", {"attention_chunk_size": 8}, "attention_chunk_size=8 cannot"),
        ("llama", {"num_local_experts": 4}, "num_local_experts=4 cannot"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling=8.0 cannot"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 cannot"),
        ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier=12.0 cannot"),
        ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder=True cannot"),
        ("llama", {"quantization_config": {"bits": 4}}, "take the checkpoint that was not quantised"),
        (
            "llama",
            {"auto_map": {"AutoModel": "m.M"}},
            "the code beside the weights may compute something else",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "its class rotates whole heads"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            "'mrope_section' is unknown",
        ),
        ("mistral", {"sliding_window": 32}, WINDOW),
        ("qwen2", SLIDING, WINDOW),
        ("qwen3", SLIDING, WINDOW),
        (
            "qwen3",
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types=['full_attention', 'l",
        ),
        ("marian", {"decoder_attention_heads": 2}, "encoder_attention_heads=4 and decoder_attention_heads=2"),
        ("marian", {"decoder_ffn_dim": 64}, "encoder_ffn_dim=48 and decoder_ffn_dim=64 differ"),
        ("marian", {"decoder_vocab_size": 40}, "vocab_size=61 and decoder_vocab_size=40 differ"),
        ("marian", {"normalize_before": True}, "normalize_before=True cannot"),
        ("marian", {"normalize_embedding": True}, "normalize_embedding=True cannot"),
        ("marian", {"add_final_layer_norm": True}, "add_final_layer_norm=True cannot"),
        ("marian", {"static_position_embeddings": False}, "static_position_embeddings=False cannot"),
        ("marian", {"activation_dropout": 0.1}, "it acts in training only: set it to 0"),
        ("marian", {"encoder_layerdrop": 0.1}, "encoder_layerdrop=0.1 cannot"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_cannot_be_represented_is_refused_by_name(kind, fields, message, run, tmp_path):
    _, config_class, tiny = SOURCES[kind]
    config_class(**tiny).save_pretrained(tmp_path / "theirs")
    stored = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**stored, **fields}))
    error = run(tmp_path / "theirs", tmp_path / "ours")
    assert error.startswith(f"convert.py: {kind}: ")
    assert message in error
    assert "\n" not in error
    assert [folder.name for folder in tmp_path.iterdir()] == ["theirs"]
    config = config_class(**tiny)
    for field, value in fields.items():
        setattr(config, field, value)
    if not set(fields) & {"use_sliding_window", "partial_rotary_factor"}:  # which become other fields
        with pytest.raises(ValueError, match=re.escape(message)):
            convert_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("headless", "is no whole LlamaForCausalLM: 1 missing weights, such as lm_head.weight"),
        ("classifier", "is no whole LlamaForCausalLM: 1 missing weights, such as lm_head.weight"),
        ("extra", "1 unexpected weights, such as model.layers.0.self_attn.q_norm.weight"),
        ("narrow", "layers.0.mlp.down_proj.weight is torch.Size([32, 48]), not torch.Size([32, 40])"),
        ("empty", "has broken weights, or others than its config.json: "),
        ("index", "has broken weights, or others than its config.json: "),
        ("corrupt", "has broken weights, or others than its config.json: "),
        ("bert", "model_type='bert' cannot be converted (known: gpt2, llama, marian, mistral, qwen2, qwen3)"),
        ("broken", "is no folder with a model and no id on the Hub"),
        ("nowhere", "is no folder with a model and no id on the Hub"),
        ("tokenizer", "cannot be loaded: "),
        ("sentencepiece", "needs sentencepiece: pip install sentencepiece sacremoses"),
    ],
)
def test_checkpoints_that_are_no_whole_source_are_refused(change, message, run, tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "is_sentencepiece_available", lambda: False)
    folder = tmp_path / "theirs"
    model = {
        "headless": lambda: LlamaModel(LlamaConfig(**LLAMA)),
        "classifier": lambda: LlamaForSequenceClassification(LlamaConfig(**LLAMA)),
        "bert": lambda: BertModel(BertConfig(**SIZES, intermediate_size=48)),
    }.get(change, lambda: build("llama"))()
    model.save_pretrained(folder)
    if change == "extra":
        weights = {**load_file(folder / "model.safetensors")}
        weights["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if change == "narrow":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    if change == "corrupt":
        (folder / "model.safetensors").write_bytes(b"half of a download")
    if change in ("empty", "index"):
        (folder / "model.safetensors").unlink()
    if change == "empty":
        (folder / "pytorch_model.bin").write_bytes(b"")
    if change == "index":
        (folder / "model.safetensors.index.json").write_text("{half")
    if change == "broken":
        (folder / "config.json").write_text("{")
    if change == "tokenizer":
        (folder / "tokenizer.json").write_text("{")
    if change == "sentencepiece":
        (folder / "source.spm").write_text("")
    error = run(tmp_path / "nowhere" if change == "nowhere" else folder, tmp_path / "new" / "ours")
    assert error.startswith("convert.py: ")
    assert message in error
    assert "\n" not in error
    assert not (tmp_path / "new").exists()


def test_the_users_files_are_safe(run, script, tmp_path, monkeypatch):
    build("llama").save_pretrained(tmp_path / "theirs")
    tiny_tokenizer(chat_template="{{ messages }}").save_pretrained(tmp_path / "theirs")
    out = tmp_path / "ours"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert f"{out} exists and is not an empty folder" in run(tmp_path / "theirs", out)
    assert f"{out / 'notes.txt'} exists and is not an empty" in run(tmp_path / "theirs", out / "notes.txt")
    assert "is not an empty folder" in run(tmp_path / "theirs", tmp_path / "theirs")
    assert (out / "notes.txt").read_text() == "mine"
    (out / "notes.txt").unlink()

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
        assert run(tmp_path / "theirs", out) == "convert.py: No space left on device"
    assert not list(out.iterdir())
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["ours", "theirs"]
    assert "saved: " in run(tmp_path / "theirs", out)
    assert (out / "model.safetensors").exists()
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["ours", "theirs"]


def test_help_teaches(run):
    printed = run("--help")
    assert "python scripts/convert.py Helsinki-NLP/opus-mt-en-de runs/en-de" in printed
    assert "SOURCE" in printed
    assert "is refused by name, before anything is written" in printed


STRANGER = """
import json, sys
sys.modules["hf_transformer_block"] = None
import torch
written = {}
for name, (snippet, ids) in json.loads(sys.stdin.read()).items():
    scope = {}
    exec(snippet, scope)
    ids = torch.tensor(ids)
    model = scope["model"]
    tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False)
    texts = scope["tokenizer"].batch_decode(tokens) if "tokenizer" in scope else None
    written[name] = tokens.tolist(), texts, type(model).__module__
print(json.dumps(written))
"""


def test_the_command_makes_folders_that_strangers_load(tmp_path):
    llama, marian = build("llama"), build("marian")
    llama.generation_config.update(max_new_tokens=12, eos_token_id=None)
    for model, name in ((llama, "llama"), (marian, "marian")):
        model.save_pretrained(tmp_path / name)
    tiny_tokenizer(chat_template="{{ messages }}").save_pretrained(tmp_path / "llama")
    (tmp_path / "marian" / "generation_config.json").unlink()  # older ones keep its fields in config.json
    stored = json.loads((tmp_path / "marian" / "config.json").read_text())
    (tmp_path / "marian" / "config.json").write_text(json.dumps({**stored, **OPUS}))
    marian = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "marian")
    assert (marian.generation_config.num_beams, marian.generation_config.max_length) == (4, 24)

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": tmp_path, "env": environment, "text": True, "stdin": subprocess.PIPE}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, str(ROOT / "scripts" / "convert.py")]
    names = ["llama", "marian"]
    processes = [subprocess.Popen([*command, name, f"new/{name}"], **options) for name in names]
    jobs, ids = {}, tiny_tokens(2, 9)
    for name, process in zip(names, processes, strict=True):
        printed, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        report, snippet = printed.split("\n\n", 1)
        assert [line.split(":")[0] for line in report.split("\n")] == [
            "tokenizer",
            "source",
            "converted",
            "saved",
        ]
        jobs[name] = (snippet, ids.tolist())
    assert "tokenizer: none" in report
    done = subprocess.run(
        [sys.executable, "-c", STRANGER],
        **{key: value for key, value in options.items() if key != "stdin"},
        input=json.dumps(jobs),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads(done.stdout.splitlines()[-1])
    for name, source in (("llama", llama), ("marian", marian)):
        tokens, _, module = written[name]
        assert tokens == write(source, ids).tolist()
        assert len(set(sum(tokens, []))) > 6
        assert module.startswith("transformers_modules.")
    assert written["llama"][1] == tiny_tokenizer(chat_template="{{ messages }}").batch_decode(
        written["llama"][0]
    )
    assert {file.name for file in (tmp_path / "new" / "marian").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "configuration_hf_transformer_block.py",
        "modeling_hf_transformer_block.py",
        "pipeline_hf_transformer_block.py",
    }
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("llama", "new/llama")]
    assert len({tuple(tokenizer("w5 w7 unheard </s>")["input_ids"]) for tokenizer in tokenizers}) == 1
    assert tokenizers[1].chat_template == "{{ messages }}"


def test_the_first_gpt2_checkpoints_store_a_constant(run, tmp_path):
    build("gpt2").save_pretrained(tmp_path / "theirs")
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    stored["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(stored, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    assert "same logits in float32" in run(tmp_path / "theirs", tmp_path / "ours")
    assert (tmp_path / "ours" / "model.safetensors").exists()


def test_an_interrupted_conversion_says_so_and_writes_nothing(run, script, tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    build("llama").save_pretrained(tmp_path / "theirs")
    monkeypatch.setattr(script, "convert", interrupt)
    assert (
        run(tmp_path / "theirs", tmp_path / "new" / "ours") == "convert.py: interrupted, nothing is written"
    )
    assert not (tmp_path / "new").exists()
