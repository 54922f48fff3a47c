"""
Tests that a saved folder is all a stranger needs: a fresh process without this package and without a network.

One process (`remote_loader.py`) loads every folder once; the tests compare what it found with this process.
"""

import importlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import CLASSES, LANGUAGE_HEADS, tiny_tokenizer
from remote_loader import run, strangers_process
from safetensors import safe_open
from transformers import AutoModel, BertConfig, BertModel

import hf_transformer_block
from hf_transformer_block import TransformerBlockConfig, TransformerBlockModel
from hf_transformer_block import configuration_hf_transformer_block as configuration


CODE = {f"{kind}_hf_transformer_block.py" for kind in ("configuration", "modeling", "pipeline")}
GENERATIVE = {"decoder": "AutoModelForCausalLM", "encoder-decoder": "AutoModelForSeq2SeqLM"}
HEAD_WEIGHTS = {
    "AutoModel": set(),
    "AutoModelForSequenceClassification": {"classifier.weight", "classifier.bias"},
    "AutoModelForTokenClassification": {"classifier.weight", "classifier.bias"},
    "AutoModelForQuestionAnswering": {"qa_outputs.weight", "qa_outputs.bias"},
}
STYLES = {
    "post_norm": {},
    "pre_norm": {"norm_type": "rms_norm", "gated_mlp": True, "num_key_value_heads": 2, "qk_norm": True},
    "tutorial": {},
}
POSITIONS = {"sinusoidal": {}, "learned": {"tie_word_embeddings": False}, "rotary": {}}
EVERY_AUTO_CLASS = [("post_norm", "learned"), ("pre_norm", "rotary")]  # an untied and a tied model
VARIANTS = [
    (architecture, auto, style, position)
    for architecture, autos in CLASSES.items()
    for auto in autos
    for style in STYLES
    for position in POSITIONS
]
NAMES = ["my.model-v1.5", "7b_model", "with two spaces", "slash/", "."]
SOURCE = {
    "input_ids": [[5, 9, 3, 31, 12, 7, 2], [8, 30, 6, 2, 0, 0, 0]],
    "attention_mask": [[1] * 7, [1] * 4 + [0] * 3],
}
TARGET = {"decoder_input_ids": [[1, 9, 4, 17, 40], [1, 21, 22, 23, 3]]}
INPUTS = {"encoder": SOURCE, "decoder": SOURCE, "encoder-decoder": {**SOURCE, **TARGET}}
PROMPTS = {
    "input_ids": [[5, 9, 3, 31, 12, 7, 28], [0, 0, 0, 8, 30, 6, 11]],
    "attention_mask": [[1] * 7, [0] * 3 + [1] * 4],
}
GENERATION = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
TEXT = "w5 w6 w7 w8 w9 w10"
TEXTS = [TEXT, "w31 w12", "w40 w41 w42 w6"]


USER_FILES = {
    "__init__.py": "",
    "scale.py": "SCALE = 2.0\n",
    "louder.py": """from .modeling_hf_transformer_block import TransformerBlockForCausalLM
from .scale import SCALE


class LouderForCausalLM(TransformerBlockForCausalLM):
    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * SCALE
        return outputs


LouderForCausalLM.register_for_auto_class("AutoModelForCausalLM")
""",
}


def folder_of(architecture, auto, style="pre_norm", position="rotary"):
    return f"{architecture}_{auto}_{style}_{position}"


def build(architecture, auto, style="pre_norm", position="rotary"):
    """Returns a model of some ten thousand parameters whose outputs vary, in evaluation mode."""
    torch.manual_seed(6 + len(architecture) + len(auto))
    config = TransformerBlockConfig(
        architecture=architecture,
        block_style=style,
        position_embedding=position,
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_decoder_layers=1 if architecture == "encoder-decoder" else None,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.3,
        num_labels=3,
        **STYLES[style],
        **POSITIONS[position],
    )
    return getattr(hf_transformer_block, CLASSES[architecture][auto])(config).eval()


def head_weights(auto, config):
    """Returns the weights that belong to the head; a tied output projection is the embedding."""
    return HEAD_WEIGHTS.get(auto, set() if config.tie_word_embeddings else {"lm_head.weight"})


