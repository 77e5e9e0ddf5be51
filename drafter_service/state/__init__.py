"""What is remembered: pages, rows, sequences, carries, sessions. Knows neither heads nor messages."""

from drafter_service.state.advice import Advice
from drafter_service.state.carries import Carry, CarryTable
from drafter_service.state.pages import PageAllocator, PagesExhausted
from drafter_service.state.rows import KeySpan, Rows
from drafter_service.state.sequences import Round, Sequence, SequenceTable, SequenceView
from drafter_service.state.sessions import Agreement, Session, SessionTable

__all__ = [
    "Advice",
    "Agreement",
    "Carry",
    "CarryTable",
    "KeySpan",
    "PageAllocator",
    "PagesExhausted",
    "Round",
    "Rows",
    "Sequence",
    "SequenceTable",
    "SequenceView",
    "Session",
    "SessionTable",
]
