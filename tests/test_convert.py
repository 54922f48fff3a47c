"""Tests that checkpoints of transformers become folders of ours: the same text, or a refusal by name."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_tokens
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MarianConfig,
    MarianMTModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_transformer_block.convert import convert, convert_config


ROOT = Path(__file__).parents[1]
SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 60, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **SIZES,
    **SPECIAL,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.1,
}
GPT2 = {
    **SIZES,
    **SPECIAL,
    "n_positions": 64,
    "n_inner": 40,
    "activation_function": "relu",
    "layer_norm_epsilon": 0.1,
}
MARIAN = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "activation_function": "swish",
    "scale_embedding": True,
    "max_position_embeddings": 64,
    "pad_token_id": 60,
    "decoder_start_token_id": 60,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
}
SOURCES = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2),
    "llama": (LlamaForCausalLM, LlamaConfig, LLAMA),
    "mistral": (MistralForCausalLM, MistralConfig, {**LLAMA, "sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {**LLAMA, "tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**LLAMA, "head_dim": 12}),
    "marian": (MarianMTModel, MarianConfig, MARIAN),
}
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


@torch.no_grad()
def build(kind: str, **kwargs):
    """Returns a source with every weight drawn; the larger, the more the written tokens vary."""
    model_class, config_class, fields = SOURCES[kind]
    model = model_class(config_class(**{**fields, **kwargs}))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1))
    return model.eval()


def auto_class(model):
    return AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    inputs = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **inputs).logits


def write(model, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    mask = torch.ones_like(ids)
    return model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **kwargs)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<unk>": 3, "<pad>": 60, "<s>": 1, "</s>": 2}
    words |= {f"w{index}": index for index in range(61) if index not in words.values()}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="{{ messages }}", **special)


@pytest.fixture(scope="module")
def script():
    """scripts/convert.py as a module."""
    spec = importlib.util.spec_from_file_location("convert_script", ROOT / "scripts" / "convert.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


@pytest.mark.parametrize("kind", SOURCES)
def test_a_saved_copy_writes_the_sources_text(kind, tmp_path):
    build(kind).save_pretrained(tmp_path / "theirs")
    theirs = auto_class(build(kind)).from_pretrained(tmp_path / "theirs")
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    ours = convert(theirs)
    assert type(ours).__name__.startswith("TransformerBlockFor")
    assert not ours.training
    ours.save_pretrained(tmp_path / "ours")
    loaded = auto_class(theirs).from_pretrained(tmp_path / "ours")
    assert type(loaded) is type(ours)
    ids = tiny_tokens(2, 12)
    expected = logits(theirs, ids)
    assert expected.std() > 0.3
    for model in (ours, loaded):
        assert_close(logits(model, ids), expected, rtol=1e-5, atol=1e-5)
    varied = {"no_repeat_ngram_size": 1} if kind == "marian" else {"eos_token_id": None}
    for beams in (1, 3):
        written = [
            write(model, ids, max_new_tokens=15, num_beams=beams, **varied) for model in (loaded, theirs)
        ]
        assert torch.equal(*written)
        assert len(written[0][:, -15:].unique()) > 4
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.fill_(0)
    after = theirs.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)  # the source keeps its own weights


def test_generation_settings_are_the_sources():
    theirs = build("marian")
    theirs.generation_config.update(num_beams=3, bad_words_ids=[[60], [5]], max_length=20, length_penalty=0.6)
    ours = convert(theirs)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert ours.generation_config is not theirs.generation_config
    ids = tiny_tokens(3, 9)
    assert torch.equal(write(ours, ids), write(theirs, ids))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "marian"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_dtypes_are_kept(kind, dtype, tmp_path):
    build(kind).to(dtype).save_pretrained(tmp_path / "theirs")
    auto = auto_class(build(kind))
    ours = convert(auto.from_pretrained(tmp_path / "theirs"))
    ours.save_pretrained(tmp_path / "ours")
    assert {tensor.dtype for tensor in load_file(tmp_path / "ours" / "model.safetensors").values()} == {dtype}
    assert auto.from_pretrained(tmp_path / "ours").dtype == ours.dtype == dtype
    exact = [auto.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("ours", "theirs")]
    ids = tiny_tokens(2, 12)
    assert_close(*(logits(model, ids) for model in exact), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.2, "initializer_range": 0.05}),
        ("llama", {"attention_dropout": 0.2, "initializer_range": 0.05}),
        ("marian", {"dropout": 0.3, "attention_dropout": 0.2, "init_std": 0.05}),
    ],
)
def test_what_acts_in_training_or_generation_only_is_kept(kind, fields):
    _, config_class, tiny = SOURCES[kind]
    config = config_class(**{**tiny, **fields, "use_cache": False, "eos_token_id": [2, 7]})
    ours = convert_config(config)
    dropout = 0.0 if kind == "llama" else 0.3
    assert (ours.dropout, ours.attention_dropout, ours.initializer_range) == (dropout, 0.2, 0.05)
    assert (ours.eos_token_id, ours.pad_token_id, ours.use_cache) == ([2, 7], 60, False)
    assert ours.bos_token_id == config.bos_token_id
    assert ours.decoder_start_token_id == (60 if kind == "marian" else None)
    assert ours.max_position_embeddings == 64


def test_the_first_llamas_have_no_padding_token():
    model_class, config_class, tiny = SOURCES["llama"]
    llama = model_class(config_class(**{**tiny, "pad_token_id": None}))
    llama.config.pad_token_id = llama.generation_config.pad_token_id = -1
    ours = convert(llama)
    assert (ours.config.pad_token_id, ours.generation_config.pad_token_id) == (None, None)


def test_the_mode_is_kept():
    theirs = build("llama").train()
    assert convert(theirs).training
    assert theirs.training


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
    ("kind", "fields"),
    [
        ("mistral", {"sliding_window": 64}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}),
    ],
)
def test_windows_that_hide_nothing_are_none(kind, fields):
    theirs = build(kind, **fields)
    ours = convert(theirs)
    assert getattr(ours.config, "sliding_window", None) is None
    ids = tiny_tokens(2, 40)
    assert_close(logits(ours, ids), logits(theirs, ids), rtol=1e-5, atol=1e-5)
    written = [write(model, ids, max_new_tokens=20, eos_token_id=None) for model in (ours, theirs)]
    assert torch.equal(*written)


def test_models_that_are_no_whole_source_are_refused():
    class Other(LlamaForCausalLM):
        pass

    config = LlamaConfig(**LLAMA)
    mixed, cast = build("llama"), build("llama").bfloat16()
    mixed.lm_head.half()
    for model, message in (
        (Other(config), "Other cannot be converted (known: GPT2LMHeadModel, LlamaForCausalLM, MarianMTModel"),
        (LlamaModel(config), "LlamaModel cannot be converted"),
        (BertModel(BertConfig(**SIZES, intermediate_size=48)), "BertModel cannot be converted"),
        (mixed, "the weights are of torch.float16 and torch.float32: give them one dtype"),
        (cast, "model.rotary_emb.inv_freq was rounded to torch.bfloat16"),
        (LlamaForCausalLM(config).to("meta"), "some weights are offloaded"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            convert(model)


def test_another_computation_is_refused():
    theirs = build("llama")
    theirs.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: 1.01 * output)
    with pytest.raises(
        ValueError, match="the converted model is not the source: logits of up to .* differ by"
    ):
        convert(theirs)
    theirs = build("marian")
    theirs.model.decoder.embed_positions.weight[3, 5] += 0.01
    with pytest.raises(
        ValueError, match="decoder.embed_positions.weight differs by 0.01 from the sinusoidal"
    ):
        convert(theirs)
    theirs = build("llama")
    theirs.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="unexpected keys: model.layers.0.mlp.extra.bias"):
        convert(theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("headless", "is no whole LlamaForCausalLM: 1 missing weights, such as lm_head.weight"),
        ("classifier", "is no whole LlamaForCausalLM: 1 missing weights, such as lm_head.weight"),
        ("extra", "1 unexpected weights, such as model.layers.0.self_attn.q_norm.weight"),
        ("narrow", "has broken weights, or others than its config.json: "),
        ("corrupt", "has broken weights, or others than its config.json: "),
        ("bert", "model_type='bert' cannot be converted (known: gpt2, llama, marian, mistral, qwen2, qwen3)"),
        ("broken", "is no folder with a checkpoint and no id on the Hub"),
        ("nowhere", "is no folder with a checkpoint and no id on the Hub"),
        ("tokenizer", "cannot be loaded: "),
        ("sentencepiece", "needs sentencepiece: pip install sentencepiece sacremoses"),
    ],
)
def test_checkpoints_that_are_no_whole_source_are_refused(
    change, message, run, script, tmp_path, monkeypatch
):
    monkeypatch.setattr(script, "is_sentencepiece_available", lambda: False)
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
    make_tokenizer().save_pretrained(tmp_path / "theirs")
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
    make_tokenizer().save_pretrained(tmp_path / "llama")
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
    assert written["llama"][1] == make_tokenizer().batch_decode(written["llama"][0])
    assert {file.name for file in (tmp_path / "new" / "marian").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "configuration_hf_transformer_block.py",
        "modeling_hf_transformer_block.py",
    }
    tokenizers = [AutoTokenizer.from_pretrained(tmp_path / folder) for folder in ("llama", "new/llama")]
    assert len({tuple(tokenizer("w5 w7 unheard </s>")["input_ids"]) for tokenizer in tokenizers}) == 1
    assert tokenizers[1].chat_template == "{{ messages }}"
