"""A disk that is full, or fails: at each of its calls once, and for a while."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
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
from mqtemplate.delay import TimerMessageStore
from mqtemplate.errors import MQTemplateError, SendError, StoreError
from mqtemplate.message import Message
from mqtemplate.results import SendStatus
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store import FlushDiskType, FolderStoreFiles, MessageStore
from tests.store.faulty_disk import FAILS_FULL, FaultyDisk, Judge, during, never, once
from tests.store.small_store import bodies, draft, kill, small

RETRY_MS = 1_000


@pytest.fixture(autouse=True)
def small_and_silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A timer wheel has 38 MB, and a thousand starts have a lot to say."""
    monkeypatch.setattr(
        "mqtemplate.brokers.embedded.broker.TimerMessageStore",
        lambda store, settings: TimerMessageStore(store, replace(settings, slots_total=200)),
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


class Owner:
    """Somebody who works with a broker whose disk may fail, and keeps count of what was promised.

    What is refused is noted; the next thing is tried all the same. Services are stepped as their threads would do it:
    one that fails is stepped again a second later.
    """

    def __init__(self, folder: Path, mode: FlushDiskType, judge: Judge = never) -> None:
        self.folder = folder
        self.mode = mode
        self.disk = FaultyDisk(judge)
        self.clock = VirtualClock()
        self.acknowledged: dict[bytes, int] = {}  # body -> not before
        self.refusals: list[MQTemplateError] = []
        self.count = 0
        self.broker: EmbeddedBroker | None = None

    def live(self) -> None:
        """Something of everything the broker does with files."""
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
    def refusable(self) -> Iterator[None]:
        """What the owner does may be refused, with one of our errors; nothing else may come out."""
        try:
            yield
        except MQTemplateError as exc:
            self.refusals.append(exc)

    def start(self) -> None:
        """Until it starts: a broker that did not is free to be started again."""
        for _ in range(60):
            with self.refusable():
                self.broker = None
                store_files = FolderStoreFiles(self.folder, self.disk)
                broker = EmbeddedBroker(settings=settings(self.mode), clock=self.clock, store_files=store_files)
                broker.start()
                self.broker = broker
                return
        raise AssertionError(f"it does not start: {self.refusals[-1]}")

    def close(self) -> None:
        assert self.broker is not None
        with self.refusable():
            self.broker.close()

    def send(self, size: int, topic: str = "orders", **properties: str) -> None:
        assert self.broker is not None
        body = self.body(size)
        with self.refusable():
            result = self.broker.send(Message(topic, body, dict(properties)))
            self.note([body], properties, result.send_status)

    def send_batch(self, count: int, **properties: str) -> None:
        assert self.broker is not None
        batch = [self.body(30) for _ in range(count)]
        with self.refusable():
            result = self.broker.send_batch([Message("orders", body, dict(properties)) for body in batch])
            self.note(batch, properties, result.send_status)

    def send_otherwise(self) -> None:
        assert self.broker is not None
        body = self.body(40)
        with self.refusable():
            future: Future[Any] = self.broker.send_async([Message("orders", body)])
            self.note([body], {}, future.result(0).send_status)
        with self.refusable():
            self.broker.send_one_way(Message("orders", self.body(50)))
        with self.refusable():
            self.broker.create_topic("another", 3)

    def body(self, size: int) -> bytes:
        self.count += 1
        return b"%04d" % self.count + bytes(size)

    def note(self, batch: list[bytes], properties: dict[str, str], status: SendStatus) -> None:
        delay_ms = {"1": 1_000, "2": 5_000}.get(properties.get("DELAY", ""), int(properties.get("TIMER_DELAY_MS", 0)))
        if status is SendStatus.SEND_OK:
            self.acknowledged |= dict.fromkeys(batch, self.clock.now_ms() + delay_ms)

    def consume(self) -> None:
        assert self.broker is not None
        with self.refusable():
            consumer = self.broker.subscribe(ConsumerSpec(group="billing", subscriptions={"orders": TagSelector()}))
            for message in consumer.poll(100, 0):
                self.broker.commit_offset("billing", message.message_queue, message.queue_offset + 1)
            consumer.close()

    def advance(self, milliseconds: int) -> None:
        assert self.broker is not None
        end_ms = self.clock.now_ms() + milliseconds
        retry_ms: dict[str, int] = {}
        while True:
            now_ms = self.clock.now_ms()
            due = []
            for service in self.broker.services():
                if retry_ms.get(service.name, 0) <= now_ms:
                    retry_ms[service.name] = now_ms + RETRY_MS
                    with self.refusable():
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
        """With a sound disk: everything in the topic once all that waited is due."""
        self.disk.judge = never
        self.start()
        assert self.broker is not None
        self.advance(200_000)
        self.send(10)
        store = self.broker.store
        queue = store.consume_queue("orders", 0)
        units = [queue.unit(at) for at in range(queue.min_offset, queue.max_offset)]
        records = [store.read(unit.physical_offset, unit.size) for unit in units]
        self.close()
        return [(record.body, record.store_timestamp) for record in records]


def check(owner: Owner) -> None:
    """What holds whatever the disk refused."""
    arrived = owner.arrived()
    counts = Counter(body for body, _ in arrived)
    assert [body[:4] for body in owner.acknowledged if counts[body] != 1] == []
    assert [body[:4] for body, count in counts.items() if count > 1] == []
    assert [body[:4] for body, at_ms in arrived if at_ms < owner.acknowledged.get(body, 0)] == []
    assert owner.acknowledged  # it did go on


def calls_of_a_life(folder: Path, mode: FlushDiskType) -> list[str]:
    owner = Owner(folder, mode)
    owner.live()
    assert owner.refusals == []
    return owner.disk.calls


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        (FlushDiskType.SYNC_FLUSH, errno.EIO),
        (FlushDiskType.ASYNC_FLUSH, errno.EIO),
        (FlushDiskType.SYNC_FLUSH, errno.ENOSPC),
    ],
    ids=["sync-EIO", "async-EIO", "sync-ENOSPC"],
)
def test_a_call_that_fails_once_costs_nothing_that_was_acknowledged(
    quick_folder: Path, mode: FlushDiskType, code: int
) -> None:
    """Each call of a life in turn: whoever is refused is told why, and all goes on."""
    calls = calls_of_a_life(quick_folder / "sound", mode)
    cases = [at for at, kind in enumerate(calls) if code == errno.EIO or kind in FAILS_FULL]

    for at in cases:
        owner = Owner(quick_folder / str(at), mode, once(at, code))
        owner.live()

        check(owner)
        for refusal in owner.refusals:
            assert isinstance(refusal, SendError | StoreError), refusal
            assert os.strerror(code) in str(refusal) or "no room on the disk" in str(refusal)
            assert any(advice in str(refusal) for advice in ("send again", "try again", "free space")), refusal
    print(f"{len(cases)} calls, each failing once: {mode.value}, {errno.errorcode[code]}")


