"""Convert the options and names of Marian's models to a layout and its keys.

Names and computations are those of `src/models/transformer.h` in Marian.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfexport.errors import CheckpointError, ConfigError, printable, raise_all, shortened
from tfexport.importing._files import Checkpoint, Described, LeftOut, snapshot
from tfexport.importing._marian_file import read_marian as read_file
from tfexport.importing.layout.layout import builtin_layouts, parse_yaml
from tfexport.nn.switches import Value

# Usual values, which old models do not store; a model with another value of these is refused.
_ONLY = {
    "type": "transformer",
    "transformer-ffn-depth": 2,
    "transformer-no-projection": False,
    "transformer-pool": False,
    "transformer-rnn-projection": False,
    "transformer-disable-position-embeddings": False,
    "layer-normalization": False,
    "lemma-dim-emb": 0,
    "ulr": False,
}
_USUAL: dict[str, Any] = _ONLY | {
    "transformer-preprocess": "",
    "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d",
    "transformer-postprocess-top": "",
    "transformer-ffn-activation": "swish",
    "transformer-decoder-autoreg": "self-attention",
    "transformer-decoder-ffn-depth": 0,
    "transformer-train-positions": False,
    "transformer-tied-layers": [],
    "transformer-heads": 8,
    "transformer-dim-ffn": 2048,
    "transformer-dim-aan": 2048,
    "transformer-aan-depth": 2,
    "transformer-aan-activation": "swish",
    "transformer-aan-nogate": False,
    "dec-cell": "gru",
    "tied-embeddings": False,
    "tied-embeddings-src": False,
    "tied-embeddings-all": False,
}
_MIXERS = {"self-attention": "attention", "rnn": "ssru", "average-attention": "average"}
_ACTIVATIONS = {"relu": "relu", "swish": "silu", "gelu": "gelu"}
# Operations before and after a sublayer: n or r is a norm, a adds the input. Dropout, d, has no effect here.
_PLACES = {("", "an"): "post", ("n", "a"): "pre", ("n", "na"): "sandwich"}
_LAYER = re.compile(r"(encoder|decoder)_l(\d+)_(self|rnn|aan|context|ffn)_(.+)")
_NORM = re.compile(r"(?:(?:Wo|ffn|emb|top)_)?(?:ln|rms)_(scale|bias)(_pre)?")
_PARTS = {"scale": "weight", "bias": "bias"}
_TABLES = {"Wemb": "encoder.Wemb", "encoder_Wemb": "encoder.Wemb", "decoder_Wemb": "decoder.Wemb", "Wpos": "positions"}
_SCALE = "_QuantMultA"
END, UNKNOWN = 0, 1
# Marian begins with a vector of zeros instead of a token. It becomes a token that is never generated: its bias is as
# low as 16-bit floats safely hold.
_NEVER = -3e4


def read_marian(path: Path) -> Checkpoint:
    """Read model.npz or a .bin file, with the keys of the layout `marian`.

    Raises CheckpointError for a damaged file, and for options that the canonical model does not have.
    """
    try:
        with snapshot(path) as (copy, entry):
            text, tensors = read_file(copy, path)
        options = parse_yaml(text, str(path))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error}); check the file") from error
    if not isinstance(options, dict):
        raise CheckpointError(f"{path}: its options are {shortened(options)}, expected names and values")
    found, described = _described(options, tensors, str(path))
    scales = {name: tensor.numel() for name, tensor in tensors.items() if name.endswith(_SCALE)}
    left = tuple(LeftOut(name, "scale of Marian's int8 kernels", size) for name, size in scales.items())
    return Checkpoint(found, {printable(path.name): entry}, left_out=left, described=described)


def _described(
    options: Mapping[str, Any], tensors: Mapping[str, Tensor], subject: str
) -> tuple[dict[str, Tensor], Described]:
    options = {**_USUAL, **options}
    problems = list(_problems(options))
    raise_all(CheckpointError, subject, problems, remedy="tfexport reads Marian models of type transformer")
    place, is_rms = _place(options)
    found = _layers(tensors, options, place)
    tables, settings = _tables(found, options, subject)
    has_positions = "positions" in tables
    settings |= {
        "num_heads": options["transformer-heads"],
        "activation": _ACTIVATIONS[options["transformer-ffn-activation"]],
        "norm": "rms" if is_rms else "layernorm",
        "norm_place": place,
        "final_norm": bool(_without_dropout(options["transformer-postprocess-top"])),
        "embedding_norm": bool(_without_dropout(options["transformer-postprocess-emb"])),
        **({"embedding_scale": 1.0} if has_positions else {}),
        "dec.mixer": _MIXERS[options["transformer-decoder-autoreg"]],
    }
    # Marian ends sources, and never generates the unknown token.
    return tables, Described(builtin_layouts()["marian"], settings, (END,), {"suppress_tokens": [UNKNOWN]})


def _without_dropout(operations: str) -> str:
    return operations.replace("d", "")


def _place(options: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the place of the norms, "" if unknown, and whether they are RMS norms."""
    names = ("preprocess", "postprocess", "postprocess-top", "postprocess-emb")
    used = [_without_dropout(str(options[f"transformer-{name}"])) for name in names]
    is_rms = "r" in "".join(used)
    before, after, *others = (each.replace("r", "n") for each in used) if "n" not in "".join(used) else used
    return ("" if {*others} - {"", "n"} else _PLACES.get((before, after), "")), is_rms


