"""Tests of what users of custom Hub models run into, named after their ids in docs/traps.md."""

import ast
import contextlib
import inspect
import json
import math
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, dispatch_model, infer_auto_device_map
from accelerate.state import AcceleratorState, PartialState
from conftest import (
    EACH_GENERATIVE,
    EACH_MODEL,
    GENERATIVE,
    MODELS,
    POSITIONS,
    SHAPES,
    model_name,
    output_of,
    tiny_config,
    tiny_inputs,
    tiny_labels,
    tiny_tokenizer,
    tiny_tokens,
)
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.dynamic_module_utils import HF_MODULES_CACHE, TRANSFORMERS_DYNAMIC_MODULE_NAME
from transformers.utils.generic import find_labels

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForMaskedLM,
    TransformerBlockForQuestionAnswering,
    TransformerBlockForSequenceClassification,
    TransformerBlockForTokenClassification,
    TransformerBlockModel,
    TransformerBlockPreTrainedModel,
)
from hf_transformer_block import modeling_hf_transformer_block as modeling
from hf_transformer_block.arguments import Arguments
from hf_transformer_block.run import Run
from hf_transformer_block.tasks import CausalLM, Split
from hf_transformer_block.training import update
from hf_transformer_block.vocabulary import train_tokenizer


pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs" / "traps.md").read_text(encoding="utf-8")
# these are tests, by their id; the design or the docs may answer the others
MUST = {
    "AB": [1],
    "AC": [2],
    "AM": [4],
    "AT": [1, 2, 4],
    "CC": [5],
    "GC": [2],
    "GN": [1, 8, 11],
    "IN": [1, 3],
    "LT": [2],
    "RC": [1, 8],
    "ST": [1],
    "TW": [1, 2, 6],
}


def table_rows() -> dict[str, list[tuple[str, str]]]:
    """Returns the tests, (file, function), of every id in the docs' table."""
    rows = re.findall(r"^\| ([A-Z]{2}\d+) \|.*\| ([^|]*) \|$", TABLE, flags=re.MULTILINE)
    assert len(rows) == len(dict(rows))
    return {name: re.findall(r"`(\w+\.py)::(\w+)`", tests) for name, tests in rows}


def ids_in(function: str) -> list[str]:
    """Returns the ids at the start of a test's name."""
    start = re.match(r"test_((?:[a-z]{2}\d+_)*)", function.lower())[1]
    return start.upper().split("_")[:-1]


def test_the_docs_name_tests_that_exist_and_every_id():
    rows = table_rows()
    assert len(rows) > 100
    functions = {
        path.name: {
            node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if hasattr(node, "name")
        }
        for path in Path(__file__).parent.glob("test_*.py")
    }
    named = [(file, function) for tests in rows.values() for file, function in tests]
    assert [test for test in named if test[1] not in functions.get(test[0], ())] == []
    here = {name for name in functions[Path(__file__).name] if name.startswith("test_")} - {
        "test_the_docs_name_tests_that_exist_and_every_id"
    }
    assert {name for name in here if not ids_in(name)} == set()
    assert {(trap, name) for name in here for trap in ids_in(name)} <= {
        (trap, function) for trap, tests in rows.items() for _, function in tests
    }
    for trap in (f"{kind}{number}" for kind, numbers in MUST.items() for number in numbers):
        assert [function for _, function in rows[trap] if trap in ids_in(function)], trap


