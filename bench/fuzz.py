"""Damaged frames: the server answers or ignores each one, or closes its connection; other connections are not affected.

Frames of real clients are damaged: bits, lengths, pieces, types, two frames in one, garbage. Other frames are valid,
and request any code with values that make no sense. A valid check request follows each frame. Either the check gets its
response, or the server closes the connection; otherwise the server hangs. Another client sends requests over its own
connection all the time, and the server's memory is measured.

    python -m bench.fuzz [--frames 1000000] [--seconds 900] [--seed 1] [--address HOST:PORT --pid PID]

Without an address the bench starts a server of its own, which decodes all headers and bodies as a broker does.
`bench.fuzz_sequences` sends sequences of valid requests to a whole broker.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from bench.measure import percentile, report, run
from bench.other_client import other_client
from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerError, RemoteProtocolError
from mqtemplate.message import HostAddress
from mqtemplate.remoting import (
    Connection,
    RemotingServer,
    RemotingServerSettings,
    parse_address,
)
from mqtemplate.remoting.protocol import (
    FrameDecoder,
    RemotingCommand,
    RequestCode,
    ResponseCode,
    SerializeType,
    encode_command,
)
from mqtemplate.remoting.protocol.bodies.group import HeartbeatData
from mqtemplate.remoting.protocol.headers.fields import BoundaryType, declared_fields
from mqtemplate.remoting.protocol.headers.group import QueryConsumerOffsetRequestHeader
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, SendMessageRequestHeaderV2
from tests.remoting.protocol.code_tables import REQUEST_HEADERS
from tests.remoting.wire import RawPeer

CHECK = RequestCode.GET_ROUTEINFO_BY_TOPIC
"""Code of the check request: every server of ours answers it, at least with an error."""

_SEND = {"a": "group", "b": "topic", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": "1767225600000", "h": "0"}
_SEND |= {"i": "KEYS\x014466\x02WAIT\x01true\x02", "j": "0", "k": "false", "m": "false", "n": "broker-a"}
_PULL = {"consumerGroup": "group", "topic": "topic", "queueId": "0", "queueOffset": "0", "maxMsgNums": "32"}
_PULL |= {"sysFlag": "2", "commitOffset": "0", "suspendTimeoutMillis": "15000", "subscription": "*", "subVersion": "0"}
_OFFSET = {"consumerGroup": "group", "topic": "topic", "queueId": "0"}
_HEARTBEAT = b'{"clientID":"10.0.0.1@1","consumerDataSet":[],"producerDataSet":[{"groupName":"group"}]}'
_COMMANDS = (
    RemotingCommand(RequestCode.SEND_MESSAGE_V2, ext_fields=_SEND, body=b"x" * 200),
    RemotingCommand(RequestCode.PULL_MESSAGE, ext_fields=_PULL),
    RemotingCommand(RequestCode.QUERY_CONSUMER_OFFSET, ext_fields=_OFFSET),
    RemotingCommand(RequestCode.HEART_BEAT, body=_HEARTBEAT),
    RemotingCommand(RequestCode.UPDATE_CONSUMER_OFFSET, flag=2, ext_fields=_OFFSET | {"commitOffset": "5"}),
    RemotingCommand(ResponseCode.SUCCESS, flag=1, remark="a response without a request"),
)
_TEXTS = (
    "topic",
    "topic",
    "group",
    "group",
    "",
    "t",
    "%RETRY%group",
    "x" * 300,
    "grüße",
    "../../x",
    "a/b",
    "*",
    "a || b",
)
_TEXTS += (
    "a > 1 AND",
    "SCHEDULE_TOPIC_XXXX",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "TBW102",
    "broker-a",
    "DELAY\x013\x02",
    "\0",
    "0",
)
_TEXTS += (
    "TIMER_DELAY_MS\x01-5\x02",
    "7F00000100002A9F0000000000001234",
    "CID@1",
    "SQL92",
    f"KEYS\x01{'k ' * 200}\x02",
)
_CONSUMER = (
    b'{"clientID":"CID@1","consumerDataSet":[{"groupName":"group","consumeType":"CONSUME_PASSIVELY","messageModel":'
    b'"CLUSTERING","consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","subscriptionDataSet":[{"topic":"topic",'
    b'"subString":"a >","expressionType":"SQL92","subVersion":1}]}]}'
)
_BODIES = (b"", b"{}", b"[]", b"null", b"x" * 200, b"\0\0\0\x10" * 8, b'{"a":' * 2_000, b'{"mqSet":[{"topic":1}]}')
_BODIES += (
    _HEARTBEAT,
    _CONSUMER,
    b'{"consumerGroup":"group","clientId":"CID@1","mqSet":[{"topic":"topic","brokerName":"broker-a","queueId":-7}]}',
    b'{"offsetTable":{{"topic":"topic","brokerName":"x","queueId":0}:99999999999999}}',
    b"messageQueueListening=\0\xff\nname = = value\n",
)
_REQUESTS = [(code, kind) for code, kind in REQUEST_HEADERS.items() if code != RequestCode.UPDATE_BROKER_CONFIG]
_WRONG_VALUES = (
    (b'"0"', b'"-1"'),
    (b'"code":', b'"code":1e9,"x":'),
    (b'"opaque":0', b'"opaque":99999999999999999999'),
    (b'"flag":0', b'"flag":"0"'),
    (b'"extFields":{', b'"extFields":[{'),
    (b"JAVA", b"KLINGON"),
    (b"PYTHON", b"\xff\xfe"),
    (b'"topic"', b'"queueId"'),
    (b'"4"', b'"9999999999999999999999999"'),
)


# --- frames -----------------------------------------------------------------------------------------


class Mutator:
    """Generator of damaged frames; the same seed yields the same frames."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._frames = [self._encode(command, form) for command in _COMMANDS for form in SerializeType]
        self._ways = [
            self._flip_bits,
            self._overwrite,
            self._cut_off,
            self._cut_out,
            self._repeat_a_piece,
            self._change_length,
            self._change_header_length,
            self._change_header_text,
            self._join_two,
            self._garbage,
            *[self._request_with_odd_values] * 3,
        ]

    @staticmethod
    def _encode(command: RemotingCommand, form: SerializeType) -> bytes:
        command.serialize_type = form
        return encode_command(command)

    def next_frame(self) -> bytes:
        """Return a frame with one to three kinds of damage; one frame in fifty is whole."""
        frame = bytearray(self._random.choice(self._frames))
        if self._random.random() > 0.02:
            for _ in range(self._random.choice((1, 1, 2, 3))):
                self._random.choice(self._ways)(frame)
        return bytes(frame)

    def _position(self, frame: bytearray) -> int:
        return self._random.randrange(len(frame)) if frame else 0

    def _flip_bits(self, frame: bytearray) -> None:
        for _ in range(self._random.choice((1, 1, 2, 8))):
            if frame:
                frame[self._position(frame)] ^= 1 << self._random.randrange(8)

    def _overwrite(self, frame: bytearray) -> None:
        at = self._position(frame)
        pieces = (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b'"\\u0', b"]}{[")
        frame[at : at + 4] = self._random.choice(pieces)

    def _cut_off(self, frame: bytearray) -> None:
        del frame[self._position(frame) :]

    def _cut_out(self, frame: bytearray) -> None:
        at = self._position(frame)
        del frame[at : at + self._random.randrange(1, 20)]
        self._correct_length(frame)

    def _repeat_a_piece(self, frame: bytearray) -> None:
        at = self._position(frame)
        frame[at:at] = frame[at : at + 20] * self._random.randrange(1, 50)
        self._correct_length(frame)

    def _change_length(self, frame: bytearray) -> None:
        lengths = (0, 3, 4, 5, len(frame), 20_000, 16_777_213, 1 << 31, 0xFFFFFFFF)
        frame[:4] = self._random.choice(lengths).to_bytes(4, "big")

    def _change_header_length(self, frame: bytearray) -> None:
        frame[5:8] = self._random.choice((0, 1, len(frame), 0xFFFFFF)).to_bytes(3, "big")

    def _change_header_text(self, frame: bytearray) -> None:
        old, new = self._random.choice(_WRONG_VALUES)
        frame[:] = frame.replace(old, new)
        self._correct_length(frame)

    def _join_two(self, frame: bytearray) -> None:
        other = self._random.choice(self._frames)
        frame[self._position(frame) :] = other[self._random.randrange(len(other)) :]

    def _garbage(self, frame: bytearray) -> None:
        frame[:] = self._random.randbytes(self._random.randrange(1, 300))

    def _request_with_odd_values(self, frame: bytearray) -> None:
        """Replace the frame by a valid one of any code, with values that are odd, missing, or of another type."""
        code, kind = self._random.choice(_REQUESTS)
        values = {field.name: self._odd_value(str(field.type)) for field, _, _ in declared_fields(kind)}
        fields = kind(**values).to_ext_fields()
        for name in list(fields):
            if self._random.random() < 0.05:
                del fields[name]
            elif self._random.random() < 0.05:
                fields[name] = self._random.choice(("", "x", "-1", "1e3", "true", "\0", "9" * 30, "٣"))
        body = self._random.choice(_BODIES)
        flag = self._random.choice((0, 0, 0, 2))
        frame[:] = self._encode(RemotingCommand(code, flag=flag, ext_fields=fields, body=body), SerializeType.JSON)

    def _odd_value(self, kind: str) -> object:
        if "bool" in kind:
            return self._random.random() < 0.5
        if "Long" in kind:
            return self._random.choice((0, 0, 1, -1, 5, (1 << 63) - 1, -(1 << 63), 1 << 31, 1_767_225_600_000))
        if "int" in kind:
            return self._random.choice((0, 0, 1, -1, 2, 32, 6, (1 << 31) - 1, -(1 << 31)))
        if "Boundary" in kind:
            return BoundaryType.UPPER
        return self._random.choice(_TEXTS)

    @staticmethod
    def _correct_length(frame: bytearray) -> None:
        """Set the right length, so that the damage reaches the code that decodes the rest."""
        if len(frame) >= 4:
            frame[:4] = (len(frame) - 4).to_bytes(4, "big")


