"""Trim a model directory, and prove that texts stay the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfexport._io.names import CERTIFICATE, CONFIG, GENERATION, LAYOUT, MODEL_WEIGHTS, TEXT, TOKENIZER
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.strict_json import read_json, render
from tfexport.bundle.manifest import changes_since_import
from tfexport.bundle.status import REFERENCE
from tfexport.contract import ModelSpec
from tfexport.decode.offline import decode
from tfexport.errors import ConfigError, ParityError, raise_all, shortened
from tfexport.generation import GenerationDefaults
from tfexport.importing.directory import stored_defaults, stored_tokenizer
from tfexport.nn.config import model_spec
from tfexport.nn.directory import check_free, load_model, save_model
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import EagerSession
from tfexport.text.tokenizer import Tokenizer
from tfexport.text.vocabulary import Vocabulary
from tfexport.trim._kept import choose, ids_of, needed_ids
from tfexport.trim._model import Kept, largest_difference, trimmed_defaults, trimmed_model, trimmed_text
from tfexport.trim._tokenizer import TokenizerFile

Report = Callable[[str], None]
Text = str | tuple[str, str]  # a source, or a source and a target
_TOLERANCE = 1e-9  # of logits in float64, relative to the largest
_COMPARED = 32  # texts whose logits are compared
_SHOWN = 3  # texts that differ


@dataclass(frozen=True, kw_only=True)
class Trimmed:
    """Sizes before and after, and what was compared.

    Attributes:
        source_vocab: tokens of the source before and after.
        target_vocab: tokens of the target before and after.
        weight_bytes: size of the weights before and after.
        seconds: greedy decoding of the texts in PyTorch before and after, one run each.
        texts: number of texts; greedy decoding gives the same output for each.
        logit_error: largest difference of a kept token's logit in float64, relative to the largest logit.
        changed: texts whose output differs with the beams of the model's default options; None without beams. Fewer
            tokens share the probability, so their scores change.
    """

    source_vocab: tuple[int, int]
    target_vocab: tuple[int, int]
    weight_bytes: tuple[int, int]
    seconds: tuple[float, float]
    texts: int
    logit_error: float
    changed: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Describe the result in lines for people."""
        source, target = ("{:,} → {:,}".format(*pair) for pair in (self.source_vocab, self.target_vocab))
        before, after = (size / 1e6 for size in self.weight_bytes)
        found = [
            f"vocabulary: {source} tokens of the source, {target} of the target",
            f"weights: {before:,.1f} → {after:,.1f} MB",
            f"logits: kept tokens differ by at most {self.logit_error:.1e} of the largest logit",
            f"outputs: the same for all {self.texts:,} texts (greedy)",
            f"time: {self.seconds[0]:.2f} → {self.seconds[1]:.2f} s (PyTorch, one run each)",
        ]
        if self.changed is not None:
            found.append(f"beams: {self.changed:,} of {self.texts:,} outputs differ with the model's number of beams")
        return found


