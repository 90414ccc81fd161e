"""A model on a backend: generate, stream, score, align and embed."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np

from tfexport._arguments import as_list, check_call, is_whole, word_problems
from tfexport.bundle.manifest import Manifest
from tfexport.contract import ModelSpec
from tfexport.decode.loop import check_cancelled
from tfexport.decode.offline import decode, stream
from tfexport.decode.pieces import Pieces
from tfexport.decode.result import Hypothesis
from tfexport.errors import ConfigError, InputError, raise_all, shortened
from tfexport.generation import DecodeConfig, GenerationDefaults
from tfexport.model.copies import NO_COPIES_IN_STREAMS, check_copies, with_copies
from tfexport.model.result import Result, result_of
from tfexport.runtime.cpu import Threads
from tfexport.runtime.session import Floats, Session, pad_right
from tfexport.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tfexport.decode.align import Alignment
    from tfexport.decode.score import Score

_log = logging.getLogger(__name__)

Pooling = Literal["mean", "cls"]


class Model:
    """A model on a backend, safe to share between threads.

    Attributes:
        session: the backend's.
        tokenizer: None where the bundle has none; then only ids go in and out.
        defaults: what the bundle generates with unless told otherwise.
        manifest: of the bundle: versions, verification, hashes of all files; None where there is no bundle.
        threads: of the CPU that a call takes in ONNX Runtime; None elsewhere.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults | None = None,
        *,
        manifest: Manifest | None = None,
        threads: Threads | None = None,
    ) -> None:
        """Wrap a session, which `close` closes."""
        self.session, self.tokenizer = session, tokenizer
        self.defaults = defaults or GenerationDefaults()
        self.manifest, self.threads = manifest, threads

    @property
    def spec(self) -> ModelSpec:
        """Sizes, limits and token ids."""
        return self.session.spec

    def decoding(self, config: DecodeConfig | None = None, **options: Any) -> DecodeConfig:
        """Return what `generate` decodes with when it is called with the same.

        Args:
            config: how to decode, in place of the bundle's defaults; None for those.
            options: fields of `DecodeConfig`, which go before both.

        Raises:
            ConfigError: options that are unknown, out of range or contradictory.
        """
        if config is None:
            return self.defaults.overridden(options)
        if not isinstance(config, DecodeConfig):
            raise ConfigError(f"config is {shortened(config)}, expected a DecodeConfig")
        return DecodeConfig.from_dict({**config.to_dict(), **options}, subject="decoding")

    def generate(
        self,
        texts: Iterable[str],
        *,
        prefixes: Iterable[str] | None = None,
        indices: Iterable[int] | None = None,
        batch_size: int = 32,
        on_progress: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> list[Result]:
        """Generate for every text.

        Args:
            texts: at least one; no result depends on the others.
            prefixes: what each result begins with, or with `prefix_bias_beta` is drawn towards; empty for nothing.
            indices: of the texts, where they are some of a longer call: results are named and seeds counted by them;
                None for 0, 1, ….
            batch_size: texts decoded at once.
            on_progress: called with the number of texts that a step has finished, and not where it finished none.
            cancel: set by another thread to give the call up; None for a call that nobody cancels.
            config: how to decode, in place of the bundle's defaults; None for those.
            options: fields of `DecodeConfig`, named and meant as in Hugging Face `generate`; they go before `config`
                and before the bundle's defaults.

        Returns:
            num_return_sequences results a text, in the order of the texts, best first; fewer where filters leave a text
            fewer, so that `index` says whose a result is.

        Raises:
            ConfigError: options that are unknown, out of range or contradictory.
            InputError: lists every text that the model cannot take.
            BackendError: the backend failed.
            Cancelled: the event was set.
        """
        decoding, tokenizer = self.decoding(config, **options), self._need_tokenizer()
        if decoding.replace_unknowns:
            check_copies(self.session, self.tokenizer)
        texts = _texts("texts", texts)
        places = _indices(indices, len(texts))
        sources = tokenizer.encode(texts)
        starts = tokenizer.begin_targets([""] * len(texts) if prefixes is None else _texts("prefixes", prefixes))
        found = decode(
            self.session,
            sources,
            decoding,
            prefixes=starts,
            batch_size=batch_size,
            on_progress=on_progress,
            cancel=cancel,
            text_of=tokenizer.decode,
            num_fixed=len(tokenizer.text.target_prefix),
            places=places,
        )
        results = [
            result_of(tokenizer, best, decoding, index) for index, hypotheses in enumerate(found) for best in hypotheses
        ]
        if decoding.replace_unknowns:
            results = with_copies(
                self.session, tokenizer, texts, sources, results, decoding, batch_size=batch_size, cancel=cancel
            )
        if indices is None:
            return results
        return [dataclasses.replace(result, index=places[result.index]) for result in results]

    def generate_ids(
        self,
        sources: Iterable[Iterable[int]],
        *,
        prefixes: Iterable[Iterable[int]] | None = None,
        batch_size: int = 32,
        on_progress: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> list[list[Hypothesis]]:
        """Generate from token ids, without a tokenizer.

        Args:
            sources: token ids of each text, special tokens included.
            prefixes: token ids that each result begins with, or with `prefix_bias_beta` is drawn towards, without the
                start token.
            batch_size: texts decoded at once.
            on_progress: called with the number of texts that a step has finished, and not where it finished none.
            cancel: set by another thread to give the call up; None for a call that nobody cancels.
            config: how to decode, in place of the bundle's defaults; None for those.
            options: fields of `DecodeConfig`; they override `config`.

        Returns:
            For each source its num_return_sequences hypotheses, best first.

        Raises:
            ConfigError: options that are unknown, out of range or contradictory.
            InputError: lists every source that the model cannot take.
            BackendError: the backend failed.
            Cancelled: the event was set.
        """
        return decode(
            self.session,
            sources,
            self.decoding(config, **options),
            prefixes=prefixes,
            batch_size=batch_size,
            on_progress=on_progress,
            cancel=cancel,
            text_of=self.tokenizer.decode if self.tokenizer else None,
        )

    def stream(
        self,
        text: str,
        *,
        prefix: str = "",
        cancel: threading.Event | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """Generate for one text and hand out pieces as they come.

        Args:
            text: to generate for.
            prefix: what the result begins with; handed out first.
            cancel: set by another thread to give the text up: the iterator then raises `Cancelled`.
            config: how to decode, in place of the bundle's defaults; None for those.
            options: fields of `DecodeConfig`, which override those of `config`; one result without beams.

        Returns:
            Pieces that together are what `generate` gives.

        Raises:
            ConfigError: options that are unknown, out of range or contradictory.
            InputError: the model cannot take the text, or beams are asked for.
            BackendError: the backend failed.
            Cancelled: the event was set.
        """
        tokenizer = self._need_tokenizer()
        (source,) = tokenizer.encode(_texts("text", [text]))
        decoding = self.decoding(config, **options)
        if decoding.replace_unknowns:
            raise InputError(f"stream: {NO_COPIES_IN_STREAMS}")
        (start,) = tokenizer.begin_targets([prefix])
        num_fixed = len(tokenizer.text.target_prefix)
        tokens = stream(
            self.session,
            source,
            decoding,
            prefix=start,
            text_of=tokenizer.decode,
            num_fixed=num_fixed,
            defaults=self._not_given(config, options),
            cancel=cancel,
        )
        num_given = num_fixed if decoding.prefix_bias_beta else len(start)
        return _pieces(Pieces(tokenizer.decode, num_given, decoding.strings), tokens)

    def stream_ids(
        self,
        source: Iterable[int],
        *,
        prefix: Iterable[int] = (),
        cancel: threading.Event | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> Iterator[int]:
        """Generate from the token ids of one text and hand out ids as they come, without a tokenizer.

        Args:
            source: token ids, special tokens included.
            prefix: token ids that the result begins with, without the start token; handed out first.
            cancel: set by another thread to give the text up: the iterator then raises `Cancelled`.
            config: how to decode, in place of the bundle's defaults; None for those.
            options: fields of `DecodeConfig`, which override those of `config`; one result without beams.

        Returns:
            The `token_ids` that `generate_ids` gives, one by one.

        Raises:
            ConfigError: options that are unknown, out of range or contradictory.
            InputError: the model cannot take the source, or beams are asked for.
            BackendError: the backend failed.
            Cancelled: the event was set.
        """
        text_of = self.tokenizer.decode if self.tokenizer else None
        decoding, defaults = self.decoding(config, **options), self._not_given(config, options)
        return stream(self.session, source, decoding, prefix=prefix, text_of=text_of, defaults=defaults, cancel=cancel)

    def score(
        self,
        texts: Iterable[str],
        targets: Iterable[str],
        *,
        add_eos: bool = True,
        batch_size: int = 32,
        on_progress: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> list[Score]:
        """Say how probable given targets are, by the model as it is: without filters, penalties or temperature.

        What the bundle lets every target begin with is read and not scored.

        Args:
            texts: the sources.
            targets: one for each source.
            add_eos: score the end token behind each target too.
            batch_size: pairs scored at once; no score depends on the others.
            on_progress: called after each batch with the number of pairs it had.
            cancel: set by another thread to give the call up; None for a call that nobody cancels.

        Returns:
            A score a pair, in their order.

        Raises:
            InputError: lists every pair that the model cannot take.
            BackendError: the backend failed.
            Cancelled: the event was set.
        """
        sources, given, prefixes = self._pairs(texts, targets, "score")
        return self.score_ids(
            sources,
            given,
            prefixes=prefixes,
            add_eos=add_eos,
            batch_size=batch_size,
            on_progress=on_progress,
            cancel=cancel,
        )

    def score_ids(
        self,
        sources: Iterable[Iterable[int]],
        targets: Iterable[Iterable[int]],
        *,
        prefixes: Iterable[Iterable[int]] | None = None,
        add_eos: bool = True,
        batch_size: int = 32,
        on_progress: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> list[Score]:
        """Score token ids, without a tokenizer; see `score`.

        Args:
            sources: token ids of each source, special tokens included.
            targets: token ids of each target, without the start token; the `token_ids` of a `Hypothesis` will do.
            prefixes: token ids that each target comes behind, read and not scored.
            add_eos: end each target with the model's end token where it does not yet.
            batch_size: pairs scored at once.
            on_progress: called after each batch with the number of pairs it had.
            cancel: set by another thread to give the call up; None for a call that nobody cancels.

        Raises:
            InputError: lists every pair that the model cannot take.
            BackendError: the backend failed.
            Cancelled: the event was set.
        """
        from tfexport.decode.score import score

        return score(
            self.session,
            sources,
            targets,
            prefixes=prefixes,
            start=self.defaults.decoder_start_token_id,
            add_eos=add_eos,
            batch_size=batch_size,
            on_progress=on_progress,
            cancel=cancel,
        )

    def align(
        self,
        texts: Iterable[str],
        targets: Iterable[str],
        *,
        batch_size: int = 32,
        on_progress: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> list[Alignment]:
        """Say which source tokens the tokens of given targets were read from.

        The weights are those of the decoder layer and heads that the bundle was exported with as its alignment. What
        the bundle lets every target begin with is read and not aligned.

        Args:
            texts: the sources.
            targets: one for each source.
            batch_size: pairs read at once; no result depends on the others.
            on_progress: called after each batch with the number of pairs it had.
            cancel: set by another thread to give the call up; None for a call that nobody cancels.

        Returns:
            An alignment a pair, in their order.

        Raises:
            ConfigError: the bundle was exported without alignment, or the backend has none.
            InputError: lists every pair that the model cannot take.
            BackendError: the backend failed.
            Cancelled: the event was set.
        """
        sources, given, prefixes = self._pairs(texts, targets, "align")
        return self.align_ids(
            sources, given, prefixes=prefixes, batch_size=batch_size, on_progress=on_progress, cancel=cancel
        )

    def align_ids(
        self,
        sources: Iterable[Iterable[int]],
        targets: Iterable[Iterable[int]],
        *,
        prefixes: Iterable[Iterable[int]] | None = None,
        batch_size: int = 32,
        on_progress: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> list[Alignment]:
        """Align token ids; see `align`.

        Args:
            sources: token ids of each source, special tokens included.
            targets: token ids of each target, without the start token; the `token_ids` of a `Hypothesis` will do.
            prefixes: token ids that each target comes behind, read and not aligned.
            batch_size: pairs read at once.
            on_progress: called after each batch with the number of pairs it had.
            cancel: set by another thread to give the call up; None for a call that nobody cancels.

        Raises:
            ConfigError: the bundle was exported without alignment, or the backend has none.
            InputError: lists every pair that the model cannot take.
            BackendError: the backend failed.
            Cancelled: the event was set.
        """
        from tfexport.decode.align import align

        found = align(
            self.session,
            sources,
            targets,
            prefixes=prefixes,
            start=self.defaults.decoder_start_token_id,
            batch_size=batch_size,
            on_progress=on_progress,
            cancel=cancel,
        )
        return [self._spelled(one) for one in found]

    def embed(
        self,
        texts: Iterable[str],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        batch_size: int = 32,
        cancel: threading.Event | None = None,
    ) -> Floats:
        """Encode texts to one vector each, with an encoder alone.

        Args:
            texts: at least one.
            pooling: "mean" over a text's tokens, or "cls", the first token's.
            normalize: divide by the Euclidean norm.
            batch_size: texts encoded at once.
            cancel: set by another thread to give the call up; None for a call that nobody cancels.

        Returns:
            float32 [texts, d_model].

        Raises:
            ConfigError: an unknown pooling.
            InputError: lists every text that the model cannot take.
            BackendError: the bundle has a decoder, or the backend failed.
            Cancelled: the event was set.
        """
        raise_all(ConfigError, "embed", word_problems(pooling=(pooling, get_args(Pooling))))
        check_call("embed", batch_size=batch_size, cancel=cancel, normalize=normalize)
        sources = self._need_tokenizer().encode(_texts("texts", texts))
        batch_size = min(batch_size, self.session.limits.rows.most or batch_size)
        vectors = np.empty((len(sources), self.spec.d_model), np.float32)
        order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
        for first in range(0, len(order), batch_size):
            check_cancelled(cancel)
            rows = order[first : first + batch_size]
            vectors[rows] = self._pool([sources[row] for row in rows], pooling)
        if normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return vectors

    def close(self) -> None:
        """Free the backend's memory; the model cannot be used afterwards."""
        self.session.close()

    def __enter__(self) -> Self:
        """Return the model itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the model."""
        self.close()

    def _pairs(
        self, texts: Iterable[str], targets: Iterable[str], subject: str
    ) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
        """Encode sources and targets, and say what each target comes behind."""
        if not self.spec.has_decoder:
            raise InputError(f"{subject}: this bundle is an encoder alone and reads no target; use embed")
        tokenizer = self._need_tokenizer()
        sources, given = _texts("texts", texts), _texts("targets", targets)
        if len(sources) != len(given):
            raise InputError(f"{subject}: {len(given)} targets for {len(sources)} texts; give one each")
        source_ids, target_ids = tokenizer.encode_pairs(sources, given, subject)
        first = self.defaults.forced_bos_token_id
        prefix = tokenizer.begin_target() or ([] if first is None else [first])
        return source_ids, target_ids, [prefix] * len(sources)

    def _spelled(self, found: Alignment) -> Alignment:
        """Add the tokens to the ids, where there is a tokenizer."""
        if self.tokenizer is None:
            return found
        source_tokens, target_tokens = self.tokenizer.tokens(found.source_ids, found.target_ids)
        return dataclasses.replace(found, source_tokens=source_tokens, target_tokens=target_tokens)

    def _pool(self, sources: Sequence[Sequence[int]], pooling: Pooling) -> Floats:
        ids, mask = pad_right(sources, self.spec.tokens.pad)
        hidden = self.session.hidden_states(ids, mask)
        if pooling == "cls":
            return hidden[:, 0]
        mean: Floats = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True).astype(np.float32)
        return mean

    def _not_given(self, config: DecodeConfig | None, options: Mapping[str, Any]) -> set[str]:
        """Return the options that a call has from the bundle's defaults."""
        return set() if config else self.defaults.given().keys() - options.keys()

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(
                "this bundle has no tokenizer; use generate_ids, or put tokenizer.json into the model directory"
            )
        return self.tokenizer


def bundle_sha256(model: Model) -> str:
    """Return the sha256 of the manifest of a model's bundle, which names all that is in it.

    Raises:
        InputError: the model is of no bundle.
    """
    if model.manifest is None:
        raise InputError("the model is of no bundle, so that nothing says what it is; use tfexport.load")
    return hashlib.sha256(model.manifest.to_bytes()).hexdigest()


def _texts(name: str, given: Iterable[str]) -> list[str]:
    """Take texts as a list; whether each is one is asked of the tokenizer."""
    texts = as_list(given)
    if texts is None:
        got = "one text" if isinstance(given, str) else shortened(given)
        raise InputError(f"{name} is {got}, expected a list of texts; write [text]")
    if not texts:
        raise InputError(f"{name} is empty, expected at least one text")
    return texts


def _indices(given: Iterable[int] | None, count: int) -> Sequence[int]:
    """Take what each text of a call is numbered by."""
    if given is None:
        return range(count)
    indices = as_list(given)
    if indices is None or len(indices) != count or not all(is_whole(index) and index >= 0 for index in indices):
        raise InputError(f"indices is {shortened(given)}, expected a whole number from 0 for each of {count} texts")
    return indices


def _pieces(text: Pieces, tokens: Iterator[int]) -> Iterator[str]:
    for token in tokens:
        piece = text.push(token)
        if piece:
            yield piece
    if rest := text.rest():
        yield rest
