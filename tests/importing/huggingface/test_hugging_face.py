"""Hugging Face directories are read as transformers reads them: logits, texts and the directory's tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers, processors
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, UMT5ForConditionalGeneration

from tests import tiny
from tests.importing.huggingface import published
from tests.importing.huggingface.published import CONFIGS, UNUSED_BIAS, VOCAB
from tfexport.decode.offline import decode
from tfexport.errors import CheckpointError
from tfexport.generation import DecodeConfig, GenerationDefaults
from tfexport.importing.config import ImportConfig
from tfexport.importing.importer import Imported, import_checkpoint
from tfexport.nn.directory import load_model
from tfexport.nn.transformer import Transformer
from tfexport.runtime.eager import EagerSession

IGNORED = "config.json: ignored keys that transformers does not read:"
UNLOADED = "ignored {} weights that transformers does not load:"
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


def assert_same_texts(ours: Transformer, theirs: Any) -> None:
    """Compare ids of 10 texts of beam search, in which no token comes twice, as these models would repeat one for ever.

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
        num_beams=4,
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
    config = DecodeConfig(num_beams=4, max_new_tokens=12, no_repeat_ngram_size=1, suppress_tokens=(tokens.pad,))
    found = decode(EagerSession(ours), sources, config)
    ended = [row[: row.index(tokens.eos) + 1] if tokens.eos in row else row for row in rows]
    assert [list(best.token_ids) for (best,) in found] == ended
    assert len({tuple(row) for row in rows}) > 5, "texts differ"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_directory_generates_as_in_transformers(name: str, tmp_path: Path) -> None:
    """Compare logits, and texts generated with the defaults in its config.json from six random sources."""
    published.write(tmp_path / "hf", name)
    found, ours = imported(tmp_path)
    assert found.certificate.proven
    theirs = published.load(tmp_path / "hf")
    assert_same_logits(ours, theirs)
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
    outputs = decode(EagerSession(ours), sources.tolist(), config)
    assert [list(best.token_ids) for (best, *_) in outputs] == rows


def test_some_transformers_scale_the_logits_of_umt5_despite_its_config(tmp_path: Path) -> None:
    """If the versions here are too old to test, remove the difference from docs/guides/hugging-face.md."""
    published.write(tmp_path / "hf", "umt5-small")
    _, ours = imported(tmp_path)
    theirs = UMT5ForConditionalGeneration.from_pretrained(tmp_path / "hf").double().eval()
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    assert_same_logits(ours, theirs, 32**-0.5 if (5, 3) <= version < (5, 24) else 1)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("opus-mt", f"{IGNORED} add_bias_logits, add_final_layer_norm, normalize_before, normalize_"),
        ("t5-small", f"{UNLOADED.format(1)} {UNUSED_BIAS}"),
        ("blenderbot-400M-distill", f"{IGNORED} add_final_layer_norm, do_blenderbot_90_layernorm, extra_"),
        ("bart-large-cnn", f"{UNLOADED.format(2)} model.decoder.version, model.encoder.version"),
        ("bart-base", "added the prefix 'model.' to the keys, as in the whole model"),
    ],
)
def test_ignored_tensors_are_reported_in_one_line(name: str, line: str, tmp_path: Path) -> None:
    published.write(tmp_path / "hf", name)
    lines: list[str] = []
    imported(tmp_path, lines)
    assert sum(one.startswith(line) for one in lines) == 1


@pytest.mark.parametrize(
    "spelling",
    [
        *("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate"),
        *("quick_gelu", "relu2"),
    ],
)
def test_every_spelling_of_an_activation(spelling: str, tmp_path: Path) -> None:
    today(tmp_path, "bart-base", activation_function=spelling)
    found, ours = imported(tmp_path)
    assert found.config.activation == (spelling if spelling in ("quick_gelu", "relu2") else "gelu_tanh")
    assert_same_logits(ours, published.load(tmp_path / "hf"))


