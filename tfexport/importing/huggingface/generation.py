"""Read the generation defaults of a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from tfexport._io.names import CONFIG
from tfexport.contract import TokenIds
from tfexport.errors import CheckpointError, ConfigError, raise_all, shortened
from tfexport.generation import LENGTHS, DecodeConfig, GenerationDefaults
from tfexport.importing._files import GENERATION_CONFIG
from tfexport.nn.config import TransformerConfig

_SPEECH = {"language", "task", "return_timestamps", "max_initial_timestamp_index"}
_SUPPORTED = {field.name for field in dataclasses.fields(GenerationDefaults)} - {"seed", "return_alternatives"}
# Unsupported options that change the text, with their neutral values.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "num_beam_groups": (1,),
    "diversity_penalty": (0,),
    "encoder_repetition_penalty": (1,),
    "forced_decoder_ids": ([],),
    "constraints": ([],),
    "force_words_ids": ([],),
    "top_h": (),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "guidance_scale": (1,),
    "token_healing": (False,),
    "watermarking_config": (),
    "no_speech_threshold": (),
}
# Options that change how a text is computed or returned, not the text.
_HARMLESS = {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "use_mtp"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "speculation_type", "compile_config", "disable_compile"),
    *("continuous_batching_config", "remove_invalid_values", "pad_token_id", "bos_token_id", "transformers_version"),
    *("_from_model_config", "_commit_hash", "_original_object_hash"),
}


def read_generation(
    hf_config: Mapping[str, Any],
    hf_generation: Mapping[str, Any],
    config: TransformerConfig,
    own_settings: Collection[str],
) -> tuple[GenerationDefaults, list[str]]:
    """Read the generation defaults as transformers does; also return notes."""
    name, found = (GENERATION_CONFIG, hf_generation) if hf_generation else (CONFIG, _with_decoder(hf_config))
    left_out = frozenset() if config.speech else _SPEECH  # keys with another meaning, as far as they have one
    found = {key: value for key, value in found.items() if value is not None and key not in left_out}
    notes = list[str]()
    if ignored := [key for key, neutral in _UNSUPPORTED.items() if key in found and found[key] not in neutral]:
        listed = ", ".join(f"{key} {shortened(found[key])}" for key in ignored)
        notes.append(f"ignored {listed}: texts will differ from those of transformers")
    if hf_generation and (unknown := sorted(found.keys() - _SUPPORTED - _UNSUPPORTED.keys() - _HARMLESS)):
        notes.append(f"ignored {', '.join(unknown)[:200]}: transformers ignores these keys too")
    options = _options(found, config.tokens, own_settings, notes)
    try:
        defaults = GenerationDefaults.from_dict(options, subject=name)
        raise_all(ConfigError, name, defaults.token_problems(config.target_vocab or 0))
    except ConfigError as error:
        raise CheckpointError(f"{error}; change it there, or remove it") from error
    listed = ", ".join(f"{key} {json.dumps(value)}" for key, value in defaults.given().items())
    first = [f"the defaults are {listed}"] if listed else []
    return defaults, [f"{name}: {note}" for note in [*first, *notes]]


def _with_decoder(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Add options of a nested decoder that the outer configuration leaves out."""
    decoder = hf_config["decoder"] if isinstance(hf_config.get("decoder"), dict) else {}
    options = {key: value for key, value in decoder.items() if key in _SUPPORTED or key == "bos_token_id"}
    given = {key: value for key, value in options.items() if value != getattr(DecodeConfig, key, None)}
    return given | {key: value for key, value in hf_config.items() if value is not None}


def _options(
    found: Mapping[str, Any], tokens: TokenIds, own_settings: Collection[str], notes: list[str]
) -> dict[str, Any]:
    options = {key: value for key, value in found.items() if key in _SUPPORTED}
    if found.get("force_bos_token_to_be_generated") and "bos_token_id" in found:  # BART, before forced_bos_token_id
        options["forced_bos_token_id"] = found["bos_token_id"]
    for with_prompt, new_tokens in LENGTHS.items():
        if with_prompt in options and new_tokens in options:
            del options[with_prompt]
    start = options.pop("decoder_start_token_id", found.get("bos_token_id"))
    if isinstance(start, list):
        notes.append("decoder_start_token_id is a list, one for each text of a batch, and ignored; give it with a call")
    elif start is not None and start != tokens.start and "tokens.start" not in own_settings:
        options["decoder_start_token_id"] = start
    ends = options.pop("eos_token_id", None)
    if ends is None:
        notes.append(f"has no eos_token_id: transformers ends texts only at the limit, tfexport also at {tokens.eos}")
    elif ends not in (tokens.eos, [tokens.eos]) and "tokens.eos" not in own_settings:
        options["eos_token_id"] = ends
    if options.get("do_sample") and options.get("num_beams", 1) != 1:
        notes.append("do_sample is ignored with beams; texts will differ from those of transformers")
        del options["do_sample"]
    return options
