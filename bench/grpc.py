"""RocketMQ's gRPC client for Java on mqtemplate's server and on RocketMQ's proxy 5.5.0 in LOCAL mode, taking turns.

1 KiB, ASYNC_FLUSH, both servers in processes of their own, each with a client process of its own. First each server
works for two minutes, since a Java server that has not compiled its code does a tenth of its later rate. Then in each
round both servers do each kind of work once; a figure is the median of the rounds. The processes of the other server
are stopped meanwhile.

    python -m bench.grpc [--rounds 3] [--seconds 5] [--warm 120] [--count 20000]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.measure import BODY, processor_s, report, run, scratch_folder
from bench.peer.fetch import fetch
from bench.peer.jvm import PeerError, command_line, scratch_home, unavailable_reason
from bench.peer.proxy import LocalProxy, fetch_proxy
from bench.peer.rocketmq import NameServer, free_port
from mqtemplate.store.settings import FlushDiskType
from tests.conformance.grpc_clients.servers import Administrator, GrpcServer, wait_until_registered
from tests.conformance.servers import BrokerProcess

_TOPICS = ("sent", "consumed", "idle")
_GROUPS = ("consumers", "idlers")
_IDLE_MESSAGES = 200
_IDLE_PAUSE_MS = 20
_WARM_STEP_S = 10
_PEER, _OURS = "RocketMQ's proxy 5.5.0", "mqtemplate's server"


class Result(NamedTuple):
    """A turn of one server."""

    rate: float
    p50_ms: float
    p99_ms: float
    processor_us: float


class Side:
    """A server and its client. Both are stopped except in `running`.

    Args:
        wait_until_ready: Called when both run again. A name server forgets a broker that was stopped for two minutes.
    """

    def __init__(
        self,
        name: str,
        server_pid: int,
        client: subprocess.Popen[str],
        errors: Path,
        wait_until_ready: Callable[[], object],
    ) -> None:
        self.name = name
        self._wait_until_ready = wait_until_ready
        self._pids = (server_pid, client.pid)
        self._client = client
        self._errors = errors

    @contextmanager
    def running(self) -> Iterator[None]:
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)
        try:
            self._wait_until_ready()
            yield
        finally:
            for pid in self._pids:
                os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let both run, so that they can end."""
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)

    def command(self, *words: object) -> Result:
        """Run a command of ``GrpcLoad.java``."""
        before = processor_s(self._pids[0])
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(" ".join(map(str, words)) + "\n")
        self._client.stdin.flush()
        if not (line := self._client.stdout.readline()):
            raise PeerError(f"the client of {self.name} ended:\n{self._errors.read_text(errors='replace')[-3_000:]}")
        rate, p50, p99, count = map(float, line.split())
        return Result(rate, p50, p99, (processor_s(self._pids[0]) - before) / count * 1e6)


@contextmanager
def client(
    name: str, server_pid: int, endpoint: str, wait_until_ready: Callable[[], object] = lambda: None
) -> Iterator[Side]:
    """Run the client of a server; see `Side`."""
    with scratch_home("grpc-load") as home, (home / "errors.out").open("w+") as errors:
        command = command_line("grpc", home, "GrpcLoad", endpoint, str(len(BODY)), heap_mib=1_024, flags=())
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=home
        )
        side = Side(name, server_pid, process, home / "errors.out", wait_until_ready)
        try:
            yield side
        finally:
            side.resume()
            process.kill()
            process.communicate()


@contextmanager
def rocketmq(folder: Path) -> Iterator[Side]:
    """Run the name server, and the broker with its proxy in one process."""
    options = {"flushDiskType": "ASYNC_FLUSH"}
    with NameServer() as names, LocalProxy(folder / "store", names, options, for_speed=True) as proxy:
        server = GrpcServer(proxy.endpoint, names.address)
        wait_until_registered(server, folder)
        _create(server)
        with client(_PEER, proxy.pid, proxy.endpoint, lambda: wait_until_registered(server, folder)) as side:
            yield side