# --- clients ----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Results of all frames."""

    frames: int = 0
    survived: int = 0  # the check request after the frame got its response
    closed: int = 0  # the server closed the connection
    incomplete: int = 0  # the frame announces more bytes than it has: the check request became a part of it
    responses: int = 0  # to damaged frames
    refused: int = 0  # with another code than SUCCESS
    hanging: list[str] = field(default_factory=list)
    other_us: list[float] = field(default_factory=list)
    other_errors: list[str] = field(default_factory=list)

    def add_other(self, took_us: float, response: RemotingCommand | BrokerError) -> None:
        """Record a request of the other client."""
        self.other_us.append(took_us)
        if isinstance(response, BrokerError):
            self.other_errors.append(str(response))

    seconds: float = 0.0


class Attacker:
    """Sender of damaged frames, over one connection at a time."""

    def __init__(self, address: HostAddress, outcome: Outcome) -> None:
        self._address = address
        self._outcome = outcome
        self._opaque = 0x5EED_0000
        self._connect()

    def _connect(self) -> None:
        self.peer = RawPeer(self._address)
        self.peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, frame: bytes) -> None:
        """Send a frame and the check request."""
        self._opaque += 1
        self._outcome.frames += 1
        self._frame = frame
        data = frame + encode_command(RemotingCommand(CHECK, self._opaque, ext_fields={"topic": "t"}))
        self._is_incomplete = is_incomplete(data, self._opaque)
        try:
            self.peer.send(data)
            if self._is_incomplete:
                self.peer.socket.shutdown(socket.SHUT_WR)  # the server sees no check request, and may wait for more
        except OSError:
            pass  # closed already, which `finish` detects

    def finish(self) -> None:
        """Wait until the check request gets its response or the server closes the connection."""
        try:
            while (command := self.peer.next_command()) is not None:
                if command.is_response and command.opaque == self._opaque:
                    self._outcome.survived += 1
                    return
                if command.is_response:
                    self._outcome.responses += 1
                    self._outcome.refused += command.code != ResponseCode.SUCCESS
            self._outcome.incomplete += self._is_incomplete
            self._outcome.closed += not self._is_incomplete
        except TimeoutError:
            self._outcome.hanging.append(self._frame.hex())
        self.peer.socket.close()
        self._connect()


