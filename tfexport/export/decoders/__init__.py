"""The variants of the decoder graph, which differ in their cache and attention."""

from tfexport.contract import Form
from tfexport.export.decoders._form import CONCAT, DecoderForm, ModuleTraits
from tfexport.export.decoders._static import STATIC
from tfexport.export.decoders.contrib import CONTRIB

__all__ = ["FORMS", "DecoderForm", "ModuleTraits"]

FORMS: dict[Form, DecoderForm] = {"concat": CONCAT, "static": STATIC, "contrib": CONTRIB}