def autos_to_load(architecture, auto, style, position):
    """Returns the auto classes to load: the base and the saved class, and for some variants all that fit."""
    if (style, position) in EVERY_AUTO_CLASS:
        return ["AutoConfig", *CLASSES[architecture]]
    return sorted({"AutoModel", auto})


def build_user_model(folder):
    """Returns a model of a package that a user made of our three files and a subclass."""
    package = folder / "loudness"
    package.mkdir()
    for name, text in USER_FILES.items():
        (package / name).write_text(text)
    for name in CODE:
        shutil.copy(Path(hf_transformer_block.__file__).with_name(name), package)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        module = importlib.import_module("loudness.louder")
    sizes = build("decoder", "AutoModelForCausalLM").config.to_diff_dict()
    config = module.LouderForCausalLM.config_class(**sizes)
    return module.LouderForCausalLM(config).eval()


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("remote")


@pytest.fixture(scope="module")
def saved(folders):
    """Every variant, saved; the models stay here to compare with."""
    built = {variant: build(*variant) for variant in VARIANTS}
    for variant, model in built.items():
        model.save_pretrained(folders / folder_of(*variant))
    return built


@pytest.fixture(scope="module")
def special(folders):
    """Folders with odd names, shards, leftovers of an earlier save, a tokenizer or a newer format."""
    decoder = build("decoder", "AutoModelForCausalLM")
    kept = {}
    for name in NAMES:
        decoder.save_pretrained(folders / "names" / name)
        kept[name] = decoder
    for name in ("sharded", "stale"):
        kept[name] = build("encoder-decoder", "AutoModelForSeq2SeqLM", "post_norm", "learned")
        kept[name].save_pretrained(folders / name, max_shard_size="10KB")
    with torch.no_grad():
        kept["stale"].lm_head.weight.mul_(-1)
    kept["stale"].save_pretrained(folders / "stale")
    for name in ("once", "twice", "tokenizer", "newer"):
        decoder.save_pretrained(folders / name)
        kept[name] = decoder
    tiny_tokenizer().save_pretrained(folders / "tokenizer")
    change_config(folders / "newer", format_version=2)
    kept["translator"] = build("encoder-decoder", "AutoModelForSeq2SeqLM", "pre_norm", "learned")
    kept["translator"].save_pretrained(folders / "translator")
    tiny_tokenizer().save_pretrained(folders / "translator")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    kept["built-in"] = BertModel(BertConfig(vocab_size=50, **sizes)).eval()
    kept["built-in"].save_pretrained(folders / "built-in")
    kept["user"] = build_user_model(folders)
    kept["user"].save_pretrained(folders / "user")
    for architecture, auto in LANGUAGE_HEADS.items():
        kept[f"resaved {architecture}"] = build(architecture, auto)
        kept[f"resaved {architecture}"].save_pretrained(folders / "generations" / architecture / "0")
    return kept


@pytest.fixture(scope="module")
def first_generation(folders, special):
    """The files of the folders which the stranger's process deletes."""
    return {architecture: files_of(folders / "generations" / architecture / "0") for architecture in CLASSES}


