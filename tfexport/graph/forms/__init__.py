"""The forms of the decoder: how each keeps its cache and attends, one file a form."""

from tfexport.graph.forms.concat import CONCAT
from tfexport.graph.forms.contrib import CONTRIB
from tfexport.graph.forms.form import DecoderForm
from tfexport.graph.forms.static import STATIC
from tfexport.spec import Form

FORMS: dict[Form, DecoderForm] = {"concat": CONCAT, "static": STATIC, "contrib": CONTRIB}
