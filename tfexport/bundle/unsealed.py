"""What lies in `engines/` of a bundle that no manifest there names: nobody has its sum, so nobody knows what it is."""

from __future__ import annotations

import os
from pathlib import Path

from tfexport._io import atomic
from tfexport.bundle.bundle import Bundle, plain_problem
from tfexport.bundle.contents import own_names, walk
from tfexport.bundle.manifest import ENGINES
from tfexport.errors import MAX_PROBLEMS, BundleError

# A folder may be replaced while it is read.
_ATTEMPTS = 3


def check_engines(bundle: Bundle) -> None:
    """Refuse a bundle with anything in `engines/` that is not sealed; see `unsealed`.

    Raises:
        BundleError: lists all of it, or it cannot be read.
    """
    if problems := unsealed(bundle):
        listed = "; ".join(problems[:MAX_PROBLEMS])
        raise BundleError(f"bundle {bundle.path}: {listed}; remove that, or copy the bundle again from its source")


def unsealed(bundle: Bundle) -> list[str]:
    """Say what in `engines/` is named by no manifest there, or no plain file of its own.

    Whether an engine is what its manifest says is found out when it is loaded. What a writer has there just now, or a
    killed one has left, counts for nothing: it is never read.

    Raises:
        BundleError: it cannot be read.
    """
    for _ in range(_ATTEMPTS):
        try:
            return _unsealed(bundle.path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise BundleError(f"bundle {bundle.path}: {ENGINES} cannot be read ({error.strerror})") from error
    raise BundleError(f"bundle {bundle.path}: {ENGINES} is changed again and again; load it when that has ended")


def _unsealed(root: Path) -> list[str]:
    if not (root / ENGINES).exists():
        return []
    found = {f"{ENGINES}/{name}": status for name, status in walk(root / ENGINES)}
    own = own_names(root, ())  # after the walk, so that an engine which comes meanwhile is known
    problems = []
    for name, status in sorted(found.items()):
        if any(map(atomic.is_leftover, name.split("/"))) or not os.path.lexists(root / name):
            continue
        if problem := plain_problem(name, status):
            problems.append(problem)
        elif name not in own:
            problems.append(f"{name!r} is named by no engine.json")
    return problems
