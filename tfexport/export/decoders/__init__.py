"""The variants of the decoder graph, which differ in their cache and attention."""

from tfexport.contract import Form
from tfexport.export.decoders.contrib import CONTRIB
from tfexport.export.decoders.form import CONCAT, DecoderForm, ModuleTraits
from tfexport.export.decoders.static import STATIC

__all__ = ["FORMS", "DecoderForm", "ModuleTraits"]

FORMS: dict[Form, DecoderForm] = {"concat": CONCAT, "static": STATIC, "contrib": CONTRIB}
