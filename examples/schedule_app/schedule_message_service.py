"""The service that sends delayed messages."""

from __future__ import annotations

import logging
from datetime import datetime

from mqtemplate import RocketMQTemplate, SendResult, SendStatus, service

DESTINATION = "schedule-message-topic:sync-tags"

log = logging.getLogger(__name__)


@service
class ScheduleMessageService:
    """Sender of delayed messages. The application injects the template by the type of the parameter."""

    def __init__(self, template: RocketMQTemplate) -> None:
        self._template = template

    def send_sync_schedule_message(self, id: str, message: str, timeout: int, delay_level: int) -> SendResult:
        """Send *message* and wait until the broker has stored it.

        Args:
            id: The business key, by which the message can be found.
            timeout: Milliseconds for the call.
            delay_level: Position in the broker's level table: 1 is 1s, 2 is 5s, 3 is 10s …
        """
        result = self._template.sync_send(DESTINATION, message, timeout, delay_level, headers={"KEYS": id})
        local_time = datetime.now().astimezone().isoformat(timespec="milliseconds")
        if result.send_status is SendStatus.SEND_OK:
            log.info("schedule.sent id=%s local_time=%s msg_id=%s", id, local_time, result.msg_id)
        else:
            log.warning("schedule.not_safe id=%s local_time=%s status=%s", id, local_time, result.send_status.name)
        return result
