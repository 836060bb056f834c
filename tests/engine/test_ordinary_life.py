"""The ordinary life of a store folder logs no warning: whatever feature was used, and however the process ended."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.message import Message, MessageQueue, SendSequence
from mqtemplate.pending import PendingQuery
from mqtemplate.results import TransactionState
from mqtemplate.store.files.disk import Disk
from mqtemplate.store.files.folder_store_files import FolderStoreFiles

START_MS = 1_767_225_600_000
HOUR_MS = 3_600_000
QUEUE = MessageQueue("orders", "broker-a", 0)


def send_timer(broker: EmbeddedBroker, delay_ms: int = 60_000) -> str:
    result = broker.sends.send(Message("orders", b"later", {"TIMER_DELAY_MS": str(delay_ms), "KEYS": "k"}))
    return result.handle or ""


def send_transactions(broker: EmbeddedBroker) -> None:
    committed, rolled_back, _open = [
        broker.sends.send_half(Message("orders", b"%d" % at), "billing") for at in range(3)
    ]
    broker.transactions.end_transaction(committed, TransactionState.COMMIT)
    broker.transactions.end_transaction(rolled_back, TransactionState.ROLLBACK)


def fill_files(broker: EmbeddedBroker) -> None:
    for number in range(6):
        broker.sends.send(Message("orders", bytes([number]) * (400 << 10), {"KEYS": f"k{number}"}), QUEUE)


FEATURES: dict[str, Callable[[EmbeddedBroker], object]] = {
    "nothing": lambda broker: None,
    "a message": lambda broker: broker.sends.send(Message("orders", b"x", {"KEYS": "k"}), QUEUE),
    "a batch": lambda broker: broker.sends.send_batch([Message("orders", b"x"), Message("orders", b"y")]),
    "several files": fill_files,
    "a level": lambda broker: broker.sends.send(Message("orders", b"x", {"DELAY": "3"})),
    "levels of all kinds": lambda broker: [
        broker.sends.send(Message("orders", b"x", {"DELAY": str(level)})) for level in range(1, 19)
    ],
    "a timer": send_timer,
    "a timer due at once": lambda broker: send_timer(broker, 1),
    "a timer of ten days": lambda broker: send_timer(broker, 240 * HOUR_MS),
    "a cancelled timer": lambda broker: broker.delayed.cancel(send_timer(broker)),
    "a moved timer": lambda broker: broker.delayed.reschedule(send_timer(broker), START_MS + 2 * HOUR_MS),
    "a cancelled level": lambda broker: broker.delayed.cancel(
        broker.sends.send(Message("orders", b"x", {"DELAY": "9"})).handle
    ),
    "counted timers": lambda broker: (send_timer(broker), broker.delayed.count_pending(PendingQuery(), HOUR_MS)),
    "transactions": send_transactions,
    "a sequence": lambda broker: broker.sends.send_sequenced(
        [(Message("orders", b"x"), QUEUE)], SendSequence("app", 1, 0)
    ),
    "topics and offsets": lambda broker: (
        broker.create_topic("new", 8),
        broker.groups.commit_offset("billing", QUEUE, 0),
    ),
}


def step_all(broker: EmbeddedBroker) -> None:
    for _ in range(4):
        for service in broker.services():
            service.step()


def live(folder: Path, use: Callable[[EmbeddedBroker], object], start_ms: int, end: str, *, steps: bool) -> Path:
    """Open the folder, use it, and end. Return the folder of the next life."""
    clock = VirtualClock(start_ms)
    with EmbeddedBroker(folder, EmbeddedSettings(mapped_file_size_commit_log=1 << 20), clock) as broker:
        broker.transactions.check_transactions("billing", lambda _: TransactionState.UNKNOWN)
        use(broker)
        if steps:
            step_all(broker)
            clock.move_ms(30_000)
            step_all(broker)
        if end == "killed":  # the files as they are at this moment
            return Path(shutil.copytree(folder, folder.with_name(f"{folder.name}k")))
    return folder


@pytest.mark.parametrize("steps", [False, True], ids=["before the services ran", "after the services ran"])
@pytest.mark.parametrize("end", ["closed", "killed"])
@pytest.mark.parametrize("use", FEATURES.values(), ids=FEATURES.keys())
def test_no_start_and_no_end_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, use: Callable[[EmbeddedBroker], object], end: str, *, steps: bool
) -> None:
    """Three lives: the feature is used in the first one, again in the second, two hours later, and then nothing is."""
    caplog.set_level(logging.WARNING)
    folder = tmp_path / "store"

    for number, used in enumerate((use, use, FEATURES["nothing"])):
        folder = live(folder, used, START_MS + number * 2 * HOUR_MS, end, steps=steps)

    assert [record.getMessage() for record in caplog.records] == []


def test_a_timer_is_delivered_once_if_the_process_ends_before_its_files_exist(tmp_path: Path) -> None:
    """A clean close creates the files, so the next start reads them instead of the whole commit log."""
    with EmbeddedBroker(tmp_path, clock=VirtualClock(START_MS)) as broker:
        send_timer(broker)
    created = (tmp_path / "config" / "timercheck").stat().st_size

    for _ in range(2):
        with EmbeddedBroker(tmp_path, clock=VirtualClock(START_MS + HOUR_MS)) as broker:
            step_all(broker)
            bodies = [
                message.body
                for queue in broker.queues("orders")
                for message in broker.reader.pull(queue, 0, max_count=32).messages
            ]
            assert bodies == [b"later"]
    assert created == 4_096


def test_damaged_files_of_timers_are_reported_as_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with EmbeddedBroker(tmp_path, clock=VirtualClock(START_MS)) as broker:
        send_timer(broker)
    (tmp_path / "config" / "timercheck").unlink()

    with EmbeddedBroker(tmp_path, clock=VirtualClock(START_MS)) as broker:
        assert broker.delayed.count_pending(PendingQuery(), HOUR_MS).total == 1

    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "timers.rebuilt reason='their files are incomplete, damaged, or contradict each other'"
    ]


def test_a_full_disk_at_the_first_timer_does_not_stop_the_close(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class NoRoomForTimers(Disk):
        def open(self, path: Path, *, flags: int = os.O_CREAT) -> int:
            if path.name.startswith("timerwheel"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().open(path, flags=flags)

    files = FolderStoreFiles(tmp_path, NoRoomForTimers())
    with EmbeddedBroker(clock=VirtualClock(START_MS), store_files=files) as broker:
        send_timer(broker)

    assert "timers.not_created" in caplog.text
    assert not (tmp_path / "abort").exists()
    with EmbeddedBroker(tmp_path, clock=VirtualClock(START_MS)) as broker:
        assert broker.delayed.count_pending(PendingQuery(), HOUR_MS).total == 1
