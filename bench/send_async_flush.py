"""Rate of sync_send with ASYNC_FLUSH, one thread, 1 KiB, to one topic and to ten; and the rate of the store alone."""

from __future__ import annotations

from bench.measure import BODY, rate, report, run, scratch_folder
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import SystemClock
from mqtemplate.record.codec import RecordDraft
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import FlushDiskType, StoreSettings
from mqtemplate.template import RocketMQTemplate


def template() -> None:
    """Measure sync_send of the template."""
    with scratch_folder() as folder:
        settings = EmbeddedSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)
        with EmbeddedBroker(folder, settings) as broker:
            send = RocketMQTemplate(broker).sync_send

            def work(count: int) -> None:
                for _ in range(count):
                    send("orders:paid", BODY)

            def work_on_ten(count: int) -> None:
                for _ in range(count // 10):
                    for topic in range(10):
                        send(f"orders-{topic}:paid", BODY)

            report("sync_send, 1 thread, ASYNC_FLUSH", rate(work, 50_000), "/s", ">= 60,000/s")
            report("the same, to 10 topics in turn", rate(work_on_ten, 50_000), "/s", "as one topic")


def store() -> None:
    """Measure MessageStore.put."""
    with scratch_folder() as folder:
        engine = MessageStore(
            FolderStoreFiles(folder), StoreSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH), SystemClock()
        )
        engine.load()
        engine.start()
        properties = b"TAGS\x01paid\x02UNIQ_KEY\x017F00000112345678ABCDEF0011223344\x02"

        def work(count: int) -> None:
            put = engine.put
            for number in range(count):
                put(RecordDraft("orders", number & 3, BODY, properties))

        report("MessageStore.put, 1 thread, nothing flushed", rate(work, 50_000), "/s", ">= 150,000/s")
        engine.close()


def main() -> None:
    template()
    store()


if __name__ == "__main__":
    run(main)
