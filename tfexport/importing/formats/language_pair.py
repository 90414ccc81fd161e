"""The languages of a translation by name: where the source's stands around its ids, and how a target begins."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from tokenizers import Tokenizer as Inner

from tfexport._io.names import TARGET_TOKENIZER, TOKENIZER
from tfexport.errors import CheckpointError
from tfexport.importing.formats.languages import M2M100, MBART, MBART_50, NLLB
from tfexport.importing.formats.tokenizer_parts import Ids, TokenizerFiles

_KNOWN = {*(f"__{language}__" for language in M2M100), *MBART_50, *NLLB}


@dataclass(frozen=True)
class LanguagePair:
    """Languages as a tokenizer names them, such as eng_Latn, en_XX or en; None leaves what is there.

    Attributes:
        source: of the texts that go in.
        target: of those that come out.
    """

    source: str | None = None
    target: str | None = None


AS_IT_IS = LanguagePair()


def with_languages(found: TokenizerFiles, pair: LanguagePair) -> TokenizerFiles:
    """Return tokenizers whose sources say their language as the family's do, and what makes targets say theirs.

    A language that is there already shows where it stands: NLLB and mBART-50 put
    it before a source, mBART and the older NLLB behind its end. Sources of Marian
    begin with the target's.

    Args:
        found: tokenizers.
        pair: languages.

    Raises:
        CheckpointError: the tokenizer has no such language, or none at all.
    """
    inner = Inner.from_str(found.files[TOKENIZER].decode("utf-8"))
    before, behind = _around(inner)
    before, behind = (*found.source_prefix, *before), (*behind, *found.source_suffix)
    spoken = [i for i in (*before, *behind) if inner.id_to_token(i) in _KNOWN]
    if pair.source is None:
        told = [f"the source language is {inner.id_to_token(i)}; --source-language gives another" for i in spoken]
        found = replace(found, notes=(*found.notes, *told))
    else:
        if len(spoken) != 1:
            raise CheckpointError(
                f"source_language is {pair.source}, but this tokenizer puts no language around a source; "
                "give the ids that it shall put there as --source-prefix and --source-suffix"
            )
        own = _id(inner, pair.source, "source_language")
        before, behind = (tuple(own if i == spoken[0] else i for i in ids) for ids in (before, behind))
        files = {**found.files, TOKENIZER: _bare(found.files[TOKENIZER])}
        found = replace(found, files=files, source_prefix=before, source_suffix=behind)
    return found if pair.target is None else _to(found, pair.target)


def _to(found: TokenizerFiles, target: str) -> TokenizerFiles:
    """Let targets be of a language."""
    inner = Inner.from_str(found.files[TOKENIZER].decode("utf-8"))
    if (marian := inner.token_to_id(f">>{target}<<")) is not None:
        return replace(found, source_prefix=(marian,))
    own = Inner.from_str(found.files[TARGET_TOKENIZER].decode("utf-8")) if TARGET_TOKENIZER in found.files else inner
    is_first = own.token_to_id(MBART[0]) is not None and own.token_to_id(MBART_50[-1]) is None
    option = "decoder_start_token_id" if is_first else "forced_bos_token_id"
    return replace(found, generation={option: _id(own, target, "target_language")})


def _id(inner: Inner, language: str, option: str) -> int:
    """Return the id of a language, which is a token that was added, and no piece of a word."""
    added = {token.content: i for i, token in inner.get_added_tokens_decoder().items()}
    for token in (language, f"__{language}__"):
        if token in added:
            return added[token]
    names = sorted(token for token in added if token in _KNOWN or token.startswith(">>"))
    raise CheckpointError(
        f"{option} is {language}, expected one of {', '.join(names)}"
        if names
        else f"{option} is {language}, but this tokenizer has no languages; leave it out"
    )


def _around(inner: Inner) -> tuple[Ids, Ids]:
    """Return the ids that a tokenizer.json puts before and behind a text."""
    encoded = inner.encode("a")
    own = [i for i, added in enumerate(encoded.special_tokens_mask) if not added]
    if not own:
        return (), tuple(encoded.ids)
    return tuple(encoded.ids[: own[0]]), tuple(encoded.ids[own[-1] + 1 :])


def _bare(raw: bytes) -> bytes:
    """Return a tokenizer.json that puts nothing around a text."""
    return json.dumps({**json.loads(raw), "post_processor": None}, ensure_ascii=False).encode()