@pytest.mark.parametrize("mode", FlushDiskType)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=lambda code: errno.errorcode[code])
def test_a_disk_that_fails_for_a_while_stops_nothing_for_good(
    quick_folder: Path, mode: FlushDiskType, code: int
) -> None:
    total = len(calls_of_a_life(quick_folder / "sound", mode))

    for first in range(0, total, 7):
        owner = Owner(quick_folder / str(first), mode, during(first, first + 25, code))
        owner.live()

        check(owner)


# --- what is done again -----------------------------------------------------------------------------


def fail_next(disk: FaultyDisk, kind: str) -> None:
    """The next call of a kind, and no other."""
    left = [errno.EIO]
    disk.judge = lambda number, asked: left.pop() if asked == kind and left else 0


def test_a_checkpoint_that_fails_is_tried_again_a_second_later(quick_folder: Path) -> None:
    """Without a further send."""
    owner = Owner(quick_folder, FlushDiskType.ASYNC_FLUSH)
    owner.start()
    assert owner.broker is not None
    store = owner.broker.store
    owner.send(10)
    fail_next(owner.disk, "flush")
    owner.advance(1_000)
    assert "Input/output error" in str(owner.refusals)

    owner.advance(2_000)

    assert store._checkpoint.fields.logics_physical_offset == store.end_offset
    assert store.group_commit.flushed == store.end_offset
    owner.close()


