"""One line an event on standard error. Tokens, handles and keys are never logged."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def set_up_logging(level: str) -> None:
    """Sends the service's log to standard error.

    Args:
        level: debug, info, warning or error.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    logger = logging.getLogger("drafter_service")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
