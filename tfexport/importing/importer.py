"""Import: a foreign checkpoint becomes a model directory, proven by a golden where there is one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from torch import Tensor

from tfexport._io.names import CERTIFICATE, GENERATION, LAYOUT
from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError, ConfigError, ParityError, raise_all
from tfexport.generation import GenerationDefaults
from tfexport.importing.config import ImportConfig
from tfexport.importing.detect.search import FLOAT32_TOLERANCE, Budget, Detection, detect
from tfexport.importing.family import Family, as_transformers_loads, read_family
from tfexport.importing.formats.container import Checkpoint, read_checkpoint, without_prefix
from tfexport.importing.formats.generation import Generation, read_generation
from tfexport.importing.formats.language_pair import AS_IT_IS, LanguagePair
from tfexport.importing.formats.snapshot import FileSum
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
from tfexport.importing.reference.golden import Golden, read_golden
from tfexport.importing.reference.weights import check_weights, completed
from tfexport.importing.text import ImportedText, Tokenizers, import_directory_text, import_text
from tfexport.nn.config import TransformerConfig, model_spec
from tfexport.nn.directory import check_free, save_model
from tfexport.nn.switches import Value
from tfexport.text.config import TextConfig

_GOLDEN_SUFFIX = ".golden.safetensors"
# What the weights lose where a fold is rounded to their dtype.
_ROUNDED = 1e-5


@dataclass(frozen=True)
class Imported:
    """What was written, and how it is known to be right.

    `layout` has every setting in it; `config` is the model's; `notes` says what
    the caller should know; `certificate` is what is stored beside the weights.
    """

    layout: Layout
    config: TransformerConfig
    certificate: Certificate
    notes: tuple[str, ...]

    def summary(self) -> str:
        """Say in one line which layout it was and what is proven."""
        proof, kind = self.certificate, "encoder-decoder" if self.config.decoder else "encoder alone"
        if not proof.proven or proof.error is None or proof.tolerance is None:
            return f"{kind}, layout {self.layout.name}, not proven"
        return f"{kind}, layout {self.layout.name}, proven: error {proof.error:.1e}, at most {proof.tolerance:.0e}"


@dataclass(frozen=True)
class _Proof:
    """The golden and the state dict that it was recorded with."""

    path: Path
    golden: Golden
    tensors: Mapping[str, Tensor]

    @cached_property
    def wide(self) -> Mapping[str, Tensor]:
        """The state dict in float64, so that folds round nothing that the golden could show."""
        return {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in self.tensors.items()}


def import_checkpoint(
    path: Path | str,
    output: Path | str,
    config: ImportConfig | None = None,
    *,
    golden: Path | None = None,
    tokenizer: Path | None = None,
    target_tokenizer: Path | None = None,
    force: bool = False,
    report: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[str, float], None] = lambda stage, done: None,
) -> Imported:
    """Import a checkpoint.

    The layout is found and proven on the state dict that the golden was recorded
    with, then applied to the checkpoint, whose weights are what is written, in
    their dtypes.

    Args:
        path: what `read_checkpoint` reads.
        output: model directory to create.
        config: which layout, heads and settings.
        golden: file that `tfexport.importing.reference.golden.record` wrote.
        tokenizer: a tokenizer.json, a SentencePiece model, a list of tokens, or a Hugging Face
            directory; of both sides where there is no other.
        target_tokenizer: the target's own.
        force: replace a model directory that is there; it stays whole until the new one is.
        report: told what happens, a line at a time.
        on_progress: told what is being done where that may take long, and the share of it that is done, from 0 to 1.

    Raises:
        CheckpointError: the checkpoint, golden or tokenizer cannot be read or does not fit; nothing tells its layout.
        ConfigError: a layout or setting is wrong.
        ParityError: the golden is not reproduced, or the tokenizer differs from its texts.
        BackendError: reading the tokenizer needs a package that is not installed.
    """
    config = config or ImportConfig()
    check_free(output, force=force)
    checkpoint = read_checkpoint(path, config.entry)
    for name, file in checkpoint.files.items():
        _report_read(name, file, report)
    for note in checkpoint.notes:
        report(f"{path}: {note}")
    given = _settings(config)
    asked = config.layout if config.builtin else ""
    family = read_family(checkpoint, asked, has_golden=golden is not None, given=given, report=report)
    layout = _asked(config, family)
    checkpoint = _loaded(checkpoint, layout, report)
    proof = _proof(golden, Path(path), checkpoint, layout, report) if golden else None
    settings = {**family.settings, **given}
    budget = Budget(config.search_budget, report, partial(on_progress, "searching"))
    left_out: list[str] = []
    with fitting_threads(checkpoint.tensors.values()):
        layout = layout or _found(config, checkpoint, proof, settings, budget, Path(output), report)
        layout, unknown = _with_tokens(_with_settings(layout, settings, proof), proof)
        certificate = _certified(layout, proof, partial(on_progress, "certifying")) if proof else unproven(layout.name)
        certificate = replace(
            certificate,
            unverified=(*certificate.unverified, *unknown),
            checkpoint=checkpoint.files,
            golden=proof.golden.file if proof else None,
        )
        canonical = _applied(layout, checkpoint, proof, left_out)
        own_notes, has_own_weights = _own_weights(layout, canonical, proof)
    tokenizers = _tokenizers(tokenizer, target_tokenizer, config, Path(path) if checkpoint.hf_config else None)
    spec = model_spec(canonical.config, "fp32")
    text = _text(Path(path), checkpoint, config, tokenizers, proof, spec, has_own_weights=has_own_weights)
    certificate = replace(certificate, texts=text.compared, unverified=(*certificate.unverified, *text.unverified))
    notes = (*left_out, *canonical.notes, *own_notes, *text.notes)
    files = {
        **text.files,
        CERTIFICATE: (json.dumps(certificate.to_dict(), indent=2, ensure_ascii=False) + "\n").encode(),
        LAYOUT: render_layout(layout).encode(),
    }
    generation = _generation(checkpoint, canonical.config, given, text.generation)
    if generation is not None:
        notes = (*notes, *generation.notes)
        if generation.defaults.given():
            files[GENERATION] = (json.dumps(generation.defaults.given(), indent=2) + "\n").encode()
    save_model(replace(canonical, tensors=_separate(canonical.tensors)).model(), output, files=files, force=force)
    for note in notes:
        report(note)
    return Imported(layout, canonical.config, certificate, notes)


def _report_read(name: str, file: FileSum, report: Callable[[str], None]) -> None:
    report(f"read {name}: {file.bytes} bytes, sha256 {file.sha256}")


def _generation(
    checkpoint: Checkpoint, config: TransformerConfig, given: Collection[str], language: Mapping[str, int]
) -> Generation | None:
    """Return what a Hugging Face directory generates with, in the target language; None where nothing says either."""
    if config.target_vocab is None:
        return None
    if checkpoint.hf_config is None:
        return Generation(GenerationDefaults.from_dict(language), ()) if language else None
    own = {**checkpoint.hf_generation, **language} if checkpoint.hf_generation else {}
    return read_generation({**checkpoint.hf_config, **language}, own, config.tokens, config.target_vocab, given)


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


def _with_settings(layout: Layout, settings: Mapping[str, Value], proof: _Proof | None) -> Layout:
    """Put settings into a layout; the golden's heads count where nobody gives any."""
    layout = override(layout, settings)
    heads = proof.golden.heads if proof else None
    is_given = any(layout.switch("num_heads", side) is not None for side in SIDES)
    return layout if is_given or heads is None else override(layout, {"num_heads": heads})


