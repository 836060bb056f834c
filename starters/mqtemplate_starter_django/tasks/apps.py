"""The Django app: model and migration of the results, and the listeners that run the tasks."""

from __future__ import annotations

from collections.abc import Sequence

from django.apps import AppConfig
from django.utils.module_loading import import_string


class TasksConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """App ``mqtemplate_tasks``."""

    name = "mqtemplate_starter_django.tasks"
    label = "mqtemplate_tasks"
    verbose_name = "mqtemplate tasks"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Add the listeners to the messages of the project."""
        from mqtemplate_starter_django.project import provide_components

        provide_components(_listeners)


def _listeners() -> Sequence[object]:
    task_listeners = import_string("mqtemplate_starter_django.tasks.worker.task_listeners")  # it needs the models
    return list(task_listeners())