@contextmanager
def mqtemplate(folder: Path) -> Iterator[Side]:
    """Run this project's server."""
    endpoint = f"127.0.0.1:{free_port()}"
    mode = FlushDiskType.ASYNC_FLUSH
    with BrokerProcess(folder / "store", flush_disk_type=mode, options={"grpc-listen": endpoint}) as process:
        _create(GrpcServer(endpoint, process.address))
        with client(_OURS, process.pid, endpoint) as side:
            yield side


def _create(server: GrpcServer) -> None:
    with Administrator(server) as administrator:
        for topic in _TOPICS:
            administrator.create_topic(topic, queues=4)
        for group in _GROUPS:
            administrator.create_group(group)


def warm(side: Side, seconds: float, count: int) -> None:
    """Let the server and its client do all kinds of work."""
    step = min(_WARM_STEP_S, max(seconds / 4, 1))
    end = time.monotonic() + seconds
    with side.running():
        while True:
            side.command("send", 16, step)
            side.command("async", step)
            side.command("fill", count)
            side.command("consume", count)
            side.command("send", 1, step)
            if time.monotonic() > end:
                return


def turn(side: Side, seconds: float, count: int) -> dict[str, Result]:
    """Do each kind of work once."""
    with side.running():
        side.command("send", 4, 1)  # It was stopped before.
        results = {
            "send, 1 thread": side.command("send", 1, seconds),
            "send, 16 threads": side.command("send", 16, seconds),
            "send, asynchronous": side.command("async", seconds),
        }
        side.command("fill", count)
        results["push consumption"] = side.command("consume", count)
        results["idle latency"] = side.command("idle", _IDLE_MESSAGES, _IDLE_PAUSE_MS)
    return results


def measure(sides: Sequence[Side], options: argparse.Namespace) -> dict[str, dict[str, list[Result]]]:
    """Return kind of work -> name of the server -> its results."""
    for side in sides:
        warm(side, options.warm, options.count)
    found: dict[str, dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for number in range(options.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            for kind, result in turn(side, options.seconds, options.count).items():
                found[kind][side.name].append(result)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.grpc")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--warm", type=float, default=120, help="seconds for each server before the rounds")
    parser.add_argument("--count", type=int, default=20_000, help="messages to consume")
    options = parser.parse_args()
    reason = unavailable_reason() or fetch_proxy() or fetch("grpc-client", "RocketMQ's gRPC client for Java")
    if reason is not None:
        raise SystemExit(f"not measured: {reason}")
    with scratch_folder() as folder, ExitStack() as stack:
        sides = []
        for name, start in (("peer", rocketmq), ("ours", mqtemplate)):
            (folder / name).mkdir()
            sides.append(stack.enter_context(start(folder / name)))
        found = measure(sides, options)
    for kind, results in found.items():
        _print(kind, {name: _median(rounds) for name, rounds in results.items()})


def _median(rounds: Sequence[Result]) -> Result:
    return Result(*(median(values) for values in zip(*rounds, strict=True)))


def _print(kind: str, results: dict[str, Result]) -> None:
    peer, ours = results[_PEER], results[_OURS]
    for name, result in results.items():
        if kind == "idle latency":
            report(f"{name}, {kind}, p50", result.p50_ms, "ms", "none")
            report(f"{name}, {kind}, p99", result.p99_ms, "ms", "none")
        else:
            report(f"{name}, {kind}", result.rate, "/s", "none")
            if result.p99_ms:
                report(f"{name}, {kind}, p50", result.p50_ms, "ms", "none")
                report(f"{name}, {kind}, p99", result.p99_ms, "ms", "none")
            report(f"{name}, {kind}, processor time for a message", result.processor_us, "us", "none")
    if kind == "idle latency":
        report("  of the proxy: p50", ours.p50_ms / peer.p50_ms, "x", "<= 0.83x")
        report("  of the proxy: p99", ours.p99_ms / peer.p99_ms, "x", "<= 0.83x")
    else:
        report("  of the proxy", ours.rate / peer.rate, "x", ">= 1.2x")


if __name__ == "__main__":
    run(main)
