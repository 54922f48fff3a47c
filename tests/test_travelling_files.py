"""Tests that the three files which travel with the weights stand alone and that their import is harmless."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers import GenerationMixin, PreTrainedModel
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import hf_transformer_block
from hf_transformer_block import modeling_hf_transformer_block as modeling


PACKAGE = Path(hf_transformer_block.__file__).parent
CONFIGURATION = "configuration_hf_transformer_block"
MODELING = "modeling_hf_transformer_block"
PIPELINE = "pipeline_hf_transformer_block"
# each file and what transformers is to take along with it
TRAVELLING = {CONFIGURATION: [], PIPELINE: [], MODELING: [CONFIGURATION, PIPELINE]}
CLASSES = [
    value
    for value in vars(modeling).values()
    if isinstance(value, type)
    and issubclass(value, PreTrainedModel)
    and value.__module__ == modeling.__name__
]
LIBRARIES = {"torch", "transformers", "huggingface_hub"}
REFERENCES = ["llama", "t5", "bert"]  # their imports move last
REMOVED = {
    "PretrainedConfig",
    "_prune_heads",
    "_tie_or_clone_weights",
    "cache_position",
    "from_legacy_cache",
    "get_extended_attention_mask",
    "get_head_mask",
    "get_usable_length",
    "gradient_checkpointing_disable",
    "gradient_checkpointing_enable",
    "head_mask",
    "input_embeds",
    "is_gradient_checkpointing",
    "key_cache",
    "past_key_value",
    "safe_serialization",
    "seen_tokens",
    "tie_embeddings_and_encoder_decoder",
    "to_legacy_cache",
    "torch_dtype",
    "use_return_dict",
    "value_cache",
}


@pytest.fixture(params=TRAVELLING)
def name(request):
    return request.param


@pytest.fixture
def path(name):
    return PACKAGE / f"{name}.py"


@pytest.fixture
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_names(tree, package=""):
    """Returns (module, name) of every `from module import name`, with relative modules inside `package`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            names |= {(module, alias.name) for alias in node.names}
    return names


