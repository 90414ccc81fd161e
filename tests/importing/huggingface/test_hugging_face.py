"""Hugging Face directories as they are published: read as transformers reads them, logits and texts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, UMT5ForConditionalGeneration

from tests import tiny
from tests.importing.huggingface import published
from tests.importing.huggingface.published import UNUSED_BIAS
from tests.importing.huggingface.published_configs import CONFIGS, VOCAB
from tfexport.decode.offline import decode
from tfexport.errors import CheckpointError
from tfexport.generation import DecodeConfig, GenerationDefaults
from tfexport.importing.importer import Imported, import_checkpoint
from tfexport.nn.directory import load_model
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import EagerSession

# Both in float64. T5 and T5Gemma of Hugging Face take the mean of squares in float32.
TOLERANCE = {"t5": 5e-4, "mt5": 5e-4, "umt5": 5e-4, "t5gemma": 5e-4}


def imported(folder: Path, lines: list[str] | None = None) -> tuple[Imported, Transformer]:
    """Import folder/hf."""
    report = (lambda _: None) if lines is None else lines.append
    found = import_checkpoint(folder / "hf", folder / "model", report=report)
    return found, load_model(folder / "model").double()


def today(folder: Path, name: str, **changes: Any) -> None:
    """Write folder/hf as transformers writes it now."""
    published.load(published.write(folder / "old", name, **changes)).float().save_pretrained(folder / "hf")


def logits(model: Any, batch: tiny.Batch) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(
            input_ids=batch.source_ids,
            attention_mask=batch.source_mask.long(),
            decoder_input_ids=batch.target_ids,
        ).logits
    return found


def assert_same_logits(ours: Transformer, theirs: Any, scale: float = 1.0) -> None:
    batch = tiny.batch(vocab=VOCAB)
    expected = logits(theirs, batch)
    assert expected.std() > 0.1, "logits that are all alike prove nothing"
    with torch.no_grad():
        difference = ours(*batch) * scale - expected
    assert difference.abs().max() < TOLERANCE.get(theirs.config.model_type, 1e-9)


def assert_same_texts(ours: Transformer, theirs: Any, num_beams: int) -> None:
    """Compare ids of 10 texts, in which no token comes twice, as these models would repeat one for ever.

    Padding is never said, for M2M100 gives it no position.
    """
    tokens = ours.config.tokens
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 13, (10,), generator=generator).tolist()
    allowed = [token for token in range(VOCAB) if token not in (tokens.pad, tokens.eos)]
    sources = [[allowed[i] for i in torch.randint(len(allowed), (n,), generator=generator)] for n in lengths]
    ids = torch.tensor([[*source, *[tokens.pad] * (12 - len(source))] for source in sources])
    mask = torch.arange(12)[None] < torch.tensor(lengths)[:, None]
    settings = GenerationConfig(
        num_beams=num_beams,
        max_new_tokens=12,
        no_repeat_ngram_size=1,
        suppress_tokens=[tokens.pad],
        use_cache=False,  # which fails there for a T5 with more layers in its decoder than in its encoder
        pad_token_id=tokens.pad,
        eos_token_id=tokens.eos,
        decoder_start_token_id=tokens.start,
    )
    theirs.generation_config = settings
    with torch.inference_mode():
        rows = theirs.generate(input_ids=ids, attention_mask=mask.long(), generation_config=settings)[:, 1:].tolist()
    config = DecodeConfig(num_beams=num_beams, max_new_tokens=12, no_repeat_ngram_size=1, suppress_tokens=(tokens.pad,))
    found = decode(EagerSession(ours), sources, config)
    ended = [row[: row.index(tokens.eos) + 1] if tokens.eos in row else row for row in rows]
    assert [list(best.token_ids) for (best,) in found] == ended
    assert len({tuple(row) for row in rows}) > 5, "texts differ"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_directory_says_what_transformers_says(name: str, tmp_path: Path) -> None:
    published.write(tmp_path / "hf", name)
    _, ours = imported(tmp_path)
    theirs = published.load(tmp_path / "hf")
    assert_same_logits(ours, theirs)
    for num_beams in (1, 4):
        assert_same_texts(ours, theirs, num_beams)


def test_transformers_5_scales_what_the_config_of_umt5_does_not(tmp_path: Path) -> None:
    """If this fails, remove the difference from docs/guides/hugging-face.md and `published.load`."""
    published.write(tmp_path / "hf", "umt5-small")
    _, ours = imported(tmp_path)
    theirs = UMT5ForConditionalGeneration.from_pretrained(tmp_path / "hf").double().eval()
    assert_same_logits(ours, theirs, 32**-0.5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_directory_written_by_transformers_today_says_the_same(name: str, tmp_path: Path) -> None:
    theirs = published.load(published.write(tmp_path / "old", name))
    theirs.float().save_pretrained(tmp_path / "hf")
    _, ours = imported(tmp_path)
    assert_same_logits(ours, theirs.double())
    assert_same_texts(ours, theirs, 4)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "opus-mt",
            (
                "config.json: left out what transformers does not read: add_bias_logits, add_final_layer_norm, "
                "normalize_before, normalize_embedding, static_position_embeddings"
            ),
        ),
        *((name, f"left out what transformers does not load: {UNUSED_BIAS}") for name in published.FIRST_T5),
        (
            "blenderbot-400M-distill",
            (
                "config.json: left out what transformers does not read: add_bias_logits, add_final_layer_norm, "
                "do_blenderbot_90_layernorm, extra_layer_norm, extra_pos_embeddings, layernorm_variant, "
                "normalize_before, normalize_embedding, static_position_embeddings"
            ),
        ),
        (
            "bart-large-cnn",
            "left out what transformers does not load: model.decoder.version, model.encoder.version",
        ),
        ("bart-base", "has the names of the model without its head; put 'model.' before them"),
    ],
)
def test_what_is_left_out_is_said_in_one_line(name: str, line: str, tmp_path: Path) -> None:
    published.write(tmp_path / "hf", name)
    lines: list[str] = []
    imported(tmp_path, lines)
    assert lines.count(line) == 1


@pytest.mark.parametrize(
    "spelling", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"]
)
def test_every_spelling_of_gelu_by_tanh(spelling: str, tmp_path: Path) -> None:
    today(tmp_path, "bart-base", activation_function=spelling)
    found, ours = imported(tmp_path)
    assert found.config.activation == "gelu_tanh"
    assert_same_logits(ours, published.load(tmp_path / "hf"))


@pytest.mark.parametrize("place", ["config.json", "generation_config.json"])
def test_several_ends_are_read(place: str, tmp_path: Path) -> None:
    several = {"eos_token_id": [5, 2]}
    generation = several if place == "generation_config.json" else None
    published.write(tmp_path / "hf", "flan-t5-small", generation, **(several if generation is None else {}))
    found, _ = imported(tmp_path)
    assert found.config.tokens.eos == 5


def test_tokens_of_generation_config_come_first(tmp_path: Path) -> None:
    generation = {"decoder_start_token_id": 7, "eos_token_id": 9, "pad_token_id": None}
    published.write(tmp_path / "hf", "flan-t5-small", generation)
    tokens = imported(tmp_path)[0].config.tokens
    assert (tokens.start, tokens.eos, tokens.pad) == (7, 9, 0)


def test_where_no_start_is_said_it_is_bos(tmp_path: Path) -> None:
    published.write(tmp_path / "hf", "flan-t5-small", bos_token_id=6, decoder_start_token_id=None)
    assert imported(tmp_path)[0].config.tokens.start == 6


def test_a_token_that_is_said_to_be_nothing_can_be_given(tmp_path: Path) -> None:
    from tfexport.importing.config import ImportConfig

    published.write(tmp_path / "hf", "flan-t5-small", pad_token_id=None)
    with pytest.raises(
        CheckpointError, match=r"pad_token_id is None, expected a whole number; give --set tokens.pad=ID"
    ):
        imported(tmp_path)
    found = import_checkpoint(tmp_path / "hf", tmp_path / "model", ImportConfig(settings=("tokens.pad=3",)))
    assert found.config.tokens.pad == 3


def untie(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


def test_a_shared_table_that_is_left_over_is_left_out(tmp_path: Path) -> None:
    """Where nothing is tied, transformers writes a table `shared` that no part of the model reads."""
    today(tmp_path, "bart-large-cnn")
    untie(tmp_path / "hf")
    tensors = published.weights(tmp_path / "hf")
    generator = torch.Generator().manual_seed(1)
    tables = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    tensors |= {f"{name}.weight": torch.randn(VOCAB, 32, generator=generator) for name in tables}
    published.save(tmp_path / "hf", tensors)
    lines: list[str] = []
    found, ours = imported(tmp_path, lines)
    assert any(line.endswith("model.shared.weight") and "does not load" in line for line in lines)
    assert not found.config.tie_embeddings
    assert not found.config.tie_output
    assert_same_logits(ours, published.load(tmp_path / "hf"))


def test_an_output_that_is_neither_stored_nor_tied_is_refused(tmp_path: Path) -> None:
    today(tmp_path, "bart-large-cnn")
    untie(tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"no lm_head.weight, and config.json says tie_word_embeddings false"):
        imported(tmp_path)


@pytest.mark.parametrize("name", ["opus-mt", "pegasus-xsum", "nllb-200-distilled"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "computed"])
def test_tables_of_an_odd_width(name: str, stored: bool, tmp_path: Path) -> None:
    sizes = {"d_model": 33, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    old = {key: value for key, value in CONFIGS[name].items() if not key.startswith(("normalize", "add_", "static"))}
    folder = published.write(tmp_path / "hf", name, **sizes)
    (folder / "config.json").write_text(json.dumps({**old, **sizes}))
    if not stored:
        kept = {key: t for key, t in published.weights(folder).items() if "embed_positions" not in key}
        published.save(folder, kept)
    _, ours = imported(tmp_path)
    assert_same_logits(ours, published.load(folder))


# As published, as far as it matters here: each names its family, and values that are no switch of ours.
OTHERS: dict[str, dict[str, Any]] = {
    "led-base-16384": {"model_type": "led", "attention_window": [1024, 1024], "activation_function": "gelu"},
    "long-t5-local-base": {"model_type": "longt5", "encoder_attention_type": "local", "local_radius": 127},
    "switch-base-8": {"model_type": "switch_transformers", "num_experts": 8, "router_type": "tokens_masked"},
    "prophetnet-large-uncased": {"model_type": "prophetnet", "ngram": 2, "num_encoder_attention_heads": 16},
    "wmt19-ru-en": {"model_type": "fsmt", "langs": ["ru", "en"], "activation_function": "relu"},
    "blenderbot_small-90M": {"model_type": "blenderbot-small", "do_blenderbot_90_layernorm": True},
    "bigbird-pegasus-large-arxiv": {"model_type": "bigbird_pegasus", "attention_type": "block_sparse"},
    "nllb-moe-54b": {"model_type": "nllb-moe", "num_experts": 128, "activation_function": "relu"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_family_is_named_with_the_way(name: str, tmp_path: Path) -> None:
    folder = published.write(tmp_path / "hf", "bart-base")
    (folder / "config.json").write_text(json.dumps({"d_model": 32, "is_encoder_decoder": True, **OTHERS[name]}))
    with pytest.raises(CheckpointError) as caught:
        imported(tmp_path)
    assert f"model_type is {OTHERS[name]['model_type']!r}, expected bart, mbart" in str(caught.value)
    assert "record a golden" in str(caught.value)
    assert "see docs/guides/hugging-face.md" in str(caught.value)
    assert "activation_function" not in str(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_directory_answers_with_its_own_defaults(name: str, tmp_path: Path) -> None:
    """Nothing is told to either side but what is in config.json; six random sources."""
    published.write(tmp_path / "hf", name)
    _, ours = imported(tmp_path)
    theirs = published.load(tmp_path / "hf")
    path = tmp_path / "model" / "generation.json"
    defaults = GenerationDefaults.from_dict(json.loads(path.read_text()) if path.exists() else {})
    tokens, generator = ours.config.tokens, torch.Generator().manual_seed(3)
    allowed = torch.tensor([token for token in range(VOCAB) if token not in (tokens.pad, tokens.eos)])
    sources = allowed[torch.randint(len(allowed), (6, 7), generator=generator)]
    limit = {} if "max_length" in CONFIGS[name] else {"max_new_tokens": 12}
    with torch.inference_mode():
        rows = [
            theirs.generate(row[None], use_cache=False, suppress_tokens=[tokens.pad], **limit)[0, 1:].tolist()
            for row in sources
        ]
    config = defaults.overridden({"suppress_tokens": (tokens.pad,), **limit})
    found = decode(EagerSession(ours), sources.tolist(), config)
    assert [list(best.token_ids) for (best, *_) in found] == rows


def drawn(name: str, seed: int) -> dict[str, Any]:
    """Draw what a config.json may say."""
    rng = random.Random(f"{name} {seed}")
    if CONFIGS[name]["model_type"] in ("t5", "mt5", "umt5"):
        kinds = ["relu", "gelu", "silu", "gated-gelu", "gated-silu", "gated-relu"]
        return {
            "feed_forward_proj": rng.choice(kinds[3:] if name == "umt5-small" else kinds),
            "num_decoder_layers": rng.randint(1, 3),
            "num_heads": rng.choice([2, 3]),
            "relative_attention_max_distance": rng.choice([12, 128]),
            "relative_attention_num_buckets": rng.choice([8, 18, 32]),
            "tie_word_embeddings": rng.random() < 0.5,
            "layer_norm_epsilon": rng.choice([1e-6, 1e-3]),
        }
    if name == "t5gemma-s-s":
        shared = {
            "attn_logit_softcapping": rng.choice([None, 2.0]),
            "final_logit_softcapping": rng.choice([None, 3.0]),
            "hidden_activation": rng.choice(["gelu", "silu", "gelu_pytorch_tanh"]),
            "query_pre_attn_scalar": rng.choice([8, 12]),
            "rope_theta": rng.choice([100.0, 10000.0]),
            "attention_bias": rng.random() < 0.5,
        }
        sizes = [{"head_dim": rng.choice([4, 8]), "num_key_value_heads": rng.choice([1, 2, 4])} for _ in range(2)]
        said = CONFIGS[name]
        return {
            "encoder": {**said["encoder"], **shared, **sizes[0]},
            "decoder": {**said["decoder"], **shared, **sizes[1]},
            "tie_word_embeddings": rng.random() < 0.5,
        }
    tied = rng.random() < 0.6
    apart = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": VOCAB + 4} if rng.random() < 0.5 else {}
    return {
        "activation_function": rng.choice(["relu", "gelu", "gelu_new", "gelu_fast", "swish", "silu", "gelu_python"]),
        "scale_embedding": rng.random() < 0.5,
        "tie_word_embeddings": tied,
        "encoder_layers": rng.randint(1, 3),
        "decoder_layers": rng.randint(1, 3),
        "encoder_attention_heads": rng.choice([1, 2, 4, 8]),
        "decoder_attention_heads": rng.choice([1, 2, 4, 8]),
        "encoder_ffn_dim": rng.choice([40, 64]),
        **(apart if name == "opus-mt" else {}),
    }


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))])
@pytest.mark.parametrize("name", CONFIGS)
def test_whatever_a_config_says(name: str, seed: int, tmp_path: Path) -> None:
    derived = ("dense_act_fn", "is_gated_act")  # of feed_forward_proj
    config = {key: value for key, value in CONFIGS[name].items() if key not in derived} | drawn(name, seed)
    published.build(config).save_pretrained(tmp_path / "hf")
    _, ours = imported(tmp_path)
    theirs = published.load(tmp_path / "hf")
    assert_same_logits(ours, theirs)
    assert_same_texts(ours, theirs, 4)


@pytest.mark.parametrize(
    ("side", "changes", "problem"),
    [
        ("decoder", {"query_pre_attn_scalar": 9}, "encoder.query_pre_attn_scalar is 8 and decoder.query_pre"),
        ("encoder", {"hidden_activation": "tanh"}, "encoder.hidden_activation is 'tanh', expected one of relu"),
        ("decoder", {"num_attention_heads": "4"}, "decoder.num_attention_heads is '4', expected a whole number"),
        ("encoder", {"rope_scaling": {"type": "linear"}}, "encoder.rope_parameters has 'linear', expected rope_type"),
        ("encoder", {"rope_theta": 0}, "encoder.rope_theta is 0, expected a number above 0"),
    ],
)
def test_what_t5gemma_may_not_say(side: str, changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    published.write(tmp_path / "hf", "t5gemma-s-s")
    said = dict(CONFIGS["t5gemma-s-s"])
    said[side] = {**said[side], **changes}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(said))
    with pytest.raises(CheckpointError) as caught:
        imported(tmp_path)
    assert problem in str(caught.value)


def test_the_longest_text_of_t5gemma_is_what_its_window_holds(tmp_path: Path) -> None:
    published.write(tmp_path / "hf", "t5gemma-s-s")
    assert imported(tmp_path)[0].config.max_target_length == 20
    said = dict(CONFIGS["t5gemma-s-s"])
    for side in ("encoder", "decoder"):
        said[side] = {**said[side], "layer_types": ["full_attention"] * said[side]["num_hidden_layers"]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(said))
    assert import_checkpoint(tmp_path / "hf", tmp_path / "whole").config.max_target_length == 24


def test_a_file_of_torch_save_is_the_same_as_safetensors(tmp_path: Path) -> None:
    """With tied tensors under each of their names, as a pytorch_model.bin has them."""
    published.write(tmp_path / "hf", "opus-mt")
    (tmp_path / "bin").mkdir()
    tensors = published.weights(tmp_path / "hf")
    tensors["model.decoder.embed_tokens.weight"] = tensors["model.shared.weight"]
    torch.save(tensors, tmp_path / "bin" / "pytorch_model.bin")
    (tmp_path / "bin" / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    for name in ("hf", "bin"):
        import_checkpoint(tmp_path / name, tmp_path / f"{name}-model")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "bin-model" / name).read_bytes() == (tmp_path / "hf-model" / name).read_bytes()
