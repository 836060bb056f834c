"""With and without the fast path the gRPC server stores the same records and gives the same answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.pop.pop import PopRequest
from mqtemplate.grpc_protos import protos
from mqtemplate.http2 import frames
from mqtemplate.http2.grpc_server import GrpcCall
from mqtemplate.http2.grpc_wire import framed
from mqtemplate.message import HostAddress
from mqtemplate.record.codec import StoredRecord
from mqtemplate.server import BrokerServer
from mqtemplate.server.grpc_api.gathered import GatheredAcks, GatheredSends
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.topics import POP_PROGRESS_TOPIC
from tests.http2.wire import SocketPeer, call, changed, data, headers
from tests.server.fast_path.fast_serving import in_one_turn
from tests.server.grpc_api.grpc_tool import create_topic, endpoint, serving

LISTEN = HostAddress("127.0.0.1", 10_911)
MAX_BODY = 8_000
POPPED = 24
"""Messages that the group *billing* has got, and acknowledges."""


class Call(NamedTuple):
    """A call of one kind, and a number that chooses sizes, values and what is wrong with it."""

    kind: str
    number: int


def message(number: int, at: int, topic: str = "orders", *, body: bytes | None = None, **system: Any) -> Any:
    """Return a message as RocketMQ's client for Java encodes it."""
    made = protos.Message(body=bytes(1 + number) if body is None else body)
    made.topic.name = topic
    fields = made.system_properties
    fields.message_id = f"0102FC000000011D3F0B1D166C{at:08X}"
    fields.body_encoding, fields.message_type, fields.born_host = 1, 1, "vm"
    fields.born_timestamp.seconds, fields.born_timestamp.nanos = 1_795_569_772 + number // 9, number * 16_000_000
    fields.queue_id = number % 4
    for name, value in system.items():
        if name == "keys":
            fields.keys.extend(value)
        elif name in (
            "tag",
            "message_id",
            "message_group",
            "priority",
            "trace_context",
            "body_encoding",
            "queue_id",
            "born_host",
        ):
            setattr(fields, name, value)
        else:
            fields.ClearField(name) if value is None else getattr(fields, name).CopyFrom(value)
    return made


def with_properties(made: Any, **properties: str) -> Any:
    for name, value in properties.items():
        made.user_properties[name] = value
    return made


def request(*messages: Any) -> bytes:
    return bytes(protos.SendMessageRequest(messages=messages).SerializeToString())


def backwards(made: Any) -> bytes:
    """Return a request whose message has its fields in another order, and its topic twice."""
    one = protos.Message(topic=made.topic, body=b"replaced").SerializeToString()
    other = protos.Message(system_properties=made.system_properties, body=made.body).SerializeToString()
    return request_of(other + one + protos.Message(body=made.body).SerializeToString())


def request_of(content: bytes) -> bytes:
    size = len(content)
    return b"\n" + (bytes((size,)) if size < 128 else bytes((size & 0x7F | 0x80, size >> 7))) + content


def in_a_property(at: int) -> str:
    """Return a text that looks like the start of system properties with an id."""
    return f'\x1a"0102FC000000011D3F0B1D166C{at:08X}(\x010\x01'


def time(seconds: int, nanos: int = 0) -> Any:
    return protos.SystemProperties(born_timestamp={"seconds": seconds, "nanos": nanos}).born_timestamp


