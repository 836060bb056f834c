"""Kill processes during a hand-over: messages lost, doubled, early, or delivered though cancelled.

    python -m bench.hand_over_kill [--kills 40] [--messages 2000] [--old folder|server] [--rocketmq] [--seed N]

An application moves pending messages (levels and timers) from an old broker to a new one, and cancels, reschedules and
sends meanwhile. Each round kills one of them with SIGKILL at a random moment: the application, which has the mover; the
old server (with ``--old server``; a folder is killed with its application); or the new broker. Each is started again.
The application writes each action to a journal, before and after it, so an action whose answer was lost is known.

At the end each message must be in exactly one of the two brokers, delivered or pending, and no cancelled one in any.
With ``--rocketmq`` the new broker is RocketMQ 5.5.0. There a message is cancelled only if it is not due soon, and is
not rescheduled after it has moved: RocketMQ answers a recall before it looks for the message, and a reschedule is a
send and a recall, between which a kill leaves two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.killed_server import free_port, now_ms
from mqtemplate.broker import Broker
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.errors import MQTemplateError
from mqtemplate.handover.mover import Mover, MoverSettings
from mqtemplate.message import Message
from mqtemplate.pending import PendingMessage, PendingQuery, ScheduleChangeStatus
from mqtemplate.topics import TIMER_TOPIC

TOPIC = "orders"
_LEVELS = (4, 5, 6)  # 30s, 1m, 2m
_SETTINGS = MoverSettings(settle_ms=2_500, lease_ms=8_000, lead_ms=3_000)
_SMALL = EmbeddedSettings(mapped_file_size_commit_log=4 << 20)
_WAIT_S = 240
_CHECK_S = 60
_SAFE_MS = 10_000
"""With RocketMQ: a message that is due sooner is not cancelled."""


@dataclass
class KillCounts:
    """Result of a run. All lists have message ids.

    Attributes:
        kills: Kills by process.
        moved: Messages that the mover has moved.
        uncertain: Messages whose cancel or reschedule lost its answer: they may be cancelled or not.
    """

    kills: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    moved: int = 0
    cancelled: int = 0
    rescheduled: int = 0
    sent: int = 0
    uncertain: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    not_cancelled: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """Number of messages with a fault."""
        return sum(map(len, (self.lost, self.doubled, self.early, self.not_cancelled)))


# --- the application ------------------------------------------------------------------------------


def opened(name: str, folder: Path) -> Broker:
    """Return a broker by its name in the arguments: ``embedded:DIR`` or ``host:port``."""
    if name.startswith("embedded:"):
        return EmbeddedBroker(name.removeprefix("embedded:"), _SMALL)
    return RemoteBroker(RemoteSettings(name_servers=(name,), offset_path=folder, retry_times_when_send_failed=0))


class Journal:
    """A file of JSON lines. A line that was written survives a SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, **values: object) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")


def run_application(old_name: str, new_name: str, folder: Path, seed: int) -> None:
    """Move, cancel, reschedule and send until standard input ends."""
    chance, journal = random.Random(seed), Journal(folder / "journal")
    is_rocketmq = (folder / "rocketmq").exists()
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    with started(old_name, folder / "old-client") as old, started(new_name, folder / "new-client") as new:
        mover = Mover(old, new, _SETTINGS, owner="application")
        mover.start()
        print("started", flush=True)
        while not ended.wait(0.02):
            action = _action(chance)
            while not ended.wait(0.02):
                try:
                    _act(action, old, new, journal, is_rocketmq=is_rocketmq)
                    break
                except MQTemplateError as error:  # a broker is away: try again
                    print(f"{action}: {error!r:.300}", file=sys.stderr, flush=True)
                    ended.wait(0.2)
            with contextlib.suppress(MQTemplateError, OSError):
                counts = old.hand_over.counts()
                text = json.dumps({"pending": counts.pending, "transit": counts.in_transit, "moved": counts.moved})
                temporary = folder / "counts.new"
                temporary.write_text(text)
                temporary.replace(folder / "counts")
        mover.close()


@contextlib.contextmanager
def started(name: str, folder: Path) -> Iterator[Broker]:
    """Start a broker; repeat that while it is away."""
    end_s = time.monotonic() + _WAIT_S
    while True:
        broker = opened(name, folder)
        try:
            broker.start()
            break
        except MQTemplateError:
            if time.monotonic() > end_s:
                raise
            threading.Event().wait(0.1)
    with broker:
        yield broker


def _action(chance: random.Random) -> dict[str, Any]:
    """Return an action: its name, a message id, and a due time."""
    kind, due_ms = chance.choice(("cancel", "reschedule", "send", "none")), now_ms() + chance.randrange(20_000, 60_000)
    number = chance.randrange(int(os.environ["HAND_OVER_MESSAGES"]))
    msg_id = f"S{chance.getrandbits(60):x}" if kind == "send" else f"M{number}"
    return {"action": kind, "id": msg_id, "due": due_ms}


