"""Check, pad and draw sources of every kind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tfexport._arguments import as_list, is_whole, listed, listed_ids
from tfexport.errors import InputError, shortened
from tfexport.sources import (
    BATCH,
    FEATURE_MASK,
    FEATURES,
    FRAMES,
    PIXELS,
    SOURCE_IDS,
    SOURCE_MASK,
    FeatureSource,
    ImageSource,
    SourceKind,
    TokenSource,
)

Array = NDArray[Any]
# Token ids as a list, or features or an image as a float32 array.
Source = Any


@dataclass(frozen=True)
class Sources:
    """A batch of sources, padded on the right."""

    kind: SourceKind
    inputs: Mapping[str, Array]  # of the encoder, by name in the order of the graph, [batch, …]
    checked: Mapping[str, Array] | None = None  # `inputs` if checked sources were joined to them

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    @functools.cached_property
    def mask(self) -> NDArray[np.bool_]:
        """Positions that a decoder attends to, [batch, source_len]."""
        if isinstance(self.kind, TokenSource):
            return self.inputs[SOURCE_MASK]
        if isinstance(self.kind, ImageSource):
            return np.ones((len(self), self.kind.positions), np.bool_)
        frames = self.inputs[FEATURE_MASK]
        return _mask(self.kind.positions(frames.sum(1)), self.kind.positions(frames.shape[1]))

    @functools.cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Positions of each source, int64 [batch]."""
        lengths: NDArray[np.int64] = self.mask.sum(1)
        return lengths

    @property
    def source_len(self) -> int:
        """Positions of the longest source."""
        return int(self.mask.shape[1])

    def take(self, rows: NDArray[np.int64]) -> Sources:
        """Return some of the sources, without padding that none of them needs."""
        taken = Sources(self.kind, {name: array[rows] for name, array in self.inputs.items()})
        return taken.resized(int(taken.lengths.max()))

    def resized(self, source_len: int) -> Sources:
        """Pad or cut the batch to `source_len`, at least that of its longest source.

        Frames are padded to the largest number that gives `source_len`, so that few sizes occur.
        """
        if source_len == self.source_len and not isinstance(self.kind, FeatureSource):
            return self
        sizes, shapes = self.kind.sizes(source_len), self.kind.inputs
        inputs = {
            name: _resized(array, sizes[axis]) if (axis := str(shapes[name][1][1])) in sizes else array
            for name, array in self.inputs.items()
        }
        return Sources(self.kind, inputs)


def _resized(array: Array, length: int) -> Array:
    if array.shape[1] >= length:
        return array[:, :length]
    return np.pad(array, [(0, 0), (0, length - array.shape[1]), *[(0, 0)] * (array.ndim - 2)])


def listed_sources(kind: SourceKind, subject: str, value: object) -> list[Any]:
    """Return the sources of a call as a list; raise `InputError` if they are none."""
    if isinstance(kind, TokenSource):
        return listed_ids(subject, "sources", value)
    name, (_, shape) = next(iter(kind.inputs.items()))
    if getattr(value, "ndim", 0) == len(shape) - 1:
        raise InputError(f"{subject}: sources is one array {list(cast(Array, value).shape)}; write [{name}]")
    return list(cast(Array, value)) if hasattr(value, "ndim") else listed(subject, "sources", value, "arrays")


def read_sources(kind: SourceKind, values: Sequence[object]) -> list[tuple[Source, int, list[str]]]:
    """Return what `read_source` returns for each value."""
    if isinstance(kind, TokenSource) and values and {list, tuple}.issuperset(map(type, values)) and all(values):
        lists = cast(Sequence[Sequence[int]], values)
        if not id_problems("sources", list(itertools.chain.from_iterable(lists)), kind.vocab):
            return [(list(ids), len(ids), []) for ids in lists]
    return [read_source(kind, value) for value in values]


@functools.singledispatch
def read_source(kind: SourceKind, value: object) -> tuple[Source, int, list[str]]:
    """Return a source, its length after the encoder, and its problems."""
    raise TypeError(kind)


@read_source.register
def _(kind: TokenSource, value: object) -> tuple[list[int], int, list[str]]:
    ids = as_list(value)
    if ids is None:
        return [], 0, [f"source is {shortened(value)}, expected a list of token ids"]
    if problems := id_problems("source", ids, kind.vocab):
        return [], len(ids), problems
    return list(map(int, ids)), len(ids), [] if ids else ["the source is empty, expected one token or more"]


@read_source.register
def _(kind: FeatureSource, value: object) -> tuple[Array, int, list[str]]:
    found, problems = _floats(FEATURES, value, (FRAMES, kind.dim))
    if not problems and kind.frames not in (None, len(found)):
        problems = [f"features has {len(found):,} frames, expected {kind.frames:,}; use the model's processor"]
    if not problems and len(found) <= (fewest := max(kind.most_frames(0), 0)):
        problems = [f"features has {len(found)} frames, expected {fewest + 1} or more"]
    return found, 0 if problems else int(kind.positions(len(found))), problems


@read_source.register
def _(kind: ImageSource, value: object) -> tuple[Array, int, list[str]]:
    found, problems = _floats(PIXELS, value, kind.shape)
    return found, kind.positions, problems


def _floats(name: str, value: object, shape: tuple[str | int, ...]) -> tuple[NDArray[np.float32], list[str]]:
    expected = f"numbers [{', '.join(map(str, shape))}]"
    try:
        numbers = np.asarray(value)
    except ValueError:  # of lists with unequal lengths
        numbers = np.asarray(None)
    if numbers.dtype.kind not in "fiu":
        return np.zeros(0, np.float32), [f"{name} is {shortened(value)}, expected {expected}"]
    found = np.ascontiguousarray(numbers, np.float32)
    if found.ndim != len(shape) or any(want not in (FRAMES, has) for want, has in zip(shape, found.shape, strict=True)):
        return found, [f"{name} is {list(found.shape)}, expected {expected}"]
    return found, [] if np.isfinite(found).all() else [f"{name} has NaN or infinity, expected finite numbers"]


