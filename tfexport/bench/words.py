"""Numbers and settings in words, the same on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TIMES = {
    "time_to_first_token": "time to first token",
    "inter_token_latency": "per output token",
    "request_latency": "end to end",
    "encode_time": "encoder",
    "step_time": "decoder step",
}
SPLIT = {"encode": "encoder", "step": "decoder steps", "reorder": "moving rows", "rest": "rest"}
# Of a server, which does not always have something to do.
SERVER_SPLIT = {"encode": "encoder", "step": "decoder steps", "rest": "idle"}
MISSING = "–"


def number(value: float | None) -> str:
    """Write a number in about three digits: 0.0123, 1.23, 123, 12,300."""
    if value is None:
        return MISSING
    size = abs(value)
    for limit, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if size >= limit:
            return f"{value:,.{digits}f}"
    return f"{value:.4f}" if size else "0"


def spread(per_process: Sequence[float]) -> str:
    """Write the least and the most that processes measured; nothing for a single one."""
    return f"{number(min(per_process))} … {number(max(per_process))}" if len(per_process) > 1 else ""


def percent(share: float | None) -> str:
    """Write a share as a percentage."""
    return MISSING if share is None else f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def headline(result: dict[str, Any]) -> list[str]:
    """Say what was measured: bundle, scenario, sizes, how often."""
    settings, bundle = result["settings"], result["bundle"]
    beams = settings["num_beams"]
    sizes = [
        f"{name} {', '.join(map(str, values))}"
        for name, values in (
            ("slots" if result["scenario"] == "server" else "batch", settings["batch_size"]),
            ("source", settings["source_length"]),
            ("target", settings["target_length"]),
        )
        if values
    ]
    return [
        bundle["name"],
        *([bundle["precision"]] if bundle["precision"] else []),
        *([settings["url"]] if settings["url"] else []),
        settings["backend"] + (f" {settings['engine']}" if settings["engine"] else ""),
        *([settings["device"]] if settings["device"] != "cpu" else []),
        *([f"{settings['form']} form"] if settings["form"] else []),
        result["scenario"] + (f" at {settings['rate']:.4g} requests/s" if settings["rate"] else ""),
        *sizes,
        *([f"{settings['input']['texts']:,} texts"] if settings["input"] else []),
        "greedy" if beams == 1 else f"beam {beams}",
    ]


def effort(result: dict[str, Any]) -> str:
    """Say how much was measured."""
    settings = result["settings"]
    processes = "1 fresh process" if settings["processes"] == 1 else f"{settings['processes']} fresh processes"
    each = f"{settings['duration']:g} s each"
    cells = f", {len(result['cells'])} combinations" if len(result["cells"]) > 1 else ""
    return f"{processes}, {each}{cells}"


def split(result: dict[str, Any], shares: dict[str, float]) -> dict[str, float]:
    """Name where the time of a call, or of a server, goes; empty where it is not known."""
    names = SERVER_SPLIT if result["scenario"] == "server" else SPLIT
    return {name: shares[key] for key, name in names.items()} if shares else {}


def serving(result: dict[str, Any]) -> dict[str, str]:
    """Say how a server does, by label; nothing for other scenarios."""
    if result["scenario"] != "server":
        return {}
    settings, metrics, found = result["settings"], result["metrics"], {}
    if result["trials"]:
        found["highest rate"] = (
            f"{settings['rate']:.4g} requests a second keep p99 within {settings['goal_p99']:g} ms, in "
            f"{len(result['trials'])} trials"
        )
    if settings["goal_ms"]:
        goodput = number(metrics["goodput"]["value"])
        found["goodput"] = f"{goodput} requests a second answered within {settings['goal_ms']:g} ms"
    if (share := metrics["slot_occupancy"]["value"]) is not None:
        found["slots"] = f"{percent(share)} in use by a step"
    if (queue := metrics["queue_time"])["count"]:
        found["queue"] = f"{number(queue['p50'])} ms, p90 {number(queue['p90'])}, p95 {number(queue['p95'])}"
    return found | {"refused": f"{metrics['refused']['value']:,} requests"}


def weights(metrics: dict[str, Any]) -> str:
    """Say how near a step comes to the speed of the memory."""
    size, share = metrics["step_weight_bytes"], metrics["memory_bandwidth_share"]
    if size["value"] is None or share["value"] is None:
        return str(size.get("note") or share["note"])
    return (
        f"{number(size['value'] / 1e6)} MB a step, {percent(share['value'])} of the "
        f"{number(metrics['memory_bandwidth']['value'])} GB/s that were measured"
    )


def machine(environment: dict[str, Any]) -> str:
    """Say what it ran on."""
    return f"{environment['cpu']}, {environment['threads']} of {environment['cores']} cores, {environment['system']}"


def versions(environment: dict[str, Any]) -> str:
    """Name the versions that matter."""
    return ", ".join(f"{name} {version}" for name, version in environment["versions"].items())


def verdict(result: dict[str, Any]) -> str:
    """Say whether the numbers can be relied on, and why not."""
    reasons = result["validity"]["reasons"]
    parity = f"parity {result['parity']['source']}"
    return f"INVALID: {'; '.join(reasons)}" if reasons else f"VALID: stable, {parity}"
