"""What a bundle is called, and where its weights come from."""

import dataclasses
import datetime
from collections.abc import Iterator

from tfexport.config import Config, Sha256
from tfexport.errors import shortened

_MAX_CHARACTERS = 200


class Identity(Config, subject="identity"):
    """What whoever made a bundle calls it; None where nobody said.

    Attributes:
        name: of the model.
        version: of the model, in the maker's own numbers.
        license: of the weights, such as an SPDX identifier.
        date: YYYY-MM-DD, of the maker's choice: the same input gives the same bytes on every day.
    """

    name: str | None = None
    version: str | None = None
    license: str | None = None
    date: str | None = None

    def _problems(self) -> Iterator[str]:
        for name, value in self.given().items():
            if not (value.strip() == value and value.isprintable() and 0 < len(value) <= _MAX_CHARACTERS):
                yield f"{name} is {shortened(value)}, expected 1 to {_MAX_CHARACTERS} characters of one line"
        if self.date is not None and not _is_date(self.date):
            yield f"date is {shortened(self.date)}, expected YYYY-MM-DD, such as 2026-01-31"

    def given(self) -> dict[str, str]:
        """Return what somebody said, by name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


class Provenance(Config, subject="provenance"):
    """How the weights were imported.

    Attributes:
        layout: name of what told which tensor is which.
        layout_sha256: of the model directory's layout.yaml; None where there is none.
        proven: whether the outputs of the original were reproduced.
        certificate_sha256: of the model directory's certificate.json.
    """

    layout: str
    layout_sha256: Sha256 | None = None
    proven: bool
    certificate_sha256: Sha256

    def _problems(self) -> Iterator[str]:
        if not self.layout.isprintable():
            yield f"layout is {shortened(self.layout)}, expected a name in one line"


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