@functools.singledispatch
def pad_sources(kind: SourceKind, sources: Sequence[Source]) -> Sources:
    """Join checked sources to a batch, padded on the right."""
    raise TypeError(kind)


@pad_sources.register
def _(kind: TokenSource, sources: Sequence[Sequence[int]]) -> Sources:
    ids, mask = pad_right(sources, kind.pad_id)
    return _joined(kind, {SOURCE_IDS: ids, SOURCE_MASK: mask})


@pad_sources.register
def _(kind: FeatureSource, sources: Sequence[Array]) -> Sources:
    mask = _mask(np.array([len(source) for source in sources]))
    features = np.zeros((*mask.shape, kind.dim), np.float32)
    for row, source in zip(features, sources, strict=True):
        row[: len(source)] = source
    return _joined(kind, {FEATURES: features, FEATURE_MASK: mask})


@pad_sources.register
def _(kind: ImageSource, sources: Sequence[Array]) -> Sources:
    return _joined(kind, {PIXELS: np.stack(sources)})


def _joined(kind: SourceKind, inputs: Mapping[str, Array]) -> Sources:
    return Sources(kind, inputs, checked=inputs)


def pad_right(sources: Sequence[Sequence[int]], pad_id: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return non-empty lists as ids int64 and their mask bool, [batch, len]."""
    lengths = [len(source) for source in sources]
    longest = max(lengths)
    rows = [[*source, *[pad_id] * (longest - len(source))] for source in sources]
    return np.array(rows, np.int64), _mask(np.array(lengths), longest)


def _mask(lengths: NDArray[np.int64], longest: int | None = None) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = np.arange(lengths.max() if longest is None else longest) < lengths[:, None]
    return mask


@functools.singledispatch
def random_source(kind: SourceKind, rng: np.random.Generator, source_len: int) -> Source:
    """Draw a source with `source_len` positions, or as many as every source has."""
    raise TypeError(kind)


@random_source.register(TokenSource)
def _(kind: TokenSource, rng: np.random.Generator, source_len: int) -> list[int]:
    found: list[int] = rng.choice(_ordinary(kind), source_len).tolist()
    return found


@random_source.register(FeatureSource)
def _(kind: FeatureSource, rng: np.random.Generator, source_len: int) -> Array:
    fewest, most = kind.most_frames(source_len - 1) + 1, kind.most_frames(source_len)
    frames = kind.frames or int(rng.integers(max(fewest, 1), most + 1))
    return rng.standard_normal((frames, kind.dim), np.float32)


@random_source.register(ImageSource)
def _(kind: ImageSource, rng: np.random.Generator, source_len: int) -> Array:
    return rng.standard_normal(kind.shape, np.float32)


@functools.lru_cache(8)
def stand_in(kind: SourceKind) -> Source:
    """Return a short source, to warm up or to check the rest of a request."""
    return random_source(kind, np.random.default_rng(0), 1)


@functools.lru_cache(8)
def _ordinary(kind: TokenSource) -> NDArray[np.int64]:
    every = np.arange(kind.vocab)
    ordinary = np.setdiff1d(every, kind.special)
    return ordinary if ordinary.size else every


def batch_problems(kind: SourceKind, sources: Sources) -> list[str]:
    """List what is wrong with the arrays of a batch for a model that reads `kind`."""
    if sources.checked is sources.inputs and sources.kind is kind:
        return []
    if list(sources.inputs) != list(kind.inputs):
        return [f"the inputs are {', '.join(sources.inputs)}, expected {', '.join(kind.inputs)}"]
    sizes, problems = dict[str | int, int]({BATCH: len(sources)}), list[str]()
    for name, (dtype, shape) in kind.inputs.items():
        array = sources.inputs[name]
        sizes = dict(zip(shape, array.shape, strict=False)) | sizes  # the mask is as long as the features
        wanted = tuple(dim if isinstance(dim, int) else sizes.get(dim, 0) for dim in shape)
        if array.shape != wanted or array.dtype != dtype or array.size == 0:
            problems.append(f"{name} is {array.dtype} {array.shape}, expected {dtype} [{', '.join(map(str, shape))}]")
        elif dtype == "bool" and (not array[:, 0].all() or (array[:, 1:] & ~array[:, :-1]).any()):
            problems.append(f"{name} must begin with True in every row and be padded on the right only")
    return problems or _value_problems(kind, *next(iter(sources.inputs.items())))


def _value_problems(kind: SourceKind, name: str, values: Array) -> list[str]:
    if not isinstance(kind, TokenSource):
        return [] if np.isfinite(values).all() else [f"{name} has NaN or infinity, expected finite numbers"]
    if values.min() >= 0 and values.max() < kind.vocab:
        return []
    return [f"{name} reach from {values.min()} to {values.max()}, expected 0 … {kind.vocab - 1}"]


def id_problems(name: str, ids: Sequence[int], vocab: int) -> list[str]:
    """Return a problem if any of the values is no id below `vocab`."""
    # Almost always all ids are valid, and checking them together is much faster.
    if len(ids) == 0 or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab):
        return []
    wrong = [token for token in ids if not is_id(token, vocab)]
    return [f"{name} has {shortened(wrong[0])}, expected ids 0 to {vocab - 1}"] if wrong else []


def is_id(token: object, vocab: int) -> bool:
    """Return whether a value is a whole number from 0 to `vocab` - 1."""
    return is_whole(token) and bool(0 <= token < vocab)