KINDS: dict[str, Callable[[int, int], bytes]] = {
    # number, place in the order -> request
    "send": lambda n, at: request(message(n, at)),
    "large": lambda n, at: request(message(n, at, body=bytes(100 * n))),
    "too large": lambda n, at: request(message(n, at, body=bytes(MAX_BODY - 1 + n % 3))),
    "empty": lambda n, at: request(message(n, at, body=b"")),
    "other topic": lambda n, at: request(message(n, at, ("other", "mixed", "one")[n % 3])),
    "refused topic": lambda n, at: request(
        message(n, at, ("missing", "bad topic", "fifo", "delay", "read-only", "SCHEDULE_TOPIC_XXXX", "")[n % 7])
    ),
    "keys": lambda n, at: request(message(n, at, keys=[f"order-{at}"])),
    "short keys": lambda n, at: request(message(n, at, keys=[str(at % 10)] * (1 + n % 2))),
    "bad keys": lambda n, at: request(message(n, at, keys=[("", " ", "a\x01b", "Zürich")[n % 4]])),
    "tag": lambda n, at: request(message(n, at, tag=("a", "b", "", "a|b", "Z\xfcrich")[n % 5])),
    "tag and keys": lambda n, at: request(message(n, at, tag="paid", keys=["one", f"two{at}"])),
    "property": lambda n, at: request(with_properties(message(n, at), city=("Bern", "Z\xfcrich", "", str(at))[n % 4])),
    "bad property": lambda n, at: request(
        with_properties(message(n, at), **{("UNIQ_KEY", "a\x01", "~~~~~~~")[n % 3]: "\x02"[n % 2 :]})
    ),
    "lookalike": lambda n, at: request(with_properties(message(n, at), a=in_a_property(n), b='"' * 34)),
    "lookalike id": lambda n, at: request(message(n, at, keys=[f"0102FC000000011D3F0B1D166C{at:08X}"])),
    "priority name": lambda n, at: request(with_properties(message(n, at), a="_SYS_MSG_PRIORITY_")),
    "long host": lambda n, at: request(message(n, at, born_host="h" * (33 + n % 3))),
    "no host": lambda n, at: request(message(n, at, born_host="")),
    "id": lambda n, at: request(message(n, at, message_id=("", "id", "z" * 34, " " * 34, "A" * 60)[n % 5])),
    "born": lambda n, at: request(
        message(n, at, born_timestamp=(time(0), time(-1), time(5, 7), None, time(1 << 34, -1))[n % 5])
    ),
    "nanos": lambda n, at: request(message(n, at, born_timestamp=time(1_795_569_772, 10 ** (n % 10)))),
    "queue": lambda n, at: request(message(n, at, queue_id=(0, 3, 127, 128, -1)[n % 5])),
    "gzip": lambda n, at: request(message(n, at, body_encoding=2)),
    "trace": lambda n, at: request(message(n, at, trace_context=("", "00-abc-01", f"00-{at}-01")[n % 3])),
    "ordered": lambda n, at: request(message(n, at, ("fifo", "mixed", "orders")[n % 3], message_group=f"g{n % 3}")),
    "priority": lambda n, at: request(message(n, at, ("priority", "orders")[n % 7 == 0], priority=n % 6)),
    "fifo": lambda n, at: request(message(n, at, "fifo", message_group=f"g{n % 3}")),
    "urgent": lambda n, at: request(message(n, at, "priority", priority=n % 2)),
    "delayed": lambda n, at: request(message(n, at, "mixed", delivery_timestamp=time(1_795_569_999))),
    "several": lambda n, at: request(message(n, at), message(n, at + 1_000, ("orders", "other")[n % 2])),
    "backwards": lambda n, at: backwards(message(n, at, body=b"x" * n)),
    "cut": lambda n, at: request(message(n, at))[: n * 2],
    "longer": lambda n, at: request(message(n, at)) + b"\x10\x01"[: 1 + n % 2],
    "none": lambda n, at: b"",
    "route": lambda n, at: bytes(protos.QueryRouteRequest(topic={"name": "orders"}).SerializeToString()),
    "unknown": lambda n, at: b"",
}
_METHODS = {"route": "QueryRoute", "unknown": "Nothing"}
ACKS = ("ack", "ack twice", "ack two", "ack none", "ack text", "ack other group", "ack bad group", "ack superseded")
CHANGES = ("change topic", "recreate topic", "retry")
ALL = sorted([*KINDS, *ACKS, *CHANGES, "no client", "two frames", "reset"])
CALLS = st.lists(st.builds(Call, st.sampled_from(ALL), st.integers(0, 60)), max_size=40)


def ack(kind: str, number: int, handles: Sequence[str]) -> bytes:
    text = handles[number % len(handles)]
    parts = text.split()
    texts = {
        "ack two": [text, handles[(number + 1) % len(handles)]],
        "ack none": [],
        "ack text": [
            (" ".join(parts[:8]), "nothing", text + " ", " ".join([*parts[:5], "else", *parts[6:]]))[number % 4]
        ],
        "ack superseded": [" ".join([parts[0], str(int(parts[1]) - 1), *parts[2:]])],
    }.get(kind, [text])
    group = {"ack other group": "auditing", "ack bad group": "bad group"}.get(kind, "billing")
    entries = [protos.AckMessageEntry(message_id=f"id-{number}", receipt_handle=each) for each in texts]
    made = protos.AckMessageRequest(group={"name": group}, topic={"name": "popped"}, entries=entries)
    return bytes(made.SerializeToString())


