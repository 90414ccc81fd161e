"""Options of generation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import tfexport
from tests.fuzz.bundles import TEXTS
from tests.fuzz.kind import Kind
from tests.fuzz.mutations import mutated_json
from tfexport.errors import TfexportError
from tfexport.generation import DecodeConfig

_NUMBERS = st.one_of(
    st.integers(-3, 12), st.sampled_from([2**31, 2**63, -(2**63), 10**30, 400]), st.floats(allow_subnormal=True)
)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(_NUMBERS, st.booleans(), st.none(), st.text(max_size=4), st.sampled_from(["never", "auto", "-", ""])),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
)
_FIELDS = {field.name: field for field in dataclasses.fields(DecodeConfig)}
# What a caller might really ask for, of each option; most combinations are allowed.
_LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(1, 20),
    "max_length": st.integers(2, 20),
    "min_new_tokens": st.integers(0, 20),
    "min_length": st.integers(0, 20),
    "num_beams": st.integers(1, 6),
    "length_penalty": st.floats(-10, 10),
    "early_stopping": st.sampled_from([True, False, "never"]),
    "no_repeat_ngram_size": st.integers(0, 4),
    "encoder_no_repeat_ngram_size": st.integers(0, 4),
    "repetition_penalty": st.floats(0.01, 100),
    "do_sample": st.booleans(),
    "temperature": st.floats(0.01, 100),
    "top_k": st.integers(0, 500),
    "top_p": st.floats(1e-9, 1),
    "num_return_sequences": st.integers(1, 6),
    "return_alternatives": st.booleans(),
    "forced_bos_token_id": st.integers(0, 400),
    "forced_eos_token_id": st.lists(st.integers(0, 400), max_size=3),
    "suppress_tokens": st.lists(st.integers(0, 400), max_size=400),
    "bad_words_ids": st.lists(st.lists(st.integers(0, 400), max_size=3), max_size=4),
    "prefix_bias_beta": st.floats(0, 1),
    "eos_token_id": st.lists(st.integers(0, 400), max_size=3),
    "decoder_start_token_id": st.integers(0, 400),
    "max_time": st.floats(1e-9, 1),
    "stop_strings": st.lists(st.text("0123456789-", max_size=3), max_size=3),
    "replace_unknowns": st.booleans(),
    "prompt_lookup_num_tokens": st.integers(1, 30),
    "seed": st.integers(0, 2**64),
}


def _drawn(*, odd: int) -> st.SearchStrategy[dict[str, Any]]:
    """Draw up to six options; one in `odd` has any value at all."""
    names = st.lists(st.sampled_from(sorted(_FIELDS)), max_size=6, unique=True)
    is_odd = st.integers(1, odd).map(lambda number: number == odd)
    return names.flatmap(
        lambda chosen: st.fixed_dictionaries(
            {name: is_odd.flatmap(lambda odd, name=name: _VALUES if odd else _LIKELY[name]) for name in chosen}
        )
    )


def generation(folder: Path, scratch: Path) -> Kind:
    """Return the kind of options of `generate`, given from Python."""
    model = tfexport.load(folder / "bundle", threads=1)

    def use(raw: bytes) -> list[Any]:
        options = json.loads(raw)
        results = model.generate(TEXTS, **options)
        assert [result.index for result in results] == sorted(result.index for result in results)
        assert all(isinstance(result.text, str) and result.score == result.score for result in results)
        if results and results[0].index == 0 and options.get("max_time") is None:
            with contextlib.suppress(TfexportError):  # a stream takes fewer
                assert "".join(model.stream(TEXTS[0], **options)) == results[0].text
        return [result.text for result in results]

    return Kind(_drawn(odd=6).map(lambda options: json.dumps(options).encode()), use, close=model.close)


def defaults(folder: Path, scratch: Path) -> Kind:
    """Return the kind of generation.json, as options that a bundle brings."""
    from tfexport.generation import GenerationDefaults

    everything = {name: field.default for name, field in _FIELDS.items()} | {"num_beams": 4, "max_new_tokens": 5}

    def use(raw: bytes) -> Any:
        from tfexport._io.strict_json import read_json

        (scratch / "generation.json").write_bytes(raw)
        return GenerationDefaults.from_dict(read_json(scratch / "generation.json", "generation.json"))

    return Kind(mutated_json(json.loads(json.dumps(everything))), use, use(json.dumps(everything).encode()))
