"""Rate at which 100,000 messages of 1 KiB, due in one millisecond, are released to their topic."""

from __future__ import annotations

import time

from bench.measure import BODY, report, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message
from mqtemplate.store.settings import FlushDiskType

_COUNT = 100_000
_BATCH = 500


def measure(mode: FlushDiskType) -> None:
    with scratch_folder() as folder, EmbeddedBroker(folder, EmbeddedSettings(flush_disk_type=mode)) as broker:
        broker.create_topic("spike", 4)
        queues = broker.queues("spike")
        due_ms = time.time_ns() // 1_000_000 + 8_000
        for _ in range(_COUNT // _BATCH):
            broker.send_batch([Message("spike", BODY, {"TIMER_DELIVER_MS": str(due_ms)}) for _ in range(_BATCH)])
        if time.time_ns() // 1_000_000 > due_ms:
            raise SystemExit("sending took longer than the delay; raise the delay")
        while sum(broker.max_offset(queue) for queue in queues) < _COUNT:
            time.sleep(0.005)
        took_s = time.time_ns() / 1e9 - due_ms / 1e3
    report(f"100,000 due in one millisecond, {mode.value}", _COUNT / took_s, "/s", ">= 60,000/s")


def main() -> None:
    for mode in FlushDiskType:
        measure(mode)


if __name__ == "__main__":
    run(main)
