"""Define the Ray Serve deployment, whose replicas run the HTTP app."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp

from tfexport.errors import BundleError, EngineFailed, TfexportError
from tfexport.integrations.ray import Arguments
from tfexport.serve.app import build_app
from tfexport.serve.engine import Engine
from tfexport.serve.http import RETRY_AFTER_S
from tfexport.serve.metrics import Metrics
from tfexport.serve.middleware import BearerTokens
from tfexport.serve.server import SWITCH_INTERVAL_S

NAME = "tfexport"
HEALTH_CHECK_S, HEALTH_CHECK_TIMEOUT_S = 2.0, 10.0  # Ray replaces a replica after three checks that fail
DRAIN_POLL_S = 0.5
MAX_STARTS = 2  # if a bundle cannot be served, more attempts do not help
# While its slots are full, a replica queues as many requests again, so that freed slots are filled at once. Other
# requests wait at the proxy, which sends them to the first replica with room, including new ones.
ONGOING_PER_SLOT = 2


def deployment_of(arguments: Arguments) -> Any:
    """Return the deployment without arguments; configuration files can override it."""
    slots, least, most = arguments.slots * len(arguments.bundles), arguments.min_replicas, arguments.max_replicas
    scaling = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": slots}
    return serve.deployment(
        Replica,
        name=NAME,
        max_ongoing_requests=ONGOING_PER_SLOT * slots,
        max_queued_requests=arguments.max_waiting * len(arguments.bundles),
        backpressure_config={"status_code": 429, "retry_after_s": RETRY_AFTER_S},
        ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus},
        graceful_shutdown_timeout_s=arguments.shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        health_check_period_s=HEALTH_CHECK_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        max_constructor_retry_count=MAX_STARTS,
        **({"num_replicas": least} if least == most else {"autoscaling_config": scaling}),
    )


@serve.ingress()
class Replica:
    """Serves bundles; Ray creates it, checks its health, and drains it."""

    async def __init__(self, arguments: Arguments) -> None:  # type: ignore[misc]  # Ray awaits it
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        metrics, bundles = Metrics(), arguments.bundles
        resources = ray.get_runtime_context().get_assigned_resources()
        options = {name: getattr(arguments, name) for name in ("backend", "variant", "engine")}
        options["device"] = arguments.device or ("cuda" if resources.get("GPU") else "cpu")
        options["threads"] = arguments.threads or max(1, int(resources.get("CPU", 1)) // len(bundles))
        self._engines = {
            name: Engine(path, arguments, observer=metrics.observer(name), trusted_keys=arguments.keys, **options)
            for name, path in bundles.items()
        }
        app = build_app(self._engines, arguments, metrics)
        try:
            # Nodes can have different files, so report all missing paths at once.
            if missing := [str(path.absolute()) for path in bundles.values() if not path.exists()]:
                problem = f"there is no bundle at {' or '.join(missing)}"
                raise BundleError(f"{problem}; each node that runs replicas needs it under this path")
            self._app = BearerTokens(app, Path(arguments.token_file)) if arguments.token_file else app
            for engine in self._engines.values():
                await engine.start()
        except TfexportError as error:
            await asyncio.gather(*(engine.drain(0) for engine in self._engines.values()))
            raise type(error)(f"node {ray.util.get_node_ip_address()}: {error}") from None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        # Ray calls this after the constructor.
        return self._app

    async def check_health(self) -> None:
        """Raise `EngineFailed` if an engine has failed or has not responded for `hang_s`."""
        # Ray then replaces the replica, which loses its accepted requests, so engines that are only slow pass.
        if dead := [name for name, engine in self._engines.items() if not engine.is_alive]:
            raise EngineFailed(f"{', '.join(dead)}: the engine has failed or hangs; see its log")

    async def __del__(self) -> None:
        # Ray awaits this after it has answered the replica's requests.
        await asyncio.gather(*(engine.drain() for engine in self._engines.values()))
