"""sync_send with SYNC_FLUSH, 1 KiB: one thread beside the disk's own fdatasync rate, and 32 threads."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

from bench.measure import BODY, rate, report, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.template import RocketMQTemplate

_FILE_SIZE = 64 << 20


def disk_rate(folder: Path) -> float:
    """What the disk does by itself: a record into a preallocated map, fdatasync, again."""
    fd = os.open(folder / "peer", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, _FILE_SIZE)
    view = mmap.mmap(fd, _FILE_SIZE)
    record = bytes(1_200)
    at = 0

    def work(count: int) -> None:
        nonlocal at
        for _ in range(count):
            view[at : at + len(record)] = record
            at += len(record)
            os.fdatasync(fd)

    result = rate(work, 2_000)
    view.close()
    os.close(fd)
    return result


def main() -> None:
    with scratch_folder() as folder:
        disk = disk_rate(folder)
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

            one = rate(work, 2_000)
            report("fdatasync of a record, the disk alone", disk, "/s", "the peer")
            report("sync_send, 1 thread, SYNC_FLUSH", one, "/s", "within 20 % of the disk")
            report("  of the disk's rate", one / disk, "x", ">= 0.8")
            report("sync_send, 32 threads, SYNC_FLUSH", rate(work_of_32, 32_000), "/s", ">= 20,000/s")


if __name__ == "__main__":
    run(main)
