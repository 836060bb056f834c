"""Rate, memory, processor time, and the sends beside it, of a hand-over of many pending messages.

    python -m bench.hand_over_rate [MESSAGES] [RATE]

The messages are in a folder, which an application in a process of its own opens; the new broker is our server in
another process. The application first sends alone, then while the mover works: the 99th percentiles of both, the
messages that move in a second, the growth of the resident memory, and the processor time for each message.
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
from pathlib import Path

from bench.hand_over_kill import TOPIC, server
from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker, RemoteBroker, RemoteSettings
from mqtemplate.handover.mover import Mover, MoverSettings
from mqtemplate.message import Message

_BATCH = 1_000
_DAY_MS = 86_400_000
_SAMPLES = 500
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


def send_times_ms(broker: Broker, goes_on: Callable[[int], bool]) -> list[float]:
    """Send one message after the other with a pause, and return how long each took."""
    times: list[float] = []
    while goes_on(len(times)):
        start_s = time.perf_counter()
        broker.sends.send(Message("sends", b"x" * 200))
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
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    rate = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    with tempfile.TemporaryDirectory(prefix="hand-over-", dir=os.environ.get("BENCH_DIR")) as home:
        folder = Path(home)
        process, address = server(folder, "new")
        try:
            process.wait_until_ready()
            _measure(folder, address, count, rate)
        finally:
            process.kill()


def _measure(folder: Path, address: str, count: int, rate: int) -> None:
    settings = RemoteSettings(name_servers=(address,), offset_path=folder / "client")
    with EmbeddedBroker(folder / "old") as old, RemoteBroker(settings) as new:
        fill(old, count)
        alone = send_times_ms(new, lambda sent: sent < _SAMPLES)
        old.hand_over.begin("new")
        gc.collect()
        before_mib, before_s = resident_mib(), time.process_time()
        most_mib, start_s = before_mib, time.monotonic()
        mover = Mover(old, new, MoverSettings(rate=rate))
        mover.start()

        def is_moving(sent: int) -> bool:
            nonlocal most_mib
            if sent % 100 == 0:
                most_mib = max(most_mib, resident_mib())
            return sent % 20 != 0 or old.hand_over.counts().moved < count

        beside = send_times_ms(new, is_moving)
        seconds = time.monotonic() - start_s
        used_s = time.process_time() - before_s
        mover.close()
    print(f"{count:,} messages in {seconds:.1f} s: {count / seconds:,.0f} a second (limit {rate:,})")
    print(f"processor time of the application: {used_s:.1f} s, {used_s / count * 1e6:.0f} us a message, sends included")
    print(
        f"memory without mapped files: {before_mib:.0f} MiB before, {most_mib - before_mib:+.0f} MiB at most meanwhile"
    )
    print(f"largest resident set: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_024:.0f} MiB")
    for name, times in (("alone", alone), ("beside the move", beside)):
        print(f"send {name}: median {percentile(times, 0.5):.2f} ms, p99 {percentile(times, 0.99):.2f} ms")


if __name__ == "__main__":
    main()