def jobs_for(folders):
    """Returns the jobs of `remote_loader.py`; the first one must find no remote module in memory."""
    causal, source = ["AutoModelForCausalLM"], SOURCE
    first = str(folders / folder_of("encoder", "AutoModel"))
    jobs = {"refused": ["refuse", {"folder": first, "autos": ["AutoConfig", *CLASSES["encoder"]]}]}
    for variant in VARIANTS:
        arguments = {"autos": autos_to_load(*variant), "inputs": INPUTS[variant[0]]}
        jobs[folder_of(*variant)] = ["load", {"folder": str(folders / folder_of(*variant)), **arguments}]
    for name in NAMES:
        where = {"folder": os.path.join(folders / "names", name)}
        if name == ".":
            where = {"folder": ".", "cwd": str(folders / "names")}
        jobs[name] = ["load", {**where, "autos": causal, "inputs": source}]
    for name in ("once", "twice", "newer", "user"):
        jobs[name] = ["load", {"folder": str(folders / name), "autos": causal, "inputs": source}]
    for name in ("sharded", "stale"):
        arguments = {"autos": ["AutoModelForSeq2SeqLM"], "inputs": INPUTS["encoder-decoder"]}
        jobs[name] = ["load", {"folder": str(folders / name), **arguments}]
    for architecture, auto in GENERATIVE.items():
        folder = folders / folder_of(architecture, auto, "pre_norm", "learned")
        where = {"folder": str(folder), "auto": auto}
        jobs[f"generate {architecture}"] = ["generate", {**where, "inputs": PROMPTS, "options": GENERATION}]
    for architecture, auto in LANGUAGE_HEADS.items():
        where = {"folder": str(folders / folder_of(architecture, auto)), "auto": auto}
        jobs[f"clone {architecture}"] = ["clone", {**where, "inputs": INPUTS[architecture]}]
        generations = [str(folders / "generations" / architecture / str(n)) for n in range(4)]
        where = {"folder": generations[0], "auto": auto, "generations": generations[1:]}
        jobs[f"resave {architecture}"] = ["resave", where]
    tokenizer = str(folders / "tokenizer")
    jobs["tokenize"] = ["tokenize", {"folder": tokenizer, "auto": causal[0], "text": TEXT}]
    where = {"folder": str(folders / "translator"), "resaved": str(folders / "translator again")}
    jobs["translate"] = ["translate", {**where, "texts": TEXTS, "options": GENERATION}]
    jobs["worker"] = ["spawn_worker", {"folder": os.path.join(folders / "names", NAMES[0])}]
    where = {"built_in": str(folders / "built-in"), "folder": first}
    jobs["built-in"] = ["keep_built_in", {**where, "auto": "AutoModel", "inputs": source}]
    return jobs


@pytest.fixture(scope="module")
def stranger(folders, saved, special, first_generation):
    """What the stranger's process found."""
    return strangers_process(folders, jobs_for(folders))


@pytest.fixture(scope="module")
def found(stranger):
    return stranger["found"]


def assert_equal_tensors(actual, expected):
    assert expected
    assert sorted(actual) == sorted(expected)
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def assert_same_model(loaded, model, inputs):
    """The loaded model is this one, bit for bit, made by code of its folder."""
    assert loaded["class"] == type(model).__name__
    assert loaded["module"].startswith("transformers_modules.")
    assert loaded["config"].startswith("transformers_modules.")
    assert not loaded["training"]
    assert_equal_tensors(loaded["parameters"], dict(model.named_parameters()))
    assert loaded["buffers"].keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(loaded["buffers"][name], buffer) for name, buffer in model.named_buffers())
    assert_equal_tensors(loaded["outputs"], run(model, inputs))


def test_process_had_neither_package_nor_network_and_saw_nothing_deprecated(stranger):
    assert stranger["package"] is None
    assert stranger["transformers"] == transformers.__version__
    assert stranger["attempts"] == []
    assert "deprecat" not in stranger["stderr"].lower()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant))
def test_in1_loads_bit_equal_into_dirty_memory(found, saved, variant):
    architecture, auto, _, _ = variant
    loaded, model = found[folder_of(*variant)], saved[variant]
    assert "error" not in loaded, loaded["error"]
    assert_same_model(loaded[auto], model, INPUTS[architecture])
    base = getattr(model, "model", model)
    assert_equal_tensors(loaded["AutoModel"]["outputs"], run(base, INPUTS[architecture]))


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant))
def test_in6_only_the_head_of_another_class_is_missing(found, saved, variant):
    architecture, saved_auto, _, _ = variant
    loaded, config = found[folder_of(*variant)], saved[variant].config
    assert set(loaded) == set(autos_to_load(*variant))
    for auto in set(loaded) - {"AutoConfig"}:
        here, there = head_weights(auto, config), head_weights(saved_auto, config)
        assert loaded[auto]["class"] == CLASSES[architecture][auto]
        assert set(loaded[auto]["missing_keys"]) == here - there
        assert set(loaded[auto]["unexpected_keys"]) == there - here
        assert not loaded[auto]["mismatched_keys"]
        assert not loaded[auto]["error_msgs"]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant))
