"""The drafting half of speculative decoding, as a gRPC service."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("drafter-service")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"