def is_incomplete(data: bytes, opaque: int) -> bool:
    """Return True if the check request at the end of *data* has become a part of the frame before it."""
    decoder = FrameDecoder()
    decoder.feed(data)
    last = None
    try:
        while (command := decoder.next_command()) is not None:
            last = command.opaque
    except RemoteProtocolError:
        return False
    return last != opaque


def attack(address: HostAddress, frames: int, seed: int, connections: int, seconds: float, outcome: Outcome) -> None:
    """Send a number of frames, or for a time; stop at the first frame after which the server hangs."""
    mutator = Mutator(seed)
    attackers = [Attacker(address, outcome) for _ in range(connections)]
    start = time.monotonic()
    while outcome.frames < frames and not outcome.hanging and time.monotonic() - start < seconds:
        for attacker in attackers:
            attacker.send(mutator.next_frame())
        for attacker in attackers:
            attacker.finish()
    for attacker in attackers:
        attacker.peer.socket.close()
    outcome.seconds = time.monotonic() - start


def checking_client(address: HostAddress, outcome: Outcome) -> AbstractContextManager[None]:
    """Return the context of a client that sends a valid request every few milliseconds."""
    return other_client(address, lambda: RemotingCommand(CHECK, ext_fields={"topic": "t"}), 0.003, outcome.add_other)


