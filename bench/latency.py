"""From send to handler on an idle system; and sending while a listener consumes, in one process.

Default settings are SYNC_FLUSH; both modes are measured. A message counts as handled when the listener's function runs.
"""

from __future__ import annotations

import threading
import time

from bench.measure import BODY, percentile, report, run, scratch_folder
from mqtemplate import MQApplication, RocketMQTemplate, message_listener

_SAMPLES = 2_000
_COUNT = 100_000


class Handled:
    """Counts messages and notes when the last came."""

    def __init__(self) -> None:
        self.count = 0
        self.at = 0.0
        self.arrived = threading.Event()
        self.wanted = 1

    def take(self) -> None:
        self.at = time.perf_counter()
        self.count += 1
        if self.count >= self.wanted:
            self.arrived.set()


def idle(template: RocketMQTemplate, handled: Handled, mode: str) -> None:
    spans = []
    for _ in range(_SAMPLES):
        handled.arrived.clear()
        handled.wanted = handled.count + 1
        start = time.perf_counter()
        template.sync_send("orders:paid", BODY)
        handled.arrived.wait(30)
        spans.append((handled.at - start) * 1_000)
        time.sleep(0.002)
    report(f"send to handler, idle, {mode}, p50", percentile(spans, 0.5), "ms", "< 0.5 ms")
    report(f"send to handler, idle, {mode}, p99", percentile(spans, 0.99), "ms", "< 2 ms")


def sustained(template: RocketMQTemplate, handled: Handled, mode: str) -> None:
    handled.arrived.clear()
    handled.wanted = handled.count + _COUNT
    start = time.perf_counter()
    for _ in range(_COUNT):
        template.sync_send("orders:paid", BODY)
    handled.arrived.wait(120)
    target = ">= 25,000/s" if mode == "ASYNC_FLUSH" else "none"
    report(f"sent and handled, one thread each, {mode}", _COUNT / (handled.at - start), "/s", target)


def main() -> None:
    for mode in ("ASYNC_FLUSH", "SYNC_FLUSH"):
        handled = Handled()

        @message_listener(topic="orders", consumer_group="bench", consume_thread_number=1, consume_thread_max=1)
        def on_message(message: bytes, handled: Handled = handled) -> None:
            handled.take()

        with scratch_folder() as folder:
            (folder / "application.yml").write_text(
                f"mqtemplate:\n  broker: {{store-path: {folder}/store, flush-disk-type: {mode}}}\n"
                "  logging: {enabled: false}\n"
            )
            with MQApplication(on_message, config_folder=folder) as app:
                idle(app.template, handled, mode)
                sustained(app.template, handled, mode)


if __name__ == "__main__":
    run(main)
