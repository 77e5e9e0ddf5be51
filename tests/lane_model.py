"""A lane in a world where everything that can happen does: the real state machines, all interleavings.

The world is a value. `World.steps` yields every event that can come next, so that a search over it sees each order of
them: two hosts, two streams, a network that loses, delays, doubles and reorders, timeouts at any moment, deaths.
The streams are played, the decisions are the product's own: `ClientLane`, `ServiceLane`, `may_run`.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from drafter_service.memory.lane_protocol import ServiceLane, Verdict, may_run
from specdraft.memory.lane_protocol import RELEASED, ClientLane

FENCED = 44
NEVER = float("inf")


class LaneWorld(NamedTuple):
    """One lane: both books, both streams, the page, what is under way."""

    client: ClientLane = ClientLane()
    service: ServiceLane = ServiceLane()
    client_stream: tuple = ()
    service_stream: tuple = ()
    ready: int = 0
    done: int = 0
    is_fenced: bool = False  # the service's own, set before a release is stored
    slot: tuple = (0, 0)  # op, status
    verified: int = 0  # newest ticket whose verify has really ended
    found: frozenset = frozenset()  # tickets whose outputs, done, the client's stream met in the slot
    refusable: frozenset = frozenset()  # accepted, not launched: may still turn out to be refused
    requests: frozenset = frozenset()
    answers: frozenset = frozenset()
    pages_returned: bool = False


class World(NamedTuple):
    """Lanes of one session, and how much may still go wrong."""

    lanes: tuple
    num_tickets: int
    losses: int
    doubles: int
    refusals: int
    waits: int
    client_lives: bool = True
    service_lives: bool = True
    may_die: bool = True
    calls_time_out: bool = True
    may_hang: bool = False
    hangs: bool = False  # the client's stream does nothing any more, and its process lives on
    session_over: bool = False

    def steps(self):
        """(name, world) of everything that can happen next."""
        for index, lane in enumerate(self.lanes):
            yield from self._lane_steps(index, lane)
        if self.may_die:
            if self.client_lives:
                lanes = tuple(lane._replace(client_stream=(), answers=frozenset()) for lane in self.lanes)
                yield "client dies", self._replace(client_lives=False, may_die=False, lanes=lanes)
            if self.service_lives:
                lanes = tuple(lane._replace(service_stream=(), requests=frozenset()) for lane in self.lanes)
                yield "service dies", self._replace(service_lives=False, may_die=False, lanes=lanes)
        if self.may_hang and self.client_lives:
            yield "verify hangs", self._replace(may_hang=False, hangs=True)
        if self.service_lives and not self.client_lives and not self.session_over:
            lanes = tuple(fenced(lane) for lane in self.lanes)
            yield "lease ends", self._replace(session_over=True, lanes=lanes)

    def _lane_steps(self, index, lane):
        put = partial(self._put, index)
        for name, changed, *others in self._host_steps(lane):
            yield f"{index} {name}", put(changed, *others)
        for ticket in lane.requests:
            if self.service_lives:
                arrived = deliver(lane, ticket)
                yield f"{index} request {ticket} arrives", put(arrived)
                if self.doubles:
                    again = arrived._replace(requests=arrived.requests | {ticket})
                    yield f"{index} request {ticket} comes twice", put(again)._replace(doubles=self.doubles - 1)
            if self.losses:
                lost = lane._replace(requests=lane.requests - {ticket})
                yield f"{index} request {ticket} is lost", put(lost)._replace(losses=self.losses - 1)
        for ticket, is_ok in lane.answers if self.client_lives else ():
            client = lane.client.answered(ticket, is_ok=is_ok)
            told = lane._replace(answers=lane.answers - {(ticket, is_ok)}, client=client)
            yield f"{index} answer {ticket} arrives", put(told)

    def _host_steps(self, lane):
        if self.client_lives:
            yield from client_steps(lane, self)
            if lane.client_stream and not self.hangs:
                yield from play_client(lane)
        if self.service_lives:
            room = sum(one.service.num_open_waits(one.ready) for one in self.lanes) < self.waits
            yield from service_steps(lane, room, self.session_over)
            for ticket in lane.refusable if self.refusals else ():
                yield f"refuse {ticket}", refuse(lane, ticket), self.refusals - 1

    def _put(self, index, lane, refusals=None):
        lanes = (*self.lanes[:index], lane, *self.lanes[index + 1 :])
        return self._replace(lanes=lanes, refusals=self.refusals if refusals is None else refusals)


def refuse(lane, ticket):
    return lane._replace(
        service=lane.service.refused(ticket),
        refusable=lane.refusable - {ticket},
        answers=lane.answers | {(ticket, False)},
    )


def deliver(lane, ticket):
    service, verdict = lane.service.taken(ticket, 0.0)
    lane = lane._replace(service=service, requests=lane.requests - {ticket})
    if verdict is Verdict.ACCEPTED:
        return lane._replace(refusable=lane.refusable | {ticket})
    return lane._replace(answers=lane.answers | {(ticket, False)})


def fenced(lane):
    """The service gives the lane up: fence first, stores by the watchdog later."""
    service, dropped = lane.service.released()
    answers = lane.answers | {(ticket, False) for ticket in dropped if ticket in lane.refusable}
    return lane._replace(service=service, is_fenced=True, refusable=frozenset(), answers=answers)


def client_steps(lane, world):
    client = lane.client
    if not client.is_released and client.last < world.num_tickets:
        issued = client.issued()
        ticket = issued.last
        stream = (*lane.client_stream, ("ready", ticket), ("wait", ticket), ("consume", ticket))
        yield f"issue {ticket}", lane._replace(client=issued, client_stream=stream, requests=lane.requests | {ticket})
    for ticket in (
        client.open if world.calls_time_out else ()
    ):  # a timeout, or the stream broke: also where the answer is only late
        yield f"call {ticket} ends", lane._replace(client=client.ended(ticket))
    if not world.service_lives and not client.is_released:
        yield "stream breaks", lane._replace(client=client.released())
    if lane.done == RELEASED and not client.is_released:
        yield "client sees the release", lane._replace(client=client.released())
    if client.is_released and lane.client_stream and lane.done != RELEASED:
        yield "client stores", lane._replace(done=RELEASED)
    if client.is_released and not lane.client_stream and lane.ready != RELEASED:
        yield "client tells", lane._replace(ready=RELEASED)  # only now: nothing of its stream overwrites it


def play_client(lane):
    (kind, ticket), rest = lane.client_stream[0], lane.client_stream[1:]
    if kind == "ready":
        yield f"ready {ticket}", lane._replace(client_stream=rest, ready=ticket, verified=ticket)
    elif kind == "wait" and lane.done >= ticket:
        yield f"waited for done {ticket}", lane._replace(client_stream=rest)
    elif kind == "consume":
        found = lane.found | {ticket} if lane.slot == (ticket, 0) else lane.found
        yield f"consume {ticket}", lane._replace(client_stream=rest, found=found)


def service_steps(lane, has_room, session_over):
    service = lane.service
    launch = service.next_launch(lane.ready, has_room=has_room)
    if launch is not None:
        yield f"launch {launch.ticket}", launched(lane, launch)
    if lane.ready == RELEASED and not service.is_released:
        yield "service is told", fenced(lane)
    if service.is_overdue(lane.ready, NEVER):
        yield "ready times out", fenced(lane)
    if service.is_released and not service.is_settled:
        stored = lane._replace(ready=RELEASED, done=RELEASED)
        if service.is_drained:
            yield "last store", stored._replace(service=service.settled())
        elif stored != lane:
            yield "service stores", stored
    if session_over and service.is_drained and not lane.pages_returned:
        yield "reap", lane._replace(pages_returned=True)
    if lane.service_stream:
        yield from play_service(lane)


def launched(lane, launch):
    ticket = launch.ticket
    work = () if launch.is_refused else (("wait", ticket), ("kernel", ticket))
    stream = (*lane.service_stream, *work, ("done", ticket))
    answers = lane.answers if launch.is_refused else lane.answers | {(ticket, True)}
    return lane._replace(
        service=lane.service.launched(ticket),
        service_stream=stream,
        refusable=lane.refusable - {ticket},
        answers=answers,
    )


def play_service(lane):
    (kind, ticket), rest = lane.service_stream[0], lane.service_stream[1:]
    lane = lane._replace(service_stream=rest)
    if kind == "wait":
        if lane.ready >= ticket:
            yield f"waited for ready {ticket}", lane
    elif kind == "kernel":
        if may_run(is_fenced=lane.is_fenced, ready=lane.ready, ticket=ticket):
            yield f"kernel {ticket}", lane._replace(slot=(ticket, 0))
        else:
            yield f"fenced kernel {ticket}", lane._replace(slot=(ticket, FENCED))
    else:  # the service's own counter, written behind `done`, tells its watchdog
        yield f"done {ticket}", lane._replace(done=ticket, service=lane.service.passed(ticket))


def believed(lane):
    """Tickets whose outputs the client takes for theirs."""
    client = lane.client
    return frozenset(t for t in lane.found & client.accepted if client.trusts(op=t, expected_op=t, status=0))


def broken_rules(before, after):
    """The rules that one step breaks; empty = none."""
    for old, new in zip(before.lanes, after.lanes, strict=True):
        for rule, holds in rules(old, new).items():
            if not holds:
                yield rule
    waits = sum(lane.service.num_open_waits(lane.ready) for lane in after.lanes)
    if after.service_lives and waits > after.waits:
        yield "more waits are open than may be"


def rules(old, new):
    wrote = new.slot != old.slot and new.slot[1] == 0
    queue = [one.ticket for one in new.service.queue]
    is_used = new.service.last != old.service.last or len(new.service_stream) > len(old.service_stream)
    touches = any(kind == "kernel" for kind, _ in new.service_stream)
    return {
        "a round of a released lane wrote rows": not (wrote and old.is_fenced),
        "a round ran before its verify had ended": not wrote or new.slot[0] <= old.verified,
        "a released lane was used again": not (old.service.is_released and is_used),
        "a released lane gave a ticket": not (old.client.is_released and new.client.last != old.client.last),
        "a round of a released lane is believed": not (new.client.is_released and believed(new)),
        "done went back": new.done >= old.done or old.done == RELEASED,
        "pages returned while the device may touch them": not (new.pages_returned and touches),
        "tickets are out of order": queue == sorted(set(queue)),
    }


def stuck(world):
    """What is still waited for in a world in which nothing can happen any more; empty = nothing."""
    for lane in world.lanes:
        if world.client_lives and not world.hangs and any(kind == "wait" for kind, _ in lane.client_stream):
            yield "the client waits for ever"
        if world.service_lives and lane.service_stream:
            yield "the service waits for ever"
        if world.service_lives and world.session_over and not lane.pages_returned:
            yield "pages never return"
        if world.service_lives and world.client_lives and any(lane.refusable):
            yield "an accepted round is neither run nor refused"


@dataclass
class Search:
    """All worlds that can be reached."""

    faults: list = field(default_factory=list)
    num_worlds: int = 0
    num_ends: int = 0
    names: set = field(default_factory=set)
    believed: set = field(default_factory=set)


def explore(start, *, stop_at_fault=False):
    """Visits every reachable world; every rule is checked on every step, and every world must be able to end well."""
    search = Search()
    seen = {start: 0}
    befores = [[]]
    waiting = deque([start])
    ends = []
    while waiting and not (stop_at_fault and search.faults):
        world = waiting.popleft()
        number = seen[world]
        is_end = True
        for name, after in world.steps():
            if after == world:
                continue
            is_end = False
            search.names.add(name.lstrip("0123456789 "))
            search.faults += [(rule, name, world) for rule in broken_rules(world, after)]
            if after not in seen:
                seen[after] = len(seen)
                befores.append([])
                waiting.append(after)
            befores[seen[after]].append(number)
        if is_end:
            ends.append(number)
            search.faults += [(rule, "the end", world) for rule in stuck(world)]
            search.believed |= {believed(lane) for lane in world.lanes}
    if waiting:
        return search
    search.num_worlds, search.num_ends = len(seen), len(ends)
    num_lost = len(seen) - len(reaching(ends, befores))
    if num_lost:
        search.faults.append(("some worlds never end", "", num_lost))
    return search


def reaching(ends, befores):
    """Numbers of the worlds from which an end can be reached."""
    found = set(ends)
    waiting = deque(ends)
    while waiting:
        for before in befores[waiting.popleft()]:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


def one_lane(num_tickets, **budget):
    return world_of(1, num_tickets, **budget)


def world_of(num_lanes, num_tickets, **budget):
    nothing = {"losses": 0, "doubles": 0, "refusals": 0, "waits": 24, "may_die": False}
    return World((LaneWorld(),) * num_lanes, num_tickets, **nothing | budget)