@pytest.mark.parametrize(
    ("task", "head", "shape"),
    [
        pytest.param(
            *("text-generation", TransformerBlockForCausalLM, "decoder"),
            marks=pytest.mark.logs_deprecation,  # by the pipeline of older versions, about itself
        ),
        ("fill-mask", TransformerBlockForMaskedLM, "encoder"),
        ("text-classification", TransformerBlockForSequenceClassification, "encoder"),
        ("text-classification", TransformerBlockForSequenceClassification, "decoder"),
        ("token-classification", TransformerBlockForTokenClassification, "encoder"),
        *(("feature-extraction", TransformerBlockModel, shape) for shape in SHAPES[:2]),
    ],
    ids=model_name,
)
def test_am9_pipelines_load_our_folders(task, head, shape, library_logs, tmp_path):
    head(tiny_config(shape)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    pipe = pipeline(task, str(tmp_path), trust_remote_code=True, device="cpu")
    assert type(pipe.model) is head
    assert pipe("w7 w8 <mask>", **({"max_new_tokens": 2} if task == "text-generation" else {}))
    assert not [message for message in library_logs if "not supported" in message]


def test_am10_a_folder_saved_from_a_notebook_holds_every_file_that_it_names(library_logs, tmp_path):
    mine = type("Mine", (TransformerBlockForCausalLM,), {"__module__": "__main__"})
    model = mine(tiny_config("decoder"))
    model.save_pretrained(tmp_path)
    assert [message for message in library_logs if "defined in __main__" in message]
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert {name for name in auto_map.values() if "Mine" in name} == set()
    files = {f"{name.split('.')[0]}.py" for name in auto_map.values()}
    assert len(files) == 2
    assert files | {"pipeline_hf_transformer_block.py"} <= {path.name for path in tmp_path.iterdir()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded) is TransformerBlockForCausalLM
    inputs = tiny_inputs(model.config)
    assert torch.equal(output_of(loaded, inputs), output_of(model, inputs))


def test_cc2_every_test_process_has_a_cache_of_its_own():
    home = Path(os.environ["HF_HOME"])
    assert home.parent == Path(tempfile.gettempdir())
    assert home.name.startswith("hf_transformer_block-tests-")
    assert Path(HF_MODULES_CACHE).parent == home


def test_cc4_the_docs_say_where_code_runs_from():
    copies = Path(HF_MODULES_CACHE, TRANSFORMERS_DYNAMIC_MODULE_NAME).relative_to(os.environ["HF_HOME"])
    assert f"`$HF_HOME/{copies.as_posix()}`" in TABLE


@pytest.mark.parametrize("tied", [True, False])
@EACH_MODEL
def test_tw1_tw5_a_dict_declares_exactly_the_weights_that_share_memory(model_class, shape, tied):
    model = model_class(tiny_config(shape, tie_word_embeddings=tied))
    state = model.state_dict()
    shared = {}
    for name, tensor in state.items():
        shared.setdefault(tensor.data_ptr(), []).append(name)
    groups = {frozenset(names) for names in shared.values() if len(names) > 1}
    declared = model.all_tied_weights_keys
    for module in model.modules():
        assert isinstance(getattr(module, "_tied_weights_keys", None), dict | None)
    assert declared.keys() | set(declared.values()) <= state.keys()
    assert groups == {
        frozenset({source, *(target for target, other in declared.items() if other == source)})
        for source in declared.values()
    }
    assert bool(groups) == (tied and (hasattr(model, "lm_head") or shape == "encoder-decoder"))


def test_tw2_a_users_class_that_forgets_post_init_is_told_when_it_is_built():
    class Forgetful(TransformerBlockPreTrainedModel):
        def __init__(self, config):
            super().__init__(config)
            self.model = TransformerBlockModel(config)

    with pytest.raises(TypeError, match=r"Forgetful.__init__ must end with self.post_init\(\)"):
        Forgetful(tiny_config())

    class Heedful(Forgetful):
        def __init__(self, config):
            super().__init__(config)
            self.post_init()

    assert list(inspect.signature(Heedful.__init__).parameters) == ["self", "config"]
    Heedful(tiny_config())


@EACH_MODEL
def test_tw6_models_are_tied_unless_told_otherwise_and_remember_it(model_class, shape, tmp_path):
    for told in ({}, {"tie_word_embeddings": False}):
        model = model_class(tiny_config(shape, **told))
        tied = not told
        assert model.config.tie_word_embeddings is tied
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is tied
        for built in (model, model_class.from_pretrained(tmp_path)):
            tables = [
                module.weight for module in built.modules() if getattr(module, "weight", None) is not None
            ]
            tables = [table for table in tables if table.shape == (61, 32)]
            assert len({table.data_ptr() for table in tables}) == (1 if tied else len(tables))


@pytest.mark.parametrize("style", ["pre_norm", "tutorial"])
@EACH_MODEL
def test_in4_what_a_checkpoint_lacks_gets_its_documented_start_value(model_class, shape, style, tmp_path):
    model = model_class(tiny_config(shape, block_style=style, qk_norm=True, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    lacking = {name for name in stored if "norm" in name or name.endswith("bias")}
    lacking |= {name for name in stored if "o_proj" in name}
    assert len(lacking) > 10
    kept = {name: tensor for name, tensor in stored.items() if name not in lacking}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name, parameter in model_class.from_pretrained(tmp_path).named_parameters():
        if name not in lacking:
            assert (parameter == 7.0).all(), name
        elif "o_proj.weight" in name:
            std = 0.2 / math.sqrt(2 * 2) if style == "pre_norm" else math.sqrt(2 / sum(parameter.shape))
            assert parameter.std().item() == pytest.approx(std, rel=0.15), name
        else:
            assert (parameter == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize(("model_class", "shape"), MODELS[:6], ids=model_name)
def test_sh3_a_model_emptied_by_hand_computes_the_same_again(model_class, shape, positions):
    config = tiny_config(shape, position_embedding=positions)
    model = model_class(config)
    inputs = tiny_inputs(config)
    with torch.device("meta"):
        empty = model_class(config)
    empty.to_empty(device="cpu")
    for tensor in (*empty.parameters(), *empty.buffers()):
        tensor.data.fill_(torch.nan)
    empty.apply(empty._init_weights)  # refills what no checkpoint holds: the buffers of rotary positions
    empty.load_state_dict(model.state_dict())
    assert torch.equal(output_of(empty, inputs), output_of(model, inputs))


@EACH_MODEL
def test_sh1_sh5_blocks_stay_whole_on_devices_that_hold_few(model_class, shape, tmp_path):
    model = model_class(tiny_config(shape, position_embedding="rotary", num_hidden_layers=3))
    inputs = tiny_inputs(model.config)
    expected = output_of(model, inputs)
    found = {type(module).__name__ for module in model.modules()}
    assert set(model._no_split_modules) == {"TransformerBlock"} & found
    block = max(
        sum(tensor.nbytes for tensor in module.state_dict().values())
        for module in model.modules()
        if isinstance(module, modeling.TransformerBlock)
    )
    memory = {"cpu": int(2.5 * block), "disk": 2**30}
    places = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=model._no_split_modules)
    assert set(places.values()) == {"cpu", "disk"}
    assert not [name for name in places if re.search(r"layers\.\d+\.", name)]
    dispatched = dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert torch.equal(output_of(dispatched, inputs), expected)


def test_cf2_generation_settings_in_an_old_config_json_do_no_harm(tmp_path):
    old = {"max_length": 9, "num_beams": 3, "do_sample": True, "temperature": 0.5}
    for head, shape in GENERATIVE:
        model = head(tiny_config(shape))
        model.save_pretrained(tmp_path)
        (tmp_path / "generation_config.json").unlink()
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **old}))
        loaded = head.from_pretrained(tmp_path)
        assert not set(old) & loaded.config.to_dict().keys()
        inputs = tiny_inputs(model.config)
        assert torch.equal(output_of(loaded, inputs), output_of(model, inputs))
        ids, options = inputs["input_ids"], {"max_new_tokens": 4, "do_sample": False, "num_beams": 1}
        assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))