@pytest.mark.parametrize(
    ("generation", "changes", "tokens"),
    [
        (None, {"eos_token_id": [5, 2]}, (0, 5, 0)),
        ({"eos_token_id": [5, 2]}, {}, (0, 5, 0)),
        ({"decoder_start_token_id": 7, "eos_token_id": 9, "pad_token_id": None}, {}, (7, 9, 0)),
        (None, {"bos_token_id": 6, "decoder_start_token_id": None}, (6, 1, 0)),
    ],
    ids=["several ends", "several ends in generation_config", "generation_config first", "no start is bos"],
)
def test_start_end_and_padding(
    generation: dict[str, Any] | None, changes: dict[str, Any], tokens: tuple[int, ...], tmp_path: Path
) -> None:
    published.write(tmp_path / "hf", "flan-t5-small", generation, **changes)
    found = imported(tmp_path)[0].config.tokens
    assert (found.start, found.eos, found.pad) == tokens


def test_a_token_that_the_config_sets_to_null_can_be_given(tmp_path: Path) -> None:
    published.write(tmp_path / "hf", "flan-t5-small", pad_token_id=None)
    with pytest.raises(
        CheckpointError, match=r"pad_token_id is None, expected a whole number; give --set tokens.pad=ID"
    ):
        imported(tmp_path)
    found = import_checkpoint(tmp_path / "hf", tmp_path / "model", ImportConfig(settings=("tokens.pad=3",)))
    assert found.config.tokens.pad == 3


@pytest.mark.parametrize(
    ("name", "key", "side"),
    [
        ("bart-base", "decoder_layers", "decoder"),
        ("opus-mt", "encoder_layers", "encoder"),
        ("t5-small", "num_layers", "encoder"),
        ("flan-t5-small", "num_decoder_layers", "decoder"),
    ],
)
@pytest.mark.parametrize("count", [0, 3])
def test_a_config_with_other_layers_than_the_weights_is_refused(
    name: str, key: str, side: str, count: int, tmp_path: Path
) -> None:
    config = json.loads((published.write(tmp_path / "hf", name) / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, key: count}))
    with pytest.raises(CheckpointError) as caught:
        imported(tmp_path)
    assert any(f"{key} is {count}, but the weights have " in one and side in one for one in caught.value.problems)
    assert not (tmp_path / "model").exists()


def test_the_certificate_lists_every_tensor_of_the_file(tmp_path: Path) -> None:
    for name in ("bart-large-cnn", "bart-base", "m2m100_418M", "opus-mt", "t5-small"):
        published.write(tmp_path / name / "hf", name)
        uses = imported(tmp_path / name)[0].certificate.tensors
        base = "model." if name == "bart-base" else ""
        assert uses.keys() == {f"{base}{key}" for key in published.weights(tmp_path / name / "hf")}


