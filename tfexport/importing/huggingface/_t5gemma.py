"""Define T5Gemma models whose two sides have the same width."""

from __future__ import annotations

from collections.abc import Collection

from tfexport.errors import shortened
from tfexport.importing.huggingface import Family, Reader
from tfexport.nn.switches import Value

# config.json has these options per side, but the canonical model has one value for both.
_SHARED = (
    *("attn_logit_softcapping", "hidden_activation", "hidden_size", "query_pre_attn_scalar", "rms_norm_eps"),
    *("rope_parameters", "rope_scaling", "rope_theta"),
)
_DEFAULTS = {"num_hidden_layers": 26, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _settings(reader: Reader, keys: Collection[str]) -> dict[str, Value]:
    encoder, decoder = reader.side("encoder", _DEFAULTS), reader.side("decoder", _DEFAULTS)
    encoder.check_layers("num_hidden_layers", "encoder", keys)
    decoder.check_layers("num_hidden_layers", "decoder", keys)
    for name in _SHARED:
        one, other = encoder.config.get(name), decoder.config.get(name)
        if one != other:
            reader.problems.append(
                f"encoder.{name} is {shortened(one)} and decoder.{name} is {shortened(other)}, expected the same"
            )
    if reader.config.get("is_encoder_decoder") is False:
        reader.problems.append("is_encoder_decoder is False, expected a decoder too")
    found: dict[str, Value] = {
        **encoder.activation("hidden_activation", encoder.config.get("hidden_activation")),
        "num_heads": encoder.whole("num_attention_heads"),
        "dec.num_heads": decoder.whole("num_attention_heads"),
        "norm_eps": encoder.config.get("rms_norm_eps", 1e-6),
        "rotary_base": encoder.rotary("rope_theta", 10000.0),
        "attention_scale": max(encoder.whole("query_pre_attn_scalar"), 1) ** -0.5,
        "attention_softcap": encoder.config["attn_logit_softcapping"] or 0.0,
        "logit_softcap": decoder.config["final_logit_softcapping"] or 0.0,
        "max_length": min(_longest(encoder), _longest(decoder)),
    }
    reader.problems += [*encoder.problems, *decoder.problems]
    return found


def _longest(reader: Reader) -> int:
    """Return the longest text that a sliding window covers completely."""
    length, kinds = reader.whole("max_position_embeddings"), reader.config.get("layer_types") or ["sliding_attention"]
    return min(length, reader.whole("sliding_window")) if "sliding_attention" in kinds else length


FAMILIES = (Family("t5gemma", lambda _: "hf_t5gemma", _settings, ("GemmaTokenizer",), head="lm_head.out_proj.weight"),)
