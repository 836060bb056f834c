"""Idle and busy connections: what a request costs beside a thousand connections that say nothing, and what they weigh.

1,000 connections are opened and idle. 100 more, each with a thread of its own process, send a message of 1 KiB ten
times a second and wait for the answer. Counted is one request, from before it is written until its answer is read.
Then 10,000 more are opened, say half a frame or nothing, and are dropped.

    python -m bench.connections [--idle 1000] [--active 100] [--seconds 10] [--dropped 10000]
                                [--address HOST:PORT --pid PID --topic T]

Without an address the server is one that answers at once, in a process of its own: the wire and nothing behind it.
With one, messages are sent to *topic*, which must be there, by SEND_MESSAGE_V2.
"""

from __future__ import annotations

import argparse
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.fuzz import process_mib
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


class Active(threading.Thread):
    """One client that sends ten times a second."""

    def __init__(self, address: str, topic: str, seconds: float) -> None:
        super().__init__(name="active")
        self.latencies_ms: list[float] = []
        self.problems: list[str] = []
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
                answer = client.invoke(self._address, send_request(self._topic), 10_000)
            except BrokerError as exc:
                self.problems.append(str(exc))
                continue
            self.latencies_ms.append((time.perf_counter() - start) * 1e3)
            if answer.code != ResponseCode.SUCCESS:
                self.problems.append(f"{answer.code}: {answer.remark}")
        client.close()


def active_process(address: str, topic: str, count: int, seconds: float) -> None:
    """Be *count* clients; print each latency in ms, then each problem."""
    clients = [Active(address, topic, seconds) for _ in range(count)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    for client in clients:
        for latency in client.latencies_ms:
            print(latency)
        for problem in client.problems:
            print("problem", problem)


def round_trip_us(address: str, request: Callable[[], RemotingCommand], count: int) -> float:
    """Median of one client that asks and waits, alone."""
    client = RemotingClient(RemotingClientSettings(), SystemClock())
    times = []
    for _ in range(count):
        start = time.perf_counter()
        client.invoke(address, request(), 10_000)
        times.append(time.perf_counter() - start)
    client.close()
    return percentile(times, 0.5) * 1e6


def serve() -> None:
    """Be a server that answers at once."""
    server = RemotingServer(HostAddress("127.0.0.1", 0), RemotingServerSettings(), SystemClock())
    server.register(RequestCode.SEND_MESSAGE_V2, lambda connection, request: request.response())
    server.start()
    print(server.address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.stop()


@contextmanager
def server_process() -> Iterator[tuple[str, int]]:
    """That server in a process of its own; its address and its process."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # so that the child's threads leave them to sigwait
    command = [sys.executable, "-m", "bench.connections", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        try:
            assert child.stdout is not None
            yield child.stdout.readline().strip(), child.pid
        finally:
            child.terminate()


def drop(host: HostAddress, count: int) -> None:
    """Open so many connections, a thousand at a time; each second one says half a frame; and drop them."""
    half = encode_command(send_request("dropped"))[:600]
    for begin in range(0, count, 1_000):
        batch = [socket.create_connection(host, 20.0) for _ in range(min(1_000, count - begin))]
        for number, sock in enumerate(batch):
            sock.sendall(half if number % 2 else b"")
            sock.close()


def measure(address: str, pid: int | None, options: argparse.Namespace) -> None:
    host = parse_address(address)
    before = process_mib(pid) if pid else 0.0
    alone = round_trip_us(address, lambda: send_request(options.topic), 3_000)
    target = "as it comes" if options.address else "< 200"
    report("round trip of 1 KiB, one thread, nobody else", alone, "us", target)
    idle = [socket.create_connection(host, 20.0) for _ in range(options.idle)]
    beside = round_trip_us(address, lambda: send_request(options.topic), 3_000)
    report(f"round trip of 1 KiB, one thread, {options.idle:,} idle connections", beside, "us", "the same")
    command = [sys.executable, "-m", "bench.connections", "--active", str(options.active), "--topic", options.topic]
    command += ["--clients-of", address, "--seconds", str(options.seconds)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    latencies = [float(line) for line in lines if not line.startswith("problem")]
    problems = [line for line in lines if line.startswith("problem")]
    report(f"requests of {options.active:,} active connections", len(latencies), "", "all of them")
    report("  failed", len(problems), "", "0")
    report("  p50", percentile(latencies, 0.5), "ms", "as it comes")
    report("  p99", percentile(latencies, 0.99), "ms", "< 50")
    if pid:
        report("memory of the server before", before, "MiB", "as it comes")
        report("memory of the server", process_mib(pid), "MiB", "< 300")
    drop(host, options.dropped)
    after = round_trip_us(address, lambda: send_request(options.topic), 3_000)
    report(f"round trip of 1 KiB after {options.dropped:,} connections were dropped", after, "us", "the same")
    if pid:
        report("memory of the server", process_mib(pid), "MiB", "< 300")
    for problem in problems[:3]:
        print(problem)
    for sock in idle:
        sock.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=1_000)
    parser.add_argument("--active", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--dropped", type=int, default=10_000)
    parser.add_argument("--address", help="of a server that runs already")
    parser.add_argument("--pid", type=int, help="its process, to read its memory")
    parser.add_argument("--topic", default="connections")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--clients-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    elif options.clients_of:
        active_process(options.clients_of, options.topic, options.active, options.seconds)
    elif options.address:
        measure(options.address, options.pid, options)
    else:
        with server_process() as (address, pid):
            measure(address, pid, options)


if __name__ == "__main__":
    run(main)
