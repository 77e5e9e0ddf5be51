"""What is counted is what happened."""

import itertools
import urllib.request

import pytest

from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import tensor_pb2
from wire import Story, refusal, refused_entry

K = 4


class Target:
    """Accepts as many drafts of each round as it is told, and knows the truth."""

    def __init__(self, sequence):
        self.sequence = sequence
        self.story = sequence.story
        self.position = 0  # P
        self.drafts = []
        self.num_accepted = [0] * K

    def pairs(self, tokens):
        return self.story.pairs(self.position, len(tokens), tokens=tokens)

    def round(self, accepted, declare, draft_count=K):
        """Closes the last round with `accepted` drafts and proposes again."""
        accepted = min(accepted, len(self.drafts))
        tokens = self.drafts[:accepted]
        bonus = 1 if accepted == len(self.drafts) else (self.drafts[accepted] + 1) % 128
        tokens = [*tokens, bonus]
        changes = {"accepted_drafts": accepted} if declare and self.drafts else {}
        for index in range(accepted):
            self.num_accepted[index] += 1
        result = self.sequence.propose(self.position, len(tokens), draft_count, pairs=self.pairs(tokens), **changes)
        self.position += len(tokens)
        self.drafts = list(result.drafts)


def counted(server):
    per_index = [server.metric("accepted_tokens_per_index_total", draft_index=str(index)) for index in range(K)]
    names = ("proposals_total", "draft_tokens_total", "accepted_tokens_total", "unjudged_proposals_total")
    return per_index, server.metrics(*names)


@pytest.fixture
def server(start):
    return start()


@pytest.mark.parametrize("declare", [True, False])
def test_counted_acceptance_is_the_true_acceptance(server, declare):
    target = Target(server.client().open().sequence(Story(1)))
    accepts = [*range(K + 1), *reversed(range(K + 1)), K, K, 0, 2]
    target.round(0, declare)
    for index, accepted in enumerate(accepts):
        target.round(accepted, declare)
        if index % 3 == 0:  # a round that asked for nothing changes nothing
            target.round(K - 1, declare, draft_count=0)
            target.round(0, declare, draft_count=0)
            target.round(0, declare)
    last = 2
    target.sequence.close(accepted_drafts=last)
    for index in range(last):
        target.num_accepted[index] += 1
    per_index, totals = counted(server)
    assert per_index == target.num_accepted
    assert totals["accepted_tokens_total"] == sum(target.num_accepted)
    num_proposals = 1 + len(accepts) + len(accepts[::3])
    assert totals["proposals_total"] == num_proposals
    assert totals["draft_tokens_total"] == num_proposals * K
    assert totals["unjudged_proposals_total"] == 0


def test_acceptance_told_by_a_catchup_or_a_truncate_counts_too(server):
    session = server.client().open()
    target = Target(session.sequence(Story(1)))
    target.round(0, declare=False)
    tokens = [*target.drafts[:3], (target.drafts[3] + 1) % 128]
    target.sequence.catchup(target.position, 4, pairs=target.pairs(tokens))
    per_index, totals = counted(server)
    assert (per_index, totals["accepted_tokens_total"]) == ([1, 1, 1, 0], 3)
    target.sequence.propose(target.position + 3, 1, K)
    target.sequence.truncate(target.position + 4, accepted_drafts=1)
    per_index, totals = counted(server)
    assert (per_index, totals["accepted_tokens_total"]) == ([2, 1, 1, 0], 4)
    assert totals["unjudged_proposals_total"] == 0


@pytest.mark.parametrize("how", ["rewind", "truncate", "close", "take", "session"])
def test_a_round_that_nobody_judged_is_counted_as_such(server, how):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    sequence.propose(0, 5, K)
    before = server.metric("unjudged_proposals_total")
    {
        "rewind": lambda: sequence.propose(3, 1, 0),
        "truncate": lambda: sequence.truncate(3),
        "close": sequence.close,
        "take": sequence.take,
        "session": session.close,
    }[how]()
    assert server.metric("unjudged_proposals_total") == before + 1
    assert server.metric("accepted_tokens_total") == 0