def _act(action: dict[str, Any], old: Broker, new: Broker, journal: Journal, *, is_rocketmq: bool) -> None:
    kind, msg_id, due_ms = action["action"], action["id"], action["due"]
    if kind == "none":
        return
    journal.write(**action)
    if kind == "send":
        found = new.find_records((TIMER_TOPIC, TOPIC), msg_id).messages  # of a try whose answer was lost
        if not found:
            properties = {"UNIQ_KEY": msg_id, "TIMER_DELIVER_MS": str(due_ms)}
            new.sends.send(Message(TOPIC, b"sent", properties), new.queues(TOPIC)[0])
        journal.write(action="sent", id=msg_id, due=due_ms)
        return
    status = _changed(action, old, new, is_rocketmq=is_rocketmq)
    journal.write(action="unchanged" if status is None else status.name, id=msg_id, due=due_ms, kind=kind)


def _changed(action: dict[str, Any], old: Broker, new: Broker, *, is_rocketmq: bool) -> ScheduleChangeStatus | None:
    """Cancel or reschedule a message in the broker that has it. Return None if it was not tried."""
    kind, msg_id, due_ms = action["action"], action["id"], action["due"]

    def change(broker: Broker) -> ScheduleChangeStatus:
        if kind == "cancel":
            return broker.delayed.cancel(key=msg_id, topic=TOPIC).status
        return broker.delayed.reschedule(None, due_ms, key=msg_id, topic=TOPIC).status

    status = change(old)
    if status is not ScheduleChangeStatus.MOVED:
        return status
    end_s = time.monotonic() + 30
    while old.hand_over.is_reserved(msg_id, TOPIC):
        if time.monotonic() > end_s:
            return None
        threading.Event().wait(0.05)
    if is_rocketmq and not _may_change(msg_id, kind, new):
        return None
    return change(new)


def _may_change(msg_id: str, kind: str, new: Broker) -> bool:
    if kind != "cancel":
        return False
    found = new.delayed.pending(PendingQuery(key=msg_id, topic=TOPIC)).messages
    return bool(found) and found[0].deliver_ms > now_ms() + _SAFE_MS


# --- the processes --------------------------------------------------------------------------------


class KilledProcess:
    """A process that is killed and started again.

    Args:
        line: Text of the line that it prints when it is ready.
    """

    def __init__(self, command: list[str], line: str, log: Path, **environment: str) -> None:
        self._command, self._line, self._log = command, line, log
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
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
    from bench.peer.rocketmq import NameServer, RocketMQ
    from bench.peer.rocketmq import free_port as peer_port

    class Killed(RocketMQ):
        def start(self) -> None:
            self.__enter__()

        def wait_until_ready(self) -> None:
            """It was ready when it was started."""

    options = {"recallMessageEnable": "true", "haListenPort": peer_port(), "listenPort": peer_port()}
    with NameServer() as names, Killed(folder / "new", names, options) as server:
        yield server, names.address


# --- a run ----------------------------------------------------------------------------------------


def fill(broker: Broker, count: int, chance: random.Random) -> dict[str, int]:
    """Send messages with levels and timers, and return when each is due."""
    sends = []
    for number in range(count):
        timer = str(chance.choice((chance.randrange(15_000, 90_000), 3_600_000 + number)))
        delay = {"DELAY": str(chance.choice(_LEVELS))} if number % 3 == 0 else {"TIMER_DELAY_MS": timer}
        message = Message(TOPIC, b"%d" % number, {"UNIQ_KEY": f"M{number}", "KEYS": "k", **delay})
        sends.append(broker.sends.send_async([message], timeout_ms=60_000))
    for each in sends:
        each.result()
    return {each.msg_id: each.deliver_ms for each in pending_of(broker)}


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


def delivered_by(broker: Broker) -> list[tuple[str, int]]:
    """Return id and store time of all messages in the topic."""
    found = []
    for queue in broker.queues(TOPIC):
        offset = broker.reader.min_offset(queue)
        while messages := broker.reader.pull(queue, offset, 32).messages:
            found += [(each.msg_id, each.store_timestamp) for each in messages]
            offset = messages[-1].queue_offset + 1
    return found


def kill_rounds(
    folder: Path, *, kills: int, messages: int, seed: int, old_kind: str = "folder", is_rocketmq: bool = False
) -> KillCounts:
    """Run a hand-over with *kills* kills, and check all messages."""
    chance, result = random.Random(seed), KillCounts(messages=messages)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if is_rocketmq:
            (folder / "rocketmq").touch()
            new, new_name = stack.enter_context(_rocketmq(folder))
        else:
            new, new_name = server(folder, "new")
            stack.callback(new.kill)
            new.wait_until_ready()
        targets: dict[str, Any] = {"new": new}
        old_name = f"embedded:{folder / 'old'}"
        if old_kind == "server":
            targets["old"], old_name = server(folder, "old")
            stack.callback(targets["old"].kill)
            targets["old"].wait_until_ready()
        with started(old_name, folder / "client") as old, started(new_name, folder / "client") as client:
            due = fill(old, messages, chance)
            client.create_topic(TOPIC)
            old.hand_over.begin(new_name, [TOPIC])
        command = [sys.executable, "-m", "bench.hand_over_kill", "--application", old_name, new_name, str(folder)]
        application = KilledProcess(
            [*command, "--seed", str(seed)], "started", folder / "application.log", HAND_OVER_MESSAGES=str(messages)
        )
        targets["application"] = application
        stack.callback(application.kill)
        for _ in range(kills):
            name = chance.choice(sorted(targets))
            threading.Event().wait(chance.uniform(0, 1.5))
            targets[name].kill()
            targets[name].start()
            if name != "application":
                targets[name].wait_until_ready()
            result.kills[name] += 1
        _wait_until_moved(folder)
        application.end()
        with started(old_name, folder / "client") as old, started(new_name, folder / "client") as client:
            result.moved = old.hand_over.counts().moved
            _check(folder / "journal", due, [old, client], result)
    return result