# --- the attacked server ----------------------------------------------------------------------------


def decoding_server() -> RemotingServer:
    """Return a server that decodes requests as a broker does, and stores nothing."""

    def send(connection: Connection, request: RemotingCommand) -> RemotingCommand:
        request.header(SendMessageRequestHeaderV2)
        return request.response()

    def pull(connection: Connection, request: RemotingCommand) -> RemotingCommand:
        request.header(PullMessageRequestHeader)
        return request.response(ResponseCode.PULL_NOT_FOUND)

    def offset(connection: Connection, request: RemotingCommand) -> RemotingCommand:
        request.header(QueryConsumerOffsetRequestHeader)
        return request.response()

    def heartbeat(connection: Connection, request: RemotingCommand) -> RemotingCommand:
        HeartbeatData.decode(request.body)
        return request.response()

    def error_response(request: RemotingCommand, exc: Exception) -> RemotingCommand | None:
        is_expected = isinstance(exc, RemoteProtocolError)
        return request.response(ResponseCode.SYSTEM_ERROR, remark=str(exc)) if is_expected else None

    settings = RemotingServerSettings()
    server = RemotingServer(HostAddress("127.0.0.1", 0), settings, SystemClock(), error_response=error_response)
    server.register(RequestCode.SEND_MESSAGE_V2, send)
    server.register(RequestCode.PULL_MESSAGE, pull)
    server.register(RequestCode.QUERY_CONSUMER_OFFSET, offset)
    server.register(RequestCode.UPDATE_CONSUMER_OFFSET, offset)
    server.register(RequestCode.HEART_BEAT, heartbeat)
    server.register(CHECK, lambda connection, request: request.response())
    return server


def serve(server: RemotingServer) -> None:
    """Start a server, print its address, and run until a signal arrives."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(40),  # a warning per bad frame would slow the bench
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    server.start()
    print(server.address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.stop()


@contextmanager
def server_process(module: str) -> Iterator[tuple[HostAddress, int]]:
    """Run ``python -m module --serve``; yield the server's address and process id."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # inherited: the child's threads leave the signals to sigwait
    with subprocess.Popen([sys.executable, "-m", module, "--serve"], stdout=subprocess.PIPE, text=True) as child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        try:
            assert child.stdout is not None
            yield parse_address(child.stdout.readline()), child.pid
        finally:
            child.terminate()


def process_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1_024


def measure(address: HostAddress, pid: int | None, options: argparse.Namespace) -> None:
    outcome, warm = Outcome(), Outcome()
    attack(address, min(20_000, options.frames), options.seed + 1, options.connections, options.seconds, warm)
    before = process_mib(pid) if pid else 0.0
    with checking_client(address, outcome):
        attack(address, options.frames, options.seed, options.connections, options.seconds, outcome)
    print(
        f"{outcome.frames:,} damaged frames (seed {options.seed}) in {outcome.seconds:,.0f} s: {outcome.survived:,} "
        f"left their connection open, {outcome.closed:,} closed it, {outcome.incomplete:,} were incomplete; "
        f"{outcome.responses:,} got a response, {outcome.refused:,} of them with an error",
        flush=True,
    )
    report("frames after which the server hung", len(outcome.hanging), "", "0")
    report("failed requests of another client", len(outcome.other_errors), "", "0")
    report("requests of another client", len(outcome.other_us), "", "all of them")
    report("  of these, p50", percentile(outcome.other_us, 0.5), "us", "none")
    report("  of these, p99", percentile(outcome.other_us, 0.99), "us", "none")
    if pid:
        report("memory of the server before", before, "MiB", "none")
        report("memory of the server grew by", process_mib(pid) - before, "MiB", "< 16")
    for frame in outcome.hanging[:3]:
        print("hanging:", frame)
    for error in outcome.other_errors[:3]:
        print("other client:", error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=900.0, help="stop after this time, even with frames left")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--address", help="address of a running server")
    parser.add_argument("--pid", type=int, help="process id of that server, to measure its memory")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(decoding_server())
    elif options.address:
        measure(parse_address(options.address), options.pid, options)
    else:
        with server_process("bench.fuzz") as (address, pid):
            measure(address, pid, options)


if __name__ == "__main__":
    run(main)
