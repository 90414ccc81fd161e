"""The tokenizer wrapper, with tokenizers that are trained or built here."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tfexport.contract import ModelSpec, TokenIds
from tfexport.errors import BackendError, BundleError, InputError
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer
from tfexport.text.vocabulary import Vocabulary

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TOKENS = TokenIds(pad=0, start=1, eos=2, unk=3)
CHARACTERS = sorted(
    set("Dienstag, 3. März 2026 mardi 3 mars 火曜日年月 الثلاثاء ٣ مارس вторник марта อังคาร <>/-0123456789")
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "der schnelle braune Fuchs springt über den faulen Hund",
    "быстрая коричневая лиса перепрыгивает через ленивую собаку",
    "素早い茶色の狐がのろまな犬を飛び越える",
]


def spec_of(inner: tokenizers.Tokenizer, **changes: object) -> ModelSpec:
    size = inner.get_vocab_size(with_added_tokens=True)
    tokens = changes.pop("tokens", TOKENS)
    assert isinstance(tokens, TokenIds)
    spec = ModelSpec(
        d_model=8, source_vocab=size, max_source_length=64, tokens=tokens, precision="fp32",
        vocab=size, layers=1, heads=1, head_dim=8, value_dim=8, max_target_length=16,
    )  # fmt: skip
    return replace(spec, **changes)  # type: ignore[arg-type]


def wrap(inner: tokenizers.Tokenizer, folder: Path, **changes: object) -> Tokenizer:
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder / "tokenizer.json", spec_of(inner, **changes))


def characters() -> tokenizers.Tokenizer:
    """Characters, as in models/dates."""
    inner = tokenizers.Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(SPECIAL + CHARACTERS)}, unk_token="<unk>")
    )
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex("[\u200e\u200f]"), "")])
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(SPECIAL)
    return inner


def byte_pairs() -> tokenizers.Tokenizer:
    """Byte-level byte-pair encoding with an end token, as in most models."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return inner


def character_pairs(**model: object) -> tokenizers.Tokenizer:
    """Byte-pair encoding of plain characters without an unknown token."""
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "€": 3}, [("a", "b")], **model))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return inner


