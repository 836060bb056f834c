"""Hostile clients against one server while 20 neighbours send: times, memory, lost messages, and SIGTERM.

Each neighbour sends one message to its own topic every 20 ms and waits for the response. The bench measures them
alone, then beside each attack, then beside all attacks at once. At the end it sends SIGTERM while all attacks go on.
An attack is one that held the others, or filled the memory, before there were limits. The hostile clients connect from
other addresses of the loopback network than the neighbours.

    python -m bench.hostile [--grpc] [--seconds 5] [--neighbours 20] [--only NAME[,NAME]]

With ``--grpc`` the attacks are those of HTTP/2 and of the gRPC protocol, `bench.grpc_attacks`, on a server with TLS
that takes plain connections, too. Every second neighbour is a client of the gRPC protocol, which sends a message, then
receives and acknowledges it. The bench prints how the server answered each attack, the memory and the threads
that it took, and the connections that remain after it.

The memory is the largest that the server had during the attack without the pages of its mapped files, which the system
takes back when it needs them; it is read each 20 ms. The next line has the largest so far with those pages.

The time of a message is from before it is written until its response is read. The programs of the attacks run on the
same machine, with the lowest priority: hostile clients elsewhere do not take the processor from the server. The
neighbours do, and other programs: so the bench prints the processors that the server and the neighbours used, and how
long a thread of the server waited for a processor each time that it could run. Where that is milliseconds, the
percentiles tell more of the machine than of the server. A send waits for the disk: with ``BENCH_DIR`` in memory, such
as ``/dev/shm``, it does not.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from bench import grpc_attacks
from bench.connections import send_request
from bench.measure import Scheduled, percentile, report, run, scratch_folder
from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerError
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import Code
from mqtemplate.http2.frames import window_update_frame
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.remoting import RemotingClient, RemotingClientSettings, parse_address
from mqtemplate.remoting.protocol import FrameDecoder, RemotingCommand, RequestCode, ResponseCode, encode_command
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, HeartbeatData, LockBatchRequestBody, ProducerData
from mqtemplate.remoting.protocol.headers.group import GetMaxOffsetRequestHeader, OffsetResponseHeader
from mqtemplate.remoting.protocol.messages import encode_batch
from tests.http2.wire import SocketPeer, call
from tests.remoting.certificates import Certificates, has_openssl
from tests.server.process import BrokerProcess

_PERIOD_S = 0.02
_ZIPPED = 0x301  # system flag of a body that zlib compressed
_QUEUES = 4
_SWITCH_INTERVAL_S = 0.0001
"""The neighbours are threads of one process. With Python's 5 ms they would wait for each other, not for the server."""

_T = TypeVar("_T")


# --- neighbours -------------------------------------------------------------------------------------


