"""Idle and active connections: the time of a request beside a thousand idle connections, and the server's memory.

The bench opens 1,000 idle connections. 100 more, each with a thread of another process, send a message of 1 KiB ten
times a second and wait for the response; the time of a request is from before it is written until its response is read.
Then the bench opens 10,000 more connections, which send half a frame or nothing, and drops them.

    python -m bench.connections [--idle 1000] [--active 100] [--seconds 10] [--dropped 10000]
                                [--address HOST:PORT --pid PID --topic T]
    python -m bench.connections --grpc [--idle 1000] [--seconds 10] [--wakes 2000]

Without an address the server is one that responds at once, in another process: only the remoting layer is measured.
With an address the messages go to *topic*, which must exist, by SEND_MESSAGE_V2.

With ``--grpc`` the server is a whole broker, and each idle client is a consumer of RocketMQ 5: a connection with a
stream of telemetry, on which it has sent its settings, and a receive that waits for 20 seconds and is repeated. It
sends a heartbeat every 10 seconds. The bench prints their memory, the processor time of the idle server, and the time
from the send of one message until one of the receives has it.
"""

from __future__ import annotations

import argparse
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.fuzz import process_mib, serve, server_process
from bench.measure import BODY, percentile, processor_s, report, run, scratch_folder
from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerError
from mqtemplate.grpc_protos import protos
from mqtemplate.grpc_protos.enums import ClientType
from mqtemplate.http2 import frames
from mqtemplate.http2.frames import frame, window_update_frame
from mqtemplate.http2.grpc_wire import framed
from mqtemplate.message import HostAddress
from mqtemplate.processes import raise_descriptor_limit
from mqtemplate.remoting import (
    RemotingClient,
    RemotingClientSettings,
    RemotingServer,
    RemotingServerSettings,
    parse_address,
)
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, encode_command
from tests.http2.wire import call, changed, data, headers, hello, parse
from tests.server.process import BrokerProcess

