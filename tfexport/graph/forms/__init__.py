"""The forms of the decoder: how each keeps its cache and attends, one file a form."""
