"""The service that a case runs against."""

import threading
from contextlib import ExitStack
from unittest import mock

from drafter_service.server import assembly
from serving import Running, temporary_directory, tiny_config


class Place:
    """A server of its own, on a socket that stays the same over restarts.

    Args:
        checkpoint: its head.
        settings: of the service, and `starting`.
        gpu: what clients are told of the GPU whose memory they share.
    """

    def __init__(self, checkpoint, settings, gpu=None):
        self.gpu = gpu or {}
        self._stack = ExitStack()
        settings = dict(settings)
        is_starting = settings.pop("starting", False)
        self.directory = self._stack.enter_context(temporary_directory())
        self.config = tiny_config(checkpoint, self.directory, **settings)
        self.server = None
        if is_starting:
            self._start_loading()
        else:
            self.server = Running(self.config)

    def _start_loading(self):
        """Begins to serve, and loads the head once it is told to."""
        go_on, real, listening = threading.Event(), assembly.assemble, threading.Event()

        def assemble(*arguments):
            listening.set()
            assert go_on.wait(60)
            return real(*arguments)

        def start():
            with mock.patch.object(assembly, "assemble", assemble):
                self.server = Running(self.config)

        starter = threading.Thread(target=start)
        starter.start()
        assert listening.wait(60)
        self.load = lambda: (go_on.set(), starter.join(60))

    def restart(self):
        self.server.close()
        self.server = Running(self.config)

    def close(self):
        self.server.close()
        self._stack.close()
