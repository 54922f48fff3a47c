"""Tests of what is checked of a model card without the Hub: its metadata, and what it shows."""

import pytest


pytest.importorskip("datasets", reason='runs after pip install "hf_transformer_block[train]"')

from hf_transformer_block.card import PIPELINE_TAGS
from hf_transformer_block.card_checks import TEXT_TASKS, check_card, is_language
from hf_transformer_block.dates import LANGUAGES
from hf_transformer_block.licenses import LICENSES


RESULT = "{task: {type: translation}, dataset: {type: a, name: a}, metrics: [{type: chrf, value: %s}]}"
CARDS = {
    "# Title": r"README\.md does not begin with metadata",
    "---\nlicense: [\n---\n": r"README\.md: the metadata are no YAML",
    "---\ndate: 2024-99-99\n---\n": r"README\.md: the metadata are no YAML",
    "---\n- mit\n---\n": r"metadata are \['mit'\], no lines of 'key: value'",
    "---\nlicense: [mit, MIT]\n---\n": "license 'MIT'",
    "---\nlicense: other\nlicense_name: mine\n---\n": "license 'other' says nothing",
    "---\nlanguage: no\n---\n": "language False is no ISO 639 code: put no into quotes",
    "---\nlanguage: [en, german]\n---\n": "language 'german'",
    "---\npipeline_tag: Text Generation\n---\n": "pipeline_tag 'Text Generation' is no task of text",
    "---\nbase_model: ./runs/dates\n---\n": "base_model './runs/dates' is no id",
    "---\ndatasets: [squad, a/b/c]\n---\n": "datasets 'a/b/c' is no id",
    "---\ntags: [a, 1]\n---\n": "tags: 1 is no text",
    "---\nmodel-index: [{results: []}]\n---\n": r"model-index\[0\].name is missing",
    "---\nmodel-index: [{name: a}]\n---\n": r"model-index\[0\].results is empty",
    "---\nmodel-index: [{name: a, results: [{metrics: []}]}]\n---\n": r"results\[0\].task.type is missing",
    f"---\nmodel-index: [{{name: a, results: [{RESULT % '.nan'}]}}]\n---\n": "chrf is nan, no plain finite",
    f"---\nmodel-index: [{{name: a, results: [{RESULT % '1e-4'}]}}]\n---\n": "chrf is '1e-4', .*write 1.0e-4",
    f"---\nmodel-index: [{{name: a, results: [{RESULT % 'true'}]}}]\n---\n": "chrf is True",
    "---\nlicense: mit\n---\n[More Information Needed]": r"still holds '\[More Information Needed\]'",
    "---\nlicense: mit\n---\nThis is {{ name }}.": "still holds '{{'",
    '---\nlicense: mit\n---\n```python\nload("path/to/this")\n```\n': "still holds 'path/to/'",
    "---\nlicense: mit\n---\n![a](curve.png)": "shows curve.png, which .* lacks",
    '---\nlicense: mit\n---\n<img width=3 src="curve.png">': "shows curve.png",
}


@pytest.mark.parametrize("text", CARDS)
def test_mistakes_in_cards_are_found(text, tmp_path):
    with pytest.raises(ValueError, match=CARDS[text]):
        check_card(text, tmp_path)


@pytest.mark.parametrize("license", ["{a: b}", "[[mit]]", "true", "2024-01-01"])
def test_a_license_of_another_shape_is_refused_by_its_value(license, tmp_path):
    with pytest.raises(ValueError, match=r"README\.md: license .* is not in the Hub's list"):
        check_card(f"---\nlicense: {license}\n---\n", tmp_path)


def test_good_cards_pass_and_all_mistakes_are_told_at_once(tmp_path):
    (tmp_path / "my curve.png").write_bytes(b"")
    body = "![a](my%20curve.png) ![b](https://example.org/b.png)\n```text\n{{cite}} ![c](gone.png)\n```\n"
    good = f"---\nlanguage: [en, 'no', gsw]\npipeline_tag: summarization\n---\n{body}"
    check_card(good, tmp_path)
    check_card(good.replace("\n", "\r\n"), tmp_path)
    bad = "---\nlicense: MIT\nlanguage: no\n---\n[More Information Needed]"
    with pytest.raises(ValueError, match="license(.|\n)*language(.|\n)*More Information"):
        check_card(bad, tmp_path)


def test_lists_hold_what_they_must_and_not_what_they_must_not():
    assert {"apache-2.0", "mit", "cc-by-4.0", "unknown", "other"} < LICENSES
    assert {*PIPELINE_TAGS.values()} < {*TEXT_TASKS}
    assert all(map(is_language, [*LANGUAGES, "no", "nb", "gsw", "multilingual", "code"]))
    assert not any(map(is_language, ["cn", "cz", "EN", "e", "engl", "", None, 3]))
