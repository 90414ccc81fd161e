"""Languages by name: what stands around a source and how a target begins, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import normalizers
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as NLLB

from tests import tiny
from tests.command import ran
from tests.importing.huggingface.odd_texts import odd_texts
from tests.importing.huggingface.published import CLASSES, opened
from tests.importing.huggingface.test_tokenizer_directories import (
    bart,
    encoded,
    is_of_the_other_side,
    is_plain,
    m2m100,
    marian,
    spec,
    train,
    write,
)
from tfexport.contract import ModelSpec
from tfexport.errors import CheckpointError, ConfigError
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.model.model import Model
from tfexport.nn.directory import load_model
from tfexport.runtime.eager import EagerSession

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
IDS = {"pad": 1, "start": 2, "eos": 2, "unk": 3}
SPM = "sentencepiece.bpe.model"


def nllb(folder: Path, **settings: Any) -> tuple[Any, ModelSpec]:
    """The files of a published one: no list of languages, but in those of special tokens, which are of any order."""
    count = len(train(folder / SPM, "bpe"))
    write(folder, config={"model_type": "m2m_100"}, tokenizer_config={"tokenizer_class": "NllbTokenizer", **settings})
    read = transformers.NllbTokenizer.from_pretrained(folder)
    vocab = {token: i for token, i in read.get_vocab().items() if i <= count}
    vocab |= {token: count + 1 + i for i, token in enumerate([*NLLB, "<mask>"])}
    theirs = transformers.NllbTokenizer(
        vocab=vocab, merges=read._merges, _spm_precompiled_charsmap=charsmap(folder / SPM), **settings
    )
    return theirs, spec(count + 206, **IDS)


def charsmap(path: Path) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(path.read_bytes())
    return bytes(proto.normalizer_spec.precompiled_charsmap)


def mbart(folder: Path, cls: str = "MBartTokenizer", languages: int = 25) -> tuple[Any, ModelSpec]:
    count = len(train(folder / SPM))
    write(folder, config={"model_type": "mbart"}, tokenizer_config={"tokenizer_class": cls})
    theirs = getattr(transformers, cls).from_pretrained(folder)
    if cls == "MBartTokenizer":
        # What its published tokenizer.json has, and transformers 5 loses where it reads the SentencePiece model.
        theirs._tokenizer.normalizer = normalizers.Precompiled(charsmap(folder / SPM))
    return theirs, spec(count + 2 + languages, **IDS)


FAMILIES: dict[str, tuple[Callable[[Path], tuple[Any, ModelSpec]], str | None, str | None]] = {
    "marian": (marian, None, None),
    "nllb": (nllb, "deu_Latn", "fra_Latn"),
    "nllb, legacy": (lambda folder: nllb(folder, legacy_behaviour=True), "deu_Latn", "fra_Latn"),
    "mbart": (mbart, "de_DE", "fr_XX"),
    "mbart50": (lambda folder: mbart(folder, "MBart50Tokenizer", 52), "de_DE", "sl_SI"),
    "m2m100": (m2m100, "fr", "de"),
}


def write_model(folder: Path, found: ModelSpec) -> Any:
    """Add random weights to a tokenizer's directory."""
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    cls = getattr(transformers, CLASSES[kind])
    sides = {"attention_heads": 2, "ffn_dim": 24, "layers": 1}
    sizes: dict[str, Any] = {
        f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()
    }
    sizes |= {"bos_token_id": 0, "max_position_embeddings": 402, "scale_embedding": True}
    own = found.tokens
    tokens = {"pad_token_id": own.pad, "eos_token_id": own.eos, "decoder_start_token_id": own.start}
    torch.manual_seed(0)
    model = cls(cls.config_class(d_model=16, vocab_size=found.source_vocab, **sizes, **tokens))
    tiny.randomise(model)
    model.tie_weights()
    model.save_pretrained(folder)
    return cls.from_pretrained(folder).double().eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_texts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """A whole directory, tokenizer files and weights, imported with languages by name or without any."""
    hf, made = tmp_path / "hf", tmp_path / "model"
    hf.mkdir()
    make, source, target = FAMILIES[family]
    theirs, found = make(hf)
    model = write_model(hf, found)
    import_checkpoint(hf, made, ImportConfig(source_language=source, target_language=target))
    ours, defaults = opened(made)
    if source:
        theirs.src_lang = source
    texts = [text for text in odd_texts() if is_plain(text) and not is_of_the_other_side(theirs, text)]
    plain = [text for text in texts if (ids := encoded(ours, text)) is not None and len(ids) < 400]
    assert len(plain) > 165
    different = [(text, a, b) for text in plain if (a := theirs(text).input_ids) != (b := ours.encode([text])[0])]
    assert not different, (len(different), different[:2])
    chosen = {}
    if target:
        token = theirs.convert_tokens_to_ids(f"__{target}__" if family == "m2m100" else target)
        chosen = {"decoder_start_token_id" if family == "mbart" else "forced_bos_token_id": token}
        assert defaults.given().items() >= chosen.items()
    # No word twice, as random weights would repeat one for ever; padding has no position in M2M100.
    suppressed = [found.tokens.pad, found.tokens.unk]
    options = {"max_new_tokens": 12, "no_repeat_ngram_size": 1, "num_beams": 1, "suppress_tokens": suppressed}
    some = plain[::8]
    with Model(EagerSession(load_model(made).double()), ours, defaults) as loaded:
        output = [result.text for result in loaded.generate(some, **options)]
    expected = []
    with torch.inference_mode():
        for text in some:
            given = theirs(text, return_tensors="pt")
            (ids,) = model.generate(given.input_ids, attention_mask=given.attention_mask, **options, **chosen)
            expected.append(theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    unequal = [(a, b) for a, b in zip(output, expected, strict=True) if a.strip() != b.strip()]
    assert len(set(expected)) > 10, "texts that are all alike prove nothing"
    assert not unequal, (len(unequal), unequal[:2])


@pytest.mark.parametrize("legacy", [False, True])
def test_ids_of_nllb(legacy: bool, tmp_path: Path) -> None:
    """Against SentencePiece itself, whose ids are one larger in the model; English where nothing says another."""
    theirs, found = nllb(tmp_path, legacy_behaviour=legacy)
    lines: list[str] = []
    write_model(tmp_path, found)
    import_checkpoint(tmp_path, tmp_path / "model", report=lines.append)
    assert "the source language is eng_Latn; --source-language gives another" in lines
    ours, _ = opened(tmp_path / "model")
    spm = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / SPM))
    own = spm.get_piece_size() + 1 + NLLB.index("eng_Latn")
    prefix, suffix = ([], [2, own]) if legacy else ([own], [2])
    for text in odd_texts():
        if (ids := encoded(ours, text)) is not None:
            assert ids == [*prefix, *(i + 1 if i else 3 for i in spm.encode(text)), *suffix], text
    assert all(ours.target_id(language) == theirs.convert_tokens_to_ids(language) for language in [*NLLB, "<mask>"])