@pytest.mark.parametrize(("source", "target"), [(1, 3), (3, 1), (2, None)])
def test_cf6_a_cache_has_as_many_layers_as_the_decoder(source, target):
    config = tiny_config("encoder-decoder", num_hidden_layers=source, num_decoder_layers=target)
    depth = source if target is None else target
    assert len(DynamicCache(config=config).layers) == depth
    assert len(StaticCache(config=config, max_cache_len=4).layers) == depth
    model = TransformerBlockForConditionalGeneration(config).eval()
    cache = model(**tiny_inputs(config), use_cache=True)[modeling.CACHE]
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        assert len(part.layers) == depth
        assert all(layer.keys.shape[:2] == (2, 4) for layer in part.layers)


def test_cf9_files_hold_the_new_names_only(library_logs, tmp_path):
    for model_class, shape in MODELS:
        model_class(tiny_config(shape)).to(torch.bfloat16).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert written["dtype"] == "bfloat16"
        assert not {"torch_dtype", "use_return_dict", "past_key_values"} & written.keys()
        loaded = model_class.from_pretrained(tmp_path, dtype=torch.float32)
        assert loaded.dtype == torch.float32
        assert loaded.config.return_dict is True
    assert library_logs == []


@EACH_GENERATIVE
def test_gn11_weights_are_written_before_wrong_generation_settings_are_refused(head, shape, tmp_path):
    model = head(tiny_config(shape))
    model.generation_config = settings = GenerationConfig(temperature=0.7, do_sample=False, num_beams=1)
    with pytest.raises(ValueError, match=r"(?s)the weights are saved in .*`temperature` is set to `0.7`"):
        model.save_pretrained(tmp_path)
    assert model.generation_config is settings
    loaded, report = head.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    expected = dict(model.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())
    assert loaded.generation_config.temperature != 0.7
    assert loaded.generation_config.eos_token_id == model.config.eos_token_id
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path)
    assert head.from_pretrained(tmp_path).generation_config.temperature == 0.7


