"""Drives the Python client for the conformance cases: requests on standard input, answers on standard output.

One JSON object a line; README.md has the protocol. `clients/go/internal/conformance` is its twin. With `asyncio` as its
argument it drives `AsyncClient`.
"""

import asyncio
import base64
import dataclasses
import functools
import inspect
import json
import queue
import sys
import threading
from pathlib import Path

import grpc
from google.protobuf import descriptor_pool, json_format, message_factory

from specdraft import (
    AsyncClient,
    AsyncSequence,
    CatchupItem,
    Client,
    ClientGpu,
    HiddenRows,
    HiddenSource,
    Proposal,
    ProposeItem,
    Resumed,
    RowsPolicy,
    SpecdraftError,
    channel,
)
from specdraft.memory.simulated import SimulatedDriver
from specdraft.statuses import error_of_call
from specdraft.v1 import drafter_pb2
from specdraft.words import DType, MemoryKind

SERVICE = "specdraft.v1.Drafter"
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]


def main():
    """Performs every request in a thread of its own until the input ends."""
    driver, writing = Driver(AsyncioClients() if sys.argv[1:] == ["asyncio"] else Client), threading.Lock()

    def answer(asked):
        said = {"id": asked["id"]} | driver.perform(asked)
        with writing:
            print(json.dumps(said), flush=True)

    for line in sys.stdin:
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()
    driver.close()


