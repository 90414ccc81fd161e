"""What the canonical model has no place for, where the names of a checkpoint give it away."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SIGNS = {
    "relative positions by Shaw": r"rel(ative)?_(pos(itions?)?_?)?(keys?|values?|k|v)(_emb\w*)?\b",
    "a mixture of experts": r"experts?\b|\brouter\b",
    "a copy mechanism": r"copy_?(attn|gen)|pointer_?gen|\bp_gen\b",
    "talking heads": r"talking",
    "an adaptive softmax": r"adaptive_softmax|out_layers\.\d+",
    "memory tokens": r"mem(ory)?_(kv|tokens?|keys?)\b",
    "a recurrent layer": r"weight_(ih|hh)_l\d|\b(lstm|gru)\b",
}


def unsupported(keys: Iterable[str]) -> list[str]:
    """Name what the keys of a state dict show and no layout can express, each with the first key that shows it."""
    keys = list(keys)
    found = []
    for what, sign in _SIGNS.items():
        key = next((key for key in keys if re.search(sign, key, re.IGNORECASE)), None)
        if key is not None:
            found.append(f"key {key[:120]} looks like {what}, which the canonical model has no place for")
    return found