@pytest.fixture(scope="module")
def dates(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return wrap(characters(), tmp_path_factory.mktemp("dates"))


@pytest.fixture
def words(tmp_path: Path) -> Tokenizer:
    return wrap(byte_pairs(), tmp_path)


# ---- encoding and decoding


@pytest.mark.parametrize("text", ["Dienstag, 3. März 2026", "火曜日3月", "الثلاثاء ٣ مارس", "вторник 3 марта", "อังคาร"])
def test_characters_are_ids_of_the_vocabulary(dates: Tokenizer, text: str) -> None:
    normal = normalizers.NFKC().normalize_str(text)
    assert dates.encode([text]) == [[len(SPECIAL) + CHARACTERS.index(c) for c in normal]]


@given(text=st.text(CHARACTERS, min_size=1, max_size=64).filter(lambda text: not text.isspace()))
@settings(max_examples=200, deadline=None)
def test_characters_are_decoded_to_the_same_text(dates: Tokenizer, text: str) -> None:
    normal = normalizers.NFKC().normalize_str(text)
    assume(len(normal) <= 64)
    assert dates.decode(dates.encode([text])[0]) == normal


@pytest.mark.parametrize(
    "text", [*CORPUS, "naïve café 🙂 ٣ مارس", "tab\there", "nul\0byte", "\u202eright to left", "a\u0301\u0302"]
)
def test_byte_pairs_are_decoded_to_the_same_text(tmp_path: Path, text: str) -> None:
    tokenizer = wrap(byte_pairs(), tmp_path, max_source_length=200)
    assert tokenizer.decode(tokenizer.encode([text])[0]) == text


def test_sources_have_the_special_tokens_of_the_file_and_targets_do_not(words: Tokenizer) -> None:
    (source,) = words.encode(["the fox"])
    assert source[-1] == TOKENS.eos
    assert words.encode_target("the fox") == source[:-1]


# ---- options of the file that are ignored


def test_padding_truncation_and_dropout_of_the_file_are_off(tmp_path: Path) -> None:
    inner = byte_pairs()
    inner.enable_padding(length=50)
    inner.enable_truncation(3)
    expected = wrap(byte_pairs(), tmp_path).encode(["the lazy dog", "Hund"])
    inner.model.dropout = 0.9
    tokenizer = wrap(inner, tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] == pytest.approx(0.9)
    assert len(expected[0]) > 3
    assert [tokenizer.encode(["the lazy dog", "Hund"]) for _ in range(5)] == [expected] * 5


def test_typed_special_tokens_are_characters(dates: Tokenizer, words: Tokenizer) -> None:
    (typed,) = dates.encode(["<s>3</s>"])
    assert not {TOKENS.start, TOKENS.eos} & set(typed)
    assert dates.decode(typed) == "<s>3</s>"
    for special in SPECIAL:
        (typed,) = words.encode([f"fox {special} dog"])
        assert not {0, 1, 2, 3} & set(typed[:-1])
        assert words.decode(typed) == f"fox {special} dog"


def test_a_special_token_in_a_text_is_unknown_if_it_is_one_token(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(
        models.Unigram(
            [("<pad>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("a", -1.0), ("b", -1.0)], unk_id=3
        )
    )
    inner.add_special_tokens(SPECIAL)
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    raw = tokenizers.Tokenizer.from_str(inner.to_str())
    raw.encode_special_tokens = True
    assert raw.encode("a</s>b").ids == [4, 2, 5, 2], "the library encodes it as the end token"
    assert wrap(inner, tmp_path).encode(["a</s>b"]) == [[4, 3, 5, 2]]


def test_a_special_token_without_unknown_token_is_refused(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3}))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = wrap(inner, tmp_path, tokens=replace(TOKENS, unk=None))
    with pytest.raises(InputError, match=r"^input: the text has '</s>', which has a special meaning; leave it out$"):
        tokenizer.encode(["a </s>"])


# ---- invalid texts


def test_every_bad_text_is_named_at_once(dates: Tokenizer) -> None:
    texts = ["3. März", "", " \t\n\u3000", "3" * 65, "\ud800", "3" * 10_001, "☃☃", 7, "2026"]
    with pytest.raises(InputError) as caught:
        dates.encode(texts)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "input of 9 texts: text 2 is empty; leave it out; text 3 is white space only; leave it out; "
        "text 4 has 65 tokens, the limit is 64; shorten it; "
        "text 5 has '\\ud800' at character 0, which is not valid Unicode; read it as UTF-8; "
        "text 6 has 10001 characters, the limit is 10000; split it; "
        "text 7 has no character of the vocabulary; give a text like those that the model was trained on; "
        "text 8 is int, expected a text"
    )
    assert caught.value.indices == tuple(range(1, 8))


def test_every_bad_prefix_is_named_and_equal_problems_once(dates: Tokenizer) -> None:
    assert dates.begin_targets(["", "3" * 15]) == [[], dates.encode(["3" * 15])[0]]
    with pytest.raises(InputError) as caught:
        dates.begin_targets(["20", " ", "3" * 16, "", " "])
    assert str(caught.value) == (
        "prefixes: 2: prefix is white space only; leave it out; 3: prefix has 16 tokens, the limit is 15; shorten it"
    )
    assert caught.value.indices == (1, 2, 4)
    with pytest.raises(InputError, match=r"^prefix is white space only; leave it out$") as caught:
        dates.begin_targets([" "] * 3)
    assert caught.value.indices == (0, 1, 2)


def test_every_bad_pair_is_named_with_its_place(dates: Tokenizer) -> None:
    with pytest.raises(InputError) as caught:
        dates.encode_pairs(["3", "", "3"], ["2026", "", " "], "score")
    assert str(caught.value) == (
        "score: pair 2: source is empty; leave it out; pair 2: target is empty; leave it out; "
        "pair 3: target is white space only; leave it out"
    )
    assert caught.value.indices == (1, 2)


@pytest.mark.parametrize(("texts", "message"), [([], "there is no text"), ("3. März", "expected a list of texts")])
def test_texts_have_to_be_a_list(dates: Tokenizer, texts: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dates.encode(texts)


def test_the_limit_counts_the_special_tokens(tmp_path: Path) -> None:
    length = len(wrap(byte_pairs(), tmp_path).encode(["the lazy dog"])[0])
    assert wrap(byte_pairs(), tmp_path, max_source_length=length).encode(["the lazy dog"])
    with pytest.raises(InputError, match=f"the text has {length} tokens, the limit is {length - 1}; shorten it"):
        wrap(byte_pairs(), tmp_path, max_source_length=length - 1).encode(["the lazy dog"])


def test_the_limit_of_characters_grows_with_the_model(tmp_path: Path) -> None:
    tokenizer = wrap(characters(), tmp_path, max_source_length=200)
    with pytest.raises(InputError, match="20001 characters, the limit is 20000"):
        tokenizer.encode(["3" * 20_001])
    with pytest.raises(InputError, match="20000 tokens, the limit is 200"):
        tokenizer.encode(["3" * 20_000])


@pytest.mark.parametrize("text", ["3" * 1_000_000, "a" + "\u0301" * 100_000], ids=["a megabyte", "combining marks"])
def test_huge_texts_are_refused_before_they_are_read(dates: Tokenizer, text: str) -> None:
    started = time.perf_counter()
    with pytest.raises(InputError, match="the limit is 10000; split it"):
        dates.encode([text])
    assert time.perf_counter() - started < 0.1


def test_unknown_among_known_characters_is_unknown(dates: Tokenizer) -> None:
    (ids,) = dates.encode(["3☃🙂\0\u202e"])
    assert ids == [len(SPECIAL) + CHARACTERS.index("3"), 3, 3, 3, 3]


@pytest.mark.parametrize("unknown", [None, 0])
def test_an_unknown_id_of_only_the_model_does_not_keep_characters(tmp_path: Path, unknown: int | None) -> None:
    tokenizer = wrap(character_pairs(), tmp_path, tokens=TokenIds(pad=0, start=0, eos=0, unk=unknown))
    with pytest.raises(InputError, match="would drop"):
        tokenizer.encode(["béb"])


@given(text=st.text("ab€é☃ x", min_size=1, max_size=12).filter(lambda text: not text.isspace()))
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize(
    "model", [{}, {"end_of_word_suffix": "€"}, {"continuing_subword_prefix": "x"}], ids=["plain", "suffix", "prefix"]
)
def test_byte_pairs_never_drop_characters_silently(model: dict[str, str], text: str) -> None:
    """A text is refused exactly if the library's tokens have fewer characters."""
    inner = tokenizers.Tokenizer(
        models.BPE({"<pad>": 0, "a": 1, "b": 2, "a€": 3, "é€": 4, "xa": 5, "xé": 6, "☃": 7, "€": 8}, [], **model)
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spec = spec_of(inner, tokens=TokenIds(pad=0, start=0, eos=0))
    vocabulary = Vocabulary(inner.to_str().encode(), "t.json", {0}, None)
    tokenizer = Tokenizer(vocabulary, vocabulary, spec)
    kept = sum(len(inner.encode(word).tokens) for word in text.split())
    lengths = sum(map(len, text.split()))  # no merges: one token a character
    if kept == lengths:
        assert len(tokenizer.encode([text])[0]) == lengths
    else:
        with pytest.raises(InputError, match="would drop"):
            tokenizer.encode([text])


# ---- files that do not fit


def test_more_tokens_than_the_model_are_refused_for_both_sides(tmp_path: Path) -> None:
    size, path = characters().get_vocab_size(), tmp_path / "tokenizer.json"
    with pytest.raises(BundleError) as caught:
        wrap(characters(), tmp_path, source_vocab=size - 1, vocab=size - 2)
    assert str(caught.value) == (
        f"tokenizer: {path}: the largest id is {size - 1}, but the model's source_vocab is {size - 1}; "
        f"{path}: the largest id is {size - 1}, but the model's target_vocab is {size - 2}; "
        "use the tokenizer that the model was trained with"
    )
    encoder = {"vocab": 0, "layers": 0, "heads": 0, "head_dim": 0, "value_dim": 0, "max_target_length": 0}
    assert wrap(characters(), tmp_path, **encoder).encode(["3"])
    assert wrap(characters(), tmp_path, source_vocab=size + 8, vocab=size + 8).encode(["3"])


def test_special_tokens_are_the_model_s_own(tmp_path: Path) -> None:
    """If the file has no special tokens, the model's are neither encoded nor decoded."""
    inner = characters()
    data = json.loads(inner.to_str())
    assert data.pop("added_tokens")
    bare = tokenizers.Tokenizer.from_str(json.dumps({**data, "added_tokens": []}))
    tokenizer = wrap(bare, tmp_path)
    (ids,) = tokenizer.encode(["3</s>"])
    assert not {TOKENS.pad, TOKENS.start, TOKENS.eos} & set(ids)
    assert tokenizer.decode([TOKENS.start, *ids[:1], TOKENS.eos, TOKENS.pad]) == "3"
    assert tokenizer.eos == TOKENS.eos


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"{}", b'{"model": {"type": "Nothing"}}', b"\xff\xfe", b"[" * 100_000, b'{"version": "9"}'],
    ids=["empty", "cut", "list", "no model", "foreign model", "no UTF-8", "deep", "version"],
)
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(damage)
    with pytest.raises(BundleError, match=r"is not a valid tokenizer.json \(.*\); save the tokenizer again$") as caught:
        Tokenizer.load(path, spec_of(characters()))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"cannot read .*tokenizer\.json: No such file"):
        Tokenizer.load(tmp_path / "tokenizer.json", spec_of(characters()))


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(BackendError, match="tokenizers is not installed; pip install --upgrade tfexport"):
        Tokenizer.load(tmp_path / "tokenizer.json", spec_of(characters()))


