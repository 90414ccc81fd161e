"""Import a checkpoint as a model directory and verify it with reference outputs."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from tfexport._io.names import CERTIFICATE, GENERATION, LAYOUT
from tfexport.errors import BackendError, BundleError, CheckpointError, ConfigError, ParityError, raise_all, shortened
from tfexport.generation import GenerationDefaults
from tfexport.importing._files import Checkpoint, read_checkpoint, without_prefix
from tfexport.importing.config import ImportConfig
from tfexport.importing.detect.search import FLOAT32_TOLERANCE, Budget, Search, detect
from tfexport.importing.huggingface import Family, Reader, as_loaded, families, family_of, read_settings, read_tokens
from tfexport.importing.huggingface.generation import read_generation
from tfexport.importing.huggingface.tokenizer import tokenizer_names
from tfexport.importing.layout.apply import Canonical, apply_layout, fits_names, unsupported
from tfexport.importing.layout.layout import (
    SIDES,
    Layout,
    builtin_layouts,
    override,
    parse_setting,
    read_layout,
    render_layout,
)
from tfexport.importing.reference.certificate import Certificate, certify, unproven
from tfexport.importing.reference.compare import BASELINES, Comparison, compare, fitting_threads, tolerance
from tfexport.importing.reference.outputs import ReferenceOutputs, read_reference
from tfexport.importing.reference.weights import check_weights, completed
from tfexport.importing.text import ImportedText, Tokenizers, import_text
from tfexport.nn.config import TransformerConfig, model_spec
from tfexport.nn.directory import check_free, save_model
from tfexport.nn.switches import Value
from tfexport.text.config import TextConfig

_REFERENCE_SUFFIX = ".golden.safetensors"
# Error of folds whose results are rounded to the dtype of the weights.
_ROUNDED = 1e-5


@dataclass(frozen=True)
class Imported:
    """The layout with every setting, the model configuration, certificate and notes."""

    layout: Layout
    config: TransformerConfig
    certificate: Certificate
    notes: tuple[str, ...]

    def summary(self) -> str:
        """Return one line with the layout and whether the import is proven."""
        proof, kind = self.certificate, "encoder-decoder" if self.config.decoder else "encoder alone"
        if not proof.proven or proof.error is None or proof.tolerance is None:
            return f"{kind}, layout {self.layout.name}, not proven"
        return f"{kind}, layout {self.layout.name}, proven: error {proof.error:.1e}, at most {proof.tolerance:.0e}"


@dataclass(frozen=True)
class _Proof:
    path: Path
    reference: ReferenceOutputs
    tensors: Mapping[str, Tensor]

    @cached_property
    def wide(self) -> Mapping[str, Tensor]:
        # In float64, folds round less than the reference outputs can detect.
        return {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in self.tensors.items()}

    def apply(self, layout: Layout) -> Canonical:
        return apply_layout(layout, self.wide, attributes=self.reference.attributes)

    def compare(self, layout: Layout, canonical: Canonical) -> tuple[Comparison, float]:
        return compare(canonical, self.reference), tolerance(self.reference, layout.baseline)


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
        path: checkpoint file or directory, see `read_checkpoint`.
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
        CheckpointError: The checkpoint, reference file or tokenizer cannot be read or does not fit, or no layout is
            known.
        ConfigError: A layout or setting is invalid.
        ParityError: The model does not reproduce the reference outputs, or the tokenizer the recorded texts.
        BackendError: A package that reads the tokenizer is not installed.
    """
    reference = reference or golden
    config, path, output = config or ImportConfig(), Path(path), Path(output)
    check_free(output, force=force)
    checkpoint = read_checkpoint(path, config.entry)
    for name, file in checkpoint.files.items():
        report(f"read {name}: {file.bytes} bytes, sha256 {file.sha256}")
    for note in checkpoint.notes:
        report(f"{path}: {note}")
    given = _settings(config)
    family, settings = _family(checkpoint, config, given, has_reference=reference is not None, report=report)
    settings |= given
    if family:
        tensors = as_loaded(family, checkpoint.hf_config or {}, checkpoint.tensors, report)
        checkpoint = replace(checkpoint, tensors=tensors)
    layout = _named_layout(config, checkpoint, family)
    proof = _proof(reference, path, checkpoint, family, report) if reference else None
    with fitting_threads(checkpoint.tensors.values()):
        if layout is None:
            budget = Budget(config.search_budget, report, partial(on_progress, "searching"))
            layout = _find_layout(config, checkpoint, proof, settings, budget, output, report)
        layout, unknown = _settled(layout, settings, proof)
        certificate = _certified(layout, proof, partial(on_progress, "certifying")) if proof else unproven(layout.name)
        canonical, notes = _apply(layout, checkpoint, proof)
        own_notes, has_own_weights = _compare_own_weights(layout, canonical, proof)
    text = _text(path, checkpoint, config, (tokenizer, target_tokenizer), proof, canonical, has_own_weights)
    defaults, generation_notes = _generation(checkpoint, canonical.config, given, text.generation)
    certificate = replace(
        certificate,
        unverified=(*certificate.unverified, *unknown, *text.unverified),
        checkpoint=checkpoint.files,
        reference=proof.reference.file if proof else None,
        texts=text.compared,
    )
    files = {
        **text.files,
        CERTIFICATE: (json.dumps(certificate.to_dict(), indent=2, ensure_ascii=False) + "\n").encode(),
        LAYOUT: render_layout(layout).encode(),
    }
    if options := defaults.given():
        files[GENERATION] = (json.dumps(options, indent=2) + "\n").encode()
    save_model(replace(canonical, tensors=_separate(canonical.tensors)).model(), output, files=files, force=force)
    notes = [*notes, *canonical.notes, *own_notes, *text.notes, *generation_notes]
    for note in notes:
        report(note)
    return Imported(layout, canonical.config, certificate, tuple(notes))


