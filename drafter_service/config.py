"""The service's settings: every default once, read from flags, then the environment, then here."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

ENVIRONMENT_PREFIX = "SPECDRAFT_"

SOCKET_PATH_MAX_BYTES = 107
"""Longest path of a Unix socket (sun_path is 108 bytes with its terminator)."""

MESSAGE_BYTES_MIN = 4096
"""Nothing useful fits into less: an answer about a full batch has some kilobytes."""

WATCH_STDIN_FLAG = "--until-stdin-ends"
"""Makes `serve` end with whoever started it, for demo and benchmarks; no setting, and in no help text."""

ADMIN_SUFFIX = ".admin"
DESCRIPTOR_SUFFIX = ".fd"
MIB = 1 << 20
PORT_MAX = 65535

COUNT_MAX = (1 << 31) - 1
"""Largest count and largest message: what gRPC's options and the contract's uint32 fields hold."""

TIME_MAX_S = 1e6
"""Longest time: in milliseconds it fits into the contract's uint32 fields."""


LEVERS = ("hidden_source", "recycle", "quantization", "lm_head", "draft_vocab")
"""Settings that change what is drafted and never what a target answers: an A/B changes one of them."""

GROUPS = (
    ("head", None, ("checkpoint", "target_checkpoint", "device", "dtype", "runner")),
    ("levers", "change what is drafted, never what the target answers", LEVERS),
    ("listeners", None, ("socket", "listen", "tls_cert", "tls_key", "tls_client_ca", "insecure")),
    ("probes and log", None, ("probe_host", "metrics_port", "health_port", "log_level", "tracing")),
    ("limits", None, ("max_drafts", "max_batch", "max_seq_len", "prefill_rows", "message_bytes", "max_in_flight")),
    ("memory", None, ("page_rows", "kv_bytes", "arena_bytes", "carry_ttl_s", "carry_share")),
    (
        "GPU memory",
        "shared with targets on the same host",
        ("gpu_arena_bytes", "allow_client_regions", "max_regions", "max_lanes", "ready_timeout_s", "simulated_gpu"),
    ),
    ("sessions", None, ("lease_s", "grace_s", "drain_s", "max_sessions", "max_sequences")),
    ("threads", None, ("workers", "torch_threads")),
)
"""Settings as `serve --help` shows them: title, what the group is, and every setting once."""

_EXPECTED = {int: "expected a whole number", float: "expected a number"}
"""What Python's own parsers want; what they say themselves is for programmers."""

_DRAFT_VOCAB = re.compile(r"all|first:[0-9]+|ids:.+", re.DOTALL)


class ConfigError(ValueError):
    """A setting that cannot be used; the text is one line for the operator."""


def _setting(default: object, text: str, parse: Any = None) -> Any:
    return field(default=default, metadata={"help": text, "parse": parse})


def parse_port(text: str) -> int | None:
    """A TCP port: a number (0 = any free one), or "off" = None."""
    if text == "off":
        return None
    if not text.isdecimal():
        raise ValueError("expected the number of a port, or off")
    port = int(text)
    if port > PORT_MAX:
        raise ValueError(f"port {port} is not in 0..{PORT_MAX}")
    return port


def parse_bytes(text: str) -> int:
    """A size: a number with an optional KiB, MiB or GiB."""
    try:
        for suffix, factor in (("KiB", 1 << 10), ("MiB", MIB), ("GiB", 1 << 30)):
            if text.endswith(suffix):
                return int(float(text.removesuffix(suffix)) * factor)
        return int(text)
    except ValueError as error:
        raise ValueError("write it in bytes, or with KiB, MiB or GiB, for example 4GiB") from error


def parse_socket(text: str) -> Path:
    """A path. gRPC's own form of it would become a directory called "unix:"."""
    if text.startswith("unix:"):
        raise ValueError("write the path alone, without unix:")
    return Path(text)


