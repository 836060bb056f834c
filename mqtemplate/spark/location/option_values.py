"""Values of the options: numbers, durations, times and tables, each with an error that says what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

from mqtemplate.durations import duration_ms
from mqtemplate.errors import ConfigurationError, DestinationError
from mqtemplate.topics import TIMER_TOPIC, check_topic
from mqtemplate.user_code import did_you_mean


def is_pending_view(options: Mapping[str, str]) -> bool:
    """Return True for ``view=pending``.

    Raises:
        ConfigurationError: The view is another one.
    """
    view = {name.lower(): value for name, value in options.items()}.get("view", "messages").strip().lower()
    if view not in ("messages", "pending"):
        raise ConfigurationError(f"option view={view!r}: allowed are 'messages', which is the default, and 'pending'")
    return view == "pending"


def known_options(
    options: Mapping[str, str],
    names: Sequence[str],
    *,
    aliases: Mapping[str, str] = MappingProxyType({}),
    ignored: Collection[str] = (),
    hints: Mapping[str, str] = MappingProxyType({}),
    where: str = "",
) -> dict[str, str]:
    """Return options under their exact names.

    Args:
        options: The options as Spark passes them: case does not matter.
        names: Exact names.
        aliases: Other name in lower case -> exact name.
        ignored: Names in lower case that Spark adds.
        hints: Name in lower case of an option that does not exist -> what to do instead.
        where: What has the options, for errors, such as `` for a write``.

    Raises:
        ConfigurationError: One is unknown, and the text names the nearest; or one is given twice.
    """
    spellings = {name.lower(): name for name in names} | dict(aliases)
    given: dict[str, str] = {}
    for written, value in options.items():
        name = written.lower().removeprefix("option.")  # Spark's prefix for a table of the catalog
        if name in ignored:
            continue
        if name not in spellings:
            known = f"known are {', '.join(names)}"
            hint = hints.get(name) or did_you_mean(name, spellings, known, written=spellings)
            raise ConfigurationError(f"option {name!r} is unknown{where}; {hint}")
        if given.setdefault(spellings[name], value) != value:
            raise ConfigurationError(
                f"option {spellings[name]!r} is given twice, with different values, also as {name!r}"
            )
    return given


def whole_number(given: Mapping[str, str], option: str, low: int = 1, high: int = 2**63 - 1) -> int | None:
    """Return a number from *low* to *high*; None if the option is not given.

    Raises:
        ConfigurationError: It is not such a number.
    """
    if option not in given:
        return None
    text = given[option].strip()
    if not re.fullmatch("[0-9]{1,19}", text) or not low <= int(text) <= high:
        raise ConfigurationError(f"option {option}={given[option]!r} must be a whole number from {low} to {high}")
    return int(text)


def flag(given: Mapping[str, str], option: str) -> bool | None:
    """Return a flag; None if the option is not given.

    Raises:
        ConfigurationError: It is neither ``true`` nor ``false``.
    """
    if option not in given:
        return None
    word = given[option].strip().lower()
    if word not in ("true", "false"):
        raise ConfigurationError(f"option {option}={given[option]!r} must be true or false")
    return word == "true"


def refuse_contradictions(given: Mapping[str, str], *exclusive: Sequence[str]) -> None:
    """Refuse several options of a group of which one may be given.

    Raises:
        ConfigurationError: There are several.
    """
    for names in exclusive:
        found = [repr(name) for name in names if name in given]
        if len(found) > 1:
            raise ConfigurationError(f"options {' and '.join(found)} contradict each other; give one of them")


def duration(given: Mapping[str, str], option: str, default: str) -> int:
    """Return milliseconds.

    Raises:
        ConfigurationError: It is not a duration.
    """
    text = given.get(option, default).strip()
    try:
        return int(duration_ms(text, 1))
    except (ValueError, TypeError) as exc:
        raise ConfigurationError(f"option {option}={text!r} is not a duration; write 30s, 15m or 1h 30m") from exc


def milliseconds(given: Mapping[str, str], option: str) -> int | None:
    """Return a time in epoch milliseconds; None if the option is not given.

    Raises:
        ConfigurationError: It is neither epoch milliseconds nor ISO 8601 with a time zone.
    """
    if option not in given:
        return None
    text = given[option]
    if text.strip().isdecimal():
        return int(text)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as exc:
        raise ConfigurationError(
            f"option {option}={text!r}: give epoch milliseconds, or ISO 8601 such as 2026-01-31T12:00:00+00:00"
        ) from exc
    if moment.tzinfo is None:
        raise ConfigurationError(f"option {option}={text!r} has no time zone; add one, such as +00:00")
    return int(moment.timestamp() * 1_000)


def topic_names(option: str, names: list[str]) -> tuple[str, ...]:
    """Return the names, sorted.

    Raises:
        ConfigurationError: One is not legal, is named twice, or is a topic that cannot be read as a table.
    """
    for name in names:
        try:
            check_topic(name)
        except DestinationError as exc:
            raise ConfigurationError(f"option {option}: {exc}") from exc
        if name == TIMER_TOPIC:
            raise ConfigurationError(
                f"option {option}: {name!r} is the log of the timers, with the messages that were cancelled or "
                "delivered; read the pending messages instead: option view=pending"
            )
    if len(set(names)) < len(names):
        raise ConfigurationError(f"option {option} names one topic twice; name each once")
    return tuple(sorted(names))


def assigned_queues(text: str) -> frozenset[tuple[str, str | None, int]]:
    """Parse ``{"orders": [0, 2]}`` or, with the names of brokers, ``{"orders": {"broker-a": [0, 2]}}``.

    Raises:
        ConfigurationError: The text has another form.
    """
    try:
        found: set[tuple[str, str | None, int]] = set()
        for topic, inner in json.loads(text).items():
            for broker, queue_ids in inner.items() if isinstance(inner, dict) else [(None, inner)]:
                found |= {(topic, broker, _queue_id(queue_id)) for queue_id in queue_ids}
        if not found:
            raise ValueError("it names no queue")
        return frozenset(found)
    except (ValueError, AttributeError, TypeError) as exc:
        raise ConfigurationError(
            f'option assign={text!r} is not queues ({exc}); write JSON such as {{"orders": [0, 2]}}'
        ) from exc


def _queue_id(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a queue id")
    return value
