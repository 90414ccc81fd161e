"""Former name of `record_reference`, kept for scripts that use it."""

from tfexport.importing.reference.outputs import record_reference as record

__all__ = ["record"]
