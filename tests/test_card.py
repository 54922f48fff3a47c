"""Tests of the model card: it says what the records hold, and what the Hub would refuse is found here."""

import copy
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import load_script, tiny_config, tiny_tokenizer
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from jinja2 import TemplateSyntaxError
from local_hub.cards import check_card as hub_check


pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')

from hf_transformer_block import TransformerBlockForCausalLM, TransformerBlockModel
from hf_transformer_block.card import check_card, is_edited, published_card, render_card
from hf_transformer_block.dates import LANGUAGES
from hf_transformer_block.tasks import TASKS


TEMPLATE = (Path(__file__).parents[1] / "model_card.md").read_text(encoding="utf-8")
TAGS = {"causal-lm": "text-generation", "masked-lm": "fill-mask"}
BLEU = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
CHRF = "nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:2.6.0"
SCORES = {
    "translation": {
        **{"loss": 0.17068055112781924, "targets": 16389, "exact_match": 85.6},
        **{"bleu": 97.56140566612935, "bleu_signature": BLEU, "chrf": 97.9, "chrf_signature": CHRF},
    },
    "causal-lm": {"loss": 1.69, "targets": 111540, "perplexity": 1.0e22, "bits_per_byte": 2.4381},
    "masked-lm": {"loss": 1e-07, "targets": 900, "accuracy": 12.5},
    "text-classification": {"loss": 0.2, "targets": 20, "accuracy": 95, "macro_f1": 94.9, "micro_f1": 95.0},
    "token-classification": {
        **{"loss": 0.3, "targets": 99, "accuracy": 90.0, "precision": 81.5, "recall": 71.25, "f1": 76.0},
    },
    "question-answering": {"loss": 2.5, "targets": 17, "exact_match": 0.0, "f1": 100 / 3},
}
KINDS = {"bleu": "sacrebleu", "macro_f1": "f1", "micro_f1": "f1"}
EXAMPLES = {"masked-lm": "w5 w6 <mask>", "question-answering": {"question": "w5 'w6'?", "context": 'w7 "w8"'}}
ARGUMENTS = {
    **{"seed": 3, "max_length": 24, "batch_size": 16, "tokens_per_batch": None, "learning_rate": 1e-2},
    **{"lr_scheduler_type": "cosine", "warmup_steps": None, "weight_decay": 0.01, "max_grad_norm": 1.0},
    **{"label_smoothing": 0.1, "ema_decay": 0.999, "num_beams": 5},
}
FILE = {"file": "train.tsv", "bytes": 120, "sha256": "ee8da45813d244a1d758ee00833e1957"}


def split(**values) -> dict:
    facts = {"source": "local files", "dataset": None, "config": None, "split": None, "rows": 80}
    return {**facts, "left_out": 2, "files": [FILE], **values}


def records(task: str, **values) -> dict:
    """Returns a run's metrics.json."""
    return {
        "split": "test",
        "scores": SCORES[task],
        "history": [{"step": 12, "loss": 2.5}, {"step": 24, "loss": 1.5}],
        "steps": 24,
        "best_step": 12,
        "seconds": 1234,
        "starts": 2,
        "started_from": None,
        "base_model": None,
        "data": {"train": split(), "test": split(rows=20, left_out=0)},
        "languages": [],
        "example": EXAMPLES.get(task, "w5 w6 'w7' 2024年"),
        "arguments": {"task": task, **ARGUMENTS},
        "command": "scripts/train.py --seed 3",
        "code": {"commit": "c0ffee" * 6 + "c0ff", "changed": False},
        "versions": {"python": "3.11.7", "hf_transformer_block": "0.1.0", "torch": "2.13.0"},
        **{"processes": 1, "engine": "NO", "mixed_precision": "no", "device": "cpu"},
        **{"platform": "Linux-6.18", "cpus": 2, "threads": 1},
        **values,
    }


