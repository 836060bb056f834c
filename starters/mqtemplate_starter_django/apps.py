"""The Django app: it checks the setting ``MQTEMPLATE``, and starts nothing."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, register


class MQTemplateConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """App ``mqtemplate_starter_django``."""

    name = "mqtemplate_starter_django"
    label = "mqtemplate"
    verbose_name = "mqtemplate"

    def ready(self) -> None:
        """Add the check of the settings to ``manage.py check``."""
        register(check_settings, "mqtemplate")


def check_settings(**_: Any) -> list[CheckMessage]:
    """Report an invalid setting ``MQTEMPLATE`` as ``mqtemplate.E001``. No broker is opened."""
    from mqtemplate.errors import MQTemplateError
    from mqtemplate_starter_django.project import read_project, settings_of

    try:
        settings_of(read_project())
    except MQTemplateError as exc:
        return [Error(str(exc), hint="docs/configuration.md lists every key", id="mqtemplate.E001")]
    return []
