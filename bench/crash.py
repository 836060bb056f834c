"""SIGKILLs at random moments of a producer process: no acknowledged message is lost, delivered twice or early.

A child process sends delayed messages with levels and timers, cancels and reschedules some, and prints each action
that the broker acknowledged. It is killed, and started again on the same store directory, until all messages are sent.
Then each message must be in its topic exactly once, stored at its deliver time or later; a cancelled one must not be.

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
from mqtemplate.store.settings import FlushDiskType
from mqtemplate.template import RocketMQTemplate

TOPIC = "crash"
_LEVELS = "1s 2s"
_LONGEST_DELAY_MS = 2_000


def settings(mode: FlushDiskType) -> EmbeddedSettings:
    """Return settings with small files, so that each round fills some, and two short levels."""
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
    """Result of all rounds."""

    kills: int = 0
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    cancelled: int = 0
    rescheduled: int = 0
    not_cancelled: list[str] = field(default_factory=list)


def send_until_killed(folder: Path, first: int, count: int, mode: FlushDiskType) -> None:
    """Run the child process: send messages *first* to *count*, and print each action before and after it."""
    chance = random.Random(first)
    clock = SystemClock()
    with EmbeddedBroker(folder, settings(mode), clock) as broker:
        template = RocketMQTemplate(broker)
        for number in range(first, count):
            level = chance.choice((0, 1, 2))
            delay_ms = level * 1_000 or chance.randrange(1, _LONGEST_DELAY_MS)
            before = clock.now_ms()
            option = {"delay_level": level} if level else {"delay": f"{delay_ms}ms"}
            result = template.sync_send(TOPIC, str(number), **option)  # type: ignore[arg-type]
            _print_action("sent", number, before + delay_ms)
            if chance.random() < 0.2:
                _change(template, result.handle, number, chance, clock)


def _change(template: RocketMQTemplate, handle: str | None, number: int, chance: random.Random, clock: Clock) -> None:
    """Cancel or reschedule a message."""
    if chance.random() < 0.5:
        _print_action("cancelling", number, 0)
        if template.cancel(handle).status is ScheduleChangeStatus.CANCELLED:
            _print_action("cancelled", number, 0)
        else:
            _print_action("delivered", number, 0)
        return
    deliver_ms = clock.now_ms() + chance.randrange(_LONGEST_DELAY_MS)
    _print_action("rescheduling", number, deliver_ms)
    if template.reschedule(handle, deliver_at=deliver_ms).status is ScheduleChangeStatus.RESCHEDULED:
        _print_action("rescheduled", number, deliver_ms)
    else:
        _print_action("delivered", number, 0)


def _print_action(action: str, number: int, due_ms: int) -> None:
    os.write(1, f"{action} {number} {due_ms}\n".encode())


@dataclass
class Expected:
    """The messages that must be in the topic, by the actions that the child printed.

    Attributes:
        due_ms: Message -> earliest time of its delivery.
        undecided: Message -> action that a kill may have interrupted; the message may be in the topic or not.
        cancelled: Messages that must not be in the topic.
    """

    due_ms: dict[str, int] = field(default_factory=dict)
    undecided: dict[str, str] = field(default_factory=dict)
    cancelled: set[str] = field(default_factory=set)
    rescheduled: set[str] = field(default_factory=set)

    def add(self, action: str, number: str, due_ms: int) -> None:
        """Add an action of the child."""
        if action == "sent":
            self.due_ms[number] = due_ms
        elif action in ("cancelling", "rescheduling"):
            self.undecided[number] = action
            if action == "rescheduling":
                self.due_ms[number] = min(self.due_ms[number], due_ms)
        else:
            self.undecided.pop(number)
            if action == "cancelled":
                self.cancelled.add(number)
            elif action == "rescheduled":
                self.rescheduled.add(number)
                self.due_ms[number] = due_ms


def kill_rounds(
    folder: Path, count: int, rounds: int, seed: int, mode: FlushDiskType = FlushDiskType.SYNC_FLUSH
) -> Outcome:
    """Send *count* messages with about *rounds* killed child processes and a last one; then check the topic."""
    chance = random.Random(seed)
    outcome = Outcome()
    expected = Expected()
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
            action, number, due_ms = line.decode().split()
            expected.add(action, number, int(due_ms))
            sent = int(number) + 1
            if action == "sent" and sent == stop_at:
                time.sleep(chance.random() / 500)  # so that the kill hits any part of a send, cancel, delivery or flush
                child.send_signal(signal.SIGKILL)
                outcome.kills += 1
        child.stdout.close()
        child.wait()
        sent += sent < count  # the next message may be stored, but not acknowledged
    outcome.acknowledged = len(expected.due_ms)
    _compare(outcome, expected, _read_topic(folder, mode))
    return outcome


def _read_topic(folder: Path, mode: FlushDiskType) -> list[tuple[str, int]]:
    """Return body and store timestamp of all messages in the topic, after all pending messages are delivered."""
    with EmbeddedBroker(folder, settings(mode)) as broker:
        consumer = broker.groups.subscribe(ConsumerSpec(group="check", subscriptions={TOPIC: TagSelector()}))
        # This message is due after all others: a message that is not delivered before it is lost.
        broker.sends.send(Message(TOPIC, b"end", {"TIMER_DELAY_MS": str(_LONGEST_DELAY_MS + 500)}))
        found: list[tuple[str, int]] = []
        while not any(body == "end" for body, _ in found):
            found += [(message.body.decode(), message.store_timestamp) for message in consumer.poll(1_000, 60_000)]
        return [item for item in found if item[0] != "end"]


def _compare(outcome: Outcome, expected: Expected, found: list[tuple[str, int]]) -> None:
    times = Counter(body for body, _ in found)
    outcome.cancelled, outcome.rescheduled = len(expected.cancelled), len(expected.rescheduled)
    outcome.lost = [
        number
        for number in expected.due_ms
        if number not in times and number not in expected.cancelled and expected.undecided.get(number) != "cancelling"
    ]
    outcome.doubled = [number for number, count in times.items() if count > 1]
    outcome.early = [body for body, stored_ms in found if stored_ms < expected.due_ms.get(body, 0)]
    outcome.not_cancelled = sorted(expected.cancelled & times.keys())


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    for mode in FlushDiskType:
        with scratch_folder() as folder:
            outcome = kill_rounds(folder / "store", 10_000, rounds, seed, mode)
        print(
            f"{mode.value}, seed {seed}: {outcome.kills} kills, {outcome.acknowledged} messages acknowledged, "
            f"{outcome.cancelled} cancelled, {outcome.rescheduled} rescheduled"
        )
        report("  lost", len(outcome.lost), "", "0")
        report("  delivered twice", len(outcome.doubled), "", "0")
        report("  early", len(outcome.early), "", "0")
        report("  cancelled, but delivered", len(outcome.not_cancelled), "", "0")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        quiet()
        send_until_killed(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), FlushDiskType(sys.argv[5]))
    else:
        run(main)
