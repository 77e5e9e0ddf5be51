"""Histories of two clients against a real server, each answer compared with what the model says.

A history is chosen step by step from a seed: what two clients of one service may do in any order, retries, late and
foreign messages among it. What nobody owns is NaN before each step.
"""

import time
from contextlib import suppress
from random import Random

import grpc

from histories_model import PAGE_ROWS, Expected, Model
from histories_world import (
    CARRY_TTL_S,
    GRACE_S,
    HIDDEN_BYTES,
    JUMP_S,
    LEASE_S,
    MARGIN,
    MAX_CARRIED,
    MAX_DRAFTS,
    MAX_SEQ_LEN,
    NUM_PAGES,
    VOCAB,
    WIDTH,
    code_of,
    next_op,
    send,
    short,
    state_of,
)
from serving import wait_until
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import tensor_pb2
from wire import Refused, refused_entry


class Side:
    """One client's session in a history: its lease in the model, its stream, what it has sent."""

    def __init__(self, session, lease, drive=None):
        self.session = session
        self.lease = lease
        self.drive = drive
        self.sent = []
        self.open_requests = []

    def inner(self, world):
        """The service's own object of this session."""
        sessions = world.server.service.assembly.sessions.listed()
        return next((one for one in sessions if one.session_id == self.session.answer.session_id), None)