def dotted_names(tree, root):
    """Returns ("root.module", name) of every longest `root.module.name` in the code."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    inner = {id(node.value) for node in attributes}
    texts = [ast.unparse(node) for node in attributes if id(node) not in inner]
    return {tuple(text.rsplit(".", 1)) for text in texts if text.split(".")[0] == root}


def identifiers(tree):
    """Returns every word that the code uses: names, attributes, arguments, keywords and keys."""
    fields = ("id", "attr", "arg", "name", "value")
    words = {getattr(node, field, None) for node in ast.walk(tree) for field in fields}
    return {word for word in words if isinstance(word, str) and word.isidentifier()}


def names_that_move_last():
    """Returns the (module, name) pairs which the reference models of the installed transformers import."""
    names = set()
    for model in REFERENCES:
        for file in (Path(transformers.__file__).parent / "models" / model).glob("*_*.py"):
            if file.stem in (f"modeling_{model}", f"configuration_{model}"):
                tree = ast.parse(file.read_text(encoding="utf-8"))
                names |= imported_names(tree, f"transformers.models.{model}")
    return names


def test_every_file_of_the_model_is_checked_here():
    kinds = ("configuration", "modeling", "pipeline")
    written = {file.stem for kind in kinds for file in PACKAGE.glob(f"{kind}_*.py")}
    assert written == set(TRAVELLING)


def test_first_line_names_the_copyright(path):
    assert path.read_text(encoding="utf-8").startswith("# Copyright 2026 ")


def test_rc5_imports_reach_libraries_that_every_user_has(path, tree):
    modules = {module for module, _ in imported_names(tree)}
    modules |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    libraries = {module.split(".")[0] for module in modules} - {""}  # "" is ours, imported by a dot
    assert libraries
    assert libraries <= LIBRARIES | set(sys.stdlib_module_names)
    assert set(get_imports(path)) <= LIBRARIES | set(sys.stdlib_module_names)


def test_rc1_rc2_the_scanner_finds_the_relative_imports_and_nothing_else(name, path, tree):
    relative = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    assert [(node.level, node.module) for node in relative] == [(1, file) for file in TRAVELLING[name]]
    assert [node.module for node in relative if node not in tree.body] in ([], [PIPELINE])  # which never runs
    assert "*" not in {alias.name for node in relative for alias in node.names}
    assert sorted(get_relative_imports(path)) == TRAVELLING[name]
    files = [str(PACKAGE / f"{file}.py") for file in TRAVELLING[name]]
    assert sorted(get_relative_import_files(path)) == files


def test_names_of_transformers_are_those_that_llama_t5_and_bert_import(tree):
    allowed = names_that_move_last()
    assert len(allowed) > 40
    # the version, and public classes that the top level exports
    exported = ("__version__", "Pipeline", "PreTrainedConfig", "PreTrainedModel", "PreTrainedTokenizerBase")
    allowed |= {("transformers", name) for name in exported}
    assert ("transformers.configuration_utils", "PreTrainedConfig") in allowed
    used = imported_names(tree) | dotted_names(tree, "transformers") | dotted_names(tree, "huggingface_hub")
    used = {pair for pair in used if pair[0].split(".")[0] in ("transformers", "huggingface_hub")}
    assert used
    assert used - allowed == set()


def test_rc7_nothing_is_imported_on_a_condition(tree):
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert imports
    nested = [node for node in imports if node not in tree.body]
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    never = [node for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING"]
    assert nested == [node for block in never for node in block.body]
    assert identifiers(tree).isdisjoint({"import_module", "__import__"})


def test_modules_keep_no_state_and_never_print(tree):
    assert [node for node in ast.walk(tree) if isinstance(node, ast.Global)] == []
    assert identifiers(tree).isdisjoint({"print", "input", "breakpoint", "exec", "eval_str", "environ"})
    assigned = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign))]
    names = [ast.unparse(target) for node in assigned for target in getattr(node, "targets", [])]
    assert names
    assert [name for name in names if not name.isupper() and name != "logger"] == []
    assert len(names) == len(assigned)


def test_no_isinstance_of_a_configuration_of_which_two_copies_exist(tree):
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    checks = [ast.unparse(call) for call in calls if ast.unparse(call.func) in ("isinstance", "issubclass")]
    assert [check for check in checks if "Config" in check or "config" in check.split(",")[1]] == []


def test_gn2_gn5_no_removed_name_is_used(path, tree):
    assert identifiers(tree).isdisjoint(REMOVED)
    assert not re.search(r"\b(cache_position|past_key_value|torch_dtype)\b", path.read_text(encoding="utf-8"))


def test_attention_goes_through_the_call_that_transformers_searches_for():
    """`set_attn_implementation` reads the text of the modeling file before it allows another backend."""
    text = (PACKAGE / f"{MODELING}.py").read_text(encoding="utf-8")
    assert "ALL_ATTENTION_FUNCTIONS.get_interface(" in text


def test_attention_is_looked_up_and_called_once_in_the_text_of_its_forward():
    """vLLM reads that text, and refuses a model whose forward leaves the call to another method."""
    tree = ast.parse((PACKAGE / f"{MODELING}.py").read_text(encoding="utf-8"))
    attention = next(
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "TransformerBlockAttention"
    )
    forward = next(node for node in attention.body if getattr(node, "name", None) == "forward")
    names = [
        node.target.id
        for node in ast.walk(forward)
        if isinstance(node, ast.AnnAssign) and "ALL_ATTENTION_FUNCTIONS.get_interface" in ast.unparse(node)
    ]
    calls = [node for node in ast.walk(forward) if isinstance(node, ast.Call)]
    calls = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id in names]
    assert len(names) == len(calls) == 1
    assert "self.scaling" in [ast.unparse(keyword.value) for keyword in calls[0].keywords]


def test_am7_class_names_are_ours_alone(tree):
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert classes
    assert classes & set(dir(transformers)) == set()


def test_am7_no_model_of_transformers_has_the_name_of_one_of_ours():
    models = {name for name in hf_transformer_block.__all__ if name != "TransformerBlock"}
    assert len(models) == 9
    definition = re.compile(rf"^class ({'|'.join(sorted(models))})\b", flags=re.MULTILINE)
    files = list((Path(transformers.__file__).parent / "models").glob("*/*.py"))
    assert len(files) > 500
    assert [file for file in files if definition.search(file.read_text(encoding="utf-8"))] == []


def test_am5_model_type_is_ours_alone():
    assert CONFIG_MAPPING_NAMES
    assert hf_transformer_block.TransformerBlockConfig.model_type == "hf_transformer_block"
    assert "hf_transformer_block" not in CONFIG_MAPPING_NAMES


def test_tw2_every_class_calls_post_init_last():
    tree = ast.parse((PACKAGE / f"{MODELING}.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    last = {
        name: ast.unparse(function.body[-1])
        for name in (model_class.__name__ for model_class in CLASSES)
        for function in classes[name].body
        if isinstance(function, ast.FunctionDef) and function.name == "__init__"
    }
    assert len(last) == len(CLASSES) - 1  # all but the base
    assert set(last.values()) == {"self.post_init()"}


def test_tw3_gn13_nothing_private_of_the_library_is_overridden():
    assert len(CLASSES) == 9
    tying = {"tie_weights", "init_weights", "get_expanded_tied_weights_keys"}
    private = {name for name in dir(GenerationMixin) if name.startswith("_") and not name.startswith("__")}
    assert len(private) > 20
    for model_class in CLASSES:
        own = {
            name for cls in model_class.__mro__ if cls.__module__ == modeling.__name__ for name in vars(cls)
        }
        assert not own & (tying | private | {"generate"}), model_class


def test_in5_nothing_uses_what_an_init_function_returns():
    calls = 0
    for file in PACKAGE.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and re.match(r"(torch\.)?(nn\.)?init\.", ast.unparse(node.func)):
                assert id(node) in statements, f"{file.name}: {ast.unparse(node)}"
                calls += 1
    assert calls


def test_in7_models_are_built_from_a_configuration_and_never_from_a_layer():
    for model_class in CLASSES:
        parameters = list(inspect.signature(model_class).parameters)
        assert parameters[0] == "config"
        expected = ["is_decoder"] if model_class is modeling.TransformerBlockStack else []
        assert model_class is modeling.TransformerBlockPreTrainedModel or parameters[1:] == expected


IMPORT_TWICE = """
import importlib, json, sys
import transformers
from transformers import AutoConfig, AutoModel, BertConfig, LlamaConfig, T5Config