def _proof(
    path: Path, imported: Path, checkpoint: Checkpoint, layout: Layout | None, report: Callable[[str], None]
) -> _Proof:
    """Read a golden and find the state dict that it speaks of: its own, the one beside it, or the checkpoint's."""
    golden = read_golden(path)
    if golden.file is not None:
        _report_read(path.name, golden.file, report)
    beside = path.with_name(path.name.removesuffix(_GOLDEN_SUFFIX) + ".safetensors")
    if golden.state:
        report(f"{path}: has its own state dict, which the layout is proven on")
        state = as_transformers_loads(checkpoint, layout, without_prefix(golden.state, []), [])
        return _Proof(path, golden, state)
    if path.name.endswith(_GOLDEN_SUFFIX) and beside.is_file() and not beside.samefile(imported):
        report(f"{path}: was recorded with {beside.name}, which the layout is proven on")
        return _Proof(path, golden, read_checkpoint(beside).tensors)
    return _Proof(path, golden, checkpoint.tensors)


def _asked(config: ImportConfig, family: Family) -> Layout | None:
    """Return the layout that is asked for or that config.json names; None where it has to be found."""
    name = family.layout or config.layout
    if name == "auto":
        return None
    return builtin_layouts().get(name) or _from_file(name)


def _loaded(checkpoint: Checkpoint, layout: Layout | None, report: Callable[[str], None]) -> Checkpoint:
    """Return a directory's weights as a model of transformers has them after loading."""
    notes: list[str] = []
    tensors = as_transformers_loads(checkpoint, layout, checkpoint.tensors, notes)
    for note in notes:
        report(note)
    return replace(checkpoint, tensors=tensors)


