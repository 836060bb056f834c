"""Changes that the actuator takes.

Listeners: pause, resume, seek, concurrency. Schedules: pause, resume, trigger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from mqtemplate.errors import ListenerError, MQTemplateError
from mqtemplate.event_log import get_logger
from mqtemplate.listener.consuming.container import ListenerContainer
from mqtemplate.message import MessageQueue
from mqtemplate.numbers import parse_number
from mqtemplate.scheduling.schedules import Schedules

_log = get_logger("mqtemplate.actuator")

ACTIONS = ("pause", "resume", "seek", "concurrency")
SCHEDULE_ACTIONS = ("pause", "resume", "trigger")


class InvalidChangeError(MQTemplateError):
    """A change that was requested is not allowed. The text says what is."""


def change_listener(container: ListenerContainer, change: Mapping[str, Any], remote: str) -> None:
    """Pause, resume or reposition a listener, or change its concurrency, and log who did it.

    ``{"action": "pause"}``, ``{"action": "resume"}``, ``{"action": "concurrency", "number": 8}``, and for
    ``{"action": "seek"}`` one of

    - ``"to": "first"``, ``"latest"``, an ISO time with a time zone, or epoch milliseconds;
    - ``"back": "1h"``: the messages of the last hour again;
    - ``"topic"``, ``"queue"``, ``"offset"`` and, with several brokers, ``"broker"``: one queue.

    Args:
        remote: Address of the client, for the log.

    Raises:
        InvalidChangeError: The change is not one of these.
        ListenerError: The listener is not running, or does not have the queue.
    """
    action = change.get("action")
    if action not in ACTIONS:
        raise InvalidChangeError(f"action must be one of {', '.join(ACTIONS)}, got {action!r}")
    if not container.is_running:
        raise ListenerError(f"{container.name} is {container.state.value}; only a running listener can be changed")
    if action == "seek":
        _seek_of(container, change)()
    elif action == "pause":
        container.pause()
    elif action == "concurrency":
        _set_concurrency(container, change.get("number"))
    else:
        container.resume()
    fields = {key: value for key, value in change.items() if key != "action" and isinstance(value, str | int)}
    _log.warning("listener.changed", listener=container.endpoint.id, action=action, remote=remote, **fields)


def change_schedule(schedules: Schedules, name: str, change: Mapping[str, Any], remote: str) -> None:
    """Pause or resume a schedule in all processes, or run it now, and log who did it.

    ``{"action": "pause"}`` with ``"until"``, an ISO time with a time zone, or without an end; ``{"action": "resume"}``;
    ``{"action": "trigger"}``.

    Raises:
        InvalidChangeError: The change is not one of these.
        ScheduleError: There is no such schedule.
    """
    action, until = change.get("action"), change.get("until")
    if action not in SCHEDULE_ACTIONS:
        raise InvalidChangeError(f"action must be one of {', '.join(SCHEDULE_ACTIONS)}, got {action!r}")
    if action == "trigger":
        schedules.trigger(name)
    elif action == "resume":
        schedules.resume(name)
    else:
        schedules.pause(name, None if until is None else _aware_time(until))
    _log.warning("schedule.changed", schedule=name, action=action, remote=remote, until=until)


def _aware_time(text: object) -> datetime:
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidChangeError(
            f"until must be an ISO time with a time zone, such as 2026-07-01T12:00:00+02:00, got {text!r}"
        )
    return time


def _seek_of(container: ListenerContainer, change: Mapping[str, Any]) -> Callable[[], None]:
    given = [key for key in ("to", "back", "offset") if key in change]
    if len(given) != 1:
        raise InvalidChangeError(
            "seek needs one of: to (first, latest, a time), back (a duration), offset (with topic and queue); "
            f"got {', '.join(given) or 'none'}"
        )
    if "offset" in change:
        queue, queue_offset = _queue_of(container, change), change["offset"]
        if not isinstance(queue_offset, int) or isinstance(queue_offset, bool) or queue_offset < 0:
            raise InvalidChangeError(f"offset must be a whole number of at least 0, got {queue_offset!r}")
        return lambda: container.seek(queue, queue_offset)
    if "back" in change:
        return lambda: _checked(lambda: container.rewind(str(change["back"])))
    to = change["to"]
    if to == "first":
        return container.rewind
    if to == "latest":
        return container.skip_to_latest
    time = _time(to)
    return lambda: _checked(lambda: container.reset_to_time(time))


def _set_concurrency(container: ListenerContainer, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise InvalidChangeError(f"concurrency needs number, a whole number of handlers, got {number!r}")
    try:
        container.set_concurrency(number)
    except ListenerError as exc:
        raise InvalidChangeError(str(exc)) from exc


def _checked(seek: Callable[[], None]) -> None:
    try:
        seek()
    except ValueError as exc:
        raise InvalidChangeError(str(exc)) from exc


def _time(text: object) -> datetime | int:
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    try:
        number = parse_number(text)
        return number if number is not None and number >= 0 else datetime.fromisoformat(str(text))
    except ValueError:
        raise InvalidChangeError(
            "to must be first, latest, epoch milliseconds, or an ISO time such as 2026-07-01T12:00:00+02:00, "
            f"got {text!r}"
        ) from None


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
