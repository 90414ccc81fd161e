"""Define Whisper, with the prompts of its languages and tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tfexport._arguments import is_whole
from tfexport.contract import SpeechTokens
from tfexport.errors import CheckpointError, ConfigError, raise_all, shortened
from tfexport.importing.huggingface import Family, Reader
from tfexport.importing.huggingface.tokenizer import need_transformers
from tfexport.nn.config import ConvolutionConfig, FeaturesConfig
from tfexport.nn.switches import Value

# Values of transformers for keys that a config.json may lack.
_DEFAULTS = {
    **{
        f"{side}_{name}": size
        for side in ("encoder", "decoder")
        for name, size in (("layers", 4), ("attention_heads", 6))
    },
    "activation_function": "gelu",
    "num_mel_bins": 80,
    "d_model": 384,
    "max_source_positions": 1500,
}
# Keys of generation_config.json that become the tokens of prompts, or that change nothing for a single window.
_PROMPT = ("forced_decoder_ids", "is_multilingual", "lang_to_id", "task_to_id", "no_timestamps_token_id")
_LONG_FORM = ("alignment_heads", "prev_sot_token_id", "condition_on_prev_tokens", "compression_ratio_threshold")
_IGNORED = (
    *_LONG_FORM,
    "logprob_threshold",
    "median_filter_width",
    "do_sample",
)  # samples need an argument of the call
_MOST_BEFORE = 4  # start token, language, task and no_timestamps


def _settings(reader: Reader, keys: Collection[str]) -> dict[str, Value]:
    for side in ("encoder", "decoder"):
        reader.check_layers(f"{side}_layers", side, keys)
    return {
        **reader.activation("activation_function", reader.config["activation_function"]),
        "num_heads": reader.whole("encoder_attention_heads"),
        "dec.num_heads": reader.whole("decoder_attention_heads"),
    }


def _log_mel(reader: Reader) -> FeaturesConfig:
    width = reader.whole("d_model")
    convolutions = (
        ConvolutionConfig(kernel=3, stride=stride, padding=1, channels=width, activation="gelu") for stride in (1, 2)
    )
    return FeaturesConfig(
        dim=reader.whole("num_mel_bins"),
        convolutions=tuple(convolutions),
        projection=False,
        frames=2 * reader.whole("max_source_positions"),
    )


def _speech(
    directory: Path, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> tuple[SpeechTokens, dict[str, Any]]:
    """Read the tokens of prompts, as `generate` of transformers chooses them.

    Also returns the other generation settings.
    """
    rest = {key: value for key, value in generation.items() if key not in (*_PROMPT, *_IGNORED)}
    is_derived = generation.get("_from_model_config")  # then transformers ignores the keys
    given = {key: generation[key] for key in _PROMPT if generation.get(key) is not None and not is_derived}
    ids = {key: given.get(key, {}) if given.get("is_multilingual") is not False else {} for key in _PROMPT[2:4]}
    problems = [
        f"{key} is {shortened(value)}, expected names with ids"
        for key, value in ids.items()
        if not isinstance(value, dict) or not all(map(is_whole, value.values()))
    ]
    raise_all(CheckpointError, "generation", problems)
    languages = {name.strip("<|>"): token for name, token in ids["lang_to_id"].items()}
    try:
        speech = SpeechTokens(
            languages=tuple(languages),
            language_ids=tuple(languages.values()),
            transcribe=ids["task_to_id"].get("transcribe"),
            translate=ids["task_to_id"].get("translate"),
            no_timestamps=given.get("no_timestamps_token_id"),
        )
    except ConfigError as error:
        raise CheckpointError(str(error), subject="generation") from error
    if isinstance(language := rest.get("language"), str) and language.strip("<|>") not in languages:
        codes = need_transformers(directory).models.whisper.tokenization_whisper.TO_LANGUAGE_CODE
        rest["language"] = codes.get(language.lower(), language)
    elif isinstance(language, str):
        rest["language"] = language.strip("<|>")
    if rest.get("language") is None and rest.get("task") is None:
        rest |= _forced(given.get("forced_decoder_ids") or config.get("forced_decoder_ids"), speech)
    # The limit of transformers does not count the prompt, except up to the positions of the decoder.
    if is_whole(limit := rest.get("max_length")) and rest.get("max_new_tokens") is None:
        most = config.get("max_target_positions", 448)
        del rest["max_length"]
        rest |= {"max_new_tokens": limit} if limit <= most - _MOST_BEFORE else {"max_length": most}
    return speech, rest


def _forced(forced: Any, speech: SpeechTokens) -> dict[str, str]:
    """Convert `forced_decoder_ids` to a language and a task."""
    if not forced or not isinstance(forced, list) or forced[0][:1] != [1]:
        return {}
    languages = dict(zip(speech.language_ids, speech.languages, strict=True))
    tasks = {speech.transcribe: "transcribe", speech.translate: "translate"}
    found, tokens = dict[str, str](), [pair[-1] for pair in forced]
    begun = [pair[0] for pair in forced] == list(range(1, len(forced) + 1))
    if tokens[:1] == [None]:
        tokens.pop(0)
    elif tokens and tokens[0] in languages:
        found["language"] = languages[tokens.pop(0)]
    if tokens and tokens[0] is not None and tokens[0] in tasks:
        found["task"] = tasks[tokens.pop(0)]
    if not begun or tokens not in ([], [speech.no_timestamps]) or ("language" in found) > ("task" in found):
        problem = f"forced_decoder_ids is {shortened(forced)}, expected a language, a task and no_timestamps_token_id"
        remedy = "take lang_to_id, task_to_id and no_timestamps_token_id from generation_config.json of the base model"
        raise CheckpointError(problem, subject="generation", remedy=remedy)
    return found


FAMILIES = (
    Family(
        "whisper",
        lambda _: "hf_whisper",
        _settings,
        ("WhisperTokenizer",),
        _DEFAULTS,
        head="proj_out.weight",
        features=_log_mel,
        arrange=lambda features: features.transpose(1, 2),
        speech=_speech,
    ),
)
