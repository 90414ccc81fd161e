"""What a bundle generates with unless told otherwise."""

from __future__ import annotations

from tfexport._io.names import GENERATION
from tfexport._io.strict_json import read_json
from tfexport.bundle.bundle import Bundle
from tfexport.errors import BundleError, ConfigError, raise_all
from tfexport.generation import GenerationDefaults


def read_defaults(bundle: Bundle) -> GenerationDefaults:
    """Read generation.json of a bundle; a bundle without one has the defaults of everybody.

    Raises:
        BundleError: it cannot be read, or lists every wrong value and every token that the model does not have.
    """
    if GENERATION not in bundle.manifest.files:
        return GenerationDefaults()
    try:
        defaults = GenerationDefaults.from_dict(read_json(bundle.file(GENERATION), GENERATION), subject=GENERATION)
        raise_all(ConfigError, GENERATION, defaults.token_problems(bundle.manifest.spec.vocab))
    except ConfigError as error:
        raise BundleError(f"bundle {bundle.path}: {error}; export it again") from error
    except OSError as error:
        raise BundleError(f"bundle {bundle.path}: {GENERATION} cannot be read ({error.strerror})") from error
    return defaults
