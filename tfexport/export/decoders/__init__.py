"""The forms of the decoder: how each keeps its cache and attends, one file a form."""

from tfexport.contract import Form
from tfexport.export.decoders.concat import CONCAT
from tfexport.export.decoders.contrib import CONTRIB
from tfexport.export.decoders.form import DecoderForm
from tfexport.export.decoders.static import STATIC

FORMS: dict[Form, DecoderForm] = {"concat": CONCAT, "static": STATIC, "contrib": CONTRIB}
