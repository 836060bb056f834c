"""Rate, memory, processor time, and the sends beside it, of a hand-over of many pending messages.

    python -m bench.hand_over_rate [MESSAGES] [RATE]

The messages (20,000; give 1000000 for a large run) are in a folder, which an application in a process of its own opens;
the new broker is our server in another process. The application sends all the time, in turns while the mover rests and
while it works: so the two 99th percentiles are of one run. Printed are their ratio, the messages that move in a second,
the growth of the resident memory, and the processor time for each message.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench.hand_over_kill import TOPIC, server
from mqtemplate.broker import MessageSends
from mqtemplate.broker.hand_over import HandOverPhase
from mqtemplate.brokers import EmbeddedBroker, RemoteBroker, RemoteSettings
from mqtemplate.handover.broker import SendsInFlight
from mqtemplate.handover.mover import Mover, MoverSettings
from mqtemplate.message import Message

_BATCH = 1_000
_DAY_MS = 86_400_000
_SAMPLES = 250
_TURNS = 6
"""Turns of `_SAMPLES` sends, at first without the mover and then with it. Later it works until all has moved."""
_PAUSE_S = 0.005


def fill(broker: EmbeddedBroker, count: int) -> None:
    """Send *count* timers that are due within a day."""
    for start in range(0, count, _BATCH):
        broker.sends.send_batch(
            [
                Message(TOPIC, b"x" * 200, {"TIMER_DELAY_MS": str(_DAY_MS + number * 37 % _DAY_MS)})
                for number in range(start, min(start + _BATCH, count))
            ]
        )


def send_times_ms(sends: MessageSends, goes_on: Callable[[int], bool]) -> list[float]:
    """Send one message after the other with a pause, and return how long each took."""
    times: list[float] = []
    while goes_on(len(times)):
        start_s = time.perf_counter()
        sends.send(Message("sends", b"x" * 200))
        times.append((time.perf_counter() - start_s) * 1_000)
        threading.Event().wait(_PAUSE_S)
    return times


def resident_mib() -> float:
    """Return the resident memory that is not of mapped files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) / 1_024


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[int(len(times) * share)]


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    rate = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    with tempfile.TemporaryDirectory(prefix="hand-over-", dir=os.environ.get("BENCH_DIR")) as home:
        folder = Path(home)
        process, address = server(folder, "new")
        try:
            process.wait_until_ready()
            _measure(folder, address, count, rate, process.pid)
        finally:
            process.kill()


@dataclass
class _Totals:
    """Sums over the turns without the mover, or with it."""

    times_ms: list[float] = field(default_factory=list)
    seconds: float = 0
    used_s: float = 0
    server_s: float = 0
    most_mib: float = 0


def _process_seconds(pid: int) -> float:
    """Return the processor time of another process."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def _turn(sends: MessageSends, totals: _Totals, server_pid: int, goes_on: Callable[[int], bool]) -> None:
    start_s, used_s, server_s = time.monotonic(), time.process_time(), _process_seconds(server_pid)

    def goes_on_counted(sent: int) -> bool:
        if sent % 100 == 0:
            totals.most_mib = max(totals.most_mib, resident_mib())
        return goes_on(sent)

    totals.times_ms += send_times_ms(sends, goes_on_counted)
    totals.seconds += time.monotonic() - start_s
    totals.used_s += time.process_time() - used_s
    totals.server_s += _process_seconds(server_pid) - server_s


def _measure(folder: Path, address: str, count: int, rate: int, server_pid: int) -> None:
    settings = RemoteSettings(name_servers=(address,), offset_path=folder / "client")
    alone, beside = _Totals(), _Totals()
    with EmbeddedBroker(folder / "old") as old, RemoteBroker(settings) as new:
        fill(old, count)
        sends = SendsInFlight(new)  # those of the application, as `HandOverBroker` has them
        send_times_ms(sends, lambda sent: sent < _SAMPLES)
        old.hand_over.begin("new")
        gc.collect()
        before_mib = resident_mib()
        mover = Mover(old, new, MoverSettings(rate=rate), is_sending=sends.are_in_flight)

        def is_moving(sent: int) -> bool:
            return sent % 20 != 0 or old.hand_over.counts().moved < count

        old.hand_over.change(HandOverPhase.PAUSED)
        mover.start()
        for _ in range(_TURNS):
            _turn(sends, alone, server_pid, lambda sent: sent < _SAMPLES)
            old.hand_over.change(HandOverPhase.RUNNING)
            _turn(sends, beside, server_pid, lambda sent: sent < _SAMPLES and is_moving(sent))
            old.hand_over.change(HandOverPhase.PAUSED)
        old.hand_over.change(HandOverPhase.RUNNING)
        _turn(sends, beside, server_pid, is_moving)
        mover.close()
        moved = old.hand_over.counts().moved
    _report(moved, rate, before_mib, alone, beside)


def _report(moved: int, rate: int, before_mib: float, alone: _Totals, beside: _Totals) -> None:
    print(f"{moved:,} messages in {beside.seconds:.1f} s: {moved / beside.seconds:,.0f} a second (limit {rate:,})")
    share = len(beside.times_ms) / len(alone.times_ms)
    for name, used_s, idle_s in (
        ("application", beside.used_s, alone.used_s),
        ("new server", beside.server_s, alone.server_s),
    ):
        own_s = used_s - idle_s * share
        print(f"processor time of the {name} without its sends: {own_s:.1f} s, {own_s / moved * 1e6:.0f} us a message")
    growth = beside.most_mib - before_mib
    print(f"memory without mapped files: {before_mib:.0f} MiB before, {growth:+.0f} MiB at most meanwhile")
    print(f"largest resident set: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024:.0f} MiB")
    for name, totals in (("alone", alone), ("beside the move", beside)):
        times = totals.times_ms
        median, p99 = percentile(times, 0.5), percentile(times, 0.99)
        print(f"{len(times):,} sends {name}: median {median:.2f} ms, p99 {p99:.2f} ms")
    ratio = percentile(beside.times_ms, 0.99) / percentile(alone.times_ms, 0.99)
    print(f"p99 beside the move / alone: {ratio:.2f}")


if __name__ == "__main__":
    main()
