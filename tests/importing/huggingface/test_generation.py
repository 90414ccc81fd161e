"""The defaults of Hugging Face directories: what transformers generates untold we do, and what we lack is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.importing.huggingface import published
from tests.importing.huggingface.published import CONFIGS, VOCAB
from tfexport.decode.offline import decode
from tfexport.errors import CheckpointError
from tfexport.generation import GenerationDefaults
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import import_checkpoint
from tfexport.nn.directory import load_model
from tfexport.runtime.eager import EagerSession

NUM_TEXTS = 20


def imported(folder: Path, *settings: str) -> tuple[GenerationDefaults, list[str]]:
    """Import folder/hf, and return its defaults and what was said."""
    lines: list[str] = []
    import_checkpoint(folder / "hf", folder / "model", ImportConfig(settings=settings), report=lines.append)
    path = folder / "model" / "generation.json"
    given = json.loads(path.read_text()) if path.exists() else {}
    return GenerationDefaults.from_dict(given, subject="generation.json"), lines


def drawn_defaults(rng: np.random.Generator, pad: int, eos: int, start: int) -> dict[str, Any]:
    """Draw what a generation_config.json may say, in values that fit one another."""

    def ids(count: int) -> list[int]:
        return [int(token) for token in rng.choice([i for i in range(2, VOCAB) if i not in (pad, eos)], count)]

    options: list[dict[str, Any]] = [
        {"num_beams": int(rng.integers(2, 5)), "length_penalty": float(rng.choice([0.6, 2.0])), "early_stopping": True},
        {"no_repeat_ngram_size": int(rng.integers(1, 4))},
        {"repetition_penalty": float(rng.choice([0.9, 1.3]))},
        {"encoder_no_repeat_ngram_size": int(rng.integers(1, 4))},
        {"min_length": int(rng.integers(2, 9))},
        {"min_new_tokens": int(rng.integers(1, 6))},
        {"forced_bos_token_id": ids(1)[0]},
        {"forced_eos_token_id": eos},
        {"bad_words_ids": [ids(int(rng.integers(1, 4))) for _ in range(12)]},
        {"decoder_start_token_id": ids(1)[0]},
        {"begin_suppress_tokens": ids(9)},
        {"sequence_bias": [[ids(int(rng.integers(1, 3))), float(rng.normal() * 3)] for _ in range(12)]},
        {"exponential_decay_length_penalty": [int(rng.integers(0, 5)), float(rng.choice([0.8, 1.3]))]},
        {"renormalize_logits": True},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "eta_cutoff": 0.1, "epsilon_cutoff": 0.1},
        {"output_scores": True, "use_cache": False, "typical_p": 1.0, "num_beam_groups": 1},
    ]
    drawn = {name: value for option in options if rng.random() < 0.5 for name, value in option.items()}
    drawn |= [{"max_length": int(rng.integers(3, 16))}, {"max_new_tokens": int(rng.integers(1, 14))}][rng.integers(2)]
    ends = [eos, *ids(int(rng.integers(0, 3)))]
    return {
        "decoder_start_token_id": start,
        "pad_token_id": pad,
        "eos_token_id": ends if len(ends) > 1 or rng.random() < 0.5 else eos,
        "suppress_tokens": [pad],  # M2M100 gives it no position
        **drawn,
    }


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_directory_generates_as_in_transformers(name: str, place: str, tmp_path: Path) -> None:
    rng = np.random.default_rng((len(name), len(place)))
    config = CONFIGS[name]
    pad, ends = config["pad_token_id"], config["eos_token_id"]
    eos = ends[0] if isinstance(ends, list) else ends
    # Where a decoder of T5Gemma starts with padding, transformers hides the start from it.
    start = config["decoder"]["bos_token_id"] if "decoder" in config else config["decoder_start_token_id"] or 0
    drawn = drawn_defaults(rng, pad, eos, start)
    changes = {} if place == "generation_config.json" else drawn
    hf = published.write(tmp_path / "hf", name, drawn if place == "generation_config.json" else None, **changes)
    defaults, _ = imported(tmp_path)

    sources = [rng.integers(2, VOCAB, rng.integers(1, 13)).tolist() for _ in range(NUM_TEXTS)]
    sources = [[token for token in source if token != pad] or [eos] for source in sources]
    ids = torch.tensor([[*source, *[pad] * (12 - len(source))] for source in sources])
    mask = torch.arange(12)[None] < torch.tensor([len(source) for source in sources])[:, None]
    with torch.inference_mode():
        # With a cache transformers fails for a T5 with more layers in its decoder than in its encoder.
        out = published.load(hf).generate(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    rows = getattr(out, "sequences", out)[:, 1:].tolist()
    ours = load_model(tmp_path / "model").double()
    found = [best.token_ids for (best,) in decode(EagerSession(ours), sources, defaults.overridden({}))]
    assert [tuple(row[: len(ids)]) for row, ids in zip(rows, found, strict=True)] == found
    # Beams of transformers fill up with the end where padding is 0.
    assert {token for row, ids in zip(rows, found, strict=True) for token in row[len(ids) :]} <= {pad, eos}


def opus(folder: Path, **values: Any) -> list[str]:
    """Import opus-mt with a generation_config.json, and return what was said of it."""
    own = {"eos_token_id": 0, "decoder_start_token_id": 40, "pad_token_id": 40}
    published.write(folder / "hf", "opus-mt", {**own, **values})
    return [line for line in imported(folder)[1] if line.startswith("generation_config.json: ")]


DIFFER = "texts will differ from those of transformers"
NO_END = "has no eos_token_id: transformers ends texts only at the limit"


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        (
            {
                "num_beams": 4,
                "typical_p": 0.9,
                "num_beam_groups": 2,
                "encoder_repetition_penalty": 1.2,
                "renormalize_logits": True,
                "sequence_bias": [[[3, 4], -2.5]],
                "min_p": None,
                "use_cache": False,
                "lang_to_id": {"de": 3},
            },
            [
                "the defaults are num_beams 4, sequence_bias [[[3, 4], -2.5]], renormalize_logits true, typical_p 0.9",
                f"ignored num_beam_groups 2, encoder_repetition_penalty 1.2: {DIFFER}",
                "ignored lang_to_id: transformers ignores these keys too",
            ],
        ),
        ({"num_beam_groups": 1, "diversity_penalty": 0.0, "typical_p": 1.0, "renormalize_logits": False}, []),
        (
            {"num_beams": 4, "do_sample": True},
            ["the defaults are num_beams 4", f"do_sample is ignored with beams; {DIFFER}"],
        ),
        (
            {"max_length": 30, "max_new_tokens": 9, "min_length": 4, "min_new_tokens": 2},
            ["the defaults are max_new_tokens 9, min_new_tokens 2"],
        ),
        (
            {"eos_token_id": None},
            [f"{NO_END}, tfexport also at 0"],
        ),
    ],
)
def test_each_applied_or_ignored_setting_is_reported(values: dict[str, Any], lines: list[str], tmp_path: Path) -> None:
    assert opus(tmp_path, **values) == [f"generation_config.json: {line}" for line in lines]
    is_changed = any(line.startswith("the defaults are") for line in lines)
    assert (tmp_path / "model" / "generation.json").exists() == is_changed


def test_a_minimum_length_above_the_limit_becomes_the_limit(tmp_path: Path) -> None:
    opus(tmp_path, max_new_tokens=3, min_new_tokens=9)
    found = json.loads((tmp_path / "model" / "generation.json").read_text())
    config = GenerationDefaults.from_dict(found, subject="generation.json").overridden({})
    assert (config.min_new_tokens, config.max_new_tokens) == (3, 3)


def test_given_token_ids_override_those_of_the_file(tmp_path: Path) -> None:
    published.write(tmp_path / "hf", "opus-mt", {"eos_token_id": [0, 7], "decoder_start_token_id": 3})
    defaults, _ = imported(tmp_path)
    assert (defaults.eos_token_id, defaults.decoder_start_token_id) == ((0, 7), None)
    import_checkpoint(tmp_path / "hf", tmp_path / "other", ImportConfig(settings=("tokens.eos=5", "tokens.start=6")))
    assert not (tmp_path / "other" / "generation.json").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_beams": 100}, "num_beams is 100, expected 1 to 64; change it there, or remove it"),
        ({"bad_words_ids": [3]}, "bad_words_ids is (3,), expected a list of a list of a whole number"),
        ({"sequence_bias": [[[3, 41], 2.0]]}, "sequence_bias has 41, expected below the vocabulary of 41"),
        ({"sequence_bias": [[[3], [4]]]}, "sequence_bias has ((3,), (4,)), expected a list of ids and a number"),
        ({"exponential_decay_length_penalty": [1.5, 2]}, "length_penalty is (1.5, 2), expected whole tokens"),
        ({"typical_p": 0.0, "do_sample": True}, "typical_p is 0.0, expected above 0 and up to 1"),
        ({"forced_bos_token_id": 41}, "forced_bos_token_id has 41, expected below the vocabulary of 41"),
        ({"num_return_sequences": 3}, "num_return_sequences is 3 but num_beams is 1"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        opus(tmp_path, **values)
    assert str(caught.value).startswith("generation_config.json: ")
    assert message in str(caught.value)
    assert not (tmp_path / "model").exists()
