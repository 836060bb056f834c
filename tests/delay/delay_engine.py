"""A store with both delay services on a virtual clock, for the tests of delayed messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import pytest

from mqtemplate.clock import VirtualClock
from mqtemplate.delay.control import DelayController
from mqtemplate.delay.divert import TimerLimits, divert
from mqtemplate.delay.pending import PendingView
from mqtemplate.delay.recall_handle import handle_of
from mqtemplate.delay.schedule_message_service import ScheduleMessageService
from mqtemplate.delay.settings import DelayLevels, TimerSettings, tags_code_of
from mqtemplate.delay.timers.timer_message_store import TimerMessageStore
from mqtemplate.errors import StoreFullError
from mqtemplate.record.appends import PutResult
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import TIMER_ROLL_TIMES, decode_properties, encode_properties
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import MemoryStoreFiles, StoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import FlushDiskType, StoreSettings
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

SMALL_WHEEL = {"slots_total": 4_000, "roll_window_slots": 3_600, "log_file_size": 5_216}
"""A window of a little more than an hour, and a hundred units a file."""


@dataclass(frozen=True)
class Arrived:
    """A message in its real topic."""

    body: bytes
    at_ms: int
    record: StoredRecord

    @property
    def properties(self) -> dict[str, str]:
        return decode_properties(self.record.properties_bytes)


class DelayEngine:
    """Stores messages as a broker does, and steps the services as the test harness does.

    Args:
        folder: Store directory; None for memory.
        levels: The level table.
        timers: Arguments of `TimerSettings`, except for the precision, which *limits* has.
        store_files: Used instead of *folder*.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        levels: str = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h",
        timers: dict[str, int] = SMALL_WHEEL,
        limits: TimerLimits | None = None,
        clock: VirtualClock | None = None,
        flush: FlushDiskType = FlushDiskType.ASYNC_FLUSH,
        log_file_size: int = 1 << 20,
        queue_file_size: int = 20_000,
        store_files: StoreFiles | None = None,
    ) -> None:
        self.clock = clock or VirtualClock()
        self.levels = DelayLevels.parse(levels)
        self.limits = limits or TimerLimits()
        self.store_files: StoreFiles = store_files or (
            MemoryStoreFiles() if folder is None else FolderStoreFiles(folder)
        )
        settings = StoreSettings(
            flush_disk_type=flush,
            mapped_file_size_commit_log=log_file_size,
            mapped_file_size_consume_queue=queue_file_size,
        )
        self.store = MessageStore(
            self.store_files, settings, self.clock, lambda *label: tags_code_of(*label, self.levels)
        )
        self.schedule = ScheduleMessageService(self.store)
        self.timer = TimerMessageStore(
            self.store, TimerSettings(**({"precision_ms": self.limits.precision_ms} | timers))
        )
        self.store.load([self.schedule, self.timer])
        self.schedule.start()
        self.timer.start()

    @cached_property
    def control(self) -> DelayController:
        return DelayController(self.store, [self.schedule, self.timer], self.limits, "broker-a")

    @cached_property
    def view(self) -> PendingView:
        return PendingView(self.store, [self.schedule, self.timer], lambda: ["orders"], "broker-a")

    # --- producer ------------------------------------------------------------------------------

    def send(self, body: bytes, topic: str = "orders", queue_id: int = 0, **properties: object) -> PutResult:
        """Store a message as the send path does: diverted if its properties have a delay."""
        texts = {name: str(value) for name, value in properties.items()}
        diverted = divert(texts, topic, queue_id, self.clock.now_ms(), self.levels, self.limits)
        if diverted is None:
            return self.put(RecordDraft(topic, queue_id, body, encode_properties(texts)))
        draft = RecordDraft(diverted.topic, diverted.queue_id, body, encode_properties(diverted.properties))
        draft.delay_ms = diverted.delay_ms
        return self.put(draft)

    def put(self, draft: RecordDraft) -> PutResult:
        """Store a record unchanged."""
        result = self.store.put(draft)
        self.store.confirm(result.end, [draft.topic])
        return result

    def send_for(self, body: bytes, topic: str = "orders", **properties: object) -> str:
        """Send a delayed message with *body* as its message id. Return its handle."""
        properties = {"UNIQ_KEY": body.decode()} | properties
        return self.handle(self.send(body, topic, **properties), topic)

    def handle(self, put: PutResult, topic: str = "orders") -> str:
        """Return the handle of a message that was stored now."""
        record = self.store.read(put.physical_offset, put.size)
        return handle_of(topic, "broker-a", record.properties_bytes, self.clock.now_ms(), put.physical_offset)

    def change_table(self, levels: str) -> None:
        """Use another level table from now on."""
        self.levels = DelayLevels.parse(levels)

    # --- time ----------------------------------------------------------------------------------

    def release_due(self) -> int | None:
        """Step both services until nothing is due now. Return when the next message is due."""
        while True:
            nexts = [due for service in (self.schedule, self.timer) if (due := service.step()) is not None]
            if not nexts or min(nexts) > self.clock.now_ms():
                return min(nexts, default=None)

    def advance(self, milliseconds: int) -> None:
        """Move the clock on, and step the services at each time they return."""
        target = self.clock.now_ms() + milliseconds
        while (due := self.release_due()) is not None and due <= target:
            self.clock.set_ms(due)
        self.clock.set_ms(max(target, self.clock.now_ms()))
        self.release_due()

    # --- consumer ------------------------------------------------------------------------------

    def arrived(self, topic: str = "orders", queue_id: int = 0) -> list[Arrived]:
        """Return all messages of a queue, in order."""
        queue = self.store.consume_queue(topic, queue_id)
        found = []
        position = queue.min_offset
        while len(units := queue.unit_tuples(position, 1_000)):
            for physical_offset, size, _ in units:
                record = self.store.read(physical_offset, size)
                found.append(Arrived(record.body, record.store_timestamp, record))
            position += len(units)
        return found

    def bodies(self, topic: str = "orders", queue_id: int = 0) -> list[bytes]:
        """Return the bodies of all messages of a queue, in order."""
        return [message.body for message in self.arrived(topic, queue_id)]

    def delayed_records(self, topic: str = SCHEDULE_TOPIC, queue_id: int = 0) -> list[StoredRecord]:
        """Return all records of a system topic, pending or not."""
        return [message.record for message in self.arrived(topic, queue_id)]

    def timer_records(self) -> list[StoredRecord]:
        """Return all records of the timer topic, pending or not."""
        return self.delayed_records(TIMER_TOPIC)

    def damage(self, put: PutResult, share: float = 0.5) -> None:
        """Flip a bit of a record in the log."""
        found = self.store._commit_log.files.find(put.physical_offset)
        assert found is not None
        at = put.physical_offset - found[1] + int(put.size * share)
        found[0].write_mapped(at, bytes([found[0].view[at] ^ 1]))

    @property
    def poison_count(self) -> int:
        """Number of messages that could not be released."""
        return self.store.metrics.counter("delay.poison").value

    # --- end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop cleanly."""
        self.store.close()
        self.timer.close()

    def crash(self) -> None:
        """Stop like a killed process: the files stay as they are at this moment."""
        self.store._close_files()
        self.timer.close()
        self.store_files.unlock()


@contextmanager
def full_disk(engine: DelayEngine) -> Iterator[None]:
    """Refuse each append meanwhile."""

    def full(*_: object, **__: object) -> NoReturn:
        raise StoreFullError("no room")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.store, "put", full)
        yield


def is_rolled(record: StoredRecord) -> bool:
    return TIMER_ROLL_TIMES in record.properties_bytes
