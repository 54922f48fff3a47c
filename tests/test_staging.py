"""Tests of what goes to the Hub: the files of a model, and nothing that nobody means to publish."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import tiny_config
from safetensors.torch import save_file
from transformers import BertConfig, BertModel


pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')

from hf_transformer_block import TransformerBlockModel
from hf_transformer_block.staging import Staged, stage, staged_model
from hf_transformer_block.vocabulary import train_tokenizer


PROJECT = Path(__file__).parents[1]
CARD = "---\nlicense: mit\n---\n# A card\n"


def staged_of(folder: Path, **options) -> Staged:
    target = folder.with_name("staged")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    return stage(folder, target, CARD, **options)


def stage_with_card(folder: Path) -> None:
    with staged_model(folder, PROJECT / "model_card.md", PROJECT / "LICENSE"):
        pass


def test_a_models_files_are_staged_and_what_else_a_training_leaves_is_not(saved):
    of_the_model = {file.name for file in saved.iterdir()}
    (saved / "checkpoints/step-8").mkdir(parents=True)
    (saved / "checkpoints/step-8/optimizer.bin").write_bytes(b"state")
    (saved / "wandb").mkdir()
    for name in ("arguments.json", "run.json", "metrics.jsonl", "notes.txt"):
        (saved / name).write_text("/home/me/secret-project", encoding="utf-8")
    (saved / "README.md").write_text("another card", encoding="utf-8")
    staged = staged_of(saved)
    assert set(staged.files) == of_the_model | {"README.md"}
    assert staged.left_out == [
        *("arguments.json", "checkpoints", "metrics.jsonl", "notes.txt", "run.json", "wandb")
    ]
    assert (staged.folder / "README.md").read_text(encoding="utf-8") == CARD
    for name, size in staged.files.items():
        assert (staged.folder / name).stat().st_size == size
        if name != "README.md":
            assert (staged.folder / name).read_bytes() == (saved / name).read_bytes()


def test_the_folders_own_license_goes_before_ours(saved, tmp_path):
    (tmp_path / "ours").write_text("ours", encoding="utf-8")
    assert (staged_of(saved, license_file=tmp_path / "ours").folder / "LICENSE").read_text() == "ours"
    (saved / "LICENSE").write_text("mine", encoding="utf-8")
    (tmp_path / "again").mkdir()
    staged = stage(saved, tmp_path / "again", CARD, license_file=tmp_path / "ours")
    assert (staged.folder / "LICENSE").read_text(encoding="utf-8") == "mine"


def test_sharded_weights_go_along_whole(tmp_path):
    TransformerBlockModel(tiny_config("encoder")).save_pretrained(tmp_path / "saved", max_shard_size="20kB")
    shards = {file.name for file in (tmp_path / "saved").glob("model-*.safetensors")}
    assert len(shards) > 1
    assert shards | {"model.safetensors.index.json"} < set(staged_of(tmp_path / "saved").files)
    (tmp_path / "again").mkdir()
    (tmp_path / "saved" / min(shards)).unlink()
    with pytest.raises(ValueError, match=f"lacks {min(shards)}, which model.safetensors.index.json names"):
        stage(tmp_path / "saved", tmp_path / "again", CARD)


def test_a_users_own_modules_go_along(saved):
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    config["auto_map"]["AutoModelForMaskedLM"] = "my_model.MyModel"
    config["auto_map"]["AutoModelForCausalLM"] = "user/other--theirs.Model"  # which stays where it is
    (saved / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (saved / "my_model.py").write_text("from .my_helpers import x\nclass MyModel: ...", encoding="utf-8")
    (saved / "my_helpers.py").write_text("x = 1", encoding="utf-8")
    tokenizer = {"auto_map": {"AutoTokenizer": ["my_tokenizer.MyTokenizer", None]}}
    (saved / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (saved / "my_tokenizer.py").write_text("class MyTokenizer: ...", encoding="utf-8")
    (saved / "notes.py").write_text("x = 2", encoding="utf-8")
    staged = staged_of(saved)
    assert {"my_model.py", "my_helpers.py", "my_tokenizer.py"} < set(staged.files)
    assert staged.left_out == ["notes.py"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (".env", "HF_TOKEN=x", r"\.env is no part of a model, and may hold secrets: move it out"),
        ("optimizer.pt", "x", r"optimizer\.pt is a pickle, which can run code"),
        ("optimizer_state", "x", "is an optimizer's or trainer's state"),
        ("training_args.bin", "x", r"training_args\.bin is a pickle"),
        ("weights.PKL", "x", r"weights\.PKL is a pickle"),
        *(
            (name, "x", "may hold secrets: move it out")
            for name in (
                *(
                    "server.key",
                    "prod.env",
                    ".git-credentials",
                    "credentials",
                    "aws_credentials.csv",
                    ".netrc",
                ),
                *(
                    "secrets.json",
                    "Secrets.yaml",
                    "client_secret_1.json",
                    "id_ecdsa",
                    "passwords.txt",
                    ".ssh",
                ),
            )
        ),
        ("metrics.json", '{"bleu": NaN}', "metrics.json holds NaN, which JSON has no number for"),
        (
            "config.json",
            '{"a": NaN}',
            "which JSON has no number for: put a finite one there",
        ),
        ("metrics.json", '{"bleu": -Infinity}', "holds -Infinity"),
        ("metrics.json", '{"bleu": ', "is no JSON"),
        (
            "metrics.json",
            '{"file": ["/data/corpus/train.en"]}',
            "path '/data/corpus/train.en' of this machine",
        ),
        ("metrics.json", r'{"file": "C:\\corpus\\train.en"}', "of this machine"),
        ("metrics.json", '{"command": "train.py --train_files=/home/me/x.txt"}', "'/home/me/x.txt' of this"),
        ("metrics.json", '{"/home/me/key": 1}', "path '/home/me/key' of this machine"),
        ("metrics.json", '{"loss": 1e999}', "holds 1e999"),
        (
            "generation_config.json",
            '{"note": "hf_abcdefghijklmnopqrstuvwxyz012345"}',
            r"a Hugging Face token",
        ),
        ("chat_template.jinja", "ghp_" + "a" * 36, r"a GitHub token \(ghp_aa\.\.\.\)"),
        ("chat_template.jinja", "AKIA" + "A" * 16, "an AWS key"),
        ("chat_template.jinja", "-----BEGIN RSA PRIVATE KEY-----", "a private key"),
        ("chat_template.jinja", "see /home/me/x", "path '/home/me/x' of this machine"),
        ("chat_template.jinja", "rows of /mnt/disk/rows.csv", "path '/mnt/disk/rows.csv' of this machine"),
        ("metrics.json", '{"note": "see /data/corpus/a.txt"}', "path '/data/corpus/a.txt' of this machine"),
        ("tokenizer_config.json", '{"auto_map": ["my.Tokenizer"]}', "has not the shape"),
        ("tokenizer_config.json", "[1]", "is a JSON list, no object"),
        ("generation_config.json", "[1]", "is a JSON list, no object"),
        ("model.safetensors.index.json", '{"weight_map": 1}', "has not the shape"),
        ("config.json", b"\xff{}", "is not UTF-8"),
        ("config.json", '{"model_type": "bert"}', "is not a model of this family"),
        ("chat_template.jinja", b"\xff\xfe", "is not UTF-8"),
        ("model.safetensors", b"\0" * 40, "is no whole safetensors file"),
        ("model-00001-of-00002.safetensors", b"x", "is not part of the model: delete it"),
        ("config.json", "{}", "has no auto_map"),
        ("config.json", "{", "is no JSON"),
    ],
)
def test_what_must_not_be_published_is_refused_by_name(saved, name, content, message):
    (saved / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as error:
        staged_of(saved)
    assert str(saved / name) in str(error.value)
    assert "abcdefghijkl" not in str(error.value)  # a secret is not shown


def test_a_token_in_the_card_is_refused_by_the_folders_name(saved, tmp_path):
    (tmp_path / "staged").mkdir()
    with pytest.raises(ValueError, match="holds what looks like a Hugging Face token") as error:
        stage(saved, tmp_path / "staged", f"{CARD}hf_{'a' * 30}")
    assert str(saved / "README.md") in str(error.value)


def test_a_text_that_has_slashes_is_no_path(saved):
    text = {"example": "/r/AskReddit is a place", "rate": "1/2", "url": "https://example.com/home/me"}
    (saved / "metrics.json").write_text(json.dumps(text), encoding="utf-8")
    assert "metrics.json" in staged_of(saved).files


SECRETS = (
    *("hf_" + "aB3" * 10, "ghp_" + "a1" * 18, "xoxb-" + "1" * 12 + "-abc", "AKIA" + "A1" * 8),
    *("AIza" + "aB3-_" * 7, "sk-" + "aB3_" * 9, "-----BEGIN OPENSSH PRIVATE KEY-----"),
    *("https://me:s3cret@example.org/x", "postgres://admin:pass!word@db", "WANDB_API_KEY=" + "0a1b" * 10),
    *("--api-key " + "0a1b" * 10, "password: " + "x" * 20 + "1"),
)
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "source.spm")


@pytest.mark.parametrize("before", ["\u0120", "\n"])
@pytest.mark.parametrize("is_ascii", [False, True])
@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_found_in_every_kind_of_file(saved, secret, before, is_ascii):
    other = {"notes": f"a {before}{secret} b"}
    for name in (*VOCABULARIES, "config.json", "chat_template.jinja", "training_curve.png"):
        kept = (saved / name).read_bytes() if (saved / name).exists() else None
        config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
        text = json.dumps(config | other if name == "config.json" else other, ensure_ascii=is_ascii)
        (saved / name).write_bytes(b"\xff\x00" * name.endswith((".png", ".model")) + text.encode())
        with pytest.raises(ValueError, match=f"{name} holds what looks like a") as error:
            staged_of(saved)
        assert secret[7:] not in str(error.value)
        (saved / name).unlink() if kept is None else (saved / name).write_bytes(kept)
    for about in (other, {"wandb_api_key": "0a1b" * 10}):
        save_file({"a": torch.zeros(1)}, saved / "model.safetensors", metadata=about)
        with pytest.raises(ValueError, match="model.safetensors holds what looks like a"):
            staged_of(saved)


def test_vocabularies_and_texts_without_secrets_pass(saved):
    """A byte-level vocabulary of this project's texts and Python's own sources; texts about secrets."""
    sources = [
        *PROJECT.rglob("*.md"),
        *PROJECT.glob("hf_transformer_block/*.py"),
        *Path(json.__file__).parents[1].glob("*.py"),
    ]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in sources]
    assert sum(map(len, texts)) > 4_000_000
    train_tokenizer(iter(texts), "bpe", 8000, 64, "encoder").save_pretrained(saved)
    vocabulary = json.loads((saved / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert len(vocabulary) == 8000
    (saved / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (saved / "chat_template.jinja").write_text(
        "api_key = os.environ['WANDB_API_KEY'], password: <yours>, token: hf_xxx, a task-sk-learn-like-name, "
        "https://<user>:<password>@host, https://example.org:80/@me, git+ssh://git@example.org/x, "
        "https://example.org/data/x, ./data/x, /data and/or /mnt, https://{user}:{token}@host",
        encoding="utf-8",
    )
    assert {"tokenizer.json", "vocab.json", "chat_template.jinja"} < set(staged_of(saved).files)


@pytest.mark.parametrize(
    "values",
    [
        *({"auto_map": value} for value in (None, [], 3, "my.Model", {"AutoModel": 3}, {"AutoModel": [1]})),
        *({"custom_pipelines": value} for value in (None, [1], 1, {"translation": 1}, {"translation": {}})),
    ],
    ids=str,
)
def test_a_configuration_of_another_shape_is_told_by_its_file(saved, values):
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    (saved / "config.json").write_text(json.dumps(config | values), encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json has not the shape that save_pretrained gives it"):
        staged_of(saved)


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.json", "model.safetensors", "README.md", "tokenizer_config.json"]
)
def test_a_folder_in_place_of_a_file_is_named(saved, name):
    (saved / name).unlink(missing_ok=True)
    (saved / name).mkdir()
    with pytest.raises(ValueError, match=name):
        stage_with_card(saved)


def test_a_folder_of_another_family_and_a_card_in_another_encoding_are_told_by_name(saved):
    (saved / "README.md").write_bytes("# Größe".encode("latin-1"))
    with pytest.raises(ValueError, match=r"README\.md is not UTF-8"):
        stage_with_card(saved)
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    BertModel(config).save_pretrained(saved)
    with pytest.raises(ValueError, match="is not a model of this family"):
        stage_with_card(saved)


def test_what_no_push_sends_is_left_out_and_listed(saved, tmp_path):
    """Names that may hold a secret count at the top alone; what is deeper stays where it is."""
    (tmp_path / "private.txt").write_text("mine", encoding="utf-8")
    (saved / "link").symlink_to(tmp_path / "private.txt")
    (saved / "model.safetensors.tmp").write_bytes(b"half")
    (saved / "folder").mkdir()
    (saved / "folder/.env").write_text("x", encoding="utf-8")
    staged = staged_of(saved)
    assert staged.left_out == ["folder", "link", "model.safetensors.tmp"]
    assert not {"folder", "link", "model.safetensors.tmp"} & {file.name for file in staged.folder.rglob("*")}


def test_a_link_out_of_the_folder_is_refused(saved, tmp_path):
    (tmp_path / "private.txt").write_text("mine", encoding="utf-8")
    (saved / "chat_template.jinja").symlink_to(tmp_path / "private.txt")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is no plain file of that folder"):
        staged_of(saved)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "holds no config.json: give a folder that train.py or save_pretrained wrote"),
        ("model.safetensors", "holds no model.safetensors: let the training finish"),
        ("modeling_hf_transformer_block.py", "lacks modeling_hf_transformer_block.py"),
    ],
)
def test_what_a_model_needs_is_missed_by_name(saved, name, message):
    (saved / name).unlink()
    with pytest.raises(ValueError, match=message):
        staged_of(saved)


def test_half_written_weights_are_refused(saved):
    save_file({"a": torch.zeros(100)}, saved / "model.safetensors")
    whole = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        staged_of(saved)