class History:
    """One history, from its seed."""

    def __init__(self, world, seed):
        self.world = world
        self.random = Random(seed)
        self.tally = world.tally
        self.model = Model(NUM_PAGES, MAX_CARRIED, CARRY_TTL_S, MAX_SEQ_LEN)
        self.steps = []
        shared = self.random.randbytes(16)
        kinds = {"shared": (shared, shared), "own": (shared, shared[::-1]), "none": (b"", b"")}
        self.keys = kinds[self.random.choice(["shared", "shared", "own", "none"])]
        self.sides = []
        self.dead = []

    def run(self, num_steps, *, restart=False):
        """Opens both sessions, does the steps, closes all; whatever goes wrong is told with the steps before it."""
        try:
            self.sides = [self.open_side(place) for place in (0, 1)]
            for place in range(num_steps):
                if restart and place == num_steps // 2:
                    self.restart()
                self.step()
                self.check_pages()
            self.check_gauges()
            self.leave()
            self.check_end()
            self.tally.events["history"] += 1
        except Exception as error:
            self.leave()
            error.add_note("\n".join(["the history:", *self.steps]))
            raise

    def leave(self):
        for side in [*self.sides, *self.dead]:
            if side.drive is not None:
                side.drive.cancel()
        with suppress(grpc.RpcError):
            for side in self.sides:
                side.session.close()

    def check_end(self):
        """Nothing is left."""
        # Carries under a key go with their time.
        self.world.ahead += 2 * CARRY_TTL_S
        self.world.server.service._servicer.expire_carries()
        wait_until(lambda: not self.world.server.ledger.sequences._by_session, 5.0, "the end of all sequences")
        wait_until(lambda: not self.world.server.pages(), 5.0, "the return of all pages")

    # What a history consists of.

    def step(self):
        actions = {
            self.write: 40,
            self.open_sequence: 12,
            self.fork: 10,
            self.truncate: 5,
            self.take: 9,
            self.install: 10,
            self.close_sequence: 4,
            self.ask: 4,
            self.free: 2,
            self.again: 9,
            self.twice_at_once: 4,
            self.late: 5,
            self.reuse: 3,
            self.foreign: 2,
            self.attach: 4,
            self.cut: 3,
            self.retry_after_a_cut: 3,
            self.pass_time: 3,
            self.close_session: 1,
            self.ask_the_dead: 1,
        }
        self.world.poison()
        (action,) = self.random.choices(list(actions), list(actions.values()))
        self.steps.append(f"-- {action.__name__}")
        self.tally.events[action.__name__] += 1
        action(self.random.choice(self.sides))

    def open_side(self, place):
        self.tally.rpcs["OpenSession"] += 1
        key = self.keys[place]
        session = self.world.clients[place].open(hidden_width=WIDTH, carry_key=key)
        lease = self.model.open_session(key or None, LEASE_S)
        assert session.answer.incarnation == self.world.incarnation
        listed = [(info.kv_id, info.label) for info in session.answer.carries]
        expected = [(kv_id, carry.label) for kv_id, carry in self.model.carries_of(lease).items()] if key else []
        assert listed == expected
        self.steps.append(f"session {place} opened, {len(listed)} carries")
        return Side(session, lease)

    def mine(self, side):
        return [(name, one) for name, one in self.model.sequences.items() if one.session is side.lease]

    def pick(self, side):
        """A sequence of the side; a new one where there is none."""
        if not self.mine(side):
            self.open_sequence(side)
        return self.random.choice(self.mine(side)) if self.mine(side) else (self.random.randbytes(16), None)

    def pairs(self, sequence, limit):
        """Mostly pairs that follow; now and then a rewind, a gap, a token that is none."""
        random = self.random
        end = sequence.last_key + 1 if sequence else 0
        verified = []
        if sequence and sequence.draft_rows and random.random() < 0.7:
            verified = list(sequence.draft_rows[: random.randint(0, len(sequence.draft_rows))])
            if verified and random.random() < 0.3:
                verified[-1] = (verified[-1] + 1) % VOCAB
        first_key = end + len(verified)
        kind = random.random()
        if kind < 0.25:
            first_key = random.randint(0, end)
            verified = []
        elif kind < 0.35:
            first_key += random.randint(0, 3)
        num = random.randint(1, limit)
        tokens = random.choices(range(VOCAB), k=num)
        if random.random() < 0.02:
            tokens[-1] = VOCAB
        data = b"".join(random.choices(HIDDEN_BYTES, k=num))
        ref = tensor_pb2.TensorRef(inline=data, dtype=tensor_pb2.D_TYPE_FLOAT32, row_count=num)
        return pb.Pairs(
            first_key=first_key,
            tokens=tokens,
            hiddens=ref,
            allow_gap=random.random() < 0.3,
            verified_tokens=verified,
        )

    def entry(self, name, sequence, rpc):
        op = sequence.last_op + 1 if sequence else 1
        if rpc == "Catchup":
            return pb.CatchupEntry(sequence_id=name, op=op, pairs=self.pairs(sequence, 9))
        changes = {"min_logprob": 0.0} if self.random.random() < 0.1 else {}
        pairs = self.pairs(sequence, MAX_DRAFTS + 1)
        num_drafts = self.random.choice([0, 1, 2, 3, 4, 4])
        return pb.ProposeEntry(sequence_id=name, op=op, pairs=pairs, draft_count=num_drafts, **changes)

    def write(self, side):
        rpc = self.random.choice(["Propose", "Propose", "Catchup"])
        chosen = [self.pick(side)]
        if self.random.random() < 0.3:
            others = [one for one in self.mine(side) if one[0] != chosen[0][0]]
            chosen += self.random.sample(others, min(len(others), 2))
        if self.random.random() < 0.02:
            chosen.append(chosen[0])
        entries = [self.entry(*one, rpc) for one in chosen]
        self.call(side, rpc, (pb.ProposeRequest if rpc == "Propose" else pb.CatchupRequest)(entries=entries))

    def open_sequence(self, side):
        fields = {"open_id": self.random.randbytes(16), "budget_tokens": self.random.choice([0, 0, 0, 9, 14])}
        if self.random.random() < 0.1:
            fields |= {"reserve": True, "budget_tokens": 9}
        if self.random.random() < 0.35:
            fields["rows_policy"] = pb.ROWS_POLICY_APPROXIMATE
        request = pb.OpenSequenceRequest(**fields)
        if side.open_requests and self.random.random() < 0.2:
            request = self.random.choice(side.open_requests)
        side.open_requests.append(request)
        self.call(side, "OpenSequence", request)

    def fork(self, side):
        name, sequence = self.pick(side)
        if sequence and len(sequence.rows) < PAGE_ROWS and self.random.random() < 0.6:
            self.call(side, "Catchup", pb.CatchupRequest(entries=[self.entry(name, sequence, "Catchup")]))
        end = (sequence.last_key if sequence else 3) + 1
        keep = self.random.choice([self.random.randint(0, end), end, end + 2])
        request = pb.ForkSequenceRequest(
            sequence_id=name,
            open_id=self.random.randbytes(16),
            keep_keys_below=keep,
            budget_tokens=self.random.choice([0, 0, 9]),
        )
        self.call(side, "ForkSequence", request)
        if self.random.random() < 0.2:
            self.call(side, "ForkSequence", request)

    def truncate(self, side):
        name, sequence = self.pick(side)
        first_key = self.random.randint(0, (sequence.last_key if sequence else 0) + 4)
        self.call(side, "Truncate", pb.TruncateRequest(sequence_id=name, op=next_op(sequence), first_key=first_key))

    def take(self, side):
        name, sequence = self.pick(side)
        label = self.random.choice(["", "turn 1", "ü" * 32])
        self.call(side, "TakeKV", pb.TakeKVRequest(sequence_id=name, op=next_op(sequence), label=label))

    def install(self, side):
        if not self.model.carries and self.random.random() < 0.8:
            self.take(side)
        name, sequence = self.pick(side)
        if sequence and sequence.rows and self.random.random() < 0.7:
            self.open_sequence(side)
            name, sequence = self.mine(side)[-1] if self.mine(side) else (name, sequence)
        changes = {"keep_keys_below": self.random.randint(0, 12)} if self.random.random() < 0.4 else {}
        request = pb.InstallKVRequest(sequence_id=name, op=next_op(sequence), kv_id=self.some_carry(), **changes)
        self.call(side, "InstallKV", request)

    def some_carry(self):
        kv_ids = list(self.model.carries)
        return self.random.choice(kv_ids) if kv_ids and self.random.random() < 0.9 else self.random.randbytes(16)

    def free(self, side):
        self.call(side, "FreeKV", pb.FreeKVRequest(kv_id=self.some_carry()))

    def close_sequence(self, side):
        name, sequence = self.pick(side)
        self.call(side, "CloseSequence", pb.CloseSequenceRequest(sequence_id=name, op=next_op(sequence)))

    def ask(self, side):
        name, sequence = self.pick(side)
        if self.random.random() < 0.4:
            self.call(side, "GetSequence", pb.GetSequenceRequest(sequence_id=name))
        else:
            op = max(next_op(sequence) - self.random.choice([1, 1, 1, 2]), 1)
            self.call(side, "ReadDrafts", pb.ReadDraftsRequest(sequence_id=name, op=op))

    def again(self, side):
        """The last request once more, and once more on the other way."""
        if side.sent:
            self.call(side, *side.sent[-1])
            self.call(side, *side.sent[-1])

    def twice_at_once(self, side):
        """One write and the next on the stream before any answer, the first of them twice."""
        if side.drive is None:
            self.attach(side)
        name, sequence = self.pick(side)
        if sequence is None:
            return
        request = pb.ProposeRequest(entries=[self.entry(name, sequence, "Propose")])
        asked = [side.drive.send(propose=request) for _ in range(2)]
        answers = [side.drive.answer_to(correlation_id) for correlation_id in asked]
        # Known by now; the model is asked as if they had come one after the other.
        assert answers[0].status.code == answers[1].status.code == 0
        self.steps.append(f"twice at once: Propose {short(request)}\n    -> {short(answers[0].propose)}")
        for answer in answers:
            expected = self.model.expect_writes(side.lease, request.entries, VOCAB)
            self.compare_result(expected[0], request.entries[0], answer.propose.results[0])
        side.lease.expires_at = self.model.now + LEASE_S

    def late(self, side):
        """A request of long ago, as if it had been on its way until now."""
        if side.sent:
            self.call(side, *self.random.choice(side.sent))

    def reuse(self, side):
        """The number of the last operation, or one too far, with another request."""
        name, sequence = self.pick(side)
        op = self.random.choice([next_op(sequence) - 1, next_op(sequence) + 1]) or 1
        first_key = self.random.randint(0, 5)
        self.call(side, "Truncate", pb.TruncateRequest(sequence_id=name, op=op, first_key=first_key))

    def foreign(self, side):
        """A sequence of the other."""
        other = next(one for one in self.sides if one is not side)
        name, sequence = self.pick(other)
        entry = self.entry(name, sequence, "Propose")
        self.call(side, "Propose", pb.ProposeRequest(entries=[entry]))
        self.call(side, "GetSequence", pb.GetSequenceRequest(sequence_id=name))

    # Sessions, streams, time.

    def attach(self, side):
        """A stream; one that is there already is fenced."""
        before, side.drive = side.drive, side.session.drive().attached()
        if before is not None:
            assert before.ending().reason == "SESSION_FENCED"
            before.cancel()
        side.lease.expires_at = self.model.now + LEASE_S

    def cut(self, side):
        """The stream breaks, and nothing was on its way."""
        if side.drive is not None:
            self.cancel(side)
            side.lease.expires_at = min(side.lease.expires_at, self.model.now + GRACE_S)

    def cancel(self, side):
        inner = side.inner(self.world)
        side.drive.cancel()
        side.drive = None
        wait_until(lambda: inner.drive is None, text="the end of a broken stream")

    def retry_after_a_cut(self, side):
        """The stream breaks while a write is on its way; nobody knows whether it was done until it is sent again."""
        if side.drive is None:
            self.attach(side)
        name, sequence = self.pick(side)
        request = pb.ProposeRequest(entries=[self.entry(name, sequence, "Propose")])
        side.drive.send(propose=request)
        if self.random.random() < 0.5:
            time.sleep(0.001)
        self.cancel(side)
        self.call(side, "Propose", request)
        self.call(side, "Propose", request)

    def pass_time(self, side):
        """Leases that nobody renews end, and carries with their time."""
        for one in self.sides:
            if self.random.random() < 0.4:
                self.tally.rpcs["KeepAlive"] += 1
                assert one.session.keep_alive().lease_ms == LEASE_S * 1000
                one.lease.expires_at = self.model.now + LEASE_S
        self.world.ahead += JUMP_S
        self.model.pass_time(JUMP_S)
        ended = [one for one in self.sides if not one.lease.is_open]
        self.tally.events["lease lost"] += len(ended)
        if self.random.random() < 0.5:
            self.world.server.service._servicer.expire_carries()  # as the service does by itself, now and then
        self.replace(ended)

    def close_session(self, side):
        self.tally.rpcs["CloseSession"] += 1
        side.session.close()
        self.model.close_session(side.lease)
        self.replace([side])

    def restart(self):
        """Another service on the same socket knows nothing of what was."""
        for side in self.sides:
            side.lease.is_open = False
            if side.drive is not None:
                side.drive.cancel()
                side.drive = None
        ended, evicted = self.sides, self.model.evicted
        self.model = Model(NUM_PAGES, MAX_CARRIED, CARRY_TTL_S, MAX_SEQ_LEN)
        self.model.evicted = evicted
        self.world.restart()
        self.tally.events["restarted"] += 1
        for side in [*ended, *self.dead]:
            side.session.client = self.world.clients[0]
        self.replace(list(ended))
        self.ask_the_dead(None)

    def replace(self, ended):
        for one in ended:
            self.call(one, "GetSequence", pb.GetSequenceRequest(sequence_id=bytes(16)), over_drive=False)
            # The service's own thread ends what a lease held, within a moment.
            wait_until(lambda one=one: one.inner(self.world) is None, text="the end of a session")
            if one.drive is not None:
                assert one.drive.ending().reason == "SESSION_UNKNOWN"
            self.dead.append(one)
            place = self.sides.index(one)
            self.sides[place] = self.open_side(place)
        wait_until(lambda: self.world.server.pages() == self.model.in_use, text="the return of pages")

    def ask_the_dead(self, side):
        """What a session that has ended asks is refused."""
        for one in self.dead:
            for rpc, request in one.sent[-2:]:
                self.call(one, rpc, request, over_drive=False)

    # Calls and their answers.

    def call(self, side, rpc, request, over_drive=None):
        if over_drive is None:
            over_drive = side.drive is not None and self.random.random() < 0.7
        self.tally.rpcs[rpc] += 1
        self.tally.events["over a stream"] += over_drive
        side.sent.append((rpc, request))
        is_batch = rpc in {"Catchup", "Propose"}
        if not side.lease.is_open:
            expected = Expected("SESSION_UNKNOWN")
        elif is_batch:
            expected = self.model.expect_writes(side.lease, request.entries, VOCAB)
        else:
            expected = self.model.expect(side.lease, rpc, request)
        side.lease.expires_at = self.model.now + LEASE_S
        answer = send(side, rpc, request, over_drive)
        self.steps.append(f"{self.sides.index(side) if side in self.sides else 'dead'} {rpc} {short(request)}")
        self.steps.append(f"    -> {short(answer)}")
        if isinstance(expected, Expected):
            self.compare(expected, answer)
            return
        assert not isinstance(answer, Refused), answer
        assert len(answer.results) == len(expected)
        for one, entry, result in zip(expected, request.entries, answer.results, strict=True):
            self.compare_result(one, entry, result)

    def compare(self, expected, answer):
        if expected.reason or isinstance(answer, Refused):
            self.compare_refusal(expected, answer)
            return
        if expected.same_as is not None:
            assert answer == expected.same_as
            self.tally.events["replayed"] += 1
            return
        expected.finish(answer)
        if expected.view is not None:
            assert state_of(answer.state) == expected.view()

    def compare_refusal(self, expected, answer):
        assert isinstance(answer, Refused), f"{expected.reason} expected"
        self.tally.reasons[answer.reason] += 1
        assert answer.reason == expected.reason
        assert answer.code.value[0] == code_of(expected.reason)
        if expected.reason == "OP_OUT_OF_ORDER":
            last_op, row_count, last_key, ranges, _ = expected.sequence.view()
            told = [answer.details[name] for name in ("last_op", "row_count", "last_pair_key", "ranges")]
            assert told == [str(last_op), str(row_count), str(last_key), ",".join(f"{a}-{b}" for a, b in ranges)]

    def compare_result(self, expected, entry, result):
        if expected.reason or result.status.code:
            self.compare_refusal(expected, refused_entry(result.status) if result.status.code else result)
            assert result.HasField("state") == (expected.view is not None)
            assert expected.view is None or state_of(result.state) == expected.view()
            return
        if expected.same_as is not None:
            assert result == expected.same_as
            self.tally.events["replayed"] += 1
            return
        if isinstance(entry, pb.ProposeEntry):
            assert (len(result.drafts), result.stop_reason) == (expected.num_drafts, expected.stop)
            assert len(result.logprobs) == len(result.drafts)
            self.tally.events[f"stop {pb.StopReason.Name(expected.stop).removeprefix('STOP_REASON_')}"] += 1
        expected.finish(result)
        assert state_of(result.state) == expected.view()
        if isinstance(entry, pb.ProposeEntry) and result.drafts and self.random.random() < 0.3:
            self.compare_drafts(expected.sequence, result)

    def compare_drafts(self, sequence, result):
        oracle = self.world.oracle(sequence.rows, len(result.drafts))
        for place, margin in enumerate(oracle.margins):
            if margin < MARGIN:
                self.tally.skipped += len(result.drafts) - place
                return
            assert result.drafts[place] == oracle.ids[place]
            assert abs(result.logprobs[place] - oracle.logprobs[place]) < 1e-3
            self.tally.compared += 1

    def check_pages(self):
        assert self.world.server.pages() == self.model.in_use

    def check_gauges(self):
        model, server = self.model, self.world.server
        expected = {"carried": model.carried, "live": model.in_use - model.carried, "free": NUM_PAGES - model.in_use}
        assert {state: server.metric("kv_pages", state=state) for state in expected} == expected
        self.tally.events["carry evicted"] += model.evicted
