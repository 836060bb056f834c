"""500,000 messages of 1 KiB due in the same second: the time until all are delivered, beside RocketMQ 5.5.0.

RocketMQ's Java client sends the timers with 32 threads, the embedded broker in batches. The time of sending is not
measured. All are due at a full second, so that RocketMQ's rounding does not delay them.

    python -m bench.rocketmq_spike [COUNT]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from bench.measure import BODY, report, run, scratch_folder
from bench.peer.jvm import java_program, unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message
from mqtemplate.store.settings import FlushDiskType

_COUNT = 500_000
_BATCH = 500
_SENDS_A_SECOND = {FlushDiskType.ASYNC_FLUSH: 10_000, FlushDiskType.SYNC_FLUSH: 5_000}  # Minimum rates of RocketMQ.


def rocketmq_seconds(folder: Path, mode: FlushDiskType, count: int) -> float:
    """Return the seconds from the due time to the delivery of the last message by RocketMQ."""
    with NameServer() as name_server, RocketMQ(folder, name_server, {"flushDiskType": mode.value}, for_speed=True):
        wait_s = 10 + count / _SENDS_A_SECOND[mode]
        due_ms = _next_second(wait_s)
        arguments = ("spike", "spike", str(count), str(len(BODY)), str(due_ms), "0")
        with java_program("Timers", name_server.address, *arguments) as lines:
            result = json.loads(list(lines)[-1])
    if result["sent"] > wait_s:
        raise SystemExit(f"sending took {result['sent']:.0f} s, longer than the delay; increase wait_s")
    return float(result["last_ms"]) / 1_000


def _next_second(wait_s: float) -> int:
    return (int(time.time() + wait_s) + 1) * 1_000


def mqtemplate_seconds(folder: Path, mode: FlushDiskType, count: int) -> float:
    """Return the same time for the embedded broker."""
    with EmbeddedBroker(folder, EmbeddedSettings(flush_disk_type=mode)) as broker:
        queues = broker.queues("spike")
        due_ms = _next_second(5 + count / 20_000)
        for _ in range(0, count, _BATCH):
            broker.sends.send_batch([Message("spike", BODY, {"TIMER_DELIVER_MS": str(due_ms)}) for _ in range(_BATCH)])
        if time.time() * 1_000 > due_ms:
            raise SystemExit("sending took longer than the delay; increase it")
        while sum(broker.reader.max_offset(queue) for queue in queues) < count:
            time.sleep(0.05)
        ends = [
            broker.reader.pull(queue, broker.reader.max_offset(queue) - 1).messages[-1].store_timestamp
            for queue in queues
        ]
        return (max(ends) - due_ms) / 1_000


def main() -> None:
    if (reason := unavailable_reason()) is not None:
        raise SystemExit(f"not measured: {reason}")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else _COUNT
    for mode in FlushDiskType:
        with scratch_folder() as folder:
            peer_s = rocketmq_seconds(folder / "peer", mode, count)
        with scratch_folder() as folder:
            own_s = mqtemplate_seconds(folder / "ours", mode, count)
        report(f"{count:,} due in one second, {mode.value}: RocketMQ", peer_s, "s", "the peer")
        report("  the embedded broker", own_s, "s", "sooner")
        report("  times as fast", peer_s / own_s, "x", ">= 2x")


if __name__ == "__main__":
    run(main)