@pytest.mark.parametrize(
    "settings", [{"num_return_sequences": 3}, {"num_beams": 2, "early_stopping": "x"}, {"pad_token_id": -3}]
)
def test_gn11_no_setting_of_generation_costs_the_weights(settings, tmp_path):
    model = TransformerBlockForCausalLM(tiny_config())
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    with contextlib.suppress(ValueError):  # which of them it refuses is the library's affair
        model.save_pretrained(tmp_path)
    loaded = TransformerBlockForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_gn11_other_errors_of_saving_stay_as_they_are(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("other")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail)
    with pytest.raises(ValueError, match="^other$"):
        TransformerBlockForCausalLM(tiny_config()).save_pretrained(tmp_path)


@pytest.mark.parametrize(("model_class", "shape"), MODELS[:6], ids=model_name)
def test_st5_a_compiled_model_saves_plain_names(model_class, shape, tmp_path):
    model = model_class(tiny_config(shape))
    model.save_pretrained(tmp_path / "plain")
    compiled = torch.compile(model, backend="eager")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for wrapped in (compiled, Accelerator(cpu=True).unwrap_model(compiled)):
        wrapped.save_pretrained(tmp_path / "compiled")
        stored = load_file(tmp_path / "compiled" / "model.safetensors")
        assert stored.keys() == plain.keys()
        assert all(torch.equal(tensor, plain[name]) for name, tensor in stored.items())
        configs = [(tmp_path / name / "config.json").read_text() for name in ("plain", "compiled")]
        assert configs[0] == configs[1]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_at3_masks_that_were_added_up_beyond_the_lowest_number_stay_masks(dtype, implementation):
    config = tiny_config("decoder", attn_implementation=implementation)
    model = TransformerBlockModel(config).eval()
    ids = tiny_tokens(2, 6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    lowest = torch.finfo(dtype).min
    parts = (causal, real[:, None, None], (torch.rand(2, 1, 6, 6) < 0.7) | torch.eye(6, dtype=torch.bool))
    added = sum(torch.where(part, 0.0, lowest).to(dtype) for part in parts)
    assert added.isinf().any()
    visible = parts[0] & parts[1] & parts[2]
    sees = visible.any(dim=-1).squeeze(1)  # not the padding
    assert torch.equal(sees, real)
    states = model.to(dtype)(ids, attention_mask=added).last_hidden_state
    expected = model.float()(ids, attention_mask=visible).last_hidden_state
    assert states.isfinite().all()
    assert_close(states[sees].float(), expected[sees], rtol=0, atol=4e-3 if dtype == torch.float16 else 4e-2)


@EACH_GENERATIVE
def test_lt4_lt5_lt6_the_librarys_trainer_evaluates(head, shape, tmp_path):
    """With metrics, a cache, and a column that the model does not know."""
    model = head(tiny_config(shape))
    rows = [{**tiny_inputs(model.config, batch=1, length=6), "text": "raw"} for _ in range(5)]
    for row in rows:
        row |= tiny_labels(model, row)
        row |= {name: value[0] for name, value in row.items() if name != "text"}
    seen = []
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = Trainer(
        model,
        arguments,
        eval_dataset=rows,
        compute_metrics=lambda prediction: seen.append(prediction.predictions) or {"seen": 1.0},
    )
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "text"}
    expected = model.eval()(**batch)
    metrics = trainer.evaluate()
    assert metrics["eval_seen"] == 1.0
    assert metrics["eval_loss"] == pytest.approx(expected.loss.item(), abs=1e-5)
    assert_close(torch.from_numpy(seen[0]), expected.logits.detach(), rtol=0, atol=1e-5)
    unlabelled = [{name: value for name, value in row.items() if name != "labels"} for row in rows]
    del batch["labels"]
    model.config.use_cache = True  # which the Trainer has switched off
    assert modeling.CACHE in model(**batch)
    predicted = trainer.predict(unlabelled).predictions
    assert_close(torch.from_numpy(predicted), model(**batch).logits.detach(), rtol=0, atol=1e-5)


