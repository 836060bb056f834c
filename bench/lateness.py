"""Lateness of 10,000 delayed messages due over 10 s, levels and timers mixed.

Lateness is the time at which the consumer has the message, minus the due millisecond. A tenth of the messages has a
level, the rest a time. They are sent before, so that sending does not disturb the release.
"""

from __future__ import annotations

import subprocess
import sys
import time

from bench.measure import BODY, percentile, report, run, scratch_folder
from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.template import RocketMQTemplate

_COUNT = 10_000
_SPREAD_MS = 10_000
_LEAD_MS = 4_000


def sleep_only() -> None:
    """Run the peer: a process that only sleeps until each of as many due times, and print its lateness."""
    start = time.time()
    late = []
    for number in range(_COUNT):
        due = start + number * _SPREAD_MS / _COUNT / 1_000
        if due > time.time():
            time.sleep(due - time.time())
        late.append((time.time() - due) * 1_000)
    print(percentile(late, 0.5), percentile(late, 0.99), max(late))


def measure(mode: FlushDiskType) -> None:
    settings = EmbeddedSettings(flush_disk_type=mode, message_delay_level="5s 6s 7s 8s 9s 10s 11s 12s 13s 14s")
    with scratch_folder() as folder, EmbeddedBroker(folder, settings) as broker:
        template = RocketMQTemplate(broker)
        consumer = broker.subscribe(ConsumerSpec(group="bench", subscriptions={"late": TagSelector()}))
        start_ms = time.time_ns() // 1_000_000 + _LEAD_MS
        by_time = [number for number in range(_COUNT) if number % 10]
        for begin in range(0, len(by_time), 500):
            broker.send_batch(
                [_timer(start_ms + number * _SPREAD_MS // _COUNT) for number in by_time[begin : begin + 500]]
            )
        for number in range(_COUNT // 10):
            template.sync_send("late", BODY, delay_level=1 + number % 10)
        peer = subprocess.Popen([sys.executable, "-m", "bench.lateness", "--peer"], stdout=subprocess.PIPE, text=True)
        lateness = []
        while len(lateness) < _COUNT:
            messages = consumer.poll(64, 60_000)
            now = time.time_ns() / 1_000_000
            lateness += [now - message.deliver_timestamp for message in messages if message.deliver_timestamp]
    p50, p99, worst = map(float, peer.communicate()[0].split())
    print(f"a process that only sleeps until such due times: p50 {p50:.2f} ms, p99 {p99:.2f} ms, worst {worst:.2f} ms")
    report(f"lateness, {mode.value}, minimum", min(lateness), "ms", ">= 0")
    report(f"lateness, {mode.value}, p50", percentile(lateness, 0.5), "ms", "<= 1 ms")
    report(f"lateness, {mode.value}, p99", percentile(lateness, 0.99), "ms", "<= 2 ms")
    report(f"lateness, {mode.value}, worst", max(lateness), "ms", "none")


def _timer(deliver_ms: int) -> Message:
    return Message("late", BODY, {"TIMER_DELIVER_MS": str(deliver_ms)})


def main() -> None:
    for mode in FlushDiskType:
        measure(mode)


if __name__ == "__main__":
    sleep_only() if sys.argv[1:] == ["--peer"] else run(main)
