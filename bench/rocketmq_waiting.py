"""1,000,000 waiting messages here and in Apache RocketMQ 5.5.0: what idling costs, how late timers come beside them.

First nothing happens for some seconds; then 10,000 timers fall due over 10 s. Lateness is the store timestamp in the
real topic less the due time. RocketMQ rounds to its precision, a second by default: that is its figure as it comes.

    python -m bench.rocketmq_waiting [COUNT]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from bench.measure import percentile, quiet, report, run, scratch_folder
from bench.peer.rocketmq import NameServer, RocketMQ, java_program, why_not
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message
from mqtemplate.store import FlushDiskType

_COUNT = 1_000_000
_BODY_BYTES = 200
_DAY_MS = 86_400_000
_IDLE_SECONDS = 20
_PUNCTUAL = 10_000
_SPREAD_MS = 10_000
_BATCH = 500
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_share(pid: int) -> float:
    """Per cent of one core that a process takes while nothing happens."""
    before, began = _cpu_seconds(pid), time.monotonic()
    time.sleep(_IDLE_SECONDS)
    return (_cpu_seconds(pid) - before) / (time.monotonic() - began) * 100


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def theirs(folder: Path, count: int) -> tuple[float, list[float]]:
    """Idle share and lateness of RocketMQ, both flush modes alike: ASYNC_FLUSH."""
    options = {"flushDiskType": "ASYNC_FLUSH", "timerMaxDelaySec": 10 * 86_400}
    with NameServer() as names, RocketMQ(folder, names, options, for_speed=True) as broker:
        far_ms = _now_ms() + _DAY_MS
        with java_program(
            "Timers", names.address, "waiting", "send", str(count), str(_BODY_BYTES), str(far_ms), str(_DAY_MS)
        ) as lines:
            list(lines)
        time.sleep(10)  # what it does behind the sender comes to rest
        share = cpu_share(broker.pid)
        soon_ms = _now_ms() + 5_000
        arguments = ("late", "lateness", str(_PUNCTUAL), str(_BODY_BYTES), str(soon_ms), str(_SPREAD_MS))
        with java_program("Timers", names.address, *arguments) as lines:
            late = [int(stored) - int(due) for due, stored in _pairs(lines)]
    return share, [float(value) for value in late]


def _pairs(lines: Iterable[str]) -> list[list[str]]:
    return [line.split() for line in lines if not line.startswith("{")]


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def ours(folder: Path, count: int, mode: FlushDiskType) -> tuple[float, list[float]]:
    """The same of an embedded broker in a process of its own."""
    command = [sys.executable, "-m", "bench.rocketmq_waiting", "--child", str(folder), str(count), mode.value]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(10)
        share = cpu_share(child.pid)
        child.stdin.write("go on\n")
        child.stdin.flush()
        return share, json.loads(child.stdout.readline())


def wait_and_release(folder: Path, count: int, mode: FlushDiskType) -> None:
    """The child: fill, idle until told, then measure."""
    with EmbeddedBroker(folder, EmbeddedSettings(flush_disk_type=mode)) as broker:
        far_ms = _now_ms() + _DAY_MS
        _send(broker, "waiting", count, far_ms, _DAY_MS)
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
    for begin in range(0, count, _BATCH):
        due = (first_ms + span_ms * number // count for number in range(begin, begin + _BATCH))
        broker.send_batch([Message(topic, body, {"TIMER_DELIVER_MS": str(due_ms)}) for due_ms in due])


def main() -> None:
    if (reason := why_not()) is not None:
        raise SystemExit(f"not measured: {reason}")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else _COUNT
    with scratch_folder() as folder:
        tell("RocketMQ", *theirs(folder, count), "the peer")
    for mode in FlushDiskType:
        with scratch_folder() as folder:
            tell(f"embedded, {mode.value}", *ours(folder, count, mode), "")


def tell(who: str, share: float, late: list[float], peer: str) -> None:
    report(f"{who}: idle, of one core", share, "%", peer or "< 1 %")
    report(f"{who}: lateness, minimum", min(late), "ms", peer or ">= 0")
    report(f"{who}: lateness, p50", percentile(late, 0.5), "ms", peer)
    report(f"{who}: lateness, p99", percentile(late, 0.99), "ms", peer or "<= 2 ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        quiet()
        wait_and_release(Path(sys.argv[2]), int(sys.argv[3]), FlushDiskType(sys.argv[4]))
    else:
        run(main)
