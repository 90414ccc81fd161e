"""The models of `models/from_scratch` that no layout is written for, by name, and what builds each."""

from __future__ import annotations

from torch import nn

from models.from_scratch.alternating import Alternating
from models.from_scratch.bare_parameters import BareParameters
from models.from_scratch.convolutions import Convolutions
from models.from_scratch.encoder_alone import EncoderAlone
from models.from_scratch.fused_gates import FusedGates
from models.from_scratch.gpt_like import GptLike
from models.from_scratch.head_axes import HeadAxes
from models.from_scratch.head_lists import HeadLists
from models.from_scratch.misleading import Misleading
from models.from_scratch.mixed import Mixed
from models.from_scratch.no_english import NoEnglish
from models.from_scratch.no_modules import NoModules
from models.from_scratch.numbered_blocks import NumberedBlocks
from models.from_scratch.of_today import OfToday
from models.from_scratch.one_for_both import OneForBoth
from models.from_scratch.ported import Ported
from models.from_scratch.scattered import Scattered
from models.from_scratch.small_projections import SmallProjections
from models.from_scratch.square import Square

SELFMADE: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (
        SmallProjections,
        FusedGates,
        HeadLists,
        NumberedBlocks,
        Convolutions,
        Mixed,
        BareParameters,
        Scattered,
        Alternating,
        HeadAxes,
        EncoderAlone,
        Ported,
        GptLike,
        NoEnglish,
        Square,
        Misleading,
        NoModules,
        OneForBoth,
        OfToday,
    )
}
