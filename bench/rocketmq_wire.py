"""All ways to send over TCP: RocketMQ's Java client to RocketMQ 5.5.0 and to mqtemplate's server, taking turns.

1 KiB, ASYNC_FLUSH, both servers in processes of their own. In each round both servers do each kind of work once; a
figure is the median of its rounds. A turn begins when the other server is idle, since RocketMQ compiles and indexes for
seconds after its own. The other server is stopped meanwhile: an idle broker of RocketMQ wakes hundreds of times a
second, and takes 5 to 10 % of a processor. The last rows compare our remote broker on our server with the Java client
on RocketMQ; those on one processor need Linux.

    python -m bench.rocketmq_wire [--rounds 3] [--seconds 3] [--only TEXT]
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import NamedTuple

from bench.measure import BODY, percentile, processor_s, report, run, scratch_folder
from bench.peer.jvm import java_program, unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.brokers import RemoteBroker, RemoteSettings
from mqtemplate.results import SendResult
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.template import RocketMQTemplate
from tests.conformance.servers import BrokerProcess

_CONSUMED = 100_000
_IDLE = 0.1
"""Part of a processor that a server uses at most while the other one is measured."""
_LONGEST_SETTLE_S = 30
_WINDOW = 256
"""Asynchronous sends of one thread that have no result yet, at most; as in ``Throughput.java``."""


class Work(NamedTuple):
    """One row of the table.

    Attributes:
        kind: sync, async, batch or consume.
        target: Smallest quotient of the rates, ours through RocketMQ's.
        is_ours: mqtemplate's client on mqtemplate's server, instead of the Java client on both.
        is_bound: Our client runs on one processor. Its threads share one interpreter lock, and to wake a thread on
            another processor takes longer.
    """

    name: str
    kind: str
    threads: int
    target: float
    is_ours: bool = False
    is_bound: bool = False


_TABLE = (
    Work("sync, 1 thread", "sync", 1, 1.3),
    Work("sync, 16 threads", "sync", 16, 1.0),
    Work("sync, 32 threads", "sync", 32, 1.0),
    Work("async, 4 threads", "async", 4, 1.0),
    Work("batches of 32, 4 threads", "batch", 4, 1.0),
    Work("push consumption of 100,000", "consume", 1, 1.2),
    Work("our template, sync, 1 thread", "sync", 1, 1.0, is_ours=True),
    Work("our template, sync, 16 threads", "sync", 16, 1.0, is_ours=True),
    Work("our template, async, 4 threads", "async", 4, 1.0, is_ours=True),
    Work("our template on one processor, sync, 16 threads", "sync", 16, 1.0, is_ours=True, is_bound=True),
    Work("our template on one processor, async, 4 threads", "async", 4, 1.0, is_ours=True, is_bound=True),
)


class Result(NamedTuple):
    """Messages per second, p50 and p99 of a synchronous send in ms, and the server's processor time for a message."""

    rate: float
    p50_ms: float
    p99_ms: float
    server_us: float


class Server(NamedTuple):
    """A server that runs."""

    address: str
    pid: int

    def processor_s(self) -> float:
        """Return the processor time that its process has used."""
        return processor_s(self.pid)

    def wait_until_idle(self) -> None:
        """Wait until it uses little of a processor."""
        pause = threading.Event()
        for _ in range(_LONGEST_SETTLE_S):
            before = self.processor_s()
            pause.wait(1.0)
            if self.processor_s() - before < _IDLE:
                return
        print(f"    process {self.pid} is not idle after {_LONGEST_SETTLE_S} s", flush=True)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop its process for the time of a block."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


def java_send(server: Server, work: Work, seconds: float) -> Result:
    """Send with the Java client: a warm-up, then a measured time. The processor time is of both."""
    batch = 32 if work.kind == "batch" else 1
    arguments = [server.address, "orders", work.threads, len(BODY), batch, seconds, 1]
    before = server.processor_s()
    with java_program("Throughput", *map(str, arguments), *(["async"] if work.kind == "async" else [])) as lines:
        rate, p50, p99, _ = map(float, "".join(lines).split())
    # The warm-up sends somewhat less in the same time, so the figure is a little too large, for both servers alike.
    return Result(rate, p50, p99, (server.processor_s() - before) / (2 * rate * seconds) * 1e6)


def java_consume(server: Server, group: str) -> Result:
    """Read the stored messages with a push consumer in Java."""
    before = server.processor_s()
    with java_program("Drain", server.address, "stored", group, str(_CONSUMED)) as lines:
        rate = float("".join(lines))
    return Result(rate, 0, 0, (server.processor_s() - before) / _CONSUMED * 1e6)