def test_an_added_language_is_found(tmp_path: Path) -> None:
    _, found = nllb(tmp_path)
    added = found.source_vocab - 2
    config = ImportConfig(source_language="tyv_Cyrl")
    write(tmp_path, added_tokens={"tyv_Cyrl": "many"})
    write_model(tmp_path, found)
    with pytest.raises(CheckpointError, match="added tokens are invalid, expected ids"):
        import_checkpoint(tmp_path, tmp_path / "model", config)
    write(tmp_path, added_tokens={"tyv_Cyrl": added})
    import_checkpoint(tmp_path, tmp_path / "model", config)
    ours, _ = opened(tmp_path / "model")
    assert ours.encode(["the"])[0][0] == added


@pytest.mark.parametrize("family", ["nllb", "nllb, legacy", "mbart", "mbart50"])
def test_the_language_of_a_tokenizer_json(family: str, tmp_path: Path) -> None:
    """The file puts the language that was set when it was saved; another one takes its place."""
    hf, saved = tmp_path / "hf", tmp_path / "saved"
    hf.mkdir()
    make, source, target = FAMILIES[family]
    theirs, found = make(hf)
    saved.mkdir()
    (saved / "config.json").write_bytes((hf / "config.json").read_bytes())
    write_model(saved, found)
    theirs.save_pretrained(saved)
    import_checkpoint(saved, tmp_path / "as-it-is")
    import_checkpoint(saved, tmp_path / "model", ImportConfig(source_language=source, target_language=target))
    texts = [text for text in odd_texts() if "\u2581" not in text and theirs.unk_token_id not in theirs(text).input_ids]
    assert len(texts) > 30
    for made, language in (("as-it-is", theirs.src_lang), ("model", source)):
        theirs.src_lang = language
        ours, _ = opened(tmp_path / made)
        assert ours.encode(texts) == theirs(texts).input_ids, made
    assert opened(tmp_path / "model")[1].given()


