"""Start after a kill: read and verify 1 GiB of commit log with messages of 1 KiB, and compare it with the queues.

No checkpoint was taken, so the whole log is read. The first run has the consume queues of the killed process; the
second run has to rebuild them. The delay services follow the log.

    python -m bench.recovery_scan [MIB] [SEED]
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from pathlib import Path

from bench.measure import report, resident_mib, run, scratch_folder
from mqtemplate.clock import SystemClock
from mqtemplate.delay.schedule_message_service import ScheduleMessageService
from mqtemplate.delay.settings import DEFAULT_DELAY_LEVELS, DelayLevels, tags_code_of
from mqtemplate.delay.timers.timer_message_store import TimerMessageStore
from mqtemplate.hashes import tags_code
from mqtemplate.record.codec import Drafts, RecordDraft
from mqtemplate.record.properties import encode_properties
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import FlushDiskType, StoreSettings

_QUEUES = 8
_BATCH = 1_000
_SETTINGS = StoreSettings(flush_disk_type=FlushDiskType.ASYNC_FLUSH)
_LEVELS = DelayLevels.parse(DEFAULT_DELAY_LEVELS)


def open_store(folder: Path) -> MessageStore:
    return MessageStore(
        FolderStoreFiles(folder), _SETTINGS, SystemClock(), lambda *label: tags_code_of(*label, _LEVELS)
    )


def fill(folder: Path, mib: int, seed: int) -> int:
    """Write *mib* of messages, and release the folder as a killed process does. Return the number of messages."""
    chance = random.Random(seed)
    bodies = [chance.randbytes(1_024) for _ in range(64)]
    tags = ["paid", "refunded", "late"]
    store = open_store(folder)
    store.load()
    count = 0
    while store.end_offset < mib << 20:
        store.put(Drafts([_draft(number, chance, bodies, tags) for number in range(count, count + _BATCH)]))
        count += _BATCH
    store.release()
    os.sync()  # only reading is measured
    return count


def _draft(number: int, chance: random.Random, bodies: list[bytes], tags: list[str]) -> RecordDraft:
    tag = chance.choice(tags)
    properties = encode_properties({"UNIQ_KEY": f"7F0000010B7C18B4AAC2{number:012X}", "WAIT": "true", "TAGS": tag})
    return RecordDraft("orders", chance.randrange(_QUEUES), chance.choice(bodies), properties, tags_code(tag))


def recover(folder: Path, case: str, count: int) -> None:
    before = resident_mib(anonymous_only=True)
    store = open_store(folder)
    followers = [ScheduleMessageService(store), TimerMessageStore(store)]
    start = time.perf_counter()
    store.load(followers)
    seconds = time.perf_counter() - start
    grown = resident_mib(anonymous_only=True) - before
    found = sum(store.consume_queue("orders", queue_id).max_offset for queue_id in range(_QUEUES))
    assert found == count, f"{found} of {count} messages are in their queues"
    report(f"recovery scan, {case}", (store.end_offset >> 20) / seconds, "MiB/s", ">= 300 MiB/s")
    report("  memory in addition, without mapped files", grown, "MiB", "flat")
    store.release()


def main() -> None:
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 1_024
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with scratch_folder() as folder:
        count = fill(folder / "store", mib, seed)
        recover(folder / "store", "queues of the killed process", count)
        shutil.rmtree(folder / "store" / "consumequeue")
        recover(folder / "store", "queues missing", count)


if __name__ == "__main__":
    run(main)
