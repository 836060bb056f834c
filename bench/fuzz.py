"""Send mutated frames to a server: each is answered, passed over, or ends its own connection; nobody else notices.

Frames that clients really send are damaged: bits, lengths, pieces, other types, two frames in one, garbage; others
are whole, and ask for any code with values that make no sense. After each goes a question without fault. Either that
is answered, or the connection has ended; neither is a server that is stuck. Meanwhile a neighbour asks on a connection
of its own, and the server's memory is watched.

    python -m bench.fuzz [--frames 1000000] [--seconds 900] [--seed 1] [--address HOST:PORT --pid PID]

Without an address a server of its own is started, which reads every header and body as a broker does.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from bench.measure import percentile, report, run
from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerError, RemoteProtocolError
from mqtemplate.message import HostAddress
from mqtemplate.remoting import (
    Connection,
    RemotingClient,
    RemotingClientSettings,
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
from mqtemplate.remoting.protocol.headers.fields import BoundaryType
from mqtemplate.remoting.protocol.headers.group import QueryConsumerOffsetRequestHeader
from mqtemplate.remoting.protocol.headers.message import PullMessageRequestHeader, SendMessageRequestHeaderV2
from tests.remoting.protocol.code_tables import REQUEST_HEADERS

QUESTION = RequestCode.GET_ROUTEINFO_BY_TOPIC
"""Every server of ours answers it, if only with an error."""
_STUCK_S = 20.0

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
    RemotingCommand(ResponseCode.SUCCESS, flag=1, remark="an answer that nobody asked for"),
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
    "KEYS\x01" + "k " * 200 + "\x02",
)
_BODIES = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b"x" * 200,
    b"\0\0\0\x10" * 8,
    b'{"a":' * 2_000,
    b'{"mqSet":[{"topic":1}]}',
    _HEARTBEAT,
)
_CONSUMER = (
    b'{"clientID":"CID@1","consumerDataSet":[{"groupName":"group","consumeType":"CONSUME_PASSIVELY","messageModel":'
    b'"CLUSTERING","consumeFromWhere":"CONSUME_FROM_LAST_OFFSET","subscriptionDataSet":[{"topic":"topic",'
    b'"subString":"a >","expressionType":"SQL92","subVersion":1}]}]}'
)
_BODIES += (
    _CONSUMER,
    b'{"consumerGroup":"group","clientId":"CID@1","mqSet":[{"topic":"topic","brokerName":"broker-a","queueId":-7}]}',
    b'{"offsetTable":{{"topic":"topic","brokerName":"x","queueId":0}:99999999999999}}',
    b"messageQueueListening=\0\xff\nname = = value\n",
)
_REQUESTS = [(code, kind) for code, kind in REQUEST_HEADERS.items() if code != RequestCode.UPDATE_BROKER_CONFIG]


# --- what is sent -----------------------------------------------------------------------------------


class Mutator:
    """Damaged frames, the same ones for the same seed."""

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
            self._ask_oddly,
            self._ask_oddly,
            self._ask_oddly,
        ]

    @staticmethod
    def _encode(command: RemotingCommand, form: SerializeType) -> bytes:
        command.serialize_type = form
        return encode_command(command)

    def next_frame(self) -> bytes:
        """A frame with one to three kinds of damage; one in fifty has none."""
        frame = bytearray(self._random.choice(self._frames))
        if self._random.random() > 0.02:
            for _ in range(self._random.choice((1, 1, 2, 3))):
                self._random.choice(self._ways)(frame)
        return bytes(frame)

    def _place(self, frame: bytearray) -> int:
        return self._random.randrange(len(frame)) if frame else 0

    def _flip_bits(self, frame: bytearray) -> None:
        for _ in range(self._random.choice((1, 1, 2, 8))):
            if frame:
                frame[self._place(frame)] ^= 1 << self._random.randrange(8)

    def _overwrite(self, frame: bytearray) -> None:
        at = self._place(frame)
        frame[at : at + 4] = self._random.choice(
            (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b'"\\u0', b"]}{[")
        )

    def _cut_off(self, frame: bytearray) -> None:
        del frame[self._place(frame) :]

    def _cut_out(self, frame: bytearray) -> None:
        at = self._place(frame)
        del frame[at : at + self._random.randrange(1, 20)]
        self._mend_length(frame)

    def _repeat_a_piece(self, frame: bytearray) -> None:
        at = self._place(frame)
        frame[at:at] = frame[at : at + 20] * self._random.randrange(1, 50)
        self._mend_length(frame)

    def _change_length(self, frame: bytearray) -> None:
        frame[:4] = self._random.choice((0, 3, 4, 5, len(frame), 20_000, 16_777_213, 1 << 31, 0xFFFFFFFF)).to_bytes(
            4, "big"
        )

    def _change_header_length(self, frame: bytearray) -> None:
        frame[5:8] = self._random.choice((0, 1, len(frame), 0xFFFFFF)).to_bytes(3, "big")

    def _change_header_text(self, frame: bytearray) -> None:
        old, new = self._random.choice(
            (
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
        )
        frame[:] = frame.replace(old, new)
        self._mend_length(frame)

    def _join_two(self, frame: bytearray) -> None:
        other = self._random.choice(self._frames)
        frame[self._place(frame) :] = other[self._random.randrange(len(other)) :]

    def _garbage(self, frame: bytearray) -> None:
        frame[:] = self._random.randbytes(self._random.randrange(1, 300))

    def _ask_oddly(self, frame: bytearray) -> None:
        """A frame without fault, of any code, whose values are odd, missing, or of another type."""
        code, kind = self._random.choice(_REQUESTS)
        values = {field.name: self._odd_value(str(field.type)) for field in dataclasses.fields(kind)}
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
    def _mend_length(frame: bytearray) -> None:
        """So that the damage reaches what lies behind the length."""
        if len(frame) >= 4:
            frame[:4] = (len(frame) - 4).to_bytes(4, "big")


# --- one connection ---------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of the frames."""

    frames: int = 0
    survived: int = 0  # the question behind the frame was answered
    closed: int = 0  # the connection was ended
    swallowed: int = 0  # the frame is longer than what came: the question became a part of it
    answers: int = 0  # to damaged frames
    refusals: int = 0  # of these, with another code than SUCCESS
    stuck: list[str] = field(default_factory=list)
    neighbour_us: list[float] = field(default_factory=list)
    neighbour_problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Attacker:
    """One connection at a time, over which damaged frames go."""

    def __init__(self, address: HostAddress, outcome: Outcome) -> None:
        self._address = address
        self._outcome = outcome
        self._opaque = 0x5EED_0000
        self._connect()

    def _connect(self) -> None:
        self.socket = socket.create_connection(self._address, _STUCK_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = FrameDecoder()

    def send(self, frame: bytes) -> None:
        """Send the frame, and the question behind it."""
        self._opaque += 1
        self._outcome.frames += 1
        self._frame = frame
        data = frame + encode_command(RemotingCommand(QUESTION, self._opaque, ext_fields={"topic": "t"}))
        self._is_swallowed = swallows(data, self._opaque)
        try:
            self.socket.sendall(data)
            if self._is_swallowed:
                self.socket.shutdown(socket.SHUT_WR)  # the server sees no question, and may wait for more
        except OSError:
            pass  # closed already; `finish` will see

    def finish(self) -> None:
        """Wait until the question is answered, or the connection has ended."""
        try:
            while (answer := self._next_command()) is not None:
                if answer.is_response and answer.opaque == self._opaque:
                    self._outcome.survived += 1
                    return
                if answer.is_response:
                    self._outcome.answers += 1
                    self._outcome.refusals += answer.code != ResponseCode.SUCCESS
            self._outcome.swallowed += self._is_swallowed
            self._outcome.closed += not self._is_swallowed
        except TimeoutError:
            self._outcome.stuck.append(self._frame.hex())
        self.socket.close()
        self._connect()

    def _next_command(self) -> RemotingCommand | None:
        while (command := self._decoder.next_command()) is None:
            try:
                data = self.socket.recv(65_536)
            except ConnectionError:
                return None
            if not data:
                return None
            self._decoder.feed(data)
        return command


def swallows(data: bytes, question: int) -> bool:
    """Whether the question at the end of *data* has become a part of the frame before it."""
    decoder = FrameDecoder()
    decoder.feed(data)
    last = None
    try:
        while (command := decoder.next_command()) is not None:
            last = command.opaque
    except RemoteProtocolError:
        return False
    return last != question


def attack(address: HostAddress, frames: int, seed: int, connections: int, seconds: float, outcome: Outcome) -> None:
    """Send so many frames, or for so long; ends at the first server that is stuck."""
    mutator = Mutator(seed)
    attackers = [Attacker(address, outcome) for _ in range(connections)]
    begin = time.monotonic()
    while outcome.frames < frames and not outcome.stuck and time.monotonic() - begin < seconds:
        for attacker in attackers:
            attacker.send(mutator.next_frame())
        for attacker in attackers:
            attacker.finish()
    for attacker in attackers:
        attacker.socket.close()
    outcome.seconds = time.monotonic() - begin


@contextmanager
def neighbour(address: HostAddress, outcome: Outcome) -> Iterator[None]:
    """Somebody who asks every few milliseconds over one connection, and notes each time and each problem."""
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    stopped = threading.Event()

    def live() -> None:
        while not stopped.wait(0.003):
            start = time.perf_counter()
            try:
                client.invoke(str(address), RemotingCommand(QUESTION, ext_fields={"topic": "t"}), 10_000)
            except BrokerError as exc:
                outcome.neighbour_problems.append(str(exc))
            outcome.neighbour_us.append((time.perf_counter() - start) * 1e6)

    thread = threading.Thread(target=live, name="neighbour")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        client.close()


# --- the server that is attacked --------------------------------------------------------------------


def reading_server() -> RemotingServer:
    """A server that reads what it is sent as a broker does, and keeps nothing."""
    server = RemotingServer(HostAddress("127.0.0.1", 0), RemotingServerSettings(), SystemClock())

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

    server.register(RequestCode.SEND_MESSAGE_V2, send)
    server.register(RequestCode.PULL_MESSAGE, pull)
    server.register(RequestCode.QUERY_CONSUMER_OFFSET, offset)
    server.register(RequestCode.UPDATE_CONSUMER_OFFSET, offset)
    server.register(RequestCode.HEART_BEAT, heartbeat)
    server.register(QUESTION, lambda connection, request: request.response())
    server.problem = lambda request, exc: (
        request.response(ResponseCode.SYSTEM_ERROR, remark=str(exc)) if isinstance(exc, RemoteProtocolError) else None
    )
    return server


def serve() -> None:
    """Be the server: print the address, and run until told to end."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(40),  # a line for each bad frame would be the bench
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    server = reading_server()
    server.start()
    print(server.address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.stop()


@contextmanager
def server_process() -> Iterator[tuple[HostAddress, int]]:
    """A server in a process of its own; its address and its process."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # so that the child's threads leave them to sigwait
    with subprocess.Popen([sys.executable, "-m", "bench.fuzz", "--serve"], stdout=subprocess.PIPE, text=True) as child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        try:
            assert child.stdout is not None
            yield parse_address(child.stdout.readline()), child.pid
        finally:
            child.terminate()


def process_mib(pid: int) -> float:
    """Resident memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1_024


def measure(address: HostAddress, pid: int | None, options: argparse.Namespace) -> None:
    outcome, warm = Outcome(), Outcome()
    attack(address, min(20_000, options.frames), options.seed + 1, options.connections, options.seconds, warm)
    before = process_mib(pid) if pid else 0.0
    with neighbour(address, outcome):
        attack(address, options.frames, options.seed, options.connections, options.seconds, outcome)
    print(
        f"{outcome.frames:,} damaged frames (seed {options.seed}) in {outcome.seconds:,.0f} s: {outcome.survived:,} "
        f"survived, {outcome.closed:,} ended their connection, {outcome.swallowed:,} announced more than came; "
        f"{outcome.answers:,} were answered, "
        f"{outcome.refusals:,} of them with an error",
        flush=True,
    )
    report("frames that left a connection stuck", len(outcome.stuck), "", "0")
    report("round trips of a neighbour that failed", len(outcome.neighbour_problems), "", "0")
    report("round trips of a neighbour meanwhile", len(outcome.neighbour_us), "", "all of them")
    report("  of these, p50", percentile(outcome.neighbour_us, 0.5), "us", "as it comes")
    report("  of these, p99", percentile(outcome.neighbour_us, 0.99), "us", "as it comes")
    if pid:
        report("memory of the server before", before, "MiB", "as it comes")
        report("memory of the server grew by", process_mib(pid) - before, "MiB", "< 16")
    for frame in outcome.stuck[:3]:
        print("stuck:", frame)
    for problem in outcome.neighbour_problems[:3]:
        print("neighbour:", problem)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=900.0, help="stop then, also with frames left")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--address", help="of a server that runs already")
    parser.add_argument("--pid", type=int, help="its process, to watch its memory")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.address:
        measure(parse_address(options.address), options.pid, options)
    else:
        with server_process() as (address, pid):
            measure(address, pid, options)


if __name__ == "__main__":
    run(main)
