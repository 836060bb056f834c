"""Delayed messages: delay levels and timers over the store, and the release of messages that are due."""

from mqtemplate.delay.control import DelayController
from mqtemplate.delay.delay_store import DelayStore
from mqtemplate.delay.divert import TimerLimits, divert, strip_broker_properties
from mqtemplate.delay.levels.schedule_message_service import ScheduleMessageService
from mqtemplate.delay.levels.table import DEFAULT_DELAY_LEVELS, DelayLevels, tags_code_of
from mqtemplate.delay.pending import PendingView
from mqtemplate.delay.recall_handle import handle_of
from mqtemplate.delay.release import DEAD_LETTER_TOPIC
from mqtemplate.delay.timers.settings import TimerSettings
from mqtemplate.delay.timers.timer_message_store import TimerMessageStore

__all__ = [
    "DEAD_LETTER_TOPIC",
    "DEFAULT_DELAY_LEVELS",
    "DelayController",
    "DelayLevels",
    "DelayStore",
    "PendingView",
    "ScheduleMessageService",
    "TimerLimits",
    "TimerMessageStore",
    "TimerSettings",
    "divert",
    "handle_of",
    "strip_broker_properties",
    "tags_code_of",
]