def write(folder: Path, metrics: dict) -> Path:
    (folder / "metrics.json").write_text(json.dumps(metrics, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Folders as a training leaves them, by task."""
    folders = {}
    for task, kind in TASKS.items():
        folder = folders[task] = tmp_path_factory.mktemp(task)
        torch.manual_seed(0)
        values = {"decoder_start_token_id": 1} if task == "translation" else {}
        if "classification" in task:
            values = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
        kind.model_class(tiny_config(kind.architecture, **values)).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        (folder / "training_curve.png").write_bytes(b"\x89PNG")
        write(folder, records(task))
    return folders


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A translation model's folder, to change."""
    return Path(shutil.copytree(saved["translation"], tmp_path / "run"))


def python_blocks(card: str) -> list[str]:
    return re.findall("```python\n(.*?)```", card, re.DOTALL)


def run(card: str, capsys) -> None:
    """Runs the card's code, all of which prints something."""
    blocks = python_blocks(card)
    assert blocks
    for code in blocks:
        exec(code, {})
        assert capsys.readouterr().out


@pytest.mark.parametrize("task", TASKS)
def test_a_card_reads_back_to_the_records_and_its_code_runs(task, saved, monkeypatch, capsys):
    card = render_card(saved[task], TEMPLATE)
    check_card(card, saved[task])
    assert hub_check(card) == ([], [])
    data = ModelCard(card).data
    tag = TAGS.get(task, task)
    assert (data.library_name, data.pipeline_tag, data.license) == ("transformers", tag, "apache-2.0")
    assert "custom_code" in data.tags
    assert (data.base_model, data.datasets, data.language) == (None, None, None)

    name, results = model_index_to_eval_results(data.to_dict()["model-index"])
    assert results == data.eval_results
    scores = {k: v for k, v in SCORES[task].items() if k != "targets" and not k.endswith("_signature")}
    assert [(result.metric_type, result.metric_value) for result in results] == [
        (KINDS.get(key, key), value) for key, value in scores.items()
    ]
    assert {type(result.metric_value) for result in results} == {float}
    assert {(r.task_type, r.dataset_name, r.dataset_split) for r in results} == {(tag, "local files", "test")}
    signatures = [result.metric_args for result in results if result.metric_type in ("sacrebleu", "chrf")]
    assert signatures == ([{"signature": BLEU}, {"signature": CHRF}] if task == "translation" else [])
    assert all(metric not in ("loss", "bits_per_byte") for metric in data.metrics or [])
    assert all(f"| {value:.5g} |" in card for value in scores.values())

    monkeypatch.chdir(saved[task])
    run(card, capsys)


def test_a_card_says_what_ran(folder):
    card = render_card(folder, TEMPLATE)
    for fact in (
        *("24 updates", "after update 12", "the best of 2 evaluations", "1,234 seconds", "started 2 times"),
        *("accelerate launch scripts/train.py --seed 3", "seed is 3", "c0ffee", "torch 2.13.0", "Linux-6.18"),
        *(
            "no text longer than 24 tokens",
            "ee8da45813d2",
            "| 80 | 2 |",
            "(training_curve.png)",
            "random weights",
        ),
    ):
        assert fact in card
    total = sum(
        value.numel() for value in TASKS["translation"].model_class.from_pretrained(folder).parameters()
    )
    assert f"It has {total:,} parameters (F32)" in card
    write(folder, records("translation", split="validation", data={"train": split(), "validation": split()}))
    assert "chose the weights, so expect somewhat worse" in render_card(folder, TEMPLATE)


def test_a_card_of_a_fine_tuned_model_names_what_it_stands_on(folder):
    hub = {"source": "the data set some/pairs", "dataset": "some/pairs", "config": "en-de", "files": []}
    data = {"train": split(**hub, split="train"), "test": split(**hub, split="dev", rows=None)}
    values = {"started_from": "some/model", "base_model": "some/model", "languages": [*LANGUAGES]}
    write(folder, records("translation", data=data, **values))
    card = render_card(folder, TEMPLATE, language=["no", "en"], datasets=["old", "some/pairs"])
    data = ModelCard(card).data
    assert (data.base_model, data.datasets) == ("some/model", ["some/pairs", "old"])
    assert data.language == [*LANGUAGES, "no"]
    assert data.license == "unknown"
    assert {(r.dataset_type, r.dataset_config, r.dataset_split) for r in data.eval_results} == {
        ("some/pairs", "en-de", "dev")
    }
    assert "the weights of `some/model`" in card
    assert (
        "[some/pairs](https://huggingface.co/datasets/some/pairs), en-de, split dev | read as a stream"
        in card
    )
    check_card(card, folder)


def test_the_code_loads_by_id_and_revision(folder):
    for revision, shown in ((None, "main"), ("v1.0", "v1.0")):
        card = render_card(folder, TEMPLATE, repo_id="alice/dates", revision=revision, license="mit")
        code = python_blocks(card)[0]
        assert f'model_id = "alice/dates"\nrevision = "{shown}"\n' in code
        assert code.count("(model_id, revision=revision, trust_remote_code=True)") == 2
        assert ("in place of `main` put the 40 digits" in card) == (revision is None)
        assert ModelCard(card).data.eval_results is not None
        assert ModelCard(card).data.model_name == "dates"
        assert ModelCard(card).data.license == "mit"


@pytest.mark.parametrize("travels", [True, False])
def test_a_pipeline_is_shown_where_it_travels(travels, folder):
    config = json.loads((folder / "config.json").read_text())
    config["custom_pipelines"] = {"translation": {"impl": "module.Class"}} if travels else {}
    (folder / "config.json").write_text(json.dumps(config))
    line = 'pipeline("translation", model_id, revision=revision, trust_remote_code=True)'
    assert (line in render_card(folder, TEMPLATE, repo_id="alice/dates")) == travels


def test_the_same_folder_gives_the_same_card_wherever_it_lies(folder, tmp_path):
    card = render_card(folder, TEMPLATE)
    assert card == render_card(str(folder), TEMPLATE)
    assert card == render_card(folder.rename(tmp_path / "elsewhere"), TEMPLATE)
    assert str(tmp_path) not in card


def leaves(metrics: dict) -> list[tuple[str, ...]]:
    """Returns the way to each value of the records that a card shows."""
    kept = [(key,) for key in metrics]
    kept += [("arguments", key) for key in metrics["arguments"]]
    kept += [("data", "test", key) for key in metrics["data"]["test"]]
    return [
        *kept,
        ("data", "test"),
        ("data", "train"),
        ("versions", "hf_transformer_block"),
        ("code", "commit"),
    ]


@pytest.mark.parametrize("way", leaves(records("translation")), ids="-".join)
def test_a_missing_value_is_an_error(way, folder):
    metrics = copy.deepcopy(records("translation"))
    where = metrics
    for key in way[:-1]:
        where = where[key]
    del where[way[-1]]
    with pytest.raises(ValueError, match=f"lacks .*{'data|test' if way[0] == 'data' else way[-1]}.*--resume"):
        render_card(write(folder, metrics), TEMPLATE)


@pytest.mark.parametrize("value", ["24", 24.5, None])
def test_a_count_of_another_shape_is_an_error(value, folder):
    with pytest.raises(ValueError, match=f"'{value}' is no whole number.*--resume"):
        render_card(write(folder, records("translation", seconds=value)), TEMPLATE)


@pytest.mark.parametrize("broken", ["{% if %}", "{{ 1 | no_filter }}", "{{ metadata "])
def test_a_broken_template_is_not_blamed_on_the_records(broken, folder):
    with pytest.raises(TemplateSyntaxError):
        render_card(folder, TEMPLATE + broken)


@pytest.mark.parametrize("name", ["hidden_size", "architecture", "dropout", "vocab_size", "model_type"])
def test_a_missing_field_of_the_configuration_is_an_error(name, folder):
    config = json.loads((folder / "config.json").read_text())
    del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"lacks .*{name}"):
        render_card(folder, TEMPLATE)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "20 ± 1", True])
