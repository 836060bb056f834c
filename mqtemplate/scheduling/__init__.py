"""Schedules: functions that run at times, as delayed messages in the broker. Names are imported when they are used."""

from typing import TYPE_CHECKING

from mqtemplate.exports import late_import

if TYPE_CHECKING:
    from mqtemplate.scheduling.decorator import SCHEDULED_ATTRIBUTE, RunAttributes, schedule_specs, scheduled
    from mqtemplate.scheduling.discovery import is_scheduled, make_schedules
    from mqtemplate.scheduling.listeners import listener_of, register_schedules, start_schedules
    from mqtemplate.scheduling.run import ScheduledRun
    from mqtemplate.scheduling.runner import ScheduleRunner
    from mqtemplate.scheduling.schedule import CatchUp, Schedule
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

__getattr__ = late_import(
    __name__,
    {
        "CatchUp": "mqtemplate.scheduling.schedule",
        "RunAttributes": "mqtemplate.scheduling.decorator",
        "SCHEDULED_ATTRIBUTE": "mqtemplate.scheduling.decorator",
        "Schedule": "mqtemplate.scheduling.schedule",
        "ScheduleRunner": "mqtemplate.scheduling.runner",
        "ScheduleState": "mqtemplate.scheduling.schedules",
        "ScheduleTopic": "mqtemplate.scheduling.topic",
        "ScheduledRun": "mqtemplate.scheduling.run",
        "Schedules": "mqtemplate.scheduling.schedules",
        "Trigger": "mqtemplate.scheduling.trigger",
        "is_scheduled": "mqtemplate.scheduling.discovery",
        "listener_of": "mqtemplate.scheduling.listeners",
        "make_schedules": "mqtemplate.scheduling.discovery",
        "register_schedules": "mqtemplate.scheduling.listeners",
        "schedule_specs": "mqtemplate.scheduling.decorator",
        "scheduled": "mqtemplate.scheduling.decorator",
        "start_schedules": "mqtemplate.scheduling.listeners",
    },
)
