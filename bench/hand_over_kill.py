"""Kill processes during a hand-over, and check every message and every listener.

    python -m bench.hand_over_kill [--kills 40] [--pending 2000] [--old folder|server] [--rocketmq] [--seed N]

An application (`bench.hand_over_application`) moves pending messages, levels and timers, from an old broker to a new
one. It cancels, reschedules and sends meanwhile, and it has two listeners: one CONCURRENTLY and one ORDERLY. The kinds
of process are killed with SIGKILL in turns, at random moments, and started again:

- ``application``: the application; with ``--old server`` it has two processes, and this one has no mover.
- ``mover``: the process that moves the messages. With a folder it is the application, which has the old broker too.
- ``old``: the old server, with ``--old server``.
- ``new``: our server, or with ``--rocketmq`` RocketMQ 5.5.0.

Half-way the hand-over is aborted, through kills, until all is back; then it starts again. At the end each message must
be in exactly one of the two brokers, delivered or pending, and no cancelled one in any. The listeners must have got
what is before their offsets, nothing early, and each key of the ORDERLY one in its order. After a kill a listener may
get a message again: that is counted, and no fault.

With ``--rocketmq`` a message is cancelled only if it is not due soon, and is not rescheduled after it has moved:
RocketMQ answers a recall before it looks for the message, and a reschedule is a send and a recall, between which a kill
leaves two. And RocketMQ delivers timers again that it delivered within the second before a kill: such a message has one
timer there and two copies in its topic, and is counted as repeated by RocketMQ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.hand_over_application import (
    GROUP,
    KEYS_OF_A_PROCESS,
    QUEUES,
    STEPS,
    STEPS_GROUP,
    TOPIC,
    Run,
    lines_of,
    records_of,
    send_step,
    started,
)
from bench.killed_server import now_ms
from bench.peer.rocketmq import NameServer, RocketMQ, free_port
from mqtemplate.broker import Broker
from mqtemplate.errors import MQTemplateError
from mqtemplate.message import Message, MessageExt, Property
from mqtemplate.pending import PendingMessage, PendingQuery

_LEVELS = (4, 5, 6)  # 30s, 1m, 2m
_STEPS_BEFORE = 10
_WAIT_S = 240
_CHECK_S = 60
_MOVER_S = 20
"""Longer than the lease of the lock. While a hand-over is aborted no process has it."""
_PHASE_S = 0.05


@dataclass
class KillCounts:
    """Result of a run. The faults are message ids, or steps of a key.

    Attributes:
        kills: Kills by kind of process.
        moved: Messages that the mover has moved.
        aborts: Aborts that were ended by the phase ``ABORTED``.
        uncertain: Messages whose cancel, reschedule or send lost its answer: it may have had its effect or not.
        handled: Messages and steps that a listener got.
        repeats: Those that it got again: a kill came between the handler and the commit of its offset.
        repeated_by_rocketmq: See the docstring of the module.
        lost: In no broker.
        doubled: More than once in the brokers.
        early: Delivered, or given to a listener, before its time.
        not_cancelled: In a broker or given to a listener, though cancelled.
        skipped: In the topic before the offset of the group, but no listener got it.
        overtaken: Given to the ORDERLY listener after a later one of its key.
    """

    kills: Counter[str] = field(default_factory=Counter)
    pending: int = 0
    moved: int = 0
    aborts: int = 0
    cancelled: int = 0
    rescheduled: int = 0
    sent: int = 0
    steps: int = 0
    uncertain: int = 0
    handled: int = 0
    repeats: int = 0
    repeated_by_rocketmq: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    not_cancelled: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    overtaken: list[str] = field(default_factory=list)

    @property
    def faults(self) -> dict[str, list[str]]:
        """The faults by their name, those without a message left out."""
        names = ("lost", "doubled", "early", "not_cancelled", "skipped", "overtaken")
        return {name: found for name in names if (found := getattr(self, name))}

    def lines(self) -> list[str]:
        """Return the result for a reader."""
        kills = ", ".join(f"{count} of {name}" for name, count in sorted(self.kills.items()))
        return [
            f"kills: {kills}; aborts that ended: {self.aborts}",
            f"{self.pending:,} messages pending at the start, {self.moved:,} moved, {self.cancelled} cancelled",
            f"{self.rescheduled} rescheduled, {self.sent} sent, {self.uncertain} with a lost answer",
            f"listeners got {self.handled:,} messages, {self.steps} of them in order, and {self.repeats} again",
            f"lost {len(self.lost)}, doubled {len(self.doubled)}, early {len(self.early)}",
            f"delivered though cancelled {len(self.not_cancelled)}, skipped by a group {len(self.skipped)}",
            f"out of order {len(self.overtaken)}, repeated by RocketMQ itself {self.repeated_by_rocketmq}",
        ]


# --- the processes --------------------------------------------------------------------------------


class KilledProcess:
    """A process that is killed and started again.

    Args:
        line: Text of the line that it prints when it is ready.
    """

    def __init__(self, command: list[str], line: str, log: Path) -> None:
        self._command, self._line, self._log = command, line, log
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert self._line in line, f"{self._command}: {line!r}, {self._log.read_text()[-2_000:]}"

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def log_text(self) -> str:
        """Return what it has printed to its standard error."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def is_running(self) -> bool:
        """False if it has ended by itself."""
        return self._process.poll() is None

    def end(self, wait_s: float | None = _WAIT_S) -> int:
        """Let it end by itself: its standard input ends. Return its exit code."""
        self._process.communicate(timeout=wait_s)
        return self._process.returncode


