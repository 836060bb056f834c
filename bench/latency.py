"""Time from the send to the handler on an idle system, and the rate of sending and consuming in one process.

Both flush modes are measured; the default is SYNC_FLUSH. A message counts as handled when the listener's function runs.
"""

from __future__ import annotations

import threading
import time

from bench.measure import BODY, percentile, report, run, scratch_folder
from mqtemplate import MQApplication, RocketMQTemplate, message_listener

_SAMPLES = 2_000
_COUNT = 100_000


class Handled:
    """Counter of handled messages, with the time of the last one."""

    def __init__(self) -> None:
        self.count = 0
        self.at = 0.0
        self.done = threading.Event()
        self.expected = 1

    def add(self) -> None:
        """Count a message."""
        self.at = time.perf_counter()
        self.count += 1
        if self.count >= self.expected:
            self.done.set()


def idle(template: RocketMQTemplate, handled: Handled, mode: str) -> None:
    """Measure single messages."""
    spans = []
    for _ in range(_SAMPLES):
        handled.done.clear()
        handled.expected = handled.count + 1
        start = time.perf_counter()
        template.sync_send("orders:paid", BODY)
        handled.done.wait(30)
        spans.append((handled.at - start) * 1_000)
        time.sleep(0.002)
    report(f"send to handler, idle, {mode}, p50", percentile(spans, 0.5), "ms", "< 0.5 ms")
    report(f"send to handler, idle, {mode}, p99", percentile(spans, 0.99), "ms", "< 2 ms")


def sustained(template: RocketMQTemplate, handled: Handled, mode: str) -> None:
    """Measure many messages in a row."""
    handled.done.clear()
    handled.expected = handled.count + _COUNT
    start = time.perf_counter()
    for _ in range(_COUNT):
        template.sync_send("orders:paid", BODY)
    handled.done.wait(120)
    target = ">= 25,000/s" if mode == "ASYNC_FLUSH" else "none"
    report(f"sent and handled, one thread each, {mode}", _COUNT / (handled.at - start), "/s", target)


def main() -> None:
    for mode in ("ASYNC_FLUSH", "SYNC_FLUSH"):
        handled = Handled()

        @message_listener(topic="orders", consumer_group="bench", consume_thread_number=1, consume_thread_max=1)
        def on_message(message: bytes, handled: Handled = handled) -> None:
            handled.add()

        with scratch_folder() as folder:
            (folder / "application.yml").write_text(
                f"rocketmq.name-server: embedded:{folder}/store\n"
                f"mqtemplate:\n  broker: {{flush-disk-type: {mode}}}\n"
                "  logging: {enabled: false}\n"
            )
            with MQApplication(on_message, config_folder=folder) as app:
                idle(app.template, handled, mode)
                sustained(app.template, handled, mode)


if __name__ == "__main__":
    run(main)
