"""Tests of scripts/plot_attention.py: the picture is what the model computes, bad input is told in a line."""

import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import load_script, tiny_config, tiny_tokenizer


pytest.importorskip("matplotlib", reason='runs after pip install "hf_transformer_block[train]"')

from matplotlib.image import imread

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForMaskedLM,
    TransformerBlockForSequenceClassification,
    TransformerBlockModel,
)


SCRIPT = Path(__file__).parents[1] / "scripts/plot_attention.py"
HEADS = (
    (TransformerBlockModel, "encoder"),
    (TransformerBlockForMaskedLM, "encoder"),
    (TransformerBlockForSequenceClassification, "decoder"),
    (TransformerBlockForCausalLM, "decoder"),
    (TransformerBlockForConditionalGeneration, "encoder-decoder"),
)
TEXT = "w5 w9 w7 w7 w30"


@pytest.fixture
def plot_attention():
    return load_script("plot_attention")


def save(
    folder: Path, head: type = TransformerBlockForConditionalGeneration, shape="encoder-decoder", **options
):
    """Saves a tiny model with tokenizer that writes six tokens, and returns the model."""
    model = head(tiny_config(shape, **{"eos_token_id": None, **options})).eval()
    if model.can_generate():
        model.generation_config.max_new_tokens = 6
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def arguments_of(plot_attention, monkeypatch, *words: object):
    monkeypatch.setattr(sys, "argv", ["plot_attention.py", *map(str, words)])
    return plot_attention.parse_arguments()


@torch.no_grad()
def eager(model, layer: int, kind: str | None = None) -> torch.Tensor:
    """Returns a layer's probabilities (H, L, S) of a model that computes all its attention eagerly."""
    model.set_attn_implementation("eager")
    inputs = tiny_tokenizer()(TEXT, return_tensors="pt")
    if kind is None:
        return model(**inputs, output_attentions=True).attentions[layer][0]
    written = model.generate(**inputs)
    assert written.shape == (1, 7)
    outputs = model(**inputs, decoder_input_ids=written[:, :-1], output_attentions=True)
    return getattr(outputs, f"{kind}_attentions")[layer][0]