def server(folder: Path, name: str) -> tuple[KilledProcess, str]:
    """Start our server, and return it with the address of its name server."""
    listen, names = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mqtemplate", "broker", "--store", str(folder / name), "--listen", listen]
    return KilledProcess([*command, "--name-server", names], "listens on", folder / f"{name}.log"), names


@contextlib.contextmanager
def _rocketmq(folder: Path) -> Iterator[tuple[Any, str]]:
    class Killed(RocketMQ):
        def start(self) -> None:
            self.__enter__()

        def wait_until_ready(self) -> None:
            """It was ready when it was started."""

    options = {"recallMessageEnable": "true", "haListenPort": free_port(), "listenPort": free_port()}
    with NameServer() as names, Killed(folder / "new", names, options) as server:
        yield server, names.address


# --- a run ----------------------------------------------------------------------------------------


def fill(broker: Broker, run: Run, chance: random.Random) -> dict[str, int]:
    """Send messages with levels and timers, and steps. Return when each message is due; 0 if it was delivered."""
    for topic, group in ((TOPIC, GROUP), (STEPS, STEPS_GROUP)):
        broker.create_topic(topic, QUEUES)
        for queue in broker.queues(topic):
            broker.groups.commit_offset(group, queue, 0)
    sends = []
    for number in range(run.pending):
        timer = str(chance.choice((chance.randrange(15_000, 240_000), 3_600_000 + number)))
        delay = {"DELAY": str(chance.choice(_LEVELS))} if number % 3 == 0 else {"TIMER_DELAY_MS": timer}
        message = Message(TOPIC, b"%d" % number, {Property.UNIQ_KEY: f"M{number}", Property.KEYS: "k", **delay})
        sends.append(broker.sends.send_async([message], timeout_ms=60_000))
        if len(sends) >= 256:
            sends.pop(0).result()
    for each in sends:
        each.result()
    for process in range(run.processes):
        for key in range(KEYS_OF_A_PROCESS):
            for step in range(-_STEPS_BEFORE, 0):
                send_step(broker, f"{process}.{key}", step)
    due = dict.fromkeys((f"M{number}" for number in range(run.pending)), 0)
    return due | {each.msg_id: each.deliver_ms for each in pending_of(broker)}


def pending_of(broker: Broker) -> list[PendingMessage]:
    """Return all pending messages of the topic."""
    found: list[PendingMessage] = []
    cursor = None
    while True:
        page = broker.delayed.pending(PendingQuery(topic=TOPIC), 1_000, cursor)
        found += page.messages
        cursor = page.cursor
        if cursor is None:
            return found


def delivered_by(broker: Broker, topic: str = TOPIC) -> list[MessageExt]:
    """Return all messages in a topic."""
    found: list[MessageExt] = []
    for queue in broker.queues(topic):
        offset = broker.reader.min_offset(queue)
        while messages := broker.reader.pull(queue, offset, 32).messages:
            found += messages
            offset = messages[-1].queue_offset + 1
    return found