def _settings(config: ImportConfig) -> dict[str, Value]:
    settings: dict[str, Value] = {}
    problems = []
    for text in config.settings:
        try:
            key, value = parse_setting(text)
        except ConfigError as error:
            problems.append(str(error))
            continue
        if key in settings:
            problems.append(f"setting {key} is given twice")
        settings[key] = value
    if config.heads is not None:
        if "num_heads" in settings:
            problems.append("the number of heads is given twice, as --heads and as num_heads")
        settings["num_heads"] = config.heads
    raise_all(ConfigError, "import", problems)
    return settings


def _family(
    checkpoint: Checkpoint,
    config: ImportConfig,
    given: Collection[str],
    *,
    has_reference: bool,
    report: Callable[[str], None],
) -> tuple[Family | None, dict[str, Value]]:
    hf, generation, asked = checkpoint.hf_config, checkpoint.hf_generation, config.layout if config.builtin else ""
    if hf is None:
        return None, {}
    if (family := family_of(hf)) is None:
        if not has_reference and asked == "auto":
            raise CheckpointError(
                f"config.json: model_type is {shortened(hf.get('model_type'))}, expected {', '.join(families())}; "
                "record reference outputs with its code and give --reference, see docs/guides/hugging-face.md"
            )
        report(f"config.json: there is no layout for {shortened(hf.get('model_type'))}; only its tokens are used")
        return None, read_tokens(Reader(hf), generation, ())
    if asked not in ("auto", family.layout(hf)):
        return None, {}
    report(f"config.json: the layout is {family.layout(hf)}")
    if unread := [name for name in family.unread if name in hf]:
        report(f"config.json: left out what transformers does not read: {', '.join(unread)}")
    return family, read_settings(family, hf, generation, checkpoint.tensors, given)


def _named_layout(config: ImportConfig, checkpoint: Checkpoint, family: Family | None) -> Layout | None:
    name = family.layout(checkpoint.hf_config or {}) if family else config.layout
    if name == "auto":
        return None
    if layout := builtin_layouts().get(name):
        return layout
    if os.sep not in name and not name.endswith((".yaml", ".yml")) and not Path(name).exists():
        raise ConfigError(
            f"layout {name!r} is neither built in nor a file; built in are {', '.join(builtin_layouts())}"
        )
    return read_layout(Path(name))


def _settled(layout: Layout, settings: Mapping[str, Value], proof: _Proof | None) -> tuple[Layout, tuple[str, ...]]:
    """Set switches, heads and tokens; also return what remains unverified."""
    layout = override(layout, settings)
    # The head count of the reference file applies only if no setting gives one.
    is_given = any(layout.switch("num_heads", side) is not None for side in SIDES)
    if proof and proof.reference.heads is not None and not is_given:
        layout = override(layout, {"num_heads": proof.reference.heads})
    missing = [name for name in ("pad", "start", "eos") if name not in layout.tokens]
    if not missing:
        return layout, ()
    pad = layout.tokens.get("pad", (proof.reference.pad_source if proof else None) or 0)
    options = " ".join(f"--set tokens.{name}=ID" for name in missing)
    note = f"tokens {', '.join(missing)} are not known and set to {pad}; before generating text import with {options}"
    return override(layout, {f"tokens.{name}": pad for name in missing}), (note,)


