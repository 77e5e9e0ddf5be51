"""What an operator does to a running service, on a socket of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from drafter_service.server.facts import RUNNERS
from drafter_service.server.refusals import invalid_field, not_implemented
from drafter_service.state import Session
from specdraft.errors import Reason, make_error
from specdraft.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from drafter_service.server.assembly import Assembly


class Administered(Protocol):
    """The service, as far as an operator can reach it."""

    @property
    def assembly(self) -> Assembly | None:
        """The parts; None while they are being loaded."""

    def refuse_sessions(self) -> None:
        """Turns health to NOT_SERVING and refuses new sessions."""


class AdminServicer(admin_pb2_grpc.DrafterAdminServicer):
    """Implements `specdraft.v1.DrafterAdmin`.

    Args:
        service: what is administered.
        clock: monotonic seconds.
    """

    def __init__(self, service: Administered, clock: Callable[[], float]) -> None:
        self._service = service
        self._clock = clock

    def SetRunner(self, request: admin_pb2.SetRunnerRequest, context: grpc.ServicerContext) -> Any:
        """`SetRunner`."""
        del context
        kind = {number: kind for kind, number in RUNNERS.items()}.get(request.runner)
        if kind is None:
            raise invalid_field("runner", request.runner, "EAGER or GRAPH")
        switch = self._assembly().switch
        if kind not in switch.kinds:
            raise not_implemented("SetRunner to GRAPH without a GPU")
        return admin_pb2.SetRunnerResponse(previous=RUNNERS[switch.use(kind)])

    def ListSessions(self, request: admin_pb2.ListSessionsRequest, context: grpc.ServicerContext) -> Any:
        """`ListSessions`."""
        del request, context
        assembly = self._assembly()
        return admin_pb2.ListSessionsResponse(
            sessions=[self._listed(assembly, session) for session in assembly.sessions.listed()]
        )

    def Drain(self, request: admin_pb2.DrainRequest, context: grpc.ServicerContext) -> Any:
        """`Drain`."""
        del request, context
        assembly = self._assembly()
        self._service.refuse_sessions()
        return admin_pb2.DrainResponse(session_count=len(assembly.sessions))

    def _assembly(self) -> Assembly:
        if self._service.assembly is None:
            raise make_error(Reason.STARTING, "the head is still being loaded", retry_delay_ms=1000)
        return self._service.assembly

    def _listed(self, assembly: Assembly, session: Session) -> admin_pb2.SessionInfo:
        now = self._clock()
        return admin_pb2.SessionInfo(
            session_id=session.session_id,
            client_name=session.agreement.client_name,
            sequence_count=assembly.engine.ledger.sequences.count(session.session_id),
            age_ms=int((now - session.opened_at) * 1000),
            lease_left_ms=max(int((session.expires_at - now) * 1000), 0),
            driving=session.drive is not None,
        )
