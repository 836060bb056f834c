"""Power loss at any moment of some transactions: any part of the data that was not flushed may be missing."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import VirtualClock
from mqtemplate.delay.timers.timer_message_store import TimerMessageStore
from mqtemplate.message import Message, MessageExt
from mqtemplate.results import HalfMessage, TransactionState
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.testing import Harness, messages_in
from tests.store.power_loss_disk import Image, PowerLossDisk, RestartedDisk, subsets, write_image

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
GROUP = "shop"
SMALL = EmbeddedSettings(
    mapped_file_size_commit_log=1 << 14,
    mapped_file_size_consume_queue=2_000,
    max_message_size=1 << 12,
    default_topic_queue_nums=1,
    max_hash_slot_num=50,
    max_index_num=200,
    mapped_file_size_timer_log=536,
    timer_roll_window_slot=100,
)
COMMITTED = (b"commit", b"late", b"timer", b"level", b"open")
STATES = {b"rollback": ROLLBACK, **dict.fromkeys(COMMITTED, COMMIT)}
"""State of each local transaction."""
IMAGES_PER_EVENT = 6

_boots = itertools.count(2)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield path
    shutil.rmtree(path)


class Run:
    """Some transactions on a simulated disk. Before each call of the disk, images of a power loss are checked."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        (folder / "store").mkdir()
        self.disk = PowerLossDisk(folder / "store", sector=512)
        self.clock = VirtualClock()
        self.stored: set[bytes] = set()  # acknowledged half messages
        self.ended: set[bytes] = set()
        self.known: set[int] = set()
        self.problems: list[str] = []
        self.doing = "start"
        self.is_checking = False

    def run(self) -> None:
        broker = EmbeddedBroker(
            settings=SMALL, clock=self.clock, store_files=FolderStoreFiles(self.folder / "store", self.disk)
        )
        broker.start()
        harness = Harness(broker)
        self.disk.on_event = self.check_images
        broker.check_transactions(GROUP, lambda message: UNKNOWN)
        late = self.send(broker, b"late")
        for body, delay in ((b"commit", {}), (b"rollback", {}), (b"level", {"DELAY": "2"})):
            self.end(broker, self.send(broker, body, **delay))
        self.send(broker, b"open")
        self.doing = "checks"
        harness.advance("37s")
        self.end(broker, self.send(broker, b"timer", TIMER_DELAY_MS="2500"))
        self.end(broker, late)
        harness.advance("5s")
        self.disk.on_event = lambda: None
        broker.close()

    def send(self, broker: EmbeddedBroker, body: bytes, **properties: str) -> HalfMessage:
        self.doing = f"sending {body!r}"
        half = broker.send_half(Message("orders", body + b" " + bytes(300), dict(properties)), GROUP)
        self.stored.add(body)
        return half

    def end(self, broker: EmbeddedBroker, half: HalfMessage) -> None:
        body = first_word(half.message)
        self.doing = f"ending {body!r}"
        broker.end_transaction(half, STATES[body])
        self.ended.add(body)

    # --- images --------------------------------------------------------------------------------

    def check_images(self) -> None:
        if self.is_checking:  # the check itself uses a disk
            return
        self.is_checking = True
        contents = self.disk.contents()
        for chosen in subsets(self.disk.choices(contents), self.chance, IMAGES_PER_EVENT):
            image = self.disk.image(contents, chosen)
            key = hash((image, len(self.stored), len(self.ended)))
            if key not in self.known:
                self.known.add(key)
                self.problems += [f"{self.doing}: {problem}" for problem in self.problems_of(image)]
        self.is_checking = False

    def problems_of(self, image: Image) -> Iterator[str]:
        folder = self.folder / "image"
        write_image(image, folder)
        checked: set[bytes] = set()

        def check(message: MessageExt) -> TransactionState:
            checked.add(first_word(message))
            return STATES[first_word(message)]

        clock = VirtualClock(self.clock.now_ms())
        for _ in range(2):  # the second time after a clean stop
            with opened(folder, clock) as broker:
                broker.check_transactions(GROUP, check)
                Harness(broker).advance("40s")
                delivered = Counter(first_word(message) for message in messages_in(broker, "orders"))
                if broker.engine.transactions.open_count:
                    yield "a transaction is still open"
            committed = {body for body in self.stored if STATES[body] is COMMIT}
            if lost := committed - delivered.keys():
                yield f"lost {lost}"
            if doubled := [body for body, count in delivered.items() if count > 1]:
                yield f"delivered twice: {doubled}"
            if b"rollback" in delivered:
                yield "delivered a message that was rolled back"
            if again := checked & self.ended:
                yield f"checked {again}, which had ended"
        shutil.rmtree(folder)


@contextmanager
def opened(folder: Path, clock: VirtualClock) -> Iterator[EmbeddedBroker]:
    store_files = FolderStoreFiles(folder, RestartedDisk(f"boot-{next(_boots)}"))
    with EmbeddedBroker(settings=SMALL, clock=clock, store_files=store_files) as broker:
        yield broker


def first_word(message: Message) -> bytes:
    return message.body.split(b" ", 1)[0]


def test_after_any_power_loss_each_transaction_has_one_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, record_property: pytest.RecordProperty
) -> None:
    monkeypatch.setattr(
        "mqtemplate.engine.delayed.TimerMessageStore",
        lambda store, settings, *more: TimerMessageStore(store, replace(settings, slots_total=200), *more),
    )
    run = Run(folder, seed=3)

    with capture_logs():
        run.run()

    record_property("images", len(run.known))
    assert run.problems[:3] == []
    assert len(run.known) > 300
