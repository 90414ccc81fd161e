"""All kinds of input: files that are changed and read again, decoding options, and HTTP requests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import sentencepiece
import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import tfexport
from models.from_scratch.numbered_blocks import NumberedBlocks
from models.from_scratch.pieces import HEADS, SOURCE, TARGET
from tests import tiny
from tests.conftest import DATES
from tests.fuzz.mutations import mutated, mutated_json
from tests.fuzz.requests import TEXTS, App, requests
from tests.importing.huggingface.odd_texts import LINES
from tests.importing.layout.test_apply import IDENTITY
from tests.tensorrt.artifact import stored
from tests.text.test_tokenizer import TOKENS, byte_pairs, spec_of
from tfexport._io.names import CONFIG
from tfexport._io.strict_json import read_json, seal
from tfexport.config import Bound, settings
from tfexport.errors import InputError, TfexportError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.generation import DecodeConfig, GenerationDefaults
from tfexport.importing._files import read_checkpoint
from tfexport.importing.layout.apply import apply_layout
from tfexport.importing.layout.layout import read_layout, render_layout
from tfexport.importing.reference.outputs import read_reference, record_reference
from tfexport.importing.vocabulary import tokenizer_json
from tfexport.nn.config import model_spec
from tfexport.nn.directory import load_model, save_model
from tfexport.tensorrt.store import engine_names, open_engine
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer
from tfexport.text.vocabulary import try_tokenizer

# Tokenizers have fewer tokens, but ids of damaged ones may be larger.
VOCAB = 2000
ODD_TEXTS = ["the quick brown fox", "3 May 1999", "naïve café 🙂 ٣ مارس", "a" * 300, "e" + "\u0301" * 40]


@dataclass(frozen=True)
class Kind:
    """One kind of input: damaged examples, and `use`, which reads one as a user would and returns its content."""

    examples: st.SearchStrategy[bytes]
    use: Callable[[bytes], Any]
    original: Any = None  # what `use` returns for an undamaged input
    is_summed: bool = False  # a checksum covers every byte, so only the original may be accepted
    close: Callable[[], object] = lambda: None


def file(
    source: str,
    read: Callable[[Path], Any],
    name: str = "",
    *,
    is_json: bool = False,
    is_summed: bool = False,
    encode: Callable[[bytes], bytes] = bytes,
) -> Callable[[Path, Path], Kind]:
    """Change the file `source`, or in a directory `source` the file that matches `name`, and read `source`."""

    def make(originals: Path, scratch: Path) -> Kind:
        copy = scratch / source
        if (originals / source).is_dir():
            shutil.copytree(originals / source, copy)
        else:
            shutil.copy(originals / source, copy)
        (path,) = copy.glob(name) if name else (copy,)
        original = path.read_bytes()

        def use(raw: bytes) -> Any:
            path.unlink(missing_ok=True)  # a mapped file must not become shorter
            path.write_bytes(encode(raw))
            return read(copy)

        examples = mutated(original)
        if is_json:
            examples |= mutated_json(json.loads(original))
        return Kind(examples, use, use(original), is_summed)

    return make


# ---- bundles and engines


def generated(bundle: Path) -> list[str]:
    with tfexport.load(bundle, threads=1) as model:
        return [result.text for result in model.generate(TEXTS, max_new_tokens=3)]


def engine(bundle: Path) -> list[Any]:
    (name,) = engine_names(bundle)
    found = open_engine(bundle, name)
    return [found.manifest, {plan: found.read_plan(plan) for plan in found.manifest.plans}]


def sealed(raw: bytes) -> bytes:
    """Give a manifest the right hash, as an attacker would; leave it if it is not an object."""
    with contextlib.suppress(ValueError, AttributeError, RecursionError):
        return seal({key: value for key, value in json.loads(raw).items() if key != "self_sha256"})
    return raw


# ---- weights and model directories


def digest(tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    def described(tensor: Tensor) -> tuple[str, tuple[int, ...], str]:
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(raw).hexdigest()

    return {name: tensor if tensor is None else described(tensor) for name, tensor in tensors.items()}


def weights(path: Path) -> dict[str, Any]:
    return digest(apply_layout(IDENTITY, read_checkpoint(path).tensors, heads=4).tensors)


def reference(path: Path) -> list[Any]:
    found = read_reference(path)
    own = {name: getattr(found, name) for name in ("source_ids", "source_mask", "target_ids", "logits")}
    parts = (own, found.state, found.attributes, found.real)
    return [*map(digest, parts), found.heads, found.pad_source, found.pad_target, found.baseline]


def layout(folder: Path) -> list[Any]:
    found = read_layout(folder / "layout.yaml")
    return [found, digest(apply_layout(found, read_checkpoint(folder / "weights").tensors, heads=4).tensors)]


def texts(path: Path) -> TextConfig:
    return TextConfig.from_dict(read_json(path, "text.json"), subject="text")


def defaults(path: Path) -> GenerationDefaults:
    return GenerationDefaults.from_dict(read_json(path, "generation.json"))


# ---- tokenizers


def tokenizer(path: Path) -> list[Any]:
    """Try a tokenizer in a subprocess, as exports do, then encode and decode; single texts may be refused."""
    try_tokenizer(path.read_bytes(), path.name)
    spec = replace(spec_of(byte_pairs()), source_vocab=VOCAB, vocab=VOCAB, max_source_length=4000)
    loaded = Tokenizer.load(path, spec)
    found: list[Any] = []
    for text in ODD_TEXTS:
        try:
            (ids,) = loaded.encode([text])
            found += [ids, loaded.decode(ids)]
        except InputError:
            found.append("refused")
    return found


def converted(path: Path) -> bytes:
    """Convert a vocabulary to tokenizer.json, as imports do."""
    config = replace(tiny.config(), source_vocab=VOCAB, target_vocab=VOCAB, tokens=TOKENS)
    return tokenizer_json(path, model_spec(config, "fp32"))


def vocabulary(path: Path) -> list[Any]:
    made = path.with_name("tokenizer.json")
    made.write_bytes(converted(path))
    return tokenizer(made)


# ---- decoding options


def options(originals: Path, scratch: Path) -> Kind:
    """Draw options of `generate`, most of them valid."""
    model = tfexport.load(originals / "bundle", threads=1)

    def use(raw: bytes) -> list[Any]:
        chosen = json.loads(raw)
        results = model.generate(TEXTS, **chosen)
        assert [result.index for result in results] == sorted(result.index for result in results)
        assert all(isinstance(result.text, str) and result.score == result.score for result in results)
        if results and results[0].index == 0 and chosen.get("max_time") is None:
            with contextlib.suppress(TfexportError):  # a stream takes fewer options
                assert "".join(model.stream(TEXTS[0], **chosen)) == results[0].text
        return [result.text for result in results]

    numbers = st.integers(-3, 12) | st.sampled_from([2**31, 2**63, -(2**63), 10**30, 400]) | st.floats()
    words = st.none() | st.booleans() | st.text(max_size=4) | st.sampled_from(["never", "auto", "-", ""])
    lists = st.lists(numbers | words | st.lists(numbers | words, max_size=3), max_size=3)
    odd: st.SearchStrategy[Any] = numbers | words | lists
    fields = {setting.name: setting for setting in settings(DecodeConfig)}

    def values(name: str) -> st.SearchStrategy[Any]:
        likely = st.one_of(*(_likely(kind, fields[name].bounds) for kind in fields[name].types))
        return st.integers(1, 6).flatmap(lambda number: odd if number == 6 else likely)

    names = st.lists(st.sampled_from(sorted(fields)), max_size=6, unique=True)
    drawn = names.flatmap(lambda chosen: st.fixed_dictionaries({name: values(name) for name in chosen}))
    return Kind(drawn.map(lambda chosen: json.dumps(chosen).encode()), use, close=model.close)


def _likely(kind: Any, bounds: tuple[Bound, ...]) -> st.SearchStrategy[Any]:
    """Draw a value that a caller might choose."""
    limits = [bound.limit for bound in bounds]
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return st.lists(_likely(getattr(item, "__origin__", item), bounds), max_size=3)
    if kind is int:
        return st.integers(int(min(limits, default=0)), 20) | st.integers(0, 400)
    if kind is float:
        return st.floats(min(limits, default=0), max(limits, default=1))
    return {bool: st.booleans(), str: st.text("0123456789-", max_size=3)}.get(kind, st.none())


# ---- all kinds


def served(originals: Path, scratch: Path) -> Kind:
    app = App(originals / "bundle")
    return Kind(requests(), app.use, 0, close=app.close)


KINDS: dict[str, Callable[[Path, Path], Kind]] = {
    "bundle-manifest": file("bundle", generated, "manifest.json", is_summed=True),
    "bundle-graph": file("bundle", generated, "decoder_contrib.onnx", is_summed=True),
    "bundle-weights": file("bundle", generated, "weights.safetensors", is_summed=True),
    "bundle-tokenizer": file("bundle", generated, "tokenizer.json", is_summed=True),
    "bundle-sealed": file("bundle", generated, "manifest.json", is_json=True, encode=sealed),
    "engine-manifest": file("with-engine", engine, "engines/*/engine.json", is_summed=True),
    "engine-plan": file("with-engine", engine, "engines/*/decoder_static.plan", is_summed=True),
    "engine-sealed": file("with-engine", engine, "engines/*/engine.json", is_json=True, encode=sealed),
    "weights-safetensors": file("weights.safetensors", weights),
    "weights-torch": file("weights.pt", weights, is_summed=True),
    "weights-legacy": file("weights.legacy", weights),
    "reference": file("reference.safetensors", reference),
    "model-config": file("directory", lambda folder: load_model(folder).config, CONFIG, is_json=True),
    "model-texts": file("text.json", texts, is_json=True),
    "layout": file("layout", layout, "layout.yaml"),
    "layout-json": file("layout-json", layout, "layout.yaml", is_json=True),
    "tokenizer-words": file("characters.json", tokenizer, is_json=True),
    "tokenizer-bpe": file("byte_pairs.json", tokenizer, is_json=True),
    "tokenizer-unigram": file("unigram.json", tokenizer, is_json=True),
    "tokenizer-spm": file("spm.model", vocabulary),
    "tokenizer-list": file("tokens.txt", vocabulary),
    "generation-json": file("generation.json", defaults, is_json=True),
    "options": options,
    "requests": served,
}


def prepare(folder: Path) -> None:
    """Write small originals of all files."""
    folder.mkdir()
    torch.manual_seed(0)
    _prepare_bundles(folder)
    _prepare_weights(folder)
    _prepare_tokenizers(folder)
    document = json.loads((DATES / "text.json").read_bytes())
    (folder / "text.json").write_text(json.dumps(document | {"samples": document["samples"][:2]}))
    every_option = DecodeConfig().to_dict() | {"num_beams": 4, "max_new_tokens": 5}
    (folder / "generation.json").write_text(json.dumps(every_option))


def _prepare_bundles(folder: Path) -> None:
    small = {"layers": 1, "d_ff": 16, "num_heads": 2}
    config = tiny.config(
        encoder=small, decoder=small, d_model=16, max_source_length=64, source_vocab=388, target_vocab=388
    )
    save_model(tiny.model(config, dtype=torch.float32), folder / "model", tokenizer=DATES / "tokenizer.json")
    export_bundle(str(folder / "model"), folder / "bundle", ExportConfig(variants=("contrib",)), verify=False)
    bundle = stored.make(folder / "with-engine")
    stored.store(bundle, stored.manifest(bundle))


def _prepare_weights(folder: Path) -> None:
    small = tiny.config(encoder={"layers": 1, "d_ff": 8}, decoder={"layers": 1, "d_ff": 8}, d_model=8)
    model = tiny.model(small, dtype=torch.float32)
    save_model(model, folder / "directory")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "weights.safetensors")
    torch.save({"model_state_dict": state, "epoch": 3}, folder / "weights.pt")
    torch.save(state, folder / "weights.legacy", _use_new_zipfile_serialization=False)
    path, sizes = folder / "reference.safetensors", {"source_vocab": SOURCE, "target_vocab": TARGET, "heads": HEADS}
    record_reference(NumberedBlocks(), lambda model, *inputs: model(*inputs), path, **sizes)
    text = render_layout(IDENTITY)
    for name, layout_text in (("layout", text), ("layout-json", json.dumps(yaml.safe_load(text)))):
        (folder / name).mkdir()
        (folder / name / "layout.yaml").write_text(layout_text, "utf-8")
        save_file(state, folder / name / "weights")


def _prepare_tokenizers(folder: Path) -> None:
    byte_pairs().save(str(folder / "byte_pairs.json"))
    shutil.copy(DATES / "tokenizer.json", folder / "characters.json")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_prefix=str(folder / "spm"),
        vocab_size=200,
        pad_id=TOKENS.pad,
        bos_id=TOKENS.start,
        eos_id=TOKENS.eos,
        unk_id=TOKENS.unk,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    (folder / "unigram.json").write_bytes(converted(folder / "spm.model"))
    pieces = [processor.id_to_piece(number) for number in range(4, 60)]
    (folder / "tokens.txt").write_text("\n".join(["<pad>", "<s>", "</s>", "<unk>", *pieces]) + "\n", "utf-8")