def coded(each: Call, at: int, stream_id: int, handles: Sequence[str]) -> bytes:
    """Return the frames of a call."""
    kind, number = each
    if kind in ACKS:
        method, content = "AckMessage", ack(kind, number, handles)
    else:
        make = KINDS.get(kind, KINDS["send"])
        method, content = _METHODS.get(kind, "SendMessage"), make(number, at)
    path = protos.method_path("SendMessage").replace("SendMessage", method)
    if kind == "no client":
        return call(stream_id, path, content)
    if kind in ("two frames", "reset"):
        fields = ((":path", path), *changed(("x-mq-client-id", "client-1"), without=":path"))
        cut = 1 + number * len(content) // 61
        parts = data(stream_id, framed(content)[:cut], 0) + data(stream_id, framed(content)[cut:])
        return headers(stream_id, fields, frames.END_HEADERS) + parts
    return call(stream_id, path, content, x_mq_client_id="client-1")


class Results(NamedTuple):
    """All that calls leave behind, to compare."""

    answers: dict[int, Any]
    records: list[StoredRecord]
    progress: list[Any]


def change(server: BrokerServer[EmbeddedBroker], each: Call) -> None:
    """Change what the checks of the next calls depend on."""
    table = server.engine.topics
    if each.kind == "change topic":
        config = {"perm": (2, 4, 6)[each.number % 3], "readQueueNums": 4, "writeQueueNums": 4 - each.number % 2}
        table.update("orders", config | {"attributes": {"message.type": ("NORMAL", "FIFO")[each.number % 5 == 0]}})
    elif each.kind == "recreate topic":
        table.delete("other")
        create_topic(server, "other", queues=1 + each.number % 3)


def serve(flush: FlushDiskType, *, fast_path: bool) -> Any:
    engine_settings = EmbeddedSettings(listen_host=LISTEN, flush_disk_type=flush, max_message_size=MAX_BODY)
    return serving(EmbeddedBroker(None, engine_settings, VirtualClock()), fast_path=fast_path, grpc_advertise=LISTEN)


def prepare(server: BrokerServer[EmbeddedBroker]) -> list[str]:
    """Create topics, and return the handles of messages that a group has got."""
    for topic in ("orders", "other", "popped"):
        create_topic(server, topic)
    for topic, kind in (("fifo", "FIFO"), ("mixed", "MIXED"), ("delay", "DELAY"), ("priority", "PRIORITY")):
        create_topic(server, topic, kind)
    create_topic(server, "one", queues=1)
    create_topic(server, "read-only", perm=4)
    for topic in ("orders", "other", "popped", "fifo", "mixed", "one", "priority"):
        for queue_id in range(4):  # else the first message of a queue is stored in a worker thread, after later ones
            server.engine.store.prepare(topic, queue_id)
    peer = SocketPeer(endpoint(server).server.address)
    peer.send(*(coded(Call(kind, 1), at, 2 * at + 1, ()) for at, kind in enumerate(["send"] * 8 + ["other topic"] * 4)))
    peer.responses(12)
    peer.send(
        *(
            call(101 + 2 * at, protos.method_path("SendMessage"), request(message(1, at, "popped")), x_mq_client_id="c")
            for at in range(POPPED)
        )
    )
    peer.responses(POPPED)
    peer.socket.close()
    popped = server.engine.engine.pop.pop(PopRequest(group="billing", topic="popped", from_last=False))
    assert len(popped.messages) == POPPED
    return [each.handle.text for each in popped.messages]


