"""A service that shares a simulated GPU's memory, and clients on it, in one process with different pids."""

import ctypes
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from serving import running
from specdraft import Client
from specdraft.memory import ClientGpu
from specdraft.memory.simulated import SimulatedDriver

PIDS = iter(range(1 << 22, 1 << 23))


class GpuClients:
    """Clients of one service, each with a pid and a view of the GPU of its own."""

    def __init__(self, server, directory):
        self.server = server
        self.directory = directory
        self.gpu = server.service.assembly.gpu
        self.driver = self.gpu.driver
        self._clients = []
        self._gates = []
        self.is_lost = False

    def gpu_of_client(self, **options):
        driver = SimulatedDriver(self.directory, pid=next(PIDS), **options)
        driver.make_current(0)
        self._clients.append(driver)
        return ClientGpu(driver, pid=driver.pid)

    def client(self, gpu=None, **options):
        gpu = gpu or self.gpu_of_client()
        client = Client(f"unix:{self.server.config.socket}", memory="cuda", gpu=gpu, **options)
        self._clients.append(client)
        return client

    def gate(self, driver):
        """Where a stream can wait for `open_gate`; at the latest it is opened in the end."""
        self._gates.append(driver.allocate(4096))
        return self._gates[-1]

    def forget(self, client):
        """A client that died is not closed."""
        self._clients.remove(client)

    def settle(self):
        assert self.gpu.reaper.wait_idle(10)

    def close(self):
        for gate in self._gates:
            open_gate(gate)
        for one in reversed(self._clients):
            one.close()


def open_gate(address):
    """Lets a stream go on that waits there."""
    ctypes.c_int64.from_address(address).value = 1


@contextmanager
def gpu_service(checkpoint, **changes):
    """A running service with CUDA arenas; what it leaves on the GPU fails the test."""
    with tempfile.TemporaryDirectory(prefix="sd-gpu-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        settings = {"simulated_gpu": directory, "allow_client_regions": True} | changes
        with running(checkpoint, **settings) as server:
            clients = GpuClients(server, directory)
            try:
                yield clients
            finally:
                clients.close()
        if clients.is_lost:
            clients.driver.break_device("")  # nothing could be freed; the process would have ended
            clients.driver.close()
            shutil.rmtree(directory)
            return
        assert clients.driver.num_bytes == clients.driver.num_imports == clients.driver.num_registered == 0
        clients.driver.close()
        assert not list(directory.iterdir())