def _proof(
    path: Path, imported: Path, checkpoint: Checkpoint, family: Family | None, report: Callable[[str], None]
) -> _Proof:
    # Use the state dict in the reference file, the one next to it, or the checkpoint's.
    reference = read_reference(path)
    if reference.file is not None:
        report(f"read {path.name}: {reference.file.bytes} bytes, sha256 {reference.file.sha256}")
    beside = path.with_name(path.name.removesuffix(_REFERENCE_SUFFIX) + ".safetensors")
    if reference.state:
        report(f"{path}: has its own state dict, which the layout is proven on")
        state = without_prefix(reference.state, [])
        if family:
            state = as_loaded(family, checkpoint.hf_config or {}, state, lambda _: None)
        return _Proof(path, reference, state)
    if path.name.endswith(_REFERENCE_SUFFIX) and beside.is_file() and not beside.samefile(imported):
        report(f"{path}: was recorded with {beside.name}, which the layout is proven on")
        return _Proof(path, reference, read_checkpoint(beside).tensors)
    return _Proof(path, reference, checkpoint.tensors)


def _find_layout(
    config: ImportConfig,
    checkpoint: Checkpoint,
    proof: _Proof | None,
    settings: Mapping[str, Value],
    budget: Budget,
    output: Path,
    report: Callable[[str], None],
) -> Layout:
    tensors = proof.wide if proof else checkpoint.tensors
    builtin = [one for one in builtin_layouts().values() if fits_names(one, tensors)] if config.builtin else []
    if proof and (layout := next((one for one in builtin if _fits(one, settings, proof)), None)):
        report(f"names and numbers fit the layout {layout.name}")
        return layout
    reference = proof.reference if proof else None
    found = detect(tensors, reference, builtin, budget=budget, settings=settings, report=report)
    if found.search is None and not config.accept_unverified:
        raise CheckpointError(
            f"the layout {found.layout.name} is a guess from names and shapes, and nothing was proven; "
            "record reference outputs and give --reference, or take the guess with --accept-unverified"
        )
    if found.search is not None and not found.search.accepted:
        raise _not_found(found.layout, found.search, budget, unsupported(tensors), output)
    if found.search is not None and found.search.is_float32:
        report("the error is above that of float64: parts or a computed table seem to be rounded to float32")
        return replace(found.layout, baseline=max(found.layout.baseline, FLOAT32_TOLERANCE / BASELINES))
    return found.layout


def _fits(layout: Layout, settings: Mapping[str, Value], proof: _Proof) -> bool:
    try:
        found, wanted = proof.compare(layout, proof.apply(_settled(layout, settings, proof)[0]))
        return found.passed(wanted)
    except (CheckpointError, ConfigError, ParityError):
        return False