def test_a_round_is_not_judged_by_a_write_that_was_refused(server):
    session = server.client().open()
    target = Target(session.sequence(Story(1)))
    target.round(0, declare=False)
    sequence = target.sequence
    tokens = [*target.drafts, 1]
    wrong = sequence.propose_entry(target.position + 3, 5, K, accepted_drafts=K)
    assert session.call("Propose", pb.ProposeRequest(entries=[wrong])).results[0].status.code == 9
    server.runner.fails = lambda entries: True
    failing = sequence.propose_entry(target.position, 5, K, pairs=target.pairs(tokens))
    assert session.call("Propose", pb.ProposeRequest(entries=[failing])).results[0].status.code == 13
    assert server.metric("accepted_tokens_total") == 0
    server.runner.fails = lambda entries: False
    sequence.op += 1
    target.round(K, declare=False)
    assert counted(server)[0] == [1] * K


def test_more_accepted_than_drafted_counts_as_all(server):
    sequence = server.client().open().sequence(Story(1))
    sequence.propose(0, 3, 2)
    sequence.propose(3, 1, 2, accepted_drafts=2**32 - 1)
    assert server.metric("accepted_tokens_total") == 2


def test_rows_stops_and_pages_are_counted(server):
    session = server.client().open()
    base = {name: server.metric(name, **labels) for name, labels in (("rows_written_total", {"kind": "exact"}),)}
    sequence = session.sequence(Story(1))
    sequence.catchup(0, 7)
    sequence.propose(7, 3, 0)
    sequence.propose(10, 1, 4, min_logprob=0.5)
    assert server.metric("rows_written_total", kind="exact") - base["rows_written_total"] == 11
    assert server.metric("stops_total", reason="NOT_ASKED") == 1
    assert server.metric("stops_total", reason="CONFIDENCE") == 1
    assert server.metric("kv_pages", state="live") == 3
    kv_id = sequence.take().carry.kv_id
    assert (server.metric("kv_pages", state="live"), server.metric("kv_pages", state="carried")) == (0, 3)
    sequence.install(kv_id)
    assert (server.metric("kv_pages", state="live"), server.metric("kv_pages", state="free")) == (3, 253)
    assert server.metric("carries_total", outcome="taken") == server.metric("carries_total", outcome="installed") == 1


def test_a_declared_gap_counts_once_when_it_is_carried_out(start):
    server = start(num_pages=4)
    session = server.client().open()
    full, sequence = session.sequence(Story(1)), session.sequence(Story(2))
    full.catchup(0, 16)
    entry = sequence.catchup_entry(8, 4, pairs=sequence.story.pairs(8, 4, allow_gap=True))
    (refused,) = session.call("Catchup", pb.CatchupRequest(entries=[entry])).results
    assert refused_entry(refused.status).kind == ("RESOURCE_EXHAUSTED", "PAGES_EXHAUSTED")
    assert server.metric("gaps_total", outcome="declared") == 0
    full.close()
    (written,) = session.call("Catchup", pb.CatchupRequest(entries=[entry])).results
    assert written.status.code == 0
    assert server.metric("gaps_total", outcome="declared") == 1


