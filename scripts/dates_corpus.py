"""Dates as people write them: CLDR formats of many locales through Babel, with their ISO 8601 form."""

from __future__ import annotations

import datetime
import functools
import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass

import babel
import babel.dates
import numpy as np

LOCALES = (
    "en_US en_GB de fr es it pt_BR nl sv da nb fi pl cs hu ro hr tr ru uk bg el he ar hi th vi id ja ko zh_Hans zh_Hant"
).split()
SKELETONS = "yMd yMEd yMMMd yMMMEd yMMMMd yMMMMEEEEd".split()
FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2100, 12, 31)
DAYS = (LAST - FIRST).days + 1


@dataclass(frozen=True)
class Format:
    """One way of writing a date.

    Attributes:
        locale: CLDR locale, such as "pt_BR".
        pattern: CLDR date pattern, such as "d 'de' MMMM 'de' y".
        held_out: never seen in training.
    """

    locale: str
    pattern: str
    held_out: bool

    def write(self, date: datetime.date) -> str:
        """Write `date` this way."""
        return babel.dates.format_date(date, self.pattern, self.locale)


@dataclass(frozen=True)
class Example:
    """A written date and what it means.

    Attributes:
        text: as written.
        iso: YYYY-MM-DD.
        format: how it was written.
    """

    text: str
    iso: str
    format: Format


def _hash(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


@functools.cache
def is_held_out(date: datetime.date) -> bool:
    """Say whether `date`, one in twenty, is kept from training."""
    return _hash(date.isoformat()) < 0.05


@functools.cache
def formats() -> tuple[Format, ...]:
    """List every pattern of every locale that names a full year.

    Two-digit years are left out: between 1900 and 2100 they name two or three
    dates. A few pairs of locale and pattern are held out, never one of
    a locale's first four patterns.
    """
    found = []
    for name in LOCALES:
        locale = babel.Locale.parse(name)
        patterns = [locale.date_formats[length].pattern for length in ("full", "long", "medium", "short")]
        patterns += [locale.datetime_skeletons[key].pattern for key in SKELETONS if key in locale.datetime_skeletons]
        kept = [p for p in dict.fromkeys(patterns) if not re.search(r"(?<!y)yy(?!y)", p) and "d" in p]
        for index, pattern in enumerate(kept):
            found.append(Format(name, pattern, index >= 4 and _hash(f"{name} {pattern}") < 1 / 5))
    return tuple(found)


@functools.cache
def ambiguous() -> frozenset[tuple[Format, int, int, int, bool]]:
    """Find what reads as two dates.

    A text is ambiguous when some format, of any locale, writes another date the
    same way: 03/04/2026 is in April in Paris and in March in New York. What is
    written depends on the year only through its digits, its first weekday and
    whether it is a leap year, so fourteen years stand for all.

    Returns:
        (format, month, day, first weekday of the year, is leap year).
    """
    result = set()
    calendars = {_calendar(year): year for year in range(1990, 2030)}
    for (weekday, leap), year in calendars.items():
        meanings: dict[str, dict[datetime.date, list[Format]]] = defaultdict(lambda: defaultdict(list))
        for ordinal in range(datetime.date(year, 1, 1).toordinal(), datetime.date(year + 1, 1, 1).toordinal()):
            date = datetime.date.fromordinal(ordinal)
            for form in formats():
                meanings[form.write(date).casefold()][date].append(form)
        for dates in meanings.values():
            if len(dates) > 1:
                for date, forms in dates.items():
                    result.update((form, date.month, date.day, weekday, leap) for form in forms)
    return frozenset(result)


@functools.cache
def _calendar(year: int) -> tuple[int, bool]:
    return datetime.date(year, 1, 1).weekday(), datetime.date(year, 12, 31).timetuple().tm_yday == 366


def is_ambiguous(form: Format, date: datetime.date) -> bool:
    """Say whether `date` written as `form` also reads as another date."""
    return (form, date.month, date.day, *_calendar(date.year)) in ambiguous()


def draw(rng: np.random.Generator, forms: tuple[Format, ...], *, held_out_dates: bool) -> Example:
    """Draw one unambiguous example, locales equally likely, then formats, then dates."""
    by_locale: dict[str, list[Format]] = _group(forms)
    while True:
        choices = by_locale[list(by_locale)[rng.integers(len(by_locale))]]
        form = choices[rng.integers(len(choices))]
        date = FIRST + datetime.timedelta(days=int(rng.integers(DAYS)))
        if is_held_out(date) == held_out_dates and not is_ambiguous(form, date):
            return Example(form.write(date), date.isoformat(), form)


@functools.cache
def _group(forms: tuple[Format, ...]) -> dict[str, list[Format]]:
    groups: dict[str, list[Format]] = defaultdict(list)
    for form in forms:
        groups[form.locale].append(form)
    return dict(groups)


def roughen(text: str, rng: np.random.Generator) -> str:
    """Write `text` as people type it: sometimes without commas, in small or capital letters."""
    if any(character.isalpha() for character in text):
        if rng.random() < 0.15:
            text = text.replace(",", "")
        case = rng.random()
        text = text.lower() if case < 0.15 else text.upper() if case < 0.2 else text
    return text
