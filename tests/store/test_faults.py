"""A disk that is full, or fails: at each of its calls once, and for a while."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.delay import TimerMessageStore
from mqtemplate.errors import MQTemplateError, SendError, StoreError
from mqtemplate.message import Message
from mqtemplate.results import SendStatus
from mqtemplate.selector import TagSelector
from mqtemplate.store import FlushDiskType, FolderHome
from tests.store.faulty_disk import FAILS_FULL, FaultyDisk, Judge, during, never, once

RETRY_MS = 1_000


@pytest.fixture(autouse=True)
def small_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one has 38 MB, made and read in each of a thousand starts."""
    monkeypatch.setattr("mqtemplate.brokers.embedded.TimerMessageStore", partial(TimerMessageStore, slots_total=200))


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
                home = FolderHome(self.folder, self.disk)
                broker = EmbeddedBroker(settings=settings(self.mode), clock=self.clock, home=home)
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


@pytest.mark.parametrize("mode", FlushDiskType)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=lambda code: errno.errorcode[code])
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
