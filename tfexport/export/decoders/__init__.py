"""The variants of the decoder graph: how each stores its cache and attends."""

from tfexport.contract import Form
from tfexport.export.decoders.contrib import CONTRIB
from tfexport.export.decoders.form import CONCAT, DecoderForm, ModuleTraits
from tfexport.export.decoders.static import STATIC

__all__ = ["FORMS", "DecoderForm", "ModuleTraits"]

FORMS: dict[Form, DecoderForm] = {"concat": CONCAT, "static": STATIC, "contrib": CONTRIB}