class Neighbour(threading.Thread):
    """Client that sends every 20 ms.

    Attributes:
        times_ms: Times of its requests.
    """

    kind = "remoting"

    def __init__(self, address: str, topic: str, seconds: float) -> None:
        super().__init__(name=topic)
        self.topic = topic
        self.times_ms: list[float] = []
        self.acknowledged = 0
        self.failed = 0
        self._address = address
        self._seconds = seconds

    def run(self) -> None:
        self._open()
        pause = threading.Event()
        due = time.monotonic()
        end = due + self._seconds
        while due < end:
            pause.wait(max(due - time.monotonic(), 0))
            due = max(due + _PERIOD_S, time.monotonic())
            try:
                is_stored = self._timed(self._send)
                self._after_send()
            except (BrokerError, OSError, KeyError):
                is_stored = False
            self.acknowledged += is_stored
            self.failed += not is_stored
        self._close()

    def _timed(self, work: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.times_ms.append((time.perf_counter() - start) * 1e3)

    def _open(self) -> None:
        self._client = RemotingClient(RemotingClientSettings(), SystemClock())

    def _send(self) -> bool:
        return self._client.invoke(self._address, send_request(self.topic), 10_000).code == ResponseCode.SUCCESS

    def _after_send(self) -> None:
        """Do nothing more."""

    def _close(self) -> None:
        self._client.close()


class GrpcNeighbour(Neighbour):
    """Client of the gRPC protocol, that sends, receives and acknowledges a message every 20 ms."""

    kind = "gRPC"

    def _open(self) -> None:
        self._peer = SocketPeer(parse_address(self._address))
        self._peer.send(window_update_frame(0, 1 << 30))
        self._stream_id = -1

    def _call(self, method: str, request: Any) -> list[Any]:
        """Return the messages of the answer."""
        self._stream_id += 2
        path, client_id = protos.method_path(method), self.topic
        self._peer.send(call(self._stream_id, path, request.SerializeToString(), x_mq_client_id=client_id))
        fields, content = self._peer.response()
        if fields["grpc-status"] != "0":
            raise BrokerError(f"{method}: {fields}")
        return [getattr(protos, f"{method}Response").FromString(each) for each in content]

    def _send(self) -> bool:
        request = protos.SendMessageRequest()
        message = request.messages.add(body=bytes(1_024))
        message.topic.name, message.system_properties.message_id = self.topic, "id"
        [answer] = self._call("SendMessage", request)
        return bool(answer.status.code == Code.OK)

    def _after_send(self) -> None:
        request = protos.ReceiveMessageRequest(batch_size=32)
        request.group.name, request.message_queue.topic.name = self.topic, self.topic
        request.invisible_duration.seconds, request.long_polling_timeout.seconds = 30, 5
        received = self._timed(lambda: self._call("ReceiveMessage", request))
        ack = protos.AckMessageRequest(group=request.group, topic=request.message_queue.topic)
        for each in received:
            if each.HasField("message"):
                ack.entries.add(receipt_handle=each.message.system_properties.receipt_handle)
        if ack.entries:
            self._timed(lambda: self._call("AckMessage", ack))

    def _close(self) -> None:
        self._peer.socket.close()


def neighbours_process(address: str, grpc: str, count: int, seconds: float) -> None:
    """Run the neighbours, and print each time in ms, and the messages of each topic."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    neighbours = [
        GrpcNeighbour(grpc, f"neighbour-{number}", seconds)
        if grpc and number % 2
        else Neighbour(address, f"neighbour-{number}", seconds)
        for number in range(count)
    ]
    for neighbour in neighbours:
        neighbour.start()
    for neighbour in neighbours:
        neighbour.join()
    for neighbour in neighbours:
        print("topic", neighbour.topic, neighbour.acknowledged, neighbour.failed)
        for milliseconds in neighbour.times_ms:
            print(neighbour.kind, milliseconds)


# --- attacks ----------------------------------------------------------------------------------------


class HostileClient:
    """A connection from an address of its own. It sends without waiting, or waits for each response."""

    def __init__(self, address: HostAddress, number: int) -> None:
        self._decoder = FrameDecoder()
        self._socket = socket.create_connection(address, 20.0, source_address=(f"127.0.1.{number}", 0))

    def send(self, *requests: RemotingCommand) -> None:
        self._socket.sendall(b"".join(map(encode_command, requests)))

    def invoke(self, request: RemotingCommand) -> RemotingCommand:
        self.send(request)
        while (response := self._decoder.next_command()) is None:
            data = self._socket.recv(1 << 18)
            if not data:
                raise ConnectionError("the server has closed the connection")
            self._decoder.feed(data)
        return response

    def close(self) -> None:
        self._socket.close()


Attack = Callable[[HostileClient, int], None]
"""One round of an attack; it is repeated until its time is over."""


def _request(code: int, body: bytes = b"", **fields: object) -> RemotingCommand:
    return RemotingCommand(code, body=body, ext_fields={name: str(value) for name, value in fields.items()})


def bombs(client: HostileClient, number: int) -> None:
    """Messages that become 256 MiB when they are decompressed, and a query for them."""
    if number == 0:
        packer = zlib.compressobj(9)
        body = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
        for _ in range(8):
            request = send_request("bombs")
            request.ext_fields |= {"f": str(_ZIPPED), "i": "KEYS\x01bomb\x02"}
            request.body = body
            client.invoke(request)
    fields = {"topic": "bombs", "key": "bomb", "maxNum": 32, "beginTimestamp": 0, "endTimestamp": (1 << 62)}
    client.invoke(_request(RequestCode.QUERY_MESSAGE, **fields))


def _pull(group: str, expression: str, offset: int, kind: str = "SQL92") -> RemotingCommand:
    return _request(
        RequestCode.PULL_MESSAGE,
        consumerGroup=group,
        topic="hostile",
        queueId=0,
        queueOffset=offset,
        maxMsgNums=32,
        sysFlag=6,
        commitOffset=0,
        suspendTimeoutMillis=1 << 62,
        subVersion=0,
        subscription=expression,
        expressionType=kind,
    )


def expressions(client: HostileClient, number: int) -> None:
    """SQL92 expressions that take long to parse, each another one."""
    client.invoke(_pull("hostile", "-" * (32_000 - number % 1_000), 0))
    client.invoke(_pull("hostile", "-" * (8_000 - number % 1_000), 0))
    client.invoke(_pull("hostile", f"a = {number} OR " * 500 + "b = 1", 0))


def batches(client: HostileClient, number: int) -> None:
    """A batch of 700,000 empty messages, and the longest one that is allowed."""
    for count in (700_000, 4_096):
        request = send_request("hostile")
        request.code, request.ext_fields["m"] = RequestCode.SEND_BATCH_MESSAGE, "true"
        request.body = encode_batch([Message("hostile", b"")]) * count
        client.invoke(request)


def locks(client: HostileClient, number: int) -> None:
    """Locks of many queues, each time for another group."""
    queues = [MessageQueue("hostile", "broker-a", queue) for queue in range(9_000)]
    for count in (9_000, 300):
        body = LockBatchRequestBody(consumer_group=f"l-{number}", client_id="hostile", mq_set=queues[:count])
        client.invoke(_request(RequestCode.LOCK_BATCH_MQ, body.encode()))


def producer_groups(client: HostileClient, number: int) -> None:
    """Producers of many groups."""
    groups = [ProducerData(group_name=f"p-{number}-{group}") for group in range(500)]
    client.invoke(
        _request(RequestCode.HEART_BEAT, HeartbeatData(client_id="hostile", producer_data_set=groups).encode())
    )


def consumer_groups(client: HostileClient, number: int) -> None:
    """Consumers of many new groups: each writes tables."""
    groups = [ConsumerData(group_name=f"c-{number}-{group}") for group in range(300)]
    client.invoke(
        _request(RequestCode.HEART_BEAT, HeartbeatData(client_id="hostile", consumer_data_set=groups).encode())
    )


def held_pulls(client: HostileClient, number: int) -> None:
    """Pulls that wait for messages for ever. Their client reads no response."""
    client.send(*(_pull("hostile", "*", 1 << 40 if number % 2 else 0, "TAG") for _ in range(200)))


def topics(client: HostileClient, number: int) -> None:
    """First messages of many topics: each writes a table and opens files."""
    client.invoke(send_request(f"hostile-{id(client)}-{number}"))


def half_messages(client: HostileClient, number: int) -> None:
    """Transactions that nobody ends."""
    request = send_request("hostile")
    request.ext_fields["i"] = "TRAN_MSG\x01true\x02PGROUP\x01hostile\x02"
    client.invoke(request)


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        bombs,
        expressions,
        batches,
        locks,
        producer_groups,
        consumer_groups,
        held_pulls,
        topics,
        half_messages,
    )
}


def attack_until(name: str, address: HostAddress, place: int, stopped: threading.Event) -> None:
    """Repeat an attack. A connection that the server closes is opened again."""
    attack, client = ATTACKS[name], None
    for number in itertools.count():
        if stopped.is_set():
            break
        try:
            client = client or HostileClient(address, place)
            attack(client, number)
        except OSError:
            if client is not None:
                client.close()
            client = None
            stopped.wait(0.1)
    if client is not None:
        client.close()


def idle_connections(address: HostAddress, place: int, count: int) -> list[socket.socket]:
    """Open connections that send nothing, as many as the server lets in."""
    socks: list[socket.socket] = []
    with contextlib.suppress(OSError):
        socks.extend(
            socket.create_connection(address, 5.0, source_address=(f"127.0.1.{place}", 0)) for _ in range(count)
        )
    return socks


def attacks_process(address: HostAddress, grpc: HostAddress | None, names: list[str]) -> None:
    """Run attacks with two connections each until the standard input ends, and print how the server answered."""
    # With nice 19 it would still end its turn of milliseconds.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    stopped = threading.Event()
    idle = idle_connections(address, 250, 2_000) if "idle_connections" in names else []
    for place, name in enumerate(name for name in [*names, *names] if name in ATTACKS):
        threading.Thread(target=attack_until, args=(name, address, place + 1, stopped), daemon=True).start()
    seen: Counter[str] = Counter()
    if grpc is not None:
        for place, name in enumerate([*names, *names]):
            arguments = (name, grpc, place + 1, stopped.is_set, seen)
            threading.Thread(target=grpc_attacks.attack_until, args=arguments, daemon=True).start()
    print("started", flush=True)
    sys.stdin.read()
    stopped.set()
    print(", ".join(f"{what} {count:,}" for what, count in seen.most_common()) or "no answer", flush=True)
    for sock in idle:
        sock.close()


# --- the trial --------------------------------------------------------------------------------------


@contextlib.contextmanager
def attacking(server: BrokerProcess, names: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run attacks in another process during the block. With gRPC, print at the end how the server answered."""
    command = [sys.executable, "-m", "bench.hostile", "--attack", ",".join(names), "--server", str(server.address)]
    command += ["--grpc-server", str(server.grpc or "")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
            if server.grpc is not None:
                assert process.stdin is not None
                process.stdin.close()
                print("  answers:", process.stdout.readline().strip(), flush=True)
        finally:
            process.kill()


class PeakMemory:
    """Reads the anonymous memory of a process each 20 ms during the block.

    Attributes:
        mib: The largest that it was.
    """

    def __init__(self, pid: int) -> None:
        self.mib = 0.0
        self._pid = pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.02):
            self.mib = max(self.mib, current_mib(self._pid))


class Trial:
    """The neighbours beside attacks: what they measured, and how many of their messages were acknowledged."""

    def __init__(self, server: BrokerProcess, options: argparse.Namespace) -> None:
        self._server = server
        self._options = options
        self.acknowledged: dict[str, int] = {}
        self.failed = 0

    def measure(self, what: str, target: str) -> None:
        """Run the neighbours, and print their times and the server's memory."""
        command = [sys.executable, "-m", "bench.hostile", "--server", str(self._server.address)]
        command += ["--run-neighbours", str(self._options.neighbours), "--seconds", str(self._options.seconds)]
        command += ["--grpc-server", str(self._server.grpc or "")]
        pid = self._server.process.pid
        before, threads = current_mib(pid), thread_count(pid)
        scheduled, children, start = Scheduled.of(pid), os.times(), time.monotonic()
        with PeakMemory(pid) as peak:
            lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        seconds, children_after, used = time.monotonic() - start, os.times(), Scheduled.of(pid).since(scheduled)
        times: dict[str, list[float]] = {}
        for line in lines:
            if line.startswith("topic"):
                _, topic, acknowledged, failed = line.split()
                self.acknowledged[topic] = self.acknowledged.get(topic, 0) + int(acknowledged)
                self.failed += int(failed)
            else:
                kind, milliseconds = line.split()
                times.setdefault(kind, []).append(float(milliseconds))
        for kind, found in times.items():
            report(f"{what}: {kind}, p50 of {len(found):,} requests", percentile(found, 0.5), "ms", "none")
            report("  p99", percentile(found, 0.99), "ms", target)
        neighbours_s = sum(children_after[2:4]) - sum(children[2:4])
        report("  processors of the server", used.run_s / seconds, "", "none")
        report("  processors of the neighbours", neighbours_s / seconds, "", "none")
        report("  mean wait of its threads for one", used.wait_s / max(used.turns, 1) * 1e3, "ms", "none")
        report("  memory of the server", peak.mib, "MiB", "< 512")
        report("  with the mapped files, so far", peak_mib(pid), "MiB", "none")
        report("  it has more than before", current_mib(pid) - before, "MiB", "none")
        report("  threads more than before", thread_count(pid) - threads, "", "none")

    def lost(self) -> int:
        """Return the number of acknowledged messages that are not in their topics."""
        client, lost = RemotingClient(RemotingClientSettings(), SystemClock()), 0
        for topic, acknowledged in self.acknowledged.items():
            stored = 0
            for queue_id in range(_QUEUES):
                header = GetMaxOffsetRequestHeader(topic=topic, queue_id=queue_id)
                request = RemotingCommand.request(RequestCode.GET_MAX_OFFSET, header)
                stored += client.invoke(str(self._server.address), request, 10_000).header(OffsetResponseHeader).offset
            lost += max(acknowledged - stored, 0)
        client.close()
        return lost


def _status(pid: int) -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())


