"""The application of `bench.hand_over_kill`, in a process of its own that is killed at any moment.

It has the setting of a hand-over: a `HandOverBroker` over the old and the new broker, with its mover. It has two
listeners, one CONCURRENTLY and one ORDERLY. Meanwhile it sends, cancels and reschedules. It writes each action to a
journal, before and after it, and each message that a listener gets to another one: a written line survives a SIGKILL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from bench.killed_server import now_ms
from mqtemplate import ConsumeMode, MessageExt, MQApplication, message_listener
from mqtemplate.broker import Broker
from mqtemplate.broker.hand_over import HandOverError, HandOverPhase
from mqtemplate.brokers import EmbeddedBroker, EmbeddedSettings, RemoteBroker, RemoteSettings
from mqtemplate.errors import MQTemplateError
from mqtemplate.handover import HandOverBroker, HandOverOptions, MoverSettings
from mqtemplate.message import Message, Property
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.topics import SCHEDULE_TOPIC, TIMER_TOPIC

TOPIC, STEPS = "orders", "steps"
GROUP, STEPS_GROUP = "billing", "shipping"
QUEUES = 4
KEYS_OF_A_PROCESS = 4
_MOVER = MoverSettings(settle_ms=2_500, lease_ms=8_000, lead_ms=3_000)
_SMALL = EmbeddedSettings(mapped_file_size_commit_log=4 << 20)
_START_S = 240
_ACTION_S = 0.03
_SAFE_MS = 10_000
"""With RocketMQ: a message that is due sooner is not cancelled."""


@dataclass(frozen=True)
class Run:
    """What each process of a run must know.

    Attributes:
        pending: Number of messages ``M0``, ``M1``, … that were pending in the old broker at the start.
        processes: Number of processes of the application.
    """

    old: str
    new: str
    pending: int
    processes: int
    seed: int
    is_rocketmq: bool

    def write(self, folder: Path) -> None:
        """Store it in the folder of the run."""
        (folder / "run.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the run of a folder."""
        return cls(**json.loads((folder / "run.json").read_text()))


