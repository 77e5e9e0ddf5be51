"""What runs and when. One thread owns the device and the books; everything else hands it calls."""

from drafter_service.engine.engine import Engine, draining
from drafter_service.engine.ledger import HeadIdentity, Ledger
from drafter_service.engine.scheduler import Scheduler

__all__ = ["Engine", "HeadIdentity", "Ledger", "Scheduler", "draining"]
