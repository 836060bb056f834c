"""A disk that is full or fails: once at each of its calls, and for a while."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.delay.timers.timer_message_store import TimerMessageStore
from mqtemplate.errors import MQTemplateError, SendError, StoreError
from mqtemplate.message import Message
from mqtemplate.record.codec import Drafts
from mqtemplate.record.columns import to_rows
from mqtemplate.record.record_arrays import BatchOrigin, UniformBatch
from mqtemplate.results import SendStatus
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.message_store import MessageStore
from mqtemplate.store.settings import FlushDiskType
from tests.store.faulty_disk import FAILS_FULL, FaultyDisk, Judge, LedgerDisk, during, never, once
from tests.store.small_store import bodies, draft, kill, opened
from tests.thirds import NINTHS

RETRY_MS = 1_000
_PAGE = 4_096


@pytest.fixture(autouse=True)
def small_and_silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a small timer wheel (the default has 38 MB), and capture the log events of a thousand starts."""
    monkeypatch.setattr(
        "mqtemplate.engine.delayed.TimerMessageStore",
        lambda store, settings, *more: TimerMessageStore(store, replace(settings, slots_total=200), *more),
    )
    with capture_logs():
        yield


def settings(mode: FlushDiskType, **changes: Any) -> EmbeddedSettings:
    sizes: dict[str, Any] = {
        "mapped_file_size_commit_log": 4_096,
        "mapped_file_size_consume_queue": 100,
        "default_topic_queue_nums": 1,
        "mapped_file_size_timer_log": 536,
        "message_delay_level": "1s 5s",
        "timer_roll_window_slot": 100,
        "message_index_enable": False,
    }
    known = EmbeddedSettings.__dataclass_fields__
    return EmbeddedSettings(
        flush_disk_type=mode, **{name: value for name, value in (sizes | changes).items() if name in known}
    )


class User:
    """User of a broker whose disk may fail; remembers the acknowledged messages.

    An action that fails is noted, and the next one follows nevertheless. Services are stepped as their threads would do
    it: a service that fails is stepped again a second later.
    """

    def __init__(self, folder: Path, mode: FlushDiskType, judge: Judge = never) -> None:
        self.folder = folder
        self.mode = mode
        self.disk = FaultyDisk(judge)
        self.clock = VirtualClock()
        self.acknowledged: dict[bytes, int] = {}  # body -> earliest delivery
        self.errors: list[MQTemplateError] = []
        self.count = 0
        self.broker: EmbeddedBroker  # of the last start

    def live(self) -> None:
        """Use every function of the broker that needs files."""
        self.start()
        for size in (10, 300, 900):
            self.send(size)
            self.send(size, DELAY="1")
            self.send(size, TIMER_DELAY_MS=str(1_000 + size))
        self.send(5, TIMER_DELAY_MS="150000")
        self.send_batch(3)
        self.send_batch(2, DELAY="2")
        self.send_otherwise()
        self.advance(1_500)
        self.consume()
        self.advance(6_000)
        for _ in range(4):
            self.send(700)
        self.close()
        self.start()
        self.send(20, DELAY="1")
        self.send(20, TIMER_DELAY_MS="700")
        self.advance(3_000)
        self.consume()
        self.close()

    @contextmanager
    def errors_noted(self) -> Iterator[None]:
        """Allow an error of mqtemplate inside the block, but no other error."""
        try:
            yield
        except MQTemplateError as exc:
            self.errors.append(exc)

    def start(self) -> None:
        """Start a broker; if that fails, try again with another."""
        for _ in range(60):
            with self.errors_noted():
                store_files = FolderStoreFiles(self.folder, self.disk)
                self.broker = EmbeddedBroker(settings=settings(self.mode), clock=self.clock, store_files=store_files)
                self.broker.start()
                return
        raise AssertionError(f"it does not start: {self.errors[-1]}")

    def close(self) -> None:
        with self.errors_noted():
            self.broker.close()

    def send(self, size: int, topic: str = "orders", **properties: str) -> None:
        body = self.body(size)
        with self.errors_noted():
            result = self.broker.sends.send(Message(topic, body, dict(properties)))
            self.note([body], properties, result.send_status)

    def send_batch(self, count: int, **properties: str) -> None:
        batch = [self.body(30) for _ in range(count)]
        with self.errors_noted():
            result = self.broker.sends.send_batch([Message("orders", body, dict(properties)) for body in batch])
            self.note(batch, properties, result.send_status)

    def send_otherwise(self) -> None:
        body = self.body(40)
        with self.errors_noted():
            future: Future[Any] = self.broker.sends.send_async([Message("orders", body)])
            self.note([body], {}, future.result(0).send_status)
        with self.errors_noted():
            self.broker.sends.send_one_way(Message("orders", self.body(50)))
        with self.errors_noted():
            self.broker.create_topic("another", 3)

    def body(self, size: int) -> bytes:
        self.count += 1
        return b"%04d" % self.count + bytes(size)

    def note(self, batch: list[bytes], properties: dict[str, str], status: SendStatus) -> None:
        delay_ms = {"1": 1_000, "2": 5_000}.get(properties.get("DELAY", ""), int(properties.get("TIMER_DELAY_MS", 0)))
        if status is SendStatus.SEND_OK:
            self.acknowledged |= dict.fromkeys(batch, self.clock.now_ms() + delay_ms)

    def consume(self) -> None:
        with self.errors_noted():
            consumer = self.broker.groups.subscribe(
                ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()})
            )
            for message in consumer.poll(100, 0):
                self.broker.groups.commit_offset("billing", message.message_queue, message.queue_offset + 1)
            consumer.close()

    def advance(self, milliseconds: int) -> None:
        end_ms = self.clock.now_ms() + milliseconds
        retry_ms: dict[str, int] = {}
        while True:
            now_ms = self.clock.now_ms()
            due = []
            for service in self.broker.services():
                if retry_ms.get(service.name, 0) <= now_ms:
                    retry_ms[service.name] = now_ms + RETRY_MS
                    with self.errors_noted():
                        next_ms = service.step()
                        retry_ms.pop(service.name)
                        due += [] if next_ms is None else [next_ms]
            due += retry_ms.values()
            next_ms = min(due, default=end_ms + 1)
            if next_ms > end_ms:
                break
            self.clock.set_ms(max(next_ms, now_ms))
        self.clock.set_ms(end_ms)

    def arrived(self) -> list[tuple[bytes, int]]:
        """Return all messages of the topic, once all delayed messages are due and the disk works."""
        self.disk.judge = never
        self.start()
        self.advance(200_000)
        self.send(10)
        store = self.broker.store
        queue = store.consume_queue("orders", 0)
        units = [queue.unit(at) for at in range(queue.min_offset, queue.max_offset)]
        records = [store.read(unit.physical_offset, unit.size) for unit in units]
        self.close()
        return [(record.body, record.store_timestamp) for record in records]


