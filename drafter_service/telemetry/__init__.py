"""What is counted and what is logged. Instruments are passed to whoever counts."""

from drafter_service.telemetry.logging import set_up_logging
from drafter_service.telemetry.metrics import Metrics

__all__ = ["Metrics", "set_up_logging"]
