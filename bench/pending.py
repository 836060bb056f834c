"""Many pending messages: their memory, the rate of sends beside them, and the time from a restart to a delivery.

Bodies have 200 bytes. One restart follows a clean stop, the other a killed process.

    python -m bench.pending [COUNT]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.measure import BODY, quiet, rate, report, resident_mib, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.template import RocketMQTemplate

_COUNT = 1_000_000
_BATCH = 1_000
_BODY = b"x" * 200
_SETTINGS = EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)
_DAY_MS = 86_400_000
_SPREAD_MS = 7_919  # a prime: spreads the deliver times over three days
_SENDS = 20_000


def fill(folder: Path, count: int, *, is_killed: bool) -> None:
    """In its own process: send messages, print the growth of memory and the rate of sends, then stop or be killed."""
    with EmbeddedBroker(folder, _SETTINGS) as broker:
        broker.send(Message("pending", _BODY, {"TIMER_DELAY_SEC": "86400"}))
        time.sleep(1.5)
        before = resident_mib(anonymous_only=True)
        now_ms = time.time_ns() // 1_000_000
        for begin in range(0, count, _BATCH):
            broker.send_batch([_pending(now_ms, number) for number in range(begin, begin + _BATCH)])
        queue = broker.queues("probe")[0]
        broker.send(Message("probe", b"on the wheel", {"TIMER_DELAY_MS": "1"}), queue)
        while broker.max_offset(queue) < 1:  # timers are enqueued in order, so all of them are on the wheel then
            time.sleep(0.05)
        broker.store.index.catch_up()  # background work ends before the measurement
        growth_mib = resident_mib(anonymous_only=True) - before
        print(json.dumps({"growth_mib": growth_mib, "sends": send_rate(broker)}), flush=True)
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)


def _pending(now_ms: int, number: int) -> Message:
    deliver_ms = now_ms + _DAY_MS + number * _SPREAD_MS % (3 * _DAY_MS)
    return Message("pending", _BODY, {"TIMER_DELIVER_MS": str(deliver_ms)})


def send_rate(broker: EmbeddedBroker) -> float:
    """Return sends per second: one thread, 1 KiB, without a delay."""
    send = RocketMQTemplate(broker).sync_send

    def work(count: int) -> None:
        for _ in range(count):
            send("now", BODY)

    return rate(work, _SENDS)


def first_delivery(folder: Path) -> float:
    """Return the seconds from the start of a broker to the delivery of a new timer."""
    start = time.perf_counter()
    with EmbeddedBroker(folder, _SETTINGS) as broker:
        queue = broker.queues("probe")[1]
        seen = broker.max_offset(queue)
        broker.send(Message("probe", b"x", {"TIMER_DELAY_MS": "1"}), queue)
        while broker.max_offset(queue) == seen:
            time.sleep(0.001)
        return time.perf_counter() - start


def child(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.pending", *arguments]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    return dict(json.loads(printed))


def measure_empty() -> None:
    with scratch_folder() as folder, EmbeddedBroker(folder, _SETTINGS) as broker:
        print(json.dumps({"sends": send_rate(broker)}), flush=True)


def measure(count: int) -> None:
    limit_mib = 200 if count > 1_000_000 else 100
    for is_killed in (False, True):
        how = "killed" if is_killed else "clean stop"
        with scratch_folder() as folder:
            filled = child("--fill", str(folder / "store"), str(count), str(int(is_killed)))
            empty = child("--empty")["sends"]
            report(f"memory for {count:,} pending, filled", filled["growth_mib"], "MiB", f"< {limit_mib} MiB")
            report("  sends beside them, relative to an empty store", filled["sends"] / empty, "x", ">= 0.8x")
            before = resident_mib(anonymous_only=True)
            report(f"  restart to first delivery, {how}", first_delivery(folder / "store"), "s", "< 15 s")
            grown_mib = resident_mib(anonymous_only=True) - before
            report(f"  memory after the restart, {how}", grown_mib, "MiB", f"< {limit_mib} MiB")


def main() -> None:
    measure(int(sys.argv[1]) if len(sys.argv) > 1 else _COUNT)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fill"]:
        quiet()
        fill(Path(sys.argv[2]), int(sys.argv[3]), is_killed=sys.argv[4] == "1")
    elif sys.argv[1:2] == ["--empty"]:
        quiet()
        measure_empty()
    else:
        run(main)
