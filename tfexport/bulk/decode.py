"""Rows in, answers out: a text that cannot be decoded says why, and keeps nobody else waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfexport.bulk.config import BulkConfig
from tfexport.bulk.formats.answer import Answer
from tfexport.decode.request import check_requests
from tfexport.errors import BackendError, InputError, TfexportError
from tfexport.generation import DecodeConfig
from tfexport.model.copies import check_copies
from tfexport.model.model import Model
from tfexport.model.result import Result
from tfexport.text.tokenizer import Tokenizer

# What an error of one text begins with, which says nothing of the text.
_SUBJECTS = ("input: ", "decode: ")


class Decoder:
    """Decodes rows with a model that is open.

    Attributes:
        decoding: how.
    """

    def __init__(self, model: Model, config: BulkConfig, decoding: DecodeConfig) -> None:
        """Check all that can be checked without a text.

        Raises:
            InputError: the model generates no text, or not with these settings or this prefix.
            ConfigError: it cannot replace unknown tokens.
        """
        self.decoding = decoding
        self._model, self._config = model, config
        tokenizer = need_tokenizer(model)
        if decoding.replace_unknowns:
            check_copies(model.session, model.tokenizer)
        begin = tokenizer.begin_target(config.prefix or "")
        check_requests(
            model.session,
            [[model.spec.tokens.eos]],
            decoding,
            [begin],
            tokenizer.decode,
            len(tokenizer.text.target_prefix),
        )

    def answers(
        self, texts: Sequence[Any], first: int, on_progress: Callable[[int], None] | None = None
    ) -> list[Answer]:
        """Decode rows as one call over the whole input would.

        Args:
            texts: of the rows; whatever is no text is an error of its row.
            first: row of the input that the first text is in, from 0, by which seeds are counted.
            on_progress: called with the number of rows that a step has finished.

        Raises:
            BackendError: the backend failed, or the model gives numbers for none of the texts.
        """
        answers = {place: Answer(error="the text is null") for place, text in enumerate(texts) if text is None}
        left = [place for place in range(len(texts)) if place not in answers]
        while left:
            try:
                found = self._generate([texts[place] for place in left], [first + place for place in left], on_progress)
                break
            except TfexportError as error:
                if not error.indices:
                    raise
                wrong = [left[index] for index in error.indices]
                for place in wrong:
                    answers[place] = self._alone(texts[place], first + place)
                left = [place for place in left if place not in answers]
                if not left and isinstance(error, BackendError):
                    raise
        if left:
            answers |= {place: _answer(found[first + place]) for place in left}
        return [answers[place] for place in range(len(texts))]

    def _generate(
        self, texts: Sequence[str], indices: Sequence[int], on_progress: Callable[[int], None] | None = None
    ) -> dict[int, list[Result]]:
        prefix = self._config.prefix
        results = self._model.generate(
            texts,
            indices=indices,
            prefixes=None if prefix is None else [prefix] * len(texts),
            batch_size=self._config.batch_size,
            on_progress=on_progress,
            config=self.decoding,
        )
        found: dict[int, list[Result]] = {index: [] for index in indices}
        for result in results:
            found[result.index].append(result)
        return found

    def _alone(self, text: Any, index: int) -> Answer:
        """Decode one text, or say what is wrong with it."""
        try:
            return _answer(self._generate([text], [index])[index])
        except TfexportError as error:
            if not error.indices:
                raise
            return Answer(error=reason(error))


def need_tokenizer(model: Model) -> Tokenizer:
    """Return the tokenizer of a model.

    Raises:
        InputError: it has none.
    """
    if model.tokenizer is None:
        raise InputError("this bundle has no tokenizer, and reads no texts; export it with its tokenizer")
    return model.tokenizer


def text_problems(tokenizer: Tokenizer, texts: Sequence[Any]) -> list[tuple[int, str]]:
    """Return the place of each text that the model cannot take, with what is wrong with it."""
    found = [(place, "the text is null") for place, text in enumerate(texts) if text is None]
    left = [place for place, text in enumerate(texts) if text is not None]
    try:
        if left:
            tokenizer.encode([texts[place] for place in left])
    except InputError as error:
        found += [(left[index], _problem(tokenizer, texts[left[index]])) for index in error.indices]
    return sorted(found)


def reason(error: TfexportError) -> str:
    """Return what an error about one text says of it."""
    said = str(error)
    for subject in _SUBJECTS:
        said = said.removeprefix(subject)
    return said


def _problem(tokenizer: Tokenizer, text: Any) -> str:
    try:
        tokenizer.encode([text])
    except InputError as error:
        return reason(error)
    raise AssertionError("a text is wrong among others and right alone")


def _answer(results: Sequence[Result]) -> Answer:
    return Answer(
        tuple(result.text for result in results),
        tuple(result.score for result in results),
        tuple(result.finish_reason for result in results),
    )
