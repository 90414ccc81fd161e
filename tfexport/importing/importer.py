"""Import a checkpoint as a model directory and verify it with reference outputs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tfexport._io.names import CERTIFICATE, CONFIG, GENERATION, LAYOUT, MODEL_WEIGHTS, PROCESSOR
from tfexport._io.sealed_directory import FileEntry
from tfexport._io.strict_json import render
from tfexport.bundle.processor import ProcessorConfig
from tfexport.contract import ModelSpec, SpeechTokens
from tfexport.errors import BackendError, BundleError, CheckpointError, ConfigError, ParityError, raise_all, shortened
from tfexport.generation import GenerationDefaults
from tfexport.importing._files import read_checkpoint, without_prefix
from tfexport.importing._marian_file import is_marian
from tfexport.importing._options import Options, check_settings, named_layout, read_options
from tfexport.importing.accounting import Account, check_same, only_buffers
from tfexport.importing.config import ImportConfig
from tfexport.importing.detect._draft import drafts
from tfexport.importing.detect.scope import check_config, check_names
from tfexport.importing.detect.search import FLOAT32_TOLERANCE, Budget, detect, not_found
from tfexport.importing.hub import locate
from tfexport.importing.huggingface import (
    Family,
    Reader,
    as_loaded,
    families,
    family_of,
    read_settings,
    read_tokens,
    with_base,
)
from tfexport.importing.huggingface.generation import read_generation
from tfexport.importing.huggingface.own_code import prove
from tfexport.importing.huggingface.processor import directory_processor
from tfexport.importing.huggingface.tokenizer import tokenizer_names
from tfexport.importing.layout.apply import FOLDED_PROJECTION, Canonical, apply_layout, fits_names, unsupported
from tfexport.importing.layout.layout import SIDES, Layout, builtin_layouts, override, render_layout
from tfexport.importing.marian import read_marian
from tfexport.importing.reference.certificate import Certificate, certify
from tfexport.importing.reference.compare import BASELINES, TOLERANCE, compare, fitting_threads, tolerance
from tfexport.importing.reference.outputs import ReferenceOutputs, read_reference
from tfexport.importing.reference.weights import check_weights, completed, with_recorded_prefix
from tfexport.importing.text import ImportedText, Tokenizers, import_text
from tfexport.nn.config import ImageConfig, TransformerConfig, model_spec
from tfexport.nn.directory import check_free, save_model
from tfexport.nn.switches import Value
from tfexport.text.config import TextConfig

_REFERENCE_SUFFIX = ".golden.safetensors"
_ROUNDED = 1e-5  # error of folds whose results are rounded to the dtype of the weights


@dataclass(frozen=True)
class Imported:
    """Result of an import: the layout has all settings."""

    layout: Layout
    config: TransformerConfig
    certificate: Certificate
    notes: tuple[str, ...]

    def summary(self) -> str:
        """Return one line with the layout and the status of the import."""
        proof, kind = self.certificate, "encoder-decoder" if self.config.decoder else "encoder-only"
        if not proof.proven or proof.error is None or proof.tolerance is None:
            return f"{kind}, layout {self.layout.name}, {proof.proof}"
        lengths = f"up to {proof.source_tokens} source"
        lengths += f" and {proof.target_tokens} target tokens" if self.config.decoder else " tokens"
        error = f"error {proof.error:.1e}, at most {proof.tolerance:.0e}"
        return f"{kind}, layout {self.layout.name}, proven: {error}, compared with {proof.author} {lengths}"


@dataclass(frozen=True)
class _Proof:
    path: Path
    reference: ReferenceOutputs
    tensors: Mapping[str, Tensor]  # that prove the layout
    recorded: Mapping[str, Tensor] | None  # before they are loaded as transformers does; None for the checkpoint's

    @cached_property
    def wide(self) -> Mapping[str, Tensor]:
        # In float64, folds round less than the reference outputs can detect.
        return {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in self.tensors.items()}

    def apply(self, layout: Layout) -> Canonical:
        return apply_layout(layout, self.wide, attributes=self.reference.attributes)


def import_checkpoint(
    path: Path | str,
    output: Path | str,
    config: ImportConfig | None = None,
    *,
    reference: Path | None = None,
    golden: Path | None = None,
    tokenizer: Path | None = None,
    target_tokenizer: Path | None = None,
    force: bool = False,
    report: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[str, float], None] = lambda stage, done: None,
) -> Imported:
    """Import a checkpoint and write it as a model directory.

    The layout is found and verified on the state dict that the reference outputs were recorded with, then applied to
    the checkpoint. The weights keep their dtypes.

    Args:
        path: a checkpoint: a safetensors or `torch.save` file, a Hugging Face directory, an accelerate or Lightning
            folder, or [OWNER/]NAME[@REVISION] on the Hugging Face Hub.
        output: model directory to create.
        config: layout, heads and settings.
        reference: file of reference outputs, written by `tfexport.record_reference`.
        golden: former name of `reference`.
        tokenizer: tokenizer of the source or of both sides, see `Tokenizers.source`.
        target_tokenizer: tokenizer of the target, if it has its own.
        force: replace an existing model directory after the new one is complete.
        report: called with each message about the progress.
        on_progress: called with the name of a stage that may take long, and its progress from 0 to 1.

    Raises:
        CheckpointError: A file cannot be read or does not fit the model, or no layout is known.
        ConfigError: A layout or setting is invalid.
        ParityError: The model does not reproduce the reference outputs, or the tokenizer the recorded texts, or tensors
            are left over that nothing explains.
        BackendError: A package that reads the tokenizer is not installed.
    """
    config, path, output = config or ImportConfig(), Path(path), Path(output)
    check_free(output, force=force)
    reference = reference or golden
    options = read_options(path, config, reference, tokenizer, target_tokenizer)
    path, origin = locate(path, report)
    task = _Import(path, config, options, reference, report)
    checkpoint, proof, layout = task.checkpoint, task.proof, task.layout
    with fitting_threads(checkpoint.tensors.values()):
        if layout is None:
            layout = task.find_layout(Budget(config.search_budget, report, partial(on_progress, "searching")), output)
        layout, unknown = task.settled(task.explained(layout), task.settings)
        certificate = _certified(layout, proof, partial(on_progress, "certifying")) if proof else None
        canonical = task.apply(layout)
        own_notes, has_own_weights = task.compare_own_weights(layout, canonical)
        certificate = certificate or task.compare_with_transformers(layout, canonical)
    canonical = replace(canonical, config=task.named(canonical.config))
    spec = model_spec(canonical.config, "fp32")
    text = task.text(tokenizer, target_tokenizer, spec, has_own_weights=has_own_weights)
    processor, processor_notes = task.processor(spec)
    defaults, generation_notes = task.generation(canonical.config, text.generation)
    certificate = replace(
        certificate,
        unverified=(*certificate.unverified, *unknown, *task.unknown_weights(), *text.unverified),
        tensors=task.account.texts(),
        checkpoint=checkpoint.files,
        origin=origin,
        reference=proof.reference.file if proof else None,
        texts=text.compared,
    )
    files = {**text.files, LAYOUT: render_layout(layout).encode()}
    if given := defaults.given():
        files[GENERATION] = (json.dumps(given, indent=2) + "\n").encode()
    if processor is not None:
        files[PROCESSOR] = render(processor.to_dict())

    def all_files(folder: Path) -> dict[str, bytes]:
        entries = {name: FileEntry.of(folder / name) for name in (CONFIG, MODEL_WEIGHTS)}
        sealed = replace(certificate, model=entries).to_dict()
        return {**files, CERTIFICATE: (json.dumps(sealed, indent=2, ensure_ascii=False) + "\n").encode()}

    seen: dict[int, str] = {}  # a weight file cannot store tensors that share memory
    tensors = {
        name: tensor if seen.setdefault(tensor.data_ptr(), name) == name else tensor.clone()
        for name, tensor in canonical.tensors.items()
    }
    save_model(replace(canonical, tensors=tensors).model(), output, files=all_files, force=force)
    notes = [*task.notes, *canonical.notes, *own_notes, *processor_notes, *text.notes, *generation_notes]
    notes.append(task.account.summary())
    for note in notes:
        report(note)
    return Imported(layout, canonical.config, certificate, tuple(notes))


class _Import:
    """A checkpoint with options, Hugging Face family and reference outputs."""

    def __init__(
        self,
        path: Path,
        config: ImportConfig,
        options: Options,
        reference: Path | None,
        report: Callable[[str], None],
    ) -> None:
        self.path, self.config, self.report = path, config, report
        self.checkpoint = read_marian(path) if is_marian(path) else read_checkpoint(path, config.entry)
        for name, file in self.checkpoint.files.items():
            report(f"read {name}: {file.bytes} bytes, sha256 {file.sha256}")
        for note in self.checkpoint.notes:
            report(f"{path}: {note}")
        self.hf_config, self.own_settings = self.checkpoint.hf_config, options.settings
        self.family, self.layout, settings = self._family(options.layout, has_reference=reference is not None)
        self.settings = settings | self.own_settings
        self.account = Account(self.checkpoint.left_out)
        self.own: Mapping[str, Tensor] = self.checkpoint.tensors  # tensors of the file, with the names of the layout
        if self.family:
            self.own = with_base(self.family, self.own, report)
            tensors, uses = as_loaded(self.family, self.hf_config or {}, self.own, report)
            self.account.uses |= uses
            self.checkpoint = replace(self.checkpoint, tensors=tensors)
        self.proof = self._proof(reference) if reference else None
        self.settings = self._recorded_tokens() | self.settings
        self._leave_out(config.ignore)
        self.notes: list[str] = []
        self.tensors = self.checkpoint.tensors  # complete, as those of the reference outputs
        if self.proof and self.proof.recorded is not None:
            self.tensors = completed(self.checkpoint.tensors, self.proof.tensors, self.notes)
            own, recorded = completed(self.own, self.proof.recorded, []), self.proof.recorded
            check_same(recorded, own, self._is_known, self.proof.path.name, next(iter(self.checkpoint.files)))

    def _is_known(self, name: str) -> bool:
        patterns = (*self.config.ignore, *(self.layout.ignore if self.layout else ()))
        patterns += self.family.unused if self.family else ()
        return name in self.account.uses or any(fnmatchcase(name, pattern) for pattern in patterns)

    def _leave_out(self, patterns: tuple[str, ...]) -> None:
        """Leave out what `--ignore` names; raise if another entry has weights."""
        if patterns:
            proof, tensors = self.proof, self.checkpoint.tensors
            ignored = self.account.ignore(patterns, self.own, proof.tensors if proof else ())
            tensors = {name: tensor for name, tensor in tensors.items() if name not in ignored}
            self.checkpoint = replace(self.checkpoint, tensors=tensors)
            if proof:
                recorded = {name: tensor for name, tensor in proof.tensors.items() if name not in ignored}
                self.proof = replace(proof, tensors=tensors if proof.recorded is None else recorded)
        self.account.check(self.checkpoint.tensors)

    def explained(self, layout: Layout) -> Layout:
        """Return the layout with `ignore` for all tensors that need no line."""
        by_layout = self.layout is not None or layout.name in builtin_layouts()
        tensors = {**(self.proof.tensors if self.proof else {}), **self.checkpoint.tensors}
        buffers = self.account.explain(layout, tensors, self.own, by_layout=by_layout)
        self.account.check(self.checkpoint.tensors)
        return replace(layout, ignore=tuple(dict.fromkeys([*layout.ignore, *buffers, *self.config.ignore])))

    def _family(
        self, given: Layout | None, *, has_reference: bool
    ) -> tuple[Family | None, Layout | None, dict[str, Value]]:
        hf, generation = self.hf_config, self.checkpoint.hf_generation
        layout = self.config.layout if self.config.builtin else ""
        if (described := self.checkpoint.described) is not None:
            return None, given or described.layout, dict(described.settings)
        if hf is None:
            return None, given, {}
        if (family := family_of(hf)) is None:
            check_config(hf)
            model_type = shortened(hf.get("model_type"))
            if not has_reference and layout == "auto":
                raise CheckpointError(
                    f"config.json: model_type is {model_type}, expected {', '.join(families())}; "
                    "record reference outputs with its code and give --reference, see docs/guides/hugging-face.md"
                )
            self.report(f"config.json: there is no layout for {model_type}; only its tokens are used")
            return None, given, read_tokens(Reader(hf, {}), generation, ())
        if layout not in ("auto", family.layout(hf)):
            return None, given, {}
        self.report(f"config.json: the layout is {family.layout(hf)}")
        if unread := [name for name in family.unread if name in hf]:
            self.report(f"config.json: ignored keys that transformers does not read: {', '.join(unread)}")
        settings, front = read_settings(family, hf, generation, self.checkpoint.tensors, self.own_settings)
        found = named_layout(family.layout(hf))
        found = replace(found, image=front) if isinstance(front, ImageConfig) else replace(found, features=front)
        return family, found, settings

    def _proof(self, path: Path) -> _Proof:
        # Use the state dict in the reference file, the one next to it, or the checkpoint's.
        reference = read_reference(path)
        if reference.file is not None:
            self.report(f"read {path.name}: {reference.file.bytes} bytes, sha256 {reference.file.sha256}")
        neighbor = path.with_name(path.name.removesuffix(_REFERENCE_SUFFIX) + ".safetensors")
        if reference.state:
            self.report(f"{path}: has its own state dict, which proves the layout")
            tensors = without_prefix(reference.state, [])
        elif path.name.endswith(_REFERENCE_SUFFIX) and neighbor.is_file() and not neighbor.samefile(self.path):
            self.report(f"{path}: was recorded with {neighbor.name}, which proves the layout")
            tensors = read_checkpoint(neighbor).tensors
        else:
            return _Proof(path, reference, self.checkpoint.tensors, None)
        if self.family is None:
            self.own = with_recorded_prefix(self.own, tensors)
            self.checkpoint = replace(self.checkpoint, tensors=self.own)
            return _Proof(path, reference, tensors, tensors)
        recorded = with_base(self.family, tensors, lambda _: None)
        return _Proof(
            path, reference, as_loaded(self.family, self.hf_config or {}, recorded, lambda _: None)[0], recorded
        )

    def _recorded_tokens(self) -> dict[str, Value]:
        """Return the token ids of the reference file as settings.

        Raises ConfigError if other ids or heads are given.
        """
        recorded = self.proof.reference.known_tokens() if self.proof else {}
        layout = None if self.layout is None or self.layout.name in builtin_layouts() else self.layout
        given: dict[str, Value] = {f"tokens.{name}": value for name, value in layout.tokens.items()} if layout else {}
        given |= self.settings
        heads = self.proof.reference.heads if self.proof and "num_heads" in self.own_settings else None
        problems = [
            f"{name} is {given[name]}, the reference outputs were recorded with {value}"
            for name, value in {**recorded, **({"num_heads": heads} if heads else {})}.items()
            if isinstance(given.get(name), int) and given[name] != value
        ]
        raise_all(
            ConfigError, "import", problems, remedy="correct --set or --heads, or record again with the right values"
        )
        return {**recorded}

    def settled(self, layout: Layout, settings: Mapping[str, Value]) -> tuple[Layout, tuple[str, ...]]:
        """Set switches, heads and tokens; also return what remains unverified."""
        layout, reference = override(layout, settings), self.proof.reference if self.proof else None
        # The head count of the reference file applies only if no setting gives one.
        if reference and reference.heads and all(layout.switch("num_heads", side) is None for side in SIDES):
            layout = override(layout, {"num_heads": reference.heads})
        is_encoder = reference is not None and reference.target_ids is None
        missing = [name for name in ("pad", "start", "eos")[: 1 if is_encoder else 3] if name not in layout.tokens]
        if not missing:
            return layout, ()
        pad = layout.tokens.get("pad", (reference.pad_source if reference else None) or 0)
        names, options = ", ".join(missing), " ".join(f"--set tokens.{name}=ID" for name in missing)
        note = f"tokens {names} are not known and set to {pad}; before generating text import with {options}"
        return override(layout, {f"tokens.{name}": pad for name in missing}), (note,)

    def find_layout(self, budget: Budget, output: Path) -> Layout:
        """Return a layout that reproduces the reference outputs, or the guess if accepted."""
        config, proof = self.config, self.proof
        tensors = proof.wide if proof else self.checkpoint.tensors
        builtin = [one for one in builtin_layouts().values() if fits_names(one, tensors)] if config.builtin else []
        if proof and (layout := next((one for one in builtin if self._fits(one, proof, self.settings)), None)):
            self.report(f"names and numbers fit the layout {layout.name}")
            return layout
        reference = proof.reference if proof else None
        if not builtin:
            shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
            check_names(shapes, reads_features=reference is not None and reference.source_ids.dim() == 3)
        if self.settings:
            attributes = reference.attributes if reference else {}
            layouts = itertools.chain(builtin, drafts(tensors, reference))
            check_settings(self.settings, layouts, tensors, attributes)
        if proof and self.own_settings and (fitting := [one.name for one in builtin if self._fits(one, proof, {})]):
            given = ", ".join(f"{name}={value}" for name, value in self.own_settings.items())
            problem = f"the layout {fitting[0]} reproduces the reference outputs, but not with {given}"
            raise ConfigError(problem, subject="import", remedy="correct --set and --heads, or leave them out")
        layout, search = detect(tensors, reference, builtin, budget=budget, settings=self.settings, report=self.report)
        if search is None and not config.accept_unverified:
            raise CheckpointError(
                f"the layout {layout.name} is a guess from names and shapes without proof; "
                "record reference outputs and give --reference, or accept the guess with --accept-unverified"
            )
        if search is not None and not search.accepted:
            layout = layout if layout in builtin else replace(layout, ignore=only_buffers(layout.ignore, tensors))
            raise not_found(layout, search, budget, unsupported(tensors), output)
        if search is not None and search.is_float32:
            self.report("the error is above that of float64: parts or a computed table seem to be rounded to float32")
            return replace(layout, baseline=max(layout.baseline, FLOAT32_TOLERANCE / BASELINES))
        return layout

    def _fits(self, layout: Layout, proof: _Proof, settings: Mapping[str, Value]) -> bool:
        try:
            canonical = proof.apply(self.settled(layout, settings)[0])
            return compare(canonical, proof.reference).passed(tolerance(proof.reference, layout.baseline))
        except (CheckpointError, ConfigError, ParityError):
            return False

    def apply(self, layout: Layout) -> Canonical:
        proof = self.proof
        canonical = apply_layout(layout, self.tensors, attributes=proof.reference.attributes if proof else None)
        self.account.apply(canonical.lines, self.own)
        if proof is None:
            return canonical
        used = [key for line in canonical.lines for key in line.sources]
        recorded = without_prefix(proof.reference.weights, [])
        note = check_weights(recorded, self.tensors, used, proof.path.name, next(iter(self.checkpoint.files)))
        self.notes += [note] if note else []
        return canonical

    def named(self, config: TransformerConfig) -> TransformerConfig:
        """Return the configuration with labels and the tokens of speech."""
        labels, count, named = self.config.labels, len(config.labels), (self.hf_config or {}).get("id2label")
        if not labels and isinstance(named, dict) and named.keys() == {str(number) for number in range(count)}:
            labels = tuple(str(named[str(number)]) for number in range(count))
        if labels and len(labels) != count:
            raise ConfigError(f"labels: got {len(labels)}, but the head of the model has {count}; give one each")
        return replace(config, labels=labels or config.labels, speech=self._speech[0])

    def compare_own_weights(self, layout: Layout, canonical: Canonical) -> tuple[list[str], bool]:
        """Compare with the outputs of the model's own weights.

        Returns notes, and whether there are such outputs.
        """
        proof = self.proof
        if proof is None or (reference := proof.reference.with_real_weights()) is None:
            return [], False
        found, wanted = compare(canonical, reference), max(tolerance(reference, layout.baseline), _ROUNDED)
        if found.passed(wanted):
            return [f"with the checkpoint's own weights the error is {found.error:.1e}"], True
        raise ParityError(
            f"with these weights the error is {found.worst:.1e}, expected at most {wanted:.0e}; {proof.path.name} was "
            "recorded with other weights, or its code changes them",
            subject=next(iter(self.checkpoint.files)),
            remedy="record again with this checkpoint loaded, or give the layout.yaml of the proven import as --layout",
        )

    def compare_with_transformers(self, layout: Layout, canonical: Canonical) -> Certificate:
        """Compare a Hugging Face directory, or note why it is not proven."""
        reason = "there are no reference outputs"
        if self.family and self.config.compare:
            if any(line.line == FOLDED_PROJECTION for line in canonical.lines):  # which is rounded to float32
                canonical = apply_layout(layout, {name: tensor.double() for name, tensor in self.tensors.items()})
            try:
                return prove(self.path, self.family, self.hf_config or {}, self.own, layout, canonical)
            except BackendError as error:
                reason += f", and it was not compared with transformers: {error}"
        self.notes.append(f"the import is not proven: {reason}")
        return Certificate(layout=layout.name, proven=False, unverified=("everything: there are no reference outputs",))

    def unknown_weights(self) -> tuple[str, ...]:
        """Return a line if the reference file does not show whose weights it has."""
        proof = self.proof
        if proof is None or proof.recorded is None or proof.reference.weights or proof.reference.real:
            return ()
        return ("weights: not compared with those that the reference outputs were recorded with",)

    def text(self, source: Path | None, target: Path | None, spec: ModelSpec, *, has_own_weights: bool) -> ImportedText:
        config, is_directory = self.config, self.hf_config is not None
        suffix, described = config.source_suffix, self.checkpoint.described
        user_text = TextConfig(
            source_prefix=config.source_prefix,
            source_suffix=suffix or (described.source_suffix if described else ()),
            target_prefix=config.target_prefix,
        )
        recorded = self.proof.reference.text if self.proof else None
        if source is None and (config.source_language, config.target_language) != (None, None):
            source = self.path
        names = tokenizer_names(self.path) if source is None and is_directory else ()
        languages = config.source_language, config.target_language
        tokenizers = Tokenizers(source or self.path, target, *languages, config.tokenize, config.lowercase)
        used = tokenizers if source or names else None
        try:
            text = import_text(used, user_text, recorded, spec, has_own_weights=has_own_weights)
        except (BackendError, BundleError, CheckpointError) as error:
            if source is not None:
                raise
            return ImportedText({}, notes=(f"the directory's tokenizer is not used: {error}",))
        notes = (f"the tokenizer is the directory's {', '.join(names)}", *text.notes) if names else text.notes
        return replace(text, notes=notes)

    def processor(self, spec: ModelSpec) -> tuple[ProcessorConfig | None, tuple[str, ...]]:
        if spec.source_vocab or self.hf_config is None:
            return None, ()
        return directory_processor(self.path, spec, compare=self.config.compare)

    def generation(
        self, config: TransformerConfig, language: Mapping[str, int]
    ) -> tuple[GenerationDefaults, list[str]]:
        if config.target_vocab is None:
            return GenerationDefaults(), []
        if self.hf_config is None:
            described = self.checkpoint.described
            return GenerationDefaults.from_dict({**(described.generation if described else {}), **language}), []
        given = {**self._speech[1], **language}
        found, own = (self.hf_config, given) if self.checkpoint.hf_generation else (given, {})
        return read_generation(found, own, config, self.own_settings)

    @cached_property
    def _speech(self) -> tuple[SpeechTokens | None, Mapping[str, Any]]:
        """Tokens of the prompts of a speech model, and the other generation settings."""
        config = self.hf_config or {}
        given = self.checkpoint.hf_generation or config
        return self.family.speech(self.path, config, given) if self.family and self.family.speech else (None, given)


def _certified(layout: Layout, proof: _Proof, on_progress: Callable[[float], None]) -> Certificate:
    canonical, wanted = proof.apply(layout), tolerance(proof.reference, layout.baseline)
    found = compare(canonical, proof.reference)
    if not found.passed(wanted):
        raise ParityError(
            f"layout {layout.name} does not reproduce the reference outputs: error {found.worst:.1e}, expected at most "
            f"{wanted:.0e}; worst in row {found.row} at position {found.position}; the difference is in the "
            f"{found.stage(wanted)}; check switches and heads, or let --layout auto search"
        )
    certificate = certify(canonical, proof.reference, layout.name, baseline=layout.baseline, on_progress=on_progress)
    error = certificate.error or 0.0
    problems = [
        f"{name} is {other.value}, with {other.nearest} the error is {other.error:.1e} instead of {error:.1e}"
        for name, other in certificate.switches.items()
        if error > max(TOLERANCE, 10 * other.error)
    ]
    raise_all(ParityError, f"layout {layout.name}", problems, remedy="correct the layout, --set or --heads")
    return certificate
