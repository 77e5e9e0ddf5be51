"""Where the service listens: who owns the Unix socket, with which permissions, and TCP with or without TLS."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

import grpc

from drafter_service.config import ADMIN_SUFFIX, DESCRIPTOR_SUFFIX, ConfigError, ServiceConfig

SOCKET_MODE = 0o660
DIRECTORY_MODE = 0o750
LOCK_SUFFIX = ".lock"

BIND_TEXT = "gRPC does not say why"
"""Where binding alone goes well."""


class SocketOwnership:
    """This process's claim on a socket path, held as a lock on a file beside it.

    Args:
        path: of the socket. A stale socket file there is removed, its neighbours too.

    Raises:
        ConfigError: a live server owns it, or it is no socket, or its directory cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_path = Path(f"{path}{LOCK_SUFFIX}")
        try:
            path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            self._lock = self._claim()
        except BlockingIOError as error:
            raise ConfigError(f"--socket {path}: a live server owns it") from error
        except OSError as error:
            raise ConfigError(f"--socket {path}: {error.strerror}") from error
        try:
            self._remove_stale()
        except (ConfigError, OSError) as error:
            self._give_up()
            raise (
                error if isinstance(error, ConfigError) else ConfigError(f"--socket {path}: {error.strerror}")
            ) from error

    def close(self) -> None:
        """Removes the socket files and gives up the claim."""
        for path in self._paths():
            path.unlink(missing_ok=True)
        self._give_up()

    def _claim(self) -> int:
        """The locked lock file. Raises BlockingIOError if somebody else has it, OSError if there can be none."""
        while True:
            lock = os.open(self._lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The owner before removes its lock file: what was opened just before that is nobody's lock any more.
                if _is_at(lock, self._lock_path):
                    return lock
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def _give_up(self) -> None:
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def _paths(self) -> list[Path]:
        return [self.path, Path(f"{self.path}{DESCRIPTOR_SUFFIX}"), Path(f"{self.path}{ADMIN_SUFFIX}")]

    def _remove_stale(self) -> None:
        for path in self._paths():
            if not path.exists() and not path.is_symlink():
                continue
            if not path.is_socket():
                raise ConfigError(f"--socket {path}: something that is no socket is there")
            if _answers(path):
                raise ConfigError(f"--socket {path}: a live server owns it")
            path.unlink()


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.errno not in {errno.ECONNREFUSED, errno.ENOENT}
    return True


def bind_unix(server: grpc.Server, path: Path) -> None:
    """Binds a Unix socket that only owner and group may open, from its first moment on. Raises ConfigError."""
    mask = os.umask(0o777 & ~SOCKET_MODE)
    try:
        # The address is a URI: what follows a % would be read as a code.
        server.add_insecure_port(f"unix:{path}".replace("%", "%25"))
    except RuntimeError as error:
        raise ConfigError(f"--socket {path} cannot be bound") from error
    finally:
        os.umask(mask)


def why_unbindable(host: str, port: int) -> str:
    """Why a TCP address cannot be listened on, found out with a plain socket: gRPC does not tell reasons apart."""
    try:
        places = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in places:
            with socket.socket(family, kind, protocol) as probe:
                # As servers do: connections that have just ended must not count.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "that is no host name"
    return ""


def bind_tcp(server: grpc.Server, config: ServiceConfig) -> int:
    """Binds the TCP listener and returns its port. Raises ConfigError."""
    try:
        if config.insecure:
            return server.add_insecure_port(config.listen)
        assert config.tls_key, "checked by the configuration"
        assert config.tls_cert, "checked by the configuration"
        assert config.tls_client_ca, "checked by the configuration"
        credentials = grpc.ssl_server_credentials(
            [(_read_pem("--tls-key", config.tls_key), _read_pem("--tls-cert", config.tls_cert))],
            root_certificates=_read_pem("--tls-client-ca", config.tls_client_ca),
            require_client_auth=True,
        )
        return server.add_secure_port(config.listen, credentials)
    except RuntimeError as error:
        raise ConfigError(f"--listen {config.listen} cannot be bound: {_why_not(config)}") from error


def _read_pem(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error


def _why_not(config: ServiceConfig) -> str:
    host, _, port = config.listen.rpartition(":")
    if why := why_unbindable(host, int(port)):
        return why
    if config.insecure:
        return BIND_TEXT
    return (
        f"{config.tls_cert}, {config.tls_key} or {config.tls_client_ca} is no PEM file of its kind, or they do not fit"
    )
