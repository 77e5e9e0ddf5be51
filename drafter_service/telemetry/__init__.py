"""What is counted, logged and traced. Instruments are passed to whoever counts."""

from drafter_service.telemetry.logging import set_up_logging
from drafter_service.telemetry.metrics import Metrics
from drafter_service.telemetry.tracing import Tracing

__all__ = ["Metrics", "Tracing", "set_up_logging"]
