"""Which place a path or URI names."""

from __future__ import annotations

from os import PathLike

from tfexport.bulk.places.local import LocalPlace
from tfexport.bulk.places.place import Place


def find_place(given: str | PathLike[str]) -> Place:
    """Return the place that a path or a URI such as s3://bucket/file.parquet names.

    Raises:
        InputError: there is no such kind of place.
        ModuleNotFoundError: it is a URI, and pyarrow is not installed.
    """
    if isinstance(given, str) and "://" in given:
        from tfexport.bulk.places.remote import find_remote

        return find_remote(given)
    return LocalPlace(given)
