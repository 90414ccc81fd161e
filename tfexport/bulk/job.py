"""What a run is about, and the parts of it that are done: a folder beside the output that outlives the process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from tfexport._io.sealed_json import seal, unseal
from tfexport.bulk.formats.answer import Answer
from tfexport.bulk.formats.format import Format, Part
from tfexport.bulk.places.place import Folder, reading, writing
from tfexport.config import Config
from tfexport.errors import InputError
from tfexport.generation import DecodeConfig

FORMAT_VERSION = 1
_JOB = "job.json"
_PART = re.compile(r"part-(\d{8})\.jsonl")


class Job(Config, subject=_JOB):
    """Everything that an output depends on; a run goes on only where all of it is as it was.

    Attributes:
        format_version: of this folder.
        bundle_sha256: of the manifest of the bundle, which names all that is in it.
        backend: that runs it.
        input_sha256: of all bytes of the input.
        input_format: as its suffix says.
        input_column: that has the texts.
        output_format: as its suffix says.
        output_column: that gets the answers.
        prefix: what every answer begins with.
        rows_per_part: rows that are kept together.
        decoding: how is decoded.
    """

    format_version: int = FORMAT_VERSION
    bundle_sha256: str
    backend: str
    input_sha256: str
    input_format: Format
    input_column: str
    output_format: Format
    output_column: str
    prefix: str | None
    rows_per_part: int
    decoding: DecodeConfig

    def differences(self, former: Job) -> list[str]:
        """Say in words what a former run had otherwise."""
        found = []
        if self.bundle_sha256 != former.bundle_sha256:
            found.append("the bundle is another one")
        if self.input_sha256 != former.input_sha256:
            found.append("the input was changed")
        for field in dataclasses.fields(self):
            now, before = getattr(self, field.name), getattr(former, field.name)
            if now != before and not field.name.endswith("sha256") and field.name != "decoding":
                found.append(f"{field.name} is {now!r} and was {before!r}")
        for field in dataclasses.fields(self.decoding):
            now, before = getattr(self.decoding, field.name), getattr(former.decoding, field.name)
            if now != before:
                found.append(f"{field.name} is {now!r} and was {before!r}")
        return found


class PartStore:
    """The parts of a job that are done.

    Each is a file of JSON lines: a first one with its place and the sha256 of the rest, then an answer a row.
    """

    def __init__(self, folder: Folder) -> None:
        """Take a folder of `open_job`."""
        self._folder, self.name = folder, folder.name

    def done(self) -> set[int]:
        """Return the numbers of the parts that are there."""
        with reading(self.name):
            return {int(match[1]) for name in self._folder.names() if (match := _PART.fullmatch(name))}

    def write(self, part: Part, answers: Sequence[Answer]) -> None:
        """Keep a part, whole or not at all."""
        body = "".join(f"{answer.to_json()}\n" for answer in answers).encode()
        with writing(self.name, kept=self.name):
            self._folder.write(_name(part), json.dumps(_head(part, body)).encode() + b"\n" + body)

    def read(self, part: Part) -> list[Answer]:
        """Return the answers of a part.

        Raises:
            InputError: its file is missing or damaged.
        """
        with reading(f"{self.name}/{_name(part)}"):
            head, _, body = self._folder.read(_name(part)).partition(b"\n")
        if head != json.dumps(_head(part, body)).encode():
            raise InputError(f"{self.name}/{_name(part)} is damaged; remove it and run the same command again")
        return [Answer.from_json(line) for line in body.decode().splitlines()]


def open_job(folder: Folder, job: Job) -> PartStore:
    """Begin a job in a folder, or go on with it; call under the lock of the output.

    Raises:
        InputError: the folder is that of another job, or none of a job.
    """
    with reading(folder.name):
        names = folder.names()
    foreign = sorted(name for name in names if name != _JOB and not _PART.fullmatch(name))
    if foreign:
        raise InputError(
            f"{folder.name} has {foreign[0]}, which is no part of a run; move it away, or choose another --output"
        )
    remedy = f"remove {folder.name} to begin anew"
    with writing(folder.name):
        if _JOB in names:
            former = unseal(
                folder.read(_JOB), _read_job, name=f"{folder.name}/{_JOB}", format_version=FORMAT_VERSION, remedy=remedy
            )
            if found := job.differences(former):
                raise InputError(
                    f"{folder.name} has the parts of another run ({'; '.join(found)}); "
                    f"give what was given then to go on with it, or {remedy}"
                )
        elif names:
            folder.remove(min(names))  # of a run that was killed when its output was there
        folder.clear()
        if _JOB not in names:
            folder.make()
            folder.write(_JOB, seal(_plain(job)))
    return PartStore(folder)


def close_job(folder: Folder) -> None:
    """Remove the folder of a job whose output is there."""
    with writing(folder.name):
        folder.remove(_JOB)


def _read_job(data: dict[str, Any]) -> Job:
    return Job.from_dict(data, subject=_JOB)


def _plain(job: Job) -> dict[str, Any]:
    """Return a job as JSON reads it back: lists for tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(job.to_dict()))
    return plain


def _name(part: Part) -> str:
    return f"part-{part.number:08d}.jsonl"


def _head(part: Part, body: bytes) -> dict[str, object]:
    return {"first": part.first, "rows": part.count, "sha256": hashlib.sha256(body).hexdigest()}