def _found(
    config: ImportConfig,
    checkpoint: Checkpoint,
    proof: _Proof | None,
    settings: Mapping[str, Value],
    budget: Budget,
    output: Path,
    report: Callable[[str], None],
) -> Layout:
    """Find the layout: one whose names and numbers fit, or the one that is detected."""
    tensors = proof.wide if proof else checkpoint.tensors
    builtin = [one for one in builtin_layouts().values() if fits_names(one, tensors)] if config.builtin else []
    known = next((one for one in builtin if proof and _fits(one, settings, proof)), None)
    if known is not None:
        report(f"names and numbers fit the layout {known.name}")
        return known
    heads = settings.get("num_heads")
    found = detect(
        tensors,
        proof.golden if proof else None,
        builtin,
        budget=budget,
        heads=heads if isinstance(heads, int) else None,
        settings=settings,
        report=report,
    )
    _check_found(found, tensors, config, budget, output, report)
    if found.search is not None and found.search.is_float32:
        return replace(found.layout, baseline=max(found.layout.baseline, FLOAT32_TOLERANCE / BASELINES))
    return found.layout


def _from_file(name: str) -> Layout:
    if os.sep not in name and not name.endswith((".yaml", ".yml")) and not Path(name).exists():
        raise ConfigError(
            f"layout {name!r} is neither built in nor a file; built in are {', '.join(builtin_layouts())}"
        )
    return read_layout(Path(name))


def _fits(layout: Layout, settings: Mapping[str, Value], proof: _Proof) -> bool:
    """Say whether a layout whose names fit reproduces the golden as it is."""
    try:
        canonical = _wide(_with_tokens(_with_settings(layout, settings, proof), proof)[0], proof)
        return compare(canonical, proof.golden).passed(tolerance(proof.golden, layout.baseline))
    except (CheckpointError, ConfigError, ParityError):
        return False


def _wide(layout: Layout, proof: _Proof) -> Canonical:
    return apply_layout(layout, proof.wide, attributes=proof.golden.attributes)


def _applied(layout: Layout, checkpoint: Checkpoint, proof: _Proof | None, notes: list[str]) -> Canonical:
    """Apply the layout to the checkpoint, whose weights have to be those that the golden was recorded with."""
    if proof is None:
        return apply_layout(layout, checkpoint.tensors)
    tensors = completed(checkpoint.tensors, proof.tensors, notes)
    try:
        canonical = apply_layout(layout, tensors, attributes=proof.golden.attributes)
    except CheckpointError as error:
        if proof.tensors is checkpoint.tensors:
            raise
        question = "the layout that the golden proves does not fit this checkpoint; is it a golden of this model?"
        raise CheckpointError(f"{question} {error}") from error
    used = [key for line in canonical.lines for key in line.sources]
    recorded = without_prefix(proof.golden.weights, [])
    note = check_weights(recorded, tensors, used, golden=proof.path.name, checkpoint=next(iter(checkpoint.files)))
    notes += [note] if note else []
    return canonical


def _check_found(
    found: Detection,
    tensors: Mapping[str, Tensor],
    config: ImportConfig,
    budget: Budget,
    output: Path,
    report: Callable[[str], None],
) -> None:
    """Refuse what was not proven, and leave a layout file to go on from."""
    search = found.search
    if search is None:
        if not config.accept_unverified:
            raise CheckpointError(
                f"the layout {found.layout.name} is a guess from names and shapes, and nothing was proven; "
                "record a golden and give --golden, or take the guess with --accept-unverified"
            )
        return
    if search.accepted:
        if search.is_float32:
            report(
                "as it seems, parts or a computed table are rounded to float32: the error is above what float64 leaves"
            )
        return
    started = _start_file(found.layout, output)
    tried = f"{search.proposals} mappings with {budget.spent:,} candidates"
    if search.is_cut:
        tried += f", all that it may; more with --search-budget {10 * budget.limit}"
    signs = "".join(f"; {sign}" for sign in unsupported(tensors))
    if search.best is None:
        refused = f"none could be run ({search.refused})"
        raise ParityError(f"no layout was found: tried {tried}, {refused}{signs}; finish {started}")
    raise ParityError(
        f"no layout reproduces the golden{signs}: tried {tried}; the closest has error {search.best.error:.1e}, "
        f"expected at most {search.tolerance:.0e}; {search.best.comparison.stage(search.tolerance)} disagrees first; "
        f"finish {started} and give it as --layout; {_way_out(found.layout)}"
    )


