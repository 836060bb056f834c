"""Problems of now: groups that lag, dead letters, a full disk, late messages, paused listeners; each with its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from mqtemplate.broker import Capability, GroupInfo, RetentionHold, StoreHealth, TopicKind
from mqtemplate.converters.readable import count_text, size_text, span_text
from mqtemplate.operations.access import BrokerAccess
from mqtemplate.operations.dead_letters import DeadLetters
from mqtemplate.operations.progress import LagTrend, Trend, behind_ms
from mqtemplate.pending import BrokerDelays, PendingQuery
from mqtemplate.store.files.folder_store_files import FolderStoreFiles
from mqtemplate.store.files.store_files import DiskUsage
from mqtemplate.topics import DLQ_TOPIC_PREFIX, is_schedule_group

_MINUTE_MS = 60_000
_DAY_MS = 86_400_000
_BEHIND_MS = _MINUTE_MS
_FAR_BEHIND_MS = 10 * _MINUTE_MS
_OVERDUE_MS = _MINUTE_MS
_LATE_MS = 10_000
_FULL_SOON_MS = 3 * _DAY_MS
_LOW_FREE = 0.1
"""Free part of a disk below which it is a problem: the default of ``disk-free-warning-ratio``."""
_SHOWN_GROUPS = 5
"""Most groups with a line each. A line for the others has their number."""
_OF_LISTENERS = ("listeners", "handlers", "lag", "lateness")
"""Components of the health of an application that lines of their own show."""


class Severity(Enum):
    """Severity of a problem: an error stops messages, a warning delays some of them or will become an error."""

    ERROR = "error"
    WARNING = "warning"


class ProblemKind(Enum):
    """Part of the broker or the application that has a problem: the page or the command that shows its cause."""

    STORE = "store"
    DISK = "disk"
    RETENTION = "retention"
    GROUP = "group"
    GROUPS = "groups"
    DEAD_LETTERS = "dead letters"
    DELAYED = "delayed"
    LISTENER = "listener"
    LATENESS = "lateness"
    HEALTH = "health"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        text: A sentence without a full stop, such as ``smsgate is 8m behind and growing: 4,711 messages``.
        name: The group, the listener or the component; empty if the problem is of several.
    """

    severity: Severity
    kind: ProblemKind
    text: str
    name: str = ""


# --- the broker ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerReading:
    """Figures of a broker at one time.

    Attributes:
        behind_ms: Group -> age of the oldest message that it has not consumed; None if unknown.
        letters: Group -> number of its open dead letters, if it has some.
        last_letter_ms: Group -> time (epoch ms) of its last dead letter.
        first_due_ms: Deliver time (epoch ms) of the first pending message; None without one, or if it is unknown.
        delays: State of the delay services of the brokers of a RocketMQ cluster.
        store: State of the store; None if it is in another process.
        disk: The disk of the store directory; None if it is not on this machine.
    """

    now_ms: int
    groups: Sequence[GroupInfo] = ()
    behind_ms: Mapping[str, int | None] = field(default_factory=dict)
    letters: Mapping[str, int] = field(default_factory=dict)
    last_letter_ms: Mapping[str, int] = field(default_factory=dict)
    first_due_ms: int | None = None
    delays: Sequence[BrokerDelays] = ()
    store: StoreHealth | None = None
    holds: Sequence[RetentionHold] = ()
    disk: DiskUsage | None = None

    @property
    def lag(self) -> int:
        """Lag of all groups."""
        return sum(group.lag for group in self.groups)


def read_broker(access: BrokerAccess, path: Path | None) -> BrokerReading:
    """Read the figures.

    Args:
        path: The store directory; None if it is not on this machine.
    """
    broker = access.broker
    # The groups of schedules have times as offsets, and no messages of applications.
    groups = [each for each in access.admin.groups() if not is_schedule_group(each.name)]
    now_ms = broker.clock.now_ms()
    letters = {name: each.open for name, each in DeadLetters(access).counts().items() if each.open}
    return BrokerReading(
        now_ms=now_ms,
        groups=groups,
        behind_ms={group.name: behind_ms(broker, group.progress, now_ms) for group in groups},
        letters=letters,
        last_letter_ms={name: time_ms for name in letters if (time_ms := _last_letter_ms(access, name)) is not None},
        first_due_ms=_first_due_ms(access),
        delays=() if access.broker.delay_console is None else access.broker.delay_console.brokers(),
        store=broker.store_health(),
        holds=broker.retention_holds(),
        disk=None if path is None else FolderStoreFiles(path).disk_usage(),
    )