def parse_listen(text: str) -> str:
    """host:port, with the host of IPv6 in brackets; empty = none."""
    if not text:
        return text
    host, found, port = text.rpartition(":")
    if not found or not host or (":" in host and not (host.startswith("[") and host.endswith("]"))):
        raise ValueError("expected host:port, for example 127.0.0.1:9000 or [::1]:9000")
    if not (port.isascii() and port.isdecimal()) or int(port) > PORT_MAX:
        raise ValueError(f"port {port!r} is not in 0..{PORT_MAX}")
    return text


def parse_bool(text: str) -> bool:
    """true or false."""
    if text.lower() not in {"true", "false", "1", "0"}:
        raise ValueError(f"{text!r} is neither true nor false")
    return text.lower() in {"true", "1"}


def parse_draft_vocab(text: str) -> str:
    """all, first:N or ids:FILE; what N and FILE are worth is found out with the checkpoint at hand."""
    if not _DRAFT_VOCAB.fullmatch(text):
        raise ValueError("expected all, first:N or ids:FILE")
    return text


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Settings of `drafter-service serve`. Times in seconds, sizes in bytes."""

    checkpoint: Path = _setting(None, "directory of the head's checkpoint", Path)
    target_checkpoint: Path | None = _setting(
        None, "directory of the target's checkpoint, for the embedding and LM head that the head does not bring", Path
    )
    socket: Path | None = _setting(Path("/run/specdraft/specdraft.sock"), "path of the Unix socket", parse_socket)
    listen: str = _setting("", "TCP address host:port to serve as well. Needs TLS, or --insecure", parse_listen)
    tls_cert: Path | None = _setting(None, "PEM certificate chain of the TCP listener", Path)
    tls_key: Path | None = _setting(None, "PEM key of the TCP listener", Path)
    tls_client_ca: Path | None = _setting(None, "PEM CA that signs clients' certificates (mutual TLS)", Path)
    insecure: bool = _setting(False, "serve TCP without TLS; inline memory only", parse_bool)
    probe_host: str = _setting("0.0.0.0", "address that metrics and health listen on", str)  # noqa: S104  # probes and scrapers come from outside the pod
    metrics_port: int | None = _setting(9464, "Prometheus port; 0 = any free one, off = none", parse_port)
    health_port: int | None = _setting(9465, "gRPC health port; 0 = any free one, off = none", parse_port)
    device: str = _setting("auto", "cpu or cuda:N; auto = the first GPU if there is one", str)
    dtype: str = _setting("auto", "float32, bfloat16, or auto = float32 on a CPU, as stored on a GPU", str)
    runner: str = _setting("auto", "eager or graph (CUDA graphs); auto = graph on a GPU, eager on a CPU", str)
    hidden_source: str = _setting("auto", "pre_norm or post_norm; auto = what the head was trained on", str)
    recycle: str = _setting("auto", "state that feeds the next draft: pre_norm or post_norm; auto = the family's", str)
    quantization: str = _setting(
        "as-stored",
        "what the projections are rounded to: as-stored, fp8 (all) or nvfp4 (all but the joining one, k and v)",
        str,
    )
    lm_head: str = _setting(
        "auto",
        "what the LM head is rounded to: as-stored, float32, bf16, fp8 or nvfp4; auto = nvfp4 on a GPU, else as-stored",
        str,
    )
    draft_vocab: str = _setting(
        "all",
        "ids that can be drafted: all, first:N or ids:FILE (one id a line); control ids always can",
        parse_draft_vocab,
    )
    max_drafts: int = _setting(8, "most drafts of one Propose entry (K_max)", int)
    max_batch: int = _setting(64, "most entries of one Propose or Catchup, and of one forward", int)
    max_seq_len: int = _setting(0, "longest sequence in tokens; the head's own limit if that is less, or with 0", int)
    prefill_rows: int = _setting(1024, "most pairs of one Catchup entry", int)
    page_rows: int = _setting(16, "rows in a KV page", int)
    kv_bytes: int = _setting(0, "KV pool, for example 4GiB; required on a GPU, 0 = 256MiB on a CPU", parse_bytes)
    arena_bytes: int = _setting(256 * MIB, "most shared memory of one session", parse_bytes)
    message_bytes: int = _setting(4 * MIB, "largest message in either direction", parse_bytes)
    gpu_arena_bytes: int = _setting(1024 * MIB, "most GPU memory of all sessions' arenas", parse_bytes)
    allow_client_regions: bool = _setting(False, "open GPU memory that clients export", parse_bool)
    max_regions: int = _setting(16, "most regions of a session", int)
    max_lanes: int = _setting(1, "most lanes of a session, released ones not counted", int)
    ready_timeout_s: float = _setting(2.0, "a lane whose verify has not ended by then is released", float)
    simulated_gpu: Path | None = _setting(
        None, "directory whose files play a GPU's memory, with --device cpu; for tests and dry runs", Path
    )
    carry_ttl_s: float = _setting(300.0, "a carry is given up after this", float)
    carry_share: float = _setting(0.5, "most of the KV pool that carries may hold before the oldest ones go", float)
    lease_s: float = _setting(30.0, "a session ends this long after its last call", float)
    grace_s: float = _setting(5.0, "... and this long after its stream broke", float)
    drain_s: float = _setting(20.0, "most time between SIGTERM and the end", float)
    max_sessions: int = _setting(64, "most sessions at once", int)
    max_sequences: int = _setting(4096, "most sequences of a session", int)
    max_in_flight: int = _setting(2, "most writes of a sequence in flight", int)
    workers: int = _setting(16, "threads for unary calls; streams have their own", int)
    torch_threads: int = _setting(0, "threads that torch uses on a CPU; 0 = torch's default", int)
    log_level: str = _setting("info", "debug, info, warning or error", str)
    tracing: bool = _setting(False, "OpenTelemetry spans of Propose; OTEL_* variables say where to", parse_bool)

    def check(self) -> None:
        """Refuses values that cannot work, by themselves or together. Raises ConfigError."""
        self._check_numbers()
        self._check_choices()
        if self.checkpoint is None:
            raise ConfigError("--checkpoint is required")
        for name in ("device", "probe_host"):
            if not getattr(self, name):
                raise ConfigError(f"--{name.replace('_', '-')} is empty")
        if self.socket is None and not self.listen:
            raise ConfigError("neither --socket nor --listen is given: nobody could call")
        if self.socket is not None:
            check_socket_path(self.socket)
        tls = (self.tls_cert, self.tls_key, self.tls_client_ca)
        if self.listen and not self.insecure and not all(tls):
            raise ConfigError("--listen needs --tls-cert, --tls-key and --tls-client-ca, or --insecure")
        if self.insecure and any(tls):
            raise ConfigError("--insecure and TLS files are both given: which is meant?")

    def _check_numbers(self) -> None:
        may_be_zero = {"max_seq_len", "kv_bytes", "torch_threads", "metrics_port", "health_port", "grace_s", "drain_s"}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if math.isnan(value):
                raise ConfigError(f"{flag_of(item)} {value} is no number")
            if value < 0 or (value == 0 and item.name not in may_be_zero):
                least = (
                    "at least 0" if item.name in may_be_zero else "at least 1" if isinstance(value, int) else "above 0"
                )
                raise ConfigError(f"{flag_of(item)} {value} is too small; {least}")
            limit = TIME_MAX_S if isinstance(value, float) else COUNT_MAX
            limit = 1 if item.name == "carry_share" else limit
            if item.name not in {"kv_bytes", "arena_bytes", "gpu_arena_bytes"} and not value <= limit:
                raise ConfigError(f"{flag_of(item)} {value} is too large; at most {limit:.0f}")

        if self.message_bytes < MESSAGE_BYTES_MIN:
            raise ConfigError(f"--message-bytes {self.message_bytes} is too small; at least {MESSAGE_BYTES_MIN}")

    def _check_choices(self) -> None:
        choices = {
            "dtype": ("auto", "float32", "bfloat16"),
            "runner": ("auto", "eager", "graph"),
            "hidden_source": ("auto", "pre_norm", "post_norm"),
            "recycle": ("auto", "pre_norm", "post_norm"),
            "quantization": ("as-stored", "fp8", "nvfp4"),
            "lm_head": ("auto", "as-stored", "float32", "bf16", "fp8", "nvfp4"),
            "log_level": ("debug", "info", "warning", "error"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"--{name.replace('_', '-')} {value!r} is none of {', '.join(allowed)}")


def check_socket_path(path: Path) -> None:
    """Refuses a path that the kernel could not bind, the longest of its neighbours counted. Raises ConfigError."""
    longest = len(str(path).encode()) + max(len(ADMIN_SUFFIX), len(DESCRIPTOR_SUFFIX))
    if longest > SOCKET_PATH_MAX_BYTES:
        raise ConfigError(
            f"--socket {path} is too long: with {ADMIN_SUFFIX} it has {longest} bytes, and a Unix socket's path has at "
            f"most {SOCKET_PATH_MAX_BYTES}"
        )


def flag_of(item: Field[Any]) -> str:
    """A setting's flag."""
    return "--" + item.name.replace("_", "-")


