"""The models of `models/from_scratch` that no layout is written for, by name, and what builds each."""

from __future__ import annotations

import re
from importlib import import_module

from torch import nn

_NAMES = """
SmallProjections FusedGates HeadLists NumberedBlocks Convolutions Mixed BareParameters Scattered Alternating HeadAxes
EncoderAlone Ported GptLike NoEnglish Square Misleading NoModules OneForBoth OfToday Lightning Relative
""".split()


def _class(name: str) -> type[nn.Module]:
    module = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    found: type[nn.Module] = getattr(import_module(f"models.from_scratch.{module}"), name)
    return found


SELFMADE = {name: _class(name) for name in _NAMES}
