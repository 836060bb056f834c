"""Kill a sending process with SIGKILL at random moments: nothing acknowledged is lost, doubled or early.

A child sends delayed messages, by level and by time, cancels some, moves some, and tells of each thing the broker
acknowledged. It is killed, started again on the same folder, and goes on, until all are sent. Then each message must
lie in its topic exactly once, stored at its due time or later; of those cancelled, none.

    python -m bench.crash [ROUNDS] [SEED]
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bench.measure import quiet, report, run, scratch_folder
from mqtemplate.broker import ConsumerSpec
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings
from mqtemplate.clock import Clock, SystemClock
from mqtemplate.message import Message
from mqtemplate.pending import ScheduleChangeStatus
from mqtemplate.selectors.tags import TagSelector
from mqtemplate.store import FlushDiskType
from mqtemplate.template import RocketMQTemplate

TOPIC = "crash"
_LEVELS = "1s 2s"
_LONGEST_DELAY_MS = 2_000


def settings(mode: FlushDiskType) -> EmbeddedSettings:
    """Small files, so that rounds meet their ends; two short levels."""
    return EmbeddedSettings(
        flush_disk_type=mode,
        message_delay_level=_LEVELS,
        mapped_file_size_commit_log=1 << 20,
        mapped_file_size_consume_queue=20_000,
        mapped_file_size_timer_log=60_000,
        checkpoint_interval_ms=200,
    )


@dataclass
class Outcome:
    """What the rounds showed."""

    kills: int = 0
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    cancelled: int = 0
    moved: int = 0
    not_cancelled: list[str] = field(default_factory=list)


def send_until_killed(folder: Path, first: int, count: int, mode: FlushDiskType) -> None:
    """The child: send messages *first* to *count*; say what is to be done, and again once it is acknowledged."""
    chance = random.Random(first)
    clock = SystemClock()
    with EmbeddedBroker(folder, settings(mode), clock) as broker:
        template = RocketMQTemplate(broker)
        for number in range(first, count):
            level = chance.choice((0, 1, 2))
            delay_ms = level * 1_000 or chance.randrange(1, _LONGEST_DELAY_MS)
            before = clock.now_ms()
            option = {"delay_level": level} if level else {"delay": delay_ms / 1_000}
            result = template.sync_send(TOPIC, str(number), **option)  # type: ignore[arg-type]
            _say("sent", number, before + delay_ms)
            if chance.random() < 0.2:
                _steer(template, result.handle, number, chance, clock)


def _steer(template: RocketMQTemplate, handle: str | None, number: int, chance: random.Random, clock: Clock) -> None:
    """Cancel a message or move it."""
    if chance.random() < 0.5:
        _say("cancelling", number, 0)
        if template.cancel(handle).status is ScheduleChangeStatus.CANCELLED:
            _say("cancelled", number, 0)
        else:
            _say("delivered", number, 0)
        return
    deliver_ms = clock.now_ms() + chance.randrange(_LONGEST_DELAY_MS)
    _say("moving", number, deliver_ms)
    if template.reschedule(handle, deliver_at=deliver_ms).status is ScheduleChangeStatus.RESCHEDULED:
        _say("moved", number, deliver_ms)
    else:
        _say("delivered", number, 0)


def _say(what: str, number: int, due_ms: int) -> None:
    os.write(1, f"{what} {number} {due_ms}\n".encode())


@dataclass
class Book:
    """What the child was told by the broker, and so what must be found.

    Attributes:
        due_ms: When each acknowledged message may come at the earliest.
        doubtful: Those that a kill left between two fates: at most once.
        cancelled: Those that must not come.
    """

    due_ms: dict[str, int] = field(default_factory=dict)
    doubtful: dict[str, str] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)

    def note(self, what: str, number: str, due_ms: int) -> None:
        if what == "sent":
            self.due_ms[number] = due_ms
        elif what in ("cancelling", "moving"):
            self.doubtful[number] = what
            if what == "moving":
                self.due_ms[number] = min(self.due_ms[number], due_ms)
        else:
            self.doubtful.pop(number)
            if what == "cancelled":
                self.cancelled.add(number)
            elif what == "moved":
                self.moved.add(number)
                self.due_ms[number] = due_ms


def kill_rounds(
    folder: Path, count: int, rounds: int, seed: int, mode: FlushDiskType = FlushDiskType.SYNC_FLUSH
) -> Outcome:
    """Send *count* messages over about *rounds* killed children, and one that may end; then look at the topic."""
    chance = random.Random(seed)
    outcome = Outcome()
    book = Book()
    sent = 0
    while sent < count:
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.crash", "--child", str(folder), str(sent), str(count), mode.value],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert child.stdout is not None
        stop_at = sent + chance.randrange(1, max(2, count // rounds)) if outcome.kills < rounds else count + 1
        for line in child.stdout:
            what, number, due_ms = line.decode().split()
            book.note(what, number, int(due_ms))
            sent = int(number) + 1
            if what == "sent" and sent == stop_at:
                time.sleep(chance.random() / 500)  # anywhere in a send, a cancel, a release, a flush
                child.send_signal(signal.SIGKILL)
                outcome.kills += 1
        child.stdout.close()
        child.wait()
        sent += sent < count  # the next number may have been stored without being acknowledged
    outcome.acknowledged = len(book.due_ms)
    _compare(outcome, book, _read_topic(folder, mode))
    return outcome


def _read_topic(folder: Path, mode: FlushDiskType) -> list[tuple[str, int]]:
    """Body and store timestamp of everything in the topic, once all that waited is due."""
    with EmbeddedBroker(folder, settings(mode)) as broker:
        consumer = broker.subscribe(ConsumerSpec(group="check", subscriptions={TOPIC: TagSelector()}))
        # A last message that is due behind all others: what is not there before it, is not there.
        broker.send(Message(TOPIC, b"end", {"TIMER_DELAY_MS": str(_LONGEST_DELAY_MS + 500)}))
        found: list[tuple[str, int]] = []
        while not any(body == "end" for body, _ in found):
            found += [(message.body.decode(), message.store_timestamp) for message in consumer.poll(1_000, 60_000)]
        return [item for item in found if item[0] != "end"]


def _compare(outcome: Outcome, book: Book, found: list[tuple[str, int]]) -> None:
    times = Counter(body for body, _ in found)
    outcome.cancelled, outcome.moved = len(book.cancelled), len(book.moved)
    outcome.lost = [
        number
        for number in book.due_ms
        if number not in times and number not in book.cancelled and book.doubtful.get(number) != "cancelling"
    ]
    outcome.doubled = [number for number, count in times.items() if count > 1]
    outcome.early = [body for body, stored_ms in found if stored_ms < book.due_ms.get(body, 0)]
    outcome.not_cancelled = sorted(book.cancelled & times.keys())


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for mode in FlushDiskType:
        with scratch_folder() as folder:
            outcome = kill_rounds(folder / "store", 10_000, rounds, seed, mode)
        print(
            f"{mode.value}, seed {seed}: {outcome.kills} kills, {outcome.acknowledged} messages acknowledged, "
            f"{outcome.cancelled} cancelled, {outcome.moved} moved"
        )
        report("  lost", len(outcome.lost), "", "0")
        report("  twice in their topic", len(outcome.doubled), "", "0")
        report("  early", len(outcome.early), "", "0")
        report("  cancelled, and there all the same", len(outcome.not_cancelled), "", "0")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        quiet()
        send_until_killed(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), FlushDiskType(sys.argv[5]))
    else:
        run(main)
