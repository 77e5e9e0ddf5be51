"""Answers against what a case expects of them."""

from specdraft.errors import REASON_CODES, Reason

STATE_FIELDS = ("last_op", "row_count", "last_pair_key", "ranges", "first_approximate_key")


def at(answer, path):
    for part in path.split("."):
        answer = answer[int(part)] if isinstance(answer, list) else answer[part]
    return answer


def check_answer(answer, expect, settle):
    """Compares an answer with what a case expects of it; one without an expectation has to be OK."""
    expect = dict(expect or {})
    wanted = expect.pop("error", None)
    if wanted is not None:
        assert "error" in answer, f"{wanted} was expected: {answer}"
        check_error(answer["error"], wanted, expect)
        return
    assert "ok" in answer, answer["error"]
    found = answer["ok"]
    if "results" in expect:
        settle(found, expect.pop("results"))
    else:
        settle(found)
    state = found.get("state", found)
    for name, value in expect.items():
        if name in STATE_FIELDS:
            assert state[name] == value, (name, state)
        elif name == "drafts":
            assert len(found["drafts"]) == value, found
        elif name == "stop":
            assert found["stop_reason"] == value, found
        else:
            assert at(found, name) == value, (name, found)


def check_error(error, wanted, expect):
    choices = wanted if isinstance(wanted, list) else [wanted]
    said = error.get("reason") or error["code"]
    assert said in choices, f"{wanted} was expected: {error}"
    if error.get("reason"):
        assert error["code"] == REASON_CODES[Reason(said)].name, error
    for name, value in expect.pop("details", {}).items():
        assert error["details"][name] == str(value), error
    if expect.pop("retry", False):
        assert error["retry_delay_ms"] > 0, error
    assert not expect, f"an error has none of {sorted(expect)}"