def test_consumer_offsets_that_could_not_be_written_are_written_later(quick_folder: Path) -> None:
    owner = Owner(quick_folder, FlushDiskType.SYNC_FLUSH)
    owner.start()
    owner.send(10)
    owner.consume()
    owner.advance(2_000)  # a checkpoint writes files of its own
    fail_next(owner.disk, "replace")
    owner.advance(3_000)
    assert "Input/output error" in str(owner.refusals)

    owner.advance(5_000)

    assert '"orders@billing":' in (quick_folder / "config" / "consumerOffset.json").read_text(encoding="utf-8")
    owner.close()


def test_a_message_whose_flush_failed_is_shown_when_a_later_one_succeeds(quick_folder: Path) -> None:
    """Its sender was told that it is not safe; readers are not shown it before it is, and are woken then."""
    store = MessageStore(FolderStoreFiles(quick_folder, disk := FaultyDisk()), small(), VirtualClock())
    store.load()
    put = store.put(draft(b"in doubt"))
    rings: list[int] = []
    store.watch("orders", lambda: rings.append(store.confirm_offset))
    disk.judge = lambda number, kind: errno.EIO if kind == "flush" else 0
    for _ in range(2):
        with pytest.raises(StoreError, match="Input/output error; the message is written, but not safe"):
            store.confirm(put.end, ["orders"])
    assert store.confirm_offset == 0
    assert rings == []
    disk.judge = never

    store.take_checkpoint()

    assert store.confirm_offset == put.end
    assert rings[0] == put.end
    store.close()


def test_an_asynchronous_send_brings_the_refusal_in_its_future(quick_folder: Path) -> None:
    owner = Owner(quick_folder, FlushDiskType.ASYNC_FLUSH)
    owner.start()
    assert owner.broker is not None
    owner.broker.queues("orders")
    fail_next(owner.disk, "allocate")

    future = owner.broker.send_async([Message("orders", b"x")])

    with pytest.raises(SendError, match="not stored: the disk refused to make .*Input/output error.*send again"):
        future.result(0)
    owner.close()


def test_a_batch_that_was_torn_by_an_error_leaves_nothing_to_come_alive(quick_folder: Path) -> None:
    """Its first records were written whole; what is written over them is shorter."""
    store = MessageStore(FolderStoreFiles(quick_folder, disk := FaultyDisk()), small(), VirtualClock())
    store.load()
    store.put(draft(b"before"))
    disk.judge = once(len(disk.calls), errno.EIO)
    with pytest.raises(StoreError, match="the disk refused to write to"):
        store.put_all([draft(b"torn %d" % number) for number in range(6)])
    store.put(draft(b""))
    kill(store)

    again = MessageStore(FolderStoreFiles(quick_folder), small(), VirtualClock())
    again.load()

    assert bodies(again) == [b"before", b""]
    again.close()


def test_a_roll_over_that_stops_halfway_goes_on_where_it_was(quick_folder: Path) -> None:
    """The next file was made, and the full one could not be ended."""
    store = MessageStore(FolderStoreFiles(quick_folder, disk := FaultyDisk()), small(), VirtualClock())
    store.load()
    for number in range(3):
        store.put(draft(b"%d" % number + bytes(1_000)))
    fail_next(disk, "write")
    with pytest.raises(StoreError, match="the disk refused to write to"):
        store.put(draft(b"3" + bytes(1_000)))

    store.put(draft(b"4" + bytes(1_000)))

    assert [body[:1] for body in bodies(store)] == [b"0", b"1", b"2", b"4"]
    assert len(list((quick_folder / "commitlog").iterdir())) == 2
    store.close()