def test_the_source_of_marian_names_the_target_language(tmp_path: Path) -> None:
    theirs, found = marian(tmp_path)
    write_model(tmp_path, found)
    import_checkpoint(tmp_path, tmp_path / "model", ImportConfig(target_language="fra"))
    ours, _ = opened(tmp_path / "model")
    assert ours.encode(["the tokenizer"])[0] == theirs(">>fra<< the tokenizer").input_ids


def test_an_unknown_language_is_refused(tmp_path: Path) -> None:
    def refused(path: Path, **given: Any) -> str:
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            import_checkpoint(path, tmp_path / "model", ImportConfig(**given))
        return str(caught.value)

    for name, make in (("nllb", nllb), ("bart", bart)):
        (tmp_path / name).mkdir()
        write_model(tmp_path / name, make(tmp_path / name)[1])
    assert "source_language is German, expected one of ace_Arab, ace_Latn" in refused(
        tmp_path / "nllb", source_language="German"
    )
    assert "target_language is de, expected one of" in refused(tmp_path / "nllb", target_language="de")
    output = refused(tmp_path / "bart", source_language="de")
    assert "adds no language to a source; give the ids" in output
    assert "this tokenizer has no languages" in refused(tmp_path / "bart", target_language="de")
    weights = tmp_path / "bart" / "model.safetensors"
    assert "a language is given, but no tokenizer" in refused(weights, target_language="de", layout="hf_bart", heads=2)
    with pytest.raises(ConfigError, match="leave source_prefix and suffix out"):
        ImportConfig(source_language="de", source_suffix=(2,))


def test_a_call_names_another_language(tmp_path: Path) -> None:
    hf, made, bundle = tmp_path / "hf", tmp_path / "model", tmp_path / "bundle"
    hf.mkdir()
    theirs, found = nllb(hf)
    write_model(hf, found)
    languages = ["--source-language", "eng_Latn", "--target-language", "deu_Latn"]
    output = ran("import", hf, "--output", made, *languages).stderr
    german, french = (theirs.convert_tokens_to_ids(name) for name in ("deu_Latn", "fra_Latn"))
    assert f"the defaults are forced_bos_token_id {german}" in output
    ran("onnx", made, "--output", bundle, "--variants", "concat", "--no-verify")

    def generate(*options: object, code: int = 0) -> Any:
        call = ran("generate", bundle, "the tokenizer", "--json", "--max-new-tokens", 3, *options, code=code)
        return json.loads(call.stdout)["token_ids"] if code == 0 else call.stderr

    assert generate()[0] == german
    for name in ("fra_Latn", french):
        assert generate("--forced-bos-token-id", name)[0] == french
    assert generate("--forced-bos-token-id", "none")[0] != german
    assert "token 'French' is not in the target's vocabulary" in generate("--forced-bos-token-id", "French", code=1)
