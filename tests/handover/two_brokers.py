"""An old and a new broker on a virtual clock, and a mover between them that can be killed or lose an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mqtemplate.brokers import EmbeddedBroker
from mqtemplate.clock import VirtualClock
from mqtemplate.engine.settings import EmbeddedSettings
from mqtemplate.errors import SendTimeoutError, UnsupportedError
from mqtemplate.futures import AwaitableFuture
from mqtemplate.handover.limits import MoverSettings
from mqtemplate.handover.mover import Mover
from mqtemplate.message import Message, MessageExt, MessageQueue
from mqtemplate.pending import PendingQuery, ScheduleChangeStatus
from mqtemplate.results import SendResult

SMALL = EmbeddedSettings(mapped_file_size_commit_log=1 << 20, mapped_file_size_timer_log=1 << 16)
TOPIC = "orders"


class Killed(BaseException):
    """Ends the process of the mover and the old broker. No code catches it."""


@dataclass
class Faults:
    """Interrupts one of the next calls between the mover and the two brokers.

    Attributes:
        calls: Names of the calls so far.
        at: Number of the call that is interrupted; None for none.
        is_after: True: the call is done, and its answer is lost.
        kills: True: the process of the mover ends. False: only a send fails.
    """

    calls: list[str]
    at: int | None = None
    is_after: bool = False
    kills: bool = True

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        self.calls.append(name)
        is_hit = self.at is not None and len(self.calls) > self.at and (self.kills or name == "send_async")
        if is_hit:
            self.at = None
        if not is_hit:
            return function(*arguments)
        if self.is_after:
            function(*arguments)
        if self.kills:
            raise Killed
        future: AwaitableFuture[SendResult] = AwaitableFuture()
        future.set_exception(SendTimeoutError("no answer"))
        return future


class Interrupted:
    """A part of a broker whose calls can be interrupted."""

    def __init__(self, part: object, faults: Faults, names: Sequence[str]) -> None:
        self._part, self._faults, self._names = part, faults, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if name not in self._names:
            return found
        return lambda *arguments, **named: self._faults.call(name, partial(found, **named), *arguments)


class InterruptedBroker:
    """A broker for a mover whose calls can be interrupted."""

    def __init__(self, broker: EmbeddedBroker, faults: Faults, *, can_reserve: bool = True) -> None:
        self._broker = broker
        self._can_reserve = can_reserve
        self.sends = Interrupted(broker.sends, faults, ["send_async"])
        self.faults = faults

    @property
    def hand_over(self) -> Any:
        if not self._can_reserve:
            raise UnsupportedError("a broker of RocketMQ cannot reserve messages")
        return Interrupted(
            self._broker.hand_over, self.faults, ["lock", "reserve", "settle", "note_brokers", "take_back"]
        )

    @property
    def delayed(self) -> Any:
        return Interrupted(self._broker.delayed, self.faults, ["cancel"])

    def find_records(self, topics: Sequence[str], msg_id: str) -> Any:
        return self.faults.call("find_records", self._broker.find_records, topics, msg_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)


def kill(broker: EmbeddedBroker) -> None:
    """Stop a broker like a killed process: its files stay as they are at this moment."""
    broker.engine.lifecycle.is_open = False
    broker.engine.delayed.timers.close()
    broker.store.release()


class TwoBrokers:
    """The old broker, the new one, and the mover, on one virtual clock.

    Attributes:
        due: Id of each message that must be delivered -> when it is due.
        cancelled: Ids of the messages that were cancelled.
    """

    def __init__(self, settings: MoverSettings | None = None) -> None:
        self.clock = VirtualClock()
        self.faults = Faults([])
        self.new_can_reserve = True
        self.settings = settings or MoverSettings()
        self._folder = TemporaryDirectory(prefix="mqtemplate-hand-over-")
        self.old, self.new = self._open("old"), self._open("new")
        self.old.hand_over.begin("new:9876")
        self.mover = self._mover()
        self.due: dict[str, int] = {}
        self.cancelled: set[str] = set()

    def _open(self, name: str) -> EmbeddedBroker:
        broker = EmbeddedBroker(Path(self._folder.name) / name, SMALL, self.clock)
        broker.start()
        return broker

    def _mover(self) -> Mover:
        old = InterruptedBroker(self.old, self.faults)
        new = InterruptedBroker(self.new, self.faults, can_reserve=self.new_can_reserve)
        return Mover(old, new, self.settings)  # type: ignore[arg-type]

    def restart(self, settings: MoverSettings) -> None:
        """Start the mover again with other settings."""
        self.mover.close()
        self.settings = settings
        self.mover = self._mover()

    def close(self) -> None:
        self.mover.close()
        self.old.close()
        self.new.close()
        self._folder.cleanup()

    # --- kills ---------------------------------------------------------------------------------

    def kill_old(self) -> None:
        """Kill the process of the mover and the old broker, and start it again."""
        self.faults.at = None
        kill(self.old)
        self.old = self._open("old")
        self.mover = self._mover()

    def kill_new(self) -> None:
        """Kill the new broker, and start it again."""
        kill(self.new)
        self.new = self._open("new")
        old = InterruptedBroker(self.old, self.faults)
        self.mover._new = InterruptedBroker(self.new, self.faults)  # type: ignore[assignment]
        self.mover._old = old.hand_over

    # --- messages ------------------------------------------------------------------------------

    def send(self, number: int, **delay: int) -> str:
        """Send a message to the old broker, and return its id."""
        properties = {name: str(value) for name, value in delay.items()}
        message = Message(TOPIC, b"%d" % number, properties | {"UNIQ_KEY": f"M{number}", "KEYS": f"k{number}"})
        result = self.old.sends.send(message)
        [pending] = self.old.delayed.pending(PendingQuery(key=result.msg_id)).messages
        self.due[result.msg_id] = pending.deliver_ms
        return result.msg_id

    def cancel(self, msg_id: str) -> ScheduleChangeStatus:
        """Cancel a message in the broker that has it."""
        status = self.old.delayed.cancel(key=msg_id, topic=TOPIC).status
        if status is ScheduleChangeStatus.MOVED:
            self._wait_until_settled(msg_id)
            status = self.new.delayed.cancel(key=msg_id, topic=TOPIC).status
        if status is ScheduleChangeStatus.CANCELLED:
            self.due.pop(msg_id, None)
            self.cancelled.add(msg_id)
        return status

    def cancel_in_new(self, msg_id: str) -> None:
        """Cancel a message in the new broker."""
        assert self.new.delayed.cancel(key=msg_id, topic=TOPIC).status is ScheduleChangeStatus.CANCELLED
        del self.due[msg_id]
        self.cancelled.add(msg_id)

    def reschedule(self, msg_id: str, deliver_ms: int) -> ScheduleChangeStatus:
        """Change the due time of a message in the broker that has it."""
        status = self.old.delayed.reschedule(None, deliver_ms, key=msg_id, topic=TOPIC).status
        if status is ScheduleChangeStatus.MOVED:
            self._wait_until_settled(msg_id)
            status = self.new.delayed.reschedule(None, deliver_ms, key=msg_id, topic=TOPIC).status
        if status is ScheduleChangeStatus.RESCHEDULED:
            self.due[msg_id] = min(deliver_ms, self.clock.now_ms()) if deliver_ms < self.clock.now_ms() else deliver_ms
        return status

    def _wait_until_settled(self, msg_id: str) -> None:
        for _ in range(40):
            if not self.old.hand_over.is_reserved(msg_id):
                return
            self.advance(1_000)
        raise AssertionError(f"{msg_id} stays in transit")

    # --- time ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Let the mover do one step; if a kill interrupts it, start the process again."""
        try:
            self.mover.step()
        except Killed:
            self.kill_old()

    def advance(self, span_ms: int) -> None:
        """Let time pass, and do the work that is due."""
        end_ms = self.clock.now_ms() + span_ms
        while True:
            times = [self._step_all(broker) for broker in (self.old, self.new)]
            self.step()
            due_ms = min([each for each in times if each is not None], default=end_ms)
            if self.clock.now_ms() >= end_ms:
                return
            next_ms = max(min(due_ms, self.mover._next_ms), self.clock.now_ms() + 1)
            self.clock.set_ms(min(next_ms, end_ms))

    def _step_all(self, broker: EmbeddedBroker) -> int | None:
        times = [service.step() for service in broker.engine.delayed.services()]
        return min([each for each in times if each is not None], default=None)

    # --- what arrived --------------------------------------------------------------------------

    def arrived(self) -> list[MessageExt]:
        """Return the messages of the topic, of both brokers."""
        return [
            message
            for broker in (self.old, self.new)
            for queue in broker.queues(TOPIC)
            for message in all_of(broker, queue)
        ]

    def check(self) -> None:
        """Check that each message has arrived once and not early, and no cancelled one."""
        arrived = self.arrived()
        counts = Counter(message.msg_id for message in arrived)
        assert {msg_id: count for msg_id, count in counts.items() if count > 1} == {}
        assert sorted(self.due.keys() - counts.keys()) == []
        assert sorted(self.cancelled & counts.keys()) == []
        early = [each.msg_id for each in arrived if each.store_timestamp < self.due[each.msg_id]]
        assert early == []


def all_of(broker: EmbeddedBroker, queue: MessageQueue) -> list[MessageExt]:
    messages: list[MessageExt] = []
    while found := broker.reader.pull(queue, len(messages), 1_000).messages:
        messages += found
    return messages
