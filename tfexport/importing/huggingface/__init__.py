"""Read Hugging Face directories.

To add families, add a module with a list `FAMILIES`, and a layout if no built-in one has the names of their weights.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Inner
from torch import Tensor

from tfexport._arguments import is_whole
from tfexport.contract import ModelSpec, SpeechTokens
from tfexport.errors import CheckpointError, ConfigError, raise_all, shortened
from tfexport.importing.accounting import Use
from tfexport.nn.config import FeaturesConfig, ImageConfig
from tfexport.nn.switches import Value

_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate")
_ACTIVATIONS = {
    **{name: name for name in ("relu", "relu2", "gelu", "quick_gelu", "silu")},
    **dict.fromkeys(_TANH, "gelu_tanh"),
    "gelu_python": "gelu",
    "swish": "silu",
}
_TOKENS = {
    "tokens.pad": "pad_token_id",
    "tokens.start": "decoder_start_token_id",
    "tokens.eos": "eos_token_id",
    "tokens.unk": "unk_token_id",
}
_BIAS = "final_logits_bias"


class Reader:
    """Read values of a config.json and collect every problem."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> None:
        self.config: Mapping[str, Any] = {**defaults, **config}
        self.given, self.prefix = config, prefix
        self.problems: list[str] = []

    def side(self, name: str, defaults: Mapping[str, Any]) -> Reader:
        """Return a reader of a nested configuration."""
        value = self.config.get(name)
        if not isinstance(value, dict):
            self.problems.append(f"{name} is {shortened(value)}, expected its configuration")
        return Reader(value if isinstance(value, dict) else {}, defaults, f"{name}.")

    def whole(self, name: str) -> int:
        """Return a non-negative integer, or record a problem and return 0."""
        value = self.config.get(name)
        if is_whole(value) and value >= 0:
            return value
        self.problems.append(f"{self.prefix}{name} is {shortened(value)}, expected a whole number")
        return 0

    def check_layers(self, name: str, side: str, keys: Iterable[str]) -> None:
        """Compare a number of layers with the keys of the weights."""
        layer = re.compile(rf"(?:^|\.){side}\.(?:transformer\.)?(?:layers?|block|h)\.(\d+)\.")
        layers, count = {int(found[1]) for key in keys if (found := layer.search(key))}, self.whole(name)
        missing = next(number for number in itertools.count() if number not in layers)
        unused = sorted(number for number in layers if number >= count)
        if unused or missing < count:
            source = "" if name in self.given else " by default"
            effect = f"layers {unused[0]} to {unused[-1]} are unused" if unused else f"layer {missing} is missing"
            self.problems.append(
                f"{self.prefix}{name} is {count}{source}, but the weights have {len(layers)} {side} layers: {effect}"
            )

    def activation(self, name: str, value: object) -> dict[str, Value]:
        """Return the switch for the activation `value` of the option `name`."""
        if isinstance(value, str) and value in _ACTIVATIONS:
            return {"activation": _ACTIVATIONS[value]}
        self.problems.append(f"{self.prefix}{name} is {shortened(value)}, expected one of {', '.join(_ACTIVATIONS)}")
        return {}

    def rotary(self, name: str, default: float) -> float:
        """Return a parameter of rotary positions that are not scaled."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind != "default":
            self.problems.append(f"{self.prefix}rope_parameters has {shortened(kind)}, expected rope_type default")
            return 1.0
        value = rope.get(name, self.config.get(name, default))
        if isinstance(value, int | float) and value > 0:
            return float(value)
        self.problems.append(f"{self.prefix}{name} is {shortened(value)}, expected a number above 0")
        return 1.0


@dataclass(frozen=True)
class Family:
    """Description of how to import models of one `model_type`."""

    model_type: str
    layout: Callable[[Mapping[str, Any]], str]  # name of the built-in layout for a config.json
    settings: Callable[[Reader, Collection[str]], dict[str, Value]]  # reads switches, also from the keys of weights
    tokenizers: tuple[str, ...]  # class names in transformers; a directory may name none, then the first one
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values that a config.json may leave out
    base: str = "model."  # prefix of the weights, missing in files of the model without its head
    head: str = "lm_head.weight"
    is_tied: bool = False  # the head may be missing, regardless of config.json
    unread: tuple[str, ...] = ()  # keys of config.json that no current version of transformers reads
    unused: tuple[str, ...] = ()  # patterns of weights that transformers does not load
    features: Callable[[Reader], FeaturesConfig | None] | None = None  # front end of encoders that read features
    image: Callable[[Reader], ImageConfig | None] | None = None  # front end of encoders that read images
    repair: Callable[[Any], None] = lambda model: None  # corrects a model that transformers loaded
    arrange: Callable[[Tensor], Tensor] = lambda features: features  # [batch, frames, dim] as transformers takes them
    # Reads the tokens of prompts from config.json and generation settings; also returns the other settings.
    speech: Callable[[Path, Mapping[str, Any], Mapping[str, Any]], tuple[SpeechTokens, dict[str, Any]]] | None = None
    convert: Callable[[Path, ModelSpec], dict[str, Inner]] | None = None  # None if transformers makes the tokenizers
    tokenizer_files: tuple[str, ...] = ()  # select `convert` if a directory has no config.json


@cache
def families() -> dict[str, Family]:
    """Return every family by its `model_type`."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    found = [family for module in modules for family in getattr(module, "FAMILIES", ())]
    return {family.model_type: family for family in found}


