"""Say what differs between two bundles: in files, in what they say of themselves, and in texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

from tfexport._io.signature import TrustedKeys
from tfexport.bundle.bundle import Bundle, open_bundle
from tfexport.bundle.defaults import read_defaults
from tfexport.errors import InputError, shortened
from tfexport.model.load import load
from tfexport.model.model import Model

# Of texts that differ, on a terminal.
MAX_SHOWN = 10
# Of the manifest. Files are compared by themselves, inputs and outputs of graphs follow from the sizes, and errors that
# a verification found are no setting.
_NO_SETTINGS = frozenset({"files", "graphs", "parity"})


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Attributes:
        name: a file, or the name of a value, with dots between its parts.
        first: sha256 or value of the first bundle; None where it has none.
        second: of the second.
    """

    name: str
    first: Any
    second: Any


@dataclass(frozen=True)
class TextDifference:
    """One text that is answered differently.

    Attributes:
        index: of the text, from 0.
        text: that went in.
        first: what the first bundle says to it.
        second: what the second says.
    """

    index: int
    text: str
    first: str
    second: str


@dataclass(frozen=True)
class TextDiff:
    """What two bundles say to the same texts.

    Attributes:
        num_texts: that both were asked.
        different: those that are answered differently, in order.
    """

    num_texts: int
    different: tuple[TextDifference, ...]


@dataclass(frozen=True)
class BundleDiff:
    """What differs between two bundles; their engines are not compared.

    Attributes:
        first: path as it was given.
        second: likewise.
        files: by sha256, each that differs or that only one has.
        settings: values of the manifests and of the defaults of generation that differ.
        texts: None where none were given.
    """

    first: str
    second: str
    files: tuple[Difference, ...]
    settings: tuple[Difference, ...]
    texts: TextDiff | None

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not (self.files or self.settings or (self.texts and self.texts.different))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {"same": self.is_same, **asdict(self)}

    def lines(self) -> list[str]:
        """Return the report for a terminal."""
        if self.is_same:
            asked = f", and in what they say to {self.texts.num_texts} texts" if self.texts else ""
            return [f"{self.first} and {self.second} are the same in files and settings{asked}"]
        lines = [f"first   {self.first}", f"second  {self.second}"]
        lines += ["", "Files, sha256", *(_line(one, _sum) for one in self.files)] if self.files else []
        lines += ["", "Settings", *(_line(one, shortened) for one in self.settings)] if self.settings else []
        return [*lines, *(_text_lines(self.texts) if self.texts else [])]


def diff_bundles(
    first: str | PathLike[str],
    second: str | PathLike[str],
    *,
    texts: Sequence[str] | None = None,
    num_beams: int = 1,
    batch_size: int = 32,
    trusted_keys: Sequence[str | PathLike[str]] | None = None,
    **options: Any,
) -> BundleDiff:
    """Compare two bundles.

    Args:
        first: path of a bundle.
        second: path of another.
        texts: that both are asked, with what each brings as its own defaults but for beams and draws; None for none.
        num_beams: of beam search; 1 is greedy.
        batch_size: texts to run together.
        trusted_keys: files of public keys, one of which must have signed each bundle; None compares whosever.
        options: of `tfexport.load`: backend, form, threads, device.

    Raises:
        TfexportError: a bundle cannot be opened or loaded, or a text cannot be answered.
    """
    keys = None if trusted_keys is None else TrustedKeys.read(trusted_keys)
    bundles = [open_bundle(path, trusted_keys=keys) for path in (first, second)]
    files, settings = _compared(map(_hashes, bundles)), _compared(map(_settings, bundles))
    found = None
    if texts is not None:
        answers = []
        for path in (first, second):
            with load(path, trusted_keys=trusted_keys, **options) as model:
                answers.append(_answers(model, str(path), texts, num_beams, batch_size))
        found = _different(texts, *answers)
    return BundleDiff(str(first), str(second), files, settings, found)


def _hashes(bundle: Bundle) -> dict[str, Any]:
    return {name: entry.sha256 for name, entry in bundle.manifest.files.items()}


def _settings(bundle: Bundle) -> dict[str, Any]:
    """Return what a bundle says of itself, each value by its name with dots."""
    manifest = bundle.manifest
    said = {name: value for name, value in manifest.to_dict().items() if name not in _NO_SETTINGS}
    said["graphs"] = {name: {"file": graph.file, "opset": graph.opset} for name, graph in manifest.graphs.items()}
    said["parity"] = {"passed": manifest.parity["passed"]} if manifest.parity else None
    said["generation"] = read_defaults(bundle).given()
    return dict(_flat(said))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _compared(values: Iterable[Mapping[str, Any]]) -> tuple[Difference, ...]:
    first, second = values
    differences = (Difference(name, first.get(name), second.get(name)) for name in sorted({*first, *second}))
    return tuple(one for one in differences if one.first != one.second)


def _answers(model: Model, path: str, texts: Sequence[str], num_beams: int, batch_size: int) -> list[str]:
    if not model.spec.has_decoder:
        raise InputError(f"{path}: is an encoder alone and says no texts; compare without --corpus")
    results = model.generate(texts, batch_size=batch_size, num_beams=num_beams, do_sample=False, num_return_sequences=1)
    return [result.text for result in results]


def _different(texts: Sequence[str], first: Sequence[str], second: Sequence[str]) -> TextDiff:
    pairs = enumerate(zip(texts, first, second, strict=True))
    return TextDiff(len(texts), tuple(TextDifference(index, *pair) for index, pair in pairs if pair[1] != pair[2]))


def _line(found: Difference, spelled: Callable[[Any], str]) -> str:
    first, second = ("none" if value is None else spelled(value) for value in (found.first, found.second))
    return f"  {found.name}  {first} → {second}"


def _sum(sha256: str) -> str:
    return f"{sha256[:16]}…"


def _text_lines(found: TextDiff) -> list[str]:
    lines = ["", f"Texts: {len(found.different)} of {found.num_texts} differ"]
    for one in found.different[:MAX_SHOWN]:
        said = ((f"text {one.index + 1}", one.text), ("  first", one.first), ("  second", one.second))
        lines += [f"  {name:10}{' '.join(text.splitlines())}" for name, text in said]
    more = len(found.different) - MAX_SHOWN
    return [*lines, f"  and {more} more; --json has all"] if more > 0 else lines
