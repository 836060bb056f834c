"""Run messages: the delayed messages that a schedule consists of, one for each run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from mqtemplate.errors import MessageError, ScheduleError
from mqtemplate.message import Message, MessageExt, Property, create_unique_id, split_keys
from mqtemplate.scheduling.schedule import check_name
from mqtemplate.scheduling.trigger import LAST_MS, Trigger

SHORT_STEP_MS = 2 * 86_400_000
"""Longest delay that every broker takes: RocketMQ's timers take three days."""

LONG_STEP_MS = 30 * 86_400_000
"""Longest delay where the broker takes more: the embedded broker and our server take forty days, by default."""


class RunKey(NamedTuple):
    """Key of a run message: equal messages of several processes have equal keys.

    The fingerprint keeps the messages of a trigger apart from those of the trigger that replaces it.
    """

    schedule: str
    run_ms: int
    deliver_ms: int
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.schedule}@{self.run_ms}@{self.deliver_ms}@{self.fingerprint}"


_RUN_KEY = re.compile(r"([a-zA-Z0-9_-]{1,64})@(\d{1,15})@(\d{1,15})@([0-9a-f]{8})", re.ASCII)


def find_run_key(keys: str | None) -> RunKey | None:
    """Return the key of a run among the keys of a message; None for a message that is no run message.

    Other programs may send to the topic, so nothing is assumed about the keys.
    """
    for key in split_keys(keys):
        if (found := _RUN_KEY.fullmatch(key)) is not None:
            schedule, run_ms, deliver_ms, fingerprint = found.groups()
            if int(run_ms) <= LAST_MS:
                return RunKey(schedule, int(run_ms), int(deliver_ms), fingerprint)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMessage:
    """Request for one run of a schedule, with all that another process needs to continue the schedule.

    Attributes:
        run_ms: Time of the run (epoch ms).
        deliver_ms: Time of the delivery; earlier than *run_ms* if the run is far away.
        trigger: Trigger of the process that started the schedule.
        since_ms: Time at which a process started the schedule with this trigger.
        is_manual: True for a run on request, which is outside of the schedule.
    """

    schedule: str
    run_ms: int
    deliver_ms: int
    trigger: Trigger
    since_ms: int
    is_manual: bool = False

    @classmethod
    def of_run(cls, schedule: str, run_ms: int, trigger: Trigger, since_ms: int) -> RunMessage:
        """Return the message for a run."""
        return cls(schedule=schedule, run_ms=run_ms, deliver_ms=run_ms, trigger=trigger, since_ms=since_ms)

    def in_steps(self, now_ms: int, step_ms: int) -> RunMessage:
        """Return this message; if the run is further away than a step, the one for a delivery on the way to it."""
        if self.run_ms - now_ms <= step_ms:
            return self
        # On a grid, so that all processes send the same.
        return replace(self, deliver_ms=(now_ms // step_ms + 1) * step_ms)

    @property
    def key(self) -> RunKey:
        """Key that all messages for this run and delivery have."""
        return RunKey(self.schedule, self.run_ms, self.deliver_ms, self.trigger.fingerprint)

    def to_message(self, topic: str) -> Message:
        """Return the message to send."""
        key = f"manual-{create_unique_id()}" if self.is_manual else str(self.key)
        properties = {Property.TAGS: self.schedule, Property.KEYS: f"{self.schedule} {key}"}
        if not self.is_manual:
            properties[Property.TIMER_DELIVER_MS] = str(self.deliver_ms)
        return Message(topic, json.dumps(self._fields(), separators=(",", ":")).encode(), properties)

    def _fields(self) -> dict[str, object]:
        # By hand: `asdict` copies each value, and takes longer than the JSON.
        return {
            "schedule": self.schedule,
            "run_ms": self.run_ms,
            "deliver_ms": self.deliver_ms,
            "trigger": self.trigger.fields(),
            "since_ms": self.since_ms,
            "is_manual": self.is_manual,
        }

    @classmethod
    def read(cls, message: MessageExt) -> RunMessage:
        """Return the request in a message.

        Raises:
            MessageError: The body is none.
        """
        try:
            fields = json.loads(message.body)
            request = cls(**fields | {"trigger": Trigger(**fields["trigger"])})
            request._check()
        except (ValueError, TypeError, KeyError, RecursionError, ScheduleError) as error:
            raise MessageError(
                f"message {message.msg_id} of topic {message.topic} is no run of a schedule: {error!r}; the topic of "
                "mqtemplate.schedules.topic is for schedules only"
            ) from error
        return request

    def _check(self) -> None:
        """Check the values of a message: any program that may send to the topic can have sent it.

        Raises:
            ValueError: A value has another type, or is out of its range.
            ScheduleError: The name or the trigger is invalid.
        """
        check_name(self.schedule)
        self.trigger.check()
        for name in ("run_ms", "deliver_ms", "since_ms"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value <= LAST_MS:
                raise ValueError(f"{name} must be milliseconds from 0 to {LAST_MS}, got {value!r:.64}")
        if type(self.is_manual) is not bool:
            raise ValueError(f"is_manual must be true or false, got {self.is_manual!r:.64}")