def peak_mib(pid: int) -> float:
    """Return the largest resident memory that the process has now, or has had."""
    return int(_status(pid)["VmHWM"].split()[0]) / 1_024


def current_mib(pid: int) -> float:
    """Return the anonymous resident memory of the process."""
    return int(_status(pid)["RssAnon"].split()[0]) / 1_024


def thread_count(pid: int) -> int:
    """Return the number of threads of the process."""
    return int(_status(pid)["Threads"])


def socket_count(pid: int) -> int:
    """Return the number of open sockets of the process."""
    count = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            count += str(each.readlink()).startswith("socket:")
    return count


def measure(folder: Path, options: argparse.Namespace) -> None:
    tls = _tls(folder) if options.grpc else ""
    (folder / "application.yml").write_text(f"mqtemplate: {{logging: {{level: error}}{tls}}}\n")
    names = [*grpc_attacks.ATTACKS] if options.grpc else [*ATTACKS, "idle_connections"]
    names = options.only.split(",") if options.only else names
    with BrokerProcess(folder, *(["--grpc", "127.0.0.1:0"] if options.grpc else [])) as server:
        trial = Trial(server, options)
        prepare(server.address, options)
        trial.measure("no attack", "none")
        trial.measure("no attack, warm", "none")
        for name in names:
            sockets = socket_count(server.process.pid)
            with attacking(server, [name]):
                trial.measure(name, "< 50")
            late = time.monotonic() + 10
            while socket_count(server.process.pid) > sockets and time.monotonic() < late:
                time.sleep(0.1)
            report("  connections that remain", socket_count(server.process.pid) - sockets, "", "0")
        with attacking(server, names):
            trial.measure("all attacks at once", "< 50")
            lost = trial.lost()
            report("acknowledged messages", sum(trial.acknowledged.values()), "", "none")
            report("  of these lost", lost, "", "0")
            report("messages of neighbours that failed", trial.failed, "", "0")
            start = time.monotonic()
            code, _, errors = server.stop(signal.SIGTERM)
            report("time from SIGTERM to the end", time.monotonic() - start, "s", "< 4")
    report("tracebacks of the server", errors.count("Traceback"), "", "0")
    if code or "Traceback" in errors:
        print(f"the server ended with {code}: {errors[-4_000:]}")


