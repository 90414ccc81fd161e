"""What a Hugging Face directory says of itself: its layout, its settings, its weights as transformers loads them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from tfexport.importing.formats import hugging_face
from tfexport.importing.formats.container import Checkpoint
from tfexport.importing.formats.hugging_face_weights import as_loaded
from tfexport.importing.layout.layout import Layout
from tfexport.nn.switches import Value


@dataclass(frozen=True)
class Family:
    """The family of a directory.

    `layout` is the one that config.json names, None where another is asked for
    or a golden has to tell; `settings` go with it.
    """

    layout: str | None
    settings: Mapping[str, Value]


def read_family(
    checkpoint: Checkpoint,
    asked: str,
    *,
    has_golden: bool,
    given: Collection[str],
    report: Callable[[str], None],
) -> Family:
    """Read what config.json says.

    Args:
        checkpoint: of a directory, or without a config.json.
        asked: the layout that is asked for, "auto" or the name of one.
        has_golden: whether a golden can tell the layout of a family that is not known.
        given: settings that take the place of these.
        report: told what was not read, and what it was.

    Raises:
        CheckpointError: the family is not known and there is no golden; or a value is missing or has no place.
    """
    config, generation = checkpoint.hf_config, checkpoint.hf_generation
    if config is None or asked not in ("auto", *hugging_face.LAYOUTS):
        return Family(None, {})
    if not hugging_face.is_known(config) and (has_golden or asked != "auto"):
        report(f"config.json: a family without a layout, {config.get('model_type')}; the tokens are taken from it")
        return Family(None, hugging_face.tokens(config, generation))
    layout = hugging_face.family(config)
    if asked not in ("auto", layout):
        return Family(None, {})
    report(f"config.json: is of the family of the layout {layout}")
    if unread := hugging_face.unread(config):
        report(f"config.json: left out what transformers does not read: {', '.join(unread)}")
    return Family(layout, hugging_face.settings(config, generation, checkpoint.tensors, given))


def as_transformers_loads(
    checkpoint: Checkpoint, layout: Layout | None, tensors: Mapping[str, Tensor], notes: list[str]
) -> Mapping[str, Tensor]:
    """Return weights of a directory, where `layout` is that of its family, as a model has them after loading."""
    config = checkpoint.hf_config
    if config is None or layout is None or not hugging_face.is_known(config):
        return tensors
    if layout.name != hugging_face.family(config):
        return tensors
    return as_loaded(config, tensors, notes)
