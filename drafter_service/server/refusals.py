"""Errors that several parts of the border raise."""

from __future__ import annotations

from specdraft.errors import Reason, SpecdraftError, make_error


def invalid_field(name: str, value: object, expected: str) -> SpecdraftError:
    """INVALID_FIELD."""
    text = f"{name} is {value}; expected {expected}"
    return make_error(Reason.INVALID_FIELD, text, field=name, value=value, expected=expected)


def not_implemented(name: str) -> SpecdraftError:
    """NOT_IMPLEMENTED, by name."""
    return make_error(Reason.NOT_IMPLEMENTED, f"{name} is in the contract and not in this build", name=name)