def family_of(config: Mapping[str, Any] | None) -> Family | None:
    """Return the family that a config.json names, or None if it is unknown."""
    model_type = (config or {}).get("model_type")
    return families().get(model_type) if isinstance(model_type, str) else None


def read_settings(
    family: Family,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    keys: Collection[str],
    own_settings: Collection[str] = (),
) -> tuple[dict[str, Value], FeaturesConfig | ImageConfig | None]:
    """Read a config.json as settings and a front end.

    `own_settings` of the user replace its tokens.
    """
    reader, front, read_front = Reader(config, family.defaults), None, family.features or family.image
    known = {*own_settings, "tokens.pad"} if read_front else own_settings  # no id pads features
    found = family.settings(reader, keys) | read_tokens(reader, generation, known)
    if read_front and not reader.problems:
        try:
            front = read_front(reader)
        except ConfigError as error:
            reader.problems += error.problems
    raise_all(CheckpointError, "config.json", list(dict.fromkeys(reader.problems)))
    return found, front


def read_tokens(reader: Reader, generation: Mapping[str, Any], own_settings: Collection[str]) -> dict[str, Value]:
    """Read the token ids of a directory; those of `generation` take precedence."""
    decoder = reader.config.get("decoder")
    of_decoder = {"decoder_start_token_id": None, **decoder} if isinstance(decoder, dict) else {}
    stored = {**of_decoder, **reader.config, **{name: value for name, value in generation.items() if value is not None}}
    if stored.get("decoder_start_token_id", 0) is None and _is_token(stored.get("bos_token_id")):
        stored["decoder_start_token_id"] = stored["bos_token_id"]  # as `generate` does
    found: dict[str, Value] = {}
    for name, key in _TOKENS.items():
        value = stored.get(key)
        if key == "eos_token_id" and isinstance(value, list) and value:
            value = value[0]  # the model has one end token; generation uses all of them
        if _is_token(value):
            found[name] = value
        elif key in stored and key != "unk_token_id" and name not in own_settings:
            reader.problems.append(f"{key} is {shortened(value)}, expected a whole number; give --set {name}=ID")
    return found


def _is_token(value: Any) -> bool:
    return is_whole(value) and value >= 0


def with_base(family: Family, tensors: Mapping[str, Tensor], report: Callable[[str], None]) -> Mapping[str, Tensor]:
    """Add the prefix that files of the model without its head lack."""
    if any(key.startswith(family.base) for key in tensors):
        return tensors
    report(f"added the prefix {family.base!r} to the keys, as in the whole model")
    return {key if key in (family.head, _BIAS) else family.base + key: tensor for key, tensor in tensors.items()}


def as_loaded(
    family: Family, config: Mapping[str, Any], tensors: Mapping[str, Tensor], report: Callable[[str], None]
) -> tuple[Mapping[str, Tensor], dict[str, Use]]:
    """Return the weights as transformers loads them, and the use of the others.

    Each difference is reported.
    """
    base, head = family.base, family.head
    found = dict(tensors)
    unused = [key for key in found if any(fnmatchcase(key, pattern) for pattern in family.unused)]
    uses = dict.fromkeys(unused, Use("ignored", "transformers does not load it"))
    shared = f"{base}shared.weight"
    tables = [f"{base}{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    if head not in found and not family.is_tied and config.get("tie_word_embeddings", True) is False:
        raise CheckpointError(f"{head} is missing, and config.json has tie_word_embeddings false; save the whole model")
    if shared in found and all(table in found for table in tables):
        # Each side has its own table, usually with equal values.
        if head not in found and config.get("share_encoder_decoder_embeddings", True):
            found[head] = found[shared]
            uses[shared] = Use("used")
        elif all(torch.equal(found[shared], found[table]) for table in tables):
            uses[shared] = Use("ignored", "equal to the tables of both sides")
        else:
            unused.append(shared)
            uses[shared] = Use("ignored", "transformers does not load it")
        del found[shared]
    if unused:
        report(f"ignored {len(unused)} weights that transformers does not load: {', '.join(sorted(unused)[:8])}")
    return {key: tensor for key, tensor in found.items() if key not in unused}, uses
