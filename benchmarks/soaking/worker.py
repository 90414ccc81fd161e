"""The process of `soaking.local`: python -m soaking.worker BUNDLE. A line comes, a line goes."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import tfexport
from soaking.asks import Ask, Outcome
from tfexport.errors import Cancelled, ConfigError, InputError, TfexportError

_THREADS, _LATE_WITHIN_S = 4, 0.005
_NONSENSE: tuple[dict[str, Any], ...] = (
    {"texts": []},
    {"texts": [""]},
    {"texts": ["a" * 50_000]},
    {"texts": ["a"], "num_beams": 0},
    {"texts": ["a"], "temprature": 1},
    {"texts": ["a"], "prefixes": ["1" * 500]},
    {"texts": ["a"], "batch_size": 0},
)


def answer(model: tfexport.Model, ask: Ask) -> Outcome:
    """Do what is asked."""
    try:
        return _WAYS.get(ask.way, _generated)(model, ask)
    except Cancelled:
        return "late" if ask.way == "late" else "left"
    except (ConfigError, InputError) as error:
        return "refused" if ask.way == "wrong" else f"failed: {error}"
    except TfexportError as error:
        return f"failed: {error}"


def _nonsense(model: tfexport.Model, ask: Ask) -> Outcome:
    model.generate(**_NONSENSE[int(ask.draw * len(_NONSENSE))])
    return "failed: nonsense was answered"


def _tokens(model: tfexport.Model, ask: Ask) -> Outcome:
    assert model.tokenizer
    return list(map(str, model.tokenizer.encode([ask.text])[0]))


def _streamed(model: tfexport.Model, ask: Ask) -> Outcome:
    return ["".join(model.stream(ask.text))]


def _left(model: tfexport.Model, ask: Ask) -> Outcome:
    """Leave a stream behind its first piece, or have another thread cancel the call."""
    if ask.options:
        return _generated(model, ask)
    next(model.stream(ask.text), None)
    return "left"


def _generated(model: tfexport.Model, ask: Ask) -> Outcome:
    cancel, timer = threading.Event(), None
    if ask.way in ("leave", "late"):
        timer = threading.Timer(_LATE_WITHIN_S * ask.draw, cancel.set)
        timer.start()
    try:
        return [result.text for result in model.generate([ask.text], cancel=cancel, **ask.options)]
    finally:
        if timer:
            timer.cancel()
            timer.join()


_WAYS: dict[str, Callable[[tfexport.Model, Ask], Outcome]] = {
    "wrong": _nonsense,
    "tokenise": _tokens,
    "stream": _streamed,
    "leave": _left,
}


def main(bundle: str) -> None:
    """Answer until the input ends."""
    model = tfexport.load(bundle, threads=1)
    with ThreadPoolExecutor(_THREADS) as pool:
        for line in sys.stdin:
            message = json.loads(line)
            found: list[Outcome] = []
            if message == "reload":
                model, old = tfexport.load(bundle, threads=1), model
                old.close()
            else:
                found = list(pool.map(partial(answer, model), map(Ask.from_dict, message)))
            print(json.dumps(found), flush=True)
    model.close()


if __name__ == "__main__":
    main(sys.argv[1])
