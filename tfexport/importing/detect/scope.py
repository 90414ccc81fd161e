"""Recognize unsupported architectures from config.json or names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tfexport.errors import CheckpointError
from tfexport.importing.detect import _keys
from tfexport.importing.detect._keys import Layers, Part, Shape

SUPPORTED = (
    "tfexport imports transformers with an encoder and a decoder, and encoders of token ids, also with a linear head"
)
_OWN_MODULE = "export it as your own module, see docs/guides/your-own-module.md"
_DECODER_ONLY, _FEATURES = "a decoder-only model", "a model whose source is features"
_CONVOLUTIONS, _EXPERTS = "a model with convolutions in its layers", "a mixture of experts"
_REMEDIES = {
    _DECODER_ONLY: "export it with a tool for language models",
    _FEATURES: f"record reference outputs with features= and give --reference, or {_OWN_MODULE}",
    _CONVOLUTIONS: _OWN_MODULE,
    _EXPERTS: _OWN_MODULE,
}
# Ends of class names in `architectures` of a config.json, and keys that only such configurations have.
_ARCHITECTURES = {"ForCausalLM": _DECODER_ONLY, "LMHeadModel": _DECODER_ONLY, "ForSpeechSeq2Seq": _FEATURES}
_CONFIG_KEYS = {
    _FEATURES: ("num_mel_bins", "input_feat_per_channel", "feat_extract_norm", "patch_size"),
    _EXPERTS: ("num_experts", "num_local_experts", "n_routed_experts"),
}
_EXPERT_KEY = re.compile(r"(^|[._])(experts?|router)(?![a-z])", re.IGNORECASE)
# Keys of GPT-2 and Llama, and causal masks, which have at least two axes.
_DECODER_KEY = re.compile(r"(^|\.)(lm_head\.weight|h\.0\.attn\.c_attn\.weight)")
_MASK_KEY = re.compile(r"(^|\.)(tril|causal_mask|attn\.bias)$")
_CROSS_WORDS = frozenset("cross encdec crossattention crossattn xattn src memory mem".split())
_CONVOLUTION_WORDS = frozenset(
    "conv convs convolution convolutions depthwise pointwise patch subsample subsampling feature features".split()
)


def check_config(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a config.json describes an unsupported architecture."""
    if "model_type" not in config and "source_vocab" in config:
        raise CheckpointError("is a model directory already; export it with tfexport onnx", subject="config.json")
    names = config.get("architectures")
    for name in names if isinstance(names, list) else []:
        for end, kind in _ARCHITECTURES.items():
            if isinstance(name, str) and name.endswith(end):
                raise _out_of_scope("config.json", kind, f"architectures has {name[:80]}")
    for kind, keys in _CONFIG_KEYS.items():
        if key := next((key for key in keys if config.get(key) not in (None, False, 0, 1)), None):
            raise _out_of_scope("config.json", kind, f"it has {key}")


def check_names(shapes: Mapping[str, Shape], *, reads_features: bool = False) -> None:
    """Raise CheckpointError if names and shapes show an unsupported architecture.

    With `reads_features`, reference outputs for features show how the checkpoint reads them.
    """
    for kind, key in _signs(shapes):
        if not reads_features or kind not in (_FEATURES, _CONVOLUTIONS):
            raise _out_of_scope("checkpoint", kind, f"{key[:120]} {list(shapes[key])}")


def _out_of_scope(subject: str, kind: str, evidence: str) -> CheckpointError:
    return CheckpointError(f"looks like {kind} ({evidence}); {SUPPORTED}", subject=subject, remedy=_REMEDIES[kind])


def _signs(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Yield unsupported architectures, each with the key that shows it."""
    yield from ((_EXPERTS, key) for key in shapes if _EXPERT_KEY.search(key))
    lists, rest = _lists(shapes)
    kernels = {key: shape for key, shape in shapes.items() if _is_kernel(key, shape)} if lists else {}
    outside = {key: shape for key, shape in kernels.items() if key in rest}
    yield from ((_FEATURES, key) for key, shape in outside.items() if len(shape) == 4 or shape[1] not in (1, shape[0]))
    yield from ((_CONVOLUTIONS, key) for key in kernels)
    if len(lists) == 2:
        yield from ((_FEATURES, part.weight or "") for part in _projections(rest))
    if len(lists) == 1 and not any(_CROSS_WORDS.intersection(_keys.words(key)) for key in shapes):
        is_decoder = _keys.side(lists[0].prefix) == "dec"
        for key, shape in shapes.items():
            if is_decoder or _DECODER_KEY.search(key) or (_MASK_KEY.search(key) and len(shape) > 1):
                yield _DECODER_ONLY, key


def _lists(shapes: Mapping[str, Shape]) -> tuple[list[Layers], dict[str, Shape]]:
    lists, rest = _keys.split(shapes)
    return (lists, rest) if lists else _keys.split(shapes, scattered=True)


def _is_kernel(key: str, shape: Shape) -> bool:
    """Return whether a weight is a convolution over several positions."""
    is_wide = len(shape) in (3, 4) and shape[0] > 1 and max(shape[2:]) > 1
    return is_wide and bool(_CONVOLUTION_WORDS.intersection(_keys.words(key)))


def _projections(rest: Mapping[str, Shape]) -> list[Part]:
    """Return linear layers that read features, if only the decoder has an embedding."""
    parts = [part for part in _keys.parts_of(rest) if part.is_matrix and len(part.shape) == 2]
    tables = [part for part in parts if part.bias is None and not part.about(_keys.POSITION)]
    if not tables or any(_keys.side(part.name) != "dec" for part in tables):
        return []
    width = tables[0].shape[-1]
    linear = [part for part in parts if part.bias is not None and _keys.side(part.name) != "dec"]
    return [part for part in linear if part.shape[0] == width != part.shape[1]]
