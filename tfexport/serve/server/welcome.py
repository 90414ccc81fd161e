"""What the server tells whoever has started it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping

from tfexport.errors import printable
from tfexport.runtime.cpu import available_cores
from tfexport.serve.engine import Engine
from tfexport.serve.server.config import ServerConfig

# Asked for where a bundle has no recorded text.
_SOME_TEXT = "Hello"
_SOME_IDS = [1, 2, 3]
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def threads_warning(engines: Collection[Engine]) -> str | None:
    """Say what to set where steps take more threads of the CPU than it has cores; None where all is well.

    Args:
        engines: of all models that are served side by side, loaded.
    """
    cores, taken = available_cores(), sum(one.model.threads.decoder for one in engines if one.model.threads)
    if taken <= cores:
        return None
    models = "the model takes" if len(engines) == 1 else f"{len(engines)} models take"
    best = max(1, cores // len(engines))
    return f"{models} {taken} threads on {cores} cores and will be slow under load; set --threads {best}"


def model_line(name: str, engine: Engine) -> str:
    """Describe a model that was loaded."""
    spec, session, threads = engine.model.spec, engine.model.session, engine.model.threads
    taken = f", {threads.decoder} thread{'s' * (threads.decoder > 1)}" if threads else ""
    return (
        f"{name}: {spec.layers} decoder layers of {spec.d_model}, {session.accuracy} on {session.backend}"
        f"{taken}, {engine.slots} slots; "
        f"sources to {spec.max_source_length} tokens, targets to {spec.max_target_length}"
    )


def network_warning(config: ServerConfig) -> str | None:
    """Say what to set where other machines may ask without a token, or send it in the clear; else None."""
    missing = [
        option
        for option, value in (("--token-file", config.token_file), ("--tls-cert", config.tls_cert))
        if value is None
    ]
    if config.host in _LOOPBACK or not missing:
        return None
    return f"host {config.host} lets other machines ask; where their network is not yours, set {' and '.join(missing)}"


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