def untie(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


def test_an_unused_shared_table_is_ignored(tmp_path: Path) -> None:
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
    with pytest.raises(CheckpointError, match=r"lm_head.weight is missing, and config.json"):
        imported(tmp_path)


@pytest.mark.parametrize("name", ["opus-mt", "pegasus-xsum", "m2m100_418M"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored", "computed"])
def test_tables_of_an_odd_width(name: str, stored: bool, tmp_path: Path) -> None:
    sizes = {"d_model": 33, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    folder = published.write(tmp_path / "hf", name, **sizes)
    if not stored:
        kept = {key: t for key, t in published.weights(folder).items() if "embed_positions" not in key}
        published.save(folder, kept)
    _, ours = imported(tmp_path)
    assert_same_logits(ours, published.load(folder))


@pytest.mark.parametrize("model_type", ["led", "longt5", "switch_transformers", "blenderbot-small"])
def test_an_unknown_family_is_refused_with_the_remedy(model_type: str, tmp_path: Path) -> None:
    folder = published.write(tmp_path / "hf", "bart-base")
    (folder / "config.json").write_text(json.dumps({**CONFIGS["bart-base"], "model_type": model_type}))
    with pytest.raises(CheckpointError) as caught:
        imported(tmp_path)
    assert f"model_type is {model_type!r}, expected bart, mbart" in str(caught.value)
    assert "record reference outputs" in str(caught.value)


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
        values = CONFIGS[name]
        return {
            "encoder": {**values["encoder"], **shared, **sizes[0]},
            "decoder": {**values["decoder"], **shared, **sizes[1]},
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
def test_any_config_imports_or_is_refused_in_one_line(name: str, seed: int, tmp_path: Path) -> None:
    """Write directories as transformers does today, with random settings."""
    derived = ("dense_act_fn", "is_gated_act")  # of feed_forward_proj
    config = {key: value for key, value in CONFIGS[name].items() if key not in derived} | drawn(name, seed)
    published.build(config).save_pretrained(tmp_path / "hf")
    _, ours = imported(tmp_path)
    theirs = published.load(tmp_path / "hf")
    assert_same_logits(ours, theirs)
    assert_same_texts(ours, theirs)


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
def test_unsupported_settings_of_t5gemma_are_refused(
    side: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    published.write(tmp_path / "hf", "t5gemma-s-s")
    values = dict(CONFIGS["t5gemma-s-s"])
    values[side] = {**values[side], **changes}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as caught:
        imported(tmp_path)
    assert problem in str(caught.value)


def test_the_window_of_t5gemma_limits_its_texts(tmp_path: Path) -> None:
    published.write(tmp_path / "hf", "t5gemma-s-s")
    assert imported(tmp_path)[0].config.max_target_length == 20
    values = dict(CONFIGS["t5gemma-s-s"])
    for side in ("encoder", "decoder"):
        values[side] = {**values[side], "layer_types": ["full_attention"] * values[side]["num_hidden_layers"]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(values))
    assert import_checkpoint(tmp_path / "hf", tmp_path / "whole").config.max_target_length == 24


# Tokenizers


def words(folder: Path, size: int) -> Path:
    """Write a tokenizer.json that puts a start and an end around a text, as that of BART does."""
    names = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(size - 4))]
    inner = Inner(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(names[:3])
    inner.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    inner.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_the_tokenizer_of_a_directory_is_used_unless_another_is_given(tmp_path: Path) -> None:
    file = words(published.write(tmp_path / "hf", "bart-base"), VOCAB)
    lines: list[str] = []
    imported(tmp_path, lines)
    assert "the tokenizer is the directory's tokenizer.json" in lines
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == file.read_bytes()
    texts = ["w1 w2", "w9 never w3"]
    tokenizer, _ = published.opened(tmp_path / "model")
    assert tokenizer.encode(texts) == PreTrainedTokenizerFast(tokenizer_file=str(file))(texts).input_ids
    (tmp_path / "other").mkdir()
    other = words(tmp_path / "other", 20)
    import_checkpoint(tmp_path / "hf", tmp_path / "second", tokenizer=other, report=lines.append)
    assert sum("the directory's" in line for line in lines) == 1
    assert (tmp_path / "second" / "tokenizer.json").read_bytes() == other.read_bytes()


def test_a_tokenizer_that_does_not_fit_is_ignored_with_the_reason(tmp_path: Path) -> None:
    words(published.write(tmp_path / "hf", "bart-base"), VOCAB + 1)
    lines: list[str] = []
    imported(tmp_path, lines)
    assert sum(line.startswith("the directory's tokenizer is not used: ") for line in lines) == 1
    assert not (tmp_path / "model" / "tokenizer.json").exists()
    (tmp_path / "hf" / "tokenizer.json").unlink()
    for name in ("source.spm", "vocab.json"):
        (tmp_path / "hf" / name).write_bytes(b"{}")
    import_checkpoint(tmp_path / "hf", tmp_path / "second", report=lines.append)
    assert any("is not used" in line for line in lines[2:])
