"""Rate of sync_send with SYNC_FLUSH, 1 KiB: one thread, compared with fdatasync of the disk, and 32 threads."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.measure import BODY, rate, report, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.template import RocketMQTemplate

_FILE_SIZE = 64 << 20


class Disk:
    """The disk alone: writes a record into a preallocated map, calls fdatasync, and repeats that."""

    def __init__(self, folder: Path) -> None:
        self._fd = os.open(folder / "peer", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._fd, 0, _FILE_SIZE)
        self._view = mmap.mmap(self._fd, _FILE_SIZE)
        self._at = 0

    def write(self, count: int) -> None:
        """Write and sync *count* records."""
        record = bytes(1_200)
        for _ in range(count):
            self._view[self._at : self._at + len(record)] = record
            self._at += len(record)
            os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        self._view.close()
        os.close(self._fd)


def compare(ours: Callable[[int], None], theirs: Callable[[int], None]) -> tuple[float, float, float]:
    """Return both rates and the median of their ratio. The rounds alternate, since the speed of the disk varies."""
    rounds = [(rate(ours, 1_000, rounds=1), rate(theirs, 1_000, rounds=1)) for _ in range(9)]
    return (
        median(one for one, _ in rounds),
        median(other for _, other in rounds),
        median(one / other for one, other in rounds),
    )


def main() -> None:
    with scratch_folder() as folder:
        disk = Disk(folder)
        with EmbeddedBroker(folder / "store") as broker:
            send = RocketMQTemplate(broker).sync_send

            def work(count: int) -> None:
                for _ in range(count):
                    send("orders:paid", BODY)

            def work_of_32(count: int) -> None:
                threads = [threading.Thread(target=work, args=(count // 32,)) for _ in range(32)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()

            one, alone, ratio = compare(work, disk.write)
            report("fdatasync of a record, the disk alone", alone, "/s", "the peer")
            report("sync_send, 1 thread, SYNC_FLUSH", one, "/s", "within 15 % of the disk")
            report("  of the rate of the disk, alternating rounds", ratio, "x", ">= 0.85")
            report("sync_send, 32 threads, SYNC_FLUSH", rate(work_of_32, 32_000), "/s", ">= 20,000/s")
            all_cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {min(all_cores)})
            report("sync_send, 32 threads, SYNC_FLUSH, on one core", rate(work_of_32, 32_000), "/s", "none")
            os.sched_setaffinity(0, all_cores)
        disk.close()


if __name__ == "__main__":
    run(main)