@pytest.mark.parametrize(("head", "shape"), HEADS)
@pytest.mark.parametrize(("layer", "which"), [(-1, None), (0, 2), (1, 0)])
def test_the_picture_is_the_models_own_attention(
    plot_attention, tmp_path, monkeypatch, head, shape, layer, which
):
    model = save(tmp_path / "saved", head, shape)
    words = [tmp_path / "saved", TEXT, "--output_file", tmp_path / "a.png", "--layer", layer]
    words += [] if which is None else ["--head", which]
    attention = plot_attention.plot(arguments_of(plot_attention, monkeypatch, *words))
    truth = eager(model, layer, "cross" if shape == "encoder-decoder" else None)
    assert truth.std(dim=0).max() > 1e-3  # the heads differ
    truth = truth.mean(dim=0) if which is None else truth[which]
    torch.testing.assert_close(attention.weights, truth, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(attention.weights.sum(dim=-1), torch.ones(len(truth)))
    assert attention.columns == TEXT.split()
    assert imread(tmp_path / "a.png").ndim == 3


@pytest.mark.parametrize("kind", ["cross", "encoder", "decoder"])
def test_an_encoder_decoder_has_three_kinds_of_attention(plot_attention, tmp_path, monkeypatch, kind):
    model = save(tmp_path / "saved", num_decoder_layers=3)
    words = [tmp_path / "saved", TEXT, "--output_file", tmp_path / "a.png", "--kind", kind, "--head", 1]
    attention = plot_attention.plot(arguments_of(plot_attention, monkeypatch, *words))
    torch.testing.assert_close(attention.weights, eager(model, -1, kind)[1], rtol=1e-5, atol=1e-6)
    written = model.generate(**tiny_tokenizer()(TEXT, return_tensors="pt"))[0]
    names = [tiny_tokenizer().decode([token]) for token in written.tolist()]
    rows, columns = {
        "cross": (names[1:], TEXT.split()),
        "encoder": (TEXT.split(), TEXT.split()),
        "decoder": (names[1:], names[:-1]),
    }[kind]
    assert (attention.rows, attention.columns) == (rows, columns)


def test_every_cell_has_the_colour_of_its_probability(plot_attention):
    weights = torch.softmax(torch.randn(5, 9), dim=-1)
    attention = plot_attention.Attention(weights, list("abcde"), list("fghijklmn"), "encoder attention")
    figure = plot_attention.draw(attention)
    figure.savefig(buffer := BytesIO(), format="png", dpi=figure.dpi)
    buffer.seek(0)
    pixels = imread(buffer)
    axes = figure.axes[0]
    image = axes.images[0]
    assert np.array_equal(image.get_array(), weights.numpy())
    assert image.norm.vmin == 0
    for row, column in np.ndindex(5, 9):
        x, y = axes.transData.transform((column, row))
        found = pixels[len(pixels) - 1 - int(y), int(x)]
        assert np.allclose(found, image.cmap(image.norm(float(weights[row, column]))), atol=0.01)
    assert [label.get_text() for label in axes.get_yticklabels()] == list("abcde")
    assert [label.get_text() for label in axes.get_xticklabels()] == list("fghijklmn")


def test_tokens_that_matplotlib_would_misread_keep_their_names(plot_attention, recwarn):
    names = ["$x$", "\N{OPEN BOX}the", "\U0010fffd", "100%", "a_b"]
    attention = plot_attention.Attention(torch.eye(5), names, names, "encoder attention")
    figure = plot_attention.draw(attention)
    figure.savefig(BytesIO(), format="png")
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert shown == [*names[:2], "U+10FFFD", *names[3:]]
    assert not any(label.get_parse_math() for label in figure.axes[0].get_xticklabels())
    assert not recwarn.list


def test_parts_of_characters_are_named_as_they_are_stored(plot_attention):
    from hf_transformer_block.vocabulary import train_tokenizer

    tokenizer = train_tokenizer(iter(["a b"]), "bpe", 300, 64, "encoder")
    ids = torch.tensor(tokenizer("é \n")["input_ids"])
    assert plot_attention.name_tokens(tokenizer, ids) == ["<s>", "Ã", "©", "\N{OPEN BOX}", "\\n", "</s>"]


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (" \n", [], "the text is empty: write something"),
        ("w5 " * 65, [], "65 tokens are more than 64: shorten the text 'w5 w5"),
        (TEXT, ["--layer", "2"], "--layer 2: there are 2 layers: give 0 to 1, or -1 for the last"),
        (TEXT, ["--layer", "-3"], "--layer -3: there are 2 layers"),
        (TEXT, ["--head", "4"], "--head 4: there are 4 heads: give 0 to 3, or none for their mean"),
        (TEXT, ["--head", "-1"], "--head -1: there are 4 heads"),
        (TEXT, ["--kind", "decoder"], "--kind decoder: encoder models have encoder: leave it out"),
        (
            TEXT,
            ["--output_file", "no/such/a.png"],
            "--output_file no/such/a.png: give a .png file in a folder",
        ),
        (TEXT, ["--output_file", "a.jpg"], "--output_file a.jpg: give a .png file"),
    ],
)
def test_bad_input_is_told_before_the_weights_are_read(
    plot_attention, tmp_path, monkeypatch, text, flags, message
):
    save(tmp_path / "saved", TransformerBlockForMaskedLM, "encoder")
    (tmp_path / "saved/model.safetensors").unlink()
    words = [tmp_path / "saved", text, "--output_file", tmp_path / "a.png", *flags]
    with pytest.raises(ValueError, match="^[^\n]*$") as error:
        plot_attention.plot(arguments_of(plot_attention, monkeypatch, *words))
    assert message in str(error.value)
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("question", "text", "message"),
    [
        ("", "w5", "the question is empty: write something"),
        ("w5", " ", "the text is empty: write something"),
        ("w6 " * 60, "w5 " * 9, "69 tokens are more than 64: shorten the question 'w6 w6"),
        ("w6 " * 9, "w5 " * 60, "69 tokens are more than 64: shorten the text 'w5 w5"),
    ],
)
def test_the_field_of_a_pair_that_does_not_do_is_named(plot_attention, question, text, message):
    with pytest.raises(ValueError, match=message):
        plot_attention.encode(tiny_tokenizer(), tiny_config("encoder"), {"question": question, "text": text})


