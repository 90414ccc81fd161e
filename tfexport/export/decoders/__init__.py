"""The variants of the decoder graph, which differ in their cache and attention."""

from tfexport.contract import Form
from tfexport.export.decoders._static import STATIC
from tfexport.export.decoders._variant import CONCAT, DecoderVariant, ModuleTraits
from tfexport.export.decoders.contrib import CONTRIB

__all__ = ["VARIANTS", "DecoderVariant", "ModuleTraits"]

VARIANTS: dict[Form, DecoderVariant] = {"concat": CONCAT, "static": STATIC, "contrib": CONTRIB}