class Journal:
    """A file of JSON lines that several processes append to."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, **values: object) -> None:
        os.write(self._file, json.dumps(values).encode() + b"\n")


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a journal; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def opened(name: str, folder: Path) -> Broker:
    """Return a broker by its name: ``embedded:DIR`` or ``host:port``."""
    if name.startswith("embedded:"):
        return EmbeddedBroker(name.removeprefix("embedded:"), _SMALL)
    return RemoteBroker(RemoteSettings(name_servers=(name,), offset_path=folder, retry_times_when_send_failed=0))


@contextlib.contextmanager
def started(name: str, folder: Path) -> Iterator[Broker]:
    """Start a broker; repeat that while it is away."""
    end_s = time.monotonic() + _START_S
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


def records_of(broker: Broker, msg_id: str, topic: str = TOPIC) -> list[MessageExt]:
    """Return all records of a message, delivered or delayed, without requests to recall it."""
    found = broker.find_records((TIMER_TOPIC, SCHEDULE_TOPIC, topic), msg_id).messages
    return [each for each in found if Property.TIMER_DEL_UNIQKEY not in each.properties]


# --- listeners ------------------------------------------------------------------------------------


def listeners(folder: Path) -> tuple[object, object]:
    """Return the two listeners. They write each message before they have handled it."""
    journal = Journal(folder / "handled")

    @message_listener(topic=TOPIC, consumer_group=GROUP)
    def bill(message: MessageExt) -> None:
        journal.write(id=message.msg_id, at=now_ms(), broker=message.broker_name)

    @message_listener(topic=STEPS, consumer_group=STEPS_GROUP, consume_mode=ConsumeMode.ORDERLY)
    def ship(message: MessageExt) -> None:
        journal.write(id=message.msg_id, at=now_ms(), broker=message.broker_name, step=message.body.decode())

    return bill, ship


# --- actions --------------------------------------------------------------------------------------


class Actions:
    """Random actions of one process.

    Processes never act on the same message: each has the numbers that it is the remainder of.

    Args:
        number: Number of the process, 0 or more.
    """

    def __init__(self, broker: HandOverBroker, run: Run, folder: Path, number: int) -> None:
        self._broker, self._run, self._folder, self._number = broker, run, folder, number
        self._chance = random.Random(run.seed + os.getpid())
        self._journal = Journal(folder / "journal")
        self._steps = self._steps_before(folder)

    def _steps_before(self, folder: Path) -> dict[str, int]:
        steps = {f"{self._number}.{key}": 0 for key in range(KEYS_OF_A_PROCESS)}
        for line in lines_of(folder / "journal"):
            if line["action"] == "step" and line["key"] in steps:
                steps[line["key"]] = max(steps[line["key"]], line["step"])
        return steps

    def act(self, ended: threading.Event) -> None:
        """Do one action. If an answer is missing, try it again until the process is to end."""
        kind = self._chance.choice(("cancel", "reschedule", "send", "step", "none"))
        if kind == "step":
            self._send_step()
        elif kind != "none":
            action = self._action(kind)
            while not ended.is_set():
                self._journal.write(**action)
                try:
                    result = self._send(action) if kind == "send" else self._change(action)
                except MQTemplateError as error:  # a broker is away
                    print(f"{action}: {error!r:.300}", file=sys.stderr, flush=True)
                    ended.wait(0.2)
                else:
                    self._journal.write(**action, result=result)
                    return

    def _action(self, kind: str) -> dict[str, Any]:
        chance, run = self._chance, self._run
        number = chance.randrange(run.pending // run.processes) * run.processes + self._number
        msg_id = f"S{chance.getrandbits(60):x}" if kind == "send" else f"M{number}"
        return {"action": kind, "id": msg_id, "due": now_ms() + chance.randrange(20_000, 60_000)}

    def _send_step(self) -> None:
        """Send the next message of a key. One whose answer is lost is not sent again: it may arrive."""
        key = self._chance.choice(sorted(self._steps))
        self._steps[key] += 1
        line = {"action": "step", "key": key, "step": self._steps[key]}
        self._journal.write(**line)
        try:
            send_step(self._broker, key, self._steps[key])
        except MQTemplateError as error:
            print(f"{line}: {error!r:.300}", file=sys.stderr, flush=True)
        else:
            self._journal.write(**line, result="SENT")

    def _send(self, action: dict[str, Any]) -> str:
        # A try before this one, whose answer was lost, may have gone to the other broker: the hand-over was aborted.
        if not any(records_of(broker, action["id"]) for broker in (self._broker.old, self._broker.new)):
            properties = {Property.UNIQ_KEY: action["id"], Property.TIMER_DELIVER_MS: str(action["due"])}
            self._broker.sends.send(Message(TOPIC, b"sent", properties), self._broker.queues(TOPIC)[0])
        return "SENT"

    def _change(self, action: dict[str, Any]) -> str:
        """Cancel or reschedule a message, and return the status; ``NOT_TRIED`` for what RocketMQ cannot do safely."""
        delayed = self._broker.delayed
        if self._run.is_rocketmq:
            status = self._changed_by(self._broker.old, action)
            if status is not ScheduleChangeStatus.MOVED:
                return status.name
            if not self._may_change(action):
                return "NOT_TRIED"
        if action["action"] == "cancel":
            return delayed.cancel(key=action["id"], topic=TOPIC).status.name
        return delayed.reschedule(deliver_ms=action["due"], key=action["id"], topic=TOPIC).status.name

    def _changed_by(self, broker: Broker, action: dict[str, Any]) -> ScheduleChangeStatus:
        if action["action"] == "cancel":
            return broker.delayed.cancel(key=action["id"], topic=TOPIC).status
        return broker.delayed.reschedule(None, action["due"], key=action["id"], topic=TOPIC).status

    def _may_change(self, action: dict[str, Any]) -> bool:
        if action["action"] != "cancel" or self._broker.old.hand_over.is_reserved(action["id"], TOPIC):
            return False
        found = self._broker.new.delayed.pending(PendingQuery(key=action["id"], topic=TOPIC)).messages
        return bool(found) and found[0].deliver_ms > now_ms() + _SAFE_MS


def send_step(broker: Broker, key: str, step: int) -> None:
    """Send one message of a key, to the queue of that key."""
    queue = sorted(broker.queues(STEPS))[sum(key.encode()) % QUEUES]
    properties = {Property.UNIQ_KEY: f"{key}-{step}", Property.SHARDING_KEY: key}
    broker.sends.send(Message(STEPS, f"{key} {step}".encode(), properties), queue)


# --- the process ----------------------------------------------------------------------------------


def run_application(folder: Path, number: int) -> None:
    """Run the application until standard input ends."""
    run, ended = Run.read(folder), threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    with _application(run, folder, number) as broker:
        print("started", flush=True)
        actions = Actions(broker, run, folder, number)
        while not ended.wait(_ACTION_S):
            if not (folder / "quiet").exists():
                actions.act(ended)
            with contextlib.suppress(MQTemplateError, OSError):
                _obey(broker, folder, run.new)
                _report(broker, folder / f"counts-{number}")


@contextlib.contextmanager
def _application(run: Run, folder: Path, number: int) -> Iterator[HandOverBroker]:
    """Start the application; repeat that while a broker is away."""
    end_s = time.monotonic() + _START_S
    while True:
        old, new = opened(run.old, folder / f"old-client-{number}"), opened(run.new, folder / f"new-client-{number}")
        broker = HandOverBroker(old, new, HandOverOptions(target=run.new, mover=_MOVER))
        settings = {"rocketmq.name-server": "embedded:memory"}  # the broker is given
        app = MQApplication(
            *listeners(folder), settings=settings, environment={}, starters=[], overrides={Broker: broker}
        )
        try:
            app.start()
            break
        except MQTemplateError as error:
            print(f"{error!r:.300}", file=sys.stderr, flush=True)
            broker.close()
            if time.monotonic() > end_s:
                raise
            threading.Event().wait(0.2)
    try:
        yield broker
    finally:
        app.stop()


def _obey(broker: HandOverBroker, folder: Path, target: str) -> None:
    """Carry out the phase that the file ``phase`` names."""
    path = folder / "phase"
    state = broker.old.hand_over.state()
    if state is None or not path.exists():
        return
    wanted = path.read_text()
    if wanted == "ABORTING" and state.phase is HandOverPhase.RUNNING:
        broker.old.hand_over.change(HandOverPhase.ABORTING)
    elif wanted == "RUNNING" and state.phase is not HandOverPhase.RUNNING:
        with contextlib.suppress(HandOverError):
            broker.old.hand_over.begin(target)
            broker.old.hand_over.change(HandOverPhase.RUNNING)


def _report(broker: HandOverBroker, path: Path) -> None:
    state, counts = broker.old.hand_over.state(), broker.old.hand_over.counts()
    assert state is not None
    values = {
        "phase": state.phase.name,
        "pending": counts.pending,
        "transit": counts.in_transit,
        "moved": counts.moved,
        "is_mover": broker.mover is not None and broker.mover.progress().is_mover,
        "error": state.last_error,
        "at": now_ms(),
    }
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(values))
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int)
    arguments = parser.parse_args()
    run_application(arguments.folder, arguments.number)


if __name__ == "__main__":
    main()