def test_rc1_folder_holds_config_code_and_safetensors_only(folders, saved, variant):
    architecture, auto, _, _ = variant
    expected = {"config.json", "model.safetensors", *CODE}
    if auto == GENERATIVE.get(architecture):
        expected.add("generation_config.json")
    assert {path.name for path in (folders / folder_of(*variant)).iterdir()} == expected


@pytest.mark.parametrize("architecture", CLASSES)
@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_st1_tw1_tied_weights_are_stored_once_and_untied_ones_apart(folders, saved, architecture, position):
    auto = LANGUAGE_HEADS[architecture]
    tables = {"lm_head.weight", "model.embed_tokens.weight"}
    if architecture == "encoder-decoder":
        tables = {"lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    folder = folders / folder_of(architecture, auto, "pre_norm", position)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = tables & set(file.keys())
    tied = saved[architecture, auto, "pre_norm", position].config.tie_word_embeddings
    assert tied == (position == "rotary")
    assert len(stored) == (1 if tied else len(tables))


def test_cc8_without_trust_no_code_runs(found):
    refused = found["refused"]
    assert set(refused["messages"]) == {"AutoConfig", *CLASSES["encoder"]}
    assert all("trust_remote_code=True" in message for message in refused["messages"].values())
    assert refused["modules"] == []


@pytest.mark.parametrize("name", NAMES)
def test_cc5_any_folder_name_loads(found, special, name):
    assert "error" not in found[name], found[name]["error"]
    assert_same_model(found[name]["AutoModelForCausalLM"], special[name], SOURCE)


def test_cc5_a_spawned_worker_receives_the_configuration(found):
    worker = found["worker"]
    assert "error" not in worker, worker["error"]
    assert worker["batch"]["size"].tolist() == [16, 16]
    assert worker["batch"]["module"][0].startswith("transformers_modules.my_dot_model_hyphen_v1_dot_5.")
    assert worker["process"] not in worker["batch"]["process"].tolist()


def test_am2_one_model_saved_twice_gives_two_folders_that_load(folders, found, special):
    assert files_of(folders / "once") == files_of(folders / "twice")
    for name in ("once", "twice"):
        assert_same_model(found[name]["AutoModelForCausalLM"], special[name], SOURCE)


def test_hb4_shards_load(folders, found, special):
    assert len(list((folders / "sharded").glob("model-*.safetensors"))) > 1
    assert (folders / "sharded" / "model.safetensors.index.json").is_file()
    assert_same_model(
        found["sharded"]["AutoModelForSeq2SeqLM"], special["sharded"], INPUTS["encoder-decoder"]
    )


def test_an_unsharded_save_over_shards_loads_the_new_weights(folders, found, special):
    """transformers deletes the old shards and leaves their index, which its loader then passes over."""
    assert list((folders / "stale").glob("model-*.safetensors")) == []
    assert_same_model(found["stale"]["AutoModelForSeq2SeqLM"], special["stale"], INPUTS["encoder-decoder"])


@pytest.mark.parametrize("architecture", LANGUAGE_HEADS)
def test_rc8_rc9_cc7_three_generations_write_the_same_files(found, first_generation, architecture):
    generations = found[f"resave {architecture}"]
    assert "error" not in generations, generations["error"]
    assert len(generations) == 3
    first = first_generation[architecture]
    config = json.loads(first["config.json"])
    assert set(config["auto_map"]) == {"AutoConfig", *CLASSES[architecture]}
    assert not [value for value in config["auto_map"].values() if "--" in value]
    for files in generations:
        assert {**json.loads(files["config.json"]), "transformers_version": None} == {
            **config,
            "transformers_version": None,
        }
        assert {**files, "config.json": None} == {**first, "config.json": None}


@pytest.mark.parametrize("architecture", GENERATIVE)
def test_generates_the_same_tokens(found, saved, architecture):
    model = saved[architecture, GENERATIVE[architecture], "pre_norm", "learned"]
    inputs = {name: torch.tensor(value) for name, value in PROMPTS.items()}
    expected = model.generate(**inputs, **GENERATION)
    assert len(set(expected[0, -12:].tolist())) > 5
    assert torch.equal(found[f"generate {architecture}"], expected)


@pytest.mark.parametrize("architecture", LANGUAGE_HEADS)
def test_loaded_models_can_be_copied_and_pickled(found, saved, architecture):
    model = saved[architecture, LANGUAGE_HEADS[architecture], "pre_norm", "rotary"]
    clones = found[f"clone {architecture}"]
    assert "error" not in clones, clones["error"]
    assert len(clones) == 5
    for outputs in clones.values():
        assert_equal_tensors(outputs, run(model, INPUTS[architecture]))


def test_am8_a_stock_tokenizer_loads_beside_the_model(found, special):
    tokens = found["tokenize"]
    assert "error" not in tokens, tokens["error"]
    assert tokens["ids"].tolist() == [[5, 6, 7, 8, 9, 10]]
    assert tokens["text"] == TEXT
    expected = run(special["tokenizer"], {"input_ids": tokens["ids"].tolist()})
    assert torch.equal(tokens["logits"], expected["logits"])


def test_a_pipeline_translates_and_saves_itself(folders, found, special):
    translated = found["translate"]
    assert "error" not in translated, translated["error"]
    tokenizer, model = tiny_tokenizer(), special["translator"]
    expected = [
        tokenizer.decode(
            model.generate(**tokenizer(text, return_tensors="pt"), **GENERATION)[0], skip_special_tokens=True
        )
        for text in TEXTS
    ]
    assert len(set(expected)) == len(TEXTS)
    assert translated["loaded"] == [{"translation_text": text} for text in expected]
    assert translated["resaved"] == translated["loaded"]
    assert translated["module"].startswith("transformers_modules.")
    assert translated["unnamed"] == "TransformerBlockTranslationPipeline"
    files, again = files_of(folders / "translator"), files_of(folders / "translator again")
    assert set(files) > CODE
    name = "tokenizer_config.json"  # where the library notes how a tokenizer was loaded
    assert {**again, name: None} == {**files, name: None}


def test_am6_loading_a_folder_leaves_built_in_models_alone(found, special):
    assert "error" not in found["built-in"], found["built-in"]
    for before_or_after in found["built-in"]:
        assert before_or_after["class"] == "BertModel"
        assert before_or_after["module"] == "transformers.models.bert.modeling_bert"
        assert_equal_tensors(before_or_after["outputs"], run(special["built-in"], SOURCE))


def test_rc4_saving_a_users_subclass_writes_every_file_that_it_needs(folders, special):
    written = files_of(folders / "user")
    own = {"louder.py", "scale.py"}
    assert set(written) == {"config.json", "generation_config.json", "model.safetensors", *CODE, *own}
    assert (
        json.loads(written["config.json"])["auto_map"]["AutoModelForCausalLM"] == "louder.LouderForCausalLM"
    )


def test_rc4_a_users_subclass_loads_from_its_folder(found, special):
    loaded = found["user"]
    assert "error" not in loaded, loaded["error"]
    assert_same_model(loaded["AutoModelForCausalLM"], special["user"], SOURCE)


def test_am11_code_in_the_folder_refuses_a_newer_format(found):
    assert "ValueError: this checkpoint has format_version=2" in found["newer"]["error"]


def test_am11_an_older_installed_package_refuses_a_newer_checkpoint(folders, saved, monkeypatch):
    folder = folders / folder_of("encoder", "AutoModel")
    monkeypatch.setattr(configuration, "FORMAT_VERSION", 0)
    with pytest.raises(ValueError, match=r"format_version=1 .* up to 0: pip install --upgrade") as refusal:
        AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert "\n" not in str(refusal.value)
    assert ". " not in str(refusal.value)


def test_am11_the_installed_package_wins_over_the_code_of_the_folder(folders, saved, tmp_path):
    model = saved["encoder", "AutoModel", "pre_norm", "rotary"]
    model.save_pretrained(tmp_path)
    for file in CODE:
        (tmp_path / file).write_text("raise RuntimeError('code of the folder')\n")
    loaded = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded) is TransformerBlockModel
    assert_equal_tensors(run(loaded, SOURCE), run(model, SOURCE))
