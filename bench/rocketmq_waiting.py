"""CPU time and timer lateness with 1,000,000 pending messages: the embedded broker and Apache RocketMQ 5.5.0.

The brokers are idle for some seconds. Then 10,000 timers are due over 10 s. Lateness is the store timestamp in the real
topic minus the due time. RocketMQ rounds the due time to its precision, one second by default.

    python -m bench.rocketmq_waiting [COUNT]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from bench.measure import percentile, processor_s, quiet, report, run, scratch_folder
from bench.peer.jvm import java_program, unavailable_reason
from bench.peer.rocketmq import NameServer, RocketMQ
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message
from mqtemplate.store.settings import FlushDiskType

_COUNT = 1_000_000
_BODY_BYTES = 200
_DAY_MS = 86_400_000
_IDLE_SECONDS = 20
_PUNCTUAL = 10_000
_SPREAD_MS = 10_000
_BATCH = 500


def cpu_share(pid: int) -> float:
    """Return the CPU share of an idle process in per cent of one core."""
    before, start = processor_s(pid), time.monotonic()
    time.sleep(_IDLE_SECONDS)
    return (processor_s(pid) - before) / (time.monotonic() - start) * 100


def rocketmq_share_and_lateness(folder: Path, count: int) -> tuple[float, list[float]]:
    """Return the idle CPU share and the lateness of RocketMQ with ASYNC_FLUSH."""
    options = {"flushDiskType": "ASYNC_FLUSH", "timerMaxDelaySec": 10 * 86_400}
    with NameServer() as name_server, RocketMQ(folder, name_server, options, for_speed=True) as broker:
        far_ms = _now_ms() + _DAY_MS
        with java_program(
            "Timers", name_server.address, "pending", "send", str(count), str(_BODY_BYTES), str(far_ms), str(_DAY_MS)
        ) as lines:
            list(lines)
        time.sleep(10)  # Let its background work end.
        share = cpu_share(broker.pid)
        soon_ms = _now_ms() + 5_000
        arguments = ("late", "lateness", str(_PUNCTUAL), str(_BODY_BYTES), str(soon_ms), str(_SPREAD_MS))
        with java_program("Timers", name_server.address, *arguments) as lines:
            late = [int(stored) - int(due) for due, stored in _pairs(lines)]
    return share, [float(value) for value in late]


def _pairs(lines: Iterable[str]) -> list[list[str]]:
    return [line.split() for line in lines if not line.startswith("{")]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def mqtemplate_share_and_lateness(folder: Path, count: int, mode: FlushDiskType) -> tuple[float, list[float]]:
    """Return the same of an embedded broker in its own process."""
    command = [sys.executable, "-m", "bench.rocketmq_waiting", "--child", str(folder), str(count), mode.value]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(10)
        share = cpu_share(child.pid)
        child.stdin.write("continue\n")
        child.stdin.flush()
        return share, json.loads(child.stdout.readline())


def store_and_deliver(folder: Path, count: int, mode: FlushDiskType) -> None:
    """Run the child process: store the messages, wait for a line on standard input, then measure."""
    with EmbeddedBroker(folder, EmbeddedSettings(flush_disk_type=mode)) as broker:
        far_ms = _now_ms() + _DAY_MS
        _send(broker, "pending", count, far_ms, _DAY_MS)
        print("filled", flush=True)
        sys.stdin.readline()
        _send(broker, "late", _PUNCTUAL, _now_ms() + 4_000, _SPREAD_MS)
        queues = broker.queues("late")
        while sum(broker.max_offset(queue) for queue in queues) < _PUNCTUAL:
            time.sleep(0.2)
        late = []
        for queue in queues:
            at = 0
            while messages := broker.pull(queue, at, 1_000).messages:
                late += [message.store_timestamp - (message.deliver_timestamp or 0) for message in messages]
                at += len(messages)
        print(json.dumps(late), flush=True)


def _send(broker: EmbeddedBroker, topic: str, count: int, first_ms: int, span_ms: int) -> None:
    body = bytes(_BODY_BYTES)
    for first in range(0, count, _BATCH):
        due = (first_ms + span_ms * number // count for number in range(first, first + _BATCH))
        broker.send_batch([Message(topic, body, {"TIMER_DELIVER_MS": str(due_ms)}) for due_ms in due])


def main() -> None:
    if (reason := unavailable_reason()) is not None:
        raise SystemExit(f"not measured: {reason}")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else _COUNT
    with scratch_folder() as folder:
        report_all("RocketMQ", *rocketmq_share_and_lateness(folder, count), "the peer")
    for mode in FlushDiskType:
        with scratch_folder() as folder:
            report_all(f"embedded, {mode.value}", *mqtemplate_share_and_lateness(folder, count, mode), "")


def report_all(name: str, share: float, late: list[float], peer: str) -> None:
    report(f"{name}: idle, of one core", share, "%", peer or "< 1 %")
    report(f"{name}: lateness, minimum", min(late), "ms", peer or ">= 0")
    report(f"{name}: lateness, p50", percentile(late, 0.5), "ms", peer)
    report(f"{name}: lateness, p99", percentile(late, 0.99), "ms", peer or "<= 2 ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        quiet()
        store_and_deliver(Path(sys.argv[2]), int(sys.argv[3]), FlushDiskType(sys.argv[4]))
    else:
        run(main)
