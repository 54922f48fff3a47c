"""Tests of scripts/demo.py: the page of every head in a real headless Chromium."""

import argparse
import itertools
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import load_script


pytest.importorskip("gradio", reason='runs after pip install "hf_transformer_block[ecosystem]"')
pytest.importorskip("selenium", reason='runs after pip install "hf_transformer_block[ecosystem]"')

from page_reader import PATIENCE, PageReader, start_browser
from tiny import writer
from transformers import AutoModelForMaskedLM, AutoModelForQuestionAnswering, AutoTokenizer, pipeline

from hf_transformer_block import (
    TransformerBlockForCausalLM,
    TransformerBlockForConditionalGeneration,
    TransformerBlockForMaskedLM,
    TransformerBlockForQuestionAnswering,
    TransformerBlockForSequenceClassification,
    TransformerBlockForTokenClassification,
    TransformerBlockModel,
)
from hf_transformer_block.vocabulary import train_tokenizer


SCRIPTS = Path(__file__).parents[1] / "scripts"
TEXTS = ("A man rides a bicycle.", "Two dogs play in the snow.", "Who rides what, and where to?")
NEEDS_BROWSER = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver")),
    reason="runs after apt-get install chromium chromium-driver",
)


@pytest.fixture
def demo(monkeypatch):
    """The script, which finds plot_attention.py beside it."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return load_script("demo")


@pytest.fixture(scope="module")
def browser():
    browser = start_browser()
    yield browser
    browser.quit()


@pytest.fixture
def opened(demo, browser):
    """Serves the page of a folder, and opens it in as many tabs as are asked for."""
    pages, first = [], browser.current_window_handle

    def open_page(folder: Path, users: int = 1) -> list[PageReader]:
        page = demo.build_page(demo.load_head(folder))
        pages.append(page)
        _, url, _ = page.launch(prevent_thread_lock=True, quiet=True, share=False, server_name="127.0.0.1")
        return [PageReader(browser, url) for _ in range(users)]

    yield open_page
    for page in pages:
        page.close(verbose=False)
    for tab in set(browser.window_handles) - {first}:
        browser.switch_to.window(tab)
        browser.close()
    browser.switch_to.window(first)


def save(folder: Path, head: type, shape: str, new_tokens: int = 12, **options) -> Path:
    """Saves a random model whose words vary, with a tokenizer of the texts."""
    is_encoder = shape == "encoder"
    tokenizer = train_tokenizer(iter(TEXTS), "word" if is_encoder else "bpe", 330, 64, shape, mask=is_encoder)
    model = writer(head, shape, "vaswani", vocab_size=len(tokenizer), **options)
    if model.can_generate():
        model.generation_config.max_new_tokens = new_tokens
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ready(task: str, folder: Path, **options):
    return pipeline(task, str(folder), trust_remote_code=True, **options)


def percent(score: float) -> str:
    return f"{round(100 * score)}%"


def rows_of(label: str) -> list[tuple[str, str]]:
    """Returns the names and the percentages that a gradio Label shows."""
    return re.findall(r"^(\S+)\n(\d+%)$", label, flags=re.MULTILINE)


@NEEDS_BROWSER
@pytest.mark.slow
def test_a_translation_its_picture_and_what_cannot_be_translated(demo, opened, tmp_path):
    folder = save(tmp_path / "saved", TransformerBlockForConditionalGeneration, "encoder-decoder")
    (page,) = opened(folder)
    expected = ready("translation", folder)(TEXTS[0])[0]["translation_text"]
    page.ask(text=TEXTS[0])
    page.wait(lambda: page.written() == expected)
    head = demo.load_head(folder)
    *_, (_, reading) = head.answer(TEXTS[0])
    address, pixels = page.image()
    assert np.array_equal(pixels, demo.picture(head, reading, 1, None))
    page.choose("layer", "0")
    address, pixels = page.image(other_than=address)
    assert np.array_equal(pixels, demo.picture(head, reading, 0, None))
    page.choose("head", "2")
    address, pixels = page.image(other_than=address)
    assert np.array_equal(pixels, demo.picture(head, reading, 0, 2))
    for text, message in {
        "": "the text is empty: write something",
        "no " * 65: r"\d+ tokens are more than 64: shorten the text 'no no",
    }.items():
        page.ask(text=text)
        shown = page.toast()
        assert re.search(message, shown)
        assert "Traceback" not in shown
        page.wait(lambda: page.written() == "")  # no answer to another text is left
        assert not page.find_all("#attention img")
    page.ask(text=TEXTS[1])
    page.wait(lambda: page.written() == ready("translation", folder)(TEXTS[1])[0]["translation_text"])


@NEEDS_BROWSER
@pytest.mark.slow
def test_two_users_at_once_get_their_own_answers(demo, opened, tmp_path, monkeypatch):
    folder = save(tmp_path / "saved", TransformerBlockForConditionalGeneration, "encoder-decoder")
    head, both, calls = demo.load_head(folder), threading.Barrier(2), itertools.count()
    forward = head.model.forward

    def meet(*args, **kwargs):
        if next(calls) < 2:  # the first waits for the second, which can only be the other user's
            both.wait(PATIENCE)
        return forward(*args, **kwargs)

    head.model.forward = meet
    monkeypatch.setattr(demo, "load_head", lambda folder: head)
    pages = opened(folder, users=2)
    for page, text in zip(pages, TEXTS, strict=False):
        page.ask(text=text)
    translate, pictures = ready("translation", folder), []
    for page, text in zip(pages, TEXTS, strict=False):
        expected = translate(text)[0]["translation_text"]
        page.wait(lambda page=page, expected=expected: page.written() == expected)
        *_, (_, reading) = head.answer(text)
        pictures.append(page.image()[1])
        assert np.array_equal(pictures[-1], demo.picture(head, reading, 1, None))
    assert pages[0].written() != pages[1].written()


def slow_writer(demo, folder: Path, beams: int, seconds: float) -> tuple:
    """Returns the head of a decoder whose every forward takes so long, and a list of its forwards."""
    head = demo.load_head(save(folder, TransformerBlockForCausalLM, "decoder", 50))
    head.model.generation_config.num_beams = beams
    steps, forward = [], head.model.forward

    def slow(*args, **kwargs):
        steps.append(1)
        time.sleep(seconds)
        return forward(*args, **kwargs)

    head.model.forward = slow
    return head, steps


@NEEDS_BROWSER
@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_who_closes_the_page_ends_the_generation(demo, browser, opened, tmp_path, monkeypatch, beams):
    head, steps = slow_writer(demo, tmp_path / "saved", beams, 1)
    monkeypatch.setattr(demo, "load_head", lambda folder: head)
    (page,) = opened(tmp_path / "saved")
    page.ask(text=TEXTS[0])
    page.wait(lambda: len(steps) > 2)
    other = next(tab for tab in browser.window_handles if tab != page.tab)
    browser.close()
    browser.switch_to.window(other)
    begun = len(steps)
    time.sleep(8)
    assert len(steps) <= begun + 3


@NEEDS_BROWSER
@pytest.mark.slow
@pytest.mark.parametrize("is_chosen", [False, True])
def test_no_picture_of_an_older_text_is_shown(demo, opened, tmp_path, monkeypatch, is_chosen):
    """One is asked again while the picture is drawn, the first or that of another layer."""
    (page,) = opened(save(tmp_path / "saved", TransformerBlockForConditionalGeneration, "encoder-decoder"))
    begun, go_on, ended, draw = (*(threading.Event() for _ in range(3)), demo.picture)

    def slow(*arguments):
        begun.set()
        assert go_on.wait(PATIENCE)
        drawn = draw(*arguments)
        ended.set()
        return drawn

    if not is_chosen:
        monkeypatch.setattr(demo, "picture", slow)
    page.ask(text=TEXTS[0])
    if is_chosen:
        page.image()
        monkeypatch.setattr(demo, "picture", slow)
        page.choose("layer", "0")
    assert begun.wait(PATIENCE)
    page.ask(text="")
    page.toast()
    go_on.set()
    assert ended.wait(PATIENCE)
    time.sleep(3)  # in which it would come
    assert page.written() == ""
    assert not page.find_all("#attention img")
    page.ask(text=TEXTS[1])
    page.image()


@NEEDS_BROWSER
@pytest.mark.slow
def test_a_text_goes_on_as_generate_writes_it(opened, tmp_path):
    folder = save(tmp_path / "saved", TransformerBlockForCausalLM, "decoder")
    (page,) = opened(folder)
    options = {"do_sample": False, "return_full_text": False, "max_new_tokens": 12}
    expected = ready("text-generation", folder)(TEXTS[0], **options)[0]["generated_text"]
    page.ask(text=TEXTS[0])
    page.wait(lambda: page.written() == expected)
    page.image()
    page.ask(text="")
    assert "the text is empty" in page.toast()
    page.ask(text="o" * 64)
    assert "the text has 64 tokens, after which there is no room to write on: shorten it" in page.toast()


@NEEDS_BROWSER
@pytest.mark.slow
def test_a_gap_is_filled(opened, tmp_path):
    folder = save(tmp_path / "saved", TransformerBlockForMaskedLM, "encoder")
    (page,) = opened(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    assert "Write <mask> where a word is missing." in " ".join(page.find("body").text.split())
    text = "A man <mask> a bicycle."
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[inputs["input_ids"] == tokenizer.mask_token_id][0]
    probabilities = logits.softmax(dim=-1)
    probabilities[tokenizer.all_special_ids] = 0  # they can stand in no gap
    scores, ids = probabilities.topk(5)
    expected = [
        (tokenizer.decode([token]), percent(score))
        for token, score in zip(ids.tolist(), scores.tolist(), strict=True)
    ]
    page.ask(text=text)
    page.wait(lambda: rows_of(page.shown()) == expected)
    page.image()
    for text, gaps in (("A man rides.", 0), ("A <mask> rides <mask>", 2)):
        page.ask(text=text)
        assert f"the text has {gaps} gaps: write <mask> once" in page.toast()


@NEEDS_BROWSER
@pytest.mark.slow
def test_a_text_is_classified(opened, tmp_path):
    folder = save(tmp_path / "saved", TransformerBlockForSequenceClassification, "encoder", num_labels=3)
    (page,) = opened(folder)
    for text in TEXTS[:2]:
        (expected,) = ready("text-classification", folder, top_k=None)([text])
        page.ask(text=text)
        wanted = [(label["label"], percent(label["score"])) for label in expected]
        page.wait(lambda wanted=wanted: rows_of(page.shown()) == wanted)
        page.image()
    page.ask(text="  ")
    assert "the text is empty" in page.toast()


@NEEDS_BROWSER
@pytest.mark.slow
def test_words_are_marked(opened, tmp_path):
    folder = save(tmp_path / "saved", TransformerBlockForTokenClassification, "encoder", num_labels=5)
    (page,) = opened(folder)
    spans = ready("token-classification", folder, aggregation_strategy="simple")(TEXTS[0])
    assert len({span["entity_group"] for span in spans}) > 1
    page.ask(text=TEXTS[0])
    page.wait(lambda: all(span["word"].strip() in page.shown() for span in spans))
    legend, marked = (
        [(part.text, part.value_of_css_property("background-color")) for part in page.find_all(selector)]
        for selector in ("#answer .legend-item", "#answer .token.highlighted")
    )
    names = {colour: name for name, colour in legend}
    found = [(text.strip(), names[colour]) for text, colour in marked]
    assert found == [(TEXTS[0][s["start"] : s["end"]].strip(), s["entity_group"]) for s in spans]
    page.image()


@NEEDS_BROWSER
@pytest.mark.slow
def test_a_question_is_answered_from_its_text(opened, tmp_path):
    folder = save(tmp_path / "saved", TransformerBlockForQuestionAnswering, "encoder")
    (page,) = opened(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForQuestionAnswering.from_pretrained(folder, trust_remote_code=True)
    encoded = tokenizer("Who?", TEXTS[0], return_offsets_mapping=True, return_tensors="pt")
    offsets = encoded.pop("offset_mapping")[0].tolist()
    sides = encoded.sequence_ids(0)
    with torch.no_grad():
        outputs = model(**encoded)
    starts, ends = outputs.start_logits[0].tolist(), outputs.end_logits[0].tolist()
    context = [index for index, side in enumerate(sides) if side == 1]
    spans = [(starts[i] + ends[j], i, j) for i in context for j in context if i <= j < i + 30]
    _, first, last = max(spans)
    page.ask(question="Who?", text=TEXTS[0])
    page.wait(lambda: page.written() == TEXTS[0][offsets[first][0] : offsets[last][1]].strip())
    page.image()
    for field in ("question", "text"):
        page.ask(**{"question": "Who?", "text": TEXTS[0], field: ""})
        assert f"the {field} is empty" in page.toast()


def test_the_texts_of_two_users_grow_side_by_side(demo, tmp_path):
    """Without a browser, and so that one's tokens certainly come between the other's."""
    folder = save(tmp_path / "saved", TransformerBlockForCausalLM, "decoder", 30)
    head, generator = demo.load_head(folder), ready("text-generation", folder)
    answers = [head.answer(text) for text in TEXTS[:2]]
    pairs = [tuple(next(answer) for answer in answers) for _ in range(10)]
    assert all(pair[0][0] != pair[1][0] for pair in pairs[5:])
    assert pairs[-1][0][1] is None  # both still write
    for answer, text in zip(answers, TEXTS, strict=False):
        *_, (shown, reading) = answer
        options = {"do_sample": False, "return_full_text": False, "max_new_tokens": 30}
        assert shown == generator(text, **options)[0]["generated_text"]
        assert reading is not None


@pytest.mark.parametrize("beams", [1, 3])
def test_a_user_who_leaves_ends_the_generation(demo, tmp_path, beams):
    head, steps = slow_writer(demo, tmp_path / "saved", beams, 0.05)
    answer = head.answer(TEXTS[0])
    assert next(answer)[1] is None  # it still writes
    answer.close()
    assert 0 < len(steps) < 40


def test_beams_are_shown_when_they_end(demo, tmp_path):
    folder = save(tmp_path / "saved", TransformerBlockForConditionalGeneration, "encoder-decoder")
    head = demo.load_head(folder)
    head.model.generation_config.num_beams = 3
    *_, (shown, _) = head.answer(TEXTS[0])
    assert shown == ready("translation", folder)(TEXTS[0], num_beams=3)[0]["translation_text"]


@pytest.mark.parametrize(
    ("head", "work"),
    [
        (TransformerBlockForMaskedLM, "fill"),
        (TransformerBlockForSequenceClassification, "classify"),
        (TransformerBlockForTokenClassification, "tag"),
    ],
)
def test_pipelines_and_inputs_are_where_the_model_is(demo, tmp_path, monkeypatch, head, work):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    loaded = demo.load_head(save(tmp_path / "saved", head, "encoder"))
    assert loaded.model.device.type == getattr(loaded, work).device.type == "meta"
    assert {tensor.device.type for tensor in loaded.encode(TEXTS[0]).values()} == {"meta"}


def test_a_folder_without_a_head_or_model_gets_a_line(tmp_path):
    TransformerBlockModel(writer(TransformerBlockModel, "encoder", "vaswani").config).save_pretrained(
        tmp_path / "bare"
    )
    for folder, message in {
        "bare": "demo.py: bare holds TransformerBlockModel, for which there is no page: save a head",
        "none": "demo.py: none holds no config.json: give a folder that train.py or save_pretrained wrote",
    }.items():
        command = [sys.executable, str(SCRIPTS / "demo.py"), folder]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr.splitlines()[-1]) == (1, message)


def test_a_text_that_a_client_leaves_out_is_empty(demo, tmp_path):
    head = demo.load_head(save(tmp_path / "saved", TransformerBlockForMaskedLM, "encoder"))
    with pytest.raises(demo.gradio.Error, match="the text is empty: write something"):
        list(demo.told(head.answer)(None))


def test_a_port_is_looked_at_before_anything_is_loaded(demo):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be used .*: give another"):
            demo.port(str(taken.getsockname()[1]))
    assert demo.port("0") > 0  # any that is free
    for text in ("99999", "-1", "http"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text} is no port: give one from 1024"):
            demo.port(text)


def test_the_guides_commands_parse_and_its_pictures_are_there_and_small(demo, monkeypatch):
    guide = SCRIPTS.parent / "docs/demo.md"
    text = guide.read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("python scripts/")]
    assert len(commands) == 4
    for _, script, *words in commands:
        monkeypatch.setattr(sys, "argv", [script, *words])
        load_script(Path(script).stem).parse_arguments()
    pictures = re.findall(r"!\[[^\]]+\]\((.+?)\)", text)
    assert len(pictures) == 3
    assert all((guide.parent / picture).stat().st_size < 150_000 for picture in pictures)
