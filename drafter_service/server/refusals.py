"""Errors that several parts of the border raise."""

from __future__ import annotations

from collections.abc import Mapping

from specdraft.errors import Reason, SpecdraftError, make_error

TEXT_MAX_BYTES = 512
"""Longest text and longest figure of a refusal: a caller's own words come back in it, and metadata holds 8 KiB, where a
byte of a text may take three."""


def invalid_field(name: str, value: object, expected: str) -> SpecdraftError:
    """INVALID_FIELD."""
    text = f"{name} is {value}; expected {expected}"
    return make_error(Reason.INVALID_FIELD, text, field=name, value=value, expected=expected)


def not_implemented(name: str) -> SpecdraftError:
    """NOT_IMPLEMENTED, by name."""
    return make_error(Reason.NOT_IMPLEMENTED, f"{name} is in the contract and not in this build", name=name)


def shortened(text: str) -> str:
    """A text that fits into a refusal."""
    whole = text.encode()
    return text if len(whole) <= TEXT_MAX_BYTES else f"{whole[: TEXT_MAX_BYTES - 3].decode(errors='ignore')}..."


def shortened_details(error: SpecdraftError) -> Mapping[str, str]:
    """The figures of a refusal, each short enough."""
    return {name: shortened(value) for name, value in error.details.items()}
