"""`grpc.health.v1`, on a pool of its own, so that no other call can keep a probe waiting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICES = ("", "specdraft.v1.Drafter")
LIVENESS = "specdraft.live"
"""A service for liveness probes: SERVING also while the head is loaded and while sessions are refused."""

NUM_THREADS = 4


class Health:
    """What probes are told.

    Args:
        is_live: False = the process should be restarted.
    """

    def __init__(self, is_live: Callable[[], bool]) -> None:
        self._pool = futures.ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="health")
        self._servicer = health.HealthServicer()
        self._is_live = is_live
        self._wants_to_serve = False
        self.set_serving(False)

    def add_to(self, server: grpc.Server) -> None:
        """Serves health on `server` too."""
        servicer: Any = _OnPool(self._servicer, self._pool)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)

    def set_serving(self, is_serving: bool) -> None:
        """NOT_SERVING, or SERVING for as long as the process is alive."""
        self._wants_to_serve = is_serving
        self.check()

    def close(self) -> None:
        """Ends the pool."""
        self._servicer.enter_graceful_shutdown()
        self._pool.shutdown(wait=False)

    def check(self) -> None:
        """Looks whether the process is alive and publishes what it finds. Called by the reaper.

        An engine that was stuck and gets on again serves again: a probe that restarts the process asks too rarely to
        have seen every such moment, and would leave it NOT_SERVING forever.
        """
        statuses = health_pb2.HealthCheckResponse
        is_live = self._is_live()
        status = statuses.SERVING if is_live and self._wants_to_serve else statuses.NOT_SERVING
        for service in SERVICES:
            self._servicer.set(service, status)
        self._servicer.set(LIVENESS, statuses.SERVING if is_live else statuses.NOT_SERVING)


class _OnPool:
    """The health servicer with every method on one pool.

    gRPC looks for the pool on the function that answers. `HealthServicer` has it set for `Watch` alone, and on the
    class: for every service of the process.
    """

    def __init__(self, servicer: health.HealthServicer, pool: futures.ThreadPoolExecutor) -> None:
        self.Check = _on_pool(servicer.Check, pool)  # named as the RPCs are
        self.Watch = _on_pool(servicer.Watch, pool)
        # A watcher waits without a thread: the servicer calls back when there is something to tell.
        self.Watch.experimental_non_blocking = True


def _on_pool(answer: Callable[..., Any], pool: futures.ThreadPoolExecutor) -> Any:
    pooled: Any = functools.partial(answer)
    pooled.experimental_thread_pool = pool
    return pooled


def start_probe_server(health_service: Health, host: str, port: int) -> tuple[grpc.Server, int]:
    """Serves health alone over TCP: the kubelet's gRPC probe cannot use a Unix socket.

    Returns:
        The server and its port.
    """
    pool = futures.ThreadPoolExecutor(2, thread_name_prefix="probe")
    # Without so_reuseport 0, a port that another gRPC server has would be shared with it, silently.
    server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
    health_service.add_to(server)
    bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    server.start()
    return server, bound


def ask_health(target: str, timeout_s: float, service: str = "") -> tuple[str, str]:
    """Asks a service for `drafter-service health`.

    Args:
        target: gRPC address, or the path of a Unix socket.
        timeout_s: most time to wait.
        service: name of the health service; "" = whether it is ready.

    Returns:
        The status that it reports, by name, and ""; or the code of the failure and what gRPC says about it.
    """
    address = f"unix:{target}".replace("%", "%25") if target.startswith("/") else target
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its types leave the methods out
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            why = " ".join((error.details() or "").split())
            if error.code() is grpc.StatusCode.NOT_FOUND:
                why = f"no health service is called {service!r}"
            return error.code().name, why
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status), ""