def _problems(options: Mapping[str, Any]) -> Iterator[str]:
    for name, expected in _ONLY.items():
        if options[name] != expected:
            yield f"{name} is {shortened(options[name])}, expected {expected}"
    if not _place(options)[0]:
        names = [f"transformer-{name}" for name in ("preprocess", "postprocess", "postprocess-emb", "postprocess-top")]
        given = ", ".join(f"{name} {options[name]!r}" for name in names)
        yield f"{given}: expected norms after (dan), before (n and da), or before and after each sublayer (n and dna)"
    if (activation := options["transformer-ffn-activation"]) not in _ACTIVATIONS:
        yield f"transformer-ffn-activation is {shortened(activation)}, expected {', '.join(_ACTIVATIONS)}"
    if options["transformer-decoder-ffn-depth"] not in (0, 2):
        yield f"transformer-decoder-ffn-depth is {options['transformer-decoder-ffn-depth']}, expected 2"
    kind, cell = options["transformer-decoder-autoreg"], options["dec-cell"]
    if kind not in _MIXERS or (kind == "rnn" and cell != "ssru"):
        expected = "self-attention, average-attention, or rnn with ssru"
        yield f"transformer-decoder-autoreg is {kind} with dec-cell {cell}, expected {expected}"
    if kind == "average-attention":
        yield from _average_problems(options)
    if type(options["transformer-heads"]) is not int:
        yield f"transformer-heads is {shortened(options['transformer-heads'])}, expected a whole number"


def _average_problems(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings of average attention that ours does not have."""
    expected = {
        "transformer-preprocess": "",  # Marian's norm would be after the mean
        "transformer-dim-aan": options["transformer-dim-ffn"],
        "transformer-aan-depth": 2,
        "transformer-aan-activation": options["transformer-ffn-activation"],
        "transformer-aan-nogate": False,
    }
    for name, value in expected.items():
        given = _without_dropout(options[name]) if name == "transformer-preprocess" else options[name]
        if given != value:
            yield f"{name} is {shortened(options[name])} with average-attention, expected {value!r}"


def _layers(tensors: Mapping[str, Tensor], options: Mapping[str, Any], place: str) -> dict[str, Tensor]:
    """Return the tensors with the keys of the layout; shared layers are repeated."""
    found = dict[str, Tensor]()
    shared = options["transformer-tied-layers"] or []
    for name, tensor in tensors.items():
        if name.endswith(_SCALE):
            continue
        layer = _LAYER.fullmatch(name)
        if layer is None:
            side, _, rest = name.partition("_")
            norm = _NORM.fullmatch(rest)
            kind = "emb_norm" if rest.startswith("emb_") else "norm"
            found[f"{side}.{kind}.{_PARTS[norm[1]]}" if norm else name] = tensor
            continue
        side, number, part, rest = layer.groups()
        part = "self" if part in ("rnn", "aan") else part
        if norm := _NORM.fullmatch(rest):
            rest = f"{'norm' if norm[2] or place == 'post' else 'post_norm'}.{_PARTS[norm[1]]}"
        layers = [int(number) - 1]
        if side == "decoder" and shared:
            layers = [i for i, used in enumerate(shared) if used == int(number)]
        found |= {f"{side}.layers.{i}.{part}.{rest}": tensor for i in layers}
    return {name: tensor[0] if tensor.dim() == 2 and len(tensor) == 1 else tensor for name, tensor in found.items()}


def _tables(
    found: dict[str, Tensor], options: Mapping[str, Any], subject: str
) -> tuple[dict[str, Tensor], dict[str, Value]]:
    """Name the tables, and add the token that targets begin with."""
    tensors = {_TABLES.get(name, name): tensor for name, tensor in found.items()}
    if "decoder_ff_logit_out_W" in tensors:
        tensors["output.W"] = tensors.pop("decoder_ff_logit_out_W").T
    elif "decoder_ff_logit_out_Wt" in tensors:
        tensors["output.W"] = tensors.pop("decoder_ff_logit_out_Wt")
    elif not (options["tied-embeddings"] or options["tied-embeddings-all"]):
        raise CheckpointError(f"{subject} has no decoder_ff_logit_out_Wt, which no option ties; copy it again")
    bias = tensors.pop("decoder_ff_logit_out_b", None)
    for name in ("encoder.Wemb", "decoder.Wemb", "output.W"):
        if name in tensors:
            tensors[name] = torch.cat((tensors[name], torch.zeros_like(tensors[name][:1])))
    source = tensors.get("encoder.Wemb")
    target = tensors.get("decoder.Wemb", source)
    if source is None or target is None:
        raise CheckpointError(f"{subject} has no table Wemb or encoder_Wemb; copy it again")
    bias = target.new_zeros(len(target) - 1) if bias is None else bias
    tensors["output.b"] = torch.cat((bias, bias.new_full((1,), _NEVER)))
    tokens: dict[str, Value] = {"pad": len(source) - 1, "start": len(target) - 1, "eos": END, "unk": UNKNOWN}
    return tensors, {f"tokens.{name}": value for name, value in tokens.items()}
