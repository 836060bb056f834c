"""A source of schedules whose tasks wait in the broker, so that no scheduler has to run for them."""

from __future__ import annotations

import math
from datetime import UTC
from typing import Any

from taskiq import ScheduledTask, ScheduleSource
from taskiq.kicker import AsyncKicker

from mqtemplate.errors import MessageError
from mqtemplate.event_log import get_logger
from mqtemplate_starter_taskiq.broker import DELIVER_AT_LABEL, SCHEDULE_LABEL, MQTemplateBroker

_log = get_logger("mqtemplate.taskiq")


class MQTemplateScheduleSource(ScheduleSource):  # type: ignore[misc]  # mypy does not follow the imports of taskiq
    """Source of schedules for one time: each one is a delayed message, on disk until its millisecond.

    ::

        source = MQTemplateScheduleSource(broker)
        schedule = await remind.schedule_by_time(source, tomorrow, "4466")
        await schedule.unschedule()

    The broker delivers the tasks by itself, also without ``taskiq scheduler``.

    Args:
        broker: Broker of the tasks.
    """

    def __init__(self, broker: MQTemplateBroker) -> None:
        self._broker = broker

    async def get_schedules(self) -> list[Any]:
        """Return no schedules: none is left for the scheduler of taskiq."""
        return []

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        """Store a schedule. A time without a zone is UTC, as everywhere in taskiq.

        Raises:
            MessageError: It is not for one time.
            SendError: The broker did not store it.
        """
        at = schedule.time
        if at is None:
            kind = "cron" if schedule.cron is not None else "interval"
            raise MessageError(
                f"MQTemplateScheduleSource takes schedules for one time, and {schedule.task_name!r} has a {kind}; "
                "give it to taskiq's LabelScheduleSource, or use @scheduled of mqtemplate"
            )
        aware = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
        labels = {SCHEDULE_LABEL: schedule.schedule_id, DELIVER_AT_LABEL: math.ceil(aware.timestamp() * 1_000)}
        kicker = AsyncKicker(schedule.task_name, self._broker, schedule.labels).with_labels(**labels)
        await kicker.with_task_id(schedule.task_id or schedule.schedule_id).kiq(*schedule.args, **schedule.kwargs)

    async def delete_schedule(self, schedule_id: str) -> None:
        """Cancel a schedule. One that has run, or is unknown, changes nothing."""
        change = await self._broker.cancel(schedule_id)
        _log.debug("taskiq.schedule_deleted", schedule_id=schedule_id, status=change.status.value)
