"""Changes that the actuator takes.

Listeners: pause, resume, seek, undo of a seek, concurrency. Schedules: pause, resume, trigger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Any
from urllib.parse import quote

from mqtemplate.broker import OffsetChange
from mqtemplate.durations import option_ms
from mqtemplate.errors import ListenerError, MQTemplateError, UnknownNameError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.container.container import ListenerContainer
from mqtemplate.listener.container.process_queue import epoch_ms
from mqtemplate.message import MessageQueue
from mqtemplate.numbers import parse_number
from mqtemplate.operations.audit import AuditLog, LoggedChange
from mqtemplate.operations.changes import (
    LISTENER_SEEK,
    OffsetsReset,
    carry_out,
    check_confirmed,
    old_offsets,
    plan_restore,
)
from mqtemplate.scheduling.schedules import Schedules
from mqtemplate.topics import RETRY_TOPIC_PREFIX
from mqtemplate.user_code import did_you_mean

_log = get_logger("mqtemplate.actuator")

ACTIONS: Mapping[str, Sequence[str]] = {
    "pause": (),
    "resume": (),
    "seek": ("to", "back", "offset", "topic", "queue", "broker", "dryRun", "confirm"),
    "concurrency": ("number",),
}
"""Actions on a listener -> fields beside ``action``."""
SCHEDULE_ACTIONS: Mapping[str, Sequence[str]] = {"pause": ("until",), "resume": (), "trigger": ()}
UNDO_ACTIONS: Mapping[str, Sequence[str]] = {"undo": ("dryRun", "confirm")}
_MAX_LONG = 2**63 - 1


class InvalidChangeError(MQTemplateError):
    """A change that was requested is not allowed. The text says what is."""


def parse_change(body: bytes) -> dict[str, Any]:
    """Return the change that a body describes.

    Raises:
        InvalidChangeError: It is not a JSON object, or has a field twice.
    """
    try:
        change = json.loads(body, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as exc:
        raise InvalidChangeError('the body must be a JSON object, such as {"action": "pause"}') from exc
    if not isinstance(change, dict):
        raise InvalidChangeError(f"the body must be a JSON object, got {type(change).__name__}")
    return change


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for index, (name, _) in enumerate(pairs) if name in dict(pairs[:index]))
        raise InvalidChangeError(f"the body has the field {twice[:40]!r} twice, allowed is once")
    return found


def listeners_named(listeners: Iterable[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """Return the listener with an id, or with a unique end of one such as ``bill``; or all listeners of a group.

    Args:
        listeners: Documents of the actuator.

    Raises:
        UnknownNameError: There is none, or an end is of several ids.
    """
    known = {str(each["id"]): each for each in listeners}
    if name in known:
        return [known[name]]
    found = [each for each_id, each in known.items() if each_id.endswith(f".{name}")]
    found = found or [each for each_id, each in known.items() if name and each_id.endswith(name)]
    if len(found) > 1:
        ids = ", ".join(sorted(str(each["id"]) for each in found))
        raise UnknownNameError(f"{name!r} is the end of several ids: {ids}; give more of one")
    found = found or [each for each in known.values() if each["group"] == name]
    if not found:
        raise UnknownNameError(f"there is no listener {name!r}; there is: {', '.join(known) or 'none'}")
    return found


def listeners_of_group(listeners: Iterable[Mapping[str, Any]], group: str) -> list[Mapping[str, Any]]:
    """Return the listeners of a group.

    Args:
        listeners: Documents of the actuator.

    Raises:
        UnknownNameError: There is none.
    """
    known = list(listeners)
    found = [each for each in known if each["group"] == group]
    if not found:
        groups = ", ".join(sorted({str(each["group"]) for each in known})) or "none"
        raise UnknownNameError(f"the application has no listener of group {group!r}; its groups are: {groups}")
    return found


def change_each(
    post: Callable[[str, dict[str, Any]], Any], listeners: Iterable[str], change: Mapping[str, Any]
) -> tuple[list[Any], MQTemplateError | None]:
    """Change several listeners. Return their documents after it, and the first failure: the others are changed.

    Args:
        post: Sends a change to a path of the actuator.
    """
    records, failed = [], None
    for each in listeners:
        try:
            records.append(post(f"listeners/{quote(each, safe='')}", dict(change)))
        except MQTemplateError as exc:
            failed = failed or exc
    return records, failed


def _action_of(change: Mapping[str, Any], actions: Mapping[str, Sequence[str]]) -> str:
    """Return the action, all fields checked: one that is ignored may be what the client meant most."""
    action = change.get("action")
    if not isinstance(action, str) or action not in actions:
        raise InvalidChangeError(f"action must be one of {', '.join(actions)}, got {action!r}")
    known = ("action", *actions[action])
    for name in change:
        if name not in known:
            hint = did_you_mean(name, known)
            raise InvalidChangeError(
                f"{action} has no field {name[:40]!r}; {f'{hint} ' if hint else ''}there is: {', '.join(known)}"
            )
    return action


@contextmanager
def _logged(kind: str, remote: str, **fields: object) -> Iterator[None]:
    """Log the change in the ``with`` block, whether it succeeds or not: a part of it may have happened."""
    try:
        yield
    except BaseException as exc:
        _log.warning(f"{kind}.change_failed", remote=remote, error=f"{type(exc).__name__}: {exc}", **fields)
        raise
    _log.warning(f"{kind}.changed", remote=remote, **fields)


def change_listener(
    container: ListenerContainer, change: Mapping[str, Any], remote: str, audit: AuditLog
) -> dict[str, Any]:
    """Pause, resume or reposition a listener, or change its concurrency, and log who did it.

    ``{"action": "pause"}``, ``{"action": "resume"}``, ``{"action": "concurrency", "number": 8}``, and for
    ``{"action": "seek"}`` one of

    - ``"to": "first"``, ``"latest"``, an ISO time with a time zone, or epoch milliseconds;
    - ``"back": "1h"``: the messages of the last hour again;
    - ``"topic"``, ``"queue"``, ``"offset"`` and, with several brokers, ``"broker"``: one queue.

    ``"dryRun": true`` returns the preview of a seek. A seek that reaches more than one message needs the number of its
    preview: ``"confirm": 2675``.

    Args:
        remote: Address of the client, for the log.

    Returns:
        ``preview`` for a dry run; otherwise ``change``, the id of a seek in the audit log, or nothing.

    Raises:
        InvalidChangeError: The change is not one of these.
        UnconfirmedChangeError: A seek lacks its confirmation.
        ListenerError: The listener is not running, or does not have the queue.
    """
    action = _action_of(change, ACTIONS)
    if not container.is_running:
        raise ListenerError(f"{container.name} is {container.state.value}; only a running listener can be changed")
    if action == "seek":
        return _make(_seek_of(container, change), container, change, remote, audit)
    apply = _apply_of(container, action, change)
    listener = container.endpoint.id
    # Who has paused it is asked later; a concurrency ends with the process.
    is_kept = action in ("pause", "resume")
    kept = audit.change(f"listener.{action}", remote, listener=listener) if is_kept else nullcontext()
    with _logged("listener", remote, listener=listener, **change), kept:
        apply()
    return {}


def _apply_of(container: ListenerContainer, action: str, change: Mapping[str, Any]) -> Callable[[], None]:
    if action == "concurrency":
        return _concurrency_of(container, change.get("number"))
    return container.pause if action == "pause" else container.resume


def _make(
    seek: OffsetsReset, container: ListenerContainer, change: Mapping[str, Any], remote: str, audit: AuditLog
) -> dict[str, Any]:
    """Make a seek that is confirmed, or return its preview."""
    confirmed = change.get("confirm")
    if confirmed is not None and (type(confirmed) is not int or not 0 <= confirmed <= _MAX_LONG):
        raise InvalidChangeError(f"confirm must be the number of the preview, got {_shown(confirmed)}")
    if type(change.get("dryRun", False)) is not bool:
        raise InvalidChangeError(f"dryRun must be true or false, got {_shown(change['dryRun'])}")
    if change.get("dryRun"):
        return {"preview": seek.preview.document()}
    check_confirmed(seek, confirmed)
    if seek.preview.is_empty:
        return {"change": None}
    with _logged("listener", remote, listener=container.endpoint.id, **change):
        return {"change": carry_out(seek, audit, remote).id}


def undo_seek(
    container: ListenerContainer, logged: LoggedChange, change: Mapping[str, Any], remote: str, audit: AuditLog
) -> dict[str, Any]:
    """Let a listener continue at the offsets before a seek: ``{"action": "undo"}``, with ``dryRun`` and ``confirm``.

    Returns and raises as `change_listener` for a seek.
    """
    _action_of(change, UNDO_ACTIONS)
    positions, reader = container.positions(), container.broker.reader
    spans = {queue: (reader.min_offset(queue), reader.max_offset(queue)) for queue in positions}
    changes, notes = plan_restore(old_offsets(logged.old()), positions, spans)
    undo = _seek_to(container, changes, {"undo_of": logged.id}, notes)
    return _make(undo, container, change, remote, audit)


def _seek_to(
    container: ListenerContainer,
    changes: Iterable[OffsetChange],
    target: Mapping[str, object],
    notes: Sequence[str] = (),
) -> OffsetsReset:
    """Return the change that moves queues of a listener."""
    endpoint = container.endpoint
    fields = {"listener": endpoint.id, "group": endpoint.settings.group, **target}
    moved = [each for each in changes if each.before != each.after]
    return OffsetsReset(
        container.broker, moved, container.seek_all, fields, action=LISTENER_SEEK, notes=notes, is_named=True
    )


def change_schedule(schedules: Schedules, name: str, change: Mapping[str, Any], remote: str) -> None:
    """Pause or resume a schedule in all processes, or run it now, and log who did it.

    ``{"action": "pause"}`` with ``"until"``, an ISO time with a time zone, or without an end; ``{"action": "resume"}``;
    ``{"action": "trigger"}``.

    Raises:
        InvalidChangeError: The change is not one of these.
        ScheduleError: There is no such schedule.
    """
    action, until = _action_of(change, SCHEDULE_ACTIONS), change.get("until")
    end = None if until is None else _aware_time(until)
    with _logged("schedule", remote, schedule=name, action=action, until=until):
        if action == "trigger":
            schedules.trigger(name)
        elif action == "resume":
            schedules.resume(name)
        else:
            schedules.pause(name, end)


def _aware_time(text: object) -> datetime:
    try:
        time = datetime.fromisoformat(str(text))
        if time.tzinfo is not None and time.timestamp() > 0:
            return time
    except (ValueError, OverflowError):
        pass  # such as the first hour of the year 1, east of Greenwich
    raise InvalidChangeError(
        f"until must be an ISO time with a time zone, such as 2026-07-01T12:00:00+02:00, got {_shown(text)}"
    )


def _seek_of(container: ListenerContainer, change: Mapping[str, Any]) -> OffsetsReset:
    given = [key for key in ("to", "back", "offset") if key in change]
    if len(given) != 1:
        raise InvalidChangeError(
            "seek needs one of: to (first, latest, a time), back (a duration), offset (with topic and queue); "
            f"got {', '.join(given) or 'none'}"
        )
    queue_fields = [key for key in ("topic", "queue", "broker") if key in change]
    if queue_fields and "offset" not in change:
        raise InvalidChangeError(
            f"{given[0]} is for all queues of the listener; give {queue_fields[0]} with offset only"
        )
    target = {name: change[name] for name in (*given, *queue_fields)}
    positions, reader = container.positions(), container.broker.reader
    if "offset" in change:
        queue, queue_offset = _queue_of(container, change), change["offset"]
        if type(queue_offset) is not int or not 0 <= queue_offset <= _MAX_LONG:
            raise InvalidChangeError(f"offset must be a whole number of at least 0, got {_shown(queue_offset)}")
        wanted = {queue: queue_offset}
    else:
        # The retry topic is left as it is: its messages are retried when they are due.
        queues = [queue for queue in positions if not queue.topic.startswith(RETRY_TOPIC_PREFIX)]
        offset_of = _position_of(container, change)
        wanted = {queue: offset_of(queue) for queue in sorted(queues)}
    changes = []
    for queue, queue_offset in wanted.items():
        low, high = reader.min_offset(queue), reader.max_offset(queue)
        changes.append(OffsetChange(queue, positions[queue], min(max(queue_offset, low), high), low))
    return _seek_to(container, changes, target)


def _position_of(container: ListenerContainer, change: Mapping[str, Any]) -> Callable[[MessageQueue], int]:
    """Return the function that finds the new offset of a queue."""
    reader = container.broker.reader
    if change.get("to") == "first":
        return reader.min_offset
    if change.get("to") == "latest":
        return reader.max_offset
    try:
        if "back" in change:
            time_ms = container.broker.clock.now_ms() - option_ms("span", str(change["back"]), ValueError)
        else:
            time_ms = epoch_ms(_time(change["to"]))
    except (ValueError, OverflowError) as exc:
        raise InvalidChangeError(str(exc)) from exc
    return lambda queue: reader.search_offset(queue, max(0, time_ms))


def _concurrency_of(container: ListenerContainer, number: object) -> Callable[[], None]:
    if type(number) is not int or abs(number) > _MAX_LONG:
        raise InvalidChangeError(f"concurrency needs number, a whole number of handlers, got {_shown(number)}")
    wanted = number

    def apply() -> None:
        try:
            container.set_concurrency(wanted)
        except ListenerError as exc:
            raise InvalidChangeError(str(exc)) from exc

    return apply


def _time(text: object) -> datetime | int:
    if type(text) is int and 0 <= text <= _MAX_LONG:
        return text
    try:
        number = parse_number(text)
        return datetime.fromisoformat(str(text)) if number is None or number < 0 else number
    except ValueError:
        raise InvalidChangeError(
            "to must be first, latest, epoch milliseconds, or an ISO time such as 2026-07-01T12:00:00+02:00, "
            f"got {_shown(text)}"
        ) from None


def _shown(value: object) -> str:
    # A number of thousands of digits has no text in Python.
    return f"{repr(value)[:60]}" if not isinstance(value, int) or abs(value) <= _MAX_LONG else "a larger number"


def _queue_of(container: ListenerContainer, change: Mapping[str, Any]) -> MessageQueue:
    wanted = (change.get("topic"), change.get("queue"))
    found = [
        queue
        for queue in container.positions()
        if (queue.topic, queue.queue_id) == wanted and change.get("broker") in (None, queue.broker_name)
    ]
    if len(found) == 1:
        return found[0]
    own = ", ".join(f"{queue.topic}/{queue.broker_name}/{queue.queue_id}" for queue in sorted(container.positions()))
    problem = "is not assigned to this listener here" if not found else "is on several brokers; add broker"
    raise InvalidChangeError(f"queue {wanted[1]!r} of topic {wanted[0]!r} {problem}; it has: {own or 'none'}")
