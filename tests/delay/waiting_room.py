"""A store with both delay services on a virtual clock: what the tests of this room work with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mqtemplate.clock import VirtualClock
from mqtemplate.delay import (
    DelayController,
    DelayLevels,
    PendingView,
    ScheduleMessageService,
    TimerLimits,
    TimerMessageStore,
    divert,
    handle_of,
    tags_code_of,
)
from mqtemplate.delay.control import KeyIndex
from mqtemplate.record.codec import RecordDraft, StoredRecord
from mqtemplate.record.properties import decode_properties, encode_properties
from mqtemplate.store import (
    FlushDiskType,
    FolderStoreFiles,
    MemoryStoreFiles,
    MessageStore,
    PutResult,
    StoreFiles,
    StoreSettings,
)
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

SMALL_WHEEL = {"slots_total": 4_000, "roll_window_slots": 3_600, "timer_log_file_size": 5_216}
"""A little more than an hour each way, and a hundred units a file."""


@dataclass(frozen=True)
class Arrived:
    """A message in its real topic."""

    body: bytes
    at_ms: int
    record: StoredRecord

    @property
    def properties(self) -> dict[str, str]:
        return decode_properties(self.record.properties_bytes)


class ScannedKeys:
    """Finds keys by reading all of a topic."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def find(self, topic: str, key: str, begin_ms: int, end_ms: int, max_count: int) -> list[int]:
        found = []
        for queue_id in self._store.queue_ids(topic):
            queue = self._store.consume_queue(topic, queue_id)
            for position in range(queue.min_offset, queue.max_offset):
                offset = queue.unit(position).physical_offset
                record = self._store.read_at(offset)
                properties = {} if record is None else decode_properties(record.properties_bytes)
                if key in (properties.get("UNIQ_KEY"), *properties.get("KEYS", "").split()):
                    found.append(offset)
        return sorted(found, reverse=True)[:max_count]


class WaitingRoom:
    """Puts messages the way a broker does, steps the services the way a harness does.

    Args:
        folder: None for memory.
        levels: The level table.
        timers: Sizes of the timer files.
        store_files: A store_files that is ready, instead of a folder.
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
        self.schedule = ScheduleMessageService(self.store, self.levels)
        self.timer = TimerMessageStore(self.store, self.limits, **timers)
        self.store.load([self.schedule, self.timer])
        self.schedule.start()
        self.timer.start()

    @cached_property
    def steering(self) -> DelayController:
        delay_stores = [self.schedule, self.timer]
        return DelayController(self.store, delay_stores, self._index, lambda: self.levels, self.limits, "broker-a")

    @cached_property
    def view(self) -> PendingView:
        return PendingView(self.store, [self.schedule, self.timer], self._index, lambda: ["orders"], "broker-a")

    @property
    def _index(self) -> KeyIndex:
        return getattr(self.store, "index", None) or ScannedKeys(self.store)

    # --- the sender's side ---------------------------------------------------------------------

    def send(self, body: bytes, topic: str = "orders", queue_id: int = 0, **properties: object) -> PutResult:
        """Through the front door: diverted if its properties ask for a delay."""
        wanted = {name: str(value) for name, value in properties.items()}
        waiting = divert(wanted, topic, queue_id, self.clock.now_ms(), self.levels, self.limits)
        if waiting is None:
            return self.put(RecordDraft(topic, queue_id, body, encode_properties(wanted)))
        draft = RecordDraft(waiting.topic, waiting.queue_id, body, encode_properties(waiting.properties))
        draft.delay_ms = waiting.delay_ms
        return self.put(draft)

    def put(self, draft: RecordDraft) -> PutResult:
        """Past the front door, as it is."""
        result = self.store.put(draft)
        self.store.confirm(result.end, [draft.topic])
        return result

    def send_for(self, body: bytes, topic: str = "orders", **properties: object) -> str:
        """`send` a delayed message with *body* as its id too; gives its handle."""
        properties = {"UNIQ_KEY": body.decode()} | properties
        put = self.send(body, topic, **properties)
        record = self.store.read(put.physical_offset, put.size)
        due_ms = self.clock.now_ms()
        return handle_of(topic, "broker-a", record.properties_bytes, due_ms, put.physical_offset)

    # --- time ----------------------------------------------------------------------------------

    def confirm(self) -> int | None:
        """Step both services until nothing is due now; gives when something is."""
        while True:
            nexts = [due for service in (self.schedule, self.timer) if (due := service.step()) is not None]
            if not nexts or min(nexts) > self.clock.now_ms():
                return min(nexts, default=None)

    def advance(self, milliseconds: int) -> None:
        """Let time pass, stopping whenever a service wants to be called."""
        target = self.clock.now_ms() + milliseconds
        while (due := self.confirm()) is not None and due <= target:
            self.clock.set_ms(due)
        self.clock.set_ms(max(target, self.clock.now_ms()))
        self.confirm()

    # --- the consumer's side -------------------------------------------------------------------

    def arrived(self, topic: str = "orders", queue_id: int = 0) -> list[Arrived]:
        """Everything in a queue, in order."""
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
        return [message.body for message in self.arrived(topic, queue_id)]

    def waiting(self, topic: str = SCHEDULE_TOPIC, queue_id: int = 0) -> list[StoredRecord]:
        return [message.record for message in self.arrived(topic, queue_id)]

    def waiting_timers(self) -> list[StoredRecord]:
        return self.waiting(TIMER_TOPIC)

    # --- ends ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End cleanly."""
        self.store.close()
        self.timer.close()

    def crash(self) -> None:
        """Be gone without a word, as a killed process: files stay as they are at this moment."""
        self.store._close_files()
        self.timer.close()
        self.store_files.unlock()
