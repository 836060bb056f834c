"""Idle and active connections: the time of a request beside a thousand idle connections, and the server's memory.

The bench opens 1,000 idle connections. 100 more, each with a thread of another process, send a message of 1 KiB ten
times a second and wait for the response; the time of a request is from before it is written until its response is read.
Then the bench opens 10,000 more connections, which send half a frame or nothing, and drops them.

    python -m bench.connections [--idle 1000] [--active 100] [--seconds 10] [--dropped 10000]
                                [--address HOST:PORT --pid PID --topic T]

Without an address the server is one that responds at once, in another process: only the remoting layer is measured.
With an address the messages go to *topic*, which must exist, by SEND_MESSAGE_V2.
"""

from __future__ import annotations

import argparse
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from bench.fuzz import process_mib, serve, server_process
from bench.measure import BODY, percentile, report, run
from mqtemplate.clock import SystemClock
from mqtemplate.errors import BrokerError
from mqtemplate.message import HostAddress
from mqtemplate.remoting import (
    RemotingClient,
    RemotingClientSettings,
    RemotingServer,
    RemotingServerSettings,
    parse_address,
)
from mqtemplate.remoting.protocol import RemotingCommand, RequestCode, ResponseCode, encode_command

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1_000)
    parser.add_argument("--active", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--dropped", type=int, default=10_000)
    parser.add_argument("--address", help="address of a running server")
    parser.add_argument("--pid", type=int, help="process id of that server, to measure its memory")
    parser.add_argument("--topic", default="connections")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clients-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
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