# ---- sharing


def test_threads_share_a_tokenizer(words: Tokenizer) -> None:
    texts = [[f"{text[i : i + 12]} {i}"] for text in CORPUS for i in range(15)]
    expected = [words.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(words.encode, texts)) == expected


def test_forking_afterwards_causes_no_warning(tmp_path: Path) -> None:
    inner = byte_pairs()
    wrap(inner, tmp_path)
    spec = spec_of(inner).to_dict()
    program = f"""
import os
from pathlib import Path
from tfexport.contract import ModelSpec
from tfexport.text.config import TextConfig
from tfexport.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load(Path({str(tmp_path / "tokenizer.json")!r}), ModelSpec.from_dict({spec!r}))
tokenizer.encode(["the fox"] * 200)
child = os.fork()
tokenizer.encode(["the dog"] * 200)
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")


# ---- tokens of a source that are copied into a target


def sentence_pieces() -> tokenizers.Tokenizer:
    """Pieces as SentencePiece spells them, with "▁" in front of a word."""
    pieces = ["▁", "▁we", "▁see", "▁To", "kyo", "▁in", "▁May"]
    inner = tokenizers.Tokenizer(
        models.Unigram([*((token, 0.0) for token in SPECIAL), *((piece, -1.0) for piece in pieces)], unk_id=3)
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    inner.add_special_tokens(SPECIAL)
    inner.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return inner


@pytest.mark.parametrize("make", [characters, byte_pairs, sentence_pieces])
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_decoding_without_replacements(
    make: object, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    inner = make()  # type: ignore[operator]
    tokenizer = wrap(inner, tmp_path_factory.mktemp("t"))
    ids = data.draw(st.lists(st.integers(0, inner.get_vocab_size() - 1), max_size=12))
    assert tokenizer.decode_with(ids, {}) == tokenizer.decode(ids)


def test_copies_are_tokens_if_source_and_target_spell_alike(tmp_path: Path) -> None:
    tokenizer = wrap(sentence_pieces(), tmp_path)
    copies = tokenizer.copies("we see 日本 in Tokyo")
    assert copies == ["▁we", "▁see", "▁", "日本", "▁in", "▁To", "kyo", None]
    ids = tokenizer.encode(["in 日 we see"])[0]
    place = ids.index(TOKENS.unk or 0)
    assert tokenizer.decode_with(ids, {place: "日本"}) == "in 日本 we see"
    assert tokenizer.decode_with([4 + 2, 3, 4 + 1], {1: "▁To"}) == "see To we"


def test_copies_are_text_if_source_and_target_spell_differently(tmp_path: Path) -> None:
    source, target = sentence_pieces(), characters()
    (tmp_path / "source.json").write_text(source.to_str())
    (tmp_path / "target.json").write_text(target.to_str())
    spec = spec_of(source, vocab=target.get_vocab_size())
    tokenizer = Tokenizer.load(tmp_path / "source.json", spec, target=tmp_path / "target.json")
    assert [piece for piece in tokenizer.copies("see Tokyo 日本") if piece != " "] == ["see", "To", "kyo", "日本", None]


def test_ids_around_a_text_are_never_copied(tmp_path: Path) -> None:
    inner = sentence_pieces()
    inner.save(str(tmp_path / "tokenizer.json"))
    text = TextConfig(source_prefix=(5,), source_suffix=(6, 2))
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json", spec_of(inner), text=text)
    copies = tokenizer.copies("in May")
    assert copies == [None, "▁in", "▁May", None, None, None]
    assert len(copies) == len(tokenizer.encode(["in May"])[0])