def test_a_score_that_is_no_number_is_refused_by_name(value, folder):
    write(folder, records("translation", scores={**SCORES["translation"], "chrf": value}))
    with pytest.raises(ValueError, match=f"the score chrf in metrics.json is {value!r}, which is no finite"):
        render_card(folder, TEMPLATE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"license": "Apache 2.0"}, "license 'Apache 2.0' is not in the Hub's list: take one"),
        ({"license": ""}, "license '' is not in the Hub's list"),
        ({"license": "other"}, "license 'other' says nothing: add license_name and license_link"),
        ({"language": ["English"]}, "language 'English' is no ISO 639 code"),
        ({"language": ["jp"]}, "language 'jp' is no ISO 639 code"),
        ({"language": ["pt-BR"]}, "language 'pt-BR' .* under language_bcp47"),
        ({"datasets": ["data/my/pairs"]}, "datasets 'data/my/pairs' is no id on the Hub: write user/name"),
        ({"repo_id": "a/b/c"}, "'a/b/c' is no id on the Hub"),
    ],
)
def test_bad_options_are_refused(options, message, folder):
    with pytest.raises(ValueError, match=message):
        render_card(folder, TEMPLATE, **options)


def test_folders_without_records_get_an_honest_card(tmp_path, monkeypatch, capsys):
    model = TransformerBlockForCausalLM(tiny_config("decoder"))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    monkeypatch.chdir(tmp_path)
    for has_tokenizer in (False, True):
        if has_tokenizer:
            tiny_tokenizer().save_pretrained(tmp_path)
        card = render_card(tmp_path, TEMPLATE)
        check_card(card, tmp_path)
        data = ModelCard(card).data
        assert (data.license, data.pipeline_tag) == ("unknown", "text-generation")
        assert (data.eval_results, data.datasets, data.metrics) == (None, None, None)
        assert "Nothing is recorded about its data, its training or its results" in card
        assert f"{model.num_parameters():,} parameters" in card
        assert "random weights" not in card
        assert ("There is no tokenizer in this folder" in card) == (not has_tokenizer)
        run(card, capsys)
    with pytest.raises(ValueError, match="has no config.json: give a folder"):
        render_card(tmp_path / "nowhere", TEMPLATE)
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"cut short")
    with pytest.raises(ValueError, match="has no whole safetensors weights"):
        render_card(tmp_path, TEMPLATE)


