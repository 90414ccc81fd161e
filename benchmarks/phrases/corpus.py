"""Draw pairs of phrases: the same content in two languages, written by Babel from CLDR."""

from __future__ import annotations

import datetime
import functools
import hashlib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from babel import Locale, dates, lists, numbers, units

from .templates import KINDS, LANGUAGES, PHRASES

CURRENCIES = "USD EUR GBP JPY CHF PLN TRY RUB CZK SEK NOK DKK CAD AUD BRL INR CNY KRW MXN ZAR".split()
UNITS = {
    "duration": ["duration-hour", "duration-minute", "duration-second", "duration-week", "duration-month"],
    "distance": ["length-kilometer", "length-meter", "length-mile", "length-nautical-mile", "length-centimeter"],
    "mass": ["mass-kilogram", "mass-gram", "mass-pound", "mass-ounce", "mass-milligram", "mass-carat"],
    "temperature": ["temperature-celsius", "temperature-fahrenheit"],
    "power": ["power-watt", "power-kilowatt", "power-megawatt", "power-horsepower"],
}
FIRST_DAY, DAYS = datetime.date(1950, 1, 1), 36_525
HELD_OUT = 0.05


@dataclass(frozen=True)
class Phrase:
    """What is said, in no language.

    Attributes:
        kind: a key of `KINDS`.
        values: for each of its fields: a date; a code; codes; a number; or a number with a unit or a currency.
    """

    kind: str
    values: tuple[object, ...]

    @property
    def is_held_out(self) -> bool:
        """Whether it, one in twenty, is kept from training in every pair of languages."""
        digest = hashlib.sha256(repr((self.kind, self.values)).encode()).digest()
        return int.from_bytes(digest[:8], "big") < HELD_OUT * 2**64


@dataclass(frozen=True)
class Pair:
    """A phrase in two languages.

    Attributes:
        source: begins with a token that names the target's language, such as "<2de>".
        target: its translation, in the first wording.
        source_language: of `LANGUAGES`.
        target_language: likewise, another one.
    """

    source: str
    target: str
    source_language: str
    target_language: str


def language_token(language: str) -> str:
    """Return what a source begins with that is to be translated into `language`."""
    return f"<2{language}>"


def draw_phrase(rng: np.random.Generator) -> Phrase:
    """Draw content: kinds equally likely, names by a law of Zipf, so that some are rare."""
    kind = list(KINDS)[rng.integers(len(KINDS))]
    values: list[object] = []
    for field in KINDS[kind]:
        value = _draw_value(rng, field)
        while value in values:
            value = _draw_value(rng, field)
        values.append(value)
    return Phrase(kind, tuple(values))


def draw_pair(rng: np.random.Generator, *, held_out: bool) -> Pair:
    """Draw a phrase and two languages; the source is in either wording, with long or short forms."""
    phrase = draw_phrase(rng)
    while phrase.is_held_out != held_out:
        phrase = draw_phrase(rng)
    source, target = rng.permutation(len(LANGUAGES))[:2]
    wording, brief = int(rng.integers(2)), bool(rng.integers(2))
    return Pair(
        source=language_token(LANGUAGES[target]) + write(phrase, LANGUAGES[source], wording=wording, brief=brief),
        target=write(phrase, LANGUAGES[target]),
        source_language=LANGUAGES[source],
        target_language=LANGUAGES[target],
    )


def write(phrase: Phrase, language: str, *, wording: int = 0, brief: bool = False) -> str:
    """Say a phrase in a language.

    Args:
        phrase: what to say.
        language: of `LANGUAGES`.
        wording: 0 or 1; a translation has 0.
        brief: "1,234.50 €" and "Mar 3, 2026" for "1,234.50 euros" and "March 3, 2026", which a translation has.

    Returns:
        The text in NFKC, where spaces are plain ones.
    """
    locale = Locale.parse(language)
    said = {
        field: _say(value, field, locale, brief=brief)
        for field, value in zip(KINDS[phrase.kind], phrase.values, strict=True)
    }
    template = PHRASES[phrase.kind][LANGUAGES.index(language)][wording]
    return unicodedata.normalize("NFKC", template.format(**said))


