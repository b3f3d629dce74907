"""Serve a model with Ray Serve. Ray routes, scales and restarts replicas, which are actors.

An actor has CPUs and GPUs of a machine, and runs ``tilewright serve`` with the other options.
Requests and streamed responses pass through. A second start with other options or another model
replaces the running replicas one by one, without lost requests:

    python demo/serve_ray.py --ray-replicas 2 --gpus 1 path/to/model --target cuda --max-num-seqs 64

Needs the extra ``ray``.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from tilewright.errors import TilewrightError
from tilewright.serve.web.health import is_healthy
from tilewright.utils.child_process import PYTHON, Child

_ADDRESS = b"tilewright: http://"
_START_SECONDS, _LOOK_SECONDS = 1800.0, 0.1
_HOP_BY_HOP = frozenset(("connection", "content-length", "host", "keep-alive", "transfer-encoding"))


class ServedApp:
    """A ``tilewright serve`` process on a free port, until `close`.

    Args:
        argv: ``tilewright serve`` options, without host and port.

    Raises:
        TilewrightError: if the server does not start, with its last message.
    """

    def __init__(self, argv: list[str]) -> None:
        command = [*PYTHON, "-m", "tilewright.cli.main", "serve", *argv]
        command += ["--host", "127.0.0.1", "--port", "0"]
        self._child = Child(command, has_pipes=True, what="tilewright serve")
        deadline = time.monotonic() + _START_SECONDS
        line = b""
        while not line.startswith(_ADDRESS):
            line = self._child.read_line(deadline - time.monotonic()) or self._fail()
        self.port = int(line.removeprefix(_ADDRESS).split()[0].rpartition(b":")[2])
        while not self.is_healthy():
            if self._child.poll() is not None or time.monotonic() > deadline:
                self._fail()
            time.sleep(_LOOK_SECONDS)

    def is_healthy(self) -> bool:
        """Return whether the server is healthy."""
        return is_healthy("127.0.0.1", self.port, timeout_s=10.0)

    def close(self) -> None:
        """Stop the server. Ray has waited for its responses."""
        self._child.stop()

    def _fail(self) -> bytes:
        raise TilewrightError(f"tilewright serve did not start: {self._child.stop().last}")


class RayReplica:
    """A Ray actor that passes requests to its own server."""

    def __init__(self, argv: list[str]) -> None:
        self._served = ServedApp(argv)
        self._session: Any = None

    async def __call__(self, request: Any) -> Any:
        """Stream the server's response to an HTTP request."""
        import aiohttp
        from starlette.responses import StreamingResponse

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)
            )
        answer = await self._session.request(
            request.method,
            f"http://127.0.0.1:{self._served.port}{request.url.path}",
            params=list(request.query_params.multi_items()),
            data=await request.body(),
            headers={k: v for k, v in request.headers.items() if k not in _HOP_BY_HOP},
            skip_auto_headers=("content-type", "user-agent"),
        )

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.content.iter_any():
                    yield piece
            finally:  # a lost client frees its slot
                answer.close()

        headers = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP_BY_HOP}
        return StreamingResponse(pieces(), status_code=answer.status, headers=headers)

    async def check_health(self) -> None:
        """Check the server. Ray replaces the actor after several failures.

        Raises:
            TilewrightError: if the server is not healthy.
        """
        if not await asyncio.to_thread(self._served.is_healthy):
            raise TilewrightError("the server of this replica is not healthy")

    def __del__(self) -> None:
        if hasattr(self, "_served"):
            self._served.close()


def main(argv: list[str]) -> int:
    """Deploy. Return after a signal, or at once with a running cluster."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ray-replicas", type=int, default=1, help="number of actors (default: 1)")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs per actor (default: 1)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per actor (default: 0)")
    parser.add_argument("--ray-host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--ray-port", type=int, default=8000, help="port (default: 8000)")
    parser.add_argument("--users", type=int, default=256, help="concurrent requests per replica")
    parser.add_argument("--address", help="address of a Ray cluster (default: start a cluster)")
    arguments, options = parser.parse_known_args(argv)
    try:
        import ray
        from ray import serve
    except ImportError:
        print("serve_ray: ray is missing; allowed: pip install -e '.[ray]'", file=sys.stderr)
        return 2
    ray.init(address=arguments.address, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": arguments.ray_host, "port": arguments.ray_port})
    deployment = serve.deployment(
        name="tilewright",
        num_replicas=arguments.ray_replicas,
        max_ongoing_requests=arguments.users,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        graceful_shutdown_timeout_s=600,
        health_check_period_s=5,
    )(RayReplica)
    serve.run(deployment.bind(options), name="tilewright")
    where = f"http://{arguments.ray_host}:{arguments.ray_port}"
    print(f"serving on {where}, cluster {ray.get_runtime_context().gcs_address}", flush=True)
    if arguments.address is None:
        signal.sigwait((signal.SIGINT, signal.SIGTERM))
        serve.shutdown()
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