@dataclass(frozen=True)
class _Directory:
    """A model with its tokenizer and settings."""

    model: Transformer
    spec: ModelSpec
    tokenizer: Tokenizer
    files: Mapping[str, bytes]  # of the tokenizer
    defaults: GenerationDefaults

    @classmethod
    def read(cls, path: Path) -> _Directory:
        model = load_model(path)
        spec = model_spec(model.config, "fp32")
        tokenizer, files = stored_tokenizer(path, spec)
        if tokenizer is None or not spec.source_vocab or not spec.has_decoder:
            problem = f"{path} has no {TOKENIZER}" if tokenizer is None else f"{path} does not turn texts into texts"
            raise ConfigError(f"{problem}; give a directory of such a model, as import writes it with --tokenizer")
        return cls(model, spec, tokenizer, files, stored_defaults(path, spec) or GenerationDefaults())

    def trimmed(self, kept: Kept, files: Mapping[str, bytes]) -> _Directory:
        model, text = trimmed_model(self.model, kept), trimmed_text(self.tokenizer.text, kept)
        spec = model_spec(model.config, "fp32")
        tokenizer = Tokenizer.parse(list(files.items()), spec, text=text)
        return _Directory(model, spec, tokenizer, files, trimmed_defaults(self.defaults, kept))

    def write(self, sources: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """Return the ids that the model writes for sources."""
        found = decode(EagerSession(self.model), sources, self.defaults.overridden(options))
        return [list(best[0].token_ids) for best in found]


def trim_model(
    directory: Path | str,
    output: Path | str,
    texts: Sequence[Text],
    *,
    keep: Sequence[str] = (),
    force: bool = False,
    report: Report = lambda _: None,
) -> Trimmed:
    """Write a copy of a model directory without tokens that your texts do not use.

    It keeps the tokens of `texts` and of the model's outputs for them, special tokens, and bytes and single characters,
    so that any other text can still be encoded.

    Args:
        directory: model directory with a tokenizer.
        output: model directory to write.
        texts: sources, or pairs of a source and a target, whose tokens are kept too.
        keep: more tokens to keep, spelled as in the tokenizer.
        force: replace an existing model directory.
        report: called with each message about the progress.

    Raises:
        InputError: there is no text, or a text cannot be encoded.
        ConfigError: the model does not turn texts into texts, or `keep` has an unknown token.
        ParityError: a text changes.
    """
    check_free(output, force=force)
    directory, output, pairs = Path(directory), Path(output), [(t, "") if isinstance(t, str) else t for t in texts]
    full, reads = _Directory.read(directory), [source for source, _ in pairs]
    sources = full.tokenizer.encode(reads)
    report(f"decoding {len(pairs):,} texts with all tokens")
    full.write(sources[:1], num_beams=1)  # the first run is slower
    began = time.perf_counter()
    written = full.write(sources, num_beams=1)
    middle = time.perf_counter()
    best = full.write(sources) if full.defaults.num_beams > 1 else None
    kept, files = _choose(full, pairs, [*written, *(best or ())], keep)
    trimmed = full.trimmed(kept, files)
    report(f"decoding them with {trimmed.spec.vocab:,}")
    again = time.perf_counter()
    found = trimmed.write(_renumbered(sources, kept.source), num_beams=1)
    seconds = middle - began, time.perf_counter() - again
    error = largest_difference(full.model, trimmed.model, kept, list(zip(sources, written, strict=True))[:_COMPARED])
    problems = list(_problems(full, trimmed, reads, _renumbered(sources, kept.source), written, found, kept))
    if error > _TOLERANCE:
        problems.append(f"logits differ by {error:.1e} of the largest, the limit is {_TOLERANCE:.0e}")
    raise_all(ParityError, str(directory), problems[:_SHOWN], remedy=f"report it with {TOKENIZER}")
    changed = None
    if best is not None:
        answers = trimmed.write(_renumbered(sources, kept.source))
        changed = sum(one != two for one, two in zip(answers, _renumbered(best, kept.target), strict=True))
    _save(directory, output, full, trimmed, force=force)
    before, after = ((folder / MODEL_WEIGHTS).stat().st_size for folder in (directory, output))
    return Trimmed(
        source_vocab=(full.spec.source_vocab, trimmed.spec.source_vocab),
        target_vocab=(full.spec.vocab, trimmed.spec.vocab),
        weight_bytes=(before, after),
        seconds=seconds,
        texts=len(pairs),
        logit_error=error,
        changed=changed,
    )


def _renumbered(texts: Sequence[Sequence[int]], new: Mapping[int, int]) -> list[list[int]]:
    return [[new[i] for i in ids] for ids in texts]


def _problems(
    full: _Directory,
    trimmed: _Directory,
    reads: Sequence[str],
    sources: Sequence[Sequence[int]],
    written: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    kept: Kept,
) -> Iterator[str]:
    """List texts whose ids or answers differ; only `written` has old ids."""
    encoded, expected = trimmed.tokenizer.encode(reads), _renumbered(written, kept.target)
    for text, *ids in zip(reads, encoded, sources, found, expected, written, strict=True):
        if ids[0] != ids[1]:
            yield f"{shortened(text)} is encoded differently"
        elif ids[2] != ids[3]:
            yield f"the output for {shortened(text)} has other tokens"
        elif trimmed.tokenizer.decode(ids[2]) != full.tokenizer.decode(ids[4]):
            yield f"the output for {shortened(text)} is decoded differently"


def _choose(
    full: _Directory, pairs: Sequence[tuple[str, str]], written: Sequence[Sequence[int]], keep: Sequence[str]
) -> tuple[Kept, dict[str, bytes]]:
    """Return the new ids, and the tokenizer's files with them."""
    files = {name: TokenizerFile(raw) for name, raw in full.files.items()}
    source, target = needed_ids(full.spec, full.tokenizer.text, full.defaults)
    kept = ids_of(keep, files.values())
    reader, *_, writer = [Vocabulary(raw, name) for name, raw in full.files.items()] * 2
    for read, wanted in pairs:
        source |= {*reader.raw_ids(read, special=True)}
        target |= {*writer.raw_ids(wanted, special=False)}
    target |= {i for ids in written for i in ids}
    is_shared = len(files) == 1 or full.model.config.tie_embeddings
    new, of_files = choose(full.spec, list(files.values()), source | kept, target | kept, shared=is_shared)
    return new, {name: file.renumbered(ids) for (name, file), ids in zip(files.items(), of_files, strict=True)}


def _save(directory: Path, output: Path, full: _Directory, trimmed: _Directory, *, force: bool) -> None:
    """Write the directory with the certificate of the import, for the new files."""
    files = {**trimmed.files, TEXT: render(trimmed.tokenizer.text.to_dict())}
    if given := trimmed.defaults.given():
        files[GENERATION] = render(given)
    if (layout := directory / LAYOUT).is_file():
        files[LAYOUT] = layout.read_bytes()
    certificate = read_json(path, str(path)) if (path := directory / CERTIFICATE).is_file() else None

    def all_files(folder: Path) -> dict[str, bytes]:
        if not isinstance(certificate, dict) or changes_since_import(certificate, directory):
            return files
        entries = {name: asdict(FileEntry.of(folder / name)) for name in (CONFIG, MODEL_WEIGHTS)}
        author = f"{certificate.get('author', REFERENCE)} before its {full.spec.vocab:,} tokens were trimmed"
        return {**files, CERTIFICATE: render({**certificate, "model": entries, "author": author})}

    save_model(trimmed.model, output, files=all_files, force=force)
