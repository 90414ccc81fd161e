"""Say what the loop graph of a bundle generates, or why it cannot generate as the bundle does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tfexport.contract import LoopSettings, ModelSpec
from tfexport.errors import ConfigError, raise_all
from tfexport.generation import DecodeConfig, GenerationDefaults

# Those of beams and samples: a greedy search sets them aside.
_NOT_GREEDY = {"num_beams": 1, "do_sample": False, "num_return_sequences": 1, "return_alternatives": False}
# What looks at the tokens so far, at words or at the clock. A bias is towards a prefix, and there is none here.
_BEYOND = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size",
    "stop_strings",
    "max_time",
)


def loop_settings(spec: ModelSpec, defaults: GenerationDefaults, target_prefix: Sequence[int] = ()) -> LoopSettings:
    """Return what greedy search by the defaults of a bundle does.

    Args:
        spec: of the model.
        defaults: of generation.
        target_prefix: ids that every target begins with.

    Raises:
        ConfigError: the model is an encoder alone; lists every default that the graph cannot express.
    """
    if not spec.has_decoder:
        raise ConfigError("loop: an encoder alone generates nothing; leave loop out")
    config = defaults.overridden(_NOT_GREEDY)
    raise_all(ConfigError, "loop", list(_beyond(config)))
    start = spec.tokens.start if config.decoder_start_token_id is None else config.decoder_start_token_id
    prompt, ends = (start, *target_prefix), tuple(sorted(set(config.ends(spec.tokens.eos))))
    # A bad word that is an end is none.
    words = [word[0] for word in config.bad_words_ids if word[0] not in ends]
    room = spec.max_target_length - len(target_prefix)
    limit = config.max_new_tokens if config.max_length is None else config.max_length - len(prompt)
    settings = LoopSettings(
        prompt=prompt,
        ends=ends,
        max_new_tokens=min(limit or room, room),
        min_new_tokens=max(config.min_new_tokens, config.min_length - len(prompt), 0),
        forced_first=None if target_prefix else config.forced_bos_token_id,  # behind a prefix nothing is forced
        forced_last=min(config.forced_ends, default=None),
        suppressed=tuple(sorted({*config.suppress_tokens, *words})),
    )
    raise_all(ConfigError, "loop", list(settings.problems_of(spec)))
    return settings


def _beyond(config: DecodeConfig) -> Iterator[str]:
    for name in _BEYOND:
        if (value := getattr(config, name)) != getattr(DecodeConfig, name):
            yield f"generation.json has {name} {value!r}, which the loop graph cannot do; take it out or leave loop out"
    if any(len(word) > 1 for word in config.bad_words_ids):
        yield (
            "generation.json has bad_words_ids of several tokens, which the loop graph cannot do; take them out, "
            "or leave loop out"
        )
