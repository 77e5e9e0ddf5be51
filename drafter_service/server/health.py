"""`grpc.health.v1`, on a pool of its own, so that no other call can keep a probe waiting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICES = ("", "specdraft.v1.Drafter")
WATCH_THREADS = 4


class Health:
    """What probes are told.

    Args:
        is_live: False = the process should be restarted.
    """

    def __init__(self, is_live: Callable[[], bool]) -> None:
        self._pool = futures.ThreadPoolExecutor(WATCH_THREADS, thread_name_prefix="health")
        self._servicer = health.HealthServicer(experimental_non_blocking=True, experimental_thread_pool=self._pool)
        self._is_live = is_live
        self._is_serving = False
        self.set_serving(False)

    def add_to(self, server: grpc.Server) -> None:
        """Serves health on `server` too."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def set_serving(self, is_serving: bool) -> None:
        """SERVING or NOT_SERVING."""
        self._is_serving = is_serving
        self._publish()

    def check(self) -> bool:
        """Looks whether the process is alive, publishes what it finds, and returns it. Called by the reaper."""
        if self._is_serving and not self._is_live():
            self._is_serving = False
        self._publish()
        return self._is_serving

    def close(self) -> None:
        """Ends the pool."""
        self._servicer.enter_graceful_shutdown()
        self._pool.shutdown(wait=False)

    def _publish(self) -> None:
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if self._is_serving else statuses.NOT_SERVING
        for service in SERVICES:
            self._servicer.set(service, status)


def start_probe_server(health_service: Health, host: str, port: int) -> tuple[grpc.Server, int]:
    """Serves health alone over TCP: the kubelet's gRPC probe cannot use a Unix socket.

    Returns:
        The server and its port.
    """
    server = grpc.server(futures.ThreadPoolExecutor(2, thread_name_prefix="probe"))
    health_service.add_to(server)
    bound = server.add_insecure_port(f"{host}:{port}")
    server.start()
    return server, bound


def ask_health(target: str, timeout_s: float) -> str:
    """The status that a service reports, by name, or why there is none. For `drafter-service health`."""
    with grpc.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its types leave the methods out
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return str(error.code().name)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