SIZES = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
AUTO = [name for name in dir(transformers) if name.startswith("AutoModelFor")]

def builtin():
    t5 = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    configs = [BertConfig(**SIZES), LlamaConfig(**SIZES), t5]
    types = [type(AutoConfig.for_model(config.model_type)).__module__ for config in configs]
    models = [type(AutoModel.from_config(config)).__module__ for config in configs]
    heads = {auto: getattr(transformers, auto)._model_mapping._model_mapping.copy() for auto in AUTO}
    for names in heads.values():
        names.pop("hf_transformer_block", None)  # the package names its own causal head there
    return types, models, heads

def ours():
    sizes = {**SIZES, "architecture": "encoder"}
    model = AutoModel.from_config(AutoConfig.for_model("hf_transformer_block", **sizes))
    return type(model) is hf_transformer_block.TransformerBlockModel

before = builtin()
import hf_transformer_block
works = [ours()]
for name in sys.argv[1:]:
    importlib.reload(sys.modules[name])
    if name == "hf_transformer_block":
        works.append(ours())
del hf_transformer_block
for name in [name for name in sys.modules if name.split(".")[0] == "hf_transformer_block"]:
    del sys.modules[name]
import hf_transformer_block
works.append(ours())
found = {"works": works, "unchanged": builtin() == before, "models": before[1], "heads": len(before[2])}
print(json.dumps(found))
"""


def test_am4_am6_registering_again_is_harmless_and_changes_no_built_in_model(tmp_path):
    package = "hf_transformer_block"
    reloaded = [package, f"{package}.{CONFIGURATION}", f"{package}.{MODELING}", package]
    script = subprocess.run(
        [sys.executable, "-c", IMPORT_TWICE, *reloaded],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        timeout=300,
    )
    assert script.returncode == 0, script.stderr
    found = json.loads(script.stdout)
    assert found["works"] == [True] * 4
    assert found["unchanged"]
    assert [module.split(".")[2] for module in found["models"]] == sorted(REFERENCES)
    assert found["heads"] > 20