def _not_found(layout: Layout, search: Search, budget: Budget, signs: Iterable[str], output: Path) -> ParityError:
    """Write the closest layout next to the output and return the error that names it."""
    names = (f"{output.name}.layout{f'-{i}' if i > 1 else ''}.yaml" for i in itertools.count(1))
    started = next(path for name in names if not os.path.lexists(path := output.with_name(name)))
    try:
        started.parent.mkdir(parents=True, exist_ok=True)
        started.write_text(render_layout(layout), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{started}: cannot be written ({error.strerror or error})") from error
    tried = f"{search.proposals} mappings with {budget.spent:,} candidates"
    if search.is_cut:
        tried += f", all that it may; more with --search-budget {10 * budget.limit}"
    features = "".join(f"; {sign}" for sign in signs)
    if search.best is None:
        refused = f"none could be run ({search.refused})"
        return ParityError(f"no layout was found: tried {tried}, {refused}{features}; finish {started}")
    is_computed = any(text.startswith("sinusoid") for text in layout.derive.values())
    kind = "no table of positions is stored: with rotary positions or ALiBi"
    return ParityError(
        f"no layout reproduces the reference outputs{features}: tried {tried}; "
        f"the closest has error {search.best.error:.1e}, "
        f"expected at most {search.tolerance:.0e}; {search.best.comparison.stage(search.tolerance)} disagrees first; "
        f"finish {started} and give it as --layout; {kind if is_computed else 'with a part of another kind'} no layout "
        "fits, and the model exports as your own module, see docs/guides/your-own-module.md"
    )


def _apply(layout: Layout, checkpoint: Checkpoint, proof: _Proof | None) -> tuple[Canonical, list[str]]:
    if proof is None:
        return apply_layout(layout, checkpoint.tensors), []
    notes: list[str] = []
    tensors = completed(checkpoint.tensors, proof.tensors, notes)
    try:
        canonical = apply_layout(layout, tensors, attributes=proof.reference.attributes)
    except CheckpointError as error:
        if proof.tensors is checkpoint.tensors:
            raise
        question = "the layout that the reference outputs prove does not fit; were they recorded from this checkpoint?"
        raise CheckpointError(f"{question} {error}") from error
    used = [key for line in canonical.lines for key in line.sources]
    recorded = without_prefix(proof.reference.weights, [])
    note = check_weights(recorded, tensors, used, reference=proof.path.name, checkpoint=next(iter(checkpoint.files)))
    return canonical, [*notes, *([note] if note else [])]


def _certified(layout: Layout, proof: _Proof, on_progress: Callable[[float], None]) -> Certificate:
    canonical = proof.apply(layout)
    found, wanted = proof.compare(layout, canonical)
    if not found.passed(wanted):
        raise ParityError(
            f"layout {layout.name} does not reproduce the reference outputs: error {found.worst:.1e}, expected at most "
            f"{wanted:.0e}; worst in row {found.row} at position {found.position}; {found.stage(wanted)} disagrees "
            "first; check switches and heads, or let --layout auto search"
        )
    return certify(canonical, proof.reference, layout.name, baseline=layout.baseline, on_progress=on_progress)


def _text(
    path: Path,
    checkpoint: Checkpoint,
    config: ImportConfig,
    files: tuple[Path | None, Path | None],
    proof: _Proof | None,
    canonical: Canonical,
    has_own_weights: bool,
) -> ImportedText:
    around = TextConfig(
        source_prefix=config.source_prefix, source_suffix=config.source_suffix, target_prefix=config.target_prefix
    )
    recorded, spec = proof.reference.text if proof else None, model_spec(canonical.config, "fp32")
    (source, target), is_directory = files, checkpoint.hf_config is not None
    if source is None and target is not None:
        raise ConfigError("import: there is a tokenizer of the target alone; give that of the source as --tokenizer")
    if source is None and (config.source_language, config.target_language) != (None, None):
        if not is_directory:
            raise ConfigError("import: there is a language, but no tokenizer that has its id; give --tokenizer")
        source = path
    names = tokenizer_names(path) if source is None and is_directory else ()
    given = Tokenizers(source or path, target, config.source_language, config.target_language)
    try:
        text = import_text(given if source or names else None, around, recorded, spec, has_own_weights=has_own_weights)
    except (BackendError, BundleError, CheckpointError) as error:
        if source is not None:
            raise
        return ImportedText({}, notes=(f"the directory's tokenizer is not taken: {error}",))
    if names:
        text = replace(text, notes=(f"the tokenizer is the directory's {', '.join(names)}", *text.notes))
    return text


def _generation(
    checkpoint: Checkpoint, config: TransformerConfig, given: Collection[str], language: Mapping[str, int]
) -> tuple[GenerationDefaults, list[str]]:
    if config.target_vocab is None:
        return GenerationDefaults(), []
    if checkpoint.hf_config is None:
        return GenerationDefaults.from_dict(language), []
    own = {**checkpoint.hf_generation, **language} if checkpoint.hf_generation else {}
    return read_generation({**checkpoint.hf_config, **language}, own, config.tokens, config.target_vocab, given)


def _compare_own_weights(layout: Layout, canonical: Canonical, proof: _Proof | None) -> tuple[list[str], bool]:
    if proof is None:
        return ["nothing was proven: there were no reference outputs"], False
    reference = proof.reference.with_real_weights()
    if reference is None:
        return [], False
    found = compare(canonical, reference)
    is_same = found.passed(max(tolerance(reference, layout.baseline), _ROUNDED))
    more = "" if is_same else ": they are not those of the reference outputs"
    return [f"with the checkpoint's own weights the error is {found.error:.1e}{more}"], is_same


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # A weight file cannot store tensors that share memory.
    seen: dict[int, str] = {}
    return {name: t.clone() if seen.setdefault(t.data_ptr(), name) != name else t for name, t in tensors.items()}