def check(user: User) -> None:
    """Check the guarantees that hold whatever call failed."""
    arrived = user.arrived()
    counts = Counter(body for body, _ in arrived)
    assert [body[:4] for body in user.acknowledged if counts[body] != 1] == []
    assert [body[:4] for body, count in counts.items() if count > 1] == []
    assert [body[:4] for body, at_ms in arrived if at_ms < user.acknowledged.get(body, 0)] == []
    assert user.acknowledged  # some sends succeeded


def life_without_faults(folder: Path, mode: FlushDiskType) -> FaultyDisk:
    user = User(folder, mode)
    user.live()
    assert user.errors == []
    return user.disk


def one_call_of_each_path(disk: FaultyDisk, mode: FlushDiskType) -> list[int]:
    """Return the number of one call for each path through the code: the first with SYNC_FLUSH, else the last."""
    numbers = range(len(disk.paths)) if mode is FlushDiskType.ASYNC_FLUSH else reversed(range(len(disk.paths)))
    return sorted({disk.paths[number]: number for number in numbers}.values())


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        (FlushDiskType.SYNC_FLUSH, errno.EIO),
        (FlushDiskType.ASYNC_FLUSH, errno.EIO),
        pytest.param(FlushDiskType.SYNC_FLUSH, errno.ENOSPC, marks=pytest.mark.thorough),
    ],
    ids=["sync-EIO", "async-EIO", "sync-ENOSPC"],
)
@pytest.mark.parametrize("ninth", NINTHS)
def test_a_call_that_fails_once_loses_no_acknowledged_message(
    quick_folder: Path, mode: FlushDiskType, code: int, ninth: int
) -> None:
    """Let a call of each path fail in turn. The caller gets the reason, and everything works afterwards."""
    disk = life_without_faults(quick_folder / "working", mode)
    numbers = one_call_of_each_path(disk, mode)[ninth :: len(NINTHS)]
    cases = [at for at in numbers if code == errno.EIO or disk.calls[at] in FAILS_FULL]

    for at in cases:
        user = User(quick_folder / str(at), mode, once(at, code))
        user.live()

        check(user)
        for error in user.errors:
            assert isinstance(error, SendError | StoreError), error
            assert os.strerror(code) in str(error) or "no room on the disk" in str(error)
            assert any(advice in str(error) for advice in ("send again", "try again", "free space")), error
    print(f"{len(cases)} calls, each failing once: {mode.value}, {errno.errorcode[code]}")


