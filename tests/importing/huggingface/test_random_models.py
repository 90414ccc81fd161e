"""Random models of every family, with random settings and their directory's own: texts are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests import tiny
from tests.importing.huggingface.published import CLASSES
from tests.importing.huggingface.published_configs import VOCAB
from tests.importing.huggingface.test_generation import drawn_defaults
from tfexport.decode.offline import decode
from tfexport.errors import ConfigError
from tfexport.export import export_bundle
from tfexport.export.config import ExportConfig
from tfexport.generation import GenerationDefaults
from tfexport.importing.importer import import_checkpoint
from tfexport.nn.directory import load_model
from tfexport.runtime.eager import EagerSession
from tfexport.runtime.registry import LoadOptions, open_session
from tfexport.runtime.session import Session

FAMILIES = ("marian", "bart", "t5", "mbart", "m2m_100", "pegasus")
NUM_TEXTS, NUM_SETTINGS, LONGEST = 8, 10, 12
# T5 of transformers takes the mean of squares in float32, so its logits are wrong by about that.
SAME = {"t5": 1e-3}


def drawn_config(family: str, rng: np.random.Generator) -> dict[str, Any]:
    """Draw sizes, activation, ties and scales that the family has."""

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    heads, layers = one(1, 2, 4), [int(number) for number in rng.integers(1, 4, 2)]
    sizes = {"vocab_size": VOCAB, "d_model": heads * one(4, 8), "init_std": 0.02}
    tokens = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2}
    if family == "t5":
        layers.sort(reverse=True)  # the cache of transformers has as many layers as the encoder
        return {
            **sizes,
            "d_kv": one(4, 7),
            "d_ff": one(16, 40),
            "num_layers": layers[0],
            "num_decoder_layers": layers[1],
            "num_heads": heads,
            "feed_forward_proj": one("relu", "gated-gelu", "gated-silu"),
            "relative_attention_num_buckets": one(4, 8, 32),
            "relative_attention_max_distance": one(12, 128),
            "tie_word_embeddings": one(True, False),
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        }
    if family == "marian":
        pad = VOCAB - 1
        tokens = {"pad_token_id": pad, "eos_token_id": 0, "bos_token_id": 0, "decoder_start_token_id": pad}
    return {
        **sizes,
        **tokens,
        "encoder_layers": layers[0],
        "decoder_layers": layers[1],
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": one(16, 40),
        "decoder_ffn_dim": one(16, 24),
        "activation_function": one("relu", "gelu", "silu", "gelu_new", "gelu_pytorch_tanh"),
        "scale_embedding": one(True, False),
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }


def write(folder: Path, family: str, rng: np.random.Generator) -> Any:
    """Write a directory as transformers does today, and return its model in float64."""
    cls = getattr(transformers, CLASSES[family])
    torch.manual_seed(int(rng.integers(1 << 30)))
    config = cls.config_class(**drawn_config(family, rng))
    model = cls(config)
    tiny.randomise(model)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    model.tie_weights()
    model.save_pretrained(folder)
    said = {key: getattr(config, key) for key in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    defaults = drawn_defaults(rng, said["pad_token_id"], said["eos_token_id"], said["decoder_start_token_id"])
    while defaults.get("min_new_tokens", 0) > defaults.get("max_new_tokens", 99):  # which we refuse
        defaults = drawn_defaults(rng, said["pad_token_id"], said["eos_token_id"], said["decoder_start_token_id"])
    (folder / "generation_config.json").write_text(json.dumps({**said, **defaults}))
    return cls.from_pretrained(folder).double().eval()


def assert_same_texts(
    theirs: Any, ours: Session, sources: list[list[int]], defaults: GenerationDefaults, **options: Any
) -> None:
    """Compare texts; one that differs must be as likely to the last digits of what transformers itself computes."""
    pad = theirs.config.pad_token_id
    ids = torch.tensor([[*source, *[pad] * (LONGEST - len(source))] for source in sources])
    mask = torch.arange(LONGEST)[None] < torch.tensor([len(source) for source in sources])[:, None]
    with torch.inference_mode():
        told = {"return_dict_in_generate": True, "output_scores": True}
        out = theirs.generate(input_ids=ids, attention_mask=mask.long(), **told, **options)
    rows = out.sequences[:, 1:].tolist()
    scores = getattr(out, "sequences_scores", None)  # of beams
    found = decode(ours, sources, defaults.overridden(options))
    for text, (row, (best, *_)) in enumerate(zip(rows, found, strict=True)):
        length = len(best.token_ids)
        is_same = tuple(row[:length]) == best.token_ids and {*row[length:]} <= {pad, theirs.config.eos_token_id}
        if not is_same:
            here = next((i for i, (a, b) in enumerate(zip(row, best.token_ids, strict=False)) if a != b), length)
            both = (row[: here + 1], list(best.token_ids)[: here + 1])
            greedy = _gap(theirs, ids[text : text + 1], mask[text : text + 1], *both)
            gap = greedy if scores is None else abs(float(scores[text]) - best.score)
            same = 1e-9 if isinstance(ours, EagerSession) else 1e-4  # graphs compute in float32
            assert gap < SAME.get(theirs.config.model_type, same), f"text {text}: {row} became {best.token_ids}: {gap}"


@torch.inference_mode()
def _gap(theirs: Any, ids: torch.Tensor, mask: torch.Tensor, *both: list[int]) -> float:
    """Return by how much two texts differ in log-probability."""
    start = theirs.config.decoder_start_token_id
    scores = []
    for said in both:
        target = torch.tensor([[start, *said]])
        logits = theirs(input_ids=ids, attention_mask=mask.long(), decoder_input_ids=target).logits.log_softmax(-1)
        scores.append(float(logits[0, :-1].gather(1, target[0, 1:, None]).sum()))
    return abs(scores[0] - scores[1])


def check(family: str, seed: int, folder: Path, num_settings: int, *, exported: bool = False) -> None:
    rng = np.random.default_rng((seed, len(family), ord(family[0])))
    theirs = write(folder / "hf", family, rng)
    import_checkpoint(folder / "hf", folder / "model")
    path = folder / "model" / "generation.json"
    said = json.loads(path.read_text()) if path.exists() else {}
    defaults = GenerationDefaults.from_dict(said, subject="generation.json")
    ours: Session = EagerSession(load_model(folder / "model").double())
    if exported:
        config = ExportConfig(forms=("concat", "static", "contrib"))
        bundle = export_bundle(str(folder / "model"), folder / "bundle", config, verify=False)
        ours = open_session(bundle, LoadOptions(backend="ort"))
    pad, eos = theirs.config.pad_token_id, theirs.config.eos_token_id
    sources = [rng.integers(2, VOCAB, rng.integers(1, LONGEST + 1)).tolist() for _ in range(NUM_TEXTS)]
    sources = [[token for token in source if token != pad] or [eos] for source in sources]
    assert_same_texts(theirs, ours, sources, defaults)
    for _ in range(num_settings - 1):
        assert_same_texts(theirs, ours, sources, defaults, **drawn_options(rng, defaults))


def drawn_options(rng: np.random.Generator, defaults: GenerationDefaults) -> dict[str, Any]:
    """Draw what a caller may ask for beyond the directory's own, and what does not contradict it."""
    of_beams = [
        {"length_penalty": float(rng.choice([0.5, 1.0, 1.7]))},
        {"early_stopping": bool(rng.integers(2))},
    ]
    options: list[dict[str, Any]] = [
        {"no_repeat_ngram_size": int(rng.integers(0, 4))},
        {"repetition_penalty": float(rng.choice([0.8, 1.0, 1.2]))},
        {"max_new_tokens": int(rng.integers(1, 16))},
    ]
    drawn = {name: value for option in options if rng.random() < 0.5 for name, value in option.items()}
    if rng.random() < 0.6:
        drawn["num_beams"] = int(rng.integers(2, 5))
        drawn |= {name: value for option in of_beams if rng.random() < 0.5 for name, value in option.items()}
    try:
        defaults.overridden(drawn)
    except ConfigError:
        return drawn_options(rng, defaults)
    return drawn


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints", "ignore:Both `max_new_tokens`")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_model_says_what_transformers_says(family: str, tmp_path: Path) -> None:
    check(family, 0, tmp_path, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints", "ignore:Both `max_new_tokens`")
@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("family", FAMILIES)
def test_hundreds_of_random_models_say_what_transformers_says(family: str, seed: int, tmp_path: Path) -> None:
    check(family, 1 + seed, tmp_path, NUM_SETTINGS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints", "ignore:Both `max_new_tokens`")
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_say_it_in_onnx_runtime_too(family: str, seed: int, tmp_path: Path) -> None:
    check(family, 100 + seed, tmp_path, NUM_SETTINGS, exported=True)
