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
            ("batch up to" if result["scenario"] == "server" else "batch", settings["batch_size"]),
            ("source", settings["source_length"]),
            ("target", settings["target_length"]),
        )
        if values
    ]
    return [
        bundle["name"],
        bundle["precision"],
        settings["backend"] + (f" {settings['engine']}" if settings["engine"] else ""),
        *([settings["device"]] if settings["device"] != "cpu" else []),
        *([f"{settings['form']} form"] if settings["form"] else []),
        result["scenario"] + (f" at {settings['rate']:g} requests/s" if settings["rate"] else ""),
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


def split(shares: dict[str, float]) -> str:
    """Write where the time of a call goes."""
    return ", ".join(f"{name} {percent(shares[key])}" for key, name in SPLIT.items() if shares[key] >= 0.0005)


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