@functools.cache
def places() -> tuple[str, ...]:
    """List the countries and regions that have a name in every language, the likeliest first."""
    return _shuffled("territories", lambda code: len(code) == 2 and code.isalpha() and code not in ("ZZ", "QO"))


@functools.cache
def languages() -> tuple[str, ...]:
    """List the languages that have a name in every language, the likeliest first; those with codes of two letters."""
    return _shuffled("languages", lambda code: len(code) == 2)


# Fields that name one thing or several, and what they choose from.
NAMES = {"place": places, "language": languages}
LISTS = {"places": places, "languages": languages}


def _shuffled(names: str, accepted: Callable[[str], bool]) -> tuple[str, ...]:
    tables = [getattr(Locale.parse(language), names) for language in LANGUAGES]
    known = sorted(set.intersection(*map(set, tables)))
    # Names that two codes share would leave a translation open.
    unique = [c for c in known if all(list(t.values()).count(t[c]) == 1 for t in tables)]
    kept = [code for code in unique if accepted(code)]
    return tuple(kept[i] for i in np.random.default_rng(7).permutation(len(kept)))


def _draw_value(rng: np.random.Generator, field: str) -> object:
    name = field.rstrip("2")
    if name == "date":
        return FIRST_DAY + datetime.timedelta(days=int(rng.integers(DAYS)))
    if name in NAMES:
        return _zipf(rng, NAMES[name]())
    if name in LISTS:
        return tuple(dict.fromkeys(_zipf(rng, LISTS[name]()) for _ in range(rng.integers(2, 5))))
    if name == "percent":
        return int(rng.integers(1, 100))
    return _draw_number(rng, name)


def _draw_number(rng: np.random.Generator, name: str) -> object:
    """Draw a number, with its unit or currency where it has one."""
    if name == "amount":
        currency = CURRENCIES[rng.integers(len(CURRENCIES))]
        is_whole = currency in ("JPY", "KRW") or bool(rng.integers(2))
        value = _magnitude(rng, 6)
        return int(value) if is_whole else value, currency
    if name in UNITS:
        known = UNITS[name]
        value = int(rng.integers(-30, 45)) if name == "temperature" else _magnitude(rng, 4)
        return int(value) if bool(rng.integers(2)) else round(value, 1), known[rng.integers(len(known))]
    return int(_magnitude(rng, 7))


def _zipf(rng: np.random.Generator, values: Sequence[str]) -> str:
    weights = _zipf_weights(len(values))
    return values[int(np.searchsorted(weights, rng.random()))]


@functools.cache
def _zipf_weights(count: int) -> np.ndarray:
    weights = 1 / (np.arange(count) + 10)
    return np.cumsum(weights / weights.sum())


def _magnitude(rng: np.random.Generator, digits: int) -> float:
    """Draw from 2 to 10**digits, all magnitudes alike, with two decimals."""
    return round(float(np.exp(rng.uniform(np.log(2), digits * np.log(10)))), 2)


def _say(value: Any, field: str, locale: Locale, *, brief: bool) -> str:
    name = field.rstrip("2")
    if name == "date":
        return dates.format_date(value, "medium" if brief else "long", locale)
    if name in NAMES:
        return _names(locale, name)[value]
    if name in LISTS:
        return lists.format_list([_names(locale, name)[code] for code in value], locale=locale)
    if name in ("percent", "number"):
        write_number = numbers.format_percent if name == "percent" else numbers.format_decimal
        return write_number(value / 100 if name == "percent" else value, locale=locale)
    return _say_unit(*value, locale, brief=brief)


def _names(locale: Locale, name: str) -> Mapping[str, str]:
    return locale.territories if name.startswith("place") else locale.languages


def _say_unit(value: float, unit: str, locale: Locale, *, brief: bool) -> str:
    """Write an amount of money or of a unit."""
    if unit in CURRENCIES:
        return numbers.format_currency(value, unit, locale=locale, format_type="standard" if brief else "name")
    long = units.format_unit(value, unit, "long", locale=locale)
    # CLDR leaves out a long form that is like the short one, which Babel does not look up.
    return units.format_unit(value, unit, "short", locale=locale) if brief or unit in long else long
