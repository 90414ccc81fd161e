"""What Ray Serve is told of the replicas: how many, on what, and how much each takes at once."""

from __future__ import annotations

from typing import Any

from ray import serve

from tfexport.integrations.ray.arguments import Arguments
from tfexport.integrations.ray.replica import Replica
from tfexport.serve.http import RETRY_AFTER_S

NAME = "tfexport"
# Seconds between two health checks; Ray replaces a replica after three that fail.
HEALTH_CHECK_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 10.0
# Seconds between two looks at whether a replica that has to go is done.
DRAIN_POLL_S = 0.5
# A bundle that cannot be served is no better the tenth time.
MAX_STARTS = 2
# While the slots are full, as many requests again stand by to take what is freed. The others wait at the proxy, from
# where they go to whichever replica has room first, a new one too.
ONGOING_PER_SLOT = 2


def deployment_of(arguments: Arguments) -> Any:
    """Return the deployment; bind the arguments to it. What a configuration file says goes before this."""
    slots = arguments.slots * len(arguments.bundles)
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
        **_scaling(arguments, slots),
    )


def _scaling(arguments: Arguments, slots: int) -> dict[str, Any]:
    """Return how many replicas there are: a number, or two bounds between which Ray keeps the slots filled."""
    if arguments.min_replicas == arguments.max_replicas:
        return {"num_replicas": arguments.min_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": arguments.min_replicas,
            "max_replicas": arguments.max_replicas,
            "target_ongoing_requests": slots,
        }
    }
