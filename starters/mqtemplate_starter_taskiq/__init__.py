"""Starter of taskiq: a broker whose delayed tasks wait on disk, and a source of schedules that needs no scheduler."""

from mqtemplate_starter_taskiq.broker import DEFAULT_TOPIC, MQTemplateBroker
from mqtemplate_starter_taskiq.schedules import MQTemplateScheduleSource

__all__ = ["DEFAULT_TOPIC", "MQTemplateBroker", "MQTemplateScheduleSource"]