def _way_out(layout: Layout) -> str:
    """Say what remains where the model has a part that no layout can express."""
    computed = any(text.startswith("sinusoid") for text in layout.derive.values())
    what = (
        "no table of positions is stored: with rotary positions or ALiBi" if computed else "with a part of another kind"
    )
    return f"{what} no layout fits, and the model exports as your own module, see docs/your-own-module.md"


def _start_file(layout: Layout, output: Path) -> Path:
    """Write a layout beside the output, under a name that is free."""
    for number in range(1, 1000):
        path = output.with_name(f"{output.name}.layout{'' if number == 1 else f'-{number}'}.yaml")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(render_layout(layout))
        except FileExistsError:
            continue
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written ({error.strerror or error})") from error
        return path
    raise CheckpointError(f"{output}: has too many layout files beside it; remove some")


def _with_tokens(layout: Layout, proof: _Proof | None) -> tuple[Layout, tuple[str, ...]]:
    """Put the padding id in the place of ids that nobody gave, and say so."""
    missing = [name for name in ("pad", "start", "eos") if name not in layout.tokens]
    if not missing:
        return layout, ()
    pad = layout.tokens.get("pad", (proof.golden.pad_source if proof else None) or 0)
    told = " ".join(f"--set tokens.{name}=ID" for name in missing)
    note = (
        f"tokens {', '.join(missing)} are not known: {pad} stands for them; before generating text import with {told}"
    )
    return override(layout, {f"tokens.{name}": pad for name in missing}), (note,)


def _certified(layout: Layout, proof: _Proof, on_progress: Callable[[float], None]) -> Certificate:
    """Prove a layout on the golden.

    Raises:
        ParityError: it is not reproduced.
    """
    canonical = _wide(layout, proof)
    certificate = certify(canonical, proof.golden, layout.name, baseline=layout.baseline, on_progress=on_progress)
    if not certificate.proven:
        found = compare(canonical, proof.golden)
        raise ParityError(_disagreement(layout, found, tolerance(proof.golden, layout.baseline)))
    return certificate


def _disagreement(layout: Layout, found: Comparison, wanted: float) -> str:
    error = max(found.error, found.encoder_error or 0.0)
    return (
        f"layout {layout.name} does not reproduce the golden: error {error:.1e}, expected at most {wanted:.0e}; "
        f"worst in row {found.row} at position {found.position}; {found.stage(wanted)} disagrees first; "
        "check switches and heads, or let --layout auto search"
    )


def _tokenizers(
    source: Path | None, target: Path | None, config: ImportConfig, directory: Path | None
) -> Tokenizers | None:
    """Return the tokenizers that are asked for; who names a language asks for the directory's."""
    if source is None and target is not None:
        raise ConfigError("import: there is a tokenizer of the target alone; give that of the source as --tokenizer")
    languages = LanguagePair(config.source_language, config.target_language)
    if source is None and languages != AS_IT_IS:
        source = directory
        if source is None:
            raise ConfigError("import: there is a language, but no tokenizer that has its id; give --tokenizer")
    return None if source is None else Tokenizers(source, target, languages)


def _text(
    path: Path,
    checkpoint: Checkpoint,
    config: ImportConfig,
    tokenizers: Tokenizers | None,
    proof: _Proof | None,
    spec: ModelSpec,
    *,
    has_own_weights: bool,
) -> ImportedText:
    """Return the tokenizers that are given, else that of a Hugging Face directory, compared with recorded texts."""
    around = TextConfig(**{name: getattr(config, name) for name in ("source_prefix", "source_suffix", "target_prefix")})
    recorded = proof.golden.text if proof else None
    if tokenizers is None and checkpoint.hf_config is not None:
        return import_directory_text(path, around, recorded, spec, has_own_weights=has_own_weights)
    return import_text(tokenizers, around, recorded, spec, has_own_weights=has_own_weights)


def _own_weights(layout: Layout, canonical: Canonical, proof: _Proof | None) -> tuple[tuple[str, ...], bool]:
    """Compare the checkpoint's own weights with what the original computed with its own, where the golden has that.

    Returns:
        What to say, and whether they are the same weights.
    """
    if proof is None:
        return ("nothing was proven: there was no golden",), False
    golden = proof.golden.with_real_weights()
    if golden is None:
        return (), False
    found = compare(canonical, golden)
    told = f"with the checkpoint's own weights the error is {found.error:.1e}"
    is_same = found.passed(max(tolerance(golden, layout.baseline), _ROUNDED))
    if not is_same:
        told += ": they are not those that the golden was recorded beside"
    return (told,), is_same


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that lie in the memory of another under a second name, which a weight file cannot hold."""
    seen: dict[int, str] = {}
    return {name: t.clone() if seen.setdefault(t.data_ptr(), name) != name else t for name, t in tensors.items()}