def _tls(folder: Path) -> str:
    """Return the settings of TLS, with plain connections, too; none without the program that makes a certificate."""
    if not has_openssl():
        return ""
    cert, key = Certificates(folder / "certificates").issue("server", "IP:127.0.0.1")
    return f", server: {{tls: {{cert-path: '{cert}', key-path: '{key}', mode: permissive}}}}"


def prepare(address: HostAddress, options: argparse.Namespace) -> None:
    """Create the topics and the group of the attacks, and those of the neighbours."""
    client = HostileClient(address, 251)
    for topic in ("hostile", *(f"neighbour-{number}" for number in range(options.neighbours))):
        client.invoke(send_request(topic))
    if options.grpc:
        bombs(client, 0)
    client.invoke(_pull("hostile", "*", 0, "TAG"))
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--neighbours", type=int, default=20)
    parser.add_argument("--only", help="names of attacks, with commas")
    parser.add_argument("--grpc", action="store_true", help="attacks of HTTP/2 and of the gRPC protocol")
    parser.add_argument("--grpc-server", default="", help=argparse.SUPPRESS)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--run-neighbours", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        grpc = parse_address(options.grpc_server) if options.grpc_server else None
        attacks_process(parse_address(options.server), grpc, options.attack.split(","))
    elif options.run_neighbours:
        neighbours_process(options.server, options.grpc_server, options.run_neighbours, options.seconds)
    else:
        with scratch_folder() as folder:
            measure(folder, options)


if __name__ == "__main__":
    run(main)
