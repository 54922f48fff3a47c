"""Tests of the embedded date data set: its texts against babel's, its splits, and one answer per source."""

import sys
import unicodedata
from collections import defaultdict
from datetime import date, timedelta

import pytest

from hf_transformer_block.dates import FIRST_DAY, LANGUAGES, LAST_DAY, SPLITS, STYLES, date_pairs, date_styles


dates = pytest.importorskip("babel.dates", reason='runs after pip install "hf_transformer_block[train]"')

DAY = date(1987, 3, 5)


@pytest.fixture(scope="module")
def styles():
    return {(style.language, style.name): style for style in date_styles()}


@pytest.fixture(scope="module")
def pairs():
    return {split: date_pairs(split, 20_000 if split == "train" else 3_000) for split in SPLITS}


def as_typed(text):
    """Babel's text without format characters, every kind of space as one plain space."""
    visible = "".join(c for c in text if unicodedata.category(c) != "Cf")
    return "".join(" " if unicodedata.category(c) == "Zs" else c for c in visible)


def test_equal_arguments_give_equal_pairs_and_seeds_differ():
    assert date_pairs("train", 500, seed=3) == date_pairs("train", 500, seed=3)
    assert date_pairs("train", 500, seed=3) != date_pairs("train", 500, seed=4)
    assert date_pairs("train", 500, seed=3)[:100] == date_pairs("train", 100, seed=3)


def test_days_are_the_same_on_every_machine():
    assert [pair["target"] for pair in date_pairs("test", 3)] == ["1951-08-09", "2039-03-06", "1922-05-26"]


@pytest.mark.parametrize(
    ("language", "style", "text"),
    [
        ("de", "long", "5. März 1987"),
        ("en", "short", "3/5/1987"),
        ("zh", "full", "1987年3月5日星期四"),
        ("ar", "short", "5/3/1987"),
        ("ru", "long", "5 марта 1987 г."),
        ("ko", "short", "1987. 3. 5."),
    ],
)
def test_known_texts(styles, language, style, text):
    assert styles[language, style].write(DAY) == text


def test_texts_are_babels_but_for_the_century(styles):
    assert styles
    for (language, name), style in styles.items():
        if name in STYLES[:4]:
            text = dates.format_date(DAY, name, language)
        else:
            text = dates.format_skeleton(name, DAY, fuzzy=False, locale=language)
        assert style.write(DAY).replace("1987", "87") == as_typed(text).replace("1987", "87")


def test_every_language_and_style_occurs_and_explains_its_texts(styles, pairs):
    seen = set()
    for pair in pairs["train"]:
        language, colon, text = pair["source"].partition(": ")
        if colon:
            day = date.fromisoformat(pair["target"])
            found = {(language, name) for name in STYLES if styles[language, name].write(day) == text}
            assert found, pair
            seen |= found
    assert seen == {(language, name) for language in LANGUAGES for name in STYLES}


@pytest.mark.parametrize("split", SPLITS)
def test_targets_are_iso_dates_in_range(pairs, split):
    assert len(pairs[split]) >= 3_000
    for pair in pairs[split]:
        assert set(pair) == {"source", "target"}
        assert FIRST_DAY <= date.fromisoformat(pair["target"]) <= LAST_DAY
        assert len(pair["target"]) == 10


def test_splits_share_no_day_and_hold_all_days():
    sizes = {"test": 4_000, "validation": 2_000, "train": 67_049}
    days = {split: {pair["target"] for pair in date_pairs(split, size)} for split, size in sizes.items()}
    assert {split: len(found) for split, found in days.items()} == sizes
    assert len(set.union(*days.values())) == (LAST_DAY - FIRST_DAY).days + 1 == 73_049
    for seed in (1, 2):
        assert {pair["target"] for pair in date_pairs("test", 4_000, seed)} == days["test"]


def test_no_source_has_two_targets_in_two_whole_years(styles):
    targets, bare = defaultdict(set), defaultdict(set)
    for first in (date(1987, 1, 1), date(2012, 1, 1)):
        for day in (first + timedelta(n) for n in range(365)):
            for style in styles.values():
                text = style.write(day)
                bare[text].add(day)
                targets[f"{style.language}: {text}"].add(day)
                if not style.needs_language:
                    targets[text].add(day)
    assert len(targets) > 50_000
    assert [source for source, days in targets.items() if len(days) > 1] == []
    # Without the prefix the check does find what it looks for.
    assert bare["3/5/1987"] == {date(1987, 3, 5), date(1987, 5, 3)}


def test_numbers_alone_carry_their_language_and_other_texts_do_half_the_time(pairs):
    bare = [pair["source"] for pair in pairs["train"] if ": " not in pair["source"]]
    assert not [text for text in bare if not any(map(str.isalpha, text)) and not text[:4].isdigit()]
    named = [pair["source"] for pair in pairs["train"] if "März" in pair["source"]]
    assert 0.35 < sum(text.startswith("de: ") for text in named) / len(named) < 0.65


@pytest.mark.parametrize("split", SPLITS)
def test_sources_have_full_years_and_only_visible_characters(pairs, split):
    for pair in pairs[split]:
        source = pair["source"]
        assert pair["target"][:4] in source
        assert source == as_typed(source)
        assert source.isprintable()
        assert "  " not in source


def test_fifty_thousand_pairs_have_one_target_per_source():
    pairs = date_pairs("train", 50_000)
    assert len(pairs) == 50_000
    targets = defaultdict(set)
    for pair in pairs:
        targets[pair["source"]].add(pair["target"])
    assert max(map(len, targets.values())) == 1


def test_size_zero_is_empty():
    assert date_pairs("test", 0) == []


def test_unknown_split_names_the_splits():
    with pytest.raises(ValueError, match=r"split is 'dev', but must be one of 'test', 'validation', 'train'"):
        date_pairs("dev", 1)


def test_negative_size_names_the_number():
    with pytest.raises(ValueError, match=r"size is -1, but must be 0 or more"):
        date_pairs("train", -1)


def test_missing_babel_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(ImportError, match=r'pip install "hf_transformer_block\[train\]"'):
        date_pairs("train", 1)