@pytest.mark.parametrize("task", TASKS)
def test_every_head_without_records_has_code_that_runs(task, saved, tmp_path, monkeypatch, capsys):
    folder = Path(shutil.copytree(saved[task], tmp_path / "bare"))
    for name in ("metrics.json", "training_curve.png"):
        (folder / name).unlink()
    monkeypatch.chdir(folder)
    run(render_card(folder, TEMPLATE), capsys)


def test_the_model_without_a_head_has_a_card(tmp_path):
    TransformerBlockModel(tiny_config("encoder")).save_pretrained(tmp_path)
    card = render_card(tmp_path, TEMPLATE)
    check_card(card, tmp_path)
    assert ModelCard(card).data.pipeline_tag == "feature-extraction"
    assert "AutoModel.from_pretrained(model_id, trust_remote_code=True)" in card


def test_a_card_that_nobody_edited_takes_the_options_of_the_push(folder):
    readme = folder / "README.md"
    assert not is_edited(folder, TEMPLATE)
    for has_readme in (False, True):
        if has_readme:
            readme.write_text(render_card(folder, TEMPLATE), encoding="utf-8")
        assert not is_edited(folder, TEMPLATE)
        card = published_card(folder, TEMPLATE, repo_id="alice/dates", license="mit", language=["de"])
        assert 'model_id = "alice/dates"' in card
        assert (ModelCard(card).data.license, ModelCard(card).data.language) == ("mit", ["de"])


def test_a_card_edited_by_hand_is_published_as_it_is(folder):
    text = render_card(folder, TEMPLATE, license="mit", language=["en", "de"]) + "\n## Thanks\n"
    (folder / "README.md").write_text(text, encoding="utf-8")
    assert 'model_id = "."' in text
    assert published_card(folder, TEMPLATE) == text
    text = text.replace('model_id = "."', 'model_id = "alice/dates"')
    assert is_edited(folder, TEMPLATE)
    options = {"repo_id": "alice/dates", "license": "mit", "language": ["de"]}
    assert published_card(folder, TEMPLATE, **options) == text
    for name, value in (("license", "gpl-3.0"), ("language", ["fr"]), ("datasets", ["some/pairs"])):
        with pytest.raises(
            ValueError, match=f"edited by hand and has no {name} '(gpl-3.0|fr|some/pairs)'.*delete"
        ):
            published_card(folder, TEMPLATE, **{**options, name: value})
    (folder / "README.md").write_text(text.replace("license: mit", "license: MIT"), encoding="utf-8")
    with pytest.raises(ValueError, match="license 'MIT' is not in the Hub's list"):
        published_card(folder, TEMPLATE, repo_id="alice/dates")
    with pytest.raises(ValueError, match="lacks"):
        render_card(write(folder, {}), TEMPLATE)
    assert is_edited(folder, TEMPLATE)


@pytest.mark.parametrize(
    "values",
    [
        *({"data": value} for value in ([1], None, {"train": 1, "test": 1}, "x")),
        *({"scores": value} for value in ("x", None, [1])),
        *({"history": None}, {"steps": "x"}, {"arguments": []}, {"versions": None}, {"languages": 1}),
    ],
    ids=str,
)
def test_records_of_another_shape_are_told_by_their_files(values, folder):
    write(folder, records("translation", **values))
    with pytest.raises(ValueError, match=r"metrics\.json or config\.json lacks or has in another shape"):
        render_card(folder, TEMPLATE)


def test_a_card_that_is_no_text_is_nobodys_to_write_anew(folder):
    (folder / "README.md").write_bytes(b"\xff")
    assert is_edited(folder, TEMPLATE)
    with pytest.raises(ValueError, match=r"README\.md is not UTF-8"):
        published_card(folder, TEMPLATE)


def test_a_mark_before_an_edited_card_is_taken_away(folder):
    text = "---\nlicense: mit\n---\n# Mine\n"
    (folder / "README.md").write_text(text, encoding="utf-8-sig")
    assert published_card(folder, TEMPLATE) == text


def test_paths_of_this_machine_stay_here(tmp_path):
    train = load_script("train")
    assert train.without_folder(["/home/me/a.txt", "data/b.txt", 3, None]) == ["a.txt", "data/b.txt", 3, None]
    assert train.hub_id("user/name") == "user/name"
    assert train.hub_id(str(tmp_path)) is None
    assert train.hub_id(None) is None
