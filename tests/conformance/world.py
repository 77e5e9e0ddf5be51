"""One case at work: its server, its proxy, the driver, and every sequence as it should be."""

import base64
import itertools
import secrets
import time
from pathlib import Path

import torch
from google.protobuf import json_format

from conformance.expectations import at, check_answer
from conformance.oracle import Model, Row, Story, bits_of, rounded
from conformance.proxy import CutProxy
from serving import wait_until
from specdraft.v1 import drafter_pb2, tensor_pb2
from wire import BOOT_ID, WIDTH, Arena

OPEN = {"timeout_ms": 10_000, "client_name": "conformance"}
HANDSHAKE = {
    "protocol_version": 1,
    "hidden_source": "HIDDEN_SOURCE_POST_NORM",
    "hidden_dtype": "D_TYPE_FLOAT32",
    "hidden_width": WIDTH,
    "memory_kind": "MEMORY_KIND_INLINE",
    "boot_id": BOOT_ID,
}
_numbers = itertools.count()


class World:
    """Performs the steps of one case with one driver.

    Args:
        driver: the client's driver.
        place: the server.
        directory: for the proxy's socket.
        is_proxied: whether the driver reaches the service through a proxy that can be cut.
    """

    def __init__(self, driver, place, directory, *, is_proxied=False):
        self.driver, self.place = driver, place
        self.prefix = f"{next(_numbers)}."
        self.models, self.carried, self.saved, self.begun, self.stories = {}, {}, {}, {}, {}
        self.num_drafts = self.num_compared = 0
        self._clients, self._tokens, self._streams = [], [], []
        self._later_stream = _LaterStream()
        socket = place.config.socket
        self.proxy = CutProxy(Path(directory) / f"{self.prefix}p.sock", socket) if is_proxied else None
        self.target = f"unix://{self.proxy.path if self.proxy else socket}"

    @property
    def server(self):
        return self.place.server

    def close(self):
        """Gives up what the case has opened, so that the next one finds an empty service."""
        if self.server is None:  # the case failed before it let the service load
            self.place.load()
        self.server.runner.gate.set()
        self.server.runner.fails = lambda entries: False
        for waiting, _ in self.begun.values():
            waiting.get()
        for name in self._streams:
            self.driver.ask("stream_close", of=name)
        for name in self._clients:
            self.driver.ask("close", of=name)
        for token in self._tokens:
            asked = {"target": self.target, "token": token, "request": {}, "timeout_ms": 5000}
            self.driver.ask("raw", rpc="CloseSession", **asked)
        if self.proxy:
            self.proxy.close()

    def check_comparisons(self):
        """Drafts of ties prove nothing; a case whose drafts are many ties would. In bf16 there are more of them."""
        share = 0.9 if self.server.service.assembly.head.dtype == torch.float32 else 0.5
        assert self.num_compared >= share * self.num_drafts, f"{self.num_compared} of {self.num_drafts} were compared"

    def named(self, name):
        return self.prefix + name

    def story(self, seed):
        return self.stories.setdefault(seed, Story(seed))

    # --- steps: what is asked of the client ---------------------------------------------------------------------------

    def run(self, step, variables):
        """Performs one step of a case's list."""
        step = dict(substituted(step, variables))
        expect, begin = self.filled(step.pop("expect", {})), step.pop("begin", None)
        ((kind, arguments),) = step.items()
        if kind == "each":
            for value in arguments["values"]:
                for inner in arguments["steps"]:
                    self.run(inner, variables | {arguments["as"]: value})
            return
        if kind == "await":
            waiting, settle = self.begun.pop(arguments)
            check_answer(waiting.get(), expect, settle)
            return
        performer = getattr(self, f"on_{kind}", None)
        if performer is not None:
            performer(**(arguments or {}))
            return
        asked, settle = getattr(self, f"ask_{kind}")(**(arguments or {}))
        waiting = self.driver.begin(kind, **asked)
        if begin:
            self.begun[begin] = waiting, settle
        else:
            check_answer(waiting.get(), expect, settle)

    def ask_open(self, **options):
        name = self.named(options.pop("as", "c"))
        if options.pop("over", "") == "tcp":
            options["target"] = f"127.0.0.1:{self.server.addresses.listen_port}"
        if "carry_key" in options:
            options["carry_key"] = options["carry_key"].encode()
        self._clients.append(name)
        return {"as": name, "target": self.target} | OPEN | self.place.gpu | options, lambda answer: None

    def ask_describe(self, of="c"):
        return {"of": self.named(of)}, lambda answer: None

    ask_info = ask_describe

    def ask_close(self, of="c"):
        return {"of": self.named(of)}, lambda answer: None

    def ask_open_sequence(self, of="c", story=1, **options):
        name = options.pop("as", "q")
        model = Model(self.story(story), keeps_drafts=options.get("approximate", False))

        def settle(answer):
            self.models[name] = model
            model.check_state(answer)

        return {"of": self.named(of), "as": self.named(name)} | options, settle

    def ask_prefill(self, of="q", tokens=10, dtype="float32"):
        model = self.models[of]
        story = model.story
        rows = {"data": story.row_bytes(0, tokens, dtype), "dtype": dtype, "width": WIDTH}

        def settle(answer):
            if tokens > 1:
                hiddens = rounded(story.rows, dtype)
                model.write(0, [(story.tokens[key + 1], hiddens[key]) for key in range(tokens - 1)])
            model.check_state(answer)

        return {"of": self.named(of), "tokens": story.tokens[:tokens], "rows": rows}, settle

    def ask_catchup(self, of="q", **pairs):
        asked, write = self._pairs(of, **pairs)

        def settle(answer):
            write()
            self.models[of].check_state(answer)

        return asked, settle

    def ask_propose(self, of="q", drafts=3, **more):
        names = ("min_logprob", "mask", "recommend", "verify_us")
        options = {name: more.pop(name) for name in names if name in more}
        asked, write = self._pairs(of, **more)

        def settle(answer):
            write()
            model = self.models[of]
            model.check_state(answer["state"])
            allowed = bits_of(options["mask"]) if "mask" in options else None
            self.num_drafts += len(answer["drafts"])
            self.num_compared += model.check_drafts(self.server.service.assembly.head, answer, allowed)

        return asked | options | {"drafts": drafts}, settle

    def _batch(self, asking, of, items):
        built = [asking(**item) for item in items]

        def settle(answer, expectations):
            for result, (_, settle_one), expect in zip(answer["results"], built, expectations, strict=True):
                check_answer(result, expect, settle_one)

        return {"of": self.named(of), "items": [asked for asked, _ in built]}, settle

    def ask_propose_batch(self, items, of="c"):
        return self._batch(self.ask_propose, of, items)

    def ask_catchup_batch(self, items, of="c"):
        return self._batch(self.ask_catchup, of, items)

    def _pairs(self, of, key=0, count=1, **more):
        """The arguments of a write, and what it does to the model. Pairs are the story's unless said otherwise."""
        model = self.models[of]
        story = self.story(more.pop("story")) if "story" in more else model.story
        row = more.pop("row", key)
        given = more.pop("tokens", story.tokens[key + 1 : key + 1 + count])
        tokens = [model.drafts[int(one[1:]) - 1] if isinstance(one, str) else one for one in given]
        dtype = more.pop("dtype", "float32")
        hiddens = rounded(story.rows[row : row + len(tokens)], dtype)
        data = story.row_bytes(row, more.pop("rows", len(tokens)), dtype)
        if more.pop("is_nan", False):
            data = data[:4] + b"\x00\x00\xc0\x7f" + data[8:]
        rows = {"data": data, "dtype": dtype, "width": more.pop("width", WIDTH)}
        if "verified" in more:
            more["verified_tokens"] = [model.drafts[i] for i in range(more.pop("verified"))]
        asked = {"of": self.named(of), "first_key": key, "tokens": tokens, "rows": rows} | more
        num_verified = len(more.get("verified_tokens", ()))
        return asked, lambda: model.write(key, list(zip(tokens, hiddens, strict=True)), num_verified)

    def ask_truncate(self, of="q", key=0, **more):
        def settle(answer):
            self.models[of].truncate(key)
            self.models[of].check_state(answer)

        return {"of": self.named(of), "first_key": key} | more, settle

    def ask_state(self, of="q"):
        return {"of": self.named(of)}, self.models[of].check_state

    def ask_read_drafts(self, of="q", **more):
        def settle(answer):
            assert answer["drafts"] == self.models[of].drafts
            assert bool(answer["last_embedding"]) == more.get("with_last_embedding", False)

        return {"of": self.named(of)} | more, settle

    def ask_close_sequence(self, of="q", **more):
        return {"of": self.named(of)} | more, lambda answer: None

    def ask_fork(self, of="q", keep=0, **more):
        name = more.pop("as", "f")

        def settle(answer):
            self.models[name] = self.models[of].forked(keep)
            self.models[name].check_state(answer)

        return {"of": self.named(of), "as": self.named(name), "keep_keys_below": keep} | more, settle

    # --- steps: turns -------------------------------------------------------------------------------------------------

    def ask_take_kv(self, of="q", **more):
        name = more.pop("as", "k")

        def settle(answer):
            model = self.models[of]
            assert answer["ranges"] == model.ranges
            self.carried[name] = model.forked(1 << 40)
            model.truncate(0)

        return {"of": self.named(of), "as": self.named(name)} | more, settle

    def ask_install_kv(self, of="q", carry="k", keep=None, **more):
        def settle(answer):
            self.models[of].rows = self.carried[carry].forked(1 << 40 if keep is None else keep).rows
            self.models[of].check_state(answer)

        more |= {} if keep is None else {"keep_keys_below": keep}
        return {"of": self.named(of), "carry": self.named(carry)} | more, settle

    def ask_free_kv(self, carry="k", of="c"):
        return {"of": self.named(of), "carry": self.named(carry)}, lambda answer: None

    def ask_park(self, sequence="q", of="c", tokens=0, conversation="", **more):
        name = more.pop("as", "k")

        def settle(answer):
            self.carried[name] = self.models.pop(sequence)
            assert answer["ranges"] == self.carried[name].ranges
            assert answer["label"] == conversation

        asked = {"of": self.named(of), "sequence": self.named(sequence), "as": self.named(name)}
        return asked | {"tokens": self.models[sequence].story.tokens[:tokens], "conversation": conversation}, settle

    def ask_resume(self, of="c", tokens=0, story=1, kept=0, **more):
        """Resumes a prompt of a story's tokens, of which `kept` rows are expected to be there."""
        name, said = more.pop("as", "q"), self.story(story)
        prompt = said.tokens[:tokens] + more.pop("then", [])

        def settle(answer):
            assert answer["keys_kept"] == kept, answer
            model = Model(said, {key: Row(said.tokens[key + 1], said.rows[key]) for key in range(kept)})
            assert answer["next_key"] == model.last_pair_key + 1
            self.models[name] = model

        return {"of": self.named(of), "as": self.named(name), "tokens": prompt} | more, settle

    def ask_adopt(self, carry, of="c", story=1, tokens=0):
        return {"of": self.named(of), "carry": self.named(carry), "tokens": self.story(story).tokens[:tokens]}, (
            lambda answer: None
        )

    # --- steps: bare messages -----------------------------------------------------------------------------------------

    def ask_raw(self, rpc, request=None, token="", *, timeout_ms=10_000, save=(), size=None):
        said = self.filled(request or {})
        if size is not None:
            message = json_format.ParseDict(said, getattr(drafter_pb2, f"{rpc}Request")())
            assert message.ByteSize() == size, "the case is about a message of another size"
        if rpc == "OpenSession":
            said = HANDSHAKE | said

        def settle(answer):
            for name, path in dict(save).items():
                self.saved[name] = at(answer, path)
            if "session_token" in answer:
                self._tokens.append(answer["session_token"])

        asked = {"target": self.target, "rpc": rpc, "request": said, "timeout_ms": timeout_ms}
        return asked | {"token": self.filled(token)}, settle

    def ask_stream_open(self, token="$token", **more):
        name = self.named(more.pop("as", "d"))
        self._streams.append(name)
        return {"as": name, "target": self.target, "token": self.filled(token)}, lambda answer: None

    def ask_stream_ask(self, of="d", request=None):
        asked = {"of": self.named(of)}
        return asked | ({} if request is None else {"request": self.filled(request)}), lambda answer: None

    def on_stream_close(self, of="d"):
        self.driver.ask("stream_close", of=self.named(of))

    def on_map_arena(self):
        """Maps the arena that an OpenSession answered, as a client does, and saves its nonce."""
        arena = Arena(json_format.ParseDict(self.saved["arena"], tensor_pb2.Arena()))
        self.saved["nonce"] = base64.b64encode(arena.nonce()).decode()
        arena.map.close()

    def filled(self, value):
        """Puts bytes and saved values where a request names them."""
        if isinstance(value, list):
            return [self.filled(one) for one in value]
        if isinstance(value, str) and value.startswith("$"):
            return self.saved[value[1:]]
        if not isinstance(value, dict):
            return value
        made = self._made_bytes(value)
        if made is not None:
            return base64.b64encode(made).decode()
        return {name: self.filled(one) for name, one in value.items()}

    def _made_bytes(self, value):
        if set(value) == {"$rows"}:
            wanted = {"story": 1, "first": 0, "count": 1, "dtype": "float32"} | value["$rows"]
            return self.story(wanted["story"]).row_bytes(wanted["first"], wanted["count"], wanted["dtype"])
        if set(value) == {"$random"}:
            return secrets.token_bytes(value["$random"])
        return bytes(value["$zeros"]) if set(value) == {"$zeros"} else None

    # --- steps: what happens to the service ---------------------------------------------------------------------------

    def on_hold(self):
        """Nothing is computed until `let_go`."""
        self.server.runner.gate.clear()

    def on_let_go(self):
        self.server.runner.gate.set()

    def on_await_batch(self, count=1):
        """Waits until so many batches have begun since the case began to hold them."""
        wait_until(lambda: len(self.server.runner.batches) >= self.saved["batches"] + count, text="a batch's beginning")

    def on_count_batches(self):
        self.saved["batches"] = len(self.server.runner.batches)

    def on_fail(self):
        """Everything that is computed fails until `mend`."""
        self.server.runner.fails = lambda entries: True

    def on_mend(self):
        self.server.runner.fails = lambda entries: False

    def on_cut(self, direction="down", after=0):
        self.proxy.cut_after(direction, after)

    def on_cut_now(self):
        self.proxy.cut_now()

    def on_expect_cuts(self, count):
        assert self.proxy.num_cuts == count, f"{self.proxy.num_cuts} connections were cut at a byte"

    def on_restart(self):
        self.place.restart()

    def on_stop(self):
        self.server.close()

    def on_drain(self):
        """What the admin socket's Drain does."""
        self.server.service.refuse_sessions()

    def on_loaded(self):
        """Lets a service that was started with `starting` load its head."""
        self.place.load()

    def on_await_sessions(self, count):
        sessions = self.server.service.assembly.sessions
        wait_until(lambda: len(sessions) == count, text=f"the number of sessions {count}")

    def on_await_pages(self, count):
        wait_until(lambda: self.server.pages() == count, text=f"the number of pages {count}")

    def on_take_over(self):
        """What a later stream with the token of the only client's session does."""
        sessions = self.server.service.assembly.sessions
        (fenced,) = (one for one in sessions.listed() if one.drive is not None)
        sessions.attach(fenced, self._later_stream)

    def on_expect_taken(self):
        """The later stream is still the session's, some time later."""
        time.sleep(0.5)
        assert not self._later_stream.is_fenced, "the fenced client has attached again"

    def on_expect_accepted(self, count):
        name = "accepted_tokens_total"
        wait_until(lambda: self.server.metric(name) == count, text=f"{count} accepted drafts")

    def on_end_streams(self):
        """What SIGTERM does first: streams end once they have answered."""
        self.server.service.drain()


class _LaterStream:
    """A stream of somebody else's with the client's token."""

    def __init__(self):
        self.is_fenced = False

    def fence(self):
        self.is_fenced = True


def substituted(value, variables):
    """Puts the variables of an `each` where the case names them: `$name`, or inside of a text."""
    if isinstance(value, dict):
        if "each" in value:
            return value
        return {name: substituted(one, variables) for name, one in value.items()}
    if isinstance(value, list):
        return [substituted(one, variables) for one in value]
    if isinstance(value, str) and value.startswith("$") and value[1:].partition(".")[0] in variables:
        return at(variables, value[1:])
    return value