@pytest.mark.parametrize("mode", FlushDiskType)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("ninth", NINTHS)
def test_a_disk_that_fails_for_a_while_loses_no_acknowledged_message(
    quick_folder: Path, mode: FlushDiskType, code: int, ninth: int
) -> None:
    total = len(life_without_faults(quick_folder / "working", mode).calls)

    for first in range(7 * ninth, total, 7 * len(NINTHS)):
        user = User(quick_folder / str(first), mode, during(first, first + 25, code))
        user.live()

        check(user)


def pages_with_content(path: Path) -> set[int]:
    data = path.read_bytes()
    return {at // _PAGE for at in range(0, len(data), _PAGE) if data[at : at + _PAGE].strip(b"\0")}


@pytest.mark.parametrize("mode", FlushDiskType)
def test_no_byte_is_written_through_a_map_before_it_is_allocated(quick_folder: Path, mode: FlushDiskType) -> None:
    """Else a full disk would end the process with SIGBUS. Every function that needs files is used."""
    user = User(quick_folder, mode)
    user.disk = disk = LedgerDisk()

    user.live()

    assert user.errors == []
    wrong = {
        str(path.relative_to(quick_folder)): sorted(missing)
        for path in quick_folder.rglob("*")
        if path.is_file()
        and path.name != "lock"
        and (missing := pages_with_content(path) - disk.pages[path.stat().st_ino])
    }
    assert wrong == {}


# --- retries ----------------------------------------------------------------------------------------


def fail_next(disk: FaultyDisk, kind: str) -> None:
    """Let only the next call of a kind fail."""
    left = [errno.EIO]
    disk.judge = lambda number, asked: left.pop() if asked == kind and left else 0


def test_a_failed_checkpoint_is_tried_again_a_second_later(quick_folder: Path) -> None:
    """No other send is necessary."""
    user = User(quick_folder, FlushDiskType.ASYNC_FLUSH)
    user.start()
    store = user.broker.store
    user.send(10)
    fail_next(user.disk, "flush")
    user.advance(1_000)
    assert "Input/output error" in str(user.errors)

    user.advance(2_000)

    assert store._checkpoint.fields.logics_physical_offset == store.end_offset
    assert store.group_commit.flushed == store.end_offset
    user.close()


def test_consumer_offsets_that_could_not_be_written_are_written_later(quick_folder: Path) -> None:
    user = User(quick_folder, FlushDiskType.SYNC_FLUSH)
    user.start()
    user.send(10)
    user.consume()
    user.advance(2_000)  # a checkpoint writes files of its own
    fail_next(user.disk, "replace")
    user.advance(3_000)
    assert "Input/output error" in str(user.errors)

    user.advance(5_000)

    assert '"orders@billing":' in (quick_folder / "config" / "consumerOffset.json").read_text(encoding="utf-8")
    user.close()


def test_the_future_of_an_asynchronous_send_has_the_disk_error(quick_folder: Path) -> None:
    user = User(quick_folder, FlushDiskType.ASYNC_FLUSH)
    user.start()
    user.broker.queues("orders")
    fail_next(user.disk, "allocate")

    future = user.broker.sends.send_async([Message("orders", b"x")])

    with pytest.raises(SendError, match="not stored: cannot create .*Input/output error.*send again"):
        future.result(0)
    user.close()


def alike(count: int, *queue_ids: int) -> UniformBatch:
    """Return the messages of one batch as rows, or of several batches: one for each queue."""
    origins = [BatchOrigin(queue_id, 0) for queue_id in queue_ids]
    ids, bodies = (to_rows([text % number for number in range(count)]) for text in (b"%02d", b"torn %d"))
    return UniformBatch(replace(draft(bodies[0].tobytes()), properties=b"UNIQ_KEY\x0100\x02"), bodies, ids, 9, origins)


@pytest.mark.parametrize(
    "put",
    [
        lambda store: store.put(Drafts([draft(b"torn %d" % number) for number in range(6)])),
        lambda store: store.put(alike(6)),
        lambda store: store.put(alike(6, 0, 0)),
    ],
)
def test_a_batch_torn_by_an_error_leaves_no_valid_records(
    quick_folder: Path, put: Callable[[MessageStore], object]
) -> None:
    """Its first records were written completely; shorter records overwrite them."""
    store = opened(quick_folder, disk=(disk := FaultyDisk()))
    store.put(draft(b"before"))
    disk.judge = once(len(disk.calls), errno.EIO)
    with pytest.raises(StoreError, match="cannot write to"):
        put(store)
    store.put(draft(b""))
    kill(store)

    again = opened(quick_folder)

    assert bodies(again) == [b"before", b""]
    again.close()