_SEND = {"a": "bench", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1767225600000", "h": "0"}
_SEND |= {"i": "WAIT\x01true\x02", "j": "0", "k": "false", "m": "false", "n": "broker-a"}
_PERIOD_S = 0.1


def send_request(topic: str) -> RemotingCommand:
    return RemotingCommand(RequestCode.SEND_MESSAGE_V2, ext_fields=_SEND | {"b": topic}, body=BODY)


class ActiveClient(threading.Thread):
    """Client that sends ten times a second."""

    def __init__(self, address: str, topic: str, seconds: float) -> None:
        super().__init__(name="active")
        self.latencies_ms: list[float] = []
        self.errors: list[str] = []
        self._address = address
        self._topic = topic
        self._seconds = seconds

    def run(self) -> None:
        client = RemotingClient(RemotingClientSettings(), SystemClock())
        due = time.monotonic() + random.random() * _PERIOD_S
        end = due + self._seconds
        pause = threading.Event()
        while due < end:
            pause.wait(max(due - time.monotonic(), 0))
            due += _PERIOD_S
            start = time.perf_counter()
            try:
                response = client.invoke(self._address, send_request(self._topic), 10_000)
            except BrokerError as exc:
                self.errors.append(str(exc))
                continue
            self.latencies_ms.append((time.perf_counter() - start) * 1e3)
            if response.code != ResponseCode.SUCCESS:
                self.errors.append(f"{response.code}: {response.remark}")
        client.close()


def active_process(address: str, topic: str, count: int, seconds: float) -> None:
    """Run *count* clients, then print each latency in ms and each error."""
    clients = [ActiveClient(address, topic, seconds) for _ in range(count)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    for client in clients:
        for latency in client.latencies_ms:
            print(latency)
        for error in client.errors:
            print("error", error)


def round_trip_us(address: str, request: Callable[[], RemotingCommand], count: int) -> float:
    """Return the median time of a request, for one client that sends alone."""
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    times = []
    for _ in range(count):
        start = time.perf_counter()
        client.invoke(address, request(), 10_000)
        times.append(time.perf_counter() - start)
    client.close()
    return percentile(times, 0.5) * 1e6


def responding_server() -> RemotingServer:
    """Return a server that responds to sends at once."""
    server = RemotingServer(HostAddress("127.0.0.1", 0), RemotingServerSettings(), SystemClock())
    server.register(RequestCode.SEND_MESSAGE_V2, lambda connection, request: request.response())
    return server


def drop(address: HostAddress, count: int) -> None:
    """Open *count* connections, a thousand at a time, send half a frame on every second one, and close them."""
    half = encode_command(send_request("dropped"))[:600]
    for start in range(0, count, 1_000):
        batch = [socket.create_connection(address, 20.0) for _ in range(min(1_000, count - start))]
        for number, sock in enumerate(batch):
            sock.sendall(half if number % 2 else b"")
            sock.close()


def measure(host: HostAddress, pid: int | None, options: argparse.Namespace) -> None:
    address = str(host)
    before = process_mib(pid) if pid else 0.0
    alone = round_trip_us(address, lambda: send_request(options.topic), 3_000)
    target = "none" if options.address else "< 200"
    report("round trip of 1 KiB, one thread, no other connection", alone, "us", target)
    idle = [socket.create_connection(host, 20.0) for _ in range(options.idle)]
    beside = round_trip_us(address, lambda: send_request(options.topic), 3_000)
    report(f"round trip of 1 KiB, one thread, {options.idle:,} idle connections", beside, "us", "the same")
    command = [sys.executable, "-m", "bench.connections", "--active", str(options.active), "--topic", options.topic]
    command += ["--clients-of", address, "--seconds", str(options.seconds)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    latencies = [float(line) for line in lines if not line.startswith("error")]
    errors = [line for line in lines if line.startswith("error")]
    report(f"requests of {options.active:,} active connections", len(latencies), "", "all of them")
    report("  failed", len(errors), "", "0")
    report("  p50", percentile(latencies, 0.5), "ms", "none")
    report("  p99", percentile(latencies, 0.99), "ms", "< 50")
    if pid:
        report("memory of the server before", before, "MiB", "none")
        report("memory of the server", process_mib(pid), "MiB", "< 300")
    drop(host, options.dropped)
    after = round_trip_us(address, lambda: send_request(options.topic), 3_000)
    report(f"round trip of 1 KiB after {options.dropped:,} dropped connections", after, "us", "the same")
    if pid:
        report("memory of the server", process_mib(pid), "MiB", "< 300")
    for error in errors[:3]:
        print(error)
    for sock in idle:
        sock.close()


# --- clients of RocketMQ 5 --------------------------------------------------------------------------


_GROUP, _TOPIC = "idle-group", "idle-topic"
_HEARTBEAT_S = 10.0


def grpc_call(stream_id: int, method: str, request: Any, client_id: str) -> bytes:
    """Return the frames of a unary call."""
    fields = {"x_mq_client_id": client_id, "x_mq_client_version": "5.2.0", "x_mq_language": "JAVA"}
    return call(stream_id, protos.method_path(method), request.SerializeToString(), **fields)


def telemetry_call(stream_id: int, client_id: str) -> bytes:
    """Return the frames of a stream of telemetry, and of the settings of a push consumer."""
    settings = protos.Settings(client_type=ClientType.PUSH_CONSUMER)
    settings.subscription.group.name = _GROUP
    entry = settings.subscription.subscriptions.add()
    entry.topic.name, entry.expression.expression = _TOPIC, "*"
    more = (("x-mq-client-id", client_id), ("x-mq-client-version", "5.2.0"), ("grpc-timeout", "99999999S"))
    fields = ((":path", protos.method_path("Telemetry")), *changed(*more, without=":path"))
    command = protos.TelemetryCommand(settings=settings).SerializeToString()
    return headers(stream_id, fields, frames.END_HEADERS) + data(stream_id, framed(command), 0)


def receive_request(wait_s: int = 20) -> Any:
    """Return the request of a receive that waits."""
    request = protos.ReceiveMessageRequest(batch_size=32, auto_renew=True)
    request.group.name, request.message_queue.topic.name = _GROUP, _TOPIC
    request.long_polling_timeout.seconds = wait_s
    return request


class IdleConsumer:
    """A push consumer that waits for messages.

    Attributes:
        received: Number of its messages.
    """

    def __init__(self, address: HostAddress, number: int) -> None:
        self.received = 0
        self._id = f"client-{number}"
        self._rest = b""
        self._next_stream = 3
        self.socket = socket.create_connection(address, 20.0)
        self.socket.sendall(hello() + window_update_frame(0, 1 << 30) + telemetry_call(1, self._id))
        self.receive()
        self.next_heartbeat_s = time.monotonic() + random.random() * _HEARTBEAT_S

    def _send(self, method: str, request: Any) -> None:
        self.socket.sendall(grpc_call(self._next_stream, method, request, self._id))
        self._next_stream += 2

    def receive(self) -> None:
        """Start the next receive."""
        self._receive_stream = self._next_stream
        self._send("ReceiveMessage", receive_request())

    def heartbeat(self) -> None:
        """Send a heartbeat. The next one is due later."""
        self.next_heartbeat_s += _HEARTBEAT_S
        request = protos.HeartbeatRequest(client_type=ClientType.PUSH_CONSUMER)
        request.group.name = _GROUP
        self._send("Heartbeat", request)

    def read(self) -> None:
        """Read what has arrived, and start the next receive after the end of one."""
        received = self.socket.recv(1 << 16)
        if not received:
            raise ConnectionError(f"the server has closed the connection of {self._id}")
        found, self._rest = parse(self._rest + received)
        for each in found:
            if each.kind == frames.PING and not each.flags & frames.ACK:
                self.socket.sendall(frame(frames.PING, frames.ACK, 0, each.payload))
            elif each.stream_id == self._receive_stream:
                if each.kind == frames.DATA:
                    response = protos.ReceiveMessageResponse.FromString(each.payload[5:])
                    self.received += response.HasField("message")
                if each.flags & frames.END_STREAM:
                    self.receive()


class IdleConsumers:
    """All consumers, in one thread."""

    def __init__(self, address: HostAddress, numbers: range) -> None:
        self._selector = selectors.DefaultSelector()
        self._all = []
        for number in numbers:
            each = IdleConsumer(address, number)
            self._all.append(each)
            self._selector.register(each.socket, selectors.EVENT_READ, each)

    def _read(self, timeout_s: float) -> Iterator[IdleConsumer]:
        for key, _ in self._selector.select(timeout_s):
            key.data.read()
            yield key.data

    def run_for(self, seconds: float) -> None:
        """Let the consumers live for some time, and forget the messages that they receive."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            for _ in self._read(0.05):
                pass
            for each in self._all:
                if each.next_heartbeat_s <= now:
                    each.heartbeat()
        self._forget_messages()

    def wait_for_message(self) -> None:
        """Read until one consumer has a message."""
        while not any(each.received for each in self._read(10.0)):
            pass
        self._forget_messages()

    def _forget_messages(self) -> None:
        for each in self._all:
            each.received = 0

    def close(self) -> None:
        """Close the connections."""
        for each in self._all:
            each.socket.close()
        self._selector.close()


def measure_grpc(folder: Path, options: argparse.Namespace) -> None:
    raise_descriptor_limit()
    (folder / "application.yml").write_text("mqtemplate: {logging: {level: error}}\n")
    with BrokerProcess(folder, "--grpc", "127.0.0.1:0") as server:
        address, pid = server.grpc, server.process.pid
        assert address is not None
        remoting = RemotingClient(RemotingClientSettings(), SystemClock())

        def send() -> None:
            remoting.invoke(str(server.address), send_request(_TOPIC), 10_000)

        for _ in range(100):
            send()
        first = IdleConsumers(address, range(1))
        first.run_for(1.0)
        first.close()
        before = process_mib(pid)
        consumers = IdleConsumers(address, range(1, options.idle + 1))
        consumers.run_for(5.0)
        grown = process_mib(pid) - before
        report("memory of the server before", before, "MiB", "none")
        report(f"  {options.idle:,} gRPC clients with telemetry and a receive: more", grown, "MiB", "< 100")
        report("  for each client", grown * 1_024 / options.idle, "KiB", "none")
        for what, wait, target in (
            ("all are silent", time.sleep, "< 2"),
            ("heartbeats and repeated receives", consumers.run_for, "< 20"),
        ):
            used, start = processor_s(pid), time.monotonic()
            wait(options.seconds / 2)
            share = (processor_s(pid) - used) / (time.monotonic() - start) * 100
            report(f"processor of the server while {what}", share, "%", target)
        times = []
        for _ in range(options.wakes):
            start = time.perf_counter()
            send()
            consumers.wait_for_message()
            times.append((time.perf_counter() - start) * 1e3)
        report("from the send of a message until a waiting receive has it: p50", percentile(times, 0.5), "ms", "none")
        report("  p99", percentile(times, 0.99), "ms", "< 50")
        report("memory of the server", process_mib(pid), "MiB", "none")
        consumers.close()
        remoting.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1_000)
    parser.add_argument("--active", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--dropped", type=int, default=10_000)
    parser.add_argument("--address", help="address of a running server")
    parser.add_argument("--pid", type=int, help="process id of that server, to measure its memory")
    parser.add_argument("--topic", default="connections")
    parser.add_argument("--grpc", action="store_true", help="measure clients of RocketMQ 5 that wait for messages")
    parser.add_argument("--wakes", type=int, default=2_000, help="messages for the receives that wait")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clients-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.grpc:
        with scratch_folder() as folder:
            measure_grpc(folder, options)
    elif options.serve:
        serve(responding_server())
    elif options.clients_of:
        active_process(options.clients_of, options.topic, options.active, options.seconds)
    elif options.address:
        measure(parse_address(options.address), options.pid, options)
    else:
        with server_process("bench.connections") as (address, pid):
            measure(address, pid, options)


if __name__ == "__main__":
    run(main)