def test_a_text_ends_where_the_tokenizer_cuts_it_for_a_pipeline(plot_attention):
    config, text = tiny_config("encoder", position_embedding="rotary"), {"text": "w5 " * 9}
    assert plot_attention.encode(tiny_tokenizer(), config, text)["input_ids"].shape == (1, 9)
    with pytest.raises(ValueError, match="9 tokens are more than 8: shorten the text 'w5 w5"):
        plot_attention.encode(tiny_tokenizer(model_max_length=8), config, text)


def test_rotary_positions_end_where_a_picture_does(plot_attention, tmp_path, monkeypatch):
    save(tmp_path / "saved", TransformerBlockForMaskedLM, "encoder", position_embedding="rotary")
    words = [tmp_path / "saved", "w5 " * 65, "--output_file", tmp_path / "a.png"]
    assert len(plot_attention.plot(arguments_of(plot_attention, monkeypatch, *words)).rows) == 65
    words[1] = "w5 " * 513
    with pytest.raises(ValueError, match="513 tokens are more than 512: shorten the text"):
        plot_attention.plot(arguments_of(plot_attention, monkeypatch, *words))


def test_the_model_reads_on_the_accelerator(plot_attention, tmp_path, monkeypatch):
    save(tmp_path / "saved")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    places = []

    def write(model, inputs):
        places.extend([model.device.type, *(tensor.device.type for tensor in inputs.values())])
        raise ValueError("no numbers on meta")

    monkeypatch.setattr(plot_attention, "write", write)
    words = [tmp_path / "saved", TEXT, "--output_file", tmp_path / "a.png"]
    arguments = arguments_of(plot_attention, monkeypatch, *words)
    with pytest.raises(ValueError, match="no numbers on meta"):
        plot_attention.plot(arguments)
    assert places == ["meta"] * 3


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def break_json(folder: Path) -> None:
    (folder / "config.json").write_text("{", encoding="utf-8")


def break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()


def break_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"short")


def break_type(folder: Path) -> None:
    (folder / "config.json").write_text(
        '{"model_type": "bert", "architectures": ["BertModel"]}', encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove_config, "holds no config.json: give a folder that train.py or save_pretrained wrote"),
        (break_json, "holds a config.json that cannot be read"),
        (break_type, "holds a model of the type 'bert', not of this family"),
        (break_tokenizer, "holds no tokenizer that can be read"),
        (break_weights, "cannot be loaded"),
    ],
)
def test_a_folder_that_is_no_model_is_told_in_one_line(plot_attention, tmp_path, monkeypatch, spoil, message):
    save(tmp_path / "saved")
    spoil(tmp_path / "saved")
    words = [tmp_path / "saved", TEXT, "--output_file", tmp_path / "a.png"]
    with pytest.raises(ValueError, match="^[^\n]*$") as error:
        plot_attention.plot(arguments_of(plot_attention, monkeypatch, *words))
    assert message in str(error.value)


def test_the_script_runs_without_this_package(tmp_path):
    """Both scripts travel into a Space, where there is none."""
    save(tmp_path / "saved")
    code = "import runpy, sys; sys.modules['hf_transformer_block'] = None; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-W", "error::UserWarning", "-c", code, SCRIPT, "saved", TEXT]
    options = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--output_file", "a.png"], **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cross attention, layer 1, mean of 4 heads: a.png\n"
    assert imread(tmp_path / "a.png").shape[0] > 100
    done = subprocess.run([*command, "--output_file", "b.png", "--layer", "9"], **options)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("plot_attention.py: --layer 9: there are 2 layers")
