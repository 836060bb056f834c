"""The effects of the tasks."""

from __future__ import annotations

from django.db import models


class Effect(models.Model):
    """One effect."""

    name = models.TextField()

    class Meta:
        app_label = "jobs"

    def __str__(self) -> str:
        return self.name
