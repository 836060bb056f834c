"""Status of a hand-over, and its changes by operators: start, pause, resume, confirm, abort.

The command line, the actuator and the dashboard use it. All of it works on the state in the old broker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from mqtemplate.broker import Broker
from mqtemplate.broker.hand_over import SENDS_TO_OLD, HandOverCounts, HandOverError, HandOverPhase, HandOverState
from mqtemplate.brokers.embedded.broker import EmbeddedBroker
from mqtemplate.converters.readable import span_text, time_text
from mqtemplate.errors import BrokerError, MQTemplateError, UnknownNameError
from mqtemplate.event_log import get_logger
from mqtemplate.handover.broker import HandOverBroker
from mqtemplate.handover.plan import HandOverPlan, create_missing, day_text, lag_reader, limits_of
from mqtemplate.handover.run import HandOverRun
from mqtemplate.metrics import MetricKind, MetricSample
from mqtemplate.operations.audit import AuditLog, OldValue
from mqtemplate.operations.bulk import OnProgress
from mqtemplate.operations.changes import Change, ChangePreview, ChangeResult, carry_out
from mqtemplate.pending import PendingQuery

_log = get_logger("mqtemplate.hand_over")

_HOUR_MS = 3_600_000
_BAR = 40
SETTING = "mqtemplate.hand-over"


# --- status ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LagAtBoth:
    """Lag of one consumer group at both brokers.

    Attributes:
        old: Messages that it has not consumed at the old broker.
        new: The same at the new one; None if it does not exist there, or the broker does not answer.
    """

    name: str
    old: int
    new: int | None


@dataclass(frozen=True, slots=True)
class HandOverStatus:
    """A hand-over at one moment.

    Attributes:
        now_ms: The moment (epoch ms).
        days: Number of messages that are pending at the old broker, by the local day on which they are due.
        groups: Lags of all groups of the old broker.
        remaining: What the old broker still has, a sentence each. Nothing: it is empty.
        stays: Number of pending messages that are not in the range of the new broker yet.
    """

    state: HandOverState
    counts: HandOverCounts
    now_ms: int
    days: dict[str, int]
    groups: tuple[LagAtBoth, ...]
    remaining: tuple[str, ...]
    stays: int = 0

    @property
    def total(self) -> int:
        """Number of messages that have moved, or are to move."""
        return self.counts.moved + self.counts.in_transit + self.counts.pending

    @property
    def done_ratio(self) -> float:
        """Part of them that has moved, 0 to 1."""
        return self.counts.moved / self.total if self.total else 1.0

    @property
    def rate(self) -> float:
        """Moved messages per second, since the start."""
        return self.counts.moved * 1_000 / max(self.now_ms - self.state.started_ms, 1)

    @property
    def left_ms(self) -> int | None:
        """Estimated time until the rest has moved, at this rate; None without a rate."""
        return self.left_at(self.rate)

    def left_at(self, rate: float) -> int | None:
        """Return the time until all has moved that can move now, at *rate* messages a second; None without a rate."""
        left = self.total - self.counts.moved - self.stays
        if not rate or self.state.phase is not HandOverPhase.RUNNING:
            return None
        return round(max(0, left) * 1_000 / rate)

    def document(self) -> dict[str, Any]:
        """Return the status as JSON has it."""
        return {
            "id": self.state.hand_over_id,
            "target": self.state.target,
            "phase": self.state.phase.value,
            "started_ms": self.state.started_ms,
            "changed_ms": self.state.changed_ms,
            "owner": self.state.owner,
            "last_error": self.state.last_error,
            **asdict(self.counts),
            "total": self.total,
            "stays": self.stays,
            "done_ratio": self.done_ratio,
            "rate": self.rate,
            "left_ms": self.left_ms,
            "days": self.days,
            "groups": [asdict(each) for each in self.groups],
            "remaining": list(self.remaining),
        }


def status_lines(document: dict[str, Any]) -> list[str]:
    """Return a `HandOverStatus.document` for a reader."""
    filled = round(document["done_ratio"] * _BAR)
    left = "" if not document["left_ms"] else f", about {span_text(document['left_ms'])} left"
    lines = [
        f"to {document['target']}: {document['phase']} since {time_text(document['changed_ms'])}",
        f"[{'#' * filled}{'-' * (_BAR - filled)}] {document['done_ratio']:.0%}",
        f"{document['moved']:,} moved, {document['in_transit']:,} in transit, {document['pending']:,} pending",
        f"{document['rate']:.1f} a second since {time_text(document['started_ms'])}{left}",
    ]
    if document["returned"]:
        lines.append(f"{document['returned']:,} were refused by the new broker: the old one releases them")
    if document["owner"]:
        lines.append(f"mover: {document['owner']}")
    if document["last_error"]:
        lines.append(f"ERROR: {document['last_error']}")
    if document["stays"]:
        lines.append(f"{document['stays']:,} of them stay until they come into the range of the new broker")
    if document["days"]:
        days = sorted(document["days"].items())
        shown = ", ".join(f"{day} {count:,}" for day, count in days[:10])
        lines.append(f"left by day: {shown}{', …' if len(days) > 10 else ''}")
    if HandOverPhase(document["phase"]) in SENDS_TO_OLD:
        unread = [f"{each['name']} {each['new']:,}" for each in document["groups"] if each["new"]]
        lines.append(f"not consumed at the new broker yet, by group: {', '.join(unread) or 'nothing'}")
        return lines
    lines += [f"left: {text}" for text in document["remaining"]]
    if not document["remaining"] and document["phase"] != HandOverPhase.CONFIRMED.value:
        lines.append("the old broker is empty: mqtemplate hand-over confirm")
    return lines


def read_status(old: Broker, new: Broker | None) -> HandOverStatus | None:
    """Return the status of the hand-over from a broker; None if there is none.

    Args:
        new: None if the new broker is not known. Its lags are then unknown.
    """
    part = old.hand_over
    state = part.state()
    if state is None:
        return None
    days: dict[str, int] = {}
    for start_ms, count in old.delayed.count_pending(PendingQuery(), _HOUR_MS).buckets.items():
        day = day_text(start_ms)
        days[day] = days.get(day, 0) + count
    counts, now_ms = part.counts(), old.clock.now_ms()
    stays = 0 if new is None else _stays(old, new, now_ms)
    return HandOverStatus(state, counts, now_ms, days, _lags(old, new), tuple(part.remaining()), stays)


def _stays(old: Broker, new: Broker, now_ms: int) -> int:
    """Return the number of pending messages that are due later than the new broker holds them."""
    try:
        limits = limits_of(new)
    except BrokerError:  # it is down
        return 0
    if limits is None:
        return 0
    return old.delayed.count_pending(PendingQuery(after_ms=now_ms + limits.max_delay_ms)).total


def _lags(old: Broker, new: Broker | None) -> tuple[LagAtBoth, ...]:
    try:
        lag = (lambda name: None) if new is None else lag_reader(new.admin())
    except BrokerError:  # a new broker that is down hides nothing of the old one
        lag = lambda name: None  # noqa: E731
    return tuple(LagAtBoth(each.name, each.lag, lag(each.name)) for each in old.admin().groups())


# --- changes --------------------------------------------------------------------------------------


class HandOverAction(Enum):
    """Change of a hand-over that was started."""

    PAUSE = "pause"
    RESUME = "resume"
    CONFIRM = "confirm"
    ABORT = "abort"


_PHASES = {
    HandOverAction.PAUSE: HandOverPhase.PAUSED,
    HandOverAction.RESUME: HandOverPhase.RUNNING,
    HandOverAction.CONFIRM: HandOverPhase.CONFIRMED,
    HandOverAction.ABORT: HandOverPhase.ABORTING,
}
_TITLES = {
    HandOverAction.PAUSE: "Pause the hand-over to {target}",
    HandOverAction.RESUME: "Resume the hand-over to {target}",
    HandOverAction.CONFIRM: "Confirm the hand-over to {target}, and seal the old broker",
    HandOverAction.ABORT: "Abort the hand-over to {target}, and move its messages back",
}
_NOTES = {
    HandOverAction.PAUSE: "Messages that are in transit still arrive; the others stay at the old broker.",
    HandOverAction.RESUME: "The mover of the application goes on within seconds.",
    HandOverAction.CONFIRM: f"The old broker refuses messages from then on. Remove {SETTING} from application.yml.",
    HandOverAction.ABORT: (
        "The application sends to the old broker from now on, and its mover moves pending messages back. When all are "
        f"back, the phase is ABORTED. When the groups have consumed what the new broker has, remove {SETTING}, and "
        "set rocketmq.name-server to the old broker."
    ),
}


class HandOverStarted(Change):
    """Start of a hand-over: topics, queues and groups are created at the new broker, and the old one gets its state.

    Args:
        plan: What will move.
    """

    def __init__(self, old: Broker, new: Broker, plan: HandOverPlan) -> None:
        super().__init__("hand_over.start", {"source": plan.source, "target": plan.target}, can_be_undone=False)
        self._old, self._new, self._plan = old, new, plan

    @property
    def title(self) -> str:
        return f"Start the hand-over from {self._plan.source} to {self._plan.target}"

    @cached_property
    def preview(self) -> ChangePreview:
        missing = [f"{each.name} ({each.queue_count} queues)" for each in self._plan.topics if each.is_missing]
        groups = [each.name for each in self._plan.groups if each.new_lag is None]
        notes = [f"topics to create: {', '.join(missing)}"] if missing else []
        notes += [f"groups to create: {', '.join(groups)}"] if groups else []
        undo = "It can be aborted: mqtemplate hand-over abort moves the messages back."
        return ChangePreview(
            count=self._plan.moves.count,
            noun="pending message",
            topics=self._plan.moves.topics,
            first_ms=self._plan.moves.first_ms,
            last_ms=self._plan.moves.last_ms,
            time_name="due",
            has_effect=True,
            notes=(*notes, *self._plan.impossible, *self._plan.notes),
            undo=undo,
        )

    def old_values(self) -> Iterator[OldValue]:
        yield from ()

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        created = create_missing(self._old.admin(), self._new)
        topics = [each.name for each in self._plan.topics]
        groups = [each.name for each in self._plan.groups]
        state = self._old.hand_over.begin(self._plan.target, topics, groups)
        if state.phase is HandOverPhase.ABORTED:
            state = self._old.hand_over.change(HandOverPhase.RUNNING)
        return ChangeResult("started", {"id": state.hand_over_id, "created_topics": created}, state)


class HandOverChanged(Change):
    """Change of the phase of a hand-over.

    Raises:
        HandOverError: There is no hand-over, its phase forbids it, or it is to be confirmed and the old broker is not
            empty.
    """

    def __init__(self, old: Broker, action: HandOverAction) -> None:
        state = old.hand_over.state()
        if state is None:
            raise HandOverError(
                f"there is no hand-over from broker {old.name!r}; start one with: mqtemplate hand-over start"
            )
        phase = _PHASES[action]
        state.check_next(phase)
        remaining = old.hand_over.remaining() if action is HandOverAction.CONFIRM else []
        if remaining:
            raise HandOverError(f"the old broker is not empty: {'; '.join(remaining)}; see mqtemplate hand-over status")
        fields = {"hand_over": state.hand_over_id, "target": state.target, "phase_before": state.phase.value}
        super().__init__(f"hand_over.{action.value}", fields, can_be_undone=False)
        self._old, self._action, self._state, self._phase = old, action, state, phase

    @property
    def title(self) -> str:
        return _TITLES[self._action].format(target=self._state.target)

    @cached_property
    def preview(self) -> ChangePreview:
        is_change = self._phase is not self._state.phase
        return ChangePreview(count=0, noun="message", has_effect=is_change, notes=(_NOTES[self._action],))

    @property
    def note(self) -> str:
        """Sentence about what happens next."""
        return _NOTES[self._action]

    def old_values(self) -> Iterator[OldValue]:
        yield from ()

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        state = self._old.hand_over.change(self._phase)
        return ChangeResult(f"the phase is {state.phase.value}", {"phase": state.phase.value}, state)


class ApplicationHandOver:
    """The hand-over of a running application, for its actuator, its metrics and its dashboard."""

    def __init__(self, broker: HandOverBroker) -> None:
        self._broker = broker

    def document(self) -> dict[str, Any] | None:
        """Return the status as JSON has it; None before the start. The rate is that of the last seconds.

        Raises:
            BrokerError: The old broker does not answer.
        """
        status = read_status(self._broker.old, self._broker.new)
        if status is None:
            return None
        document, mover = status.document(), self._broker.mover
        if mover is not None and (progress := mover.progress()).is_mover:
            document |= {"rate": progress.rate, "left_ms": status.left_at(progress.rate)}
        return document

    def change(self, name: str, remote: str, audit: AuditLog, *, is_dry_run: bool) -> dict[str, Any]:
        """Change the hand-over, or only show the preview of the change.

        Raises:
            UnknownNameError: There is no such change.
            HandOverError: The phase forbids it, or the old broker is not empty.
        """
        try:
            action = HandOverAction(name)
        except ValueError:
            allowed = ", ".join(each.value for each in HandOverAction)
            raise UnknownNameError(f"there is no change {name!r} of a hand-over; there is: {allowed}") from None
        change = HandOverChanged(self._broker.old, action)
        if is_dry_run:
            return {"title": change.title, "notes": list(change.preview.notes)}
        result = carry_out(change, audit, remote, place=self._broker.options.origin)
        return {"phase": result.facts["phase"], "change": result.id}

    def samples(self) -> Iterator[MetricSample]:
        """Yield the numbers of messages that are not in the new broker; nothing while the old one does not answer."""
        try:
            state, counts = self._broker.old.hand_over.state(), self._broker.old.hand_over.counts()
        except MQTemplateError as exc:
            _log.debug("metrics.hand_over_unknown", reason=str(exc))
            return
        if state is None:
            return
        yield MetricSample("hand_over.pending", MetricKind.GAUGE, counts.pending, {})
        yield MetricSample("hand_over.in_transit", MetricKind.GAUGE, counts.in_transit, {})
        yield MetricSample("hand_over.running", MetricKind.GAUGE, state.phase is HandOverPhase.RUNNING, {})


def application_hand_over(broker: Broker) -> ApplicationHandOver | None:
    """Return the hand-over of the application with this broker; None if it has none."""
    return ApplicationHandOver(broker) if isinstance(broker, HandOverBroker) else None


class StoreMoved(Change):
    """Move of a store directory to a new broker.

    Args:
        plan: What will move.
        stop: Set to stop after the current batch.
        on_error: See `HandOverRun`.
    """

    def __init__(
        self,
        old: EmbeddedBroker,
        new: Broker,
        plan: HandOverPlan,
        stop: threading.Event,
        on_error: Callable[[str], None],
    ) -> None:
        super().__init__("hand_over.run", {"source": plan.source, "target": plan.target}, can_be_undone=False)
        self._old, self._new, self._plan = old, new, plan
        self._stop, self._on_error = stop, on_error

    @property
    def title(self) -> str:
        return f"Move {self.preview.amount} from {self._plan.source} to {self._plan.target}"

    @cached_property
    def preview(self) -> ChangePreview:
        plan = self._plan
        return ChangePreview(
            count=plan.ready + plan.moves.count + plan.retries.count,
            noun="message",
            has_effect=True,
            notes=(*plan.impossible, *plan.notes),
            undo="Nothing is deleted in the directory: what has moved stays there, and is not sent a second time.",
        )

    def old_values(self) -> Iterator[OldValue]:
        yield from ()

    def make(self, old: Callable[[], Iterator[OldValue]], on_progress: OnProgress) -> ChangeResult:
        run = HandOverRun(
            self._old,
            self._new,
            self._plan.target,
            rate=self._plan.rate,
            stop=self._stop,
            on_progress=on_progress,
            on_error=self._on_error,
        )
        report = run.run()
        facts = {"copied": report.copied, "moved": report.moved, "left": report.left, "stopped": report.is_stopped}
        return ChangeResult(f"{report.copied + report.moved:,} messages moved", facts, report)