class KillRun:
    """A hand-over with kills."""

    def __init__(self, folder: Path, run: Run, targets: dict[str, Any], chance: random.Random) -> None:
        self.folder, self.run, self._targets, self._chance = folder, run, targets, chance
        command = [sys.executable, "-m", "bench.hand_over_application", str(folder)]
        self.applications = [
            KilledProcess([*command, str(number)], "started", folder / f"application-{number}.log")
            for number in range(run.processes)
        ]
        self.result = KillCounts(pending=run.pending)

    def kill(self, count: int) -> None:
        """Kill processes, the kinds in turns, and abort the hand-over half-way."""
        kinds = ["mover", *self._targets, *(["application"] if self.run.processes > 1 else [])]
        for number in range(count):
            if number == count // 2:
                (self.folder / "phase").write_text("ABORTING")
            is_late = number >= count * 3 // 4
            if number > count // 2 and not self.result.aborts and (is_late or self._is_aborted()):
                self._wait_until_aborted()
            threading.Event().wait(self._chance.uniform(0.2, 2.5))
            self._kill_one(kinds[number % len(kinds)])
        if not self.result.aborts:
            self._wait_until_aborted()

    def _kill_one(self, kind: str) -> None:
        process = self._targets[kind] if kind in self._targets else self._application(is_mover=kind == "mover")
        process.kill()
        process.start()
        if process not in self.applications or self._chance.random() < 0.7:  # else it may be killed while it starts
            process.wait_until_ready()
        self.result.kills[kind] += 1

    def _application(self, *, is_mover: bool) -> KilledProcess:
        """Return the process that moves messages, or another one. Wait for one that moves, if there is one soon."""
        end_s = time.monotonic() + _MOVER_S
        while len(self.applications) > 1 and time.monotonic() < end_s:
            found = [each.get("is_mover", False) for each in self._counts()]
            if any(found):
                return self.applications[found.index(True) if is_mover else found.index(False)]
            threading.Event().wait(_PHASE_S)
        return self.applications[0]

    def _counts(self) -> list[dict[str, Any]]:
        """Return what each process has reported within the last seconds."""
        found = []
        for number in range(self.run.processes):
            values: dict[str, Any] = {}
            with contextlib.suppress(OSError):
                values = json.loads((self.folder / f"counts-{number}").read_text())
            found.append(values if values and values["at"] > now_ms() - 3_000 else {})
        return found

    def _is_aborted(self) -> bool:
        return any(each.get("phase") == "ABORTED" for each in self._counts())

    def _wait_until_aborted(self) -> None:
        """Wait until all is back in the old broker, and start the hand-over again."""
        self._wait_for("the end of the abort", lambda each: each["phase"] == "ABORTED")
        self.result.aborts += 1
        (self.folder / "phase").write_text("RUNNING")
        self._wait_for("the second start", lambda each: each["phase"] == "RUNNING")

    def wait_until_moved(self) -> None:
        """Wait until nothing is pending in the old broker, and nothing in transit."""
        (self.folder / "quiet").touch()
        self._wait_for("the move", lambda each: not each["pending"] and not each["transit"])

    def _wait_for(self, what: str, holds: Any) -> None:
        end_s = time.monotonic() + _WAIT_S + self.run.pending / 50
        while time.monotonic() < end_s:
            if any(each and holds(each) for each in self._counts()):
                return
            threading.Event().wait(_PHASE_S)
        raise AssertionError(f"{what} has not come: {self._counts()}")

    def end(self) -> None:
        for each in self.applications:
            each.end()


def kill_rounds(
    folder: Path, *, kills: int, pending: int, seed: int, old_kind: str = "folder", is_rocketmq: bool = False
) -> KillCounts:
    """Run a hand-over with *kills* kills, and check all messages."""
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        targets: dict[str, Any] = {}
        if is_rocketmq:
            targets["new"], new_name = stack.enter_context(_rocketmq(folder))
        else:
            targets["new"], new_name = server(folder, "new")
            stack.callback(targets["new"].kill)
            targets["new"].wait_until_ready()
        old_name = f"embedded:{folder / 'old'}"
        if old_kind == "server":
            targets["old"], old_name = server(folder, "old")
            stack.callback(targets["old"].kill)
            targets["old"].wait_until_ready()
        run = Run(old_name, new_name, pending, 2 if old_kind == "server" else 1, seed, is_rocketmq)
        run.write(folder)
        with started(old_name, folder / "client") as old, started(new_name, folder / "client") as new:
            due = fill(old, run, chance)
            _when_registered(lambda: [new.create_topic(topic, QUEUES) for topic in (TOPIC, STEPS)])
        started_run = KillRun(folder, run, targets, chance)
        for application in started_run.applications:
            stack.callback(application.kill)
            application.wait_until_ready()
        started_run.kill(kills)
        started_run.wait_until_moved()
        started_run.end()
        with started(old_name, folder / "client") as old, started(new_name, folder / "client") as new:
            _when_registered(lambda: new.queues(TOPIC))
            started_run.result.moved = old.hand_over.counts().moved
            check = Check(folder, due, [old, new], started_run.result, is_rocketmq=is_rocketmq)
            check.run()
            for name, found in started_run.result.faults.items():
                (folder / name).write_text("".join(f"{line}\n" for each in found for line in check.evidence(each)))
    return started_run.result


