"""Which bundle is served under which name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tfexport.errors import ConfigError, raise_all, shortened

# A name is a part of a URL, and a label of metrics.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NAMED = re.compile(rf"({_NAME.pattern})=(.+)", re.DOTALL)


def named_bundles(arguments: Sequence[str]) -> dict[str, Path]:
    """Read `[NAME=]BUNDLE` of each argument; without a name it is that of the directory.

    Raises:
        ConfigError: lists every name that cannot stand in a URL, and every one that is taken.
    """
    bundles: dict[str, Path] = {}
    problems = []
    for argument in arguments:
        named = _NAMED.fullmatch(argument)
        path = Path(named[2] if named else argument)
        name = named[1] if named else path.absolute().name
        if not _NAME.fullmatch(name):
            problems.append(f"name {shortened(name)} cannot stand in a URL; give another, as in NAME={argument}")
        elif name in bundles:
            problems.append(f"name {name} is taken by {bundles[name]}; give another, as in NAME={path}")
        else:
            bundles[name] = path
    raise_all(ConfigError, "serve", problems)
    return bundles
