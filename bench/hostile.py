"""Hostile clients against one server while 20 neighbours send: times, memory, lost messages, and SIGTERM.

Each neighbour sends one message to its own topic every 20 ms and waits for the response. The bench measures them
alone, then beside each attack, then beside all attacks at once. At the end it sends SIGTERM while all attacks go on.
An attack is one that held the others, or filled the memory, before there were limits. The hostile clients connect from
other addresses of the loopback network than the neighbours.

    python -m bench.hostile [--seconds 5] [--neighbours 20] [--only NAME]

The time of a message is from before it is written until its response is read. The programs of the attacks run on the
same machine, with the lowest priority: hostile clients elsewhere do not take the processor from the server.
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
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.connections import send_request
from bench.measure import percentile, report, run, scratch_folder
from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerError
from mqtemplate.message import HostAddress, Message, MessageQueue
from mqtemplate.remoting import RemotingClient, RemotingClientSettings, parse_address
from mqtemplate.remoting.protocol import FrameDecoder, RemotingCommand, RequestCode, ResponseCode, encode_command
from mqtemplate.remoting.protocol.bodies.group import ConsumerData, HeartbeatData, LockBatchRequestBody, ProducerData
from mqtemplate.remoting.protocol.headers.group import GetMaxOffsetRequestHeader, OffsetResponseHeader
from mqtemplate.remoting.protocol.messages import encode_batch
from tests.server.process import BrokerProcess

_PERIOD_S = 0.02
_ZIPPED = 0x301  # system flag of a body that zlib compressed
_QUEUES = 4


# --- neighbours -------------------------------------------------------------------------------------


class Neighbour(threading.Thread):
    """Client that sends every 20 ms."""

    def __init__(self, address: str, topic: str, seconds: float) -> None:
        super().__init__(name=topic)
        self.topic = topic
        self.times_ms: list[float] = []
        self.acknowledged = 0
        self.failed = 0
        self._address = address
        self._seconds = seconds

    def run(self) -> None:
        client = RemotingClient(RemotingClientSettings(), SystemClock())
        pause = threading.Event()
        due = time.monotonic()
        end = due + self._seconds
        while due < end:
            pause.wait(max(due - time.monotonic(), 0))
            due = max(due + _PERIOD_S, time.monotonic())
            start = time.perf_counter()
            try:
                is_stored = client.invoke(self._address, send_request(self.topic), 10_000).code == ResponseCode.SUCCESS
            except BrokerError:
                is_stored = False
            self.times_ms.append((time.perf_counter() - start) * 1e3)
            self.acknowledged += is_stored
            self.failed += not is_stored
        client.close()


def neighbours_process(address: str, count: int, seconds: float) -> None:
    """Run the neighbours, and print each time in ms, and the messages of each topic."""
    neighbours = [Neighbour(address, f"neighbour-{number}", seconds) for number in range(count)]
    for neighbour in neighbours:
        neighbour.start()
    for neighbour in neighbours:
        neighbour.join()
    for neighbour in neighbours:
        print("topic", neighbour.topic, neighbour.acknowledged, neighbour.failed)
        for milliseconds in neighbour.times_ms:
            print(milliseconds)


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


def attacks_process(address: HostAddress, names: list[str]) -> None:
    """Run attacks with two connections each until the standard input ends."""
    # With nice 19 it would still end its turn of milliseconds.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    stopped = threading.Event()
    idle = idle_connections(address, 250, 2_000) if "idle_connections" in names else []
    for place, name in enumerate(name for name in [*names, *names] if name in ATTACKS):
        threading.Thread(target=attack_until, args=(name, address, place + 1, stopped), daemon=True).start()
    print("started", flush=True)
    sys.stdin.read()
    stopped.set()
    for sock in idle:
        sock.close()


# --- the trial --------------------------------------------------------------------------------------


@contextlib.contextmanager
def attacking(address: HostAddress, names: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run attacks in another process during the block."""
    command = [sys.executable, "-m", "bench.hostile", "--attack", ",".join(names), "--server", str(address)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


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
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        times = []
        for line in lines:
            if line.startswith("topic"):
                _, topic, acknowledged, failed = line.split()
                self.acknowledged[topic] = self.acknowledged.get(topic, 0) + int(acknowledged)
                self.failed += int(failed)
            else:
                times.append(float(line))
        report(f"{what}: p50 of {len(times):,} messages", percentile(times, 0.5), "ms", "none")
        report("  p99", percentile(times, 0.99), "ms", target)
        report("  memory of the server", peak_mib(self._server.process.pid), "MiB", "< 512")

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


def peak_mib(pid: int) -> float:
    """Return the largest anonymous memory that the process has now, or has had."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) / 1_024


def measure(folder: Path, options: argparse.Namespace) -> None:
    (folder / "application.yml").write_text("mqtemplate: {logging: {level: error}}\n")
    names = [options.only] if options.only else [*ATTACKS, "idle_connections"]
    with BrokerProcess(folder) as server:
        trial = Trial(server, options)
        prepare(server.address)
        trial.measure("no attack", "none")
        for name in names:
            with attacking(server.address, [name]):
                trial.measure(name, "< 50")
        with attacking(server.address, names):
            trial.measure("all attacks at once", "< 50")
            lost = trial.lost()
            report("acknowledged messages", sum(trial.acknowledged.values()), "", "none")
            report("  of these lost", lost, "", "0")
            report("messages of neighbours that failed", trial.failed, "", "0")
            start = time.monotonic()
            code, _, errors = server.stop(signal.SIGTERM)
            report("time from SIGTERM to the end", time.monotonic() - start, "s", "< 4")
    if code:
        print(f"the server ended with {code}: {errors[-2_000:]}")


def prepare(address: HostAddress) -> None:
    """Create the topic and the group of the attacks."""
    client = HostileClient(address, 251)
    client.invoke(send_request("hostile"))
    client.invoke(_pull("hostile", "*", 0, "TAG"))
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--neighbours", type=int, default=20)
    parser.add_argument("--only", choices=[*ATTACKS, "idle_connections"])
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--run-neighbours", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        attacks_process(parse_address(options.server), options.attack.split(","))
    elif options.run_neighbours:
        neighbours_process(options.server, options.run_neighbours, options.seconds)
    else:
        with scratch_folder() as folder:
            measure(folder, options)


if __name__ == "__main__":
    run(main)
