"""The variants of the decoder graph, which differ in their cache and attention."""

from tfexport.contract import Variant
from tfexport.export.decoders._static import STATIC
from tfexport.export.decoders._variant import CONCAT, DecoderVariant, ModuleTraits
from tfexport.export.decoders.contrib import CONTRIB

__all__ = ["VARIANTS", "DecoderVariant", "ModuleTraits"]

VARIANTS: dict[Variant, DecoderVariant] = {"concat": CONCAT, "static": STATIC, "contrib": CONTRIB}
