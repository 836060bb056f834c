"""Options of the backend, as ``TASKS`` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from django.core.exceptions import ImproperlyConfigured

from mqtemplate.durations import duration_ms
from mqtemplate.errors import DestinationError
from mqtemplate.topics import check_topic
from mqtemplate.user_code import did_you_mean

_NAMES = ("THREADS", "EFFECT_ONCE", "MAX_ATTEMPTS", "KEEP", "TOPIC")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """``OPTIONS`` of one backend.

    Attributes:
        threads: Number of tasks that run at once in one process.
        effect_once: True: a task and its result are one transaction, and a repeat has no effect.
        max_attempts: Number of workers that may start a task before it fails; more than one if workers die.
        keep_ms: Time for which a result is kept.
        topic: Start of the names of the topics.
    """

    threads: int
    effect_once: bool
    max_attempts: int
    keep_ms: int
    topic: str

    @classmethod
    def read(cls, alias: str, given: Mapping[str, object]) -> TaskOptions:
        """Return the options of the backend *alias*.

        Raises:
            ImproperlyConfigured: An option is unknown, or has a value that is not allowed.
        """
        where = f"TASKS[{alias!r}]['OPTIONS']"
        for name in given:
            if name not in _NAMES:
                hint = did_you_mean(name, _NAMES, f"allowed are {', '.join(_NAMES)}")
                raise ImproperlyConfigured(f"{where} has no option {name!r}; {hint}")
        effect_once = given.get("EFFECT_ONCE", False)
        if not isinstance(effect_once, bool):
            raise ImproperlyConfigured(f"{where}['EFFECT_ONCE'] must be True or False, got {effect_once!r}")
        topic = given.get("TOPIC", f"django-tasks-{alias}")
        return cls(
            threads=_count(where, "THREADS", given.get("THREADS", 4)),
            effect_once=effect_once,
            max_attempts=_count(where, "MAX_ATTEMPTS", given.get("MAX_ATTEMPTS", 10)),
            keep_ms=_duration(where, "KEEP", given.get("KEEP", "30d")),
            topic=checked_topic(f"{where}['TOPIC']", topic),
        )


def checked_topic(where: str, topic: object) -> str:
    """Return a name that a topic can have.

    Raises:
        ImproperlyConfigured: It is not a legal name.
    """
    try:
        if not isinstance(topic, str):
            raise DestinationError(f"a topic must be text, got {topic!r}")
        check_topic(topic)
    except DestinationError as error:
        raise ImproperlyConfigured(f"{where}: {error}") from error
    return topic


def _count(where: str, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1_000:
        raise ImproperlyConfigured(f"{where}[{name!r}] must be a whole number from 1 to 1000, got {value!r}")
    return value


def _duration(where: str, name: str, value: object) -> int:
    try:
        return duration_ms(value)
    except (TypeError, ValueError):
        raise ImproperlyConfigured(
            f"{where}[{name!r}] must be a duration such as '30d' or a timedelta, got {value!r}"
        ) from None
