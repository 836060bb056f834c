"""Tables."""

from __future__ import annotations

from django.db import models


class Order(models.Model):  # type: ignore[misc]  # Django has no types
    """An order of a customer."""

    customer = models.TextField()
    is_reminded = models.BooleanField(default=False)

    class Meta:
        app_label = "orders"

    def __str__(self) -> str:
        return f"order {self.pk} of {self.customer}"
