"""The words in the names of parameters, and what they usually mean."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Python reads no longer numbers than a few thousand digits.
_NUMBER = re.compile(r"(\d{1,18})")
_INDEX = re.compile(r"\{\d*i\+?(\d*)\}")

ENCODER = frozenset("enc encoder encoders encode encoding src source input inputs inp".split())
DECODER = frozenset("dec decoder decoders decode decoding tgt trg target targets output outputs outp".split())
CROSS = frozenset(
    "cross enc encoder encdec src source mem memory context ctx inter interact co xattn crossattn".split()
)
SELF = frozenset("self slf masked causal tgt trg target dec decoder selfattn intra".split())
ATTENTION = frozenset("attn attention att mha mhsa multihead head heads attentions selfattn crossattn xattn".split())
FEED_FORWARD = frozenset(
    "ffn ff ffw feed forward feedforward mlp pwff pff positionwise pointwise intermediate ann fcn dense fc1 fc2".split()
)
EMBEDDING = frozenset("emb embs embed embeds embedding embeddings embedder lut wte shared".split())
POSITION = frozenset("pos position positions positional pe wpe posenc posemb postional".split())
ROTARY = frozenset("rotary rope freqs freq inv".split())
OUTPUT = frozenset("out output generator proj projection head lm logits classifier prj unembed fc linear dense".split())
NORM = frozenset("norm norms ln layernorm rms rmsnorm lnorm normalization normalisation".split())
FINAL = frozenset("final last f post top".split())
GATE = frozenset("gate gated gating".split())

_WEIGHT = frozenset("weight weights w kernel gamma alpha gain scale g a".split())
# Names of gains and shifts, which are norms' where matrices beside them have weights and biases.
GAIN = frozenset("gamma alpha gain scale g a beta shift offset".split())
_BIAS = frozenset("bias biases b beta shift offset".split())
# Parameters of PyTorch's own attention, which stores them as its modules do.
_OWN = frozenset({"in_proj_weight"})
# The word is much the same in many languages: encodeur, enkoder.
_ENCODES, _DECODES = re.compile(r"en[ck]od(?!.*de[ck]od)"), re.compile(r"de[ck]od")
_ROLES = {
    "q": re.compile(r"(w?q|qs|qw|.*quer(y|ies))"),
    "k": re.compile(r"(w?k|ks|kw|.*keys?)"),
    "v": re.compile(r"(w?v|vs|vw|vals?|.*values?)"),
    "o": re.compile(r"(w?o|out|output|outputs|.*concat|final|combine|merge|unify.*|outproj)"),
    "kv": re.compile(r"(to|w)?kv"),
}


def words(name: str) -> tuple[str, ...]:
    """Split a name at dots, underscores, digits and capitals: "W_q.selfAttn1" is w, q, self, attn, 1."""
    return tuple(word.lower() for word in _WORD.findall(name))


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key that puts 2 before 10, and {3i} before {3i+1}."""
    pieces = _NUMBER.split(_INDEX.sub(lambda found: found[1] or "0", name))
    return tuple((1, int(piece)) if i % 2 else (0, piece) for i, piece in enumerate(pieces))


def side(name: str) -> str | None:
    """Say whether a name belongs to "enc" or "dec"; a component that has both words says nothing."""
    for component in name.split("."):
        found = set(words(component))
        is_decoder = bool(found & DECODER) or any(_DECODES.match(word) for word in found)
        is_encoder = bool(found & ENCODER) or any(_ENCODES.match(word) for word in found)
        if is_encoder != is_decoder:
            return "enc" if is_encoder else "dec"
    return None


def common(names: Iterable[Sequence[str]]) -> int:
    """Return with how many equal components all names begin."""
    return sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, zip(*names, strict=False)))


def field(leaf: str) -> tuple[str, str]:
    """Split the last component of a key into what it belongs to and "weight", "bias" or, unknown, "".

    "in_proj_bias" is ("in proj", "bias"), "W_q" is ("q", "weight"), "gamma" is ("", "weight").
    """
    found = list(words(leaf))
    for position in (-1, 0):
        if found and found[position] in _WEIGHT | _BIAS:
            kind = "weight" if found.pop(position) in _WEIGHT else "bias"
            return " ".join(found), kind
    return " ".join(found), ""


def is_bare(key: str) -> bool:
    """Say whether a key is that of a parameter alone, whose author chose which way round it is stored."""
    leaf = key.rpartition(".")[2]
    return leaf != "weight" and leaf not in _OWN


def fused_order(found: Iterable[str]) -> str | None:
    """Return the order that a word such as "qkv" or "kqv" gives the parts of a fused projection."""
    return next((word[-3:] for word in found if sorted(word[-3:]) == ["k", "q", "v"]), None)


def attention_role(found: tuple[str, ...]) -> str | None:
    """Say which projection of an attention the words name: q, k, v, o, the fused kv or qkv, or None.

    The last word that says something decides.
    """
    if {"q", "k", "v"} <= set(found) or found[-2:] == ("in", "proj"):
        return "qkv"
    if {"k", "v"} <= set(found):
        return "kv"
    for word in reversed(found):
        if fused_order([word]):
            return "qkv"
        for role, pattern in _ROLES.items():
            if pattern.fullmatch(word):
                return role
    return None
