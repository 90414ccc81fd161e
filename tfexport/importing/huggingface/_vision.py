"""Define VisionEncoderDecoder models of ViT or DeiT, and TrOCR or GPT-2."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tfexport._arguments import is_whole
from tfexport.errors import shortened
from tfexport.importing.huggingface import Family, Reader
from tfexport.nn.config import ImageConfig
from tfexport.nn.switches import Value

# Values of transformers for keys that a config.json may lack.
_ENCODER = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
}
_TROCR = {
    "d_model": 1024,
    "decoder_layers": 12,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "max_position_embeddings": 512,
    "scale_embedding": False,
    "use_learned_position_embeddings": True,
    "layernorm_embedding": True,
    "pad_token_id": 1,
}
_GPT2 = {
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
_CLASS_TOKENS = {"vit": 1, "deit": 2}
_CROSS = "cross_attention_hidden_size"
_POSITIONS = "decoder.model.decoder.embed_positions.weight"
_QUERY = "encoder.encoder.layer.0.attention.attention.query.bias"


def _kind(config: Mapping[str, Any], side: str) -> str:
    return str(config[side].get("model_type")) if isinstance(config.get(side), dict) else ""


def _layout(config: Mapping[str, Any]) -> str:
    return "hf_vit_gpt2" if _kind(config, "decoder") == "gpt2" else "hf_trocr"


def _settings(reader: Reader, keys: Collection[str]) -> dict[str, Value]:
    kinds = [_kind(reader.config, side) for side in ("encoder", "decoder")]
    if kinds[0] not in _CLASS_TOKENS or kinds[1] not in _DECODERS:
        reader.problems.append(
            f"the encoder is {shortened(kinds[0])} and the decoder {shortened(kinds[1])}, expected "
            f"{' or '.join(_CLASS_TOKENS)}, and {' or '.join(_DECODERS)}; export it as your own module, see "
            "docs/guides/your-own-module.md"
        )
        return {}
    defaults, read, width, head = _DECODERS[kinds[1]]
    encoder, decoder = reader.side("encoder", _ENCODER), reader.side("decoder", defaults)
    found = read(decoder, keys) | _encoder(encoder, keys)  # settings of both sides precede those of one
    is_projected = encoder.whole("hidden_size") != decoder.whole(width) and not decoder.config.get(_CROSS)
    used = {
        "enc_to_dec_proj.weight": is_projected,
        "enc_to_dec_proj.bias": is_projected,
        _POSITIONS: decoder.config.get("use_learned_position_embeddings", False),
        _QUERY: encoder.config["qkv_bias"],
    }
    for name, is_used in used.items():
        if bool(is_used) != (name in keys):
            uses, have = ("uses", "lack") if is_used else ("does not use", "have")
            reader.problems.append(f"it {uses} {name}, which the weights {have}; save both again")
    if decoder.config.get("tie_word_embeddings", True) is False and head not in keys:
        reader.problems.append(f"{head} is missing, and decoder.tie_word_embeddings is false; save the whole model")
    reader.problems += [*encoder.problems, *decoder.problems]
    return found


def _encoder(reader: Reader, keys: Collection[str]) -> dict[str, Value]:
    reader.check_layers("num_hidden_layers", "encoder", keys)
    activation = reader.activation("hidden_act", reader.config["hidden_act"])
    return {
        **{f"enc.{name}": value for name, value in activation.items()},
        "enc.norm_eps": reader.config["layer_norm_eps"],
        "enc.num_heads": reader.whole("num_attention_heads"),
        "enc.embedding_scale": 1.0,
        "enc.embedding_norm": False,
    }


def _trocr(reader: Reader, keys: Collection[str]) -> dict[str, Value]:
    reader.check_layers("decoder_layers", "decoder", keys)
    found: dict[str, Value] = {
        **reader.activation("activation_function", reader.config["activation_function"]),
        "embedding_scale": "sqrt(d_model)" if reader.config["scale_embedding"] else 1.0,
        "embedding_norm": bool(reader.config["layernorm_embedding"]),
        "dec.num_heads": reader.whole("decoder_attention_heads"),
    }
    if not reader.config["use_learned_position_embeddings"]:
        found["dec.max_length"] = reader.whole("max_position_embeddings")
        if (pad := reader.whole("pad_token_id")) != 1:
            reader.problems.append(f"decoder.pad_token_id is {pad}, expected 1, after which computed positions begin")
    return found


def _gpt2(reader: Reader, keys: Collection[str]) -> dict[str, Value]:
    reader.check_layers("n_layer", "decoder", keys)
    for name, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
        if reader.config[name] is not usual:
            reader.problems.append(f"decoder.{name} is {shortened(reader.config[name])}, expected {usual}")
    return {
        **reader.activation("activation_function", reader.config["activation_function"]),
        "norm_eps": reader.config["layer_norm_epsilon"],
        "dec.num_heads": reader.whole("n_head"),
    }


def _image(reader: Reader) -> ImageConfig | None:
    encoder = reader.side("encoder", _ENCODER)
    (height, width), (patch_height, patch_width) = (_edges(encoder, name) for name in ("image_size", "patch_size"))
    channels = encoder.whole("num_channels")
    reader.problems += encoder.problems
    if reader.problems:
        return None
    return ImageConfig(
        channels=channels,
        height=height,
        width=width,
        patch_height=patch_height,
        patch_width=patch_width,
        class_tokens=_CLASS_TOKENS[encoder.config["model_type"]],
    )


def _edges(reader: Reader, name: str) -> tuple[int, int]:
    value = reader.config[name]
    edges = tuple(value) if isinstance(value, list) else (value, value)
    if len(edges) == 2 and all(map(is_whole, edges)):
        return edges
    reader.problems.append(f"encoder.{name} is {shortened(value)}, expected a whole number, or height and width")
    return 0, 0


def _repair(model: Any) -> None:
    model.encoder.set_attn_implementation("sdpa")  # the other one rounds the softmax to float32
    if getattr(model.config.decoder, "use_learned_position_embeddings", True) is False:
        positions = model.decoder.model.decoder.embed_positions  # transformers 5 loads them without values
        positions.weights = positions.get_embedding(*positions.weights.shape, positions.padding_idx)


# Defaults, function that reads settings, key of the width, and name of the output projection.
_DECODERS = {
    "trocr": (_TROCR, _trocr, "d_model", "decoder.output_projection.weight"),
    "gpt2": (_GPT2, _gpt2, "n_embd", "decoder.lm_head.weight"),
}
FAMILIES = (
    Family(
        "vision-encoder-decoder",
        _layout,
        _settings,
        ("RobertaTokenizer", "XLMRobertaTokenizer", "GPT2Tokenizer"),
        base="",
        is_tied=True,
        unused=("decoder.model.decoder.embed_positions._float_tensor",),
        image=_image,
        repair=_repair,
    ),
)
