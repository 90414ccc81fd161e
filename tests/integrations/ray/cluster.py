"""Three nodes of Ray on loopback, their application, and load for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tests.serve.running import eventually

HOST = "127.0.0.1"
# Generous: the nodes share two cores.
PATIENCE_S = 90.0
# A loopback address for each node; not 127.0.0.1, in whose place Ray would take the address of the machine.
NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
OURS = "tfexport.integrations.ray:app"


@dataclass
class Machines:
    """The nodes, the address of the proxy on the first node, and the newest application."""

    cluster: Cluster
    url: str
    app: str = ""
    _count: int = 0

    def deploy(self, path: str = OURS, deployment: dict[str, Any] | None = None, **args: Any) -> str:
        """Replace the application, as a configuration file does, and wait; return errors of Serve, or ""."""
        self._count += 1
        self.app = f"test-{os.getpid()}-{self._count}"
        self.submit(path, deployment, **args)
        eventually(lambda: self.status() and self.status().status in ("RUNNING", "DEPLOY_FAILED"), PATIENCE_S)
        if self.status().status == "DEPLOY_FAILED":
            return self.status().message + "".join(one.message for one in self.status().deployments.values())
        eventually(lambda: self._is_alive(""), PATIENCE_S)
        return ""

    def submit(self, path: str = OURS, deployment: dict[str, Any] | None = None, **args: Any) -> None:
        """Submit the configuration of the newest application without waiting."""
        _submit([_application(self.app, "/", path, args, deployment)])

    def deploy_several(self, applications: Mapping[str, Mapping[str, Any]], path: str = OURS) -> None:
        """Replace the application with several, by their route prefix; wait until they run."""
        _submit([_application(prefix[1:], prefix, path, args) for prefix, args in applications.items()])
        for prefix in applications:
            eventually(lambda prefix=prefix: self._is_alive(prefix), PATIENCE_S)

    def _is_alive(self, prefix: str) -> bool:
        # While no replica runs, the proxy lets requests wait.
        return httpx.get(f"{self.url}{prefix}/livez", timeout=PATIENCE_S).status_code == 200

    def status(self) -> Any:
        return serve.status().applications.get(self.app)

    def num_running(self) -> int:
        return self.status().deployments["tfexport"].replica_states.get("RUNNING", 0)

    def replicas(self) -> list[int]:
        """Return the process ids of the replicas."""
        title = f"ray::ServeReplica:{self.app}:tfexport".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has just ended
                if path.read_bytes().startswith(title):
                    found.append(int(path.parent.name))
        return found


def _application(
    name: str, prefix: str, path: str, args: Mapping[str, Any], deployment: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    own = [{"name": "tfexport", **deployment}] if deployment else []
    return {"name": name, "route_prefix": prefix, "import_path": path, "args": dict(args), "deployments": own}


def _submit(applications: list[dict[str, Any]]) -> None:
    _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": applications}))


@contextmanager
def machines() -> Iterator[Machines]:
    """Start three nodes; the proxy listens on a free port of loopback."""
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    head, *others = ({"node_ip_address": address, "include_dashboard": False} for address in NODES)
    cluster = Cluster(initialize_head=True, head_node_args=head | {"num_cpus": 0})
    try:
        for node in others:
            cluster.add_node(**node, num_cpus=2)
        ray.init(address=cluster.address, _node_ip_address=NODES[0], log_to_driver=False, logging_level="error")
        serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port})
        yield Machines(cluster, f"http://{HOST}:{port}")
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


@dataclass(frozen=True)
class Request:
    """A finished request: its start, its status (0 if the connection broke), and its text or error."""

    start: float
    status: int
    text: str


class Load:
    """Clients that send a request as soon as the last one is answered; every other request is a stream."""

    def __init__(self, url: str, texts: Sequence[str], num_clients: int) -> None:
        self.requests: list[Request] = []  # those that are finished
        self._url, self._texts, self._num_clients = url, texts, num_clients
        self._is_running, self._num_sent = True, 0

    async def __aenter__(self) -> Self:
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S, limits=limits)
        self._tasks = [asyncio.create_task(self._ask(index)) for index in range(self._num_clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_running = False
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def until(self, holds: Callable[[], object]) -> float:
        """Wait for a condition; return the seconds that it took."""
        start = time.monotonic()
        while not await asyncio.to_thread(holds):
            assert time.monotonic() - start < PATIENCE_S, "the condition did not become true"
            await asyncio.sleep(0.05)
        return time.monotonic() - start

    async def for_more(self, number: int) -> None:
        """Wait until this many further requests are finished."""
        expected = len(self.requests) + number
        await self.until(lambda: len(self.requests) >= expected)

    @property
    def lost(self) -> list[Request]:
        return [one for one in self.requests if one.status != 200]

    async def _ask(self, index: int) -> None:
        while self._is_running:
            text, start = self._texts[index % len(self._texts)], time.monotonic()
            send = self._generate if self._num_sent % 2 else self._stream
            self._num_sent += 1
            try:
                self.requests.append(Request(start, *await send({"text_input": text})))
            except httpx.HTTPError as error:
                self.requests.append(Request(start, 0, repr(error)))
            index += self._num_clients

    async def _generate(self, data: dict[str, Any]) -> tuple[int, str]:
        answer = await self._client.post("/v2/models/dates/generate", json=data)
        return answer.status_code, answer.json()["text_output"] if answer.status_code == 200 else answer.text

    async def _stream(self, data: dict[str, Any]) -> tuple[int, str]:
        async with self._client.stream("POST", "/v2/models/dates/generate_stream", json=data) as answer:
            if answer.status_code != 200:
                return answer.status_code, (await answer.aread()).decode()
            events = [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: ")]
        if not events or "finish_reason" not in events[-1]:
            return 0, f"the stream ended early, after {len(events)} events"
        return 200, "".join(event["text_output"] for event in events)
