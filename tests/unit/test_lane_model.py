"""The lane's protocol in every order of events: no wait is for ever, nothing wrong is written, nothing wrong believed.

The state machines are the product's own; `lane_model` plays hosts, streams and network around them. The last test
breaks them one by one, so that it is known what the search can see.
"""

import pytest

import lane_model
from drafter_service.memory.lane_protocol import ServiceLane, Ticketed, Verdict, may_run
from lane_model import explore, one_lane, world_of
from specdraft.memory.lane_protocol import RELEASED, ClientLane

WORLDS = {
    "two tickets; lost, doubled, late and reordered messages": one_lane(2, losses=1, doubles=1),
    "two tickets; client or service dies at any point; a message is lost": one_lane(2, losses=1, may_die=True),
    "two tickets; death and a refusal": one_lane(2, refusals=1, may_die=True),
    "two tickets; one wait may be open": one_lane(2, refusals=1, waits=1),
    "two tickets; a verify never ends": one_lane(2, may_hang=True),
    "three tickets": one_lane(3, calls_time_out=False),
    "two lanes that share one open wait": world_of(2, 1, waits=1, calls_time_out=False),
}


@pytest.mark.parametrize("start", WORLDS.values(), ids=WORLDS)
def test_no_order_of_events_breaks_a_rule_or_leaves_a_wait(start):
    search = explore(start)
    assert not search.faults, search.faults[:3]
    assert search.num_ends > 3
    everything = frozenset(range(1, start.num_tickets + 1))
    assert everything in search.believed, "the good end is reached"
    assert not start.calls_time_out or frozenset() in search.believed, "and the bad one"


def test_every_kind_of_event_happens_somewhere():
    searches = [explore(one_lane(1, refusals=1, may_die=True, may_hang=True))]
    kinds = {name.split(" ")[0] for search in searches for name in search.names}
    assert {"issue", "request", "answer", "launch", "refuse", "ready", "waited", "kernel", "fenced", "done"} <= kinds
    assert {"consume", "call", "stream", "client", "service", "lease", "last", "reap"} <= kinds


def mutants():
    """(what is broken, the attribute, what stands in its place, the rule that must show it)."""
    taken = ServiceLane.taken
    yield (
        "no fence",
        lane_model,
        "may_run",
        lambda *, is_fenced, ready, ticket: ticket <= ready < RELEASED,
        "wrote rows",
    )
    yield "no kernel check", lane_model, "may_run", lambda **_: True, "wrote rows"
    yield "tickets in any order", ServiceLane, "taken", any_order, "out of order"
    yield "a released lane takes tickets", ServiceLane, "taken", forgetful(taken), "used again"
    yield "a refusal takes the ticket out", ServiceLane, "refused", without, "client waits for ever"
    yield "one store only", ServiceLane, "is_drained", property(lambda _: True), "ever"
    yield "no bound", ServiceLane, "next_launch", unbounded(ServiceLane.next_launch), "more waits"
    yield "no timeout", ServiceLane, "is_overdue", lambda *_: False, "service waits for ever"
    yield "clients believe after a release", ClientLane, "trusts", lambda *_, **__: True, "believed"
    yield "a lost answer is waited for", ClientLane, "ended", lambda self, _: self, "client waits for ever"


def any_order(self, ticket, deadline):
    return ServiceLane(ticket, (*self.queue, Ticketed(ticket, deadline))), Verdict.ACCEPTED


def forgetful(taken):
    return lambda self, ticket, deadline: taken(ServiceLane(self.last, self.queue), ticket, deadline)


def without(self, ticket):
    return ServiceLane(self.last, tuple(one for one in self.queue if one.ticket != ticket), self.is_released)


def unbounded(next_launch):
    return lambda self, ready, *, has_room: next_launch(self, ready, has_room=True)


@pytest.mark.parametrize("mutant", list(mutants()), ids=lambda mutant: mutant[0])
def test_the_search_sees_a_broken_lane(monkeypatch, mutant):
    _, place, name, broken, rule = mutant
    monkeypatch.setattr(place, name, broken)
    worlds = (
        one_lane(2, losses=1),
        one_lane(1, doubles=1, may_die=True),
        one_lane(2, waits=1, refusals=1),
        one_lane(1, may_hang=True),
    )
    faults = [fault for world in worlds for fault in explore(world, stop_at_fault=True).faults]
    assert any(rule in fault[0] for fault in faults), faults[:3]


def test_a_round_runs_only_for_its_own_ticket_on_a_lane_that_nobody_gave_up():
    assert may_run(is_fenced=False, ready=3, ticket=3)
    assert may_run(is_fenced=False, ready=4, ticket=3)
    assert not may_run(is_fenced=True, ready=3, ticket=3)
    assert not may_run(is_fenced=False, ready=RELEASED, ticket=3)
    assert not may_run(is_fenced=False, ready=2, ticket=3), "a store ended the wait, and an older write came after it"


def test_a_ticket_that_skips_one_is_refused_and_still_answered_in_lane_order():
    lane, verdict = ServiceLane().taken(1, 5.0)
    assert verdict is Verdict.ACCEPTED
    lane, verdict = lane.taken(3, 5.0)
    assert verdict is Verdict.OUT_OF_ORDER
    assert lane.next_launch(0, has_room=True).ticket == 1
    lane = lane.launched(1)
    refused = lane.next_launch(0, has_room=False)
    assert (refused.ticket, refused.is_refused) == (3, True)
    assert lane.taken(2, 5.0) == (lane, Verdict.OUT_OF_ORDER), "the missing one comes late: done must not go back"
    assert lane.taken(RELEASED, 5.0) == (lane, Verdict.OUT_OF_ORDER), "done = RELEASED would be a release"


def test_a_released_client_lane_gives_no_ticket():
    with pytest.raises(ValueError, match="released"):
        ClientLane().issued().ended(1).issued()
