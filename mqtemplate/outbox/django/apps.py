"""The Django app: models and migrations of the tables."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """App ``mqtemplate_outbox``."""

    name = "mqtemplate.outbox.django"
    label = "mqtemplate_outbox"
    verbose_name = "mqtemplate outbox"
    default_auto_field = "django.db.models.BigAutoField"