def environment_of(item: Field[Any]) -> str:
    """A setting's environment variable."""
    return ENVIRONMENT_PREFIX + item.name.upper()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds one flag a setting, in groups."""
    groups: dict[str, argparse._ArgumentGroup] = {}  # argparse has no other name for it
    for title, text, names in GROUPS:
        groups |= dict.fromkeys(names, parser.add_argument_group(title, text))
    for item in fields(ServiceConfig):
        place = groups[item.name]
        text = f"{item.metadata['help']} ({_default_of(item)}; ${environment_of(item)})"
        if item.metadata["parse"] is parse_bool:
            place.add_argument(flag_of(item), nargs="?", const="true", metavar="BOOL", help=text)
        else:
            place.add_argument(flag_of(item), metavar=item.name.upper(), help=text)


def _default_of(item: Field[Any]) -> str:
    if item.name == "checkpoint":
        return "required"
    if item.metadata["parse"] is parse_bytes and isinstance(item.default, int) and item.default:
        return f"default {item.default / MIB:g}MiB"
    return "unset" if item.default in {None, ""} else f"default {item.default}"


def read_config(flags: argparse.Namespace, environment: Mapping[str, str]) -> ServiceConfig:
    """Flags first, then the environment, then the defaults; checked. Raises ConfigError."""
    values: dict[str, object] = {}
    for item in fields(ServiceConfig):
        given = getattr(flags, item.name, None)
        source = flag_of(item)
        if given is None:
            given, source = environment.get(environment_of(item)), environment_of(item)
        if given is None:
            assert item.default is not MISSING, "every setting has a default"
            continue
        try:
            values[item.name] = _parsed(item, given)
        except (ValueError, OverflowError) as error:
            why = _EXPECTED.get(item.metadata["parse"], error)
            raise ConfigError(f"{source} {given!r} cannot be used: {why}") from error
    config = ServiceConfig(**values)  # type: ignore[arg-type]  # each value went through its own parser
    config.check()
    return config


def _parsed(item: Field[Any], text: str) -> object:
    parse = item.metadata["parse"]
    # Paths alone can be unset; anything else that is empty is a mistake for its parser to find.
    return None if text == "" and parse in {Path, parse_socket} else parse(text)


def flags_for(config: ServiceConfig) -> Sequence[str]:
    """The command line that makes this configuration; what differs from the defaults only."""
    flags: list[str] = []
    for item in fields(config):
        value = getattr(config, item.name)
        if value != item.default:
            text = (
                "off" if value is None and item.metadata["parse"] is parse_port else "" if value is None else str(value)
            )
            flags += [flag_of(item), text]
    return flags
