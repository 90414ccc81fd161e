"""Check the options of an import before a checkpoint is read or searched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tfexport._io.names import CONFIG
from tfexport._io.strict_json import plain_problem
from tfexport.errors import ConfigError, raise_all
from tfexport.importing.bare_vocabulary import split_problem
from tfexport.importing.config import ImportConfig
from tfexport.importing.layout.apply import setting_conflicts
from tfexport.importing.layout.layout import Layout, builtin_layouts, parse_setting, read_layout, setting_problems
from tfexport.nn.switches import Value

_TRIED = 16  # layouts whose shapes are compared with the settings


class Options(NamedTuple):
    """Valid options, which may still not fit the checkpoint."""

    settings: dict[str, Value]
    layout: Layout | None  # None if it is to be found


def read_options(
    checkpoint: Path, config: ImportConfig, reference: Path | None, tokenizer: Path | None, target: Path | None
) -> Options:
    """Read settings and layout; raises ConfigError with everything that is wrong."""
    problems, layout = list[str](), None
    settings = _settings(config, problems)
    if config.layout != "auto":
        try:
            layout = named_layout(config.layout)
        except ConfigError as error:
            problems.append(str(error))
    files = {"reference": reference, "tokenizer": tokenizer, "target_tokenizer": target}
    problems += [
        f"{name} {path}: {problem}"
        for name, path in files.items()
        if path and not (path.is_dir() and name != "reference") and (problem := plain_problem(path))
    ]
    problems += _text_problems(checkpoint, config, tokenizer, target)
    raise_all(ConfigError, "import", problems)
    return Options(settings, layout)


def check_settings(
    settings: Mapping[str, Value],
    layouts: Iterable[Layout],
    tensors: Mapping[str, Tensor],
    attributes: Mapping[str, Tensor],
) -> None:
    """Raise ConfigError if the likeliest layouts fit only without the settings."""
    first: list[str] = []
    for layout in islice(layouts, _TRIED):
        conflicts = setting_conflicts(layout, tensors, settings, attributes)
        if conflicts == []:
            return
        first = first or conflicts or []
    raise_all(ConfigError, "import", first)


def named_layout(name: str) -> Layout:
    """Return a built-in layout, or read a layout file."""
    if layout := builtin_layouts().get(name):
        return layout
    if Path(name).name == name and not name.endswith((".yaml", ".yml")) and not Path(name).exists():
        raise ConfigError(f"layout {name!r} is not a file or one of {', '.join(builtin_layouts())}")
    return read_layout(Path(name))


def _settings(config: ImportConfig, problems: list[str]) -> dict[str, Value]:
    pairs = list[tuple[str, Value]]()
    for text in config.settings:
        try:
            pairs.append(parse_setting(text))
        except ConfigError as error:
            problems.append(str(error))
    if config.heads is not None:
        pairs.append(("num_heads", config.heads))
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    problems += [f"setting {key} is given twice; keep one --set or --heads" for key in twice]
    settings = dict(pairs)
    problems += setting_problems(settings)
    return settings


def _text_problems(checkpoint: Path, config: ImportConfig, source: Path | None, target: Path | None) -> Iterator[str]:
    if source is None and target is not None:
        yield "the target has a tokenizer, but the source has none; give --tokenizer too"
    if config.tokenize and (problem := split_problem(config.tokenize)):
        yield problem
    has_language = (config.source_language, config.target_language) != (None, None)
    if source is None and has_language and checkpoint.exists() and not (checkpoint / CONFIG).exists():
        yield "a language is given, but no tokenizer that has its id; give --tokenizer"