class Driver:
    """Holds what the runner has named. Every `do_` method is an operation of the protocol."""

    def __init__(self, open_client):
        self.open_client = open_client
        self.clients, self.sequences, self.carries, self.streams, self.channels = {}, {}, {}, {}, {}

    def perform(self, asked):
        operation = getattr(self, f"do_{asked['do']}", None)
        if operation is None:
            return {"error": {"code": "UNKNOWN_OPERATION", "message": asked["do"]}}
        try:
            return {"ok": operation(asked) or {}}
        except SpecdraftError as error:
            return {"error": say_error(error)}
        except ValueError as error:
            return {"error": {"code": "LOCAL", "message": str(error)}}
        except Exception as error:  # noqa: BLE001  # the runner says what the driver got wrong
            return {"error": {"code": "DRIVER", "message": repr(error)}}

    def close(self):
        for client in self.clients.values():
            client.close()
        for one in self.channels.values():
            one.close()

    # --- sessions -----------------------------------------------------------------------------------------------------

    def do_hello(self, _asked):
        return {"language": "python"}

    def do_open(self, asked):
        names = ("hidden_width", "vocab_size", "slot_count", "max_drafts", "prefill_rows", "client_name", "with_masks")
        options = {name: asked[name] for name in names if name in asked}
        if "hidden_dtype" in asked:
            options["hidden_dtype"] = asked["hidden_dtype"]
        if "hidden_source" in asked:
            options["hidden_source"] = HiddenSource[asked["hidden_source"].upper()]
        if "layer_ids" in asked:
            options["layer_ids"] = asked["layer_ids"]
        if "carry_key" in asked:
            options["carry_key"] = base64.b64decode(asked["carry_key"])
        for name in ("carries_max", "carry_tokens_max"):
            if name in asked:
                options[name] = max(0, asked[name])  # 0 is Go's word for the default; below, for none
        if "keepalive_ms" in asked:
            channel._KEEPALIVE_TIME_MS = asked["keepalive_ms"]
        memory = asked.get("memory", "auto")
        if memory == "cuda":
            options["gpu"] = gpu_of(asked.get("simulated_gpu"))
        client = self.open_client(
            asked["target"], memory=memory, use_drive=not asked.get("unary"), timeout_s=asked["timeout_ms"] / 1000,
            **options,
        )  # fmt: skip
        self.clients[asked["as"]] = client
        for index, carry in enumerate(client.carries):
            self.carries[f"{asked['as']}.carries.{index}"] = carry
        return self.do_describe({"of": asked["as"]})

    def do_describe(self, asked):
        client = self.clients[asked["of"]]
        return {
            "memory": MemoryKind(client.memory_kind).name.lower(),
            "max_drafts": client.max_drafts,
            "hidden_width": client.hidden_width,
            "driving": client.is_driving,
            "carries": [say_carry(one) for one in client.carries],
        }

    def do_info(self, asked):
        client = self.clients[asked["of"]]
        info = client.server_info()
        return {
            "protocol_version": info.protocol_version,
            "incarnation": base64.b64encode(info.incarnation).decode(),
            "head": {name: getattr(info.head, name) for name in ("hidden_width", "vocab_size", "fingerprint")},
            "limits": {"max_drafts": info.limits.max_drafts, "propose_batch_max": info.limits.propose_batch_max},
        }

    def do_close(self, asked):
        self.clients[asked["of"]].close()

    # --- sequences ----------------------------------------------------------------------------------------------------

    def do_open_sequence(self, asked):
        sequence = self.clients[asked["of"]].open_sequence(
            asked.get("budget_tokens", 0), reserve=asked.get("reserve", False), rows_policy=policy(asked)
        )
        self.sequences[asked["as"]] = sequence
        return say_state(sequence.known_state)

    def do_prefill(self, asked):
        return say_state(self.sequences[asked["of"]].prefill(asked["tokens"], rows_of(asked)))

    def do_catchup(self, asked):
        fields = pairs_of(asked)
        return say_state(self.sequences[asked["of"]].catchup(**fields))

    def do_propose(self, asked):
        return say_proposal(self.sequences[asked["of"]].propose(**pairs_of(asked), **draft_of(asked)))

    def do_catchup_batch(self, asked):
        items = [CatchupItem(self.sequences[one["of"]], **pairs_of(one)) for one in asked["items"]]
        return {"results": [say_result(one) for one in self.clients[asked["of"]].catchup_batch(items)]}

    def do_propose_batch(self, asked):
        items = [ProposeItem(self.sequences[one["of"]], **pairs_of(one), **draft_of(one)) for one in asked["items"]]
        return {"results": [say_result(one) for one in self.clients[asked["of"]].propose_batch(items)]}

    def do_truncate(self, asked):
        return say_state(self.sequences[asked["of"]].truncate(asked["first_key"], asked.get("accepted_drafts")))

    def do_state(self, asked):
        return say_state(self.sequences[asked["of"]].state())

    def do_read_drafts(self, asked):
        stored = self.sequences[asked["of"]].read_drafts(
            asked.get("op"), with_last_embedding=asked.get("with_last_embedding", False)
        )
        return {
            "drafts": list(stored.drafts),
            "logprobs": list(stored.logprobs),
            "stop_reason": stored.stop_reason.name,
            "last_embedding": base64.b64encode(stored.last_embedding).decode(),
        }

    def do_close_sequence(self, asked):
        self.sequences[asked["of"]].close(asked.get("accepted_drafts"))

    def do_fork(self, asked):
        forked = self.sequences[asked["of"]].fork(asked["keep_keys_below"], asked.get("budget_tokens", 0))
        self.sequences[asked["as"]] = forked
        return say_state(forked.known_state)

    # --- turns --------------------------------------------------------------------------------------------------------

    def do_take_kv(self, asked):
        carry = self.sequences[asked["of"]].take_kv(asked.get("label", ""))
        self.carries[asked["as"]] = carry
        return say_carry(carry)

    def do_install_kv(self, asked):
        carry = self.carries[asked["carry"]]
        if asked.get("head_fingerprint"):
            carry = type(carry)(carry.kv_id, carry.ranges, carry.label, carry.expires_in_ms, asked["head_fingerprint"])
        return say_state(self.sequences[asked["of"]].install_kv(carry, asked.get("keep_keys_below")))

    def do_free_kv(self, asked):
        self.clients[asked["of"]].free_kv(self.carries[asked["carry"]])

    def do_park(self, asked):
        conversations = self.clients[asked["of"]].conversations
        carry = conversations.park(self.sequences[asked["sequence"]], asked["tokens"], asked.get("conversation", ""))
        self.carries[asked["as"]] = carry
        return say_carry(carry)

    def do_resume(self, asked):
        conversations = self.clients[asked["of"]].conversations
        resumed = conversations.resume(
            asked["tokens"],
            asked.get("conversation", ""),
            budget_tokens=asked.get("budget_tokens", 0),
            rows_policy=policy(asked),
            keep_carry=asked.get("keep_carry", False),
        )
        self.sequences[asked["as"]] = resumed.sequence
        return {"keys_kept": resumed.num_keys_kept, "next_key": resumed.next_key, "parked": len(conversations)}

    def do_adopt(self, asked):
        self.clients[asked["of"]].conversations.adopt(self.carries[asked["carry"]], asked["tokens"])

    # --- bare messages ------------------------------------------------------------------------------------------------

    def do_raw(self, asked):
        method = descriptor_pool.Default().FindServiceByName(SERVICE).FindMethodByName(asked["rpc"])
        request = message_factory.GetMessageClass(method.input_type)()
        json_format.ParseDict(asked["request"], request)
        call = self.channel(asked["target"]).unary_unary(
            f"/{SERVICE}/{asked['rpc']}",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        timeout_s = asked["timeout_ms"] / 1000 or None
        try:
            answer = call(request, timeout=timeout_s, metadata=token_of(asked), wait_for_ready=True)
        except grpc.RpcError as failure:
            raise error_of_call(failure) from None
        return say_message(answer)

    def do_stream_open(self, asked):
        outgoing = queue.SimpleQueue()
        opener = self.channel(asked["target"]).stream_stream(
            f"/{SERVICE}/Drive",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=drafter_pb2.DriveResponse.FromString,
        )
        call = opener(iter(outgoing.get, None), metadata=token_of(asked), wait_for_ready=True)
        call.initial_metadata()  # waits until the service has taken the stream up, or refused it
        if not call.is_active():
            raise error_of_call(call)
        self.streams[asked["as"]] = call, outgoing

    def do_stream_ask(self, asked):
        call, outgoing = self.streams[asked["of"]]
        if "request" in asked:
            outgoing.put(json_format.ParseDict(asked["request"], drafter_pb2.DriveRequest()))
        try:
            return say_message(next(call))
        except grpc.RpcError as failure:
            raise error_of_call(failure) from None

    def do_stream_close(self, asked):
        call, outgoing = self.streams.pop(asked["of"])
        call.cancel()
        outgoing.put(None)

    def channel(self, target):
        if target not in self.channels:
            self.channels[target] = grpc.insecure_channel(target, OPTIONS)
        return self.channels[target]


class AsyncioClients:
    """Opens clients for asyncio on a loop of its own, and waits for whatever is to be awaited."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __call__(self, target, **options):
        client = AsyncClient(target, **options)
        self.wait(client.open())
        return Waited(client, self)

    def wait(self, awaitable):
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result()


class Waited:
    """A client, its conversations or a sequence, whose methods are waited for."""

    def __init__(self, inner, clients):
        self.inner, self._clients = inner, clients

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        if name == "conversations":
            return Waited(found, self._clients)
        return functools.partial(self._call, found) if inspect.ismethod(found) else found

    def __len__(self):
        return len(self.inner)

    def _call(self, method, *arguments, **named):
        arguments = [self._bare(one) for one in arguments]
        result = method(*arguments, **named)
        if inspect.isawaitable(result):
            result = self._clients.wait(result)
        if isinstance(result, Resumed):
            return dataclasses.replace(result, sequence=Waited(result.sequence, self._clients))
        return Waited(result, self._clients) if isinstance(result, AsyncSequence) else result

    @staticmethod
    def _bare(argument):
        if isinstance(argument, list):
            return [Waited._bare(one) for one in argument]
        if isinstance(argument, CatchupItem | ProposeItem):
            return dataclasses.replace(argument, sequence=argument.sequence.inner)
        return argument.inner if isinstance(argument, Waited) else argument


@functools.cache
def gpu_of(directory):
    """This process's GPU: one that the directory plays, or the first one."""
    return ClientGpu(SimulatedDriver(Path(directory)) if directory else None)


def token_of(asked):
    token = base64.b64decode(asked.get("token", ""))
    return (("specdraft-token-bin", token),) if token else ()


def policy(asked):
    return RowsPolicy.APPROXIMATE if asked.get("approximate") else RowsPolicy.EXACT


def rows_of(asked):
    said = asked["rows"]
    data, dtype, width = base64.b64decode(said["data"]), DType[said["dtype"].upper()], said["width"]
    size = width * dtype.size_bytes
    return HiddenRows(memoryview(data), dtype, len(data) // size, width)


def pairs_of(asked):
    names = ("first_key", "tokens", "allow_gap", "accepted_drafts", "verified_tokens")
    return {name: asked[name] for name in names if name in asked} | {"hiddens": rows_of(asked)}


def draft_of(asked):
    names = ("min_logprob", "mask", "recommend", "verify_us")
    return {name: asked[name] for name in names if name in asked} | {"num_drafts": asked["drafts"]}


def say_state(state):
    return {
        "last_op": state.last_op,
        "row_count": state.row_count,
        "last_pair_key": state.last_pair_key,
        "ranges": [[one.begin, one.end] for one in state.ranges],
        "first_approximate_key": state.first_approximate_key,
    }


def say_proposal(proposal):
    return {
        "drafts": list(proposal.drafts),
        "logprobs": list(proposal.logprobs),
        "stop_reason": proposal.stop_reason.name,
        "state": say_state(proposal.state),
        "recommended_drafts": proposal.recommended_drafts,
    }


def say_result(result):
    if isinstance(result, SpecdraftError):
        return {"error": say_error(result)}
    return {"ok": say_proposal(result) if isinstance(result, Proposal) else say_state(result)}


def say_carry(carry):
    return {
        "ranges": [[one.begin, one.end] for one in carry.ranges],
        "label": carry.label,
        "kv_id": base64.b64encode(carry.kv_id).decode(),
    }


def say_error(error):
    return {
        "code": error.code.name,
        "reason": error.reason.value if error.reason else "",
        "message": error.message,
        "details": dict(error.details),
        "retry_delay_ms": error.retry_delay_ms,
    }


def say_message(message):
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


if __name__ == "__main__":
    main()
