"""The service's face: the only package that knows gRPC and messages."""

from drafter_service.server.app import Addresses, Service
from drafter_service.server.health import ask_health

__all__ = ["Addresses", "Service", "ask_health"]
