"""Statuses become the exceptions of errors.py, for whole calls and for single entries."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from fake_service import FakeService, entry_status, status_of
from specdraft import Client, Code, Reason, SpecdraftError
from specdraft.errors import REASON_CODES, make_error
from specdraft.statuses import error_of_call, error_of_entry, is_uncertain
from specdraft.v1 import drafter_pb2


class FailedCall(grpc.RpcError):
    """What gRPC raises, without a connection."""

    def __init__(self, code, details, trailers=()):
        super().__init__()
        self._code, self._details, self._trailers = code, details, trailers

    def code(self):
        return self._code

    def details(self):
        return self._details

    def trailing_metadata(self):
        return self._trailers


def failed(status):
    return FailedCall(status.code, status.details, status.trailing_metadata)


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_of_a_call_comes_back_as_its_exception(reason):
    sent = make_error(reason, "why", retry_delay_ms=1500, field="x", limit=3)
    error = error_of_call(failed(status_of(sent)))
    assert type(error) is type(sent)
    assert error.code is REASON_CODES[reason]
    assert (error.reason, error.message, error.retry_delay_ms) == (reason, "why", 1500)
    assert dict(error.details) == {"field": "x", "limit": "3"}


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_of_an_entry_comes_back_as_its_exception(reason):
    sent = make_error(reason, "why", retry_delay_ms=20, field="x")
    error = error_of_entry(entry_status(sent))
    assert type(error) is type(sent)
    assert (error.reason, error.message, error.retry_delay_ms) == (reason, "why", 20)
    assert dict(error.details) == {"field": "x"}


@pytest.mark.parametrize("reason", list(Reason))
@pytest.mark.parametrize("has_drive", [True, False])
def test_every_reason_travels(reason, has_drive, services):
    service, client = services[has_drive]
    sequence = client.open_sequence()
    service.faults["Truncate"] = [make_error(reason, "why", limit=3)]
    if reason in {Reason.OP_REUSED, Reason.OP_OUT_OF_ORDER}:
        service.faults["Truncate"] *= 2  # the first one corrects the counter
    with pytest.raises(SpecdraftError) as caught:
        sequence.truncate(0)
    service.faults.clear()
    assert type(caught.value) is type(make_error(reason, ""))
    assert caught.value.reason is reason
    assert caught.value.details["limit"] == "3"


@pytest.fixture(scope="module")
def services(tmp_path_factory):
    with (
        FakeService(tmp_path_factory.mktemp("a")) as driven,
        FakeService(tmp_path_factory.mktemp("b"), has_drive=False) as unary,
        Client(driven.target) as driving,
        Client(unary.target) as calling,
    ):
        yield {True: (driven, driving), False: (unary, calling)}


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_statuses_that_grpc_makes_have_no_reason(status):
    error = error_of_call(FailedCall(status, "text"))
    assert error.code == Code(status.value[0])
    assert error.reason is None
    assert error.message == "text"


def test_a_foreign_domain_gives_no_reason():
    status = status_pb2.Status(code=3, message="text")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="INVALID_FIELD", domain="elsewhere.example"))
    assert error_of_call(failed(rpc_status.to_status(status))).reason is None


def test_a_reason_of_a_later_version_keeps_class_and_details():
    status = status_pb2.Status(code=9, message="text")
    info = error_details_pb2.ErrorInfo(reason="FROM_THE_FUTURE", domain="specdraft", metadata={"a": "b"})
    status.details.add().Pack(info)
    error = error_of_call(failed(rpc_status.to_status(status)))
    assert (error.code, error.reason, dict(error.details)) == (Code.FAILED_PRECONDITION, None, {"a": "b"})
    entry = error_of_entry(drafter_pb2.EntryStatus(code=9, reason=9999, message="text"))
    assert (entry.code, entry.reason) == (Code.FAILED_PRECONDITION, None)


def test_details_that_do_not_parse_or_disagree_leave_the_status():
    trailers = (("grpc-status-details-bin", b"\xff\xff\xff"),)
    assert error_of_call(FailedCall(grpc.StatusCode.NOT_FOUND, "text", trailers)).code is Code.NOT_FOUND
    other = (("grpc-status-details-bin", status_pb2.Status(code=3, message="x").SerializeToString()),)
    assert error_of_call(FailedCall(grpc.StatusCode.NOT_FOUND, "text", other)).code is Code.NOT_FOUND


def test_ok_is_no_error():
    assert error_of_entry(drafter_pb2.EntryStatus()) is None


def test_what_may_have_been_done_is_uncertain():
    assert is_uncertain(make_error(Reason.TIMEOUT, ""))
    assert is_uncertain(make_error(Reason.DEVICE_LOST, ""))
    assert not is_uncertain(make_error(Reason.MISSING_ROWS, ""))
