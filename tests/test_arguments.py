"""Odd values for every argument of every call, and iterables that are read once."""

from __future__ import annotations

import collections
import inspect
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tfexport
from tests.decode.scripted import ScriptedSession, drawn
from tfexport import ConfigError, DecodeConfig, InputError, Model, TfexportError

TEXT = "le 14 juillet 1989"


class Unspeakable:
    """Can be neither printed nor compared."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equal")

    __hash__ = object.__hash__


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


# Made anew for each call, because some can be read only once.
ODD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "a huge number": lambda: 10**400,
    "NaN": lambda: float("nan"),
    "no text": lambda: "",
    "a text": lambda: TEXT,
    "a lone surrogate": lambda: "\ud800",
    "NUL": lambda: "a\0b",
    "bytes": lambda: b"ab",
    "a memoryview": lambda: memoryview(b"\x05\x06"),
    "an empty list": list,
    "ids": lambda: [5, 6, 2],
    "texts and ids": lambda: [TEXT, [5, 6]],
    "a list that holds itself": endless,
    "a set": lambda: {5, 6},
    "a dict": lambda: {0: [5, 6]},
    "an iterator": lambda: iter([[5, 6]]),
    "a generator of texts": lambda: (text for text in (TEXT,)),
    "an array of one dimension": lambda: np.array([5, 6]),
    "an array of two": lambda: np.array([[5, 6], [7, 0]]),
    "a number of NumPy": lambda: np.int64(5),
    "a tensor": lambda: torch.tensor([5, 6]),
    "an object": object,
    "one without words": Unspeakable,
    "a list of one without words": lambda: [Unspeakable()],
    "a function": lambda: print,
}
GIVEN: dict[str, dict[str, Any]] = {
    "generate": {"texts": [TEXT]},
    "generate_ids": {"sources": [[5, 6]]},
    "stream": {"text": TEXT},
    "stream_ids": {"source": [5, 6]},
    "score": {"texts": [TEXT], "targets": ["1989"]},
    "score_ids": {"sources": [[5, 6]], "targets": [[7]]},
    "align": {"texts": [TEXT], "targets": ["1989"]},
    "align_ids": {"sources": [[5, 6]], "targets": [[7]]},
    "embed": {"texts": [TEXT]},
    "classify": {"texts": [TEXT]},
    "source_ids": {"texts": [TEXT]},
    "read": {"inputs": [TEXT]},
    "decoding": {},
}


@pytest.fixture(scope="module")
def model(dates_aligned: Path) -> Iterator[Model]:
    with tfexport.load(dates_aligned, threads=1) as loaded:
        yield loaded


def call(method: Callable[..., Any], given: dict[str, Any]) -> None:
    """Accept a result, or an error of tfexport in one line."""
    message = ""
    try:
        found = method(**given)
        if isinstance(found, Iterator):
            collections.deque(found, maxlen=0)
    except TfexportError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 1000


def test_the_table_has_every_call() -> None:
    public = {name for name, _ in inspect.getmembers(Model, inspect.isfunction) if not name.startswith("_")}
    assert public == {*GIVEN, "close"}


@pytest.mark.parametrize("odd", ODD)
def test_odd_values_for_any_argument_are_accepted_or_refused_in_one_line(model: Model, odd: str) -> None:
    for name, given in GIVEN.items():
        method = getattr(model, name)
        for parameter in inspect.signature(method).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            # Errors of the caller's own function are the caller's.
            if parameter.name != "on_progress" or not callable(ODD[odd]()):
                call(method, given | {parameter.name: ODD[odd]()})


@pytest.mark.parametrize("odd", ODD)
def test_odd_values_for_any_option_of_decoding(model: Model, odd: str) -> None:
    for name in DecodeConfig().to_dict():
        call(model.decoding, {name: ODD[odd]()})
        call(DecodeConfig, {name: ODD[odd]()})


@pytest.mark.parametrize("odd", ODD)
def test_odd_values_for_any_option_of_load(dates_aligned: Path, odd: str) -> None:
    for name in inspect.signature(tfexport.load).parameters:
        is_valid = {
            "None": ("variant", "form", "threads", "engine", "trusted_keys"),
            "a number of NumPy": ("threads",),
            "an empty list": ("warm_up",),
            "an iterator": ("warm_up",),
        }
        if name in is_valid.get(odd, ()):
            continue
        with pytest.raises(TfexportError) as refused:
            tfexport.load(**({"path": dates_aligned} | {name: ODD[odd]()}))
        assert "\n" not in str(refused.value)


def test_a_warm_up_is_pairs_within_the_model(dates_aligned: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        tfexport.load(dates_aligned, warm_up=[(1, 8), (0, 8), (1, 8, 2), 5])  # type: ignore[list-item]
    expected = "expected pairs of a number of texts and a number of source tokens, such as [(32, 16)]"
    assert str(refused.value) == f"load: warm_up is [(1, 8), (0, 8), (1, 8, 2), 5], {expected}"
    with pytest.raises(InputError, match="warm-up: source_len is 999, the limit is 64; lower it"):
        tfexport.load(dates_aligned, warm_up=[(1, 999)])
    with tfexport.load(dates_aligned, warm_up=[(3, 9)], threads=1) as warm:
        assert warm.generate([TEXT])[0].text == "1989-07-14"


def test_options_of_load_are_refused_together(dates_aligned: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        tfexport.load(dates_aligned, threads="2", engine=5, device=3, variant=[])  # type: ignore[arg-type]
    assert str(refused.value) == (
        "load: variant is [], expected one of None, 'concat', 'static', 'contrib'; device is 3, expected 'cpu', 'cuda' "
        "or one of several GPUs, such as 'cuda:1'; threads is '2', expected 1 to 1024, or 'auto'; engine is 5, "
        "expected the name of an engine, or None"
    )


# ---- iterables


def test_ids_are_read_once_from_any_sequence() -> None:
    session = ScriptedSession(12, drawn(12, eos_bias=1))
    model = Model(session, None)
    wanted = model.generate_ids([[5, 6], [7]], prefixes=[[3], []])
    assert wanted[0][0].token_ids[:1] == (3,)
    ways: list[tuple[Any, Any]] = [
        (iter([[5, 6], [7]]), iter([[3], []])),
        ((ids for ids in ([5, 6], [7])), [[3], []]),
        ([iter([5, 6]), (7,)], (range(3, 4), ())),
        ([np.array([5, 6]), np.array([7], np.uint8)], [np.array([3]), np.array([])]),
        ([torch.tensor([5, 6]), torch.tensor([7], dtype=torch.int32)], [[3], torch.tensor([], dtype=torch.int64)]),
        ({0: [5, 6], 1: [7]}.values(), {0: [3], 1: []}.values()),
        (np.array([[5, 6], [7]], object), [[3], []]),
    ]
    for sources, prefixes in ways:
        assert model.generate_ids(sources, prefixes=prefixes) == wanted
    assert list(model.stream_ids(iter([5, 6]), prefix=iter([3]))) == list(wanted[0][0].token_ids)


def test_texts_pairs_and_prefixes_are_read_once(model: Model) -> None:
    texts, targets = [TEXT, "3 May 2026"], ["1989-07-14", "2026-05-03"]
    assert model.generate(iter(texts), prefixes=iter(["19", ""])) == model.generate(texts, prefixes=["19", ""])
    assert model.generate(np.array(texts)) == model.generate(texts)
    assert model.score(iter(texts), iter(targets)) == model.score(texts, targets)
    ids = [[5, 6], [7, 8]]
    assert model.score_ids(iter(ids), iter(ids), prefixes=iter(ids)) == model.score_ids(ids, ids, prefixes=ids)
    (one, other), (first, second) = model.align(iter(texts), iter(targets)), model.align(texts, targets)
    assert [one.target_tokens, other.target_tokens] == [first.target_tokens, second.target_tokens]
    assert np.array_equal(one.weights, first.weights)
    assert model.tokenizer is not None
    assert model.tokenizer.encode(iter(texts)) == model.tokenizer.encode(texts)


@pytest.mark.parametrize(
    ("method", "given", "problem"),
    [
        ("generate_ids", {"sources": [5, 6, 2]}, "sources is [5, 6, 2], expected a list of lists of token ids; write"),
        ("generate_ids", {"sources": np.array([[5, 6]])}, "sources is array([[5, 6]]), expected a list of lists"),
        ("generate_ids", {"sources": [{5, 6}]}, "decode: source is {5, 6}, expected a list of token ids"),
        ("generate_ids", {"sources": [np.array([5.0])]}, "decode: source has 5.0, expected ids 0 to"),
        ("generate_ids", {"sources": [[True, 6]]}, "decode: source has True, expected ids 0 to"),
        ("generate_ids", {"on_progress": 5}, "on_progress is 5, expected a function or None"),
        ("generate_ids", {"cancel": threading.Event}, "cancel is <class 'threading.Event'>, expected"),
        ("generate", {"texts": {TEXT}}, f"texts is {{'{TEXT}'}}, expected a list of texts; write [text]"),
        ("generate", {"texts": [TEXT.encode()]}, "is bytes, expected a text"),
        ("generate", {"prefixes": "1"}, "prefixes is one text, expected a list of texts; write [text]"),
        ("stream", {"text": [TEXT]}, "is list, expected a text"),
        ("score", {"add_eos": "no"}, "add_eos is 'no', expected True or False"),
        ("score_ids", {"targets": 5}, "targets is 5, expected a list of lists of token ids"),
        ("embed", {"pooling": ["mean"]}, "pooling is ['mean'], expected one of None, 'mean', 'cls', 'max'"),
    ],
)  # fmt: skip
def test_errors_name_the_expected_type(model: Model, method: str, given: dict[str, Any], problem: str) -> None:
    with pytest.raises((InputError, ConfigError)) as refused:
        list(getattr(model, method)(**(GIVEN[method] | given)))
    assert problem in str(refused.value)
