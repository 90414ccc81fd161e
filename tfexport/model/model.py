"""Generate, stream, score, align and embed with a loaded bundle."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np

from tfexport._arguments import as_list, check_call, is_whole, word_problems
from tfexport.bundle.manifest import Manifest
from tfexport.contract import ModelSpec, Pooling
from tfexport.decode.loop import check_cancelled
from tfexport.decode.offline import decode, stream, with_languages
from tfexport.decode.request import check_requests, check_sources, num_speech_tokens
from tfexport.decode.result import Hypothesis
from tfexport.decode.stops import Pieces
from tfexport.errors import ConfigError, InputError, raise_all, shortened
from tfexport.features.processor import FeatureProcessor
from tfexport.generation import DecodeConfig, GenerationDefaults
from tfexport.model.inputs import read_features
from tfexport.model.result import (
    NO_COPIES_IN_STREAMS,
    Classification,
    Result,
    Results,
    check_copies,
    result_of,
    with_copies,
)
from tfexport.runtime.cpu import Threads
from tfexport.runtime.session import Floats, Mask, Session
from tfexport.runtime.sources import Source, Sources, pad_sources
from tfexport.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tfexport.decode.align import Alignment
    from tfexport.decode.score import Score


class Model:
    """A bundle on a backend, safe to share between threads.

    These arguments mean the same in every method:

    - `batch_size`: number of texts processed at once. Results depend neither on it nor on the other texts.
    - `on_progress`: function called after a step or batch with the number of texts that it finished, if any.
    - `cancel`: event that another thread sets to end the call with `Cancelled`.
    - `config`: decoding options that replace the bundle's defaults; None uses the defaults.
    - `options`: fields of `DecodeConfig`, named as in Hugging Face `generate`; they override `config` and defaults.

    Every method raises `ConfigError` for options that are unknown, out of range or contradictory, `InputError` with
    every input that the model does not accept, `BackendError` if the backend failed, and `Cancelled`.

    Attributes:
        session: session of the backend; `close` closes it.
        tokenizer: None if the bundle has no tokenizer; then only the methods for token ids work.
        processor: computes features of audio or images; None if the model reads token ids, or callers pass features.
        defaults: decoding options of the bundle.
        manifest: the bundle's manifest, with versions, verification and file hashes; None without a bundle.
        threads: CPU threads of a call in ONNX Runtime or `native`; None for other backends.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults | None = None,
        *,
        processor: FeatureProcessor | None = None,
        manifest: Manifest | None = None,
        threads: Threads | None = None,
    ) -> None:
        self.session, self.tokenizer, self.processor = session, tokenizer, processor
        self.defaults = defaults or GenerationDefaults()
        self.manifest, self.threads = manifest, threads

    @property
    def spec(self) -> ModelSpec:
        """Sizes, limits and token ids."""
        return self.session.spec

    @property
    def reads(self) -> Literal["text", "audio", "image", "features"]:
        """What the model reads; "features" if the bundle has no processor for them."""
        if self.spec.source_vocab:
            return "text"
        if self.processor is None:
            return "features"
        return "image" if self.spec.image else "audio"

    def decoding(self, config: DecodeConfig | None = None, **options: Any) -> DecodeConfig:
        """Return the decoding options that `generate` would use with the same arguments."""
        if config is None:
            return self.defaults.overridden(options)
        if not isinstance(config, DecodeConfig):
            raise ConfigError(f"config is {shortened(config)}, expected a DecodeConfig")
        if not options and type(config) is DecodeConfig:
            return config
        return DecodeConfig.from_dict({**vars(config), **options}, subject="decoding")

    def read(self, inputs: Iterable[Any], *, paths: bool = True) -> list[Source]:
        """Return what the encoder reads for each input: token ids of a text, or features.

        A model of features takes paths of audio or images, their bytes, arrays of features as NumPy arrays or
        memoryviews, and pairs of samples and their rate. Without `paths`, a text is never opened as a file. The
        InputError lists every invalid input.
        """
        if self.spec.source_vocab:
            return self._need_tokenizer().encode(inputs)
        return read_features(self.processor, inputs, paths=paths)

    def generate(
        self,
        texts: Iterable[Any],
        *,
        prefixes: Iterable[str] | None = None,
        indices: Iterable[int] | None = None,
        batch_size: int = 32,
        on_progress: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> list[Result]:
        """Generate text for every source text, or audio or image, as `read` takes them.

        - `prefixes`: text that each result begins with, or is biased towards with `prefix_bias_beta`; "" for no prefix.
        - `indices`: places of the texts in a longer call, for `Result.index` and for the seeds of samples; None for
          0, 1, ….

        Returns:
            num_return_sequences results per text, best first, in the order of the texts.
            A text has fewer results if the options forbid the others.
        """
        decoding, tokenizer = self.decoding(config, **options), self._need_tokenizer()
        if decoding.replace_unknowns:
            check_copies(self.session, self.tokenizer)
        texts = _texts("texts", texts)
        places = _indices(indices, len(texts))
        sources = self.read(texts)
        starts = None
        if prefixes is not None or tokenizer.text.target_prefix:
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
        if places is not None:
            results = [dataclasses.replace(result, index=places[result.index]) for result in results]
        return Results(results)

    def generate_ids(
        self,
        sources: Iterable[Source],
        *,
        prefixes: Iterable[Iterable[int]] | None = None,
        batch_size: int = 32,
        on_progress: Callable[[int], None] | None = None,
        cancel: threading.Event | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> list[list[Hypothesis]]:
        """Generate token ids for the token ids of every source, without a tokenizer.

        - `sources`: token ids, including special tokens; or arrays of features or pixels.
        - `prefixes`: token ids that each hypothesis begins with, without the start token.

        Returns:
            For each source its num_return_sequences hypotheses, best first.
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
        text: Any,
        *,
        prefix: str = "",
        cancel: threading.Event | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """Generate text for one source text and yield pieces as they are decoded.

        It supports one result and no beams. The pieces, joined, equal the text that `generate` returns, including
        `prefix`. If `cancel` is set, the iterator raises `Cancelled`.
        """
        tokenizer = self._need_tokenizer()
        (source,) = self.read(_texts("text", [text]))
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
            defaults=self._unset_options(config, options),
            cancel=cancel,
        )
        num_prefix = num_fixed if decoding.prefix_bias_beta else len(start)
        num_prefix += num_speech_tokens(self.spec, decoding)
        return _pieces(Pieces(tokenizer.decode, num_prefix, decoding.strings), tokens)

    def stream_ids(
        self,
        source: Source,
        *,
        prefix: Iterable[int] = (),
        cancel: threading.Event | None = None,
        config: DecodeConfig | None = None,
        **options: Any,
    ) -> Iterator[int]:
        """Generate token ids for one source and yield each at once, without a tokenizer.

        They equal the `token_ids` that `generate_ids` returns, including `prefix`, which has no start token.
        """
        decoding, defaults = self.decoding(config, **options), self._unset_options(config, options)
        text_of = self.tokenizer.decode if self.tokenizer else None
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
        """Return the log-probabilities of given targets, one target for each text.

        They come from the model's logits, without logits processors. The tokens that the bundle starts every target
        with are not scored. `add_eos` also scores the end token after each target.
        """
        source_ids, target_ids, prefixes = self._pairs(texts, targets, "score")
        return self.score_ids(
            source_ids,
            target_ids,
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
        """Return the log-probabilities of targets given as token ids, without a tokenizer.

        - `sources`: token ids, including special tokens.
        - `targets`: token ids without the start token, like `Hypothesis.token_ids`.
        - `prefixes`: token ids that the decoder reads before each target; they are not scored.
        - `add_eos`: append the end token to each target that does not end with it.
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
        """Return how much each target token attends to each source token.

        There is one target for each text. The weights are those of the decoder layer and heads that the bundle was
        exported with (`--alignment`). The tokens that the bundle starts every target with are not aligned.
        """
        source_ids, target_ids, prefixes = self._pairs(texts, targets, "align")
        return self.align_ids(
            source_ids, target_ids, prefixes=prefixes, batch_size=batch_size, on_progress=on_progress, cancel=cancel
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
        """Align token ids as `align` does texts; the arguments are those of `score_ids`."""
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
        if self.tokenizer is None:
            return found
        tokens = [self.tokenizer.tokens(one.source_ids, one.target_ids) for one in found]
        return [
            dataclasses.replace(one, source_tokens=source, target_tokens=target)
            for one, (source, target) in zip(found, tokens, strict=True)
        ]

    def embed(
        self,
        texts: Iterable[str] | Iterable[Iterable[int]],
        *,
        pooling: Pooling | None = None,
        normalize: bool = True,
        batch_size: int = 32,
        cancel: threading.Event | None = None,
    ) -> Floats:
        """Encode each text, or token ids, as one vector, with an encoder-only bundle.

        - `pooling`: "mean" or "max" over the tokens, or "cls", the vector of the first one; None for the bundle's own.
        - `normalize`: divide each vector by its Euclidean norm.

        Returns:
            float32 [texts, d_model].
        """
        raise_all(ConfigError, "embed", word_problems(pooling=(pooling, (None, *get_args(Pooling)))))
        check_call("embed", batch_size=batch_size, cancel=cancel, normalize=normalize)
        sources = self.source_ids(texts)
        vectors = np.empty((len(sources), self.spec.d_model), np.float32)
        for rows, some in self._batches(sources, batch_size, cancel):
            vectors[rows] = _pooled(self.session.hidden_states(some), some.mask, pooling or self.spec.pooling)
        if normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return vectors

    def classify(
        self,
        texts: Iterable[str] | Iterable[Iterable[int]],
        *,
        batch_size: int = 32,
        cancel: threading.Event | None = None,
    ) -> list[Classification]:
        """Label each text, or token ids, with the head of an encoder-only bundle."""
        check_call("classify", batch_size=batch_size, cancel=cancel)
        if self.spec.head == "none":
            raise InputError("classify: this bundle has no head; import a checkpoint with one and its logits")
        sources, labels, found = self.source_ids(texts), self.spec.labels, dict[int, Classification]()
        for rows, some in self._batches(sources, batch_size, cancel):
            for row, logits, mask in zip(rows, self.session.logits(some), some.mask, strict=True):
                own = logits if logits.ndim == 1 else logits[: mask.sum()]
                best = own.argmax(-1)
                label = labels[best] if best.ndim == 0 else tuple(labels[number] for number in best)
                found[row] = Classification(label, own, tuple(sources[row]) if self.spec.source_vocab else ())
        return [found[row] for row in range(len(sources))]

    def source_ids(self, texts: Iterable[Any], *, paths: bool = True) -> list[Source]:
        """Return the ids of sources; raise InputError with every invalid text.

        `paths` is that of `read`.
        """
        if self.spec.has_decoder:
            raise InputError("this bundle is not encoder-only, so it has no vectors and labels; use generate")
        values = _texts("texts", texts)
        if self.processor:
            values = self.read(values, paths=paths)
        elif any(isinstance(value, str) for value in values):
            return self.read(values)
        return check_sources(self.spec, self.session.limits, "encode", values)

    def close(self) -> None:
        """Free the backend's memory; the model cannot be used afterwards."""
        self.session.close()
        # Without `malloc_trim` of glibc, a process that loads and closes `paper-base` repeatedly keeps 296 MB, not 30.
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        getattr(library, "malloc_trim", lambda pad: None)(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _pairs(
        self, texts: Iterable[Any], targets: Iterable[str], subject: str
    ) -> tuple[list[Source], list[list[int]], list[list[int]]]:
        if not self.spec.has_decoder:
            raise InputError(f"{subject}: this bundle is encoder-only and reads no target; use embed")
        texts, targets, tokenizer = _texts("texts", texts), _texts("targets", targets), self._need_tokenizer()
        if len(texts) != len(targets):
            raise InputError(f"{subject}: {len(targets)} targets for {len(texts)} texts; pass one for each text")
        if self.spec.source_vocab:
            sources: list[Source]
            sources, target_ids = tokenizer.encode_pairs(texts, targets, subject)
        else:
            sources, target_ids = self.read(texts), [tokenizer.encode_target(target) for target in targets]
        first = self.defaults.forced_bos_token_id
        prefixes = [tokenizer.begin_target() or ([] if first is None else [first])] * len(sources)
        if self.spec.speech is not None:  # a language may have to be detected
            requests = check_requests(self.session, sources, self.decoding(), prefixes)
            prefixes = [list(request.prompt[1:]) for request in with_languages(self.session, requests, 1)]
        return sources, target_ids, prefixes

    def _batches(
        self, sources: Sequence[Source], size: int, cancel: threading.Event | None
    ) -> Iterator[tuple[list[int], Sources]]:
        """Yield sources of similar length together, with their places."""
        size = min(size, self.session.limits.rows.most or size)
        order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
        for first in range(0, len(order), size):
            check_cancelled(cancel)
            rows = order[first : first + size]
            yield rows, pad_sources(self.spec.source, [sources[row] for row in rows])

    def _unset_options(self, config: DecodeConfig | None, options: Mapping[str, Any]) -> set[str]:
        return set() if config else self.defaults.given().keys() - options.keys()

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(
                "this bundle has no tokenizer; use generate_ids, or put tokenizer.json into the model directory"
            )
        return self.tokenizer


def bundle_sha256(model: Model) -> str:
    """Return the SHA-256 of a model's manifest; raise `InputError` without a bundle."""
    if model.manifest is None:
        raise InputError("the model was not loaded from a bundle; use tfexport.load")
    return hashlib.sha256(model.manifest.to_bytes()).hexdigest()


def _pooled(hidden: Floats, mask: Mask, pooling: Pooling) -> Floats:
    if pooling == "cls":
        return hidden[:, 0]
    is_max, keep = pooling == "max", mask[:, :, None]
    tokens: Floats = np.where(keep, hidden, np.float32(-np.inf if is_max else 0))
    found: Floats = tokens.max(1) if is_max else tokens.sum(1) / keep.sum(1, dtype=np.float32)
    return found


def _texts(name: str, argument: Iterable[Any]) -> list[Any]:
    texts = as_list(argument)
    if texts is None:
        got = "one text" if isinstance(argument, str) else shortened(argument)
        raise InputError(f"{name} is {got}, expected a list of texts; write [text]")
    if not texts:
        raise InputError(f"{name} is empty, expected at least one text")
    return texts


def _indices(argument: Iterable[int] | None, count: int) -> list[int] | None:
    if argument is None:
        return None
    indices = as_list(argument)
    if indices is None or len(indices) != count or not all(is_whole(index) and index >= 0 for index in indices):
        raise InputError(f"indices is {shortened(argument)}, expected a whole number from 0 for each of {count} texts")
    return indices


def _pieces(text: Pieces, tokens: Iterator[int]) -> Iterator[str]:
    yield from filter(None, map(text.push, tokens))
    if rest := text.rest():
        yield rest
