"""Any mix of sends, pauses, kills, power failures and clock changes, compared with a model in plain Python."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from structlog.testing import capture_logs

from mqtemplate.clock import VirtualClock
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.settings import FlushDiskType
from tests.delay.delay_engine import DelayEngine
from tests.store.power_loss_disk import PowerLossDisk, write_image
from tests.store.power_loss_run import LEVEL_MS, LEVELS, LONGEST_MS, TIMERS
from tests.thirds import examples

QUEUES = (0, 1)

levels = st.integers(1, len(LEVEL_MS)).map(lambda level: {"DELAY": level})
timers = st.one_of(st.integers(1, 3_000), st.integers(1, 200_000)).map(lambda delay_ms: {"TIMER_DELAY_MS": delay_ms})
delays = st.one_of(st.just({}), levels, timers)
spans = st.one_of(st.integers(0, 1_500), st.integers(0, LONGEST_MS))
seeds = st.integers(0, 2**32 - 1)
moments = st.integers(1, 30)


class PowerFailed(BaseException):
    """Ends everything in the middle of a call; no code catches it."""


class StoreModel(RuleBasedStateMachine):
    """The model: the messages of each queue in order, and the delayed messages with their due times.

    With ``SYNC_FLUSH`` a power failure between two calls changes nothing. A failure inside a send may leave the message
    or not; the model adopts what it finds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logs = capture_logs()
        self.logs.__enter__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.clock = VirtualClock()
        self.boots = itertools.count()
        self.queues: dict[int, list[bytes]] = {queue_id: [] for queue_id in QUEUES}
        self.delayed: dict[bytes, tuple[int, int]] = {}  # body -> queue, earliest delivery
        self.unsure: set[bytes] = set()  # sent when the power failed
        self.count = 0

    @initialize(log_file_size=st.sampled_from([4_096, 16_384]), sector=st.sampled_from([512, 4_096]))
    def start(self, log_file_size: int, sector: int) -> None:
        self.log_file_size, self.sector = log_file_size, sector
        self.root = self.folder / "0"
        self.root.mkdir()
        self.start_machine()

    def start_machine(self) -> None:
        self.disk = PowerLossDisk(self.root, self.sector, boot=f"boot-{next(self.boots)}")
        self.open()

    def open(self) -> None:
        self.room = DelayEngine(
            store_files=FolderStoreFiles(self.root, self.disk),
            levels=LEVELS,
            timers=TIMERS,
            clock=self.clock,
            flush=FlushDiskType.SYNC_FLUSH,
            log_file_size=self.log_file_size,
            queue_file_size=100,
        )
        self.room.release_due()

    # --- events --------------------------------------------------------------------------------

    @rule(delay=delays, queue_id=st.sampled_from(QUEUES), size=st.integers(0, 600))
    def send(self, delay: dict[str, int], queue_id: int, size: int) -> None:
        self.count += 1
        body = b"%04d" % self.count + bytes(size)
        now_ms = self.clock.now_ms()
        self.unsure.add(body)
        put = self.room.send(body, queue_id=queue_id, **delay)
        self.unsure.discard(body)
        if level := delay.get("DELAY"):
            self.delayed[body] = queue_id, put.store_timestamp + LEVEL_MS[level - 1]
        elif delay:
            self.delayed[body] = queue_id, now_ms + delay["TIMER_DELAY_MS"]
        else:
            self.queues[queue_id].append(body)

    @rule(span=spans)
    def wait(self, span: int) -> None:
        self.room.advance(span)

    @rule(span=st.integers(-100_000, 100_000))
    def set_clock(self, span: int) -> None:
        self.clock.move_ms(span)
        self.room.release_due()

    @rule()
    def checkpoint(self) -> None:
        self.room.store.take_checkpoint()

    @rule()
    def close(self) -> None:
        self.room.close()
        self.open()

    @rule()
    def kill(self) -> None:
        self.room.crash()
        self.open()

    @rule(seed=seeds)
    def power_fails(self, seed: int) -> None:
        self.lose_power(random.Random(seed))

    @rule(seed=seeds, moment=moments, delay=delays)
    def power_fails_in_a_send(self, seed: int, moment: int, delay: dict[str, int]) -> None:
        self.interrupt(seed, moment, lambda: self.send(delay, 0, 100))

    @rule(seed=seeds, moment=moments, span=spans)
    def power_fails_while_time_goes_by(self, seed: int, moment: int, span: int) -> None:
        self.interrupt(seed, moment, lambda: self.room.advance(span))

    @rule(seed=seeds, moment=moments)
    def power_fails_in_a_checkpoint(self, seed: int, moment: int) -> None:
        self.interrupt(seed, moment, self.room.store.take_checkpoint)

    @rule(seed=seeds, moment=moments)
    def power_fails_in_a_recovery(self, seed: int, moment: int) -> None:
        self.room.crash()
        self.interrupt(seed, moment, self.open)

    def interrupt(self, seed: int, moment: int, act: Callable[[], Any]) -> None:
        """Let the power fail at the n-th call of the disk, if *act* has so many calls."""
        left = itertools.count(moment, -1)

        def on_event() -> None:
            if next(left) == 1:
                raise PowerFailed

        self.disk.on_event = on_event
        with suppress(PowerFailed):
            act()
            self.disk.on_event = lambda: None
            return
        self.lose_power(random.Random(seed))

    def lose_power(self, chance: random.Random) -> None:
        self.disk.on_event = lambda: None
        contents = self.disk.contents()
        share = chance.choice((0.0, 0.3, 0.7, 1.0))
        image = self.disk.image(contents, {each for each in self.disk.choices(contents) if chance.random() < share})
        with suppress(AttributeError):  # the store was not open yet
            self.room.crash()
        self.root = self.folder / str(next(self.boots))
        write_image(image, self.root)
        self.start_machine()

    # --- guarantees ----------------------------------------------------------------------------

    @invariant()
    @precondition(lambda self: hasattr(self, "room"))
    def services_agree_with_the_model(self) -> None:
        self.adopt_arrivals()
        overdue = [body[:4] for body, (_, due_ms) in self.delayed.items() if due_ms <= self.clock.now_ms()]
        assert overdue == []
        assert self.due_times() == sorted(due_ms for _, due_ms in self.delayed.values())

    def adopt_arrivals(self) -> None:
        """Check that known messages keep their queue offsets, and that new ones were delayed for the queue and are
        due."""
        for queue_id, known in self.queues.items():
            arrived = self.room.arrived(queue_id=queue_id)
            assert [message.body for message in arrived[: len(known)]] == known
            for message in arrived[len(known) :]:
                if message.body in self.unsure:
                    self.unsure.discard(message.body)
                else:
                    target, due_ms = self.delayed.pop(message.body)
                    assert (target, message.at_ms >= due_ms) == (queue_id, True)
                known.append(message.body)

    def due_times(self) -> list[int]:
        """Return the due times of all delayed messages from the services. Adopt an unsure message that is there."""
        found: list[int] = []
        for delay_store in (self.room.schedule, self.room.timer):
            with delay_store.lock:
                delay_store.catch_up()
            for piece in delay_store.pending(0, 1 << 62):
                rows: np.ndarray = piece.rows
                for due_ms, offset, size in zip(
                    rows["due_ms"].tolist(), rows["physical_offset"].tolist(), rows["size"].tolist(), strict=True
                ):
                    body = self.room.store.read(offset, size).body
                    if body in self.unsure:
                        self.unsure.discard(body)
                        self.delayed[body] = 0, due_ms
                    found.append(due_ms)
        return sorted(found)

    def teardown(self) -> None:
        """All delayed messages are delivered in the end."""
        with ExitStack() as last:
            last.callback(self.logs.__exit__, None, None, None)
            last.callback(shutil.rmtree, self.folder)
            if hasattr(self, "room"):
                last.callback(self.room.crash)
                for _ in range(3):
                    self.room.advance(LONGEST_MS)
                self.adopt_arrivals()
                assert self.delayed == {}


StoreModel.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
TestStoreModel = StoreModel.TestCase
