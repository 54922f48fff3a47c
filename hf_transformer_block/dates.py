"""The training script's default data set: dates as sixteen languages write them, and in ISO 8601."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from random import Random
from typing import TYPE_CHECKING, Literal


if TYPE_CHECKING:
    from babel import Locale
    from babel.dates import DateTimePattern

LANGUAGES = ("en", "zh", "de", "fr", "es", "ru", "ar", "ja", "pt", "it", "nl", "pl", "tr", "ko", "vi", "sv")

# CLDR's four lengths, and the skeletons (fields without their order) that people write besides.
STYLES = ("short", "medium", "long", "full", "yMMMd", "yMMMMd", "yMMMEd", "yMd")

FIRST_DAY, LAST_DAY = date(1900, 1, 1), date(2099, 12, 31)

SPLITS = {"test": slice(0, 4_000), "validation": slice(4_000, 6_000), "train": slice(6_000, None)}

# U+200E, U+200F and U+061C only steer the direction of text on a screen; nobody types them.
_DIRECTION_MARKS = dict.fromkeys([0x200E, 0x200F, 0x061C])


@dataclass(frozen=True)
class DateStyle:
    """One way in which one language writes a date.

    Source: Unicode CLDR, https://cldr.unicode.org.
    """

    language: str
    name: str
    pattern: DateTimePattern
    locale: Locale

    @property
    def needs_language(self) -> bool:
        """Whether the text alone leaves open which number is the day: 3/5/1987 is March in en, May in es.

        A month's name settles it, and so does a leading year, after which all our languages put the month.
        """
        return "MMM" not in self.pattern.pattern and not self.pattern.pattern.startswith("y")

    def write(self, day: date) -> str:
        """The day in this style, as people type it: no invisible characters, single plain spaces."""
        return " ".join(self.pattern.apply(day, self.locale).translate(_DIRECTION_MARKS).split())


def date_styles() -> list[DateStyle]:
    """Every language of `LANGUAGES` in each of the `STYLES` that the installed CLDR has for it.

    Raises ImportError without babel.
    """
    try:
        from babel import Locale
        from babel.dates import parse_pattern
    except ModuleNotFoundError:
        raise ImportError('dates need babel: pip install "hf_transformer_block[train]"') from None
    styles = []
    for locale in map(Locale.parse, LANGUAGES):
        formats = {**locale.date_formats, **locale.datetime_skeletons}
        for name in filter(formats.__contains__, STYLES):
            # 87 names no century, and our days span two: the year is always written in full.
            pattern = parse_pattern(re.sub("y+", "y", formats[name].pattern))
            styles.append(DateStyle(locale.language, name, pattern, locale))
    return styles


def _shuffled(days: list[date], rng: Random) -> list[date]:
    # Of Random's methods, only random() promises the same numbers in every Python version.
    return sorted(days, key=lambda _: rng.random())


def _split_days(split: str) -> list[date]:
    days = [date.fromordinal(n) for n in range(FIRST_DAY.toordinal(), LAST_DAY.toordinal() + 1)]
    return _shuffled(days, Random("splits"))[SPLITS[split]]


def date_pairs(
    split: Literal["train", "validation", "test"], size: int, seed: int = 0
) -> list[dict[str, str]]:
    """Draws pairs like {"source": "5. März 1987", "target": "1987-03-05"}, each source with one answer.

    A day belongs to one split whatever the seed, and comes again only once all days of its split have come. A
    source that could be read in two ways starts with its language ("en: 3/5/1987"), others do half the time.
    Equal arguments give equal pairs, on every machine with the same babel (which carries CLDR).

    Raises ValueError for an unknown split or a negative size, ImportError without babel.
    Source: Unicode CLDR, https://cldr.unicode.org; the target is the calendar date of ISO 8601-1:2019.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}, but must be one of {', '.join(map(repr, SPLITS))}")
    if size < 0:
        raise ValueError(f"size is {size}, but must be 0 or more: it counts the pairs to draw")
    styles = date_styles()
    rng = Random(f"{split} {seed}")
    days = _shuffled(_split_days(split), rng)
    pairs = []
    for i in range(size):
        day = days[i % len(days)]
        style = styles[int(rng.random() * len(styles))]
        source = style.write(day)
        # The coin is tossed for every pair, so that all later draws are independent of this one's style.
        if rng.random() < 0.5 or style.needs_language:
            source = f"{style.language}: {source}"
        pairs.append({"source": source, "target": day.isoformat()})
    return pairs
