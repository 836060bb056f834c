"""Starter of Celery: tasks with ``eta`` or ``countdown`` wait in mqtemplate, not in the memory of a worker."""

from mqtemplate_starter_celery.messages import CeleryMQTemplate as MQTemplate
from mqtemplate_starter_celery.sending import DEFAULT_TOPIC, delay_tasks, task_forwarder

__all__ = ["DEFAULT_TOPIC", "MQTemplate", "delay_tasks", "task_forwarder"]