def our_send(server: Server, work: Work, seconds: float) -> Result:
    """Send with our remote broker."""
    settings = RemoteSettings(name_servers=(server.address,), compress_threshold=1 << 30)
    with _one_processor() if work.is_bound else nullcontext(), RemoteBroker(settings) as broker:
        template = RocketMQTemplate(broker)
        send = _send_async if work.kind == "async" else _send_sync
        _round(template, send, work.threads, seconds)  # a warm-up
        before = server.processor_s()
        count, times_ms, taken_s = _round(template, send, work.threads, seconds)
    rate = count / taken_s
    times_ms = times_ms or [0.0]
    server_us = (server.processor_s() - before) / count * 1e6
    return Result(rate, percentile(times_ms, 0.5), percentile(times_ms, 0.99), server_us)


@contextmanager
def _one_processor() -> Iterator[None]:
    """Run this thread, and those that it starts, on one processor."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


_Send = Callable[[RocketMQTemplate, float, list[float]], int]


def _round(template: RocketMQTemplate, send: _Send, threads: int, seconds: float) -> tuple[int, list[float], float]:
    counts: list[int] = []
    times_ms: list[float] = []
    start = time.perf_counter()
    work = [
        threading.Thread(target=lambda: counts.append(send(template, start + seconds, times_ms)))
        for _ in range(threads)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    return sum(counts), times_ms, time.perf_counter() - start


def _send_sync(template: RocketMQTemplate, end: float, times_ms: list[float]) -> int:
    count, before = 0, time.perf_counter()
    while before < end:
        template.sync_send("orders:paid", BODY)
        now = time.perf_counter()
        times_ms.append((now - before) * 1e3)
        before = now
        count += 1
    return count


def _send_async(template: RocketMQTemplate, end: float, times_ms: list[float]) -> int:
    window, errors, count = threading.Semaphore(_WINDOW), list[BaseException](), 0

    def on_success(result: SendResult) -> None:
        window.release()

    def on_error(error: BaseException) -> None:
        errors.append(error)
        window.release()

    while time.perf_counter() < end:
        window.acquire()
        template.async_send("orders:paid", BODY, on_success=on_success, on_error=on_error)
        count += 1
    for _ in range(_WINDOW):
        window.acquire()
    if errors:
        raise errors[0]
    return count


def measure(server: Server, work: Work, seconds: float, group: str, *, is_peer: bool) -> Result:
    """Measure one row on one server."""
    if work.kind == "consume":
        return java_consume(server, group)
    if work.is_ours and not is_peer:
        return our_send(server, work, seconds)
    return java_send(server, work, seconds)


def report_row(work: Work, peer: list[Result], own: list[Result]) -> None:
    """Print the medians of one row."""
    rates = [median(result.rate for result in results) for results in (peer, own)]
    report(f"{work.name}: Java client, RocketMQ 5.5.0", rates[0], "/s", "the peer")
    report(f"{work.name}: {'our client' if work.is_ours else 'Java client'}, our server", rates[1], "/s", "")
    report("  of RocketMQ", rates[1] / rates[0], "x", f">= {work.target}x")
    for name, results in (("RocketMQ", peer), ("our server", own)):
        cpu = median(result.server_us for result in results)
        p50, p99 = (median(result[at] for result in results) for at in (1, 2))
        times = f", p50 {p50:.2f} ms, p99 {p99:.2f} ms" if p50 else ""
        print(f"    {name}: {cpu:.0f} us of processor time for a message in the server{times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--only", default="", help="measure the rows whose name contains this")
    options = parser.parse_args()
    if (reason := unavailable_reason()) is not None:
        raise SystemExit(f"not measured: {reason}")
    table = [work for work in _TABLE if options.only in work.name]
    mode = FlushDiskType.ASYNC_FLUSH
    # On a machine with few processors RocketMQ would refuse sends that waited for 200 ms.
    patient = {"waitTimeMillsInSendQueue": 10_000, "osPageCacheBusyTimeOutMills": 10_000}
    found: dict[tuple[Work, bool], list[Result]] = defaultdict(list)
    with (
        scratch_folder() as folder,
        NameServer() as name_server,
        RocketMQ(folder / "peer", name_server, patient | {"flushDiskType": mode.value}, for_speed=True) as rocketmq,
        BrokerProcess(folder / "ours", flush_disk_type=mode) as ours,
    ):
        servers = {True: Server(name_server.address, rocketmq.pid), False: Server(ours.address, ours.pid)}
        if any(work.kind == "consume" for work in table):
            for server in servers.values():
                with java_program("Fill", server.address, "stored", str(_CONSUMED), "100", str(len(BODY))) as lines:
                    list(lines)
        for number in range(options.rounds):
            for work in table:
                for is_peer, server in servers.items():
                    other = servers[not is_peer]
                    other.wait_until_idle()
                    with other.stopped():
                        result = measure(server, work, options.seconds, f"group-{number}", is_peer=is_peer)
                    found[work, is_peer].append(result)
                    name = "RocketMQ" if is_peer else "our server"
                    print(f"    round {number + 1}, {work.name}, {name}: {result.rate:,.0f}/s", flush=True)
    for work in table:
        report_row(work, found[work, True], found[work, False])


if __name__ == "__main__":
    run(main)
