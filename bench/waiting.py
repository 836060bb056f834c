"""1,000,000 waiting messages: memory they take, and the time from a restart to the next delivery.

Bodies have 200 bytes. One half of the restarts follows a clean stop, the other a killed process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.measure import report, resident_mib, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.message import Message
from mqtemplate.store import FlushDiskType

_COUNT = 1_000_000
_BATCH = 1_000
_BODY = b"x" * 200
_SETTINGS = EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)
_DAY_MS = 86_400_000


def fill(folder: Path, *, dies: bool) -> None:
    """In a process of its own: send, tell how memory grew, and stop or die."""
    chance_ms = 7_919  # a prime: spreads the deliver times over three days
    with EmbeddedBroker(folder, _SETTINGS) as broker:
        broker.send(Message("waiting", _BODY, {"TIMER_DELAY_SEC": "86400"}))
        time.sleep(1.5)
        before = resident_mib(anonymous_only=True)
        now_ms = time.time_ns() // 1_000_000
        for begin in range(0, _COUNT, _BATCH):
            broker.send_batch(
                [
                    Message(
                        "waiting",
                        _BODY,
                        {"TIMER_DELIVER_MS": str(now_ms + _DAY_MS + number * chance_ms % (3 * _DAY_MS))},
                    )
                    for number in range(begin, begin + _BATCH)
                ]
            )
        queue = broker.queues("probe")[0]
        broker.send(Message("probe", b"on the wheel", {"TIMER_DELAY_MS": "1"}), queue)
        while broker.max_offset(queue) < 1:  # enqueued in order, so all are on the wheel then
            time.sleep(0.05)
        print(resident_mib(anonymous_only=True) - before, flush=True)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


def first_delivery(folder: Path) -> float:
    """Seconds from the start of a broker to the delivery of a message that fell due meanwhile."""
    start = time.perf_counter()
    with EmbeddedBroker(folder, _SETTINGS) as broker:
        queue = broker.queues("probe")[1]
        seen = broker.max_offset(queue)
        broker.send(Message("probe", b"x", {"TIMER_DELAY_MS": "1"}), queue)
        while broker.max_offset(queue) == seen:
            time.sleep(0.001)
        return time.perf_counter() - start


def main() -> None:
    for dies in (False, True):
        with scratch_folder() as folder:
            child = [sys.executable, "-m", "bench.waiting", "--fill", str(folder / "store"), str(int(dies))]
            said = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=False).stdout
            how = "killed" if dies else "clean"
            report(f"memory for 1,000,000 waiting, filled ({how})", float(said), "MiB", "< 100 MiB")
            before = resident_mib(anonymous_only=True)
            report(f"restart to first delivery, {how} stop", first_delivery(folder / "store"), "s", "< 10 s")
            report(
                f"memory after the restart, {how} stop", resident_mib(anonymous_only=True) - before, "MiB", "< 100 MiB"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fill"]:
        from bench.measure import quiet

        quiet()
        fill(Path(sys.argv[2]), dies=sys.argv[3] == "1")
    else:
        run(main)