def _when_registered(use: Callable[[], object]) -> None:
    """Use a broker as soon as it is registered at the name server, which RocketMQ does each ten seconds."""
    end_s = time.monotonic() + _CHECK_S
    while True:
        try:
            use()
            return
        except MQTemplateError:
            if time.monotonic() > end_s:
                raise
        threading.Event().wait(0.5)


# --- the check ------------------------------------------------------------------------------------


class Check:
    """Compares both brokers and the listeners with the journals.

    Args:
        due: When each message was due that was pending at the start.
        brokers: The old and the new one.
    """

    def __init__(
        self, folder: Path, due: dict[str, int], brokers: Sequence[Broker], result: KillCounts, *, is_rocketmq: bool
    ) -> None:
        self._folder, self._brokers, self._result, self._is_rocketmq = folder, brokers, result, is_rocketmq
        self._expected = set(due)
        self._times = {msg_id: {due_ms} for msg_id, due_ms in due.items()}  # when each may be due
        self._cancelled: set[str] = set()
        self._uncertain: set[str] = set()
        self._tried: Counter[str] = Counter()  # tries since the last answer
        self._handled = lines_of(folder / "handled")

    def run(self) -> None:
        """Check everything, and note it in the result."""
        for line in lines_of(self._folder / "journal"):
            if line["action"] != "step":
                self._read(line)
        self._uncertain.update(msg_id for msg_id, count in self._tried.items() if count)
        self._result.cancelled, self._result.uncertain = len(self._cancelled), len(self._uncertain)
        self._compare_brokers()
        self._check_times()
        self._check_listeners()
        self._check_order()

    def _read(self, line: dict[str, Any]) -> None:
        """Read one action: a try, or the answer to it. A try without an answer may have had its effect."""
        msg_id, action, result = line["id"], line["action"], line.get("result")
        if result is None:
            self._tried[msg_id] += 1
            if action != "cancel":
                self._times.setdefault(msg_id, set()).add(line["due"])
            return
        tries, self._tried[msg_id] = self._tried[msg_id], 0
        if action == "send":
            self._expected.add(msg_id)
            self._result.sent += 1
        elif result == "CANCELLED":
            self._cancelled.add(msg_id)
        elif result == "RESCHEDULED":
            self._result.rescheduled += 1
            self._times[msg_id] = {line["due"]}
        elif tries > 1:
            self._uncertain.add(msg_id)  # the answer to an earlier try is not known

    def _compare_brokers(self) -> None:
        """Find each message in one of the brokers, and once."""
        result, end_s = self._result, time.monotonic() + _CHECK_S
        missing: set[str] | None = None
        while True:
            of_old, of_new = map(delivered_by, self._brokers)
            self._delivered = [*of_old, *of_new]
            pending = [each.msg_id for broker in self._brokers for each in pending_of(broker)]
            counts = Counter([each.msg_id for each in self._delivered] + pending)
            now_missing = self._expected - counts.keys() - self._cancelled - self._uncertain
            missing = now_missing if missing is None else missing & now_missing
            result.lost = sorted(missing)
            doubled = sorted(msg_id for msg_id, count in counts.items() if count > 1)
            elsewhere = {*pending, *(each.msg_id for each in of_old)}
            repeated = [msg_id for msg_id in doubled if self._is_repeated_by_rocketmq(msg_id, elsewhere)]
            result.doubled = sorted(set(doubled).difference(repeated))
            result.repeated_by_rocketmq = len(repeated)
            # A message that is due between the two reads is in both or in none. RocketMQ delivers a second late, and
            # while messages are due all the time some are missing at each look: lost is what is missing at all of them.
            if not (result.lost or result.doubled) or time.monotonic() > end_s:
                break
            threading.Event().wait(1)
        result.not_cancelled = sorted(self._cancelled & (counts.keys() | {line["id"] for line in self._handled}))

    def _is_repeated_by_rocketmq(self, msg_id: str, elsewhere: Collection[str]) -> bool:
        """Return True if RocketMQ alone has delivered a message, and all its copies are of one timer."""
        if not self._is_rocketmq or msg_id in elsewhere:
            return False
        delivered = {_timer_of(each) for each in self._delivered if each.msg_id == msg_id}
        timers = Counter(_timer_of(each) for each in records_of(self._brokers[1], msg_id) if each.topic != TOPIC)
        return [timers[each] for each in delivered] == [1]

    def _check_times(self) -> None:
        def is_early(msg_id: str, at_ms: int) -> bool:
            return at_ms < min(self._times.get(msg_id, {0}))

        early = {each.msg_id for each in self._delivered if is_early(each.msg_id, each.store_timestamp)}
        early.update(line["id"] for line in self._handled if "step" not in line and is_early(line["id"], line["at"]))
        self._result.early = sorted(early)

    def _check_listeners(self) -> None:
        """Find what is before the offset of a group, but was given to no listener."""
        counts = Counter(line["id"] for line in self._handled)
        self._result.handled, self._result.repeats = len(counts), counts.total() - len(counts)
        self._result.steps = len({line["id"] for line in self._handled if "step" in line})
        skipped = set()
        for broker in self._brokers:
            for topic, group in ((TOPIC, GROUP), (STEPS, STEPS_GROUP)):
                offsets = {
                    queue.queue_id: broker.groups.committed_offset(group, queue) for queue in broker.queues(topic)
                }
                for each in delivered_by(broker, topic):
                    is_consumed = each.queue_offset < (offsets[each.queue_id] or 0)
                    if is_consumed and each.msg_id not in counts:
                        skipped.add(each.msg_id)
        self._result.skipped = sorted(skipped)

    def _check_order(self) -> None:
        """Find steps that came first after a later one of their key."""
        latest: dict[str, int] = {}
        seen: set[str] = set()
        for line in self._handled:
            if "step" not in line or line["step"] in seen:
                continue
            seen.add(line["step"])
            key, step = line["step"].split()
            if int(step) < latest.get(key, int(step)):
                self._result.overtaken.append(line["step"])
            latest[key] = max(int(step), latest.get(key, int(step)))

    def evidence(self, msg_id: str) -> list[str]:
        """Return what the journals and the brokers have of a message."""
        found = [f"--- {msg_id}, was due {sorted(self._times.get(msg_id, ()))}"]
        found += [json.dumps(line) for line in lines_of(self._folder / "journal") if line.get("id") == msg_id]
        found += [json.dumps(line) for line in self._handled if line["id"] == msg_id]
        with contextlib.suppress(MQTemplateError):
            found.append(f"transit: {self._brokers[0].hand_over.moved(msg_id, TOPIC)}")
        for broker in self._brokers:
            found += [
                f"{broker.name}: {each.topic} {each.queue_id} {each.queue_offset} {each.store_timestamp} "
                f"{each.properties}"
                for each in records_of(broker, msg_id)
            ]
        return found


def _timer_of(message: MessageExt) -> tuple[str | None, str | None]:
    """Return the transit and the slot of a timer, or of the timer that was delivered as this message."""
    return message.properties.get(Property.HAND_OVER), message.properties.get(Property.TIMER_OUT_MS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--pending", type=int, default=2_000)
    parser.add_argument("--old", choices=("folder", "server"), default="folder")
    parser.add_argument("--rocketmq", action="store_true")
    parser.add_argument("--seed", type=int, default=20_261_129)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hand-over-", dir=os.environ.get("BENCH_DIR")))
    start_s = time.monotonic()
    result = kill_rounds(
        folder,
        kills=arguments.kills,
        pending=arguments.pending,
        seed=arguments.seed,
        old_kind=arguments.old,
        is_rocketmq=arguments.rocketmq,
    )
    print(*result.lines(), sep="\n")
    print(f"{time.monotonic() - start_s:.0f} s")
    if not result.moved:
        sys.exit(f"no message was moved, so this run shows nothing: see {folder}/application-0.log for the reason")
    if result.faults:
        sys.exit(f"{json.dumps(result.faults)}\nwhat is known of each: {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