def test_lt7_the_librarys_trainer_smooths_the_labels_of_the_next_token(tmp_path):
    model = TransformerBlockForCausalLM(tiny_config())
    rows = [{"input_ids": ids, "labels": ids} for ids in tiny_tokens(4, 6)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    found = Trainer(model, arguments, eval_dataset=rows).evaluate()["eval_loss"]
    ids = torch.stack([row["input_ids"] for row in rows])
    expected = model(ids, labels=ids, label_smoothing=0.1).loss
    assert found == pytest.approx(expected.item(), abs=1e-5)


@EACH_MODEL
def test_lt5_lt6_arguments_have_the_names_that_the_librarys_trainer_looks_for(model_class, shape):
    names = set(inspect.signature(model_class.forward).parameters)
    assert names >= {"input_ids", "attention_mask", "position_ids", "inputs_embeds"}
    # an evaluation has a loss only if a batch holds all of these
    labels = {
        TransformerBlockModel: [],
        TransformerBlockForQuestionAnswering: ["start_positions", "end_positions"],
    }
    assert find_labels(model_class) == labels.get(model_class, ["labels"])
    if shape == "encoder-decoder":
        assert names >= {"decoder_input_ids", "decoder_attention_mask", "encoder_outputs"}


@pytest.mark.parametrize(("processes", "micro_batches"), [(1, 1), (1, 3), (2, 1), (3, 2)])
def test_ac2_the_schedule_counts_updates_and_not_processes(processes, micro_batches, monkeypatch, tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_batches)
    for state in (PartialState._shared_state, AcceleratorState._shared_state):
        monkeypatch.setitem(state, "num_processes", processes)
    assert accelerator.num_processes == processes
    tokenizer = train_tokenizer(iter(["abcdef"]), "char", 20, 16, "decoder")
    arguments = Arguments(
        task="causal-lm",
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_steps=8,
        warmup_steps=2,
        lr_scheduler_type="linear",
        learning_rate=0.6,
        output_dir=str(tmp_path),
    )
    example = {"input_ids": [3, 4, 5], "labels": [-100, 4, 5], "position_ids": [0, 1, 2], "length": 3}
    task, split = CausalLM(max_length=16), Split(None, Dataset.from_list([example]))
    run = Run(arguments, accelerator, task, tokenizer, {"train": split})
    batches, rates = [task.collate([example], tokenizer)] * micro_batches, []
    for _ in range(8):
        rates.append(run.optimizer.param_groups[0]["lr"])
        update(accelerator, run.model, run.optimizer, run.scheduler, batches, task.count_targets, 1.0)
    assert rates == pytest.approx([0.0, 0.3, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    run.model.generation_config.validate(strict=True)  # GN11, before the first step


def test_ec2_the_layers_that_adapters_choose_are_in_the_readme():
    named = re.search(r"The layers to adapt with LoRA are (.*)\.", (ROOT / "README.md").read_text("utf-8"))
    named = set(re.findall(r"`(\w+)`", named[1]))
    for shape, attentions in (("encoder", 2), ("decoder", 2), ("encoder-decoder", 2 + 3 * 2)):
        depth = {"num_decoder_layers": 3} if shape == "encoder-decoder" else {}
        model = TransformerBlockModel(tiny_config(shape, gated_mlp=True, **depth))
        found = [
            name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)
        ]
        assert set(found) == named
        blocks = 2 if shape != "encoder-decoder" else 2 + 3
        for name in named:
            assert found.count(name) == (attentions if name[1:] == "_proj" else blocks), name


def test_ec4_no_document_uses_a_pipeline_that_is_gone():
    documents = [ROOT / "README.md", ROOT / "model_card.md", *(ROOT / "docs").glob("*.md")]
    gone = r"""pipeline\(\s*["'](text2text-generation|summarization|translation_|question-answering)"""
    assert len(documents) > 2
    assert [path.name for path in documents if re.search(gone, path.read_text(encoding="utf-8"))] == []
    assert "translation" in tiny_config("encoder-decoder").custom_pipelines  # which the README may call


def test_tu1_tu2_tu3_projections_are_whole_and_scores_are_divided_by_the_heads_width():
    config = tiny_config("encoder", attention_bias=False)
    attention = TransformerBlockModel(config).layers[0].self_attn
    assert sum(parameter.numel() for parameter in attention.parameters()) == 4 * 32**2
    target, source = torch.randn(2, 3, 32), torch.randn(2, 8, 32)
    query, key, value = (
        projection(states).unflatten(-1, (4, 8)).transpose(1, 2)
        for projection, states in (
            (attention.q_proj, target),
            (attention.k_proj, source),
            (attention.v_proj, source),
        )
    )
    expected = nn.functional.scaled_dot_product_attention(query, key, value)  # divides by sqrt(8)
    expected = attention.o_proj(expected.transpose(1, 2).flatten(-2))
    assert_close(attention(target, key_value_states=source)[0], expected, rtol=0, atol=1e-5)
    changed = source.clone()
    changed[..., 0] += 1.0  # one feature reaches every head
    moved = (attention.v_proj(changed) - attention.v_proj(source)).unflatten(-1, (4, 8)).abs().amax(dim=-1)
    assert (moved > 1e-3).all()