def test_refusals_are_counted_by_reason_and_calls_by_code(server):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    refusal(session.call, "Truncate", sequence.truncate_request(0, op=7))
    session.call("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(5, 2)]))
    with session.drive() as drive:
        drive.ask(truncate=sequence.truncate_request(0, op=7))
        drive.ask(get_sequence=pb.GetSequenceRequest(sequence_id=sequence.sequence_id))
    assert server.metric("errors_total", reason="OP_OUT_OF_ORDER") == 2
    assert server.metric("errors_total", reason="MISSING_ROWS") == 1
    assert server.metric("rpc_duration_seconds_count", method="Truncate", code="ABORTED") == 2
    assert server.metric("rpc_duration_seconds_count", method="Propose", code="OK") == 1
    assert server.metric("rpc_duration_seconds_count", method="GetSequence", code="OK") == 1


def test_the_number_of_series_does_not_grow_with_sessions(start):
    server = start(metrics_port=0)

    def exercise():
        session = server.client().open(client_name=f"target-{next(numbers)}")
        sequence = session.sequence(Story(1))
        sequence.propose(0, 3, K)
        sequence.take(label=f"label-{next(numbers)}")
        refusal(session.call, "Truncate", sequence.truncate_request(0, op=77))
        session.close()

    numbers = itertools.count()
    exercise()
    before = len(scrape(server))
    for _ in range(10):
        exercise()
    after = scrape(server)
    assert len(after) == before
    assert all(line.startswith(("specdraft_", "process_", "#")) for line in after)
    assert not any("target-" in line or "label-" in line for line in after)


def scrape(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.addresses.metrics_port}/metrics", timeout=10) as answer:
        return answer.read().decode().splitlines()


def test_sessions_are_counted_by_how_their_rows_travel(server):
    server.client().open(memory_kind=tensor_pb2.MEMORY_KIND_HOST)
    server.client().open(memory_kind=tensor_pb2.MEMORY_KIND_INLINE)
    server.client().open(memory_kind=tensor_pb2.MEMORY_KIND_INLINE)
    assert server.metric("sessions_opened_total", memory="host") == 1
    assert server.metric("sessions_opened_total", memory="inline") == 2


def test_rows_are_counted_by_what_they_come_from(server):
    sequence = server.client().open().sequence(Story(9), rows_policy=pb.ROWS_POLICY_APPROXIMATE)
    sequence.catchup(0, 2)
    drafts = list(sequence.propose(2, 4).drafts)
    sequence.propose(8, 1, pairs=Story(9).pairs(8, 1, verified_tokens=drafts[:2]))
    assert server.metric("rows_written_total", kind="exact") == 7
    assert server.metric("rows_written_total", kind="approximate") == 2


def test_the_memory_that_is_taken_is_told_by_its_use(server):
    assembly = server.service.assembly
    assert server.metric("device_memory_bytes", use="kv") == server.config.kv_bytes
    assert server.metric("device_memory_bytes", use="weights") == assembly.head.weight_bytes()


# Names of operations' list, and who fills in those that are not here yet.
COMPLETE = {
    "specdraft_rpc_duration_seconds": {"method", "code"},
    "specdraft_propose_stage_seconds": {"stage"},
    "specdraft_sessions": set(),
    "specdraft_sequences": set(),
    "specdraft_sessions_opened": {"memory"},
    "specdraft_sessions_ended": {"end_reason"},
    "specdraft_kv_pages": {"state"},
    "specdraft_carries": {"outcome"},
    "specdraft_batch_size": set(),
    "specdraft_rows_written": {"kind"},
    "specdraft_proposals": set(),
    "specdraft_draft_tokens": set(),
    "specdraft_accepted_tokens": set(),
    "specdraft_accepted_tokens_per_index": {"draft_index"},
    "specdraft_unjudged_proposals": set(),
    "specdraft_gaps": {"outcome"},
    "specdraft_stops": {"reason"},
    "specdraft_errors": {"reason"},
    "specdraft_device_busy_seconds": set(),
    "specdraft_device_faults": set(),
    "specdraft_device_memory_bytes": {"use"},
    "specdraft_regions_open": set(),
    "specdraft_ready_timeouts": set(),
    "specdraft_graph_captures": set(),
    "specdraft_jit_compiles": set(),
}


def test_every_metric_has_its_name_and_its_labels_and_a_text(server):
    server.client().open().sequence(Story(1)).propose(0, 2)
    families = {family.name: family for family in server.service.registry.collect()}
    labels = {
        name: {label for sample in families[name].samples for label in sample.labels} - {"le"} for name in COMPLETE
    }
    assert labels == COMPLETE
    ours = {name for name in families if name.startswith("specdraft_")}
    assert ours - set(COMPLETE) == {"specdraft_head", "specdraft_build"}
    assert all(family.documentation for family in families.values())


def test_times_have_the_classic_buckets_from_50_us_to_1_s(server):
    server.client().open().sequence(Story(1)).propose(0, 2)
    for name in ("rpc_duration_seconds", "propose_stage_seconds"):
        (family,) = [f for f in server.service.registry.collect() if f.name == f"specdraft_{name}"]
        bounds = sorted({float(s.labels["le"]) for s in family.samples if "le" in s.labels})
        assert (bounds[0], bounds[-2], bounds[-1]) == (50e-6, 1.0, float("inf"))
