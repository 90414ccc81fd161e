"""Three nodes of Ray on loopback, and what is deployed there."""

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
    """The nodes, and the application on them.

    Attributes:
        cluster: of the nodes; the first one has the proxy and no replica.
        url: of the proxy.
        app: name of the application that was deployed last.
    """

    cluster: Cluster
    url: str
    app: str = ""
    _count: int = 0

    def deploy(self, path: str = OURS, deployment: dict[str, Any] | None = None, **args: Any) -> str:
        """Deploy an application in place of the last one, as a configuration file does; wait until it runs or fails.

        Args:
            path: to import its builder from.
            deployment: what the file says of it, before its own settings.
            args: of the application.

        Returns:
            What Serve says where it has failed; empty where it runs.
        """
        self._count += 1
        self.app = f"test-{os.getpid()}-{self._count}"
        self.submit(path, deployment, **args)
        eventually(lambda: self.status() and self.status().status in ("RUNNING", "DEPLOY_FAILED"), PATIENCE_S)
        if self.status().status == "DEPLOY_FAILED":
            return self.status().message + "".join(one.message for one in self.status().deployments.values())
        eventually(lambda: self._is_alive(""), PATIENCE_S)
        return ""

    def submit(self, path: str = OURS, deployment: dict[str, Any] | None = None, **args: Any) -> None:
        """Submit the configuration of the application, which changes it where it is there already; wait for nothing."""
        found = _application(self.app, "/", path, args, deployment)
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [found]}))

    def deploy_beside(self, applications: Mapping[str, Mapping[str, Any]], path: str = OURS) -> None:
        """Deploy several applications in place of the last one; wait until they run.

        Args:
            applications: the arguments of each, by the path that it is reached below, such as "/one".
            path: to import their builder from.
        """
        found = [_application(prefix[1:], prefix, path, args, None) for prefix, args in applications.items()]
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": found}))
        for prefix in applications:
            eventually(lambda prefix=prefix: self._is_alive(prefix), PATIENCE_S)

    def _is_alive(self, prefix: str) -> bool:
        """Say whether a replica answers; while none runs, the proxy lets who asks wait."""
        return httpx.get(f"{self.url}{prefix}/livez", timeout=PATIENCE_S).status_code == 200

    def status(self) -> Any:
        """Return what Serve says of the application; None where it knows none."""
        return serve.status().applications.get(self.app)

    def num_running(self) -> int:
        """Count the replicas that Serve says are running."""
        return self.status().deployments["tfexport"].replica_states.get("RUNNING", 0)

    def replicas(self) -> list[int]:
        """Return the processes of the replicas."""
        title = f"ray::ServeReplica:{self.app}:tfexport".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has just ended
                if path.read_bytes().startswith(title):
                    found.append(int(path.parent.name))
        return found


def _application(
    name: str, prefix: str, path: str, args: Mapping[str, Any], deployment: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what a configuration file says of an application."""
    own = [{"name": "tfexport", **deployment}] if deployment else []
    return {"name": name, "route_prefix": prefix, "import_path": path, "args": dict(args), "deployments": own}


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
class Asked:
    """A request and its end.

    Attributes:
        start: when it was sent, by `time.monotonic`.
        end: when it was answered, or broke.
        status: of the answer; 0 where the connection, or its stream, broke.
        said: the text that was generated, or what went wrong.
    """

    start: float
    end: float
    status: int
    said: str


class Load:
    """Clients that ask again as soon as they are answered, every other time for a stream, while this is entered.

    Attributes:
        asked: the requests that are over.
    """

    def __init__(self, url: str, texts: Sequence[str], num_clients: int) -> None:
        self.asked: list[Asked] = []
        self._url, self._texts, self._num_clients = url, texts, num_clients
        self._goes_on, self._num_asked = True, 0

    async def __aenter__(self) -> Self:
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S, limits=limits)
        self._tasks = [asyncio.create_task(self._ask(index)) for index in range(self._num_clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._goes_on = False
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def until(self, holds: Callable[[], object]) -> float:
        """Wait until something holds; return the seconds that it took."""
        start = time.monotonic()
        while not await asyncio.to_thread(holds):
            assert time.monotonic() - start < PATIENCE_S, "it never came to hold"
            await asyncio.sleep(0.05)
        return time.monotonic() - start

    async def for_more(self, number: int) -> None:
        """Wait until as many requests more are over."""
        so_far = len(self.asked)
        await self.until(lambda: len(self.asked) >= so_far + number)

    @property
    def lost(self) -> list[Asked]:
        """The requests that were not answered."""
        return [one for one in self.asked if one.status != 200]

    async def _ask(self, index: int) -> None:
        while self._goes_on:
            text, start = self._texts[index % len(self._texts)], time.monotonic()
            ask = self._generate if self._num_asked % 2 else self._stream
            self._num_asked += 1
            try:
                status, said = await ask({"text_input": text})
            except httpx.HTTPError as error:
                status, said = 0, repr(error)
            self.asked.append(Asked(start, time.monotonic(), status, said))
            index += self._num_clients

    async def _generate(self, data: dict[str, Any]) -> tuple[int, str]:
        answer = await self._client.post("/v2/models/dates/generate", json=data)
        return answer.status_code, answer.json()["text_output"] if answer.status_code == 200 else answer.text

    async def _stream(self, data: dict[str, Any]) -> tuple[int, str]:
        """Read a stream to its end; one that ends without a reason was cut off."""
        async with self._client.stream("POST", "/v2/models/dates/generate_stream", json=data) as answer:
            if answer.status_code != 200:
                return answer.status_code, (await answer.aread()).decode()
            events = [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: ")]
        if not events or "finish_reason" not in events[-1]:
            return 0, f"the stream ends after {len(events)} events"
        return 200, "".join(event["text_output"] for event in events)