def _last_letter_ms(access: BrokerAccess, group: str) -> int | None:
    spans = access.admin.queue_spans(DLQ_TOPIC_PREFIX + group)
    return max((span.last_stored_ms for span in spans if span.last_stored_ms is not None), default=None)


def _first_due_ms(access: BrokerAccess) -> int | None:
    if Capability.PENDING not in access.broker.capabilities:
        return None
    console = access.broker.delay_console
    state = None if console is None else console.index_state()
    if state is not None and not state.is_complete:
        return None  # the first read of a cluster takes minutes, which the other figures do not wait for
    first = access.broker.delayed.pending(PendingQuery(), 1).messages
    return first[0].deliver_ms if first else None


def broker_problems(reading: BrokerReading, trends: Mapping[str, LagTrend] | None = None) -> list[Problem]:
    """Return the problems of a broker, errors first.

    Args:
        trends: Group -> trend of its lag, as far as it is known.
    """
    found = [
        *_store_problems(reading),
        *_overdue(reading),
        *_late_brokers(reading),
        *_group_problems(reading, trends or {}),
        *_dead_letters(reading),
        *_retention(reading),
    ]
    return errors_first(found)


def errors_first(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems in their order, errors before warnings."""
    return sorted(problems, key=lambda each: each.severity is not Severity.ERROR)


def _store_problems(reading: BrokerReading) -> Iterator[Problem]:
    store, usage = reading.store, reading.disk
    if store is not None and store.error is not None:
        yield Problem(Severity.ERROR, ProblemKind.STORE, f"the store takes no messages: {store.error}")
    if store is not None and store.refusal is not None:
        yield Problem(Severity.ERROR, ProblemKind.DISK, f"new messages are refused: {store.refusal}")
    space = None if store is None else store.disk
    if space is not None and space.full_in_ms is not None and space.full_in_ms < _FULL_SOON_MS:
        severity = Severity.ERROR if space.full_in_ms < _DAY_MS else Severity.WARNING
        free = size_text(space.free_bytes)
        when = f"disk full in {span_text(space.full_in_ms)}" if space.full_in_ms else "disk full"
        yield Problem(severity, ProblemKind.DISK, f"{when}: {free} free")
    elif usage is not None and 1 - usage.used_ratio < _LOW_FREE and not (space is not None and space.is_roomy):
        text = f"disk {usage.used_ratio:.0%} used: {size_text(usage.free)} free"
        yield Problem(Severity.WARNING, ProblemKind.DISK, text)


def _overdue(reading: BrokerReading) -> Iterator[Problem]:
    late_ms = 0 if reading.first_due_ms is None else reading.now_ms - reading.first_due_ms
    if late_ms >= _OVERDUE_MS:
        text = f"delayed messages are overdue, the first by {span_text(late_ms)}"
        yield Problem(Severity.ERROR, ProblemKind.DELAYED, text)


def _late_brokers(reading: BrokerReading) -> Iterator[Problem]:
    for each in reading.delays:
        for cause in each.causes:
            severity = Severity.ERROR if each.late_ms >= _OVERDUE_MS else Severity.WARNING
            yield Problem(severity, ProblemKind.DELAYED, f"broker {each.broker}: {cause}")


def _group_problems(reading: BrokerReading, trends: Mapping[str, LagTrend]) -> Iterator[Problem]:
    behind = {name: each for name, each in reading.behind_ms.items() if each is not None and each >= _BEHIND_MS}
    lags = {group.name: group.lag for group in reading.groups}
    ordered = sorted(behind, key=lambda name: (-behind[name], name))
    for name in ordered[:_SHOWN_GROUPS]:
        trend = trends.get(name)
        is_shrinking = trend is not None and trend.direction is Trend.SHRINKING
        is_error = behind[name] >= _FAR_BEHIND_MS and not is_shrinking
        text = f"{name} is {span_text(behind[name])} behind{_trend_text(trend)}: {count_text(lags[name], 'message')}"
        yield Problem(Severity.ERROR if is_error else Severity.WARNING, ProblemKind.GROUP, text, name)
    others = len(ordered) - _SHOWN_GROUPS
    if others > 0:
        text = f"{count_text(others, 'more group')} more than {span_text(_BEHIND_MS)} behind"
        yield Problem(Severity.WARNING, ProblemKind.GROUPS, text)


def _trend_text(trend: LagTrend | None) -> str:
    if trend is None or trend.direction is None:
        return ""
    if trend.catch_up_ms is not None:
        return f" and catches up in {span_text(trend.catch_up_ms)}"
    return f" and {trend.direction.value}"


def _dead_letters(reading: BrokerReading) -> Iterator[Problem]:
    letters = reading.letters
    if not letters:
        return
    text = count_text(sum(letters.values()), "open dead letter")
    if len(letters) > 1:
        text += f" in {len(letters)} groups"
    if reading.last_letter_ms:
        newest = max(reading.last_letter_ms, key=lambda name: reading.last_letter_ms[name])
        age = span_text(max(0, reading.now_ms - reading.last_letter_ms[newest]))
        text += f", the last one came {age} ago"
    only = next(iter(letters)) if len(letters) == 1 else ""
    yield Problem(Severity.WARNING, ProblemKind.DEAD_LETTERS, text, only)


def _retention(reading: BrokerReading) -> Iterator[Problem]:
    for hold in reading.holds:
        if TopicKind.of(hold.topic) is TopicKind.DEAD_LETTER:
            text = f"{size_text(hold.byte_count)} of old files stay for the dead letters of {hold.group}"
        else:
            text = f"{size_text(hold.byte_count)} of old files stay until {hold.group} has consumed {hold.topic}"
        yield Problem(Severity.WARNING, ProblemKind.RETENTION, text, hold.group)


# --- the application ----------------------------------------------------------------------------


def application_problems(health: Mapping[str, Any] | None, listeners: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Return the problems of an application, errors first.

    Args:
        health: Its document ``health``; None without one.
        listeners: The list in its document ``listeners``.
    """
    components = {} if health is None else health["components"]
    found = [*_component_problems(components), *_listener_problems(listeners), *_late(components.get("lateness", {}))]
    return errors_first(found)


def _component_problems(components: Mapping[str, Any]) -> Iterator[Problem]:
    for name, component in components.items():
        if component["status"] == "UP" or name in _OF_LISTENERS:
            continue
        errors = [str(each["error"]) for _, each in _details(component) if "error" in each]
        text = f"health: {name} is {component['status']}{': ' if errors else ''}{'; '.join(errors)}"
        yield Problem(Severity.ERROR, ProblemKind.HEALTH, text, name)


def _details(component: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the details of a component, for each process of the application that has some."""
    parts: Mapping[str, Mapping[str, Any]] = component.get("components", {"": component})
    yield from ((name, part["details"]) for name, part in parts.items() if "details" in part)


def _listener_problems(listeners: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    for each in listeners:
        name, state, lag = each["id"], each["state"], each.get("lag") or 0
        if each.get("hanging"):
            text = f"{count_text(each['hanging'], 'handler')} of listener {name} {_hang(each['hanging'])}"
            yield Problem(Severity.ERROR, ProblemKind.LISTENER, text, name)
        if state == "broken" or (state == "stopped" and each.get("autoStartup")):
            yield Problem(Severity.ERROR, ProblemKind.LISTENER, f"listener {name} is {state}{_with_lag(lag)}", name)
        elif "paused" in state:
            yield Problem(Severity.WARNING, ProblemKind.LISTENER, f"listener {name} is {state}{_with_lag(lag)}", name)


def _hang(count: int) -> str:
    return "hangs" if count == 1 else "hang"


def _with_lag(lag: int) -> str:
    return f", with a lag of {count_text(lag, 'message')}" if lag else ""


def _late(component: Mapping[str, Any]) -> Iterator[Problem]:
    worst_ms = max((each.get("worstMs") or 0 for _, each in _details(component)), default=0)
    if worst_ms >= _LATE_MS:
        text = f"delayed messages of the last minutes were handled up to {span_text(worst_ms)} late"
        yield Problem(Severity.WARNING, ProblemKind.LATENESS, text)
