"""Rate of sync_send with lists of 100 bodies of 1 KiB, ASYNC_FLUSH."""

from __future__ import annotations

from bench.measure import BODY, rate, report, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.template import RocketMQTemplate


def main() -> None:
    with (
        scratch_folder() as folder,
        EmbeddedBroker(folder, EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)) as broker,
    ):
        send = RocketMQTemplate(broker).sync_send
        batch = [BODY] * 100

        def work(count: int) -> None:
            for _ in range(count // 100):
                send("orders:paid", batch)

        report("messages in lists of 100, 1 thread, ASYNC_FLUSH", rate(work, 100_000), "/s", ">= 200,000/s")


if __name__ == "__main__":
    run(main)
