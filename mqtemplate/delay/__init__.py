"""Delayed messages: delay levels and timers over the store, and the release of messages that are due.

Names are imported when they are used: a client needs the rules for delays only.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_MODULES = {
    "DEAD_LETTER_TOPIC": "mqtemplate.delay.release",
    "DEFAULT_DELAY_LEVELS": "mqtemplate.delay.levels.table",
    "DelayController": "mqtemplate.delay.control",
    "DelayLevels": "mqtemplate.delay.levels.table",
    "DelayStore": "mqtemplate.delay.delay_store",
    "PendingView": "mqtemplate.delay.pending",
    "ScheduleMessageService": "mqtemplate.delay.levels.schedule_message_service",
    "TimerLimits": "mqtemplate.delay.divert",
    "TimerMessageStore": "mqtemplate.delay.timers.timer_message_store",
    "TimerSettings": "mqtemplate.delay.timers.settings",
    "divert": "mqtemplate.delay.divert",
    "handle_of": "mqtemplate.delay.recall_handle",
    "strip_broker_properties": "mqtemplate.delay.divert",
    "tags_code_of": "mqtemplate.delay.levels.table",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