def results_of(calls: Sequence[Call], flush: FlushDiskType, *, fast_path: bool, read_bytes: int = 0) -> Results:
    """Send calls at once to a server, and return what they leave behind.

    Args:
        read_bytes: Most bytes that the server reads at once; 0: all that is there.
    """
    random.seed(0)
    answers: dict[int, Any] = {}
    with serve(flush, fast_path=fast_path) as server:
        handles = prepare(server)
        if read_bytes:
            loop = endpoint(server).server.loop
            loop.buffer = loop.buffer[:read_bytes]
        peer = SocketPeer(endpoint(server).server.address)
        for is_change, part in groupby(enumerate(calls), lambda each: each[1].kind in CHANGES):
            if is_change:
                for _, each in part:
                    change(server, each)
                continue
            found = list(part)
            peer.send(*(coded(each, at, 2 * at + 1, handles) for at, each in found))
            resets = [2 * at + 1 for at, each in found if each.kind == "reset"]
            answers |= peer.responses(len(found))
            peer.send(*(frames.rst_stream_frame(each, frames.ErrorCode.CANCEL) for each in resets))
        peer.socket.close()
        progress = [each._replace(oldest_pop_ms=None) for each in server.engine.engine.pop.in_flight("billing")]
        return Results({at: parsed(*each) for at, each in answers.items()}, stored(server), progress)


def parsed(fields: dict[str, str], messages: list[bytes]) -> Any:
    """Return an answer without the order of its bytes."""
    kinds = (protos.SendMessageResponse, protos.AckMessageResponse, protos.QueryRouteResponse)
    return fields, [
        tuple(str(kind.FromString(each)) if _fits(kind, each) else "" for kind in kinds) for each in messages
    ]


def _fits(kind: Any, content: bytes) -> bool:
    try:
        kind.FromString(content)
    except protos.DecodeError:
        return False
    return True


def stored(server: BrokerServer[EmbeddedBroker]) -> list[StoredRecord]:
    """Return the records in their order, without what depends on the records of the journal between them."""
    store, at, found = server.engine.store, 0, []
    while at < store.end_offset:
        record = store.read_at(at)
        assert record is not None
        at += record.total_size
        if record.topic != POP_PROGRESS_TOPIC:
            found.append(record._replace(born_host=record.born_host[:4], physical_offset=0))
    return found


@pytest.fixture(autouse=True, scope="module")
def _one_turn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        in_one_turn(patch)
        yield


def assert_equal_results(calls: Sequence[Call], flush: FlushDiskType, **options: int) -> Results:
    fast, slow = (results_of(calls, flush, fast_path=fast_path, **options) for fast_path in (True, False))
    for with_fast_path, without in zip(fast, slow, strict=True):
        assert with_fast_path == without
    return fast


@settings(max_examples=25, deadline=None)
@given(CALLS, st.sampled_from(FlushDiskType))
def test_any_calls_leave_the_same_records_and_answers(calls: list[Call], flush: FlushDiskType) -> None:
    assert_equal_results(calls, flush)


@pytest.mark.parametrize("read_bytes", [1, 7, 64, 300, 1_500])
def test_calls_that_arrive_in_parts_leave_the_same_records_and_answers(read_bytes: int) -> None:
    """With one byte in each read, every call is cut at each of its bytes."""
    kinds = ["send", "ack", "send", "send", "keys", "empty", "route", "send", "ack", "ack two", "other topic", "send"]
    calls = [Call(kind, at) for at, kind in enumerate(kinds)]

    assert_equal_results(calls, FlushDiskType.SYNC_FLUSH, read_bytes=read_bytes)


@pytest.mark.parametrize("flush", FlushDiskType)
@pytest.mark.parametrize("seed", range(2))
def test_the_fast_path_stores_and_answers_as_the_slow_one(
    seed: int, flush: FlushDiskType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many calls, most of them frequent ones."""
    chance, slow = random.Random(seed), list[str]()
    unusual = [Call(chance.choice(ALL), chance.randrange(60)) for _ in range(50)]
    usual = [
        Call(chance.choice(["send", "keys", "ack", "fifo", "urgent"]), chance.randrange(20, 60)) for _ in range(200)
    ]
    calls = [each for each in unusual if each.kind not in CHANGES] + usual
    chance.shuffle(calls)
    for gathering in (GatheredSends, GatheredAcks):
        _note_slow(gathering, slow, monkeypatch)

    found = assert_equal_results(calls, flush)

    assert len(slow) < len(unusual) + 40, "frequent calls are on the fast path"
    assert len(found.records) > 150


def _note_slow(gathering: type[Any], slow: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    create = gathering.__init__

    def noting(self: Any, *arguments: Any) -> None:
        create(self, *arguments)
        process = self._slow

        def note(call: GrpcCall, data: bytes) -> None:
            slow.append(call.method)
            process(call, data)

        self._slow = note

    monkeypatch.setattr(gathering, "__init__", noting)
