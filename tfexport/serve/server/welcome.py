"""What the server tells whoever has started it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping

from tfexport.errors import printable
from tfexport.serve.engine import Engine
from tfexport.serve.server.config import ServerConfig

# Asked for where a bundle has no recorded text.
_SOME_TEXT = "Hello"
_SOME_IDS = [1, 2, 3]


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_warning(num_models: int, threads: int | None) -> str | None:
    """Say what to set where models would take more threads of the CPU than it has cores; None where all is well.

    Args:
        num_models: that are served side by side.
        threads: of each; None for one for each core.
    """
    cores = num_cores()
    each = threads or cores
    if num_models * each <= cores:
        return None
    models = "the model takes" if num_models == 1 else f"{num_models} models take"
    best = max(1, cores // num_models)
    return f"{models} {each} threads each on {cores} cores and will be slow under load; set --threads {best}"


def model_line(name: str, engine: Engine, threads: int | None) -> str:
    """Describe a model that was loaded."""
    spec, session, num_threads = engine.model.spec, engine.model.session, threads or num_cores()
    return (
        f"{name}: {spec.layers} decoder layers of {spec.d_model}, {session.accuracy} on {session.backend}, "
        f"{num_threads} thread{'s' * (num_threads > 1)}, {engine.slots} slots; "
        f"sources to {spec.max_source_length} tokens, targets to {spec.max_target_length}"
    )


def example(url: str, engines: Mapping[str, Engine], config: ServerConfig) -> str:
    """Return a command that asks the first model for a text that it knows."""
    name, engine = next(iter(engines.items()))
    tokenizer = engine.model.tokenizer
    if tokenizer is None:
        asked: dict[str, object] = {"input_ids": _SOME_IDS}
    else:
        asked = {"text_input": tokenizer.text.samples[0].text if tokenizer.text.samples else _SOME_TEXT}
    words = ["curl", f"{url}/v2/models/{name}/generate", "-H", "Content-Type: application/json"]
    token = ""
    if config.token_file:
        token = f' -H "Authorization: Bearer $(head -n 1 {shlex.quote(str(config.token_file))})"'
    return printable(f"  {shlex.join(words)}{token} -d {shlex.quote(json.dumps(asked, ensure_ascii=False))}")
