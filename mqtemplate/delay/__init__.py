"""The waiting room: delay levels and timers, and what is due goes back to the log."""

from mqtemplate.delay.divert import Diverted, TimerLimits, divert, slot_of, strip_broker_properties
from mqtemplate.delay.levels import DEFAULT_DELAY_LEVELS, DelayLevels, tags_code_of
from mqtemplate.delay.release import DEAD_LETTER_TOPIC
from mqtemplate.delay.schedule_message_service import ScheduleMessageService
from mqtemplate.delay.timer_files import TimerSettings
from mqtemplate.delay.timer_message_store import TimerMessageStore

__all__ = [
    "DEAD_LETTER_TOPIC",
    "DEFAULT_DELAY_LEVELS",
    "DelayLevels",
    "Diverted",
    "ScheduleMessageService",
    "TimerLimits",
    "TimerMessageStore",
    "TimerSettings",
    "divert",
    "slot_of",
    "strip_broker_properties",
    "tags_code_of",
]
