"""Hand-over of the pending messages of an old broker to a new one: its state, and the part of the old broker in it.

`OldBroker` is that part: `mqtemplate.brokers.embedded.broker.EmbeddedBroker.hand_over` and, for a server of this
library, `mqtemplate.brokers.remote.broker.RemoteBroker.hand_over` return it. All of it is durable in the old broker.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Protocol, Self

from mqtemplate.errors import BrokerError
from mqtemplate.message import Message, MessageExt


class HandOverPhase(Enum):
    """Phase of a hand-over.

    ``RUNNING``: messages move to the new broker. ``PAUSED``: no more messages are reserved.
    ``ABORTING``: the application sends to the old broker again, and messages move back. ``ABORTED``: all are back.
    ``CONFIRMED``: the old broker is empty, and refuses messages.
    """

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    ABORTING = "ABORTING"
    ABORTED = "ABORTED"
    CONFIRMED = "CONFIRMED"


NEXT_PHASES: Mapping[HandOverPhase, frozenset[HandOverPhase]] = {
    HandOverPhase.RUNNING: frozenset(set(HandOverPhase) - {HandOverPhase.RUNNING}),  # ABORTED: it was an abort itself
    HandOverPhase.PAUSED: frozenset(set(HandOverPhase) - {HandOverPhase.PAUSED}),
    HandOverPhase.ABORTING: frozenset({HandOverPhase.RUNNING, HandOverPhase.ABORTED}),
    HandOverPhase.ABORTED: frozenset({HandOverPhase.RUNNING}),
    HandOverPhase.CONFIRMED: frozenset(),
}
"""The phases that may follow a phase. A confirmed hand-over is over."""

SENDS_TO_OLD = frozenset({HandOverPhase.ABORTING, HandOverPhase.ABORTED})
"""Phases in which the application sends to the old broker."""

_MOST_SWITCHES = 15


class HandOverError(BrokerError):
    """A hand-over cannot do what was requested: its phase, its lock, or what the old broker still has forbids it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverState:
    """State of a hand-over, stored in the old broker.

    Attributes:
        hand_over_id: Random text that names this hand-over.
        target: The new broker, as the settings name it.
        started_ms: Time of the start (epoch ms).
        changed_ms: Time of the last change (epoch ms).
        topics: Topics of the old broker at the start.
        groups: Consumer groups of the old broker at the start.
        brokers: Brokers of the new cluster to which a message was sent.
        returned: Messages that are pending here again: the new broker refused them, or they have come back.
        first_offset: Queue offset of the first message of this hand-over in the transit topic.
        taken_back: Messages that were in transit back, from a new broker that cannot reserve them.
        back_offset: Queue offset after the last one of these.
        last_error: Why the mover made no progress the last time; None if it does.
        owner: The last owner of the lock; None if there was none.
        switches_ms: When the sends of the application changed to the new broker, back to the old one, and so on (epoch
            ms). The last ones are kept, the first of them a change to the new broker.
    """

    hand_over_id: str
    target: str
    phase: HandOverPhase
    started_ms: int
    changed_ms: int
    topics: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    brokers: tuple[str, ...] = ()
    returned: int = 0
    first_offset: int = 0
    taken_back: int = 0
    back_offset: int = 0
    last_error: str | None = None
    owner: str | None = None
    switches_ms: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return the state as a JSON object."""
        return json.dumps(asdict(self) | {"phase": self.phase.value})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the state of `to_json`.

        Raises:
            ValueError: *text* is not such a state.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            names = {"phase": HandOverPhase(values["phase"])}
            lists = {name: tuple(map(str, values.get(name, ()))) for name in ("topics", "groups", "brokers")}
            times = {"switches_ms": tuple(map(int, values.get("switches_ms", ())))}
            return cls(**(values | names | lists | times))
        except (TypeError, KeyError, AttributeError) as exc:
            raise ValueError(f"not the state of a hand-over: {exc}") from exc

    @property
    def sends_to_old(self) -> bool:
        """True if the application sends to the old broker: the hand-over is aborted."""
        return self.phase in SENDS_TO_OLD

    @property
    def switches(self) -> tuple[int, ...]:
        """`switches_ms`; of the state of an older version, which does not have them, the times that are known."""
        return self.switches_ms or (self.started_ms, *((self.changed_ms,) if self.sends_to_old else ()))

    def switched(self, phase: HandOverPhase, now_ms: int) -> tuple[int, ...]:
        """Return `switches` with the time of a change to *phase*, if the sends change to the other broker then."""
        times = self.switches
        if (phase in SENDS_TO_OLD) is not self.sends_to_old:
            times = (*times, max(now_ms, times[-1] + 1))
        return times if len(times) <= _MOST_SWITCHES else times[2:]

    def check_next(self, phase: HandOverPhase) -> None:
        """Check that *phase* may follow the phase now.

        Raises:
            HandOverError: It may not.
        """
        if phase is not self.phase and phase not in NEXT_PHASES[self.phase]:
            allowed = ", ".join(sorted(each.value for each in NEXT_PHASES[self.phase])) or "none"
            raise HandOverError(
                f"the hand-over to {self.target} is {self.phase.value}, which {phase.value} cannot follow; allowed: "
                f"{allowed}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverCounts:
    """Numbers of messages of a hand-over.

    Attributes:
        pending: Pending messages of the old broker, those that cannot move included.
        reserved: Messages that were ever reserved.
        in_transit: Reserved messages that are not settled: they are in neither broker's delayed messages for certain.
        moved: Messages that are in the new broker.
        returned: Messages that the new broker refused, or that have come back from it.
    """

    pending: int
    reserved: int
    in_transit: int
    moved: int
    returned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOverProgress:
    """Progress of a hand-over, as a mover sees it.

    Attributes:
        is_mover: True if this process moves the messages; another one may.
        is_idle: True if the last step of this mover found nothing in transit, and nothing that can move now.
        rate: Messages that this process moved in a second, over the last ten seconds.
        error: Why this process made no progress at its last attempt; None if it did.
    """

    state: HandOverState | None
    counts: HandOverCounts | None
    is_mover: bool
    is_idle: bool
    rate: float
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayLimits:
    """The delays that a broker can keep.

    Attributes:
        max_delay_ms: The longest delay of a timer; 0 without timers.
        precision_ms: A timer may be late by this much. None of the brokers delivers a timer early.
        levels_ms: Delays of the levels, level 1 first.
    """

    max_delay_ms: int
    precision_ms: int = 1
    levels_ms: tuple[int, ...] = ()


class TransitEnd(Enum):
    """End of the transit of a message: it is in the new broker, or pending in the old one again.

    ``RECALLED`` is no end: the new broker is requested to recall a message that comes back.
    """

    MOVED = "moved"
    RETURNED = "returned"
    RECALLED = "recalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransitMessage:
    """A reserved message: no release and no cancel reaches it in the old broker.

    Attributes:
        offset: Its queue offset in the transit topic.
        msg_id: The message id, as the producer got it.
        deliver_ms: When it is due.
        queue_id: Queue of its topic in the old broker.
        delay_level: Its delay level in the old broker; 0 for a timer.
        move_id: Text that names this transit. The message in the new broker has it as the property
            ``Property.HAND_OVER``; so a lookup there tells whether this very transit was sent.
        message: The message as it is sent to the new broker, without its delay: real topic, body, keys, tag,
            properties, and message id. A retry has its number of retries in ``RECONSUME_TIME``.
        is_back: True: it comes back from a new broker that cannot reserve it, and that still has it.
        is_recalled: With *is_back*: the mover may have recalled it there.
        recalled_ms: When it was due in the new broker, if it was there before and was recalled; else None.
    """

    offset: int
    msg_id: str
    deliver_ms: int
    queue_id: int
    delay_level: int
    move_id: str
    message: Message
    is_back: bool = False
    is_recalled: bool = False
    recalled_ms: int | None = None

    @property
    def topic(self) -> str:
        """The real topic."""
        return self.message.topic

    def to_json(self) -> str:
        """Return it as a JSON object."""
        values = {name: getattr(self, name) for name in _TRANSIT_FIELDS}
        body = base64.b64encode(self.message.body).decode()
        message = {"topic": self.topic, "body": body, "properties": self.message.properties, "flag": self.message.flag}
        return json.dumps(values | {"message": message})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the message of `to_json`.

        Raises:
            ValueError: *text* is not such a message.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            message = values.pop("message")
            body = base64.b64decode(message["body"])
            return cls(**values, message=Message(message["topic"], body, dict(message["properties"]), message["flag"]))
        except (TypeError, KeyError, AttributeError) as exc:
            raise ValueError(f"not a message in transit: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedMessage:
    """End of the transit of one message.

    Attributes:
        msg_id: The message id: the same in both brokers.
        topic: The real topic.
        deliver_ms: When it is due.
        offset: Queue offset in the transit topic.
        end: Where it is now.
        broker_name: Broker of the new cluster that has it; empty if that is not known, and for a returned message.
        handle: Handle in the new broker, for `cancel` and `reschedule` there; None if it was due at once, or if only
            its id is known: it was found after a kill. Its id names it in the new broker in any case.
        reason: Why it was returned; None for a moved message.
        may_move_again: True for a returned message that may be reserved again: its topic was refused, not the message.
    """

    msg_id: str
    topic: str
    deliver_ms: int
    offset: int
    end: TransitEnd = TransitEnd.MOVED
    broker_name: str = ""
    handle: str | None = None
    reason: str | None = None
    may_move_again: bool = False

    def to_json(self) -> str:
        """Return it as a JSON object."""
        values = {name: getattr(self, name) for name in _MOVED_FIELDS}  # `asdict` takes longer than the JSON
        return json.dumps(values | {"end": self.end.value})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the message of `to_json`.

        Raises:
            ValueError: *text* is not such a message.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            return cls(**(values | {"end": TransitEnd(values["end"])}))
        except (TypeError, KeyError, AttributeError) as exc:
            raise ValueError(f"not a moved message: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveFilter:
    """The pending messages that may be reserved. Messages without an id never are.

    Attributes:
        after_ms: Due at this time (epoch ms) or later.
        before_ms: Due before this time (epoch ms).
        without_topics: Topics whose messages stay, since the new broker refuses them now.
        topics: Only messages for these topics; None for all.
        namespace: Only messages for topics of this namespace of remote clients; a remote broker sets its own.
        with_retries: Retries too: for an application that is stopped. Else the listeners consume them from this broker.
    """

    after_ms: int
    before_ms: int
    without_topics: frozenset[str] = frozenset()
    topics: frozenset[str] | None = None
    namespace: str | None = None
    with_retries: bool = False

    def to_json(self) -> str:
        """Return it as a JSON object."""
        lists = {"without_topics": sorted(self.without_topics)}
        return json.dumps(asdict(self) | lists | {"topics": None if self.topics is None else sorted(self.topics)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the filter of `to_json`.

        Raises:
            ValueError: *text* is not such a filter.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            topics = values.get("topics")
            sets = {"topics": None if topics is None else frozenset(topics)}
            return cls(**(values | sets | {"without_topics": frozenset(values.get("without_topics", ()))}))
        except (TypeError, AttributeError) as exc:
            raise ValueError(f"not a filter of a reservation: {exc}") from exc


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """The stored records of one message.

    Attributes:
        brokers: Names of all brokers that were asked, and have answered.
        messages: The records, delayed ones with the system topic that they are stored in.
    """

    brokers: frozenset[str]
    messages: Sequence[MessageExt]


_MOVED_FIELDS = (
    "msg_id",
    "topic",
    "deliver_ms",
    "offset",
    "broker_name",
    "handle",
    "reason",
    "may_move_again",
)
_TRANSIT_FIELDS = (
    "offset",
    "msg_id",
    "deliver_ms",
    "queue_id",
    "delay_level",
    "move_id",
    "is_back",
    "is_recalled",
    "recalled_ms",
)


class OldBroker(Protocol):
    """The part of an old broker in a hand-over: its state, the lock of the mover, and the transit of messages.

    A message is pending, in transit, or settled. `reserve` and `settle` are one append to the commit log each, so a
    kill leaves a message in one of these states, and the state is on disk when the method returns.
    """

    # --- state ---------------------------------------------------------------------------------

    def state(self) -> HandOverState | None:
        """Return the state; None if no hand-over was started."""

    def begin(self, target: str, topics: Collection[str] = (), groups: Collection[str] = ()) -> HandOverState:
        """Start a hand-over, or return the state of the one to the same target.

        Raises:
            HandOverError: There is one to another target, which is not aborted.
        """

    def change(self, phase: HandOverPhase) -> HandOverState:
        """Change the phase, and return the state. ``CONFIRMED`` seals the broker: it refuses messages from then on.

        Raises:
            HandOverError: There is no hand-over, the phase may not follow, or for ``CONFIRMED`` the broker is not empty
                (see `remaining`).
        """

    def on_change(self, wake: Callable[[], None]) -> bool:
        """Call *wake* each time the phase has changed. Return False if this broker cannot: its state must be read."""

    def note_error(self, owner: str, error: str | None) -> None:
        """Store why the mover makes no progress, for operators; None if it does. Only the owner of the lock may."""

    def remaining(self) -> list[str]:
        """Return what keeps the hand-over from being confirmed, a sentence each; nothing if the broker is empty.

        Pending messages, messages in transit, unread messages of groups, open transactions.
        """

    def counts(self) -> HandOverCounts:
        """Return the numbers of messages."""

    def note_brokers(self, owner: str, names: Collection[str]) -> None:
        """Store names of brokers of the new cluster, before the first message is sent to one of them."""

    # --- the lock of the mover -----------------------------------------------------------------

    def lock(self, owner: str, lease_ms: int) -> bool:
        """Take or renew the lock for *owner*. Return False if another one has it, for at most its lease."""

    def unlock(self, owner: str) -> None:
        """Release the lock, if *owner* has it."""

    # --- messages ------------------------------------------------------------------------------

    def reserve(self, owner: str, max_count: int, chosen: ReserveFilter) -> int:
        """Reserve pending messages in order of due time, and return their number.

        Raises:
            HandOverError: *owner* does not have the lock, or the phase is not ``RUNNING``.
        """

    def transit(self, max_count: int = 1_000) -> list[TransitMessage]:
        """Return the first reserved messages that are not settled: at most this number, and fewer if they are large."""

    def settle(self, owner: str, ended: Sequence[MovedMessage]) -> None:
        """Store how the transit of messages ended. A returned one is pending again, or in its topic if it is due.

        Raises:
            HandOverError: *owner* does not have the lock.
        """

    def take_back(self, owner: str, messages: Sequence[Message]) -> None:
        """Store messages that come back from the new broker, in transit: it still has them.

        Args:
            messages: With real topic and message id, and when they are due in ``TIMER_DELIVER_MS``.

        Raises:
            HandOverError: *owner* does not have the lock.
        """

    def moved(self, msg_id: str, topic: str | None = None) -> MovedMessage | None:
        """Return how the last transit of a message ended; None if it never was in transit, or still is."""

    def is_reserved(self, msg_id: str, topic: str | None = None) -> bool:
        """Return True while a message is in transit."""