def _wait_until_moved(folder: Path) -> None:
    """Wait until nothing is pending in the old broker, and nothing in transit."""
    end_s, text = time.monotonic() + _WAIT_S, ""
    since_ms = now_ms()
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            path = folder / "counts"
            text = path.read_text()
            counts = json.loads(text)
            is_new = path.stat().st_mtime * 1_000 > since_ms
            if is_new and not counts["pending"] and not counts["transit"]:
                return
        threading.Event().wait(0.2)
    raise AssertionError(f"the hand-over has not ended after {_WAIT_S} s: {text}")


def _check(journal: Path, due: dict[str, int], brokers: list[Broker], result: KillCounts) -> None:
    uncertain: set[str] = set()
    cancelled: set[str] = set()
    earliest = {msg_id: {due_ms} for msg_id, due_ms in due.items()}
    expected = set(due)
    open_actions: dict[str, dict[str, Any]] = {}
    for line in journal.read_text().splitlines() if journal.exists() else []:
        entry = json.loads(line)
        msg_id, action = entry["id"], entry["action"]
        before = open_actions.pop(msg_id, None)
        if before is not None and action in ("cancel", "reschedule") and before != entry:
            uncertain.add(msg_id)  # the application was killed before the answer
        if action in ("cancel", "reschedule", "send"):
            open_actions[msg_id] = entry
        if action in ("reschedule", "send", "sent"):
            earliest.setdefault(msg_id, set()).add(entry["due"])
        if action == "sent":
            expected.add(msg_id)
            result.sent += 1
        elif action == "CANCELLED" and entry["kind"] == "cancel":
            cancelled.add(msg_id)
        elif action == "RESCHEDULED":
            result.rescheduled += 1
            earliest[msg_id] = {entry["due"]}
    uncertain.update(open_actions)
    result.cancelled, result.uncertain = len(cancelled), len(uncertain)
    end_s = time.monotonic() + _CHECK_S
    while True:
        delivered = [each for broker in brokers for each in delivered_by(broker)]
        pending = [each.msg_id for broker in brokers for each in pending_of(broker)]
        counts = Counter([msg_id for msg_id, _ in delivered] + pending)
        result.lost = sorted(expected - counts.keys() - cancelled - uncertain)
        result.doubled = sorted(msg_id for msg_id, count in counts.items() if count > 1)
        # A message that is due between the two reads is in both or in none. RocketMQ delivers a second after its time.
        if not (result.lost or result.doubled) or time.monotonic() > end_s:
            break
        threading.Event().wait(1)
    result.not_cancelled = sorted(cancelled & counts.keys())
    result.early = sorted(msg_id for msg_id, at_ms in delivered if at_ms < min(earliest.get(msg_id, {0})))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--messages", type=int, default=2_000)
    parser.add_argument("--old", choices=("folder", "server"), default="folder")
    parser.add_argument("--rocketmq", action="store_true")
    parser.add_argument("--seed", type=int, default=20_261_129)
    parser.add_argument("--application", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.application:
        old_name, new_name, folder = arguments.application
        run_application(old_name, new_name, Path(folder), arguments.seed + os.getpid())
        return
    with tempfile.TemporaryDirectory(prefix="hand-over-", dir=os.environ.get("BENCH_DIR")) as folder:
        start_s = time.monotonic()
        result = kill_rounds(
            Path(folder),
            kills=arguments.kills,
            messages=arguments.messages,
            seed=arguments.seed,
            old_kind=arguments.old,
            is_rocketmq=arguments.rocketmq,
        )
        seconds = time.monotonic() - start_s
    print(f"kills {dict(result.kills)} in {seconds:.0f} s; {result.messages} messages, {result.moved} moved, ", end="")
    print(f"{result.cancelled} cancelled, {result.rescheduled} rescheduled, {result.sent} sent; ", end="")
    print(f"{result.uncertain} with a lost answer")
    print(f"lost {len(result.lost)}, doubled {len(result.doubled)}, early {len(result.early)}, ", end="")
    print(f"delivered though cancelled {len(result.not_cancelled)}")
    if not result.moved:
        sys.exit("no message was moved, so this run shows nothing: see application.log for the reason")
    if result.faults:
        sys.exit(f"lost {result.lost}\ndoubled {result.doubled}\nearly {result.early}\n{result.not_cancelled}")


if __name__ == "__main__":
    main()
