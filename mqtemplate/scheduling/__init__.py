"""Schedules: functions that run at times, as delayed messages in the broker."""

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
