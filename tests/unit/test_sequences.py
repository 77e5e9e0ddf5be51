"""Operation numbers, and what a round's acceptance is told by."""

from __future__ import annotations

import pytest

from drafter_service.state import Round, Sequence
from specdraft.errors import AbortedError, InvalidArgumentError, Reason


def sequence(last_op: int = 0, digest: bytes = b"") -> Sequence:
    made = Sequence(b"q", b"s", b"o", max_keys=10)
    made.last_op, made.last_digest = last_op, digest
    return made


def test_the_next_number_is_new_and_the_last_one_a_retry() -> None:
    assert not sequence(0).is_replay(1, b"x")
    assert not sequence(4, b"x").is_replay(5, b"y")
    assert sequence(4, b"x").is_replay(4, b"x")


def test_the_last_number_with_another_request_is_refused() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        sequence(4, b"x").is_replay(4, b"y")
    assert caught.value.reason is Reason.OP_REUSED


@pytest.mark.parametrize("op", [0, 2, 3, 6, 100])
def test_any_other_number_is_refused_with_what_is_needed_to_go_on(op: int) -> None:
    with pytest.raises(AbortedError) as caught:
        sequence(4, b"x").is_replay(op, b"x")
    assert caught.value.reason is Reason.OP_OUT_OF_ORDER
    assert caught.value.details["last_op"] == "4"
    assert caught.value.details["last_pair_key"] == "-1"


@pytest.mark.parametrize(
    ("first_key", "tokens", "declared", "accepted"),
    [
        (8, (9,), None, 0),  # only the bonus token
        (8, (1, 9), None, 1),
        (8, (1, 2, 9), None, 2),
        (8, (1, 2, 3, 9), None, 3),
        (8, (1,), None, 0),  # the bonus token equals the first draft: a coincidence, no acceptance
        (8, (1, 2), None, 1),
        (8, (5, 2, 3), None, 0),  # accepted is a prefix
        (8, (9,), 2, 2),  # the client knows better
        (8, (9,), 7, 3),  # ... within what was drafted
        (7, (1, 2), None, None),  # rewound below P: nobody can tell
        (9, (2,), None, None),
        (3, (1,), 1, 1),
    ],
)
def test_acceptance_is_declared_or_the_common_prefix_without_the_bonus(
    first_key: int, tokens: tuple[int, ...], declared: int | None, accepted: int | None
) -> None:
    assert Round(8, (1, 2, 3)).accepted(first_key, tokens, declared) == accepted
