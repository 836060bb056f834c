"""Schedules: functions that run at times, as delayed messages in the broker. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.scheduling.decorator import SCHEDULED_ATTRIBUTE, RunAttributes, schedule_specs, scheduled
    from mqtemplate.scheduling.discovery import is_scheduled, make_schedules
    from mqtemplate.scheduling.listeners import ScheduleRunner, listener_of, register_schedules, start_schedules
    from mqtemplate.scheduling.schedule import CatchUp, Schedule, ScheduledRun
    from mqtemplate.scheduling.schedules import Schedules, ScheduleState
    from mqtemplate.scheduling.topic import ScheduleTopic
    from mqtemplate.scheduling.trigger import Trigger

__all__ = [
    "SCHEDULED_ATTRIBUTE",
    "CatchUp",
    "RunAttributes",
    "Schedule",
    "ScheduleRunner",
    "ScheduleState",
    "ScheduleTopic",
    "ScheduledRun",
    "Schedules",
    "Trigger",
    "is_scheduled",
    "listener_of",
    "make_schedules",
    "register_schedules",
    "schedule_specs",
    "scheduled",
    "start_schedules",
]

_NAMES = {
    "decorator": "RunAttributes SCHEDULED_ATTRIBUTE schedule_specs scheduled",
    "discovery": "is_scheduled make_schedules",
    "listeners": "ScheduleRunner listener_of register_schedules start_schedules",
    "schedule": "CatchUp Schedule ScheduledRun",
    "schedules": "ScheduleState Schedules",
    "topic": "ScheduleTopic",
    "trigger": "Trigger",
}
"""Module -> the public names that it defines."""

__getattr__ = late_import(
    __name__, {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
)
